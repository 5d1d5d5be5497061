//! What all command lines share.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use bytesize::ByteSize;
use clap::builder::FalseyValueParser;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command};

use super::exit::Exit;
use super::messages::{Level, Messages};
use crate::format::labels;
use crate::format::time::Timestamp;
use crate::store::queue::{QueueFiles, ReadOptions};

/// The arguments of every tool.
#[derive(Debug, Args)]
pub(super) struct Common {
    /// The queue
    #[arg(long, env = "HANDOFF_QUEUE", value_name = "PATH", default_value = "/var/lib/agents/queue.jsonl")]
    pub(super) queue: PathBuf,

    /// The lock file [default: beside the queue, <stem>.lock]
    #[arg(long, env = "HANDOFF_LOCK", value_name = "PATH")]
    lock: Option<PathBuf>,

    /// How long to wait for the lock before giving up with exit code 75, as in 500ms or 1m
    #[arg(long, env = "HANDOFF_LOCK_TIMEOUT", value_name = "TIME", default_value = "10s", value_parser = humantime::parse_duration)]
    lock_timeout: Duration,

    /// Count longer lines as malformed, without reading them into memory; in bytes, or as in 512KiB
    #[arg(long, env = "HANDOFF_MAX_LINE", value_name = "SIZE", default_value = "64MiB", value_parser = size)]
    max_line: ByteSize,

    /// Say what was read
    #[arg(short, long, env = "HANDOFF_VERBOSE", value_parser = FalseyValueParser::new())]
    verbose: bool,

    /// Say nothing but errors
    #[arg(short, long, env = "HANDOFF_QUIET", value_parser = FalseyValueParser::new())]
    quiet: bool,

    /// Take this for the present time
    #[arg(long, env = "HANDOFF_NOW", value_name = "RFC3339", hide = true, value_parser = time)]
    now: Option<Timestamp>,
}

impl Common {
    pub(super) fn files(&self, blobs: Option<PathBuf>) -> QueueFiles {
        let mut files = QueueFiles::beside(self.queue.clone());
        if let Some(lock) = &self.lock {
            files.lock.clone_from(lock);
        }
        if let Some(blobs) = blobs {
            files.blobs = blobs;
        }
        files
    }

    pub(super) fn read_options(&self) -> ReadOptions {
        ReadOptions {
            lock_timeout: self.lock_timeout,
            max_line: usize::try_from(self.max_line.as_u64()).unwrap_or(usize::MAX),
            ..ReadOptions::default()
        }
    }

    /// Resolves `verbose` and `quiet` where one stands on the command line and the other is a variable.
    pub(super) fn prefer(&mut self, verbose: bool, quiet: bool) {
        self.verbose &= !quiet;
        self.quiet &= !verbose;
    }

    pub(super) fn level(&self) -> Level {
        match (self.quiet, self.verbose) {
            (true, _) => Level::Error,
            (false, false) => Level::Warning,
            (false, true) => Level::Info,
        }
    }

    /// The present time, to be asked for once a run.
    #[expect(clippy::disallowed_methods, reason = "this is the one place")]
    pub(super) fn now(&self) -> Timestamp {
        self.now.unwrap_or_else(|| {
            let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            Timestamp::from_micros(i64::try_from(since_epoch.as_micros()).unwrap_or(i64::MAX))
        })
    }
}

/// Parses the command line; a variable that is set but empty counts as not set, as people expect of a file of them.
///
/// # Errors
/// What clap says, help and version included.
#[expect(clippy::disallowed_methods, reason = "clap reads these variables too")]
pub(super) fn parse(command: Command, args: impl IntoIterator<Item = OsString>) -> Result<ArgMatches, clap::Error> {
    command
        .mut_args(|arg| {
            let is_empty =
                arg.get_env().is_some_and(|name| std::env::var_os(name).is_some_and(|value| value.is_empty()));
            if is_empty { arg.env(None::<&str>) } else { arg }
        })
        .try_get_matches_from(args)
}

/// Prints what clap has to say: help and version as they are, an error as one message.
pub(super) fn report(program: &'static str, error: &clap::Error) -> Exit {
    if !error.use_stderr() {
        // Who reads only the beginning has got what they wanted.
        drop(error.print());
        return Exit::Done;
    }
    let text = error.render().to_string();
    let first = text.lines().next().unwrap_or_default();
    Messages::new(program, Level::Error).error(format_args!("{}: see --help", first.trim_start_matches("error: ")));
    Exit::Usage
}

/// Whether an argument stands on the command line itself, which wins over variables.
pub(super) fn is_on_command_line(matches: &ArgMatches, id: &str) -> bool {
    matches.value_source(id) == Some(ValueSource::CommandLine)
}

/// A role's or kind's name.
pub(super) fn name(text: &str) -> Result<String, String> {
    let name = text.trim();
    if name.is_empty() {
        return Err("a name is empty".to_owned());
    }
    if name.len() > labels::MAX_BYTES || name.chars().any(char::is_control) {
        return Err(format!("a name has at most {} bytes and no control characters", labels::MAX_BYTES));
    }
    Ok(name.to_owned())
}

fn size(text: &str) -> Result<ByteSize, String> {
    text.parse().map_err(|_| "not a size like 64MiB".to_owned())
}

fn time(text: &str) -> Result<Timestamp, String> {
    Timestamp::from_rfc3339(text).ok_or_else(|| "not a time like 2026-11-29T10:00:00Z".to_owned())
}
