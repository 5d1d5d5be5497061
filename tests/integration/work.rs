//! `handoff work`: what comes of a record by what its command does, and what is left when the worker is stopped or killed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::offload_settings::hold_lock;
use crate::test_env::{Background, Run, TestEnv, append, copy_program, mode, record, run, start, tool, under};

/// Nothing that is waited for takes so long.
const HANG: Duration = Duration::from_secs(60);

pub(crate) fn env_with(queue: &str) -> TestEnv {
    let env = TestEnv::new();
    env.write("queue.jsonl", queue);
    env
}

/// A worker of the role `researcher` that runs a script for each record.
pub(crate) fn worker(env: &TestEnv, arguments: &[&str], script: &str) -> Command {
    let mut command = env.bare_handoff();
    command.args(["work", "--queue", "queue.jsonl", "--role", "researcher", "--poll", "20ms"]);
    command.args(arguments).args(["--", "sh", "-c", script]);
    command
}

fn once(env: &TestEnv, script: &str) -> Run {
    let run = run(&mut worker(env, &["--once"], script));
    assert_eq!(run.code, Some(0), "{script}: {}", run.stderr);
    run
}

/// The records in the queue, by their ids.
pub(crate) fn records(env: &TestEnv) -> BTreeMap<String, Value> {
    let mut records = BTreeMap::new();
    for line in fs::read_to_string(env.path("queue.jsonl")).unwrap().lines() {
        let record: Value = serde_json::from_str(line).unwrap();
        if record["kind"] != "ledger" {
            let id = record["id"].as_str().unwrap().to_owned();
            assert!(records.insert(id, record).is_none(), "twice: {line}");
        }
    }
    records
}

pub(crate) fn status(env: &TestEnv, id: &str) -> String {
    records(env)[id]["status"].as_str().unwrap().to_owned()
}

fn nack(env: &TestEnv, id: &str) -> Value {
    let record = records(env)[id].clone();
    assert_eq!(record["nacks"].as_array().map(Vec::len), Some(1), "{record}");
    record["nacks"][0].clone()
}

pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < HANG, "waited in vain: {what}");
        sleep(Duration::from_millis(5));
    }
}

/// The process whose number a script has written into a file, as it is to do in one go.
fn process_in(env: &TestEnv, name: &str) -> String {
    let read = || fs::read_to_string(env.path(name)).unwrap_or_default();
    until(name, || read().ends_with('\n'));
    read().trim().to_owned()
}

fn lives(process: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.starts_with(" Z"))
}

fn signal(env: &TestEnv, name: &str, processes: &[&str]) {
    let run = run(env.command(tool("kill", "procps")).arg(format!("-{name}")).args(processes));
    assert_eq!(run.code, Some(0), "{}", run.stderr);
}

/// A worker in the background, which is killed at the end of the test.
pub(crate) struct Running<'a> {
    env: &'a TestEnv,
    child: Child,
}

impl<'a> Running<'a> {
    pub(crate) fn start(env: &'a TestEnv, command: &mut Command) -> Self {
        let messages = File::options().create(true).append(true).open(env.path("messages")).unwrap();
        Self { env, child: start(command.stderr(messages)) }
    }

    fn id(&self) -> String {
        self.child.id().to_string()
    }

    pub(crate) fn signal(&self, name: &str) {
        signal(self.env, name, &[&self.id()]);
    }

    /// Waits for its end: the exit code or else the signal, and what it said.
    pub(crate) fn end(mut self) -> (Option<i32>, Option<i32>, String) {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(start.elapsed() < HANG, "the worker hangs: {}", messages(self.env));
            sleep(Duration::from_millis(5));
        };
        (status.code(), status.signal(), messages(self.env))
    }

    fn stop(self) -> String {
        self.signal("TERM");
        self.stop_by_itself()
    }

    /// Waits for its end, after it was told to stop.
    fn stop_by_itself(self) -> String {
        let (code, signal, messages) = self.end();
        assert_eq!((code, signal), (Some(0), None), "{messages}");
        messages
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        // It may have ended by itself.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn messages(env: &TestEnv) -> String {
    fs::read_to_string(env.path("messages")).unwrap_or_default()
}

// What a command gets, and what comes of it.

