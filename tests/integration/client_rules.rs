//! The rules of handing over where they are tried hardest: records in the way of others, marks that have outlived their reason, loops, and
//! flushes that fail after the fact.

use std::fs;

use serde_json::{Value, json};

use crate::strace::{fail_with, own_calls, traced};
use crate::test_env::{Run, TestEnv, run};

fn handoff(env: &TestEnv, verb: &str, arguments: &[&str]) -> Run {
    run(env.bare_handoff().args([verb, "--queue", "queue.jsonl"]).args(arguments))
}

fn done(env: &TestEnv, verb: &str, arguments: &[&str]) -> String {
    let run = handoff(env, verb, arguments);
    assert_eq!(run.code, Some(0), "{verb} {arguments:?}: {}", run.stderr);
    String::from_utf8(run.stdout).unwrap().trim_end().to_owned()
}

fn line(id: &str, ts: u32, status: &str, more: &str) -> String {
    format!(
        "{{\"id\":\"{id}\",\"ts\":{ts},\"kind\":\"classify\",\"from\":\"a\",\"to\":\"b\",\"payload\":{{}},\"status\":\"{status}\"{more}}}\n"
    )
}

fn record(env: &TestEnv, id: &str) -> Value {
    let queue = fs::read_to_string(env.path("queue.jsonl")).unwrap();
    let is_it = |record: &Value| record["id"] == id;
    queue.lines().filter_map(|line| serde_json::from_str(line).ok()).find(is_it).unwrap()
}

/// The value of a metric.
fn metric(env: &TestEnv, name: &str) -> f64 {
    let text = String::from_utf8(run(&mut env.to_stdout()).stdout).unwrap();
    let line = text.lines().find(|line| line.starts_with(name) && line[name.len()..].starts_with(' '));
    line.and_then(|line| line.rsplit_once(' ')).map_or(0.0, |(_, value)| value.parse().unwrap())
}

