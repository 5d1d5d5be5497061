//! Random sequences of operations against an independent model of the state table ("Handing over" in FORMAT.md): what becomes of records, who
//! may do what, and what the counters show.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use queue_format::format::draft::Draft;
use queue_format::format::histogram::{BOUNDS_SECONDS, Histogram};
use queue_format::format::ledger::Totals;
use queue_format::format::lines::RawLine;
use queue_format::format::money::Usd;
use queue_format::format::offload::Rule;
use queue_format::format::owner::Owner;
use queue_format::format::spend::Prices;
use queue_format::format::summary::{Parameters, Summary};
use queue_format::format::time::Timestamp;
use queue_format::format::transition::Refusal;
use queue_format::store::client::{By, Client, Outcome};
use queue_format::store::files::QueueFiles;
use queue_format::store::put::Rules;
use queue_format::store::scan::ReadOptions;
use queue_format::store::{Error, ErrorKind, process};
use serde_json::Value;

use crate::test_env::{Background, TestEnv, tell, tool};

const KINDS: [&str; 2] = ["classify", "file_bug"];
const ROLES: [&str; 3] = ["triage", "researcher", "a \"role\"/é"];
const PAYLOADS: [&str; 3] = ["{}", r#"{"summary":"é"}"#, r#"{ "n" : [1, 2] }"#];
/// USD, in millionths.
const COSTS: [u64; 3] = [0, 250_000, 1_000_001];
const MAX_HOPS: usize = 2;
const START: i64 = 1_795_953_600_000_000;
const SECOND: i64 = 1_000_000;

// ---- what is done ----

/// A process, as the model sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
    Us,
    /// Another that lives.
    Other,
    /// One that there is not any more.
    Dead,
    /// One of an earlier boot.
    EarlierBoot,
    /// One on another host.
    Foreign,
    /// `owner` has no shape that can be read.
    Unreadable,
    Nobody,
}

/// Which record an operation is for.
#[derive(Clone, Copy, Debug)]
enum Target {
    /// One that the operation may be for, if there is one.
    Fit(usize),
    Any(usize),
    /// An id that no record has.
    Missing,
}

#[derive(Clone, Copy, Debug)]
enum Holder {
    Process(Who),
    Force,
}

#[derive(Clone, Debug)]
struct New {
    kind: usize,
    from: usize,
    to: usize,
    run: Option<u8>,
    correlation: Option<u8>,
    payload: usize,
}

#[derive(Clone, Debug)]
enum Operation {
    Put(New, Option<Target>),
    /// Something that nobody may put.
    PutInvalid(usize),
    /// Of one of the three roles, or of one that has something queued.
    Take(usize, Who),
    Done(Target, Holder, Option<usize>, Option<New>),
    DoneInvalid(Target, usize),
    Nack(Target, Holder, bool, Option<usize>),
    HandBack(Target, Who),
    Reclaim(usize),
    /// Perhaps by force, perhaps by the beginning of its id.
    Requeue(Target, bool, bool),
    Cancel(Target, bool, bool),
    Announce(Target),
}

/// A line that is there before.
#[derive(Clone, Debug)]
struct Seed {
    status: &'static str,
    owner: Who,
    nacks: Nacks,
    /// Which times it has: none, when it was started, and when it was finished too.
    times: u8,
    /// The id of another.
    is_double: bool,
    is_doubtful: bool,
    form: usize,
}

#[derive(Clone, Copy, Debug)]
enum Nacks {
    Absent,
    Number(u64),
    Array(usize),
}

fn target() -> impl Strategy<Value = Target> {
    prop_oneof![
        12 => (0..64_usize).prop_map(Target::Fit),
        6 => (0..64_usize).prop_map(Target::Any),
        1 => Just(Target::Missing)
    ]
}

fn process() -> impl Strategy<Value = Who> {
    prop_oneof![6 => Just(Who::Us), 1 => Just(Who::Other), 3 => Just(Who::Dead), 1 => Just(Who::Foreign), 1 => Just(Who::Nobody)]
}

fn holder() -> impl Strategy<Value = Holder> {
    prop_oneof![6 => process().prop_map(Holder::Process), 1 => Just(Holder::Force)]
}

fn new() -> impl Strategy<Value = New> {
    let key = || prop_oneof![2 => Just(None), 1 => (0..2_u8).prop_map(Some)];
    // Mostly not to whom it is from.
    (0..2_usize, 0..3_usize, prop_oneof![1 => Just(0), 5 => 1..3_usize], key(), key(), 0..3_usize).prop_map(
        |(kind, from, step, run, correlation, payload)| New {
            kind,
            from,
            to: (from + step) % 3,
            run,
            correlation,
            payload,
        },
    )
}

