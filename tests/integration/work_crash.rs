//! `handoff work` killed before any call that matters, and with any of them failing: its record is worked on in the end, and once if it was done.

use std::fs;

use serde_json::{Value, json};

use crate::kill_and_inject::{Call, calls_in};
use crate::strace::{changes_something, context_of, fail_with, kill_before};
use crate::test_env::{Run, TestEnv, record, run, tell, tool, under};
use crate::work::{env_with, records, worker};

const SCRIPT: &str = r#"echo began >>log; cat >input
    printf '{"result":[1],"spend":0.5,"followup":{"kind":"file_bug","to":"patcher","payload":{"n":1}}}'"#;

fn scene() -> TestEnv {
    let env = env_with(&(record("other", "patcher", "queued") + &record("a", "researcher", "queued")));
    env.write("queue.lock", "");
    env
}

/// Runs the worker under strace(1), which looks at its main thread only: that does everything with files.
fn traced(env: &TestEnv, arguments: &[&str]) -> Run {
    let mut strace = env.command(tool("strace", "strace"));
    strace.args(["-qq", "-o", "textfile/trace"]).args(arguments);
    run(&mut under(strace, &worker(env, &["--once"], SCRIPT)))
}

/// Calls that start, await or end processes and threads, beside those that change files.
const PROCESSES: &str = "clone clone3 vfork wait4 waitid kill futex";

fn calls() -> Vec<Call> {
    let env = scene();
    let run = traced(&env, &[]);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert_finished(&env, 0, "untouched");
    let trace = fs::read_to_string(env.path("textfile/trace")).expect("strace(1) must be allowed to trace");
    // As if a thread had been told.
    let trace = trace.lines().map(|line| format!("1 {line}")).collect::<Vec<_>>().join("\n");
    let matters = |call: &Call| changes_something(call) || PROCESSES.split(' ').any(|name| name == call.name);
    let calls: Vec<Call> = calls_in(&trace).into_iter().filter(matters).collect();
    assert!(calls.len() > 30, "{} calls are too few to be true", calls.len());
    calls
}

fn began(env: &TestEnv) -> usize {
    fs::read_to_string(env.path("log")).unwrap_or_default().lines().count()
}

fn assert_finished(env: &TestEnv, nacks: usize, context: &str) {
    let mut records = records(env);
    let (other, a) = (records.remove("other").unwrap(), records.remove("a").unwrap());
    assert_eq!(other["status"], "queued", "{context}");
    assert_eq!((&a["status"], &a["result"], &a["spend"]), (&json!("done"), &json!([1]), &json!(0.5)), "{context}");
    assert_eq!(a["nacks"].as_array().map_or(0, Vec::len), nacks, "{context}: {a}");
    assert_eq!(records.len(), 1, "{context}");
    let followup = records.pop_first().unwrap().1;
    assert_eq!((&followup["parent"], &followup["status"]), (&json!("a"), &json!("queued")), "{context}");
}

/// Lets further workers go on, and tells what the first one left.
fn assert_goes_on(env: &TestEnv, context: &str) -> String {
    let left = records(env);
    let status = left["a"]["status"].as_str().unwrap().to_owned();
    assert_eq!(left.len(), if status == "done" { 3 } else { 2 }, "{context}");
    let before = began(env);
    let ended: Vec<Run> = (0..2).map(|_| run(&mut worker(env, &["--once"], SCRIPT))).collect();
    let codes: Vec<Option<i32>> = ended.iter().map(|run| run.code).collect();
    let expected = if status == "done" { [Some(1), Some(1)] } else { [Some(0), Some(1)] };
    assert_eq!(codes, expected, "{context}: {ended:?}");
    assert_eq!(began(env) - before, usize::from(status != "done"), "{context}");
    assert!(before <= 1, "{context}");
    let nacks: Vec<Value> = left["a"]["nacks"].as_array().cloned().unwrap_or_default();
    assert_finished(env, nacks.len() + usize::from(status == "running"), context);
    status
}

#[test]
fn killed_before_any_call_it_leaves_a_record_that_is_worked_on_or_done() {
    let mut left = std::collections::BTreeMap::new();
    for call in calls() {
        let env = scene();
        let context = context_of("killed before", &call);
        let run = traced(&env, &["-e", &kill_before(&call)]);
        // What comes from other threads is not the same each time.
        if run.signal.is_none() && run.code == Some(0) && call.name == "futex" {
            continue;
        }
        assert_eq!((run.code, run.signal), (None, Some(9)), "{context}: {}", run.stderr);
        *left.entry(assert_goes_on(&env, &context)).or_insert(0) += 1;
    }
    tell(&format!("{left:?}"));
    assert!(["queued", "running", "done"].iter().all(|status| left.contains_key(*status)), "{left:?}");
}

#[test]
fn a_call_that_fails_costs_no_record() {
    for (index, call) in calls().into_iter().enumerate() {
        if ["wait4", "waitid", "kill", "futex"].contains(&call.name.as_str()) {
            continue;
        }
        let error = match call.name.as_str() {
            "clone" | "clone3" | "vfork" => "EAGAIN",
            _ if index % 2 == 0 => "EIO",
            _ => "ENOSPC",
        };
        let env = scene();
        let context = context_of(error, &call);
        let run = traced(&env, &["-e", &fail_with(error, &call)]);
        assert!(matches!(run.code, Some(0 | 74)), "{context}: {:?} {}", run.code, run.stderr);
        assert!(run.code == Some(0) || run.stderr.contains("handoff: "), "{context}");
        // What took effect though it seemed to fail is not taken for somebody else's.
        assert!(!run.stderr.contains("somebody else has changed it"), "{context}: {}", run.stderr);
        assert_goes_on(&env, &context);
    }
}
