//! Appending a line to the queue beside others who may do so without the lock.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::atomic_file::Temporary;
use super::files::{OpenQueue, QueueFiles, identity, read_error};
use super::lock::{self, ExclusiveLock};
use super::{Error, ErrorKind, attributes, directory_of};
use crate::format::envelope::{self, Line};

/// What came of an attempt to append.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Appended {
    /// The line is in the queue and on the disk.
    Durable,
    /// It must be replaced instead: its last line is not terminated, and somebody may still be writing it, or it has a second name.
    MustReplace,
    /// Somebody has begun a line at the same moment, so that ours is part of that one now.
    Glued,
}

/// Appends a line, which ends with `\n`, in one write, and reads it back. If there is no queue, one is made of it.
///
/// # Errors
/// If that fails. The message says whether the line may be in the queue all the same.
pub(super) fn append(files: &QueueFiles, lock: &ExclusiveLock, line: &[u8]) -> Result<Appended, Error> {
    let queue = loop {
        match OpenQueue::open(files)? {
            Some(queue) => break queue,
            None if create(files, line)? => return Ok(Appended::Durable),
            None => {} // somebody has just made one
        }
    };
    queue.require_one_lock(files)?;
    let path = &queue.path;
    let failed = |error| Error::io(path, "cannot be appended to, and is left as it was", error);
    let file = OpenOptions::new().read(true).append(true).open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    let size = metadata.len();
    // A second name is a dead run's, which a replacement removes, or a reason to refuse. So is a lock that is the queue.
    let is_lock = fs::metadata(&files.lock).is_ok_and(|lock| identity(&lock) == identity(&metadata));
    if metadata.nlink() != 1 || is_lock {
        return Ok(Appended::MustReplace);
    }
    if !is_line_start(&file, size).map_err(|error| read_error(path, error))? {
        return Ok(Appended::MustReplace);
    }
    reserve(&file, size, line.len() as u64).map_err(failed)?;

    let end = match (&file).write(line) {
        Ok(written) if written == line.len() => io::Seek::stream_position(&mut &file).map_err(failed)?,
        Ok(_) => {
            let error = Error::io(path, "could be appended to only in part", io::ErrorKind::WriteZero.into());
            return Err(error.note("its last line is torn").advise("make room: the next `handoff put` sets it apart"));
        }
        Err(error) if error.kind() == io::ErrorKind::Interrupted => {
            return Err(Error::new(ErrorKind::Busy, path, "was not appended to: a signal came: try again"));
        }
        Err(error) => return Err(failed(error)),
    };
    let unsure = |error| Error::io(path, "cannot be read back or flushed to disk", error).note(MAY_BE_THERE);
    let start = end - line.len() as u64;
    if !reads_as(&file, start, line).map_err(unsure)? {
        let changed =
            Error::new(ErrorKind::Io, path, "reads differently from what was appended: somebody rewrites it in place");
        return Err(changed.note(MAY_BE_THERE));
    }
    flush(&file, &queue).map_err(|error| error.note(MAY_BE_THERE))?;
    if !lock.is_effective()? || !lock::is_still_at(&file, path)? {
        let what = "was replaced without the lock while a line was appended";
        return Err(Error::new(ErrorKind::Io, path, what).note(MAY_BE_THERE));
    }
    let is_whole = is_line_start(&file, start).and_then(|is| Ok(is || is_blank(&file, size..start)?));
    Ok(if is_whole.map_err(unsure)? { Appended::Durable } else { Appended::Glued })
}

/// Makes sure that what the queue's file holds is on the disk, under its name too: whoever has given it that may have been killed before.
///
/// # Errors
/// If that fails. It must not be tried again: the kernel may have forgotten what it could not write.
pub(super) fn flush(file: &File, queue: &OpenQueue) -> Result<(), Error> {
    let OpenQueue { path, directory, .. } = queue;
    let failed = |path, error| Error::io(path, "cannot be flushed to disk", error);
    file.sync_all().map_err(|error| failed(path, error))?;
    File::open(directory).and_then(|directory| directory.sync_all()).map_err(|error| failed(directory, error))
}

const MAY_BE_THERE: &str = "the new line may be in the queue or not: look with `handoff list`";

/// Whether a line may begin here.
fn is_line_start(file: &File, at: u64) -> io::Result<bool> {
    let mut before = [b'\n'];
    if at > 0 {
        file.read_exact_at(&mut before, at - 1)?;
    }
    Ok(before == *b"\n")
}

/// Whether what somebody has begun here is no more than a blank line, which does no harm to what follows on it.
fn is_blank(file: &File, range: Range<u64>) -> io::Result<bool> {
    let mut begun = vec![0; usize::try_from(range.end.saturating_sub(range.start)).unwrap_or_default()];
    file.read_exact_at(&mut begun, range.start)?;
    let begun = begun.rsplit(|byte| *byte == b'\n').next().filter(|begun| !begun.is_empty());
    Ok(begun.is_some_and(|begun| matches!(envelope::parse(begun), Ok(Line::Blank))))
}

fn reads_as(file: &File, start: u64, line: &[u8]) -> io::Result<bool> {
    let mut written = vec![0; line.len()];
    file.read_exact_at(&mut written, start)?;
    Ok(written == line)
}

/// Makes sure that there is room for the whole line: nobody could take half of one back, for others may have appended to it.
fn reserve(file: &File, size: u64, length: u64) -> io::Result<()> {
    let limit = getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX);
    if size.saturating_add(length) > limit {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    match fallocate(file, FallocateFlags::KEEP_SIZE, size, length) {
        Err(error @ (Errno::NOSPC | Errno::DQUOT | Errno::FBIG | Errno::IO)) => Err(error.into()),
        // Not every file system can do that.
        _ => Ok(()),
    }
}

/// Makes a queue of one line, unless there is one by now, and says whether it did.
fn create(files: &QueueFiles, line: &[u8]) -> Result<bool, Error> {
    let failed = |error| Error::io(&files.queue, "cannot be created", error);
    let directory = directory_of(&files.queue);
    let name = files.queue.file_name().ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?;
    let temporary = Temporary::beside(&directory, name).map_err(failed)?;
    temporary.file().write_all_at(line, 0).map_err(failed)?;
    if !reads_as(temporary.file(), 0, line).map_err(failed)? {
        return Err(failed(io::Error::other("what was written reads differently")));
    }
    let metadata = fs::metadata(&directory).map_err(failed)?;
    attributes::adopt(temporary.file(), &metadata).map_err(failed)?;
    temporary.file().sync_all().map_err(failed)?;
    match temporary.persist_new(&files.queue) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(false),
        made => made.map_err(failed)?,
    }
    let synced = File::open(&directory).and_then(|directory| directory.sync_all());
    synced.map_err(|error| Error::io(&directory, "cannot be flushed to disk", error).note(MAY_BE_THERE))?;
    Ok(true)
}
