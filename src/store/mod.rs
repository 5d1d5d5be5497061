//! Files and locks: the queue read consistently beside its writers, and files replaced whole.
//!
//! *Architecture invariant:* what is wrong with a file comes back as an [`Error`] or a [`files::Finding`] that names it; nothing
//! here prints or ends the process.

mod append;
pub mod atomic_file;
mod attributes;
pub mod blob;
pub mod blob_check;
mod blob_writer;
pub mod check;
pub mod client;
pub mod compact;
mod error;
pub mod files;
mod lease;
mod ledger_lines;
mod lock;
pub mod offload;
pub mod process;
pub mod prune;
pub mod put;
pub mod quarantine;
pub mod queue;
pub mod read;
mod records;
mod replace;
pub mod scan;
pub mod unannounced;
pub mod watch;

use std::fs::{self, File};
use std::io;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, fadvise};

pub use error::{Error, ErrorKind};
pub use replace::Rewritten;

use crate::format::lines::{LineSplitter, RawLine};
use crate::format::summary::MalformedLine;

/// Opens a regular file for reading; `None` if there is none.
///
/// Anything else than a regular file is an error, because opening a FIFO could block for ever.
pub(crate) fn open_regular(path: &Path) -> Result<Option<File>, Error> {
    let open = || -> io::Result<File> {
        let metadata = fs::metadata(path)?;
        if metadata.is_dir() {
            return Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a directory, not a file"));
        }
        if !metadata.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
        }
        File::open(path)
    };
    loop {
        let error = match open() {
            Ok(file) => return Ok(Some(file)),
            Err(error) => error,
        };
        if error.kind() != io::ErrorKind::NotFound {
            return Err(Error::io(path, "cannot be opened", error));
        }
        match fs::symlink_metadata(path) {
            Ok(metadata) if metadata.is_symlink() => {
                return Err(Error::io(
                    path,
                    "cannot be opened: it is a symbolic link to a file that is missing",
                    error,
                ));
            }
            Ok(_) => {} // it has just been made
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::io(path, "cannot be examined", error)),
        }
    }
}

/// Reads a regular file of at most `limit` bytes whole; `None` if there is none.
///
/// # Errors
/// If it can't be read, or is larger.
pub fn read_regular(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, Error> {
    let Some(file) = open_regular(path)? else { return Ok(None) };
    let mut contents = Vec::new();
    io::Read::read_to_end(&mut io::Read::take(file, limit.saturating_add(1)), &mut contents)
        .map_err(|error| Error::io(path, "cannot be read", error))?;
    if contents.len() as u64 > limit {
        return Err(Error::new(ErrorKind::BadData, path, format!("has more than {limit} bytes: it can't be right")));
    }
    Ok(Some(contents))
}

/// The last line of a regular file that begins with `prefix`, of lines of up to a kilobyte; `None` if there is none.
///
/// # Errors
/// If the file can't be read.
pub fn find_line(path: &Path, prefix: &str) -> Result<Option<String>, Error> {
    let Some(mut file) = open_regular(path)? else { return Ok(None) };
    let mut found = None;
    let mut splitter = LineSplitter::new(1024);
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let read = uninterrupted(|| io::Read::read(&mut file, &mut buffer));
        let read = read.map_err(|error| Error::io(path, "cannot be read", error))?;
        if read == 0 {
            return Ok(found);
        }
        splitter.push(&buffer[..read], |line| {
            if let RawLine::Whole(line) = line
                && line.starts_with(prefix.as_bytes())
            {
                found = Some(String::from_utf8_lossy(line).into_owned());
            }
        });
    }
}

/// Says that nothing may be rewritten, because nobody could tell any more what was removed.
pub(crate) fn unreadable_ledger(queue: &Path, fault: &MalformedLine) -> Error {
    let what = format!("the ledger cannot be read ({}), so nothing may be rewritten", fault.malformed.detail);
    Error::new(ErrorKind::BadData, queue, what)
        .at_line(fault.line)
        .advise("mend it as the README says of a damaged ledger; without it, counters start again")
}

/// Calls `operation` until no signal interrupts it.
pub(crate) fn uninterrupted<T>(mut operation: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match operation() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Has a part of a file on its way to the disk, so that little is left to be waited for when it is flushed.
pub(crate) fn begin_write_back(file: &File, offset: u64, len: Option<NonZeroU64>) {
    // Linux starts to write back what it is told will not be needed. It is advice: should it fail, fsync does it all.
    let _ = fadvise(file, offset, len, Advice::DontNeed);
}

/// Makes sure that there is a directory at `path`.
///
/// # Errors
/// Says about `user`, the file for which the directory is wanted, that it isn't there or can't be looked at.
pub(crate) fn require_directory(path: &Path, user: &Path, what: &'static str) -> Result<(), Error> {
    let metadata = fs::metadata(path)
        .and_then(|metadata| if metadata.is_dir() { Ok(()) } else { Err(io::ErrorKind::NotADirectory.into()) });
    metadata.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            Error::io(user, what, error).advise("create the directory or correct the path")
        }
        _ => Error::io(user, what, error),
    })
}

/// The directory that `path` lies in.
pub(crate) fn directory_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}
