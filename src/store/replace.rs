//! Replacing the queue while others append to it without the lock: the one primitive behind every tool that rewrites it.
//!
//! ```text
//! Snapshot::take      under the exclusive lock: remove what a dead run left, note where the last whole line ends
//! Snapshot::drain     find late lines in earlier generations; remove those that are proven drained
//! Snapshot::replace   write temporary ─► link queue as queue.gen.<n> ─► rename temporary to queue, the commit
//! settle              the same again while lines arrive late
//! ```
//!
//! Killed at any point, either the old queue or the new one is in place, each whole. What a dead run leaves (a temporary file, a second name
//! for the queue) the next one removes. What reaches the old file after the snapshot is not lost either: the file keeps a name, and the
//! ledger in the new queue says up to where it has been taken over.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File, Metadata};
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, fadvise};

use super::atomic_file::{self, Temporary};
use super::lease::Lease;
use super::lock::ExclusiveLock;
use super::queue::{Finding, QueueFiles, generations, missing, read_error, stem};
use super::scan::{count_lines, for_each_chunk, in_parallel, last_line_end};
use super::{Error, ErrorKind, attributes, directory_of, open_regular};
use crate::format::ledger::{Ledger, LedgerTotals};
use crate::format::retention::Amount;
use crate::format::time::Timestamp;

/// A set of the lines of a range, one bit a line, in order.
#[derive(Debug, Default)]
pub(super) struct LineSet {
    bits: Vec<u64>,
    len: u64,
}

impl LineSet {
    /// Says of the next line whether it is in the set.
    pub(super) fn push(&mut self, is_in: bool) {
        if self.len.is_multiple_of(64) {
            self.bits.push(0);
        }
        if let Some(last) = self.bits.last_mut() {
            *last |= u64::from(is_in) << (self.len % 64);
        }
        self.len += 1;
    }

    /// Whether a line, counted from 0, is in the set.
    fn contains(&self, line: u64) -> bool {
        let word = usize::try_from(line / 64).ok().and_then(|index| self.bits.get(index));
        word.is_some_and(|word| word >> (line % 64) & 1 == 1)
    }
}

/// Whole lines of the queue, and which of them go on.
#[derive(Debug)]
pub(super) struct Piece {
    /// Where they are.
    pub(super) range: Range<u64>,
    /// The lines that do not go on.
    pub(super) dropped: LineSet,
    /// How many bytes the others have.
    pub(super) kept_bytes: u64,
}

/// The queue as it is at one moment, under the exclusive lock.
#[derive(Debug)]
pub(super) struct Snapshot<'l> {
    lock: &'l ExclusiveLock,
    /// The queue's real name, behind all links.
    path: PathBuf,
    directory: PathBuf,
    pub(super) file: File,
    metadata: Metadata,
    /// Where the last whole line ends.
    pub(super) end: u64,
    /// What is named like an earlier generation.
    generations: Vec<(u64, PathBuf)>,
}

/// What earlier generations still held.
#[derive(Debug, Default)]
pub(super) struct Drain {
    late: Vec<Late>,
    /// Of each generation that stays, how many bytes will have been taken over.
    offsets: BTreeMap<u64, u64>,
    /// The highest number that a generation has, on disk or in the ledger.
    highest: u64,
    /// The late lines.
    pub(super) lines: Amount,
    /// How many generations were proven drained, and removed.
    pub(super) removed: u64,
    pub(super) findings: Vec<Finding>,
}

impl Drain {
    /// Whether no late lines have been found.
    pub(super) fn is_empty(&self) -> bool {
        self.late.is_empty()
    }
}

/// Late lines of one generation.
#[derive(Debug)]
struct Late {
    path: PathBuf,
    file: File,
    range: Range<u64>,
    /// Whether they lack the last `\n`, and will never get it.
    unterminated: bool,
}

/// The queue after a commit.
#[derive(Debug)]
pub(super) struct Committed {
    /// Device and inode.
    identity: (u64, u64),
    pub(super) ledger: Ledger,
    ledger_line: String,
}

