//! Removing blobs that nothing refers to any more.
//!
//! ```text
//! which blobs are old? ─► less those that a file beside the queue refers to ─► less those that a blob refers to which stays
//!   ─► lock the store and the queue exclusively ─► look into what may have changed once more ─► remove what is left
//! ```
//!
//! Nearly always nothing is left after the first steps, and nobody is kept waiting. A blob never changes, so those are read while workers go on.

use std::collections::BTreeMap;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::blob::{BUFFER, Blob, BlobStore, BlobUsage};
use super::files::{OpenQueue, QueueFiles, identity, read_error};
use super::lock::{self, ExclusiveLock, Mode};
use super::{Error, directory_of, uninterrupted};
use crate::format::blob::{Digest, Digests};
use crate::format::time::Timestamp;

/// Removes blobs that nothing refers to and that were last put before `limit`, and says how much that was.
///
/// # Errors
/// If anything can't be read that might refer to a blob: nothing is removed then. If a blob can't be removed.
pub fn prune(files: &QueueFiles, lock_timeout: Duration, limit: Timestamp) -> Result<BlobUsage, Error> {
    let mut usage = BlobUsage::default();
    let store = BlobStore::open(&files.blobs)?;
    store.remove_abandoned();
    let Some(mut old) = Old::unwanted(files, &store, lock_timeout, limit, Refresh::Yes)? else { return Ok(usage) };
    // In this order, which is also that of those who put.
    let _store = store.lock(lock_timeout, Mode::Exclusive)?;
    // Nobody puts now. Other queues come first: while their locks are waited for, ours is free.
    old.spare_what_files_refer_to(files, Files::OfOtherQueues, lock_timeout)?;
    let queue = ExclusiveLock::acquire(files, lock_timeout)?;
    old.spare_what_files_refer_to(files, Files::AllElse, lock_timeout)?;
    old.spare_what_blobs_refer_to(&store, Blobs::New)?;
    if !queue.is_effective()? {
        return Err(read_error(queue.path(), io::ErrorKind::NotFound.into()));
    }
    old.for_each_unwanted(&store, limit, |blob| {
        store.remove(&blob.digest)?;
        usage += blob;
        Ok(())
    })?;
    Ok(usage)
}

/// How much [`prune`] would remove.
///
/// # Errors
/// If anything can't be read that might refer to a blob.
pub fn preview(files: &QueueFiles, lock_timeout: Duration, limit: Timestamp) -> Result<BlobUsage, Error> {
    let mut usage = BlobUsage::default();
    for_each_unwanted(files, lock_timeout, limit, |blob| {
        usage += blob;
        Ok(())
    })?;
    Ok(usage)
}

/// Passes on the blobs that nothing refers to and that were last put before `limit`.
///
/// # Errors
/// If anything can't be read that might refer to a blob.
pub(super) fn for_each_unwanted(
    files: &QueueFiles,
    lock_timeout: Duration,
    limit: Timestamp,
    each: impl FnMut(Blob) -> Result<(), Error>,
) -> Result<(), Error> {
    let store = BlobStore::open(&files.blobs)?;
    let old = Old::unwanted(files, &store, lock_timeout, limit, Refresh::No)?;
    old.map_or(Ok(()), |mut old| old.for_each_unwanted(&store, limit, each))
}

/// The blobs that were in the store at first, and whether they are old enough to go.
///
/// They are known by the first 64 bits of their digests, which takes half of the memory. Should two be the same, both stay if one does.
struct Old {
    /// In order.
    blobs: Vec<(u64, State)>,
    refresh: Refresh,
    /// Blobs that turned out to be wanted: what they refer to is yet to be found out.
    spared: Vec<Digest>,
    /// Files that have been read, and what they were then.
    read: BTreeMap<PathBuf, Version>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    /// Old, and as far as is known nothing refers to it.
    Unwanted,
    /// Old, and something refers to it.
    Wanted,
    /// Not old.
    Young,
}

/// Which files are looked into.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Files {
    /// Those that have a lock of their own, under which workers rewrite them.
    OfOtherQueues,
    /// The queue that is pruned for, and what else lies beside it.
    AllElse,
}

