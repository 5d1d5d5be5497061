//! `handoff` at a shell: pipes, files, standard input, help, and what hostile hands may give it.

use std::fs::{self, File, OpenOptions};
use std::io::{Write, pipe};
use std::process::Stdio;

use serde_json::{Value, json};

use crate::exposition::{Samples, sum};
use crate::test_env::{Background, Run, TestEnv, python, record, run, start, tool};

const EXAMPLE: [&str; 6] = ["--kind", "classify", "--from", "triage", "--to", "researcher"];

/// Runs a verb of `handoff` on `queue.jsonl`.
fn handoff(env: &TestEnv, verb: &str, arguments: &[&str]) -> Run {
    run(env.bare_handoff().args([verb, "--queue", "queue.jsonl"]).args(arguments))
}

/// The same, which must succeed, and what it prints.
fn done(env: &TestEnv, verb: &str, arguments: &[&str]) -> String {
    let run = handoff(env, verb, arguments);
    assert_eq!(run.code, Some(0), "{verb} {arguments:?}: {}", run.stderr);
    String::from_utf8(run.stdout).unwrap().trim_end_matches('\n').to_owned()
}

/// The same, which must be refused for a reason, and leave the queue as it is.
fn refused(env: &TestEnv, verb: &str, arguments: &[&str], why: &str) {
    let before = fs::read(env.path("queue.jsonl")).ok();
    let run = handoff(env, verb, arguments);
    assert_eq!(run.code, Some(65), "{verb} {arguments:?}: {}", run.stderr);
    assert!(run.stderr.contains(why), "{verb} {arguments:?}: {}", run.stderr);
    assert_eq!(run.stdout, b"", "{verb} {arguments:?}");
    assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
    assert!(fs::read(env.path("queue.jsonl")).ok() == before, "{verb} {arguments:?} has changed the queue");
}

fn put_payload(env: &TestEnv, payload: &str) -> String {
    done(env, "put", &[&EXAMPLE[..], &["--payload", payload]].concat())
}

fn refuse_payload(env: &TestEnv, payload: &str, why: &str) {
    refused(env, "put", &[&EXAMPLE[..], &["--payload", payload]].concat(), why);
}

/// Puts a payload as standard input.
fn put_through_stdin(env: &TestEnv, payload: &[u8]) -> Run {
    env.write("payload", payload);
    let mut put = env.bare_handoff();
    put.args(["put", "--queue", "queue.jsonl", "--payload", "-"]).args(EXAMPLE);
    run(put.stdin(File::open(env.path("payload")).unwrap()))
}

fn queue(env: &TestEnv) -> String {
    fs::read_to_string(env.path("queue.jsonl")).unwrap()
}

/// The records of the queue, which holds nothing else than these and a ledger.
fn records(env: &TestEnv) -> Vec<Value> {
    let queue = queue(env);
    assert!(queue.is_empty() || queue.ends_with('\n'), "{queue}");
    let lines = queue.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter(|record| record["status"] != "ledger").collect()
}

fn record_of(env: &TestEnv, id: &str) -> Value {
    let mut found = records(env);
    found.retain(|record| record["id"] == id);
    assert_eq!(found.len(), 1, "records with the id {id}");
    found.remove(0)
}

fn take(env: &TestEnv, role: &str) -> Value {
    serde_json::from_str(&done(env, "take", &["--role", role])).unwrap()
}

/// Runs a script in which `$H` is the tool, as an interactive shell does: each pipeline is a group of processes.
fn sh(env: &TestEnv, script: &str) -> Run {
    let mut sh = env.command(tool("sh", "dash"));
    let handoff = env.bare_handoff();
    run(sh.args(["-c", script]).env("H", handoff.get_program()).env("HANDOFF_QUEUE", "queue.jsonl"))
}

/// What the exporter shows by the real clock.
fn samples(env: &TestEnv) -> Samples {
    let run = run(env.exporter().arg("--stdout"));
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    run.samples()
}

// ---- pipes ----

