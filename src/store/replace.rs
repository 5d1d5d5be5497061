//! Replacing the queue while others append to it without the lock: the one primitive behind every tool that rewrites it.
//!
//! ```text
//! lock exclusively ─► clean up after dead runs ─► snapshot: up to the last whole line ─► the tool's plan for it
//!   ─► late lines of earlier generations; generations that are proven drained are removed
//!   ─► write temporary, fsync ─► what was appended meanwhile, fsync ─► link queue as queue.gen.<n>, fsync directory
//!   ─► rename temporary to queue: the commit ─► fsync directory ─► the same again while lines arrive late
//! ```
//!
//! Killed at any point, either the old queue or the new one is in place, each whole. What a dead run leaves (a temporary file, a second name
//! for the queue) the next one removes. What reaches the old file after the snapshot is not lost either: the file keeps a name, and the
//! ledger in the new queue says up to where it has been taken over.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, FallocateFlags, StatxAttributes, StatxFlags, fallocate, statx};
use rustix::io::Errno;

use super::atomic_file::{self, Temporary};
use super::files::{Finding, Generation, OpenQueue, QueueFiles, identity, read_error};
use super::lease::Lease;
use super::lock::{self, ExclusiveLock};
use super::scan::{count_lines, for_each_chunk, in_parallel, last_line_end};
use super::{Error, ErrorKind, attributes, begin_write_back, directory_of};
use crate::format::ledger::{Ledger, LedgerTotals};
use crate::format::retention::Amount;
use crate::format::time::Timestamp;

/// What a tool makes of the whole lines of the queue.
pub(super) struct Plan<'e> {
    /// The ledger, with the generations that it has listed so far.
    pub(super) ledger: Ledger,
    /// All lines.
    pub(super) segments: Vec<Segment<'e>>,
    /// Whether there is anything to change.
    pub(super) changes: bool,
}

impl Plan<'_> {
    /// How many bytes all lines will have.
    fn kept_bytes(&self) -> u64 {
        self.segments.iter().map(|segment| segment.kept_bytes).sum()
    }
}

/// Whole lines of the queue, and what becomes of them.
pub(super) struct Segment<'e> {
    /// Where they are.
    pub(super) range: Range<u64>,
    /// What becomes of each.
    pub(super) fates: Fates,
    /// Makes a line, without its `\n`, of one that changes: the same at any time.
    pub(super) edit: &'e Edit<'e>,
    /// New lines that follow them.
    pub(super) added: Vec<u8>,
    /// How many bytes all of these will have.
    pub(super) kept_bytes: u64,
}

pub(super) type Edit<'e> = dyn Fn(&[u8]) -> Vec<u8> + Sync + 'e;

/// For segments in which no line changes.
pub(super) const AS_IT_IS: &Edit<'static> = &<[u8]>::to_vec;

impl Segment<'_> {
    /// Lines that all go on.
    fn kept(range: Range<u64>) -> Self {
        Self::followed_by(range, Vec::new())
    }

    /// Lines that all go on, and new ones after them.
    pub(super) fn followed_by(range: Range<u64>, added: Vec<u8>) -> Self {
        let kept_bytes = range.end - range.start + added.len() as u64;
        Self { range, fates: Fates::default(), edit: AS_IT_IS, added, kept_bytes }
    }
}

/// What becomes of a line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Fate {
    /// It goes on as it is.
    #[default]
    Kept,
    /// It doesn't go on.
    Dropped,
    /// It goes on changed.
    Edited,
}

/// The fates of the lines of a segment, two bits a line, in order.
#[derive(Debug, Default)]
pub(super) struct Fates {
    bits: Vec<u64>,
    len: u64,
}

impl Fates {
    const PER_WORD: u64 = 32;

    /// Says what becomes of the next line.
    pub(super) fn push(&mut self, fate: Fate) {
        if self.len.is_multiple_of(Self::PER_WORD) {
            self.bits.push(0);
        }
        self.len += 1;
        self.set(self.len - 1, fate);
    }

    /// Says what becomes of a line, counted from 0, after all.
    pub(super) fn set(&mut self, line: u64, fate: Fate) {
        if let Some(word) = usize::try_from(line / Self::PER_WORD).ok().and_then(|index| self.bits.get_mut(index)) {
            let place = line % Self::PER_WORD * 2;
            *word = *word & !(3 << place) | (fate as u64) << place;
        }
    }

