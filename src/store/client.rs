//! What agents do with the queue: put, take, done, nack and the like, each in one commit.
//!
//! ```text
//! check what is given ─► put large values into the blob store ─► under the exclusive lock: look at the records that matter
//!   ─► append one line, or replace the queue with changed lines, new ones, and the ledger
//! ```

use std::fs::File;

use uuid::Uuid;

use super::append::{Appended, append};
use super::blob_writer::{BlobWriter, Durable};
use super::files::{Finding, OpenQueue, QueueFiles, read_error};
use super::lock::ExclusiveLock;
use super::process::{self, Life};
use super::records::{Account, Change, Each, Filter, Found, Place, look};
use super::replace::{Plan, Rewritten, rewrite, rewrite_locked};
use super::scan::{ReadOptions, last_line_end};
use super::{Error, ErrorKind, directory_of};
use crate::format::draft::{Draft, Stopped};
use crate::format::envelope::{self, Line, Status};
use crate::format::offload::{Content, Rule};
use crate::format::owner::Owner;
use crate::format::time::Timestamp;
use crate::format::transition::{Operation, Refusal, check_result, check_spend};

/// A queue, and the rules of handing over.
#[derive(Clone, Debug)]
pub struct Client {
    /// Where it is.
    pub files: QueueFiles,
    /// How it is read.
    pub options: ReadOptions,
    /// The kinds that there are.
    pub kinds: Vec<String>,
    /// How many ancestors a record may have.
    pub max_hops: usize,
    /// What is too large for a line.
    pub rule: Rule,
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
    /// What somebody should look at.
    pub findings: Vec<Finding>,
}

/// A record that was put, or was there.
#[derive(Debug)]
pub struct Put {
    /// Its id.
    pub id: String,
    /// What it is.
    pub status: Status,
    /// Whether the same had been put before, so that nothing was written.
    pub existed: bool,
    /// Why nobody is to take it, if so.
    pub stopped: Option<String>,
    /// What somebody should look at.
    pub findings: Vec<Finding>,
}

/// Who ends a record.
#[derive(Clone, Debug)]
pub enum By {
    /// This process, or one that is not known: not if another that lives holds it.
    Process(Option<Owner>),
    /// Nobody: only if whoever holds it is dead.
    Nobody,
    /// Only if this process holds it.
    OwnerOnly(Owner),
    /// A person who insists.
    Force,
}

/// What came of a job.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The result, as JSON text.
    pub result: Option<String>,
    /// What it cost, as JSON text.
    pub spend: Option<String>,
    /// The follow-up: an object with `kind`, `to` and `payload`, perhaps `run_id` and `correlation_id`, as JSON text.
    pub followup: Option<String>,
}

/// How often a line is appended that others have spoilt.
const MAX_APPENDS: usize = 10;
/// How often a record is looked for among lines that arrive late.
const MAX_ATTEMPTS: usize = 3;

