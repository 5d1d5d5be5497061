//! Big queues: the right line numbers whatever the number of threads, and little memory.

use std::fs::{self, File};
use std::io::{BufWriter, Write};

use crate::exposition::{sum, value};
use crate::test_env::{Run, TestEnv, record, run, to_file_under, tool};

const MIB: usize = 1024 * 1024;
/// What the exporter may take, for a queue of any size with lines of an ordinary one.
const MOST_MEMORY_KIB: u64 = 8 * 1024;

/// A record of about 1,000 bytes.
fn long_record(number: usize) -> String {
    let filler = "x".repeat(880);
    format!(
        r#"{{"id":"{number}","ts":1795950000,"kind":"classify","from":"triage","to":"researcher","payload":{{"summary":"{filler}"}},"status":"done"}}"#
    ) + "\n"
}

/// A queue of so many lines, some of which are others. Lines count from 1.
fn write_queue(env: &TestEnv, lines: usize, others: &[(usize, &[u8])]) {
    let mut queue = BufWriter::new(File::create(env.path("queue.jsonl")).unwrap());
    for number in 1..=lines {
        match others.iter().find(|(other, _)| *other == number) {
            Some((_, line)) => queue.write_all(line).and_then(|()| queue.write_all(b"\n")).unwrap(),
            None => queue.write_all(long_record(number).as_bytes()).unwrap(),
        }
    }
    queue.flush().unwrap();
}

/// Runs the exporter and asserts the malformed lines that it counts (by reason) and names (by number).
fn assert_malformed(env: &TestEnv, arguments: &[&str], counts: &[(&str, f64)], named: &[(usize, &str)]) -> Run {
    let run = run(env.to_stdout().args(arguments));
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let samples = run.samples();
    for (reason, count) in counts {
        let found = value(&samples, "handoff_queue_malformed_lines", &[("reason", reason)]);
        assert!((found - count).abs() < 0.5, "{found} lines are {reason}, not {count}");
    }
    let all: f64 = counts.iter().map(|(_, count)| count).sum();
    assert!((sum(&samples, "handoff_queue_malformed_lines", &[]) - all).abs() < 0.5, "{}", run.stderr);
    let mut messages: Vec<&str> = run.stderr.lines().collect();
    let unnamed: usize = all.round().to_string().parse::<usize>().unwrap() - named.len();
    if unnamed > 0 {
        assert_eq!(
            messages.pop(),
            Some(format!("handoff-exporter: queue.jsonl: {unnamed} more malformed lines").as_str())
        );
    }
    assert_eq!(messages.len(), named.len(), "{messages:#?}");
    for (message, (line, reason)) in messages.iter().zip(named) {
        let expected = format!("handoff-exporter: queue.jsonl:{line}: malformed line ({reason}): ");
        assert!(message.starts_with(&expected), "{message:?} doesn't start with {expected:?}");
    }
    run
}

fn records(run: &Run) -> f64 {
    sum(&run.samples(), "handoff_queue_records", &[])
}

#[test]
fn the_first_ten_malformed_lines_are_named_wherever_threads_begin() {
    let env = TestEnv::new();
    let lines = 25_000;
    // Close to each other in the second half, so that whatever thread meets them must know where it began.
    let wrong: Vec<usize> = vec![3, 12_501, 15_000, 18_749, 18_750, 18_751, 20_000, 24_000, 24_998, 24_999, 25_000];
    let others: Vec<(usize, &[u8])> = wrong.iter().map(|&line| (line, &b"not json"[..])).collect();
    write_queue(&env, lines, &others);
    assert!(fs::metadata(env.path("queue.jsonl")).unwrap().len() > 20 * MIB as u64);
    let named: Vec<(usize, &str)> = wrong.iter().take(10).map(|&line| (line, "not_json")).collect();
    let run = assert_malformed(&env, &[], &[("not_json", 11.0)], &named);
    assert!((records(&run) - 24_989.0).abs() < 0.5);
}