#[test]
fn a_command_gets_the_record_and_is_told_of_the_queue() {
    let mut line = record("a/b \n'\"$(x)", "researcher", "queued").replace('\n', "\\n");
    line.truncate(line.len() - 2);
    let line = line.replace("'\"$", "'\\\"$") + "\n";
    let env = env_with(&(record("other", "patcher", "queued") + &line));
    let script = r#"cat >line; printf %s "$HANDOFF_ID" >id; printf %s "$AGENT_ROLE" >role; printf %s "$HANDOFF_QUEUE" >queue
        printf %s "${HANDOFF_LOCK-none}" >lock; printf %s "${HANDOFF_BLOB_DIR-none}" >blobs"#;
    let ended = once(&env, script);
    assert_eq!(ended.stdout, b"");
    let read = |name: &str| fs::read_to_string(env.path(name)).unwrap();
    assert_eq!(read("id"), "a/b \n'\"$(x)");
    assert_eq!((read("role"), read("lock"), read("blobs")), ("researcher".into(), "none".into(), "none".into()));
    assert_eq!(Path::new(&read("queue")), env.path("queue.jsonl"));
    let line = read("line");
    assert!(line.ends_with("}\n") && line.lines().count() == 1, "{line}");
    let line: Value = serde_json::from_str(&line).unwrap();
    assert_eq!((&line["status"], &line["payload"]), (&json!("running"), &json!({})));
    assert!(line["owner"]["pid"].is_u64() && line["started_ts"].is_number(), "{line}");
    assert_eq!(status(&env, "a/b \n'\"$(x)"), "done");
    assert_eq!(status(&env, "other"), "queued");

    // Tools that it runs find the same lock and store.
    append(&env, "queue.jsonl", &record("c", "researcher", "queued"));
    let ended = run(&mut worker(&env, &["--once", "--lock", "other.lock", "--blob-dir", "store"], script));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(Path::new(&read("lock")), env.path("other.lock"));
    assert_eq!(Path::new(&read("blobs")), env.path("store"));
}

#[test]
fn its_end_decides() {
    type Nack = (&'static str, &'static str, &'static str);
    let bad = |what| Some(("queued", "bad_output", what));
    // Status, class and the beginning of the reason.
    let cases: [(&str, Option<Nack>); 23] = [
        ("true", None),
        ("echo", None),
        ("echo '{}'", None),
        ("printf '\\n{\"result\":\\n [1,\\n2],\\n\"spend\":null}\\n\\n'", None),
        ("echo oops >&2; exit 75", Some(("queued", "exit_75", "exit code 75: oops"))),
        ("echo oops >&2; exit 65", Some(("dead", "exit_65", "exit code 65: oops"))),
        ("exit 3", Some(("queued", "exit_3", "exit code 3"))),
        ("exit 127", Some(("queued", "exit_127", "exit code 127"))),
        ("exit 143", Some(("queued", "exit_143", "exit code 143"))),
        ("echo bye >&2; kill -KILL $$", Some(("queued", "signal_kill", "ended by signal SIGKILL: bye"))),
        ("kill -TERM $$", Some(("queued", "signal_term", "ended by signal SIGTERM"))),
        ("kill -KILL 0", Some(("queued", "signal_kill", "ended by signal SIGKILL"))),
        ("echo done", bad("it is no JSON object, beginning with: done")),
        ("echo '[1]'", bad("it is no JSON object, beginning with: [1]")),
        ("echo '{\"result\":1}{}'", bad("trailing characters at line 1")),
        ("echo '{\"result\":1'", bad("EOF while parsing")),
        ("echo '{\"results\":1}'", bad("unknown field `results`")),
        ("echo '{\"result\":1,\"result\":2}'", bad("duplicate field `result`")),
        ("printf '{\"result\":\"\\377\"}'", bad("invalid utf-8")),
        ("echo '{\"result\":NaN}'", bad("expected value")),
        ("echo '{\"spend\":\"much\"}'", bad("the spend is neither")),
        ("echo '{\"followup\":{\"kind\":\"nap\",\"to\":\"x\"}}'", bad("")),
        ("echo '{\"followup\":{\"kind\":\"classify\",\"to\":\"\"}}'", bad("")),
    ];
    for (script, expected) in cases {
        let env = env_with(&record("a", "researcher", "queued"));
        once(&env, script);
        let Some((expected, class, reason)) = expected else {
            assert_eq!(status(&env, "a"), "done", "{script}");
            continue;
        };
        assert_eq!(status(&env, "a"), expected, "{script}");
        let nack = nack(&env, "a");
        assert_eq!((&nack["error_class"], &nack["by"]), (&json!(class), &json!("researcher")), "{script}");
        assert_eq!(nack["retryable"], json!(expected != "dead"));
        let told = nack["reason"].as_str().unwrap();
        let told = told.strip_prefix("its output can't be accepted: ").unwrap_or(told);
        assert!(told.starts_with(reason), "{script}: {told}");
        assert_eq!(records(&env).len(), 1, "{script}");
    }
}

#[test]
fn what_came_of_it_is_written_at_once() {
    let env = env_with(&record("a", "researcher", "queued"));
    let output = json!({
        "result": {"found": ["é", 1.50]},
        "spend": [{"id": "m", "cost_usd": 0.25}],
        "followup": {"kind": "file_bug", "to": "patcher", "payload": {"summary": "s"}},
    });
    env.write("output", serde_json::to_string_pretty(&output).unwrap());
    once(&env, "cat output");
    let mut records = records(&env);
    let a = records.remove("a").unwrap();
    assert_eq!((&a["status"], &a["result"], &a["spend"]), (&json!("done"), &output["result"], &output["spend"]));
    let (_, followup) = records.pop_first().unwrap();
    assert!(records.is_empty());
    let expected =
        [("kind", "file_bug"), ("from", "researcher"), ("to", "patcher"), ("status", "queued"), ("parent", "a")];
    for (name, value) in expected {
        assert_eq!(followup[name], value, "{followup}");
    }
}

#[test]
fn what_a_failed_attempt_cost_counts() {
    let env = env_with(&record("a", "researcher", "queued"));
    once(&env, "echo '{\"spend\":0.5}'; exit 75");
    assert_eq!(records(&env)["a"]["spend"], json!(0.5));
    once(&env, "echo '{\"spend\":0.25,\"followup\":{\"kind\":\"nap\",\"to\":\"x\"}}'");
    let a = &records(&env)["a"];
    assert_eq!((&a["spend"], &a["status"]), (&json!([0.5, 0.25]), &json!("human")), "{a}");
}

#[test]
fn the_last_kilobyte_of_standard_error_is_kept_and_all_is_passed_on() {
    let env = env_with(&record("a", "researcher", "queued"));
    // 1,024 bytes from the end lies the second byte of an é.
    let text = format!("{}é{}", "x".repeat(100_000), "y".repeat(1_023));
    env.write("text", &text);
    let ended = once(&env, "cat text >&2; exit 1");
    assert_eq!(nack(&env, "a")["reason"], format!("exit code 1: {}", "y".repeat(1_023)));
    assert!(ended.stderr.contains(&text));
}

#[test]
fn an_id_that_no_environment_holds_is_refused_for_good() {
    for id in ["a\\u0000b".to_owned(), "x".repeat(200_000)] {
        let env = env_with(&(record(&id, "researcher", "queued") + &record("next", "researcher", "queued")));
        once(&env, "exit 1");
        let refused = records(&env).into_values().find(|record| record["id"] != "next").unwrap();
        assert_eq!((&refused["status"], &refused["nacks"][0]["error_class"]), (&json!("dead"), &json!("bad_id")));
        once(&env, "true");
        assert_eq!(status(&env, "next"), "done");
    }
}

#[test]
fn another_role_and_an_empty_queue_are_nothing_to_do() {
    for queue in [String::new(), record("a", "patcher", "queued"), record("a", "researcher", "human")] {
        let env = env_with(&queue);
        let ended = run(&mut worker(&env, &["--once"], "touch ran"));
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(1), ""));
        assert!(!env.path("ran").exists());
        assert_eq!(fs::read_to_string(env.path("queue.jsonl")).unwrap(), queue);
    }
}

