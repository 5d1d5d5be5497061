//! Putting a record, alone or with the one that it follows.

use std::fs::File;
use std::sync::{Mutex, PoisonError};

use uuid::Uuid;

use super::append::{Appended, append, flush};
use super::blob_writer::{BlobWriter, Durable};
use super::client::{Client, unsettled};
use super::files::{Finding, OpenQueue, read_error};
use super::lock::ExclusiveLock;
use super::records::{Each, Filter, Found, Place, look};
use super::replace::rewrite_locked;
use super::scan::last_line_end;
use super::{Error, ErrorKind, directory_of};
use crate::format::draft::{Draft, Stopped};
use crate::format::envelope::{self, Line, Status};
use crate::format::offload::{Content, Rule};
use crate::format::time::Timestamp;

/// The rules for new records.
#[derive(Clone, Debug)]
pub struct Rules {
    /// The kinds that there are.
    pub kinds: Vec<String>,
    /// The roles that there are; none: any.
    pub roles: Vec<String>,
    /// How many ancestors a record may have.
    pub max_hops: usize,
    /// What is too large for a line.
    pub offload: Rule,
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

/// How often a line is appended that others have spoilt.
const MAX_APPENDS: usize = 10;

impl Client {
    /// Puts a record.
    ///
    /// # Errors
    /// [`ErrorKind::BadData`] if it is none that may be put, [`ErrorKind::Refused`] if the queue already has another in its place.
    pub fn put(&self, draft: &Draft, rules: &Rules, now: Timestamp) -> Result<Put, Error> {
        let (draft, durable) = self.prepare(draft.clone(), rules)?;
        self.files.require_directory()?;
        let lock = ExclusiveLock::acquire(&self.files, self.options.lock_timeout)?;
        durable.as_ref().map_or(Ok(()), Durable::require_in_place)?;
        let mut new = match OpenQueue::open(&self.files)? {
            None => New::default(),
            Some(queue) => match self.judge(&draft, rules, &queue.file, queue.metadata.len())? {
                Judged::New(new) => new,
                Judged::Existing(put) => {
                    // Whoever has put it may have been killed before it was on the disk.
                    flush(&queue.file, &queue).map_err(|error| error.note("the record is there, but may not stay"))?;
                    return Ok(put);
                }
            },
        };
        new.findings.extend(durable.iter().flat_map(|durable| durable.findings.iter().cloned()));
        let (put, line) = self.compose(&draft, rules, new, now)?;
        let line = line + "\n";
        for _ in 0..MAX_APPENDS {
            match append(&self.files, &lock, line.as_bytes())? {
                Appended::Durable => return Ok(put),
                Appended::Glued => {}
                Appended::MustReplace => {
                    let rewritten = rewrite_locked(&self.files, &lock, now, |file, end| {
                        let nothing =
                            look::<()>(&self.files, file, end, &self.options, &Filter::all(&["ledger"]), &|_, _, _| {});
                        nothing?.into_plan(&self.files, &[], &[line.trim_end().to_owned()], &[])
                    })?;
                    if let Some(mut rewritten) = rewritten {
                        if rewritten.may_come_back
                            && let Some(error) = rewritten.unsettled.take()
                        {
                            return Err(error);
                        }
                        let findings = [put.findings, unsettled(rewritten)].concat();
                        return Ok(Put { findings, ..put });
                    }
                }
            }
        }
        let what = "is written to without the lock all the time, so that no line stays whole";
        Err(Error::new(ErrorKind::Busy, &self.files.queue, what).advise("try again"))
    }

    /// Checks a record that is to be put, and puts its large values into the blob store.
    fn prepare(&self, draft: Draft, rules: &Rules) -> Result<(Draft, Option<Durable>), Error> {
        let draft = draft
            .check(&rules.kinds, &rules.roles)
            .map_err(|what| Error::new(ErrorKind::BadData, &self.files.queue, what))?;
        let (payload, _, durable) = self.offload(&draft, None, rules.offload)?;
        Ok((Draft { payload, ..draft }, durable))
    }