    /// What becomes of a line, counted from 0.
    fn of(&self, line: u64) -> Fate {
        let word = usize::try_from(line / Self::PER_WORD).ok().and_then(|index| self.bits.get(index));
        match word.map_or(0, |word| word >> (line % Self::PER_WORD * 2) & 3) {
            0 => Fate::Kept,
            1 => Fate::Dropped,
            _ => Fate::Edited,
        }
    }
}

/// What became of a queue.
#[derive(Debug, Default)]
pub struct Rewritten {
    /// Whether it was replaced.
    pub replaced: bool,
    /// Its ledger now.
    pub ledger: Ledger,
    /// Lines that reached earlier generations, and were taken over.
    pub late: Amount,
    /// How many earlier generations were drained and removed.
    pub removed_generations: u64,
    /// How long writers were kept out.
    pub locked_for: Duration,
    /// What somebody should look at.
    pub findings: Vec<Finding>,
    /// What went wrong after the queue was replaced: lines may still lie in an earlier generation.
    pub unsettled: Option<Error>,
    /// Whether it is that a power cut could bring back the old queue.
    pub may_come_back: bool,
}

impl Rewritten {
    /// What becomes of a queue that doesn't exist.
    pub(super) fn of_nothing(files: &QueueFiles) -> Self {
        let message = "does not exist, so there is nothing to do: if it should, correct the path";
        Self { findings: vec![Finding::new(&files.queue, message)], ..Self::default() }
    }
}

/// Does to the queue what `plan` wants, and takes over what reached earlier generations of it; `None` if there is no queue.
///
/// `plan` is given the queue and where its last whole line ends.
///
/// # Errors
/// If any step fails. The queue is then as it was, unless the message says otherwise.
pub(super) fn rewrite<'e>(
    files: &QueueFiles,
    lock_timeout: Duration,
    now: Timestamp,
    plan: impl FnOnce(&File, u64) -> Result<Plan<'e>, Error>,
) -> Result<Option<Rewritten>, Error> {
    files.require_directory()?;
    // Where there is no queue, not even a lock file is made. To open it, the lock must be held.
    if fs::metadata(&files.queue).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
        && OpenQueue::open(files)?.is_none()
    {
        return Ok(None);
    }
    rewrite_locked(files, &ExclusiveLock::acquire(files, lock_timeout)?, now, plan)
}

/// The same for who holds the lock.
pub(super) fn rewrite_locked<'e>(
    files: &QueueFiles,
    lock: &ExclusiveLock,
    now: Timestamp,
    plan: impl FnOnce(&File, u64) -> Result<Plan<'e>, Error>,
) -> Result<Option<Rewritten>, Error> {
    let Some(snapshot) = Snapshot::take(files, lock)? else { return Ok(None) };
    let plan = plan(&snapshot.queue.file, snapshot.end)?;
    let drain = snapshot.drain(&plan.ledger.generations, Prove::Yes)?;
    let mut rewritten = Rewritten {
        replaced: plan.changes || !drain.late.is_empty(),
        late: drain.lines,
        removed_generations: drain.removed,
        ..Rewritten::default()
    };
    if rewritten.replaced {
        let mut committed = snapshot.replace(plan.ledger.totals, &plan.segments, &drain, now)?;
        rewritten.findings = drain.findings;
        rewritten.unsettled = committed.may_come_back.take();
        rewritten.may_come_back = rewritten.unsettled.is_some();
        if rewritten.may_come_back {
            // What does not take a flush won't take another queue.
            rewritten.ledger = committed.ledger;
        } else {
            settle(files, lock, committed, now, &mut rewritten);
        }
    } else {
        rewritten.ledger = plan.ledger;
        rewritten.findings = drain.findings;
    }
    rewritten.locked_for = lock.held_for();
    Ok(Some(rewritten))
}

/// Says what [`rewrite`] would do, and changes nothing.
///
/// # Errors
/// If the queue can't be read.
pub(super) fn preview<'e>(
    files: &QueueFiles,
    lock_timeout: Duration,
    mut plan: impl FnMut(&File, u64) -> Result<Plan<'e>, Error>,
) -> Result<Option<Rewritten>, Error> {
    files.require_directory()?;
    let look = || {
        let Some(snapshot) = Snapshot::of(files, None)? else { return Ok(None) };
        let plan = plan(&snapshot.queue.file, snapshot.end)?;
        let drain = snapshot.drain(&plan.ledger.generations, Prove::No)?;
        let refusals = snapshot.refusals(files, &plan, &drain);
        let Drain { lines: late, mut findings, .. } = drain;
        findings.extend(refusals.map(|error| Finding::new(&files.queue, format!("a run would refuse: {error}"))));
        Ok(Some(Rewritten { ledger: plan.ledger, late, findings, ..Rewritten::default() }))
    };
    lock::shared(&files.lock, lock_timeout, look).map(|(rewritten, _)| rewritten)
}

