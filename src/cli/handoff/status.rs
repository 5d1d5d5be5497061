//! `handoff status`: the picture at 3 a.m.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use super::{Output, Place};
use crate::cli::args::Pricing;
use crate::cli::exit::Exit;
use crate::cli::job::{count, size};
use crate::cli::messages::{self, one_line};
use crate::cli::text::{age, beginning, id, name, owner, parameters, spend, table};
use crate::format::cause::Cause;
use crate::format::envelope::{self, Envelope, Line, Status as State};
use crate::format::ledger::Totals;
use crate::format::malformed::{Malformed, Reason};
use crate::format::money::Usd;
use crate::format::owner::Owner;
use crate::format::summary::{Cell, Parameters, Summary};
use crate::format::time::Timestamp;
use crate::store::Error;
use crate::store::process::{self, Life};
use crate::store::read::{self, Pass};

/// Show how the queue stands: what waits and for how long, who holds what and whether they live, what waits for a person, what failed,
/// what it cost, and what to do about it
#[derive(Debug, Args)]
#[command(after_help = "Example: handoff status --json | jq '.roles.researcher.queued'
Exit codes: 0 whatever the picture; 2, 65, 74, 75 as ever")]
pub(super) struct Status {
    #[command(flatten)]
    pub(super) place: Place,

    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    pricing: Pricing,
}

/// So many roles, running records and records that wait for a person are shown.
const MOST_SHOWN: usize = 20;
/// A queue that has not moved for so long may have no worker.
const LONG_WAIT: Duration = Duration::from_secs(3_600);

impl Status {
    pub(super) fn run(&self) -> Result<Exit, Error> {
        let parameters = parameters(&self.pricing, self.place.common.now())?;
        let mut picture = read::under_lock(&self.place.files(), &self.place.common.read_options(), |lines| {
            let mut picture = Picture::new(&parameters);
            picture.pass = lines.for_each(|line| {
                picture.add(envelope::parse_raw(line.raw), &parameters);
                Ok(())
            })?;
            Ok(picture)
        })?;
        self.place.report(&picture.pass);
        picture.look_at_owners()?;
        let queue = self.place.common.queue.to_string_lossy();
        messages::print(if self.output.json { picture.json(&queue) } else { picture.text(&queue) }.as_bytes())?;
        Ok(Exit::Done)
    }
}

/// How the queue stands.
struct Picture {
    now: Timestamp,
    summary: Summary,
    pass: Pass,
    running: Vec<Running>,
    /// The ones that have waited longest, in that order.
    human: Vec<Waiting>,
    /// Nacks of the last hour, and of the last day.
    recent_nacks: [u64; 2],
    /// By status, in the order of [`State::ALL`].
    in_doubt: [u64; State::ALL.len()],
    has_unreadable_ledger: bool,
}

/// A record that somebody holds.
struct Running {
    id: String,
    role: String,
    kind: String,
    since: Timestamp,
    owner: Option<String>,
    /// Whether that lives; `None` if there is none.
    life: Option<Life>,
}

/// A record that waits for a person.
struct Waiting {
    id: String,
    role: String,
    kind: String,
    since: Timestamp,
    error_class: Option<String>,
    reason: Option<String>,
}

impl Picture {
    fn new(parameters: &Parameters) -> Self {
        Self {
            now: parameters.now,
            summary: Summary::new(parameters),
            pass: Pass::default(),
            running: Vec::new(),
            human: Vec::new(),
            recent_nacks: [0; 2],
            in_doubt: [0; State::ALL.len()],
            has_unreadable_ledger: false,
        }
    }

    fn add(&mut self, line: Result<Line<'_>, Malformed>, parameters: &Parameters) {
        match &line {
            Ok(Line::Record(record)) => self.add_record(record),
            Err(malformed) => self.has_unreadable_ledger |= malformed.is_ledger,
            Ok(_) => {}
        }
        self.summary.add_parsed(line, parameters);
    }

