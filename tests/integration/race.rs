//! Workers that append without the lock and rewrite in place, the account that they keep, and what has become of their lines.
//!
//! The workers (workers/racer.py) write down each line that they put, and when, and into which file. In the end, every line must be in the
//! queue, once, or among those that the ledger says were removed. Which lines those were no ledger tells; but each run leaves the file that
//! it has replaced until the next one, so what compaction has ever had in its hands can be read there.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::ops::AddAssign;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::exposition::{Samples, sum};
use crate::test_env::{Background, TestEnv, counters, in_tests, names_in, python, record, run, shortened};

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Workers, and the account that they keep.
pub(crate) struct Race {
    pub(crate) workers: Vec<Background>,
    /// Producers that have stopped themselves.
    pub(crate) stopped: Vec<Background>,
    /// The names of all logs.
    pub(crate) logs: Vec<String>,
    /// Whether producers put lines with values that offload moves.
    pub(crate) large: bool,
    pub(crate) env: TestEnv,
}

/// A line that a producer has put, or has begun to.
pub(crate) struct Put {
    pub(crate) line: String,
    pub(crate) inode: u64,
    /// Whether the file ended in the middle of a line when it was opened.
    pub(crate) behind_torn: bool,
    /// From when to when it wrote, for each write.
    pub(crate) writes: Vec<(u64, u64)>,
    /// Unless the producer was killed before.
    pub(crate) has_ended: bool,
}

/// A file that was read and rewritten in place, under the lock.
pub(crate) struct Take {
    pub(crate) inode: u64,
    pub(crate) began: u64,
    pub(crate) ended: u64,
}

/// What the workers have written down.
#[derive(Default)]
pub(crate) struct Account {
    pub(crate) puts: Vec<Put>,
    pub(crate) takes: Vec<Take>,
    /// The records that takes have read, and so written back.
    pub(crate) read_by_takes: HashSet<String>,
}

/// What runs of compaction said they did.
#[derive(Debug, Default)]
pub(crate) struct Runs {
    pub(crate) runs: u64,
    pub(crate) commits: u64,
    pub(crate) removed: u64,
    pub(crate) late: u64,
    pub(crate) drained: u64,
}

/// Records that may go: how many, and how long they were worked on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Removable {
    pub(crate) records: u64,
    pub(crate) micros: u64,
}

impl AddAssign for Removable {
    fn add_assign(&mut self, other: Self) {
        self.records += other.records;
        self.micros += other.micros;
    }
}

/// Where producers say what blobs hold.
const ACCOUNTS: &str = "accounts";

/// What producers say that blobs hold: the JSON text of the value that was moved, by the blob's name.
#[derive(Default)]
pub(crate) struct Contents {
    pub(crate) values: HashMap<String, String>,
    /// How far each account has been read.
    read: HashMap<String, u64>,
}

impl Contents {
    /// Puts values back to where handles stand, each as its producer wrote it.
    pub(crate) fn restore(&mut self, env: &TestEnv, text: String) -> String {
        const START: &str = r#"{"artifact_ref":"blob/"#;
        if !text.contains(START) {
            return text;
        }
        // Whoever puts a value has said so before.
        self.read_accounts(env);
        let (mut restored, mut end) = (String::with_capacity(text.len()), 0);
        for (start, _) in text.match_indices(START) {
            let mut values = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Value>();
            // A line may have been torn in the middle of a handle.
            let Some(Ok(handle)) = values.next() else { continue };
            if let Some(value) = handle["sha256"].as_str().and_then(|name| self.values.get(name)) {
                restored += &text[end..start];
                restored += value;
                end = start + values.byte_offset();
            }
        }
        restored + &text[end..]
    }

    pub(crate) fn read_accounts(&mut self, env: &TestEnv) {
        for name in names_in(&env.path(ACCOUNTS)) {
            let read = self.read.entry(name.clone()).or_default();
            let mut file = File::open(env.path(ACCOUNTS).join(&name)).unwrap();
            file.seek(SeekFrom::Start(*read)).unwrap();
            let mut text = String::new();
            file.read_to_string(&mut text).unwrap();
            let whole = text.rfind('\n').map_or(0, |end| end + 1);
            *read += whole as u64;
            for entry in text[..whole].lines() {
                let (name, value) = entry.split_once(' ').unwrap();
                self.values.insert(name.to_owned(), value.to_owned());
            }
        }
    }
}

/// Whole lines that have been in a file of the queue which compaction has read, or will have read: by their record's id and their length.
/// Of these compaction owes an account, whatever a take does.
#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) lines: HashMap<(String, usize), Option<Removable>>,
    /// How far each earlier generation has been read.
    pub(crate) read: BTreeMap<String, u64>,
    pub(crate) contents: Contents,
}

