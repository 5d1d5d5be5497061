//! The JSONL handoff queue of LLM agents: its on-disk format and the safe operations on it.
//!
//! Layers, each using only those below it:
//!
//! * `cli`: command lines, messages and exit codes (feature `cli`);
//! * [`metrics`]: a reading of the queue as Prometheus text;
//! * [`store`]: files and locks;
//! * [`format`](mod@format): bytes in, values out. No file, clock, environment or output.
//!
//! The format itself follows.
#![doc = include_str!("FORMAT.md")]

#[cfg(feature = "cli")]
pub mod cli;
pub mod format;
pub mod metrics;
pub mod store;
