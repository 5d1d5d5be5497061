//! Removes old records from the queue. See `handoff-compact --help`.

use std::process::ExitCode;

fn main() -> ExitCode {
    queue_format::cli::compact::main()
}
