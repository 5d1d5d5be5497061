//! Offload beside workers, beside compaction, and beside the pruning of the store that it puts blobs into: no line is lost, and none is left
//! without its blob.

use std::fs::{self, File, FileTimes};
use std::path::Path;
use std::process::Command;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use queue_format::format::blob::Digest;
use queue_format::format::offload::Rule;
use queue_format::format::time::Timestamp;
use queue_format::store::files::QueueFiles;
use queue_format::store::offload::offload;
use queue_format::store::prune::prune;
use queue_format::store::scan::ReadOptions;
use serde_json::Value;
use tempfile::TempDir;

use crate::exposition::value;
use crate::kill_and_inject::Call;
use crate::offloaded::{Oversized, entries, references};
use crate::race::{
    Contents, Race, Runs, Seen, WITH_TORN_LINES, WITHOUT_TORN_LINES, assert_nothing_lost, assert_only_takes_lose,
    kept_before, wait_until,
};
use crate::strace::{changes_something, own_calls, stop_after, traced, with_stops};
use crate::test_env::{Background, Run, TestEnv, append, in_tests, names_in, python, run, tell, tool, under};

// One who puts and one who prunes, at chosen moments.

const LONG_AGO: Duration = Duration::from_secs(100 * 24 * 60 * 60);

/// A directory with queues that share a store.
struct Place {
    env: TestEnv,
    oversized: Oversized,
}

impl Place {
    /// The queue has these lines. There is another, which is empty, and whose pruning looks into the same store.
    fn new(lines: &[&str]) -> Self {
        let env = TestEnv::new();
        let oversized = Oversized::new(&env, "");
        env.write("queue.jsonl", lines.iter().map(|name| oversized.old(name).to_owned() + "\n").collect::<String>());
        env.write("other.jsonl", "");
        for lock in ["queue.lock", "other.lock"] {
            env.write(lock, "");
        }
        Self { env, oversized }
    }

    /// Lays a blob that has been in the store for long.
    fn lay(&self, name: &str) {
        let store = self.env.path("blob");
        self.oversized.lay(&store, name);
        make_old(&store.join(&name[..2]).join(name));
    }

    /// The blob of a line that has one value to be moved.
    fn blob_of(&self, line: &str) -> String {
        self.oversized.blobs_of(line).pop_first().unwrap()
    }

    fn has(&self, blob: &str) -> bool {
        self.oversized.check_blob(&self.env.path("blob"), blob).is_ok()
    }

    /// A run that moves values, and removes nothing.
    fn putting(&self) -> Command {
        let mut offload = self.env.offload_now();
        offload.args(["-q", "--prune-after", "1000d"]);
        offload
    }

    /// A run that moves nothing, and removes whatever nothing refers to.
    fn pruning(&self, queue: &str) -> Command {
        let mut offload = self.env.bare_offload();
        offload.args([
            "--queue",
            queue,
            "--textfile-dir",
            "textfile",
            "-q",
            "--max-bytes",
            "1GiB",
            "--prune-after",
            "0s",
        ]);
        offload
    }

