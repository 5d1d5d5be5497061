//! `handoff show`: everything about a record.

use std::fmt::Write;
use std::path::PathBuf;

use clap::Args;
use clap::builder::NonEmptyStringValueParser;

use super::{Output, Place};
use crate::cli::args::Pricing;
use crate::cli::exit::Exit;
use crate::cli::messages::{self, one_line};
use crate::cli::text::{cause, id, json_line, name, owner, parameters, spend, table, time};
use crate::format::cause::Cause;
use crate::format::envelope::{self, Envelope, Line};
use crate::format::lines::RawLine;
use crate::format::pretty::pretty;
use crate::format::summary::{Parameters, Summary};
use crate::format::time::Timestamp;
use crate::store::process;
use crate::store::read::{self, Lines, Pass};
use crate::store::{Error, ErrorKind};

/// Show a record: all its fields, its nacks, whether its owner lives, what it came from and what came of it
#[derive(Debug, Args)]
#[command(after_help = "Example: handoff show 3f2a | less
Exit codes: 0 shown, 1 there is no such record, 65 several begin like this")]
pub(super) struct Show {
    #[command(flatten)]
    pub(super) place: Place,

    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    pricing: Pricing,

    /// The record's id, or a beginning that no other id has
    #[arg(value_name = "ID", value_parser = NonEmptyStringValueParser::new())]
    id: String,
}

/// A record and where it is.
struct Hit {
    path: PathBuf,
    number: u64,
    line: Vec<u8>,
}

/// What an id stands for.
#[derive(Default)]
struct Found {
    /// The records that have the one id.
    hits: Vec<Hit>,
    /// That id, and if there are several that begin like it, the first of these.
    ids: Vec<String>,
    /// Whether there are even more.
    has_more: bool,
    /// The records that the one caused: id, status, kind and role.
    followups: Vec<Vec<String>>,
}

/// So many ids are named.
const MAX_IDS: usize = 10;

impl Show {
    pub(super) fn run(&self) -> Result<Exit, Error> {
        let (files, options) = (self.place.files(), self.place.common.read_options());
        let parameters = parameters(&self.pricing, self.place.common.now())?;
        let (found, pass) = read::under_lock(&files, &options, |lines| self.find(lines))?;
        self.place.report(&pass);
        let [id] = found.ids.as_slice() else { return self.refuse(&found) };
        if found.hits.len() > 1 {
            let (path, hits) = (files.queue.display(), found.hits.len());
            self.place
                .messages()
                .warning(format_args!("{path}: {hits} records have the id {id}: no operation can tell them apart"));
        }
        messages::print_each(found.hits.iter().enumerate().map(|(number, hit)| {
            if self.output.json {
                return Ok(json_line(&hit.line));
            }
            let between = if number > 0 { "\n" } else { "" };
            picture(hit, &found.followups, &parameters).map(|picture| format!("{between}{picture}").into_bytes())
        }))?;
        Ok(Exit::Done)
    }

    /// Looks for the record, and then for those that it caused.
    fn find(&self, lines: &Lines<'_>) -> Result<(Found, Pass), Error> {
        let (mut found, mut is_exact) = (Found::default(), false);
        let pass = for_each_record(lines, |record, hit| {
            let matches_exactly = record.id == self.id.as_str();
            if matches_exactly && !is_exact {
                (found, is_exact) = (Found::default(), true);
            }
            if matches_exactly || !is_exact && record.id.starts_with(&self.id) {
                found.add(&record.id, hit);
            }
        })?;
        if let ([wanted], false) = (found.ids.as_slice(), self.output.json) {
            for_each_record(lines, |record, _| {
                if record.more().parent.as_deref() == Some(wanted) {
                    let status = record.status.as_str().to_owned();
                    found.followups.push(vec![id(&record.id), status, name(&record.kind), name(&record.to)]);
                }
            })?;
        }
        Ok((found, pass))
    }

    /// Says that there is no such record, or more than one. That there is none is a valid answer: compaction removes what is done.
    fn refuse(&self, found: &Found) -> Result<Exit, Error> {
        let queue = &self.place.common.queue;
        if found.ids.is_empty() {
            let (queue, id) = (queue.display(), &self.id);
            self.place.messages().warning(format_args!("{queue}: no record has the id {id}: what is done goes in time, and malformed lines are none (handoff check)"));
            return Ok(Exit::No);
        }
        let more = if found.has_more { " and others" } else { "" };
        let what = format!("several ids begin with {}: {}{more}", self.id, found.ids.join(", "));
        Err(Error::new(ErrorKind::BadData, queue, what).advise("give more of it"))
    }
}

