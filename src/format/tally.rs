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