    fn add_record(&mut self, record: &Envelope<'_>) {
        self.in_doubt[record.status as usize] += u64::from(record.doubt.is_some());
        if record.nacks > 0 {
            let nacks = record.more().nacks.map(Cause::of_nacks).unwrap_or_default();
            for (recent, hours) in self.recent_nacks.iter_mut().zip([1, 24]) {
                let since = self.now.before(Duration::from_secs(hours * 3_600));
                let is_recent = |nack: &&Cause<'_>| nack.ts.is_some_and(|ts| ts > since && ts <= self.now);
                *recent += nacks.iter().filter(is_recent).count() as u64;
            }
        }
        match record.status {
            State::Running => self.running.push(Running {
                id: record.id.to_string(),
                role: record.to.to_string(),
                kind: record.kind.to_string(),
                since: record.started_ts.unwrap_or(record.ts),
                owner: record.more().owner.map(str::to_owned),
                life: None,
            }),
            State::Human => self.add_waiting(record),
            _ => {}
        }
    }

    fn add_waiting(&mut self, record: &Envelope<'_>) {
        let since = record.finished_ts.unwrap_or(record.ts);
        let at = self.human.partition_point(|waiting| waiting.since <= since);
        if at >= MOST_SHOWN {
            return;
        }
        let more = record.more();
        let last_nack = || more.nacks.and_then(|nacks| Cause::of_nacks(nacks).pop());
        let cause = more.stopped.map(Cause::read).or_else(last_nack).unwrap_or_default();
        let text = |text: Option<Cow<'_, str>>| text.map(Cow::into_owned);
        let (id, role, kind) = (record.id.to_string(), record.to.to_string(), record.kind.to_string());
        let (error_class, reason) = (text(cause.error_class), text(cause.reason));
        self.human.insert(at, Waiting { id, role, kind, since, error_class, reason });
        self.human.truncate(MOST_SHOWN);
    }

    /// Finds out who of those that hold records lives, and puts those first that need somebody to look at them.
    fn look_at_owners(&mut self) -> Result<(), Error> {
        for running in &mut self.running {
            running.life = running.owner.as_deref().map(process::life_of).transpose()?;
        }
        self.running.sort_by_key(|running| (running.life != Some(Life::Dead), running.since));
        Ok(())
    }

    fn held_by(&self, life: Option<Life>) -> usize {
        self.running.iter().filter(|running| running.life == life).count()
    }

    fn live(&self, status: State) -> u64 {
        self.summary.cells().map(|(_, _, cell)| cell.live[status as usize]).sum()
    }

