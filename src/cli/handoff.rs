//! `handoff`: what people and agents do with the queue.

use std::fmt::Write;
use std::process::ExitCode;

use clap::builder::FalseyValueParser;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use serde_json::{Value, json};

use super::args::{self, Blobs, Common};
use super::exit::Exit;
use super::job::{count, size};
use super::messages::{self, Messages};
use crate::format::blob::Digest;
use crate::format::time::Timestamp;
use crate::store::blob::{Blob, BlobStore};
use crate::store::blob_check::{self, Forged, Missing, Problems, Stats};
use crate::store::files::QueueFiles;
use crate::store::{Error, ErrorKind};

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
    Blob(BlobCommand),
}

#[derive(Debug, Subcommand)]
enum BlobCommand {
    /// Print a blob, and verify it while it is printed
    #[command(
        after_help = "Example: handoff blob cat blob/ab/abcd… | head\nExit codes: 0 printed, 65 damaged, 74 not there"
    )]
    Cat {
        #[command(flatten)]
        place: Place,

        /// The blob: the `artifact_ref` of its handle, or its `sha256`
        #[arg(value_name = "REF|SHA256", value_parser = digest)]
        blob: Digest,
    },

    /// List blobs that are missing, corrupt or orphaned, and handles that say what isn't so
    ///
    /// Reads every blob. Orphaned blobs are harmless: handoff-offload removes them in time. One that is just being put is orphaned too,
    /// until its line is written.
    #[command(
        after_help = "Example: handoff blob check --json | jq .missing\nExit codes: 0 all is well, 1 it is not, 74 or 75 there was no telling"
    )]
    Check {
        #[command(flatten)]
        place: Place,

        #[command(flatten)]
        output: Output,
    },

    /// Say how many blobs there are, and how large
    #[command(after_help = "Example: handoff blob stats --json | jq .orphaned.bytes")]
    Stats {
        #[command(flatten)]
        place: Place,

        #[command(flatten)]
        output: Output,
    },
}

impl BlobCommand {
    fn place_mut(&mut self) -> &mut Place {
        match self {
            Self::Cat { place, .. } | Self::Check { place, .. } | Self::Stats { place, .. } => place,
        }
    }
}

#[derive(Debug, Args)]
struct Place {
    #[command(flatten)]
    common: Common,

    #[command(flatten)]
    blobs: Blobs,
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
        Ok(arguments) => run(&arguments).into(),
        Err(error) => args::report(NAME, &error).into(),
    }
}

fn parse() -> Result<Arguments, clap::Error> {
    let mut matches = args::parse(Arguments::command(), std::env::args_os())?;
    let [verbose, quiet] = args::verbosity(Arguments::command(), args::innermost(&matches))?;
    let mut arguments = Arguments::from_arg_matches_mut(&mut matches)?;
    let Command::Blob(command) = &mut arguments.command;
    command.place_mut().common.prefer(verbose, quiet);
    Ok(arguments)
}

fn run(arguments: &Arguments) -> Exit {
    let Command::Blob(command) = &arguments.command;
    let (done, place) = match command {
        BlobCommand::Cat { place, blob } => (cat(&place.files(), blob).map(|()| Exit::Done), place),
        BlobCommand::Check { place, output } => (check(place, output), place),
        BlobCommand::Stats { place, output } => (stats(place, output).map(|()| Exit::Done), place),
    };
    done.unwrap_or_else(|error| {
        place.messages().error(&error);
        error.kind().into()
    })
}

/// Prints a blob.
fn cat(files: &QueueFiles, blob: &Digest) -> Result<(), Error> {
    let store = BlobStore::open(&files.blobs)?;
    if store.read(blob, messages::print)?.is_some() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Io, &store.path_of(blob), "is not there")
        .advise("if this is the right store (--queue, --blob-dir), restore it from a backup; handoff blob check tells what refers to it"))
}

