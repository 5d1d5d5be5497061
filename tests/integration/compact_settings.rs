//! The command line of handoff-compact: its messages, exit codes, plans and metrics.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs::{self, File, Permissions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::exposition::{Samples, differences, parse, sum, value};
use crate::services::{NodeExporter, Prometheus};
use crate::test_env::{
    Background, EARLIER, EARLIER_SECONDS, MountNamespace, NOW, NOW_SECONDS, Run, TestEnv, in_tests, mode, python,
    record, run, start, tool, under,
};
use crate::validator::assert_valid;

const VARIABLES: [&str; 14] = [
    "HANDOFF_DRY_RUN",
    "HANDOFF_JSON",
    "HANDOFF_LOCK",
    "HANDOFF_LOCK_TIMEOUT",
    "HANDOFF_MAX_LINE",
    "HANDOFF_NOW",
    "HANDOFF_OLDER_THAN",
    "HANDOFF_ROLES",
    "HANDOFF_KINDS",
    "HANDOFF_PRICES",
    "HANDOFF_QUEUE",
    "HANDOFF_QUIET",
    "HANDOFF_TEXTFILE_DIR",
    "HANDOFF_VERBOSE",
];
/// When old records were queued, which is also when they were done.
const OLD_SECONDS: f64 = 1_790_000_000.0;

/// A record that has been done for months.
fn old(id: &str) -> String {
    record(id, "researcher", "done").replace("\"ts\":1795950000", "\"ts\":1790000000")
}

/// Two records that go and three lines that stay.
fn queue() -> String {
    let kept = record("queued", "researcher", "queued") + "not json\n" + &record("recent", "patcher", "done");
    old("old-1") + &kept + &old("old-2")
}

fn env_with_queue() -> TestEnv {
    let env = TestEnv::new();
    env.write("queue.jsonl", queue());
    env
}

/// What is in the queue after its ledger line.
fn lines_after_ledger(env: &TestEnv) -> String {
    let contents = fs::read_to_string(env.path("queue.jsonl")).unwrap();
    let (ledger, rest) = contents.split_once('\n').unwrap();
    assert!(ledger.starts_with("{\"id\":\"ledger\","), "the first line is {ledger}");
    rest.to_owned()
}

fn is_compacted(env: &TestEnv) -> bool {
    !fs::read_to_string(env.path("queue.jsonl")).unwrap().contains("\"old-")
}

