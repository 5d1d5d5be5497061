//! Finding a few records among all lines of the queue, and what to make of them in one replacement.

use std::fs::File;
use std::io;
use std::ops::Range;

use memchr::memmem::Finder;

use super::Error;
use super::files::{OpenQueue, QueueFiles, read_error};
use super::ledger_lines::LedgerLines;
use super::replace::{self, Segment};
use super::scan::{self, Fold, ReadOptions, for_each_chunk, last_line_end};
use crate::format::envelope::{self, Envelope, Line};
use crate::format::ledger::{Ledger, LedgerTotals, Totals};
use crate::format::lines::{LineSplitter, RawLine};

/// Tells lines apart that need not be parsed, because they can't hold these strings.
pub(super) struct Filter {
    all: Vec<Finder<'static>>,
    any: Vec<Finder<'static>>,
    escape: Finder<'static>,
}

impl Filter {
    /// Lines that hold all of these strings.
    pub(super) fn all(strings: &[&str]) -> Self {
        let all = strings.iter().filter_map(|string| finder(string)).collect();
        Self { all, any: Vec::new(), escape: Finder::new(ESCAPE) }
    }

    /// Lines that hold one of these strings, which are at least one.
    pub(super) fn any(strings: &[&str]) -> Self {
        let any: Option<Vec<_>> = strings.iter().map(|string| finder(string)).collect();
        Self { all: Vec::new(), any: any.unwrap_or_default(), escape: Finder::new(ESCAPE) }
    }

    /// Lines that hold a string that begins so.
    pub(super) fn beginning(prefix: &str) -> Self {
        let quoted = finder(prefix)
            .map(|finder| finder.needle().strip_suffix(b"\"").map(|needle| Finder::new(needle).into_owned()));
        Self { all: quoted.flatten().into_iter().collect(), any: Vec::new(), escape: Finder::new(ESCAPE) }
    }

    fn passes(&self, line: &[u8]) -> bool {
        let holds = |finder: &Finder<'_>| finder.find(line).is_some();
        self.all.iter().all(holds) && (self.any.is_empty() || self.any.iter().any(holds)) || self.has_spelt_out(line)
    }

    /// Whether a line has escapes where none are needed, so that any string may stand there in disguise.
    fn has_spelt_out(&self, line: &[u8]) -> bool {
        self.escape.find_iter(line).any(|at| matches!(line.get(at + ESCAPE.len()), Some(b'2'..=b'7')))
    }
}

const ESCAPE: &[u8] = br"\u00";

/// Finds a string where it stands in JSON, if there is only one way to write it that needs no escapes of ASCII.
fn finder(string: &str) -> Option<Finder<'static>> {
    let is_plain = string.bytes().all(|byte| matches!(byte, b' '..=b'~') && !matches!(byte, b'"' | b'\\' | b'/'));
    is_plain.then(|| Finder::new(format!("\"{string}\"").as_bytes()).into_owned())
}

/// Where a line stands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// Its number, from 1.
    pub(super) line: u64,
    start: u64,
    /// Its `\n` included.
    end: u64,
}

/// A record that somebody has looked for.
#[derive(Debug)]
pub(super) struct Found<T> {
    pub(super) place: Place,
    pub(super) what: T,
}

/// What becomes of a line.
pub(super) struct Change {
    pub(super) place: Place,
    /// The line that stands there now, without the `\n`.
    pub(super) line: String,
}

/// What is to be taken note of in the ledger.
pub(super) struct Account {
    pub(super) role: String,
    pub(super) kind: String,
    pub(super) totals: Totals,
}

/// What was found.
pub(super) struct Looked<T> {
    pub(super) found: Vec<Found<T>>,
    ledgers: LedgerLines<Place>,
    ranges: Vec<Range<u64>>,
}

