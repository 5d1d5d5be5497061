//! Flags and their variables.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;
use std::time::Duration;

use crate::exposition::{sum, value};
use crate::test_env::{Background, NOW, NOW_SECONDS, TestEnv, in_tests, python, record, run, small_queue};

const VARIABLES: [&str; 14] = [
    "HANDOFF_BLOB_DIR",
    "HANDOFF_KINDS",
    "HANDOFF_LOCK",
    "HANDOFF_LOCK_TIMEOUT",
    "HANDOFF_MAX_BYTES",
    "HANDOFF_MAX_LINE",
    "HANDOFF_NOW",
    "HANDOFF_PRICES",
    "HANDOFF_QUEUE",
    "HANDOFF_QUIET",
    "HANDOFF_ROLES",
    "HANDOFF_STDOUT",
    "HANDOFF_TEXTFILE_DIR",
    "HANDOFF_VERBOSE",
];

#[test]
fn wrong_usage_is_refused_before_anything_is_written() {
    let wrong: [&[&str]; 13] = [
        &["--no-such-flag"],
        &["positional"],
        &["--stdout", "--textfile-dir", "textfile"],
        &["-v", "-q"],
        &["--lock-timeout", "soon"],
        &["--lock-timeout", "-1s"],
        &["--max-line", "many"],
        &["--now", "yesterday"],
        &["--now", "1764400000"],
        &["--roles", ","],
        &["--roles", "a\u{1b}b"],
        &["--kinds"],
        &["--queue"],
    ];
    for arguments in wrong {
        let env = TestEnv::new();
        env.write("queue.jsonl", small_queue());
        env.run_earlier();
        let before = fs::read(env.prom()).unwrap();
        let mut command = env.bare_exporter();
        if !arguments.contains(&"--stdout") {
            // The default directory may exist.
            command.env("HANDOFF_TEXTFILE_DIR", "textfile");
        }
        let run = run(command.args(arguments));
        assert_eq!((run.code, &*run.stdout), (Some(2), &b""[..]), "{arguments:?}: {}", run.stderr);
        let is_one_message = run.stderr.starts_with("handoff-exporter: ") && run.stderr.lines().count() == 1;
        assert!(is_one_message && run.stderr.ends_with(": see --help\n"), "{arguments:?}: {}", run.stderr);
        assert_eq!(fs::read(env.prom()).unwrap(), before, "{arguments:?}");
    }
}

#[test]
fn help_and_version_are_answers() {
    let env = TestEnv::new();
    for flag in ["--help", "-h", "--version", "-V"] {
        let run = run(env.bare_exporter().arg(flag));
        assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{flag}");
        assert!(
            run.stdout.starts_with(b"handoff-exporter") || run.stdout.starts_with(b"Read the handoff queue"),
            "{flag}"
        );
    }
}

#[test]
fn each_flag_in_the_help_has_a_variable_that_is_tried_here() {
    let env = TestEnv::new();
    let help = String::from_utf8(run(env.bare_exporter().arg("--help")).stdout).unwrap();
    let shown: BTreeSet<&str> =
        help.split("[env: ").skip(1).map(|rest| &rest[..rest.find(['=', ']']).expect("a variable's end")]).collect();
    let mut known = BTreeSet::from(VARIABLES);
    known.remove("HANDOFF_NOW");
    assert_eq!(shown, known, "{help}");
    let flags = help.lines().filter(|line| line.trim_start().starts_with("--") || line.trim_start().starts_with('-'));
    assert_eq!(flags.count(), known.len() + 2, "flags with variables, --help and --version: {help}");
}

#[test]
fn an_empty_variable_counts_as_not_set() {
    let env = TestEnv::new();
    env.write("queue.jsonl", small_queue());
    let mut command = env.exporter();
    command.args(["--textfile-dir", "textfile"]).envs(VARIABLES.map(|name| (name, "")));
    let run = run(&mut command);
    assert_eq!((run.code, run.stderr.as_str(), &*run.stdout), (Some(0), "", &b""[..]));
    let samples = env.assert_only_a_good_file("empty variables");
    assert!((sum(&samples, "handoff_queue_records", &[]) - 3.0).abs() < 0.5);
}

/// The exporter with nothing but variables, writing to standard output.
fn with_variables(env: &TestEnv, variables: &[(&str, &str)]) -> Command {
    let mut command = env.bare_exporter();
    command.env("HANDOFF_QUEUE", "queue.jsonl").env("HANDOFF_STDOUT", "1").env("HANDOFF_NOW", NOW);
    command.envs(variables.iter().copied());
    command
}

#[test]
fn the_queue_the_time_and_the_output_can_be_variables() {
    let env = TestEnv::new();
    env.write("queue.jsonl", small_queue());
    let to_stdout = run(&mut with_variables(&env, &[])).samples();
    assert!((value(&to_stdout, "handoff_exporter_last_success_timestamp_seconds", &[]) - NOW_SECONDS).abs() < 1e-6);
    assert!((sum(&to_stdout, "handoff_queue_records", &[]) - 3.0).abs() < 0.5);

    for no in ["", "0", "false", "no"] {
        let run = run(&mut with_variables(&env, &[("HANDOFF_STDOUT", no), ("HANDOFF_TEXTFILE_DIR", "textfile")]));
        assert_eq!((run.code, &*run.stdout), (Some(0), &b""[..]), "{no:?}: {}", run.stderr);
        env.assert_only_a_good_file(no);
        fs::remove_file(env.prom()).unwrap();
    }
    // A flag wins over a variable, its own and its opposite.
    let run = run(with_variables(&env, &[("HANDOFF_QUEUE", "missing/queue.jsonl")]).args([
        "--queue",
        "queue.jsonl",
        "--textfile-dir",
        "textfile",
    ]));
    assert_eq!((run.code, &*run.stdout), (Some(0), &b""[..]), "{}", run.stderr);
    env.assert_only_a_good_file("a flag");
}

