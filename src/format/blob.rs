//! Blobs: their names, the handles that stand for them in lines, and references to them in raw bytes.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use memchr::memmem::Finder;
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::json::{self, Cursor, Document, Stop, Visit};

/// The SHA-256 of a blob's bytes, by which it is known.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Digest([u8; 32]);

impl Digest {
    /// That of these bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// Reads 64 lower-case hex digits.
    #[must_use]
    pub fn parse(hex: &str) -> Option<Self> {
        let mut bytes = [0; 32];
        let (pairs, []) = hex.as_bytes().as_chunks::<2>() else { return None };
        if pairs.len() != bytes.len() {
            return None;
        }
        for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
            *byte = hex_digit(*high)? << 4 | hex_digit(*low)?;
        }
        Some(Self(bytes))
    }

    /// Reads a blob's path below the store, `<aa>/<sha256>`.
    #[must_use]
    pub fn parse_path(path: &str) -> Option<Self> {
        let (directory, hex) = path.split_once('/')?;
        Self::parse(hex).filter(|_| directory.len() == 2 && hex.starts_with(directory))
    }

    /// Reads what a handle refers to its blob by, `blob/<aa>/<sha256>`.
    #[must_use]
    pub fn parse_reference(reference: &str) -> Option<Self> {
        Self::parse_path(reference.strip_prefix(PREFIX)?)
    }

    /// The path of the blob below the store.
    #[must_use]
    pub fn path(&self) -> String {
        format!("{}/{self}", self.directory())
    }

    /// What a handle refers to the blob by.
    #[must_use]
    pub fn reference(&self) -> String {
        format!("{PREFIX}{}", self.path())
    }

    /// The name of the directory that the blob lies in.
    #[must_use]
    pub(crate) fn directory(&self) -> String {
        format!("{:02x}", self.first())
    }

    /// The digest's first byte, after which the directory is named.
    pub(crate) fn first(&self) -> u8 {
        self.0[0]
    }

    /// The digest's first bytes, which tell blobs apart nearly always.
    #[must_use]
    pub(crate) fn prefix(&self) -> u64 {
        self.0[..8].iter().fold(0, |prefix, byte| prefix << 8 | u64::from(*byte))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The digest of bytes that come one piece after the other.
#[derive(Clone, Debug, Default)]
pub(crate) struct Hasher(Sha256);

impl Hasher {
    /// Takes the next bytes.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of all of them.
    #[must_use]
    pub(crate) fn finish(self) -> Digest {
        Digest(self.0.finalize().into())
    }
}

/// What a blob holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediaType {
    /// The text of a string.
    Text,
    /// JSON text.
    Json,
}

impl MediaType {
    /// Its name, as in handles.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Text => "text/plain",
            Self::Json => "application/json",
        }
    }
}

/// What stands in a line for a blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handle<'a> {
    /// The blob's name.
    pub digest: Digest,
    /// How many bytes the blob has.
    pub bytes: u64,
    /// What it holds: a [`MediaType`]'s name, if it is one of ours.
    pub media_type: Cow<'a, str>,
    /// How it begins.
    pub summary: Cow<'a, str>,
}

impl<'a> Handle<'a> {
    /// Reads the value at a cursor, if it is a handle, in time that depends on nothing that lies deeper.
    pub(super) fn read(mut cursor: Cursor<'_, 'a>) -> Option<Self> {
        const MEMBERS: [&str; 5] = [ARTIFACT_REF, "bytes", "sha256", "media_type", "summary"];
        let mut texts = [None; MEMBERS.len()];
        let mut member = |cursor: &mut Cursor<'_, 'a>, key: &'a str| {
            let key = json::string(key).ok_or(Stop)?.text;
            let index = MEMBERS.iter().position(|member| *member == key).ok_or(Stop)?;
            match texts[index].replace(cursor.scalar()?) {
                None => Ok(()),
                Some(_) => Err(Stop),
            }
        };
        cursor.entries(&mut member).ok()?;
        let [artifact_ref, bytes, sha256, media_type, summary] = texts;
        let string = |json: Option<&'a str>| Some(json::string(json?)?.text);
        let digest = Digest::parse(&string(sha256)?)?;
        let bytes = bytes?.parse().ok()?;
        let handle = Self { digest, bytes, media_type: string(media_type)?, summary: string(summary)? };
        (Digest::parse_reference(&string(artifact_ref)?) == Some(digest)).then_some(handle)
    }

    /// The handle as JSON text.
    #[must_use]
    pub fn to_json(&self) -> String {
        #[derive(Serialize)]
        struct Members<'h> {
            artifact_ref: String,
            bytes: u64,
            sha256: String,
            media_type: &'h str,
            summary: &'h str,
        }
        let Self { digest, bytes, media_type, summary } = self;
        let (artifact_ref, sha256) = (digest.reference(), digest.to_string());
        // Strings and a number can always be serialised.
        let members = Members { artifact_ref, bytes: *bytes, sha256, media_type, summary };
        json::compact(&serde_json::to_string(&members).unwrap_or_default())
    }
}

