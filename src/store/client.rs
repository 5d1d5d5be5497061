//! What agents do with the queue: put, take, done, nack and the like, each in one commit.
//!
//! ```text
//! check what is given ─► put large values into the blob store ─► under the exclusive lock: look at the records that matter
//!   ─► append one line, or replace the queue with changed lines, new ones, and the ledger
//! ```

use std::fs::File;

use super::blob_writer::Durable;
use super::files::{Finding, QueueFiles};
use super::process::{self, Life};
use super::put::{Judged, Put, Rules};
use super::records::{Account, Change, Each, Filter, Found, Place, look};
use super::replace::{Plan, Rewritten, rewrite};
use super::scan::ReadOptions;
use super::{Error, ErrorKind};
use crate::format::draft::Draft;
use crate::format::envelope::{self, Envelope, Line, Status};
pub use crate::format::outcome::Outcome;
use crate::format::owner::Owner;
use crate::format::time::Timestamp;
use crate::format::transition::{Operation, Refusal, Transition, check_result, check_spend};

/// A queue to work with.
#[derive(Clone, Debug)]
pub struct Client {
    /// Where it is.
    pub files: QueueFiles,
    /// How it is read.
    pub options: ReadOptions,
}

/// What came of an operation on a record.
#[derive(Debug)]
pub struct Changed {
    /// The record's id.
    pub id: String,
    /// The kind.
    pub kind: String,
    /// The role.
    pub role: String,
    /// What it is now.
    pub status: Status,
    /// Its line now, without the `\n`.
    pub line: String,
    /// The follow-up that was put.
    pub followup: Option<Put>,
    /// Whether it is on the disk for certain. If not, a power cut now could undo it.
    pub is_durable: bool,
    /// What somebody should look at.
    pub findings: Vec<Finding>,
}

impl Changed {
    /// The ids of the records that wait for a person since: itself, and its follow-up.
    #[must_use]
    pub fn escalated(&self) -> Vec<&str> {
        let followup = self.followup.as_ref().filter(|put| put.status == Status::Human && !put.existed);
        let record = (self.status == Status::Human).then_some(self.id.as_str());
        record.into_iter().chain(followup.map(|put| put.id.as_str())).collect()
    }
}

/// Who ends a record.
#[derive(Clone, Debug)]
pub enum By {
    /// This process, for whoever has started it, directly or not: not if any other that lives or may live holds it.
    Caller,
    /// A process, or one that is not known: not if another that lives or may live holds it.
    Process(Option<Owner>),
    /// Nobody: only if whoever holds it is dead.
    Nobody,
    /// Only if this process holds it.
    OwnerOnly(Owner),
    /// A person who insists.
    Force,
}

/// How often a record is looked for among lines that arrive late.
const MAX_ATTEMPTS: usize = 3;

