//! Offload: values that are too large for a line move into the blob store, and handles take their place.
//!
//! ```text
//! survey under the shared lock: is there anything to move? ─► many times: read some of it under the shared lock, put it into the store
//!   without ─► the blobs are on disk ─► under the exclusive lock replace the queue: what is in these blobs gets handles
//! ```
//!
//! The lines are read again under each lock, and nothing is concluded from what they were before: a record that has changed, come or gone
//! meanwhile is found as it is. One whose values are not among the blobs just put waits for the next run.

use std::fs::File;
use std::io;
use std::ops::{AddAssign, Range};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};

use super::blob::BlobUsage;
use super::blob_writer::{BlobWriter, Durable};
use super::files::{OpenQueue, QueueFiles, read_error};
use super::ledger_lines::LedgerLines;
use super::replace::{self, AS_IT_IS, Edit, Fate, Fates, Rewritten, Segment};
use super::scan::{self, Fold, ReadOptions, for_each_chunk, next_line};
use super::{Error, directory_of, lock};
use crate::format::blob::{Digest, MediaType};
use crate::format::envelope::{self, Envelope, Line};
use crate::format::ledger::Ledger;
use crate::format::lines::{LineSplitter, RawLine};
use crate::format::offload::{Content, Rule};
use crate::format::time::Timestamp;

/// What offload made of a queue.
#[derive(Debug, Default)]
pub struct Outcome {
    /// What was moved, or would be, and what was not.
    pub counts: Counts,
    /// The values that would be moved, in a preview.
    pub values: Vec<Value>,
    /// The blobs that were written.
    pub written: BlobUsage,
    /// How many blobs were there already.
    pub reused: u64,
    /// What became of the queue.
    pub rewritten: Rewritten,
}

/// What was found to be too large.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Records with values to move.
    pub records: u64,
    /// These values.
    pub values: u64,
    /// Records with such values that stay, because they are in doubt.
    pub records_in_doubt: u64,
    /// Strings that stay, because they hold lone surrogates.
    pub lone_surrogates: u64,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, more: Self) {
        self.records += more.records;
        self.values += more.values;
        self.records_in_doubt += more.records_in_doubt;
        self.lone_surrogates += more.lone_surrogates;
    }
}

/// A value that is to be moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    /// Its line, from 1.
    pub line: u64,
    /// Its record.
    pub id: Arc<str>,
    /// Where in the line it stands, as a JSON pointer.
    pub pointer: String,
    /// How many bytes its blob has.
    pub bytes: u64,
    /// What the blob is.
    pub media_type: MediaType,
    /// The blob's name.
    pub digest: Digest,
}

/// Says what [`offload`] would do, and changes nothing.
///
/// # Errors
/// If the queue can't be read.
pub fn preview(files: &QueueFiles, options: &ReadOptions, rule: Rule) -> Result<Outcome, Error> {
    let may_move = |_: &Digest| true;
    let edit = |line: &[u8]| replaced(line, rule, &may_move);
    let pass = Pass { options, rule, may_move: Some(&may_move), edit: &edit, lists: true };
    let mut outcome = Outcome::default();
    let rewritten = replace::preview(files, options.lock_timeout, |file, end| {
        let mut judged = judge(files, file, end, pass)?;
        (outcome.counts, outcome.values) = (judged.counts, std::mem::take(&mut judged.values));
        Ok(judged.into_plan())
    })?;
    outcome.rewritten = rewritten.unwrap_or_else(|| Rewritten::of_nothing(files));
    Ok(outcome)
}

