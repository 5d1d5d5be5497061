//! What compaction removes, what it keeps, and why.

use std::collections::BTreeMap;
use std::ops::AddAssign;
use std::time::Duration;

use super::envelope::{self, Doubt, Envelope, Line, Status};
use super::ledger::{Ledger, LedgerTotals, Totals};
use super::lines::RawLine;
use super::malformed::{self, Malformed};
use super::spend::Prices;
use super::summary::{MalformedLine, merge_generations};
use super::tally::Tally;
use super::time::Timestamp;

/// What is old enough to go.
#[derive(Debug)]
pub struct Policy {
    /// The present.
    pub now: Timestamp,
    /// What has been done for longer than this is removed.
    pub older_than: Duration,
    // What metrics are made with: totals must not change by a removal.
    /// The roles that have a name of their own, beside the first ones that the queue shows.
    pub roles: Vec<String>,
    /// The same for kinds.
    pub kinds: Vec<String>,
    /// Prices for model responses that come without their cost.
    pub prices: Prices,
}

/// Why a line is kept. The first one that applies counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// It is no record.
    Malformed(malformed::Reason),
    /// It means nothing.
    Blank,
    /// It can't be read with certainty.
    Doubt(Doubt),
    /// It isn't done.
    Status(Status),
    /// It is done, but was refused at some time.
    Nacked,
    /// One of its times hasn't come yet.
    FutureTime,
    /// It has not been done for long enough.
    Recent,
    /// It would have finished before it began.
    ContradictoryTimes,
}

impl Reason {
    /// Every reason, in the order of FORMAT.md.
    pub const ALL: [Self; 21] = [
        Self::Malformed(malformed::Reason::TooLong),
        Self::Malformed(malformed::Reason::NotUtf8),
        Self::Malformed(malformed::Reason::NotJson),
        Self::Malformed(malformed::Reason::UnsupportedVersion),
        Self::Malformed(malformed::Reason::NotAnEnvelope),
        Self::Blank,
        Self::Doubt(Doubt::DuplicateKey),
        Self::Doubt(Doubt::NonFiniteNumber),
        Self::Doubt(Doubt::LoneSurrogate),
        Self::Doubt(Doubt::UnreadableTime),
        Self::Doubt(Doubt::UnreadableNacks),
        Self::Status(Status::Queued),
        Self::Status(Status::Running),
        Self::Status(Status::Nack),
        Self::Status(Status::Human),
        Self::Status(Status::Dead),
        Self::Status(Status::Other),
        Self::Nacked,
        Self::FutureTime,
        Self::Recent,
        Self::ContradictoryTimes,
    ];

    /// Its name, as in plans.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Malformed(reason) => reason.as_str(),
            Self::Blank => "blank",
            Self::Doubt(doubt) => doubt.as_str(),
            Self::Status(Status::Other) => "unknown_status",
            Self::Status(status) => status.as_str(),
            Self::Nacked => "nacked",
            Self::FutureTime => "future_time",
            Self::Recent => "recent",
            Self::ContradictoryTimes => "contradictory_times",
        }
    }
}

impl Policy {
    /// Why a record is kept; `None` if it is to be removed.
    #[must_use]
    pub fn reason_to_keep(&self, envelope: &Envelope<'_>) -> Option<Reason> {
        if let Some(doubt) = envelope.doubt {
            return Some(Reason::Doubt(doubt));
        }
        if envelope.status != Status::Done {
            return Some(Reason::Status(envelope.status));
        }
        if envelope.nacks > 0 {
            return Some(Reason::Nacked);
        }
        let times = [Some(envelope.ts), envelope.started_ts, envelope.finished_ts];
        if times.into_iter().flatten().any(|time| time > self.now) {
            return Some(Reason::FutureTime);
        }
        let limit = self.now.before(self.older_than);
        if envelope.finished_ts.unwrap_or(envelope.ts) >= limit {
            return Some(Reason::Recent);
        }
        times.into_iter().flatten().any(|time| time >= limit).then_some(Reason::ContradictoryTimes)
    }
}

/// Lines, and their bytes with the `\n`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// How many.
    pub lines: u64,
    /// How many bytes.
    pub bytes: u64,
}

impl AddAssign for Amount {
    fn add_assign(&mut self, more: Self) {
        self.lines += more.lines;
        self.bytes += more.bytes;
    }
}