/// Which blobs are looked into, of those that stay.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Blobs {
    All,
    /// Those that were not there at first.
    New,
}

/// Whether old blobs that other blobs refer to get a new time: not being old, they need not be looked for in all blobs again before long.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Refresh {
    Yes,
    No,
}

/// What tells a file from what it becomes when it is written.
#[derive(PartialEq, Eq)]
struct Version {
    identity: (u64, u64),
    len: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Version {
    fn of(metadata: &Metadata) -> Self {
        Self {
            identity: identity(metadata),
            len: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

impl Old {
    /// Those that nothing refers to, as far as can be said while others go on; `None` if there are none.
    fn unwanted(
        files: &QueueFiles,
        store: &BlobStore,
        lock_timeout: Duration,
        limit: Timestamp,
        refresh: Refresh,
    ) -> Result<Option<Self>, Error> {
        // Without a queue there is no telling what is still wanted: perhaps the path is wrong.
        if !files.queue.exists() {
            return Ok(None);
        }
        let mut old = Self::list(store, limit, refresh)?;
        if old.has_unwanted() {
            old.spare_what_files_refer_to(files, Files::OfOtherQueues, lock_timeout)?;
            let spare = || old.spare_what_files_refer_to(files, Files::AllElse, lock_timeout);
            lock::shared(&files.lock, lock_timeout, spare)?;
        }
        if old.has_unwanted() {
            old.spare_what_blobs_refer_to(store, Blobs::All)?;
        }
        Ok(old.has_unwanted().then_some(old))
    }

    fn list(store: &BlobStore, limit: Timestamp, refresh: Refresh) -> Result<Self, Error> {
        let mut blobs = Vec::new();
        store.for_each(|blob| {
            let state = if blob.modified < limit { State::Unwanted } else { State::Young };
            blobs.push((blob.digest.prefix(), state));
            Ok(())
        })?;
        blobs.sort_unstable();
        Ok(Self { blobs, refresh, spared: Vec::new(), read: BTreeMap::new() })
    }

    fn has_unwanted(&self) -> bool {
        self.blobs.iter().any(|(_, state)| *state == State::Unwanted)
    }

    /// `None` if it was not there at first.
    fn state(&mut self, digest: &Digest) -> Option<&mut State> {
        let prefix = digest.prefix();
        let index = self.blobs.partition_point(|(other, _)| *other < prefix);
        self.blobs.get_mut(index).filter(|(other, _)| *other == prefix).map(|(_, state)| state)
    }

    /// Spares a blob, and says whether it was not known to be wanted.
    fn spare(&mut self, digest: Digest) -> bool {
        let Some(state @ State::Unwanted) = self.state(&digest) else { return false };
        *state = State::Wanted;
        self.spared.push(digest);
        true
    }

    /// Spares what files beside the queue refer to: the queue itself, generations, temporary files, other queues that share the store,
    /// somebody's copies.
    fn spare_what_files_refer_to(
        &mut self,
        files: &QueueFiles,
        which: Files,
        lock_timeout: Duration,
    ) -> Result<(), Error> {
        let Some(queue) = OpenQueue::open(files)? else {
            return Err(read_error(&files.queue, io::ErrorKind::NotFound.into()));
        };
        queue.require_one_lock(files)?;
        let beside = directory_of(&files.queue);
        let mut directories = vec![beside.canonicalize().map_err(|error| unreadable(&beside, error))?];
        if directories[0] != queue.directory {
            directories.push(queue.directory.clone());
        }
        for directory in directories {
            for entry in fs::read_dir(&directory).map_err(|error| unreadable(&directory, error))? {
                let path = entry.map_err(|error| unreadable(&directory, error))?.path();
                self.spare_what_file_refers_to(&path, &queue, files, which, lock_timeout)?;
            }
        }
        Ok(())
    }

    fn spare_what_file_refers_to(
        &mut self,
        path: &Path,
        queue: &OpenQueue,
        files: &QueueFiles,
        which: Files,
        lock_timeout: Duration,
    ) -> Result<(), Error> {
        let failed = |error| unreadable(path, error);
        let other = QueueFiles::beside(path.to_owned()).lock;
        let of = |path: &Path| fs::metadata(path).ok().map(|metadata| identity(&metadata));
        let is_other = of(&other).is_some_and(|other| of(&files.lock) != Some(other));
        let mut read = || {
            let Some(file) = open_file(path).map_err(failed)? else { return Ok(()) };
            let version = Version::of(&file.metadata().map_err(failed)?);
            // Files of the kernel's have no length, and reading them may never end.
            let is_queue = version.identity == identity(&queue.metadata);
            if version.len == 0 || !is_queue && self.read.get(path) == Some(&version) {
                return Ok(());
            }
            // What is added meanwhile is no end of it: perhaps somebody writes down what we do.
            for_each_reference(file.take(version.len), path, |digest| {
                self.spare(digest);
            })?;
            self.read.insert(path.to_owned(), version);
            Ok(())
        };
        match (which, is_other) {
            (Files::OfOtherQueues, true) => lock::shared(&other, lock_timeout, read).map(|((), _)| ()),
            (Files::AllElse, false) => read(),
            _ => Ok(()),
        }
    }

    /// Spares what blobs refer to that stay, and what these refer to, and so on.
    fn spare_what_blobs_refer_to(&mut self, store: &BlobStore, which: Blobs) -> Result<(), Error> {
        store.for_each(|blob| match self.state(&blob.digest) {
            Some(State::Unwanted) => Ok(()),
            Some(_) if which == Blobs::New => Ok(()),
            _ => self.spare_what_blob_refers_to(store, &blob.digest),
        })?;
        while let Some(digest) = self.spared.pop() {
            self.spare_what_blob_refers_to(store, &digest)?;
        }
        Ok(())
    }

    fn spare_what_blob_refers_to(&mut self, store: &BlobStore, digest: &Digest) -> Result<(), Error> {
        let Some((file, _)) = store.open_blob(digest)? else { return Ok(()) };
        for_each_reference(file, &store.path_of(digest), |digest| {
            if self.spare(digest) && self.refresh == Refresh::Yes {
                // Should that fail, the next run takes longer.
                drop(store.refresh(&digest));
            }
        })
    }

    /// Passes on the blobs that are unwanted and still old.
    fn for_each_unwanted(
        &mut self,
        store: &BlobStore,
        limit: Timestamp,
        mut each: impl FnMut(Blob) -> Result<(), Error>,
    ) -> Result<(), Error> {
        store.for_each(|blob| {
            let is_unwanted = self.state(&blob.digest) == Some(&mut State::Unwanted);
            if is_unwanted && blob.modified < limit { each(blob) } else { Ok(()) }
        })
    }
}

/// Opens a regular file, also one that a link leads to: another queue may be known by that. `None` for anything else.
fn open_file(path: &Path) -> io::Result<Option<File>> {
    let is_file = |metadata: Metadata| metadata.is_file();
    // Opening a FIFO or a device would do more than that, and what is looked at here may be exchanged for one.
    let open = || {
        if !fs::metadata(path).map(is_file)? {
            return Ok(None);
        }
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
        Ok(file.metadata().map(is_file)?.then_some(file))
    };
    open().or_else(|error: io::Error| match error.raw_os_error() {
        // It has been removed, or is a link to nowhere.
        Some(libc::ENOENT | libc::ENOTDIR | libc::ELOOP | libc::ENXIO) => Ok(None),
        _ => Err(error),
    })
}

/// Passes on the blobs that a file refers to.
fn for_each_reference(mut file: impl Read, path: &Path, mut each: impl FnMut(Digest)) -> Result<(), Error> {
    let (mut digests, mut buffer) = (Digests::default(), vec![0; BUFFER]);
    loop {
        let read = uninterrupted(|| file.read(&mut buffer)).map_err(|error| unreadable(path, error))?;
        if read == 0 {
            digests.finish(&mut each);
            return Ok(());
        }
        digests.push(&buffer[..read], &mut each);
    }
}

fn unreadable(path: &Path, error: io::Error) -> Error {
    Error::io(path, "cannot be read, and might refer to blobs, so none is removed", error)
}
