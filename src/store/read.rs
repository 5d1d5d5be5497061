//! Reading the queue line by line: what `list`, `show`, `status` and `check` look at, with memory for one line.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::files::{Finding, OpenQueue, QueueFiles, read_error};
use super::ledger_lines::LedgerLines;
use super::scan::{ReadOptions, count_lines, for_each_chunk};
use super::{Error, lock};
use crate::format::envelope::{self, Line as Parsed};
use crate::format::lines::{LineSplitter, RawLine};

/// The lines of a queue, and the late lines of its generations, while nobody changes them.
#[derive(Debug)]
pub struct Lines<'a> {
    pub(super) files: &'a QueueFiles,
    options: &'a ReadOptions,
    /// `None` if there is none.
    pub(super) queue: Option<OpenQueue>,
}

/// A line and its place.
#[derive(Debug)]
pub struct Line<'a> {
    /// Its file.
    pub path: &'a Path,
    /// Its number in the file, from 1.
    pub number: u64,
    /// Itself, without its `\n`.
    pub raw: RawLine<'a>,
    /// Where it stands in the file.
    range: Range<u64>,
    file: &'a File,
}

impl Line<'_> {
    /// Passes over its bytes in pieces, even if it is too long to be held.
    ///
    /// # Errors
    /// If it can't be read.
    pub(super) fn for_each_chunk(&self, mut each: impl FnMut(&[u8])) -> Result<(), Error> {
        match self.raw {
            RawLine::Whole(line) => each(line),
            RawLine::TooLong { .. } => {
                let read = for_each_chunk(self.file, self.range.clone(), BUFFER, |chunk| {
                    each(chunk);
                    Ok(true)
                });
                read.map_err(|error| read_error(self.path, error))?;
            }
        }
        Ok(())
    }
}

/// How many bytes of a line that is too long are read at once.
const BUFFER: usize = 256 * 1024;

/// What a pass over all lines has met.
#[derive(Debug, Default)]
pub struct Pass {
    /// Whether there is a queue at all.
    pub has_queue: bool,
    /// The queue's size.
    pub queue_bytes: u64,
    /// How many lines there are, of every sort.
    pub lines: u64,
    /// How many of them lie in earlier generations.
    pub late_lines: u64,
    /// How many earlier generations are still on disk.
    pub generations: u64,
    /// Generations whose late lines begin in the middle of a line, and where.
    pub misplaced: Vec<(PathBuf, u64)>,
    /// Files with bytes after their last `\n`, and how many.
    pub unterminated: Vec<(PathBuf, u64)>,
    /// What somebody should look at.
    pub findings: Vec<Finding>,
}

/// Reads the queue while writers are kept out. `read` may be called more than once, and must begin anew each time: what was read
/// beside a writer means nothing.
///
/// # Errors
/// Those of `read`, or if the queue can't be opened, or the lock can't be had in time.
pub fn under_lock<T>(
    files: &QueueFiles,
    options: &ReadOptions,
    mut read: impl FnMut(&Lines<'_>) -> Result<T, Error>,
) -> Result<T, Error> {
    files.require_directory()?;
    let open_and_read = || read(&Lines { files, options, queue: OpenQueue::open(files)? });
    lock::shared(&files.lock, options.lock_timeout, open_and_read).map(|(value, _)| value)
}

/// Lines that stand together in a file.
struct Part<'f> {
    path: &'f Path,
    file: &'f File,
    range: Range<u64>,
    /// How many lines come before them.
    before: u64,
}

impl Lines<'_> {
    /// Passes over all lines in order.
    ///
    /// # Errors
    /// Those of `each`, or if anything can't be read.
    pub fn for_each(&self, mut each: impl FnMut(&Line<'_>) -> Result<(), Error>) -> Result<Pass, Error> {
        let Some(queue) = &self.queue else { return Ok(Pass::default()) };
        let path = self.files.queue.as_path();
        // Writers without the lock may append while we read. What they append now is for the next reading.
        let size = queue.metadata.len();
        let mut pass = Pass { has_queue: true, queue_bytes: size, ..Pass::default() };
        let mut ledgers = LedgerLines::new();
        let part = Part { path, file: &queue.file, range: 0..size, before: 0 };
        self.for_each_of(&part, &mut pass, |line| {
            if let RawLine::Whole(bytes) = line.raw
                && ledgers.may_be(bytes)
                && let Ok(Parsed::Ledger(ledger)) = envelope::parse(bytes)
            {
                ledgers.add(*ledger, ());
            }
            each(line)
        })?;
        if queue.file.metadata().map_err(|error| read_error(path, error))?.len() < size {
            return Err(read_error(path, io::ErrorKind::UnexpectedEof.into()));
        }

        let (in_queue, mut findings) = (pass.lines, Vec::new());
        pass.generations = queue.for_each_late(&ledgers.generations, &mut findings, |path, file, range| {
            if range.is_empty() {
                return Ok(());
            }
            let failed = |error| read_error(path, error);
            let before = count_lines(file, 0..range.start, self.options.buffer).map_err(failed)?;
            let last_before = range.start.saturating_sub(1)..range.start;
            if count_lines(file, last_before.clone(), 1).map_err(failed)? < last_before.end - last_before.start {
                pass.misplaced.push((path.to_owned(), range.start));
            }
            self.for_each_of(&Part { path, file, range, before }, &mut pass, &mut each)
        })?;
        pass.late_lines = pass.lines - in_queue;
        pass.findings = findings;
        Ok(pass)
    }

    fn for_each_of(
        &self,
        part: &Part<'_>,
        pass: &mut Pass,
        mut each: impl FnMut(&Line<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let &Part { path, file, ref range, before } = part;
        let mut splitter = LineSplitter::new(self.options.max_line);
        let (mut at, mut number, mut result) = (range.start, before, Ok(()));
        let read = for_each_chunk(file, range.clone(), self.options.buffer, |chunk| {
            splitter.push(chunk, |raw| {
                if result.is_ok() {
                    let start = at;
                    at += raw.size();
                    number += 1;
                    result = each(&Line { path, number, raw, range: start..at - 1, file });
                }
            });
            Ok(result.is_ok())
        });
        read.map_err(|error| read_error(path, error)).and(result)?;
        pass.lines += number - before;
        if at < range.end {
            pass.unterminated.push((path.to_owned(), range.end - at));
        }
        Ok(())
    }
}