impl Race {
    pub(crate) fn new() -> Self {
        let env = TestEnv::new();
        env.write("queue.jsonl", "");
        env.write("queue.lock", "");
        fs::create_dir(env.path(ACCOUNTS)).unwrap();
        Self { workers: Vec::new(), stopped: Vec::new(), logs: Vec::new(), large: false, env }
    }

    pub(crate) fn start(&mut self, actions: &[&str]) {
        for action in actions {
            let mut worker = self.worker(action, &[]);
            self.workers.push(Background::spawn(&mut worker));
        }
    }

    /// A worker whose log is named after what it does.
    fn worker(&mut self, action: &str, more: &[&str]) -> Command {
        let log = format!("{action}-{}", self.logs.len());
        let mut command = self.env.command(python());
        // Without what sites add to Python, it starts in half the time.
        command.args(["-S", "-E"]).arg(in_tests("workers/racer.py")).args(self.large.then_some("--large"));
        command.args([action, "queue.jsonl", &log, "researcher"]).args(more);
        self.logs.push(log);
        command
    }

    /// Starts a producer that opens the queue and stops before it writes (`open`) or in the middle of its line (`line`).
    pub(crate) fn stop_one(&mut self, place: &str) {
        let mut command = self.worker("stop", &[place]);
        let (producer, _) = Background::spawn_and_wait_for_line(&mut command);
        let state = || {
            let stat = fs::read_to_string(format!("/proc/{}/stat", producer.id())).unwrap();
            stat.rsplit_once(") ").unwrap().1.chars().next()
        };
        wait_until("a producer stops", || state() == Some('T'));
        self.stopped.push(producer);
    }

    /// Producers that hold earlier generations open, each its own, for as long as they are stopped.
    pub(crate) fn stop_two(&mut self, runs: &mut Runs, seen: &mut Seen) {
        for place in ["open", "line"] {
            // There is something to remove, so that the queue is replaced behind the producer's back.
            let mut queue = fs::read(self.env.path("queue.jsonl")).unwrap();
            let old = record(&format!("before-{place}"), "archivist", "done").replace("1795950000", "1600000000");
            queue.extend(old.into_bytes());
            self.env.write("queue.jsonl", queue);
            self.stop_one(place);
            let commits = runs.commits;
            runs.compact(&self.env, seen);
            assert!(runs.commits > commits, "the queue was not replaced");
        }
    }

    /// Has all workers finish, those that have stopped last.
    pub(crate) fn finish(&mut self) {
        self.workers.drain(..).for_each(Background::finish);
        for producer in self.stopped.drain(..) {
            let id = Pid::from_raw(i32::try_from(producer.id()).unwrap()).unwrap();
            kill_process(id, Signal::CONT).unwrap();
            producer.finish();
        }
    }

    /// How many puts have `begun` or are `done`.
    pub(crate) fn count(&self, what: &str) -> u64 {
        let size = |log| fs::metadata(self.env.path(format!("{log}.{what}"))).map_or(0, |file| file.len());
        self.logs.iter().map(size).sum()
    }

    pub(crate) fn account(&self) -> Account {
        let mut account = Account::default();
        for log in &self.logs {
            let text = fs::read_to_string(self.env.path(format!("{log}.account"))).unwrap_or_default();
            // Who was killed may not have completed the last entry, and has then not touched the queue.
            let whole = text.rfind('\n').map_or(0, |end| end + 1);
            for entry in text[..whole].lines() {
                let number = |field: &str| field.parse::<u64>().unwrap();
                let fields = if entry.starts_with('B') { 4 } else { 5 };
                match entry.splitn(fields, ' ').collect::<Vec<_>>()[..] {
                    ["B", inode, torn, line] => account.puts.push(Put {
                        line: line.to_owned(),
                        inode: number(inode),
                        behind_torn: torn == "1",
                        writes: Vec::new(),
                        has_ended: false,
                    }),
                    ["W", from, to] => account.puts.last_mut().unwrap().writes.push((number(from), number(to))),
                    ["E"] => account.puts.last_mut().unwrap().has_ended = true,
                    ["T", began, ended, inode, ids] => {
                        account.takes.push(Take { inode: number(inode), began: number(began), ended: number(ended) });
                        account.read_by_takes.extend(ids.split(',').map(str::to_owned));
                    }
                    _ => panic!("{log}: {entry}"),
                }
            }
        }
        account
    }

    /// The queue, as it would be if nothing had been moved out of it.
    pub(crate) fn queue(&self) -> String {
        Contents::default().restore(&self.env, fs::read_to_string(self.env.path("queue.jsonl")).unwrap())
    }

