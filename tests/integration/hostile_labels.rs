//! Whatever stands in a queue's names, the file stays well-formed and the number of series bounded.

use std::collections::BTreeSet;

use crate::exposition::{Samples, Series, sum, value};
use crate::services::NodeExporter;
use crate::test_env::{TestEnv, run};

/// Names as they stand between quotes in JSON, and what they are as labels.
const NAMES: [(&str, &str); 34] = [
    ("", ""),
    (" ", " "),
    (r#"quote\""#, "quote\""),
    (r"back\\slash", "back\\slash"),
    (r"ends in \\", "ends in \\"),
    (r"\\n is no newline", "\\n is no newline"),
    (r#"\\\" both"#, "\\\" both"),
    (r"new\nline", "new\nline"),
    (r"\n", "\n"),
    (r"carriage\rreturn", "carriage\u{fffd}return"),
    (r"line\r\nend", "line\u{fffd}\nend"),
    (r"nul\u0000", "nul\u{fffd}"),
    (r"bell\u0007", "bell\u{fffd}"),
    (r"escape\u001b[2J", "escape\u{fffd}[2J"),
    (r"delete\u007f", "delete\u{fffd}"),
    (r"next line\u0085", "next line\u{fffd}"),
    (r"tab\t", "tab\u{fffd}"),
    ("__name__", "__name__"),
    ("le", "le"),
    ("job", "job"),
    ("instance", "instance"),
    ("+Inf", "+Inf"),
    ("NaN", "NaN"),
    ("{", "{"),
    ("}", "}"),
    (r#"\"} 1\nevil_total{x=\""#, "\"} 1\nevil_total{x=\""),
    (r"# HELP x y\n# TYPE x counter", "# HELP x y\n# TYPE x counter"),
    ("🦀👩‍💻", "🦀👩‍💻"),
    ("line\u{2028}separator", "line\u{2028}separator"),
    ("\u{feff}mark", "\u{feff}mark"),
    (r"high \ud83d", "high \u{fffd}"),
    (r"low \ude00", "low \u{fffd}"),
    (r"pair \ud83d\ude00", "pair 😀"),
    ("other", "other"),
];

/// How many values a bounded label has at most: 50 and `other`.
const MOST_VALUES: usize = 51;

/// A record whose role, kind and model are these, as they stand in JSON.
fn record(id: usize, role: &str, kind: &str, model: &str) -> String {
    format!(
        r#"{{"id":"{id}","ts":1795950000,"kind":"{kind}","from":"{role}","to":"{role}","payload":{{}},"status":"queued","spend":{{"model":"{model}","cost_usd":0.5,"input_tokens":1}}}}"#
    ) + "\n"
}

/// Each hostile name as role, kind and model.
pub(crate) fn hostile_queue() -> Vec<u8> {
    NAMES.iter().enumerate().map(|(id, (name, _))| record(id, name, name, name)).collect::<String>().into_bytes()
}

/// 10,000 distinct roles, kinds and models, in every pair of the first of them, and one enormous role.
pub(crate) fn flood() -> Vec<u8> {
    let mut queue = record(0, &"enormous ".repeat(120_000), "classify", "m");
    for n in 0..10_000 {
        let (role, kind) = if n < 2_500 { (n % 50, n / 50) } else { (n, n) };
        queue += &record(n + 1, &format!("role {role}"), &format!("kind {kind}"), &format!("model {n}"));
    }
    for n in 0..2_500 {
        queue += &record(n + 10_001, &format!("role {n}"), &format!("kind {n}"), "m");
    }
    queue.into_bytes()
}

/// Runs the exporter on a queue and has its file judged by the validator and by node_exporter.
fn exported(queue: &[u8]) -> Samples {
    let env = TestEnv::new();
    env.write("queue.jsonl", queue);
    let run = run(&mut env.to_file());
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    let samples = env.assert_only_a_good_file("the file");
    NodeExporter::start(&env).assert_serves(&samples);
    samples
}

fn values<'a>(samples: &'a Samples, label: &str) -> BTreeSet<&'a str> {
    samples.keys().filter_map(|series: &Series| series.label(label)).collect()
}

#[test]
fn every_name_arrives_as_it_should() {
    let samples = exported(&hostile_queue());
    for (_, name) in NAMES {
        let count = sum(&samples, "handoff_records_total", &[("role", name), ("kind", name)]);
        assert!(count >= 1.0, "{name:?} is missing");
        let model = if name.is_empty() { "unknown" } else { name };
        let tokens = sum(&samples, "handoff_tokens_total", &[("model", model), ("token_type", "input")]);
        assert!(tokens >= 1.0, "the model {model:?} is missing");
    }
    let names: BTreeSet<&str> = NAMES.iter().map(|(_, name)| *name).collect();
    assert_eq!(values(&samples, "role"), names);
    assert_eq!(values(&samples, "kind"), names);
    // Nothing is lost where two names become one.
    assert!((sum(&samples, "handoff_records_total", &[]) - float(NAMES.len())).abs() < 0.5);
}

#[test]
fn a_name_that_is_no_text_at_all_is_malformed() {
    let env = TestEnv::new();
    env.write("queue.jsonl", b"{\"id\":\"a\",\"ts\":1795950000,\"kind\":\"k\",\"from\":\"f\",\"to\":\"\xff\",\"payload\":{},\"status\":\"queued\"}\n");
    let samples = env.samples();
    assert!((value(&samples, "handoff_queue_malformed_lines", &[("reason", "not_utf8")]) - 1.0).abs() < 0.5);
    assert!(sum(&samples, "handoff_records_total", &[]) < 0.5);
}

#[test]
fn a_flood_of_names_is_bounded() {
    let queue = flood();
    let samples = exported(&queue);
    for label in ["role", "kind", "model"] {
        let count = values(&samples, label).len();
        assert!(count <= MOST_VALUES, "{label} has {count} values");
        assert!(
            count == MOST_VALUES,
            "{label} has only {count} values: the flood has become too small to try the bound"
        );
    }
    assert_eq!(values(&samples, "status").len(), 6);
    assert_eq!(values(&samples, "token_type").len(), 4);
    // Roles × kinds × (6 statuses, 2 outcomes and 4 more counters), roles × 2 histograms of 15 series and 3 ages, and so on.
    let most = MOST_VALUES * MOST_VALUES * (6 + 2 + 4 + 4) + MOST_VALUES * (2 * 15 + 3) + 100;
    assert!(samples.len() <= most, "{} series", samples.len());
    let lines = memchr::memchr_iter(b'\n', &queue).count();
    assert!((sum(&samples, "handoff_records_total", &[]) - float(lines)).abs() < 0.5);
    assert!((sum(&samples, "handoff_spend_usd_total", &[]) - float(lines) / 2.0).abs() < 0.1);
}

#[test]
fn configured_names_bound_a_flood_too() {
    let env = TestEnv::new();
    env.write("queue.jsonl", flood());
    let run = run(env.to_stdout().args(["--roles", "role 1,role 77", "--kinds", "kind 3"]));
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let samples = run.samples();
    assert_eq!(values(&samples, "role"), BTreeSet::from(["role 1", "role 77", "other"]));
    assert_eq!(values(&samples, "kind"), BTreeSet::from(["kind 3", "other"]));
}

#[expect(clippy::cast_precision_loss, reason = "the counts of a test are small")]
fn float(count: usize) -> f64 {
    count as f64
}
