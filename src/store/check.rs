//! Checking a queue: what is wrong with its lines, with what belongs to it, and with who may use these.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, Metadata};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use memchr::memmem::Finder;

use super::blob::BlobStore;
use super::files::{OpenQueue, QueueFiles, identity};
use super::process::{self, Life};
use super::read::{self, Line, Lines};
use super::scan::ReadOptions;
use super::{Error, directory_of};
use crate::format::blob::{Digest, References};
use crate::format::envelope::{self, Envelope, Line as Parsed, Status};
use crate::format::lines::RawLine;
use crate::format::owner::Owner;
use crate::format::time::Timestamp;
use crate::format::transition::{Operation, Refusal};

/// What a check has found.
#[derive(Debug, Default)]
pub struct Report {
    /// Whether there is a queue at all.
    pub has_queue: bool,
    /// How many lines were read.
    pub lines: u64,
    /// How many of them are records.
    pub records: u64,
    /// What somebody should look at, in the order of the lines.
    pub items: Vec<Item>,
}

impl Report {
    /// How many problems there are. Notes are none.
    #[must_use]
    pub fn problems(&self) -> usize {
        self.items.iter().filter(|item| item.is_problem).count()
    }
}

/// Something that somebody should look at.
#[derive(Debug, PartialEq, Eq)]
pub struct Item {
    /// What it is, in one word.
    pub what: &'static str,
    /// Whether something is wrong, and will not come right by itself.
    pub is_problem: bool,
    /// In which file.
    pub path: PathBuf,
    /// In which line, from 1.
    pub line: Option<u64>,
    /// Of which record.
    pub id: Option<String>,
    /// What it is, in words.
    pub detail: String,
}

/// Checks the queue, and changes nothing.
///
/// # Errors
/// If it can't be read.
pub fn check(files: &QueueFiles, options: &ReadOptions, now: Timestamp) -> Result<Report, Error> {
    let mut look = read::under_lock(files, options, |lines| Look::at(lines, now))?;
    look.look_at_owners()?;
    let mut report = look.report;
    report.items.sort_by(|a, b| {
        let place = |item: &'_ Item| (item.line.is_none(), item.path != files.queue);
        (place(a), &a.path, a.line).cmp(&(place(b), &b.path, b.line))
    });
    Ok(report)
}

/// Clocks may differ by so much.
const TOLERANCE: Duration = Duration::from_secs(300);
/// No agent has queued anything before: 2001-09-09T01:46:40Z.
const FIRST_PLAUSIBLE: Timestamp = Timestamp::from_micros(1_000_000_000_000_000);

/// A look at all lines.
struct Look {
    now: Timestamp,
    max_line: usize,
    /// Who might take a record.
    taker: Option<Owner>,
    /// Or why it can't be looked at.
    store: Result<BlobStore, Error>,
    reference: Finder<'static>,
    missing: BTreeMap<Digest, Missing>,
    /// A hash of each id: all ids would take many times as much memory.
    hashes: Vec<u64>,
    hasher: RandomState,
    running: Vec<Running>,
    report: Report,
}

/// Where a missing blob is referred to first, and how often it is.
struct Missing {
    path: PathBuf,
    line: u64,
    times: u64,
}

/// A record that somebody holds.
struct Running {
    path: PathBuf,
    line: u64,
    id: String,
    owner: Option<String>,
}

