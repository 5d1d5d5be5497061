//! Where a queue and what belongs to it lie.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::process::geteuid;

use super::{Error, ErrorKind, directory_of, open_regular, require_directory};

/// The names of a queue and of what lies beside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueFiles {
    /// The queue itself.
    pub queue: PathBuf,
    /// The lock file.
    pub lock: PathBuf,
    /// The blob store.
    pub blobs: PathBuf,
}

impl QueueFiles {
    /// The names that derive from the queue's.
    #[must_use]
    pub fn beside(queue: PathBuf) -> Self {
        let mut lock = stem(&queue).to_owned();
        lock.push(".lock");
        Self { lock: queue.with_file_name(lock), blobs: queue.with_file_name("blob"), queue }
    }

    /// Makes sure that the queue's directory is there. Without one there is no empty queue, but more likely a file system that isn't
    /// mounted, or a wrong path.
    pub(super) fn require_directory(&self) -> Result<(), Error> {
        require_directory(&directory_of(&self.queue), &self.queue, "cannot be read: its directory")
    }
}

/// The name that the names beside the queue begin with.
fn stem(queue: &Path) -> &OsStr {
    let name = queue.file_name().unwrap_or_default();
    OsStr::from_bytes(name.as_bytes().strip_suffix(b".jsonl").unwrap_or(name.as_bytes()))
}

/// Where malformed lines are put aside: beside the file that a queue really is.
pub(super) fn quarantine_of(real: &Path) -> PathBuf {
    let mut name = stem(real).to_owned();
    name.push(".bad.jsonl");
    real.with_file_name(name)
}

/// Something that somebody should look at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// In which file.
    pub path: PathBuf,
    /// In which line, from 1.
    pub line: Option<u64>,
    /// What it is.
    pub message: String,
}

impl Finding {
    pub(super) fn new(path: &Path, message: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line: None, message: message.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.path.display())?;
        if let Some(line) = self.line {
            write!(f, "{line}:")?;
        }
        write!(f, " {}", self.message)
    }
}

/// The queue, opened for reading.
#[derive(Debug)]
pub(super) struct OpenQueue {
    /// Its real name, behind all links.
    pub(super) path: PathBuf,
    /// The directory that it really lies in.
    pub(super) directory: PathBuf,
    pub(super) file: File,
    /// As it was when it was opened.
    pub(super) metadata: Metadata,
    /// What is named like an earlier generation of it, in ascending order.
    pub(super) generations: Vec<Generation>,
}

/// A file that is named like an earlier generation.
#[derive(Debug)]
pub(super) struct Generation {
    pub(super) number: u64,
    pub(super) path: PathBuf,
    /// Whether it is the queue itself by a second name, which a killed run has left.
    pub(super) is_queue: bool,
}

impl OpenQueue {
    /// `None` if there is no queue.
    ///
    /// # Errors
    /// If it can't be opened, or there must have been one.
    pub(super) fn open(files: &QueueFiles) -> Result<Option<Self>, Error> {
        let Some(file) = open_regular(&files.queue)? else {
            let generations = generations(&directory_of(&files.queue), stem(&files.queue), None)?;
            let Some(Generation { path, .. }) = generations.last() else { return Ok(None) };
            let what =
                format!("is missing, though it has an earlier generation, {}: it has been removed", path.display());
            return Err(Error::new(ErrorKind::Io, &files.queue, what)
                .advise("stop all that write, and restore it from a copy of that generation or a backup"));
        };
        let failed = |error| read_error(&files.queue, error);
        let path = fs::canonicalize(&files.queue).map_err(failed)?;
        let directory = directory_of(&path);
        let metadata = file.metadata().map_err(failed)?;
        let generations = generations(&directory, stem(&path), Some(&metadata))?;
        Ok(Some(Self { path, directory, file, metadata, generations }))
    }

    /// The lock of those who know the queue by its real name, not by the link, if it is another file than ours.
    pub(super) fn other_lock(&self, files: &QueueFiles) -> Option<PathBuf> {
        let other = QueueFiles::beside(self.path.clone()).lock;
        let of = |path: &Path| fs::metadata(path).ok().map(|metadata| identity(&metadata));
        let is_link = fs::symlink_metadata(&files.queue).is_ok_and(|metadata| metadata.is_symlink());
        (is_link && of(&other).is_some_and(|other| of(&files.lock) != Some(other))).then_some(other)
    }

    /// Makes sure that who takes our lock keeps all workers out, and that nobody leads us to a file of their choice.
    pub(super) fn require_one_lock(&self, files: &QueueFiles) -> Result<(), Error> {
        for path in [&files.queue, &files.lock] {
            let of_others = |link: &Metadata| link.is_symlink() && ![0, geteuid().as_raw()].contains(&link.uid());
            let link = match fs::symlink_metadata(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                link => link.map_err(|error| Error::io(path, "cannot be examined", error))?,
            };
            if of_others(&link) {
                let what = "is a symbolic link that belongs to another user, and is not followed to write";
                return Err(Error::new(ErrorKind::Io, path, what)
                    .advise("make it root's or your own (chown -h), or name the file that it leads to"));
            }
        }
        let Some(other) = self.other_lock(files) else { return Ok(()) };
        let what = format!("there is another lock, {}: workers that use it are not kept out", other.display());
        Err(Error::new(ErrorKind::Io, &files.lock, what)
            .advise("make all use the queue by the same name, and remove the lock that nobody uses"))
    }