/// Whether generations that nobody writes into any more are looked for, which is for the first cycle of a run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Prove {
    Yes,
    No,
}

/// How often a run replaces the queue at most, while lines arrive late.
const MAX_CYCLES: usize = 5;
/// An offset in the ledger line has at most so many digits.
const MAX_DIGITS: usize = 20;

impl<'l> Snapshot<'l> {
    /// Cleans up after dead runs and takes a snapshot; `None` if there is no queue.
    ///
    /// # Errors
    /// If that fails, or if the queue is no file that could be replaced.
    pub(super) fn take(files: &QueueFiles, lock: &'l ExclusiveLock) -> Result<Option<Self>, Error> {
        let Some(file) = open_regular(&files.queue)? else {
            return missing(files).map(|()| None);
        };
        let failed = |error| read_error(&files.queue, error);
        let path = fs::canonicalize(&files.queue).map_err(failed)?;
        let directory = directory_of(&path);
        let metadata = file.metadata().map_err(failed)?;
        atomic_file::remove_abandoned(&directory, path.file_name().unwrap_or_default());
        let mut others = Vec::new();
        for (number, other) in generations(&directory, stem(&path))? {
            let is_queue = fs::symlink_metadata(&other).is_ok_and(|other| identity(&other) == identity(&metadata));
            if is_queue {
                let failed = |error| Error::io(&other, "a second name of the queue, cannot be removed", error);
                fs::remove_file(&other).map_err(failed)?;
            } else {
                others.push((number, other));
            }
        }
        let metadata = file.metadata().map_err(failed)?;
        if metadata.nlink() != 1 {
            let what = format!(
                "has {} names (hard links), and a new file could take the place of only one of them",
                metadata.nlink()
            );
            return Err(Error::new(ErrorKind::Io, &path, what).advise("remove the others; find -samefile lists them"));
        }
        let end = last_line_end(&file, 0..metadata.len()).map_err(failed)?;
        Ok(Some(Self { lock, path, directory, file, metadata, end, generations: others }))
    }

    /// Looks for late lines in the generations that the ledger lists with these offsets.
    ///
    /// # Errors
    /// If a generation can't be read or removed.
    pub(super) fn drain(&self, offsets: &BTreeMap<u64, u64>, prove: Prove) -> Result<Drain, Error> {
        let on_disk = self.generations.iter().map(|(number, _)| *number);
        let highest = on_disk.chain(offsets.keys().copied()).max().unwrap_or(0);
        let mut drain = Drain { highest, ..Drain::default() };
        for (number, path) in &self.generations {
            match offsets.get(number) {
                Some(&offset) => self.drain_one(*number, path, offset, prove, &mut drain)?,
                None => drain.findings.push(Finding {
                    path: path.clone(),
                    line: None,
                    message: "a generation that the queue's ledger does not list: left alone".to_owned(),
                }),
            }
        }
        Ok(drain)
    }

    fn drain_one(&self, number: u64, path: &Path, offset: u64, prove: Prove, drain: &mut Drain) -> Result<(), Error> {
        let failed = |error| read_error(path, error);
        let Some(file) = open_regular(path)? else { return Ok(()) };
        let mut find = |message: String| drain.findings.push(Finding { path: path.to_owned(), line: None, message });
        // The lease first: only what is read after it can be all that there will ever be.
        let lease = match prove {
            Prove::No => None,
            Prove::Yes => match Lease::acquire(&file) {
                Ok(Some(lease)) => Some(lease),
                Ok(None) => {
                    find("is kept, because somebody still has it open for writing: fuser tells who".to_owned());
                    None
                }
                Err(error) => {
                    find(format!("is kept, because nothing can prove that nobody writes into it any more: {error}"));
                    None
                }
            },
        };
        let size = file.metadata().map_err(failed)?.len();
        if size < offset {
            find(format!(
                "has {size} bytes, but the queue's ledger says that {offset} have been taken over: left alone"
            ));
            drain.offsets.insert(number, offset);
            return Ok(());
        }
        let whole = last_line_end(&file, offset..size).map_err(failed)?;
        // Nobody is left to complete the last line.
        let unterminated = lease.is_some() && whole < size;
        let end = if unterminated { size } else { whole };
        if let Some(lease) = &lease
            && end == offset
        {
            return self.remove_drained(path, lease, || drain.removed += 1);
        }
        drop(lease);
        drain.offsets.insert(number, end);
        if end > offset {
            let range = offset..end;
            let lines = count_lines(&file, range.clone(), BUFFER).map_err(failed)?;
            // Its last `\n` will be ours.
            let added = u64::from(unterminated);
            drain.lines += Amount { lines: lines + added, bytes: end - offset + added };
            drain.late.push(Late { path: path.to_owned(), file, range, unterminated });
        }
        Ok(())
    }

