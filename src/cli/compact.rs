//! `handoff-compact`: removes records that have been done for long enough.

use std::fmt::Write;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Command, CommandFactory, Parser};
use serde_json::json;

use super::args::{self, Common, Names, Pricing, Textfile};
use super::exit::Exit;
use super::job::{self, Flags, Job, count, size};
use crate::format::envelope::Status;
use crate::format::ledger::Ledger;
use crate::format::retention::{Policy, Reason};
use crate::format::time::Timestamp;
use crate::metrics::{self, Removed};
use crate::store::compact::{Outcome, compact, preview};
use crate::store::{Error, Rewritten};

const NAME: &str = "handoff-compact";
/// As in the names of metrics.
const JOB: &str = "compact";

/// Remove records that have been done for long enough from the handoff queue, and keep everything else
///
/// A record goes if it is done, was never refused, and finished longer ago than --older-than. Whatever is in doubt stays. What removed
/// records amount to is kept in the queue, so that no counter falls.
///
/// Every flag can also be set by its variable; a flag wins. An empty variable counts as not set, and 0, false, no and off
/// switch a flag without a value off.
#[derive(Debug, Parser)]
#[command(name = NAME, version, after_help = EXIT_CODES)]
struct Arguments {
    #[command(flatten)]
    common: Common,

    /// Remove what has been done for longer than this, as in 14d or 36h
    #[arg(long, env = "HANDOFF_OLDER_THAN", value_name = "TIME", default_value = "14d", value_parser = humantime::parse_duration)]
    older_than: Duration,

    #[command(flatten)]
    flags: Flags,

    #[command(flatten)]
    names: Names,

    #[command(flatten)]
    pricing: Pricing,

    #[command(flatten)]
    textfile: Textfile,
}

const EXIT_CODES: &str = "\
Exit codes:
   0  done, also if there was nothing to remove
   2  wrong usage
  65  the queue's ledger can't be read, or the price map is not valid
  74  a file can't be read or written, or the disk is too full
  75  the lock is busy, or the queue was rewritten without it: try again
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
    let outcome = job.check(act(arguments, now));
    if let Some(outcome) = &outcome {
        job.report(&outcome.rewritten);
        if arguments.flags.json || arguments.flags.dry_run {
            job.print(&if arguments.flags.json {
                json(arguments, now, outcome)
            } else {
                text(arguments, now, outcome)
            });
        }
        if !arguments.flags.dry_run {
            job.say(in_words(arguments, outcome), &outcome.rewritten);
        }
    }
    if arguments.flags.dry_run {
        return job.finish_preview();
    }
    let removed = match &outcome {
        Some(outcome) => Some(removed_by(&outcome.rewritten.ledger)),
        None => previously_removed(&arguments.textfile),
    };
    job.finish(|run| metrics::render_compact(run, removed))
}

fn act(arguments: &Arguments, now: Timestamp) -> Result<Outcome, Error> {
    let Names { roles, kinds } = &arguments.names;
    let (roles, kinds, prices) = (roles.clone(), kinds.clone(), arguments.pricing.read()?);
    let policy = Policy { now, older_than: arguments.older_than, roles, kinds, prices };
    let (files, options) = (arguments.common.files(None), arguments.common.read_options());
    if arguments.flags.dry_run { preview(&files, &options, &policy) } else { compact(&files, &options, &policy) }
}

#[expect(clippy::cast_precision_loss, reason = "samples are floats, and exact up to 2^53")]
fn removed_by(ledger: &Ledger) -> Removed {
    Removed { records: ledger.removed_records() as f64, bytes: ledger.totals.reclaimed_bytes as f64 }
}

/// What the last run said: a counter must not vanish because the queue can't be read.
fn previously_removed(textfile: &Textfile) -> Option<Removed> {
    let value = |metric| textfile.previous(&job::file_name(JOB), metric).ok().flatten();
    let [records, bytes] = metrics::REMOVED.map(value);
    Some(Removed { records: records?, bytes: bytes? })
}

