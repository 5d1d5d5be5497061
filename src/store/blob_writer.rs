//! Putting blobs into the store so that a line may refer to them: whole, and on disk.
//!
//! ```text
//! lock the store shared ─► many threads: write some temporary files ─► fsync each ─► rename each
//!                      ─► once, when all are done: fsync the directories
//! ```
//!
//! While one thread waits for the disk another writes, and files that are flushed at the same time share a commit of the file system's journal.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::fs::{self, File, Metadata, Permissions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::{CWD, Dir, Mode, mkdirat, renameat};
use rustix::io::Errno;

use super::atomic_file::Temporary;
use super::blob::{BlobStore, BlobUsage};
use super::files::Finding;
use super::scan::in_parallel;
use super::{Error, attributes, begin_write_back, directory_of, lock};
use crate::format::blob::Digest;

/// Puts blobs. While there is one, nobody prunes.
#[derive(Debug)]
pub(super) struct BlobWriter {
    store: BlobStore,
    /// The shared lock on the store's directory.
    lock: File,
    /// The metadata of the directory that the queue is in: its owner gets what root makes.
    owner: Metadata,
    progress: Mutex<Progress>,
}

/// What all threads together have come to.
#[derive(Debug, Default)]
struct Progress {
    /// The blobs that a thread has put, or is about to.
    put: BTreeSet<Digest>,
    /// The directories that they lie in, by the first bytes of their digests.
    directories: BTreeSet<u8>,
}

/// Blobs that are on disk, and that nobody prunes as long as this lives.
#[derive(Debug)]
pub(super) struct Durable {
    store: BlobStore,
    lock: File,
    /// In order.
    blobs: Vec<Digest>,
    /// What was written.
    pub(super) written: BlobUsage,
    /// How many blobs were there already.
    pub(super) reused: u64,
    /// Damaged blobs that were replaced.
    pub(super) findings: Vec<Finding>,
}

impl Durable {
    /// Makes sure that the store has not been moved away.
    pub(super) fn require_in_place(&self) -> Result<(), Error> {
        self.store.require_in_place(&self.lock)
    }

    /// Whether a blob is among them.
    pub(super) fn contains(&self, digest: &Digest) -> bool {
        self.blobs.binary_search(digest).is_ok()
    }
}

/// What a thread has put.
#[derive(Default)]
struct Share {
    /// What is written, but not yet in its place.
    batch: Vec<(Digest, Temporary)>,
    written: BlobUsage,
    reused: u64,
    findings: Vec<Finding>,
}

/// So many files of a thread are flushed together. All are open until then.
const MAX_BATCH: usize = 32;
/// How many bytes are compared at once.
const COMPARED: usize = 16 * 1024;
const FILE_MODE: u32 = 0o640;
const DIRECTORY_MODE: u32 = 0o750;

impl BlobWriter {
    /// Opens the store at `path`, and makes it if there is none.
    ///
    /// # Errors
    /// If that fails, if the store is a link that somebody else could have planted, or if it is being pruned for longer than `timeout`.
    pub(super) fn open(path: &Path, queue_directory: &Path, timeout: Duration) -> Result<Self, Error> {
        let failed = |error: io::Error| {
            let is_lost = error.kind() == io::ErrorKind::NotFound;
            let error = Error::io(path, "cannot be made", error);
            if is_lost { error.advise("create the directory that it is to lie in, or correct the path") } else { error }
        };
        let owner =
            fs::metadata(queue_directory).map_err(|error| Error::io(queue_directory, "cannot be examined", error))?;
        let is_new = make_directory(CWD, path).map_err(failed)?;
        let store = BlobStore::open(path)?;
        adopt(store.directory()?, is_new, &owner).map_err(failed)?;
        let lock = store.lock(timeout, lock::Mode::Shared)?;
        Ok(Self { store, lock, owner, progress: Mutex::default() })
    }