/// Moves values that are too large into the blob store, and takes over what reached earlier generations of the queue.
///
/// # Errors
/// If the queue can't be read or replaced, or its ledger can't be read, or a blob can't be written. The queue is then as it was.
pub fn offload(files: &QueueFiles, options: &ReadOptions, rule: Rule, now: Timestamp) -> Result<Outcome, Error> {
    files.require_directory()?;
    let look = Pass { options, rule, may_move: None, edit: AS_IT_IS, lists: false };
    let (survey, _) = lock::shared(&files.lock, options.lock_timeout, || {
        let Some(queue) = OpenQueue::open(files)? else { return Ok(None) };
        let size = queue.metadata.len();
        let judged = judge(files, &queue.file, size, look)?;
        Ok(Some(Survey { counts: judged.counts, start: judged.start, size, is_settled: queue.generations.is_empty() }))
    })?;
    let mut outcome = Outcome::default();
    let Some(survey) = survey else { return Ok(Outcome { rewritten: Rewritten::of_nothing(files), ..outcome }) };
    outcome.counts = survey.counts;
    let durable = survey.start.map(|start| put(files, options, rule, start..survey.size)).transpose()?;
    if durable.is_none() && survey.is_settled {
        return Ok(outcome);
    }

    let may_move = |digest: &Digest| durable.as_ref().is_some_and(|durable| durable.contains(digest));
    let edit = |line: &[u8]| replaced(line, rule, &may_move);
    let pass = Pass { may_move: Some(&may_move), edit: &edit, ..look };
    let rewritten = replace::rewrite(files, options.lock_timeout, now, |file, end| {
        durable.as_ref().map_or(Ok(()), Durable::require_in_place)?;
        let judged = judge(files, file, end, pass)?;
        outcome.counts = judged.counts;
        Ok(judged.into_plan())
    })?;
    outcome.rewritten = rewritten.unwrap_or_else(|| Rewritten::of_nothing(files));
    if let Some(durable) = durable {
        let note = "the queue has been replaced, and refers to blobs that lie where the store is now: move it back";
        let moved_away = durable.require_in_place().err().map(|error| error.note(note));
        outcome.rewritten.unsettled = moved_away.or(outcome.rewritten.unsettled);
        (outcome.written, outcome.reused) = (durable.written, durable.reused);
        outcome.rewritten.findings.splice(..0, durable.findings);
    }
    Ok(outcome)
}

/// What there is to do.
struct Survey {
    counts: Counts,
    /// Where the first record begins that has a value to move.
    start: Option<u64>,
    /// The queue's size.
    size: u64,
    /// Whether there is no earlier generation.
    is_settled: bool,
}

/// Puts the values of records in a range of the queue that are too large into the store.
fn put(files: &QueueFiles, options: &ReadOptions, rule: Rule, range: Range<u64>) -> Result<Durable, Error> {
    let writer = BlobWriter::open(&files.blobs, &directory_of(&files.queue), options.lock_timeout)?;
    let worth_starting = usize::try_from((range.end - range.start) / options.min_segment.max(1)).unwrap_or(usize::MAX);
    let start = Mutex::new(range.start);
    writer.put_all(worth_starting.min(MAX_WRITERS), || {
        let mut start = start.lock().unwrap_or_else(PoisonError::into_inner);
        if *start >= range.end {
            return Ok(None);
        }
        // Writers to the queue wait only while some values are read, not while these are written to the disk.
        let read = || read_some(files, options, rule, *start..range.end);
        let ((contents, next), _) = lock::shared(&files.lock, options.lock_timeout, read)?;
        *start = next;
        Ok(Some(contents))
    })
}

/// How many threads write blobs or wait for the disk at most, whatever the number of processors. Each takes memory for some values.
const MAX_WRITERS: usize = 4;
/// So many bytes of values a thread takes at once, or those of one line.
const MAX_READ: usize = 128 * 1024;
/// A thread looks for them in so much of the queue at once, or in one line.
const MAX_LOOKED_AT: u64 = 32 * 1024 * 1024;
/// How many bytes of the queue are read at once to find them.
const READ_BUFFER: usize = 64 * 1024;

