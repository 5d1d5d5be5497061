//! `handoff` under load: producers and takers at full speed, killed at random, beside compaction, the exporter, and existing Python workers.
//!
//! Producers and takers (workers/) write down what they begin and what they have done. In the end each record that
//! was put has ended, once, and nobody had it while somebody else did.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::process::CommandExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use queue_format::format::time::Timestamp;
use queue_format::store::client::Client;
use queue_format::store::files::QueueFiles;
use queue_format::store::scan::ReadOptions;
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;

use crate::exposition::{Samples, sum};
use crate::test_env::{Background, TestEnv, counters, in_tests, names_in, python, run, tell};

/// A load that hangs is a failure.
const PATIENCE: Duration = Duration::from_secs(600);

fn is_long() -> bool {
    std::env::var_os("LONG").is_some()
}

/// A worker, which is started again when it has ended in any other way than a good one.
struct Worker {
    script: &'static str,
    arguments: Vec<String>,
    process: Option<Background>,
    lives: u64,
}

impl Worker {
    /// A producer that uses `handoff`.
    fn put(env: &TestEnv, name: &str, count: usize, most: usize) -> Self {
        Self::client(env, &["put"], &[name, name, &count.to_string(), &most.to_string()])
    }

    /// A taker that uses `handoff`.
    fn take(env: &TestEnv, name: &str, trouble: &str) -> Self {
        Self::client(env, &["take"], &[name, trouble])
    }

    fn client(env: &TestEnv, action: &[&str], more: &[&str]) -> Self {
        let handoff = env.bare_handoff().get_program().to_str().unwrap().to_owned();
        Self::start(env, "workers/client_worker.py", &[action, &[&handoff, "queue.jsonl"], more].concat())
    }

    fn old_put(env: &TestEnv, name: &str, count: usize) -> Self {
        let log = format!("{name}.old-put");
        Self::start(env, "workers/old_worker.py", &["put", "queue.jsonl", &log, name, &count.to_string(), "0.01"])
    }

    fn old_take(env: &TestEnv, name: &str) -> Self {
        Self::start(env, "workers/old_worker.py", &["take", "queue.jsonl", &format!("{name}.old-take")])
    }

    fn start(env: &TestEnv, script: &'static str, arguments: &[&str]) -> Self {
        let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
        let mut worker = Self { script, arguments, process: None, lives: 0 };
        worker.revive(env);
        worker
    }

    fn revive(&mut self, env: &TestEnv) {
        let mut command = env.command(python());
        // It leads a group, as a service or a script does: records belong to it, and it is killed together with its client.
        self.process =
            Some(Background::spawn(command.arg(in_tests(self.script)).args(&self.arguments).process_group(0)));
        self.lives += 1;
    }

    /// Kills it and whatever it has started.
    fn kill(&self) {
        let Some(process) = &self.process else { return };
        let group = Pid::from_raw(i32::try_from(process.id()).unwrap()).unwrap();
        // It may have ended by itself.
        kill_process_group(group, Signal::KILL).unwrap_or(());
    }

    /// Starts it again if it was killed, and says whether it has ended well.
    fn has_finished(&mut self, env: &TestEnv) -> bool {
        let Some(process) = &mut self.process else { return true };
        if !process.has_ended() {
            return false;
        }
        // 9 is how one ends that is in trouble, and no code is how one ends that is killed.
        let code = process.exit_code();
        assert!(matches!(code, None | Some(0 | 9)), "{:?} has ended with {code:?}: see its output", self.arguments);
        self.process = None;
        if code != Some(0) {
            self.revive(env);
        }
        code == Some(0)
    }

    fn finish(mut self) {
        self.process.take().unwrap().finish();
    }
}

/// What the workers have written down.
#[derive(Default)]
struct Account {
    /// Every entry of workers that use `handoff`: how often, by action and record.
    entries: BTreeMap<String, BTreeMap<String, u64>>,
    /// What is known of ids.
    ids: BTreeMap<String, String>,
}

impl Account {
    fn read(env: &TestEnv) -> Self {
        let mut account = Self::default();
        for name in names_in(&env.path("")) {
            let (_, end) = name.rsplit_once('.').unwrap_or_default();
            let text = || fs::read_to_string(env.path(&name)).unwrap();
            match end {
                "put" | "take" => {
                    for line in text().lines() {
                        let words: Vec<&str> = line.split(' ').collect();
                        account.add(words[0], words[1]);
                        if words[2] != "-" {
                            let other = account.ids.insert(words[2].to_owned(), words[1].to_owned());
                            assert!(other.is_none_or(|other| other == words[1]), "one id of two: {line}");
                        }
                    }
                }
                "old-put" => text().lines().for_each(|n| account.add("old-put", n)),
                "old-take" => text().lines().for_each(|n| account.add("took", n)),
                _ => {}
            }
        }
        account
    }