/// Makes sure, for who holds the lock at least shared, that `plan` could be carried out now, as far as that shows without doing it.
///
/// # Errors
/// Says what would keep it from that.
pub(super) fn require_possible(files: &QueueFiles, plan: &Plan<'_>, now: Timestamp) -> Result<(), Error> {
    let Some(snapshot) = Snapshot::of(files, None)? else { return Ok(()) };
    let drain = snapshot.drain(&plan.ledger.generations, Prove::No)?;
    if let Some(refusal) = snapshot.refusals(files, plan, &drain).next() {
        return Err(refusal);
    }
    snapshot.lock_queue()?;
    if is_mount_point(&snapshot.queue.path) {
        return Err(snapshot.commit_error(io::ErrorKind::ResourceBusy.into()));
    }
    let (_, _, reserved) = snapshot.next_ledger(plan.ledger.totals.clone(), &drain, now)?;
    let bytes = reserved as u64 + plan.kept_bytes() + drain.lines.bytes;
    let temporary = snapshot.new_file()?;
    match fallocate(temporary.file(), FallocateFlags::empty(), 0, bytes) {
        // This file system can't tell.
        Err(Errno::NOTSUP) => {}
        allocated => allocated.map_err(|error| snapshot.write_error(error.into()))?,
    }
    attributes::copy(&snapshot.queue.file, temporary.file()).map_err(|error| snapshot.attribute_error(error))
}

/// Whether something is mounted just there. A kernel that doesn't say so is believed.
fn is_mount_point(path: &Path) -> bool {
    statx(CWD, path, AtFlags::empty(), StatxFlags::empty())
        .is_ok_and(|file| (file.stx_attributes & file.stx_attributes_mask).contains(StatxAttributes::MOUNT_ROOT))
}

/// Replaces the queue again while lines arrive in earlier generations.
fn settle(
    files: &QueueFiles,
    lock: &ExclusiveLock,
    mut committed: Committed,
    now: Timestamp,
    rewritten: &mut Rewritten,
) {
    for cycle in 1..=MAX_CYCLES {
        match settle_once(files, lock, &mut committed, now, cycle < MAX_CYCLES) {
            Ok(Settled::Late(lines)) => rewritten.late += lines,
            Ok(Settled::Nothing) => break,
            Ok(Settled::Left(lines)) => {
                let message = format!(
                    "{lines} lines have reached earlier generations, where workers do not see them: the next run takes them over"
                );
                rewritten.findings.push(Finding::new(&files.queue, message));
                break;
            }
            Err(error) => {
                let note =
                    "the queue has been replaced before, and the next run takes over what came too late for that";
                rewritten.unsettled = Some(error.note(note));
                break;
            }
        }
    }
    rewritten.ledger = committed.ledger;
}

/// What one more cycle came to.
enum Settled {
    /// Nothing had arrived late.
    Nothing,
    /// Late lines were taken over.
    Late(Amount),
    /// So many late lines are left.
    Left(u64),
}

fn settle_once(
    files: &QueueFiles,
    lock: &ExclusiveLock,
    committed: &mut Committed,
    now: Timestamp,
    may_replace: bool,
) -> Result<Settled, Error> {
    // The next snapshot takes its own lock on it.
    committed.file = None;
    let Some(snapshot) = Snapshot::take(files, lock)? else { return Ok(Settled::Nothing) };
    let drain = snapshot.drain(&committed.ledger.generations, Prove::No)?;
    if drain.late.is_empty() {
        return Ok(Settled::Nothing);
    }
    // Only our own first line is known without reading all others.
    if !may_replace || !committed.is_still(&snapshot)? {
        return Ok(Settled::Left(drain.lines.lines));
    }
    let rest = Segment::kept(committed.ledger_line.len() as u64..snapshot.end);
    *committed = snapshot.replace(committed.ledger.totals.clone(), &[rest], &drain, now)?;
    committed.may_come_back.take().map_or(Ok(Settled::Late(drain.lines)), Err)
}