impl Found {
    fn add(&mut self, id: &str, hit: impl FnOnce() -> Hit) {
        if !self.ids.iter().any(|known| known == id) {
            if self.ids.len() == MAX_IDS {
                self.has_more = true;
                return;
            }
            self.ids.push(id.to_owned());
        }
        // Which of several it might have been does not matter.
        if self.ids.len() == 1 {
            self.hits.push(hit());
        } else {
            self.hits.clear();
        }
    }
}

fn for_each_record(lines: &Lines<'_>, mut each: impl FnMut(&Envelope<'_>, &dyn Fn() -> Hit)) -> Result<Pass, Error> {
    lines.for_each(|line| {
        if let (RawLine::Whole(bytes), Ok(Line::Record(record))) = (line.raw, envelope::parse_raw(line.raw)) {
            each(&record, &|| Hit { path: line.path.to_owned(), number: line.number, line: bytes.to_vec() });
        }
        Ok(())
    })
}

/// The record for people.
fn picture(hit: &Hit, followups: &[Vec<String>], parameters: &Parameters) -> Result<String, Error> {
    let Ok(Line::Record(record)) = envelope::parse(&hit.line) else { return Ok(String::new()) };
    let (more, now) = (record.more(), parameters.now);
    let mut fields = Fields(Vec::new());
    fields.add("id", &record.id);
    let doubt =
        record.doubt.map_or_else(String::new, |doubt| format!(", in doubt ({}): no tool changes it", doubt.as_str()));
    fields.add("status", &format!("{}{doubt}", record.status.as_str()));
    fields.add("kind", &record.kind);
    fields.add("from → to", &format!("{} → {}", record.from, record.to));
    fields.add("queued", &time(record.ts, now));
    fields.add_some("started", record.started_ts.map(|started| time(started, now)));
    fields.add_some("finished", record.finished_ts.map(|finished| time(finished, now)));
    fields.add_some("owner", more.owner.map(|json| process::life_of(json).map(|life| owner(json, life))).transpose()?);
    fields.add_some("run", more.run_id);
    fields.add_some("correlation", more.correlation_id);
    fields.add_some("parent", more.parent);
    let told = more.notified_ts.and_then(Timestamp::from_json);
    fields.add_some("person told", told.map(|told| time(told, now)));
    fields.add_some("stopped", more.stopped.map(|stopped| cause(&Cause::read(stopped), now)));
    fields.add_some("spend", more.spend.map(|_| spend_of(&hit.line, parameters)));
    fields.add("line", &format!("{}:{}", hit.path.display(), hit.number));
    let mut text = table(&fields.0, "");

    if record.nacks > 0 {
        let _ = writeln!(text, "nacks: {}", record.nacks);
        for nack in more.nacks.map(Cause::of_nacks).unwrap_or_default() {
            let _ = writeln!(text, "  {}", one_line(&cause(&nack, now)));
        }
    }
    let known = [("payload", record.payload), ("result", more.result), ("spend", more.spend)];
    let known = known.into_iter().filter_map(|(name, json)| Some((name.into(), json?)));
    for (name, json) in known.chain(record.unknown_fields()) {
        let _ = writeln!(text, "{}:", one_line(&name));
        for line in pretty(json, "  ").lines() {
            let _ = writeln!(text, "{}", one_line(line));
        }
    }
    if !followups.is_empty() {
        text += "follow-ups:\n";
        text += &table(followups, "  ");
    }
    Ok(text)
}

/// Names and values, one pair a line.
struct Fields(Vec<Vec<String>>);

impl Fields {
    fn add(&mut self, name: &str, value: &str) {
        self.0.push(vec![name.to_owned(), one_line(value)]);
    }

    fn add_some(&mut self, name: &str, value: Option<impl AsRef<str>>) {
        if let Some(value) = value {
            self.add(name, value.as_ref());
        }
    }
}

/// What a record cost, by the rules of the metrics.
fn spend_of(line: &[u8], parameters: &Parameters) -> String {
    let mut summary = Summary::new(parameters);
    summary.add(RawLine::Whole(line), parameters);
    let totals = summary.cells().map(|(_, _, cell)| &cell.totals).next();
    totals.map_or_else(String::new, |totals| spend(totals.spend_usd, totals.unpriced))
}