    /// Removes a generation that holds nothing new. The ledger drops it with its next commit.
    fn remove_drained(&self, path: &Path, lease: &Lease<'_>, removed: impl FnOnce()) -> Result<(), Error> {
        // What it held is in the queue: on the disk too, before its own copy goes.
        self.file.sync_all().map_err(|error| Error::io(&self.path, "cannot be flushed to disk", error))?;
        self.sync_directory()?;
        if lease.is_unbroken() {
            fs::remove_file(path).map_err(|error| Error::io(path, "cannot be removed", error))?;
            removed();
        }
        Ok(())
    }

    /// Replaces the queue by a new file of these pieces, the drained lines, and one ledger line with these totals.
    ///
    /// # Errors
    /// If any step fails. The queue is then as it was, unless the message says otherwise.
    pub(super) fn replace(
        self,
        totals: LedgerTotals,
        pieces: &[Piece],
        drain: &Drain,
        now: Timestamp,
    ) -> Result<Committed, Error> {
        // Never a number that the old ledger lists: should this fail half-way, it would say of our file what it knows of another.
        let number = drain.highest + 1;
        let mut ledger = Ledger { totals, generations: drain.offsets.clone() };
        ledger.generations.insert(number, self.end);
        // Its offset may yet grow, but not the room for its digits.
        let reserved = self.ledger_line(&ledger, now)?.len() + MAX_DIGITS - self.end.to_string().len();

        let bytes = reserved as u64 + pieces.iter().map(|piece| piece.kept_bytes).sum::<u64>() + drain.lines.bytes;
        self.require_space(bytes)?;
        let failed = |error| self.write_error(error);
        let temporary =
            Temporary::beside(&self.directory, self.path.file_name().unwrap_or_default()).map_err(failed)?;
        let file = temporary.file();
        let mut at = self.write_pieces(pieces, file, reserved as u64).map_err(failed)?;
        file.sync_data().map_err(failed)?;

        // That took its time. What has been appended meanwhile would arrive late, so it goes along if it can.
        let mut end = self.end;
        for _ in 0..MAX_CYCLES {
            let size = self.file.metadata().map_err(failed)?.len();
            let appended = end..last_line_end(&self.file, end..size.max(end)).map_err(failed)?;
            if appended.is_empty() {
                break;
            }
            end = appended.end;
            at += copy(&self.file, appended, file, at).map_err(failed)?;
        }
        for late in &drain.late {
            at += copy(&late.file, late.range.clone(), file, at).map_err(|error| read_error(&late.path, error))?;
            if late.unterminated {
                file.write_all_at(b"\n", at).map_err(failed)?;
                at += 1;
            }
        }
        ledger.generations.insert(number, end);
        let mut ledger_line = self.ledger_line(&ledger, now)?;
        let missing = reserved.saturating_sub(ledger_line.len());
        ledger_line.insert_str(ledger_line.len() - 1, &" ".repeat(missing));
        file.write_all_at(ledger_line.as_bytes(), 0).map_err(failed)?;
        attributes::copy(&self.file, file).map_err(failed)?;
        file.sync_all().map_err(failed)?;
        let written = file.metadata().map_err(failed)?;
        if written.len() != at || ledger_line.len() != reserved {
            return Err(Error::new(
                ErrorKind::Io,
                &self.path,
                "the new file came out wrong: the queue is left as it was",
            ));
        }

        self.commit(temporary, number)?;
        Ok(Committed { identity: identity(&written), ledger, ledger_line })
    }