    pub(crate) fn generations(&self) -> Vec<String> {
        let mut names = names_in(&self.env.path(""));
        names.retain(|name| name.starts_with("queue.gen."));
        names
    }

    /// When all workers have ended, a few runs bring everything into the queue. After each at most so many generations are left.
    pub(crate) fn settle(&self, runs: &mut Runs, seen: &mut Seen, most_left: &[usize]) {
        for &most_left in most_left {
            runs.compact(&self.env, seen);
            let left = self.generations();
            assert!(left.len() <= most_left, "{left:?}");
        }
        let before = (self.queue(), runs.commits);
        runs.compact(&self.env, seen);
        assert!(before == (self.queue(), runs.commits), "one more run has changed something");
        let temporary: Vec<_> = names_in(&self.env.path("")).into_iter().filter(|name| name.starts_with('.')).collect();
        assert_eq!(temporary, Vec::<String>::new());
    }
}

/// The first run takes over what arrived late, the second may remove it, the third removes the last generation.
pub(crate) const WITHOUT_TORN_LINES: &[usize] = &[usize::MAX, 1, 0];
/// Before that, one run replaces a queue that ends with a torn line, so that another can prove that nobody will complete it.
pub(crate) const WITH_TORN_LINES: &[usize] = &[usize::MAX, 2, 1, 0];

impl Runs {
    /// Runs compaction once, which must succeed, and reads what it has left.
    pub(crate) fn compact(&mut self, env: &TestEnv, seen: &mut Seen) {
        self.compact_unseen(env);
        seen.read_generations(env);
    }

    /// Runs it once, which must succeed.
    pub(crate) fn compact_unseen(&mut self, env: &TestEnv) {
        let mut compact = env.bare_compact();
        compact.args(["--queue", "queue.jsonl", "--textfile-dir", "textfile", "--older-than", "0s", "--json", "-q"]);
        let run = run(&mut compact);
        assert_eq!(run.code, Some(0), "compaction failed: {}", run.stderr);
        assert_eq!(run.stderr, "", "compaction complains");
        let said: Value = serde_json::from_slice(&run.stdout).unwrap();
        let number = |pointer| said.pointer(pointer).and_then(Value::as_u64).unwrap();
        self.runs += 1;
        self.commits += u64::from(said["replaced"].as_bool().unwrap());
        self.removed += number("/removed/records");
        self.late += number("/late/lines");
        self.drained += number("/removed_generations");
        assert_eq!(number("/totals/removed_records"), self.removed, "the ledger counts others than were removed");
    }

    /// Runs it again and again.
    pub(crate) fn compact_for(&mut self, time: Duration, env: &TestEnv, seen: &mut Seen) {
        let started = Instant::now();
        while started.elapsed() < time {
            self.compact(env, seen);
        }
    }
}

impl Seen {
    /// Reads what has come into the generations that there are.
    pub(crate) fn read_generations(&mut self, env: &TestEnv) {
        let mut sizes = BTreeMap::new();
        for entry in fs::read_dir(env.path("")).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            if !name.starts_with("queue.gen.") {
                continue;
            }
            let size = entry.metadata().unwrap().len();
            if self.read.get(&name) != Some(&size) {
                let text = self.contents.restore(env, fs::read_to_string(entry.path()).unwrap());
                self.add(&text);
            }
            sizes.insert(name, size);
        }
        self.read = sizes;
    }

    pub(crate) fn add(&mut self, text: &str) {
        for line in text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
            if let Some(id) = id(line).filter(|id| *id != "ledger") {
                self.lines.entry((id.to_owned(), line.len())).or_insert_with(|| removable(line));
            }
        }
    }

    pub(crate) fn has(&self, line: &str) -> bool {
        self.lines.contains_key(&(id(line).unwrap().to_owned(), line.len()))
    }

    pub(crate) fn removable(&self) -> Removable {
        total(self.lines.values().copied().flatten())
    }
}

pub(crate) fn total(amounts: impl IntoIterator<Item = Removable>) -> Removable {
    let mut total = Removable::default();
    amounts.into_iter().for_each(|amount| total += amount);
    total
}