fn names(env: &TestEnv) -> Vec<String> {
    let entries = fs::read_dir(env.path(".")).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Runs a command that must end so and say just one thing.
fn assert_message(command: &mut Command, code: i32, message: &str) -> Run {
    let run = run(command);
    assert_eq!(run.code, Some(code), "{message}: {}", run.stderr);
    let [line] = run.stderr.lines().collect::<Vec<_>>()[..] else { panic!("not one message: {}", run.stderr) };
    assert!(line.starts_with("handoff-compact: ") && line.contains(message), "{line:?} doesn't say {message:?}");
    run
}

fn succeed(command: &mut Command) -> Run {
    let run = run(command);
    assert_eq!(run.code, Some(0), "{command:?}: {}", run.stderr);
    run
}

fn stdout(command: &mut Command) -> String {
    String::from_utf8(succeed(command).stdout).unwrap()
}

/// The one line of JSON that a run prints.
fn json_of(command: &mut Command) -> Value {
    let text = stdout(command);
    assert!(text.ends_with("}\n") && text.lines().count() == 1, "{text:?}");
    serde_json::from_str(&text).unwrap()
}

/// As people read sizes.
fn in_words(bytes: usize) -> String {
    let tenths = (bytes * 10 + 512) / 1024;
    if bytes < 1024 { format!("{bytes} B") } else { format!("{}.{} KiB", tenths / 10, tenths % 10) }
}

// Flags and variables.

#[test]
fn help_and_version_are_answers() {
    let env = env_with_queue();
    for flag in ["--help", "-h", "--version", "-V"] {
        let run = succeed(env.bare_compact().arg(flag));
        assert_eq!(run.stderr, "", "{flag}");
        let beginning: &[u8] = if flag.to_lowercase().contains('v') {
            b"handoff-compact 0."
        } else {
            b"Remove records that have been done"
        };
        assert!(run.stdout.starts_with(beginning), "{flag}");
    }
    let help = stdout(env.bare_compact().arg("--help"));
    for code in ["   0  ", "   2  ", "  65  ", "  74  ", "  75  "] {
        assert!(help.lines().any(|line| line.starts_with(code)), "exit code{code}is not explained: {help}");
    }
    assert_eq!(fs::read_to_string(env.path("queue.jsonl")).unwrap(), queue());
}

#[test]
fn each_flag_in_the_help_has_a_variable_that_is_tried_here() {
    let env = TestEnv::new();
    let help = stdout(env.bare_compact().arg("--help"));
    let shown: BTreeSet<&str> =
        help.split("[env: ").skip(1).map(|rest| &rest[..rest.find(['=', ']']).expect("a variable's end")]).collect();
    let mut known = BTreeSet::from(VARIABLES);
    known.remove("HANDOFF_NOW");
    assert_eq!(shown, known, "{help}");
    let flags = help.lines().filter(|line| line.trim_start().starts_with('-'));
    assert_eq!(flags.count(), known.len() + 2, "flags with variables, --help and --version: {help}");
    for fixed in ["[default: /var/lib/agents/queue.jsonl]", "[default: 10s]", "[default: 14d]"] {
        assert!(help.contains(fixed), "{fixed} is missing: {help}");
    }
    assert!(help.contains("[default: /var/lib/prometheus/node-exporter]"), "{help}");
}

#[test]
fn wrong_usage_is_refused_before_anything_is_done() {
    let wrong: [&[&str]; 25] = [
        &["--no-such-flag"],
        &["positional"],
        &["-v", "-q"],
        &["--older-than", "14"],
        &["--older-than", "-1d"],
        &["--older-than=-1d"],
        &["--older-than", "forever"],
        &["--older-than", ""],
        &["--older-than= "],
        &["--older-than"],
        &["--older-than", "14d x"],
        &["--older-than", "14D"],
        &["--older-than", "1e3s"],
        &["--older-than", "NaNd"],
        &["--older-than", "999999999999999d"],
        &["--older-than", "18446744073709551616s"],
        &["--older-than", "99999999999999999999999999999999999999999y"],
        &["--older-than", "1d", "--older-than", "2d"],
        &["--lock-timeout", "soon"],
        &["--lock-timeout", "-1s"],
        &["--max-line", "many"],
        &["--now", "yesterday"],
        &["--dry-run=perhaps"],
        &["--queue"],
        &["--stdout"],
    ];
    for arguments in wrong {
        let env = env_with_queue();
        let mut command = env.bare_compact();
        command.envs([("HANDOFF_QUEUE", "queue.jsonl"), ("HANDOFF_TEXTFILE_DIR", "textfile"), ("HANDOFF_NOW", NOW)]);
        let run = assert_message(command.args(arguments), 2, ": see --help");
        assert!(run.stderr.ends_with(": see --help\n") && run.stdout.is_empty(), "{arguments:?}: {}", run.stderr);
        assert_eq!(names(&env), ["queue.jsonl", "textfile"], "{arguments:?}");
        assert_eq!(fs::read_to_string(env.path("queue.jsonl")).unwrap(), queue(), "{arguments:?}");
        assert!(env.textfile_names().is_empty(), "{arguments:?}");
    }
}

#[test]
fn metrics_never_take_the_place_of_the_queue_or_its_lock() {
    for (tool, file) in [("compact", "handoff_compact.prom"), ("exporter", "handoff.prom")] {
        for flag in ["--queue", "--lock"] {
            let env = env_with_queue();
            let contents = if flag == "--queue" { queue() } else { String::new() };
            env.write(&format!("textfile/{file}"), &contents);
            let mut command = if tool == "compact" { env.bare_compact() } else { env.bare_exporter() };
            if flag == "--lock" {
                command.args(["--queue", "queue.jsonl"]);
            }
            command.args([flag, &format!("./textfile/../textfile/{file}"), "--textfile-dir", "textfile"]);
            let run = run(&mut command);
            assert_eq!(run.code, Some(2), "{tool} {flag}: {}", run.stderr);
            assert!(run.stderr.contains("would have the metrics replace the queue"), "{}", run.stderr);
            assert_eq!(fs::read_to_string(env.path(format!("textfile/{file}"))).unwrap(), contents, "{tool} {flag}");
            assert_eq!(fs::read_to_string(env.path("queue.jsonl")).unwrap(), queue(), "{tool} {flag}");
        }
    }
}

#[test]
fn wrong_variables_are_wrong_usage_too() {
    for (name, value) in [
        ("HANDOFF_OLDER_THAN", "14"),
        ("HANDOFF_OLDER_THAN", "-1d"),
        ("HANDOFF_OLDER_THAN", "forever"),
        ("HANDOFF_OLDER_THAN", "999999999999999d"),
        ("HANDOFF_LOCK_TIMEOUT", "10"),
        ("HANDOFF_MAX_LINE", "-1"),
        ("HANDOFF_NOW", "now"),
    ] {
        let env = env_with_queue();
        let mut command = env.bare_compact();
        command.args(["--queue", "queue.jsonl", "--textfile-dir", "textfile"]).env(name, value);
        let run = assert_message(&mut command, 2, ": see --help");
        assert!(run.stderr.contains("'--"), "{name}={value}: {}", run.stderr);
        assert_eq!(names(&env), ["queue.jsonl", "textfile"], "{name}={value}");
        assert_eq!(fs::read_to_string(env.path("queue.jsonl")).unwrap(), queue());
    }
}

#[test]
fn an_empty_variable_counts_as_not_set() {
    let env = env_with_queue();
    let mut command = env.compact();
    let run = succeed(command.envs(VARIABLES.map(|name| (name, ""))));
    assert!(run.stdout.is_empty() && run.stderr.lines().count() == 1, "{}", run.stderr);
    assert!(is_compacted(&env));
    assert_eq!(env.textfile_names(), ["handoff_compact.prom"]);
}

/// Compaction with nothing but variables.
fn with_variables(env: &TestEnv, variables: &[(&str, &str)]) -> Command {
    let mut command = env.bare_compact();
    command.envs([("HANDOFF_QUEUE", "queue.jsonl"), ("HANDOFF_TEXTFILE_DIR", "textfile"), ("HANDOFF_NOW", NOW)]);
    command.envs(variables.iter().copied());
    command
}

/// Names that have series of their own keep them, however many others there are.
#[test]
fn configured_names_have_a_place_of_their_own_in_the_ledger() {
    for (flag, variable, member) in [("--roles", "HANDOFF_ROLES", "role"), ("--kinds", "HANDOFF_KINDS", "kind")] {
        for configured in [None, Some("--"), Some("variable")] {
            let env = env_with_queue();
            let field = if member == "role" { "to" } else { "kind" };
            let lines = (0..=60).map(|n| {
                let mut record: Value = serde_json::from_str(&record(&n.to_string(), "b", "done")).unwrap();
                record["ts"] = 1_700_000_000.into();
                record[field] = format!("name-{n}").into();
                format!("{record}\n")
            });
            env.write("queue.jsonl", lines.collect::<String>());
            let mut command = env.compact();
            match configured {
                Some("--") => drop(command.args([flag, "name-3,name-60"])),
                Some(_) => drop(command.env(variable, "name-3,name-60")),
                None => {}
            }
            succeed(&mut command);
            let queue = fs::read_to_string(env.path("queue.jsonl")).unwrap();
            let ledger: Value = serde_json::from_str(queue.lines().next().unwrap()).unwrap();
            let cells = ledger["payload"]["totals"]["cells"].as_array().unwrap();
            let mut names: Vec<_> = cells.iter().map(|cell| cell[member].as_str().unwrap().to_owned()).collect();
            names.sort();
            let mut expected: Vec<_> = (0..50).map(|n| format!("name-{n}")).chain(["other".to_owned()]).collect();
            expected.extend(configured.map(|_| "name-60".to_owned()));
            expected.sort();
            assert_eq!(names, expected, "{member}, {configured:?}");
        }
    }
}

#[test]
fn each_variable_does_what_its_flag_does() {
    // The limit, in both directions.
    let env = env_with_queue();
    succeed(&mut with_variables(&env, &[("HANDOFF_OLDER_THAN", "1000w")]));
    assert!(!is_compacted(&env));
    succeed(&mut with_variables(&env, &[("HANDOFF_OLDER_THAN", "1h")]));
    assert!(is_compacted(&env));
    assert!(fs::read_to_string(env.path("queue.jsonl")).unwrap().contains("\"recent\""), "it was done within the hour");
    succeed(&mut with_variables(&env, &[("HANDOFF_OLDER_THAN", "59m")]));
    assert!(!fs::read_to_string(env.path("queue.jsonl")).unwrap().contains("\"recent\""), "it was done an hour ago");

    // The preview and JSON, whose words for no are those of all switches.
    for (word, is_on) in
        [("1", true), ("true", true), ("yes", true), ("0", false), ("false", false), ("no", false), ("off", false)]
    {
        let env = env_with_queue();
        let text = stdout(&mut with_variables(&env, &[("HANDOFF_DRY_RUN", word)]));
        assert_eq!((text.starts_with("queue.jsonl: 5 lines\n"), is_compacted(&env)), (is_on, !is_on), "{word}");
        let env = env_with_queue();
        let text = stdout(&mut with_variables(&env, &[("HANDOFF_JSON", word)]));
        assert_eq!(text.starts_with('{'), is_on, "{word}");
    }

    // A flag wins over a variable.
    let env = env_with_queue();
    succeed(with_variables(&env, &[("HANDOFF_OLDER_THAN", "1000w")]).args(["--older-than", "14d"]));
    assert!(is_compacted(&env));
    let env = env_with_queue();
    succeed(with_variables(&env, &[("HANDOFF_QUEUE", "missing/queue.jsonl")]).args(["--queue", "queue.jsonl"]));
    assert!(is_compacted(&env));

    // What a line may have.
    let env = env_with_queue();
    succeed(&mut with_variables(&env, &[("HANDOFF_MAX_LINE", "50")]));
    assert_eq!(fs::read_to_string(env.path("queue.jsonl")).unwrap(), queue(), "what is too long stays");

    // How much is said.
    let lines = |variables: &[(&str, &str)], arguments: &[&str]| {
        let env = env_with_queue();
        succeed(with_variables(&env, variables).args(arguments)).stderr.lines().count()
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
    let env = env_with_queue();
    let (holder, id) = hold_lock(&env, "special.lock");
    let special = ("HANDOFF_LOCK", "special.lock");
    let busy = &mut with_variables(&env, &[special, ("HANDOFF_LOCK_TIMEOUT", "100ms")]);
    assert_message(busy, 75, &format!("special.lock: still locked after 100ms by process {id} (python"));
    assert!(!is_compacted(&env));
    holder.finish();
    succeed(&mut with_variables(&env, &[special]));
    assert!(is_compacted(&env) && !env.path("queue.lock").exists());
}

#[test]
fn prices_can_be_a_variable_and_no_metric_falls_by_them() {
    let lay_out = || {
        let env = TestEnv::new();
        env.write("prices.json", r#"{"m":{"input_cost_per_token":0.25}}"#);
        let spend = r#""payload":{},"spend":{"model":"m","input_tokens":6}"#;
        env.write("queue.jsonl", old("old-1").replace("\"payload\":{}", spend) + &record("queued", "r", "queued"));
        env
    };
    let prices = ("HANDOFF_PRICES", "prices.json");
    let spend_and_unpriced = |env: &TestEnv| {
        let mut exporter = env.to_stdout();
        let samples = run(exporter.envs([prices])).samples();
        ["handoff_spend_usd_total", "handoff_spend_unpriced_records_total"]
            .map(|name| sum(&samples, name, &[]).to_string())
    };
    let env = lay_out();
    assert_eq!(spend_and_unpriced(&env), ["1.5", "0"]);
    succeed(&mut with_variables(&env, &[prices]));
    assert!(is_compacted(&env));
    assert_eq!(spend_and_unpriced(&env), ["1.5", "0"], "after compaction with the prices");
    // Without them, the record's cost is not known, and that is what is kept of it.
    let env = lay_out();
    succeed(&mut with_variables(&env, &[]));
    assert_eq!(spend_and_unpriced(&env), ["0", "1"]);
}

#[test]
fn the_largest_limit_keeps_everything_and_none_removes_all_that_is_done() {
    for limit in ["18446744073709551615s", "584542046090y", "300000y", "100y"] {
        let env = env_with_queue();
        let arguments = ["--older-than", limit];
        let text = stdout(env.compact().args(arguments).arg("--dry-run"));
        assert!(text.contains("\nremove 0 records, 0 B: done before "), "{text}");
        let plan = json_of(env.compact().args(arguments).args(["--dry-run", "--json"]));
        assert!(plan["done_before_timestamp_seconds"].is_number(), "{plan}");
        assert_message(env.compact().args(arguments), 0, "nothing to remove that was done for longer than ");
        assert_eq!(fs::read_to_string(env.path("queue.jsonl")).unwrap(), queue(), "{limit}");
    }
    for limit in ["0s", "0d", "1us"] {
        let env = env_with_queue();
        succeed(env.compact().args(["--older-than", limit]));
        assert_eq!(lines_after_ledger(&env), record("queued", "researcher", "queued") + "not json\n", "{limit}");
    }
    // Done at this very moment is not done for longer than nothing.
    let env = TestEnv::new();
    let now = old("now").replace("1790000000", "1795953600");
    let earlier = old("just-now").replace("1790000000", "1795953599.999999");
    env.write("queue.jsonl", now.clone() + &earlier);
    succeed(env.compact().args(["--older-than", "0s"]));
    assert_eq!(lines_after_ledger(&env), now);
}

// What is said.

/// For each reason, in the format's order: its name, the words for it, and a line that stays for it.
fn reasons() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let of = |from: &str, to: &str| old("x").replace(from, to).into_bytes();
    let status = |status: &str| of("\"status\":\"done\"", &format!("\"status\":\"{status}\""));
    let extra = |member: &str| of("\"payload\":{}", &format!("\"payload\":{{}},{member}"));
    vec![
        ("too_long", "malformed (too_long)", extra(&format!("\"x\":\"{}\"", "x".repeat(1_000)))),
        ("not_utf8", "malformed (not_utf8)", b"\"\xff\"\n".to_vec()),
        ("not_json", "malformed (not_json)", b"{\"id\":\n".to_vec()),
        ("unsupported_version", "malformed (unsupported_version)", extra("\"protocol_version\":3")),
        ("not_an_envelope", "malformed (not_an_envelope)", b"[1]\n".to_vec()),
        ("blank", "blank", b" \t\r\n".to_vec()),
        ("duplicate_key", "in doubt (duplicate_key)", extra("\"status\":\"done\"")),
        ("non_finite_number", "in doubt (non_finite_number)", extra("\"x\":NaN")),
        ("lone_surrogate", "in doubt (lone_surrogate)", of("\"x\"", "\"\\ud83d\"")),
        ("unreadable_time", "in doubt (unreadable_time)", extra("\"finished_ts\":\"soon\"")),
        ("unreadable_nacks", "in doubt (unreadable_nacks)", extra("\"nacks\":-1")),
        ("queued", "queued", status("queued")),
        ("running", "running", status("running")),
        ("nack", "nack", status("nack")),
        ("human", "human", status("human")),
        ("dead", "dead", status("dead")),
        ("unknown_status", "of an unknown status", status("paused")),
        ("nacked", "done after a refusal", extra("\"nacks\":[{}]")),
        ("future_time", "done, dated in the future", extra("\"finished_ts\":1795953601")),
        ("recent", "done more recently", extra("\"finished_ts\":1795953599")),
        (
            "contradictory_times",
            "done before they began",
            extra("\"started_ts\":1795953599,\"finished_ts\":1790000000"),
        ),
    ]
}

/// A queue of each reason, each another number of times, and of 30 records that go; and the number of its bytes that stay.
fn queue_of_all_reasons() -> (TestEnv, usize) {
    let env = TestEnv::new();
    let kept: Vec<u8> = (1..).zip(reasons()).flat_map(|(count, (_, _, line))| line.repeat(count)).collect();
    env.write("queue.jsonl", [old("old-1").repeat(30).into_bytes(), kept.clone()].concat());
    (env, kept.len())
}

const KEPT_LINES: usize = 21 * 22 / 2;
const MAX_LINE: [&str; 2] = ["--max-line", "1000"];

#[test]
fn the_summary_says_how_many_of_what_and_why() {
    let (env, kept) = queue_of_all_reasons();
    let removed = old("old-1").len() * 30;
    let why: Vec<String> = (1..).zip(reasons()).map(|(count, (_, words, _))| format!("{count} {words}")).collect();
    let expected = format!(
        "handoff-compact: queue.jsonl: removed 30 records done for longer than 14days, {}; kept {KEPT_LINES} lines, {}: {}\n",
        in_words(removed),
        in_words(kept),
        why.join(", ")
    );
    let run = succeed(env.compact().args(MAX_LINE));
    assert_eq!((run.stderr, run.stdout), (expected, Vec::new()));

    let again = succeed(env.compact().args(MAX_LINE));
    let expected =
        format!("queue.jsonl: nothing to remove that was done for longer than 14days; kept {KEPT_LINES} lines, ");
    assert!(
        again.stderr.contains(&expected) && again.stderr.ends_with("; removed 1 drained generation\n"),
        "{}",
        again.stderr
    );
}

#[test]
fn late_lines_are_told() {
    let env = env_with_queue();
    succeed(&mut env.compact());
    let late = record("late-1", "r", "queued") + &record("late-2", "r", "queued");
    let generation = fs::read_to_string(env.path("queue.gen.1")).unwrap();
    env.write("queue.gen.1", generation + &late);
    let run = succeed(env.compact().args(["--json"]));
    assert!(run.stderr.contains("; took over 2 late lines\n"), "{}", run.stderr);
    let outcome: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!(outcome["late"], json!({ "lines": 2, "bytes": late.len() }));
    assert_eq!((&outcome["replaced"], &outcome["removed"]["records"]), (&json!(true), &json!(0)));
}

#[test]
fn a_preview_says_the_same_and_changes_nothing() {
    let (env, kept) = queue_of_all_reasons();
    let before = fs::read(env.path("queue.jsonl")).unwrap();
    let removed = old("old-1").len() * 30;
    let mut expected = format!(
        "queue.jsonl: {} lines\nremove 30 records, {}: done before 2026-11-15T12:00:00Z\nkeep {KEPT_LINES} lines, {}, \
         the oldest record from 2026-09-21T14:13:20Z\n",
        KEPT_LINES + 30,
        in_words(removed),
        in_words(kept)
    );
    for (count, (_, words, _)) in (1..).zip(reasons()) {
        writeln!(expected, "{count:>10}  {words}").unwrap();
    }
    let run = succeed(env.compact().args(MAX_LINE).arg("--dry-run"));
    assert_eq!(String::from_utf8(run.stdout).unwrap(), expected);
    assert_eq!(run.stderr, "");
    assert!(fs::read(env.path("queue.jsonl")).unwrap() == before);
    // No lock file, no metrics.
    assert_eq!(names(&env), ["queue.jsonl", "textfile"]);
    assert!(env.textfile_names().is_empty());
}

#[test]
fn json_says_the_same_to_machines() {
    let (env, kept) = queue_of_all_reasons();
    let removed = old("old-1").len() * 30;
    let reasons: serde_json::Map<String, Value> =
        (1..).zip(reasons()).map(|(count, (name, _, _))| (name.to_owned(), json!(count))).collect();
    let expected = |is_preview: bool| {
        json!({
            "queue": "queue.jsonl",
            "dry_run": is_preview,
            "done_before_timestamp_seconds": 1_794_744_000.0,
            "lines": KEPT_LINES + 30,
            "removed": { "records": 30, "bytes": removed },
            "kept": { "lines": KEPT_LINES, "bytes": kept, "oldest_timestamp_seconds": OLD_SECONDS, "reasons": reasons },
            "ledger_lines": 0,
            "late": { "lines": 0, "bytes": 0 },
            "removed_generations": 0,
            "replaced": !is_preview,
            "totals": {
                "removed_records": 30,
                "reclaimed_bytes": removed,
            },
        })
    };
    for is_preview in [true, false] {
        let mut command = env.compact();
        command.args(MAX_LINE).arg("--json").args(is_preview.then_some("--dry-run"));
        let mut outcome = json_of(&mut command);
        let held = outcome.as_object_mut().unwrap().remove("lock_held_seconds").unwrap().as_f64().unwrap();
        assert_eq!(held > 0.0, !is_preview, "{held}");
        assert_eq!(outcome, expected(is_preview));
    }
    // A second run: nothing but what was removed before.
    let again = json_of(env.compact().args(MAX_LINE).arg("--json"));
    assert_eq!(again["removed"], json!({ "records": 0, "bytes": 0 }));
    assert_eq!(again["totals"], json!({ "removed_records": 30, "reclaimed_bytes": removed }));
    assert_eq!(again["kept"], expected(false)["kept"]);
    assert_eq!(
        (&again["ledger_lines"], &again["removed_generations"], &again["replaced"]),
        (&json!(1), &json!(1), &json!(false))
    );
}

#[test]
fn json_is_all_that_standard_output_gets_whatever_is_said_beside_it() {
    let env = env_with_queue();
    // A warning, a summary and a detail.
    env.write("queue.gen.4", "");
    let run = succeed(env.compact().args(["--json", "-v"]));
    assert_eq!(run.stderr.lines().count(), 3, "{}", run.stderr);
    let outcome: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!(outcome["removed"]["records"], 2);
    let silent = succeed(env.compact().args(["--json", "-q"]));
    assert_eq!(silent.stderr, "");
    assert!(serde_json::from_slice::<Value>(&silent.stdout).unwrap().is_object());

    // A failure prints none, so that nobody takes it for a result.
    let failed = run_with_bad_prices(&env, &["--json"]);
    assert!(failed.stdout.is_empty());
    // An empty queue has no oldest record.
    env.write("queue.jsonl", "");
    fs::remove_file(env.path("queue.gen.4")).unwrap();
    let outcome = json_of(env.compact().arg("--json"));
    assert_eq!((&outcome["lines"], &outcome["kept"]["oldest_timestamp_seconds"]), (&json!(0), &Value::Null));
}

fn run_with_bad_prices(env: &TestEnv, arguments: &[&str]) -> Run {
    env.write("prices.json", "{");
    let mut command = env.compact();
    assert_message(command.args(["--prices", "prices.json"]).args(arguments), 65, "prices.json")
}

#[test]
fn quiet_is_silent_unless_it_fails() {
    let env = env_with_queue();
    env.write("queue.gen.4", "");
    for arguments in [&["-q"][..], &["--quiet"], &["-q", "--older-than", "0s"]] {
        let run = succeed(env.compact().args(arguments));
        assert_eq!((run.stdout, run.stderr.as_str()), (Vec::new(), ""));
    }
    run_with_bad_prices(&env, &["-q"]);
}

#[test]
fn odd_names_of_queues_break_no_line() {
    for name in [&b"a\nb\x1b[2J.jsonl"[..], b"\xff\xfe.jsonl", "\u{9b}\u{2028}.jsonl".as_bytes(), b"-q", b" "] {
        let env = TestEnv::new();
        let name = std::ffi::OsStr::from_bytes(name);
        fs::write(env.path(name), queue()).unwrap();
        let mut command = env.bare_compact();
        let mut argument = std::ffi::OsString::from("--queue=");
        argument.push(name);
        command.arg(argument).args(["--textfile-dir", "textfile", "--now", NOW, "--json", "-v"]);
        let run = succeed(&mut command);
        assert_eq!(run.stderr.lines().count(), 2, "{name:?}: {}", run.stderr);
        assert!(run.stderr.lines().all(|line| line.starts_with("handoff-compact: ")), "{name:?}: {}", run.stderr);
        assert!(!run.stderr.contains(|c: char| c.is_control() && c != '\n'), "{name:?}: {:?}", run.stderr);
        let outcome: Value = serde_json::from_slice(&run.stdout).unwrap();
        assert_eq!(outcome["queue"], *name.to_string_lossy());
        assert!(!fs::read_to_string(env.path(name)).unwrap().contains("\"old-"));
    }
}

#[test]
fn the_journal_gets_priorities() {
    let env = env_with_queue();
    env.write("queue.gen.4", "");
    let journaled = |stream: &str, arguments: &[&str]| {
        let mut sh = env.command(tool("sh", "dash"));
        sh.args(["-c", &format!("exec 2>err; export JOURNAL_STREAM={stream}; exec \"$@\""), "sh"]);
        run(under(sh, &env.compact()).args(arguments));
        fs::read_to_string(env.path("err")).unwrap()
    };
    let own = "$(stat -c %d:%i err)";
    let lines = |text: &str| -> Vec<String> {
        text.lines().map(|line| line.split_once("handoff-compact: ").unwrap().0.to_owned()).collect()
    };
    assert_eq!(lines(&journaled(own, &["-v"])), ["<4>", "<5>", "<6>"], "a warning, a notice, a detail");
    assert_eq!(lines(&journaled(own, &["--prices", "missing.json"])), ["<3>"], "an error");
    assert_eq!(lines(&journaled(own, &["--no-such-flag"])), ["<3>"], "wrong usage");
    // It is another's journal, or none.
    for stream in ["8:1", "", "journal", "1:2:3"] {
        assert_eq!(lines(&journaled(stream, &[])), ["", ""], "{stream}");
    }
}

#[test]
fn standard_output_that_cannot_be_written_is_an_error_after_the_work() {
    let env = env_with_queue();
    let full = || File::options().write(true).open("/dev/full").unwrap();
    let mut command = env.compact();
    let child = start(command.arg("--json").stdout(full()).stderr(Stdio::piped()));
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(74), "{stderr}");
    let first = stderr.lines().next().unwrap();
    assert!(first.starts_with("handoff-compact: standard output: cannot be written: No space"), "{stderr}");
    assert!(is_compacted(&env));
    // The summary still says what was done.
    assert!(stderr.lines().nth(1).is_some_and(|line| line.contains("removed 2 records")), "{stderr}");

    // Who reads only the beginning has got what they wanted.
    let env = env_with_queue();
    let mut command = env.compact();
    let mut child = start(command.arg("--json").stdout(Stdio::piped()).stderr(Stdio::piped()));
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(is_compacted(&env));
}

#[test]
fn a_closed_standard_error_changes_nothing() {
    let env = env_with_queue();
    let mut sh = env.command(tool("sh", "dash"));
    sh.args(["-c", "exec \"$@\" 2>&-", "sh"]);
    succeed(&mut under(sh, &env.compact()));
    assert!(is_compacted(&env));
    assert!(
        fs::read(env.path("queue.jsonl")).unwrap().starts_with(b"{\"id\":\"ledger\","),
        "a message went into a file"
    );
}

// Metrics.

const FAMILIES: [&str; 6] = [
    "handoff_compact_duration_seconds",
    "handoff_compact_last_run_timestamp_seconds",
    "handoff_compact_last_success_timestamp_seconds",
    "handoff_compact_reclaimed_bytes_total",
    "handoff_compact_removed_records_total",
    "handoff_compact_success",
];
/// What a first run that fails cannot know.
const TOTALS: [&str; 2] = [FAMILIES[3], FAMILIES[4]];

/// The metrics of compaction, which must be ones that node_exporter accepts and can read.
fn metrics(env: &TestEnv) -> Samples {
    let path = env.path("textfile/handoff_compact.prom");
    assert_eq!(mode(&path), 0o644);
    let is_ours = |name: &&String| name.contains("compact");
    assert_eq!(env.textfile_names().iter().filter(is_ours).count(), 1, "{:?}", env.textfile_names());
    let contents = fs::read(path).unwrap();
    assert_valid(&contents, "handoff_compact.prom");
    parse(&contents)
}

/// What the metrics should say of the last run.
#[derive(Clone, Copy)]
struct Expected {
    success: bool,
    last_run: f64,
    last_success: f64,
    /// Records and bytes, if they are known.
    removed: Option<(f64, f64)>,
}

fn assert_metrics(env: &TestEnv, expected: Expected, context: &str) {
    let samples = metrics(env);
    let names: Vec<&str> = samples.keys().map(|series| series.name.as_str()).collect();
    let is_known = |name: &&str| expected.removed.is_some() || !TOTALS.contains(name);
    assert_eq!(names, FAMILIES.into_iter().filter(is_known).collect::<Vec<_>>(), "{context}");
    let mut wanted = vec![
        ("handoff_compact_success", f64::from(u8::from(expected.success))),
        ("handoff_compact_last_run_timestamp_seconds", expected.last_run),
        ("handoff_compact_last_success_timestamp_seconds", expected.last_success),
    ];
    if let Some((records, bytes)) = expected.removed {
        wanted.extend([(TOTALS[1], records), (TOTALS[0], bytes)]);
    }
    for (name, wanted) in wanted {
        let got = value(&samples, name, &[]);
        assert!((got - wanted).abs() < 1e-6, "{context}: {name} is {got}, not {wanted}");
    }
    let duration = value(&samples, "handoff_compact_duration_seconds", &[]);
    assert!(duration > 0.0 && duration < 60.0, "{context}: {duration}");
}

/// Compaction at another time.
fn compact_at(env: &TestEnv, now: &str) -> Command {
    let mut command = env.bare_compact();
    command.args(["--queue", "queue.jsonl", "--textfile-dir", "textfile", "--lock-timeout", "100ms", "--now", now]);
    command
}

#[expect(clippy::cast_precision_loss, reason = "a few hundred")]
fn bytes(text: &str) -> f64 {
    text.len() as f64
}

#[test]
fn metrics_say_what_was_removed_over_all_runs() {
    let env = env_with_queue();
    succeed(&mut compact_at(&env, EARLIER));
    let two = bytes(&(old("old-1") + &old("old-2")));
    let mut expected =
        Expected { success: true, last_run: EARLIER_SECONDS, last_success: EARLIER_SECONDS, removed: Some((2.0, two)) };
    assert_metrics(&env, expected, "the first run");

    // Nothing to remove.
    succeed(&mut compact_at(&env, NOW));
    expected = Expected { last_run: NOW_SECONDS, last_success: NOW_SECONDS, ..expected };
    assert_metrics(&env, expected, "the second run");

    // More, and without the file that the last run left: the totals are the queue's.
    let longer = old("old-with-a-longer-name");
    env.write("queue.jsonl", fs::read_to_string(env.path("queue.jsonl")).unwrap() + &longer);
    fs::remove_file(env.path("textfile/handoff_compact.prom")).unwrap();
    succeed(&mut compact_at(&env, NOW));
    expected.removed = Some((3.0, two + bytes(&longer)));
    assert_metrics(&env, expected, "the third run");

    // A preview is no run.
    let before = fs::read(env.path("textfile/handoff_compact.prom")).unwrap();
    succeed(env.compact().args(["--dry-run", "--older-than", "0s"]));
    assert!(fs::read(env.path("textfile/handoff_compact.prom")).unwrap() == before);
    assert_metrics(&env, expected, "after a preview");

    // No queue at all is nothing to compact.
    let env = TestEnv::new();
    succeed(&mut env.compact());
    let expected =
        Expected { success: true, last_run: NOW_SECONDS, last_success: NOW_SECONDS, removed: Some((0.0, 0.0)) };
    assert_metrics(&env, expected, "without a queue");
}

fn hold_lock(env: &TestEnv, lock: &str) -> (Background, String) {
    let mut command = env.command(python());
    Background::spawn_and_wait_for_line(command.arg(in_tests("workers/hold_lock.py")).args([lock, "exclusive"]))
}

#[test]
fn after_a_failure_metrics_say_so_and_keep_what_is_known() {
    let later = |seconds: u32| format!("2026-11-29T12:01:{seconds:02}Z");
    let later_seconds = |seconds: u32| NOW_SECONDS + 60.0 + f64::from(seconds);
    for has_succeeded in [true, false] {
        let env = env_with_queue();
        let two = bytes(&(old("old-1") + &old("old-2")));
        let mut expected = Expected { success: false, last_run: 0.0, last_success: 0.0, removed: None };
        if has_succeeded {
            succeed(&mut env.compact());
            expected = Expected { last_success: NOW_SECONDS, removed: Some((2.0, two)), ..expected };
        }
        let good = fs::read_to_string(env.path("queue.jsonl")).unwrap() + &old("old-3");
        env.write("queue.jsonl", &good);
        let mut runs = 0;
        let mut fails = |command: &mut dyn FnMut(&str) -> Command, code: i32, message: &str| {
            runs += 1;
            assert_message(&mut command(&later(runs)), code, message);
            expected.last_run = later_seconds(runs);
            assert_metrics(&env, expected, &format!("has succeeded: {has_succeeded}, {message}"));
        };

        let (holder, _) = hold_lock(&env, "queue.lock");
        fails(&mut |now| compact_at(&env, now), 75, "queue.lock: still locked after 100ms");
        holder.finish();
        // A price map that is none, and one that isn't there.
        env.write("prices.json", "[]");
        for (prices, code) in [("prices.json", 65), ("missing.json", 74)] {
            let mut command = |now: &str| {
                let mut command = compact_at(&env, now);
                command.args(["--prices", prices]);
                command
            };
            fails(&mut command, code, prices);
        }
        // A full disk.
        let mut full = |now: &str| {
            let mut strace = env.command(tool("strace", "strace"));
            strace.args(["-f", "-o", "trace", "-e", "inject=pwrite64:error=ENOSPC"]);
            under(strace, &compact_at(&env, now))
        };
        fails(&mut full, 74, "queue.jsonl: cannot be rewritten, and is left as it was: No space left on device");
        assert_eq!(fs::read_to_string(env.path("queue.jsonl")).unwrap(), good);
        // A ledger that can't be read.
        let unreadable =
            r#"{"id":"ledger","ts":1,"kind":"ledger","from":"","to":"","payload":{"version":2},"status":"ledger"}"#;
        env.write("queue.jsonl", format!("{good}{unreadable}\n"));
        let line = good.lines().count() + 1;
        fails(&mut |now| compact_at(&env, now), 65, &format!("queue.jsonl:{line}: the ledger cannot be read"));
        // No queue, but a directory.
        fs::remove_file(env.path("queue.jsonl")).unwrap();
        fs::create_dir(env.path("queue.jsonl")).unwrap();
        fails(&mut |now| compact_at(&env, now), 74, "queue.jsonl: cannot be opened: it is a directory");
        fs::remove_dir(env.path("queue.jsonl")).unwrap();

        env.write("queue.jsonl", &good);
        succeed(&mut compact_at(&env, &later(59)));
        let removed = Some((3.0, two + bytes(&old("old-3"))));
        let now = later_seconds(59);
        let expected = Expected { success: true, last_run: now, last_success: now, removed };
        assert_metrics(&env, expected, "recovered");
    }
}

#[test]
fn a_damaged_file_of_an_earlier_run_is_replaced() {
    for damaged in [
        &b""[..],
        b"\xff\xfe\0",
        b"handoff_compact_last_success_timestamp_seconds NaN\n",
        b"handoff_compact_removed_records_total -5\n",
    ] {
        let env = env_with_queue();
        env.write("textfile/handoff_compact.prom", damaged);
        run_with_bad_prices(&env, &[]);
        let expected = Expected { success: false, last_run: NOW_SECONDS, last_success: 0.0, removed: None };
        assert_metrics(&env, expected, "damaged");
    }
}

#[test]
fn anyone_may_read_the_metrics_whatever_the_umask() {
    for umask in ["000", "077", "777"] {
        let env = env_with_queue();
        let mut sh = env.command(tool("sh", "dash"));
        sh.args(["-c", &format!("umask {umask}; exec \"$@\""), "sh"]);
        succeed(&mut under(sh, &env.compact()));
        metrics(&env);
    }
}

#[test]
fn metrics_that_cannot_be_written_are_an_error_after_the_work() {
    // The directory is named by a flag or a variable, so that somebody wants them.
    for by_flag in [true, false] {
        let env = env_with_queue();
        fs::remove_dir(env.textfile_dir()).unwrap();
        let mut command = if by_flag { env.compact() } else { with_variables(&env, &[]) };
        let run = run(&mut command);
        assert_eq!(run.code, Some(74), "{}", run.stderr);
        let lines: Vec<&str> = run.stderr.lines().collect();
        assert!(lines.len() == 2 && lines[0].contains("removed 2 records"), "{lines:#?}");
        assert!(lines[1].starts_with("handoff-compact: textfile: cannot be written into: No such file"), "{lines:#?}");
        assert!(is_compacted(&env) && !env.textfile_dir().exists());
    }
    // A directory stands in the file's place.
    let env = env_with_queue();
    fs::create_dir(env.path("textfile/handoff_compact.prom")).unwrap();
    let run = run(&mut env.compact());
    assert_eq!(run.code, Some(74), "{}", run.stderr);
    assert!(run.stderr.contains("handoff_compact.prom: cannot be replaced"), "{}", run.stderr);
    assert!(is_compacted(&env));
    assert_eq!(env.textfile_names(), ["handoff_compact.prom"]);
}

#[test]
fn the_default_directory_is_used_only_if_it_is_there() {
    let env = env_with_queue();
    let mounts = MountNamespace::new(&env, "mkdir -p /var/lib; mount -t tmpfs tmpfs /var/lib");
    let mut command = env.bare_compact();
    command.args(["--queue", "queue.jsonl", "--now", NOW]);
    let run = succeed(&mut mounts.inside(&env, &command));
    assert_eq!(run.stderr.lines().count(), 2, "{}", run.stderr);
    let said = "/var/lib/prometheus/node-exporter: does not exist, so there are no metrics\n";
    assert!(run.stderr.ends_with(said), "{}", run.stderr);
    assert!(is_compacted(&env));
    assert_eq!(mounts.sh(&env, "ls -A /var/lib"), "", "it has made a directory");
    // As a flag or a variable, the same directory is wanted.
    let mut wanted = mounts.inside(&env, &command);
    wanted.env("HANDOFF_TEXTFILE_DIR", "/var/lib/prometheus/node-exporter");
    assert_eq!(crate::test_env::run(&mut wanted).code, Some(74));

    mounts.sh(&env, "mkdir -p /var/lib/prometheus/node-exporter");
    succeed(&mut mounts.inside(&env, &command));
    assert_eq!(mounts.sh(&env, "ls -A /var/lib/prometheus/node-exporter"), "handoff_compact.prom\n");
}

// Prometheus.

/// Whether a series is one whose fall Prometheus takes for a reset.
fn is_cumulative(name: &str) -> bool {
    ["_total", "_bucket", "_count", "_sum"].iter().any(|suffix| name.ends_with(suffix))
}

fn at_first(samples: &[(f64, f64)]) -> f64 {
    samples[0].1
}

fn at_last(samples: &[(f64, f64)]) -> f64 {
    samples[samples.len() - 1].1
}

/// Records whose durations and costs are such that floats add them up exactly.
fn records(first: u32, count: u32, queued_at: u32) -> String {
    let record = |number: u32| {
        let pick = |values: &[&'static str], divisor: u32| values[(number / divisor) as usize % values.len()];
        let (role, kind) = (pick(&["researcher", "patcher", "triage"], 1), pick(&["classify", "file_bug"], 2));
        let ts = queued_at + number;
        let started = ts + [3, 45, 400, 5_000, 20_000][number as usize % 5];
        let finished = started + [1, 30, 31, 7_000][number as usize % 4];
        let (status, more) = match number % 10 {
            0 => ("queued", String::new()),
            1 => ("dead", format!(",\"started_ts\":{started},\"finished_ts\":{finished},\"nacks\":2")),
            2 => ("done", format!(",\"started_ts\":{started},\"finished_ts\":{finished},\"nacks\":1")),
            _ => ("done", format!(",\"started_ts\":{started},\"finished_ts\":{finished}")),
        };
        let model = pick(&["m-1", "m-2"], 3);
        let spend = match number % 4 {
            0 => format!(
                ",\"spend\":{{\"model\":\"{model}\",\"cost_usd\":{},\"input_tokens\":{number},\"output_tokens\":7}}",
                f64::from(number) / 8.0
            ),
            1 => format!(
                ",\"spend\":[0.5,{{\"model\":\"{model}\",\"cost_usd\":\"0.25\",\"cache_read_input_tokens\":9}}]"
            ),
            2 => format!(",\"spend\":{{\"model\":\"{model}\",\"input_tokens\":11}}"), // without a price
            _ => String::new(),
        };
        format!(
            "{{\"id\":\"{number}\",\"ts\":{ts},\"kind\":\"{kind}\",\"from\":\"intake\",\"to\":\"{role}\",\"payload\":{{}},\"status\":\"{status}\"{more}{spend}}}\n"
        )
    };
    (first..first + count).map(record).collect()
}

/// What the records amount to, counted by a program that shares no code with the tools: cumulative series only.
fn recounted(env: &TestEnv, records: &str, now: &str) -> Samples {
    env.write("recount.jsonl", records);
    let mut command = env.command(python());
    command.arg(in_tests("recount.py")).args(["recount.jsonl", "--now", now, "--format", "prom"]);
    let mut samples = parse(stdout(&mut command).as_bytes());
    samples.retain(|series, _| is_cumulative(&series.name));
    samples
}

#[test]
fn no_counter_falls_or_jumps_in_prometheus_while_half_of_the_queue_goes() {
    const TIMES: [&str; 4] =
        ["2026-11-29T12:00:00Z", "2026-11-29T12:00:15Z", "2026-11-29T12:00:30Z", "2026-11-29T12:00:45Z"];
    let env = TestEnv::new();
    // All roles, kinds and models from the start, so that no series begins later.
    let (first, new) =
        (records(0, 300, 1_790_000_000) + &records(300, 150, 1_795_900_000), records(450, 60, 1_795_920_000));
    env.write("queue.jsonl", &first);
    let export = |time: &str| {
        let mut command = env.exporter();
        succeed(command.args(["--textfile-dir", "textfile", "--now", time]));
    };
    let exported = |prometheus: &Prometheus, seconds: f64| {
        prometheus.wait_for("handoff_exporter_last_success_timestamp_seconds", seconds);
    };
    let compacted = |prometheus: &Prometheus, seconds: f64| {
        prometheus.wait_for("handoff_compact_last_run_timestamp_seconds", seconds);
    };
    export(TIMES[0]);
    succeed(compact_at(&env, TIMES[0]).args(["--older-than", "1000w"]));

    let node_exporter = NodeExporter::start(&env);
    let mut files = parse(&fs::read(env.prom()).unwrap());
    files.extend(metrics(&env));
    node_exporter.assert_serves(&files);
    let promtool = tool("promtool", "prometheus");
    let file = File::open(env.path("textfile/handoff_compact.prom")).unwrap();
    let check = run(env.command(promtool).args(["check", "metrics"]).stdin(file));
    assert_eq!((check.code, &*check.stdout, &*check.stderr), (Some(0), &b""[..], ""), "promtool objects");

    let prometheus = Prometheus::start(&env, &node_exporter);
    prometheus.assert_has(&files);

    // Half of the queue goes; it is scraped between the two, and after the exporter has seen it.
    let plan = json_of(compact_at(&env, TIMES[1]).arg("--json"));
    let (removed, lines) = (plan["removed"]["records"].as_u64().unwrap(), plan["lines"].as_u64().unwrap());
    assert!(removed * 2 >= lines - 30 && removed * 2 <= lines + 30, "{removed} of {lines} is not half");
    compacted(&prometheus, NOW_SECONDS + 15.0);
    export(TIMES[1]);
    exported(&prometheus, NOW_SECONDS + 15.0);

    // New records come, and then all that is done goes, theirs too.
    let grown = fs::read_to_string(env.path("queue.jsonl")).unwrap() + &new;
    env.write("queue.jsonl", grown);
    export(TIMES[2]);
    exported(&prometheus, NOW_SECONDS + 30.0);
    let second = json_of(compact_at(&env, TIMES[3]).args(["--older-than", "0s", "--json"]));
    assert!(second["removed"]["records"].as_u64().unwrap() > 100, "{second}");
    export(TIMES[3]);
    exported(&prometheus, NOW_SECONDS + 45.0);
    compacted(&prometheus, NOW_SECONDS + 45.0);

    let scraped = prometheus.scraped("{__name__=~'handoff_.+'}");
    let cumulative: Vec<_> = scraped.iter().filter(|(series, _)| is_cumulative(&series.name)).collect();
    let of_queue = |pick: fn(&[(f64, f64)]) -> f64| -> Samples {
        let is_of_queue = |name: &str| !name.starts_with("handoff_compact_");
        let found = cumulative.iter().filter(|(series, _)| is_of_queue(&series.name));
        found.map(|(series, samples)| ((*series).clone(), pick(samples))).collect()
    };
    // The same that a queue would amount to from which nothing ever goes.
    let (before, both) = (recounted(&env, &first, TIMES[0]), recounted(&env, &(first.clone() + &new), TIMES[3]));
    assert!(before.len() > 100, "{} series prove little", before.len());
    assert_eq!(differences(&of_queue(at_first), &before), Vec::<String>::new());
    assert_eq!(differences(&of_queue(at_last), &both), Vec::<String>::new());
    // And the new records alone account for the difference.
    let grown_by = recounted(&env, &new, TIMES[3]);
    assert!(grown_by.keys().all(|series| before.contains_key(series)), "the new records made a series of their own");
    let risen = of_queue(|samples| at_last(samples) - at_first(samples));
    let expected = before.keys().map(|series| (series.clone(), grown_by.get(series).copied().unwrap_or(0.0))).collect();
    assert_eq!(differences(&risen, &expected), Vec::<String>::new());

    let times: Vec<Vec<f64>> =
        cumulative.iter().map(|(_, samples)| samples.iter().map(|(time, _)| *time).collect()).collect();
    assert!(times[0].len() >= 4, "only {} scrapes", times[0].len());
    for ((series, samples), times_of_series) in cumulative.iter().zip(&times) {
        assert_eq!(times_of_series, &times[0], "{series} was missing for a while");
        assert!(samples.windows(2).all(|pair| pair[0].1 <= pair[1].1), "{series} fell: {samples:?}");
    }
    for name in cumulative.iter().map(|(series, _)| series.name.as_str()).collect::<BTreeSet<_>>() {
        let resets = prometheus.query(&format!("resets({name}[5m])"));
        assert!(!resets.is_empty() && resets.values().all(|resets| *resets == 0.0), "{name}: {resets:?}");
        // It extrapolates to the edges of the range, by half of a scrape's distance on each side at most or so.
        let increases = prometheus.query(&format!("increase({name}[5m])"));
        for (series, increase) in &increases {
            let mut series = series.clone();
            name.clone_into(&mut series.name);
            let samples = &scraped[&series];
            let exact = at_last(samples) - at_first(samples);
            assert!((exact..=exact * 2.0).contains(increase), "{series}: increase() is {increase}, not {exact}");
        }
        assert_eq!(increases.len(), resets.len(), "{name}");
    }
    // Those of compaction itself.
    let totals = ["removed_records_total", "reclaimed_bytes_total"].map(|name| {
        let series = crate::exposition::Series::new(&format!("handoff_compact_{name}"), &[]);
        (at_first(&scraped[&series]), at_last(&scraped[&series]))
    });
    let removed = |key: &str| plan["removed"][key].as_f64().unwrap() + second["removed"][key].as_f64().unwrap();
    assert!(totals[0].0 == 0.0 && (totals[0].1 - removed("records")).abs() < 0.5, "{totals:?}");
    assert!(totals[1].0 == 0.0 && (totals[1].1 - removed("bytes")).abs() < 0.5, "{totals:?}");
}

// The README.

fn readme() -> String {
    fs::read_to_string(in_tests("../README.md")).unwrap()
}

#[test]
fn the_readme_shows_what_a_preview_prints() {
    let env = TestEnv::new();
    fs::create_dir(env.path("agents")).unwrap();
    env.write("agents/queue.jsonl", fs::read(in_tests("data/week/queue.jsonl")).unwrap());
    let mut command = env.bare_compact();
    let printed = stdout(command.args(["--queue", "agents/queue.jsonl", "--dry-run", "--now", "2026-12-12T12:00:00Z"]));
    let readme = readme();
    let shown = readme.split_once("handoff-compact --dry-run   ").unwrap().1;
    let shown: Vec<&str> = shown.lines().skip(1).take_while(|line| line.trim() != "...").collect();
    assert!(shown.len() >= 5, "{shown:?}");
    for line in shown {
        let line = line.replace("/var/lib/agents", "agents");
        assert!(
            printed.lines().any(|printed| printed == line),
            "it doesn't print {line:?}, which the README shows: {printed}"
        );
    }
}

#[test]
fn the_readme_tells_how_to_bring_removed_records_back() {
    let readme = readme();
    let recipe =
        readme.split_once("**Undo.**").unwrap().1.split_once("```console\n").unwrap().1.split_once("```").unwrap().0;
    let script: String = recipe.lines().map(|line| line.trim_start_matches("$ ").to_owned() + "\n").collect();
    let script = script.replace("/var/lib/agents", ".").replace("queue.gen.7", "queue.gen.1");
    let env = TestEnv::new();
    let spaced = old("old-3").replace("\":", "\": ").replace(",\"", ", \"");
    let before = queue() + "\n" + &spaced + "\"\\ud83d\" \"status\":\"done\"";
    env.write("queue.jsonl", before.clone() + "\n");
    let export = || env.samples();
    let (first, _) = (export(), succeed(&mut env.compact()));
    assert!(is_compacted(&env));
    let kept = lines_after_ledger(&env);
    let mut sh = env.command(tool("sh", "dash"));
    succeed(sh.args(["-e", "-c", &script]));
    assert_eq!(lines_after_ledger(&env), kept.clone() + &old("old-1") + &old("old-2") + &spaced);
    // As the README says: they count twice, and go again with the next run.
    let counted = |samples: &Samples| sum(samples, "handoff_records_total", &[]);
    assert!((counted(&export()) - counted(&first) - 3.0).abs() < 0.5);
    succeed(&mut env.compact());
    assert_eq!(lines_after_ledger(&env), kept);
}

#[test]
fn a_run_with_nothing_to_remove_rewrites_nothing() {
    let env = TestEnv::new();
    let contents =
        record("queued", "r", "queued") + "\n\u{feff}not json\r\n" + &record("recent", "r", "done") + "a tail";
    env.write("queue.jsonl", &contents);
    fs::set_permissions(env.path("queue.jsonl"), Permissions::from_mode(0o640)).unwrap();
    let identity =
        |path: &Path| fs::metadata(path).map(|found| (found.ino(), found.mtime_nsec(), found.ctime_nsec())).unwrap();
    let before = identity(&env.path("queue.jsonl"));
    for _ in 0..2 {
        let run = succeed(env.compact().arg("--json"));
        assert_eq!(serde_json::from_slice::<Value>(&run.stdout).unwrap()["replaced"], false);
        assert_eq!(identity(&env.path("queue.jsonl")), before);
        assert_eq!(fs::read_to_string(env.path("queue.jsonl")).unwrap(), contents);
        assert_eq!(names(&env), ["queue.jsonl", "queue.lock", "textfile"]);
    }
}