    fn ledger_line(&self, ledger: &Ledger, now: Timestamp) -> Result<String, Error> {
        ledger.to_line(now).ok_or_else(|| {
            let what = "its ledger would be too long to be read again: too many roles, kinds or models with long names";
            Error::new(ErrorKind::BadData, &self.path, what).advise("give the workers fewer of them")
        })
    }

    fn require_space(&self, bytes: u64) -> Result<(), Error> {
        let available = fs2::available_space(&self.directory)
            .map_err(|error| Error::io(&self.directory, "cannot be asked for its free space", error))?;
        if available < bytes {
            let what = format!(
                "is left as it was: its new file needs {bytes} bytes, but {} has only {available}",
                self.directory.display()
            );
            let full = io::ErrorKind::StorageFull.into();
            return Err(Error::io(&self.path, what, full));
        }
        Ok(())
    }

    /// Writes the pieces one after the other from `start` on, and returns where they end.
    fn write_pieces(&self, pieces: &[Piece], to: &File, start: u64) -> io::Result<u64> {
        let mut end = start;
        let places: Vec<(&Piece, u64)> = pieces
            .iter()
            .map(|piece| {
                let at = end;
                end += piece.kept_bytes;
                (piece, at)
            })
            .collect();
        in_parallel(&places, |(piece, at)| copy_kept(&self.file, piece, to, *at))?;
        Ok(end)
    }

    /// Makes the temporary file the queue, and the queue the generation `number`.
    fn commit(&self, temporary: Temporary, number: u64) -> Result<(), Error> {
        let mut name = OsString::from(stem(&self.path));
        name.push(format!(".gen.{number}"));
        let generation = self.path.with_file_name(name);
        // Whatever fails from here on to the rename: the old queue must not keep a second name, but it must keep one.
        let undo = |error: Error| {
            if fs::symlink_metadata(&self.path).is_ok_and(|queue| identity(&queue) == identity(&self.metadata)) {
                drop(fs::remove_file(&generation));
            }
            error
        };
        fs::hard_link(&self.path, &generation).map_err(|error| self.commit_error(error))?;
        let linked = fs::symlink_metadata(&generation).map_err(|error| undo(read_error(&generation, error)))?;
        if identity(&linked) != identity(&self.metadata) || !self.lock.is_effective().map_err(undo)? {
            return Err(undo(read_error(&self.path, io::ErrorKind::NotFound.into())));
        }
        self.sync_directory().map_err(undo)?;
        temporary.persist(&self.path).map_err(|error| undo(self.commit_error(error)))?;
        self.sync_directory().map_err(|error| {
            error.advise(
                "the queue has been replaced and nothing is lost, but a power cut now could bring back the old one",
            )
        })
    }

    fn sync_directory(&self) -> Result<(), Error> {
        File::open(&self.directory)
            .and_then(|directory| directory.sync_all())
            .map_err(|error| Error::io(&self.directory, "cannot be flushed to disk", error))
    }

    fn write_error(&self, error: io::Error) -> Error {
        if error.kind() == io::ErrorKind::UnexpectedEof {
            return read_error(&self.path, error);
        }
        Error::io(&self.path, "cannot be rewritten, and is left as it was", error)
    }

    fn commit_error(&self, error: io::Error) -> Error {
        if matches!(error.kind(), io::ErrorKind::ResourceBusy | io::ErrorKind::CrossesDevices) {
            let what = "cannot be replaced, and is left as it was: it is a mount point of its own";
            return Error::io(&self.path, what, error).advise("mount its directory instead");
        }
        Error::io(&self.path, "cannot be replaced, and is left as it was", error)
    }
}

