//! The exporter killed before each system call of its writing, and each of these calls failing: node_exporter finds the old file
//! or the new one, never anything else, and the next run leaves no trace.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use crate::exposition::{Samples, differences, parse, sum};
use crate::test_env::{
    Background, Run, TestEnv, in_tests, mode, python, record, run, small_queue, to_file_under, tool,
};
use crate::validator::problems;

/// A system call by name and by how many of that name came before it in the run, as strace counts them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) name: String,
    pub(crate) number: usize,
    /// Its line in the trace.
    pub(crate) line: String,
}

/// The calls in what `strace -f -o` wrote about a process with one thread.
pub(crate) fn calls_in(trace: &str) -> Vec<Call> {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let mut calls = Vec::new();
    for line in trace.lines() {
        let call = line.split_once(' ').unwrap().1.trim_start();
        let Some((name, _)) = call.split_once('(') else { continue };
        let count = counts.entry(name.to_owned()).or_default();
        *count += 1;
        calls.push(Call { name: name.to_owned(), number: *count, line: call.to_owned() });
    }
    calls
}

/// A directory with the output of an earlier run over an older queue.
fn scene() -> (TestEnv, Vec<u8>) {
    let env = TestEnv::new();
    env.write("queue.lock", "");
    env.write("queue.jsonl", record("first", "researcher", "queued"));
    env.run_earlier();
    let before = fs::read(env.prom()).unwrap();
    env.write("queue.jsonl", small_queue());
    (env, before)
}

/// Runs the exporter under strace(1).
fn traced(env: &TestEnv, arguments: &[&str]) -> Run {
    let mut strace = env.command(tool("strace", "strace"));
    strace.args(["-f", "-o", "trace"]).args(arguments);
    run(&mut to_file_under(strace))
}

/// The calls of a successful run: all of them, and the index of the one that makes the temporary file.
fn calls() -> (Vec<Call>, usize) {
    let (env, _) = scene();
    let run = traced(&env, &[]);
    assert_eq!(run.code, Some(0), "strace(1) must be allowed to trace: {}", run.stderr);
    let calls = calls_in(&fs::read_to_string(env.path("trace")).unwrap());
    let start = calls.iter().position(|call| call.line.contains(".handoff.prom.") && call.line.contains("O_CREAT"));
    (calls, start.expect("the run makes a temporary file beside the target"))
}

/// Whether the file holds just what the run should have written.
fn is_new(file: &[u8], new: &Samples) -> bool {
    problems(file).is_empty() && differences(&without_duration(parse(file)), new).is_empty()
}

fn without_duration(mut samples: Samples) -> Samples {
    samples.retain(|series, _| series.name != "handoff_exporter_duration_seconds");
    samples
}

fn new_samples() -> Samples {
    let (env, _) = scene();
    assert_eq!(run(&mut env.to_file()).code, Some(0));
    let samples = without_duration(env.assert_only_a_good_file("undisturbed"));
    assert!((sum(&samples, "handoff_queue_records", &[]) - 3.0).abs() < 0.5);
    samples
}

/// Asserts that a run without disturbance cleans up whatever an earlier one left.
fn assert_recovers(env: &TestEnv, new: &Samples, context: &str) {
    let run = run(&mut env.to_file());
    assert_eq!(run.code, Some(0), "{context}: the next run: {}", run.stderr);
    assert!(is_new(&fs::read(env.prom()).unwrap(), new), "{context}: the next run's file");
    env.assert_only_a_good_file(context);
}