fn operation() -> impl Strategy<Value = Operation> {
    let spend = || proptest::option::of(0..COSTS.len());
    prop_oneof![
        6 => (new(), proptest::option::weighted(0.4, target())).prop_map(|(new, parent)| Operation::Put(new, parent)),
        1 => (0..INVALID.len()).prop_map(Operation::PutInvalid),
        10 => (0..6_usize, process()).prop_map(|(role, who)| Operation::Take(role, who)),
        5 => (target(), holder(), spend(), proptest::option::of(new())).prop_map(|(t, h, s, n)| Operation::Done(t, h, s, n)),
        1 => (target(), 0..INVALID_OUTCOMES.len()).prop_map(|(t, n)| Operation::DoneInvalid(t, n)),
        6 => (target(), holder(), proptest::bool::weighted(0.8), spend()).prop_map(|(t, h, r, s)| Operation::Nack(t, h, r, s)),
        2 => (target(), process()).prop_map(|(t, who)| Operation::HandBack(t, who)),
        3 => (0..3_usize).prop_map(Operation::Reclaim),
        4 => (target(), proptest::bool::weighted(0.2), any::<bool>()).prop_map(|(t, f, b)| Operation::Requeue(t, f, b)),
        3 => (target(), proptest::bool::weighted(0.2), any::<bool>()).prop_map(|(t, f, b)| Operation::Cancel(t, f, b)),
        2 => target().prop_map(Operation::Announce),
    ]
}

fn seed() -> impl Strategy<Value = Seed> {
    use Who::{Dead, EarlierBoot, Foreign, Nobody, Other, Unreadable, Us};
    let nacks = prop_oneof![
        3 => Just(Nacks::Absent),
        1 => (0..4_u64).prop_map(Nacks::Number),
        1 => (0..3_usize).prop_map(Nacks::Array)
    ];
    (
        select(vec!["queued", "running", "running", "done", "nack", "human", "dead", "parked"]),
        select(vec![Us, Other, Dead, EarlierBoot, Foreign, Unreadable, Nobody]),
        nacks,
        0..3_u8,
        (proptest::bool::weighted(0.1), proptest::bool::weighted(0.1), 0..4_usize),
    )
        .prop_map(|(status, owner, nacks, times, (is_double, is_doubtful, form))| {
            // What a queued or running record can't have is left out.
            let most = match status {
                "queued" => 0,
                "running" => 1,
                _ => 2,
            };
            Seed { status, owner, nacks, times: times.min(most), is_double, is_doubtful, form }
        })
}

/// Drafts that are not valid: kind, from, to, payload.
const INVALID: [(&str, &str, &str, &str); 8] = [
    ("improvise", "triage", "researcher", "{}"),
    ("classify", "", "researcher", "{}"),
    ("classify", "triage", "", "{}"),
    ("classify", "triage", "researcher", "[]"),
    ("classify", "triage", "researcher", "{\"a\":NaN}"),
    ("classify", "triage", "researcher", "{\"summary\":1}"),
    ("classify", "triage", "researcher", "{} {}"),
    ("classify", "triage", "researcher", ""),
];

