//! The fold over a queue's lines: all that metrics or a status report need to know.

use std::collections::BTreeMap;

use super::envelope::{self, Envelope, Line, Status};
use super::labels::Label;
use super::ledger::{Ledger, Totals, merge_generations};
use super::lines::RawLine;
use super::malformed::{Malformed, Reason};
use super::offload;
use super::spend::{Prices, Tokens};
use super::tally::{self, Tally};
use super::time::Timestamp;

/// What the fold takes from outside the queue.
#[derive(Debug)]
pub struct Parameters {
    /// The present: what lies later hasn't happened.
    pub now: Timestamp,
    /// The roles that have a name of their own; empty: the first ones that the queue shows.
    pub roles: Vec<String>,
    /// The same for kinds.
    pub kinds: Vec<String>,
    /// Prices for model responses that come without their cost.
    pub prices: Prices,
    /// What is too large for a line.
    pub offload: offload::Rule,
}

/// What the lines amount to.
#[derive(Debug, PartialEq, Eq)]
pub struct Summary {
    /// How many lines there were, of every sort.
    pub lines: u64,
    /// How many records the next offload would touch.
    pub oversized: u64,
    /// How many malformed lines there were, by reason.
    pub malformed: [u64; Reason::ALL.len()],
    /// The first malformed lines.
    pub first_malformed: Vec<MalformedLine>,
    /// From the ledger: of each earlier generation, how many bytes have been taken over.
    pub generations: BTreeMap<u64, u64>,
    tally: Tally<Cell>,
}

/// What the records of one role and kind amount to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    /// Live and removed records.
    pub totals: Totals,
    /// Live records by status, in the order of [`Status::ALL`].
    pub live: [u64; Status::ALL.len()],
    /// The earliest `ts` of live records by status, in the order of [`Status::ALL`].
    pub oldest: [Option<Timestamp>; Status::ALL.len()],
}

/// A malformed line and its place.
#[derive(Debug, PartialEq, Eq)]
pub struct MalformedLine {
    /// Its number, from 1.
    pub line: u64,
    /// What is wrong with it.
    pub malformed: Malformed,
}

/// How many malformed lines are remembered with their place.
pub const MAX_FIRST_MALFORMED: usize = 10;

impl Summary {
    /// Of no lines.
    #[must_use]
    pub fn new(parameters: &Parameters) -> Self {
        Self {
            lines: 0,
            oversized: 0,
            malformed: [0; Reason::ALL.len()],
            first_malformed: Vec::new(),
            generations: BTreeMap::new(),
            tally: Tally::for_metrics(&parameters.roles, &parameters.kinds),
        }
    }

    /// Adds the next line.
    pub fn add(&mut self, line: RawLine<'_>, parameters: &Parameters) {
        self.add_parsed(envelope::parse_raw(line), parameters);
    }

    /// Adds the next line as it was read.
    pub fn add_parsed(&mut self, line: Result<Line<'_>, Malformed>, parameters: &Parameters) {
        self.lines += 1;
        match line {
            Ok(Line::Blank) => {}
            Ok(Line::Record(envelope)) => self.add_record(&envelope, parameters),
            Ok(Line::Ledger(ledger)) => {
                let Ledger { totals, generations } = *ledger;
                self.tally.add_ledger(&totals);
                merge_generations(&mut self.generations, &generations);
            }
            Err(malformed) => {
                self.malformed[malformed.reason as usize] += 1;
                if self.first_malformed.len() < MAX_FIRST_MALFORMED {
                    self.first_malformed.push(MalformedLine { line: self.lines, malformed });
                }
            }
        }
    }

    fn add_record(&mut self, envelope: &Envelope<'_>, parameters: &Parameters) {
        let cell = self.tally.add_record(envelope, parameters.now, &parameters.prices);
        let status = envelope.status as usize;
        cell.live[status] += 1;
        cell.oldest[status] = Some(cell.oldest[status].map_or(envelope.ts, |oldest| oldest.min(envelope.ts)));
        self.oversized += u64::from(parameters.offload.would_move(envelope));
    }

    /// Whether a set of labels was full, so that the result depends on which values came first.
    #[must_use]
    pub fn overflowed(&self) -> bool {
        self.tally.overflowed()
    }

    /// Adds the summary of the lines that follow.
    ///
    /// The result is that of one fold over all lines, unless `later` has [overflowed](Self::overflowed).
    pub fn merge(&mut self, later: Self) {
        for (count, more) in self.malformed.iter_mut().zip(later.malformed) {
            *count += more;
        }
        for mut malformed in later.first_malformed {
            if self.first_malformed.len() < MAX_FIRST_MALFORMED {
                malformed.line += self.lines;
                self.first_malformed.push(malformed);
            }
        }
        self.lines += later.lines;
        self.oversized += later.oversized;
        merge_generations(&mut self.generations, &later.generations);
        self.tally.merge(later.tally);
    }