/// Passes on the objects anywhere in a JSON text that claim to stand for a blob: handles, and `None` for what is none.
///
/// That is an object with an `artifact_ref` that mentions `blob/`, or one with a `sha256` too. Others refer to artifacts of another sort.
pub(crate) fn for_each_handle<'a>(text: &'a str, sink: impl FnMut(Option<Handle<'a>>)) {
    let document = Document::new(text);
    let mut claims = Claims { document: &document, open: Vec::new(), marks: Vec::new(), is_at_ref: false, sink };
    // What isn't JSON ends it.
    let _ = document.start().walk(&mut claims);
}

/// Finds objects that claim to be handles.
struct Claims<'d, 'a, S> {
    document: &'d Document<'a>,
    /// Where the containers begin that are open.
    open: Vec<u32>,
    /// Those of them, by depth, that have a member of a handle's.
    marks: Vec<Mark>,
    /// Whether the next value is that of an `artifact_ref`.
    is_at_ref: bool,
    sink: S,
}

#[derive(Default)]
struct Mark {
    depth: usize,
    has_ref: bool,
    has_digest: bool,
    mentions_blob: bool,
}

impl<S> Claims<'_, '_, S> {
    /// Marks the innermost container.
    fn mark(&mut self, set: impl FnOnce(&mut Mark)) {
        let depth = self.open.len();
        match self.marks.last_mut() {
            Some(mark) if mark.depth == depth => set(mark),
            _ => {
                let mut mark = Mark { depth, ..Mark::default() };
                set(&mut mark);
                self.marks.push(mark);
            }
        }
    }

    fn string(&self, json: Range<usize>) -> Option<Cow<'_, str>> {
        self.document.text().get(json).and_then(json::string).map(|string| string.text)
    }
}

impl<'a, S: FnMut(Option<Handle<'a>>)> Visit for Claims<'_, 'a, S> {
    fn open(&mut self, at: usize) {
        self.is_at_ref = false;
        self.open.push(u32::try_from(at).unwrap_or(u32::MAX));
    }

    fn key(&mut self, key: Range<usize>) {
        let key = self.string(key);
        let (is_ref, is_digest) = (key.as_deref() == Some(ARTIFACT_REF), key.as_deref() == Some("sha256"));
        self.is_at_ref = is_ref;
        if is_ref || is_digest {
            self.mark(|mark| {
                mark.has_ref |= is_ref;
                mark.has_digest |= is_digest;
            });
        }
    }

    fn scalar(&mut self, value: Range<usize>) {
        if std::mem::take(&mut self.is_at_ref) && self.string(value).is_some_and(|text| text.contains(PREFIX)) {
            self.mark(|mark| mark.mentions_blob = true);
        }
    }

    fn close(&mut self, _end: usize) {
        let depth = self.open.len();
        let start = self.open.pop().unwrap_or_default();
        if let Some(mark) = self.marks.pop_if(|mark| mark.depth == depth)
            && mark.has_ref
            && (mark.has_digest || mark.mentions_blob)
        {
            (self.sink)(Handle::read(self.document.cursor(start as usize)));
        }
    }
}

/// The member that makes an object look like a handle.
pub(crate) const ARTIFACT_REF: &str = "artifact_ref";

/// The first bytes of a text, `limit` at most, and only whole characters.
pub(super) fn beginning(text: &str, limit: usize) -> &str {
    (0..=limit.min(text.len())).rev().find_map(|end| text.get(..end)).unwrap_or_default()
}

const PREFIX: &str = "blob/";
/// How a reference begins, whatever stands before its slashes.
const WORD: &str = "blob";
/// How many bytes after its first one decide whether there is a reference: the rest of it, its slashes escaped, and the byte after it.
const LOOK_AHEAD: usize = WORD.len() + 2 + 2 + 2 + Digests::LEN;
/// Finds references to blobs in a stream of raw bytes, cut into chunks of any size: their digests, wherever 64 hex digits stand together.
///
/// What a handle was before a worker wrote it anew, or a crash tore it, may look different, but its digest is still there.
#[derive(Debug, Default)]
pub(crate) struct Digests {
    /// The end of the last chunk, in which a digest may begin, and the new one.
    bytes: Vec<u8>,
}

impl Digests {
    /// The length of a digest as it is written.
    const LEN: usize = 64;

    /// Passes on the digests that turn out to end with the next bytes of the stream.
    pub(crate) fn push(&mut self, chunk: &[u8], sink: impl FnMut(Digest)) {
        let decided = self.bytes.len();
        self.bytes.extend_from_slice(chunk);
        Self::find(&self.bytes, decided..self.bytes.len(), sink);
        // If all of these are digits, they belong to more than a digest.
        self.bytes.drain(..self.bytes.len().saturating_sub(Self::LEN + 1));
    }

