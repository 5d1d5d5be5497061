//! `handoff list`, `show` and `status`: what they say of a queue, of hostile records and of processes that hold records, and how they end.

use std::fs;
use std::io::Read;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use crate::exposition::{sum, value};
use crate::test_env::{NOW, Run, TestEnv, append, record, run, start, tool};

/// The present time of the tests in seconds since the epoch: 2026-11-29T12:00:00Z.
const NOW_SECONDS: i64 = 1_795_953_600;

/// A record that was queued so many seconds ago. `more` replaces or adds members.
fn envelope(id: &str, ago: i64, status: &str, more: Value) -> String {
    let mut envelope = json!({
        "id": id, "ts": NOW_SECONDS - ago, "kind": "classify", "from": "triage", "to": "researcher", "payload": {}, "status": status,
    });
    let Value::Object(more) = more else { panic!("{more} is no object") };
    envelope.as_object_mut().unwrap().extend(more);
    format!("{envelope}\n")
}

fn ledger(totals: &str, generations: &str) -> String {
    format!(
        r#"{{"id":"ledger","ts":1795950000,"kind":"ledger","from":"handoff","to":"","payload":{{"version":1,"totals":{totals},"generations":{{{generations}}}}},"status":"ledger"}}"#
    ) + "\n"
}

/// Asserts how a command ends and what it prints, and that it says nothing else.
fn assert_prints(command: &mut Command, code: i32, expected: &str) {
    let run = run(command);
    let stdout = String::from_utf8(run.stdout).unwrap();
    assert_eq!((run.code, stdout.as_str(), run.stderr.as_str()), (Some(code), expected, ""), "{command:?}");
}

fn json_of(command: &mut Command) -> Value {
    let run = run(command);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    serde_json::from_slice(&run.stdout).unwrap()
}

