//! Compaction: records that have been done for long enough go, everything else stays.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use super::lock::{self, ExclusiveLock};
use super::queue::{Finding, QueueFiles, missing, read_error};
use super::replace::{LineSet, Piece, Prove, Snapshot, settle};
use super::scan::{self, Part, ReadOptions, for_each_chunk, last_line_end};
use super::{Error, ErrorKind, directory_of, open_regular, require_directory};
use crate::format::ledger::Ledger;
use crate::format::lines::LineSplitter;
use crate::format::retention::{Amount, Plan, Policy};

/// What compaction did to a queue, or would do.
#[derive(Debug, Default)]
pub struct Outcome {
    /// What goes and what stays.
    pub plan: Plan,
    /// Lines that reached earlier generations, and were taken over.
    pub late: Amount,
    /// How many earlier generations were drained and removed.
    pub removed_generations: u64,
    /// Whether the queue was replaced.
    pub replaced: bool,
    /// The ledger after it.
    pub ledger: Ledger,
    /// How long writers were kept out.
    pub locked_for: Duration,
    /// What somebody should look at.
    pub findings: Vec<Finding>,
    /// Why lines may still lie in an earlier generation, though the queue was replaced.
    pub unsettled: Option<Error>,
}

/// Says what [`compact`] would do, and changes nothing.
///
/// # Errors
/// If the queue can't be read.
pub fn preview(files: &QueueFiles, options: &ReadOptions, policy: &Policy) -> Result<Outcome, Error> {
    require_directory(&directory_of(&files.queue), &files.queue, "cannot be read: its directory")?;
    let read = || {
        let Some(file) = open_regular(&files.queue)? else { return missing(files).map(|()| None) };
        let failed = |error| read_error(&files.queue, error);
        let size = file.metadata().map_err(failed)?.len();
        let end = last_line_end(&file, 0..size).map_err(failed)?;
        plan(files, &file, end, options, policy).map(|(plan, _)| Some(plan))
    };
    let (plan, _) = lock::shared(&files.lock, options.lock_timeout, read)?;
    let Some(plan) = plan else { return Ok(Outcome::of_nothing(files)) };
    Ok(Outcome { ledger: plan.ledger(), plan, ..Outcome::default() })
}

/// Removes what has been done for long enough, and takes over what reached earlier generations of the queue.
///
/// # Errors
/// If the queue can't be read or replaced, or its ledger can't be read. It is then as it was.
pub fn compact(files: &QueueFiles, options: &ReadOptions, policy: &Policy) -> Result<Outcome, Error> {
    require_directory(&directory_of(&files.queue), &files.queue, "cannot be read: its directory")?;
    if open_regular(&files.queue)?.is_none() {
        // Not even a lock file is made where there may be no queue at all.
        return missing(files).map(|()| Outcome::of_nothing(files));
    }
    let lock = ExclusiveLock::acquire(&files.lock, options.lock_timeout)?;
    let Some(snapshot) = Snapshot::take(files, &lock)? else { return Ok(Outcome::of_nothing(files)) };
    let (plan, pieces) = plan(files, &snapshot.file, snapshot.end, options, policy)?;
    let mut ledger = plan.ledger();
    let mut drain = snapshot.drain(&ledger.generations, Prove::Yes)?;
    let mut outcome = Outcome {
        late: drain.lines,
        removed_generations: drain.removed,
        replaced: plan.removed.lines > 0 || !drain.is_empty(),
        findings: std::mem::take(&mut drain.findings),
        plan,
        ..Outcome::default()
    };
    if outcome.replaced {
        let committed = snapshot.replace(ledger.totals, &pieces, &drain, policy.now)?;
        ledger = committed.ledger.clone();
        match settle(files, &lock, committed, policy.now) {
            Ok((settled, late, findings)) => {
                ledger = settled;
                outcome.late += late;
                outcome.findings.extend(findings);
            }
            Err(error) => outcome.unsettled = Some(error),
        }
    }
    outcome.ledger = ledger;
    outcome.locked_for = lock.held_for();
    Ok(outcome)
}

impl Outcome {
    fn of_nothing(files: &QueueFiles) -> Self {
        let message = "does not exist, so there is nothing to compact: if it should, correct the path".to_owned();
        let finding = Finding { path: files.queue.clone(), line: None, message };
        Self { findings: vec![finding], ..Self::default() }
    }
}

/// Judges the first `end` bytes of the queue.
fn plan(
    files: &QueueFiles,
    file: &File,
    end: u64,
    options: &ReadOptions,
    policy: &Policy,
) -> Result<(Plan, Vec<Piece>), Error> {
    let new = || Judged { options, policy, plan: Plan::default(), pieces: Vec::new() };
    let Judged { plan, pieces, .. } =
        scan::scan(file, end, options, new).map_err(|error| read_error(&files.queue, error))?;
    if let Some(fault) = &plan.unreadable_ledger {
        let path = PathBuf::from(format!("{}:{}", files.queue.display(), fault.line));
        let what = format!("the ledger cannot be read ({}), so nothing may be rewritten", fault.malformed.detail);
        return Err(Error::new(ErrorKind::BadData, &path, what).advise(
            "repair the line from an earlier generation or a backup, or remove it and accept that counters start again",
        ));
    }
    Ok((plan, pieces))
}

/// A plan for lines, and where they are.
struct Judged<'a> {
    options: &'a ReadOptions,
    policy: &'a Policy,
    plan: Plan,
    pieces: Vec<Piece>,
}

impl Part for Judged<'_> {
    fn add_range(&mut self, file: &File, range: Range<u64>) -> io::Result<()> {
        let mut splitter = LineSplitter::new(self.options.max_line);
        let mut dropped = LineSet::default();
        for_each_chunk(file, range.clone(), self.options.buffer, |chunk| {
            splitter.push(chunk, |line| dropped.push(!self.plan.add(line, self.policy)));
            Ok(true)
        })?;
        self.pieces.push(Piece { range, dropped, kept_bytes: self.plan.kept.bytes });
        Ok(())
    }

    fn depends_on_order(&self) -> bool {
        self.plan.overflowed()
    }

    fn append(&mut self, later: Self) {
        self.plan.merge(later.plan);
        self.pieces.extend(later.pieces);
    }
}