#[test]
fn each_sort_of_damage_is_one_line_with_its_number() {
    let env = TestEnv::new();
    let nuls = vec![0; 3 * MIB];
    let glued = long_record(1).trim_end().repeat(2);
    let unclosed = b"[".repeat(100_000);
    let deep = format!(
        r#"{{"id":"deep","ts":1795950000,"kind":"classify","from":"triage","to":"deep","payload":{{"x":{}{}}},"status":"done"}}"#,
        "[".repeat(100_000),
        "]".repeat(100_000)
    );
    let deep_object = format!(
        r#"{{"id":"deep","ts":1795950000,"kind":"classify","from":"triage","to":"deep","payload":{}{}{},"status":"done"}}"#,
        r#"{"x":"#.repeat(100_000),
        "{}",
        "}".repeat(100_000)
    );
    let torn_and_glued = [&long_record(1).as_bytes()[..500], long_record(2).trim_end().as_bytes()].concat();
    let others: [(usize, &[u8]); 11] = [
        (9_000, b"\xef\xbb\xbf"),
        (12_000, &nuls),
        (14_000, glued.as_bytes()),
        (15_000, b"\xff\xfe"),
        (16_000, deep.as_bytes()),
        (16_001, &unclosed),
        (17_000, deep_object.as_bytes()),
        (18_000, b""),
        (18_001, b" \t\r"),
        (19_000, &torn_and_glued),
        (20_000, br#"{"protocol_version":3}"#),
    ];
    write_queue(&env, 21_000, &others);
    let run = assert_malformed(
        &env,
        &[],
        &[("not_json", 4.0), ("not_utf8", 1.0), ("unsupported_version", 1.0)],
        &[
            (12_000, "not_json"),
            (14_000, "not_json"),
            (15_000, "not_utf8"),
            (16_001, "not_json"),
            (19_000, "not_json"),
            (20_000, "unsupported_version"),
        ],
    );
    assert!((records(&run) - (21_000.0 - 6.0 - 3.0)).abs() < 0.5);
    assert!((sum(&run.samples(), "handoff_queue_records", &[("role", "deep")]) - 2.0).abs() < 0.5);
}

#[test]
fn a_line_of_50_mb_is_a_record_unless_that_is_too_long() {
    let env = TestEnv::new();
    let huge = long_record(0).trim_end().replace("xxx\"", &format!("{}\"", "y".repeat(50_000_000)));
    write_queue(&env, 10_000, &[(5_000, huge.as_bytes()), (9_000, b"not json")]);
    let run = assert_malformed(&env, &[], &[("not_json", 1.0)], &[(9_000, "not_json")]);
    assert!((records(&run) - 9_999.0).abs() < 0.5);

    let run = assert_malformed(
        &env,
        &["--max-line", "1MiB"],
        &[("not_json", 1.0), ("too_long", 1.0)],
        &[(5_000, "too_long"), (9_000, "not_json")],
    );
    assert!((records(&run) - 9_998.0).abs() < 0.5);
}

#[test]
fn memory_does_not_grow_with_the_queue() {
    let env = TestEnv::new();
    write_queue(&env, 200_000, &[]);
    assert!(fs::metadata(env.path("queue.jsonl")).unwrap().len() > 190 * MIB as u64);
    let peak = peak_kib(&env, 200_000.0);
    assert!(peak <= MOST_MEMORY_KIB, "the exporter took {peak} KiB, more than {MOST_MEMORY_KIB}");
}

#[test]
fn a_line_of_millions_of_responses_takes_little_more_than_itself() {
    let env = TestEnv::new();
    let spend = format!("\"payload\":{{}},\"spend\":[{}]", vec!["1"; 4_000_000].join(","));
    env.write("queue.jsonl", record("a", "researcher", "done").replace("\"payload\":{}", &spend));
    let peak = peak_kib(&env, 1.0);
    let line = fs::metadata(env.path("queue.jsonl")).unwrap().len() / 1024;
    assert!(line > 7_000, "the line has {line} KiB only");
    assert!(peak <= MOST_MEMORY_KIB + 2 * line, "the exporter took {peak} KiB for a line of {line} KiB");
}

/// The most memory that the exporter took to count so many records.
fn peak_kib(env: &TestEnv, records: f64) -> u64 {
    // Its own child's peak is what time(1) reports. As a child of ours the exporter would begin as a copy of this process,
    // which is larger than the exporter ever gets. More processors would make more threads.
    let mut time = env.command(tool("time", "time"));
    time.args(["-f", "%M", "-o", "peak"]).arg(tool("taskset", "util-linux")).args(["--cpu-list", &two_processors()]);
    let run = run(&mut to_file_under(time));
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    let samples = env.assert_only_a_good_file("the file");
    assert!((sum(&samples, "handoff_queue_records", &[]) - records).abs() < 0.5);
    let peak: u64 = fs::read_to_string(env.path("peak")).unwrap().trim().parse().unwrap();
    assert!(peak > 500, "{peak} KiB is too little to be true");
    peak
}

/// The first two processors that we may use, as taskset(1) takes them; one if there is no more.
fn two_processors() -> String {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim();
    let ranges = list.split(',').map(|range| range.split_once('-').unwrap_or((range, range)));
    let processors = ranges.flat_map(|(first, last)| first.parse::<u32>().unwrap()..=last.parse().unwrap());
    processors.take(2).map(|processor| processor.to_string()).collect::<Vec<_>>().join(",")
}
