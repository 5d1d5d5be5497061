//! Reading the queue line by line: what `list`, `show`, `status` and `check` look at, with memory for one line.

use std::borrow::Cow;
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::files::{Finding, OpenQueue, QueueFiles, read_error};
use super::ledger_lines::LedgerLines;
use super::scan::{ReadOptions, count_lines, for_each_chunk};
use super::{Error, ErrorKind, lock};
use crate::format::envelope::{self, Line as Parsed};
use crate::format::lines::{LineSplitter, RawLine};

/// The lines of a queue, and the late lines of its generations, while nobody changes them.
#[derive(Debug)]
pub struct Lines<'a> {
    pub(super) files: &'a QueueFiles,
    pub(super) options: &'a ReadOptions,
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

/// Lines that somebody wants to have when writers are not kept out any longer. As many as there is memory for are held in it, the others
/// are read again from the files that they stood in.
#[derive(Debug, Default)]
pub struct Kept {
    held: usize,
    files: Vec<(PathBuf, File)>,
    hasher: RandomState,
}

/// Such a line.
#[derive(Debug)]
pub struct KeptLine(Kind);

#[derive(Debug)]
enum Kind {
    Held(Box<[u8]>),
    InFile { file: usize, range: Range<u64>, hash: u64 },
}

impl Kept {
    /// So many bytes are held.
    const MOST_HELD: usize = 16 * 1024 * 1024;

    /// Keeps a line.
    ///
    /// # Errors
    /// If its file can't be kept open, or the line can't be read.
    pub fn keep(&mut self, line: &Line<'_>) -> Result<KeptLine, Error> {
        if let RawLine::Whole(bytes) = line.raw
            && bytes.len() <= Self::MOST_HELD - self.held
        {
            self.held += bytes.len();
            return Ok(KeptLine(Kind::Held(bytes.into())));
        }
        // The lines of a file come one after the other.
        if self.files.last().is_none_or(|(path, _)| path != line.path) {
            let file = line.file.try_clone().map_err(|error| read_error(line.path, error))?;
            self.files.push((line.path.to_owned(), file));
        }
        let mut hasher = self.hasher.build_hasher();
        line.for_each_chunk(|chunk| hasher.write(chunk))?;
        Ok(KeptLine(Kind::InFile { file: self.files.len() - 1, range: line.range.clone(), hash: hasher.finish() }))
    }

    /// A line that was kept, as it stood there.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if somebody has rewritten its file in place.
    pub fn read<'l>(&self, line: &'l KeptLine) -> Result<Cow<'l, [u8]>, Error> {
        let (file, range, hash) = match &line.0 {
            Kind::Held(line) => return Ok(Cow::Borrowed(line)),
            Kind::InFile { file, range, hash } => (*file, range, *hash),
        };
        let (path, file) = &self.files[file];
        let mut line = vec![0; usize::try_from(range.end - range.start).unwrap_or(usize::MAX)];
        match file.read_exact_at(&mut line, range.start) {
            Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => return Err(read_error(path, error)),
            Err(_) => {}
            Ok(()) => {
                let mut hasher = self.hasher.build_hasher();
                hasher.write(&line);
                if hasher.finish() == hash {
                    return Ok(Cow::Owned(line));
                }
            }
        }
        let what = "was rewritten in place while its lines were printed, so that these are not all";
        Err(Error::new(ErrorKind::Busy, path, what).advise("try again"))
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