/// The queue as it is at one moment.
struct Snapshot<'l> {
    /// Unless it is only looked at.
    lock: Option<&'l ExclusiveLock>,
    queue: OpenQueue,
    /// Where the last whole line ends.
    end: u64,
}

/// What earlier generations still held.
#[derive(Default)]
struct Drain {
    late: Vec<Late>,
    /// Of each generation that stays, how many bytes will have been taken over.
    offsets: BTreeMap<u64, u64>,
    /// The highest number that a generation has, on disk or in the ledger.
    highest: u64,
    /// The late lines.
    lines: Amount,
    /// How many generations were proven drained, and removed.
    removed: u64,
    findings: Vec<Finding>,
}

/// Late lines of one generation.
struct Late {
    path: PathBuf,
    file: File,
    range: Range<u64>,
    /// Whether they lack the last `\n`, and will never get it.
    unterminated: bool,
}

/// The queue after a commit.
struct Committed {
    /// Its file, which is locked while we have it.
    file: Option<File>,
    identity: (u64, u64),
    ledger: Ledger,
    ledger_line: String,
    /// Why a power cut could bring back the queue from before it, if one could.
    may_come_back: Option<Error>,
}

/// Whether generations that nobody writes into any more are looked for, which is for the first cycle of a run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Prove {
    Yes,
    No,
}

/// How long to wait for the lock on the queue itself, which only somebody with another lock file can have for long.
const ITSELF_TIMEOUT: Duration = Duration::from_millis(200);
/// How often a run replaces the queue at most, while lines arrive late.
const MAX_CYCLES: usize = 5;
/// How often what was appended while the new file was written is looked for.
const MAX_ROUNDS: usize = 5;

impl<'l> Snapshot<'l> {
    /// Cleans up after dead runs and takes a snapshot; `None` if there is no queue.
    ///
    /// # Errors
    /// If that fails, or if the queue is no file that could be replaced.
    fn take(files: &QueueFiles, lock: &'l ExclusiveLock) -> Result<Option<Self>, Error> {
        let Some(snapshot) = Self::of(files, Some(lock))? else { return Ok(None) };
        let queue = &snapshot.queue;
        snapshot.require_replaceable(files)?;
        snapshot.lock_queue()?;
        if !lock::is_still_at(&queue.file, &queue.path)? {
            return Err(read_error(&queue.path, io::ErrorKind::NotFound.into()));
        }

        atomic_file::remove_abandoned(&queue.directory, queue.path.file_name().unwrap_or_default());
        // A run that was killed while it made the lock file may not have been the one that made it.
        atomic_file::remove_abandoned(&directory_of(&files.lock), files.lock.file_name().unwrap_or_default());
        let names =
            || queue.file.metadata().map(|metadata| metadata.nlink()).map_err(|error| read_error(&queue.path, error));
        for Generation { path, .. } in queue.generations.iter().filter(|generation| generation.is_queue) {
            // Mounted as the queue, a generation is its only name.
            if names()? > 1 {
                let failed = |error| Error::io(path, "a second name of the queue, cannot be removed", error);
                fs::remove_file(path).map_err(failed)?;
            }
        }
        snapshot.require_names(1)?;
        Ok(Some(snapshot))
    }

    /// Keeps out a run that uses another lock, against all rules: this one is on the file that it would replace.
    fn lock_queue(&self) -> Result<(), Error> {
        let path = &self.queue.path;
        // A program that another thread of ours is just starting still has what was open when it began.
        let same = self.queue.file.try_clone().map_err(|error| read_error(path, error))?;
        if lock::wait(same, path, ITSELF_TIMEOUT, lock::Mode::Exclusive)?.is_some() {
            return Ok(());
        }
        let what = format!("is locked itself{}", lock::held_by(path));
        Err(Error::new(ErrorKind::Busy, path, what).advise("try again"))
    }

    /// What would keep a run from replacing the queue, as far as that shows without changing anything.
    fn refusals(&self, files: &QueueFiles, plan: &Plan<'_>, drain: &Drain) -> impl Iterator<Item = Error> + use<> {
        let second_names = self.queue.generations.iter().filter(|generation| generation.is_queue).count() as u64;
        let kept = plan.kept_bytes() + drain.lines.bytes;
        let checks = [
            self.require_replaceable(files),
            self.require_names(1 + second_names),
            if plan.changes || !drain.late.is_empty() { self.require_space(kept) } else { Ok(()) },
        ];
        checks.into_iter().filter_map(Result::err)
    }