impl Client {
    /// Takes the oldest queued record of a role; `None` if there is none.
    ///
    /// # Errors
    /// If the queue can't be read or replaced.
    pub fn take(
        &self,
        role: &str,
        owner: Option<&Owner>,
        now: Timestamp,
    ) -> Result<(Option<Changed>, Vec<Finding>), Error> {
        let operation = Operation::Take { owner };
        // Only the oldest of those that can be taken is kept, and the first that can't.
        let each: Each<'_, Candidate> = &|record, place, found| {
            let is_older = |found: &Found<Candidate>| found.what.applied.is_ok() && found.what.ts <= record.ts;
            if record.to != role || !operation.applies_to(record.status) || found.iter().any(is_older) {
                return;
            }
            let applied = self.apply(&operation, place, record, now);
            if applied.is_ok() || found.iter().all(|found| found.what.applied.is_ok()) {
                found.retain(|found| found.what.applied.is_ok() != applied.is_ok());
                found.push(Found { place, what: Candidate { ts: record.ts, applied } });
            }
        };
        let mut hopeless = None;
        let mut attempted = self.attempt(now, |file, end| {
            let filter = Filter::all(&[Status::Queued.as_str(), role]);
            let mut looked = look(&self.files, file, end, &self.options, &filter, each)?;
            let (mut oldest, mut oldest_ts) = (None, None);
            for Found { what: Candidate { ts, applied }, place } in std::mem::take(&mut looked.found) {
                match applied {
                    // Of several with the same time the first.
                    Ok(applied) if oldest_ts.is_none_or(|oldest| ts < oldest) => {
                        (oldest, oldest_ts) = (Some(applied), Some(ts));
                    }
                    Ok(_) => {}
                    Err(error) => drop(hopeless.get_or_insert(error.at_line(place.line))),
                }
            }
            let Some(Applied { changed, change, account }) = oldest else {
                return Ok((None, looked.into_plan(&self.files, &[], &[], &[])?));
            };
            Ok((Some(changed), looked.into_plan(&self.files, &[change], &[], &[account])?))
        })?;
        attempted.findings.extend(hopeless.map(Error::into_finding));
        let taken = attempted.found.map(|changed| Changed { is_durable: attempted.is_durable, ..changed });
        Ok((taken, attempted.findings))
    }

    /// Finishes a record.
    ///
    /// # Errors
    /// [`ErrorKind::BadData`] if the outcome is not valid, [`ErrorKind::Refused`] if the record can't be finished now.
    pub fn done(&self, id: &str, by: &By, outcome: &Outcome, rules: &Rules, now: Timestamp) -> Result<Changed, Error> {
        let invalid = |what: String| self.invalid(id, &what);
        let Outcome { result, spend, followup } = outcome;
        result.as_deref().map_or(Ok(()), check_result).map_err(invalid)?;
        spend.as_deref().map_or(Ok(()), check_spend).map_err(invalid)?;
        // Whom it is from is known later.
        let draft = followup.as_deref().map(|text| Draft::follow_up(text, "?", id)).transpose().map_err(invalid)?;
        let draft = draft.map(|draft| draft.check(&rules.kinds, &rules.roles)).transpose().map_err(invalid)?;
        let probe =
            Draft { payload: draft.as_ref().map_or("{}", |draft| &draft.payload).to_owned(), ..Draft::default() };
        let (payload, result, durable) = self.offload(&probe, result.as_deref(), rules.offload)?;
        let draft = draft.map(|draft| Draft { payload, ..draft });
        let operation = Operation::Done { result: result.as_deref(), spend: spend.as_deref() };
        let followup = draft.as_ref().map(|draft| (draft, rules));
        let request = Request { followup, durable: durable.as_ref(), ..Request::new(id, by, &operation) };
        let mut changed = self.change(&request, now)?;
        changed.findings.extend(durable.into_iter().flat_map(|durable| durable.findings));
        Ok(changed)
    }

    /// Refuses a record.
    ///
    /// # Errors
    /// [`ErrorKind::BadData`] if what is given is not valid, [`ErrorKind::Refused`] if the record can't be refused now.
    pub fn nack(&self, id: &str, by: &By, refusal: &Refusal, now: Timestamp) -> Result<Changed, Error> {
        let invalid = |what: String| self.invalid(id, &what);
        refusal.spend.as_deref().map_or(Ok(()), check_spend).map_err(invalid)?;
        self.change(&Request::new(id, by, &Operation::Nack(refusal)), now)
    }

    /// Says that what is given for a record is not valid.
    fn invalid(&self, id: &str, what: &str) -> Error {
        Error::new(ErrorKind::BadData, &self.files.queue, format!("record {}: {what}", id.escape_debug()))
    }

    /// Gives a record back that this owner holds, as if it had not been taken.
    ///
    /// # Errors
    /// [`ErrorKind::Refused`] if that owner doesn't hold it.
    pub fn hand_back(&self, id: &str, owner: &Owner, now: Timestamp) -> Result<Changed, Error> {
        self.change(&Request::new(id, &By::OwnerOnly(owner.clone()), &Operation::HandBack), now)
    }

    /// Has a record tried again that was given up, or whose worker is dead.
    ///
    /// # Errors
    /// [`ErrorKind::Refused`] if it is no such record.
    pub fn requeue(&self, id: &str, is_forced: bool, now: Timestamp) -> Result<Changed, Error> {
        self.change_at_rest(id, is_forced, &Operation::Requeue, now)
    }

    /// Gives a record up.
    ///
    /// # Errors
    /// [`ErrorKind::Refused`] if it can't be given up.
    pub fn cancel(&self, id: &str, is_forced: bool, reason: &str, now: Timestamp) -> Result<Changed, Error> {
        self.change_at_rest(id, is_forced, &Operation::Cancel { reason }, now)
    }

    /// Says of a record that waits for a person that one has been told, unless it waits for another reason by now than when its line was this.
    ///
    /// # Errors
    /// [`ErrorKind::Refused`] if it doesn't wait for one any more, or waits for another reason.
    pub fn announce(&self, id: &str, line: &str, now: Timestamp) -> Result<Changed, Error> {
        let request = Request { expected: Some(line), ..Request::new(id, &By::Force, &Operation::Announce) };
        self.change(&request, now)
    }

    /// Refuses all running records of a role whose owners are dead, and finds those that have none.
    ///
    /// # Errors
    /// If the queue can't be read or replaced.
    pub fn reclaim(&self, role: &str, now: Timestamp) -> Result<(Vec<Changed>, Vec<Finding>), Error> {
        let refusal = Refusal {
            reason: "its worker died while it had the record".to_owned(),
            error_class: Some("worker_died".to_owned()),
            is_retryable: true,
            spend: None,
        };
        let operation = Operation::Nack(&refusal);
        // `None` is one without an owner.
        let each: Each<'_, Option<Result<Applied, Error>>> = &|record, place, found| {
            if record.to != role || record.status != Status::Running || record.doubt.is_some() {
                return;
            }
            match record.more().owner.and_then(Owner::read) {
                Some(owner) if is_dead(&owner) => {
                    found.push(Found { place, what: Some(self.apply(&operation, place, record, now)) });
                }
                Some(_) => {}
                None => found.push(Found { place, what: None }),
            }
        };
        let (mut unowned, mut hopeless) = (None, Vec::new());
        let mut attempted = self.attempt(now, |file, end| {
            let filter = Filter::all(&[Status::Running.as_str(), role]);
            let mut looked = look(&self.files, file, end, &self.options, &filter, each)?;
            let (mut reclaimed, mut changes, mut accounts) = (Vec::new(), Vec::new(), Vec::new());
            hopeless.clear();
            unowned = looked.found.iter().find(|found| found.what.is_none()).map(|found| found.place.line);
            for Found { place, what } in std::mem::take(&mut looked.found) {
                match what {
                    None => {}
                    Some(Ok(Applied { changed, change, account })) => {
                        reclaimed.push(changed);
                        changes.push(change);
                        accounts.push(account);
                    }
                    // It must not keep the others from it.
                    Some(Err(error)) => hopeless.push(error.at_line(place.line)),
                }
            }
            Ok((Some(reclaimed), looked.into_plan(&self.files, &changes, &[], &accounts)?))
        })?;
        attempted.findings.extend(hopeless.into_iter().map(Error::into_finding));
        if unowned.is_some() {
            let what = "a running record does not say who works on it, so that nobody can tell whether that lives, and it is left as it is";
            let message = format!("{what}: handoff requeue --force if it does not");
            attempted.findings.push(Finding { line: unowned, ..Finding::new(&self.files.queue, message) });
        }
        Ok((attempted.found.unwrap_or_default(), attempted.findings))
    }

    /// Rewrites the queue as `plan` wants, again if it has not found what it looks for, but lines have arrived late that it may be among.
    fn attempt<T>(
        &self,
        now: Timestamp,
        mut plan: impl FnMut(&File, u64) -> Result<(Option<T>, Plan<'static>), Error>,
    ) -> Result<Attempted<T>, Error> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            let mut found = None;
            let rewritten = rewrite(&self.files, self.options.lock_timeout, now, |file, end| {
                let (what, plan) = plan(file, end)?;
                found = what;
                Ok(plan)
            })?;
            let Some(rewritten) = rewritten else {
                let findings = Rewritten::of_nothing(&self.files).findings;
                return Ok(Attempted { found: None, findings, is_durable: true });
            };
            if found.is_some() || rewritten.late.lines == 0 || attempts == MAX_ATTEMPTS {
                let is_durable = !rewritten.may_come_back;
                return Ok(Attempted { found, findings: unsettled(rewritten), is_durable });
            }
        }
    }

    /// The same as [`change`](Self::change) of a record that nobody who lives may hold.
    fn change_at_rest(
        &self,
        id: &str,
        is_forced: bool,
        operation: &Operation<'_>,
        now: Timestamp,
    ) -> Result<Changed, Error> {
        let by = if is_forced { By::Force } else { By::Nobody };
        self.change(&Request { may_be_prefix: true, ..Request::new(id, &by, operation) }, now)
    }

    /// Applies an operation to a record, and puts a follow-up of it, in one commit.
    fn change(&self, request: &Request<'_>, now: Timestamp) -> Result<Changed, Error> {
        let Request { id, may_be_prefix, expected, operation, followup, durable, .. } = *request;
        // Every id begins with nothing, which is what a variable that is not set amounts to.
        let may_be_prefix = may_be_prefix && !id.is_empty();
        let filter = if may_be_prefix { Filter::beginning(id) } else { Filter::any(&[id]) };
        let each: Each<'_, Named> = &|record, place, found| {
            if record.id == id || may_be_prefix && record.id.starts_with(id) {
                let applies = operation.applies_to(record.status);
                let what = Named {
                    id: record.id.to_string(),
                    status: record.status,
                    is_expected: expected.is_none_or(|line| has_stopped_alike(line, record)),
                    owner: record.more().owner.map(str::to_owned),
                    applied: applies.then(|| self.apply(operation, place, record, now)),
                };
                found.push(Found { place, what });
            }
        };
        let Attempted { found: changed, findings, is_durable } = self.attempt(now, |file, end| {
            durable.map_or(Ok(()), Durable::require_in_place)?;
            let mut looked = look(&self.files, file, end, &self.options, &filter, each)?;
            let Some((Found { place, what }, applied)) =
                self.choose(id, operation, std::mem::take(&mut looked.found))?
            else {
                return Ok((None, looked.into_plan(&self.files, &[], &[], &[])?));
            };
            self.require_right(request, place, &what)?;
            let Applied { mut changed, change, account } = applied.map_err(|error| error.at_line(place.line))?;
            let mut added = Vec::new();
            if let Some((draft, rules)) = followup {
                let draft = Draft { from: changed.role.clone(), ..draft.clone() };
                changed.followup = Some(match self.judge(&draft, rules, file, end)? {
                    Judged::Existing(put) => put,
                    Judged::New(new) => {
                        let (put, line) = self.compose(&draft, rules, new, now)?;
                        added.push(line);
                        put
                    }
                });
            }
            Ok((Some(changed), looked.into_plan(&self.files, &[change], &added, &[account])?))
        })?;
        let changed = changed.ok_or_else(|| {
            let what = format!("has no record {}", id.escape_debug());
            Error::new(ErrorKind::Refused, &self.files.queue, what)
                .advise("give the whole id, as `handoff list` shows it")
        })?;
        Ok(Changed { is_durable, findings, ..changed })
    }

    /// The one of the records with an id to which the operation may be applied; `None` if there are no such records.
    fn choose(&self, id: &str, operation: &Operation<'_>, mut found: Vec<Found<Named>>) -> Result<Option<Fit>, Error> {
        let refused = |line: u64, what: String| {
            Error::new(ErrorKind::Refused, &self.files.queue, format!("record {} {what}", id.escape_debug()))
                .at_line(line)
        };
        if found.iter().any(|found| found.what.id == id) {
            found.retain(|found| found.what.id == id);
        } else if let Some(first) = found.first()
            && let Some(other) = found.iter().find(|found| found.what.id != first.what.id)
        {
            let (one, other) = (first.what.id.escape_debug(), other.what.id.escape_debug());
            let what = format!("has records whose ids begin with {}, {one} and {other} for two", id.escape_debug());
            return Err(Error::new(ErrorKind::Refused, &self.files.queue, what).advise("say more of the id"));
        }
        let (mut fit, mut unfit) = (Vec::new(), Vec::new());
        for Found { place, mut what } in found {
            match what.applied.take() {
                Some(applied) => fit.push((Found { place, what }, applied)),
                None => unfit.push(Found { place, what }),
            }
        }
        match (fit.pop(), fit.is_empty(), unfit.last()) {
            (Some((one, _)), true, _) if !one.what.is_expected => {
                Err(refused(one.place.line, "has changed since it was looked at".to_owned()))
            }
            (Some(one), true, _) => Ok(Some(one)),
            (Some((last, _)), false, _) => {
                let lines: Vec<String> = fit.iter().map(|(found, _)| found.place.line.to_string()).collect();
                let what = format!(
                    "is there more than once, in line {} too, so that there is no telling which is meant",
                    lines.join(", ")
                );
                Err(refused(last.place.line, what)
                    .advise("`handoff check` lists such records: mend or remove one of the lines by hand"))
            }
            (None, _, Some(found)) => {
                let (status, done) = (found.what.status.as_str(), operation.as_str());
                Err(refused(found.place.line, format!("is {status}, and can't be {done}")))
            }
            (None, _, None) => Ok(None),
        }
    }

    /// Makes sure that a running record is not taken from who holds it.
    fn require_right(&self, request: &Request<'_>, place: Place, record: &Named) -> Result<(), Error> {
        let Request { by, operation, .. } = *request;
        if record.status != Status::Running || matches!(by, By::Force) {
            return Ok(());
        }
        let refused = |what: &str| {
            let what = format!("record {} can't be {}: {what}", record.id.escape_debug(), operation.as_str());
            let error = Error::new(ErrorKind::Refused, &self.files.queue, what).at_line(place.line);
            Err(error.advise("--force does it all the same, if you know better"))
        };
        let Some(owner) = &record.owner else {
            return match by {
                By::Caller | By::Process(_) | By::Force => Ok(()),
                _ => refused("it does not say which process holds it, so that nobody can tell whether that lives"),
            };
        };
        let Some(owner) = Owner::read(owner) else {
            return refused("what it says of who holds it can't be read, so that nobody can tell whether that lives");
        };
        let who = format!("process {} on {}", owner.pid, owner.host.escape_debug());
        match (by, process::life(&owner)?) {
            (By::Process(Some(us)) | By::OwnerOnly(us), _) if owner == *us => Ok(()),
            // A script that it has started, or the command of a worker.
            (By::Caller, Life::Alive) if process::is_above_us(&owner) => Ok(()),
            (By::Caller | By::Process(_) | By::Nobody, Life::Dead) | (By::Force, _) => Ok(()),
            (_, Life::Dead) => refused(&format!("{who}, which is dead, holds it")),
            (_, Life::Alive) => refused(&format!("{who}, which is alive, holds it")),
            (_, Life::Unknown) => refused(&format!("{who} holds it, and nobody here can tell whether that lives")),
        }
    }

    /// Applies an operation to a record.
    fn apply(
        &self,
        operation: &Operation<'_>,
        place: Place,
        record: &Envelope<'_>,
        now: Timestamp,
    ) -> Result<Applied, Error> {
        let (id, role, kind) = (record.id.to_string(), record.to.to_string(), record.kind.to_string());
        let impossible = |what: &str| {
            let what = format!("record {} can't be {}: {what}", id.escape_debug(), operation.as_str());
            Error::new(ErrorKind::BadData, &self.files.queue, what)
        };
        let Transition { status, line, lost } = operation.apply(record, now).map_err(|what| impossible(&what))?;
        if line.len() > self.options.max_line {
            return Err(impossible("its line would be too long (--max-line): make it shorter by hand"));
        }
        let changed = Changed {
            id,
            kind: kind.clone(),
            role: role.clone(),
            status,
            line: line.trim_start_matches('\u{feff}').trim_end().to_owned(),
            followup: None,
            is_durable: true,
            findings: Vec::new(),
        };
        Ok(Applied { changed, change: Change { place, line }, account: Account { role, kind, totals: lost } })
    }
}

