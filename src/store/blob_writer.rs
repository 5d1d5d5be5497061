//! Putting blobs into the store so that a line may refer to them: whole, and on disk.
//!
//! ```text
//! lock the store shared ─► many times: write temporary, compare ─► fsync each ─► rename each ─► once: fsync the directories
//! ```
//!
//! A file of a batch is flushed only when all of it are written and on their way to the disk: the first fsync then has the file system write
//! its journal for all, and the others find nothing left to do but to report their own errors.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File, Metadata, Permissions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{Advice, CWD, Mode, fadvise, mkdirat, renameat};
use rustix::io::Errno;

use super::atomic_file::Temporary;
use super::blob::{BUFFER, BlobStore, BlobUsage, TEMPORARY};
use super::files::Finding;
use super::scan::in_parallel;
use super::{Error, attributes, directory_of, lock};
use crate::format::blob::{Digest, References};

/// Puts blobs. While there is one, nobody prunes.
#[derive(Debug)]
pub(super) struct BlobWriter {
    store: BlobStore,
    /// The shared lock on the store's directory.
    lock: File,
    /// The metadata of the directory that the queue is in: its owner gets what root makes.
    owner: Metadata,
    /// What is written, but not yet in its place.
    batch: Vec<Written>,
    /// What will be on disk when the writer is finished.
    put: BTreeSet<Digest>,
    /// The directories that have to be flushed.
    changed: BTreeSet<u8>,
    written: BlobUsage,
    reused: u64,
    findings: Vec<Finding>,
}

/// Blobs that are on disk, and that nobody prunes as long as this lives.
#[derive(Debug)]
pub(super) struct Durable {
    _lock: File,
    blobs: BTreeSet<Digest>,
    /// What was written.
    pub(super) written: BlobUsage,
    /// How many blobs were there already.
    pub(super) reused: u64,
    /// Damaged blobs that were replaced.
    pub(super) findings: Vec<Finding>,
}

impl Durable {
    /// Whether a blob is among them.
    pub(super) fn contains(&self, digest: &Digest) -> bool {
        self.blobs.contains(digest)
    }
}

/// What came of one blob.
enum Put {
    /// It is yet to be flushed and moved to its place.
    Written(Written),
    /// It is there.
    Reused,
}

/// A blob in a temporary file.
#[derive(Debug)]
struct Written {
    digest: Digest,
    bytes: u64,
    temporary: Temporary,
    /// Whether it takes the place of a damaged one.
    replaces: bool,
}

/// So many files make a batch, and those that came with the last of them: all are open.
const MAX_BATCH: usize = 128;
/// How many threads write.
const WRITERS: usize = 4;
/// How many threads wait for the disk.
const FLUSHERS: usize = 16;
const FILE_MODE: u32 = 0o640;
const DIRECTORY_MODE: u32 = 0o750;

impl BlobWriter {
    /// Opens the store at `path`, and makes it if there is none.
    ///
    /// # Errors
    /// If that fails, if the store is a link that somebody else could have planted, or if it is being pruned for longer than `timeout`.
    pub(super) fn open(path: &Path, queue_directory: &Path, timeout: Duration) -> Result<Self, Error> {
        let failed = |error| Error::io(path, "cannot be made", error);
        let owner =
            fs::metadata(queue_directory).map_err(|error| Error::io(queue_directory, "cannot be examined", error))?;
        require_trusted(path)?;
        let is_new = make_directory(CWD, path).map_err(failed)?;
        let store = BlobStore::open(path)?;
        adopt(store.directory()?, is_new, &owner).map_err(failed)?;
        let lock = store.lock(timeout, lock::Mode::Shared)?;
        Ok(Self {
            store,
            lock,
            owner,
            batch: Vec::new(),
            put: BTreeSet::new(),
            changed: BTreeSet::new(),
            written: BlobUsage::default(),
            reused: 0,
            findings: Vec::new(),
        })
    }