#[test]
fn what_is_taken_goes_through_a_pipe_and_still_belongs_to_who_called() {
    let env = TestEnv::new();
    let id = put_payload(&env, r#"{"summary":"one"}"#);
    let python = python();
    let piped = sh(&env, &format!("$H take --role researcher | {} -m json.tool", python.display()));
    assert_eq!((piped.code, piped.stderr.as_str()), (Some(0), ""));
    let taken: Value = serde_json::from_slice(&piped.stdout).unwrap();
    assert_eq!((&taken["id"], &taken["payload"]["summary"]), (&json!(id), &json!("one")));
    assert_eq!(record_of(&env, &id), taken);
    // The pipeline is over, and its shell too, but not who has started that.
    refused(&env, "requeue", &[&id], "is alive, holds it");
    assert_eq!(done(&env, "done", &[&id]), "done");
}

#[test]
fn a_script_with_variables_goes_from_put_to_done() {
    let env = TestEnv::new();
    let script = r#"set -e
        id=$($H put --kind classify --from triage --to researcher --payload '{"summary":"x"}')
        envelope=$($H take --role researcher)
        case $envelope in *"$id"*) ;; *) exit 3 ;; esac
        echo '{"found":1}' | $H done "$id" --result -
        $H take --role researcher || echo "none: $?""#;
    let run = sh(&env, script);
    assert_eq!((run.code, run.stdout.as_slice()), (Some(0), &b"done\nnone: 1\n"[..]), "{}", run.stderr);
    assert_eq!(records(&env)[0]["result"], json!({ "found": 1 }));
}

/// Runs `take` with a standard output that nobody reads any more.
fn take_for_nobody(env: &TestEnv, arguments: &[&str]) -> (Option<i32>, String) {
    let (reader, writer) = pipe().unwrap();
    drop(reader);
    let mut take = env.bare_handoff();
    take.args(["take", "--queue", "queue.jsonl", "--role", "researcher"]).args(arguments);
    let child = start(take.stdout(writer).stderr(Stdio::piped()));
    let output = child.wait_with_output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_record_that_nobody_has_read_is_queued_again() {
    for arguments in [&[][..], &["--owner", "0"]] {
        let env = TestEnv::new();
        let id = put_payload(&env, "{}");
        assert_eq!(take_for_nobody(&env, arguments), (Some(0), String::new()), "quiet");
        let record = record_of(&env, &id);
        assert_eq!(
            (&record["status"], &record["owner"], &record["started_ts"]),
            (&json!("queued"), &json!(null), &json!(null))
        );
        assert_eq!(record["nacks"], json!(null), "nobody has refused it");
        assert_eq!(take(&env, "researcher")["id"], json!(id));
        // That it waited twice is not forgotten.
        assert!((sum(&samples(&env), "handoff_queue_wait_seconds_count", &[]) - 2.0).abs() < 0.5);
    }
}

#[test]
fn a_full_disk_behind_standard_output_is_told_and_the_record_queued_again() {
    let env = TestEnv::new();
    let id = put_payload(&env, "{}");
    let mut take = env.bare_handoff();
    take.args(["take", "--queue", "queue.jsonl", "--role", "researcher"]);
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let child = start(take.stdout(full).stderr(Stdio::piped()));
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(74));
    assert!(String::from_utf8(output.stderr).unwrap().contains("standard output: cannot be written"));
    assert_eq!(record_of(&env, &id)["status"], "queued");
}

#[test]
fn a_put_whose_id_nobody_reads_is_a_put() {
    let env = TestEnv::new();
    let (reader, writer) = pipe().unwrap();
    drop(reader);
    let mut put = env.bare_handoff();
    put.args(["put", "--queue", "queue.jsonl"]).args(EXAMPLE);
    let output = start(put.stdout(writer).stderr(Stdio::piped())).wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr), (Some(0), Vec::new()));
    assert_eq!(records(&env).len(), 1);
}

// ---- help ----

/// The commands that a help lists.
fn commands(help: &str) -> Vec<&str> {
    let list = help.split("\nCommands:\n").nth(1).unwrap_or_default();
    let lines = list.lines().take_while(|line| !line.is_empty());
    let named = lines.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    named.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help").collect()
}

