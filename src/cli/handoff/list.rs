//! `handoff list`: the records, oldest first.

use std::time::Duration;

use clap::Args;
use clap::builder::PossibleValuesParser;

use super::{Output, Place};
use crate::cli::args;
use crate::cli::exit::Exit;
use crate::cli::job::count;
use crate::cli::messages;
use crate::cli::text::{Columns, age, beginning, id, json_line, name};
use crate::format::envelope::{self, Envelope, Line, Status};
use crate::format::time::Timestamp;
use crate::store::Error;
use crate::store::read::{self, Kept, KeptLine};

/// List records, oldest first: id, status, kind, who asks whom, age, nacks, and how the summary begins
#[derive(Debug, Args)]
#[command(
    after_help = "With --json each record is its line in the queue. One in doubt, which no tool changes, is listed too.
Example: handoff list --role researcher --status queued,running --since 2h
Exit codes: 0 listed, also if there is none; 2, 74, 75 as ever"
)]
pub(super) struct List {
    #[command(flatten)]
    pub(super) place: Place,

    #[command(flatten)]
    output: Output,

    /// Only records for these roles
    #[arg(long, env = "HANDOFF_ROLE", value_name = "ROLE,…", value_delimiter = ',', value_parser = args::name)]
    role: Vec<String>,

    /// Only records with these statuses
    #[arg(long, env = "HANDOFF_STATUS", value_name = "STATUS,…", value_delimiter = ',', value_parser = PossibleValuesParser::new(Status::ALL.map(Status::as_str)))]
    status: Vec<String>,

    /// Only records of these kinds
    #[arg(long, env = "HANDOFF_KIND", value_name = "KIND,…", value_delimiter = ',', value_parser = args::name)]
    kind: Vec<String>,

    /// Only records that were queued since then: a time like 2026-11-29T10:00:00Z, or as long ago as 2h
    #[arg(long, env = "HANDOFF_SINCE", value_name = "TIME", value_parser = since)]
    since: Option<Since>,
}

/// A point in time, or how long ago it was.
#[derive(Clone, Copy, Debug)]
enum Since {
    Time(Timestamp),
    Ago(Duration),
}

fn since(text: &str) -> Result<Since, String> {
    let ago = || humantime::parse_duration(text).ok().map(Since::Ago);
    let since = Timestamp::from_rfc3339(text).map(Since::Time).or_else(ago);
    since.ok_or_else(|| "neither a time like 2026-11-29T10:00:00Z nor how long ago, as in 2h".to_owned())
}

impl List {
    pub(super) fn run(&self) -> Result<Exit, Error> {
        let now = self.place.common.now();
        let (mut listed, pass) = read::under_lock(&self.place.files(), &self.place.common.read_options(), |lines| {
            let mut listed = Listed::default();
            let pass = lines.for_each(|line| match envelope::parse_raw(line.raw) {
                Ok(Line::Record(record)) if self.wants(&record, now) => {
                    let entry = if self.output.json {
                        Entry::Line(listed.kept.keep(line)?)
                    } else {
                        let cells = cells(&record, now);
                        listed.columns.fit(&cells[..COLUMNS]);
                        Entry::Row(cells.join(BETWEEN).into())
                    };
                    listed.entries.push((record.ts, entry));
                    Ok(())
                }
                _ => Ok(()),
            })?;
            Ok((listed, pass))
        })?;
        self.place.report(&pass);
        // Not while the lock is held: whoever reads this may take their time.
        listed.entries.sort_by_key(|(ts, _)| *ts);
        let Listed { entries, columns, kept } = &listed;
        messages::print_each(entries.iter().map(|(_, entry)| match entry {
            Entry::Line(line) => Ok(json_line(&kept.read(line)?)),
            Entry::Row(row) => Ok(columns.line(&row.split(BETWEEN).collect::<Vec<_>>()).into_bytes()),
        }))?;
        Ok(Exit::Done)
    }

    fn wants(&self, record: &Envelope<'_>, now: Timestamp) -> bool {
        let is_among = |names: &[String], name: &str| names.is_empty() || names.iter().any(|one| one == name);
        let since = match self.since {
            Some(Since::Time(time)) => Some(time),
            Some(Since::Ago(ago)) => Some(now.before(ago)),
            None => None,
        };
        is_among(&self.role, &record.to)
            && is_among(&self.status, record.status.as_str())
            && is_among(&self.kind, &record.kind)
            && since.is_none_or(|since| record.ts >= since)
    }
}

/// The records that are to be listed, and the time of each.
#[derive(Default)]
struct Listed {
    entries: Vec<(Timestamp, Entry)>,
    columns: Columns,
    kept: Kept,
}

/// What is printed of a record.
enum Entry {
    /// Cells for people, in one piece, for there may be very many.
    Row(Box<str>),
    Line(KeptLine),
}

/// What stands between cells: they are text in one line.
const BETWEEN: &str = "\n";
/// So many cells stand one below the other.
const COLUMNS: usize = 6;
/// How many characters of a summary are shown.
const SUMMARY: usize = 60;

/// The cells of a row. Those that some records don't have come last.
fn cells(record: &Envelope<'_>, now: Timestamp) -> Vec<String> {
    let doubt = record.doubt.map(|doubt| format!("in doubt: {}", doubt.as_str()));
    let summary = record.summary().map(|summary| beginning(&summary, SUMMARY));
    let cells = [
        id(&record.id),
        record.status.as_str().to_owned(),
        name(&record.kind),
        format!("{}→{}", name(&record.from), name(&record.to)),
        age(record.ts, now),
        count(record.nacks, "nack"),
    ];
    cells.into_iter().chain(doubt).chain(summary).collect()
}
