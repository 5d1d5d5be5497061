//! Offload killed before each system call, and each of them failing: every line is as it was or as it should become, every reference
//! leads to its blob, and the next run leaves no trace.
//!
//! `LONG=1` sweeps more pairs of kills, and lets calls fail that only look.

use std::collections::BTreeSet;
use std::fs::{self, File, FileTimes, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use walkdir::WalkDir;

use crate::exposition::{Samples, differences, parse, value};
use crate::holdings::{assert_same_lines, holdings, is_ledger, pieces};
use crate::kill_and_inject::Call;
use crate::offloaded::{Oversized, entries, is_temporary};
use crate::strace::{
    self, Span, Tally, add, changes_something, context_of, deed, fail_with, kill_before, own_calls, place,
};
use crate::test_env::{Run, TestEnv, append, copy_of, counters, is_root, mode, names_in, record, run, shortened, tell};
use crate::validator::assert_valid;

/// Everything belongs to `nobody` if root runs the tests.
const OWNER: u32 = 65534;
const QUEUE_MODE: u32 = 0o640;
const BLOB_MODE: u32 = 0o640;
const DIRECTORY_MODE: u32 = 0o750;
/// What is made is for its maker alone at first.
const NEW_FILE_MODE: u32 = 0o600;
const NEW_DIRECTORY_MODE: u32 = 0o700;
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// What a dead writer leaves.
const TORN: &str = r#"{"id":"late-torn","ts":17"#;
/// More than a batch has, and than is read at once.
const MANY: usize = 150;
/// What killed runs have left.
const LEFT_IN_STORE: &str = ".blob.999.abc.tmp";
const LEFT_BESIDE_QUEUE: &str = ".queue.jsonl.999.abc.tmp";

/// What there is at some time.
struct Stage {
    /// The lines of the queue, without ledgers.
    queue: Vec<String>,
    /// What lies in earlier generations, and is not in the queue yet.
    beside: Vec<String>,
}

/// A scene as a directory to be copied, and what becomes of it.
struct Scene {
    env: TestEnv,
    oversized: Oversized,
    /// The queue as it was.
    old: Vec<u8>,
    /// What there is at first, and after each undisturbed run until nothing changes any more.
    stages: Vec<Stage>,
    /// The blobs that the first run removes.
    pruned: Vec<String>,
    /// Those that it puts again, though they are there.
    reused: Vec<String>,
    /// Those that it gives a new time.
    refreshed: Vec<String>,
    /// Those that there are in the end.
    left: BTreeSet<String>,
    /// The counters and histograms that the exporter made of it, and would make if its end were a line.
    counters: [Samples; 2],
}

impl Scene {
    /// Lines with one value to move, with several, with the same ones, and others. There is no store yet.
    fn new() -> Self {
        let env = TestEnv::new();
        let oversized = Oversized::new(&env, "");
        let names = ["small", "one", "in-doubt", "several", "no-record", "duplicates", "in-part"];
        let (old, new) = (oversized.old_lines(&names), oversized.new_lines(&names));
        let stages = vec![Stage { queue: old, beside: Vec::new() }, Stage { queue: new, beside: Vec::new() }];
        let left = names.iter().flat_map(|name| oversized.blobs_of(name)).collect();
        Self { left, ..Self::of(env, oversized, "", "", stages) }
    }

    /// More values than are written in one batch, or read at once.
    fn many() -> Self {
        Self::many_before(&[])
    }

    /// The same in a queue so large that several threads put them.
    fn many_for_threads() -> Self {
        const MIB: usize = 1024 * 1024;
        let payload = format!("{{\"x\":\"{}\"}}", "x".repeat(4_000));
        let line = record("more", "researcher", "done").trim_end().replace("{}", &payload);
        let lines = 20 * MIB / line.len();
        Self::many_before(&vec![line; lines])
    }

    fn many_before(more: &[String]) -> Self {
        let env = TestEnv::new();
        let numbers: Vec<String> = (0..MANY).map(|number| number.to_string()).collect();
        let names: Vec<&str> = numbers.iter().map(String::as_str).collect();
        let oversized = Oversized::with_many(&env, "", MANY);
        let (old, new) = ([&oversized.old_lines(&names), more].concat(), [&oversized.new_lines(&names), more].concat());
        let stages = vec![Stage { queue: old, beside: Vec::new() }, Stage { queue: new, beside: Vec::new() }];
        let left = names.iter().flat_map(|name| oversized.blobs_of(name)).collect();
        Self { left, ..Self::of(env, oversized, "", "", stages) }
    }

    /// A queue that has been offloaded before: with a ledger, an earlier generation with late lines, an unterminated end, and what killed
    /// runs leave. The store has old blobs: some that lines, generations, and other blobs refer to, some that nothing refers to, one that is
    /// damaged, and some that are about to be put again.
    fn lived_in() -> Self {
        let env = TestEnv::new();
        let oversized = Oversized::new(&env, "");
        let text = |name| oversized.old(name).to_owned();
        let names = ["one", "put-before", "reference", "damaged", "refers", "handle", "no-record"];
        let late = ["late", "late-too"];
        let (old, new) = (oversized.old_lines(&names), oversized.new_lines(&names));
        let (old_late, new_late) = (oversized.old_lines(&late), oversized.new_lines(&late));
        let torn = || vec![TORN.to_owned()];

        // This one was taken over up to an offset, and more came after it.
        let taken_over = text("taken-over") + "\n";
        env.write("queue.gen.3", taken_over.clone() + &joined(&old_late) + TORN);
        env.write("queue.gen.4", "drained");
        env.write(LEFT_BESIDE_QUEUE, "never completed");
        let store = env.path("blob");
        let blobs_of = |names: &[&str]| names.iter().flat_map(|name| oversized.blobs_of(name)).collect::<BTreeSet<_>>();
        let [inner, of_malformed, recent_orphan, old_orphan, old_inner_orphan] =
            ["inner", "of-malformed", "recent-orphan", "old-orphan", "old-inner-orphan"]
                .map(|name| oversized.other(name));
        let put_before = blobs_of(&["put-before"]).pop_first().unwrap();
        let mut there = blobs_of(&["put-before", "damaged", "handle", "taken-over"]);
        there.extend([&inner, &of_malformed, &recent_orphan, &old_orphan, &old_inner_orphan].map(String::clone));
        for name in &there {
            oversized.lay(&store, name);
        }
        let damaged = blobs_of(&["damaged"]).pop_first().unwrap();
        fs::write(store.join(&damaged[..2]).join(&damaged), "not what the name says").unwrap();
        for name in &there {
            let age = if [&recent_orphan, &put_before, &damaged].contains(&name) { DAY } else { 100 * DAY };
            make_older(&store.join(&name[..2]).join(name), age);
        }
        fs::write(store.join(LEFT_IN_STORE), "never completed").unwrap();

        let stages = vec![
            Stage { queue: [&old[..], &[text("end")]].concat(), beside: [&old_late[..], &torn()].concat() },
            // Late lines go along as they are.
            Stage { queue: [&new[..], &old_late, &torn()].concat(), beside: vec![text("end")] },
            Stage { queue: [&new[..], &new_late, &torn(), &[text("end")]].concat(), beside: Vec::new() },
            Stage {
                queue: [&new[..], &new_late, &torn(), &oversized.new_lines(&["end"])].concat(),
                beside: Vec::new(),
            },
        ];
        let mut left = blobs_of(&[&names[..], &late, &["end"]].concat());
        left.extend([&inner, &of_malformed, &recent_orphan].map(String::clone));
        let (pruned, reused) = (vec![old_orphan, old_inner_orphan], vec![put_before.clone()]);
        let refreshed = vec![put_before];
        let ledger = format!(
            r#"{{"id":"ledger","ts":1764400000,"kind":"ledger","from":"handoff","to":"","payload":{{"version":1,"totals":{{"cells":[{{"role":"researcher","kind":"classify","records":3,"done":3,"spend_usd":"0.1"}}],"reclaimed_bytes":300}},"generations":{{"3":{},"4":7}}}},"status":"ledger"}}"#,
            taken_over.len()
        ) + "\n";
        let end = text("end");
        let scene = Self::of(env, oversized, &ledger, &end, stages);
        fs::hard_link(scene.env.path("queue.jsonl"), scene.env.path("queue.gen.5")).unwrap();
        Self { pruned, reused, refreshed, left, ..scene }
    }

    /// Lays the queue, and gives everything its owner and mode.
    fn of(env: TestEnv, oversized: Oversized, ledger: &str, end: &str, stages: Vec<Stage>) -> Self {
        let whole = &stages[0].queue[..stages[0].queue.len() - usize::from(!end.is_empty())];
        let old = (ledger.to_owned() + &joined(whole) + end).into_bytes();
        env.write("queue.jsonl", &old);
        for entry in WalkDir::new(env.path("")) {
            let entry = entry.unwrap();
            if is_root() {
                chown(entry.path(), Some(OWNER), Some(OWNER)).unwrap();
            }
            if entry.path().starts_with(env.path("blob")) {
                let mode = if entry.file_type().is_dir() { DIRECTORY_MODE } else { BLOB_MODE };
                fs::set_permissions(entry.path(), Permissions::from_mode(mode)).unwrap();
            }
        }
        fs::set_permissions(env.path("queue.jsonl"), Permissions::from_mode(QUEUE_MODE)).unwrap();
        let with_end = copy_of(&env);
        append(&with_end, "queue.jsonl", "\n");
        let counters = [&env, &with_end].map(|env| counters(env.samples()));
        assert!(counters[0].len() > 5, "{counters:?}");
        let (pruned, reused, refreshed) = (Vec::new(), Vec::new(), Vec::new());
        Self { env, oversized, old, stages, pruned, reused, refreshed, left: BTreeSet::new(), counters }
    }

    /// Another directory with the same in it.
    fn copy(&self) -> TestEnv {
        copy_of(&self.env)
    }

    /// Asserts that all is as it should be at one of the stages, which is returned, whatever has happened to a run.
    fn assert_whole(&self, env: &TestEnv, context: &str) -> usize {
        let queue = fs::read(env.path("queue.jsonl")).unwrap();
        let is_old = queue == self.old;
        let mut lines = pieces(&queue);
        lines.retain(|line| !is_ledger(line));
        let is = |stage: &&Stage| stage.queue.iter().map(String::as_bytes).eq(lines.iter().map(Vec::as_slice));
        let stage = self.stages.iter().skip(usize::from(!is_old)).find(is).unwrap_or_else(|| {
            let lines: Vec<_> = lines.iter().map(|line| shortened(&String::from_utf8_lossy(line))).collect();
            panic!("{context}: neither the old queue nor a new one: {lines:#?}")
        });
        assert!(is_old || queue.ends_with(b"\n"), "{context}: the queue ends in the middle of a line");
        let number = self.stages.iter().position(|other| std::ptr::eq(other, stage)).unwrap();
        let context = format!("{context}: stage {number}");
        let expected = stage.queue.iter().chain(&stage.beside).map(|line| line.clone().into_bytes()).collect();
        assert_same_lines(holdings(env, &context), expected, &context);
        let metadata = fs::symlink_metadata(env.path("queue.jsonl")).unwrap();
        assert_eq!(mode(&env.path("queue.jsonl")), QUEUE_MODE, "{context}");
        assert!(!is_root() || (metadata.uid(), metadata.gid()) == (OWNER, OWNER), "{context}: the queue's owner");

        self.oversized.check_references(&env.path("")).unwrap_or_else(|problem| panic!("{context}: {problem}"));
        self.assert_store(env, &context);
        let samples = env.samples();
        let missing = value(&samples, "handoff_blob_missing_references", &[]);
        assert!(missing.abs() < 0.5, "{context}: {missing} references to blobs that are missing");
        let expected = &self.counters[usize::from(number > 1)];
        assert_eq!(differences(&counters(samples), expected), Vec::<String>::new(), "{context}: counters");
        number
    }

    /// Asserts that the store has nothing but whole blobs, each for whom it should be, and temporary files.
    fn assert_store(&self, env: &TestEnv, context: &str) {
        let store = env.path("blob");
        for entry in entries(&store) {
            let context = format!("{context}: blob/{}", entry.name);
            let is_temporary = entry.name.starts_with(".blob.");
            let (new, finished) =
                if entry.is_directory { (NEW_DIRECTORY_MODE, DIRECTORY_MODE) } else { (NEW_FILE_MODE, BLOB_MODE) };
            let may_be_new = entry.is_directory || is_temporary;
            assert!(entry.mode == finished || may_be_new && entry.mode == new, "{context} has mode {:o}", entry.mode);
            if is_root() && !may_be_new {
                assert_eq!(entry.owner, (OWNER, OWNER), "{context}: owner");
            }
            if !entry.is_directory && !is_temporary {
                let name = entry.name.split_once('/').unwrap().1;
                let path = store.join(&entry.name);
                // The one that was damaged stays so until it is put again.
                let was_damaged = fs::read(self.env.path("blob").join(&entry.name)).ok() == fs::read(path).ok()
                    && self.oversized.check_blob(&self.env.path("blob"), name).is_err();
                let checked = if was_damaged { Ok(()) } else { self.oversized.check_blob(&store, name) };
                checked.unwrap_or_else(|problem| panic!("{context}: {problem}"));
            }
        }
    }

    /// Asserts that the next run brings the queue from one stage to the next, and leaves nothing half done.
    fn assert_goes_on(&self, env: &TestEnv, stage: usize, context: &str) -> usize {
        let context = format!("{context}: the run after it");
        let run = run(&mut offload(env));
        assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{context}");
        let next = self.assert_whole(env, &context);
        assert_eq!(next, (stage + 1).min(self.stages.len() - 1), "{context}: the next stage");
        assert_eq!(temporary(env), Vec::<String>::new(), "{context}: left behind");
        let names = names_in(&env.path(""));
        let is_ours = |name: &&String| {
            ["blob", "queue.jsonl", "queue.lock", "textfile"].contains(&name.as_str()) || name.starts_with("queue.gen.")
        };
        assert!(names.iter().all(|name| is_ours(&name)), "{context}: {names:?}");
        for name in &self.pruned {
            assert!(!blob(env, name).exists(), "{context}: {name} has not been removed");
        }
        for name in &self.refreshed {
            let age = fs::metadata(blob(env, name)).unwrap().modified().unwrap().elapsed();
            let age = age.unwrap_or_default();
            assert!(age < DAY / 2, "{context}: {name} is still {age:?} old");
        }
        for entry in entries(&env.path("blob")).iter().filter(|entry| entry.is_directory) {
            let context = format!("{context}: blob/{}", entry.name);
            assert_eq!(entry.mode, DIRECTORY_MODE, "{context}");
            assert!(!is_root() || entry.owner == (OWNER, OWNER), "{context}: {:?}", entry.owner);
        }
        let samples = offload_samples(env).unwrap();
        assert!((value(&samples, "handoff_offload_success", &[]) - 1.0).abs() < 0.5, "{context}");
        next
    }

    /// Asserts that runs without disturbance bring the queue to its last stage, and leave nothing beside it but the store.
    fn assert_settles(&self, env: &TestEnv, mut stage: usize, context: &str) {
        // The last one removes the generation that the one before has made, and what only that referred to goes with another.
        for _ in 0..=self.stages.len() {
            stage = self.assert_goes_on(env, stage, context);
        }
        let context = format!("{context}: at last");
        assert_eq!(stage, self.stages.len() - 1, "{context}");
        assert_eq!(names_in(&env.path("")), ["blob", "queue.jsonl", "queue.lock", "textfile"], "{context}");
        assert_eq!(env.textfile_names(), ["handoff_offload.prom"], "{context}");
        let entries = entries(&env.path("blob"));
        let left = entries.iter().filter_map(|entry| entry.name.split_once('/')).map(|(_, name)| name.to_owned());
        assert_eq!(left.collect::<BTreeSet<_>>(), self.left, "{context}: blobs");
    }

    /// The calls of a run, with the paths of the files that they are about.
    fn calls(&self) -> Vec<Call> {
        let env = self.copy();
        let (run, trace) = traced(&env, &["-y"]);
        assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
        self.assert_settles(&env, 1, "undisturbed");
        own_calls(&trace)
    }

    /// Kills offload before a call, and returns what stage the queue is at.
    fn kill_before(&self, env: &TestEnv, call: &Call, context: &str) -> usize {
        let (killed, _) = traced(env, &["-e", &kill_before(call)]);
        assert_eq!((killed.code, killed.signal), (None, Some(9)), "not {context}: {}", killed.stderr);
        self.assert_whole(env, context)
    }
}

fn joined(lines: &[String]) -> String {
    lines.iter().map(|line| line.clone() + "\n").collect()
}

/// Sets a file's times back.
fn make_older(path: &Path, age: Duration) {
    let time = SystemTime::now() - age;
    File::options().write(true).open(path).unwrap().set_times(FileTimes::new().set_modified(time)).unwrap();
}

fn blob(env: &TestEnv, name: &str) -> std::path::PathBuf {
    env.path("blob").join(&name[..2]).join(name)
}

/// Offload that says only what is wrong.
fn offload(env: &TestEnv) -> Command {
    let mut offload = env.offload_now();
    offload.arg("-q");
    offload
}

/// Runs it under strace(1) with one thread, and returns the trace too.
fn traced(env: &TestEnv, arguments: &[&str]) -> (Run, String) {
    strace::traced(env, &offload(env), arguments)
}

/// The temporary files that there are anywhere.
fn temporary(env: &TestEnv) -> Vec<String> {
    let name = |entry: walkdir::Result<walkdir::DirEntry>| entry.unwrap().file_name().to_str().unwrap().to_owned();
    WalkDir::new(env.path("")).into_iter().map(name).filter(|name| is_temporary(name)).collect()
}

/// What the last run of offload said of itself.
fn offload_samples(env: &TestEnv) -> Option<Samples> {
    let contents = fs::read(env.path("textfile/handoff_offload.prom")).ok()?;
    assert_valid(&contents, "handoff_offload.prom");
    Some(parse(&contents))
}

fn is_long() -> bool {
    std::env::var_os("LONG").is_some()
}

fn place_of(calls: &[Call], what: &str, is: impl Fn(&Call) -> bool) -> usize {
    calls.iter().position(is).unwrap_or_else(|| panic!("the run makes no {what}"))
}

/// The place of the commit.
fn commit(calls: &[Call]) -> usize {
    place_of(calls, "commit", |call| call.name == "renameat" && call.line.contains("/queue.jsonl\") ="))
}

// Kills.

/// Kills offload before each of its calls that changes something, and before every so many-th of all others; before all of them with `LONG`.
fn kill_everywhere(scene: &Scene, passive: usize) {
    let calls = scene.calls();
    let commit = commit(&calls);
    let mut stages = Tally::new();
    for (index, call) in calls.iter().enumerate() {
        if !changes_something(call) && !is_long() && index % passive > 0 {
            continue;
        }
        let context = context_of("killed before", call);
        let env = scene.copy();
        let stage = scene.kill_before(&env, call, &context);
        assert_eq!(stage == 0, index <= commit, "{context}: stage {stage}");
        if changes_something(call) {
            scene.assert_settles(&env, stage, &context);
        } else {
            scene.assert_goes_on(&env, stage, &context);
        }
        add(&mut stages, &stage.to_string());
    }
    for name in ["mkdirat", "pwrite64", "fsync", "renameat", "linkat", "fchmod", "flock", "statx", "pread64"] {
        assert!(calls.iter().any(|call| call.name == name), "the run makes no {name}");
    }
    tell(&format!("killed at {stages:?}"));
    assert!(stages["0"] > 70 && stages["1"] > 10, "{stages:?}");
}

#[test]
fn killed_before_any_call_while_it_makes_a_store_it_leaves_lines_and_blobs_whole() {
    kill_everywhere(&Scene::new(), 3);
}

#[test]
fn killed_before_any_call_in_a_store_that_is_lived_in_it_leaves_lines_and_blobs_whole() {
    kill_everywhere(&Scene::lived_in(), 10);
}

#[test]
fn killed_in_any_batch_of_many_blobs_it_leaves_lines_and_blobs_whole() {
    let scene = Scene::many();
    let calls = scene.calls();
    let mut stages = Tally::new();
    let (step, mut left_in_store) = (if is_long() { 1 } else { 61 }, 0);
    for call in calls.iter().filter(|call| changes_something(call)).step_by(step) {
        let context = context_of("killed before", call);
        let env = scene.copy();
        let stage = scene.kill_before(&env, call, &context);
        left_in_store = left_in_store.max(temporary(&env).len());
        scene.assert_goes_on(&env, stage, &context);
        add(&mut stages, &stage.to_string());
    }
    tell(&format!("killed at {stages:?}, with up to {left_in_store} temporary files left"));
    let renames = calls.iter().filter(|call| call.name == "renameat").count();
    assert!(renames > MANY && stages["0"] > 10 && left_in_store > 10, "{renames} renames, {stages:?}, {left_in_store}");
}

/// The numbers of calls of a name, in whichever thread comes to it first, before which offload is killed: not all, for there are hundreds.
const NUMBERS: [usize; 3] = [1, 7, 40];

#[test]
fn killed_at_any_time_in_any_of_its_threads_it_leaves_lines_and_blobs_whole() {
    let scene = Scene::many_for_threads();
    let names = "mkdirat fchown fchmod pwrite64 fadvise64 fsync renameat flock close linkat";
    let numbers = if is_long() { (1..100).collect() } else { NUMBERS.to_vec() };
    let (mut stages, mut left_in_store) = (Tally::new(), 0);
    for name in names.split(' ') {
        for &number in &numbers {
            let context = format!("killed before {name} number {number} of a thread");
            let env = scene.copy();
            let kill = format!("inject={name}:signal=KILL:when={number}");
            // What else it does is not looked at: it would be slower, and the threads less in each other's way.
            let only = format!("trace={name}");
            let (killed, _) = strace::traced_in_threads(&env, &offload(&env), &["-e", &only, "-e", &kill]);
            let stage = scene.assert_whole(&env, &context);
            if killed.signal.is_none() {
                // No thread makes so many.
                assert_eq!((killed.code, killed.stderr.as_str(), stage), (Some(0), "", 1), "{context}");
                break;
            }
            left_in_store = left_in_store.max(temporary(&env).len());
            scene.assert_goes_on(&env, stage, &context);
            add(&mut stages, &format!("{stage} {name}"));
        }
    }
    tell(&format!("killed at {stages:?}, with up to {left_in_store} temporary files left"));
    assert!(stages.len() >= 8 && left_in_store > 32, "{stages:?}, {left_in_store}");
}

/// Kills offload before calls that change something, and the run after it before such calls too: before all of them with `LONG`, otherwise
/// before some that lie in another place in each pair.
fn kill_twice(scene: &Scene) {
    let step = if is_long() { 1 } else { 9 };
    let calls = scene.calls();
    let mut stages = Tally::new();
    for (number, first) in calls.iter().filter(|call| changes_something(call)).enumerate().step_by(step) {
        let context = context_of("killed before", first);
        let killed = scene.copy();
        let stage = scene.kill_before(&killed, first, &context);
        let (rerun, trace) = traced(&copy_of(&killed), &[]);
        assert_eq!((rerun.code, rerun.stderr.as_str()), (Some(0), ""), "{context}: the run after it");
        let again = own_calls(&trace);
        for second in again.iter().filter(|call| changes_something(call)).skip(number / step % step).step_by(step) {
            let context = format!("{context}; then {}", context_of("killed before", second));
            let env = copy_of(&killed);
            let next = scene.kill_before(&env, second, &context);
            assert!(next == stage || next == stage + 1, "{context}: from stage {stage} to {next}");
            scene.assert_settles(&env, next, &context);
            add(&mut stages, &format!("{stage}, {next}"));
        }
    }
    tell(&format!("killed twice at {stages:?}"));
    assert!(stages["0, 0"] > 10 && stages.len() > 1, "{stages:?}");
}

#[test]
fn killed_once_more_in_the_next_run_it_leaves_lines_and_blobs_whole_too() {
    kill_twice(&Scene::new());
}

#[test]
fn killed_once_more_in_the_next_run_of_a_store_that_is_lived_in_it_leaves_lines_and_blobs_whole_too() {
    kill_twice(&Scene::lived_in());
}

// Failures.

/// The errors that a call is made to fail with.
fn errors_for(call: &Call) -> &'static [&'static str] {
    match call.name.as_str() {
        _ if changes_something(call) => &["EIO", "ENOSPC"],
        // The kernel closes a file whatever it returns, and advice need not be taken.
        "close" | "fadvise64" => &[],
        _ if is_long() => &["EIO"],
        _ => &[],
    }
}

