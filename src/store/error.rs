//! The one error of this layer.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// What went wrong, and with which file.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    path: PathBuf,
    what: String,
    source: Option<io::Error>,
}

/// The classes of errors, one for each thing that a caller would do about them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// A file can't be read or written.
    Io,
    /// Somebody else is at it: try again.
    Busy,
    /// A file holds what it must not.
    BadData,
}

impl Error {
    /// A file can't be read or written, because of `source`.
    pub fn io(path: &Path, what: impl Into<String>, source: io::Error) -> Self {
        Self { kind: ErrorKind::Io, path: path.to_owned(), what: what.into(), source: Some(source) }
    }

    /// An error without a deeper cause.
    pub fn new(kind: ErrorKind, path: &Path, what: impl Into<String>) -> Self {
        Self { kind, path: path.to_owned(), what: what.into(), source: None }
    }

    /// The class of the error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.what)?;
        let Some(source) = &self.source else { return Ok(()) };
        write!(f, ": {source}")?;
        match source.kind() {
            io::ErrorKind::PermissionDenied => f.write_str(": give the user that this runs as access to it"),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => f.write_str(": make room for it"),
            _ => Ok(()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| source as &(dyn std::error::Error + 'static))
    }
}
