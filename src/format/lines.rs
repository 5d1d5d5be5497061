//! Splitting a stream of bytes into lines, with memory for one line.

use super::ledger::{LEDGER_START, MAX_LEDGER_LINE, begins_like_ledger};

/// One line, without its `\n`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RawLine<'a> {
    /// All of it.
    Whole(&'a [u8]),
    /// It was longer than the limit and has not been kept.
    TooLong {
        /// Its length.
        bytes: u64,
        /// Whether it begins like a ledger.
        is_ledger: bool,
    },
}

impl RawLine<'_> {
    /// How many bytes it has, its `\n` included.
    #[must_use]
    pub fn size(self) -> u64 {
        match self {
            Self::Whole(line) => line.len() as u64 + 1,
            Self::TooLong { bytes, .. } => bytes + 1,
        }
    }
}

/// Cuts chunks of any size into lines.
///
/// A line that lies within one chunk is passed on where it stands; only one that spans chunks is copied.
#[derive(Debug)]
pub struct LineSplitter {
    max_line: usize,
    /// The beginning of the line that the next chunk goes on with, unless it is too long.
    partial: Vec<u8>,
    /// Its length so far.
    partial_bytes: u64,
    /// Whether it is too long already, and if so whether it began like a ledger.
    too_long: Option<bool>,
}

/// Above this, memory that a long line took is given back after it.
const KEPT_CAPACITY: usize = 1024 * 1024;

impl LineSplitter {
    /// A splitter at the start of a line, for lines of at most `max_line` bytes.
    #[must_use]
    pub fn new(max_line: usize) -> Self {
        // Places in a line are held as 32 bits.
        let max_line = max_line.min(u32::MAX as usize);
        Self { max_line, partial: Vec::new(), partial_bytes: 0, too_long: None }
    }

    /// Takes the next bytes of the stream and passes on the lines that they complete.
    pub fn push(&mut self, chunk: &[u8], mut sink: impl FnMut(RawLine<'_>)) {
        let mut start = 0;
        for end in memchr::memchr_iter(b'\n', chunk) {
            let piece = &chunk[start..end];
            start = end + 1;
            if self.partial_bytes == 0 {
                sink(self.judge(piece));
            } else {
                self.extend(piece);
                sink(match self.too_long.take() {
                    Some(is_ledger) => RawLine::TooLong { bytes: self.partial_bytes, is_ledger },
                    None => self.judge(&self.partial),
                });
                self.partial.clear();
                self.partial.shrink_to(KEPT_CAPACITY);
                self.partial_bytes = 0;
            }
        }
        self.extend(&chunk[start..]);
    }

    /// How many bytes came after the last `\n`.
    #[must_use]
    pub fn unterminated_bytes(&self) -> u64 {
        self.partial_bytes
    }

    fn judge<'a>(&self, line: &'a [u8]) -> RawLine<'a> {
        if line.len() <= self.max_line {
            return RawLine::Whole(line);
        }
        // No limit may hide a ledger.
        let is_ledger = begins_like_ledger(line);
        if is_ledger && line.len() <= MAX_LEDGER_LINE {
            return RawLine::Whole(line);
        }
        RawLine::TooLong { bytes: line.len() as u64, is_ledger }
    }

    fn extend(&mut self, piece: &[u8]) {
        self.partial_bytes += piece.len() as u64;
        if self.too_long.is_none() {
            self.partial.extend_from_slice(piece);
            // So few bytes may still become a ledger.
            if self.partial.len() >= LEDGER_START
                && let RawLine::TooLong { is_ledger, .. } = self.judge(&self.partial)
            {
                self.too_long = Some(is_ledger);
                self.partial = Vec::new();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn split(chunks: &[&[u8]], max_line: usize) -> (Vec<Result<Vec<u8>, u64>>, u64) {
        let mut splitter = LineSplitter::new(max_line);
        let mut lines = Vec::new();
        for chunk in chunks {
            splitter.push(chunk, |line| {
                lines.push(match line {
                    RawLine::Whole(line) => Ok(line.to_vec()),
                    RawLine::TooLong { bytes, .. } => Err(bytes),
                });
            });
        }
        (lines, splitter.unterminated_bytes())
    }

    #[test]
    fn only_newlines_end_lines_and_the_tail_is_none() {
        let (lines, tail) = split(&[b"a\r\n\n\xe2\x80\xa8b\x0b\0", b"c\nd"], 100);
        assert_eq!(lines, [Ok(b"a\r".to_vec()), Ok(vec![]), Ok(b"\xe2\x80\xa8b\x0b\0c".to_vec())]);
        assert_eq!(tail, 1);
    }

    #[test]
    fn a_line_of_the_limit_is_whole_and_one_more_byte_is_too_long() {
        for chunks in [&[&b"abcd\nabcde\nx\n"[..]][..], &[b"ab", b"cd\nab", b"cd", b"e", b"\nx\n"]] {
            assert_eq!(split(chunks, 4), (vec![Ok(b"abcd".to_vec()), Err(5), Ok(b"x".to_vec())], 0));
        }
    }

    #[test]
    fn a_ledger_may_be_longer_than_other_lines() {
        const START: &[u8] = b"\xef\xbb\xbf{ \"id\": \"ledger\",";
        let ledger = [START, &[b'x'; 100]].concat();
        let text = [&ledger[..], b"\n{\"id\":\"ledge\n", &[b'y'; 70], b"\n", &ledger, b"\n"].concat();
        for size in 1..=text.len() {
            let chunks: Vec<&[u8]> = text.chunks(size).collect();
            assert_eq!(split(&chunks, 4).0, [Ok(ledger.clone()), Err(12), Err(70), Ok(ledger.clone())], "{size}");
        }
        let longest = [START, &vec![b' '; MAX_LEDGER_LINE - START.len()]].concat();
        let longer = [&longest[..], b" "].concat();
        for (line, expected) in [(&longest, Ok(longest.clone())), (&longer, Err(longer.len() as u64))] {
            for chunks in [&[line, &b"\n"[..]][..], &[&[line, &b"\n"[..]].concat()]] {
                assert_eq!(split(chunks, 4).0, std::slice::from_ref(&expected));
            }
        }
        let mut splitter = LineSplitter::new(4);
        splitter.push(&[&longer[..], b"\n"].concat(), |line| {
            assert!(matches!(line, RawLine::TooLong { is_ledger: true, .. }));
        });
    }

    #[test]
    fn memory_of_a_long_line_is_given_back() {
        let mut splitter = LineSplitter::new(usize::MAX);
        splitter.push(&vec![b'x'; 8 * KEPT_CAPACITY], |_| {});
        splitter.push(b"\n", |_| {});
        assert!(splitter.partial.capacity() <= KEPT_CAPACITY);
    }

    proptest! {
        #[test]
        fn chunking_changes_nothing(text in proptest::collection::vec(prop_oneof![3 => Just(b'\n'), 7 => any::<u8>()], 0..200), size in 1_usize..40, max_line in 0_usize..20) {
            let chunks: Vec<&[u8]> = text.chunks(size).collect();
            let (lines, tail) = split(&chunks, max_line);
            let mut expected: Vec<&[u8]> = text.split(|&b| b == b'\n').collect();
            let expected_tail = expected.pop().map_or(0, |tail| tail.len() as u64);
            let expected: Vec<_> = expected.into_iter().map(|l| if l.len() > max_line { Err(l.len() as u64) } else { Ok(l.to_vec()) }).collect();
            prop_assert_eq!((lines, tail), (expected, expected_tail));
        }
    }
}
