//! What the README tells people to do with `handoff`, at a shell and from Python, done.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::exposition::{Samples, sum};
use crate::strace;
use crate::test_env::{Run, TestEnv, in_tests, mode, names_in, python, readme_block, record, run, start, tool};

/// A program that finds `handoff` in its `PATH`, and its queue.
fn with_handoff(env: &TestEnv, program: &Path) -> Command {
    let handoff = env.bare_handoff();
    let directory = Path::new(handoff.get_program()).parent().unwrap();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let paths = [directory.to_owned()].into_iter().chain(std::env::split_paths(&path));
    let mut command = env.command(program);
    command.env("PATH", std::env::join_paths(paths).unwrap()).env("HANDOFF_QUEUE", "queue.jsonl");
    command
}

/// Runs a command line as the README has it.
fn sh(env: &TestEnv, line: &str) -> Run {
    run(with_handoff(env, &tool("bash", "bash")).args(["-o", "pipefail", "-c", line]))
}

/// The command lines of a block, each with what the README shows that it prints.
fn commands(block: &str) -> Vec<(String, String)> {
    let mut commands: Vec<(String, String)> = Vec::new();
    for line in block.lines() {
        match (line.strip_prefix("$ "), commands.last_mut()) {
            (Some(command), _) => commands.push((command.to_owned(), String::new())),
            (None, Some((command, output))) if output.is_empty() && command.ends_with('\\') => {
                command.extend(["\n", line]);
            }
            (None, Some((_, output))) => output.extend([line, "\n"]),
            (None, None) => panic!("no command comes before {line}"),
        }
    }
    commands
}

fn queue(env: &TestEnv) -> String {
    fs::read_to_string(env.path("queue.jsonl")).unwrap()
}

/// The records of the queue, among lines that are none.
fn records(env: &TestEnv) -> Vec<Value> {
    let queue = fs::read(env.path("queue.jsonl")).unwrap();
    // What no Rust string can hold is another matter.
    let text = String::from_utf8_lossy(&queue).replace("\\ud83d", "?");
    let lines = text.split('\n').filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|record| record["id"].is_string() && record["status"] != "ledger").collect()
}

/// What the exporter shows by the real clock.
fn samples(env: &TestEnv) -> Samples {
    let run = run(env.exporter().arg("--stdout"));
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    run.samples()
}

#[test]
fn at_a_shell_records_are_handed_over_as_the_readme_shows() {
    let env = TestEnv::new();
    let commands = commands(&readme_block("## Handing over", "```console\n"));
    let [(put, id), (take, _), ..] = commands.as_slice() else { panic!("{commands:?}") };
    for (command, output) in &commands {
        let mut command = command.clone();
        if command.contains(" ID ") {
            // Another one.
            assert_eq!([sh(&env, put).code, sh(&env, take).code], [Some(0); 2]);
            let record: Value = serde_json::from_str(&fs::read_to_string(env.path("record.json")).unwrap()).unwrap();
            command = command.replace(" ID ", &format!(" {} ", record["id"].as_str().unwrap()));
        }
        let run = sh(&env, &command);
        assert_eq!(run.code, Some(0), "{command}: {}", run.stderr);
        let printed = String::from_utf8(run.stdout).unwrap();
        if output == id {
            let shape = |text: &str| text.replace(|c: char| c.is_ascii_hexdigit(), "0");
            assert_eq!(shape(&printed), shape(id));
        } else {
            assert_eq!(&printed, output, "{command}");
        }
    }
    let none = sh(&env, &take.replace("researcher", "nobody"));
    assert_eq!(none.code, Some(1), "{}", none.stderr);
    let records = records(&env);
    let of = |name: &str| records.iter().map(|record| record[name].clone()).collect::<Vec<_>>();
    assert_eq!(of("status"), ["done", "queued", "queued"]);
    assert_eq!(of("to"), ["researcher", "patcher", "researcher"]);
    assert_eq!((&records[1]["parent"], &records[1]["payload"]), (&records[0]["id"], &json!({ "ticket": 4711 })));
    assert_eq!(records[2]["nacks"][0]["reason"], "no ticket id in the payload");
    let samples = samples(&env);
    let spent = sum(&samples, "handoff_spend_usd_total", &[("role", "researcher")]);
    assert!((spent - 0.0125).abs() < 1e-9, "{spent}");
}

