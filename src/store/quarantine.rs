//! Putting malformed lines aside, into a file of their own.
//!
//! ```text
//! lock exclusively ─► note where the quarantine ends: what follows may stand in the queue too ─► append the lines, read them back, fsync,
//!   fsync the directory ─► replace the queue without them: the commit ─► forget the note
//! ```
//!
//! Killed before the commit, the lines are in both files: the next run finds the note, and that the lines after it are those that it would
//! append.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{XattrFlags, fgetxattr, fremovexattr, fsetxattr};
use rustix::io::Errno;

use super::files::{QueueFiles, quarantine_of, read_error};
use super::ledger_lines::LedgerLines;
use super::replace::{self, AS_IT_IS, Fate, Fates, Rewritten, Segment};
use super::scan::{ReadOptions, for_each_chunk};
use super::{Error, attributes, directory_of};
use crate::format::envelope::{self, Line};
use crate::format::ledger::Ledger;
use crate::format::lines::LineSplitter;
use crate::format::retention::Amount;
use crate::format::time::Timestamp;

/// What was put aside.
#[derive(Debug, Default)]
pub struct Outcome {
    /// The lines.
    pub moved: Amount,
    /// Where they are now, if there are any.
    pub path: Option<PathBuf>,
    /// What became of the queue in the end; `None` if there is none.
    pub rewritten: Option<Rewritten>,
}

/// Moves malformed lines out of the queue. Ledger lines that can't be read stay, and so does everything else.
///
/// # Errors
/// If a ledger can't be read, or the lines can't be written, or the queue can't be replaced. It is then as it was.
pub fn quarantine(files: &QueueFiles, options: &ReadOptions, now: Timestamp) -> Result<Outcome, Error> {
    let mut outcome = Outcome::default();
    for _ in 0..ROUNDS {
        let (mut moved, mut aside) = (Amount::default(), None);
        let rewritten = replace::rewrite(files, options.lock_timeout, now, |queue, end| {
            let judged = judge(files, queue, end, options)?;
            moved = judged.moved;
            if moved.lines > 0 {
                aside = Some(Aside::put(files, &Lines { queue, parts: &judged.malformed, bytes: moved.bytes })?);
            }
            Ok(replace::Plan { ledger: judged.ledger, segments: vec![judged.segment], changes: moved.lines > 0 })
        })?;
        if let Some(aside) = aside {
            aside.settle();
            outcome.path = Some(aside.path);
        }
        outcome.moved += moved;
        let may_have_more = rewritten.as_ref().is_some_and(|rewritten| rewritten.late.lines > 0);
        outcome.rewritten = rewritten;
        if !may_have_more {
            break;
        }
    }
    Ok(outcome)
}

/// Late lines come into the queue in one round, and are judged in the next.
const ROUNDS: usize = 2;
/// How many bytes are copied at once.
const BUFFER: usize = 256 * 1024;

/// What becomes of lines.
struct Judged {
    ledger: Ledger,
    segment: Segment<'static>,
    /// Where the malformed lines stand, with their `\n`.
    malformed: Vec<Range<u64>>,
    moved: Amount,
}

/// Judges the first `end` bytes of the queue.
fn judge(files: &QueueFiles, queue: &File, end: u64, options: &ReadOptions) -> Result<Judged, Error> {
    let mut splitter = LineSplitter::new(options.max_line);
    let (mut fates, mut malformed, mut moved) = (Fates::default(), Vec::<Range<u64>>::new(), Amount::default());
    let mut ledgers = LedgerLines::new();
    let (mut at, mut kept_bytes, mut number) = (0, 0, 0);
    let read = for_each_chunk(queue, 0..end, options.buffer, |chunk| {
        splitter.push(chunk, |line| {
            let bytes = line.size();
            number += 1;
            let fate = match envelope::parse_raw(line) {
                Ok(Line::Ledger(ledger)) => {
                    // A new one takes the place of the first.
                    let fate = if ledgers.first.is_none() { Fate::Dropped } else { Fate::Kept };
                    ledgers.add(*ledger, ());
                    fate
                }
                Ok(_) => Fate::Kept,
                Err(fault) if fault.is_ledger => {
                    ledgers.add_malformed(number, fault);
                    Fate::Kept
                }
                Err(_) => {
                    moved += Amount { lines: 1, bytes };
                    match malformed.last_mut() {
                        Some(last) if last.end == at => last.end += bytes,
                        _ => malformed.push(at..at + bytes),
                    }
                    Fate::Dropped
                }
            };
            fates.push(fate);
            at += bytes;
            kept_bytes += if fate == Fate::Kept { bytes } else { 0 };
        });
        Ok(true)
    });
    read.map_err(|error| read_error(&files.queue, error))?;
    ledgers.require_readable(&files.queue)?;
    let LedgerLines { first, generations, .. } = ledgers;
    let ledger = Ledger { totals: first.map(|((), totals)| totals).unwrap_or_default(), generations };
    let segment = Segment { range: 0..end, fates, edit: AS_IT_IS, added: Vec::new(), kept_bytes };
    Ok(Judged { ledger, segment, malformed, moved })
}

/// The file that lines are put aside into.
struct Aside {
    path: PathBuf,
    file: File,
}

