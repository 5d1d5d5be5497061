//! Earlier generations of the queue, which compaction leaves beside it until they are drained.

use std::fs;
use std::os::unix::fs::symlink;

use crate::exposition::{sum, value};
use crate::test_env::{TestEnv, record, run};

fn ledger(generations: &str) -> String {
    format!(
        r#"{{"id":"ledger","ts":1795950000,"kind":"ledger","from":"handoff","to":"","payload":{{"version":1,"totals":{{}},"generations":{{{generations}}}}},"status":"ledger"}}"#
    ) + "\n"
}

/// Asserts how many records and generations the exporter counts, and what it says.
fn assert_counts(env: &TestEnv, records: f64, generations: f64, messages: &[&str]) {
    let run = run(&mut env.to_stdout());
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let samples = run.samples();
    let counted = sum(&samples, "handoff_queue_records", &[]);
    assert!((counted - records).abs() < 0.5, "{counted} records, not {records}");
    let counted = value(&samples, "handoff_queue_generations", &[]);
    assert!((counted - generations).abs() < 0.5, "{counted} generations, not {generations}");
    let lines: Vec<&str> = run.stderr.lines().collect();
    assert_eq!(lines.len(), messages.len(), "{lines:#?}");
    for (line, message) in lines.iter().zip(messages) {
        assert!(line.contains(message), "{line:?} doesn't say {message:?}");
    }
}