#[test]
fn looking_shows_what_the_readme_says() {
    let env = TestEnv::new();
    let lines = [
        record("3f2a9c", "researcher", "running"),
        record("77", "researcher", "human").replace("1795950000", "1795940000"),
        "not json\n".to_owned(),
        record("78", "researcher", "queued"),
    ];
    env.write("queue.jsonl", lines.concat());
    let block = readme_block("### Looking", "```console\n");
    // What each prints and how it ends.
    let expected = [
        ("handoff status ", 0, "→ people are waited for"),
        ("handoff list --status human,running ", 0, "77 "),
        ("handoff show 3f2a ", 0, "id         3f2a9c\n"),
        ("handoff check ", 1, "queue.jsonl:3: not_json: no JSON at byte 1\n"),
        ("handoff check --quarantine ", 0, "queue.jsonl:2: note: no_owner: "),
    ];
    let commands = commands(&block);
    assert_eq!(commands.len(), expected.len(), "{commands:?}");
    for ((command, _), (beginning, code, text)) in commands.iter().zip(expected) {
        assert!(command.starts_with(beginning), "{command}");
        let run = sh(&env, command);
        let printed = String::from_utf8(run.stdout).unwrap();
        assert!(run.code == Some(code) && printed.contains(text), "{command}: {:?}: {printed}{}", run.code, run.stderr);
        if beginning.contains("list") {
            let ids: Vec<_> = printed.lines().map(|row| row.split_whitespace().next().unwrap()).collect();
            assert_eq!(ids, ["77", "3f2a9c"]);
        }
    }
    assert_eq!(fs::read_to_string(env.path("queue.bad.jsonl")).unwrap(), "not json\n");
    assert_eq!(sh(&env, "handoff show nix").code, Some(1));
    assert_eq!(sh(&env, "handoff show 7").code, Some(65));
    let json = sh(&env, "handoff list --status human,running --json");
    assert_eq!(String::from_utf8(json.stdout).unwrap(), [lines[1].as_str(), &lines[0]].concat());

    // And back.
    env.write("mended", record("79", "researcher", "queued"));
    let back = "flock queue.lock sh -c '{ echo; cat mended; } >> queue.jsonl'";
    assert!(fs::read_to_string(in_tests("../README.md")).unwrap().contains(&format!("`{back}`")));
    assert_eq!(sh(&env, back).code, Some(0));
    assert_eq!(sh(&env, "handoff show 79").code, Some(0));
}

/// The client of the README that calls `handoff`.
fn client() -> String {
    readme_block("### In Python", "```python\n")
}

/// The client of the README that does without, in the current directory.
fn own() -> String {
    let own = readme_block(&client(), "```python\n");
    assert!(own.contains("\"/var/lib/agents/queue.jsonl\"") && own.contains("\"/var/lib/agents/queue.lock\""));
    own.replace("/var/lib/agents", ".")
}

/// Runs a program in Python that begins with a block of the README, and returns what it prints, as JSON.
fn in_python(env: &TestEnv, block: &str, program: &str) -> Value {
    env.write("program.py", format!("{block}\n{program}"));
    let run = run(with_handoff(env, &python()).arg("program.py"));
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{}", String::from_utf8_lossy(&run.stdout));
    serde_json::from_slice(&run.stdout).unwrap()
}

#[test]
fn python_hands_over_by_calling_handoff_as_the_readme_says() {
    let env = TestEnv::new();
    let use_it = r#"
payload = {"summary": "é", "text": "\ud83d", "n": 12345678901234567890123}
first = put("classify", payload, "triage", "researcher")
second = put("classify", {}, "triage", "researcher")
job = take("researcher")
assert (job["id"], job["payload"], job["status"]) == (first, payload, "running"), job
done(job, {"refund": True, "why": "é\n"})
job = take("researcher")
assert job["id"] == second
done(job)
assert take("researcher") is None
refused = []
def refuse(action):
    try:
        action()
    except Refused as refusal:
        refused.append(str(refusal))
refuse(lambda: put("clasify", {}, "triage", "researcher"))
refuse(lambda: put("classify", None, "triage", "researcher"))
refuse(lambda: done(job))
import os
os.environ["HANDOFF_QUEUE"] = "nowhere/queue.jsonl"
try:
    take("researcher")
except OSError as error:
    refused.append(str(error))
print(json.dumps(refused))
"#;
    let refused = in_python(&env, &client(), use_it);
    let expected = ["clasify", "payload", "is done, and can't be done", "nowhere/queue.jsonl: "];
    let refused: Vec<&str> = refused.as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect();
    assert_eq!(refused.len(), expected.len(), "{refused:?}");
    assert!(refused.iter().zip(expected).all(|(text, part)| text.contains(part)), "{refused:?}");
    let results: Vec<Value> = records(&env).iter().map(|record| json!([record["status"], record["result"]])).collect();
    assert_eq!(results, [json!(["done", {"refund": true, "why": "é\n"}]), json!(["done", null])]);
}

