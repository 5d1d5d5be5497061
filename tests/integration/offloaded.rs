//! What becomes of lines with values that offload moves, known by construction, and whether a store has all that is referred to.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde_json::Value;
use walkdir::WalkDir;

use crate::test_env::{TestEnv, in_tests, names_in, python, run};

/// Lines and what they become, and all blobs that they and others refer to, as `oversized_lines.py` makes them.
pub(crate) struct Oversized {
    lines: BTreeMap<String, (String, String)>,
    /// By their names.
    pub(crate) blobs: BTreeMap<String, Vec<u8>>,
    references: BTreeMap<String, String>,
}

impl Oversized {
    /// Each seed has contents of its own.
    pub(crate) fn new(env: &TestEnv, seed: &str) -> Self {
        Self::with_many(env, seed, 0)
    }

    /// With so many lines more, named by their numbers, each with a value of its own.
    pub(crate) fn with_many(env: &TestEnv, seed: &str, many: usize) -> Self {
        let mut python = env.command(python());
        let made = run(python.args(["-S", "-E"]).arg(in_tests("oversized_lines.py")).args([seed, &many.to_string()]));
        assert_eq!(made.code, Some(0), "{}", made.stderr);
        let made: Value = serde_json::from_slice(&made.stdout).unwrap();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let members = |name: &str| made[name].as_object().unwrap().clone().into_iter();
        Self {
            lines: members("lines").map(|(name, line)| (name, (text(&line["old"]), text(&line["new"])))).collect(),
            blobs: members("blobs").map(|(name, blob)| (name, text(&blob).into_bytes())).collect(),
            references: members("references").map(|(name, reference)| (name, text(&reference))).collect(),
        }
    }

    /// A line, without its `\n`.
    pub(crate) fn old(&self, name: &str) -> &str {
        &self.lines[name].0
    }

    /// What it is after an offload.
    pub(crate) fn new_of(&self, name: &str) -> &str {
        &self.lines[name].1
    }

    pub(crate) fn old_lines(&self, names: &[&str]) -> Vec<String> {
        names.iter().map(|name| self.old(name).to_owned()).collect()
    }

    pub(crate) fn new_lines(&self, names: &[&str]) -> Vec<String> {
        names.iter().map(|name| self.new_of(name).to_owned()).collect()
    }

    /// The names of the blobs that a line refers to after an offload.
    pub(crate) fn blobs_of(&self, name: &str) -> BTreeSet<String> {
        references(self.new_of(name).as_bytes())
    }

    /// The name of a blob that no line was made for.
    pub(crate) fn other(&self, name: &str) -> String {
        references(self.references[name].as_bytes()).pop_first().unwrap()
    }

    /// Lays a blob into the store, which is made if there is none.
    pub(crate) fn lay(&self, store: &Path, name: &str) {
        let path = store.join(&name[..2]);
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join(name), &self.blobs[name]).unwrap();
    }

    /// Says what is wrong with a reference in the queue or in one of its generations, each from its first byte to its last, or how many
    /// there are.
    pub(crate) fn check_references(&self, directory: &Path) -> Result<usize, String> {
        let mut count = 0;
        for file in names_in(directory) {
            if file == "queue.jsonl" || file.starts_with("queue.gen.") {
                let found = references(&fs::read(directory.join(&file)).unwrap());
                count += found.len();
                found.iter().try_for_each(|name| {
                    self.check_blob(&directory.join("blob"), name)
                        .map_err(|problem| format!("{file} refers to {problem}"))
                })?;
            }
        }
        Ok(count)
    }

    /// Says what is wrong with a blob.
    pub(crate) fn check_blob(&self, store: &Path, name: &str) -> Result<(), String> {
        let path = store.join(&name[..2]).join(name);
        let metadata = fs::symlink_metadata(&path).map_err(|error| format!("{name}: {error}"))?;
        if !metadata.is_file() {
            return Err(format!("{name}, which is no file"));
        }
        let content = fs::read(&path).map_err(|error| format!("{name}: {error}"))?;
        let expected = self.blobs.get(name).ok_or_else(|| format!("{name}, which nobody knows"))?;
        if content == *expected {
            return Ok(());
        }
        Err(format!("{name}, which has {} bytes that are not its {}", content.len(), expected.len()))
    }
}

/// The names of the blobs that these bytes refer to: `blob/<aa>/<sha256>` anywhere, whatever it stands in.
pub(crate) fn references(bytes: &[u8]) -> BTreeSet<String> {
    const START: &[u8] = b"blob/";
    const DIGITS: usize = 64;
    let starts = bytes.windows(START.len()).enumerate().filter(|(_, window)| *window == START);
    let name = |start: usize| {
        let (directory, rest) = bytes[start + START.len()..].split_at_checked(2)?;
        let (name, after) = rest.strip_prefix(b"/")?.split_at_checked(DIGITS)?;
        let is_digit = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
        let is_name = name.iter().all(is_digit) && name.starts_with(directory) && !after.first().is_some_and(is_digit);
        is_name.then(|| String::from_utf8(name.to_vec()).unwrap())
    };
    starts.filter_map(|(start, _)| name(start)).collect()
}

/// A file or directory in a store.
pub(crate) struct Entry {
    /// Its path in the store, "" for the store itself.
    pub(crate) name: String,
    pub(crate) is_directory: bool,
    pub(crate) mode: u32,
    pub(crate) owner: (u32, u32),
}

/// All that is in a store, if there is one.
pub(crate) fn entries(store: &Path) -> Vec<Entry> {
    if !store.exists() {
        return Vec::new();
    }
    let entry = |entry: walkdir::Result<walkdir::DirEntry>| {
        let entry = entry.unwrap();
        let metadata = entry.metadata().unwrap();
        Entry {
            name: entry.path().strip_prefix(store).unwrap().to_str().unwrap().to_owned(),
            is_directory: metadata.is_dir(),
            mode: metadata.mode() & 0o7777,
            owner: (metadata.uid(), metadata.gid()),
        }
    };
    WalkDir::new(store).sort_by_file_name().into_iter().map(entry).collect()
}

/// Whether a name is one of files that are not yet complete.
pub(crate) fn is_temporary(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension == "tmp")
}
