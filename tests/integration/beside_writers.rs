//! The exporter beside workers that write the queue as today's do, with and without the lock.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::exposition::{parse, sum};
use crate::test_env::{Background, TestEnv, in_tests, python, record, run};
use crate::validator::assert_valid;

/// How often the exporter runs beside each set of workers.
const RUNS: usize = 500;
/// Nobody may wait longer than this for the lock. A reading takes milliseconds; the rest is a slow machine.
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// How many records there are before any worker starts. A take that loses what is put while it writes cannot leave a part of
/// it, as long as it writes back more than that.
const BEFORE: u64 = 500;

/// Workers, and the account that they keep.
struct Workers<'a> {
    env: &'a TestEnv,
    processes: Vec<Background>,
}

impl<'a> Workers<'a> {
    fn start(env: &'a TestEnv, actions: &[&str]) -> Self {
        let old: String = (0..BEFORE).map(|number| record(&format!("old-{number}"), "archivist", "done")).collect();
        env.write("queue.jsonl", old);
        let spawn = |(number, action): (usize, &&str)| {
            // Both ways to put keep the same account.
            let log = format!("{}-{number}", action.trim_start_matches('l'));
            let mut command = env.command(python());
            command.arg(in_tests("workers/worker.py")).args([action, "queue.jsonl", &log, "researcher"]);
            Background::spawn(&mut command)
        };
        let mut workers = Self { env, processes: actions.iter().enumerate().map(spawn).collect() };
        // Their account begins with their first puts.
        workers.wait_until(|workers| workers.count("put", "done") >= 20);
        workers
    }