pub(crate) fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < PATIENCE, "this takes too long: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// The id of a line that begins as those of the workers do.
pub(crate) fn id(line: &str) -> Option<&str> {
    line.strip_prefix(r#"{"id":""#)?.split_once('"').map(|(id, _)| id)
}

/// What a line amounts to, if it is one that compaction may remove.
pub(crate) fn removable(line: &str) -> Option<Removable> {
    let record: Value = serde_json::from_str(line).ok()?;
    let millis = |name: &str| record[name].as_u64();
    let micros = millis("finished_ts").zip(millis("started_ts")).map_or(0, |(end, start)| (end - start) * 1000);
    (record["status"] == "done" && record["nacks"].is_null()).then_some(Removable { records: 1, micros })
}

/// The line as a take leaves it.
pub(crate) fn as_taken(line: &str) -> String {
    line.replace(r#""status":"queued""#, r#""status":"running""#)
}

/// What the ledger of a queue says was removed.
pub(crate) fn removed(queue: &str) -> Removable {
    let ledgers: Vec<&str> = queue.lines().filter(|line| id(line) == Some("ledger")).collect();
    assert_eq!(ledgers.len(), 1, "{ledgers:#?}");
    let ledger: Value = serde_json::from_str(ledgers[0]).unwrap();
    total(ledger["payload"]["totals"]["cells"].as_array().unwrap().iter().map(|cell| Removable {
        records: cell["records"].as_u64().unwrap(),
        micros: cell["role_time"]["sum_us"].as_u64().unwrap(),
    }))
}

/// Asserts that each line is there, as it was put or as a take left it, once, or is among the removed.
pub(crate) fn assert_nothing_lost(race: &Race, context: &str) {
    let queue = race.queue();
    let mut times: HashMap<&str, usize> = HashMap::new();
    for line in queue.lines() {
        *times.entry(line).or_default() += 1;
    }
    let mut found = removed(&queue);
    let account = race.account();
    // Those that there were before the producers came.
    let mut put = Removable { records: removed_before(race), micros: 0 };
    let mut problems = Vec::new();
    let mut in_queue = 1;
    for Put { line, has_ended, .. } in &account.puts {
        assert!(has_ended, "a producer has not finished: {}", shortened(line));
        let taken = as_taken(line);
        let mut count = times.get(&**line).copied().unwrap_or(0);
        if taken != *line {
            count += times.get(&*taken).copied().unwrap_or(0);
        }
        in_queue += count;
        if let Some(amount) = removable(line) {
            put += amount;
            found += total(vec![amount; count]);
        }
        if count > 1 || (count == 0 && removable(line).is_none()) {
            problems.push(format!("{count} times: {}", shortened(line)));
        }
    }
    assert!(
        problems.is_empty(),
        "{context}: {} of {} lines:\n{}",
        problems.len(),
        account.puts.len(),
        problems.join("\n")
    );
    // All numbers of milliseconds differ, so that one line lost cannot be made up for by another that was counted twice.
    assert_eq!(found, put, "{context}: what was removed or is there, and what was put");
    let foreign: Vec<String> = {
        let own: HashSet<&str> = account.puts.iter().map(|put| &*put.line).collect();
        let taken: HashSet<String> = account.puts.iter().map(|put| as_taken(&put.line)).collect();
        let is_own = |line: &str| own.contains(line) || taken.contains(line) || id(line) == Some("ledger");
        queue.lines().filter(|line| !is_own(line)).map(shortened).collect()
    };
    assert_eq!((in_queue, &foreign), (queue.lines().count(), &Vec::new()), "{context}: glued, torn or foreign");
}

/// How many records [`Race::stop_two`] has put, which have been removed.
pub(crate) fn removed_before(race: &Race) -> u64 {
    race.logs.iter().filter(|log| log.starts_with("stop-")).count() as u64
}

/// Records that were there before and stay, so that takes take their time.
pub(crate) const KEPT_BEFORE: usize = 1500;

pub(crate) fn kept_before() -> String {
    (0..KEPT_BEFORE).map(|number| record(&format!("kept-{number}"), "archivist", "human")).collect()
}

/// What of the puts is not there any more though it was not removed.
pub(crate) struct Losses {
    pub(crate) puts: usize,
    /// Lost by takes, which rewrite what they have read and so lose what was put meanwhile.
    pub(crate) by_takes: usize,
    /// Lost otherwise.
    pub(crate) by_others: Vec<String>,
    /// How many takes there were, and how long they were at work: puts fall into that time as often as into any other.
    pub(crate) takes: usize,
    pub(crate) taking: Duration,
}

impl fmt::Display for Losses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { puts, by_takes, takes, taking, .. } = self;
        write!(f, "{by_takes} of {puts} puts lost by {takes} takes, which were at work for {taking:.1?}")
    }
}

