//! References from lines to blobs.

use memchr::memmem::Finder;

const PREFIX: &[u8] = b"blob/";
/// The length of a blob's path below the store: two digits, a slash, the hash.
const PATH_LEN: usize = 2 + 1 + 64;
/// How many bytes after its first one decide whether there is a reference: the rest of it, and the byte after it.
const LOOK_AHEAD: usize = PREFIX.len() + PATH_LEN;

/// Finds references to blobs in a stream of raw bytes, cut into chunks of any size.
#[derive(Debug)]
pub struct References {
    finder: Finder<'static>,
    /// The last bytes of the stream, in which a reference may begin that ends in the next chunk.
    carry: Vec<u8>,
}

impl Default for References {
    fn default() -> Self {
        Self { finder: Finder::new(PREFIX), carry: Vec::new() }
    }
}

impl References {
    /// Passes on the blobs that are referred to, as paths below the store: `<aa>/<sha256>`.
    pub fn push(&mut self, chunk: &[u8], mut sink: impl FnMut(&str)) {
        let carried = self.carry.len();
        self.carry.extend_from_slice(&chunk[..chunk.len().min(LOOK_AHEAD)]);
        let decided = carried.min(self.carry.len().saturating_sub(LOOK_AHEAD));
        self.find(&self.carry, decided, &mut sink);
        if chunk.len() > LOOK_AHEAD {
            let decided = chunk.len() - LOOK_AHEAD;
            self.find(chunk, decided, &mut sink);
            self.carry.clear();
            self.carry.extend_from_slice(&chunk[decided..]);
        } else {
            self.carry.drain(..decided);
        }
    }

    /// The same for the end of the stream.
    pub fn finish(self, mut sink: impl FnMut(&str)) {
        self.find(&self.carry, self.carry.len(), &mut sink);
    }

    /// Passes on the references in `bytes` that begin before `end`.
    fn find(&self, bytes: &[u8], end: usize, sink: &mut impl FnMut(&str)) {
        for at in self.finder.find_iter(bytes).take_while(|at| *at < end) {
            let path = &bytes[at + PREFIX.len()..];
            let is_longer = path.get(PATH_LEN).copied().is_some_and(is_hex_digit);
            if let Some(path) = path.get(..PATH_LEN).and_then(|path| std::str::from_utf8(path).ok())
                && !is_longer
                && is_blob_path(path)
            {
                sink(path);
            }
        }
    }
}

/// Whether `path`, relative to the store, is where a blob lies.
#[must_use]
pub fn is_blob_path(path: &str) -> bool {
    path.split_once('/').is_some_and(|(directory, hash)| {
        is_blob_directory(directory)
            && hash.len() == 64
            && hash.starts_with(directory)
            && hash.bytes().all(is_hex_digit)
    })
}

/// Whether `name` is that of a directory in the store.
#[must_use]
pub fn is_blob_directory(name: &str) -> bool {
    name.len() == 2 && name.bytes().all(is_hex_digit)
}

fn is_hex_digit(byte: u8) -> bool {
    matches!(byte, b'0'..=b'9' | b'a'..=b'f')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str, chunk: usize) -> usize {
        let mut references = References::default();
        let mut count = 0;
        for chunk in text.as_bytes().chunks(chunk) {
            references.push(chunk, |_| count += 1);
        }
        references.finish(|_| count += 1);
        count
    }

    #[test]
    fn only_whole_and_consistent_paths_are_references_in_any_chunks() {
        let hash = "ab".repeat(32);
        let padding = "x".repeat(100);
        for (text, expected) in [
            (format!("/srv/blob/ab/{hash}\" and blob/ab/{hash}"), 2),
            (format!("blob/ab/{hash}"), 1),
            (format!("{padding}blob/ab/{hash}{padding}blob/ab/{hash}\n{padding}"), 2),
            (format!("blob/blob/ab/{hash}"), 1),
            (format!("blob/ab/{hash}0"), 0),
            (format!("blob/ac/{hash}"), 0),
            (format!("blob/ab/{}", &hash[1..]), 0),
            (format!("blob/AB/{}", hash.to_uppercase()), 0),
            ("blob/ab/".to_owned(), 0),
        ] {
            for chunk in 1..=text.len() {
                assert_eq!(found(&text, chunk), expected, "{text} in chunks of {chunk}");
            }
        }
    }
}
