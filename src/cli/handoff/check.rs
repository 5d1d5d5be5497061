//! `handoff check`: whether the queue is as it should be.

use std::fmt::Write;

use clap::Args;
use clap::builder::FalseyValueParser;
use serde_json::{Value, json};

use super::{Output, Place};
use crate::cli::exit::Exit;
use crate::cli::job::{count, size};
use crate::cli::messages::{self, one_line};
use crate::cli::text;
use crate::store::Error;
use crate::store::check::{self, Item, Report};
use crate::store::quarantine::{self, Outcome};

/// Check the queue: malformed lines, records in doubt or stuck, doubled ids, missing blobs, dead owners, odd times and totals, generations,
/// permissions
#[derive(Debug, Args)]
#[command(after_help = "Notes are what may be right, as a record that runs without an owner; they are no problems.
Example: handoff check --json | jq '.problems[] | select(.what == \"dead_owner\") .id'
Exit codes: 0 no problem, 1 problems (are left), 65 the ledger can't be read, so nothing was moved")]
pub(super) struct Check {
    #[command(flatten)]
    pub(super) place: Place,

    #[command(flatten)]
    output: Output,

    /// Move malformed lines into <stem>.bad.jsonl beside the queue, byte for byte, and then check; unreadable ledgers and records in doubt stay
    #[arg(long, env = "HANDOFF_QUARANTINE", value_parser = FalseyValueParser::new())]
    quarantine: bool,
}

impl Check {
    pub(super) fn run(&self) -> Result<Exit, Error> {
        let (files, options) = (self.place.files(), self.place.common.read_options());
        let now = self.place.common.now();
        let moved = self.quarantine.then(|| quarantine::quarantine(&files, &options, now));
        // What is wrong is told even if nothing could be moved.
        let report = check::check(&files, &options, now)?;
        let outcome = match &moved {
            Some(Ok(outcome)) => Some(outcome),
            _ => None,
        };
        messages::print(if self.output.json { self.json(&report, outcome) } else { as_text(&report) }.as_bytes())?;
        self.place.warn_without_queue(report.has_queue);
        self.say(&report, outcome);
        match moved.transpose()?.and_then(|outcome| outcome.rewritten?.unsettled) {
            Some(error) => Err(error),
            None => Ok(if report.problems() == 0 { Exit::Done } else { Exit::No }),
        }
    }

    /// Says what was done and what was found in short.
    fn say(&self, report: &Report, outcome: Option<&Outcome>) {
        let (messages, queue) = (self.place.messages(), self.place.common.queue.display());
        if let Some(Outcome { moved, path, rewritten }) = outcome {
            messages.warnings(rewritten.iter().flat_map(|rewritten| &rewritten.findings));
            let lines = count(moved.lines, "malformed line");
            let to = path.as_ref().map_or_else(String::new, |path| format!(" to {}", path.display()));
            messages.notice(format_args!("{queue}: moved {lines} ({}){to}", size(moved.bytes)));
        }
        let (lines, records) = (count(report.lines, "line"), count(report.records, "record"));
        let problems = report.problems();
        let notes = count((report.items.len() - problems) as u64, "note");
        let problems = count(problems as u64, "problem");
        messages.notice(format_args!("{queue}: {lines}, {records}: {problems}, {notes}"));
    }

    fn json(&self, report: &Report, outcome: Option<&Outcome>) -> String {
        let list = |are_problems: bool| -> Value {
            let items = report.items.iter().filter(|item| item.is_problem == are_problems);
            let json = |Item { what, path, line, id, detail, .. }: &Item| json!({ "what": what, "file": path.to_string_lossy(), "line": line, "id": id, "detail": detail });
            items.map(json).collect()
        };
        let quarantined = outcome.map(|Outcome { moved, path, .. }| {
            json!({ "lines": moved.lines, "bytes": moved.bytes, "file": path.as_ref().map(|path| path.to_string_lossy()) })
        });
        let json = json!({
            "queue": self.place.common.queue.to_string_lossy(),
            "lines": report.lines,
            "records": report.records,
            "problems": list(true),
            "notes": list(false),
            "quarantined": quarantined,
        });
        format!("{json}\n")
    }
}

/// One line for each thing that somebody should look at.
fn as_text(report: &Report) -> String {
    let mut text = String::new();
    for Item { what, is_problem, path, line, id, detail } in &report.items {
        let line = line.map_or_else(String::new, |line| format!(":{line}"));
        let note = if *is_problem { "" } else { "note: " };
        let record = id.as_ref().map_or_else(String::new, |id| format!("record {}: ", text::id(id)));
        let path = one_line(&path.to_string_lossy());
        let _ = writeln!(text, "{path}{line}: {note}{what}: {record}{}", one_line(detail));
    }
    text
}
