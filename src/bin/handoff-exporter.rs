//! Reads the queue, writes its metrics. See `handoff-exporter --help`.

use std::process::ExitCode;

fn main() -> ExitCode {
    queue_format::cli::exporter::main()
}