    /// Sees to it that blobs will be on disk when the writer is [finished](Self::finish).
    ///
    /// # Errors
    /// If one can't be written. What is only half written is then gone.
    pub(super) fn put(&mut self, contents: &[impl AsRef<[u8]> + Sync]) -> Result<(), Error> {
        let digests = in_groups(contents, WRITERS, |content| Ok(Digest::of(content.as_ref())))?;
        let mut new = Vec::new();
        for (digest, content) in digests.into_iter().zip(contents) {
            if self.put.insert(digest) {
                new.push((digest, content.as_ref()));
                if self.changed.insert(digest.first()) {
                    self.make_directory_of(&digest)?;
                }
            }
        }
        for put in in_groups(&new, WRITERS, |(digest, content)| self.put_one(*digest, content))? {
            match put {
                Put::Written(written) => {
                    self.written.objects += 1;
                    self.written.bytes += written.bytes;
                    if written.replaces {
                        let path = self.store.path_of(&written.digest);
                        self.findings.push(Finding::new(&path, "was damaged, and has been written again"));
                    }
                    self.batch.push(written);
                }
                Put::Reused => self.reused += 1,
            }
        }
        if self.batch.len() >= MAX_BATCH { self.flush() } else { Ok(()) }
    }

    fn put_one(&self, digest: Digest, content: &[u8]) -> Result<Put, Error> {
        // What it refers to has only this reference, perhaps, from now on. Should that fail, who prunes still looks into all blobs.
        let mut references = References::default();
        references.push(content, |reference| drop(self.store.refresh(&reference)));
        references.finish(|reference| drop(self.store.refresh(&reference)));

        let found = self.find(&digest, content)?;
        if found == Some(true) {
            return self.store.refresh(&digest).map(|()| Put::Reused);
        }
        let failed = |error| self.write_error(&digest, error);
        let temporary = Temporary::new(self.store.path(), OsStr::new(TEMPORARY)).map_err(failed)?;
        self.fill(temporary.file(), content).map_err(failed)?;
        Ok(Put::Written(Written { digest, bytes: content.len() as u64, temporary, replaces: found.is_some() }))
    }

    /// Writes a file and has it on its way to the disk.
    fn fill(&self, file: &File, content: &[u8]) -> io::Result<()> {
        file.write_all_at(content, 0)?;
        if !holds(file, content)? {
            return Err(io::Error::other("what was written reads differently"));
        }
        attributes::give_to_owner_of(file, &self.owner)?;
        file.set_permissions(Permissions::from_mode(FILE_MODE))?;
        // Linux starts to write back what it is told will not be needed. It is advice: should it fail, fsync does it all.
        let _ = fadvise(file, 0, None, Advice::DontNeed);
        Ok(())
    }

    /// Whether what is in the place of a blob has these bytes; `None` if there is none.
    fn find(&self, digest: &Digest, content: &[u8]) -> Result<Option<bool>, Error> {
        let Some((file, size)) = self.store.open_blob(digest)? else { return Ok(None) };
        let failed = |error| Error::io(&self.store.path_of(digest), "cannot be read", error);
        Ok(Some(size == content.len() as u64 && holds(&file, content).map_err(failed)?))
    }

    /// Makes the directory for a blob if there is none.
    fn make_directory_of(&self, digest: &Digest) -> Result<(), Error> {
        let path = self.store.path().join(digest.directory());
        let failed = |error| Error::io(&path, "cannot be made", error);
        let is_new = self.store.directory_of(digest.first())?.is_none()
            && make_directory(self.store.directory()?, digest.directory()).map_err(failed)?;
        let Some(directory) = self.store.directory_of(digest.first())? else {
            let what = "is no directory, and no link is followed inside the store";
            return Err(Error::io(&path, what, io::ErrorKind::NotADirectory.into()).advise("move it away"));
        };
        adopt(directory, is_new, &self.owner).map_err(failed)
    }

    /// Brings what is written to the disk and into its place.
    fn flush(&mut self) -> Result<(), Error> {
        let batch = std::mem::take(&mut self.batch);
        // Many wait for the disk at once, which then flushes its own memory once for all of them.
        in_groups(&batch, FLUSHERS, |Written { digest, temporary, .. }| {
            temporary.file().sync_all().map_err(|error| self.write_error(digest, error))
        })?;
        for Written { digest, temporary, .. } in batch {
            let Some(directory) = self.store.directory_of(digest.first())? else { continue };
            let rename = |from: &Path| renameat(CWD, from, directory, digest.to_string());
            temporary.persist_by(rename).map_err(|error| self.write_error(&digest, error.into()))?;
        }
        Ok(())
    }