// Commands that can't be run.

#[test]
fn without_a_command_nothing_is_taken() {
    let queue = record("a", "researcher", "queued");
    let env = env_with(&queue);
    env.write("not-executable", "#!/bin/sh\n");
    fs::create_dir(env.path("directory")).unwrap();
    for program in ["no-such-program", "./no-such-program", "./not-executable", "./directory", ""] {
        let mut command = env.bare_handoff();
        let ended = run(command.args(["work", "--queue", "queue.jsonl", "--role", "researcher", "--", program]));
        assert_eq!(ended.code, Some(74), "{program}: {}", ended.stderr);
        let expected =
            format!("handoff: {program}: is no program in PATH that this user may run: correct COMMAND or PATH\n");
        assert_eq!(ended.stderr, expected);
        assert_eq!(fs::read_to_string(env.path("queue.jsonl")).unwrap(), queue);
    }
}

#[test]
fn a_record_whose_command_can_not_be_started_is_handed_back() {
    let env = env_with(&(record("a", "researcher", "queued") + &record("b", "researcher", "queued")));
    env.write("text", "#!/no/such/interpreter\n");
    copy_program(&env.path("text"), &env.path("program"));
    let mut command = env.bare_handoff();
    let ended = run(command.args(["work", "--queue", "queue.jsonl", "--role", "researcher", "--", "./program"]));
    assert_eq!(ended.code, Some(74), "{}", ended.stderr);
    let last = ended.stderr.lines().last().unwrap();
    assert!(last.contains("./program: cannot be run: ") && last.contains("the record has been handed back"), "{last}");
    for record in records(&env).values() {
        assert_eq!((&record["status"], record.get("nacks")), (&json!("queued"), None), "{record}");
    }
}

// Commands that misbehave.

#[test]
fn a_command_need_not_read_its_input() {
    let payload = format!("{{\"text\":\"{}\"}}", "x".repeat(10_000_000));
    for (script, result) in [
        ("true", Value::Null),
        ("exec <&-; sleep 0.1", Value::Null),
        ("head -c 1 >/dev/null; sleep 0.1", Value::Null),
        ("printf '{\"result\":%d}' \"$(wc -c)\"", json!(true)),
    ] {
        let env = env_with(&record("a", "researcher", "queued").replace("{}", &payload));
        let ended = run(&mut worker(&env, &["--once", "--max-bytes", "100MiB"], script));
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        let a = &records(&env)["a"];
        assert_eq!(a["status"], "done", "{script}: {}", ended.stderr);
        if result == json!(true) {
            assert!(a["result"].as_u64().unwrap() > 10_000_000, "{}", a["result"]);
        }
    }
}