    /// Asserts that the queue has these lines as they should become, but for those that `stay`, and that each reference leads to its blob.
    fn assert_lines(&self, lines: &[&str], stay: &[&str], context: &str) {
        let queue = fs::read_to_string(self.env.path("queue.jsonl")).unwrap();
        let found: Vec<&str> = queue.lines().filter(|line| !line.starts_with(r#"{"id":"ledger""#)).collect();
        let of = |name: &&str| {
            if stay.contains(name) { self.oversized.old(name) } else { self.oversized.new_of(name) }
        };
        assert_eq!(found, lines.iter().map(of).collect::<Vec<_>>(), "{context}");
        self.oversized.check_references(&self.env.path("")).unwrap_or_else(|problem| panic!("{context}: {problem}"));
    }
}

fn make_old(file: &Path) {
    let file = File::options().write(true).open(file).unwrap();
    file.set_times(FileTimes::new().set_modified(SystemTime::now() - LONG_AGO)).unwrap();
}

fn well(run: &Run, context: &str) {
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{context}");
}

/// The calls of a command in a place like this.
fn calls_of(place: &Place, command: &Command) -> Vec<Call> {
    let (run, trace) = traced(&place.env, command, &["-y"]);
    well(&run, "traced");
    own_calls(&trace)
}

/// The argument for strace(1) that stops a process before the first call that `is` so.
fn stop_before(calls: &[Call], is: impl Fn(&Call) -> bool) -> String {
    let place = calls.iter().position(is).unwrap_or_else(|| panic!("there is no such call: {calls:#?}"));
    stop_after(&calls[place - 1].name, &calls[place - 1].number.to_string())
}

fn locks_alone(call: &Call, what: &str) -> bool {
    call.name == "flock" && call.line.contains("LOCK_EX") && call.line.contains(&format!("/{what}>,"))
}

/// Prunes with a stop between its look at the lines and its locks, and `meanwhile` in that stop.
fn prune_with_stop_before_its_locks(place: &Place, model: &Place, queue: &str, meanwhile: impl FnOnce()) {
    let calls = calls_of(model, &model.pruning(queue));
    let stop = stop_before(&calls, |call| locks_alone(call, "blob"));
    let mut meanwhile = Some(meanwhile);
    let (run, _, stops) =
        with_stops(&place.env, &place.pruning(queue), &["-e", &stop], |_| meanwhile.take().unwrap()());
    well(&run, "pruning");
    assert_eq!(stops, 1);
}

#[test]
fn a_blob_that_is_put_again_while_somebody_is_about_to_remove_it_stays() {
    for queue in ["queue.jsonl", "other.jsonl"] {
        let [place, model] = [(); 2].map(|()| {
            let place = Place::new(&["one"]);
            place.lay(&place.blob_of("one"));
            place
        });
        prune_with_stop_before_its_locks(&place, &model, queue, || {
            well(&run(&mut place.putting()), "putting");
        });
        place.assert_lines(&["one"], &[], queue);
        assert!(!model.has(&model.blob_of("one")), "without a put it is removed");
    }
}

#[test]
fn a_blob_that_a_line_comes_to_refer_to_while_somebody_is_about_to_remove_it_stays() {
    for queue in ["queue.jsonl", "other.jsonl"] {
        let [place, model] = [(); 2].map(|()| {
            let place = Place::new(&["small"]);
            place.lay(&place.blob_of("handle"));
            place
        });
        prune_with_stop_before_its_locks(&place, &model, queue, || {
            append(&place.env, "queue.jsonl", &(place.oversized.new_of("handle").to_owned() + "\n"));
        });
        place.assert_lines(&["small", "handle"], &[], queue);
        assert!(!model.has(&model.blob_of("handle")), "without a line it is removed");
    }
}

/// Has a line come that is moved to a blob which alone refers to an old one, while somebody is about to remove that.
fn assert_new_blob_keeps_inner(place_with: impl Fn() -> Place) {
    for queue in ["queue.jsonl", "other.jsonl"] {
        let [place, model] = [(); 2].map(|()| {
            let place = place_with();
            place.lay(&place.oversized.other("inner"));
            place
        });
        let inner = place.oversized.other("inner");
        prune_with_stop_before_its_locks(&place, &model, queue, || {
            append(&place.env, "queue.jsonl", &(place.oversized.old("refers").to_owned() + "\n"));
            // The second run removes the generation, which has the line as it was.
            for _ in 0..2 {
                well(&run(&mut place.putting()), "putting");
            }
        });
        place.assert_lines(&["small", "refers"], &[], queue);
        let lines = fs::read(place.env.path("queue.jsonl")).unwrap();
        assert!(!references(&lines).contains(&inner), "a line refers to it by itself");
        assert!(place.has(&inner), "{queue}: a blob of the queue refers to {inner}");
        assert!(!model.has(&inner), "without a put it is removed");
    }
}

#[test]
fn a_blob_that_only_a_new_blob_refers_to_while_somebody_is_about_to_remove_it_stays() {
    assert_new_blob_keeps_inner(|| Place::new(&["small"]));
}

#[test]
fn who_puts_waits_for_who_is_removing_the_same_blob() {
    for queue in ["queue.jsonl", "other.jsonl"] {
        let [place, model] = [(); 2].map(|()| {
            let place = Place::new(&["one"]);
            place.lay(&place.blob_of("one"));
            place
        });
        let calls = calls_of(&model, &model.pruning(queue));
        for stop in [stop_before(&calls, |call| call.name == "unlinkat"), stop_after("unlinkat", "1")] {
            let place = Place::new(&["one"]);
            place.lay(&place.blob_of("one"));
            let mut putting = None;
            let (run, _, stops) = with_stops(&place.env, &place.pruning(queue), &["-e", &stop], |_| {
                let process = Background::spawn(&mut place.putting());
                wait_until("who puts waits", || waits_for_a_lock(process.id()));
                putting = Some(process);
            });
            well(&run, queue);
            assert_eq!(stops, 1);
            putting.unwrap().finish();
            place.assert_lines(&["one"], &[], queue);
        }
        drop(place);
    }
}

/// Whether a process waits for a lock that another holds.
fn waits_for_a_lock(process: u32) -> bool {
    let locks = fs::read_to_string("/proc/locks").unwrap();
    locks.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).any(|fields| {
        // "1: -> FLOCK ADVISORY READ 1234 08:01:131090 0 EOF"
        fields.get(1) == Some(&"->") && fields.get(5).is_some_and(|id| *id == process.to_string())
    })
}

#[test]
fn nobody_removes_a_blob_between_its_put_and_the_line_that_refers_to_it() {
    // "one" has its blob in the store already, "result" has not.
    let lines = ["one", "result"];
    let place = || {
        let place = Place::new(&lines);
        place.lay(&place.blob_of("one"));
        place
    };
    let model = place();
    let calls = calls_of(&model, &model.putting());
    let first = calls.iter().position(|call| call.name == "utimensat").unwrap();
    let commit =
        calls.iter().position(|call| call.name == "renameat" && call.line.contains("/queue.jsonl\") =")).unwrap();
    let mut busy = 0;
    for (index, call) in calls.iter().enumerate().take(commit + 1).skip(first) {
        if !changes_something(call) && !call.name.contains("lock") {
            continue;
        }
        // Once as a run for the same queue, once for the other: they take different locks, but for the store's.
        for queue in ["queue.jsonl", "other.jsonl"] {
            let context = format!("{queue} pruned after call {index}, {}", call.line);
            let place = place();
            let stop = stop_after(&call.name, &call.number.to_string());
            let (put, _, stops) = with_stops(&place.env, &place.putting(), &["-e", &stop], |_| {
                let pruned = run(place.pruning(queue).args(["--lock-timeout", "50ms"]));
                assert!([Some(0), Some(75)].contains(&pruned.code), "{context}: {}", pruned.stderr);
                busy += usize::from(pruned.code == Some(75));
            });
            well(&put, &context);
            assert_eq!(stops, 1, "{context}");
            place.assert_lines(&lines, &[], &context);
        }
    }
    assert!(busy > 20, "only {busy} runs found the store in use");
}

#[test]
fn a_line_that_comes_when_all_blobs_are_put_waits_for_the_next_run() {
    let model = Place::new(&["one"]);
    let calls = calls_of(&model, &model.putting());
    let stop = stop_before(&calls, |call| locks_alone(call, "queue.lock"));
    let place = Place::new(&["one"]);
    let (put, _, stops) = with_stops(&place.env, &place.putting(), &["-e", &stop], |_| {
        for line in ["several", "duplicates", "small"] {
            append(&place.env, "queue.jsonl", &(place.oversized.old(line).to_owned() + "\n"));
        }
    });
    well(&put, "with a stop");
    assert_eq!(stops, 1);
    let lines = ["one", "several", "duplicates", "small"];
    place.assert_lines(&lines, &["several", "duplicates"], "whose blobs nobody has put");
    well(&run(&mut place.putting()), "the next run");
    place.assert_lines(&lines, &[], "the next run");
}

#[test]
fn what_only_an_earlier_generation_refers_to_stays_as_long_as_that() {
    let place = Place::new(&["small"]);
    // A record was taken out by somebody who knew what they did; the queue as it was is still there.
    let blob = place.blob_of("handle");
    place.lay(&blob);
    place.env.write("queue.gen.1", place.oversized.new_of("handle").to_owned() + "\n");
    for queue in ["other.jsonl", "queue.jsonl"] {
        run(&mut place.pruning(queue));
        assert!(place.has(&blob), "removed by a run for {queue}");
    }
    fs::remove_file(place.env.path("queue.gen.1")).unwrap();
    well(&run(&mut place.pruning("other.jsonl")), "without it");
    assert!(!place.has(&blob), "nothing refers to it any more");
}

// The same again and again, at moments that chance chooses.

/// How often a blob is put and removed at the same time.
const TRIES: usize = 10_000;
/// So many at once.
const PAIRS: usize = 2;
/// Each of the two begins within this time.
const DELAY: Duration = Duration::from_millis(2);

/// What the tries of a pair came to.
#[derive(Clone, Copy, Debug, Default)]
struct Tries {
    tries: usize,
    /// The blob was there still when it was put.
    reused: usize,
    /// It had just been removed, and was written again.
    removed: usize,
}

/// Puts a blob that nothing refers to and that has been there for long, while another removes such blobs.
fn put_and_prune(pair: usize, tries: usize) -> Tries {
    // In memory, where flushing takes no time: what counts here is who comes first.
    let directory = TempDir::with_prefix_in("handoff-test-", "/dev/shm").unwrap();
    let path = |name: &str| directory.path().join(name);
    let (queue, other) = (QueueFiles::beside(path("queue.jsonl")), QueueFiles::beside(path("other.jsonl")));
    fs::write(&other.queue, "").unwrap();
    let now = Timestamp::from_rfc3339("2026-11-29T12:00:00Z").unwrap();
    // So that all that there is will have been put long before.
    let far = Timestamp::from_rfc3339("2200-01-01T00:00:00Z").unwrap();
    let rule = Rule { max_bytes: 1000, preview_bytes: 20 };
    let options = ReadOptions::default();

    let (mut random, mut came_to) = (Random(pair as u64 + 1), Tries { tries, ..Tries::default() });
    let barrier = Barrier::new(2);
    thread::scope(|scope| {
        let other_one = scope.spawn(|| {
            let mut random = Random(1000 + pair as u64);
            (0..tries)
                .map(|number| {
                    barrier.wait();
                    thread::sleep(DELAY.mul_f64(random.fraction()));
                    let files = if number % 2 == 0 { &queue } else { &other };
                    let pruned = prune(files, options.lock_timeout, far).unwrap();
                    barrier.wait();
                    pruned.objects
                })
                .collect::<Vec<u64>>()
        });
        for number in 0..tries {
            let content = format!("{pair} {number} {}", "x".repeat(1000 + random.below(1000)));
            let blob = queue.blobs.join(Digest::of(content.as_bytes()).path());
            fs::create_dir_all(blob.parent().unwrap()).unwrap();
            fs::write(&blob, &content).unwrap();
            make_old(&blob);
            let line = record_with(&content);
            let _ = fs::remove_file(path("queue.gen.1"));
            fs::write(&queue.queue, line + "\n").unwrap();
            barrier.wait();
            thread::sleep(DELAY.mul_f64(random.fraction()));
            let put = offload(&queue, &options, rule, now).unwrap();
            barrier.wait();
            let text = fs::read_to_string(&queue.queue).unwrap();
            assert_eq!(put.counts.records, 1, "try {number}: nothing was moved");
            let referred = references(text.as_bytes());
            assert_eq!(referred.len(), 1, "try {number}: {text}");
            let there =
                fs::read_to_string(&blob).unwrap_or_else(|error| panic!("try {number}: {}: {error}", blob.display()));
            assert!(there == content && blob.ends_with(referred.first().unwrap()), "try {number}: another blob");
            came_to.reused += usize::try_from(put.reused).unwrap();
            came_to.removed += usize::try_from(put.written.objects).unwrap();
            fs::remove_file(&blob).unwrap();
        }
        let gone: u64 = other_one.join().unwrap().iter().sum();
        assert_eq!(usize::try_from(gone).unwrap(), came_to.removed, "removed by one, and written again by the other");
    });
    came_to
}

#[test]
fn in_ten_thousand_tries_no_line_loses_the_blob_that_is_put_while_it_is_removed() {
    let started = Instant::now();
    let all = thread::scope(|scope| {
        let pairs: Vec<_> = (0..PAIRS).map(|pair| scope.spawn(move || put_and_prune(pair, TRIES / PAIRS))).collect();
        pairs.into_iter().map(|pair| pair.join().unwrap()).collect::<Vec<_>>()
    });
    let sum = |of: fn(&Tries) -> usize| all.iter().map(of).sum::<usize>();
    let (tries, reused, removed) = (sum(|all| all.tries), sum(|all| all.reused), sum(|all| all.removed));
    tell(&format!("{tries} tries in {:?}: reused {reused}, removed and written again {removed}", started.elapsed()));
    assert!(tries >= TRIES && reused > TRIES / 20 && removed > TRIES / 20, "{all:?}");
}

fn record_with(content: &str) -> String {
    format!(
        r#"{{"id":"a","ts":1764400000,"kind":"classify","from":"triage","to":"researcher","payload":{{"x":"{content}"}},"status":"queued"}}"#
    )
}

/// Numbers that look random, and are the same each time (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % limit as u64).unwrap()
    }

    fn fraction(&mut self) -> f64 {
        f64::from(u32::try_from(self.next() >> 32).unwrap()) / f64::from(u32::MAX)
    }
}