#[test]
fn a_record_that_cannot_be_taken_keeps_no_other_from_it() {
    let env = TestEnv::new();
    let long = format!(r#","x":"{}""#, "y".repeat(900));
    env.write(
        "queue.jsonl",
        [line("doubt", 1, "queued", r#","nacks":-1"#), line("long", 2, "queued", &long), line("good", 3, "queued", "")]
            .concat(),
    );
    let taken = handoff(&env, "take", &["--role", "b", "--max-line", "1100", "--owner", "1"]);
    assert_eq!(taken.code, Some(0), "{}", taken.stderr);
    assert_eq!(serde_json::from_slice::<Value>(&taken.stdout).unwrap()["id"], "good");
    assert!(taken.stderr.contains("queue.jsonl:1: record doubt can't be taken"), "{}", taken.stderr);
    // When nothing else is there, it is said, and there is nothing to take.
    let none = handoff(&env, "take", &["--role", "b", "--max-line", "1100"]);
    assert_eq!((none.code, none.stdout.len()), (Some(1), 0), "{}", none.stderr);
    assert!(none.stderr.contains("can't be taken"), "{}", none.stderr);
}

#[test]
fn nacks_of_any_number_are_counted_on() {
    let env = TestEnv::new();
    env.write("queue.jsonl", line("many", 1, "queued", r#","nacks":5000"#));
    let nacks = |env: &TestEnv| metric(env, "handoff_nacks_total{role=\"b\",kind=\"classify\"}");
    assert!((nacks(&env) - 5000.0).abs() < 0.5);
    done(&env, "take", &["--role", "b"]);
    assert_eq!(done(&env, "nack", &["many", "--reason", "no"]), "human");
    assert!((nacks(&env) - 5001.0).abs() < 0.5, "{}", nacks(&env));
    assert_eq!(record(&env, "many")["nacks"].as_array().unwrap().len(), 1001);
}

#[test]
fn a_mark_of_an_earlier_mail_does_not_outlive_its_reason() {
    let env = TestEnv::new();
    let marks = r#","nacks":1,"notified_ts":1700000000,"stopped":{"reason":"old"}"#;
    for (verb, status, arguments) in [
        ("take", "queued", &["--role", "b"][..]),
        ("nack", "running", &["1", "--reason", "no"]),
        ("requeue", "human", &["1"]),
    ] {
        env.write("queue.jsonl", line("1", 1_700_000_000, status, marks));
        done(&env, verb, arguments);
        let record = record(&env, "1");
        assert_eq!((&record["notified_ts"], &record["stopped"]), (&Value::Null, &Value::Null), "{verb}: {record}");
    }
}

#[test]
fn who_may_still_hold_a_record_is_not_overruled() {
    let env = TestEnv::new();
    for owner in [
        r#"{"host":"elsewhere","boot_id":"x","pid":1,"start_time":1}"#,
        r#"{"host":"elsewhere","boot_id":"x","pid":"1"}"#,
        "17",
    ] {
        for verb in [&["done", "1"][..], &["nack", "1", "--reason", "no"], &["requeue", "1"], &["cancel", "1"]] {
            env.write("queue.jsonl", line("1", 1, "running", &format!(",\"owner\":{owner}")));
            let refused = handoff(&env, verb[0], &verb[1..]);
            assert_eq!(refused.code, Some(65), "{verb:?} {owner}: {}", refused.stderr);
            assert!(refused.stderr.contains("--force"), "{}", refused.stderr);
            done(&env, verb[0], &[&verb[1..], &["--force"]].concat());
        }
    }
    // Where nobody holds it for certain, who works on it may end it.
    env.write("queue.jsonl", line("1", 1, "running", ""));
    assert_eq!(done(&env, "done", &["1"]), "done");
}

#[test]
fn a_chain_that_leads_back_to_itself_waits_for_a_person() {
    let env = TestEnv::new();
    let parent = |of: &str| format!(",\"parent\":\"{of}\"");
    env.write("queue.jsonl", [line("1", 1, "done", &parent("2")), line("2", 2, "done", &parent("1"))].concat());
    // Each has its one follow-up already.
    assert_eq!(
        handoff(&env, "put", &["--kind", "classify", "--from", "a", "--to", "b", "--parent", "1"]).code,
        Some(65)
    );
    env.write(
        "queue.jsonl",
        [line("1", 1, "done", &parent("2")), line("2", 2, "done", &parent("2")), line("3", 3, "done", &parent("1"))]
            .concat(),
    );
    let id =
        done(&env, "put", &["--kind", "classify", "--from", "a", "--to", "b", "--parent", "3", "--max-hops", "100"]);
    assert_eq!(record(&env, &id)["stopped"]["error_class"], "too_many_hops");
}

#[test]
fn what_is_dead_from_the_start_is_so_the_second_time_too() {
    let env = TestEnv::new();
    let put = || handoff(&env, "put", &["--kind", "classify", "--from", "a", "--to", "a", "--run-id", "r"]);
    let (first, second) = (put(), put());
    assert_eq!((first.code, second.code), (Some(65), Some(65)), "{}", second.stderr);
    assert_eq!(first.stdout, second.stdout);
}

#[test]
fn done_tells_of_its_follow_up() {
    let env = TestEnv::new();
    let followup = r#"{"kind":"file_bug","to":"c","payload":{}}"#;
    env.write("queue.jsonl", line("1", 1, "running", ""));
    let answer: Value = serde_json::from_str(&done(&env, "done", &["1", "--followup", followup, "--json"])).unwrap();
    let id = answer["followup"]["id"].as_str().unwrap();
    assert_eq!((&answer["status"], &answer["record"]), (&json!("done"), &record(&env, "1")));
    assert_eq!((&record(&env, id)["parent"], &record(&env, id)["from"]), (&json!("1"), &json!("b")));
    // One that hands over to itself is kept as dead, but what was asked for is done.
    env.write("queue.jsonl", line("1", 1, "running", ""));
    let to_itself = handoff(&env, "done", &["1", "--followup", &followup.replace("\"c\"", "\"b\"")]);
    assert_eq!((to_itself.code, to_itself.stdout.as_slice()), (Some(0), &b"done\n"[..]), "{}", to_itself.stderr);
    assert!(to_itself.stderr.contains("is kept as dead"), "{}", to_itself.stderr);
}

/// The last flush comes after the commit: what was done is told, and that a power cut could undo it.
#[test]
fn a_flush_that_fails_after_the_commit_is_told_beside_what_was_done() {
    let env = TestEnv::new();
    let queue = line("1", 1, "queued", "");
    let mut take = env.bare_handoff();
    take.args(["take", "--queue", "queue.jsonl", "--role", "b"]);
    env.write("queue.jsonl", &queue);
    let (_, trace) = traced(&env, &take, &[]);
    let mut flushes = own_calls(&trace).into_iter().filter(|call| call.name == "fsync");
    let last = &flushes.next_back().expect("it flushes");
    env.write("queue.jsonl", &queue);
    let (taken, _) = traced(&env, &take, &["-e", &fail_with("EIO", last)]);
    assert_eq!(taken.code, Some(74), "{}", taken.stderr);
    assert_eq!(serde_json::from_slice::<Value>(&taken.stdout).unwrap(), record(&env, "1"));
    assert!(taken.stderr.contains("a power cut now could bring back the old one"), "{}", taken.stderr);
}

/// As when a shell has taken a record and a script that it starts finishes it, or the command of a worker refuses its own.
#[test]
fn what_an_owner_has_started_may_end_its_record_and_nobody_else_may() {
    let env = TestEnv::new();
    let script = |take: &str, end: &str| {
        env.write("queue.jsonl", line("1", 1, "queued", ""));
        let handoff = env.bare_handoff();
        let script = format!(
            "set -m; H=\"$0 \"; export HANDOFF_QUEUE=queue.jsonl\n{take} >/dev/null\nsh -c '(\"$0\" done 1; echo $?)' \"$0\" {end}"
        );
        run(env.command("bash").args(["-c", &script]).arg(handoff.get_program()))
    };
    // The script is a group of its own, three processes below.
    let below = script("\"$0\" take --role b", "");
    assert_eq!(String::from_utf8_lossy(&below.stdout), "done\n0\n", "{}", below.stderr);
    // Process 1 is above everybody; a process beside us is not.
    let beside = script("sleep 60 & other=$!; trap 'kill $other' EXIT; \"$0\" take --role b --owner $other", "");
    assert_eq!(String::from_utf8_lossy(&beside.stdout), "65\n", "{}", beside.stderr);
}