/// A queue with one of everything, and late lines.
fn week(env: &TestEnv) {
    let taken_over = record("old", "researcher", "queued");
    let late = envelope("late", 300, "queued", json!({"to": "patcher", "payload": {"summary": "came late"}}));
    env.write("queue.gen.4", taken_over.clone() + &late + "late garbage\n");
    let nacks = json!([
        {"ts": NOW_SECONDS - 90_000, "by": "researcher", "reason": "no answer", "error_class": "timeout", "retryable": true},
        {"ts": NOW_SECONDS - 1_800, "by": "researcher", "reason": "still none"},
    ]);
    let lines = [
        ledger(
            r#"{"cells":[{"role":"researcher","kind":"classify","records":10,"done":10,"spend_usd":"1.5"}]}"#,
            &format!(r#""4":{}"#, taken_over.len()),
        ),
        envelope("new", 60, "queued", json!({"payload": {"summary": "two\nlines"}})),
        envelope("old-1", 7_200, "queued", json!({})),
        "garbage\n".to_owned(),
        envelope("run-1", 3_600, "running", json!({"started_ts": NOW_SECONDS - 1_200})),
        envelope("asks", 100_000, "human", json!({"nacks": nacks, "finished_ts": NOW_SECONDS - 1_800})),
        envelope(
            "looped",
            500,
            "human",
            json!({"kind": "draft_reply", "stopped": {"ts": NOW_SECONDS - 500, "by": "handoff", "reason": "9 ancestors", "error_class": "too_many_hops"}}),
        ),
        envelope(
            "done-1",
            400,
            "done",
            json!({"kind": "draft_reply", "parent": "old-1", "spend": [{"cost_usd": "0.1"}, {"cost_usd": 0.2}]}),
        ),
        envelope("done-2", 400, "done", json!({"spend": {"model": "unheard-of", "input_tokens": 5}})),
        envelope("paused", 50, "paused", json!({})),
        envelope("twice", 40, "queued", json!({})).replace("}\n", r#","status":"queued"}"#) + "\n",
    ];
    env.write("queue.jsonl", lines.concat() + r#"{"id":"in flight"#);
    env.write("queue.lock", "");
}

#[test]
fn list_shows_records_oldest_first_with_late_ones_and_those_in_doubt() {
    let env = TestEnv::new();
    week(&env);
    let expected = "\
asks    human    classify     triage→researcher  1d 3h  2 nacks
old-1   queued   classify     triage→researcher  2h 0m  0 nacks
run-1   running  classify     triage→researcher  1h 0m  0 nacks
looped  human    draft_reply  triage→researcher  8m     0 nacks
done-1  done     draft_reply  triage→researcher  6m     0 nacks
done-2  done     classify     triage→researcher  6m     0 nacks
late    queued   classify     triage→patcher     5m     0 nacks  came late
new     queued   classify     triage→researcher  1m     0 nacks  two\\nlines
paused  other    classify     triage→researcher  50s    0 nacks
twice   queued   classify     triage→researcher  40s    0 nacks  in doubt: duplicate_key
";
    assert_prints(&mut env.handoff("list"), 0, expected);
}

#[test]
fn list_picks_by_role_status_kind_and_time() {
    let env = TestEnv::new();
    week(&env);
    let ids = |arguments: &[&str]| -> Vec<String> {
        let run = run(env.handoff("list").arg("--json").args(arguments));
        assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{arguments:?}");
        let id = |line: &str| serde_json::from_str::<Value>(line).unwrap()["id"].as_str().unwrap().to_owned();
        String::from_utf8(run.stdout).unwrap().lines().map(id).collect()
    };
    assert_eq!(ids(&["--role", "patcher"]), ["late"]);
    assert_eq!(ids(&["--status", "queued,running", "--role", "researcher"]), ["old-1", "run-1", "new", "twice"]);
    assert_eq!(ids(&["--status", "human", "--status", "other"]), ["asks", "looped", "paused"]);
    assert_eq!(ids(&["--kind", "draft_reply"]), ["looped", "done-1"]);
    // Both ends: what was queued just then counts.
    assert_eq!(ids(&["--since", "1h", "--status", "running,queued"]), ["run-1", "late", "new", "twice"]);
    assert_eq!(ids(&["--since", "2026-11-29T11:59:10Z"]), ["paused", "twice"]);
    assert_eq!(ids(&["--since", "2026-11-29T12:59:10.5+01:00"]), ["twice"]);
    assert_eq!(ids(&["--role", "nobody"]), [""; 0]);
    for (name, value, expected) in [("HANDOFF_ROLE", "patcher", "late"), ("HANDOFF_SINCE", "45s", "twice")] {
        let run = run(env.handoff("list").env(name, value));
        assert!(run.stdout.starts_with(expected.as_bytes()), "{name}: {}", String::from_utf8_lossy(&run.stdout));
        assert_eq!(String::from_utf8(run.stdout).unwrap().lines().count(), 1, "{name}");
    }
    for wrong in [["--status", "waiting"], ["--since", "yesterday"], ["--role", ""]] {
        assert_eq!(run(env.handoff("list").args(wrong)).code, Some(2), "{wrong:?}");
    }
}

#[test]
fn json_is_the_line_as_it_stands() {
    let env = TestEnv::new();
    let odd = r#" { "id":"odd\u0000", "ts":1e9,"kind":"k","from":"a","to":"b","payload":{"n":12345678901234567890123,"x":1.50},"status":"queued","new":[] }"#;
    env.write("queue.jsonl", format!("\u{feff}{odd} \r\n"));
    assert_prints(env.handoff("list").arg("--json"), 0, &format!("{}\n", odd.trim()));
    assert_prints(env.handoff("show").args(["--json", "odd"]), 0, &format!("{}\n", odd.trim()));
}

/// More lines than are held in memory, the newest first.
fn more_than_memory() -> Vec<String> {
    let filler = "x".repeat(1_000_000);
    let line = |number: i64| envelope(&format!("id-{number}"), number, "queued", json!({"payload": {"text": filler}}));
    (0..40).map(line).collect()
}

#[test]
fn memory_does_not_grow_with_what_is_listed_and_no_file_is_needed() {
    let env = TestEnv::new();
    let lines = more_than_memory();
    // Some come late, and 7 is prime to the number of the others, so that each comes up once.
    let (taken_over, late) = (record("old", "researcher", "queued"), lines[35..].concat());
    env.write("queue.gen.4", taken_over.clone() + &late);
    let queue: String = (0..35).map(|number| lines[number * 3 % 35].as_str()).collect();
    env.write("queue.jsonl", ledger("{}", &format!(r#""4":{}"#, taken_over.len())) + &queue);
    let program = env.handoff("list").get_program().to_owned();
    for json in ["", "--json"] {
        // 40 MB are more than all of the process may have.
        let script = format!(r#"ulimit -v 40000; exec "$1" list --queue queue.jsonl --now {NOW} {json}"#);
        let run =
            run(env.command(tool("sh", "dash")).args(["-c", &script, "sh"]).arg(&program).env("TMPDIR", "nowhere"));
        assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{json}");
        let lines = lines.iter().rev();
        if json.is_empty() {
            let ids: Vec<String> = String::from_utf8(run.stdout)
                .unwrap()
                .lines()
                .map(|row| row.split(' ').next().unwrap().to_owned())
                .collect();
            assert_eq!(ids, (0..40).rev().map(|number| format!("id-{number}")).collect::<Vec<_>>());
        } else {
            let expected: String = lines.map(String::as_str).collect();
            assert!(
                run.stdout == expected.as_bytes(),
                "{} bytes are not the {} expected",
                run.stdout.len(),
                expected.len()
            );
        }
    }
}

type Rewrite = fn(&TestEnv, &str);

#[test]
fn a_list_of_a_queue_that_is_rewritten_meanwhile_is_that_of_one_moment_or_ends_with_75() {
    let lines = more_than_memory();
    let expected: String = lines.iter().rev().map(String::as_str).collect();
    let new = lines.concat().replace(r#""queued""#, r#""running""#);
    // Each case: how the queue becomes another, and how the list ends.
    let cases: [(&str, Rewrite, i32); 4] = [
        (
            "replaced",
            |env, new| {
                env.write("new", new);
                fs::rename(env.path("new"), env.path("queue.jsonl")).unwrap();
            },
            0,
        ),
        ("appended to", |env, _| append(env, "queue.jsonl", &record("new", "researcher", "queued")), 0),
        ("rewritten in place", |env, new| env.write("queue.jsonl", new), 75),
        ("cut", |env, _| env.write("queue.jsonl", ""), 75),
    ];
    for (what, rewrite, code) in cases {
        let env = TestEnv::new();
        env.write("queue.jsonl", lines.concat());
        let mut list = start(env.handoff("list").arg("--json").stdout(Stdio::piped()).stderr(Stdio::piped()));
        let (mut stdout, mut first) = (list.stdout.take().unwrap(), [0; 1_000]);
        // From now on it no longer has the lock.
        stdout.read_exact(&mut first).unwrap();
        rewrite(&env, &new);
        let mut rest = Vec::new();
        stdout.read_to_end(&mut rest).unwrap();
        let output = list.wait_with_output().unwrap();
        let (stderr, printed) = (String::from_utf8(output.stderr).unwrap(), [&first[..], &rest].concat());
        assert_eq!(output.status.code(), Some(code), "{what}: {stderr}");
        // What has been printed is true in any case, and whole lines.
        assert!(
            expected.as_bytes().starts_with(&printed) && printed.ends_with(b"\n"),
            "{what}: {} bytes",
            printed.len()
        );
        if code == 0 {
            assert_eq!((printed.len(), stderr.as_str()), (expected.len(), ""), "{what}");
        } else {
            let message = "handoff: queue.jsonl: was rewritten in place while its lines were printed, so that these are not all: try again\n";
            assert_eq!(stderr, message, "{what}");
        }
    }
}

#[test]
fn a_list_shows_only_the_beginning_of_what_is_long() {
    let env = TestEnv::new();
    let long = |c: &str| c.repeat(1_000);
    let more = json!({"kind": long("k"), "from": long("f"), "to": long("é"), "payload": {"summary": long("s")}});
    env.write("queue.jsonl", envelope(&long("i"), 60, "queued", more));
    let of = |c: &str, most: usize| format!("{}…", c.repeat(most));
    let expected = format!(
        "{}  queued  {}  {}→{}  1m  0 nacks  {}\n",
        of("i", 100),
        of("k", 40),
        of("f", 40),
        of("é", 40),
        of("s", 60)
    );
    assert_prints(&mut env.handoff("list"), 0, &expected);
}

/// A queue whose list no pipe holds.
fn long_queue() -> String {
    (0..5_000).map(|number| envelope(&format!("id-{number}"), number, "queued", json!({}))).collect()
}

#[test]
fn whoever_reads_only_the_beginning_hears_of_no_error() {
    let env = TestEnv::new();
    env.write("queue.jsonl", long_queue());
    for arguments in ["list", "list --json", "show --json id-1", "status"] {
        let script =
            format!(r#""$1" {arguments} --queue queue.jsonl --now {NOW} | head -n1 >first; echo "${{PIPESTATUS[0]}}""#);
        let program = env.handoff("list").get_program().to_owned();
        let run = run(env.command(tool("bash", "bash")).args(["-c", &script, "bash"]).arg(program));
        assert_eq!((run.stdout.as_slice(), run.stderr.as_str()), (&b"0\n"[..], ""), "{arguments}");
        assert_eq!(fs::read_to_string(env.path("first")).unwrap().lines().count(), 1, "{arguments}");
    }
}

#[test]
fn no_lock_is_held_while_the_list_is_printed() {
    let env = TestEnv::new();
    env.write("queue.jsonl", long_queue());
    env.write("queue.lock", "");
    let mut list = start(env.handoff("list").stdout(Stdio::piped()));
    // Nobody reads what it prints, but a writer gets the lock.
    let run = run(env.command(tool("flock", "util-linux")).args(["--timeout", "60", "queue.lock", "true"]));
    assert_eq!(run.code, Some(0));
    assert!(list.try_wait().unwrap().is_none(), "the list is not long enough to show it");
    list.kill().unwrap();
    list.wait().unwrap();
}

#[test]
fn show_tells_all_of_a_record() {
    let env = TestEnv::new();
    week(&env);
    let expected = "\
id         asks
status     human
kind       classify
from → to  triage → researcher
queued     2026-11-28T08:13:20Z (1d 3h ago)
finished   2026-11-29T11:30:00Z (30m ago)
line       queue.jsonl:6
nacks: 2
  2026-11-28T11:00:00Z (1d 1h ago) by researcher, timeout: no answer
  2026-11-29T11:30:00Z (30m ago) by researcher: still none
payload:
  {}
";
    assert_prints(env.handoff("show").arg("asks"), 0, expected);
    let expected = "\
id         old-1
status     queued
kind       classify
from → to  triage → researcher
queued     2026-11-29T10:00:00Z (2h 0m ago)
line       queue.jsonl:3
payload:
  {}
follow-ups:
  done-1  done  draft_reply  researcher
";
    // By the beginning of its id, which "late" and others do not share.
    assert_prints(env.handoff("show").arg("ol"), 0, expected);
    let expected = "\
id         done-1
status     done
kind       draft_reply
from → to  triage → researcher
queued     2026-11-29T11:53:20Z (6m ago)
parent     old-1
spend      0.3 USD
line       queue.jsonl:8
payload:
  {}
spend:
  [
    {
      \"cost_usd\": \"0.1\"
    },
    {
      \"cost_usd\": 0.2
    }
  ]
";
    assert_prints(env.handoff("show").arg("done-1"), 0, expected);
    let looped = run(env.handoff("show").arg("looped"));
    let stopped = "\nstopped    2026-11-29T11:51:40Z (8m ago) by handoff, too_many_hops: 9 ancestors\n";
    assert!(String::from_utf8(looped.stdout).unwrap().contains(stopped));
    let late = String::from_utf8(run(env.handoff("show").arg("late")).stdout).unwrap();
    assert!(late.contains("/queue.gen.4:2\n") && late.contains("\"summary\": \"came late\""), "{late}");
    let twice = String::from_utf8(run(env.handoff("show").arg("twice")).stdout).unwrap();
    assert!(twice.contains("status     queued, in doubt (duplicate_key): no tool changes it\n"), "{twice}");
}

#[test]
fn show_names_what_an_id_might_mean() {
    let env = TestEnv::new();
    let ids = ["job", "job-1", "job-2", "same", "same"];
    let queue: String = ids.map(|id| record(id, "researcher", "queued")).concat();
    env.write("queue.jsonl", queue + &(0..15).map(|n| record(&format!("many-{n}"), "r", "done")).collect::<String>());
    let says = |id: &str, code: i32, message: &str| -> Run {
        let run = run(env.handoff("show").arg(id));
        assert_eq!((run.code, run.stderr.as_str()), (Some(code), message), "{id}");
        run
    };
    // The id itself wins over others that begin like it.
    let job = says("job", 0, "");
    assert!(job.stdout.starts_with(b"id         job\n"));
    let none = says(
        "nix",
        1,
        "handoff: queue.jsonl: no record has the id nix: what is done goes in time, and malformed lines are none (handoff check)\n",
    );
    assert_eq!(none.stdout, b"");
    says("job-", 65, "handoff: queue.jsonl: several ids begin with job-: job-1, job-2: give more of it\n");
    let first = (0..10).map(|n| format!("many-{n}")).collect::<Vec<_>>().join(", ");
    says(
        "many",
        65,
        &format!("handoff: queue.jsonl: several ids begin with many: {first} and others: give more of it\n"),
    );
    let same = says("same", 0, "handoff: queue.jsonl: 2 records have the id same: no operation can tell them apart\n");
    let same = String::from_utf8(same.stdout).unwrap();
    assert!(
        same.contains("queue.jsonl:4\n") && same.contains("\n\nid         same\n") && same.contains("queue.jsonl:5\n"),
        "{same}"
    );
    assert_eq!(run(env.handoff("show").arg("")).code, Some(2));
}

#[test]
fn status_is_the_whole_picture() {
    let env = TestEnv::new();
    week(&env);
    let size = fs::metadata(env.path("queue.jsonl")).unwrap().len();
    assert!((1_024..10_240).contains(&size));
    let kib = format!("{:.1}", f64::from(u32::try_from(size).unwrap()) / 1_024.0);
    let expected = format!(
        "\
queue.jsonl: {kib} KiB, 13 lines, at 2026-11-29T12:00:00Z
role        queued  running  human  nack  dead  done  oldest queued
researcher       3        1      2     0     0     2  2h 0m
patcher          1        0      0     0     0     0  5m
running: 0 with an owner that lives, 0 with a dead one, 0 unknown, 1 without
  run-1  researcher  classify  20m  no owner
waiting for a person: 2
  asks    researcher  classify     30m  still none
  looped  researcher  draft_reply  8m   too_many_hops: 9 ancestors
nacks: 2, 10.0 in 100 records; 1 in the last hour, 1 in the last day
spend:
  classify     ≥ 1.5 USD, 1 record unpriced
  draft_reply  0.3 USD
malformed (not_json): 2 lines
in doubt: 1 record, of which 1 queued
not drained: 1 generation, with 2 late lines
→ queued records in doubt can't be taken: handoff check names them
→ people are waited for: handoff show ID, then handoff requeue ID, done ID or cancel ID
→ lines are malformed: handoff check names them, and with --quarantine puts them aside
→ late lines lie where workers don't see them: the next run of handoff-compact takes them over
"
    );
    assert_prints(&mut env.handoff("status"), 0, &expected);
}

#[test]
fn status_counts_as_the_exporter_does() {
    let env = TestEnv::new();
    week(&env);
    env.write("prices.json", r#"{"unheard-of":{"input_cost_per_token":0.000001}}"#);
    let status = json_of(env.handoff("status").args(["--json", "--prices", "prices.json"]));
    let run = run(env.to_stdout().args(["--prices", "prices.json"]));
    let samples = run.samples();
    let is = |found: &Value, expected: f64, what: &str| {
        assert!((found.as_f64().unwrap() - expected).abs() < 1e-9, "{what}: {found}, not {expected}");
    };
    for role in ["researcher", "patcher"] {
        for status_name in ["queued", "running", "done", "nack", "human", "dead", "other"] {
            let expected = sum(&samples, "handoff_queue_records", &[("role", role), ("status", status_name)]);
            is(&status["roles"][role][status_name], expected, status_name);
        }
        let oldest = value(&samples, "handoff_queue_oldest_timestamp_seconds", &[("role", role), ("status", "queued")]);
        is(&status["roles"][role]["oldest_queued_timestamp_seconds"], oldest, role);
    }
    is(&status["nacks"]["total"], sum(&samples, "handoff_nacks_total", &[]), "nacks");
    is(&status["nacks"]["records"], sum(&samples, "handoff_records_total", &[]), "records");
    is(&status["queue_bytes"], value(&samples, "handoff_queue_bytes", &[]), "bytes");
    is(&status["generations"], value(&samples, "handoff_queue_generations", &[]), "generations");
    is(&status["malformed"]["not_json"], sum(&samples, "handoff_queue_malformed_lines", &[]), "malformed");
    assert_eq!(
        status["spend"],
        json!({"classify": {"usd": "1.500005", "unpriced_records": 0}, "draft_reply": {"usd": "0.3", "unpriced_records": 0}})
    );
    assert_eq!(status["human_records"], 2);
    assert_eq!(
        status["human"][1],
        json!({"id": "looped", "role": "researcher", "kind": "draft_reply", "since_timestamp_seconds": 1_795_953_100.0, "error_class": "too_many_hops", "reason": "9 ancestors"})
    );
    assert_eq!(status["late_lines"], 2);
    assert_eq!(status["ledger_is_readable"], true);
}

#[test]
fn status_fits_a_screen_whatever_there_is() {
    let env = TestEnv::new();
    let lines = |status: &str| -> String {
        let line = |n: i64| {
            envelope(
                &format!("{status}-{n:03}"),
                10_000 + n,
                status,
                json!({"to": format!("role-{n}"), "kind": format!("kind-{}", n % 70)}),
            )
        };
        (0..100).map(line).collect()
    };
    env.write("queue.jsonl", ["running", "human", "queued"].map(lines).concat());
    let run = run(&mut env.handoff("status"));
    let text = String::from_utf8(run.stdout).unwrap();
    assert!(text.lines().count() <= 95, "{} lines:\n{text}", text.lines().count());
    // The oldest are shown.
    assert!(text.contains("human-099") && text.contains("human-080") && !text.contains("human-079"), "{text}");
    assert!(text.contains("running-099") && !text.contains("running-079"), "{text}");
    assert_eq!(text.matches("  and 80 more\n").count(), 2, "{text}");
    let status = json_of(env.handoff("status").arg("--json"));
    assert_eq!((status["running"].as_array().unwrap().len(), &status["running_by_owner"]["none"]), (20, &json!(100)));
    assert_eq!(status["human_records"], 100);
    assert!(text.contains("→ records without an owner run for over an hour"), "{text}");
}

/// A process that holds records, as itself and as others than it might be.
fn owner_of(process: &Child) -> Value {
    let read = |path: String| fs::read_to_string(path).unwrap();
    let stat = read(format!("/proc/{}/stat", process.id()));
    // The 22nd field; the second is in parentheses.
    let start_time: u64 = stat.rsplit_once(") ").unwrap().1.split(' ').nth(19).unwrap().parse().unwrap();
    json!({
        "host": read("/proc/sys/kernel/hostname".to_owned()).trim(), "boot_id": read("/proc/sys/kernel/random/boot_id".to_owned()).trim(),
        "pid": process.id(), "start_time": start_time,
    })
}

fn with(owner: &Value, name: &str, value: Value) -> Value {
    let mut owner = owner.clone();
    owner[name] = value;
    owner
}

#[test]
fn owners_live_or_are_dead_or_nobody_can_tell() {
    let env = TestEnv::new();
    // It ends with its input, should this test fail.
    let mut process = start(env.command("cat").stdin(Stdio::piped()).stdout(Stdio::null()));
    let (owner, pid) = (owner_of(&process), process.id());
    let later = owner["start_time"].as_u64().unwrap() + 1;
    let owners = [
        ("itself", owner.clone()),
        ("another", with(&owner, "start_time", json!(later))),
        ("before", with(&owner, "boot_id", json!("00000000-0000-0000-0000-000000000000"))),
        ("elsewhere", with(&owner, "host", json!("elsewhere"))),
        ("inside", with(&owner, "pid_namespace", json!(1))),
        ("shapeless", json!("somebody")),
    ];
    let mut queue: String = owners
        .iter()
        .map(|(id, owner)| envelope(id, 100, "running", json!({"owner": owner, "started_ts": NOW_SECONDS - 10})))
        .collect();
    queue += &envelope("nobody", 100, "running", json!({"started_ts": NOW_SECONDS - 10}));
    env.write("queue.jsonl", queue);
    let assert_lives = |of_itself: &str| {
        let mut expected: Vec<(&str, &str)> = vec![
            ("another", "dead"),
            ("before", "dead"),
            ("elsewhere", "unknown"),
            ("inside", "unknown"),
            ("itself", of_itself),
            ("nobody", "none"),
            ("shapeless", "unknown"),
        ];
        let status = json_of(env.handoff("status").arg("--json"));
        let running = status["running"].as_array().unwrap();
        let mut found: Vec<(&str, &str)> = running
            .iter()
            .map(|running| (running["id"].as_str().unwrap(), running["owner_is"].as_str().unwrap()))
            .collect();
        let dead = expected.iter().filter(|(_, life)| *life == "dead").count();
        assert!(found.iter().take(dead).all(|(_, life)| *life == "dead"), "the dead don't come first: {found:?}");
        found.sort_unstable();
        assert_eq!(found, expected);
        assert_eq!(status["running_by_owner"]["dead"], dead);

        expected.retain(|(id, _)| *id != "nobody" && *id != "shapeless");
        for (id, life) in expected {
            let shown = String::from_utf8(run(env.handoff("show").arg(id)).stdout).unwrap();
            assert!(shown.contains(&format!("\nowner      {life}: process {pid} on ")), "{id}: {shown}");
        }
        let check = run(env.handoff("check").arg("--json"));
        assert_eq!(check.code, Some(1));
        let check: Value = serde_json::from_slice(&check.stdout).unwrap();
        let ids = |list: &str, what: &str| -> Vec<&str> {
            let items = check[list].as_array().unwrap().iter().filter(|item| item["what"] == what);
            items.map(|item| item["id"].as_str().unwrap()).collect()
        };
        let expected: &[&str] =
            if of_itself == "dead" { &["itself", "another", "before"] } else { &["another", "before"] };
        assert_eq!(ids("problems", "dead_owner"), expected);
        assert_eq!(ids("notes", "unknown_owner"), ["elsewhere", "inside", "shapeless"]);
        assert_eq!(ids("notes", "no_owner"), ["nobody"]);
    };
    assert_lives("alive");
    process.kill().unwrap();
    // Ended, but not yet waited for: it only looks as if it were there.
    loop {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        if stat.rsplit_once(") ").unwrap().1.starts_with('Z') {
            break;
        }
        std::thread::yield_now();
    }
    assert_lives("dead");
    process.wait().unwrap();
    assert_lives("dead");
    let text = String::from_utf8(run(&mut env.handoff("status")).stdout).unwrap();
    assert!(text.contains("→ owners are dead: restart the worker of researcher, which reclaims its records, or hand each back: handoff requeue ID\n"), "{text}");
}

#[test]
fn no_record_has_a_terminal_obey_it() {
    let env = TestEnv::new();
    let evil = "/\n\u{1b}]0;title\u{7}\u{1b}[2J\u{7f}\u{9b}31m\u{202e}\r";
    let cause = json!({"ts": 1, "by": evil, "reason": evil, "error_class": evil});
    let mut more = json!({
        "kind": evil, "from": evil, "to": evil, "payload": {"summary": evil, evil: [evil]}, "result": evil, "parent": evil, "run_id": evil,
        "correlation_id": evil, "owner": {"host": evil, "boot_id": evil, "pid": 1, "start_time": 1}, "nacks": [cause], "spend": evil,
    });
    more[evil] = json!(evil);
    let mut queue = String::new();
    for status in ["queued", "running", "human", "done", "running"] {
        queue += &envelope(evil, 10_000, status, more.clone());
        more["owner"] = json!(evil);
        more["stopped"] = cause.clone();
    }
    env.write("queue.jsonl", queue + &format!("garbage {evil}\n") + &record("plain", "b", "queued"));
    let arguments: [&[&str]; 5] = [&["list"], &["status"], &["show", evil], &["show", "/"], &["check"]];
    for arguments in arguments {
        let run = run(env.handoff(arguments[0]).args(&arguments[1..]));
        let text = String::from_utf8(run.stdout).unwrap();
        assert!(text.contains("\\u{1b}[2J") && text.contains("\\n"), "{arguments:?}: {text}");
        for text in [&text, &run.stderr] {
            let obeyed = text.chars().find(|c| c.is_control() && *c != '\n' || *c == '\u{202e}');
            assert_eq!(obeyed, None, "{arguments:?}: {text:?}");
        }
    }
    let ids = run(env.handoff("list").args(["--json", "--status", "human"]));
    let line: Value = serde_json::from_slice(&ids.stdout).unwrap();
    assert_eq!(line["id"], evil);
}

#[test]
fn payloads_are_shown_token_by_token() {
    let env = TestEnv::new();
    let payload = r#"{"n":1e400,"n":0.10,"s":"\ud83d\u001b","deep":[[],{"a":NaN}]}"#;
    env.write("queue.jsonl", record("a", "b", "queued").replace("{}", payload));
    let shown = String::from_utf8(run(env.handoff("show").arg("a")).stdout).unwrap();
    let expected = "payload:
  {
    \"n\": 1e400,
    \"n\": 0.10,
    \"s\": \"\\ud83d\\u001b\",
    \"deep\": [
      [],
      {
        \"a\": NaN
      }
    ]
  }
";
    assert!(shown.ends_with(expected), "{shown}");
}

#[test]
fn without_a_queue_there_is_nothing_to_see() {
    let env = TestEnv::new();
    for (verb, code) in [("list", 0), ("status", 0), ("check", 0)] {
        let run = run(&mut env.handoff(verb));
        assert_eq!(run.code, Some(code), "{verb}");
        assert!(run.stderr.starts_with("handoff: queue.jsonl: does not exist"), "{verb}: {}", run.stderr);
    }
    assert_eq!(run(env.handoff("show").arg("x")).code, Some(1));
    for verb in ["list", "status", "check"] {
        let run = run(env.bare_handoff().args([verb, "--queue", "nowhere/queue.jsonl"]));
        assert_eq!(run.code, Some(74), "{verb}");
    }
    // Nobody who only looks makes a lock file.
    assert!(!env.path("queue.lock").exists());
    // A queue that was lost is none that is empty.
    env.write("queue.gen.1", record("a", "b", "queued"));
    assert_eq!(run(&mut env.handoff("list")).code, Some(74));
}

#[test]
fn a_lock_that_is_busy_is_waited_for_and_no_longer() {
    let env = TestEnv::new();
    env.write("queue.jsonl", record("a", "b", "queued"));
    let script = r#"for verb in list status check "show a"; do "$1" $verb --queue queue.jsonl --lock-timeout 50ms; echo $?; done"#;
    let program = env.handoff("list").get_program().to_owned();
    let run = run(env.command(tool("flock", "util-linux")).args(["queue.lock", "sh", "-c", script, "sh"]).arg(program));
    assert_eq!(run.stdout, b"75\n75\n75\n75\n", "{}", run.stderr);
    assert_eq!(
        run.stderr.matches("handoff: queue.lock: still locked after 50ms by process ").count(),
        4,
        "{}",
        run.stderr
    );
}

#[test]
fn help_fits_a_screen_and_has_an_example() {
    let env = TestEnv::new();
    for verb in ["list", "show", "status", "check"] {
        let run = run(env.bare_handoff().args([verb, "--help"]));
        let help = String::from_utf8(run.stdout).unwrap();
        assert!((10..=40).contains(&help.lines().count()), "{verb}: {} lines", help.lines().count());
        assert!(help.contains("\nExample: handoff ") && help.contains("\nExit codes: "), "{help}");
        let flags = help.lines().filter(|line| line.trim_start().starts_with("--")).count();
        let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.matches("[env: HANDOFF_").count() >= flags, "{help}");
    }
}
