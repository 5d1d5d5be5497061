//! From the queue to a query's answer, through the real node_exporter and the real Prometheus.

use std::fs::{self, File};

use crate::hostile_labels::{flood, hostile_queue};
use crate::services::{NodeExporter, Prometheus};
use crate::test_env::{TestEnv, in_tests, run, tool};

#[test]
fn a_week_of_work_reaches_prometheus() {
    reaches_prometheus(&fs::read(in_tests("data/week/queue.jsonl")).unwrap());
}

#[test]
fn hostile_labels_reach_prometheus() {
    reaches_prometheus(&hostile_queue());
}

#[test]
fn a_flood_of_labels_reaches_prometheus() {
    reaches_prometheus(&flood());
}

#[test]
fn a_failed_run_reaches_prometheus_without_a_depth() {
    let env = TestEnv::new();
    fs::create_dir(env.path("queue.jsonl")).unwrap();
    assert_eq!(run(&mut env.to_file()).code, Some(74));
    let file = env.assert_only_a_good_file("after a failure");
    let node_exporter = NodeExporter::start(&env);
    let prometheus = Prometheus::start(&env, &node_exporter);
    prometheus.assert_has(&file);
    assert_eq!(prometheus.query("handoff_exporter_success == 0").len(), 1);
    assert_eq!(prometheus.query("handoff_queue_records").len(), 0);
}

fn reaches_prometheus(queue: &[u8]) {
    let env = TestEnv::new();
    env.write("queue.jsonl", queue);
    let exported = run(&mut env.to_file());
    assert_eq!(exported.code, Some(0), "{}", exported.stderr);
    let file = env.assert_only_a_good_file("the file");

    let promtool = tool("promtool", "prometheus");
    let check = run(env.command(promtool).args(["check", "metrics"]).stdin(File::open(env.prom()).unwrap()));
    assert_eq!((check.code, &*check.stdout, &*check.stderr), (Some(0), &b""[..], ""), "promtool objects");

    let node_exporter = NodeExporter::start(&env);
    node_exporter.assert_serves(&file);
    Prometheus::start(&env, &node_exporter).assert_has(&file);
}