#[test]
fn a_gigabyte_of_output_is_read_and_refused_in_little_memory() {
    let env = env_with(&record("a", "researcher", "queued"));
    let mut time = env.command(tool("time", "time"));
    time.args(["-f", "%M", "-o", "peak"]);
    let command = worker(&env, &["--once"], "head -c 1000000000 /dev/zero && echo all >&2");
    let ended = run(&mut under(time, &command));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let nack = nack(&env, "a");
    assert_eq!(nack["error_class"], "bad_output");
    let reason = nack["reason"].as_str().unwrap();
    assert!(reason.starts_with("its output can't be accepted: there is more than 16777216 bytes of it"), "{reason}");
    // It was not cut off, which would end it by a signal.
    assert!(ended.stderr.contains("all\n"), "{}", ended.stderr);
    let peak: u64 = fs::read_to_string(env.path("peak")).unwrap().trim().parse().unwrap();
    assert!((500..60_000).contains(&peak), "{peak} KiB");
}

#[test]
fn what_a_command_leaves_behind_ends_with_it() {
    let env = env_with(&record("a", "researcher", "queued"));
    // It ignores what can be ignored, and has the outputs open.
    once(
        &env,
        "sh -c 'trap \"\" TERM HUP; echo $$ >child; while :; do sleep 1; done' & while [ ! -s child ]; do sleep 0.01; done",
    );
    assert_eq!(status(&env, "a"), "done");
    let child = process_in(&env, "child");
    until("the child's end", || !lives(&child));
}

#[test]
fn what_has_left_for_a_session_of_its_own_does_not_hold_the_worker_up() {
    let env = env_with(&record("a", "researcher", "queued"));
    once(
        &env,
        "setsid sh -c 'echo $$ >child; exec sleep 1000' & while [ ! -s child ]; do sleep 0.01; done; echo '{\"result\":7}'",
    );
    assert_eq!(records(&env)["a"]["result"], json!(7));
    let child = process_in(&env, "child");
    assert!(lives(&child));
    signal(&env, "KILL", &[&child]);
}

#[test]
fn a_command_that_takes_too_long_is_ended_with_all_its_children() {
    for script in [
        // One that ends when it is told to, and one that must be killed, in the group and outside.
        "sleep 1000 & echo $! >child; wait",
        "trap '' TERM; echo $$ >child; while :; do sleep 1; done",
        "exec setsid sh -c 'trap \"\" TERM; echo $$ >child; while :; do sleep 1; done'",
    ] {
        let env = env_with(&record("a", "researcher", "queued"));
        let ended = run(&mut worker(&env, &["--once", "--timeout", "500ms"], script));
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        assert_eq!(status(&env, "a"), "queued", "{script}");
        let nack = nack(&env, "a");
        let reason = "took longer than --timeout";
        assert_eq!((&nack["error_class"], &nack["reason"]), (&json!("timeout"), &json!(reason)), "{script}");
        let child = process_in(&env, "child");
        until("the child's end", || !lives(&child));
    }
}

#[test]
fn exit_zero_after_the_timeout_is_too_late() {
    let env = env_with(&record("a", "researcher", "queued"));
    let script = "trap 'exit 0' TERM; while :; do sleep 0.05; done";
    let ended = run(&mut worker(&env, &["--once", "--timeout", "300ms"], script));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(nack(&env, "a")["error_class"], "timeout");
}

#[test]
fn what_is_found_again_and_again_is_said_once() {
    let doubtful = record("doubtful", "researcher", "queued").replace("{}", "[NaN]");
    let env = env_with(&(doubtful + &two_records() + &record("unowned", "researcher", "running")));
    let worker = Running::start(&env, &mut worker(&env, &[], "true"));
    until("both records", || {
        ["a", "b"].iter().all(|id| fs::read_to_string(env.path("queue.jsonl")).unwrap().contains(&format!("\"id\":\"{id}\",\"ts\":1795950000,\"kind\":\"classify\",\"from\":\"triage\",\"to\":\"researcher\",\"payload\":{{}},\"status\":\"done\"")))
    });
    append(&env, "queue.jsonl", "\n");
    sleep(Duration::from_millis(200));
    let messages = worker.stop();
    assert_eq!(messages.matches("record doubtful can't be taken: it is in doubt").count(), 1, "{messages}");
    assert_eq!(messages.matches("does not say who works on it").count(), 1, "{messages}");
}

// Being told to stop.

#[test]
fn an_idle_worker_stops_at_once() {
    for name in ["TERM", "INT", "HUP"] {
        let env = env_with(&record("a", "patcher", "queued"));
        let mut command = env.bare_handoff();
        command.args(["work", "--queue", "queue.jsonl", "--role", "researcher", "--poll", "1h", "--", "true"]);
        let worker = Running::start(&env, &mut command);
        until("a lock file", || env.path("queue.lock").exists());
        sleep(Duration::from_millis(100));
        worker.signal(name);
        let (code, signal, messages) = worker.end();
        assert_eq!((code, signal, messages.as_str()), (Some(0), None, ""), "{name}");
    }
}

