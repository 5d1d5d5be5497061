//! Where strings end, found for a whole text at once.
//!
//! Looking for it byte by byte, or even escape by escape, costs most of the time of reading a queue: each step waits for the one
//! before. Here 64 bytes at a time become bits, and all escapes among them are resolved together.

use wide::u8x16;

/// For each byte of a text whether a string that it lies in stops there: at a quote that isn't escaped, at a control character, or
/// at a byte that must not follow a backslash.
#[derive(Debug)]
pub(super) struct Stops {
    bits: Vec<u64>,
    /// Whether there is any backslash.
    pub(super) has_escapes: bool,
}

const WORD: usize = u64::BITS as usize;

impl Stops {
    pub(super) fn of(text: &[u8]) -> Self {
        let (blocks, rest) = text.as_chunks();
        // The padding is of control characters, so that every search ends.
        let mut last = [0; WORD];
        last[..rest.len()].copy_from_slice(rest);

        let mut stops = Self { bits: Vec::with_capacity(blocks.len() + 1), has_escapes: false };
        let mut after_backslash = false;
        for (index, bytes) in blocks.iter().chain([&last]).enumerate() {
            let block = Block::new(bytes);
            let mut bits = block.bits(|bytes| is_quote(bytes) | is_control(bytes));
            if after_backslash || block.any(is_backslash) {
                stops.has_escapes = true;
                bits =
                    without_escapes(bits, &block, text.get(index * WORD..).unwrap_or_default(), &mut after_backslash);
            }
            stops.bits.push(bits);
        }
        stops
    }

    /// The first stop from `at` on, or a place behind the end of the text.
    pub(super) fn next(&self, at: usize) -> usize {
        let Some((&first, rest)) = self.bits.get(at / WORD..).and_then(<[u64]>::split_first) else { return at };
        let first = first >> (at % WORD);
        if first != 0 {
            return at + first.trailing_zeros() as usize;
        }
        let empty = rest.iter().take_while(|word| **word == 0).count();
        let last = rest.get(empty).map_or(0, |word| word.trailing_zeros() as usize);
        (at / WORD + 1 + empty) * WORD + last
    }
}

/// Resolves the escapes in a block at which `text` begins: escaped quotes are no stops, and what may not be escaped is one.
fn without_escapes(stops: u64, block: &Block, text: &[u8], after_backslash: &mut bool) -> u64 {
    let escaped = escaped(block.bits(is_backslash), after_backslash);
    let common = escaped & block.bits(is_common_escape);
    let mut invalid = escaped & !common;
    let mut candidates = invalid;
    while candidates != 0 {
        let at = candidates.trailing_zeros() as usize;
        if is_escape(text.get(at..).unwrap_or_default()) {
            invalid &= !(1 << at);
        }
        candidates &= candidates - 1;
    }
    // Of the common escapes only the quote is among the stops.
    stops & !common | invalid
}

/// 64 bytes of a text.
struct Block([u8x16; 4]);

impl Block {
    fn new(bytes: &[u8; WORD]) -> Self {
        let (parts, _) = bytes.as_chunks();
        Self([u8x16::new(parts[0]), u8x16::new(parts[1]), u8x16::new(parts[2]), u8x16::new(parts[3])])
    }

    fn any(&self, is: impl Fn(u8x16) -> u8x16) -> bool {
        let [a, b, c, d] = self.0.map(is);
        (a | b | c | d).to_bitmask() != 0
    }

    /// A bit for each byte, the lowest for the first.
    fn bits(&self, is: impl Fn(u8x16) -> u8x16) -> u64 {
        self.0.iter().rev().fold(0, |bits, &part| bits << 16 | u64::from(is(part).to_bitmask()))
    }
}

fn is_backslash(bytes: u8x16) -> u8x16 {
    bytes.simd_eq(u8x16::splat(b'\\'))
}

fn is_quote(bytes: u8x16) -> u8x16 {
    bytes.simd_eq(u8x16::splat(b'"'))
}

fn is_control(bytes: u8x16) -> u8x16 {
    bytes.min(u8x16::splat(0x1f)).simd_eq(bytes)
}

/// The bytes that nearly every escape sequence consists of.
fn is_common_escape(bytes: u8x16) -> u8x16 {
    is_quote(bytes) | is_backslash(bytes) | bytes.simd_eq(u8x16::splat(b'n')) | bytes.simd_eq(u8x16::splat(b't'))
}

/// Whether a backslash may stand before `rest`.
fn is_escape(rest: &[u8]) -> bool {
    match rest {
        [b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't', ..] => true,
        [b'u', digits @ ..] => digits.get(..4).is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit)),
        _ => false,
    }
}

/// Which bytes a backslash escapes. `after_backslash` tells whether one does so to the first byte, and then for the next block.
fn escaped(backslashes: u64, after_backslash: &mut bool) -> u64 {
    let mut escaped = u64::from(*after_backslash);
    // A backslash that is escaped itself escapes nothing.
    let mut escaping = backslashes & !escaped;
    if escaping & (escaping << 1) == 0 {
        *after_backslash = escaping >> (WORD - 1) == 1;
        return escaped | escaping << 1;
    }
    *after_backslash = false;
    while escaping != 0 {
        let first = escaping & escaping.wrapping_neg();
        escaped |= first << 1;
        *after_backslash = first >> (WORD - 1) == 1;
        escaping &= !(first | first << 1);
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_in_each_place() {
        for byte in (0..=u8::MAX).filter(|byte| *byte != b'\\') {
            let is_stop = byte < 0x20 || byte == b'"';
            for len in [1, 2, WORD - 1, WORD, WORD + 1, 3 * WORD] {
                for at in 0..len {
                    let mut text = vec![b'!'; len];
                    text[at] = byte;
                    let stops = Stops::of(&text);
                    assert_eq!(stops.next(0), if is_stop { at } else { len }, "{byte} at {at} of {len}");
                    assert_eq!(stops.next(at), if is_stop { at } else { len }, "{byte} at {at} of {len}");
                    assert_eq!(stops.next(at + 1), len, "after {byte} at {at} of {len}");
                    assert!(!stops.has_escapes);
                }
            }
        }
        assert!(Stops::of(b"").next(1_000) >= 1_000);
    }

    #[test]
    fn each_byte_after_a_backslash_in_each_place() {
        for byte in 0..=u8::MAX {
            for at in 0..2 * WORD {
                let mut text = vec![b'!'; 2 * WORD + 2];
                text[at..at + 2].copy_from_slice(&[b'\\', byte]);
                let is_escape = b"\"\\/bfnrt".contains(&byte);
                assert_eq!(Stops::of(&text).next(0), if is_escape { text.len() } else { at + 1 }, "{byte} at {at}");
            }
        }
    }

    #[test]
    fn runs_of_backslashes_across_the_border_of_blocks() {
        for start in 0..WORD {
            for len in 0..WORD {
                // After an even number of backslashes the quote is the end, after an odd one it is escaped.
                let mut text = vec![b'x'; start];
                text.resize(start + len, b'\\');
                text.extend_from_slice(b"\"x");
                let expected = if len % 2 == 0 { start + len } else { text.len() };
                assert_eq!(Stops::of(&text).next(0), expected, "{len} from {start}");
            }
        }
    }
}