/// What compaction makes of a queue.
#[derive(Debug, PartialEq, Eq)]
pub struct Plan {
    /// The lines that stay.
    pub kept: Amount,
    /// How many of them, by reason.
    pub reasons: BTreeMap<Reason, u64>,
    /// The earliest `ts` of a record that stays.
    pub oldest_kept: Option<Timestamp>,
    /// The records that go.
    pub removed: Amount,
    /// The ledger lines, which a new one replaces.
    pub ledgers: Amount,
    /// The first ledger line that can't be read, so that nothing may be removed.
    pub unreadable_ledger: Option<MalformedLine>,
    /// What has been removed before and is now.
    tally: Tally<Totals>,
    /// How many bytes were reclaimed before.
    reclaimed_bytes: u64,
    /// From the ledger: of each earlier generation, how many bytes have been taken over.
    generations: BTreeMap<u64, u64>,
}

impl Plan {
    /// For no lines.
    #[must_use]
    pub fn new(policy: &Policy) -> Self {
        Self {
            kept: Amount::default(),
            reasons: BTreeMap::new(),
            oldest_kept: None,
            removed: Amount::default(),
            ledgers: Amount::default(),
            unreadable_ledger: None,
            tally: Tally::for_ledger(&policy.roles, &policy.kinds),
            reclaimed_bytes: 0,
            generations: BTreeMap::new(),
        }
    }

    /// Adds the next line, and says whether it goes on.
    pub fn add(&mut self, line: RawLine<'_>, policy: &Policy) -> bool {
        let bytes = match line {
            RawLine::Whole(line) => line.len() as u64,
            RawLine::TooLong { bytes, .. } => bytes,
        };
        let amount = Amount { lines: 1, bytes: bytes + 1 };
        let reason = match envelope::parse_raw(line) {
            Ok(Line::Ledger(ledger)) => {
                self.ledgers += amount;
                self.add_ledger(&ledger);
                return false;
            }
            Ok(Line::Record(envelope)) => {
                let Some(reason) = policy.reason_to_keep(&envelope) else {
                    self.removed += amount;
                    self.tally.add_record(&envelope, policy.now, &policy.prices);
                    return false;
                };
                self.tally.note_names(&envelope);
                self.oldest_kept = Some(self.oldest_kept.map_or(envelope.ts, |oldest| oldest.min(envelope.ts)));
                reason
            }
            Ok(Line::Blank) => Reason::Blank,
            Err(malformed) => self.refuse(malformed),
        };
        self.kept += amount;
        *self.reasons.entry(reason).or_default() += 1;
        true
    }

    fn add_ledger(&mut self, ledger: &Ledger) {
        self.tally.add_ledger(&ledger.totals);
        self.reclaimed_bytes = self.reclaimed_bytes.saturating_add(ledger.totals.reclaimed_bytes);
        merge_generations(&mut self.generations, &ledger.generations);
    }

    fn refuse(&mut self, malformed: Malformed) -> Reason {
        let reason = Reason::Malformed(malformed.reason);
        if malformed.is_ledger && self.unreadable_ledger.is_none() {
            self.unreadable_ledger = Some(MalformedLine { line: self.lines() + 1, malformed });
        }
        reason
    }

    /// How many lines there were.
    #[must_use]
    pub fn lines(&self) -> u64 {
        self.kept.lines + self.removed.lines + self.ledgers.lines
    }

    /// Whether a limit was reached, so that the totals depend on what came first.
    #[must_use]
    pub fn overflowed(&self) -> bool {
        self.tally.overflowed()
    }

    /// Adds the plan for the lines that follow.
    ///
    /// The result is that of one plan for all lines, unless `later` has [overflowed](Self::overflowed).
    pub fn merge(&mut self, later: Self) {
        let before = self.lines();
        if self.unreadable_ledger.is_none() {
            self.unreadable_ledger =
                later.unreadable_ledger.map(|fault| MalformedLine { line: before + fault.line, ..fault });
        }
        self.kept += later.kept;
        self.removed += later.removed;
        self.ledgers += later.ledgers;
        for (reason, lines) in later.reasons {
            *self.reasons.entry(reason).or_default() += lines;
        }
        self.oldest_kept = [self.oldest_kept, later.oldest_kept].into_iter().flatten().min();
        self.reclaimed_bytes = self.reclaimed_bytes.saturating_add(later.reclaimed_bytes);
        merge_generations(&mut self.generations, &later.generations);
        self.tally.merge(later.tally);
    }

    /// The ledger as it will be once the records are removed.
    #[must_use]
    pub fn ledger(&self) -> Ledger {
        let reclaimed_bytes = self.reclaimed_bytes.saturating_add(self.removed.bytes);
        let totals = LedgerTotals { reclaimed_bytes, ..self.tally.to_ledger() };
        Ledger { totals, generations: self.generations.clone() }
    }
}
