//! `handoff`: what people and agents do with the queue. One module a verb.

mod blob;

use std::process::ExitCode;

use clap::builder::FalseyValueParser;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use super::args::{self, Common};
use super::exit::Exit;
use super::messages::Messages;
use crate::store::Error;
use crate::store::files::QueueFiles;

const NAME: &str = "handoff";

/// Work with the handoff queue
///
/// Every flag can also be set by its variable; a flag wins. An empty variable counts as not set, and 0, false, no and off
/// switch a flag without a value off.
#[derive(Debug, Parser)]
#[command(name = NAME, version, after_help = EXIT_CODES)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Look at the blobs that handles in the queue stand for
    #[command(subcommand)]
    Blob(blob::Blobs),
}

impl Command {
    fn place_mut(&mut self) -> &mut Place {
        match self {
            Self::Blob(command) => command.place_mut(),
        }
    }

    fn run(&self) -> Result<Exit, Error> {
        match self {
            Self::Blob(command) => command.run(),
        }
    }
}

#[derive(Debug, Args)]
struct Place {
    #[command(flatten)]
    common: Common,

    #[command(flatten)]
    blobs: args::Blobs,
}

impl Place {
    fn files(&self) -> QueueFiles {
        self.common.files(self.blobs.dir())
    }

    fn messages(&self) -> Messages {
        Messages::new(NAME, self.common.level())
    }

    /// Without a queue there is nothing to compare a store with, and most likely another is meant.
    fn warn_without_queue(&self, has_queue: bool) {
        if !has_queue {
            let queue = self.common.queue.display();
            self.messages().warning(format_args!("{queue}: does not exist: if it should, correct the path"));
        }
    }
}

#[derive(Debug, Args)]
struct Output {
    /// Print JSON
    #[arg(long, env = "HANDOFF_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
}

const EXIT_CODES: &str = "\
Exit codes:
   0  done
   1  a check has found problems
   2  wrong usage
  65  a blob is damaged
  74  a file can't be read or written, or isn't there
  75  the lock is busy, or the queue was rewritten without it: try again";

/// Runs the tool.
#[must_use]
pub fn main() -> ExitCode {
    match parse() {
        Ok(arguments) => run(arguments).into(),
        Err(error) => args::report(NAME, &error).into(),
    }
}

fn parse() -> Result<Arguments, clap::Error> {
    let mut matches = args::parse(Arguments::command(), std::env::args_os())?;
    let [verbose, quiet] = args::verbosity(Arguments::command(), args::innermost(&matches))?;
    let mut arguments = Arguments::from_arg_matches_mut(&mut matches)?;
    arguments.command.place_mut().common.prefer(verbose, quiet);
    Ok(arguments)
}

fn run(mut arguments: Arguments) -> Exit {
    let messages = arguments.command.place_mut().messages();
    arguments.command.run().unwrap_or_else(|error| {
        messages.error(&error);
        error.kind().into()
    })
}
