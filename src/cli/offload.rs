//! `handoff-offload`: moves values that are too large for a line into the blob store.

use std::fmt::Write;
use std::process::ExitCode;
use std::time::Duration;

use bytesize::ByteSize;
use clap::builder::FalseyValueParser;
use clap::{CommandFactory, FromArgMatches, Parser};
use serde_json::json;

use super::args::{self, Blobs, Common, Limit, Textfile};
use super::exit::Exit;
use super::job::{self, Job, count, size, taken_over};
use crate::format::offload::Rule;
use crate::format::time::Timestamp;
use crate::metrics::{self, Offloaded};
use crate::store::Error;
use crate::store::blob::BlobUsage;
use crate::store::offload::{Outcome, Policy, Rewritten, offload, preview};

const NAME: &str = "handoff-offload";
/// As in the names of metrics.
const JOB: &str = "offload";

/// Move values that are too large for a line of the handoff queue into the blob store, and leave handles in their place
///
/// A handle says where the value is, how large it is and how it begins; `handoff blob cat` prints it. Nothing else in a line changes, and
/// the line of a record that is in doubt stays as it is. Blobs that nothing refers to any more are removed after --prune-after.
///
/// Every flag can also be set by its variable; a flag wins. An empty variable counts as not set, and 0, false, no and off
/// switch a flag without a value off.
#[derive(Debug, Parser)]
#[command(name = NAME, version, after_help = EXIT_CODES)]
struct Arguments {
    #[command(flatten)]
    common: Common,

    #[command(flatten)]
    limit: Limit,

    /// How much of a value its handle shows at most; in bytes, or as in 1KiB
    #[arg(long, env = "HANDOFF_PREVIEW_BYTES", value_name = "SIZE", default_value = "1KiB", value_parser = args::size)]
    preview_bytes: ByteSize,

    #[command(flatten)]
    blobs: Blobs,

    /// Remove blobs that nothing refers to and that were put longer ago than this, as in 14d or 36h
    #[arg(long, env = "HANDOFF_PRUNE_AFTER", value_name = "TIME", default_value = "14d", value_parser = humantime::parse_duration)]
    prune_after: Duration,

    /// Print what would be moved; change nothing
    #[arg(long, env = "HANDOFF_DRY_RUN", value_parser = FalseyValueParser::new())]
    dry_run: bool,

    /// Print what was done, or would be, as JSON
    #[arg(long, env = "HANDOFF_JSON", value_parser = FalseyValueParser::new())]
    json: bool,

    #[command(flatten)]
    textfile: Textfile,
}

const EXIT_CODES: &str = "\
Exit codes:
   0  done, also if there was nothing to move
   2  wrong usage
  65  the queue's ledger can't be read
  74  a file can't be read or written, or the disk is too full
  75  a lock is busy, or the queue was rewritten without it: try again
The queue is whole after each of them; a failed run has left it as it was, or says what it has done.";

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
    let [verbose, quiet] = args::verbosity(Arguments::command(), &matches)?;
    let wants_metrics = !args::is_default(&matches, "textfile_dir");
    let mut arguments = Arguments::from_arg_matches_mut(&mut matches)?;
    arguments.common.prefer(verbose, quiet);
    arguments.textfile.is_wanted = wants_metrics;
    arguments.textfile.keep_apart(&job::file_name(JOB), &arguments.common, Arguments::command())?;
    Ok(arguments)
}

fn run(arguments: &Arguments) -> Exit {
    let mut job = Job::begin(NAME, JOB, &arguments.common, &arguments.textfile);
    let outcome = job.check(act(arguments, job.now));
    if let Some(outcome) = &outcome {
        outcome.pruned.as_ref().err().into_iter().for_each(|error| job.fail(error));
        job.report(&outcome.rewritten);
        if arguments.json || arguments.dry_run {
            job.print(&if arguments.json { json(arguments, outcome) } else { text(arguments, outcome) });
        }
        if !arguments.dry_run {
            job.say(in_words(arguments, outcome), &outcome.rewritten);
        }
    }
    if arguments.dry_run {
        return job.finish_preview();
    }
    let offloaded = outcome.as_ref().map(|outcome| Offloaded {
        objects: outcome.written.objects,
        bytes: outcome.written.bytes,
        pruned_objects: outcome.pruned.as_ref().ok().map(|pruned| pruned.objects),
    });
    job.finish(|run| metrics::render_offload(run, offloaded))
}