/// Tells apart by whom lines were lost.
///
/// A take reads a file and writes back what it has read, all under the lock, which compaction takes too: they never work at the same time. So a
/// take can lose only what producers write into the very file that it has open, between its reading and the end of its writing. A line is lost
/// by a take only if
///
/// * one of the writes that it was put with overlaps in time with a take of the same file. Both sides write down times that lie outside of what they
///   did, and the file's inode; a number that is given to another file later can't mislead, because at one time it means one file;
/// * no take has read it, for then it was written back;
/// * it was never seen whole in a file that compaction has replaced, for then it has outlived the takes of that file, and nobody but
///   compaction can take it over.
///
/// Every other line that is gone would still be there without compaction.
pub(crate) fn losses(account: &Account, queue: &str, seen: &Seen) -> Losses {
    let whole: HashSet<&str> = queue.lines().collect();
    // A take tears lines, and what is put behind a torn line is glued to it, but not lost.
    let own: HashSet<String> = account.puts.iter().flat_map(|put| [put.line.clone(), as_taken(&put.line)]).collect();
    let torn: Vec<&str> = queue.lines().filter(|line| !own.contains(*line)).collect();
    let is_there = |line: &str| whole.contains(line) || torn.iter().any(|torn| torn.contains(line));
    let mut losses = Losses {
        puts: account.puts.len(),
        by_takes: 0,
        by_others: Vec::new(),
        takes: account.takes.len(),
        taking: Duration::from_nanos(account.takes.iter().map(|take| take.ended - take.began).sum()),
    };
    for put in &account.puts {
        let (line, taken) = (&put.line, as_taken(&put.line));
        let was_seen = seen.has(line) || seen.has(&taken);
        // What may go and was seen is accounted for by number, see below.
        if (was_seen && removable(line).is_some()) || is_there(line) || is_there(&taken) {
            continue;
        }
        let overlaps = |take: &Take| put.writes.iter().any(|(from, to)| take.began < *to && *from < take.ended);
        let disturbs = |take: &Take| take.inode == put.inode && overlaps(take);
        let was_read = account.read_by_takes.contains(id(line).unwrap());
        if account.takes.iter().any(disturbs) && !was_read && !was_seen {
            losses.by_takes += 1;
        } else {
            let why = format!("seen: {was_seen}, read by a take: {was_read}");
            losses.by_others.push(format!("{why}: {}", shortened(line)));
        }
    }
    losses
}

/// Runs the exporter again and again: what it counts is never less than before, and no less than was put before nor more than after.
pub(crate) fn export_for(time: Duration, race: &Race) -> u64 {
    let started = Instant::now();
    let mut before = Samples::new();
    let mut runs = 0;
    while started.elapsed() < time {
        let done = race.count("done") + removed_before(race);
        let run = run(race.env.exporter().arg("--stdout"));
        let begun = race.count("begun") + removed_before(race);
        assert_eq!(run.code, Some(0), "{}", run.stderr);
        let samples = run.samples();
        let records = sum(&samples, "handoff_records_total", &[]);
        let as_float = |count: u64| f64::from(u32::try_from(count).unwrap());
        assert!(
            (as_float(done)..=as_float(begun)).contains(&records),
            "run {runs}: {records} records, but {done} to {begun} were put"
        );
        assert!(sum(&samples, "handoff_queue_malformed_lines", &[]) < 0.5, "run {runs}: {}", run.stderr);
        let now = counters(samples);
        for (series, before) in &before {
            let now = now.get(series).copied();
            assert!(now.is_some_and(|now| now >= *before), "run {runs}: {series} is {now:?} after {before}");
        }
        before = now;
        runs += 1;
    }
    runs
}

/// Asserts that nothing was lost or doubled but by takes, and tells what they have lost.
pub(crate) fn assert_only_takes_lose(race: &Race, seen: &mut Seen) -> Losses {
    let (account, queue) = (race.account(), race.queue());
    seen.add(&queue);
    let losses = losses(&account, &queue, seen);
    assert!(
        losses.by_others.is_empty(),
        "{} of {} lines were lost by compaction:\n{}",
        losses.by_others.len(),
        losses.puts,
        losses.by_others.join("\n")
    );
    // Each line that could go and was ever seen is still there, or was removed, once.
    let mut found = removed(&queue);
    let lines: Vec<&str> = queue.lines().collect();
    found += total(lines.iter().filter_map(|line| removable(line)));
    assert_eq!(found, seen.removable(), "what was removed or is there, and what was seen");
    assert_eq!(lines.iter().filter(|line| id(line).is_some_and(|id| id.starts_with("kept-"))).count(), KEPT_BEFORE);
    let mut ids = HashSet::new();
    for line in lines.iter().filter(|line| serde_json::from_str::<Value>(line).is_ok()) {
        assert!(ids.insert(id(line)), "twice: {}", shortened(line));
    }
    losses
}