#[test]
fn labels_and_lines_can_be_variables() {
    let env = TestEnv::new();
    env.write("queue.jsonl", small_queue() + &record(&"long".repeat(100), "researcher", "queued"));
    let samples =
        run(&mut with_variables(&env, &[("HANDOFF_ROLES", "patcher,absent"), ("HANDOFF_KINDS", "file_bug")])).samples();
    assert!((value(&samples, "handoff_records_total", &[("role", "patcher"), ("kind", "other")]) - 1.0).abs() < 0.5);
    assert!((value(&samples, "handoff_records_total", &[("role", "other"), ("kind", "other")]) - 3.0).abs() < 0.5);
    assert!(value(&samples, "handoff_records_total", &[("role", "absent"), ("kind", "file_bug")]) < 0.5);

    let samples = run(&mut with_variables(&env, &[("HANDOFF_MAX_LINE", "200")])).samples();
    assert!((value(&samples, "handoff_queue_malformed_lines", &[("reason", "too_long")]) - 1.0).abs() < 0.5);

    assert!(value(&samples, "handoff_queue_oversized_records", &[]) < 0.5);
    env.write(
        "queue.jsonl",
        record("a", "r", "done").replace("{}", r#"{"text":"0123456789abcdefghijklmnopqrstuvwxyz"}"#),
    );
    for (limit, oversized) in [("37", 1.0), ("38", 0.0)] {
        let samples = run(&mut with_variables(&env, &[("HANDOFF_MAX_BYTES", limit)])).samples();
        assert!((value(&samples, "handoff_queue_oversized_records", &[]) - oversized).abs() < 0.5, "{limit}");
    }
}

#[test]
fn prices_and_the_blob_store_can_be_variables() {
    let env = TestEnv::new();
    let name = format!("aa/{}", "a".repeat(64));
    fs::create_dir_all(env.path("elsewhere/aa")).unwrap();
    env.write(&format!("elsewhere/{name}"), "blob");
    env.write("prices.json", r#"{"m":{"input_cost_per_token":0.25}}"#);
    env.write(
        "queue.jsonl",
        format!(
            r#"{{"id":"a","ts":1795950000,"kind":"classify","from":"triage","to":"r","payload":{{"x":"blob/{name}"}},"status":"done","spend":{{"model":"m","input_tokens":2}}}}"#
        ) + "\n",
    );
    let read =
        |variables: &[(&str, &str)], name: &str| sum(&run(&mut with_variables(&env, variables)).samples(), name, &[]);
    assert!((read(&[], "handoff_spend_unpriced_records_total") - 1.0).abs() < 0.5);
    assert!((read(&[("HANDOFF_PRICES", "prices.json")], "handoff_spend_usd_total") - 0.5).abs() < 1e-9);
    assert!((read(&[], "handoff_blob_missing_references") - 1.0).abs() < 0.5);
    assert!((read(&[("HANDOFF_BLOB_DIR", "elsewhere")], "handoff_blob_bytes") - 4.0).abs() < 0.5);
}

#[test]
fn how_much_is_said_can_be_a_variable() {
    let env = TestEnv::new();
    env.write("queue.jsonl", small_queue() + "not json\n");
    let lines = |variables: &[(&str, &str)], arguments: &[&str]| {
        let run = run(with_variables(&env, variables).args(arguments));
        assert_eq!(run.code, Some(0), "{}", run.stderr);
        run.stderr.lines().count()
    };
    assert_eq!(lines(&[], &[]), 1);
    assert_eq!(lines(&[("HANDOFF_QUIET", "1")], &[]), 0);
    assert_eq!(lines(&[("HANDOFF_VERBOSE", "1")], &[]), 2);
    assert_eq!(lines(&[], &["-q"]), 0);
    assert_eq!(lines(&[], &["-v"]), 2);
    assert_eq!(lines(&[("HANDOFF_QUIET", "1")], &["-v"]), 2);
    assert_eq!(lines(&[("HANDOFF_VERBOSE", "1")], &["-q"]), 0);
}

#[test]
fn the_lock_and_the_patience_can_be_variables() {
    let env = TestEnv::new();
    env.write("queue.jsonl", small_queue());
    let mut holder = env.command(python());
    holder.arg(in_tests("workers/hold_lock.py")).args(["special.lock", "exclusive"]);
    let (holder, _) = Background::spawn_and_wait_for_line(&mut holder);
    let special = ("HANDOFF_LOCK", "special.lock");
    let busy = run(&mut with_variables(&env, &[special, ("HANDOFF_LOCK_TIMEOUT", "100ms")]));
    assert_eq!(busy.code, Some(75), "{}", busy.stderr);
    assert!(busy.took < Duration::from_secs(5), "it took {:?}", busy.took);
    assert!(busy.stderr.contains("special.lock"), "{}", busy.stderr);
    assert_eq!(run(&mut with_variables(&env, &[])).code, Some(0), "the other lock is free");
    holder.finish();
    assert_eq!(run(&mut with_variables(&env, &[special])).code, Some(0));
}