#[test]
fn python_that_does_without_changes_only_what_it_must() {
    let env = TestEnv::new();
    let target = r#"{"id": "t", "ts": 1764400000, "kind": "classify", "from": "triage", "to": "researcher", "payload": {"n": 12345678901234567890123, "s": "\ud83d\u00e9"}, "status": "queued", "new": [1.5, {"x": null}]}"#;
    let foreign: [&[u8]; 9] = [
        br#"{"id":"ledger","ts":1795950000,"kind":"ledger","from":"handoff","to":"","payload":{"version":1,"totals":{},"generations":{}},"status":"ledger"}"#,
        b"not json",
        b"\xff\xfe{}",
        b"",
        b"\r",
        b"[1]",
        b"{\"id\":\"other\", \"ts\":1e9,\"kind\":\"k\",\"from\":\"a\",\"to\":\"b\",\"x\":1.50, \"status\":\"queued\"} \r",
        br#"{"status":"queued"}"#,
        &b"[".repeat(200_000),
    ];
    let torn = br#"{"id":"torn"#;
    fs::create_dir(env.path("real")).unwrap();
    env.write("real/queue.jsonl", [&foreign.join(&b'\n'), &b"\n"[..], target.as_bytes(), b"\n", torn].concat());
    fs::set_permissions(env.path("real/queue.jsonl"), Permissions::from_mode(0o640)).unwrap();
    symlink("real/queue.jsonl", env.path("queue.jsonl")).unwrap();
    let use_it = r#"
job = take("researcher")
none = take("researcher")
id = put("classify", {"summary": "s"}, "triage", "researcher")
job = done(job, {"refund": True}, 0.25)
again = done(job)
print(json.dumps([repr(job["started_ts"]), repr(job["finished_ts"]), none, again, id]))
"#;
    let results = in_python(&env, &own(), use_it);
    let [started, finished, id] = [0, 1, 4].map(|place: usize| results[place].as_str().unwrap());
    assert_eq!((&results[2], &results[3]), (&Value::Null, &Value::Null));

    assert!(fs::symlink_metadata(env.path("queue.jsonl")).unwrap().is_symlink());
    assert_eq!(names_in(&env.path("real")), ["queue.jsonl"]);
    assert_eq!(mode(&env.path("real/queue.jsonl")), 0o640);
    let queue = fs::read(env.path("queue.jsonl")).unwrap();
    let mut lines: Vec<&[u8]> = queue.split(|byte| *byte == b'\n').collect();
    assert_eq!(lines.pop(), Some(&b""[..]));
    assert_eq!(lines[..foreign.len()], foreign);
    let [changed, after, put] = lines[foreign.len()..] else { panic!("{} lines", lines.len()) };
    assert_eq!(after, torn);
    let before = target.replace("\"queued\"", "\"done\"");
    let added = format!(
        r#"{}, "started_ts": {started}, "finished_ts": {finished}, "result": {{"refund": true}}, "spend": 0.25}}"#,
        before.strip_suffix('}').unwrap()
    );
    assert_eq!(String::from_utf8_lossy(changed), added);
    assert_eq!(serde_json::from_slice::<Value>(put).unwrap()["id"], id);

    let samples = samples(&env);
    let of_role = [("role", "researcher")];
    for (name, expected) in [
        ("handoff_queue_wait_seconds_count", 1.0),
        ("handoff_role_time_seconds_count", 1.0),
        ("handoff_finished_total", 1.0),
        ("handoff_spend_usd_total", 0.25),
        ("handoff_records_total", 2.0),
    ] {
        let found = sum(&samples, name, &of_role);
        assert!((found - expected).abs() < 1e-9, "{name}: {found}");
    }
    // What is no JSON is an error, not a job that is done.
    in_python(
        &env,
        &own(),
        &format!(
            r#"
job = take("researcher")
try:
    done(job, object())
except TypeError:
    print(json.dumps(job["id"] == "{id}"))
"#
        ),
    );
    assert_eq!(records(&env).last().unwrap()["status"], "running");
}