    fn add(&mut self, action: &str, n: &str) {
        *self.entries.entry(action.to_owned()).or_default().entry(n.to_owned()).or_default() += 1;
    }

    fn count(&self, action: &str, n: &str) -> u64 {
        self.entries.get(action).and_then(|entries| entries.get(n)).copied().unwrap_or(0)
    }

    fn all(&self, action: &str) -> BTreeSet<&str> {
        self.entries.get(action).into_iter().flat_map(|entries| entries.keys()).map(String::as_str).collect()
    }
}

/// The records that are in the queue, by their `n`.
fn in_queue(env: &TestEnv) -> BTreeMap<String, Value> {
    let mut records = BTreeMap::new();
    for line in fs::read_to_string(env.path("queue.jsonl")).unwrap().lines() {
        let record: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        if let Some(n) = record["payload"]["n"].as_str() {
            let n = n.to_owned();
            assert!(records.insert(n, record).is_none(), "twice in the queue: {line}");
        }
    }
    records
}

fn samples(env: &TestEnv) -> Samples {
    let run = run(env.exporter().args(["--stdout", "--lock-timeout", "60s"]));
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    run.samples()
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counts are small and whole")]
fn total(samples: &Samples, name: &str, labels: &[(&str, &str)]) -> u64 {
    sum(samples, name, labels).round() as u64
}

/// Lets workers go on until all of these have ended well.
fn wait_for(env: &TestEnv, workers: &mut [Worker], patience: Duration) {
    let started = Instant::now();
    while !workers.iter_mut().all(|worker| worker.has_finished(env)) {
        assert!(started.elapsed() < patience, "the workers don't get to their end");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn the_load_under_which_the_old_workers_lose_most_records_loses_none_and_takes_none_twice() {
    let env = TestEnv::new();
    env.write("queue.jsonl", "");
    let each = if is_long() { 2_000 } else { 150 };
    let mut producers = ["p0", "p1"].map(|name| Worker::put(&env, name, each, usize::MAX));
    let takers = ["t0", "t1"].map(|name| Worker::take(&env, name, "0"));
    wait_for(&env, &mut producers, PATIENCE * 10);
    takers.into_iter().for_each(Worker::finish);
    let (account, left) = (Account::read(&env), in_queue(&env));
    assert_eq!(account.all("put").len(), 2 * each);
    for n in account.all("put") {
        let counts = ["put", "took", "done"].map(|action| account.count(action, n));
        assert_eq!(counts, [1; 3], "{n}");
        assert_eq!(left[n]["status"], "done", "{n}");
    }
    assert_eq!((left.len(), account.ids.len()), (2 * each, 2 * each));
    assert!(producers.iter().all(|producer| producer.lives == 1), "a producer has failed");
}

/// What brings records back whose takers are dead, and tries some again that were given up.
struct Keeper<'a> {
    env: &'a TestEnv,
    client: Client,
    random: Random,
    /// How often each record was brought back.
    returned: BTreeMap<String, u64>,
    reclaimed: u64,
    requeued: u64,
}

/// Numbers that need not be good, only different.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

fn now() -> Timestamp {
    let since_epoch = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
    Timestamp::from_micros(i64::try_from(since_epoch.as_micros()).unwrap())
}

impl<'a> Keeper<'a> {
    fn new(env: &'a TestEnv) -> Self {
        let mut options = ReadOptions::default();
        options.lock_timeout = Duration::from_secs(60);
        let client = Client { files: QueueFiles::beside(env.path("queue.jsonl")), options };
        Self { env, client, random: Random(1), returned: BTreeMap::new(), reclaimed: 0, requeued: 0 }
    }

    /// Looks after the queue once. Returns whether there is a record that has not ended.
    fn look(&mut self) -> bool {
        let records = in_queue(self.env);
        for (n, record) in &records {
            let is_given_up = matches!(record["status"].as_str(), Some("human" | "dead"));
            let is_orphan = record["status"] == "running" && !is_alive(&record["owner"]);
            // Some of those that were given up are tried again, though not for ever.
            let chance = if is_orphan { 2 } else { 20 };
            if (is_orphan || is_given_up && self.returned.get(n).is_none_or(|times| *times < 2))
                && self.random.below(chance) == 0
            {
                let id = record["id"].as_str().unwrap();
                let requeue = run(self.env.bare_handoff().args(["requeue", "--queue", "queue.jsonl", id]));
                if requeue.code == Some(65) && in_queue(self.env).get(n) != Some(record) {
                    // Its taker has finished it, and ended, since we looked.
                    continue;
                }
                assert_eq!((requeue.code, requeue.stderr.as_str()), (Some(0), ""), "requeue {record}");
                *self.returned.entry(n.clone()).or_default() += 1;
                self.requeued += 1;
            }
        }
        let (reclaimed, _) = self.client.reclaim("researcher", now()).unwrap();
        self.reclaimed += reclaimed.len() as u64;
        for changed in reclaimed {
            let record: Value = serde_json::from_str(&changed.line).unwrap();
            assert_eq!(record["nacks"].as_array().unwrap().last().unwrap()["error_class"], "worker_died");
            *self.returned.entry(record["payload"]["n"].as_str().unwrap().to_owned()).or_default() += 1;
        }
        records.values().any(|record| matches!(record["status"].as_str(), Some("queued" | "running")))
    }
}

fn is_alive(owner: &Value) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", owner["pid"])).unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields.get(19).is_some_and(|start| start.parse().ok() == owner["start_time"].as_u64()) && fields[0] != "Z"
}

/// How large a soak is.
struct Size {
    producers: usize,
    takers: usize,
    /// Records for each producer.
    each: usize,
    between_kills: u64,
    between_others: Duration,
    patience: Duration,
}

#[test]
fn every_record_ends_once_whatever_is_killed_and_no_counter_falls() {
    let size = if is_long() {
        Size {
            producers: 8,
            takers: 4,
            each: 12_500,
            between_kills: 1_500,
            between_others: Duration::from_secs(1),
            patience: Duration::from_secs(4 * 3_600),
        }
    } else {
        Size {
            producers: 4,
            takers: 3,
            each: 250,
            between_kills: 1_000,
            between_others: Duration::from_millis(500),
            patience: PATIENCE,
        }
    };
    let env = TestEnv::in_memory();
    for name in ["queue.jsonl", "puts", "ends"] {
        env.write(name, "");
    }
    let names = |letter: &str, count: usize| (0..count).map(|n| format!("{letter}{n}")).collect::<Vec<_>>();
    let mut producers: Vec<Worker> =
        names("p", size.producers).iter().map(|name| Worker::put(&env, name, size.each, 60)).collect();
    let mut takers: Vec<Worker> = names("t", size.takers).iter().map(|name| Worker::take(&env, name, "8")).collect();
    let (is_over, mut keeper, mut kills) = (AtomicBool::new(false), Keeper::new(&env), 0);
    let started = Instant::now();

    let (runs, compactions, nacks) = thread::scope(|scope| {
        let exporting = scope.spawn(|| export_until(&env, &is_over, size.between_others));
        let compacting = scope.spawn(|| compact_until(&env, &is_over, size.between_others));
        // If this thread panics the others must end too.
        let end = EndOnDrop(&is_over);
        let mut random = Random(7);
        let mut next_kill = Instant::now();
        loop {
            assert!(started.elapsed() < size.patience, "the soak does not come to its end");
            // All of them must be looked at.
            let finished: Vec<bool> =
                producers.iter_mut().chain(&mut takers).map(|worker| worker.has_finished(&env)).collect();
            let are_done = finished[..size.producers].iter().all(|finished| *finished);
            let is_at_work = keeper.look();
            if are_done && !is_at_work {
                break;
            }
            if Instant::now() >= next_kill && !are_done {
                let victim = usize::try_from(random.below((size.producers + size.takers) as u64)).unwrap();
                producers.iter().chain(&takers).nth(victim).unwrap().kill();
                kills += 1;
                next_kill = Instant::now() + Duration::from_millis(random.below(size.between_kills));
            }
            thread::sleep(Duration::from_millis(100));
        }
        drop(end);
        let (runs, nacks) = exporting.join().unwrap();
        (runs, compacting.join().unwrap(), nacks)
    });
    let lives: u64 = takers.iter().map(|taker| taker.lives).sum();
    for taker in &mut takers {
        // One may just be in trouble, with nothing taken.
        let code = taker.process.as_mut().unwrap().exit_code();
        assert!(matches!(code, Some(0 | 9)), "a taker has ended with {code:?}");
    }
    assert!(!keeper.look(), "a record has not ended");
    let last = samples(&env);
    let (account, left) = (Account::read(&env), in_queue(&env));
    assert_each_ended_once(&account, &left, &keeper.returned);
    assert_totals(&last, &account, &left);
    assert!(total(&last, "handoff_nacks_total", &[]) >= nacks, "counters fell in the end");
    tell(&format!(
        "{} records in {:?}: {kills} kills, {lives} lives of takers, {} requeued, {} reclaimed, {runs} exports, {compactions} compactions, {} records left",
        account.all("put").len(),
        started.elapsed(),
        keeper.requeued,
        keeper.reclaimed,
        left.len()
    ));
    assert!(kills > 5 && lives > 5 && keeper.requeued > 3 && keeper.reclaimed > 3 && runs > 5 && compactions > 5);
}

struct EndOnDrop<'a>(&'a AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Reads the exporter's counters again and again, none of which may fall. Returns how often, and the nacks of the last time.
fn export_until(env: &TestEnv, is_over: &AtomicBool, pause: Duration) -> (u64, u64) {
    let (mut runs, mut before) = (0, Samples::new());
    while !is_over.load(Ordering::Relaxed) {
        let all = samples(env);
        assert_eq!(total(&all, "handoff_queue_malformed_lines", &[]), 0);
        let now = counters(all);
        for (series, before) in &before {
            let now = now.get(series).copied();
            // Sums of fractions are exact until they are printed.
            assert!(now.is_some_and(|now| now >= *before), "run {runs}: {series} is {now:?} after {before}");
        }
        before = now;
        runs += 1;
        thread::sleep(pause);
    }
    (runs, total(&before, "handoff_nacks_total", &[]))
}

/// Removes what is done, again and again.
fn compact_until(env: &TestEnv, is_over: &AtomicBool, pause: Duration) -> u64 {
    let mut runs = 0;
    while !is_over.load(Ordering::Relaxed) {
        let mut compact = env.bare_compact();
        compact.args([
            "--queue",
            "queue.jsonl",
            "--textfile-dir",
            "textfile",
            "--older-than",
            "0s",
            "--lock-timeout",
            "60s",
        ]);
        let run = run(&mut compact);
        assert_eq!(run.code, Some(0), "{}", run.stderr);
        runs += 1;
        thread::sleep(pause);
    }
    runs
}

fn assert_each_ended_once(account: &Account, left: &BTreeMap<String, Value>, returned: &BTreeMap<String, u64>) {
    let mut problems = Vec::new();
    for n in account.all("put") {
        let count = |action: &str| account.count(action, n);
        let status = left.get(n).map(|record| record["status"].as_str().unwrap());
        // What is not in the queue any more was removed, and that is done.
        let is_done = status.is_none_or(|status| status == "done");
        if !is_done && !matches!(status, Some("human" | "dead")) {
            problems.push(format!("{n} has not ended: {status:?}"));
        }
        if is_done && count("begin-done") == 0 {
            problems.push(format!("{n} is gone or done ({status:?}), but nobody has finished it"));
        }
        if count("put") > 1 || count("done") > 1 || count("done") == 1 && !is_done {
            problems.push(format!(
                "{n} was put {} times, done {} times, and is {status:?}",
                count("put"),
                count("done")
            ));
        }
        // To be taken again it must have been refused, perhaps by a client that was killed, or brought back.
        let ends = count("begin-nack") + returned.get(n).copied().unwrap_or(0);
        if count("took") > 1 + ends {
            problems.push(format!("{n} was taken {} times, but given back only {ends} times", count("took")));
        }
        let nacks = left.get(n).and_then(|record| record["nacks"].as_array()).map_or(0, Vec::len) as u64;
        if nacks < count("nack") {
            problems.push(format!("{n} was refused {} times, of which {nacks} are kept", count("nack")));
        }
    }
    let begun = account.all("begin-put");
    problems.extend(left.keys().filter(|n| !begun.contains(n.as_str())).map(|n| format!("{n} was put by nobody")));
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
}

fn assert_totals(samples: &Samples, account: &Account, left: &BTreeMap<String, Value>) {
    // A put whose producer was killed is there if anybody has seen it.
    let mut seen = account.all("put");
    seen.extend(account.all("took"));
    seen.extend(left.keys().map(String::as_str));
    assert_eq!(total(samples, "handoff_records_total", &[]), seen.len() as u64, "records");
    let is_done = |n: &&&str| left.get(**n).is_none_or(|record| record["status"] == "done");
    let done = seen.iter().filter(is_done).count() as u64;
    assert_eq!(total(samples, "handoff_finished_total", &[("outcome", "done")]), done, "done");
    let nacks = |record: &Value| record["nacks"].as_array().map_or(0, Vec::len) as u64;
    assert_eq!(total(samples, "handoff_nacks_total", &[]), left.values().map(nacks).sum::<u64>(), "nacks");
    let dead = left.values().filter(|record| record["status"] == "dead").count() as u64;
    assert!(total(samples, "handoff_finished_total", &[("outcome", "dead")]) >= dead, "dead");
    // Each take is a wait, also those of which nobody has seen the output.
    let took: u64 = account.entries["took"].values().sum();
    assert!(total(samples, "handoff_queue_wait_seconds_count", &[]) >= took, "waits");
    assert_eq!(total(samples, "handoff_spend_usd_total", &[("role", "none")]), 0);
    let spend = sum(samples, "handoff_spend_usd_total", &[]);
    let expected = f64::from(u32::try_from(done).unwrap()) / 1_000.0;
    assert!((spend - expected).abs() < 1e-6, "{spend} USD were spent, not {expected}");
}

// ---- beside existing workers ----

const FEW: usize = 60;

#[test]
fn what_python_puts_without_the_lock_is_taken_by_handoff_once_and_none_is_lost() {
    let env = TestEnv::new();
    env.write("queue.jsonl", "");
    let takers = ["t0", "t1"].map(|name| Worker::take(&env, name, "0"));
    let mut producers = ["o0", "o1"].map(|name| Worker::old_put(&env, name, 2 * FEW));
    wait_for(&env, &mut producers, PATIENCE);
    takers.into_iter().for_each(Worker::finish);
    let (account, left) = (Account::read(&env), in_queue(&env));
    assert_eq!(account.all("old-put").len(), 4 * FEW);
    for n in account.all("old-put") {
        assert_eq!(["took", "done"].map(|action| account.count(action, n)), [1; 2], "{n}");
        assert_eq!(left[n]["status"], "done", "{n}");
    }
}

#[test]
fn what_handoff_puts_beside_python_takes_is_taken_once_by_either() {
    let env = TestEnv::new();
    env.write("queue.jsonl", "");
    let mut producers = ["p0", "p1"].map(|name| Worker::put(&env, name, FEW, usize::MAX));
    let takers = [Worker::old_take(&env, "o0"), Worker::take(&env, "t0", "0"), Worker::old_take(&env, "o1")];
    wait_for(&env, &mut producers, PATIENCE);
    takers.into_iter().for_each(Worker::finish);
    let (account, left) = (Account::read(&env), in_queue(&env));
    assert_eq!(account.all("put").len(), 2 * FEW);
    for n in account.all("put") {
        assert_eq!(account.count("took", n), 1, "{n}");
        let done = if account.count("done", n) == 1 { "done" } else { "running" };
        assert_eq!(left[n]["status"], done, "{n}");
    }
    let by_python = account.all("put").len() - account.all("done").len();
    // Whose turn it is nobody can tell, but both have had theirs.
    assert!(by_python > 0 && by_python < 2 * FEW, "{by_python} were taken by Python");
}

/// Python's own take loses what Python's own put appends in the middle of it. What `handoff` has put is never among that.
#[test]
fn beside_python_that_loses_its_own_records_those_of_handoff_are_safe() {
    let env = TestEnv::new();
    env.write("queue.jsonl", "");
    let takers = [Worker::old_take(&env, "o0"), Worker::take(&env, "t0", "0")];
    let mut producers = [
        Worker::old_put(&env, "q0", 4 * FEW),
        Worker::old_put(&env, "q1", 4 * FEW),
        Worker::put(&env, "p0", FEW, usize::MAX),
    ];
    wait_for(&env, &mut producers, PATIENCE);
    // Killed in the middle of a take, the old one would lose all of the queue.
    takers.into_iter().for_each(Worker::finish);
    // Whatever lines are none are Python's own.
    let queue = fs::read_to_string(env.path("queue.jsonl")).unwrap();
    let records: Vec<Value> = queue.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let left: BTreeSet<&str> = records.iter().filter_map(|record| record["payload"]["n"].as_str()).collect();
    let account = Account::read(&env);
    assert_eq!(account.all("put").len(), FEW);
    for n in account.all("put") {
        assert_eq!(account.count("took", n), 1, "{n}");
        assert!(left.contains(n), "{n} was put and taken, and is not in the queue");
    }
    let twice: Vec<_> = account.entries["took"].iter().filter(|(_, times)| **times > 1).collect();
    assert!(twice.is_empty(), "taken twice: {twice:?}");
    let lost = account.all("old-put").iter().filter(|n| account.count("took", n) == 0 && !left.contains(*n)).count();
    tell(&format!("Python has lost {lost} of the {} records that it put", account.all("old-put").len()));
}
