//! Files and locks: the queue read consistently beside its writers, and files replaced whole.
//!
//! *Architecture invariant:* what is wrong with a file comes back as an [`Error`] or a [`queue::Finding`] that names it; nothing
//! here prints or ends the process.

pub mod atomic_file;
pub mod blob;
mod error;
pub mod lock;
pub mod queue;

use std::fs::{self, File};
use std::io;
use std::path::Path;

pub use error::{Error, ErrorKind};

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
    match open() {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => match fs::symlink_metadata(path) {
            Ok(_) => {
                Err(Error::io(path, "cannot be opened: it is a symbolic link to a file that does not exist", error))
            }
            Err(_) => Ok(None),
        },
        Err(error) => Err(Error::io(path, "cannot be opened", error)),
    }
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