/// What is to be done to a record.
#[derive(Clone, Copy)]
struct Request<'a> {
    id: &'a str,
    /// Whether `id` may be how the record's begins.
    may_be_prefix: bool,
    /// A line of it that must say of its end what it says now, if that matters.
    expected: Option<&'a str>,
    by: &'a By,
    operation: &'a Operation<'a>,
    /// What is put with it.
    followup: Option<(&'a Draft, &'a Rules)>,
    /// The blobs that it refers to then.
    durable: Option<&'a Durable>,
}

impl<'a> Request<'a> {
    fn new(id: &'a str, by: &'a By, operation: &'a Operation<'a>) -> Self {
        Self { id, may_be_prefix: false, expected: None, by, operation, followup: None, durable: None }
    }
}

/// What an operation makes of a record, and of the queue.
struct Applied {
    changed: Changed,
    change: Change,
    account: Account,
}

/// What came of rewriting the queue.
struct Attempted<T> {
    found: Option<T>,
    findings: Vec<Finding>,
    is_durable: bool,
}

/// A record that an operation may be applied to, and what it makes of it.
type Fit = (Found<Named>, Result<Applied, Error>);

/// A record that may be taken.
struct Candidate {
    ts: Timestamp,
    applied: Result<Applied, Error>,
}

