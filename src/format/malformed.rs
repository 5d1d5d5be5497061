//! What is wrong with a line that is no part of the queue.

use std::borrow::Cow;

/// Why a line is no part of the queue.
#[derive(Debug, PartialEq, Eq)]
pub struct Malformed {
    /// The class of the fault.
    pub reason: Reason,
    /// The fault, in words.
    pub detail: Cow<'static, str>,
    /// Whether it is, or was, a ledger: without it nobody can tell what was removed, so that no tool may rewrite the queue.
    pub is_ledger: bool,
}

impl Malformed {
    pub(super) fn new(reason: Reason, detail: impl Into<Cow<'static, str>>) -> Self {
        Self { reason, detail: detail.into(), is_ledger: false }
    }

    pub(super) fn ledger(reason: Reason, detail: impl Into<Cow<'static, str>>) -> Self {
        Self { is_ledger: true, ..Self::new(reason, detail) }
    }
}

/// The classes of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// Longer than the limit.
    TooLong,
    /// Not UTF-8.
    NotUtf8,
    /// Not one JSON value.
    NotJson,
    /// Of a protocol version that this crate doesn't know.
    UnsupportedVersion,
    /// JSON, but no envelope.
    NotAnEnvelope,
}

impl Reason {
    /// Every reason.
    pub const ALL: [Self; 5] =
        [Self::TooLong, Self::NotUtf8, Self::NotJson, Self::UnsupportedVersion, Self::NotAnEnvelope];

    /// Its name, as in metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::TooLong => "too_long",
            Self::NotUtf8 => "not_utf8",
            Self::NotJson => "not_json",
            Self::UnsupportedVersion => "unsupported_version",
            Self::NotAnEnvelope => "not_an_envelope",
        }
    }
}
