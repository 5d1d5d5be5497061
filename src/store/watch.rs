//! Whether a queue has changed, without reading it.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

use super::Error;
use super::files::{Generation, OpenQueue, QueueFiles, identity};

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