// Everybody at once.

/// How long the workers of the great race are at work.
const LOAD: Duration = Duration::from_secs(60);
/// How long those of the others are.
const SHORT_LOAD: Duration = Duration::from_secs(20);

/// What runs of offload said they did.
#[derive(Debug, Default)]
struct Offloads {
    runs: u64,
    commits: u64,
    values: u64,
    written: u64,
    reused: u64,
    pruned: u64,
    late: u64,
}

impl Offloads {
    /// Runs offload once, which must succeed. One run in three keeps blobs that nothing refers to.
    fn offload(&mut self, env: &TestEnv) {
        let grace = if self.runs % 3 == 2 { "14d" } else { "0s" };
        let run = run(env.offload_now().args(["--json", "-q", "--prune-after", grace]));
        assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "offload failed or complains");
        let said: Value = serde_json::from_slice(&run.stdout).unwrap();
        let number = |pointer| said.pointer(pointer).and_then(Value::as_u64).unwrap();
        self.runs += 1;
        self.commits += u64::from(said["replaced"].as_bool().unwrap());
        self.values += number("/moved/values");
        self.written += number("/blobs/written");
        self.reused += number("/blobs/reused");
        self.pruned += number("/pruned/objects");
        self.late += number("/late/lines");
    }
}

/// Runs the exporter again and again: it never finds a reference without its blob.
fn export_for(time: Duration, env: &TestEnv) -> u64 {
    let (started, mut runs) = (Instant::now(), 0);
    while started.elapsed() < time {
        let run = run(env.exporter().arg("--stdout"));
        assert_eq!(run.code, Some(0), "{}", run.stderr);
        let missing = value(&run.samples(), "handoff_blob_missing_references", &[]);
        assert!(missing.abs() < 0.5, "run {runs}: {missing} references to blobs that are missing: {}", run.stderr);
        runs += 1;
    }
    runs
}