    /// A file that is to take the queue's place.
    fn new_file(&self) -> Result<Temporary, Error> {
        let name = self.queue.path.file_name().unwrap_or_default();
        Temporary::beside(&self.queue.directory, name).map_err(|error| {
            Error::io(&self.queue.directory, "cannot be written into, so the queue is left as it was", error)
        })
    }

    /// Makes sure that nobody would be left behind by a replacement.
    fn require_replaceable(&self, files: &QueueFiles) -> Result<(), Error> {
        let lock = match fs::metadata(&files.lock) {
            // A preview takes none, and needs none.
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            lock => Some(lock.map_err(|error| Error::io(&files.lock, "cannot be examined", error))?),
        };
        if lock.is_some_and(|lock| identity(&lock) == identity(&self.queue.metadata)) {
            let what = "is the queue itself, and a new file would take its place: lock a file of its own";
            return Err(Error::new(ErrorKind::Io, &files.lock, what));
        }
        self.queue.require_one_lock(files)
    }

    /// Makes sure that the queue has so many names.
    fn require_names(&self, expected: u64) -> Result<(), Error> {
        let path = &self.queue.path;
        let names = self.queue.file.metadata().map_err(|error| read_error(path, error))?.nlink();
        if names != expected {
            let what = format!("has {names} names (hard links), and a new file could take the place of only one");
            return Err(Error::new(ErrorKind::Io, path, what).advise("remove the others: find -samefile lists them"));
        }
        Ok(())
    }

    /// Takes a snapshot and changes nothing.
    fn of(files: &QueueFiles, lock: Option<&'l ExclusiveLock>) -> Result<Option<Self>, Error> {
        let Some(queue) = OpenQueue::open(files)? else { return Ok(None) };
        let end =
            last_line_end(&queue.file, 0..queue.metadata.len()).map_err(|error| read_error(&queue.path, error))?;
        Ok(Some(Self { lock, queue, end }))
    }

    /// Looks for late lines in the generations that the ledger lists with these offsets.
    ///
    /// # Errors
    /// If a generation can't be read or removed.
    fn drain(&self, offsets: &BTreeMap<u64, u64>, prove: Prove) -> Result<Drain, Error> {
        let generations = || self.queue.generations.iter().filter(|generation| !generation.is_queue);
        let on_disk = generations().map(|generation| generation.number);
        let highest = on_disk.chain(offsets.keys().copied()).max().unwrap_or(0);
        let mut drain = Drain { highest, ..Drain::default() };
        for generation in generations() {
            if let Some(&offset) = offsets.get(&generation.number) {
                self.drain_one(generation, offset, prove, &mut drain)?;
            } else {
                drain.findings.push(generation.unlisted(!offsets.is_empty()));
            }
        }
        Ok(drain)
    }

    fn drain_one(&self, generation: &Generation, offset: u64, prove: Prove, drain: &mut Drain) -> Result<(), Error> {
        let Generation { number, path, .. } = generation;
        let failed = |error| read_error(path, error);
        // As it was, until it turns out what else to do.
        drain.offsets.insert(*number, offset);
        let file = generation.open(&self.queue.metadata)?;
        // The lease first: only what is read after it can be all that there will ever be.
        let lease = match prove {
            Prove::No => None,
            Prove::Yes => {
                let kept = |why| drain.findings.push(Finding::new(path, format!("is kept: {why}")));
                Lease::acquire(&file).map_err(kept).ok()
            }
        };
        let size = file.metadata().map_err(failed)?.len();
        if size < offset {
            let message =
                format!("has {size} bytes, but the queue's ledger says that {offset} have been taken over: left alone");
            drain.findings.push(Finding::new(path, message));
            return Ok(());
        }
        let whole = last_line_end(&file, offset..size).map_err(failed)?;
        // Nobody is left to complete the last line.
        let unterminated = lease.is_some() && whole < size;
        let end = if unterminated { size } else { whole };
        if end > offset {
            drop(lease);
            let range = offset..end;
            let lines = count_lines(&file, range.clone(), BUFFER).map_err(failed)?;
            // Its last `\n` will be ours.
            let added = u64::from(unterminated);
            drain.lines += Amount { lines: lines + added, bytes: end - offset + added };
            drain.offsets.insert(*number, end);
            drain.late.push(Late { path: path.clone(), file, range, unterminated });
        } else if let Some(lease) = lease {
            if self.remove_drained(generation, &lease)? {
                drain.removed += 1;
                drain.offsets.remove(number);
            } else {
                drain.findings.push(Finding::new(path, "is kept: somebody has just opened it for writing"));
            }
        }
        Ok(())
    }