    /// Passes over the late lines of generations that the ledger lists with these offsets: `each` is given a file and where they stand in it.
    /// Returns the number of generations.
    ///
    /// # Errors
    /// Those of `each`, or if a generation can't be opened.
    pub(super) fn for_each_late(
        &self,
        offsets: &BTreeMap<u64, u64>,
        findings: &mut Vec<Finding>,
        mut each: impl FnMut(&Path, &File, Range<u64>) -> Result<(), Error>,
    ) -> Result<u64, Error> {
        let mut count = 0;
        let mut unlisted = Vec::new();
        for generation in self.generations.iter().filter(|generation| !generation.is_queue) {
            let path = &generation.path;
            count += 1;
            let Some(&offset) = offsets.get(&generation.number) else {
                unlisted.push(generation);
                continue;
            };
            let file = generation.open(&self.metadata)?;
            let size = file.metadata().map_err(|error| read_error(path, error))?.len();
            if offset > size {
                let message =
                    format!("has {size} bytes, but the queue's ledger says that {offset} have been taken over");
                findings.push(Finding::new(path, message));
                continue;
            }
            each(path, &file, offset..size)?;
        }
        if let [first, more @ ..] = unlisted.as_slice() {
            findings.push(first.unlisted(!offsets.is_empty()));
            if !more.is_empty() {
                let message = format!("and {} more like it", more.len());
                findings.push(Finding::new(&first.path, message));
            }
        }
        Ok(count)
    }

    /// The name of a generation.
    pub(super) fn generation(&self, number: u64) -> PathBuf {
        let mut name = stem(&self.path).to_owned();
        name.push(format!(".gen.{number}"));
        self.path.with_file_name(name)
    }
}

impl Generation {
    /// Opens it for reading.
    ///
    /// # Errors
    /// If it can't be opened, or can't be what it seems. A queue's directory may belong to another user than the one who runs a tool, and
    /// what is read here gets into the queue: so it is no link to anywhere else.
    pub(super) fn open(&self, queue: &Metadata) -> Result<File, Error> {
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(&self.path);
        let file = match opened {
            Ok(file) => file,
            // A symbolic link, or a socket.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ELOOP | libc::ENXIO)) => return Err(self.foreign()),
            Err(error) => return Err(Error::io(&self.path, "cannot be opened", error)),
        };
        let metadata = file.metadata().map_err(|error| read_error(&self.path, error))?;
        let may_be_ours = metadata.is_file() && metadata.dev() == queue.dev() && metadata.nlink() == 1;
        if may_be_ours { Ok(file) } else { Err(self.foreign()) }
    }

    fn foreign(&self) -> Error {
        let what = "cannot be the generation that the queue's ledger lists: that is a regular file with one name";
        Error::new(ErrorKind::Io, &self.path, what).advise("put the generation back, or move this away if it is lost")
    }

    /// What to say of one that the ledger doesn't list.
    pub(super) fn unlisted(&self, has_ledger: bool) -> Finding {
        let message = if has_ledger {
            "a generation that the queue's ledger does not list: not read, never deleted: remove it if the queue has all its lines"
        } else {
            "a generation, but the queue has no ledger that lists it: not read, never deleted: if the ledger has been lost, what was removed is missing from all counters"
        };
        Finding::new(&self.path, message)
    }
}

/// Device and inode: what makes a file the same one.
pub(super) fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// What is wrong when a file of the queue can't be read.
pub(super) fn read_error(path: &Path, error: io::Error) -> Error {
    if matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::NotFound) {
        let what = "was cut or removed while it was read: somebody changes it without the lock: try again";
        return Error::new(ErrorKind::Busy, path, what);
    }
    Error::io(path, "cannot be read", error)
}

/// The files in `directory` that are named like generations, in ascending order.
fn generations(directory: &Path, stem: &OsStr, queue: Option<&Metadata>) -> Result<Vec<Generation>, Error> {
    let failed = |error| Error::io(directory, "cannot be listed to look for earlier generations of the queue", error);
    let mut prefix = stem.to_owned();
    prefix.push(".gen.");
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let digits =
            name.as_bytes().strip_prefix(prefix.as_bytes()).and_then(|digits| std::str::from_utf8(digits).ok());
        if let Some(digits) = digits
            && let Ok(number) = digits.parse::<u64>()
            && number.to_string() == digits
        {
            let path = entry.path();
            let is_queue = queue.is_some_and(|queue| {
                fs::symlink_metadata(&path).is_ok_and(|metadata| identity(&metadata) == identity(queue))
            });
            found.push(Generation { number, path, is_queue });
        }
    }
    found.sort_unstable_by_key(|generation| generation.number);
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_derive_from_the_stem() {
        let files = QueueFiles::beside("/var/lib/agents/x.jsonl".into());
        assert_eq!(files.lock, Path::new("/var/lib/agents/x.lock"));
        assert_eq!(files.blobs, Path::new("/var/lib/agents/blob"));
        assert_eq!(QueueFiles::beside("x.json".into()).lock, Path::new("x.json.lock"));
    }
}