fn help(env: &TestEnv, verb: &[&str]) -> String {
    let run = run(env.bare_handoff().args(verb).arg("--help").env("COLUMNS", "100"));
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{verb:?}");
    String::from_utf8(run.stdout).unwrap()
}

#[test]
fn the_help_of_each_command_fits_a_screen_and_has_an_example_and_a_variable_for_each_flag() {
    let env = TestEnv::new();
    let top = help(&env, &[]);
    let mut all: Vec<Vec<&str>> = Vec::new();
    let blob = help(&env, &["blob"]);
    for verb in commands(&top) {
        match verb {
            "blob" => all.extend(commands(&blob).into_iter().map(|verb| vec!["blob", verb])),
            _ => all.push(vec![verb]),
        }
    }
    assert!(all.len() >= 9 && all.contains(&vec!["put"]) && all.contains(&vec!["blob", "cat"]), "{all:?}");
    for verb in all {
        let help = help(&env, &verb);
        let length = help.lines().count();
        assert!((10..=40).contains(&length), "the help of {verb:?} has {length} lines:\n{help}");
        let widest = help.lines().map(|line| line.chars().count()).max().unwrap();
        assert!(widest <= 100, "{verb:?} is {widest} wide:\n{help}");
        assert!(help.contains("Example:"), "{verb:?} has no example:\n{help}");
        // Options, each with the lines that go on.
        let options = help.split("\nOptions:\n").nth(1).unwrap().split("\n\n").next().unwrap();
        let mut flags: Vec<String> = Vec::new();
        for line in options.lines() {
            let is_new = line.trim_start().starts_with('-') && line.len() - line.trim_start().len() <= 6;
            if is_new { flags.push(line.to_owned()) } else { flags.last_mut().unwrap().push_str(line) }
        }
        assert!(flags.len() >= 3, "{options}");
        for flag in flags.iter().filter(|flag| !flag.contains("--help") && !flag.contains("--version")) {
            let words: String = flag.split_whitespace().collect();
            assert!(words.contains("[env:HANDOFF_") || words.contains("[env:AGENT_ROLE"), "{verb:?}: {flag}");
        }
    }
}

#[test]
fn variables_do_what_flags_do_and_flags_win() {
    let env = TestEnv::new();
    let mut put = env.bare_handoff();
    put.arg("put").envs([
        ("HANDOFF_QUEUE", "queue.jsonl"),
        ("HANDOFF_KIND", "file_bug"),
        ("HANDOFF_FROM", "triage"),
        ("HANDOFF_TO", "nobody"),
        ("HANDOFF_PAYLOAD", "{\"n\":1}"),
        ("HANDOFF_RUN_ID", "r"),
        ("HANDOFF_CORRELATION_ID", "c"),
        ("HANDOFF_JSON", "1"),
    ]);
    let run = run(put.args(["--to", "patcher"]));
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let put: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!((&put["status"], &put["existed"]), (&json!("queued"), &json!(false)));
    let record = record_of(&env, put["id"].as_str().unwrap());
    let expected = json!({ "kind": "file_bug", "from": "triage", "to": "patcher", "payload": { "n": 1 }, "run_id": "r", "correlation_id": "c" });
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(&record[name], value, "{name}");
    }
}

// ---- what is given ----