    /// What live and removed records amount to.
    fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        self.summary.cells().for_each(|(_, _, cell)| totals.merge(&cell.totals));
        totals
    }

    fn spend(&self) -> BTreeMap<&str, (Usd, u64)> {
        let mut spend = BTreeMap::new();
        for (_, kind, cell) in self.summary.cells() {
            let (usd, unpriced): &mut (Usd, u64) = spend.entry(kind).or_default();
            *usd = usd.saturating_add(cell.totals.spend_usd);
            *unpriced = unpriced.saturating_add(cell.totals.unpriced);
        }
        spend
    }

    fn malformed(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counts = Reason::ALL.into_iter().zip(self.summary.malformed);
        counts.filter(|(_, lines)| *lines > 0).map(|(reason, lines)| (reason.as_str(), lines))
    }

    /// The roles with live records: those first for which the most waits.
    fn roles(&self) -> Vec<(&str, Cell)> {
        let mut roles: Vec<_> = self.summary.roles().into_iter().filter(|(_, cell)| cell.live != [0; 7]).collect();
        roles.sort_by_key(|(_, cell)| Reverse(cell.live[State::Queued as usize]));
        roles
    }

    /// What somebody should do.
    fn advice(&self) -> Vec<String> {
        let mut advice = Vec::new();
        if self.has_unreadable_ledger {
            advice.push("the ledger can't be read, and nothing can be rewritten: handoff check names the line, the README says how to mend it".to_owned());
        }
        let dead = self.running.iter().filter(|running| running.life == Some(Life::Dead));
        let roles: BTreeSet<&str> = dead.map(|running| running.role.as_str()).collect();
        if !roles.is_empty() {
            let roles = names(roles);
            advice.push(format!("owners are dead: restart the worker of {roles}, which reclaims its records, or hand each back: handoff requeue ID"));
        }
        let since = self.now.before(LONG_WAIT);
        if self.running.iter().any(|running| running.life.is_none() && running.since < since) {
            advice.push("records without an owner run for over an hour: see whether their workers do; if not: handoff requeue --force ID".to_owned());
        }
        let [queued, running] = [State::Queued, State::Running].map(|status| status as usize);
        let is_idle = |cell: &Cell| cell.live[running] == 0 && cell.oldest[queued].is_some_and(|oldest| oldest < since);
        let idle: BTreeSet<&str> =
            self.roles().into_iter().filter(|(_, cell)| is_idle(cell)).map(|(role, _)| role).collect();
        if !idle.is_empty() {
            let roles = names(idle);
            advice.push(format!("nothing runs, and records wait for over an hour: is there a worker for {roles}?"));
        }
        if self.in_doubt[State::Queued as usize] > 0 {
            advice.push("queued records in doubt can't be taken: handoff check names them".to_owned());
        }
        if !self.human.is_empty() {
            advice.push(
                "people are waited for: handoff show ID, then handoff requeue ID, done ID or cancel ID".to_owned(),
            );
        }
        if self.malformed().next().is_some() && !self.has_unreadable_ledger {
            advice.push(
                "lines are malformed: handoff check names them, and with --quarantine puts them aside".to_owned(),
            );
        }
        if self.pass.late_lines > 0 {
            advice.push(
                "late lines lie where workers don't see them: the next run of handoff-compact takes them over"
                    .to_owned(),
            );
        }
        advice
    }

    fn text(&self, queue: &str) -> String {
        let Pass { queue_bytes, lines, generations, late_lines, .. } = &self.pass;
        let (now, totals) = (self.now, self.totals());
        let mut text = format!("{}: {}, {}, at {now}\n", one_line(queue), size(*queue_bytes), count(*lines, "line"));
        text += &self.roles_as_text();

        if !self.running.is_empty() {
            let [alive, dead, unknown, none] = LIVES.map(|life| self.held_by(life));
            let _ = writeln!(
                text,
                "running: {alive} with an owner that lives, {dead} with a dead one, {unknown} unknown, {none} without"
            );
            let rows: Vec<_> = self.running.iter().take(MOST_SHOWN).map(|running| running.row(now)).collect();
            text += &table(&rows, "  ");
            text += &more(self.running.len() as u64);
        }
        let human = self.live(State::Human);
        if human > 0 {
            let _ = writeln!(text, "waiting for a person: {human}");
            let rows: Vec<_> = self.human.iter().map(|waiting| waiting.row(now)).collect();
            text += &table(&rows, "  ");
            text += &more(human);
        }
        let [hour, day] = self.recent_nacks;
        let rate = nack_rate(&totals);
        let _ = writeln!(
            text,
            "nacks: {}, {rate} in 100 records; {hour} in the last hour, {day} in the last day",
            totals.nacks
        );
        let kinds = self.spend();
        if !kinds.is_empty() {
            text += "spend:\n";
            let row = |(kind, (usd, unpriced)): (&&str, &(Usd, u64))| vec![name(kind), spend(*usd, *unpriced)];
            text += &table(&kinds.iter().take(MOST_SHOWN).map(row).collect::<Vec<_>>(), "  ");
            text += &more(kinds.len() as u64);
        }
        for (reason, lines) in self.malformed() {
            let _ = writeln!(text, "malformed ({reason}): {}", count(lines, "line"));
        }
        let in_doubt: u64 = self.in_doubt.iter().sum();
        if in_doubt > 0 {
            let queued = self.in_doubt[State::Queued as usize];
            let _ = writeln!(text, "in doubt: {}, of which {queued} queued", count(in_doubt, "record"));
        }
        if *generations > 0 {
            let _ = writeln!(
                text,
                "not drained: {}, with {}",
                count(*generations, "generation"),
                count(*late_lines, "late line")
            );
        }
        for advice in self.advice() {
            let _ = writeln!(text, "→ {advice}");
        }
        text
    }

    fn roles_as_text(&self) -> String {
        const SHOWN: [State; 6] = [State::Queued, State::Running, State::Human, State::Nack, State::Dead, State::Done];
        let roles = self.roles();
        if roles.is_empty() {
            return "no records\n".to_owned();
        }
        let mut header: Vec<String> = SHOWN.map(|status| status.as_str().to_owned()).to_vec();
        header.insert(0, "role".to_owned());
        header.push("oldest queued".to_owned());
        let row = |(role, cell): &(&str, Cell)| {
            let mut row: Vec<String> = SHOWN.map(|status| cell.live[status as usize].to_string()).to_vec();
            row.insert(0, name(role));
            row.push(cell.oldest[State::Queued as usize].map_or_else(String::new, |oldest| age(oldest, self.now)));
            row
        };
        let rows: Vec<_> = std::iter::once(header).chain(roles.iter().take(MOST_SHOWN).map(row)).collect();
        table(&rows, "") + &more(roles.len() as u64)
    }

    fn json(&self, queue: &str) -> String {
        let (now, totals) = (self.now, self.totals());
        let seconds = |ts: Timestamp| ts.as_seconds();
        let role = |(role, cell): (&str, Cell)| {
            let mut json: Value =
                State::ALL.iter().map(|status| (status.as_str(), cell.live[*status as usize])).collect();
            json["oldest_queued_timestamp_seconds"] = json!(cell.oldest[State::Queued as usize].map(seconds));
            (role.to_owned(), json)
        };
        let running = self.running.iter().take(MOST_SHOWN).map(|running| {
            json!({
                "id": running.id, "role": running.role, "kind": running.kind,
                "since_timestamp_seconds": seconds(running.since),
                "owner": running.owner.as_deref().map(Owner::read),
                "owner_is": life_as_str(running.life),
            })
        });
        let human = self.human.iter().map(|waiting| {
            json!({
                "id": waiting.id, "role": waiting.role, "kind": waiting.kind,
                "since_timestamp_seconds": seconds(waiting.since),
                "error_class": waiting.error_class, "reason": waiting.reason,
            })
        });
        let spend = self.spend().into_iter().map(|(kind, (usd, unpriced))| {
            (kind.to_owned(), json!({ "usd": usd.to_string(), "unpriced_records": unpriced }))
        });
        let [hour, day] = self.recent_nacks;
        let json = json!({
            "queue": queue,
            "now_timestamp_seconds": seconds(now),
            "queue_bytes": self.pass.queue_bytes,
            "lines": self.pass.lines,
            "roles": self.summary.roles().into_iter().map(role).collect::<Value>(),
            "running": running.collect::<Value>(),
            "running_by_owner": LIVES.map(|life| (life_as_str(life), self.held_by(life))).into_iter().collect::<Value>(),
            "human": human.collect::<Value>(),
            "human_records": self.live(State::Human),
            "nacks": { "total": totals.nacks, "records": totals.records, "last_hour": hour, "last_day": day },
            "spend": spend.collect::<Value>(),
            "malformed": self.malformed().collect::<Value>(),
            "ledger_is_readable": !self.has_unreadable_ledger,
            "in_doubt": State::ALL.iter().map(|status| (status.as_str(), self.in_doubt[*status as usize])).collect::<Value>(),
            "generations": self.pass.generations,
            "late_lines": self.pass.late_lines,
            "advice": self.advice(),
        });
        format!("{json}\n")
    }
}