    /// Brings everything to the disk that was put. Only now a line may refer to it.
    ///
    /// # Errors
    /// If that fails.
    pub(super) fn finish(mut self) -> Result<Durable, Error> {
        self.flush()?;
        let sync = |directory: &File| {
            let failed = |error| Error::io(self.store.path(), "cannot be flushed to disk", error).note(UNTOUCHED);
            directory.sync_all().map_err(failed)
        };
        let changed: Vec<u8> = self.changed.iter().copied().collect();
        in_groups(&changed, FLUSHERS, |first| self.store.directory_of(*first)?.map_or(Ok(()), sync))?;
        // Somebody who was killed may have made them, and come no further.
        sync(self.store.directory()?)?;
        let parent = directory_of(self.store.path());
        sync(&File::open(&parent).map_err(|error| Error::io(&parent, "cannot be opened", error).note(UNTOUCHED))?)?;
        let Self { lock, put, written, reused, findings, .. } = self;
        Ok(Durable { _lock: lock, blobs: put, written, reused, findings })
    }

    fn write_error(&self, digest: &Digest, error: io::Error) -> Error {
        Error::io(&self.store.path_of(digest), "cannot be written", error).note(UNTOUCHED)
    }
}

const UNTOUCHED: &str = "the queue is left as it was";

/// Does a job for each item, on so many threads.
fn in_groups<I: Sync, T: Send>(
    items: &[I],
    threads: usize,
    job: impl Fn(&I) -> Result<T, Error> + Sync,
) -> Result<Vec<T>, Error> {
    let groups: Vec<&[I]> = items.chunks(items.len().div_ceil(threads).max(1)).collect();
    let done = in_parallel(&groups, |group| group.iter().map(&job).collect::<Result<Vec<T>, Error>>())?;
    Ok(done.into_iter().flatten().collect())
}

/// Whether a file begins with these bytes.
fn holds(file: &File, content: &[u8]) -> io::Result<bool> {
    let mut buffer = vec![0; BUFFER.min(content.len())];
    for (index, wanted) in content.chunks(BUFFER).enumerate() {
        let found = &mut buffer[..wanted.len()];
        file.read_exact_at(found, (index * BUFFER) as u64)?;
        if found != wanted {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Makes sure that the store is no link that somebody has planted to have us write elsewhere.
pub(super) fn require_trusted(path: &Path) -> Result<(), Error> {
    let Ok(metadata) = fs::symlink_metadata(path) else { return Ok(()) };
    let ours = rustix::process::geteuid().as_raw();
    if metadata.is_symlink() && ![0, ours].contains(&metadata.uid()) {
        let what = format!("is a symbolic link that belongs to another user, {}, and is not followed", metadata.uid());
        return Err(Error::io(path, what, io::ErrorKind::PermissionDenied.into()).advise("say --blob-dir"));
    }
    Ok(())
}

/// Makes a directory that is at first its maker's alone, and says whether there was none.
fn make_directory(at: impl AsFd, path: impl rustix::path::Arg) -> io::Result<bool> {
    match mkdirat(at, path, Mode::RWXU) {
        Ok(()) => Ok(true),
        Err(Errno::EXIST) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Gives a new directory of the store its owner and mode, also one that root was killed over.
fn adopt(directory: &File, is_new: bool, owner: &Metadata) -> io::Result<()> {
    let found = directory.metadata()?;
    let is_roots = rustix::process::geteuid().is_root() && found.uid() == 0 && owner.uid() != 0;
    if is_new || is_roots && found.mode() & 0o777 == Mode::RWXU.as_raw_mode() {
        attributes::give_to_owner_of(directory, owner)?;
        directory.set_permissions(Permissions::from_mode(DIRECTORY_MODE))?;
    }
    Ok(())
}