    /// Removes a generation that holds nothing new, and says whether it did. The ledger drops it with its next commit.
    fn remove_drained(&self, generation: &Generation, lease: &Lease<'_>) -> Result<bool, Error> {
        // What it held is in the queue: on the disk too, before its own copy goes.
        self.queue.file.sync_all().map_err(|error| Error::io(&self.queue.path, "cannot be flushed to disk", error))?;
        self.sync_directory("cannot be flushed to disk")?;
        if !lease.is_unbroken() {
            return Ok(false);
        }
        fs::remove_file(&generation.path).map_err(|error| Error::io(&generation.path, "cannot be removed", error))?;
        Ok(true)
    }

    /// The number of the next generation, the ledger that lists it, and how many bytes that takes at most.
    fn next_ledger(&self, totals: LedgerTotals, drain: &Drain, now: Timestamp) -> Result<(u64, Ledger, usize), Error> {
        // Never a number that the old ledger lists: should this fail half-way, it would say of our file what it knows of another.
        let number = drain.highest.checked_add(1).ok_or_else(|| {
            let what = "has an earlier generation with the largest number there is, which leaves none for the next";
            Error::new(ErrorKind::BadData, &self.queue.path, what).advise("rename that file, or correct the ledger")
        })?;
        let mut ledger = Ledger { totals, generations: drain.offsets.clone() };
        // How much will have been taken over of it is not yet known, but that no number takes more room than this.
        ledger.generations.insert(number, u64::MAX);
        let reserved = self.ledger_line(&ledger, now)?.len();
        Ok((number, ledger, reserved))
    }

    /// Replaces the queue by a new file of one ledger line with these totals, the lines that go on, and the late lines.
    ///
    /// # Errors
    /// If any step fails. The queue is then as it was, unless the message says otherwise.
    fn replace(
        self,
        totals: LedgerTotals,
        segments: &[Segment<'_>],
        drain: &Drain,
        now: Timestamp,
    ) -> Result<Committed, Error> {
        let (number, mut ledger, reserved) = self.next_ledger(totals, drain, now)?;
        let kept: u64 = segments.iter().map(|segment| segment.kept_bytes).sum();
        self.require_space(reserved as u64 + kept + drain.lines.bytes)?;
        let failed = |error| self.write_error(error);
        let temporary = self.new_file()?;
        let file = temporary.file();
        let mut at = self.write_segments(segments, file, reserved as u64).map_err(failed)?;
        file.sync_data().map_err(failed)?;

        // That took its time. What has been appended meanwhile would arrive late, so it goes along if it can.
        let mut end = self.end;
        for _ in 0..MAX_ROUNDS {
            let appended = end..last_line_end(&self.queue.file, end..self.size_from(end)?).map_err(failed)?;
            if appended.is_empty() {
                break;
            }
            end = appended.end;
            at = copy(&self.queue.file, &Segment::kept(appended), file, at).map_err(failed)?;
        }
        for late in &drain.late {
            let segment = Segment::kept(late.range.clone());
            at = copy(&late.file, &segment, file, at).map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => read_error(&late.path, error),
                _ => failed(error),
            })?;
            if late.unterminated {
                file.write_all_at(b"\n", at).map_err(failed)?;
                at += 1;
            }
        }
        ledger.generations.insert(number, end);
        let mut ledger_line = self.ledger_line(&ledger, now)?;
        ledger_line.insert_str(ledger_line.len() - 1, &" ".repeat(reserved.saturating_sub(ledger_line.len())));
        file.write_all_at(ledger_line.as_bytes(), 0).map_err(failed)?;
        attributes::copy(&self.queue.file, file).map_err(|error| self.attribute_error(error))?;
        file.sync_all().map_err(failed)?;
        let written = file.metadata().map_err(failed)?;
        if written.len() != at {
            let what = "has come out wrong in its new file, and is left as it was: somebody else writes into that";
            return Err(Error::new(ErrorKind::Io, &self.queue.path, what));
        }