/// From which byte on its lines may stand in the queue too: those of a run that has not come to its commit.
const NOTE: &str = "user.handoff.uncommitted";

impl Aside {
    /// Appends these lines, unless a run that was killed has done so.
    fn put(files: &QueueFiles, lines: &Lines<'_>) -> Result<Self, Error> {
        let real = fs::canonicalize(&files.queue).map_err(|error| read_error(&files.queue, error))?;
        let path = quarantine_of(&real);
        let put = || -> io::Result<File> {
            let file = open(&path)?;
            let size = file.metadata()?.len();
            if size == 0 {
                attributes::set_aside(lines.queue, &file, &fs::metadata(directory_of(&path))?)?;
            }
            let noted = noted(&file, size, lines.bytes)?;
            if noted < size && lines.begin_with(&file, noted..size)? {
                lines.write(&file, noted, size - noted)?;
            } else {
                lines.write(&file, end_last_line(&file, size)?, 0)?;
            }
            File::open(directory_of(&path))?.sync_all()?;
            Ok(file)
        };
        let file =
            put().map_err(|error| Error::io(&path, "cannot be written, so the queue is left as it was", error))?;
        Ok(Self { path, file })
    }

    /// Says that the lines are no longer in the queue.
    fn settle(&self) {
        // Should that fail, the same lines, malformed anew, would be taken for these, and need not be appended twice.
        let _ = fremovexattr(&self.file, NOTE);
    }
}

/// Opens the quarantine, or makes it. It is no link to anywhere else: what is malformed may be of another user's making.
fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = options.open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_file() && metadata.nlink() == 1 {
        return Ok(file);
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file with one name: move it away"))
}

/// Where the lines of a run begin that was killed, in a quarantine of this size; its end if there was none.
fn noted(file: &File, size: u64, bytes: u64) -> io::Result<u64> {
    let mut value = [0; 20];
    let noted = match fgetxattr(file, NOTE, &mut value[..]) {
        Ok(length) => std::str::from_utf8(&value[..length]).ok().and_then(|value| value.parse().ok()),
        // Where nothing can be noted, the lines that stand there last are taken for those of such a run if they are the same.
        Err(Errno::NOTSUP) => Some(size.saturating_sub(bytes)),
        Err(Errno::NODATA | Errno::RANGE) => None,
        Err(error) => return Err(error.into()),
    };
    Ok(noted.filter(|noted| *noted <= size).unwrap_or(size))
}

/// Makes sure that a new line can begin at the end of a file of this size, and returns where.
fn end_last_line(file: &File, size: u64) -> io::Result<u64> {
    let mut last = [b'\n'];
    file.read_exact_at(&mut last[..usize::from(size > 0)], size.saturating_sub(1))?;
    if last == *b"\n" {
        return Ok(size);
    }
    file.write_all_at(b"\n", size)?;
    Ok(size + 1)
}

/// Lines of the queue.
struct Lines<'q> {
    queue: &'q File,
    /// Where they stand, with their `\n`.
    parts: &'q [Range<u64>],
    /// How many bytes they have together.
    bytes: u64,
}

impl Lines<'_> {
    /// Passes over their bytes. `each` is told how many came before, and says whether to go on.
    fn for_each_chunk(&self, mut each: impl FnMut(u64, &[u8]) -> io::Result<bool>) -> io::Result<()> {
        let (mut at, mut goes_on) = (0, true);
        for part in self.parts {
            for_each_chunk(self.queue, part.clone(), BUFFER, |chunk| {
                goes_on = goes_on && each(at, chunk)?;
                at += chunk.len() as u64;
                Ok(goes_on)
            })?;
        }
        Ok(())
    }

    /// Whether a part of a file is how they begin.
    fn begin_with(&self, file: &File, range: Range<u64>) -> io::Result<bool> {
        let length = range.end - range.start;
        let (mut is_same, mut buffer) = (length <= self.bytes, Vec::new());
        self.for_each_chunk(|at, chunk| {
            let wanted = usize::try_from(length.saturating_sub(at)).unwrap_or(usize::MAX).min(chunk.len());
            buffer.resize(wanted, 0);
            file.read_exact_at(&mut buffer, range.start + at)?;
            is_same = is_same && buffer == chunk[..wanted];
            Ok(is_same && wanted == chunk.len())
        })?;
        Ok(is_same)
    }

    /// Writes them to a file from `start` on, where so many of their bytes stand already, and makes sure that they are on the disk.
    fn write(&self, file: &File, start: u64, there: u64) -> io::Result<()> {
        match fsetxattr(file, NOTE, start.to_string().as_bytes(), XattrFlags::empty()) {
            Ok(()) | Err(Errno::NOTSUP) => {}
            Err(error) => return Err(error.into()),
        }
        // The note first: lines without it would be appended once more.
        file.sync_all()?;
        self.for_each_chunk(|at, chunk| {
            let skipped = usize::try_from(there.saturating_sub(at)).unwrap_or(usize::MAX).min(chunk.len());
            file.write_all_at(&chunk[skipped..], start + at + skipped as u64)?;
            Ok(true)
        })?;
        if !self.begin_with(file, start..start + self.bytes)? || file.metadata()?.len() != start + self.bytes {
            return Err(io::Error::other("it does not hold what was written: somebody else writes to it"));
        }
        file.sync_all()
    }
}