/// Asserts that each reference in the queue and in its generations leads to a blob that holds what a producer has put, and returns how many
/// there are.
fn assert_blobs(env: &TestEnv) -> usize {
    let mut contents = Contents::default();
    contents.read_accounts(env);
    let mut count = 0;
    for file in names_in(&env.path("")) {
        if file == "queue.jsonl" || file.starts_with("queue.gen.") {
            for name in references(&fs::read(env.path(&file)).unwrap()) {
                let value = contents.values.get(&name).unwrap_or_else(|| panic!("{file}: nobody has put {name}"));
                let content = serde_json::from_str::<String>(value).unwrap_or_else(|_| value.clone());
                let blob = env.path("blob").join(&name[..2]).join(&name);
                let found =
                    fs::read_to_string(&blob).unwrap_or_else(|error| panic!("{file}: {}: {error}", blob.display()));
                assert!(found == content, "{file}: {name} holds something else");
                count += 1;
            }
        }
    }
    count
}

/// Brings everything to rest: all is taken over, moved, and in its blob.
fn settle(race: &Race, offloads: &mut Offloads, runs: &mut Runs, seen: &mut Seen, most_left: &[usize]) {
    let referred = assert_blobs(&race.env);
    offloads.offload(&race.env);
    seen.read_generations(&race.env);
    race.settle(runs, seen, most_left);
    for _ in 0..2 {
        offloads.offload(&race.env);
        seen.read_generations(&race.env);
    }
    let samples = race.env.samples();
    let oversized = value(&samples, "handoff_queue_oversized_records", &[]);
    assert!(oversized.abs() < 0.5, "{oversized} records are oversized still");
    let left = assert_blobs(&race.env);
    assert!(referred > 50 && left > 20, "{referred} references, and {left} in the end");
    let temporary: Vec<_> =
        entries(&race.env.path("blob")).into_iter().filter(|entry| entry.name.starts_with('.')).collect();
    assert!(temporary.is_empty(), "temporary files are left in the store");
}

