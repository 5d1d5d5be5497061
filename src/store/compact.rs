//! Compaction: records that have been done for long enough go, everything else stays.

use std::fs::File;
use std::io;
use std::ops::Range;

use super::files::{QueueFiles, read_error};
use super::replace::Rewritten;
use super::replace::{self, AS_IT_IS, Fate, Fates, Segment};
use super::scan::{self, Fold, ReadOptions, for_each_chunk};
use super::{Error, unreadable_ledger};
use crate::format::lines::LineSplitter;
use crate::format::retention::{Plan, Policy};

/// What compaction made of a queue.
#[derive(Debug)]
pub struct Outcome {
    /// What goes and what stays.
    pub plan: Plan,
    /// What became of the queue.
    pub rewritten: Rewritten,
}

/// Says what [`compact`] would do, and changes nothing.
///
/// # Errors
/// If the queue can't be read.
pub fn preview(files: &QueueFiles, options: &ReadOptions, policy: &Policy) -> Result<Outcome, Error> {
    let mut plan = Plan::new(policy);
    let rewritten = replace::preview(files, options.lock_timeout, |file, end| {
        let (judged, rewrite) = judge(files, file, end, options, policy)?;
        plan = judged;
        Ok(rewrite)
    })?;
    Ok(Outcome { plan, rewritten: rewritten.unwrap_or_else(|| Rewritten::of_nothing(files)) })
}

/// Removes what has been done for long enough, and takes over what reached earlier generations of the queue.
///
/// # Errors
/// If the queue can't be read or replaced, or its ledger can't be read. It is then as it was.
pub fn compact(files: &QueueFiles, options: &ReadOptions, policy: &Policy) -> Result<Outcome, Error> {
    let mut plan = Plan::new(policy);
    let rewritten = replace::rewrite(files, options.lock_timeout, policy.now, |file, end| {
        let (judged, rewrite) = judge(files, file, end, options, policy)?;
        plan = judged;
        Ok(rewrite)
    })?;
    Ok(Outcome { plan, rewritten: rewritten.unwrap_or_else(|| Rewritten::of_nothing(files)) })
}

/// Judges the first `end` bytes of the queue.
fn judge(
    files: &QueueFiles,
    file: &File,
    end: u64,
    options: &ReadOptions,
    policy: &Policy,
) -> Result<(Plan, replace::Plan<'static>), Error> {
    let new = || Judged { options, policy, plan: Plan::new(policy), segments: Vec::new() };
    let Judged { plan, segments, .. } =
        scan::scan(file, end, options, new).map_err(|error| read_error(&files.queue, error))?;
    if let Some(fault) = &plan.unreadable_ledger {
        return Err(unreadable_ledger(&files.queue, fault));
    }
    let rewrite = replace::Plan { ledger: plan.ledger(), segments, changes: plan.removed.lines > 0 };
    Ok((plan, rewrite))
}

/// A plan for lines, and where they are.
struct Judged<'a> {
    options: &'a ReadOptions,
    policy: &'a Policy,
    plan: Plan,
    segments: Vec<Segment<'static>>,
}

impl Fold for Judged<'_> {
    fn add_segment(&mut self, file: &File, range: Range<u64>) -> io::Result<()> {
        let mut splitter = LineSplitter::new(self.options.max_line);
        let mut fates = Fates::default();
        let before = self.plan.kept.bytes;
        for_each_chunk(file, range.clone(), self.options.buffer, |chunk| {
            splitter.push(chunk, |line| {
                fates.push(if self.plan.add(line, self.policy) { Fate::Kept } else { Fate::Dropped });
            });
            Ok(true)
        })?;
        self.segments.push(Segment {
            range,
            fates,
            edit: AS_IT_IS,
            added: Vec::new(),
            kept_bytes: self.plan.kept.bytes - before,
        });
        Ok(())
    }

    fn depends_on_order(&self) -> bool {
        self.plan.overflowed()
    }

    fn append(&mut self, later: Self) {
        self.plan.merge(later.plan);
        self.segments.extend(later.segments);
    }
}
