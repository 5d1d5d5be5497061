//! The one error of this layer.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use super::files::Finding;

/// What went wrong, and with which file.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    path: PathBuf,
    line: Option<u64>,
    what: String,
    source: Option<io::Error>,
    note: Option<&'static str>,
    advice: Option<&'static str>,
}

/// The classes of errors, one for each thing that a caller would do about them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// A file can't be read or written.
    Io,
    /// Somebody else is at it: try again.
    Busy,
    /// A file holds what it must not, or what was given is not valid.
    BadData,
    /// A record is not in a state for what is to be done to it, or who wants that must not.
    Refused,
}

impl Error {
    /// A file can't be read or written, because of `source`.
    pub fn io(path: &Path, what: impl Into<String>, source: io::Error) -> Self {
        Self { source: Some(source), ..Self::new(ErrorKind::Io, path, what) }
    }

    /// An error without a deeper cause.
    pub fn new(kind: ErrorKind, path: &Path, what: impl Into<String>) -> Self {
        Self { kind, path: path.to_owned(), line: None, what: what.into(), source: None, note: None, advice: None }
    }

    /// The same with what to do about it.
    #[must_use]
    pub fn advise(self, advice: &'static str) -> Self {
        Self { advice: Some(advice), ..self }
    }

    /// The same with what has been done all the same. The first to be noted counts.
    #[must_use]
    pub fn note(self, note: &'static str) -> Self {
        Self { note: self.note.or(Some(note)), ..self }
    }

    /// The same with the line, from 1.
    #[must_use]
    pub fn at_line(self, line: u64) -> Self {
        Self { line: Some(line), ..self }
    }

    /// The same as something that somebody should look at.
    pub(super) fn into_finding(self) -> Finding {
        let message = self.message();
        Finding { path: self.path, line: self.line, message }
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The class of the error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl Error {
    /// All of it but the place.
    fn message(&self) -> String {
        let source = self.source.as_ref().map(ToString::to_string);
        let by_cause = |source: &io::Error| match source.kind() {
            io::ErrorKind::PermissionDenied => Some("give this user access to it"),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Some("make room for it"),
            io::ErrorKind::ReadOnlyFilesystem => Some("mount its file system for writing"),
            io::ErrorKind::FileTooLarge => Some("raise the limit on the size of files, ulimit -f"),
            _ => None,
        };
        let advice = self.advice.or_else(|| self.source.as_ref().and_then(by_cause));
        let more = self.note.into_iter().chain(advice).map(str::to_owned);
        [self.what.clone()].into_iter().chain(source).chain(more).collect::<Vec<_>>().join(": ")
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.path.display())?;
        if let Some(line) = self.line {
            write!(f, "{line}:")?;
        }
        write!(f, " {}", self.message())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| source as &(dyn std::error::Error + 'static))
    }
}
