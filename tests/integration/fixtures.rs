//! Queues and the metrics they must give: by hand for each rule of the format, and counted a second time by a program that
//! shares no code with the exporter.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use walkdir::WalkDir;

use crate::exposition::{Samples, differences, parse};
use crate::test_env::{NOW, Run, TestEnv, in_tests, python, run, start};

/// Different in every run, or in every version.
const VARYING: [&str; 2] = ["handoff_exporter_duration_seconds", "handoff_build_info"];

#[test]
fn every_case_gives_its_expected_metrics() {
    let mut cases: Vec<PathBuf> =
        fs::read_dir(in_tests("data/cases")).unwrap().map(|entry| entry.unwrap().path()).collect();
    cases.retain(|case| case.is_dir());
    cases.sort();
    assert!(!cases.is_empty(), "there are no cases");

    let mut failures = Vec::new();
    for case in &cases {
        let env = TestEnv::new();
        let folder = env.path("case");
        copy_folder(case, &folder);
        let arguments = fs::read_to_string(folder.join("args")).unwrap_or_default();
        let run = run(env.to_stdout().current_dir(&folder).args(arguments.lines()));
        let expected = fs::read(folder.join("expected.prom")).unwrap();
        failures.extend(judge(&case.file_name().unwrap().to_string_lossy(), &run, &expected));
    }
    assert!(failures.is_empty(), "{} of {} cases fail:\n{}", failures.len(), cases.len(), failures.join("\n"));
}

#[test]
fn a_week_of_work_is_counted_as_a_second_program_counts_it() {
    let env = TestEnv::new();
    env.write("queue.jsonl", fs::read(in_tests("data/week/queue.jsonl")).unwrap());
    recount(&env, &[vec![]]);
    let expected = fs::read(env.path("expected-0")).unwrap();
    assert_eq!(judge("week", &run(&mut env.to_stdout()), &expected), None);
}

#[test]
fn random_queues_are_counted_as_a_second_program_counts_them() {
    let env = TestEnv::new();
    let script = in_tests("random_queue.py");
    let seeds: Vec<u32> = (1..=40).collect();
    let queue = |seed: &u32| env.path(format!("queue-{seed}.jsonl"));
    let text = |path: PathBuf| path.to_string_lossy().into_owned();
    batch(&env, seeds.iter().map(|seed| vec![text(queue(seed)), text(script.clone()), seed.to_string()]));

    let prices = text(in_tests("data/cases/prices/prices.json"));
    let settings: Vec<Vec<String>> = seeds
        .iter()
        .flat_map(|seed| {
            let plain = vec!["--queue".to_owned(), text(queue(seed))];
            let with_prices = [plain.clone(), vec!["--prices".to_owned(), prices.clone()]].concat();
            [plain, with_prices]
        })
        .collect();
    recount(&env, &settings);

    let mut failures = Vec::new();
    for (index, arguments) in settings.iter().enumerate() {
        let run = run(env.bare_exporter().args(["--stdout", "--now", NOW]).args(arguments));
        let expected = fs::read(env.path(format!("expected-{index}"))).unwrap();
        let with = if arguments.len() > 2 { "with" } else { "without" };
        failures.extend(judge(&format!("seed {}, {with} prices", seeds[index / 2]), &run, &expected));
    }
    assert!(failures.is_empty(), "{} of {} queues fail:\n{}", failures.len(), settings.len(), failures.join("\n"));
}

/// What is wrong with a run, if anything is.
fn judge(name: &str, run: &Run, expected: &[u8]) -> Option<String> {
    if run.code != Some(0) {
        return Some(format!("{name}: exit code {:?}: {}", run.code, run.stderr));
    }
    let problems = crate::validator::problems(&run.stdout);
    if !problems.is_empty() {
        return Some(format!("{name}: {problems:#?}"));
    }
    let without_varying = |mut samples: Samples| {
        samples.retain(|series, _| !VARYING.contains(&series.name.as_str()));
        samples
    };
    let expected = without_varying(parse(expected));
    assert!(!expected.is_empty(), "{name}: nothing is expected");
    let differences = differences(&without_varying(parse(&run.stdout)), &expected);
    let first = &differences[..differences.len().min(10)];
    (!differences.is_empty()).then(|| format!("{name}: {} differences:\n  {}", differences.len(), first.join("\n  ")))
}

/// Counts queues with `recount.py`, into `expected-0` and so on. The arguments are those of the exporter.
fn recount(env: &TestEnv, settings: &[Vec<String>]) {
    let script = in_tests("recount.py").to_string_lossy().into_owned();
    let calls = settings.iter().enumerate().map(|(index, arguments)| {
        let output = env.path(format!("expected-{index}")).to_string_lossy().into_owned();
        let default = vec!["--queue".to_owned(), env.path("queue.jsonl").to_string_lossy().into_owned()];
        let arguments = if arguments.is_empty() { default } else { arguments.clone() };
        // The queue is the one argument that it takes without a flag.
        let fixed = ["--now", NOW, "--format", "prom"].map(str::to_owned);
        [vec![output, script.clone()], arguments[1..].to_vec(), fixed.to_vec()].concat()
    });
    batch(env, calls);
}

/// Calls Python scripts: for each the file for its output, its path and its arguments.
pub(crate) fn batch(env: &TestEnv, calls: impl Iterator<Item = Vec<String>>) {
    let mut child = start(env.command(python()).arg(in_tests("workers/batch.py")).stdin(Stdio::piped()));
    let mut stdin = child.stdin.take().unwrap();
    for call in calls {
        writeln!(stdin, "{}", serde_json::to_string(&call).unwrap()).expect("the batch failed: see its output");
    }
    drop(stdin);
    assert!(child.wait().unwrap().success(), "the batch failed: see its output");
}

pub(crate) fn copy_folder(from: &Path, to: &Path) {
    for entry in WalkDir::new(from) {
        let entry = entry.unwrap();
        let target = to.join(entry.path().strip_prefix(from).unwrap());
        if entry.file_type().is_dir() {
            fs::create_dir_all(target).unwrap();
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[test]
fn the_readme_shows_what_the_first_command_prints() {
    let env = TestEnv::new();
    env.write("week.jsonl", fs::read(in_tests("data/week/queue.jsonl")).unwrap());
    let run = run(env.bare_exporter().args(["--queue", "week.jsonl", "--stdout"]));
    let output =
        String::from_utf8(run.stdout).unwrap() + &run.stderr.replace("week.jsonl", "tests/data/week/queue.jsonl");
    let readme = fs::read_to_string(in_tests("../README.md")).unwrap();
    let mut shown = 0;
    for line in readme.lines().filter(|line| line.starts_with("handoff_") || line.starts_with("handoff-exporter: ")) {
        assert!(output.lines().any(|printed| printed == line), "the README shows a line that isn't printed: {line}");
        shown += 1;
    }
    assert!(shown >= 3, "the README shows nothing");
}
