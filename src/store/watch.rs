//! What a worker watches: whether the queue has changed, without reading it, who holds records of a role, and whether
//! any can be changed.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

use super::files::{Generation, OpenQueue, QueueFiles, identity};
use super::records::{Each, Filter, Found, look_at_queue};
use super::scan::ReadOptions;
use super::{Error, lock};
use crate::format::envelope::Status;
use crate::format::owner::Owner;

/// What a queue and its generations looked like at one moment. If they look the same later, nothing has been written meanwhile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Look(Vec<FileLook>);

/// Device and inode, size, and time of modification.
type FileLook = ((u64, u64), u64, (i64, i64));

/// Looks at a queue.
///
/// # Errors
/// If it can't be opened, or its directory can't be listed.
pub fn look(files: &QueueFiles) -> Result<Look, Error> {
    files.require_directory()?;
    let Some(queue) = OpenQueue::open(files)? else { return Ok(Look(Vec::new())) };
    let generation = |generation: &Generation| generation.path.symlink_metadata().ok();
    let generations = queue.generations.iter().filter_map(generation);
    Ok(Look(generations.chain([queue.metadata]).map(|metadata| of(&metadata)).collect()))
}

fn of(metadata: &Metadata) -> FileLook {
    (identity(metadata), metadata.len(), (metadata.mtime(), metadata.mtime_nsec()))
}

/// Who holds the running records of a role; `None` for each record that doesn't say so.
///
/// # Errors
/// If the queue can't be read, or the lock can't be had in time.
pub fn holders(files: &QueueFiles, options: &ReadOptions, role: &str) -> Result<Vec<Option<Owner>>, Error> {
    files.require_directory()?;
    let each: Each<'_, Option<Owner>> = &|record, place, found| {
        if record.to == role && record.status == Status::Running {
            found.push(Found { place, what: record.more().owner.and_then(Owner::read) });
        }
    };
    let filter = Filter::all(&[Status::Running.as_str(), role]);
    let read = || look_at_queue(files, options, &filter, each);
    let (looked, _) = lock::shared(&files.lock, options.lock_timeout, read)?;
    Ok(looked.into_iter().flat_map(|looked| looked.found).map(|found| found.what).collect())
}

/// Makes sure that the ledger can be read, without which nothing can be changed.
///
/// # Errors
/// If it can't, or the queue can't, or the lock can't be had in time.
pub fn require_ledger(files: &QueueFiles, options: &ReadOptions) -> Result<(), Error> {
    let read = || match look_at_queue::<()>(files, options, &Filter::all(&["ledger"]), &|_, _, _| {})? {
        Some(looked) => looked.into_plan(files, &[], &[], &[]).map(drop),
        None => Ok(()),
    };
    lock::shared(&files.lock, options.lock_timeout, read).map(|((), _)| ())
}