impl Client {
    /// Puts a record.
    ///
    /// # Errors
    /// [`ErrorKind::BadData`] if it is none that may be put, [`ErrorKind::Refused`] if the queue already has another in its place.
    pub fn put(&self, draft: &Draft, now: Timestamp) -> Result<Put, Error> {
        let (draft, durable) = self.prepare(draft.clone())?;
        self.files.require_directory()?;
        let lock = ExclusiveLock::acquire(&self.files, self.options.lock_timeout)?;
        durable.as_ref().map_or(Ok(()), Durable::require_in_place)?;
        let judged = if draft.run_id.is_some() || draft.correlation_id.is_some() || draft.parent.is_some() {
            OpenQueue::open(&self.files)?
                .map(|queue| self.judge(&draft, &queue.file, queue.metadata.len()))
                .transpose()?
        } else {
            None
        };
        let mut new = match judged.unwrap_or_default() {
            Judged::Existing(put) => return Ok(put),
            Judged::New(new) => new,
        };
        new.findings.extend(durable.iter().flat_map(|durable| durable.findings.iter().cloned()));
        let (put, line) = self.compose(&draft, new, now)?;
        let line = line + "\n";
        for _ in 0..MAX_APPENDS {
            match append(&self.files, &lock, line.as_bytes())? {
                Appended::Durable => return Ok(put),
                Appended::Glued => {}
                Appended::Unterminated => {
                    let rewritten = rewrite_locked(&self.files, &lock, now, |file, end| {
                        let nothing =
                            look::<()>(&self.files, file, end, &self.options, &Filter::all(&["ledger"]), &|_, _, _| {});
                        nothing?.into_plan(&self.files, &[], &[line.trim_end().to_owned()], &[])
                    })?;
                    if let Some(rewritten) = rewritten {
                        let findings = [put.findings, findings_of(rewritten)].concat();
                        return Ok(Put { findings, ..put });
                    }
                }
            }
        }
        let what = "is written to without the lock all the time, so that no line stays whole";
        Err(Error::new(ErrorKind::Busy, &self.files.queue, what).advise("try again"))
    }

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
        struct Candidate {
            ts: Timestamp,
            doubt: Option<&'static str>,
            text: String,
        }
        let operation = Operation::Take { owner };
        // Only the oldest of those that may be taken is kept, and the first that may not.
        let each: Each<'_, Candidate> = &|record, place, found| {
            if record.to != role || !operation.applies_to(record.status) {
                return;
            }
            let doubt = record.doubt.map(envelope::Doubt::as_str);
            let known = found.iter().position(|found| found.what.doubt.is_some() == doubt.is_some());
            if let Some(known) = known {
                if doubt.is_some() || found[known].what.ts <= record.ts {
                    return;
                }
                found.remove(known);
            }
            found.push(Found { place, what: Candidate { ts: record.ts, doubt, text: record.line().to_owned() } });
        };
        let mut doubtful = None;
        let (taken, mut findings) = self.attempt(now, |file, end| {
            let filter = Filter::all(&[Status::Queued.as_str(), role]);
            let mut looked = look(&self.files, file, end, &self.options, &filter, each)?;
            let (fit, unfit): (Vec<_>, Vec<_>) =
                std::mem::take(&mut looked.found).into_iter().partition(|found| found.what.doubt.is_none());
            doubtful = unfit.first().and_then(|found| Some((found.place.line, found.what.doubt?)));
            // Of several with the same time the first.
            let Some(Found { place, what }) = fit.into_iter().min_by_key(|found| found.what.ts) else {
                return Ok((None, looked.into_plan(&self.files, &[], &[], &[])?));
            };
            let (changed, change, account) = self.apply(&operation, place, &what.text, now)?;
            Ok((Some(changed), looked.into_plan(&self.files, &[change], &[], &[account])?))
        })?;
        if let Some((line, doubt)) = doubtful {
            let message = format!("nobody can take this record, which is in doubt ({doubt}): mend the line by hand");
            findings.push(Finding { line: Some(line), ..Finding::new(&self.files.queue, message) });
        }
        Ok((taken, findings))
    }

    /// Finishes a record.
    ///
    /// # Errors
    /// [`ErrorKind::BadData`] if the outcome is not valid, [`ErrorKind::Refused`] if the record can't be finished now.
    pub fn done(&self, id: &str, by: &By, outcome: &Outcome, now: Timestamp) -> Result<Changed, Error> {
        let invalid = |what: String| {
            Error::new(ErrorKind::BadData, &self.files.queue, format!("record {}: {what}", id.escape_debug()))
        };
        let Outcome { result, spend, followup } = outcome;
        result.as_deref().map_or(Ok(()), check_result).map_err(invalid)?;
        spend.as_deref().map_or(Ok(()), check_spend).map_err(invalid)?;
        // Whom it is from is known later.
        let draft = followup.as_deref().map(|text| Draft::follow_up(text, "?", id)).transpose().map_err(invalid)?;
        let draft = draft.map(|draft| draft.check(&self.kinds)).transpose().map_err(invalid)?;
        let probe =
            Draft { payload: draft.as_ref().map_or("{}", |draft| &draft.payload).to_owned(), ..Draft::default() };
        let (payload, result, durable) = self.offload(&probe, result.as_deref())?;
        let draft = draft.map(|draft| Draft { payload, ..draft });
        let operation = Operation::Done { result: result.as_deref(), spend: spend.as_deref() };
        let mut changed = self.change(id, by, &operation, draft.as_ref(), durable.as_ref(), now)?;
        changed.findings.extend(durable.into_iter().flat_map(|durable| durable.findings));
        Ok(changed)
    }

    /// Refuses a record.
    ///
    /// # Errors
    /// [`ErrorKind::BadData`] if what is given is not valid, [`ErrorKind::Refused`] if the record can't be refused now.
    pub fn nack(&self, id: &str, by: &By, refusal: &Refusal, now: Timestamp) -> Result<Changed, Error> {
        let invalid = |what: String| {
            Error::new(ErrorKind::BadData, &self.files.queue, format!("record {}: {what}", id.escape_debug()))
        };
        refusal.spend.as_deref().map_or(Ok(()), check_spend).map_err(invalid)?;
        self.change(id, by, &Operation::Nack(refusal), None, None, now)
    }

    /// Gives a record back that this owner holds, as if it had not been taken.
    ///
    /// # Errors
    /// [`ErrorKind::Refused`] if that owner doesn't hold it.
    pub fn hand_back(&self, id: &str, owner: &Owner, now: Timestamp) -> Result<Changed, Error> {
        self.change(id, &By::OwnerOnly(owner.clone()), &Operation::HandBack, None, None, now)
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

    /// Says of a record that waits for a person that one has been told.
    ///
    /// # Errors
    /// [`ErrorKind::Refused`] if it doesn't wait for one any more.
    pub fn announce(&self, id: &str, now: Timestamp) -> Result<Changed, Error> {
        self.change(id, &By::Force, &Operation::Announce, None, None, now)
    }

    /// Refuses all running records of a role whose owners are dead.
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
        let each: Each<'_, String> = &|record, place, found| {
            let is_running = record.to == role && record.status == Status::Running && record.doubt.is_none();
            if is_running && record.more().owner.and_then(Owner::read).is_some_and(|owner| is_dead(&owner)) {
                found.push(Found { place, what: record.line().to_owned() });
            }
        };
        let (reclaimed, findings) = self.attempt(now, |file, end| {
            let filter = Filter::all(&[Status::Running.as_str(), role]);
            let mut looked = look(&self.files, file, end, &self.options, &filter, each)?;
            let (mut reclaimed, mut changes, mut accounts) = (Vec::new(), Vec::new(), Vec::new());
            for Found { place, what } in std::mem::take(&mut looked.found) {
                // One that can't be refused must not keep the others from it: `check` tells of it.
                if let Ok((changed, change, account)) = self.apply(&operation, place, &what, now) {
                    reclaimed.push(changed);
                    changes.push(change);
                    accounts.push(account);
                }
            }
            Ok((Some(reclaimed), looked.into_plan(&self.files, &changes, &[], &accounts)?))
        })?;
        Ok((reclaimed.unwrap_or_default(), findings))
    }

    /// Rewrites the queue as `plan` wants, again if it has not found what it looks for, but lines have arrived late that it may be among.
    fn attempt<T>(
        &self,
        now: Timestamp,
        mut plan: impl FnMut(&File, u64) -> Result<(Option<T>, Plan<'static>), Error>,
    ) -> Result<(Option<T>, Vec<Finding>), Error> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            let mut found = None;
            let rewritten = rewrite(&self.files, self.options.lock_timeout, now, |file, end| {
                let (what, plan) = plan(file, end)?;
                found = what;
                Ok(plan)
            })?;
            let Some(rewritten) = rewritten else { return Ok((None, Vec::new())) };
            if found.is_some() || rewritten.late.lines == 0 || attempts == MAX_ATTEMPTS {
                return Ok((found, findings_of(rewritten)));
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
        self.change(id, &by, operation, None, None, now)
    }

    /// Applies an operation to the record with this id, and puts a follow-up of it, in one commit.
    fn change(
        &self,
        id: &str,
        by: &By,
        operation: &Operation<'_>,
        followup: Option<&Draft>,
        durable: Option<&Durable>,
        now: Timestamp,
    ) -> Result<Changed, Error> {
        let each: Each<'_, Candidate> = &|record, place, found| {
            if record.id == id {
                let owner = record.more().owner.map(str::to_owned);
                let text = record.line().to_owned();
                found.push(Found { place, what: Candidate { status: record.status, owner, text } });
            }
        };
        let (changed, findings) = self.attempt(now, |file, end| {
            durable.map_or(Ok(()), Durable::require_in_place)?;
            let mut looked = look(&self.files, file, end, &self.options, &Filter::any(&[id]), each)?;
            let Some(Found { place, what }) = self.choose(id, operation, std::mem::take(&mut looked.found))? else {
                return Ok((None, looked.into_plan(&self.files, &[], &[], &[])?));
            };
            self.require_right(id, by, operation, place, &what)?;
            let (mut changed, change, account) = self.apply(operation, place, &what.text, now)?;
            let mut added = Vec::new();
            if let Some(draft) = followup {
                let draft = Draft { from: changed.role.clone(), ..draft.clone() };
                changed.followup = Some(match self.judge(&draft, file, end)? {
                    Judged::Existing(put) => put,
                    Judged::New(new) => {
                        let (put, line) = self.compose(&draft, new, now)?;
                        added.push(line);
                        put
                    }
                });
            }
            Ok((Some(changed), looked.into_plan(&self.files, &[change], &added, &[account])?))
        })?;
        let changed = changed.ok_or_else(|| {
            let what = format!("has no record {}", id.escape_debug());
            Error::new(ErrorKind::Refused, &self.files.queue, what).advise("`handoff list` shows what there is")
        })?;
        Ok(Changed { findings, ..changed })
    }

    /// The one of the records with an id to which the operation may be applied; `None` if there are no such records.
    fn choose(
        &self,
        id: &str,
        operation: &Operation<'_>,
        found: Vec<Found<Candidate>>,
    ) -> Result<Option<Found<Candidate>>, Error> {
        let refused = |line: u64, what: String| {
            Error::new(ErrorKind::Refused, &self.files.queue, format!("record {} {what}", id.escape_debug()))
                .at_line(line)
        };
        let (mut fit, unfit): (Vec<_>, Vec<_>) =
            found.into_iter().partition(|found| operation.applies_to(found.what.status));
        match (fit.pop(), fit.is_empty(), unfit.last()) {
            (Some(one), true, _) => Ok(Some(one)),
            (Some(last), false, _) => {
                let lines: Vec<String> = fit.iter().map(|found| found.place.line.to_string()).collect();
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
    fn require_right(
        &self,
        id: &str,
        by: &By,
        operation: &Operation<'_>,
        place: Place,
        record: &Candidate,
    ) -> Result<(), Error> {
        if record.status != Status::Running || matches!(by, By::Force) {
            return Ok(());
        }
        let refused = |what: &str| {
            let what = format!("record {} can't be {}: {what}", id.escape_debug(), operation.as_str());
            let error = Error::new(ErrorKind::Refused, &self.files.queue, what).at_line(place.line);
            Err(error.advise("--force does it all the same, if you know better"))
        };
        let Some(owner) = record.owner.as_deref().and_then(Owner::read) else {
            return match by {
                By::Process(_) | By::Force => Ok(()),
                _ => refused("it does not say which process holds it, so that nobody can tell whether that lives"),
            };
        };
        let who = format!("process {} on {}", owner.pid, owner.host.escape_debug());
        match (by, process::life(&owner)?) {
            (By::Process(Some(us)) | By::OwnerOnly(us), _) if owner == *us => Ok(()),
            (By::Process(_) | By::Nobody, Life::Dead) | (By::Process(_), Life::Unknown) | (By::Force, _) => Ok(()),
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
        text: &str,
        now: Timestamp,
    ) -> Result<(Changed, Change, Account), Error> {
        let refused = |what: String| Error::new(ErrorKind::Refused, &self.files.queue, what).at_line(place.line);
        let Ok(Line::Record(record)) = envelope::parse(text.as_bytes()) else {
            return Err(refused("is no record any more".to_owned()));
        };
        let (id, role, kind) = (record.id.to_string(), record.to.to_string(), record.kind.to_string());
        let name = id.escape_debug();
        let transition = operation
            .apply(&record, now)
            .map_err(|what| refused(format!("record {name} can't be {}: {what}", operation.as_str())))?;
        if transition.line.len() > self.options.max_line {
            let what =
                format!("record {name} can't be {}: its line would be too long (--max-line)", operation.as_str());
            return Err(refused(what));
        }
        let line = transition.line.trim_start_matches('\u{feff}').trim_end().to_owned();
        let changed = Changed {
            id,
            kind: kind.clone(),
            role: role.clone(),
            status: transition.status,
            line,
            followup: None,
            findings: Vec::new(),
        };
        Ok((changed, Change { place, line: transition.line }, Account { role, kind, totals: transition.lost }))
    }

    /// Checks a record that is to be put, and puts its large values into the blob store.
    fn prepare(&self, draft: Draft) -> Result<(Draft, Option<Durable>), Error> {
        let draft = draft.check(&self.kinds).map_err(|what| Error::new(ErrorKind::BadData, &self.files.queue, what))?;
        let (payload, _, durable) = self.offload(&draft, None)?;
        Ok((Draft { payload, ..draft }, durable))
    }

    /// Puts values of a payload and a result that are too large into the blob store, and returns both with handles in their place.
    fn offload(&self, draft: &Draft, result: Option<&str>) -> Result<(String, Option<String>, Option<Durable>), Error> {
        let unchanged = || (draft.payload.clone(), result.map(str::to_owned), None);
        let limit = self.rule.max_bytes;
        if draft.payload.len() <= limit && result.is_none_or(|result| result.len() <= limit) {
            return Ok(unchanged());
        }
        let mut line = draft.to_line("-", None, Timestamp::from_micros(0));
        if let Some(result) = result {
            line.truncate(line.len() - 1);
            line.extend([",\"result\":", result, "}"]);
        }
        let too_long = || {
            let what = format!("{} bytes are more than a line may have (--max-line)", line.len());
            Error::new(ErrorKind::BadData, &self.files.queue, what)
        };
        let Ok(Line::Record(record)) = envelope::parse(line.as_bytes()) else { return Err(too_long()) };
        let oversized = self.rule.judge(&record);
        if oversized.is_empty() {
            return Ok(unchanged());
        }
        let contents = oversized.contents();
        let texts = std::sync::Mutex::new(Some(contents.iter().map(|content| content.text.to_string()).collect()));
        let writer = BlobWriter::open(&self.files.blobs, &directory_of(&self.files.queue), self.options.lock_timeout)?;
        let next = || Ok(texts.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take());
        let durable = writer.put_all(1, next)?;
        let digests: Vec<_> = contents.iter().map(Content::digest).collect();
        let line = oversized.replaced(&contents, &digests);
        let Ok(Line::Record(record)) = envelope::parse(line.as_bytes()) else { return Err(too_long()) };
        let payload = record.payload.unwrap_or("{}").to_owned();
        Ok((payload, record.more().result.map(str::to_owned), Some(durable)))
    }

    /// What the queue's records say of one that is to be put.
    fn judge(&self, draft: &Draft, file: &File, size: u64) -> Result<Judged, Error> {
        let end = last_line_end(file, 0..size).map_err(|error| read_error(&self.files.queue, error))?;
        let has_key = draft.run_id.is_some() || draft.correlation_id.is_some();
        let key = draft.run_id.as_deref().or(draft.correlation_id.as_deref());
        let words: Vec<&str> = key.into_iter().chain(draft.parent.as_deref()).collect();
        if words.is_empty() {
            return Ok(Judged::default());
        }
        let each: Each<'_, Related> = &|record, place, found| {
            let more = record.more();
            if has_key
                && (&*record.kind, &*record.to) == (&*draft.kind, &*draft.to)
                && (more.run_id.as_deref(), more.correlation_id.as_deref())
                    == (draft.run_id.as_deref(), draft.correlation_id.as_deref())
            {
                let is_same = record.payload.is_some_and(|payload| draft.has_payload(payload));
                found.push(Found {
                    place,
                    what: Related::Same { id: record.id.to_string(), status: record.status, is_same },
                });
            }
            if draft.parent.is_some() && more.parent == draft.parent.as_deref().map(Into::into) {
                found.push(Found { place, what: Related::FollowUp(record.id.to_string()) });
            }
            if draft.parent.as_deref() == Some(&*record.id) {
                found.push(Found { place, what: Related::Parent(more.parent.map(Into::into)) });
            }
        };
        let looked = look(&self.files, file, end, &self.options, &Filter::any(&words), each)?;
        let refused = |place: Place, what: String| {
            Err(Error::new(ErrorKind::Refused, &self.files.queue, what).at_line(place.line))
        };
        let (mut follow_up, mut parent) = (None, None);
        for Found { place, what } in looked.found {
            match what {
                Related::Same { id, status, is_same: true } => {
                    return Ok(Judged::Existing(Put {
                        id,
                        status,
                        existed: true,
                        stopped: None,
                        findings: Vec::new(),
                    }));
                }
                Related::Same { id, .. } => {
                    let id = id.escape_debug();
                    let what = format!(
                        "record {id} has the same run, kind, role and correlation, but another payload: give this one a --correlation-id of its own"
                    );
                    return refused(place, what);
                }
                Related::FollowUp(id) => follow_up = Some((place, id)),
                Related::Parent(of) => parent = Some(of),
            }
        }
        if let Some((place, id)) = follow_up {
            let parent = draft.parent.as_deref().unwrap_or_default();
            let what = format!(
                "record {} is the follow-up of {} already: a record has at most one",
                id.escape_debug(),
                parent.escape_debug()
            );
            return refused(place, what);
        }
        let mut new = New::default();
        if let (Some(id), None) = (&draft.parent, &parent) {
            let message = format!("has no record {}, of which this one is to be the follow-up", id.escape_debug());
            new.findings.push(Finding::new(&self.files.queue, message));
        }
        new.hops = usize::from(draft.parent.is_some());
        let mut next = parent.flatten();
        while let Some(id) = next
            && new.hops <= self.max_hops
        {
            new.hops += 1;
            let each: Each<'_, Option<String>> = &|record, place, found| {
                if record.id == id {
                    found.push(Found { place, what: record.more().parent.map(Into::into) });
                }
            };
            let found = look(&self.files, file, end, &self.options, &Filter::any(&[&id]), each)?.found;
            next = found.into_iter().find_map(|found| found.what);
        }
        Ok(Judged::New(new))
    }

    /// The line of a record that may be put, without its `\n`.
    fn compose(&self, draft: &Draft, new: New, now: Timestamp) -> Result<(Put, String), Error> {
        let id = Uuid::new_v4().to_string();
        let too_many = || Stopped::too_many_hops(new.hops, self.max_hops);
        let stopped = draft.cycle().or_else(|| (new.hops > self.max_hops).then(too_many));
        let line = draft.to_line(&id, stopped.as_ref(), now);
        if line.len() > self.options.max_line {
            let what = format!("{} bytes are more than a line may have (--max-line)", line.len());
            return Err(Error::new(ErrorKind::BadData, &self.files.queue, what));
        }
        let status = stopped.as_ref().map_or(Status::Queued, |stopped| stopped.status);
        let stopped = stopped.map(|stopped| stopped.reason);
        Ok((Put { id, status, existed: false, stopped, findings: new.findings }, line))
    }
}

/// A record with the id that was looked for.
struct Candidate {
    status: Status,
    owner: Option<String>,
    text: String,
}

/// A record that has to do with one that is to be put.
enum Related {
    /// It has the same key.
    Same { id: String, status: Status, is_same: bool },
    /// It is the follow-up of the same parent.
    FollowUp(String),
    /// It is the parent, which may have one too.
    Parent(Option<String>),
}

/// What the queue says of a record that is to be put.
enum Judged {
    /// It is there.
    Existing(Put),
    /// It isn't.
    New(New),
}

impl Default for Judged {
    fn default() -> Self {
        Self::New(New::default())
    }
}

#[derive(Default)]
struct New {
    /// How many ancestors it has; not counted any further than that they are too many.
    hops: usize,
    findings: Vec<Finding>,
}

fn is_dead(owner: &Owner) -> bool {
    process::life(owner).is_ok_and(|life| life == Life::Dead)
}

fn findings_of(rewritten: Rewritten) -> Vec<Finding> {
    let unsettled = rewritten.unsettled.map(|error| Finding {
        path: error.path().to_owned(),
        line: None,
        message: error.to_string(),
    });
    rewritten.findings.into_iter().chain(unsettled).collect()
}
