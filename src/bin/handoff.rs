//! What people and agents do with the queue. See `handoff --help`.

use std::process::ExitCode;

fn main() -> ExitCode {
    queue_format::cli::handoff::main()
}
