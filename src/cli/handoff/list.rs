//! `handoff list`: the records, oldest first.

use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Duration;

use clap::Args;
use clap::builder::PossibleValuesParser;
use tempfile::{SpooledTempFile, spooled_tempfile};

use super::text::{Columns, age, beginning, json_line};
use super::{Output, Place};
use crate::cli::args;
use crate::cli::exit::Exit;
use crate::cli::job::count;
use crate::cli::messages::{self, one_line};
use crate::format::envelope::{self, Envelope, Line, Status};
use crate::format::lines::RawLine;
use crate::format::time::Timestamp;
use crate::store::{Error, read};

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
            let mut listed = Listed::new();
            let pass = lines.for_each(|line| match (line.raw, envelope::parse_raw(line.raw)) {
                (RawLine::Whole(bytes), Ok(Line::Record(record))) if self.wants(&record, now) => {
                    listed.add(&record, bytes, now)
                }
                _ => Ok(()),
            })?;
            Ok((listed, pass))
        })?;
        self.place.report(&pass);
        // Not while the lock is held: whoever reads this may take their time.
        listed.index.sort_by_key(|(ts, _, _)| *ts);
        let Listed { spool, index, columns } = &mut listed;
        messages::print_each(index.iter().map(|(_, start, len)| {
            let line = read_back(spool, *start, *len)?;
            Ok(if self.output.json { json_line(&line) } else { row(&line, columns, now) })
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

/// The lines that are to be listed: in memory, or in a file if they are many.
struct Listed {
    spool: SpooledTempFile,
    /// The time of each, and where it is.
    index: Vec<(Timestamp, u64, usize)>,
    columns: Columns,
}

/// So much is held in memory.
const MOST_MEMORY: usize = 16 * 1024 * 1024;

impl Listed {
    fn new() -> Self {
        Self { spool: spooled_tempfile(MOST_MEMORY), index: Vec::new(), columns: Columns::default() }
    }

    fn add(&mut self, record: &Envelope<'_>, line: &[u8], now: Timestamp) -> Result<(), Error> {
        let start = self.index.last().map_or(0, |(_, start, len)| start + *len as u64);
        self.spool.write_all(line).map_err(spool_error)?;
        self.index.push((record.ts, start, line.len()));
        self.columns.fit(&cells(record, now));
        Ok(())
    }
}

fn read_back(spool: &mut SpooledTempFile, start: u64, len: usize) -> Result<Vec<u8>, Error> {
    let mut line = vec![0; len];
    spool.seek(SeekFrom::Start(start)).and_then(|_| spool.read_exact(&mut line)).map_err(spool_error)?;
    Ok(line)
}

fn spool_error(error: std::io::Error) -> Error {
    Error::io(Path::new("a temporary file"), "cannot be used", error)
}

fn cells(record: &Envelope<'_>, now: Timestamp) -> [String; 6] {
    [
        one_line(&record.id),
        record.status.as_str().to_owned(),
        one_line(&record.kind),
        one_line(&format!("{}→{}", record.from, record.to)),
        age(record.ts, now),
        count(record.nacks, "nack"),
    ]
}

/// How many characters of a summary are shown.
const SUMMARY: usize = 60;

fn row(line: &[u8], columns: &Columns, now: Timestamp) -> Vec<u8> {
    let Ok(Line::Record(record)) = envelope::parse(line) else { return Vec::new() };
    let doubt = record.doubt.map(|doubt| format!("in doubt: {}", doubt.as_str()));
    let summary = record.summary().map(|summary| beginning(&summary, SUMMARY));
    let cells: Vec<String> = cells(&record, now).into_iter().chain(doubt).chain(summary).collect();
    columns.line(&cells).into_bytes()
}
