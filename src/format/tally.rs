//! What records amount to, by role, kind and model: what metrics show, and what the ledger remembers of removed records.

use std::collections::BTreeMap;

use super::envelope::{Envelope, Status};
use super::labels::{Label, Labels, MAX_LEARNED};
use super::ledger::{LedgerCell, LedgerTokens, LedgerTotals, Totals};
use super::money::Usd;
use super::spend::{Prices, Tokens};
use super::time::{Timestamp, interval};

/// A cell of a tally, which may hold more than the totals.
pub trait Cell: Default {
    /// Its totals.
    fn totals(&mut self) -> &mut Totals;
    /// Adds the other's amounts.
    fn merge(&mut self, other: &Self);
}

impl Cell for Totals {
    fn totals(&mut self) -> &mut Totals {
        self
    }

    fn merge(&mut self, other: &Self) {
        Self::merge(self, other);
    }
}

/// Amounts by role and kind, and tokens by kind and model.
#[derive(Debug, PartialEq, Eq)]
pub struct Tally<C> {
    /// The roles met so far.
    pub(super) roles: Labels,
    /// The kinds met so far.
    pub(super) kinds: Labels,
    models: Labels,
    pub(super) cells: BTreeMap<(Label, Label), C>,
    tokens: BTreeMap<(Label, Label), Tokens>,
}

/// The label of a model, which may come without a name.
fn named_model(name: &str) -> &str {
    if name.is_empty() { "unknown" } else { name }
}

impl<C: Cell> Tally<C> {
    /// A tally for metrics.
    #[must_use]
    pub fn for_metrics(roles: &[String], kinds: &[String]) -> Self {
        Self::new(Labels::new(roles), Labels::new(kinds))
    }

    fn new(roles: Labels, kinds: Labels) -> Self {
        Self { roles, kinds, models: Labels::learning(&[]), cells: BTreeMap::new(), tokens: BTreeMap::new() }
    }

    /// Adds a record, and returns the cell that it belongs to.
    pub fn add_record(&mut self, envelope: &Envelope<'_>, now: Timestamp, prices: &Prices) -> &mut C {
        let (role, kind) = self.meet(envelope);
        let (mut spend_usd, mut unpriced) = (Usd::ZERO, false);
        for entry in envelope.responses().into_iter().flatten() {
            match entry.cost(prices) {
                Some(cost) => spend_usd = spend_usd.saturating_add(cost),
                None => unpriced = true,
            }
            if let Some((model, tokens)) = entry.tokens() {
                let model = self.models.intern(named_model(model));
                self.tokens.entry((kind, model)).or_default().merge(&tokens);
            }
        }

        let cell = self.cells.entry((role, kind)).or_default();
        let totals = cell.totals();
        // A ledger may hold any number, so that one more could be too many.
        totals.records = totals.records.saturating_add(1);
        totals.done = totals.done.saturating_add(u64::from(envelope.status == Status::Done));
        totals.dead = totals.dead.saturating_add(u64::from(envelope.status == Status::Dead));
        totals.nacks = totals.nacks.saturating_add(envelope.nacks);
        totals.spend_usd = totals.spend_usd.saturating_add(spend_usd);
        totals.unpriced = totals.unpriced.saturating_add(u64::from(unpriced));
        if let Some(started) = envelope.started_ts {
            if let Some(wait) = interval(envelope.ts, started, now) {
                totals.queue_wait.observe(wait);
            }
            if let Some(finished) = envelope.finished_ts
                && let Some(time) = interval(started, finished, now)
            {
                totals.role_time.observe(time);
            }
        }
        cell
    }

    /// Adds what removed records amounted to.
    pub fn add_ledger(&mut self, removed: &LedgerTotals) {
        for (labels, names) in
            [(&mut self.roles, &removed.roles), (&mut self.kinds, &removed.kinds), (&mut self.models, &removed.models)]
        {
            for name in names {
                labels.intern(name);
            }
        }
        for LedgerCell { role, kind, totals } in &removed.cells {
            let key = (self.roles.intern(role), self.kinds.intern(kind));
            self.cells.entry(key).or_default().totals().merge(totals);
        }
        for LedgerTokens { kind, model, tokens } in &removed.tokens {
            let key = (self.kinds.intern(kind), self.models.intern(named_model(model)));
            self.tokens.entry(key).or_default().merge(tokens);
        }
    }

