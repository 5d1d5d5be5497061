//! What all command lines share.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytesize::ByteSize;
use clap::builder::FalseyValueParser;
use clap::error::ErrorKind as UsageError;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, Command};
use signal_hook::consts::SIGXFSZ;

use super::exit::Exit;
use super::messages::{self, Level, Messages};
use crate::format::labels;
use crate::format::offload::Rule;
use crate::format::spend::Prices;
use crate::format::time::Timestamp;
use crate::metrics;
use crate::store::files::QueueFiles;
use crate::store::scan::ReadOptions;
use crate::store::{Error, ErrorKind, find_line, read_regular};

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
        ReadOptions { lock_timeout: self.lock_timeout, max_line: bytes(self.max_line), ..ReadOptions::default() }
    }

    /// Resolves `verbose` and `quiet` where one stands on the command line and the other is a variable.
    pub(super) fn prefer(&mut self, verbose: bool, quiet: bool) {
        self.verbose &= !quiet;
        self.quiet &= !verbose;
    }

    pub(super) fn level(&self) -> Level {
        match (self.quiet, self.verbose) {
            (true, _) => Level::Error,
            (false, false) => Level::Notice,
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

/// The names that metrics show.
#[derive(Debug, Args)]
pub(super) struct Names {
    /// The roles that get series of their own, even without records; all others become `other`; the same for all tools
    /// [default: the first 50 that the queue shows]
    #[arg(long, env = "HANDOFF_ROLES", value_name = "NAME,…", value_delimiter = ',', value_parser = name)]
    pub(super) roles: Vec<String>,

    /// The kinds that get series of their own, even without records; all others become `other`; the same for all tools
    /// [default: the first 50 that the queue shows]
    #[arg(long, env = "HANDOFF_KINDS", value_name = "NAME,…", value_delimiter = ',', value_parser = name)]
    pub(super) kinds: Vec<String>,
}

/// Where prices come from.
#[derive(Debug, Args)]
pub(super) struct Pricing {
    /// Prices for model responses that come without their cost, as in LiteLLM's price map; the same for all tools
    #[arg(long, env = "HANDOFF_PRICES", value_name = "FILE")]
    prices: Option<PathBuf>,
}

impl Pricing {
    /// LiteLLM's price map has a good megabyte.
    const MAX_BYTES: u64 = 64 * 1024 * 1024;

    /// Reads the price map, if there is to be one.
    pub(super) fn read(&self) -> Result<Prices, Error> {
        let Some(path) = &self.prices else { return Ok(Prices::default()) };
        let json = read_regular(path, Self::MAX_BYTES)?;
        let json = json.ok_or_else(|| Error::new(ErrorKind::Io, path, "does not exist").advise("correct the path"))?;
        Prices::parse(&json).map_err(|error| Error::new(ErrorKind::BadData, path, error.to_string()))
    }
}

/// What is too large for a line.
#[derive(Debug, Args)]
pub(super) struct Limit {
    /// A value in a record with more bytes of JSON text belongs in the blob store; in bytes, or as in 8KiB; the same for all tools
    #[arg(long, env = "HANDOFF_MAX_BYTES", value_name = "SIZE", default_value = "8KiB", value_parser = size)]
    max_bytes: ByteSize,
}

impl Limit {
    pub(super) fn rule(&self) -> Rule {
        Rule { max_bytes: bytes(self.max_bytes), ..Rule::default() }
    }
}

/// Where blobs are.
#[derive(Debug, Args)]
pub(super) struct Blobs {
    /// The blob store [default: beside the queue, blob/]
    #[arg(long, env = "HANDOFF_BLOB_DIR", value_name = "DIR")]
    blob_dir: Option<PathBuf>,
}

impl Blobs {
    pub(super) fn dir(&self) -> Option<PathBuf> {
        self.blob_dir.clone()
    }
}

/// Where metrics go.
#[derive(Debug, Args)]
pub(super) struct Textfile {
    /// Write the metrics into this directory, for node_exporter's textfile collector
    #[arg(long, env = "HANDOFF_TEXTFILE_DIR", value_name = "DIR", default_value = "/var/lib/prometheus/node-exporter")]
    pub(super) textfile_dir: PathBuf,

    /// Whether somebody has said so, and not only the default does.
    #[arg(skip)]
    pub(super) is_wanted: bool,
}

impl Textfile {
    /// Makes sure that the metrics don't take the place of the queue or its lock.
    pub(super) fn keep_apart(&self, file_name: &str, common: &Common, mut command: Command) -> Result<(), clap::Error> {
        let real = |path: &Path| path.canonicalize().ok();
        let target = real(&self.textfile_dir.join(file_name));
        let files = common.files(None);
        if target.is_some() && [&files.queue, &files.lock].into_iter().any(|path| real(path) == target) {
            let message = "--textfile-dir would have the metrics replace the queue or its lock";
            return Err(command.error(UsageError::ArgumentConflict, message));
        }
        Ok(())
    }

    /// The value that a metric without labels had in the last output; `None` if there was none.
    pub(super) fn previous(&self, file_name: &str, metric: &str) -> Result<Option<f64>, Error> {
        let line = find_line(&self.textfile_dir.join(file_name), metric)?;
        Ok(line.and_then(|line| metrics::previous_value(&line, metric)))
    }

    /// When a tool last succeeded, as its last output says: 0 for never, `None` if there is no telling.
    pub(super) fn last_success(&self, file_name: &str, metric: &str, messages: &Messages) -> Option<f64> {
        const NEVER: f64 = 0.0;
        match self.previous(file_name, metric) {
            Ok(value) => Some(value.unwrap_or(NEVER)),
            Err(error) => {
                messages.warning(error);
                None
            }
        }
    }
}

/// Parses the command line; a variable that is set but empty counts as not set, as people expect of a file of them. Before, it sees to it that
/// a limit on the size of files (`ulimit -f`) is an error like others, and doesn't end the process in the middle of what it does.
///
/// # Errors
/// What clap says, help and version included.
pub(super) fn parse(command: Command, args: impl IntoIterator<Item = OsString>) -> Result<ArgMatches, clap::Error> {
    // Where that fails, it is as it was. What we start is not concerned.
    drop(signal_hook::flag::register(SIGXFSZ, Arc::default()));
    without_empty_variables(command).try_get_matches_from(args)
}

#[expect(clippy::disallowed_methods, reason = "clap reads these variables too")]
fn without_empty_variables(command: Command) -> Command {
    let is_empty = |name: &OsStr| std::env::var_os(name).is_some_and(|value| value.is_empty());
    let without = |arg: Arg| if arg.get_env().is_some_and(is_empty) { arg.env(None::<&str>) } else { arg };
    command.mut_args(without).mut_subcommands(without_empty_variables)
}

/// Prints what clap has to say: help and version as they are, an error as one message.
pub(super) fn report(program: &'static str, error: &clap::Error) -> Exit {
    if !error.use_stderr() {
        // Who reads only the beginning has got what they wanted.
        drop(error.print());
        return Exit::Done;
    }
    let text = error.render().to_string();
    if error.kind() == UsageError::DisplayHelpOnMissingArgumentOrSubcommand {
        messages::print_help(&text);
        return Exit::Usage;
    }
    // What is wrong, which may go on in further lines, without the advice after it.
    let what: Vec<&str> = text.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
    let what = what.join(" ");
    Messages::new(program, Level::Error).error(format_args!("{}: see --help", what.trim_start_matches("error: ")));
    Exit::Usage
}

/// The matches of the innermost subcommand.
pub(super) fn innermost(matches: &ArgMatches) -> &ArgMatches {
    matches.subcommand().map_or(matches, |(_, inner)| innermost(inner))
}

/// Whether `--verbose` and `--quiet` stand on the command line itself, which only one of them may.
pub(super) fn verbosity(mut command: Command, matches: &ArgMatches) -> Result<[bool; 2], clap::Error> {
    let [verbose, quiet] = ["verbose", "quiet"].map(|id| is_on_command_line(matches, id));
    if verbose && quiet {
        return Err(command.error(UsageError::ArgumentConflict, "--verbose and --quiet exclude each other"));
    }
    Ok([verbose, quiet])
}

/// Whether an argument has its default value.
pub(super) fn is_default(matches: &ArgMatches, id: &str) -> bool {
    matches.value_source(id) == Some(ValueSource::DefaultValue)
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

/// A number of ancestors. Each is looked for in the whole queue.
pub(super) fn hops(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|hops| *hops <= 100).ok_or_else(|| "not a number from 0 to 100".to_owned())
}

pub(super) fn bytes(size: ByteSize) -> usize {
    usize::try_from(size.as_u64()).unwrap_or(usize::MAX)
}

pub(super) fn size(text: &str) -> Result<ByteSize, String> {
    text.parse().map_err(|_| "not a size like 64MiB".to_owned())
}

pub(super) fn time(text: &str) -> Result<Timestamp, String> {
    Timestamp::from_rfc3339(text).ok_or_else(|| "not a time like 2026-11-29T10:00:00Z".to_owned())
}