fn race() -> Race {
    let mut race = Race::new();
    race.large = true;
    race
}

#[test]
fn a_minute_beside_workers_compaction_and_the_exporter_loses_only_what_takes_lose_by_themselves() {
    let mut race = race();
    let (mut offloads, mut runs, mut seen) = (Offloads::default(), Runs::default(), Seen::default());
    race.env.write("queue.jsonl", kept_before());
    race.stop_two(&mut runs, &mut seen);
    race.start(&["put", "put", "put", "take"]);
    let (started, before) = (Instant::now(), runs.late);
    let exports = thread::scope(|scope| {
        let exporting = scope.spawn(|| export_for(LOAD, &race.env));
        // One after the other: what each has had in its hands can be read only until the next.
        while started.elapsed() < LOAD {
            offloads.offload(&race.env);
            seen.read_generations(&race.env);
            runs.compact(&race.env, &mut seen);
        }
        exporting.join().unwrap()
    });
    let late = runs.late - before + offloads.late;
    race.finish();
    settle(&race, &mut offloads, &mut runs, &mut seen, WITH_TORN_LINES);
    let losses = assert_only_takes_lose(&race, &mut seen);
    tell(&format!("{losses}; {exports} exports; {late} lines late during the load; {offloads:?}; {runs:?}"));
    assert!(offloads.commits > 20 && runs.commits > 20 && late > 20 && losses.takes > 50 && exports > 50);
    assert!(offloads.written > 50 && offloads.reused > 20 && offloads.pruned > 20);
}