    /// Whether a limit was reached, so that the result depends on what came first.
    #[must_use]
    pub fn overflowed(&self) -> bool {
        self.roles.overflowed || self.kinds.overflowed || self.models.overflowed
    }

    /// Adds the tally of what follows.
    ///
    /// The result is that of one pass over both, unless `later` has [overflowed](Self::overflowed).
    pub fn merge(&mut self, later: Self) {
        // Every label of `later` first, in its order: that is the order in which one pass would have met them.
        self.roles.intern_all(&later.roles);
        self.kinds.intern_all(&later.kinds);
        self.models.intern_all(&later.models);
        for ((role, kind), cell) in later.cells {
            let key = (self.roles.intern(later.roles.get(role)), self.kinds.intern(later.kinds.get(kind)));
            self.cells.entry(key).or_default().merge(&cell);
        }
        for ((kind, model), tokens) in later.tokens {
            let key = (self.kinds.intern(later.kinds.get(kind)), self.models.intern(later.models.get(model)));
            self.tokens.entry(key).or_default().merge(&tokens);
        }
    }

    /// The amounts by role and kind.
    pub fn cells(&self) -> impl Iterator<Item = (&str, &str, &C)> {
        self.cells.iter().map(|((role, kind), cell)| (self.roles.get(*role), self.kinds.get(*kind), cell))
    }

    /// Tokens by kind and model.
    pub fn tokens(&self) -> impl Iterator<Item = (&str, &str, &Tokens)> {
        self.tokens.iter().map(|((kind, model), tokens)| (self.kinds.get(*kind), self.models.get(*model), tokens))
    }

    fn meet(&mut self, envelope: &Envelope<'_>) -> (Label, Label) {
        (self.roles.intern(&envelope.to), self.kinds.intern(&envelope.kind))
    }
}

impl Tally<Totals> {
    /// A tally for the ledger, which keeps names apart that metrics keep apart: the first ones, and these.
    #[must_use]
    pub fn for_ledger(roles: &[String], kinds: &[String]) -> Self {
        Self::new(Labels::learning(roles), Labels::learning(kinds))
    }

    /// Remembers the names of a record that is kept, without adding it: metrics learn their labels in the order in which records show
    /// them, and must learn the same ones after other records have been removed.
    pub fn note_names(&mut self, envelope: &Envelope<'_>) {
        self.meet(envelope);
        if self.models.values().len() < MAX_LEARNED {
            for entry in envelope.responses().into_iter().flatten() {
                if let Some((model, _)) = entry.tokens() {
                    self.models.intern(named_model(model));
                }
            }
        }
    }

    /// What a ledger stores of it.
    #[must_use]
    pub fn to_ledger(&self) -> LedgerTotals {
        let first = |labels: &Labels| labels.values().iter().take(MAX_LEARNED).cloned().collect();
        let cell = |(role, kind, totals): (&str, &str, &Totals)| LedgerCell {
            role: role.to_owned(),
            kind: kind.to_owned(),
            totals: totals.clone(),
        };
        let row = |(kind, model, tokens): (&str, &str, &Tokens)| LedgerTokens {
            kind: kind.to_owned(),
            model: model.to_owned(),
            tokens: *tokens,
        };
        LedgerTotals {
            roles: first(&self.roles),
            kinds: first(&self.kinds),
            models: first(&self.models),
            cells: self.cells().map(cell).collect(),
            tokens: self.tokens().map(row).collect(),
            reclaimed_bytes: 0,
        }
    }
}

#[cfg(test)]
#[expect(clippy::expect_used, reason = "a test that panics has failed")]
mod tests {
    use super::super::envelope::{self, Line};
    use super::super::labels::MAX_BYTES;
    use super::super::ledger::Ledger;
    use super::*;

    const NOW: Timestamp = Timestamp::from_micros(1_795_953_600_000_000);

