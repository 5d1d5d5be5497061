//! What compaction removes, what it keeps, and why.

use std::collections::BTreeMap;
use std::ops::AddAssign;
use std::time::Duration;

use super::envelope::{self, Doubt, Envelope, Line, Status};
use super::ledger::{Ledger, LedgerTotals, Totals, merge_generations};
use super::lines::RawLine;
use super::malformed::{self, Malformed};
use super::spend::Prices;
use super::summary::MalformedLine;
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
        let amount = Amount { lines: 1, bytes: line.size() };
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

#[cfg(test)]
#[expect(clippy::expect_used, reason = "a test that panics has failed")]
mod tests {
    use proptest::collection::{btree_map, vec};
    use proptest::prelude::*;

    use super::super::histogram::Histogram;
    use super::super::ledger::{LedgerCell, LedgerTokens, begins_like_ledger};
    use super::super::money::Usd;
    use super::super::offload;
    use super::super::spend::Tokens;
    use super::super::summary::{Parameters, Summary};
    use super::*;

    const NOW: u64 = 1_795_953_600;
    const DAY: u64 = 86_400;
    /// Longer lines come to the plan as too long.
    const MAX_LINE: usize = 600;

    fn micros(seconds: u64, micros: i64) -> Timestamp {
        Timestamp::from_micros(i64::try_from(seconds).expect("a time of today") * 1_000_000 + micros)
    }

    fn policy(older_than: Duration) -> Policy {
        Policy { now: micros(NOW, 0), older_than, roles: Vec::new(), kinds: Vec::new(), prices: prices() }
    }

    fn prices() -> Prices {
        Prices::parse(br#"{"model-1":{"input_cost_per_token":0.25,"output_cost_per_token":1e-7}}"#)
            .expect("a price map")
    }

    fn raw(line: &str) -> RawLine<'_> {
        let is_ledger = begins_like_ledger(line.as_bytes());
        // As the splitter has it.
        if line.len() <= MAX_LINE || is_ledger {
            return RawLine::Whole(line.as_bytes());
        }
        RawLine::TooLong { bytes: line.len() as u64, is_ledger }
    }

    /// The plan for lines, and those that go on.
    fn plan_of(lines: &[String], policy: &Policy) -> (Plan, Vec<String>) {
        let mut plan = Plan::new(policy);
        let kept = lines.iter().filter(|line| plan.add(raw(line), policy)).cloned().collect();
        (plan, kept)
    }

    /// A ledger with its rows in the order of their names: that of names without series of their own is nobody's business.
    fn sorted(mut ledger: Ledger) -> Ledger {
        ledger.totals.cells.sort_by(|a, b| (&a.role, &a.kind).cmp(&(&b.role, &b.kind)));
        ledger.totals.tokens.sort_by(|a, b| (&a.kind, &a.model).cmp(&(&b.kind, &b.model)));
        ledger
    }

    /// What compaction makes of lines.
    fn compacted(lines: &[String], policy: &Policy) -> Vec<String> {
        let (plan, kept) = plan_of(lines, policy);
        let line = plan.ledger().to_line(policy.now).expect("a ledger that can be read");
        let ledger = line.strip_suffix('\n').expect("a line").to_owned();
        std::iter::once(ledger).chain(kept).collect()
    }

    type ByLabels<T> = BTreeMap<(String, String), T>;

    /// All that counters and histograms show of lines, with these roles configured.
    fn shown(lines: &[String], roles: &[&str], now: Timestamp) -> (ByLabels<Totals>, ByLabels<Tokens>) {
        let roles = roles.iter().map(|&role| role.to_owned()).collect();
        let parameters =
            Parameters { now, roles, kinds: Vec::new(), prices: prices(), offload: offload::Rule::default() };
        let mut summary = Summary::new(&parameters);
        for line in lines {
            summary.add(raw(line), &parameters);
        }
        let key = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        let cells = summary.cells().map(|(role, kind, cell)| (key(role, kind), cell.totals.clone())).collect();
        (cells, summary.tokens().map(|(kind, model, tokens)| (key(kind, model), *tokens)).collect())
    }