    /// Puts what `next` has, until it has nothing more, with so many threads. When this returns, all of it is on disk and a line may refer to
    /// it.
    ///
    /// # Errors
    /// Those of `next`. If a blob can't be written: what is only half written is then gone.
    pub(super) fn put_all(
        self,
        threads: usize,
        next: impl Fn() -> Result<Option<Vec<String>>, Error> + Sync,
    ) -> Result<Durable, Error> {
        let has_failed = AtomicBool::new(false);
        let work = |share: &mut Share| {
            while !has_failed.load(Ordering::Relaxed)
                && let Some(contents) = next()?
            {
                contents.iter().try_for_each(|content| self.put(content.as_bytes(), share))?;
            }
            self.flush(share)
        };
        let shares = in_parallel(&vec![(); threads.max(1)], |()| {
            let mut share = Share::default();
            let done = work(&mut share).inspect_err(|_| has_failed.store(true, Ordering::Relaxed));
            done.map(|()| share)
        })?;
        self.flush_directories(threads)?;

        let Progress { put, .. } = self.progress.into_inner().unwrap_or_else(PoisonError::into_inner);
        let blobs = put.into_iter().collect();
        let mut durable = Durable {
            store: self.store,
            lock: self.lock,
            blobs,
            written: BlobUsage::default(),
            reused: 0,
            findings: Vec::new(),
        };
        for share in shares {
            durable.written += share.written;
            durable.reused += share.reused;
            durable.findings.extend(share.findings);
        }
        Ok(durable)
    }

    fn put(&self, content: &[u8], share: &mut Share) -> Result<(), Error> {
        let digest = Digest::of(content);
        if !self.begin(&digest)? {
            return Ok(());
        }
        match self.find(&digest, content)? {
            Some(true) => {
                share.reused += 1;
                return Ok(());
            }
            Some(false) => {
                let path = self.store.path_of(&digest);
                share.findings.push(Finding::new(&path, "was damaged, and has been written again"));
            }
            None => {}
        }
        let failed = |error| self.write_error(&digest, error);
        let temporary = self.store.temporary().map_err(failed)?;
        self.fill(temporary.file(), content).map_err(failed)?;
        share.written += BlobUsage { objects: 1, bytes: content.len() as u64 };
        share.batch.push((digest, temporary));
        if share.batch.len() < MAX_BATCH { Ok(()) } else { self.flush(share) }
    }

    /// Writes a file and has it on its way to the disk.
    fn fill(&self, file: &File, content: &[u8]) -> io::Result<()> {
        file.write_all_at(content, 0)?;
        if !holds(file, content)? {
            return Err(io::Error::other("what was written reads differently"));
        }
        attributes::give_to_owner_of(file, &self.owner)?;
        file.set_permissions(Permissions::from_mode(FILE_MODE))?;
        begin_write_back(file, 0, None);
        Ok(())
    }

    /// Whether what is in the place of a blob has these bytes, and then counts as put now; `None` if there is none.
    fn find(&self, digest: &Digest, content: &[u8]) -> Result<Option<bool>, Error> {
        let Some((file, size)) = self.store.open_blob(digest)? else { return Ok(None) };
        let failed = |error| Error::io(&self.store.path_of(digest), "cannot be read", error);
        if size != content.len() as u64 || !holds(&file, content).map_err(failed)? {
            return Ok(Some(false));
        }
        match self.store.refresh(digest) {
            // Another user's, which may be replaced by one of ours.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Ok(None),
            refreshed => refreshed
                .map_err(|error| Error::io(&self.store.path_of(digest), "cannot be given a new time", error))?,
        }
        // Perhaps somebody has just copied it here.
        file.sync_all().map_err(|error| self.write_error(digest, error))?;
        Ok(Some(true))
    }

    /// Sees to it that there is a directory for a blob, and says whether that is still to be put.
    fn begin(&self, digest: &Digest) -> Result<bool, Error> {
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        if !progress.directories.contains(&digest.first()) {
            self.make_directory_of(digest)?;
            progress.directories.insert(digest.first());
        }
        Ok(progress.put.insert(*digest))
    }

    /// Makes the directory for a blob if there is none.
    fn make_directory_of(&self, digest: &Digest) -> Result<(), Error> {
        let path = self.store.path().join(digest.directory());
        let failed = |error| Error::io(&path, "cannot be made", error);
        let is_new = self.store.directory_of(digest.first())?.is_none()
            && make_directory(self.store.directory()?, digest.directory()).map_err(failed)?;
        adopt(self.directory_of(digest.first())?, is_new, &self.owner).map_err(failed)
    }