impl Look {
    fn at(lines: &Lines<'_>, now: Timestamp) -> Result<Self, Error> {
        let mut look = Self {
            now,
            max_line: lines.options.max_line,
            taker: process::this().ok(),
            // Not before the lock is held: a store that appears later would be taken for absent.
            store: BlobStore::open(&lines.files.blobs),
            reference: Finder::new("blob"),
            missing: BTreeMap::new(),
            hashes: Vec::new(),
            hasher: RandomState::new(),
            running: Vec::new(),
            report: Report::default(),
        };
        let pass = lines.for_each(|line| {
            look.add_references(line)?;
            look.add(line);
            Ok(())
        })?;
        (look.report.has_queue, look.report.lines) = (pass.has_queue, pass.lines);
        look.report.records = look.hashes.len() as u64;
        look.find_duplicates(lines)?;

        let items = &mut look.report.items;
        let of_generations =
            pass.findings.into_iter().map(|finding| problem("generation", &finding.path, finding.message));
        items.extend(of_generations);
        for (path, at) in pass.misplaced {
            let detail = format!("the ledger says that {at} bytes have been taken over, but there no line begins");
            items.push(problem("generation", &path, detail));
        }
        if pass.late_lines > 0 {
            let detail = format!(
                "{} lie in earlier generations, where workers don't see them: the next run of handoff-compact takes them over",
                pass.late_lines
            );
            items.push(note("late_lines", &lines.files.queue, detail));
        }
        for (path, bytes) in pass.unterminated {
            let detail = format!(
                "{bytes} bytes after the last newline may be a write in flight: if they stay, their writer has died, and the next run of handoff-compact ends the line"
            );
            items.push(note("unterminated", &path, detail));
        }
        for (digest, Missing { path, line, times }) in std::mem::take(&mut look.missing) {
            let detail = format!("{} is missing, and is referred to here first of {times} places", digest.reference());
            items.push(problem("missing_blob", &path, detail).at(line));
        }
        if let Err(error) = &look.store {
            items.push(problem("blob_store", error.path(), format!("so that no reference was followed: {error}")));
        }
        if let Some(queue) = &lines.queue {
            check_files(lines.files, queue, items)?;
        }
        Ok(look)
    }

    /// Notes the blobs that a line refers to and that aren't there.
    fn add_references(&mut self, line: &Line<'_>) -> Result<(), Error> {
        if let RawLine::Whole(bytes) = line.raw
            && self.reference.find(bytes).is_none()
        {
            return Ok(());
        }
        let (mut references, mut digests) = (References::default(), BTreeSet::new());
        line.for_each_chunk(|chunk| references.push(chunk, |digest| digests.extend([digest])))?;
        references.finish(|digest| digests.extend([digest]));
        for digest in digests {
            let Ok(store) = &self.store else { break };
            match store.exists(&digest) {
                Ok(true) => {}
                Ok(false) => {
                    let first = || Missing { path: line.path.to_owned(), line: line.number, times: 0 };
                    self.missing.entry(digest).or_insert_with(first).times += 1;
                }
                Err(error) => self.store = Err(error),
            }
        }
        Ok(())
    }

    fn add(&mut self, line: &Line<'_>) {
        let found = |item: Item| item.at(line.number);
        match envelope::parse_raw(line.raw) {
            Ok(Parsed::Blank) => {}
            Ok(Parsed::Record(record)) => self.add_record(&record, line),
            Ok(Parsed::Ledger(ledger)) => {
                let faults = ledger.totals.faults().into_iter();
                self.report.items.extend(faults.map(|fault| found(problem("implausible_totals", line.path, fault))));
            }
            Err(malformed) => {
                let what = if malformed.is_ledger { "unreadable_ledger" } else { malformed.reason.as_str() };
                let mut detail = malformed.detail.into_owned();
                if malformed.is_ledger {
                    detail += ": nothing can be rewritten until it is mended";
                }
                self.report.items.push(found(problem(what, line.path, detail)));
            }
        }
    }