    /// Waits for the workers, all of which must be at work.
    fn wait_until(&mut self, condition: impl Fn(&Self) -> bool) {
        let started = Instant::now();
        while !condition(self) {
            assert!(!self.processes.iter_mut().any(Background::has_ended), "a worker has ended: see its output");
            assert!(started.elapsed() < Duration::from_secs(60), "the workers don't get on");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The account's files for an action, always in the same order.
    fn files(&self, action: &str, what: &str) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(self.env.path(""))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.retain(|name| name.starts_with(&format!("{action}-")) && name.ends_with(&format!(".{what}")));
        names.sort();
        names
    }

    /// How many puts or takes have `begun` or are `done`.
    fn count(&self, action: &str, what: &str) -> u64 {
        self.files(action, what).iter().map(|name| fs::metadata(self.env.path(name)).unwrap().len()).sum()
    }

    /// How many lines the last take wrote back.
    fn lines_written_back(&self) -> u64 {
        numbers(&self.env.path(&self.files("take", "lines")[0])).last().copied().unwrap_or(0)
    }

    /// How many microseconds each of the workers has waited for the lock, time after time.
    fn waits(&self) -> Vec<Vec<u64>> {
        let names = [self.files("put", "waits"), self.files("take", "waits")].concat();
        names.iter().map(|name| numbers(&self.env.path(name))).collect()
    }

    fn finish(self) {
        self.processes.into_iter().for_each(Background::finish);
    }
}

/// The numbers in a file that is being appended to, whole lines only.
fn numbers(path: &Path) -> Vec<u64> {
    let text = fs::read_to_string(path).unwrap();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().map(|line| line.parse().unwrap()).collect()
}

/// What one run of the exporter saw.
struct Seen {
    records: u64,
    running: u64,
    torn: u64,
}

/// Runs the exporter once. `None` if it failed, and said so in its file.
fn export(env: &TestEnv, context: &str) -> Option<Seen> {
    let run = run(env.exporter().args(["--textfile-dir", "textfile"]));
    let contents = fs::read(env.prom()).unwrap();
    assert_valid(&contents, context);
    let samples = parse(&contents);
    let success = sum(&samples, "handoff_exporter_success", &[]) > 0.5;
    assert_eq!(success, run.code == Some(0), "{context}: exit code {:?}: {}", run.code, run.stderr);
    if !success {
        assert!(
            samples.keys().all(|series| !series.name.starts_with("handoff_queue")),
            "{context}: depth after a failure"
        );
        return None;
    }
    Some(Seen {
        records: count(sum(&samples, "handoff_queue_records", &[])),
        running: count(sum(&samples, "handoff_queue_records", &[("status", "running")])),
        torn: count(sum(&samples, "handoff_queue_malformed_lines", &[])),
    })
}

#[test]
fn appends_without_the_lock_are_seen_whole_and_once() {
    let env = TestEnv::new();
    let workers = Workers::start(&env, &["put", "put"]);
    let mut before = 0;
    for number in 0..RUNS {
        let context = format!("run {number}");
        let done = workers.count("put", "done");
        let seen =
            export(&env, &context).unwrap_or_else(|| panic!("{context} failed, though nobody can have hindered it"));
        let begun = workers.count("put", "begun");
        assert!(
            (BEFORE + done..=BEFORE + begun).contains(&seen.records),
            "{context}: {} records, but {done} to {begun} were put",
            seen.records
        );
        assert_eq!(seen.torn, 0, "{context}");
        assert!(seen.records >= before, "{context}: {} records after {before}", seen.records);
        before = seen.records;
    }
    let put = || workers.count("put", "done");
    assert!(put() > 100, "the workers have hardly worked: {} puts", put());
    workers.finish();
}

#[test]
fn under_the_lock_every_record_is_seen_and_nobody_waits_long() {
    let env = TestEnv::new();
    let workers = Workers::start(&env, &["lput", "lput", "take"]);
    std::thread::sleep(Duration::from_secs(1));
    let alone = workers.waits();
    for number in 0..RUNS {
        let context = format!("run {number}");
        let (done, taken) = (workers.count("put", "done"), workers.count("take", "done"));
        let seen =
            export(&env, &context).unwrap_or_else(|| panic!("{context} failed, though it may wait for the lock"));
        let (begun, taking) = (workers.count("put", "begun"), workers.count("take", "begun"));
        assert!(
            (BEFORE + done..=BEFORE + begun).contains(&seen.records),
            "{context}: {} records, but {done} to {begun} were put",
            seen.records
        );
        assert_eq!(seen.torn, 0, "{context}");
        assert!(
            (taken..=taking).contains(&seen.running),
            "{context}: {} running, but {taken} to {taking} were taken",
            seen.running
        );
    }
    assert!(workers.count("take", "done") > 20, "the taker has hardly worked");
    let all = workers.waits();
    let beside: Vec<u64> = all.iter().zip(&alone).flat_map(|(all, alone)| all[alone.len()..].to_vec()).collect();
    assert!(beside.len() > 100, "the lock was taken only {} times", beside.len());
    let longest = |waits: &[u64]| Duration::from_micros(waits.iter().copied().max().unwrap_or(0));
    let (beside, alone) = (longest(&beside), longest(&alone.concat()));
    assert!(beside < LONGEST_WAIT, "somebody waited {beside:?} for the lock; without the exporter it was {alone:?}");
    workers.finish();
}

#[test]
fn beside_takes_that_lose_records_nothing_torn_is_counted() {
    let env = TestEnv::new();
    let mut workers = Workers::start(&env, &["put", "put", "take"]);
    workers.wait_until(|workers| workers.lines_written_back() > 0);
    let mut most_torn = 0;
    let mut failed = 0;
    for number in 0..RUNS {
        let context = format!("run {number}");
        // A take writes back all that it has read: it loses only what is put while it writes.
        let kept = workers.lines_written_back();
        let Some(seen) = export(&env, &context) else {
            failed += 1;
            continue;
        };
        most_torn = most_torn.max(seen.torn);
        let begun = workers.count("put", "begun");
        assert!(
            (kept..=BEFORE + begun).contains(&(seen.records + seen.torn)),
            "{context}: {} records, but {kept} were kept and {begun} put",
            seen.records
        );
    }
    assert!(failed < RUNS / 10, "{failed} of {RUNS} runs failed");
    workers.finish();
    // Where a put and a take tear a line, it stays torn: what was counted as malformed is so to this day.
    let queue = fs::read_to_string(env.path("queue.jsonl")).unwrap();
    let is_torn = |line: &&str| serde_json::from_str::<serde_json::Value>(line).is_err();
    let torn = queue.lines().filter(is_torn).count() as u64;
    assert!(most_torn <= torn, "{most_torn} lines were counted as malformed, but {torn} are");
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counts are small and whole")]
fn count(value: f64) -> u64 {
    value as u64
}
