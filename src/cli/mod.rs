//! The command lines: arguments, messages and exit codes.
//!
//! *Architecture invariant:* this layer alone reads the time of day and the environment, prints, and decides on exit codes.

mod args;
mod child;
pub mod compact;
mod exit;
pub mod exporter;
pub mod handoff;
mod job;
mod mail;
mod messages;
mod notify;
pub mod offload;
mod relay;
mod text;

/// The command lines, for man pages and completions.
#[must_use]
pub fn commands() -> [clap::Command; 4] {
    [handoff::command(), exporter::command(), compact::command(), offload::command()]
}
