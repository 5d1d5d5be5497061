//! Finding the bytes that matter in a string, many at once and without a branch for each.

use wide::u8x16;

/// How many bytes are looked at together: the bits of a mask, the lowest bit for the first byte.
pub(super) const BLOCK: usize = 32;

/// The first bytes of a text. Behind the end of the text there are only control characters.
pub(super) struct Block([u8x16; 2]);

impl Block {
    /// Looks at the first bytes of `text`.
    pub(super) fn first_of(text: &[u8]) -> Self {
        text.first_chunk().map_or_else(|| Self::padded(text), Self::new)
    }

    fn new(bytes: &[u8; BLOCK]) -> Self {
        let (halves, _) = bytes.as_chunks();
        Self([u8x16::new(halves[0]), u8x16::new(halves[1])])
    }

    #[cold]
    fn padded(text: &[u8]) -> Self {
        let mut bytes = [0; BLOCK];
        bytes[..text.len()].copy_from_slice(text);
        Self::new(&bytes)
    }

    /// Which bytes are quotes, backslashes or control characters.
    pub(super) fn special(&self) -> u32 {
        self.mask(|bytes| {
            let is_control = bytes.min(u8x16::splat(0x1f)).simd_eq(bytes);
            is_control | bytes.simd_eq(u8x16::splat(b'"')) | bytes.simd_eq(u8x16::splat(b'\\'))
        })
    }

    /// Which bytes are quotes.
    pub(super) fn quotes(&self) -> u32 {
        self.mask(|bytes| bytes.simd_eq(u8x16::splat(b'"')))
    }

    /// Which bytes are backslashes.
    pub(super) fn backslashes(&self) -> u32 {
        self.mask(|bytes| bytes.simd_eq(u8x16::splat(b'\\')))
    }

    /// Which bytes are those that most often follow a backslash.
    pub(super) fn common_escapes(&self) -> u32 {
        let any_of = |bytes: u8x16, set: [u8; 4]| {
            set.map(|byte| bytes.simd_eq(u8x16::splat(byte))).into_iter().reduce(|a, b| a | b)
        };
        self.mask(|bytes| any_of(bytes, *b"\"\\nt").unwrap_or_default())
    }

    /// Which bytes a backslash escapes. `after_backslash` tells whether it does so to the first one, and then for the next block.
    pub(super) fn escaped(&self, after_backslash: &mut bool) -> u32 {
        let mut escaped = u32::from(*after_backslash);
        // A backslash that is escaped itself escapes nothing.
        let mut escaping = self.backslashes() & !escaped;
        if escaping & (escaping << 1) == 0 {
            escaped |= escaping << 1;
            *after_backslash = escaping >> (BLOCK - 1) == 1;
            return escaped;
        }
        *after_backslash = false;
        while escaping != 0 {
            let first = escaping & escaping.wrapping_neg();
            escaped |= first << 1;
            *after_backslash = first >> (BLOCK - 1) == 1;
            escaping &= !(first | first << 1);
        }
        escaped
    }

    fn mask(&self, is: impl Fn(u8x16) -> u8x16) -> u32 {
        is(self.0[0]).to_bitmask() | is(self.0[1]).to_bitmask() << 16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same byte for byte.
    fn expected(text: &[u8], is: impl Fn(u8) -> bool) -> u32 {
        (0..BLOCK).filter(|&at| is(text.get(at).copied().unwrap_or(0))).map(|at| 1 << at).sum()
    }

    #[test]
    fn each_byte_in_each_place() {
        for byte in 0..=u8::MAX {
            for at in 0..BLOCK {
                for len in [BLOCK, BLOCK + 1, at + 1] {
                    let mut text = vec![b'!'; len];
                    text[at] = byte;
                    let block = Block::first_of(&text);
                    let special = expected(&text, |byte| byte < 0x20 || byte == b'"' || byte == b'\\');
                    assert_eq!(block.special(), special, "{byte} at {at} of {len}");
                    assert_eq!(block.quotes(), expected(&text, |byte| byte == b'"'), "{byte} at {at} of {len}");
                    assert_eq!(block.backslashes(), expected(&text, |byte| byte == b'\\'), "{byte} at {at} of {len}");
                    let escapes = expected(&text, |byte| b"\"\\nt".contains(&byte));
                    assert_eq!(block.common_escapes(), escapes, "{byte} at {at} of {len}");
                }
            }
        }
    }

    #[test]
    fn every_run_of_backslashes_across_the_border_of_blocks() {
        for start in 0..BLOCK {
            for len in 0..BLOCK {
                let text: Vec<u8> =
                    (0..2 * BLOCK).map(|at| if (start..start + len).contains(&at) { b'\\' } else { b'x' }).collect();
                let mut after_backslash = false;
                let masks = [0, BLOCK].map(|at| Block::first_of(&text[at..]).escaped(&mut after_backslash));
                for at in 0..2 * BLOCK {
                    // In a run every second byte is escaped, and the byte after a run of odd length.
                    let is_escaped = at > start && at <= start + len && (at - start) % 2 == 1;
                    assert_eq!(
                        masks[at / BLOCK] >> (at % BLOCK) & 1 == 1,
                        is_escaped,
                        "{at} in a run of {len} from {start}"
                    );
                }
            }
        }
    }
}