/// The outcome in one sentence.
fn in_words(arguments: &Arguments, outcome: &Outcome) -> String {
    let plan = &outcome.plan;
    let age = humantime::format_duration(arguments.older_than);
    let mut words = match plan.removed.lines {
        0 => format!("nothing to remove that was done for longer than {age}"),
        records => {
            format!("removed {} done for longer than {age}, {}", count(records, "record"), size(plan.removed.bytes))
        }
    };
    let _ = write!(words, "; kept {}, {}", count(plan.kept.lines, "line"), size(plan.kept.bytes));
    for (index, (reason, lines)) in plan.reasons.iter().enumerate() {
        let separator = if index == 0 { ": " } else { ", " };
        let _ = write!(words, "{separator}{lines} {}", words_for(*reason));
    }
    words + &job::taken_over(&outcome.rewritten)
}

/// The plan for people.
fn text(arguments: &Arguments, now: Timestamp, outcome: &Outcome) -> String {
    let plan = &outcome.plan;
    let limit = now.before(arguments.older_than);
    let mut text = format!("{}: {}\n", arguments.common.queue.display(), count(plan.lines(), "line"));
    let (removed, kept) = (count(plan.removed.lines, "record"), count(plan.kept.lines, "line"));
    let _ = writeln!(text, "remove {removed}, {}: done before {limit}", size(plan.removed.bytes));
    let _ = write!(text, "keep {kept}, {}", size(plan.kept.bytes));
    if let Some(oldest) = plan.oldest_kept {
        let _ = write!(text, ", the oldest record from {oldest}");
    }
    text.push('\n');
    for (reason, lines) in &plan.reasons {
        let _ = writeln!(text, "{lines:>10}  {}", words_for(*reason));
    }
    if plan.ledgers.lines > 0 {
        let _ = writeln!(text, "renew {} that holds the ledger", count(plan.ledgers.lines, "line"));
    }
    text + &job::would_take_over(&outcome.rewritten)
}

/// The outcome for machines.
fn json(arguments: &Arguments, now: Timestamp, outcome: &Outcome) -> String {
    let plan = &outcome.plan;
    let lines = |reason: Reason| plan.reasons.get(&reason).copied().unwrap_or(0);
    let reasons: serde_json::Map<String, serde_json::Value> =
        Reason::ALL.into_iter().map(|reason| (reason.as_str().to_owned(), lines(reason).into())).collect();
    let Rewritten { late, removed_generations, replaced, locked_for, ledger, .. } = &outcome.rewritten;
    let outcome = json!({
        "queue": arguments.common.queue.to_string_lossy(),
        "dry_run": arguments.flags.dry_run,
        "done_before_timestamp_seconds": now.before(arguments.older_than).as_seconds(),
        "lines": plan.lines(),
        "removed": { "records": plan.removed.lines, "bytes": plan.removed.bytes },
        "kept": {
            "lines": plan.kept.lines,
            "bytes": plan.kept.bytes,
            "oldest_timestamp_seconds": plan.oldest_kept.map(Timestamp::as_seconds),
            "reasons": reasons,
        },
        "ledger_lines": plan.ledgers.lines,
        "late": { "lines": late.lines, "bytes": late.bytes },
        "removed_generations": removed_generations,
        "replaced": replaced,
        "lock_held_seconds": locked_for.as_secs_f64(),
        "totals": {
            "removed_records": ledger.removed_records(),
            "reclaimed_bytes": ledger.totals.reclaimed_bytes,
        },
    });
    format!("{outcome}\n")
}

/// Why lines stay, said of them.
fn words_for(reason: Reason) -> String {
    match reason {
        Reason::Malformed(reason) => format!("malformed ({})", reason.as_str()),
        Reason::Blank => "blank".to_owned(),
        Reason::Doubt(doubt) => format!("in doubt ({})", doubt.as_str()),
        Reason::Status(Status::Other) => "of an unknown status".to_owned(),
        Reason::Status(status) => status.as_str().to_owned(),
        Reason::Nacked => "done after a refusal".to_owned(),
        Reason::FutureTime => "done, dated in the future".to_owned(),
        Reason::Recent => "done more recently".to_owned(),
        Reason::ContradictoryTimes => "done before they began".to_owned(),
    }
}