impl<T> Looked<T> {
    /// A plan that changes these lines, adds some at the end, and some amounts to the ledger.
    ///
    /// # Errors
    /// If the ledger can't be read.
    pub(super) fn into_plan(
        self,
        files: &QueueFiles,
        changes: &[Change],
        added: &[String],
        accounts: &[Account],
    ) -> Result<replace::Plan<'static>, Error> {
        self.ledgers.require_readable(&files.queue)?;
        let LedgerLines { first, generations, .. } = self.ledgers;
        let with_newline = |line: &String| [line.as_bytes(), b"\n"].concat();
        let is_change = !changes.is_empty() || !added.is_empty();
        let mut cuts: Vec<(Place, Vec<u8>)> =
            changes.iter().map(|change| (change.place, with_newline(&change.line))).collect();
        let mut totals = LedgerTotals::default();
        if let Some((place, first)) = first {
            // A new ledger takes the place of this one.
            cuts.push((place, Vec::new()));
            totals = first;
        }
        cuts.sort_by_key(|(place, _)| place.start);
        for Account { role, kind, totals: amounts } in accounts {
            if *amounts != Totals::default() {
                totals.add(role, kind, amounts);
            }
        }
        let mut segments = Vec::new();
        let mut cuts = cuts.into_iter().peekable();
        for range in self.ranges {
            let mut at = range.start;
            while let Some((place, new)) = cuts.next_if(|(place, _)| place.start < range.end) {
                segments.push(Segment::followed_by(at..place.start, new));
                at = place.end;
            }
            segments.push(Segment::followed_by(at..range.end, Vec::new()));
        }
        if !added.is_empty() {
            segments.push(Segment::followed_by(0..0, added.iter().flat_map(with_newline).collect()));
        }
        Ok(replace::Plan { ledger: Ledger { totals, generations }, segments, changes: is_change })
    }
}

/// Looks at the records that pass the filter among the first `end` bytes of the queue.
///
/// `each` may keep something of a record, and drop what it has kept before.
///
/// # Errors
/// If the queue can't be read.
pub(super) fn look<T: Send>(
    files: &QueueFiles,
    file: &File,
    end: u64,
    options: &ReadOptions,
    filter: &Filter,
    each: Each<'_, T>,
) -> Result<Looked<T>, Error> {
    let new = || Pass { options, filter, each, lines: 0, looked: Looked::nothing() };
    let pass = scan::scan(file, end, options, new).map_err(|error| read_error(&files.queue, error))?;
    Ok(pass.looked)
}

/// Looks at the records of the queue that pass the filter, for who holds the lock; `None` if there is no queue.
///
/// # Errors
/// If it can't be read.
pub(super) fn look_at_queue<T: Send>(
    files: &QueueFiles,
    options: &ReadOptions,
    filter: &Filter,
    each: Each<'_, T>,
) -> Result<Option<Looked<T>>, Error> {
    let Some(queue) = OpenQueue::open(files)? else { return Ok(None) };
    let end = last_line_end(&queue.file, 0..queue.metadata.len()).map_err(|error| read_error(&files.queue, error))?;
    look(files, &queue.file, end, options, filter, each).map(Some)
}

pub(super) type Each<'a, T> = &'a (dyn Fn(&Envelope<'_>, Place, &mut Vec<Found<T>>) + Sync);

impl<T> Looked<T> {
    fn nothing() -> Self {
        Self { found: Vec::new(), ledgers: LedgerLines::new(), ranges: Vec::new() }
    }
}

struct Pass<'a, T> {
    options: &'a ReadOptions,
    filter: &'a Filter,
    each: Each<'a, T>,
    lines: u64,
    looked: Looked<T>,
}

impl<T> Pass<'_, T> {
    fn add(&mut self, line: RawLine<'_>, place: Place) {
        let Looked { found, ledgers, .. } = &mut self.looked;
        if let RawLine::Whole(line) = line
            && !self.filter.passes(line)
            && !ledgers.may_be(line)
        {
            return;
        }
        match envelope::parse_raw(line) {
            Ok(Line::Record(envelope)) => (self.each)(&envelope, place, found),
            Ok(Line::Ledger(ledger)) => ledgers.add(*ledger, place),
            Ok(Line::Blank) => {}
            Err(malformed) => ledgers.add_malformed(place.line, malformed),
        }
    }
}

impl<T: Send> Fold for Pass<'_, T> {
    fn add_segment(&mut self, file: &File, range: Range<u64>) -> io::Result<()> {
        let mut splitter = LineSplitter::new(self.options.max_line);
        let mut start = range.start;
        for_each_chunk(file, range.clone(), self.options.buffer, |chunk| {
            splitter.push(chunk, |line| {
                self.lines += 1;
                let end = start + line.size();
                self.add(line, Place { line: self.lines, start, end });
                start = end;
            });
            Ok(true)
        })?;
        self.looked.ranges.push(range);
        Ok(())
    }

    fn depends_on_order(&self) -> bool {
        false
    }

    fn append(&mut self, later: Self) {
        let before = self.lines;
        let moved = |place: Place| Place { line: before + place.line, ..place };
        let Looked { found, ledgers, ranges } = later.looked;
        let found = found.into_iter().map(|found| Found { place: moved(found.place), ..found });
        self.looked.found.extend(found);
        self.looked.ledgers.append(ledgers, before, moved);
        self.looked.ranges.extend(ranges);
        self.lines += later.lines;
    }
}