#[test]
fn python_that_does_without_has_its_changes_on_the_disk() {
    let env = TestEnv::new();
    env.write("queue.jsonl", record("a", "researcher", "queued"));
    env.write("program.py", own() + "take('researcher')\nput('classify', {}, 'triage', 'researcher')\n");
    let mut command = env.command(python());
    command.arg("program.py");
    let calls = "trace=fsync,fdatasync,rename,renameat,renameat2";
    let (run, trace) = strace::traced_in_threads(&env, &command, &["-y", "-e", calls]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    let directory = env.path("").canonicalize().unwrap().display().to_string();
    let deeds: Vec<String> =
        strace::spans(&trace).iter().map(|span| strace::deed(&span.call, directory.trim_end_matches('/'))).collect();
    let of_take = [
        "fsync queue.jsonl.python",
        "fsync DIR",
        "rename queue.jsonl.python queue.jsonl",
        "fsync queue.jsonl",
        "fsync DIR",
    ];
    assert_eq!(deeds, [&of_take[..], &["fsync queue.jsonl", "fsync DIR"]].concat());
}

/// What `produce` and `consume` do with each client of the README.
const WORKER: &str = r#"
import select, sys, time
action, name, count = sys.argv[1:]
if action == "produce":
    for number in range(int(count)):
        print(put("classify", {"summary": f"{name} {number}"}, "triage", "researcher"), flush=True)
while action == "consume":
    is_last = select.select([sys.stdin], [], [], 0)[0]
    job = take("researcher")
    if job:
        print(job["id"], flush=True)
        done(job, {"by": name}, *SPEND)
    elif is_last:
        break
    else:
        time.sleep(0.01)
"#;

#[test]
fn both_sorts_of_python_share_a_queue_and_nothing_is_lost_or_taken_twice() {
    const EACH: usize = 25;
    let env = TestEnv::in_memory();
    // Written in Python's way, so that what Python writes anew is the same to the byte.
    let unknown = |number: usize| format!(r#""new": [{number}, 1.5, "\ud83d", 12345678901234567890123]"#);
    let old = |number: usize| {
        format!(
            r#"{{"id": "old-{number}", "ts": 1764400000, "kind": "classify", "from": "triage", "to": "researcher", {}, "payload": {{}}, "status": "queued"}}"#,
            unknown(number)
        ) + &format!("\nforeign {number} \u{e9}\r\n")
    };
    env.write("queue.jsonl", (0..EACH).map(old).collect::<String>());
    env.write("client.py", client() + "\nSPEND = []\n" + WORKER);
    env.write("own.py", own() + "\nSPEND = [0.01]\n" + WORKER);
    let worker = |action: &str, program: &str, number: usize| {
        let mut command = with_handoff(&env, &python());
        let name = format!("{program}-{number}");
        command.args([format!("{program}.py").as_str(), action, &name, &EACH.to_string()]);
        // Each is a service of its own.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        (name, start(&mut command))
    };
    let each = |action: &str| -> Vec<_> {
        let programs = [("client", 0), ("own", 0), ("client", 1), ("own", 1)];
        programs.into_iter().map(|(program, number)| worker(action, program, number)).collect()
    };
    let (consumers, producers) = (each("consume"), each("produce"));
    // The ids that each has printed.
    let finish = |workers: Vec<(String, std::process::Child)>| -> Vec<(String, String)> {
        let mut printed = Vec::new();
        for (name, worker) in workers {
            let output = worker.wait_with_output().unwrap();
            assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
            let ids = String::from_utf8(output.stdout).unwrap();
            printed.extend(ids.lines().map(|id| (id.to_owned(), name.clone())));
        }
        printed
    };
    let put: BTreeSet<String> = finish(producers).into_iter().map(|(id, _)| id).collect();
    assert_eq!(put.len(), 4 * EACH);
    // With the end of their standard input they take what is left.
    let taken = finish(consumers);
    let expected: BTreeSet<String> = (0..EACH).map(|number| format!("old-{number}")).chain(put).collect();
    let by: BTreeMap<String, String> = taken.iter().cloned().collect();
    assert_eq!((taken.len(), by.keys().cloned().collect()), (expected.len(), expected));

    let records = records(&env);
    assert_eq!(records.len(), by.len());
    for record in &records {
        let id = record["id"].as_str().unwrap();
        assert_eq!((&record["status"], &record["result"]["by"]), (&json!("done"), &json!(by[id])), "{record}");
    }
    let queue = queue(&env);
    for number in 0..EACH {
        assert_eq!(queue.matches(&format!("\"to\": \"researcher\", {}, ", unknown(number))).count(), 1, "{number}");
    }
    let foreign: Vec<&str> = queue.split('\n').filter(|line| line.starts_with("foreign")).collect();
    assert_eq!(foreign, (0..EACH).map(|number| format!("foreign {number} \u{e9}\r")).collect::<Vec<_>>());
    let samples = samples(&env);
    let own = by.values().filter(|name| name.starts_with("own")).count();
    let tell = |name: &str| sum(&samples, name, &[("role", "researcher")]);
    let spent = f64::from(u32::try_from(own).unwrap()) / 100.0;
    assert!(own > 0 && own < by.len() && (tell("handoff_spend_usd_total") - spent).abs() < 1e-9);
    let count = f64::from(u32::try_from(by.len()).unwrap());
    for name in ["handoff_queue_wait_seconds_count", "handoff_role_time_seconds_count", "handoff_finished_total"] {
        assert!((tell(name) - count).abs() < 1e-9, "{name}: {}", tell(name));
    }
}