/// Outcomes that are not valid: result, spend, follow-up.
const INVALID_OUTCOMES: [(Option<&str>, Option<&str>, Option<&str>); 7] = [
    (Some("text"), None, None),
    (Some("NaN"), None, None),
    (Some("1 2"), None, None),
    (None, Some("\"1\""), None),
    (None, Some("[true]"), None),
    (None, None, Some(r#"{"kind":"improvise","to":"researcher"}"#)),
    (None, None, Some(r#"{"kind":"classify","to":"researcher","status":"done"}"#)),
];

// ---- the model ----

#[derive(Clone, Debug, PartialEq, Eq)]
struct Record {
    id: String,
    ts: i64,
    kind: String,
    role: String,
    status: String,
    nacks: u64,
    owner: Who,
    started: Option<i64>,
    finished: Option<i64>,
    notified: Option<i64>,
    /// The class of `stopped`.
    stopped: Option<String>,
    has_result: bool,
    key: (Option<String>, Option<String>),
    parent: Option<String>,
    payload: String,
    spend: u64,
    is_doubtful: bool,
}

/// What the counters show of a role and kind.
#[derive(Clone, Debug, Default)]
struct Account {
    records: u64,
    done: u64,
    dead: u64,
    nacks: u64,
    waits: Vec<i64>,
    times: Vec<i64>,
    spend: u64,
}

#[derive(Clone, Debug, Default)]
struct Model {
    records: Vec<Record>,
    accounts: BTreeMap<(String, String), Account>,
}

/// Why something is not done.
#[derive(Debug, PartialEq, Eq)]
enum No {
    Invalid,
    Refused,
}

type Answer<T> = Result<T, No>;

/// What a put comes to.
#[derive(Debug, PartialEq, Eq)]
enum Putting {
    /// It is this one.
    Existing(String),
    /// A new one of this status, with the class of `stopped`.
    New(&'static str, Option<&'static str>),
}

impl Model {
    fn account(&mut self, record: &Record) -> &mut Account {
        self.accounts.entry((record.role.clone(), record.kind.clone())).or_default()
    }

    fn add(&mut self, record: Record) {
        let account = self.account(&record);
        account.records += 1;
        account.done += u64::from(record.status == "done");
        account.dead += u64::from(record.status == "dead");
        account.nacks += record.nacks;
        account.spend += record.spend;
        if let Some(started) = record.started {
            account.waits.push(started - record.ts);
            account.times.extend(record.finished.map(|finished| finished - started));
        }
        self.records.push(record);
    }

    fn id(&self, target: Target, statuses: &[&str]) -> String {
        let is_fit = |record: &&Record| statuses.contains(&&*record.status);
        let fit: Vec<&Record> = self.records.iter().filter(is_fit).collect();
        let one = match target {
            Target::Fit(number) if !fit.is_empty() => Some(fit[number % fit.len()]),
            Target::Fit(number) | Target::Any(number) => self.records.get(number % self.records.len().max(1)),
            Target::Missing => None,
        };
        one.map_or_else(|| "no-such-record".to_owned(), |record| record.id.clone())
    }

    /// The one id that begins so.
    fn whole_id(&self, beginning: &str) -> Answer<String> {
        let mut ids: Vec<&String> = self.records.iter().map(|record| &record.id).collect();
        ids.retain(|id| id.starts_with(beginning));
        ids.sort();
        ids.dedup();
        match ids[..] {
            [id] => Ok(id.clone()),
            _ if ids.iter().any(|id| *id == beginning) => Ok(beginning.to_owned()),
            _ => Err(No::Refused),
        }
    }

    /// The record of an id that an operation on these statuses is for.
    fn find(&self, id: &str, statuses: &[&str]) -> Answer<usize> {
        let fits = |record: &Record| record.id == id && statuses.contains(&&*record.status);
        let mut found = (0..self.records.len()).filter(|place| fits(&self.records[*place]));
        match (found.next(), found.next()) {
            (Some(place), None) => Ok(place),
            _ => Err(No::Refused),
        }
    }

    /// Whether a process may end what a running record's owner is at.
    fn require_owner(record: &Record, holder: Holder) -> Answer<()> {
        let Holder::Process(who) = holder else { return Ok(()) };
        let may_live = matches!(record.owner, Who::Us | Who::Other | Who::Foreign | Who::Unreadable);
        if record.status == "running" && may_live && record.owner != who { Err(No::Refused) } else { Ok(()) }
    }

    /// Whether whoever holds a running record is dead.
    fn require_dead_owner(record: &Record, is_forced: bool) -> Answer<()> {
        let is_dead = matches!(record.owner, Who::Dead | Who::EarlierBoot);
        if record.status == "running" && !is_dead && !is_forced { Err(No::Refused) } else { Ok(()) }
    }

    fn require_no_doubt(record: &Record) -> Answer<()> {
        if record.is_doubtful { Err(No::Invalid) } else { Ok(()) }
    }

    fn judge(&self, new: &New, from: &str, parent: Option<&str>) -> Answer<Putting> {
        let key = key(new);
        let payload: Value = serde_json::from_str(PAYLOADS[new.payload]).unwrap();
        if key != (None, None) {
            let is_same_job =
                |record: &&Record| record.key == key && record.kind == KINDS[new.kind] && record.role == ROLES[new.to];
            if let Some(record) = self.records.iter().find(is_same_job) {
                let theirs: Value = serde_json::from_str(&record.payload).unwrap();
                return if theirs == payload { Ok(Putting::Existing(record.id.clone())) } else { Err(No::Refused) };
            }
        }
        if parent.is_some() && self.records.iter().any(|record| record.parent.as_deref() == parent) {
            return Err(No::Refused);
        }
        if from == ROLES[new.to] {
            return Ok(Putting::New("dead", Some("cycle")));
        }
        let mut ancestors = 0;
        let mut next = parent.map(str::to_owned);
        while let Some(id) = next {
            ancestors += 1;
            if ancestors > MAX_HOPS {
                return Ok(Putting::New("human", Some("too_many_hops")));
            }
            next = self.records.iter().find(|record| record.id == id).and_then(|record| record.parent.clone());
        }
        Ok(Putting::New("queued", None))
    }

    fn put(&mut self, id: &str, new: &New, parent: Option<&str>, as_what: &Putting, now: i64) {
        let Putting::New(status, class) = *as_what else { return };
        self.add(Record {
            id: id.to_owned(),
            ts: now,
            kind: KINDS[new.kind].to_owned(),
            role: ROLES[new.to].to_owned(),
            status: status.to_owned(),
            nacks: 0,
            owner: Who::Nobody,
            started: None,
            finished: (status == "dead").then_some(now),
            notified: None,
            stopped: class.map(str::to_owned),
            has_result: false,
            key: key(new),
            parent: parent.map(str::to_owned),
            payload: PAYLOADS[new.payload].to_owned(),
            spend: 0,
            is_doubtful: false,
        });
    }

    fn role(&self, number: usize) -> usize {
        let queued = self.records.iter().find(|record| record.status == "queued").filter(|_| number >= ROLES.len());
        queued.and_then(|record| ROLES.iter().position(|role| *role == record.role)).unwrap_or(number % ROLES.len())
    }

    /// The record that a role is given next.
    fn next(&self, role: usize) -> Option<usize> {
        let fits = |record: &Record| record.role == ROLES[role] && record.status == "queued" && !record.is_doubtful;
        let places = (0..self.records.len()).filter(|place| fits(&self.records[*place]));
        // The first of several with the same time.
        places.min_by_key(|place| self.records[*place].ts)
    }

    fn take(&mut self, place: usize, who: Who, now: i64) {
        let record = &mut self.records[place];
        "running".clone_into(&mut record.status);
        record.started = Some(now);
        record.finished = None;
        record.owner = who;
        let record = record.clone();
        self.account(&record).waits.push(now - record.ts);
    }

    /// Queues a record again.
    fn queue(&mut self, place: usize) {
        let record = &mut self.records[place];
        "queued".clone_into(&mut record.status);
        record.owner = Who::Nobody;
        (record.started, record.finished, record.notified, record.stopped) = (None, None, None, None);
    }

    /// Ends a record, or has it wait for a person.
    fn end(&mut self, place: usize, status: &str, now: i64) {
        let record = &mut self.records[place];
        let ends_now = record.status == "running" || record.finished.is_none();
        status.clone_into(&mut record.status);
        record.owner = Who::Nobody;
        if ends_now {
            record.finished = Some(now);
        }
        let record = record.clone();
        let account = self.account(&record);
        account.done += u64::from(status == "done");
        account.dead += u64::from(status == "dead");
        if ends_now {
            account.times.extend(record.started.map(|started| now - started));
        }
    }

    fn nack(&mut self, place: usize, is_retryable: bool, now: i64) {
        let record = &mut self.records[place];
        record.nacks += 1;
        let is_first = record.nacks == 1;
        let record = record.clone();
        let account = self.account(&record);
        account.nacks += 1;
        match (is_retryable, is_first) {
            (true, true) => {
                account.times.extend(record.started.map(|started| now - started));
                self.queue(place);
            }
            (true, false) => self.end(place, "human", now),
            (false, _) => self.end(place, "dead", now),
        }
    }

    fn spend(&mut self, place: usize, cost: Option<usize>) {
        let cost = cost.map_or(0, |cost| COSTS[cost]);
        self.records[place].spend += cost;
        let record = self.records[place].clone();
        self.account(&record).spend += cost;
    }
}

fn key(new: &New) -> (Option<String>, Option<String>) {
    (new.run.map(|run| format!("run/{run}")), new.correlation.map(|correlation| format!("c\"{correlation}")))
}

// ---- the queue beside it ----

struct Tried<'a> {
    env: &'a TestEnv,
    client: Client,
    rules: Rules,
    others: &'a Others,
    model: Model,
    now: i64,
    /// What the counters have shown before.
    before: BTreeMap<(String, String), Totals>,
    counts: &'a mut Counts,
}

/// How much has been tried.
#[derive(Debug, Default)]
struct Counts {
    done: u64,
    refused: u64,
    by_operation: BTreeMap<&'static str, (u64, u64)>,
}

/// Processes that records belong to.
struct Others {
    us: Owner,
    other: Owner,
    _sleeping: Background,
}

impl Others {
    fn owner(&self, who: Who) -> Option<Owner> {
        let us = || self.us.clone();
        match who {
            Who::Us => Some(us()),
            Who::Other => Some(self.other.clone()),
            // The number is another process's by now.
            Who::Dead => Some(Owner { start_time: us().start_time - 1, ..us() }),
            Who::EarlierBoot => Some(Owner { boot_id: "00000000-0000-0000-0000-000000000000".to_owned(), ..us() }),
            Who::Foreign => Some(Owner { host: format!("not-{}", us().host), ..us() }),
            Who::Unreadable | Who::Nobody => None,
        }
    }

    fn json(&self, who: Who) -> String {
        match who {
            Who::Unreadable => r#"{"pid":"7"}"#.to_owned(),
            Who::Nobody => "null".to_owned(),
            _ => self.owner(who).unwrap().to_json(),
        }
    }

    fn by(&self, holder: Holder) -> By {
        match holder {
            Holder::Process(who) => By::Process(self.owner(who)),
            Holder::Force => By::Force,
        }
    }
}

const PATIENCE: Duration = Duration::from_secs(20);

impl<'a> Tried<'a> {
    fn new(env: &'a TestEnv, others: &'a Others, seeds: &[Seed], counts: &'a mut Counts) -> Self {
        for name in fs::read_dir(env.path("")).unwrap().map(|entry| entry.unwrap().path()) {
            if name.is_file() {
                fs::remove_file(name).unwrap();
            }
        }
        let mut model = Model::default();
        let mut queue = String::from("not JSON\n \n");
        for (number, seed) in seeds.iter().enumerate() {
            let (record, line) = seeded(number, seed, others);
            model.add(record);
            queue.push_str(&line);
        }
        env.write("queue.jsonl", queue);
        let mut options = ReadOptions::default();
        options.lock_timeout = PATIENCE;
        let client = Client { files: QueueFiles::beside(env.path("queue.jsonl")), options };
        let kinds = KINDS.map(str::to_owned).to_vec();
        let rules = Rules { kinds, roles: Vec::new(), max_hops: MAX_HOPS, offload: Rule::default() };
        Self { env, client, rules, others, model, now: START, before: BTreeMap::new(), counts }
    }

    fn queue(&self) -> Vec<u8> {
        fs::read(self.env.path("queue.jsonl")).unwrap()
    }

    #[expect(clippy::too_many_lines, reason = "an arm for each operation")]
    fn apply(&mut self, operation: &Operation) -> Result<(), TestCaseError> {
        let before = self.queue();
        let now = Timestamp::from_micros(self.now);
        let name = match operation {
            Operation::Put(new, parent) => {
                let parent = parent.map(|parent| self.model.id(parent, &["running", "done"]));
                let expected = self.model.judge(new, ROLES[new.from], parent.as_deref());
                let (run_id, correlation_id) = key(new);
                let draft = Draft {
                    kind: KINDS[new.kind].to_owned(),
                    from: ROLES[new.from].to_owned(),
                    to: ROLES[new.to].to_owned(),
                    payload: PAYLOADS[new.payload].to_owned(),
                    run_id,
                    correlation_id,
                    parent: parent.clone(),
                };
                let put = self.client.put(&draft, &self.rules, now);
                if let Some((put, expected)) = self.agree("put", put, expected, &before)? {
                    self.agree_on_put(&put.id, put.existed, &expected)?;
                    self.model.put(&put.id, new, parent.as_deref(), &expected, self.now);
                }
                "put"
            }
            Operation::PutInvalid(number) => {
                let (kind, from, to, payload) = INVALID[*number];
                let [kind, from, to, payload] = [kind, from, to, payload].map(str::to_owned);
                let draft = Draft { kind, from, to, payload, ..Draft::default() };
                let put = self.client.put(&draft, &self.rules, now);
                self.agree::<_, ()>("put of what is not valid", put, Err(No::Invalid), &before)?;
                "put of what is not valid"
            }
            Operation::Take(role, who) => {
                let who = *who;
                let role = self.model.role(*role);
                let expected = self.model.next(role);
                let taken = self.client.take(ROLES[role], self.others.owner(who).as_ref(), now);
                let (taken, _) = taken.map_err(|error| TestCaseError::fail(format!("take failed: {error}")))?;
                let expected_id = expected.map(|place| self.model.records[place].id.clone());
                prop_assert_eq!(taken.map(|taken| taken.id), expected_id, "taken");
                if let Some(place) = expected {
                    self.model.take(place, who, self.now);
                }
                "take"
            }
            Operation::Done(target, holder, cost, followup) => {
                self.done(*target, *holder, *cost, followup.as_ref(), &before)?;
                "done"
            }
            Operation::DoneInvalid(target, number) => {
                let id = self.model.id(*target, &["running"]);
                let (result, spend, followup) = INVALID_OUTCOMES[*number];
                let [result, spend, followup] = [result, spend, followup].map(|text| text.map(str::to_owned));
                let outcome = Outcome { result, spend, followup };
                let done = self.client.done(&id, &By::Force, &outcome, &self.rules, now);
                self.agree::<_, ()>("done with what is not valid", done, Err(No::Invalid), &before)?;
                "done with what is not valid"
            }
            Operation::Nack(target, holder, is_retryable, cost) => {
                let id = self.model.id(*target, &["running"]);
                let expected = self.model.find(&id, &["running"]).and_then(|place| {
                    let record = &self.model.records[place];
                    Model::require_owner(record, *holder)?;
                    Model::require_no_doubt(record).map(|()| place)
                });
                let refusal = Refusal {
                    reason: "no \"reason\"\n".to_owned(),
                    error_class: Some("test".to_owned()),
                    is_retryable: *is_retryable,
                    spend: cost.map(usd),
                };
                let nacked = self.client.nack(&id, &self.others.by(*holder), &refusal, now);
                if let Some((_, place)) = self.agree("nack", nacked, expected, &before)? {
                    self.model.spend(place, *cost);
                    self.model.nack(place, *is_retryable, self.now);
                }
                "nack"
            }
            Operation::HandBack(target, who) => {
                // A process that nobody knows has nothing to give back.
                let owner = self.others.owner(*who).unwrap_or_else(|| self.others.us.clone());
                let id = self.model.id(*target, &["running"]);
                let expected = self.model.find(&id, &["running"]).and_then(|place| {
                    let record = &self.model.records[place];
                    if self.others.owner(record.owner).as_ref() != Some(&owner) {
                        return Err(No::Refused);
                    }
                    Model::require_no_doubt(record).map(|()| place)
                });
                let handed_back = self.client.hand_back(&id, &owner, now);
                if let Some((_, place)) = self.agree("hand back", handed_back, expected, &before)? {
                    self.model.queue(place);
                }
                "hand back"
            }
            Operation::Reclaim(role) => {
                let is_orphan = |record: &Record| {
                    record.role == ROLES[*role]
                        && record.status == "running"
                        && matches!(record.owner, Who::Dead | Who::EarlierBoot)
                        && !record.is_doubtful
                };
                let places: Vec<_> =
                    (0..self.model.records.len()).filter(|place| is_orphan(&self.model.records[*place])).collect();
                let reclaimed = self.client.reclaim(ROLES[*role], now);
                let (reclaimed, _) =
                    reclaimed.map_err(|error| TestCaseError::fail(format!("reclaim failed: {error}")))?;
                let ids: Vec<_> = places.iter().map(|place| self.model.records[*place].id.clone()).collect();
                prop_assert_eq!(reclaimed.into_iter().map(|changed| changed.id).collect::<Vec<_>>(), ids, "reclaimed");
                for place in places {
                    self.model.nack(place, true, self.now);
                }
                "reclaim"
            }
            Operation::Requeue(target, is_forced, is_short) => {
                let statuses = ["human", "dead", "nack", "running"];
                let mut id = self.model.id(*target, &statuses);
                if *is_short {
                    id.truncate(5);
                }
                let expected = self.model.whole_id(&id).and_then(|id| {
                    let place = self.model.find(&id, &statuses)?;
                    let record = &self.model.records[place];
                    Model::require_dead_owner(record, *is_forced)?;
                    Model::require_no_doubt(record).map(|()| place)
                });
                let requeued = self.client.requeue(&id, *is_forced, now);
                if let Some((_, place)) = self.agree("requeue", requeued, expected, &before)? {
                    self.model.queue(place);
                }
                "requeue"
            }
            Operation::Cancel(target, is_forced, is_short) => {
                let statuses = ["queued", "human", "nack", "running"];
                let mut id = self.model.id(*target, &statuses);
                if *is_short {
                    id.truncate(5);
                }
                let expected = self.model.whole_id(&id).and_then(|id| {
                    let place = self.model.find(&id, &statuses)?;
                    let record = &self.model.records[place];
                    Model::require_dead_owner(record, *is_forced)?;
                    Model::require_no_doubt(record).map(|()| place)
                });
                let cancelled = self.client.cancel(&id, *is_forced, "not needed", now);
                if let Some((_, place)) = self.agree("cancel", cancelled, expected, &before)? {
                    self.model.end(place, "dead", self.now);
                    self.model.records[place].stopped = Some("cancelled".to_owned());
                }
                "cancel"
            }
            Operation::Announce(target) => {
                let id = self.model.id(*target, &["human"]);
                let expected = self
                    .model
                    .find(&id, &["human"])
                    .and_then(|place| Model::require_no_doubt(&self.model.records[place]).map(|()| place));
                let queue = self.queue();
                let is_it = |line: &&str| {
                    let record: Value = serde_json::from_str(line.trim_start_matches('\u{feff}')).unwrap_or_default();
                    record["id"] == id && record["status"] == "human"
                };
                let line = std::str::from_utf8(&queue).unwrap().lines().find(is_it).unwrap_or_default();
                let announced = self.client.announce(&id, line, now);
                if let Some((_, place)) = self.agree("announce", announced, expected, &before)? {
                    self.model.records[place].notified = Some(self.now);
                }
                "announce"
            }
        };
        let has_changed = self.queue() != before;
        let counts = self.counts.by_operation.entry(name).or_default();
        *(if has_changed { &mut counts.0 } else { &mut counts.1 }) += 1;
        self.compare()
    }

    fn done(
        &mut self,
        target: Target,
        holder: Holder,
        cost: Option<usize>,
        followup: Option<&New>,
        before: &[u8],
    ) -> Result<(), TestCaseError> {
        let id = self.model.id(target, &["running", "human"]);
        let expected = self.model.find(&id, &["running", "human"]).and_then(|place| {
            let record = &self.model.records[place];
            Model::require_owner(record, holder)?;
            Model::require_no_doubt(record)?;
            let put = followup.map(|new| self.model.judge(new, &record.role, Some(&id))).transpose()?;
            Ok((place, put))
        });
        let as_json = |new: &New| {
            let mut json = serde_json::json!({ "kind": KINDS[new.kind], "to": ROLES[new.to] });
            json["payload"] = serde_json::from_str(PAYLOADS[new.payload]).unwrap();
            let (run, correlation) = key(new);
            json["run_id"] = run.into();
            json["correlation_id"] = correlation.into();
            json.to_string()
        };
        let outcome =
            Outcome { result: Some("[ 1 ]".to_owned()), spend: cost.map(usd), followup: followup.map(as_json) };
        let now = Timestamp::from_micros(self.now);
        let done = self.client.done(&id, &self.others.by(holder), &outcome, &self.rules, now);
        let Some((done, (place, put))) = self.agree("done", done, expected, before)? else { return Ok(()) };
        self.model.spend(place, cost);
        self.model.end(place, "done", self.now);
        self.model.records[place].has_result = true;
        prop_assert_eq!(done.followup.is_some(), put.is_some(), "follow-up");
        if let (Some(followup), Some(expected), Some(new)) = (done.followup, put, followup) {
            self.agree_on_put(&followup.id, followup.existed, &expected)?;
            self.model.put(&followup.id, new, Some(&id), &expected, self.now);
        }
        Ok(())
    }

    fn agree_on_put(&self, id: &str, existed: bool, expected: &Putting) -> Result<(), TestCaseError> {
        match expected {
            Putting::Existing(old) => prop_assert_eq!((id, existed), (old.as_str(), true)),
            Putting::New(..) => {
                prop_assert!(!existed, "{} is said to have existed", id);
                prop_assert!(self.model.records.iter().all(|record| record.id != id), "{} is not new", id);
            }
        }
        Ok(())
    }

    /// Both did it, or both didn't, for the same sort of reason; then the queue is what it was.
    fn agree<T: std::fmt::Debug, U: std::fmt::Debug>(
        &mut self,
        what: &str,
        answer: Result<T, Error>,
        expected: Answer<U>,
        before: &[u8],
    ) -> Result<Option<(T, U)>, TestCaseError> {
        match (answer, expected) {
            (Ok(answer), Ok(expected)) => {
                self.counts.done += 1;
                Ok(Some((answer, expected)))
            }
            (Err(error), Err(no)) => {
                self.counts.refused += 1;
                let kind = if no == No::Invalid { ErrorKind::BadData } else { ErrorKind::Refused };
                prop_assert_eq!(error.kind(), kind, "{}: {}", what, error);
                prop_assert!(self.queue() == before, "{} was refused, and has changed the queue: {}", what, error);
                Ok(None)
            }
            (Ok(answer), Err(no)) => {
                Err(TestCaseError::fail(format!("{what} must fail ({no:?}), but gave {answer:?}")))
            }
            (Err(error), Ok(expected)) => {
                Err(TestCaseError::fail(format!("{what} must succeed ({expected:?}), but: {error}")))
            }
        }
    }

    /// The queue holds what the model says, and the counters show it.
    fn compare(&mut self) -> Result<(), TestCaseError> {
        let queue = self.queue();
        let lines: Vec<&[u8]> = queue.split(|byte| *byte == b'\n').collect();
        prop_assert_eq!(lines.last().copied(), Some(&b""[..]), "the last line is not terminated");
        let records: Vec<(&str, Value)> = lines
            .iter()
            .map(|line| std::str::from_utf8(line).unwrap())
            .filter_map(|line| Some((line, serde_json::from_str(line.trim_start_matches('\u{feff}').trim_end()).ok()?)))
            .filter(|(_, value): &(_, Value)| value["status"] != "ledger")
            .collect();
        prop_assert_eq!(records.len(), self.model.records.len(), "how many records there are");
        for ((line, value), expected) in records.iter().zip(&self.model.records) {
            let actual = self.read(value, expected);
            prop_assert_eq!(&actual, expected, "{}", line);
        }
        let kept = lines.iter().filter(|line| **line == b"not JSON" || **line == b" ").count();
        prop_assert_eq!(kept, 2, "lines that are none of anybody's are gone");
        self.compare_counters(&lines)
    }

    /// A record as it stands in the queue, as the model has it.
    fn read(&self, value: &Value, expected: &Record) -> Record {
        let text = |name: &str| value[name].as_str().map(str::to_owned);
        let time = |name: &str| value[name].as_f64().map(micros);
        let nacks = value["nacks"].as_array().map_or_else(|| value["nacks"].as_u64().unwrap_or(0), |n| n.len() as u64);
        let whos = [Who::Us, Who::Other, Who::Dead, Who::EarlierBoot, Who::Foreign, Who::Unreadable];
        let is_owner = |who: &&Who| serde_json::from_str::<Value>(&self.others.json(**who)).unwrap() == value["owner"];
        let owner = whos.iter().find(is_owner).copied().unwrap_or(Who::Nobody);
        let costs = match &value["spend"] {
            Value::Array(costs) => costs.clone(),
            cost => vec![cost.clone()],
        };
        Record {
            id: text("id").unwrap(),
            ts: time("ts").unwrap(),
            kind: text("kind").unwrap(),
            role: text("to").unwrap(),
            status: text("status").unwrap(),
            nacks: nacks.max(u64::from(value["status"] == "nack")),
            owner,
            started: time("started_ts"),
            finished: time("finished_ts"),
            notified: time("notified_ts"),
            stopped: value["stopped"]["error_class"].as_str().map(str::to_owned),
            has_result: value["result"] == serde_json::json!([1]),
            key: (text("run_id"), text("correlation_id")),
            parent: text("parent"),
            payload: if serde_json::from_str::<Value>(&expected.payload).unwrap() == value["payload"] {
                expected.payload.clone()
            } else {
                value["payload"].to_string()
            },
            spend: costs.iter().filter_map(Value::as_f64).map(|cost| u64::try_from(micros(cost)).unwrap()).sum(),
            is_doubtful: expected.is_doubtful,
        }
    }

    fn compare_counters(&mut self, lines: &[&[u8]]) -> Result<(), TestCaseError> {
        let parameters = Parameters {
            now: Timestamp::from_micros(self.now),
            roles: Vec::new(),
            kinds: Vec::new(),
            prices: Prices::default(),
            offload: Rule::default(),
        };
        let mut summary = Summary::new(&parameters);
        for line in lines {
            summary.add(RawLine::Whole(line), &parameters);
        }
        let named = |(role, kind, cell): (&str, &str, &queue_format::format::summary::Cell)| {
            ((role.to_owned(), kind.to_owned()), cell.totals.clone())
        };
        let actual: BTreeMap<_, _> = summary.cells().map(named).collect();
        for (names, account) in &self.model.accounts {
            let expected = Totals {
                records: account.records,
                done: account.done,
                dead: account.dead,
                nacks: account.nacks,
                queue_wait: histogram(&account.waits),
                role_time: histogram(&account.times),
                spend_usd: Usd::parse(&decimal(account.spend)).unwrap(),
                unpriced: 0,
            };
            prop_assert_eq!(actual.get(names), Some(&expected), "{:?}", names);
        }
        prop_assert_eq!(actual.len(), self.model.accounts.len(), "roles and kinds");
        // The model's accounts never fall; but that must not depend on the model.
        for (names, before) in &self.before {
            let now = actual.get(names).cloned().unwrap_or_default();
            let pairs = [
                (before.records, now.records),
                (before.done, now.done),
                (before.dead, now.dead),
                (before.nacks, now.nacks),
                (before.queue_wait.sum_us, now.queue_wait.sum_us),
                (before.role_time.sum_us, now.role_time.sum_us),
            ];
            let buckets = |of: &Totals| [of.queue_wait.buckets, of.role_time.buckets].concat();
            let falls = pairs.iter().any(|(before, now)| now < before)
                || buckets(before).iter().zip(buckets(&now)).any(|(before, now)| now < *before)
                || now.spend_usd < before.spend_usd;
            prop_assert!(!falls, "a counter of {:?} fell from {:?} to {:?}", names, before, now);
        }
        self.before = actual;
        Ok(())
    }
}

fn histogram(durations: &[i64]) -> Histogram {
    let mut histogram = Histogram::default();
    for micros in durations {
        let micros = u64::try_from(*micros).unwrap();
        let bucket = BOUNDS_SECONDS.iter().position(|bound| micros <= bound * 1_000_000);
        histogram.buckets[bucket.unwrap_or(BOUNDS_SECONDS.len())] += 1;
        histogram.sum_us += micros;
    }
    histogram
}

#[expect(clippy::cast_possible_truncation, reason = "times and costs are small")]
fn micros(seconds: f64) -> i64 {
    (seconds * 1e6).round() as i64
}

fn decimal(micros: u64) -> String {
    format!("{}.{:06}", micros / 1_000_000, micros % 1_000_000)
}

fn usd(cost: usize) -> String {
    decimal(COSTS[cost])
}

/// A record that is there before, and its line.
fn seeded(number: usize, seed: &Seed, others: &Others) -> (Record, String) {
    let id = if seed.is_double { "double".to_owned() } else { format!("seed/{number}") };
    let offset = i64::try_from(number).unwrap();
    let ts = START - (1_000 - offset % 3) * SECOND;
    let (started, finished) =
        ((seed.times > 0).then_some(ts + 20 * SECOND), (seed.times > 1).then_some(ts + 100 * SECOND));
    let role = ROLES[number % ROLES.len()];
    let time =
        |name: &str, time: Option<i64>| time.map_or_else(String::new, |time| format!(r#","{name}":{}"#, time / SECOND));
    let nacks = match seed.nacks {
        Nacks::Absent => String::new(),
        Nacks::Number(number) => format!(r#","nacks":{number}"#),
        Nacks::Array(length) => format!(r#","nacks":[ {} ]"#, vec![r#"{"reason":"x"}"#; length].join(" , ")),
    };
    let count = match seed.nacks {
        Nacks::Absent => 0,
        Nacks::Number(number) => number,
        Nacks::Array(length) => length as u64,
    };
    let owner = if seed.status == "running" { seed.owner } else { Who::Nobody };
    let json_owner = if owner == Who::Nobody { String::new() } else { format!(r#","owner":{}"#, others.json(owner)) };
    let doubt = if seed.is_doubtful { r#","to":"#.to_owned() + &quoted(role) } else { String::new() };
    let escaped_id = if seed.form == 1 { quoted(&id).replace('e', "\\u0065").replace('/', "\\/") } else { quoted(&id) };
    let line = format!(
        r#"{{"id":{escaped_id}, "ts":{},"kind":"classify","from":"archivist","to":{}{doubt},"payload":{{}},"status":"{}"{}{}{nacks}{json_owner},"mark":{number}}}"#,
        ts / SECOND,
        quoted(role),
        seed.status,
        time("started_ts", started),
        time("finished_ts", finished),
    );
    let line = match seed.form {
        2 => format!("\u{feff}{line}\r\n"),
        3 => format!("  {line}\t\n"),
        _ => format!("{line}\n"),
    };
    let record = Record {
        id,
        ts,
        kind: "classify".to_owned(),
        role: role.to_owned(),
        status: seed.status.to_owned(),
        nacks: count.max(u64::from(seed.status == "nack")),
        owner,
        started,
        finished,
        notified: None,
        stopped: None,
        has_result: false,
        key: (None, None),
        parent: None,
        payload: "{}".to_owned(),
        spend: 0,
        is_doubtful: seed.is_doubtful,
    };
    (record, line)
}

fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

#[test]
fn any_sequence_of_operations_does_what_the_state_table_says() {
    let env = TestEnv::in_memory();
    let mut sleep = env.command(tool("sleep", "coreutils"));
    let sleeping = Background::spawn(sleep.arg("1000"));
    let others = Others {
        us: process::this().unwrap(),
        other: process::with_number(sleeping.id()).unwrap(),
        _sleeping: sleeping,
    };
    let steps = prop_oneof![3 => Just(0), 2 => Just(SECOND), 2 => Just(20 * SECOND), 1 => Just(90_000 * SECOND + 7)];
    let strategy = (proptest::collection::vec(seed(), 0..6), proptest::collection::vec((operation(), steps), 1..30));
    let cases = if std::env::var_os("LONG").is_some() { 10_000 } else { 300 };
    let counts = std::cell::RefCell::new(Counts::default());
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 2_000, ..Config::default() };
    let result = TestRunner::new(config).run(&strategy, |(seeds, operations)| {
        let mut counts = counts.borrow_mut();
        let mut tried = Tried::new(&env, &others, &seeds, &mut counts);
        tried.compare()?;
        for (operation, step) in &operations {
            tried.now += step;
            tried.apply(operation)?;
        }
        Ok(())
    });
    if let Err(failure) = result {
        panic!("{failure}");
    }
    let counts = counts.into_inner();
    tell(&format!("{counts:?}"));
    for (operation, (changed, unchanged)) in &counts.by_operation {
        let is_always_refused = operation.contains("not valid");
        assert!(
            is_always_refused == (*changed == 0) && *unchanged > 0,
            "{operation} was not tried both ways: {counts:?}"
        );
    }
    assert_eq!(counts.by_operation.len(), 11, "{counts:?}");
}
