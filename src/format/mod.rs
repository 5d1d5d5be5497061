//! The queue's format, pure: bytes in, values out.
//!
//! *Architecture invariant:* nothing here opens a file, reads a clock or the environment, or prints. The
//! present time is a parameter.

pub mod blob;
pub mod cause;
pub mod draft;
pub mod envelope;
pub mod histogram;
mod json;
pub mod labels;
pub mod ledger;
pub mod lines;
pub mod malformed;
pub mod money;
pub mod offload;
pub mod outcome;
pub mod owner;
pub mod pretty;
pub mod retention;
pub mod spend;
pub mod summary;
pub mod tally;
pub mod time;
pub mod transition;