fn two_records() -> String {
    record("a", "researcher", "queued") + &record("b", "researcher", "queued")
}

#[test]
fn the_record_at_hand_may_be_finished() {
    let env = env_with(&two_records());
    let script = "echo $$ >child; while [ ! -e go ]; do sleep 0.01; done; echo '{\"result\":1}'";
    let worker = Running::start(&env, &mut worker(&env, &["--stop-timeout", "1h"], script));
    process_in(&env, "child");
    worker.signal("TERM");
    sleep(Duration::from_millis(300));
    env.write("go", "");
    let (code, signal, messages) = worker.end();
    assert_eq!((code, signal), (Some(0), None), "{messages}");
    assert_eq!((status(&env, "a"), status(&env, "b")), ("done".to_owned(), "queued".to_owned()));
    assert_eq!(records(&env)["a"]["result"], json!(1));
}

fn assert_handed_back(env: &TestEnv, context: &str) {
    for (id, record) in records(env) {
        assert_eq!(record["status"], "queued", "{context}: {record}");
        for field in ["nacks", "owner", "started_ts", "finished_ts", "result"] {
            assert!(record[field].is_null(), "{context}: {id} has {field}: {record}");
        }
    }
}

#[test]
fn one_that_takes_longer_is_handed_back_without_a_nack() {
    for script in [
        "echo $$ >child; exec sleep 1000",
        "trap 'exit 1' TERM; echo $$ >child; while :; do sleep 0.05; done",
        "trap 'exit 0' TERM; echo $$ >child; while :; do sleep 0.05; done",
        "trap '' TERM; echo $$ >child; while :; do sleep 1; done",
    ] {
        let env = env_with(&two_records());
        let worker = Running::start(&env, &mut worker(&env, &["--stop-timeout", "100ms"], script));
        let child = process_in(&env, "child");
        worker.stop();
        assert_handed_back(&env, script);
        until("the child's end", || !lives(&child));
    }
}

#[test]
fn a_second_signal_ends_the_command_at_once() {
    let env = env_with(&two_records());
    let worker = Running::start(&env, &mut worker(&env, &["--stop-timeout", "1h"], "echo $$ >child; exec sleep 1000"));
    process_in(&env, "child");
    worker.signal("TERM");
    sleep(Duration::from_millis(100));
    worker.signal("TERM");
    let (code, signal, messages) = worker.end();
    assert_eq!((code, signal), (Some(0), None), "{messages}");
    assert_handed_back(&env, &messages);
}

#[test]
fn a_command_that_is_told_to_stop_with_its_worker_is_handed_back() {
    // As systemd does it, and as a shell tells of it.
    for script in
        ["echo $$ >child; exec sleep 1000", "echo $$ >child; trap 'exit 143' TERM; while :; do sleep 0.01; done"]
    {
        let env = env_with(&two_records());
        let worker = Running::start(&env, &mut worker(&env, &["--stop-timeout", "1h"], script));
        let child = process_in(&env, "child");
        signal(&env, "TERM", &[&child]);
        worker.signal("TERM");
        let (code, signal, messages) = worker.end();
        assert_eq!((code, signal), (Some(0), None), "{messages}");
        assert_handed_back(&env, &messages);
    }
}

#[test]
fn failures_count_even_while_it_stops() {
    for (code, expected) in [(1, "queued"), (65, "dead"), (75, "queued")] {
        let env = env_with(&record("a", "researcher", "queued"));
        let script = format!("echo $$ >child; while [ ! -e go ]; do sleep 0.01; done; exit {code}");
        let worker = Running::start(&env, &mut worker(&env, &["--stop-timeout", "1h"], &script));
        process_in(&env, "child");
        worker.signal("TERM");
        sleep(Duration::from_millis(100));
        env.write("go", "");
        let (ended, _, messages) = worker.end();
        assert_eq!((ended, status(&env, "a").as_str()), (Some(0), expected), "{messages}");
        assert_eq!(nack(&env, "a")["error_class"], format!("exit_{code}"));
    }
}