    /// A record as JSON, whose names are quoted as they must be.
    fn record(role: &str, kind: &str, model: &str) -> String {
        let [role, kind, model] = [role, kind, model].map(|name| serde_json::to_string(name).expect("a string"));
        format!(
            "{{\"id\":\"1\",\"ts\":1764400000,\"kind\":{kind},\"from\":\"a\",\"to\":{role},\"status\":\"done\",\
             \"started_ts\":1764400100,\"finished_ts\":1764400200,\"spend\":{{\"model\":{model},\"input_tokens\":3,\"cost_usd\":\"0.25\"}}}}"
        )
    }

    fn add<C: Cell>(tally: &mut Tally<C>, lines: &[String]) {
        for line in lines {
            match envelope::parse(line.as_bytes()) {
                Ok(Line::Record(envelope)) => tally.add_record(&envelope, NOW, &Prices::default()),
                other => panic!("{line}: {other:?}"),
            };
        }
    }

    fn for_metrics() -> Tally<Totals> {
        Tally::for_metrics(&[], &[])
    }

    /// What metrics show of records, and what they show of the ledger that remembers them.
    fn assert_metrics_are_the_same(lines: &[String]) -> LedgerTotals {
        let (mut ledger, mut live, mut removed) = (Tally::for_ledger(&[], &[]), for_metrics(), for_metrics());
        add(&mut ledger, lines);
        add(&mut live, lines);
        let ledger = ledger.to_ledger();
        removed.add_ledger(&ledger);
        let shown = |tally: &Tally<Totals>| {
            let key = |a: &str, b: &str| (a.to_owned(), b.to_owned());
            let cells: BTreeMap<_, _> =
                tally.cells().map(|(role, kind, totals)| (key(role, kind), totals.clone())).collect();
            (cells, tally.tokens().map(|(kind, model, tokens)| (key(kind, model), *tokens)).collect::<BTreeMap<_, _>>())
        };
        let ((live_cells, live_tokens), (cells, tokens)) = (shown(&live), shown(&removed));
        for (key, totals) in &live_cells {
            assert_eq!(cells.get(key), Some(totals), "{key:?}");
        }
        for (key, row) in &live_tokens {
            assert_eq!(tokens.get(key), Some(row), "{key:?}");
        }
        assert_eq!((cells.len(), tokens.len()), (live_cells.len(), live_tokens.len()));
        ledger
    }

    /// Asserts that the line of a ledger can be read, and returns how long it is.
    fn assert_readable(totals: LedgerTotals) -> usize {
        let ledger = Ledger { totals, generations: BTreeMap::from([(u64::MAX, u64::MAX)]) };
        let line = ledger.to_line(NOW).expect("a ledger that is short enough");
        match envelope::parse(line.trim_end().as_bytes()) {
            Ok(Line::Ledger(read)) => assert!(*read == ledger, "it is another"),
            other => panic!("{other:?}"),
        }
        line.len()
    }

    #[test]
    fn ten_thousand_names_of_each_sort_make_a_ledger_that_can_be_read() {
        let name = |n: usize| format!("role-{n}");
        let lines: Vec<String> = (0..10_000).map(|n| record(&name(n), &name(n), &name(n))).collect();
        let ledger = assert_metrics_are_the_same(&lines);
        assert_eq!(ledger.roles.len(), MAX_LEARNED);
        assert_eq!(ledger.cells.iter().map(|cell| cell.totals.records).sum::<u64>(), 10_000);
        assert_eq!(ledger.tokens.iter().map(|row| row.tokens.input).sum::<u64>(), 30_000);
        assert_readable(ledger);
    }

    /// As many rows as there can be of names that are as long as a label may be, and twice as long as JSON text.
    #[test]
    fn the_longest_names_make_a_ledger_that_can_be_read() {
        let name = |n: usize| format!("{n}{}", "\"".repeat(MAX_BYTES - n.to_string().len()));
        let pairs = (0..60 * 60).map(|n| record(&name(n / 60), &name(n % 60), &name(n / 60)));
        let others = (0..1_000).map(|n| record(&name(1_000 + n), &name(1_000 + n), &name(1_000 + n)));
        let mut tally = Tally::for_ledger(&[], &[]);
        add(&mut tally, &pairs.chain(others).collect::<Vec<_>>());
        let length = assert_readable(tally.to_ledger());
        assert!(length > 3_000_000, "{length} bytes are too few to try the bound");
    }