    /// Puts values of a payload and a result that are too large into the blob store, and returns both with handles in their place.
    pub(super) fn offload(
        &self,
        draft: &Draft,
        result: Option<&str>,
        rule: Rule,
    ) -> Result<(String, Option<String>, Option<Durable>), Error> {
        let unchanged = || (draft.payload.clone(), result.map(str::to_owned), None);
        let limit = rule.max_bytes;
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
        let oversized = rule.judge(&record);
        if oversized.is_empty() {
            return Ok(unchanged());
        }
        let contents = oversized.contents();
        let texts = Mutex::new(Some(contents.iter().map(|content| content.text.to_string()).collect()));
        let writer = BlobWriter::open(&self.files.blobs, &directory_of(&self.files.queue), self.options.lock_timeout)?;
        let next = || Ok(texts.lock().unwrap_or_else(PoisonError::into_inner).take());
        let durable = writer.put_all(1, next)?;
        let digests: Vec<_> = contents.iter().map(Content::digest).collect();
        let line = oversized.replaced(&contents, &digests);
        let Ok(Line::Record(record)) = envelope::parse(line.as_bytes()) else { return Err(too_long()) };
        let payload = record.payload.unwrap_or("{}").to_owned();
        Ok((payload, record.more().result.map(str::to_owned), Some(durable)))
    }

    /// What the queue's records say of one that is to be put.
    pub(super) fn judge(&self, draft: &Draft, rules: &Rules, file: &File, size: u64) -> Result<Judged, Error> {
        let has_key = draft.run_id.is_some() || draft.correlation_id.is_some();
        let key = draft.run_id.as_deref().or(draft.correlation_id.as_deref());
        let words: Vec<&str> = key.into_iter().chain(draft.parent.as_deref()).collect();
        if words.is_empty() {
            return Ok(Judged::default());
        }
        let end = last_line_end(file, 0..size).map_err(|error| read_error(&self.files.queue, error))?;
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
                        stopped: draft.cycle().map(|stopped| stopped.reason),
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
            let message = format!(
                "has no record {}, which the new one names as its parent: is that the whole id?",
                id.escape_debug()
            );
            new.findings.push(Finding::new(&self.files.queue, message));
        }
        new.hops = usize::from(draft.parent.is_some());
        let mut next = parent.flatten();
        let mut ancestors: Vec<String> = draft.parent.iter().cloned().collect();
        while let Some(id) = next
            && new.hops <= rules.max_hops
        {
            new.hops += 1;
            if ancestors.contains(&id) {
                // Its own ancestor has no end of them.
                new.hops = new.hops.max(rules.max_hops.saturating_add(1));
                break;
            }
            let each: Each<'_, Option<String>> = &|record, place, found| {
                if record.id == id {
                    found.push(Found { place, what: record.more().parent.map(Into::into) });
                }
            };
            let found = look(&self.files, file, end, &self.options, &Filter::any(&[&id]), each)?.found;
            next = found.into_iter().find_map(|found| found.what);
            ancestors.push(id);
        }
        Ok(Judged::New(new))
    }

    /// The line of a record that may be put, without its `\n`.
    pub(super) fn compose(
        &self,
        draft: &Draft,
        rules: &Rules,
        new: New,
        now: Timestamp,
    ) -> Result<(Put, String), Error> {
        let id = Uuid::new_v4().to_string();
        let too_many = || Stopped::too_many_hops(new.hops, rules.max_hops);
        let stopped = draft.cycle().or_else(|| (new.hops > rules.max_hops).then(too_many));
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
pub(super) enum Judged {
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
pub(super) struct New {
    /// How many ancestors it has; not counted any further than that they are too many.
    hops: usize,
    findings: Vec<Finding>,
}