/// Races two offloads with each other and with compaction, all at any time, and with these workers, which lose nothing by themselves.
fn race_with(actions: &[&str]) {
    let mut race = race();
    let (mut offloads, mut runs, mut seen) = (Offloads::default(), Runs::default(), Seen::default());
    race.start(actions);
    let exports = thread::scope(|scope| {
        scope.spawn(|| {
            let (started, mut others) = (Instant::now(), Offloads::default());
            while started.elapsed() < SHORT_LOAD {
                others.offload(&race.env);
            }
        });
        let exporting = scope.spawn(|| export_for(SHORT_LOAD, &race.env));
        let compacting = scope.spawn(|| {
            let started = Instant::now();
            let mut runs = Runs::default();
            while started.elapsed() < SHORT_LOAD {
                runs.compact_unseen(&race.env);
            }
            runs
        });
        let started = Instant::now();
        while started.elapsed() < SHORT_LOAD {
            offloads.offload(&race.env);
        }
        runs = compacting.join().unwrap();
        exporting.join().unwrap()
    });
    race.finish();
    settle(&race, &mut offloads, &mut runs, &mut seen, WITHOUT_TORN_LINES);
    assert_nothing_lost(&race, &format!("beside {actions:?}"));
    let puts = race.account().puts.len();
    tell(&format!("beside {actions:?}: {puts} puts; {exports} exports; {offloads:?}; {runs:?}"));
    assert!(offloads.commits > 10 && runs.commits > 10 && exports > 10 && puts > 100);
    assert!(offloads.written > 30 && offloads.reused > 5 && offloads.pruned > 10);
}