fn act(arguments: &Arguments, now: Timestamp) -> Result<Outcome, Error> {
    let rule = Rule { preview_bytes: args::bytes(arguments.preview_bytes), ..arguments.limit.rule() };
    let policy = Policy { now, rule, prune_before: now.before(arguments.prune_after) };
    let (files, options) = (arguments.common.files(arguments.blobs.dir()), arguments.common.read_options());
    if arguments.dry_run { preview(&files, &options, &policy) } else { offload(&files, &options, &policy) }
}

/// The outcome in one sentence.
fn in_words(arguments: &Arguments, outcome: &Outcome) -> String {
    let Outcome { found, written, reused, .. } = outcome;
    let limit = size(arguments.limit.rule().max_bytes as u64);
    let mut words = match found.records {
        0 => format!("nothing over {limit} to move"),
        records => {
            let (values, records) = (count(found.values, "value"), count(records, "record"));
            let blobs = count(written.objects, "new blob");
            format!("moved {values} over {limit} out of {records}: {blobs}, {}", size(written.bytes))
        }
    };
    if *reused > 0 {
        let _ = write!(words, ", {} there already", count(*reused, "blob"));
    }
    words += &kept(outcome);
    if let Ok(BlobUsage { objects: objects @ 1.., bytes }) = outcome.pruned {
        let _ = write!(words, "; removed {} that nothing refers to, {}", count(objects, "blob"), size(bytes));
    }
    words + &taken_over(&outcome.rewritten)
}

/// What stays though it is too large, if anything does.
fn kept(outcome: &Outcome) -> String {
    let mut words = String::new();
    if outcome.found.records_in_doubt > 0 {
        let _ = write!(words, "; left {} in doubt", count(outcome.found.records_in_doubt, "record"));
    }
    if outcome.found.lone_surrogates > 0 {
        let strings = count(outcome.found.lone_surrogates, "string");
        let _ = write!(words, "; left {strings} with lone surrogates, which no text says exactly");
    }
    words
}

/// The plan for people.
fn text(arguments: &Arguments, outcome: &Outcome) -> String {
    let mut text = String::new();
    for value in &outcome.values {
        let (queue, bytes) = (arguments.common.queue.display(), size(value.bytes));
        let (id, pointer) = (value.id.escape_debug(), value.pointer.escape_debug());
        let _ = writeln!(text, "{queue}:{}: {id} {pointer}: {bytes}, {}", value.line, value.media_type.as_str());
    }
    let (values, records) = (count(outcome.found.values, "value"), count(outcome.found.records, "record"));
    let _ = writeln!(text, "move {values} out of {records}{}", kept(outcome));
    if let Ok(BlobUsage { objects: objects @ 1.., bytes }) = outcome.pruned {
        let _ = writeln!(text, "remove {} that nothing refers to, {}", count(objects, "blob"), size(bytes));
    }
    if outcome.rewritten.late.lines > 0 {
        let late = count(outcome.rewritten.late.lines, "late line");
        let _ = writeln!(text, "take over {late} from earlier generations");
    }
    text
}

/// The outcome for machines.
fn json(arguments: &Arguments, outcome: &Outcome) -> String {
    let Outcome { found, written, reused, pruned, .. } = outcome;
    let Rewritten { late, removed_generations, replaced, locked_for, .. } = &outcome.rewritten;
    let mut json = json!({
        "queue": arguments.common.queue.to_string_lossy(),
        "dry_run": arguments.dry_run,
        "moved": { "records": found.records, "values": found.values },
        "blobs": { "written": written.objects, "written_bytes": written.bytes, "reused": reused },
        "kept": { "records_in_doubt": found.records_in_doubt, "lone_surrogates": found.lone_surrogates },
        "pruned": pruned.as_ref().ok().map(|pruned| json!({ "objects": pruned.objects, "bytes": pruned.bytes })),
        "late": { "lines": late.lines, "bytes": late.bytes },
        "removed_generations": removed_generations,
        "replaced": replaced,
        "lock_held_seconds": locked_for.as_secs_f64(),
    });
    if arguments.dry_run {
        let values = outcome.values.iter().map(|value| {
            json!({
                "line": value.line,
                "id": value.id,
                "pointer": value.pointer,
                "bytes": value.bytes,
                "media_type": value.media_type.as_str(),
                "sha256": value.digest.to_string(),
            })
        });
        json["values"] = values.collect();
    }
    format!("{json}\n")
}