#[test]
fn killed_before_any_call_it_leaves_the_old_file_or_the_new() {
    let (calls, start) = calls();
    let names: Vec<&str> = calls[start..].iter().map(|call| call.name.as_str()).collect();
    for expected in ["write", "fchmod", "fsync"] {
        assert!(names.contains(&expected), "the run makes no {expected}: {names:?}");
    }
    let new = new_samples();
    let (mut old_files, mut new_files, mut leftovers) = (0, 0, 0);
    // Calls of these names before the temporary file is made are swept too.
    for call in calls.iter().filter(|call| names.contains(&call.name.as_str()) && call.name != "exit_group") {
        let context = format!("killed before {} number {}: {}", call.name, call.number, call.line);
        let (env, before) = scene();
        let killed = traced(&env, &["-e", &format!("inject={}:signal=KILL:when={}", call.name, call.number)]);
        assert_eq!((killed.code, killed.signal), (None, Some(9)), "not {context}");

        let file = fs::read(env.prom()).unwrap();
        if file == before {
            old_files += 1;
        } else {
            assert!(is_new(&file, &new), "{context}: neither the old file nor the new one");
            new_files += 1;
        }
        assert_eq!(mode(&env.prom()), 0o644, "{context}");
        for name in env.textfile_names().iter().filter(|name| *name != "handoff.prom") {
            // node_exporter reads what has just this suffix.
            let is_read = Path::new(name).extension().is_some_and(|extension| extension == "prom");
            assert!(!is_read, "{context}: node_exporter would read {name}");
            leftovers += 1;
        }
        assert_recovers(&env, &new, &context);
    }
    assert!(old_files > 0 && new_files > 0 && leftovers > 0, "{old_files} old, {new_files} new, {leftovers} left over");
}

#[test]
fn a_call_that_fails_leaves_the_old_file_and_no_other() {
    let (calls, start) = calls();
    let new = new_samples();
    let mut failures = 0;
    for call in &calls[start..] {
        let errors: &[&str] = match call.name.as_str() {
            "openat" | "open" | "creat" => &["EIO", "ENOSPC", "EROFS", "EACCES", "EMFILE"],
            "write" | "writev" | "pwrite64" | "fsync" | "fdatasync" => &["EIO", "ENOSPC", "EDQUOT"],
            "rename" | "renameat" | "renameat2" => &["EIO", "ENOSPC", "EBUSY", "EPERM"],
            "fchmod" | "chmod" | "fchmodat" => &["EIO", "ENOSPC", "EPERM"],
            "flock" => &["EIO", "ENOLCK"],
            _ => continue,
        };
        for error in errors {
            let context = format!("{error} for {} number {}: {}", call.name, call.number, call.line);
            let (env, before) = scene();
            let failed = traced(&env, &["-e", &format!("inject={}:error={error}:when={}", call.name, call.number)]);
            assert_eq!(failed.code, Some(74), "{context}: {}", failed.stderr);
            assert_eq!(failed.stderr.lines().count(), 1, "{context}: {}", failed.stderr);
            assert!(
                failed.stderr.contains("handoff.prom: cannot be ")
                    || failed.stderr.contains("textfile: cannot be written into: "),
                "{context}: {}",
                failed.stderr
            );
            assert!(failed.stderr.contains("(os error "), "{context}: no cause in {}", failed.stderr);
            assert!(fs::read(env.prom()).unwrap() == before, "{context}: the file has changed");
            assert_eq!(env.textfile_names(), ["handoff.prom"], "{context}");
            assert_recovers(&env, &new, &context);
            failures += 1;
        }
    }
    assert!(failures >= 12, "only {failures} failures were tried");
}

#[test]
fn an_interrupted_write_is_tried_again() {
    let (calls, start) = calls();
    let new = new_samples();
    for call in calls[start..].iter().filter(|call| call.name == "write") {
        let (env, _) = scene();
        let run = traced(&env, &["-e", &format!("inject={}:error=EINTR:when={}", call.name, call.number)]);
        assert_eq!(run.code, Some(0), "EINTR for {}: {}", call.line, run.stderr);
        assert!(is_new(&fs::read(env.prom()).unwrap(), &new), "EINTR for {}", call.line);
        env.assert_only_a_good_file("interrupted");
    }
}