#[test]
fn beside_compaction_and_producers_without_the_lock_nothing_is_lost() {
    race_with(&["put"; 4]);
}

#[test]
fn beside_compaction_and_workers_that_all_take_the_lock_nothing_is_lost() {
    race_with(&["lput", "lput", "lput", "take", "take"]);
}

// What is beside the queue.

#[test]
fn a_take_of_another_queue_that_is_in_the_middle_of_its_rewriting_costs_it_no_blob() {
    let place = Place::new(&["small"]);
    let blob = place.blob_of("handle");
    place.lay(&blob);
    let line = place.oversized.new_of("handle").to_owned() + "\n";
    // Its worker has cut the other queue under its lock, as old ones do, and is about to write it anew.
    let mut holder = place.env.command(python());
    holder.arg(in_tests("workers/hold_lock.py")).args(["other.lock", "exclusive"]);
    let (taking, _) = Background::spawn_and_wait_for_line(&mut holder);
    let pruned = run(place.pruning("queue.jsonl").args(["--lock-timeout", "200ms"]));
    place.env.write("other.jsonl", line);
    taking.finish();
    assert!(place.has(&blob), "{:?}: {blob} is gone, and the other queue refers to it", pruned.code);
}

#[test]
fn a_file_that_grows_as_it_is_read_keeps_nobody_waiting() {
    let place = Place::new(&["small"]);
    place.lay(&place.oversized.other("old-orphan"));
    // A trace in the directory has something added for each piece of it that is read.
    let mut strace = place.env.command(tool("strace", "strace"));
    strace.args(["-f", "-o", "growing.log"]);
    let mut pruning = Background::spawn(&mut under(strace, &place.pruning("queue.jsonl")));
    let started = Instant::now();
    while !pruning.has_ended() {
        assert!(started.elapsed() < Duration::from_secs(10), "it reads a file that grows, and will not end");
        thread::sleep(Duration::from_millis(10));
    }
    pruning.finish();
}

#[test]
fn a_blob_from_the_future_does_not_make_new_ones_look_old() {
    assert_new_blob_keeps_inner(|| {
        let place = Place::new(&["small"]);
        let name = place.oversized.other("recent-orphan");
        place.oversized.lay(&place.env.path("blob"), &name);
        // As one that was copied from a machine with another clock.
        let blob = File::options().write(true).open(place.env.path("blob").join(&name[..2]).join(&name)).unwrap();
        blob.set_times(FileTimes::new().set_modified(SystemTime::now() + Duration::from_secs(3600))).unwrap();
        place
    });
}