/// Reads some values that are too large, and tells where to go on.
///
/// Workers may have rewritten the queue since, so that another line is here now, or the middle of one.
fn read_some(
    files: &QueueFiles,
    options: &ReadOptions,
    rule: Rule,
    range: Range<u64>,
) -> Result<(Vec<String>, u64), Error> {
    let (mut contents, mut bytes) = (Vec::new(), 0);
    let Some(queue) = OpenQueue::open(files)? else { return Ok((contents, range.end)) };
    let end = range.end.min(queue.metadata.len());
    if range.start >= end {
        return Ok((contents, range.end));
    }
    let mut read = || -> io::Result<u64> {
        let mut at = range.start;
        let mut before = [b'\n'];
        if at > 0 {
            queue.file.read_exact_at(&mut before, at - 1)?;
        }
        if before != *b"\n" {
            at = next_line(&queue.file, at..end)?;
        }
        let start = at;
        let (mut splitter, mut is_full) = (LineSplitter::new(options.max_line), false);
        for_each_chunk(&queue.file, at..end, READ_BUFFER, |chunk| {
            splitter.push(chunk, |line| {
                at += line.size();
                if let Some(envelope) = record(line, rule)
                    && envelope.doubt.is_none()
                {
                    for content in rule.judge(&envelope).contents() {
                        bytes += content.text.len();
                        contents.push(content.text.into_owned());
                    }
                }
            });
            is_full = bytes >= MAX_READ || at - start >= MAX_LOOKED_AT;
            Ok(!is_full)
        })?;
        Ok(if is_full { at } else { range.end })
    };
    let next = read().map_err(|error| read_error(&files.queue, error))?;
    Ok((contents, next))
}

/// A line that is a record and long enough to hold a value that is too large.
fn record(line: RawLine<'_>, rule: Rule) -> Option<Envelope<'_>> {
    match line {
        RawLine::Whole(line) if line.len() > rule.max_bytes => match envelope::parse(line) {
            Ok(Line::Record(envelope)) => Some(envelope),
            _ => None,
        },
        _ => None,
    }
}

/// A line with handles in place of its values that are too large, if these may be moved.
fn replaced(line: &[u8], rule: Rule, may_move: MayMove<'_>) -> Vec<u8> {
    let Some(envelope) = record(RawLine::Whole(line), rule) else { return line.to_vec() };
    let oversized = rule.judge(&envelope);
    let contents = oversized.contents();
    let digests = digests_of(&contents);
    if digests.iter().all(may_move) { oversized.replaced(&contents, &digests).into_bytes() } else { line.to_vec() }
}

fn digests_of(contents: &[Content<'_>]) -> Vec<Digest> {
    contents.iter().map(Content::digest).collect()
}

/// Whether a value may be moved, by the name of its blob.
type MayMove<'a> = &'a (dyn Fn(&Digest) -> bool + Sync);

/// What is wanted of the lines.
#[derive(Clone, Copy)]
struct Pass<'a> {
    options: &'a ReadOptions,
    rule: Rule,
    /// Which values may be moved. If none is to be moved yet, digests need not be worked out.
    may_move: Option<MayMove<'a>>,
    edit: &'a Edit<'a>,
    /// Whether values are listed.
    lists: bool,
}

/// Judges the whole lines among the first `end` bytes of the queue.
fn judge<'a>(files: &QueueFiles, file: &File, end: u64, pass: Pass<'a>) -> Result<Judged<'a>, Error> {
    let failed = |error| read_error(&files.queue, error);
    let mut judged = scan::scan(file, end, pass.options, || Judged::new(pass)).map_err(failed)?;
    judged.ledgers.require_readable(&files.queue)?;
    // A new ledger takes the place of this one.
    if let Some((FirstLedger { segment, line, bytes }, _)) = &judged.ledgers.first
        && let Some(segment) = judged.segments.get_mut(*segment)
    {
        segment.fates.set(*line, Fate::Dropped);
        segment.kept_bytes -= bytes;
    }
    Ok(judged)
}

/// What becomes of lines.
struct Judged<'a> {
    pass: Pass<'a>,
    ledgers: LedgerLines<FirstLedger>,
    lines: u64,
    counts: Counts,
    values: Vec<Value>,
    /// Where the first record begins that has a value to move.
    start: Option<u64>,
    segments: Vec<Segment<'a>>,
}

/// The place of the first ledger line.
struct FirstLedger {
    segment: usize,
    /// From 0, in the segment.
    line: u64,
    bytes: u64,
}

impl<'a> Judged<'a> {
    fn new(pass: Pass<'a>) -> Self {
        Self {
            pass,
            ledgers: LedgerLines::new(),
            lines: 0,
            counts: Counts::default(),
            values: Vec::new(),
            start: None,
            segments: Vec::new(),
        }
    }