    /// The directory of the blobs whose digests begin with a byte, which must be there.
    fn directory_of(&self, first: u8) -> Result<&File, Error> {
        self.store.directory_of(first)?.ok_or_else(|| {
            let what = "is no directory, and no link is followed inside the store";
            let path = self.store.path().join(format!("{first:02x}"));
            Error::io(&path, what, io::ErrorKind::NotADirectory.into()).note(UNTOUCHED).advise("move it away")
        })
    }

    /// Brings what is written to the disk and into its place.
    fn flush(&self, share: &mut Share) -> Result<(), Error> {
        let batch = std::mem::take(&mut share.batch);
        for (digest, temporary) in &batch {
            temporary.file().sync_all().map_err(|error| self.write_error(digest, error))?;
        }
        for (digest, temporary) in batch {
            let directory = self.directory_of(digest.first())?;
            let rename = |from: &Path| renameat(CWD, from, directory, digest.to_string());
            temporary.persist_by(rename).map_err(|error| self.write_error(&digest, error.into()))?;
        }
        Ok(())
    }

    /// Brings the names of all blobs to the disk that were put, those that were there already too: who put them may not have come so far.
    fn flush_directories(&self, threads: usize) -> Result<(), Error> {
        let failed = |path: &Path, error| Error::io(path, "cannot be flushed to disk", error).note(UNTOUCHED);
        let store = self.store.path();
        let progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        let firsts: Vec<u8> = progress.directories.iter().copied().collect();
        let groups: Vec<&[u8]> = firsts.chunks(firsts.len().div_ceil(threads.max(1)).max(1)).collect();
        in_parallel(&groups, |firsts| {
            firsts.iter().try_for_each(|first| {
                let path = store.join(format!("{first:02x}"));
                self.directory_of(*first)?.sync_all().map_err(|error| failed(&path, error))
            })
        })?;
        self.store.directory()?.sync_all().map_err(|error| failed(store, error))?;
        let parent = directory_of(store);
        match File::open(&parent) {
            // Then it was not made by us: only who may read it can flush it.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            opened => opened.and_then(|parent| parent.sync_all()).map_err(|error| failed(&parent, error))?,
        }
        self.store.require_in_place(&self.lock)
    }

    fn write_error(&self, digest: &Digest, error: io::Error) -> Error {
        let is_directory = error.kind() == io::ErrorKind::IsADirectory;
        let error = Error::io(&self.store.path_of(digest), "cannot be written", error).note(UNTOUCHED);
        if is_directory { error.advise("move away what stands in its place") } else { error }
    }
}

const UNTOUCHED: &str = "the queue is left as it was";

/// Whether a file begins with these bytes.
fn holds(file: &File, content: &[u8]) -> io::Result<bool> {
    let mut buffer = vec![0; COMPARED.min(content.len())];
    for (index, wanted) in content.chunks(COMPARED).enumerate() {
        let found = &mut buffer[..wanted.len()];
        file.read_exact_at(found, (index * COMPARED) as u64)?;
        if found != wanted {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Makes a directory, and says whether there was none.
fn make_directory(at: impl AsFd, path: impl rustix::path::Arg) -> io::Result<bool> {
    match mkdirat(at, path, Mode::from_raw_mode(DIRECTORY_MODE)) {
        Ok(()) => Ok(true),
        Err(Errno::EXIST) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Gives a new directory of the store its owner and mode, also one that root was killed over: it is empty.
fn adopt(directory: &File, is_new: bool, owner: &Metadata) -> io::Result<()> {
    let is_ours = |name: &CStr| matches!(name.to_bytes(), b"." | b"..");
    let is_empty = || -> io::Result<bool> {
        Ok(Dir::read_from(directory)?.all(|entry| entry.is_ok_and(|entry| is_ours(entry.file_name()))))
    };
    let found = directory.metadata()?;
    let is_roots = rustix::process::geteuid().is_root() && found.uid() == 0 && owner.uid() != 0;
    // A mode that no umask makes of ours was somebody's intention.
    if is_new || is_roots && found.mode() & 0o7777 & !DIRECTORY_MODE == 0 && is_empty()? {
        attributes::give_to_owner_of(directory, owner)?;
        directory.set_permissions(Permissions::from_mode(DIRECTORY_MODE))?;
    }
    Ok(())
}