/// Whether a run may do without a call: what dead runs left can be looked for and removed later, and without a lease a generation stays.
fn can_be_done_without(call: &Call) -> bool {
    call.line.contains(".999.abc.tmp")
        || call.line.contains("queue.gen.") && call.line.contains("AT_SYMLINK_NOFOLLOW")
        || call.name == "statx" && (call.line.contains(" \"queue.jsonl\"") || call.line.contains("AT_SYMLINK_NOFOLLOW"))
        || ["fcntl", "newfstatat", "getdents64"].contains(&call.name.as_str())
        || call.name == "openat" && call.line.contains("O_DIRECTORY")
}

/// Lets a call fail, and asserts that the run says so and leaves nothing half done.
fn assert_fails_well(scene: &Scene, calls: &[Call], index: usize, error: &str) -> String {
    let call = &calls[index];
    let context = context_of(&format!("{error} for"), call);
    let env = scene.copy();
    let inode = |name: &str| fs::metadata(env.path(name)).map(|metadata| metadata.ino()).ok();
    let before = inode("queue.jsonl");
    let (run, trace) = traced(&env, &["-e", &fail_with(error, call)]);
    assert!(trace.contains("(INJECTED)"), "not {context}");

    let stage = scene.assert_whole(&env, &context);
    let success = offload_samples(&env).map(|samples| value(&samples, "handoff_offload_success", &[]) > 0.5);
    if run.code == Some(0) {
        assert!(can_be_done_without(call), "{context}: it says that all is well");
        assert_eq!((stage, success, run.stderr.as_str()), (1, Some(true), ""), "{context}");
    } else {
        assert_eq!(run.code, Some(74), "{context}: {}", run.stderr);
        assert_ne!(success, Some(true), "{context}");
        for message in run.stderr.lines() {
            let says_why = message.starts_with("handoff-offload: ") && message.contains("(os error ");
            assert!(says_why, "{context}: {}", run.stderr);
        }
        assert_eq!(run.stderr.lines().count(), 1, "{context}: {}", run.stderr);
    }
    if stage == 0 {
        assert_eq!(inode("queue.jsonl"), before, "{context}: the queue is another file");
    }
    // What dead runs left may still be there if it has not come to that, but nothing of this run may.
    let left: Vec<_> =
        temporary(&env).into_iter().filter(|name| ![LEFT_IN_STORE, LEFT_BESIDE_QUEUE].contains(&&**name)).collect();
    assert_eq!(left, Vec::<String>::new(), "{context}: left behind");
    scene.assert_settles(&env, stage, &context);
    if run.code == Some(0) { "done without".to_owned() } else { format!("stage {stage}") }
}