    /// Makes cells for the configured roles and kinds that no line has shown.
    pub fn seed(&mut self) {
        let Tally { roles, kinds, cells, .. } = &mut self.tally;
        if !roles.is_configured() && !kinds.is_configured() {
            return;
        }
        let mut roles: Vec<Label> = roles.iter().chain(cells.keys().map(|(role, _)| *role)).collect();
        let mut kinds: Vec<Label> = kinds.iter().chain(cells.keys().map(|(_, kind)| *kind)).collect();
        for labels in [&mut roles, &mut kinds] {
            labels.sort_unstable();
            labels.dedup();
        }
        for &role in &roles {
            for &kind in &kinds {
                cells.entry((role, kind)).or_default();
            }
        }
    }

    /// What the records amount to, by role and kind.
    pub fn cells(&self) -> impl Iterator<Item = (&str, &str, &Cell)> {
        self.tally.cells()
    }

    /// The same, by role.
    #[must_use]
    pub fn roles(&self) -> BTreeMap<&str, Cell> {
        let roles = &self.tally.roles;
        // A ledger may name a role that has no records any more. Only configured ones need none.
        let configured = roles.iter().filter(|_| roles.is_configured());
        let mut cells: BTreeMap<&str, Cell> = configured.map(|role| (roles.get(role), Cell::default())).collect();
        for (role, _, cell) in self.cells() {
            tally::Cell::merge(cells.entry(role).or_default(), cell);
        }
        cells
    }

    /// Tokens by kind and model.
    pub fn tokens(&self) -> impl Iterator<Item = (&str, &str, &Tokens)> {
        self.tally.tokens()
    }
}

impl tally::Cell for Cell {
    fn totals(&mut self) -> &mut Totals {
        &mut self.totals
    }

    fn merge(&mut self, other: &Self) {
        self.totals.merge(&other.totals);
        for (count, more) in self.live.iter_mut().zip(other.live) {
            *count += more;
        }
        for (oldest, other) in self.oldest.iter_mut().zip(other.oldest) {
            *oldest = [*oldest, other].into_iter().flatten().min();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(roles: &[&str], kinds: &[&str]) -> Parameters {
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let now = Timestamp::from_micros(2_000_000_000_000_000);
        Parameters {
            now,
            roles: owned(roles),
            kinds: owned(kinds),
            prices: Prices::default(),
            offload: offload::Rule::default(),
        }
    }

    fn record(role: &str, kind: &str, status: &str) -> String {
        format!(
            r#"{{"id":"1","ts":1764400000,"kind":"{kind}","from":"a","to":"{role}","payload":{{}},"status":"{status}"}}"#
        )
    }

    fn fold<'a>(lines: impl IntoIterator<Item = &'a String>, parameters: &Parameters) -> Summary {
        let mut summary = Summary::new(parameters);
        for line in lines {
            summary.add(RawLine::Whole(line.as_bytes()), parameters);
        }
        summary
    }

    fn pairs(summary: &Summary) -> Vec<(&str, &str, u64)> {
        summary.cells().map(|(role, kind, cell)| (role, kind, cell.totals.records)).collect()
    }

    #[test]
    fn the_fold_of_two_parts_is_the_fold_of_the_whole() {
        let parameters = parameters(&[], &[]);
        let lines: Vec<String> = (0..90)
            .map(|n| match n % 9 {
                0 => "{".to_owned(),
                _ => record(&format!("role-{}", n % 7), &format!("kind-{}", n % 40), "queued"),
            })
            .collect();
        for cut in 0..lines.len() {
            let (first, second) = lines.split_at(cut);
            let mut merged = fold(first, &parameters);
            merged.merge(fold(second, &parameters));
            assert_eq!(merged, fold(&lines, &parameters), "cut at {cut}");
        }
    }

    #[test]
    fn a_part_that_overflowed_says_so() {
        let parameters = parameters(&[], &[]);
        let fill = |count| (0..count).map(|n| record(&format!("role-{n}"), "k", "done")).collect::<Vec<_>>();
        assert!(!fold(&fill(50), &parameters).overflowed());
        assert!(fold(&fill(51), &parameters).overflowed());
    }

    #[test]
    fn configured_names_are_seeded_and_others_are_other() {
        let lines = [record("a", "k", "done"), record("x", "y", "done")];
        let seeded = |roles: &[&str], kinds: &[&str]| {
            let mut summary = fold(&lines, &parameters(roles, kinds));
            summary.seed();
            pairs(&summary).iter().map(|(role, kind, records)| format!("{role}/{kind}={records}")).collect::<Vec<_>>()
        };
        assert_eq!(seeded(&[], &[]), ["a/k=1", "x/y=1"]);
        assert_eq!(
            seeded(&["a", "b"], &["k"]),
            ["a/k=1", "a/other=0", "b/k=0", "b/other=0", "other/k=0", "other/other=1"]
        );
        assert_eq!(seeded(&["b"], &[]), ["b/k=0", "b/y=0", "other/k=1", "other/y=1"]);
    }

    #[test]
    fn the_first_malformed_lines_keep_their_numbers() {
        let lines: Vec<String> = (1..=30).map(|n| if n % 2 == 0 { String::new() } else { "{".to_owned() }).collect();
        let summary = fold(&lines, &parameters(&[], &[]));
        let numbers: Vec<u64> = summary.first_malformed.iter().map(|malformed| malformed.line).collect();
        assert_eq!(numbers, [1, 3, 5, 7, 9, 11, 13, 15, 17, 19]);
        assert_eq!((summary.lines, summary.malformed[Reason::NotJson as usize]), (30, 15));
    }
}