    /// Names, of which some are cleaned before they become labels.
    fn name(prefix: &'static str, names: u8) -> impl Strategy<Value = String> {
        prop_oneof![
            10 => (0..names).prop_map(move |n| format!("{prefix}-{n}")),
            1 => prop_oneof![
                Just(String::new()),
                Just("other".to_owned()),
                Just(r"a\u0007".to_owned()),
                Just("a\u{fffd}".to_owned()),
                Just(r#"\""#.to_owned()),
                Just("x".repeat(130)),
            ],
        ]
    }

    fn record(names: u8) -> impl Strategy<Value = String> {
        let time = || prop_oneof![0..3 * DAY, 13 * DAY..15 * DAY, 0..400 * DAY].prop_map(|age| NOW + DAY - age);
        let times = (time(), proptest::option::of(time()), proptest::option::of(time()));
        let of = (name("role", names), name("kind", names), name("model", names));
        let status = prop_oneof![5 => Just("done"), 1 => Just("queued"), 1 => Just("dead"), 1 => Just("nack"), 1 => Just("paused")];
        (of, times, status, 0..10_u8, 0..1_000_u32).prop_map(|((role, kind, model), (ts, started, finished), status, more, amount)| {
            let time = |name: &str, time: Option<u64>| time.map_or(String::new(), |time| format!(",\"{name}\":{time}"));
            let more = match more {
                0 => ",\"nacks\":1".to_owned(),
                1 => ",\"x\":NaN".to_owned(),
                2 => ",\"spend\":0.1".to_owned(),
                3 => format!(",\"x\":\"{}\"", "x".repeat(MAX_LINE)),
                4 => String::new(),
                5 => format!(",\"spend\":[{{\"cost_usd\":\"0.{amount}\",\"model\":\"{model}\"}},{{\"output_tokens\":{amount}}}]"),
                _ => format!(",\"spend\":{{\"model\":\"{model}\",\"input_tokens\":{amount},\"output_tokens\":7}}"),
            };
            let times = time("started_ts", started) + &time("finished_ts", finished);
            format!(
                "{{\"id\":\"1\",\"ts\":{ts},\"kind\":\"{kind}\",\"from\":\"a\",\"to\":\"{role}\",\"payload\":{{}},\"status\":\"{status}\"{times}{more}}}"
            )
        })
    }

    fn ledger_line(names: u8) -> impl Strategy<Value = String> {
        (name("role", names), name("kind", names), name("model", names), name("role", names), 0..9_u8).prop_map(
            |(role, kind, model, other, n)| {
                format!(
                    "{{\"id\":\"ledger\",\"ts\":1,\"kind\":\"ledger\",\"from\":\"handoff\",\"to\":\"\",\"payload\":{{\"version\":1,\"totals\":{{\
                     \"roles\":[\"{other}\",\"{role}\"],\"models\":[\"{model}\"],\"cells\":[{{\"role\":\"{role}\",\"kind\":\"{kind}\",\"records\":{n},\
                     \"queue_wait\":{{\"sum_us\":{n}}},\"spend_usd\":\"{n}.5\"}},{{\"role\":\"{other}\",\"kind\":\"{kind}\",\"nacks\":{n}}}],\
                     \"tokens\":[{{\"kind\":\"{kind}\",\"model\":\"{model}\",\"input\":{n}}}],\"reclaimed_bytes\":{n}}},\
                     \"generations\":{{\"{n}\":{n}}}}},\"status\":\"ledger\"}}"
                )
            },
        )
    }

    /// Lines of every sort with so many names of each sort.
    fn lines(names: u8, count: usize) -> impl Strategy<Value = Vec<String>> {
        let line = prop_oneof![
            20 => record(names),
            2 => ledger_line(names),
            1 => prop_oneof![Just("\0\0".to_owned()), Just("{}{}".to_owned()),  Just("{}".to_owned()), Just(String::new())],
            1 => Just(r#"{"id":"ledger","ts":"#.to_owned()),
        ];
        vec(line, 0..count)
    }

    /// The same without ledgers that can't be read, with which nothing may be rewritten.
    fn readable_lines(names: u8, count: usize) -> impl Strategy<Value = Vec<String>> {
        lines(names, count).prop_map(|mut lines| {
            lines.retain(|line| line != r#"{"id":"ledger","ts":"#);
            lines
        })
    }

    fn usd() -> impl Strategy<Value = Usd> {
        let decimal =
            (0..34_000_000_000_u64, 0..10_u128.pow(28)).prop_map(|(whole, fraction)| format!("{whole}.{fraction:028}"));
        let most = (0..40).fold(Usd::ZERO, |sum, _| sum.saturating_add(Usd::MAX_COST));
        prop_oneof![1 => Just(Usd::ZERO), 1 => Just(most), 8 => decimal.prop_map(|text| Usd::parse(&text).expect("an amount"))]
    }

    fn histogram() -> impl Strategy<Value = Histogram> {
        (any::<[u64; 13]>(), any::<u64>()).prop_map(|(buckets, sum_us)| Histogram { buckets, sum_us })
    }

    fn cell() -> impl Strategy<Value = LedgerCell> {
        let counts = any::<[u64; 5]>();
        (any::<String>(), any::<String>(), counts, histogram(), histogram(), usd()).prop_map(
            |(role, kind, [records, done, dead, nacks, unpriced], queue_wait, role_time, spend_usd)| LedgerCell {
                role,
                kind,
                totals: Totals { records, done, dead, nacks, queue_wait, role_time, spend_usd, unpriced },
            },
        )
    }

    fn ledger() -> impl Strategy<Value = Ledger> {
        let names = || vec(any::<String>(), 0..5);
        let row = (any::<String>(), any::<String>(), any::<[u64; 4]>()).prop_map(|(kind, model, counts)| {
            let [input, output, cache_read, cache_creation] = counts;
            LedgerTokens { kind, model, tokens: Tokens { input, output, cache_read, cache_creation } }
        });
        let generations = btree_map(any::<u64>(), any::<u64>(), 0..5);
        (names(), names(), names(), vec(cell(), 0..5), vec(row, 0..5), any::<u64>(), generations).prop_map(
            |(roles, kinds, models, cells, tokens, reclaimed_bytes, generations)| Ledger {
                totals: LedgerTotals { roles, kinds, models, cells, tokens, reclaimed_bytes },
                generations,
            },
        )
    }

    proptest! {
        // Each of them reads hundreds of lines.
        #![proptest_config(ProptestConfig::with_cases(40))]

        /// However lines are cut into parts, the plans for these make up the plan for all.
        #[test]
        fn plans_of_parts_make_up_the_plan_of_the_whole(lines in lines(8, 60), cuts in vec(0..60_usize, 0..4)) {
            let policy = policy(Duration::from_secs(14 * DAY));
            let (whole, kept) = plan_of(&lines, &policy);
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(lines.len())).chain([0, lines.len()]).collect();
            cuts.sort_unstable();
            let (mut merged, mut kept_of_parts) = plan_of(&[], &policy);
            for part in cuts.windows(2) {
                let (plan, kept) = plan_of(&lines[part[0]..part[1]], &policy);
                merged.merge(plan);
                kept_of_parts.extend(kept);
            }
            prop_assert_eq!(merged, whole);
            prop_assert_eq!(kept_of_parts, kept);
        }

        /// With more names than metrics show, the parts say so, or the ledger comes out the same.
        #[test]
        fn plans_of_parts_with_many_names_make_up_the_ledger_of_the_whole(lines in lines(80, 120), cut in 0..120_usize) {
            let policy = policy(Duration::from_secs(DAY));
            let (first, later) = lines.split_at(cut.min(lines.len()));
            let (mut merged, later) = (plan_of(first, &policy).0, plan_of(later, &policy).0);
            prop_assume!(!later.overflowed());
            merged.merge(later);
            prop_assert_eq!(merged.ledger(), plan_of(&lines, &policy).0.ledger());
        }

        /// Counters after a compaction are those before it, also after many, with far more names than there is room for.
        #[test]
        fn compaction_changes_no_counter(chunks in vec(readable_lines(120, 80), 1..4), ages in any::<[u16; 4]>()) {
            let (mut all, mut live) = (Vec::new(), Vec::new());
            for (round, (chunk, age)) in chunks.into_iter().zip(ages).enumerate() {
                all.extend(chunk.iter().cloned());
                live.extend(chunk);
                let roles = ["role-3", "role-90", "other", "nobody"];
                let policy = Policy {
                    now: micros(NOW + 10 * DAY * round as u64, 0),
                    roles: roles.map(str::to_owned).to_vec(),
                    ..policy(Duration::from_secs(u64::from(age) * 60))
                };
                let before = shown(&live, &[], policy.now);
                live = compacted(&live, &policy);
                prop_assert_eq!(&shown(&live, &[], policy.now), &before);
                prop_assert_eq!(before, shown(&all, &[], policy.now));
                prop_assert_eq!(shown(&live, &roles, policy.now), shown(&all, &roles, policy.now));
            }
        }

        /// Every line and every byte is accounted for, and what stays would stay once more, for the same reasons.
        #[test]
        fn a_second_plan_removes_nothing(lines in readable_lines(70, 120), age in 0..20 * DAY) {
            let policy = policy(Duration::from_secs(age));
            let (plan, kept) = plan_of(&lines, &policy);
            let bytes = |lines: &[String]| lines.iter().map(|line| line.len() as u64 + 1).sum::<u64>();
            prop_assert_eq!(plan.lines(), lines.len() as u64);
            prop_assert_eq!(plan.kept, Amount { lines: kept.len() as u64, bytes: bytes(&kept) });
            prop_assert_eq!(plan.kept.bytes + plan.removed.bytes + plan.ledgers.bytes, bytes(&lines));
            prop_assert_eq!(plan.reasons.values().sum::<u64>(), plan.kept.lines);

            let (second, kept_again) = plan_of(&compacted(&lines, &policy), &policy);
            prop_assert_eq!(second.removed, Amount::default());
            prop_assert_eq!((&second.reasons, second.oldest_kept, second.ledgers.lines), (&plan.reasons, plan.oldest_kept, 1));
            prop_assert_eq!(kept_again, kept);
            prop_assert_eq!(sorted(second.ledger()), sorted(plan.ledger()));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]

        /// A ledger is read as it was written, whatever is in it.
        #[test]
        fn a_ledger_line_is_read_back(ledger in ledger(), seconds in 0..1_u64 << 33) {
            let line = ledger.to_line(micros(seconds, 999_999)).expect("a short ledger");
            prop_assert_eq!(line.find('\n'), Some(line.len() - 1));
            match envelope::parse(line.trim_end_matches('\n').as_bytes()) {
                Ok(Line::Ledger(read)) => prop_assert_eq!(*read, ledger),
                other => prop_assert!(false, "{:?}", other),
            }
        }
    }

    /// Why a record with these members is kept at `NOW` with a limit of 14 days.
    fn reason(members: &str) -> Option<&'static str> {
        let line = format!("{{\"id\":\"1\",\"kind\":\"k\",\"from\":\"a\",\"to\":\"b\",{members}}}");
        match envelope::parse(line.as_bytes()) {
            Ok(Line::Record(envelope)) => {
                policy(Duration::from_secs(14 * DAY)).reason_to_keep(&envelope).map(Reason::as_str)
            }
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn each_record_for_its_first_reason() {
        // 1794744000 is the limit: 14 days before `NOW`.
        for (members, expected) in [
            (r#""ts":1794743999.999999,"status":"done""#, None),
            (r#""ts":1794744000,"status":"done""#, Some("recent")),
            (r#""ts":0,"finished_ts":1794743999999.999,"status":"done""#, None),
            (r#""ts":0,"finished_ts":1794744000000,"status":"done""#, Some("recent")),
            (r#""ts":0,"started_ts":0,"status":"done","nacks":[]"#, None),
            (r#""ts":0,"status":"done","nacks":0"#, None),
            (r#""ts":0,"status":"done","nacks":[0]"#, Some("nacked")),
            (r#""ts":0,"status":"done","nacks":1"#, Some("nacked")),
            (r#""ts":1795953600,"status":"done""#, Some("recent")),
            (r#""ts":1795953600.000001,"status":"done""#, Some("future_time")),
            (r#""ts":0,"finished_ts":0,"started_ts":1795953601,"status":"done""#, Some("future_time")),
            (r#""ts":0,"finished_ts":0,"started_ts":1794744000,"status":"done""#, Some("contradictory_times")),
            (r#""ts":1794744000,"finished_ts":0,"status":"done""#, Some("contradictory_times")),
            (r#""ts":1794743999,"finished_ts":0,"status":"done""#, None),
            (r#""ts":0,"status":"queued""#, Some("queued")),
            (r#""ts":0,"status":"running","nacks":1"#, Some("running")),
            (r#""ts":0,"status":"nack""#, Some("nack")),
            (r#""ts":0,"status":"human""#, Some("human")),
            (r#""ts":9999999999,"status":"dead""#, Some("dead")),
            (r#""ts":0,"status":"DONE""#, Some("unknown_status")),
            (r#""ts":0,"status":"done","status":"done""#, Some("duplicate_key")),
            (r#""ts":0,"status":"done","x":NaN"#, Some("non_finite_number")),
            (r#""ts":0,"status":"done\ud800""#, Some("lone_surrogate")),
            (r#""ts":0,"status":"done","finished_ts":-1"#, Some("unreadable_time")),
            (r#""ts":0,"status":"queued","nacks":-1,"started_ts":"x""#, Some("unreadable_time")),
            (r#""ts":0,"status":"done","nacks":-1"#, Some("unreadable_nacks")),
        ] {
            assert_eq!(reason(members), expected, "{members}");
        }
    }

    #[test]
    fn no_limit_is_too_short_or_too_long() {
        let line =
            |seconds: u64| format!(r#"{{"id":"1","ts":{seconds},"kind":"k","from":"a","to":"b","status":"done"}}"#);
        let removed = |older_than: Duration| {
            let lines = [line(0), line(NOW - 1), line(NOW), line(NOW + 1)];
            plan_of(&lines, &policy(older_than)).0.removed.lines
        };
        assert_eq!(removed(Duration::ZERO), 2);
        assert_eq!(removed(Duration::from_nanos(999)), 2);
        assert_eq!(removed(Duration::from_micros(1)), 2);
        assert_eq!(removed(Duration::from_secs(1)), 1);
        assert_eq!(removed(Duration::from_micros(NOW * 1_000_000 - 1)), 1);
        for forever in [NOW, 2 * NOW, u64::MAX / 2_000_000, u64::MAX] {
            assert_eq!(removed(Duration::from_secs(forever)), 0);
        }
    }

    #[test]
    fn every_reason_has_its_own_name() {
        let names: std::collections::BTreeSet<&str> = Reason::ALL.into_iter().map(Reason::as_str).collect();
        assert_eq!(names.len(), Reason::ALL.len());
        // They come in the order in which plans list them.
        assert!(Reason::ALL.is_sorted());
    }

    #[test]
    fn the_first_unreadable_ledger_is_told_by_its_number() {
        let policy = policy(Duration::ZERO);
        let number = |plan: &Plan| plan.unreadable_ledger.as_ref().map(|fault| fault.line);
        let lines: Vec<String> = ["x", "", r#"{"id":"ledger",1"#, r#"{"id":"ledger",2"#].map(str::to_owned).into();
        for cut in 0..=lines.len() {
            let (first, later) = lines.split_at(cut);
            let mut plan = plan_of(first, &policy).0;
            plan.merge(plan_of(later, &policy).0);
            assert_eq!(number(&plan), Some(3), "cut at {cut}");
        }
        assert_eq!(number(&plan_of(&lines[..2], &policy).0), None);
    }
}