/// Lets each call fail.
fn fail_everywhere(scene: &Scene) {
    let calls = scene.calls();
    let mut outcomes = Tally::new();
    for index in 0..calls.len() {
        for error in errors_for(&calls[index]) {
            add(&mut outcomes, &assert_fails_well(scene, &calls, index, error));
        }
    }
    tell(&format!("failed: {outcomes:?}"));
    assert!(outcomes["stage 0"] > 80 && outcomes["stage 1"] > 5, "{outcomes:?}");
}

#[test]
fn whatever_fails_while_it_makes_a_store_it_says_so_and_leaves_no_trace() {
    fail_everywhere(&Scene::new());
}

#[test]
fn whatever_fails_in_a_store_that_is_lived_in_it_says_so_and_leaves_no_trace() {
    fail_everywhere(&Scene::lived_in());
}

// The order in which things get to the disk.

/// What a run does with which files, as far as it succeeds. Temporary files of blobs are told apart by what comes after `.blob.`.
fn deeds(scene: &Scene) -> (Vec<Call>, Vec<String>) {
    let env = scene.copy();
    let directory = fs::canonicalize(env.path("")).unwrap();
    let (run, trace) = traced(&env, &["-y"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    scene.assert_whole(&env, "traced");
    let mut calls = own_calls(&trace);
    calls.retain(|call| !call.line.contains(" = -1 "));
    for call in &mut calls {
        call.line = without_descriptor(&call.line, directory.join("blob").to_str().unwrap());
    }
    let deeds = calls.iter().map(|call| deed(call, directory.to_str().unwrap())).collect();
    (calls, deeds)
}

/// A call in which the store, by whatever descriptor it was named, has its own name.
pub(crate) fn without_descriptor(line: &str, store: &str) -> String {
    const START: &str = "/proc/self/fd/";
    let Some((before, after)) = line.split_once(START) else { return line.to_owned() };
    format!("{before}{store}{}", after.trim_start_matches(|digit: char| digit.is_ascii_digit()))
}

/// Where a deed is done that must be done, after one place and before another.
fn between(deeds: &[String], after: usize, before: usize, deed: &str) -> usize {
    let place = deeds[after..before].iter().position(|is| is == deed);
    after + place.unwrap_or_else(|| panic!("no {deed} between {} and {}: {deeds:#?}", deeds[after], deeds[before]))
}

/// The places of deeds that begin so.
fn places(deeds: &[String], deed: &str) -> Vec<usize> {
    (0..deeds.len()).filter(|place| deeds[*place].starts_with(deed)).collect()
}

#[test]
fn a_blob_is_on_disk_before_it_has_its_name_and_its_directories_before_a_line_refers_to_it() {
    for scene in [Scene::new(), Scene::lived_in()] {
        let (_, deeds) = deeds(&scene);
        let commit = place(&deeds, "renameat NEW queue.jsonl");
        let renames = places(&deeds, "renameat blob/.blob.");
        assert!(renames.len() > 2 && renames.iter().all(|rename| *rename < commit), "{deeds:#?}");
        for rename in renames {
            let (_, files) = deeds[rename].split_once(' ').unwrap();
            let (temporary, directory) = files.split_once(' ').unwrap();
            let made = place(&deeds, &format!("openat(O_CREAT) {temporary}"));
            let flushed = between(&deeds, made, rename, &format!("fsync {temporary}"));
            for change in ["pwrite64", "fchmod"] {
                let change = between(&deeds, made, flushed, &format!("{change} {temporary}"));
                assert!(!deeds[flushed..rename].contains(&deeds[change]), "changed after it was flushed: {deeds:#?}");
            }
            // What is written is compared.
            let written = between(&deeds, made, flushed, &format!("pwrite64 {temporary}"));
            between(&deeds, written, flushed, &format!("pread64 {temporary}"));
            between(&deeds, rename, commit, &format!("fsync {directory}"));
        }
        for made in places(&deeds, "mkdirat blob") {
            between(&deeds, made, commit, "fsync blob");
        }
        // It is made in the queue's directory, whose name in the trace is that of the present one.
        for made in places(&deeds, "mkdirat ").into_iter().filter(|made| deeds[*made] == "mkdirat ") {
            between(&deeds, made, place(&deeds, "openat(O_CREAT) NEW"), "fsync DIR");
        }
        // A blob that was there already may not be on the disk yet under its name.
        for name in &scene.reused {
            let read = place(&deeds, &format!("pread64 blob/{}/{name}", &name[..2]));
            let refreshed = between(&deeds, read, commit, &format!("utimensat blob/{}", &name[..2]));
            between(&deeds, refreshed, commit, &format!("fsync blob/{}", &name[..2]));
            // Nor its bytes: perhaps somebody has just copied it there.
            between(&deeds, read, commit, &format!("fsync blob/{}/{name}", &name[..2]));
        }
    }
}

#[test]
fn whichever_thread_puts_a_blob_it_is_on_disk_before_a_line_refers_to_it() {
    let scene = Scene::many_for_threads();
    let env = scene.copy();
    let (run, trace) = strace::traced_in_threads(&env, &offload(&env), &["-y"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    scene.assert_whole(&env, "traced");
    let directory = fs::canonicalize(env.path("")).unwrap();
    let store = directory.join("blob");
    let deed = |span: &Span| {
        let line = without_descriptor(&span.call.line, store.to_str().unwrap());
        deed(&Call { line, ..span.call.clone() }, directory.to_str().unwrap())
    };
    let spans: Vec<(Span, String)> =
        strace::spans(&trace).into_iter().map(|span| (deed(&span), span)).map(|(deed, span)| (span, deed)).collect();
    let threads: BTreeSet<&str> =
        trace.lines().filter(|line| line.contains(" pwrite64(")).map(|line| line.split_once(' ').unwrap().0).collect();
    assert!(threads.len() > 2, "only {threads:?} have written");
    let all = |deed: &str| {
        spans
            .iter()
            .filter(|(_, is)| is.starts_with(deed))
            .map(|(span, deed)| (span, deed.as_str()))
            .collect::<Vec<_>>()
    };
    let (commit, _) = all("renameat NEW queue.jsonl")[0];
    // Something that begins only after one call has ended, and ends before another begins.
    let between = |after: &Span, before: &Span, deed: &str| {
        let is_between = |span: &Span| after.ended < span.began && span.ended < before.began;
        let found = spans.iter().any(|(span, is)| is == deed && is_between(span));
        assert!(found, "no {deed} between line {} and line {} of\n{trace}", after.ended + 1, before.began + 1);
    };
    let renames = all("renameat blob/.blob.");
    assert_eq!(renames.len(), MANY);
    for (rename, deed) in renames {
        let (_, files) = deed.split_once(' ').unwrap();
        let (temporary, directory) = files.split_once(' ').unwrap();
        let (written, _) = all(&format!("pwrite64 {temporary}"))[0];
        between(written, rename, &format!("fsync {temporary}"));
        between(rename, commit, &format!("fsync {directory}"));
    }
    for (made, _) in all("mkdirat blob") {
        between(made, commit, "fsync blob");
    }
}

#[test]
fn whoever_puts_shares_the_store_until_the_line_is_on_disk_and_whoever_prunes_has_it_alone() {
    let scene = Scene::lived_in();
    let (calls, deeds) = deeds(&scene);
    // A lock is held until the descriptor is closed that it was taken with.
    let held = |lock: &str| {
        let taken = deeds.iter().position(|deed| deed == lock).unwrap_or_else(|| panic!("no {lock} in {deeds:#?}"));
        let descriptor = calls[taken].line.strip_prefix("flock(").unwrap().split_once('<').unwrap().0;
        let close = format!("close({descriptor}<");
        let released = calls[taken..].iter().position(|call| call.line.starts_with(&close));
        taken..taken + released.expect("it is closed")
    };
    let (alone, shared) = (held("flock(LOCK_EX) blob"), held("flock(LOCK_SH) blob"));
    // Who prunes locks the queue too, and then looks once more at every file.
    let queue = held("flock(LOCK_EX) queue.lock");
    assert!(alone.start < queue.start && queue.end <= alone.end && alone.end < shared.start, "{deeds:#?}");
    let (pruned, put) = (places(&deeds, "unlinkat blob/"), places(&deeds, "renameat blob/.blob."));
    assert_eq!(pruned.len(), scene.pruned.len(), "{deeds:#?}");
    assert!(pruned.iter().all(|place| queue.contains(place)), "{deeds:#?}");
    for file in ["queue.jsonl", "queue.gen.3"] {
        between(&deeds, queue.start, pruned[0], &format!("fstat {file}"));
    }
    let committed = place(&deeds, "renameat NEW queue.jsonl");
    let flushed = between(&deeds, committed, deeds.len() - 1, "fsync DIR");
    assert!(put.iter().chain([&committed, &flushed]).all(|place| shared.contains(place)), "{deeds:#?}");
}

#[test]
fn a_directory_that_a_killed_run_has_made_is_flushed_before_a_line_refers_to_what_is_in_it() {
    let env = TestEnv::new();
    let oversized = Oversized::new(&env, "");
    env.write("queue.jsonl", oversized.old("one").to_owned() + "\n");
    let (run, trace) = traced(&copy_of(&env), &["-y"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    let calls = own_calls(&trace);
    let is_of_store = |call: &Call| call.line.contains("/blob>");
    let made = place_of(&calls, "directory in the store", |call| call.name == "mkdirat" && is_of_store(call));
    let flushed = made + place_of(&calls[made..], "flush of it", |call| call.name == "fsync" && is_of_store(call));
    let (killed, _) = traced(&env, &["-e", &kill_before(&calls[flushed])]);
    assert_eq!(killed.signal, Some(9), "{}", killed.stderr);

    let (run, trace) = traced(&env, &["-y"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    let calls = own_calls(&trace);
    let is_flushed = calls[..commit(&calls)].iter().any(|call| call.name == "fsync" && is_of_store(call));
    assert!(is_flushed, "the store's directory is not flushed: {calls:#?}");
}
