//! Removing blobs that nothing refers to any more.
//!
//! ```text
//! which blobs are old? ─► less those that a file beside the queue refers to ─► less those that a blob refers to which stays
//!   ─► lock the store and the queue exclusively ─► look into the files once more ─► remove what is left
//! ```
//!
//! Nearly always nothing is left after the first step or the second, and no lock is taken. A blob never changes, so those are read
//! while workers go on.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::time::Duration;

use super::blob::{BUFFER, Blob, BlobStore, BlobUsage, TEMPORARY};
use super::blob_writer::require_trusted;
use super::files::QueueFiles;
use super::lock::{ExclusiveLock, Mode};
use super::{Error, atomic_file, directory_of, uninterrupted};
use crate::format::blob::{Digest, References};
use crate::format::time::Timestamp;

/// Removes blobs that nothing refers to and that were last put before `limit`, and says how much that was.
///
/// # Errors
/// If anything can't be read that might refer to a blob: nothing is removed then. If a blob can't be removed.
pub(super) fn prune(files: &QueueFiles, lock_timeout: Duration, limit: Timestamp) -> Result<BlobUsage, Error> {
    let mut usage = BlobUsage::default();
    let store = BlobStore::open(&files.blobs)?;
    if store.directory().is_ok() {
        require_trusted(&files.blobs)?;
        atomic_file::remove_abandoned(&files.blobs, TEMPORARY.as_ref());
    }
    let Some(mut old) = Old::unwanted(files, &store, limit, true)? else { return Ok(usage) };
    // In this order, which is also that of those who put.
    let _store = store.lock(lock_timeout, Mode::Exclusive)?;
    let _queue = ExclusiveLock::acquire(files, lock_timeout)?;
    old.spare_what_files_refer_to(files)?;
    old.spare_what_blobs_refer_to(&store, Which::NewlySpared, true)?;
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
pub(super) fn preview(files: &QueueFiles, limit: Timestamp) -> Result<BlobUsage, Error> {
    let mut usage = BlobUsage::default();
    for_each_unwanted(files, limit, |blob| {
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
    limit: Timestamp,
    each: impl FnMut(Blob) -> Result<(), Error>,
) -> Result<(), Error> {
    let store = BlobStore::open(&files.blobs)?;
    let old = Old::unwanted(files, &store, limit, false)?;
    old.map_or(Ok(()), |mut old| old.for_each_unwanted(&store, limit, each))
}

/// The blobs that are old enough to go.
///
/// They are known by the first 64 bits of their digests, which takes a quarter of the memory. Should two be the same, both stay if one does.
struct Old {
    /// In order.
    blobs: Vec<(u64, State)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// As far as is known, nothing refers to it.
    Unwanted,
    /// Something refers to it, and what it refers to itself is yet to be found out.
    Spared,
    /// Something refers to it.
    Wanted,
}

/// Which blobs are looked into.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Which {
    /// All but the unwanted.
    AllThatStay,
    /// Those that were unwanted before.
    NewlySpared,
}

impl Old {
    /// Those that nothing refers to, as far as can be said without a lock; `None` if there are none.
    fn unwanted(files: &QueueFiles, store: &BlobStore, limit: Timestamp, refresh: bool) -> Result<Option<Self>, Error> {
        // Without a queue there is no telling what is still wanted: perhaps the path is wrong.
        if !files.queue.exists() {
            return Ok(None);
        }
        let mut old = Self::list(store, limit)?;
        if old.is_any(State::Unwanted) {
            old.spare_what_files_refer_to(files)?;
        }
        if old.is_any(State::Unwanted) {
            old.spare_what_blobs_refer_to(store, Which::AllThatStay, refresh)?;
        }
        Ok(old.is_any(State::Unwanted).then_some(old))
    }

    fn list(store: &BlobStore, limit: Timestamp) -> Result<Self, Error> {
        let mut blobs = Vec::new();
        store.for_each(|blob| {
            if blob.modified < limit {
                blobs.push((blob.digest.prefix(), State::Unwanted));
            }
            Ok(())
        })?;
        blobs.sort_unstable_by_key(|(prefix, _)| *prefix);
        Ok(Self { blobs })
    }

    /// `None` if it isn't old.
    fn state(&mut self, digest: &Digest) -> Option<&mut State> {
        let prefix = digest.prefix();
        let index = self.blobs.partition_point(|(other, _)| *other < prefix);
        self.blobs.get_mut(index).filter(|(other, _)| *other == prefix).map(|(_, state)| state)
    }

    fn is_any(&self, state: State) -> bool {
        self.blobs.iter().any(|(_, other)| *other == state)
    }

    /// Spares a blob, and says whether it was unwanted.
    fn spare(&mut self, digest: &Digest) -> bool {
        let state = self.state(digest).filter(|state| **state == State::Unwanted);
        state.map(|state| *state = State::Spared).is_some()
    }

    fn spare_what_files_refer_to(&mut self, files: &QueueFiles) -> Result<(), Error> {
        let real = fs::canonicalize(&files.queue).map_err(|error| unreadable(&files.queue, error))?;
        let mut directories = vec![directory_of(&files.queue), directory_of(&real)];
        directories.dedup();
        for directory in directories {
            for entry in fs::read_dir(&directory).map_err(|error| unreadable(&directory, error))? {
                let path = entry.map_err(|error| unreadable(&directory, error))?.path();
                // A link may be another queue that shares the store, or lead nowhere.
                let metadata = match fs::metadata(&path) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    metadata => metadata.map_err(|error| unreadable(&path, error))?,
                };
                if metadata.is_file() && metadata.len() > 0 {
                    match File::open(&path) {
                        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                        file => for_each_reference(file, &path, |digest| {
                            self.spare(&digest);
                            Ok(())
                        })?,
                    }
                }
            }
        }
        Ok(())
    }

    /// Spares what blobs refer to, and what these refer to, and so on. With `refresh` it is no longer old, so that this need not be found out
    /// again before long.
    fn spare_what_blobs_refer_to(&mut self, store: &BlobStore, mut which: Which, refresh: bool) -> Result<(), Error> {
        loop {
            store.for_each(|blob| {
                let looks = match self.state(&blob.digest) {
                    Some(State::Unwanted) => false,
                    Some(state @ State::Spared) => {
                        *state = State::Wanted;
                        true
                    }
                    Some(State::Wanted) | None => which == Which::AllThatStay,
                };
                let opened = if looks { store.open_blob(&blob.digest)? } else { None };
                opened.map_or(Ok(()), |(file, _)| {
                    for_each_reference(Ok(file), &store.path_of(&blob.digest), |digest| {
                        if self.spare(&digest) && refresh { store.refresh(&digest) } else { Ok(()) }
                    })
                })
            })?;
            if !self.is_any(State::Spared) {
                return Ok(());
            }
            which = Which::NewlySpared;
        }
    }

    /// Passes on the blobs that are unwanted and still old.
    fn for_each_unwanted(
        &mut self,
        store: &BlobStore,
        limit: Timestamp,
        mut each: impl FnMut(Blob) -> Result<(), Error>,
    ) -> Result<(), Error> {
        store.for_each(|blob| {
            let is_unwanted = self.state(&blob.digest).is_some_and(|state| *state == State::Unwanted);
            if is_unwanted && blob.modified < limit { each(blob) } else { Ok(()) }
        })
    }
}

/// Passes on the blobs that a file refers to.
fn for_each_reference(
    file: io::Result<File>,
    path: &Path,
    mut each: impl FnMut(Digest) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut file = file.map_err(|error| unreadable(path, error))?;
    let (mut references, mut buffer, mut result) = (References::default(), vec![0; BUFFER], Ok(()));
    let mut sink = |digest| {
        if result.is_ok() {
            result = each(digest);
        }
    };
    loop {
        let read = uninterrupted(|| file.read(&mut buffer)).map_err(|error| unreadable(path, error))?;
        if read == 0 {
            references.finish(&mut sink);
            return result;
        }
        references.push(&buffer[..read], &mut sink);
    }
}

fn unreadable(path: &Path, error: io::Error) -> Error {
    Error::io(path, "cannot be read, and might refer to blobs, so none is removed", error)
}