    /// The same for the end of the stream.
    pub(crate) fn finish(self, sink: impl FnMut(Digest)) {
        Self::find(&self.bytes, self.bytes.len()..self.bytes.len() + 1, sink);
    }

    /// Passes on the digests that end in a range.
    fn find(bytes: &[u8], ends: Range<usize>, mut sink: impl FnMut(Digest)) {
        let is_digit = |byte: &u8| hex_digit(*byte).is_some();
        // No digest fits between two of these places.
        let mut at = Self::LEN - 1;
        while at < bytes.len() {
            if !is_digit(&bytes[at]) {
                at += Self::LEN;
                continue;
            }
            let start = at - bytes[..at].iter().rev().take_while(|byte| is_digit(byte)).count();
            let end = at + bytes[at..].iter().take_while(|byte| is_digit(byte)).count();
            if end - start == Self::LEN && ends.contains(&end) {
                std::str::from_utf8(&bytes[start..end]).ok().and_then(Digest::parse).into_iter().for_each(&mut sink);
            }
            at = end + Self::LEN;
        }
    }
}

/// Finds references to blobs by their full text in a stream of raw bytes, cut into chunks of any size.
#[derive(Debug)]
pub struct References {
    finder: Finder<'static>,
    /// The last bytes of the stream, in which a reference may begin that ends in the next chunk.
    carry: Vec<u8>,
}

impl Default for References {
    fn default() -> Self {
        Self { finder: Finder::new(WORD), carry: Vec::new() }
    }
}

impl References {
    /// Passes on the blobs that are referred to, one call for each place.
    pub fn push(&mut self, chunk: &[u8], mut sink: impl FnMut(Digest)) {
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
    pub fn finish(self, mut sink: impl FnMut(Digest)) {
        self.find(&self.carry, self.carry.len(), &mut sink);
    }

    /// Passes on the references in `bytes` that begin before `end`.
    fn find(&self, bytes: &[u8], end: usize, sink: &mut impl FnMut(Digest)) {
        // JSON allows a backslash before a slash.
        let slash = |bytes: &'_ [u8]| bytes.strip_prefix(b"\\").unwrap_or(bytes).strip_prefix(b"/").map(<[u8]>::len);
        let after_slash = |bytes| slash(bytes).map(|rest| &bytes[bytes.len() - rest..]);
        for at in self.finder.find_iter(bytes).take_while(|at| *at < end) {
            let Some(path) = after_slash(&bytes[at + WORD.len()..]) else { continue };
            let Some((directory, rest)) = path.split_at_checked(2) else { continue };
            let Some(hex) = after_slash(rest) else { continue };
            let is_longer = hex.get(Digests::LEN).is_some_and(|byte| hex_digit(*byte).is_some());
            if let Some(hex) = hex.get(..Digests::LEN).and_then(|hex| std::str::from_utf8(hex).ok())
                && !is_longer
                && hex.as_bytes().starts_with(directory)
                && let Some(digest) = Digest::parse(hex)
            {
                sink(digest);
            }
        }
    }
}

/// Whether `name` is that of a directory in the store.
#[must_use]
pub(crate) fn is_blob_directory(name: &str) -> bool {
    name.len() == 2 && name.bytes().all(|byte| hex_digit(byte).is_some())
}

fn hex_digit(byte: u8) -> Option<u8> {
    match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    }
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
    fn a_digest_is_found_in_any_chunks_wherever_64_digits_stand_together() {
        let hash = "0123456789abcdef".repeat(4);
        let long = "ab".repeat(500);
        for (text, expected) in [
            (hash.clone(), true),
            (format!("blob\\/01\\/{hash}\""), true),
            (format!("{long}\"{hash}"), true),
            (format!("{hash} {long}"), true),
            (format!("{}{hash}\n{}", "x".repeat(63), "y".repeat(64)), true),
            (format!("{hash}0"), false),
            (format!("a{hash}"), false),
            (format!("{}{hash}", "0".repeat(300)), false),
            (hash[1..].to_owned(), false),
            (hash.to_uppercase(), false),
            (long, false),
        ] {
            for chunk in 1..=text.len() {
                let (mut digests, mut found) = (Digests::default(), Vec::new());
                for chunk in text.as_bytes().chunks(chunk) {
                    digests.push(chunk, |digest| found.push(digest.to_string()));
                }
                digests.finish(|digest| found.push(digest.to_string()));
                found.dedup();
                assert_eq!(found, if expected { vec![hash.clone()] } else { vec![] }, "{text} in chunks of {chunk}");
            }
        }
    }

    #[test]
    fn only_whole_and_consistent_paths_are_references_in_any_chunks() {
        let hash = "ab".repeat(32);
        let padding = "x".repeat(100);
        for (text, expected) in [
            (format!("/srv/blob/ab/{hash}\" and blob/ab/{hash}"), 2),
            (format!("blob/ab/{hash}"), 1),
            (format!("blob\\/ab\\/{hash}"), 1),
            (format!("blob\\\\/ab/{hash}"), 0),
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