#[test]
fn late_lines_are_counted_from_the_offset_on() {
    let env = TestEnv::new();
    let taken_over = record("old-1", "researcher", "done") + &record("old-2", "researcher", "done");
    let late = record("late-1", "researcher", "queued") + "not json\n" + &record("late-2", "patcher", "queued");
    env.write("queue.gen.7", taken_over.clone() + &late);
    env.write("queue.jsonl", ledger(&format!(r#""7":{}"#, taken_over.len())) + &record("live", "researcher", "queued"));
    // The line's number is that in the generation's file.
    assert_counts(&env, 3.0, 1.0, &["queue.gen.7:4: malformed line (not_json)"]);

    // As soon as they have been taken over, they count once, as part of the queue.
    let all = taken_over.len() + late.len();
    env.write("queue.jsonl", ledger(&format!(r#""7":{all}"#)) + &record("live", "researcher", "queued") + &late);
    assert_counts(&env, 3.0, 1.0, &["queue.jsonl:4: malformed line (not_json)"]);
}

#[test]
fn a_late_line_in_flight_is_left_for_later() {
    let env = TestEnv::new();
    let late = record("late", "researcher", "queued");
    let (beginning, end) = late.split_at(40);
    env.write("queue.jsonl", ledger(r#""7":0"#));
    env.write("queue.gen.7", beginning);
    assert_counts(&env, 0.0, 1.0, &[]);
    env.write("queue.gen.7", [beginning, end].concat());
    assert_counts(&env, 1.0, 1.0, &[]);
}

#[test]
fn several_generations_are_read_in_the_order_of_their_numbers() {
    let env = TestEnv::new();
    env.write("queue.jsonl", ledger(r#""9":0,"10":0"#) + &ledger(r#""9":5"#));
    env.write("queue.gen.10", "ten\n".to_owned() + &record("b", "patcher", "queued"));
    env.write("queue.gen.9", "nine\n".to_owned() + &record("a", "researcher", "queued"));
    // Of several offsets the largest counts: 5 bytes, which is the whole first line of generation 9.
    assert_counts(&env, 2.0, 2.0, &["queue.gen.10:1: malformed"]);
    env.write("queue.jsonl", ledger(r#""9":0,"10":0"#));
    assert_counts(&env, 2.0, 2.0, &["queue.gen.9:1: malformed", "queue.gen.10:1: malformed"]);
}

#[test]
fn an_unlisted_generation_is_reported_and_not_counted() {
    let env = TestEnv::new();
    env.write("queue.jsonl", ledger("") + &record("live", "researcher", "queued"));
    env.write("queue.gen.3", record("stray", "researcher", "queued"));
    assert_counts(&env, 1.0, 1.0, &["queue.gen.3: a generation, but the queue has no ledger that lists it: not read"]);
}

#[test]
fn a_second_name_of_the_queue_is_not_counted() {
    let env = TestEnv::new();
    env.write("queue.jsonl", ledger("") + &record("live", "researcher", "queued"));
    fs::hard_link(env.path("queue.jsonl"), env.path("queue.gen.3")).unwrap();
    assert_counts(&env, 1.0, 0.0, &[]);
}

#[test]
fn a_generation_shorter_than_its_offset_is_reported() {
    let env = TestEnv::new();
    env.write("queue.jsonl", ledger(r#""7":1000"#));
    env.write("queue.gen.7", record("a", "researcher", "queued"));
    assert_counts(&env, 0.0, 1.0, &["queue.gen.7: has"]);
}

#[test]
fn late_lines_count_while_the_queue_itself_is_a_symbolic_link() {
    let env = TestEnv::new();
    fs::create_dir(env.path("real")).unwrap();
    env.write("real/work.jsonl", ledger(r#""7":0"#));
    env.write("real/work.gen.7", record("late", "researcher", "queued"));
    env.write("queue.gen.7", record("not of this queue", "researcher", "queued"));
    symlink("real/work.jsonl", env.path("queue.jsonl")).unwrap();
    assert_counts(&env, 1.0, 1.0, &[]);
}

#[test]
fn whatever_else_is_named_like_a_generation_stops_no_run() {
    let env = TestEnv::new();
    env.write("queue.jsonl", record("a", "researcher", "queued"));
    fs::create_dir(env.path("queue.gen.5")).unwrap();
    symlink("nowhere", env.path("queue.gen.6")).unwrap();
    env.write("queue.gen.07", "");
    env.write("queue.gen.x", "");
    let run = run(&mut env.to_stdout());
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert!(run.stderr.contains("queue.gen.5: and 1 more like it"), "{}", run.stderr);
    assert_eq!(run.stderr.lines().count(), 2, "{}", run.stderr);
}

#[test]
fn no_counter_wraps_whatever_a_ledger_says() {
    let env = TestEnv::new();
    let most = u64::MAX;
    let histogram = format!("{{\"buckets\":[{}],\"sum_us\":{most}}}", vec![most.to_string(); 13].join(","));
    let ledger = format!(
        "{{\"id\":\"ledger\",\"ts\":1,\"kind\":\"ledger\",\"from\":\"handoff\",\"to\":\"\",\"payload\":{{\"version\":1,\"totals\":{{\"cells\":[{{\
         \"role\":\"researcher\",\"kind\":\"classify\",\"records\":{most},\"done\":{most},\"dead\":{most},\"nacks\":{most},\"unpriced\":{most},\
         \"spend_usd\":\"34000000000\",\"queue_wait\":{histogram},\"role_time\":{histogram}}}]}},\"generations\":{{}}}},\"status\":\"ledger\"}}\n"
    );
    let record = "{\"id\":\"1\",\"ts\":1764400000,\"kind\":\"classify\",\"from\":\"a\",\"to\":\"researcher\",\"payload\":{},\"status\":\"done\",\
                  \"started_ts\":1764400001,\"finished_ts\":1764400002,\"nacks\":3,\"spend\":[1000000000,\"?\"]}\n";
    env.write("queue.jsonl", format!("{ledger}{record}{ledger}{record}"));
    let run = run(&mut env.to_stdout());
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let samples = run.samples();
    for name in ["handoff_records_total", "handoff_nacks_total", "handoff_spend_unpriced_records_total"] {
        assert!(sum(&samples, name, &[]) > 1.8e19, "{name} has wrapped");
    }
    for name in ["handoff_finished_total", "handoff_queue_wait_seconds_count", "handoff_role_time_seconds_count"] {
        assert!(sum(&samples, name, &[]) > 1.8e19, "{name} has wrapped");
    }
    assert!(sum(&samples, "handoff_spend_usd_total", &[]) > 3.4e10, "the money has wrapped");
}
