//! The ledger lines that a pass over the queue meets.

use std::collections::BTreeMap;
use std::path::Path;

use memchr::memmem::Finder;

use super::Error;
use super::unreadable_ledger;
use crate::format::ledger::{Ledger, LedgerTotals, merge_generations};
use crate::format::malformed::Malformed;
use crate::format::summary::MalformedLine;

/// The ledger lines of a queue. A new one takes the place of the first; others go on, and add up with it.
pub(super) struct LedgerLines<P> {
    word: Finder<'static>,
    /// The place of the first, and what it says.
    pub(super) first: Option<(P, LedgerTotals)>,
    /// Of each earlier generation, how many bytes have been taken over.
    pub(super) generations: BTreeMap<u64, u64>,
    unreadable: Option<MalformedLine>,
}

impl<P> LedgerLines<P> {
    pub(super) fn new() -> Self {
        // It stands in every ledger line that a tool has written, or a worker written anew.
        let word = Finder::new(b"\"ledger\"");
        Self { word, first: None, generations: BTreeMap::new(), unreadable: None }
    }

    /// Whether a line has to be parsed, because it may be a ledger.
    pub(super) fn may_be(&self, line: &[u8]) -> bool {
        self.word.find(line).is_some()
    }

    pub(super) fn add(&mut self, ledger: Ledger, place: P) {
        merge_generations(&mut self.generations, &ledger.generations);
        self.first.get_or_insert((place, ledger.totals));
    }

    /// Adds a line that can't be read, if it is or was a ledger.
    pub(super) fn add_malformed(&mut self, line: u64, malformed: Malformed) {
        if malformed.is_ledger {
            self.unreadable.get_or_insert(MalformedLine { line, malformed });
        }
    }

    /// Adds those that follow after so many lines; `moved` gives a place its meaning here.
    pub(super) fn append(&mut self, later: Self, before: u64, moved: impl FnOnce(P) -> P) {
        merge_generations(&mut self.generations, &later.generations);
        self.first = self.first.take().or(later.first.map(|(place, totals)| (moved(place), totals)));
        let moved = |fault: MalformedLine| MalformedLine { line: before + fault.line, ..fault };
        self.unreadable = self.unreadable.take().or(later.unreadable.map(moved));
    }

    /// Makes sure that all of them could be read.
    pub(super) fn require_readable(&self, queue: &Path) -> Result<(), Error> {
        self.unreadable.as_ref().map_or(Ok(()), |fault| Err(unreadable_ledger(queue, fault)))
    }
}