fn check(place: &Place, output: &Output) -> Result<Exit, Error> {
    let files = place.files();
    let problems = blob_check::check(&files, &place.common.read_options())?;
    messages::print(if output.json { problems_as_json(&problems) } else { problems_as_text(&problems) }.as_bytes())?;
    place.warn_without_queue(problems.has_queue);
    let blobs = count(problems.usage.objects, "blob");
    place.messages().notice(format_args!(
        "{}: {blobs}, {}: {} missing, {} corrupt, {} orphaned; {} forged",
        files.blobs.display(),
        size(problems.usage.bytes),
        problems.missing.len(),
        problems.corrupt.len(),
        problems.orphaned.len(),
        count(problems.forged.len() as u64, "handle"),
    ));
    Ok(if problems.is_empty() { Exit::Done } else { Exit::No })
}

fn problems_as_text(problems: &Problems) -> String {
    let mut text = String::new();
    for Missing { digest, path, line } in &problems.missing {
        let place = line.map_or_else(String::new, |line| format!(":{line}"));
        let _ = writeln!(text, "missing {}: {}{place} refers to it", digest.reference(), path.display());
    }
    for (_, what) in &problems.corrupt {
        let _ = writeln!(text, "corrupt {what}");
    }
    for Forged { path, line, id, what } in &problems.forged {
        let record = id.as_ref().map_or_else(String::new, |id| format!(" record {}:", id.escape_debug()));
        let _ = writeln!(text, "forged {}:{line}:{record} {what}", path.display());
    }
    for Blob { digest, bytes, modified } in &problems.orphaned {
        let _ = writeln!(text, "orphaned {}: {}, put {modified}", digest.reference(), size(*bytes));
    }
    text
}

fn problems_as_json(problems: &Problems) -> String {
    let missing = problems.missing.iter().map(|Missing { digest, path, line }| {
        json!({ "artifact_ref": digest.reference(), "file": path.to_string_lossy(), "line": line })
    });
    let corrupt =
        problems.corrupt.iter().map(|(digest, what)| json!({ "artifact_ref": digest.reference(), "problem": what }));
    let forged = problems.forged.iter().map(|Forged { path, line, id, what }| {
        json!({ "file": path.to_string_lossy(), "line": line, "id": id.as_deref(), "problem": what })
    });
    let orphaned = problems.orphaned.iter().map(|Blob { digest, bytes, modified }| {
        json!({ "artifact_ref": digest.reference(), "bytes": bytes, "put_timestamp_seconds": modified.as_seconds() })
    });
    let json = json!({
        "objects": problems.usage.objects,
        "bytes": problems.usage.bytes,
        "missing": missing.collect::<Value>(),
        "corrupt": corrupt.collect::<Value>(),
        "forged": forged.collect::<Value>(),
        "orphaned": orphaned.collect::<Value>(),
    });
    format!("{json}\n")
}

fn stats(place: &Place, output: &Output) -> Result<(), Error> {
    let files = place.files();
    let stats = blob_check::stats(&files, &place.common.read_options())?;
    let Stats { usage, orphaned, largest_bytes, oldest, missing, has_queue } = stats;
    place.warn_without_queue(has_queue);
    if output.json {
        let json = json!({
            "store": files.blobs.to_string_lossy(),
            "objects": usage.objects,
            "bytes": usage.bytes,
            "largest_bytes": largest_bytes,
            "oldest_timestamp_seconds": oldest.map(Timestamp::as_seconds),
            "orphaned": { "objects": orphaned.objects, "bytes": orphaned.bytes },
            "missing": missing,
        });
        return messages::print(format!("{json}\n").as_bytes());
    }
    let mut text = format!("{}: {}, {}", files.blobs.display(), count(usage.objects, "blob"), size(usage.bytes));
    if let Some(oldest) = oldest {
        let _ = write!(text, ", the largest {}, the oldest from {oldest}", size(largest_bytes));
    }
    let orphans = count(orphaned.objects, "blob");
    let _ = writeln!(text, "\nnothing refers to {orphans}, {}", size(orphaned.bytes));
    let _ = writeln!(text, "missing {}", count(missing, "blob"));
    messages::print(text.as_bytes())
}

/// A blob as somebody names it.
fn digest(text: &str) -> Result<Digest, String> {
    let digest = Digest::parse_reference(text).or_else(|| Digest::parse_path(text)).or_else(|| Digest::parse(text));
    digest.ok_or_else(|| "neither blob/<aa>/<sha256> nor 64 lower-case hex digits".to_owned())
}