    fn into_plan(self) -> replace::Plan<'a> {
        let LedgerLines { first, generations, .. } = self.ledgers;
        let totals = first.map(|(_, totals)| totals).unwrap_or_default();
        let changes = self.counts.records > 0;
        replace::Plan { ledger: Ledger { totals, generations }, segments: self.segments, changes }
    }

    /// Says what becomes of the next line, which begins at `at` and is line `in_segment` of its segment, and how many bytes it will have.
    fn add(&mut self, line: RawLine<'_>, at: u64, in_segment: u64) -> (Fate, u64) {
        self.lines += 1;
        let kept = (Fate::Kept, line.size());
        if let RawLine::Whole(line) = line
            && line.len() <= self.pass.rule.max_bytes
            && !self.ledgers.may_be(line)
        {
            return kept;
        }
        match envelope::parse_raw(line) {
            Ok(Line::Record(envelope)) => self.add_record(&envelope, at).map_or(kept, |bytes| (Fate::Edited, bytes)),
            Ok(Line::Ledger(ledger)) => {
                let place = FirstLedger { segment: self.segments.len(), line: in_segment, bytes: kept.1 };
                self.ledgers.add(*ledger, place);
                kept
            }
            Ok(Line::Blank) => kept,
            Err(malformed) => {
                self.ledgers.add_malformed(self.lines, malformed);
                kept
            }
        }
    }

    /// If the record is to be changed, how many bytes its line will have.
    fn add_record(&mut self, envelope: &Envelope<'_>, at: u64) -> Option<u64> {
        let oversized = self.pass.rule.judge(envelope);
        if envelope.doubt.is_some() {
            self.counts.records_in_doubt += u64::from(!oversized.is_empty());
            return None;
        }
        self.counts.lone_surrogates += oversized.inexact;
        if oversized.is_empty() {
            return None;
        }
        let mut bytes = None;
        if let Some(may_move) = self.pass.may_move {
            let contents = oversized.contents();
            let digests = digests_of(&contents);
            if !digests.iter().all(may_move) {
                return None;
            }
            let len = oversized.replaced(&contents, &digests).len();
            // Handles may be longer than what they stand for, and the line must not become one that nobody reads.
            if len > self.pass.options.max_line {
                return None;
            }
            bytes = Some(len as u64 + 1);
            if self.pass.lists {
                let id: Arc<str> = envelope.id.as_ref().into();
                for ((content, digest), pointer) in contents.iter().zip(digests).zip(oversized.pointers()) {
                    self.values.push(Value {
                        line: self.lines,
                        id: Arc::clone(&id),
                        pointer,
                        bytes: content.text.len() as u64,
                        media_type: content.media_type,
                        digest,
                    });
                }
            }
        }
        self.counts.records += 1;
        self.counts.values += oversized.len() as u64;
        self.start = self.start.or(Some(at));
        bytes
    }
}

impl Fold for Judged<'_> {
    fn add_segment(&mut self, file: &File, range: Range<u64>) -> io::Result<()> {
        let mut splitter = LineSplitter::new(self.pass.options.max_line);
        let (mut fates, mut kept_bytes, mut at, mut line_in_segment) = (Fates::default(), 0, range.start, 0);
        for_each_chunk(file, range.clone(), self.pass.options.buffer, |chunk| {
            splitter.push(chunk, |line| {
                let (fate, bytes) = self.add(line, at, line_in_segment);
                fates.push(fate);
                kept_bytes += bytes;
                at += line.size();
                line_in_segment += 1;
            });
            Ok(true)
        })?;
        self.segments.push(Segment { range, fates, edit: self.pass.edit, added: Vec::new(), kept_bytes });
        Ok(())
    }

    fn depends_on_order(&self) -> bool {
        false
    }

    fn append(&mut self, later: Self) {
        let before = self.lines;
        self.lines += later.lines;
        self.counts += later.counts;
        self.values.extend(later.values.into_iter().map(|value| Value { line: before + value.line, ..value }));
        self.start = self.start.or(later.start);
        let segments = self.segments.len();
        let moved = |first: FirstLedger| FirstLedger { segment: segments + first.segment, ..first };
        self.ledgers.append(later.ledgers, before, moved);
        self.segments.extend(later.segments);
    }
}