/// Whether an owner lives; `None` if there is none.
const LIVES: [Option<Life>; 4] = [Some(Life::Alive), Some(Life::Dead), Some(Life::Unknown), None];

fn life_as_str(life: Option<Life>) -> &'static str {
    life.map_or("none", Life::as_str)
}

impl Running {
    fn row(&self, now: Timestamp) -> Vec<String> {
        let owner = self.owner.as_deref().zip(self.life).map(|(json, life)| owner(json, life));
        let owner = owner.unwrap_or_else(|| "no owner".to_owned());
        vec![id(&self.id), name(&self.role), name(&self.kind), age(self.since, now), owner]
    }
}

impl Waiting {
    /// How many characters of a reason are shown.
    const REASON: usize = 60;

    fn row(&self, now: Timestamp) -> Vec<String> {
        let cause = [&self.error_class, &self.reason].into_iter().flatten().map(String::as_str).collect::<Vec<_>>();
        let cause = beginning(&cause.join(": "), Self::REASON);
        vec![id(&self.id), name(&self.role), name(&self.kind), age(self.since, now), cause]
    }
}

/// Names, of which the first few are said.
fn names(all: BTreeSet<&str>) -> String {
    const FEW: usize = 5;
    let more = all.len().saturating_sub(FEW);
    let names: Vec<String> = all.into_iter().take(FEW).map(name).collect();
    names.join(", ") + &if more > 0 { format!(" and {more} more") } else { String::new() }
}

/// Says that there are more than are shown.
fn more(all: u64) -> String {
    match all.saturating_sub(MOST_SHOWN as u64) {
        0 => String::new(),
        more => format!("  and {more} more\n"),
    }
}

/// How many nacks there are for a hundred records, to one place.
fn nack_rate(totals: &Totals) -> String {
    let tenths = u128::from(totals.nacks) * 1_000 / u128::from(totals.records.max(1));
    format!("{}.{}", tenths / 10, tenths % 10)
}
