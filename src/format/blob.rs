//! References from lines to blobs.

use memchr::memmem::Finder;

/// The length of a blob's path below the store: two digits, a slash, the hash.
const PATH_LEN: usize = 2 + 1 + 64;
const PREFIX: &[u8] = b"blob/";

/// Finds references to blobs in raw lines.
#[derive(Debug)]
pub struct References(Finder<'static>);

impl Default for References {
    fn default() -> Self {
        Self(Finder::new(PREFIX))
    }
}

impl References {
    /// The distinct blobs that `line` refers to, as paths below the store: `<aa>/<sha256>`.
    #[must_use]
    pub fn find<'a>(&self, line: &'a [u8]) -> Vec<&'a str> {
        let mut paths = Vec::new();
        for at in self.0.find_iter(line) {
            let path = &line[at + PREFIX.len()..];
            let ends = path.get(PATH_LEN).is_none_or(|&next| !is_hex_digit(next));
            if let Some(path) = path.get(..PATH_LEN).and_then(|path| std::str::from_utf8(path).ok())
                && ends
                && is_blob_path(path)
            {
                paths.push(path);
            }
        }
        paths.sort_unstable();
        paths.dedup();
        paths
    }
}

/// Whether `path`, relative to the store, is where a blob lies.
#[must_use]
pub fn is_blob_path(path: &str) -> bool {
    path.split_once('/').is_some_and(|(directory, hash)| {
        directory.len() == 2 && hash.len() == 64 && hash.starts_with(directory) && hash.bytes().all(is_hex_digit)
    })
}

fn is_hex_digit(byte: u8) -> bool {
    matches!(byte, b'0'..=b'9' | b'a'..=b'f')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_and_consistent_paths_are_references() {
        let hash = "ab".repeat(32);
        let found = |text: &str| References::default().find(text.as_bytes()).len();
        assert_eq!(found(&format!("/srv/blob/ab/{hash}\" and blob/ab/{hash}")), 1);
        assert_eq!(found(&format!("blob/ab/{hash}")), 1);
        assert_eq!(found(&format!("blob/ab/{hash}0")), 0);
        assert_eq!(found(&format!("blob/ac/{hash}")), 0);
        assert_eq!(found(&format!("blob/ab/{}", &hash[1..])), 0);
        assert_eq!(found(&format!("blob/AB/{}", hash.to_uppercase())), 0);
        assert_eq!(found("blob/ab/"), 0);
    }
}