    fn add_record(&mut self, record: &Envelope<'_>, line: &Line<'_>) {
        self.hashes.push(self.hasher.hash_one(record.id.as_bytes()));
        let mut items = Vec::new();
        let mut push = |item: Item| items.push(Item { id: Some(record.id.to_string()), ..item.at(line.number) });
        if let Some(doubt) = record.doubt {
            let (what, status) = (doubt.as_str(), record.status.as_str());
            let what_follows = match record.status {
                Status::Queued => "nobody can take it",
                Status::Done | Status::Dead => "it is kept for ever",
                _ => "no operation can change it",
            };
            let detail = format!("is in doubt, and {status}: {what_follows}");
            let has_ended = matches!(record.status, Status::Done | Status::Dead);
            push(if has_ended { note(what, line.path, detail) } else { problem(what, line.path, detail) });
        }
        if record.doubt.is_none()
            && let Some(detail) = self.stuck(record)
        {
            push(problem("stuck", line.path, detail));
        }
        if record.status == Status::Other {
            push(problem("unknown_status", line.path, "has a status that is none of the format's: nobody acts on it"));
        }
        let times = [("ts", Some(record.ts)), ("started_ts", record.started_ts), ("finished_ts", record.finished_ts)];
        for (name, time) in times {
            let Some(time) = time else { continue };
            if time.before(TOLERANCE) > self.now {
                push(problem("future_time", line.path, format!("`{name}` lies in the future: {time}")));
            } else if time < FIRST_PLAUSIBLE {
                push(problem("implausible_time", line.path, format!("`{name}` is {time}: is it in another unit?")));
            }
        }
        self.report.items.extend(items);
        if record.status == Status::Running {
            let owner = record.more().owner.map(str::to_owned);
            let (path, id) = (line.path.to_owned(), record.id.to_string());
            self.running.push(Running { path, line: line.number, id, owner });
        }
    }

    /// Why what must come next can't be done to a record, if so.
    fn stuck(&self, record: &Envelope<'_>) -> Option<String> {
        let refusal = Refusal { is_retryable: true, ..Refusal::default() };
        let next = match record.status {
            Status::Queued => Operation::Take { owner: self.taker.as_ref() },
            Status::Running => Operation::Nack(&refusal),
            Status::Human if record.more().notified_ts.is_none() => Operation::Announce,
            _ => return None,
        };
        let why = match next.apply(record, self.now) {
            Ok(transition) if transition.line.len() <= self.max_line => return None,
            Ok(_) => "its line would be too long: move large values out of it (handoff-offload), or have all tools allow more (--max-line)".to_owned(),
            Err(why) => why,
        };
        Some(format!("is {}, and can't be {}: {why}", record.status.as_str(), next.as_str()))
    }

    /// Looks for ids that several records have, by another pass if there may be any.
    fn find_duplicates(&mut self, lines: &Lines<'_>) -> Result<(), Error> {
        self.hashes.sort_unstable();
        let pairs = self.hashes.windows(2).filter(|pair| pair[0] == pair[1]);
        let suspects: BTreeSet<u64> = pairs.map(|pair| pair[0]).collect();
        self.hashes = Vec::new();
        if suspects.is_empty() {
            return Ok(());
        }
        let mut first: HashMap<String, (PathBuf, u64)> = HashMap::new();
        lines.for_each(|line| {
            let Ok(Parsed::Record(record)) = envelope::parse_raw(line.raw) else { return Ok(()) };
            if !suspects.contains(&self.hasher.hash_one(record.id.as_bytes())) {
                return Ok(());
            }
            if let Some((path, number)) = first.get(record.id.as_ref()) {
                let detail = format!("has the same id as the record in {}:{number}", path.display());
                let id = Some(record.id.to_string());
                self.report.items.push(Item { id, ..problem("duplicate_id", line.path, detail).at(line.number) });
            } else {
                first.insert(record.id.to_string(), (line.path.to_owned(), line.number));
            }
            Ok(())
        })?;
        Ok(())
    }