    /// Whatever the order is in which pairs are shown, those that metrics show have a place of their own in the ledger.
    #[test]
    fn pairs_of_names_without_series_take_no_place_from_others() {
        let pair = |a: usize, b: usize| record(&format!("role-{a}"), &format!("kind-{b}"), &format!("model-{a}"));
        let learned: Vec<String> = (0..50).map(|n| pair(n, n)).collect();
        let flood: Vec<String> = (0..60 * 60).map(|n| pair(100 + n / 60, 100 + n % 60)).collect();
        let late: Vec<String> = (0..50).flat_map(|n| [pair(n, 49 - n), pair(n, 100), pair(200, n)]).collect();
        assert_readable(assert_metrics_are_the_same(&[learned, flood, late].concat()));
    }

    /// As many series as metrics can have, and their names as long as they can be: it takes no more rows than that.
    #[test]
    fn all_that_metrics_can_show_has_a_place_in_the_ledger() {
        let name =
            |sort: &str, n: usize| format!("{sort}-{n}-{}", "x".repeat(128 - sort.len() - n.to_string().len() - 2));
        let lines: Vec<String> =
            (0..51 * 51).map(|n| record(&name("r", n / 51), &name("k", n % 51), &name("m", n / 51))).collect();
        let ledger = assert_metrics_are_the_same(&lines);
        assert_eq!((ledger.cells.len(), ledger.tokens.len()), (51 * 51, 51 * 51));
        assert_readable(ledger);
    }

    #[test]
    fn a_ledger_of_a_ledger_is_the_same() {
        let pair = |n: usize| {
            record(&format!("role-{}", n * 7 % 90), &format!("kind-{}", n * 11 % 70), &format!("model-{}", n % 80))
        };
        let mut tally = Tally::for_ledger(&[], &[]);
        add(&mut tally, &(0..2_000).map(pair).collect::<Vec<_>>());
        let first = tally.to_ledger();
        let mut again = Tally::for_ledger(&[], &[]);
        again.add_ledger(&first);
        // The order of rows may differ where their names have no series of their own.
        let sorted = |mut ledger: LedgerTotals| {
            ledger.cells.sort_by(|a, b| (&a.role, &a.kind).cmp(&(&b.role, &b.kind)));
            ledger.tokens.sort_by(|a, b| (&a.kind, &a.model).cmp(&(&b.kind, &b.model)));
            ledger
        };
        assert!(sorted(again.to_ledger()) == sorted(first.clone()), "it is another");
        // Twice the ledger is twice the amounts.
        again.add_ledger(&first);
        let sum = |ledger: &LedgerTotals| ledger.cells.iter().map(|cell| cell.totals.records).sum::<u64>();
        assert_eq!((sum(&first), sum(&again.to_ledger())), (2_000, 4_000));
    }

    /// A kept record's names are learned, and nothing else of it.
    #[test]
    fn noted_names_have_an_order_and_no_amounts() {
        let mut tally = Tally::for_ledger(&[], &[]);
        for (line, is_kept) in
            [(record("b", "k", "n"), true), (record("a", "l", ""), false), (record("c", "k", "m"), true)]
        {
            match envelope::parse(line.as_bytes()) {
                Ok(Line::Record(envelope)) if is_kept => tally.note_names(&envelope),
                Ok(Line::Record(envelope)) => drop(tally.add_record(&envelope, NOW, &Prices::default())),
                other => panic!("{line}: {other:?}"),
            }
        }
        let ledger = tally.to_ledger();
        assert_eq!(
            (ledger.roles, ledger.kinds),
            (vec!["b".to_owned(), "a".to_owned(), "c".to_owned()], vec!["k".to_owned(), "l".to_owned()])
        );
        assert_eq!(ledger.models, ["n", "unknown", "m"]);
        let cells: Vec<_> =
            ledger.cells.iter().map(|cell| (cell.role.as_str(), cell.kind.as_str(), cell.totals.records)).collect();
        assert_eq!(cells, [("a", "l", 1)]);
        assert_eq!(ledger.tokens.len(), 1);
    }
}