#[test]
fn a_payload_comes_from_a_file_from_standard_input_or_as_it_is() {
    let env = TestEnv::new();
    env.write("payload.json", "{\r\n\t\"n\" : [ 1.50e+3 ,\n  \"a b\\n\" ],\n  \"m\": {}\n}\n");
    let id = put_payload(&env, "@payload.json");
    assert!(queue(&env).contains(r#""payload":{"n":[1.50e+3,"a b\n"],"m":{}},"#), "{}", queue(&env));
    assert_eq!(queue(&env).lines().count(), 1);
    assert_eq!(record_of(&env, &id)["payload"]["n"][0], json!(1500.0));
    let put = put_through_stdin(&env, "\u{feff}{\"n\": \"é\"}".as_bytes());
    assert_eq!(put.code, Some(0), "{}", put.stderr);
    assert_eq!(records(&env)[1]["payload"], json!({ "n": "é" }));

    let missing = handoff(&env, "put", &[&EXAMPLE[..], &["--payload", "@missing.json"]].concat());
    assert_eq!(
        (missing.code, missing.stderr.contains("missing.json: does not exist")),
        (Some(74), true),
        "{}",
        missing.stderr
    );
    let directory = handoff(&env, "put", &[&EXAMPLE[..], &["--payload", "@textfile"]].concat());
    assert_eq!(directory.code, Some(74), "{}", directory.stderr);
    let closed = sh(&env, "$H put --kind classify --from triage --to researcher --payload - <&-");
    assert_eq!(closed.code, Some(65), "{}", closed.stderr);
    assert_eq!(records(&env).len(), 2);
}

#[test]
fn what_is_no_payload_is_refused_with_the_reason() {
    let env = TestEnv::new();
    put_payload(&env, "{}");
    for not_an_object in ["[]", "1", "\"text\"", "null"] {
        refuse_payload(&env, not_an_object, "the payload is not a JSON object");
    }
    for not_json in ["{", "text", "{} {}", "{\"a\":\"\u{1}\"}", "{\"a\":\"\n\"}", "{'a':1}", "{\"a\":1,}", "{\"a\":01}"]
    {
        refuse_payload(&env, not_json, "the payload is not");
    }
    refuse_payload(&env, " ", "the payload is empty");
    for number in ["NaN", "Infinity", "-Infinity"] {
        refuse_payload(&env, &format!("{{\"a\":[{{\"b\":{number}}}]}}"), "NaN or Infinity");
    }
    refuse_payload(&env, r#"{"summary":"a","summary":"b"}"#, "two members `summary`");
    refuse_payload(&env, r#"{"summary":["a"]}"#, "`summary` is not a string");
    let latin = put_through_stdin(&env, b"{\"a\":\"\xe9\"}");
    assert_eq!((latin.code, latin.stderr.as_str()), (Some(65), "handoff: standard input: is not UTF-8\n"));
    assert_eq!(put_through_stdin(&env, b"{\"a\":\"\0\"}").code, Some(65));
    assert_eq!(records(&env).len(), 1);
}

#[test]
fn a_summary_is_measured_in_characters() {
    let env = TestEnv::new();
    for character in ["x", "é", "😀", r"\n", r"\u00e9", r"\ud83d\ude00"] {
        put_payload(&env, &format!("{{\"summary\":\"{}\"}}", character.repeat(800)));
        refuse_payload(
            &env,
            &format!("{{\"summary\":\"{}\"}}", character.repeat(801)),
            "has 801 characters, more than 800",
        );
    }
    // Only the payload's own.
    put_payload(&env, &format!("{{\"a\":{{\"summary\":\"{}\"}}}}", "x".repeat(801)));
}

#[test]
fn what_json_allows_arrives_as_it_was_given() {
    let env = TestEnv::new();
    let payloads = [
        r#"{"lone":"\ud83d","pair":"\ud83d\ude00"}"#,
        r#"{"a":1,"a":2,"b":{"c":1,"c":1}}"#,
        r#"{"large":123456789012345678901234567890,"exact":0.1000000000000000055511151231257827,"tiny":1e-400}"#,
        r#"{"control":"\u0000\u0001\u001b[2J\u007f","":"","/":"\/"}"#,
        "{\"del\":\"\u{7f}\",\"c1\":\"\u{9b}2J\",\"bom\":\"\u{feff}\",\"rtl\":\"\u{202e}\"}",
        r#"{"id":"x","status":"done","kind":"ledger","payload":{"status":"queued"}}"#,
    ];
    for payload in payloads {
        let id = put_payload(&env, payload);
        let line = done(&env, "take", &["--role", "researcher"]);
        assert!(line.contains(&format!("\"payload\":{payload},")), "{line}");
        assert_eq!(done(&env, "done", &[&id, "--result", payload]), "done");
        let all = queue(&env);
        let line = all.lines().find(|line| line.contains(&id)).unwrap();
        assert!(
            line.contains(&format!("\"payload\":{payload},")) && line.contains(&format!("\"result\":{payload}")),
            "{line}"
        );
    }
}

/// A line with what its handles stand for, and that with what its handles stand for.
fn restored(env: &TestEnv, line: &str) -> String {
    const START: &str = r#"{"artifact_ref":""#;
    let Some(start) = line.find(START) else { return line.to_owned() };
    let name = line[start + START.len()..].split('"').next().unwrap();
    let mut handle = serde_json::Deserializer::from_str(&line[start..]).into_iter::<Value>();
    handle.next().unwrap().unwrap();
    let end = start + handle.byte_offset();
    let blob = fs::read_to_string(env.path(name)).unwrap();
    line[..start].to_owned() + &restored(env, &blob) + &line[end..]
}

#[test]
fn a_payload_nested_a_hundred_thousand_deep_is_put_and_taken() {
    let env = TestEnv::new();
    let deep = format!("{{\"deep\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    env.write("deep.json", &deep);
    // Its inner arrays are too large for a line, and each one around them is not, until it has grown again.
    let id = put_payload(&env, "@deep.json");
    let line = done(&env, "take", &["--role", "researcher"]);
    assert!(line.len() < 20_000 && line.contains("artifact_ref"), "{} bytes", line.len());
    assert_eq!(restored(&env, &line).matches('[').count(), 100_000);
    env.write("deeper.json", format!("{}{}", "[".repeat(100_000), "]".repeat(100_000)));
    assert_eq!(done(&env, "done", &[&id, "--result", "@deeper.json"]), "done");
    // Where it may stay in the line.
    let arguments = [&EXAMPLE[..], &["--payload", "@deep.json", "--max-bytes", "1MiB"]].concat();
    done(&env, "put", &arguments);
    assert!(done(&env, "take", &["--role", "researcher"]).contains(&deep));
}

#[test]
fn ten_megabytes_go_to_a_blob_or_stay_if_they_are_many_small_values() {
    let env = TestEnv::new();
    let text = "0123456789abcdef".repeat(10 * 65_536);
    env.write("large.json", format!("{{\"summary\":\"large\",\"log\":\"{text}\"}}"));
    put_payload(&env, "@large.json");
    let taken = take(&env, "researcher");
    let blob = env.path(taken["payload"]["log"]["artifact_ref"].as_str().unwrap());
    assert!(fs::read_to_string(blob).unwrap() == text, "the blob holds something else");
    assert!(queue(&env).len() < 4_000);

    env.write("result.json", format!("[\"{text}\"]"));
    let id = taken["id"].as_str().unwrap();
    assert_eq!(done(&env, "done", &[id, "--result", "@result.json"]), "done");
    let result = &record_of(&env, id)["result"];
    // Its only element is too large, and then what is left of it is not.
    let blob = env.path(result[0]["artifact_ref"].as_str().unwrap());
    assert!(fs::read_to_string(blob).unwrap() == text, "the blob holds something else");

    let members: Vec<String> = (0..10_000).map(|n| format!("\"m{n}\":\"{}\"", "x".repeat(1_000))).collect();
    let many = format!("{{{}}}", members.join(","));
    let put = put_through_stdin(&env, many.as_bytes());
    assert_eq!(put.code, Some(0), "{}", put.stderr);
    assert!(done(&env, "take", &["--role", "researcher"]).contains(&many));

    let too_long = handoff(&env, "put", &[&EXAMPLE[..], &["--payload", "@large.json", "--max-line", "1MiB"]].concat());
    assert_eq!(too_long.code, Some(65), "{}", too_long.stderr);
}

#[test]
fn names_and_ids_may_hold_anything_that_an_argument_can() {
    let env = TestEnv::new();
    let hostile =
        ["a/b", "../..", "\"quoted\"", "back\\slash", "new\nline", "\u{1b}[2J", "😀", "é", " ", "-", "@x", "{}", "--"];
    for (number, name) in hostile.iter().enumerate() {
        let (run_id, correlation) = (format!("run {name}"), format!("{name}{name}"));
        let put = [
            "--kind=classify".to_owned(),
            "--from=triage".to_owned(),
            format!("--to={name}"),
            format!("--run-id={run_id}"),
            format!("--correlation-id={correlation}"),
        ];
        let put: Vec<&str> = put.iter().map(String::as_str).collect();
        let id = done(&env, "put", &put);
        // Found again whatever has to be escaped.
        assert_eq!(done(&env, "put", &put), id, "{name:?}");
        assert_eq!(records(&env).len(), number + 1, "{name:?}");
        let other = [&put[..], &["--payload", "{\"n\":1}"]].concat();
        refused(&env, "put", &other, "another payload");
        let taken: Value = serde_json::from_str(&done(&env, "take", &[&format!("--role={name}")])).unwrap();
        let expected = [json!(id), json!(name), json!(run_id), json!(correlation)];
        assert_eq!(
            [&taken["id"], &taken["to"], &taken["run_id"], &taken["correlation_id"]].map(Value::clone),
            expected
        );
        let reason = format!("--reason={name}");
        assert_eq!(done(&env, "nack", &[&id, &reason, "--no-retry", &format!("--class={name}")]), "dead");
        let nack = &record_of(&env, &id)["nacks"][0];
        assert_eq!([&nack["by"], &nack["reason"], &nack["error_class"]], [&json!(name); 3]);
    }
    // Messages reach a terminal.
    let run = handoff(&env, "done", &["\u{1b}[2J\n/é"]);
    assert_eq!(
        (run.code, run.stderr.chars().any(|c| c.is_control() && c != '\n')),
        (Some(65), false),
        "{}",
        run.stderr
    );
    let run = handoff(&env, "put", &["--kind", "\u{1b}[2J", "--from", "a", "--to", "b"]);
    assert_eq!(
        (run.code, run.stderr.chars().any(|c| c.is_control() && c != '\n')),
        (Some(65), false),
        "{}",
        run.stderr
    );
}

#[test]
fn what_is_empty_or_outside_the_set_is_refused() {
    let env = TestEnv::new();
    put_payload(&env, "{}");
    refused(&env, "put", &["--kind", "improvise", "--from", "a", "--to", "b"], "there is no kind improvise");
    refused(&env, "put", &["--kind", "", "--from", "a", "--to", "b"], "there is no kind");
    refused(&env, "put", &["--kind", "classify", "--from", "", "--to", "b"], "`from` is empty");
    refused(&env, "put", &["--kind", "classify", "--from", "a", "--to", ""], "`to` is empty");
    for key in ["--run-id", "--correlation-id", "--parent"] {
        refused(&env, "put", &[&EXAMPLE[..], &[key, ""]].concat(), "is empty");
    }
    refused(&env, "put", &[&EXAMPLE[..], &["--kinds", "file_bug"]].concat(), "there is no kind classify");
    let id = take(&env, "researcher")["id"].as_str().unwrap().to_owned();
    refused(&env, "done", &["", "--force"], "has no record");
    for verb in ["requeue", "cancel"] {
        let run = handoff(&env, verb, &["", "--force"]);
        assert_ne!(run.code, Some(0), "an empty id is the beginning of every one: {verb}");
    }
    for (flag, not_valid) in [
        ("--result", ""),
        ("--result", "text"),
        ("--spend", ""),
        ("--spend", "\"1\""),
        ("--followup", ""),
        ("--followup", "[]"),
    ] {
        refused(&env, "done", &[&id, flag, not_valid], "");
    }
    let followup = r#"{"kind":"improvise","to":"patcher"}"#;
    refused(&env, "done", &[&id, "--followup", followup], "there is no kind improvise");
    assert_eq!(record_of(&env, &id)["status"], "running");
    assert_eq!(done(&env, "nack", &[&id, "--reason", ""]), "queued");
}

// ---- lines of others ----

#[test]
fn ids_are_known_however_they_are_written_and_by_how_they_begin() {
    let env = TestEnv::new();
    let line = |id: &str, status: &str| {
        format!(
            r#"{{"id":"{id}","ts":1795950000,"kind":"classify","from":"triage","to":"r\u0065searcher","payload":{{}},"st\u0061tus":"{status}"}}"#
        ) + "\n"
    };
    env.write(
        "queue.jsonl",
        line(r"\u0061bc", "human")
            + &line(r"abd\/1", "dead")
            + &line(r"\ud83d\ude00\u00e9", "human")
            + &line("abdominal", "human"),
    );
    for (id, written) in [("abc", r"\u0061bc"), ("abd/1", r"abd\/1"), ("😀é", r"\ud83d\ude00\u00e9")] {
        assert_eq!(done(&env, "requeue", &[id]), "queued", "{id}");
        assert!(queue(&env).contains(&format!(r#"{{"id":"{written}","#)), "{}", queue(&env));
        assert_eq!(record_of(&env, id)["status"], "queued");
        assert_eq!(take(&env, "researcher")["id"], json!(id));
        assert_eq!(done(&env, "done", &[id]), "done");
    }
    refused(&env, "cancel", &["ab"], "begin with ab");
    assert_eq!(done(&env, "cancel", &["abdo"]), "dead");
    assert_eq!(done(&env, "requeue", &["abdom"]), "queued");
    refused(&env, "requeue", &["x"], "has no record");
    // What would end a job wants all of the id.
    assert_eq!(take(&env, "researcher")["id"], json!("abdominal"));
    refused(&env, "done", &["abdo"], "has no record");
    refused(&env, "nack", &["abdo", "--reason", "x"], "has no record");
}

#[test]
fn lines_keep_their_ends_their_order_and_all_that_is_not_changed() {
    let env = TestEnv::new();
    let changed = "\u{feff}{ \"id\" : \"a\",\"ts\":1795950000.50 , \"kind\":\"classify\",\"from\":\"triage\",\"to\":\"researcher\",\"payload\":{ \"x\" : 1.0 }, \"status\" : \"queued\", \"mine\":[ ] } \r\n";
    let around = ["not JSON\r\n", "\r\n", "\u{feff}\n", "{\"id\":1}\n"];
    let other = record("b", "patcher", "queued");
    env.write("queue.jsonl", format!("{}{}{changed}{other}{}{}", around[0], around[1], around[2], around[3]));
    let taken = done(&env, "take", &["--role", "researcher"]);
    assert!(
        taken.starts_with("{ \"id\" : \"a\"") && taken.ends_with('}'),
        "what is printed is one JSON document: {taken:?}"
    );
    assert_eq!(done(&env, "done", &["a", "--spend", "0.5"]), "done");
    let after = queue(&env);
    let (_, after) = after.split_once('\n').unwrap();
    for line in around {
        assert!(after.contains(line), "{line:?}");
    }
    let start = "\u{feff}{ \"id\" : \"a\",\"ts\":1795950000.50 , \"kind\":\"classify\",\"from\":\"triage\",\"to\":\"researcher\",\"payload\":{ \"x\" : 1.0 }, \"status\" : \"done\", \"mine\":[ ] ,\"started_ts\":";
    let line = after.split_inclusive('\n').find(|line| line.contains("\"id\" : \"a\"")).unwrap();
    assert!(line.starts_with(start) && line.ends_with("\"spend\":0.5} \r\n"), "{line:?}");
    assert!(after.contains(&other) && after.find(line) < after.find(&other), "{after}");
}

#[test]
fn a_torn_tail_never_glues_to_what_is_put() {
    let env = TestEnv::new();
    let torn = r#"{"id":"torn","ts":17959"#;
    env.write("queue.jsonl", record("a", "researcher", "done") + torn);
    let id = put_payload(&env, "{}");
    let all = queue(&env);
    assert_eq!(all.lines().filter(|line| line.contains(&id)).count(), 1);
    let line = all.lines().find(|line| line.contains(&id)).unwrap();
    assert_eq!(serde_json::from_str::<Value>(line).unwrap()["id"], json!(id));
    assert_eq!(take(&env, "researcher")["id"], json!(id));
    // Its writer could still have gone on; now that nobody has the file open, it moves over as a line of its own.
    put_payload(&env, "{}");
    take(&env, "researcher");
    let rest: Vec<String> = queue(&env).lines().map(str::to_owned).collect();
    assert!(rest.contains(&torn.to_owned()), "{rest:?}");
}

/// What existing Python workers do with each line when they take a record: `str.splitlines`, and `json.loads` of each.
#[test]
fn python_workers_can_read_every_line_that_is_written() {
    let env = TestEnv::new();
    let separators = "\u{85} \u{2028} \u{2029} \u{7f} \u{feff}";
    let payload = format!("{{\"summary\":\"{separators}\",\"{separators}\":1}}");
    let arguments = ["--run-id", separators, "--payload", &payload];
    let put =
        |role: &str| done(&env, "put", &[&["--kind=classify", "--from=triage", "--to", role][..], &arguments].concat());
    let id = put(separators);
    assert_eq!(put(separators), id, "the same again is the same");
    let taken: Value = serde_json::from_str(&done(&env, "take", &["--role", separators])).unwrap();
    assert_eq!(taken["payload"]["summary"], json!(separators));
    let followup = format!("{{\"kind\":\"classify\",\"to\":\"a\",\"payload\":{payload}}}");
    let result = format!("\"{separators}\"");
    done(
        &env,
        "done",
        &[&id, "--result", &result, "--spend", &format!("{{\"model\":{result}}}"), "--followup", &followup],
    );
    let id = take(&env, "a")["id"].as_str().unwrap().to_owned();
    done(&env, "nack", &[&id, "--reason", separators, "--class", separators]);
    done(&env, "cancel", &[&id, "--reason", separators]);
    // A handle shows how its blob begins.
    put_payload(&env, &format!("{{\"log\":\"{}\"}}", separators.repeat(1_000)));
    assert!(queue(&env).contains("artifact_ref"));
    let script = "import json, pathlib\n\
        for line in pathlib.Path('queue.jsonl').read_text(encoding='utf-8').splitlines(): json.loads(line)";
    let read = run(env.command(python()).args(["-c", script]));
    assert_eq!(read.code, Some(0), "{}\n{}", read.stderr, queue(&env));
    assert_eq!(record_of(&env, &id)["stopped"]["reason"], json!(separators));
}

#[test]
fn a_lock_that_somebody_holds_is_waited_for_and_then_given_up_with_75() {
    let env = TestEnv::new();
    put_payload(&env, "{}");
    let script = "import fcntl, sys\nlock = open('queue.lock', 'a')\nfcntl.flock(lock, fcntl.LOCK_EX)\nprint('held', flush=True)\nsys.stdin.read()";
    let (holder, _) = Background::spawn_and_wait_for_line(env.command(python()).args(["-c", script]));
    let before = queue(&env);
    for (verb, arguments) in [("put", &EXAMPLE[..]), ("take", &["--role", "researcher"]), ("cancel", &["x"])] {
        let run = handoff(&env, verb, &[arguments, &["--lock-timeout", "50ms"]].concat());
        assert_eq!((run.code, run.stderr.lines().count()), (Some(75), 1), "{verb}: {}", run.stderr);
    }
    assert_eq!(queue(&env), before);
    holder.finish();
    assert_eq!(take(&env, "researcher")["status"], "running");
}

/// Standard input that has more than a line may have is not read to its end.
#[test]
fn endless_standard_input_is_given_up() {
    let env = TestEnv::new();
    let mut put = env.bare_handoff();
    put.args(["put", "--queue", "queue.jsonl", "--payload", "-", "--max-line", "1MiB"]).args(EXAMPLE);
    let mut child = start(put.stdin(Stdio::piped()).stderr(Stdio::piped()));
    let mut stdin = child.stdin.take().unwrap();
    let (blank, mut written) = (vec![b' '; 65_536], 0);
    while written < 1_000_000_000 && stdin.write_all(&blank).is_ok() {
        written += blank.len();
    }
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(65));
    assert!(written < 100_000_000, "{written} bytes were read");
    assert!(String::from_utf8(output.stderr).unwrap().contains("standard input: has more than the 1048576 bytes"));
}