        self.size_from(end)?;
        let (file, may_come_back) = self.commit(temporary, number)?;
        Ok(Committed { file: Some(file), identity: identity(&written), ledger, ledger_line, may_come_back })
    }

    /// The queue's size, which was `end` at least.
    ///
    /// # Errors
    /// If somebody has cut it in place, without the lock.
    fn size_from(&self, end: u64) -> Result<u64, Error> {
        let failed = |error| read_error(&self.queue.path, error);
        let size = self.queue.file.metadata().map_err(failed)?.len();
        if size < end { Err(failed(io::ErrorKind::UnexpectedEof.into())) } else { Ok(size) }
    }

    fn ledger_line(&self, ledger: &Ledger, now: Timestamp) -> Result<String, Error> {
        ledger.to_line(now).ok_or_else(|| {
            let what = "its ledger would be too long to be read again";
            Error::new(ErrorKind::BadData, &self.queue.path, what)
                .advise("give the workers fewer roles, kinds and models, with shorter names")
        })
    }

    fn require_space(&self, bytes: u64) -> Result<(), Error> {
        let directory = &self.queue.directory;
        let space = fs2::statvfs(directory)
            .map_err(|error| Error::io(directory, "cannot be asked for its free space", error))?;
        // Some file systems in memory have no size at all.
        if space.available_space() < bytes && space.total_space() > 0 {
            let what = format!(
                "is left as it was: its new file needs {bytes} bytes, but {} has only {}",
                directory.display(),
                space.available_space()
            );
            return Err(Error::io(&self.queue.path, what, io::ErrorKind::StorageFull.into()));
        }
        Ok(())
    }

    /// Writes the segments one after the other from `start` on, and returns where they end.
    fn write_segments(&self, segments: &[Segment<'_>], to: &File, start: u64) -> io::Result<u64> {
        let mut end = start;
        let places: Vec<(&Segment<'_>, u64)> = segments
            .iter()
            .map(|segment| {
                let at = end;
                end += segment.kept_bytes;
                (segment, at)
            })
            .collect();
        in_parallel(&places, |(segment, at)| copy(&self.queue.file, segment, to, *at))?;
        Ok(end)
    }

    /// Makes the temporary file the queue, and the queue the generation `number`. Returns the new queue's file, and why the old one could
    /// come back, if it could.
    fn commit(&self, temporary: Temporary, number: u64) -> Result<(File, Option<Error>), Error> {
        let queue = &self.queue;
        let generation = queue.generation(number);
        // Whatever fails from here on to the rename: the old queue must not keep a second name, but it must keep one.
        let undo = |error: Error| {
            let of = |path| fs::symlink_metadata(path).ok().map(|metadata| identity(&metadata));
            if of(&queue.path).is_some() && of(&queue.path) == of(&generation) {
                drop(fs::remove_file(&generation));
            }
            error
        };
        fs::hard_link(&queue.path, &generation).map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported => self
                .commit_error(error)
                .advise("its file system must have hard links, and this user must be allowed to make one of it"),
            _ => self.commit_error(error),
        })?;
        let linked = fs::symlink_metadata(&generation).map_err(|error| undo(read_error(&generation, error)))?;
        if identity(&linked) != identity(&queue.metadata) {
            return Err(undo(read_error(&queue.path, io::ErrorKind::NotFound.into())));
        }
        if let Some(lock) = self.lock
            && !lock.is_effective().map_err(undo)?
        {
            return Err(undo(read_error(lock.path(), io::ErrorKind::NotFound.into())));
        }
        self.sync_directory("cannot be flushed to disk, so the queue is left as it was").map_err(undo)?;
        let file = temporary.persist(&queue.path).map_err(|error| undo(self.commit_error(error)))?;
        let note = "the queue has been replaced, and nothing is lost, but a power cut now could bring back the old one";
        let flushed = self.sync_directory("cannot be flushed to disk");
        Ok((file, flushed.err().map(|error| error.note(note))))
    }

    fn sync_directory(&self, otherwise: &'static str) -> Result<(), Error> {
        File::open(&self.queue.directory)
            .and_then(|directory| directory.sync_all())
            .map_err(|error| Error::io(&self.queue.directory, otherwise, error))
    }

    fn write_error(&self, error: io::Error) -> Error {
        if error.kind() == io::ErrorKind::UnexpectedEof {
            return read_error(&self.queue.path, error);
        }
        Error::io(&self.queue.path, "cannot be rewritten, and is left as it was", error)
    }

    fn attribute_error(&self, error: io::Error) -> Error {
        let refused = error.kind() == io::ErrorKind::PermissionDenied;
        let error = Error::io(&self.queue.path, "cannot be rewritten, and is left as it was", error);
        if refused { error.advise("run this as root, or as the queue's owner") } else { error }
    }

    fn commit_error(&self, error: io::Error) -> Error {
        if matches!(error.kind(), io::ErrorKind::ResourceBusy | io::ErrorKind::CrossesDevices) {
            let what = "cannot be replaced, and is left as it was: it is a mount point of its own";
            return Error::io(&self.queue.path, what, error).advise("mount its directory instead");
        }
        Error::io(&self.queue.path, "cannot be replaced, and is left as it was", error)
    }
}