/// A running record whose owner has died with another boot of this host, and that was refused before: it is left to a person next.
fn last_attempt_of_a_dead_worker(id: &str) -> String {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let owner = format!(r#"{{"host":"{}","boot_id":"gone","pid":1,"start_time":1}}"#, host.trim());
    record(id, "researcher", "running").replace("}\n", &format!(",\"nacks\":[{{}}],\"owner\":{owner}}}\n"))
}

#[test]
fn nothing_is_begun_by_a_worker_that_is_told_to_stop_while_it_tells_people() {
    let env = env_with(&(last_attempt_of_a_dead_worker("a") + &record("b", "researcher", "queued")));
    let mut command = worker(&env, &[], "touch ran; exec sleep 1000");
    let worker =
        Running::start(&env, command.env("HANDOFF_NOTIFY", "echo >told; while [ ! -e go ]; do sleep 0.01; done"));
    until("the message", || env.path("told").exists());
    worker.signal("TERM");
    sleep(Duration::from_millis(100));
    env.write("go", "");
    worker.stop_by_itself();
    assert!(!env.path("ran").exists());
    assert_eq!((status(&env, "a"), status(&env, "b")), ("human".to_owned(), "queued".to_owned()));
    assert!(records(&env)["a"]["notified_ts"].is_number());
}

#[test]
fn what_is_taken_by_a_worker_that_is_told_to_stop_is_handed_back() {
    let env = env_with(&two_records());
    // Readers don't mind it, but whoever takes a record has to wait.
    let (holder, _) = hold_lock(&env, "queue.lock", "shared");
    let worker = Running::start(&env, &mut worker(&env, &["--lock-timeout", "1h"], "touch ran; exec sleep 1000"));
    let waits = |line: &str| line.contains("-> FLOCK") && line.split_whitespace().any(|word| word == worker.id());
    until("the wait for the lock", || fs::read_to_string("/proc/locks").unwrap().lines().any(waits));
    worker.signal("TERM");
    sleep(Duration::from_millis(100));
    holder.finish();
    let messages = worker.stop_by_itself();
    assert!(messages.contains("handed back") && !env.path("ran").exists(), "{messages}");
    assert_handed_back(&env, &messages);
}

// Workers that die.

#[test]
fn an_idle_worker_notices_that_another_has_died() {
    let env = env_with(&record("a", "researcher", "queued"));
    let mut other = Background::spawn(&mut env.command("cat"));
    let other_id = other.id().to_string();
    let taken =
        run(env.bare_handoff().args(["take", "--queue", "queue.jsonl", "--role", "researcher", "--owner", &other_id]));
    assert_eq!(taken.code, Some(0), "{}", taken.stderr);
    let worker = Running::start(&env, &mut worker(&env, &[], "true"));
    sleep(Duration::from_millis(500));
    assert_eq!(status(&env, "a"), "running");
    // Nothing is written.
    assert_eq!(other.exit_code(), Some(0));
    until("the next attempt", || status(&env, "a") == "done");
    assert_eq!(nack(&env, "a")["error_class"], "worker_died");
    worker.stop();
}

// Records that can't be changed.

#[test]
fn a_record_that_has_no_room_for_a_nack_is_left_running_and_told_of() {
    // A kilobyte of reason does not fit.
    let script = "[ $HANDOFF_ID = b ] || { head -c 2000 /dev/zero | tr '\\0' x >&2; exit 1; }";
    let told = "queue.jsonl:2: record a can't be refused: its line would be too long (--max-line)";
    let env = env_with(&two_records());
    let worker = Running::start(&env, &mut worker(&env, &["--max-line", "1000"], script));
    until("the next record", || status(&env, "b") == "done");
    let messages = worker.stop();
    assert_eq!(messages.matches(told).count(), 1, "{messages}");
    assert!(messages.contains("it stays running until its line is mended"), "{messages}");
    assert!(!messages.contains("somebody else"), "{messages}");
    assert_eq!(status(&env, "a"), "running");

    let env = env_with(&two_records());
    let ended = run(&mut self::worker(&env, &["--max-line", "1000", "--once"], script));
    assert_eq!((ended.code, ended.stderr.matches(told).count()), (Some(65), 1), "{}", ended.stderr);
    assert_eq!((status(&env, "a"), status(&env, "b")), ("running".to_owned(), "queued".to_owned()));
}

#[test]
fn what_came_of_a_record_is_kept_until_the_ledger_is_mended() {
    let env = env_with(&two_records());
    let script = "echo $$ >child; while [ ! -e go ]; do sleep 0.01; done; echo '{\"result\":1}'";
    let worker = Running::start(&env, &mut worker(&env, &["--lock-timeout", "1s"], script));
    process_in(&env, "child");
    let sed = |script: &str| {
        let edited = run(env.command("sed").args(["-i", script, "queue.jsonl"]));
        assert_eq!(edited.code, Some(0), "{}", edited.stderr);
    };
    sed("1s/\"payload\":{/\"payload\":[/");
    env.write("go", "");
    until("a warning", || messages(&env).contains("is kept, and written when it can be"));
    assert!(messages(&env).contains("the ledger cannot be read"), "{}", messages(&env));
    sed("1s/\"payload\":\\[/\"payload\":{/");
    until("the commit", || status(&env, "a") == "done");
    assert_eq!(records(&env)["a"]["result"], json!(1));
    drop(worker);
}

#[test]
fn what_a_killed_worker_began_dies_with_it_and_is_tried_again() {
    let env = env_with(&record("a", "researcher", "queued"));
    // A child in the background, and one that waits in the foreground.
    let script = "sleep 1000 & echo $! >child; echo $$ >parent; sleep 1000";
    for (attempt, expected) in [(1, "queued"), (2, "human")] {
        for name in ["child", "parent"] {
            drop(fs::remove_file(env.path(name)));
        }
        let worker = Running::start(&env, &mut worker(&env, &[], script));
        let processes = [process_in(&env, "child"), process_in(&env, "parent")];
        assert_eq!(status(&env, "a"), "running");
        worker.signal("KILL");
        worker.end();
        for process in processes {
            until("the end of what the worker began", || !lives(&process));
        }
        assert_eq!(status(&env, "a"), "running");
        // Another role has nothing to do with it.
        let other = run(env.bare_handoff().args([
            "work",
            "--queue",
            "queue.jsonl",
            "--role",
            "patcher",
            "--once",
            "--",
            "true",
        ]));
        assert_eq!((other.code, status(&env, "a").as_str()), (Some(1), "running"));
        if attempt == 2 {
            let ended = run(&mut self::worker(&env, &["--once"], "touch ran"));
            assert_eq!(ended.code, Some(1), "{}", ended.stderr);
            assert!(!env.path("ran").exists());
            let a = &records(&env)["a"];
            assert_eq!(a["status"], expected);
            let classes: Vec<&Value> = a["nacks"].as_array().unwrap().iter().map(|nack| &nack["error_class"]).collect();
            assert_eq!(classes, ["worker_died", "worker_died"]);
        }
    }
}

#[test]
fn what_nobody_can_tell_to_be_dead_is_left_alone() {
    let running = |id: &str, owner: &str| {
        record(id, "researcher", "running").replace("}\n", &format!(",\"started_ts\":1795950001{owner}}}\n"))
    };
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let owner = |host: &str, boot_id: &str| {
        format!(r#","owner":{{"host":"{}","boot_id":"{}","pid":1,"start_time":1}}"#, host.trim(), boot_id.trim())
    };
    let queue = running("none", "")
        + &running("odd", ",\"owner\":\"me\"")
        + &running("elsewhere", &owner("another-host", &boot_id))
        + &running("rebooted", &owner(&host, "00000000-0000-0000-0000-000000000000"))
        + &running("reused", &owner(&host, &boot_id));
    let env = env_with(&queue);
    let ended = run(&mut worker(&env, &["--once"], "exit 3"));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let of = |status: &str| -> BTreeSet<String> {
        records(&env).into_iter().filter(|(_, record)| record["status"] == status).map(|(id, _)| id).collect()
    };
    assert_eq!(of("running"), ["none", "odd", "elsewhere"].map(str::to_owned).into());
    let told = "queue.jsonl:1: a running record does not say who works on it";
    assert_eq!(ended.stderr.matches(told).count(), 1, "{}", ended.stderr);
    assert_eq!(ended.stderr.matches("does not say who works on it").count(), 1, "{}", ended.stderr);
    // One of the two was then worked on, which failed.
    assert_eq!(of("human").len(), 1);
    assert_eq!(of("queued").len(), 1);
}

// Beside others.

#[test]
fn workers_of_a_role_never_get_the_same_record() {
    let ids: Vec<String> = (0..60).map(|number| format!("r-{number}")).collect();
    let env = env_with(&ids.iter().map(|id| record(id, "researcher", "queued")).collect::<String>());
    let script = "echo $HANDOFF_ID >>log";
    let workers: Vec<Running<'_>> = (0..3).map(|_| Running::start(&env, &mut worker(&env, &[], script))).collect();
    until("the last record", || records(&env).values().all(|record| record["status"] == "done"));
    for worker in workers {
        worker.stop();
    }
    let log = fs::read_to_string(env.path("log")).unwrap();
    let mut worked_on: Vec<&str> = log.lines().collect();
    worked_on.sort_unstable();
    let mut expected: Vec<&str> = ids.iter().map(String::as_str).collect();
    expected.sort_unstable();
    assert_eq!(worked_on, expected);
}

#[test]
fn records_that_others_append_are_seen_and_an_idle_worker_takes_no_lock() {
    let env = env_with(&record("other", "patcher", "queued"));
    let mut strace = env.command(tool("strace", "strace"));
    strace.args(["-f", "-qq", "-e", "trace=flock,openat", "-o", "calls"]);
    let worker = Running::start(&env, &mut under(strace, &worker(&env, &[], "true")));
    let calls = |what: &str| {
        let calls = fs::read_to_string(env.path("calls")).unwrap_or_default();
        calls.lines().filter(|line| line.contains(what)).count()
    };
    until("many looks", || calls("queue.jsonl\"") > 40);
    let locks = calls("flock(");
    assert!((1..20).contains(&locks), "{locks} locks in {} looks", calls("queue.jsonl\""));
    let seen = calls("queue.jsonl\"");
    // In all of these it also looks three times whether another worker has died.
    until("more looks", || calls("queue.jsonl\"") > seen + 100);
    assert_eq!(calls("flock("), locks);
    append(&env, "queue.jsonl", &record("a", "researcher", "queued"));
    until("the appended record", || status(&env, "a") == "done");
    let id = fs::read_to_string(env.path("calls")).unwrap().split_whitespace().next().unwrap().to_owned();
    signal(&env, "TERM", &[&id]);
    assert_eq!(worker.end().0, Some(0));
}

#[test]
fn a_busy_lock_is_waited_for_before_and_after_a_record() {
    let env = env_with(&record("a", "researcher", "queued"));
    let (holder, _) = hold_lock(&env, "queue.lock", "exclusive");
    let script = "echo $$ >>child; while [ ! -e go ]; do sleep 0.01; done; echo '{\"result\":5}'";
    let worker = Running::start(&env, &mut worker(&env, &["--lock-timeout", "50ms"], script));
    until("a warning", || messages(&env).contains("still locked after 50ms"));
    holder.finish();
    process_in(&env, "child");
    let (holder, _) = hold_lock(&env, "queue.lock", "exclusive");
    env.write("go", "");
    until("a warning", || messages(&env).contains("is kept, and written when it can be"));
    holder.finish();
    until("the commit", || status(&env, "a") == "done");
    worker.stop();
    assert_eq!(records(&env)["a"]["result"], json!(5));
    assert_eq!(fs::read_to_string(env.path("child")).unwrap().lines().count(), 1);
}

#[test]
fn a_worker_that_is_to_stop_and_can_not_write_says_so() {
    let env = env_with(&record("a", "researcher", "queued"));
    let script = "echo $$ >child; while [ ! -e go ]; do sleep 0.01; done";
    // Whoever has told it to stop does not wait that long.
    let worker = Running::start(&env, &mut worker(&env, &["--lock-timeout", "1h"], script));
    process_in(&env, "child");
    let (_holder, _) = hold_lock(&env, "queue.lock", "exclusive");
    worker.signal("TERM");
    sleep(Duration::from_millis(300));
    env.write("go", "");
    let (code, _, messages) = worker.end();
    assert_eq!(code, Some(75), "{messages}");
    let last = messages.lines().last().unwrap();
    assert!(last.contains("the record stays running until the role's next worker starts"), "{messages}");
    assert_eq!(status(&env, "a"), "running");
}

#[test]
fn a_record_that_others_have_ended_meanwhile_is_left_to_them() {
    for script in ["echo '{\"result\":1}'", "exit 1", "exit 65", "echo garbage"] {
        let env = env_with(&record("a", "researcher", "queued"));
        let script = format!("echo $$ >child; while [ ! -e go ]; do sleep 0.01; done; {script}");
        let worker = Running::start(&env, &mut worker(&env, &[], &script));
        process_in(&env, "child");
        let cancelled = run(env.bare_handoff().args(["cancel", "--queue", "queue.jsonl", "--force", "a"]));
        assert_eq!(cancelled.code, Some(0), "{}", cancelled.stderr);
        let before = records(&env)["a"].clone();
        env.write("go", "");
        until("a warning", || messages(&env).contains("somebody else has changed it meanwhile"));
        // And it goes on.
        append(&env, "queue.jsonl", &record("b", "researcher", "queued"));
        until("the next record", || {
            status(&env, "b") != "queued" && status(&env, "b") != "running" || !records(&env)["b"]["nacks"].is_null()
        });
        worker.stop();
        assert_eq!(records(&env)["a"], before);
    }
}

#[test]
fn what_a_command_takes_belongs_to_it_and_not_to_the_worker() {
    let env = env_with(&(record("a", "researcher", "queued") + &record("b", "helper", "queued")));
    let handoff = env!("CARGO_BIN_EXE_handoff");
    // It can't end its own record, which the worker has.
    let script = format!(
        "{handoff} take --role helper >taken; {handoff} done $HANDOFF_ID; echo $? >code; echo >ready; while [ ! -e go ]; do sleep 0.01; done"
    );
    let worker = Running::start(&env, &mut worker(&env, &[], &script));
    until("the command", || env.path("ready").exists());
    assert_eq!(fs::read_to_string(env.path("code")).unwrap(), "65\n");
    let requeue = || run(env.bare_handoff().args(["requeue", "--queue", "queue.jsonl", "b"]));
    let refused = requeue();
    assert_eq!(refused.code, Some(65), "{}", refused.stderr);
    assert!(refused.stderr.contains("which is alive, holds it"), "{}", refused.stderr);
    env.write("go", "");
    until("its end", || status(&env, "a") == "done");
    assert_eq!(status(&env, "b"), "running");
    // The worker lives, the command doesn't.
    let requeued = requeue();
    assert_eq!((requeued.code, status(&env, "b").as_str()), (Some(0), "queued"), "{}", requeued.stderr);
    worker.stop();
}

#[test]
fn an_unreadable_queue_ends_it() {
    let env = TestEnv::new();
    fs::create_dir(env.path("queue.jsonl")).unwrap();
    let ended = run(&mut worker(&env, &[], "true"));
    assert_eq!(ended.code, Some(74), "{}", ended.stderr);
    assert_eq!(mode(&env.path("queue.jsonl")) & 0o700, 0o700);
}