/// Replaces the queue again while lines arrive in earlier generations. Returns the ledger, the late lines taken over, and what is left.
///
/// # Errors
/// Like [`Snapshot::replace`].
pub(super) fn settle(
    files: &QueueFiles,
    lock: &ExclusiveLock,
    mut committed: Committed,
    now: Timestamp,
) -> Result<(Ledger, Amount, Vec<Finding>), Error> {
    let mut late = Amount::default();
    let mut findings = Vec::new();
    for cycle in 1..=MAX_CYCLES {
        let Some(snapshot) = Snapshot::take(files, lock)? else { break };
        let drain = snapshot.drain(&committed.ledger.generations, Prove::No)?;
        // Only our own first line is known without reading all others.
        if drain.is_empty() || !committed.is_still(&snapshot)? {
            break;
        }
        if cycle == MAX_CYCLES {
            let message = format!(
                "{} lines have just been appended to earlier generations, where workers do not see them: the next run takes them over",
                drain.lines.lines
            );
            findings.push(Finding { path: files.queue.clone(), line: None, message });
            break;
        }
        late += drain.lines;
        let range = committed.ledger_line.len() as u64..snapshot.end;
        let kept_bytes = range.end - range.start;
        let rest = Piece { range, dropped: LineSet::default(), kept_bytes };
        committed = snapshot.replace(committed.ledger.totals, &[rest], &drain, now)?;
    }
    Ok((committed.ledger, late, findings))
}

impl Committed {
    /// Whether the snapshot is of the queue that was committed, and begins with its ledger.
    fn is_still(&self, snapshot: &Snapshot<'_>) -> Result<bool, Error> {
        let mut start = vec![0; self.ledger_line.len()];
        if self.identity != identity(&snapshot.metadata) || snapshot.end < start.len() as u64 {
            return Ok(false);
        }
        snapshot.file.read_exact_at(&mut start, 0).map_err(|error| read_error(&snapshot.path, error))?;
        Ok(start == self.ledger_line.as_bytes())
    }
}

fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// How many bytes are read at once.
const BUFFER: usize = 256 * 1024;
/// After so many bytes their way to the disk begins, so that little is left to be waited for at the end.
const WRITE_BACK: u64 = 8 * 1024 * 1024;

/// Copies the lines of a piece that go on, which must be as many bytes as planned.
fn copy_kept(from: &File, piece: &Piece, to: &File, start: u64) -> io::Result<()> {
    let mut output = Output { file: to, at: start, written_back: start };
    let mut kept = Vec::with_capacity(BUFFER);
    let mut line = 0;
    let mut keeps = !piece.dropped.contains(line);
    for_each_chunk(from, piece.range.clone(), BUFFER, |chunk| {
        let mut start = 0;
        for newline in memchr::memchr_iter(b'\n', chunk) {
            line += 1;
            let keeps_next = !piece.dropped.contains(line);
            if keeps != keeps_next {
                if keeps {
                    kept.extend_from_slice(&chunk[start..=newline]);
                }
                start = newline + 1;
                keeps = keeps_next;
            }
        }
        if keeps {
            kept.extend_from_slice(&chunk[start..]);
        }
        output.write(&kept)?;
        kept.clear();
        Ok(true)
    })?;
    if output.at - start != piece.kept_bytes {
        // Somebody has rewritten the queue in place, without the lock.
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(())
}

/// Copies a range, and returns how many bytes it has.
fn copy(from: &File, range: Range<u64>, to: &File, at: u64) -> io::Result<u64> {
    let kept_bytes = range.end - range.start;
    copy_kept(from, &Piece { range, dropped: LineSet::default(), kept_bytes }, to, at)?;
    Ok(kept_bytes)
}

/// A place in a file that is being written.
struct Output<'f> {
    file: &'f File,
    at: u64,
    written_back: u64,
}

impl Output<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, self.at)?;
        self.at += bytes.len() as u64;
        if let Some(len) = NonZeroU64::new(self.at - self.written_back)
            && len.get() >= WRITE_BACK
        {
            // Linux starts to write back what it is told will not be needed. It is advice: should it fail, fsync does it all.
            let _ = fadvise(self.file, self.written_back, Some(len), Advice::DontNeed);
            self.written_back = self.at;
        }
        Ok(())
    }
}