impl Committed {
    /// Whether the snapshot is of the queue that was committed, and begins with its ledger.
    fn is_still(&self, snapshot: &Snapshot<'_>) -> Result<bool, Error> {
        let mut start = vec![0; self.ledger_line.len()];
        if self.identity != identity(&snapshot.queue.metadata) || snapshot.end < start.len() as u64 {
            return Ok(false);
        }
        let read = snapshot.queue.file.read_exact_at(&mut start, 0);
        read.map_err(|error| read_error(&snapshot.queue.path, error))?;
        Ok(start == self.ledger_line.as_bytes())
    }
}

/// How many bytes are read at once.
const BUFFER: usize = 256 * 1024;
/// After so many bytes their way to the disk begins, so that little is left to be waited for at the end.
const WRITE_BACK: u64 = 8 * 1024 * 1024;

/// Copies the lines of a segment that go on, which must be as many bytes as planned, and returns where they end.
fn copy(from: &File, segment: &Segment<'_>, to: &File, start: u64) -> io::Result<u64> {
    let mut output = Output { file: to, at: start, written_back: start };
    let mut lines = Lines { segment, kept: Vec::with_capacity(BUFFER), edited: Vec::new() };
    let mut line = 0;
    let mut fate = segment.fates.of(line);
    for_each_chunk(from, segment.range.clone(), BUFFER, |chunk| {
        let mut start = 0;
        for newline in memchr::memchr_iter(b'\n', chunk) {
            line += 1;
            let next = segment.fates.of(line);
            if fate != next || fate == Fate::Edited {
                lines.add(fate, &chunk[start..=newline]);
                start = newline + 1;
                fate = next;
            }
        }
        lines.add(fate, &chunk[start..]);
        output.write(&lines.kept)?;
        lines.kept.clear();
        Ok(true)
    })?;
    output.write_and_verify(&segment.added)?;
    if output.at - start != segment.kept_bytes {
        // Somebody has rewritten the queue in place, without the lock.
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(output.at)
}

/// Lines on their way into a new file.
struct Lines<'s> {
    segment: &'s Segment<'s>,
    /// What is to be written.
    kept: Vec<u8>,
    /// The beginning of a line that is to be changed.
    edited: Vec<u8>,
}

impl Lines<'_> {
    /// Adds the next piece, which ends with its line if that is to be changed, unless the line goes on in the next piece.
    fn add(&mut self, fate: Fate, piece: &[u8]) {
        match fate {
            Fate::Kept => self.kept.extend_from_slice(piece),
            Fate::Dropped => {}
            Fate::Edited => {
                self.edited.extend_from_slice(piece);
                if let Some(line) = self.edited.strip_suffix(b"\n") {
                    self.kept.extend_from_slice(&(self.segment.edit)(line));
                    self.kept.push(b'\n');
                    self.edited = Vec::new();
                }
            }
        }
    }
}

/// A place in a file that is being written.
struct Output<'f> {
    file: &'f File,
    at: u64,
    written_back: u64,
}

impl Output<'_> {
    /// Writes what stands nowhere else yet.
    fn write_and_verify(&mut self, bytes: &[u8]) -> io::Result<()> {
        let at = self.at;
        self.write(bytes)?;
        let mut written = vec![0; bytes.len()];
        self.file.read_exact_at(&mut written, at)?;
        if written == bytes { Ok(()) } else { Err(io::Error::other("what was written reads differently")) }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, self.at)?;
        self.at += bytes.len() as u64;
        if let Some(len) = NonZeroU64::new(self.at - self.written_back)
            && len.get() >= WRITE_BACK
        {
            begin_write_back(self.file, self.written_back, Some(len));
            self.written_back = self.at;
        }
        Ok(())
    }
}
