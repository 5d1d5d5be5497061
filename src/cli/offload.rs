//! `handoff-offload`: moves values that are too large for a line into the blob store.

use std::fmt::Write;
use std::process::ExitCode;
use std::time::Duration;

use bytesize::ByteSize;
use clap::{Command, CommandFactory, Parser};
use serde_json::json;

use super::args::{self, Blobs, Common, Limit, Textfile};
use super::exit::Exit;
use super::job::{self, Flags, Job, count, size, taken_over};
use crate::format::offload::Rule;
use crate::metrics;
use crate::store::blob::BlobUsage;
use crate::store::offload::{Outcome, offload, preview};
use crate::store::{ErrorKind, Rewritten, prune};

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

    /// How much of a value its handle shows at most; in bytes, or as in 1KiB. A handle takes some 240 bytes more, so that values that are
    /// hardly longer are better left where they are
    #[arg(long, env = "HANDOFF_PREVIEW_BYTES", value_name = "SIZE", default_value = "1KiB", value_parser = args::size)]
    preview_bytes: ByteSize,

    #[command(flatten)]
    blobs: Blobs,

    /// Remove blobs that nothing refers to and that were put longer ago than this, as in 14d or 36h
    #[arg(long, env = "HANDOFF_PRUNE_AFTER", value_name = "TIME", default_value = "14d", value_parser = humantime::parse_duration)]
    prune_after: Duration,

    #[command(flatten)]
    flags: Flags,

    #[command(flatten)]
    textfile: Textfile,
}

/// What a handle takes at least.
const HANDLE_BYTES: usize = 240;

const EXIT_CODES: &str = "\
Exit codes:
   0  done, also if there was nothing to move
   2  wrong usage
  65  the queue's ledger can't be read
  74  a file can't be read or written, or the disk is too full
  75  a lock is busy, or the queue was rewritten without it: try again
The queue is whole after each of them; a failed run has left it as it was, or says what it has done.";

/// Its command line.
pub(super) fn command() -> Command {
    Arguments::command()
}

/// Runs the tool.
#[must_use]
pub fn main() -> ExitCode {
    match job::parse(JOB, |arguments: &mut Arguments| (&mut arguments.common, &mut arguments.textfile)) {
        Ok(arguments) => run(&arguments).into(),
        Err(error) => args::report(NAME, &error).into(),
    }
}

fn run(arguments: &Arguments) -> Exit {
    let mut job = Job::begin(NAME, JOB, &arguments.common, &arguments.textfile);
    let now = job.now;
    let (files, options) = (arguments.common.files(arguments.blobs.dir()), arguments.common.read_options());
    let (timeout, limit) = (options.lock_timeout, now.before(arguments.prune_after));
    let rule = Rule { preview_bytes: args::bytes(arguments.preview_bytes), ..arguments.limit.rule() };
    let is_preview = arguments.flags.dry_run;

    if rule.max_bytes < HANDLE_BYTES {
        // Who means 8 bytes has forgotten a unit.
        let limit = rule.max_bytes;
        job.warn(format_args!("--max-bytes {limit}: such values are shorter than their handles, and lines grow: is a unit missing, as in 8KiB?"));
    }
    // First what goes, for it makes room.
    let prune = if is_preview { prune::preview } else { prune::prune };
    let pruned = prune(&files, timeout, limit);
    let is_busy = pruned.as_ref().is_err_and(|error| error.kind() == ErrorKind::Busy && error.path() == files.lock);
    let pruned = job.check(pruned);
    let done = match is_preview {
        // Who has waited for the lock in vain need not do so again.
        _ if is_busy => None,
        true => Some(preview(&files, &options, rule)),
        false => Some(offload(&files, &options, rule, now)),
    };
    let outcome = done.and_then(|done| job.check(done));
    if let Some(outcome) = &outcome {
        job.report(&outcome.rewritten);
        if arguments.flags.json || is_preview {
            let json = arguments.flags.json;
            job.print(&if json { self::json(arguments, outcome, pruned) } else { text(arguments, outcome, pruned) });
        }
    }
    if is_preview {
        return job.finish_preview();
    }
    match &outcome {
        Some(outcome) => job.say(in_words(arguments, outcome, pruned), &outcome.rewritten),
        None if pruned.is_some_and(|pruned| pruned.objects > 0) => {
            job.say(in_words_pruned(pruned), &Rewritten::default());
        }
        None => {}
    }
    let written = outcome.as_ref().map(|outcome| outcome.written);
    job.finish(|run| metrics::render_offload(run, written, pruned))
}

