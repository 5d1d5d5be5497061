//! `handoff-exporter`: reads the queue and writes `handoff.prom`.

use std::process::ExitCode;
use std::time::Instant;

use clap::builder::FalseyValueParser;
use clap::error::ErrorKind as UsageError;
use clap::{Command, CommandFactory, FromArgMatches, Parser};

use super::args::{self, Blobs, Common, Limit, Names, Pricing, Textfile};
use super::exit::Exit;
use super::messages::{self, Messages};
use crate::format::summary::Parameters;
use crate::format::time::Timestamp;
use crate::metrics::{self, Health};
use crate::store::queue::{self, Reading};
use crate::store::{Error, ErrorKind, atomic_file};

const NAME: &str = "handoff-exporter";
/// The file in the textfile directory.
const FILE_NAME: &str = "handoff.prom";

/// Read the handoff queue and write its metrics for node_exporter's textfile collector
///
/// Every flag can also be set by its variable; a flag wins. An empty variable counts as not set, and 0, false, no and off
/// switch a flag without a value off.
#[derive(Debug, Parser)]
#[command(name = NAME, version, after_help = EXIT_CODES)]
struct Arguments {
    #[command(flatten)]
    common: Common,

    #[command(flatten)]
    textfile: Textfile,

    /// Print the metrics to standard output instead of writing handoff.prom
    #[arg(long, env = "HANDOFF_STDOUT", value_parser = FalseyValueParser::new())]
    stdout: bool,

    #[command(flatten)]
    names: Names,

    #[command(flatten)]
    pricing: Pricing,

    #[command(flatten)]
    limit: Limit,

    #[command(flatten)]
    blobs: Blobs,
}

const EXIT_CODES: &str = "\
Exit codes:
   0  metrics written
   2  wrong usage
  65  the price map is not valid
  74  a file can't be read or written
  75  the lock is busy, or the queue was rewritten without it: try again
After 65, 74 and 75 the metrics say handoff_exporter_success 0, if they could be written.";

/// Its command line.
pub(super) fn command() -> Command {
    Arguments::command()
}

/// Runs the tool.
#[must_use]
pub fn main() -> ExitCode {
    match parse() {
        Ok(arguments) => run(&arguments).into(),
        Err(error) => args::report(NAME, &error).into(),
    }
}

fn parse() -> Result<Arguments, clap::Error> {
    let mut matches = args::parse(Arguments::command(), std::env::args_os())?;
    let [to_directory, to_stdout] = ["textfile_dir", "stdout"].map(|id| args::is_on_command_line(&matches, id));
    if to_directory && to_stdout {
        let message = "--textfile-dir and --stdout exclude each other";
        return Err(Arguments::command().error(UsageError::ArgumentConflict, message));
    }
    let [verbose, quiet] = args::verbosity(Arguments::command(), &matches)?;
    let mut arguments = Arguments::from_arg_matches_mut(&mut matches)?;
    // What the command line says wins over a variable that says the opposite.
    arguments.stdout &= !to_directory;
    arguments.common.prefer(verbose, quiet);
    if !arguments.stdout {
        arguments.textfile.keep_apart(FILE_NAME, &arguments.common, Arguments::command())?;
    }
    Ok(arguments)
}

fn run(arguments: &Arguments) -> Exit {
    let start = Instant::now();
    let now = arguments.common.now();
    let messages = Messages::new(NAME, arguments.common.level());
    let mut exit = Exit::Done;

    let reading = read(arguments, now).inspect_err(|error| {
        messages.error(error);
        exit = error.kind().into();
    });
    if let Ok(reading) = &reading {
        for finding in &reading.findings {
            messages.warning(finding);
        }
        if let Err(error) = &reading.blobs {
            messages.error(error);
            exit = error.kind().into();
        }
    }

    let success = exit == Exit::Done;
    let last_success = match success {
        true => Some(now.as_seconds()),
        false if arguments.stdout => None,
        false => arguments.textfile.last_success(FILE_NAME, metrics::LAST_SUCCESS, &messages),
    };
    let health = Health { success, last_success, duration: start.elapsed().as_secs_f64() };
    let written = metrics::render(reading.as_ref().ok(), health)
        .map_err(|error| {
            Error::new(ErrorKind::Io, &arguments.common.queue, format!("cannot be put into metrics: {error}"))
        })
        .and_then(|text| write(arguments, text.as_bytes()));
    if let Err(error) = written {
        messages.error(&error);
        return error.kind().into();
    }
    if let Ok(reading) = &reading {
        messages.info(format_args!(
            "{}: lines: {}, bytes: {}, of which {} after the last newline may be a write in flight, {}, {:?}",
            arguments.common.queue.display(),
            reading.summary.lines,
            reading.queue_bytes,
            reading.unterminated_bytes,
            if reading.locked { "under the lock" } else { "without a lock, because there is no lock file" },
            start.elapsed()
        ));
    }
    exit
}

/// Reads all that the metrics tell of.
fn read(arguments: &Arguments, now: Timestamp) -> Result<Reading, Error> {
    let prices = arguments.pricing.read()?;
    let Names { roles, kinds } = &arguments.names;
    let (roles, kinds) = (roles.clone(), kinds.clone());
    let parameters = Parameters { now, roles, kinds, prices, offload: arguments.limit.rule() };
    let files = arguments.common.files(arguments.blobs.dir());
    let mut reading = queue::read(&files, &arguments.common.read_options(), &parameters)?;
    reading.summary.seed();
    Ok(reading)
}

/// Puts the metrics where they are wanted.
fn write(arguments: &Arguments, text: &[u8]) -> Result<(), Error> {
    if !arguments.stdout {
        return atomic_file::replace(&arguments.textfile.textfile_dir, FILE_NAME, text);
    }
    messages::print(text)
}
