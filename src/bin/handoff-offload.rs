//! Moves oversized values into the blob store. See `handoff-offload --help`.

use std::process::ExitCode;

fn main() -> ExitCode {
    queue_format::cli::offload::main()
}