#[test]
fn it_is_on_disk_before_it_has_its_name() {
    let (calls, start) = calls();
    let place = |names: &[&str]| {
        let index = calls[start..].iter().position(|call| names.contains(&call.name.as_str()));
        index.unwrap_or_else(|| panic!("the run makes no {names:?}"))
    };
    let (write, chmod, sync, rename) =
        (place(&["write"]), place(&["fchmod"]), place(&["fsync"]), place(&["rename", "renameat", "renameat2"]));
    assert!(write < sync && chmod < rename && sync < rename, "{:#?}", &calls[start..]);
}

#[test]
fn a_queue_that_fails_to_be_read_is_not_an_empty_one() {
    let (calls, start) = calls();
    // The loader reads with the same call before.
    let opened = calls.iter().position(|call| call.name == "openat" && call.line.contains("\"queue.jsonl\"")).unwrap();
    let reads: Vec<&Call> = calls[opened..start].iter().filter(|call| call.name == "pread64").collect();
    assert!(!reads.is_empty(), "the run doesn't read the queue with pread64");
    for call in reads {
        let (env, _) = scene();
        let run = traced(&env, &["-e", &format!("inject=pread64:error=EIO:when={}", call.number)]);
        assert_eq!(run.code, Some(74), "{}: {}", call.line, run.stderr);
        let samples = env.assert_only_a_good_file("unreadable");
        assert!(samples.keys().all(|series| !series.name.starts_with("handoff_queue")), "{}", call.line);
    }
}

/// Runs the exporter with a pause before it reads the queue, and `meanwhile` in that pause.
fn interrupted(env: &TestEnv, arguments: &[&str], meanwhile: impl FnOnce()) -> Run {
    let (calls, start) = calls();
    let opened = calls.iter().position(|call| call.name == "openat" && call.line.contains("\"queue.jsonl\"")).unwrap();
    let read = calls[opened..start].iter().find(|call| call.name == "pread64").unwrap();
    let mut strace = env.command(tool("strace", "strace"));
    let pause = format!("inject=pread64:delay_enter=2000000:when={}", read.number);
    strace.args(["-f", "-o", "trace", "-e", &pause]);
    thread::scope(|scope| {
        let reading = scope.spawn(|| run(to_file_under(strace).args(arguments)));
        // It gets to the pause long before; should it come later, then it meets what is there by then.
        thread::sleep(Duration::from_millis(700));
        meanwhile();
        reading.join().unwrap()
    })
}

#[test]
fn what_is_read_beside_a_writer_does_not_count() {
    for lock_exists in [true, false] {
        let (env, _) = scene();
        if !lock_exists {
            fs::remove_file(env.path("queue.lock")).unwrap();
        }
        let mut holder = None;
        let busy = interrupted(&env, &["--lock-timeout", "100ms"], || {
            // A worker makes the lock file, or another one, and works under it.
            let mut command = env.command(python());
            command.arg(in_tests("workers/hold_lock.py")).args(["new.lock", "exclusive"]);
            holder = Some(Background::spawn_and_wait_for_line(&mut command));
            fs::rename(env.path("new.lock"), env.path("queue.lock")).unwrap();
        });
        assert_eq!(busy.code, Some(75), "lock exists: {lock_exists}: {}", busy.stderr);
        assert!(busy.stderr.starts_with("handoff-exporter: queue.lock: "), "{}", busy.stderr);
        let samples = env.assert_only_a_good_file("busy");
        assert!(samples.keys().all(|series| !series.name.starts_with("handoff_queue")), "depth after a failure");
        drop(holder);
    }
}

#[test]
fn a_queue_cut_while_it_is_read_is_not_a_short_one() {
    for length in [0, 50] {
        let (env, _) = scene();
        let cut = interrupted(&env, &[], || {
            fs::File::options().write(true).open(env.path("queue.jsonl")).unwrap().set_len(length).unwrap();
        });
        assert_eq!(cut.code, Some(75), "{length}: {}", cut.stderr);
        assert!(cut.stderr.contains("was cut or removed while it was read"), "{}", cut.stderr);
        let samples = env.assert_only_a_good_file("cut");
        assert!(samples.keys().all(|series| !series.name.starts_with("handoff_queue")), "depth after a failure");
    }
}