    /// Finds out who of those that hold records lives.
    fn look_at_owners(&mut self) -> Result<(), Error> {
        for Running { path, line, id, owner } in self.running.drain(..) {
            let item = match owner.as_deref().map(process::life_of).transpose()? {
                Some(Life::Alive) => continue,
                Some(Life::Dead) => problem(
                    "dead_owner",
                    &path,
                    "runs, but its owner is dead: restart the worker, which reclaims it, or handoff requeue",
                ),
                Some(Life::Unknown) => {
                    note("unknown_owner", &path, "runs, and nobody here can tell whether its owner lives")
                }
                None => note("no_owner", &path, "runs without an owner, as workers leave it that don't use handoff"),
            };
            self.report.items.push(Item { id: Some(id), ..item.at(line) });
        }
        Ok(())
    }
}

fn problem(what: &'static str, path: &Path, detail: impl Into<String>) -> Item {
    Item { what, is_problem: true, path: path.to_owned(), line: None, id: None, detail: detail.into() }
}

fn note(what: &'static str, path: &Path, detail: impl Into<String>) -> Item {
    Item { is_problem: false, ..problem(what, path, detail) }
}

impl Item {
    fn at(self, line: u64) -> Self {
        Self { line: Some(line), ..self }
    }
}

/// Checks who may use the files, and whether the queue can be replaced.
fn check_files(files: &QueueFiles, queue: &OpenQueue, items: &mut Vec<Item>) -> Result<(), Error> {
    let examined = |path: &Path| match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        metadata => metadata.map(Some).map_err(|error| Error::io(path, "cannot be examined", error)),
    };
    let directory = directory_of(&queue.path);
    let (lock, store) = (examined(&files.lock)?, examined(&files.blobs)?);
    let mut permissions = |path: &Path, detail: String| items.push(problem("permissions", path, detail));
    let all = [
        (&files.queue, Some(&queue.metadata)),
        (&files.lock, lock.as_ref()),
        (&directory, examined(&directory)?.as_ref()),
        (&files.blobs, store.as_ref()),
    ]
    .map(|(path, metadata)| (path.clone(), metadata.cloned()));
    for (path, metadata) in all {
        // In a directory with the sticky bit nobody can take away what is another's.
        if let Some(metadata) = metadata
            && metadata.mode() & 0o2 != 0
            && !(metadata.is_dir() && metadata.mode() & 0o1000 != 0)
        {
            permissions(&path, format!("everybody may write to it (mode {:04o}): chmod o-w", metadata.mode() & 0o7777));
        }
    }
    if let Some(lock) = &lock {
        let (owner, holder) = (queue.metadata.uid(), lock.uid());
        if !may_write(lock, &queue.metadata) {
            permissions(
                &files.lock,
                format!(
                    "the queue's owner, user {owner}, may not write to it (mode {:04o}, user {holder}): give it to them",
                    lock.mode() & 0o7777
                ),
            );
        } else if owner != holder {
            let detail = format!("belongs to user {holder}, but the queue to user {owner}");
            items.push(note("owners", &files.lock, detail));
        }
        if identity(lock) == identity(&queue.metadata) {
            items.push(problem(
                "lock",
                &files.lock,
                "is the queue itself, which is then never rewritten: lock a file of its own",
            ));
        }
    }
    if let Some(other) = queue.other_lock(files) {
        let detail = format!("there is another lock, {}: workers that use it are not kept out", other.display());
        items.push(problem("lock", &files.lock, detail));
    }
    let second_names = queue.generations.iter().filter(|generation| generation.is_queue).count() as u64;
    let names = queue.metadata.nlink().saturating_sub(second_names);
    if names > 1 {
        let detail =
            format!("has {names} names (hard links), so that it is never rewritten: find -samefile lists them");
        items.push(problem("names", &files.queue, detail));
    }
    Ok(())
}

/// Whether the owner of the queue may write to the lock, as far as owner, group and mode tell.
fn may_write(lock: &Metadata, queue: &Metadata) -> bool {
    let bit = match queue.uid() {
        0 => return true,
        owner if owner == lock.uid() => 0o200,
        _ if queue.gid() == lock.gid() => 0o020,
        _ => 0o002,
    };
    lock.mode() & bit != 0
}