/// The outcome in one sentence.
fn in_words(arguments: &Arguments, outcome: &Outcome, pruned: Option<BlobUsage>) -> String {
    let Outcome { counts: found, written, reused, .. } = outcome;
    let limit = size(arguments.limit.rule().max_bytes as u64);
    let mut words = match found.records {
        0 if written.objects + reused > 0 => {
            "moved nothing: all records with large values have changed meanwhile, and wait for the next run".to_owned()
        }
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
    if pruned.is_some_and(|pruned| pruned.objects > 0) {
        let _ = write!(words, "; {}", in_words_pruned(pruned));
    }
    words + &taken_over(&outcome.rewritten)
}

fn in_words_pruned(pruned: Option<BlobUsage>) -> String {
    let BlobUsage { objects, bytes } = pruned.unwrap_or_default();
    format!("removed {} that nothing refers to, {}", count(objects, "blob"), size(bytes))
}

/// What stays though it is too large, if anything does.
fn kept(outcome: &Outcome) -> String {
    let mut words = String::new();
    if outcome.counts.records_in_doubt > 0 {
        let _ = write!(words, "; left {} in doubt", count(outcome.counts.records_in_doubt, "record"));
    }
    if outcome.counts.lone_surrogates > 0 {
        let strings = count(outcome.counts.lone_surrogates, "string");
        let _ = write!(words, "; left {strings} with lone surrogates, which no text says exactly");
    }
    words
}

/// The plan for people.
fn text(arguments: &Arguments, outcome: &Outcome, pruned: Option<BlobUsage>) -> String {
    let mut text = String::new();
    for value in &outcome.values {
        let (queue, bytes) = (arguments.common.queue.display(), size(value.bytes));
        let (id, pointer) = (value.id.escape_debug(), value.pointer.escape_debug());
        let _ = writeln!(text, "{queue}:{}: {id} {pointer}: {bytes}, {}", value.line, value.media_type.as_str());
    }
    let (values, records) = (count(outcome.counts.values, "value"), count(outcome.counts.records, "record"));
    let _ = writeln!(text, "move {values} out of {records}{}", kept(outcome));
    if let Some(BlobUsage { objects: objects @ 1.., bytes }) = pruned {
        let _ = writeln!(text, "remove {} that nothing refers to, {}", count(objects, "blob"), size(bytes));
    }
    text + &job::would_take_over(&outcome.rewritten)
}

/// The outcome for machines.
fn json(arguments: &Arguments, outcome: &Outcome, pruned: Option<BlobUsage>) -> String {
    let Outcome { counts: found, written, reused, .. } = outcome;
    let Rewritten { late, removed_generations, replaced, locked_for, .. } = &outcome.rewritten;
    let mut json = json!({
        "queue": arguments.common.queue.to_string_lossy(),
        "dry_run": arguments.flags.dry_run,
        "moved": { "records": found.records, "values": found.values },
        "blobs": { "written": written.objects, "written_bytes": written.bytes, "reused": reused },
        "kept": { "records_in_doubt": found.records_in_doubt, "lone_surrogates": found.lone_surrogates },
        "pruned": pruned.map(|pruned| json!({ "objects": pruned.objects, "bytes": pruned.bytes })),
        "late": { "lines": late.lines, "bytes": late.bytes },
        "removed_generations": removed_generations,
        "replaced": replaced,
        "lock_held_seconds": locked_for.as_secs_f64(),
    });
    if arguments.flags.dry_run {
        let values = outcome.values.iter().map(|value| {
            json!({
                "line": value.line,
                "id": *value.id,
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
