//! Exit codes, one table for all tools.

use std::process::ExitCode;

use crate::store::ErrorKind;

/// How a tool ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Exit {
    Done = 0,
    /// A valid answer that is no.
    No = 1,
    Usage = 2,
    BadData = 65,
    Io = 74,
    Busy = 75,
}

impl From<ErrorKind> for Exit {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::Io => Self::Io,
            ErrorKind::Busy => Self::Busy,
            ErrorKind::BadData | ErrorKind::Refused => Self::BadData,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_codes_are_those_of_sysexits() {
        assert_eq!(
            [Exit::Done, Exit::No, Exit::Usage, Exit::BadData, Exit::Io, Exit::Busy].map(|exit| exit as u8),
            [0, 1, 2, 65, 74, 75]
        );
    }
}