/// A record with the id that was looked for.
struct Named {
    id: String,
    status: Status,
    /// Whether it has stopped as it had.
    is_expected: bool,
    owner: Option<String>,
    /// What the operation makes of it, if it may be applied.
    applied: Option<Result<Applied, Error>>,
}

/// Whether a record has stopped at the same time for the same reason as when this was its line. Anything else in it may have changed.
fn has_stopped_alike(line: &str, record: &Envelope<'_>) -> bool {
    let Ok(Line::Record(before)) = envelope::parse(line.as_bytes()) else { return false };
    let (old, new) = (before.more(), record.more());
    (before.finished_ts, old.nacks, old.stopped) == (record.finished_ts, new.nacks, new.stopped)
}

fn is_dead(owner: &Owner) -> bool {
    process::life(owner).is_ok_and(|life| life == Life::Dead)
}

/// What somebody should look at after a replacement. A generation or two that stay for a while are nothing to be told of each time.
pub(super) fn unsettled(rewritten: Rewritten) -> Vec<Finding> {
    let kept = if rewritten.ledger.generations.len() > USUAL_GENERATIONS { rewritten.findings } else { Vec::new() };
    kept.into_iter().chain(rewritten.unsettled.map(Error::into_finding)).collect()
}

const USUAL_GENERATIONS: usize = 2;
