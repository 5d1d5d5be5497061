//! What compaction removes and keeps, and that no counter falls.
//!
//! What must go and what must stay is worked out by `retain.py`, or by hand; what counters must say is what the exporter says of all
//! lines that were ever written.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::exposition::{Samples, differences, parse, sum, value};
use crate::fixtures::{batch, copy_folder};
use crate::hostile_labels::flood;
use crate::test_env::{NOW, Run, TestEnv, in_tests, python, readme_block, run};

const LEDGER_START: &[u8] = b"{\"id\":\"ledger\",";
/// Old enough to go at `NOW`, if done.
const OLD: u64 = 1_794_000_000;
/// Not old enough.
const RECENT: u64 = 1_795_000_000;

// ------------------------------------------------------------------------------------------------------------ helpers

/// A queue in a directory of its own.
struct Place<'e> {
    env: &'e TestEnv,
    name: String,
}

/// What is to be told of a file: inode, time of change in nanoseconds, mode, contents.
type State = BTreeMap<String, (u64, i128, u32, Vec<u8>)>;

impl<'e> Place<'e> {
    fn new(env: &'e TestEnv, name: &str, queue: impl AsRef<[u8]>) -> Self {
        let place = Self { env, name: name.to_owned() };
        fs::create_dir(env.path(name)).unwrap();
        // Somebody has always locked it before.
        fs::write(place.path("queue.lock"), "").unwrap();
        place.lay(queue);
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.env.path(&self.name).join(name)
    }

    fn lay(&self, queue: impl AsRef<[u8]>) {
        fs::write(self.path("queue.jsonl"), queue).unwrap();
    }

    fn append(&self, lines: impl AsRef<[u8]>) {
        let mut queue = fs::OpenOptions::new().append(true).open(self.path("queue.jsonl")).unwrap();
        queue.write_all(lines.as_ref()).unwrap();
    }

    fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap()
    }

    fn run(&self, now: &str, arguments: &[impl AsRef<str>]) -> Run {
        let mut command = self.env.bare_compact();
        command.current_dir(self.env.path(&self.name)).args(["--queue", "queue.jsonl", "--now", now, "--json"]);
        command.arg("--textfile-dir").arg(self.env.textfile_dir());
        run(command.args(arguments.iter().map(AsRef::as_ref)))
    }

    /// Compacts, which must succeed, and returns what it says for machines.
    fn compact(&self, now: &str, arguments: &[impl AsRef<str>]) -> Value {
        let run = self.run(now, arguments);
        assert_eq!(run.code, Some(0), "{}: {}", self.name, run.stderr);
        serde_json::from_slice(&run.stdout).unwrap()
    }

    /// What the exporter says, which must succeed.
    fn metrics(&self, now: &str, arguments: &[impl AsRef<str>]) -> Metrics {
        let mut command = self.env.bare_exporter();
        command.current_dir(self.env.path(&self.name)).args(["--queue", "queue.jsonl", "--stdout", "--now", now]);
        let run = run(command.args(arguments.iter().map(AsRef::as_ref)));
        assert_eq!(run.code, Some(0), "{}: {}", self.name, run.stderr);
        Metrics(String::from_utf8(run.stdout).unwrap())
    }

    fn state(&self) -> State {
        let file = |entry: std::io::Result<fs::DirEntry>| {
            let entry = entry.unwrap();
            let metadata = entry.metadata().unwrap();
            let modified = i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec());
            let contents = if metadata.is_file() { fs::read(entry.path()).unwrap() } else { Vec::new() };
            (entry.file_name().into_string().unwrap(), (metadata.ino(), modified, metadata.mode(), contents))
        };
        fs::read_dir(self.env.path(&self.name)).unwrap().map(file).collect()
    }

    fn names(&self) -> Vec<String> {
        self.state().into_keys().collect()
    }

    /// The numbers of the generations that are there, beside the queue, its lock and nothing else.
    fn generations(&self) -> Vec<u64> {
        let mut names = self.names();
        names.retain(|name| !["queue.jsonl", "queue.lock"].contains(&name.as_str()));
        let number = |name: &String| name.strip_prefix("queue.gen.").and_then(|number| number.parse().ok());
        let mut numbers: Vec<u64> =
            names.iter().map(|name| number(name).unwrap_or_else(|| panic!("{}: {name}", self.name))).collect();
        numbers.sort_unstable();
        numbers
    }

    /// The queue's ledger, which is its first line, and what follows it.
    fn split(&self) -> (Value, Vec<u8>) {
        let mut queue = self.read("queue.jsonl");
        let end = queue.iter().position(|byte| *byte == b'\n').unwrap() + 1;
        let rest = queue.split_off(end);
        assert!(queue.starts_with(LEDGER_START), "{}: {}", self.name, queue.escape_ascii());
        (serde_json::from_slice(&queue).unwrap(), rest)
    }
}

/// Asserts that not a single file was changed, replaced, made or removed.
fn assert_unchanged(before: &State, after: &State, context: &str) {
    let names: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    for name in names {
        let (Some(before), Some(after)) = (before.get(name), after.get(name)) else {
            panic!("{context}: {name} has come or gone");
        };
        assert_eq!((before.0, before.1, before.2), (after.0, after.1, after.2), "{context}: {name} was touched");
        assert!(before.3 == after.3, "{context}: {name} has other bytes");
    }
}

/// Asserts that two texts are the same, and shows where they part if they aren't.
fn assert_bytes(actual: &[u8], expected: &[u8], context: &str) {
    if actual != expected {
        let same = actual.iter().zip(expected).take_while(|(a, b)| a == b).count();
        let around =
            |bytes: &[u8]| bytes[same.saturating_sub(60)..bytes.len().min(same + 60)].escape_ascii().to_string();
        panic!(
            "{context}: {} bytes, not {}; they part at {same}:\n  {}\n  {}",
            actual.len(),
            expected.len(),
            around(actual),
            around(expected)
        );
    }
}

/// What the exporter printed. Most tests only ask whether it is the same as before, for which it need not be parsed: that takes far longer
/// than all else where there are many names.
struct Metrics(String);

impl Metrics {
    fn parsed(&self) -> Samples {
        parse(self.0.as_bytes())
    }

    fn value(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        value(&self.parsed(), name, labels)
    }

    fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        sum(&self.parsed(), name, labels)
    }

    /// Each series, as it is written, with its value, as it is written.
    fn lines(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.lines().filter(|line| !line.starts_with('#')).map(|line| line.rsplit_once(' ').unwrap())
    }

    fn counters(&self) -> BTreeMap<&str, &str> {
        let counters: BTreeMap<&str, &str> = self.lines().filter(|(series, _)| is_counter(name_of(series))).collect();
        assert!(!counters.is_empty(), "there are no counters");
        counters
    }

    fn labels(&self, label: &str) -> BTreeSet<String> {
        self.parsed().keys().filter_map(|series| series.label(label)).map(str::to_owned).collect()
    }
}

fn name_of(series: &str) -> &str {
    &series[..series.find('{').unwrap_or(series.len())]
}

fn is_counter(name: &str) -> bool {
    ["_total", "_bucket", "_sum", "_count"].iter().any(|suffix| name.ends_with(suffix))
}

/// Asserts that two sets of series are the same, each with the same value, as it is written.
fn assert_same(after: &BTreeMap<&str, &str>, before: &BTreeMap<&str, &str>, context: &str) {
    if after == before {
        return;
    }
    let both: BTreeSet<_> = before.keys().chain(after.keys()).collect();
    let differences: Vec<String> = both
        .into_iter()
        .filter(|series| before.get(**series) != after.get(**series))
        .map(|series| format!("{series}: {:?} became {:?}", before.get(series), after.get(series)))
        .collect();
    let first = differences[..differences.len().min(10)].join("\n  ");
    panic!("{context}: {} differences:\n  {first}", differences.len());
}

/// Asserts that the same counters are there, each with the same value to the last digit.
fn assert_same_counters(before: &Metrics, after: &Metrics, context: &str) {
    assert_same(&after.counters(), &before.counters(), context);
}

/// Asserts that no counter has fallen or vanished.
fn assert_no_counter_fell(before: &Metrics, after: &Metrics, context: &str) {
    let after = after.counters();
    for (series, before) in before.counters() {
        let after = after.get(series).unwrap_or_else(|| panic!("{context}: {series} has vanished"));
        let [was, is] = [before, after].map(|value| value.parse::<f64>().unwrap());
        assert!(is >= was, "{context}: {series} fell from {was} to {is}");
    }
}

/// Asserts that of all gauges only those have changed that the removal of so many records changes.
fn assert_gauges(before: &Metrics, after: &Metrics, removed: u64, context: &str) {
    // These fall with the removed records, series by series.
    let falls = |series: &str| {
        let names = ["handoff_queue_oversized_records", "handoff_blob_missing_references"];
        names.contains(&name_of(series))
            || (name_of(series) == "handoff_queue_records" && series.contains("status=\"done\""))
    };
    let changes = |series: &str| {
        ["handoff_queue_bytes", "handoff_queue_generations", "handoff_exporter_duration_seconds"]
            .contains(&name_of(series))
    };
    let gauges = |metrics: &'_ Metrics, chosen: &dyn Fn(&str) -> bool| -> BTreeMap<String, String> {
        let lines = metrics.lines().filter(|(series, _)| !is_counter(name_of(series)) && chosen(series));
        lines.map(|(series, value)| (series.to_owned(), value.to_owned())).collect()
    };
    let same = |series: &str| !falls(series) && !changes(series);
    assert_eq!(gauges(after, &same), gauges(before, &same), "{context}");
    let (before, after) = (gauges(before, &falls), gauges(after, &falls));
    assert!(before.keys().eq(after.keys()), "{context}: gauges have come or gone");
    let mut gone = 0.0;
    for ((series, before), after) in before.iter().zip(after.values()) {
        let [was, is] = [before, after].map(|value| value.parse::<f64>().unwrap());
        assert!(is <= was, "{context}: {series} has risen from {was} to {is}");
        if name_of(series) == "handoff_queue_records" {
            gone += was - is;
        }
    }
    assert!((gone - float(removed)).abs() < 0.5, "{context}: {gone} done records fewer, not {removed}");
}

fn text(path: PathBuf) -> String {
    path.into_os_string().into_string().unwrap()
}

/// What follows the last `\n`.
fn tail_of(queue: &[u8]) -> &[u8] {
    &queue[queue.iter().rposition(|byte| *byte == b'\n').map_or(0, |newline| newline + 1)..]
}

fn record(id: &str, ts: u64, status: &str) -> String {
    record_with(id, &ts.to_string(), status, "")
}

/// A record with its `ts` as JSON and with further members.
fn record_with(id: &str, ts: &str, status: &str, members: &str) -> String {
    format!(
        r#"{{"id":"{id}","ts":{ts},"kind":"classify","from":"triage","to":"researcher","payload":{{}},"status":"{status}"{members}}}"#
    ) + "\n"
}

fn old(id: &str) -> String {
    record(id, OLD, "done")
}

fn recent(id: &str) -> String {
    record(id, RECENT, "done")
}

const NONE: [&str; 0] = [];

// ------------------------------------------------------------------------- what goes and stays, decided a second time

/// A queue, and the settings under which it is compacted.
struct Case<'e> {
    place: Place<'e>,
    older_than: &'static str,
    seconds: u64,
    /// For both tools.
    shared: Vec<String>,
    /// For the exporter alone.
    exporter: Vec<String>,
}

impl Case<'_> {
    fn compact(&self, more: &[&str]) -> Value {
        let fixed = ["--older-than", self.older_than];
        let shared = self.shared.iter().map(String::as_str);
        self.place.compact(NOW, &fixed.into_iter().chain(shared).chain(more.iter().copied()).collect::<Vec<_>>())
    }

    fn metrics(&self) -> Metrics {
        self.place.metrics(NOW, &[self.shared.clone(), self.exporter.clone()].concat())
    }

    /// A file beside the case's directory, so that it doesn't count as part of it.
    fn beside(&self, what: &str) -> PathBuf {
        self.place.env.path(format!("{}.{what}", self.place.name))
    }
}

const AGES: [(&str, u64); 4] = [("14d", 14 * 86_400), ("0s", 0), ("1d", 86_400), ("365d", 365 * 86_400)];

/// Has `retain.py` judge the queues as they are now: what it says and what it keeps goes to files beside them.
fn retain(env: &TestEnv, cases: &[&Case<'_>]) {
    let script = in_tests("retain.py");
    batch(
        env,
        cases.iter().map(|case| {
            let mut call =
                vec![text(case.beside("report")), text(script.clone()), text(case.place.path("queue.jsonl"))];
            call.extend(["--now", NOW, "--older-than"].map(str::to_owned));
            call.extend([case.seconds.to_string(), "--kept".to_owned(), text(case.beside("kept"))]);
            if let Some(at) = case.shared.iter().position(|argument| argument == "--max-line") {
                call.extend_from_slice(&case.shared[at..at + 2]);
            }
            call
        }),
    );
}

/// What `retain.py` said, and what it would keep.
fn judgement(case: &Case<'_>) -> (Value, Vec<u8>) {
    let report = serde_json::from_slice(&fs::read(case.beside("report")).unwrap()).unwrap();
    (report, fs::read(case.beside("kept")).unwrap())
}

fn records_removed(report: &Value) -> u64 {
    report["removed"]["records"].as_u64().unwrap()
}

#[expect(clippy::cast_precision_loss, reason = "the counts of a test are small")]
fn float(count: u64) -> f64 {
    count as f64
}

/// Takes queues without earlier generations through everything that compaction may do to them. Returns how many were refused, how many
/// lost records, and how many of these had a tail.
fn prove_retention(env: &TestEnv, cases: &[Case<'_>]) -> [usize; 3] {
    let script = in_tests("workers/readable_ledgers.py");
    let path = |case: &Case<'_>, name: &str| text(case.beside(name));
    batch(
        env,
        cases.iter().map(|case| {
            let queue = text(case.place.path("queue.jsonl"));
            vec![path(case, "unreadable"), text(script.clone()), queue, path(case, "readable")]
        }),
    );
    let refused = cases.iter().filter(|case| refuses_unreadable_ledgers(case)).count();
    retain(env, &cases.iter().collect::<Vec<_>>());
    let compacted: Vec<&Case<'_>> = cases.iter().filter(|case| removes_what_it_should(case)).collect();
    let with_tail: Vec<&Case<'_>> =
        compacted.iter().copied().filter(|case| settles_at_once_or_takes_the_tail(case)).collect();
    retain(env, &with_tail);
    for case in &with_tail {
        settles_after_the_tail(case);
    }
    [refused, compacted.len(), with_tail.len()]
}

/// If the queue has an unreadable ledger line, nothing may happen to it. Then it goes on without that line.
fn refuses_unreadable_ledgers(case: &Case<'_>) -> bool {
    let place = &case.place;
    let numbers: Vec<u64> = serde_json::from_slice(&fs::read(case.beside("unreadable")).unwrap()).unwrap();
    let Some(first) = numbers.first() else { return false };
    let before = place.state();
    for more in [&["--dry-run"][..], &[]] {
        let arguments: Vec<&str> = case.shared.iter().map(String::as_str).chain(more.iter().copied()).collect();
        let run = place.run(NOW, &[&["--older-than", case.older_than], &arguments[..]].concat());
        assert_eq!(run.code, Some(65), "{}: {}", place.name, run.stderr);
        let at = format!("handoff-compact: queue.jsonl:{first}: the ledger cannot be read (");
        assert!(run.stderr.starts_with(&at), "{}: line {first}: {}", place.name, run.stderr);
        assert!(run.stdout.is_empty(), "{}: there is a plan all the same", place.name);
        assert_unchanged(&before, &place.state(), &place.name);
    }
    place.lay(fs::read(case.beside("readable")).unwrap());
    true
}

/// The first compaction; returns whether it removed anything.
fn removes_what_it_should(case: &Case<'_>) -> bool {
    let (place, name) = (&case.place, &case.place.name);
    let (report, kept) = judgement(case);
    let (before, metrics_before) = (place.state(), case.metrics());
    let old = place.read("queue.jsonl");

    let preview = case.compact(&["--dry-run"]);
    assert_unchanged(&before, &place.state(), &format!("{name}: --dry-run"));
    let plan = case.compact(&[]);
    for key in ["lines", "removed", "kept", "ledger_lines"] {
        assert_eq!(plan[key], report[key], "{name}: {key} of the plan");
    }
    for key in ["lines", "removed", "kept", "ledger_lines", "totals", "done_before_timestamp_seconds"] {
        assert_eq!(preview[key], plan[key], "{name}: {key} of --dry-run");
    }

    let after = place.state();
    if records_removed(&report) == 0 {
        assert_eq!(plan["replaced"], false, "{name}");
        assert_unchanged(&before, &after, &format!("{name}: nothing to remove"));
        return false;
    }
    assert_eq!(plan["replaced"], true, "{name}");
    let [number] = place.generations()[..] else { panic!("{name}: {:?}", place.names()) };
    assert!(report["ledger_lines"] != 0 || number == 1, "{name}: the first generation is {number}");
    let generation = &after[&format!("queue.gen.{number}")];
    assert_eq!(generation.0, before["queue.jsonl"].0, "{name}: the old file is another");
    assert_bytes(&generation.3, &old, &format!("{name}: the old file"));
    let (ledger, rest) = place.split();
    assert_bytes(&rest, &kept, &format!("{name}: the lines that stay"));
    let offset = old.len() - tail_of(&old).len();
    assert_eq!(ledger["payload"]["generations"], json!({ number.to_string(): offset }), "{name}");
    assert_eq!(ledger["ts"], 1_795_953_600, "{name}");

    let metrics = case.metrics();
    assert_same_counters(&metrics_before, &metrics, name);
    assert_gauges(&metrics_before, &metrics, records_removed(&report), name);
    true
}

/// The second compaction of the same moment: without a tail it only removes the old file, with one it takes the tail over. Returns whether
/// there was one.
fn settles_at_once_or_takes_the_tail(case: &Case<'_>) -> bool {
    let (place, name) = (&case.place, &case.place.name);
    let (mut before, metrics_before) = (place.state(), case.metrics());
    let (_, kept) = place.split();
    let [number] = place.generations()[..] else { panic!("{name}: {:?}", place.names()) };
    let generation = format!("queue.gen.{number}");
    let tail = tail_of(&before[&generation].3).to_owned();
    let plan = case.compact(&[]);
    assert_eq!(records_removed(&plan), 0, "{name}: a second run finds more to remove");
    if tail.is_empty() {
        assert_eq!((&plan["replaced"], &plan["removed_generations"]), (&json!(false), &json!(1)), "{name}");
        before.remove(&generation);
        assert_unchanged(&before, &place.state(), &format!("{name}: the second run"));
        assert_same_counters(&metrics_before, &case.metrics(), name);
        let plan = case.compact(&[]);
        assert_eq!((&plan["replaced"], &plan["removed_generations"]), (&json!(false), &json!(0)), "{name}");
        assert_unchanged(&before, &place.state(), &format!("{name}: the third run"));
        return false;
    }
    let late = json!({ "lines": 1, "bytes": tail.len() + 1 });
    assert_eq!((&plan["replaced"], &plan["late"]), (&json!(true), &late), "{name}");
    let (_, rest) = place.split();
    assert_bytes(&rest, &[&kept[..], &tail, b"\n"].concat(), &format!("{name}: the tail becomes a line"));
    assert_eq!(place.generations(), [number, number + 1], "{name}");
    assert_no_counter_fell(&metrics_before, &case.metrics(), name);
    true
}

/// The runs after the tail has been taken over: it is judged as any line is, and taken over no second time.
fn settles_after_the_tail(case: &Case<'_>) {
    let (place, name) = (&case.place, &case.place.name);
    let (report, kept) = judgement(case);
    let metrics_before = case.metrics();
    let mut state = place.state();
    for round in 0.. {
        assert!(round < 4, "{name}: compaction doesn't settle");
        case.compact(&[]);
        let (_, rest) = place.split();
        assert_bytes(&rest, &kept, &format!("{name}: after the tail was taken over"));
        let after = place.state();
        if after.keys().eq(state.keys()) && after["queue.jsonl"] == state["queue.jsonl"] {
            assert_unchanged(&state, &after, name);
            break;
        }
        assert!(
            records_removed(&report) > 0 || after["queue.jsonl"] == state["queue.jsonl"],
            "{name}: the queue is rewritten for nothing"
        );
        state = after;
    }
    assert!(place.generations().is_empty(), "{name}: {:?}", place.names());
    assert_same_counters(&metrics_before, &case.metrics(), name);
}

#[test]
fn random_queues_are_compacted_as_a_second_program_says() {
    let env = TestEnv::new();
    let generator = in_tests("random_queue.py");
    let seeds: Vec<u32> = (1..=30).collect();
    let queue = |seed: &u32| env.path(format!("random-{seed}"));
    // Those of every tenth seed have many names.
    let lines = |seed: &u32| if seed.is_multiple_of(10) { "250" } else { "80" };
    batch(
        &env,
        seeds
            .iter()
            .map(|seed| vec![text(queue(seed)), text(generator.clone()), seed.to_string(), lines(seed).to_owned()]),
    );
    let prices = text(in_tests("data/cases/prices/prices.json"));
    let cases: Vec<Case<'_>> = (0..)
        .zip(seeds.iter().flat_map(|seed| [seed, seed]))
        .map(|(index, seed)| {
            // Every age meets every other setting.
            let (older_than, seconds) = AGES[index % AGES.len()];
            let mut shared = Vec::new();
            if index % 3 == 1 {
                shared.extend(["--prices".to_owned(), prices.clone()]);
            }
            if let Some(max_line) = [None, None, Some("700"), None, Some("300")][index % 5] {
                shared.extend(["--max-line", max_line].map(str::to_owned));
            }
            let exporter = match index % 7 {
                0 => vec!["--roles", "role1,role3,role80,nobody,line feed", "--kinds", "kind2"],
                3 => vec!["--kinds", "kind0,kind1"],
                5 => vec!["--roles", "role2,other"],
                _ => vec![],
            };
            let exporter = exporter.into_iter().map(str::to_owned).collect();
            let place = Place::new(&env, &format!("seed-{seed}-{older_than}-{index}"), fs::read(queue(seed)).unwrap());
            Case { place, older_than, seconds, shared, exporter }
        })
        .collect();
    let [refused, compacted, with_tail] = prove_retention(&env, &cases);
    let enough = refused >= 12 && compacted >= 45 && with_tail >= 15;
    assert!(
        enough,
        "the seeds try too little: {refused} refused, {compacted} compacted, {with_tail} of them with a tail"
    );
}

/// The folders of the cases, with the arguments that they need.
fn case_folders() -> Vec<(PathBuf, Vec<String>)> {
    let mut folders: Vec<PathBuf> =
        fs::read_dir(in_tests("data/cases")).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.retain(|folder| folder.is_dir());
    folders.sort();
    let arguments = |folder: &PathBuf| {
        let arguments = fs::read_to_string(folder.join("args")).unwrap_or_default();
        arguments.lines().map(str::to_owned).collect()
    };
    folders.into_iter().map(|folder| (folder.clone(), arguments(&folder))).collect()
}

/// Those of the arguments that both tools take, and those that only the exporter takes.
fn shared_and_own(arguments: &[String]) -> (Vec<String>, Vec<String>) {
    let is_shared = |pair: &&[String]| ["--prices", "--max-line"].contains(&pair[0].as_str());
    let (shared, own): (Vec<&[String]>, Vec<&[String]>) = arguments.chunks(2).partition(is_shared);
    (shared.concat(), own.concat())
}

#[test]
fn every_case_and_the_week_are_compacted_as_a_second_program_says() {
    let env = TestEnv::new();
    let week = fs::read(in_tests("data/week/queue.jsonl")).unwrap();
    let mut cases = Vec::new();
    for (older_than, seconds) in AGES.into_iter().take(3) {
        for (folder, arguments) in case_folders() {
            // In between, ages make no difference to the cases.
            if older_than == "1d" {
                continue;
            }
            let name = format!("{}-{older_than}", folder.file_name().unwrap().to_string_lossy());
            let place = Place::new(&env, &name, fs::read(folder.join("queue.jsonl")).unwrap());
            let (mut shared, exporter) = shared_and_own(&arguments);
            for argument in &mut shared {
                if argument == "prices.json" {
                    *argument = text(folder.join("prices.json"));
                }
            }
            cases.push(Case { place, older_than, seconds, shared, exporter });
        }
        let place = Place::new(&env, &format!("week-{older_than}"), &week);
        cases.push(Case { place, older_than, seconds, shared: vec![], exporter: vec![] });
    }
    let [refused, compacted, with_tail] = prove_retention(&env, &cases);
    let enough = refused >= 2 && compacted >= 40 && with_tail >= 2;
    assert!(
        enough,
        "the cases try too little: {refused} refused, {compacted} compacted, {with_tail} of them with a tail"
    );
}

#[test]
fn late_lines_of_the_cases_are_taken_over_and_strange_files_are_left_alone() {
    let env = TestEnv::new();
    let mut with_generations = 0;
    for (folder, arguments) in case_folders() {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let has_generations = |name: &str| {
            fs::read_dir(&folder).unwrap().any(|file| file.unwrap().file_name().to_string_lossy().starts_with(name))
        };
        if !has_generations("queue.gen.") {
            continue;
        }
        with_generations += 1;
        copy_folder(&folder, &env.path(&name));
        let place = Place { env: &env, name: name.clone() };
        let (shared, exporter) = shared_and_own(&arguments);
        let case = Case { place, older_than: "14d", seconds: 14 * 86_400, shared, exporter };
        let place = &case.place;
        retain(&env, &[&case]);
        let (report, mut expected) = judgement(&case);

        // What the ledger says has been taken over of each generation; of several offsets the largest.
        let mut offsets = BTreeMap::<u64, u64>::new();
        for line in place.read("queue.jsonl").split(|byte| *byte == b'\n').filter(|line| line.starts_with(LEDGER_START))
        {
            let ledger: Value = serde_json::from_slice(line).unwrap();
            for (number, offset) in ledger["payload"]["generations"].as_object().unwrap() {
                let known = offsets.entry(number.parse().unwrap()).or_default();
                *known = offset.as_u64().unwrap().max(*known);
            }
        }
        let mut before = place.state();
        let mut late = 0;
        for (number, offset) in &offsets {
            let Some((.., contents)) = before.get(&format!("queue.gen.{number}")) else { continue };
            let Some(lines) = contents.get(usize::try_from(*offset).unwrap()..) else { continue };
            if lines.is_empty() {
                // Drained, and proven to be: nobody has it open.
                before.remove(&format!("queue.gen.{number}"));
                continue;
            }
            expected.extend_from_slice(lines);
            late += memchr::memchr_iter(b'\n', lines).count();
            if !lines.ends_with(b"\n") {
                expected.push(b'\n');
                late += 1;
            }
        }

        let metrics_before = case.metrics();
        let plan = case.compact(&[]);
        assert_eq!(plan["late"]["lines"], late, "{name}");
        assert_no_counter_fell(&metrics_before, &case.metrics(), &name);
        let replaced = late > 0 || records_removed(&report) > 0;
        assert_eq!(plan["replaced"], replaced, "{name}");
        if replaced {
            assert_bytes(&place.split().1, &expected, &name);
            let number = 1 + offsets.keys().max().unwrap();
            let mut after = place.state();
            assert_eq!(
                after.remove(&format!("queue.gen.{number}")).map(|old| old.0),
                before.remove("queue.jsonl").map(|old| old.0)
            );
            after.remove("queue.jsonl");
            before.entry("queue.lock".to_owned()).or_insert_with(|| after["queue.lock"].clone());
            assert_unchanged(&before, &after, &name);
            for _ in 0..2 {
                case.compact(&[]);
            }
            assert_bytes(&place.split().1, &expected, &format!("{name}, once more"));
        } else {
            before.insert("queue.lock".to_owned(), place.state()["queue.lock"].clone());
            assert_unchanged(&before, &place.state(), &name);
        }
    }
    assert!(with_generations >= 3, "the cases have no generations any more");
}

// --------------------------------------------------------------------------------------------------- no counter falls

/// Names as they stand in JSON.
const NAMES: [&str; 18] = [
    "",
    "other",
    "unknown",
    "ledger",
    r#"quo\"te"#,
    r"back\\slash",
    r"line\nfeed",
    r"bell\u0007",
    "bell\u{fffd}", // as a label it is the same as the one before
    r"delete\u007f",
    r"next\u0085",
    "line\u{2028}separator",
    r"\ud83d\ude00",
    "__name__",
    "\u{feff}mark",
    "+Inf",
    " ",
    r#"{}\",role=\"x"#,
];

/// Numbers that look random and are always the same.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    fn name(&mut self, prefix: &str) -> String {
        match self.below(12) {
            0..3 => NAMES[usize::try_from(self.below(NAMES.len() as u64)).unwrap()].to_owned(),
            3 => match self.below(4) {
                0 => "é".repeat(64),
                1 => "é".repeat(65),
                2 => "long".repeat(50),
                _ => r"\u0001".repeat(60), // short, but not as a label
            },
            _ => format!("{prefix}-{}", self.below(80)),
        }
    }

    /// Records of the days before `now`, with names that metrics have no room for, most of them done.
    fn records(&mut self, count: u64, now: u64) -> String {
        let mut lines = String::new();
        for id in 0..count {
            let (role, kind) = (self.name("role"), self.name("kind"));
            let ts = now - self.below(40 * 86_400);
            let started = ts + self.below(200_000);
            // Some will not have happened yet.
            let finished = started + self.below(90_000);
            let status = ["queued", "human", "dead", "nack", "done", "done", "done", "done"];
            let status = status[usize::try_from(self.below(8)).unwrap()];
            let model = match self.below(3) {
                0 => ["m-paid", "m-free", "m-tier", "m-half"][usize::try_from(self.below(4)).unwrap()].to_owned(),
                _ => self.name("model"),
            };
            let (input, output) = (self.below(300_000), self.below(5_000));
            let tokens = format!(r#""model":"{model}","input_tokens":{input},"output_tokens":{output}"#);
            let spend = match self.below(6) {
                0 => String::new(),
                1 => r#","spend":0.1"#.to_owned(),
                2 => format!(
                    r#","spend":[{{"cost_usd":"0.{input}",{tokens}}},{{{tokens},"cache_read_input_tokens":7}}]"#
                ),
                _ => format!(r#","spend":{{{tokens},"cache_creation_input_tokens":{input}}}"#),
            };
            let nacks = if self.below(10) == 0 { r#","nacks":2"# } else { "" };
            let more = format!(r#","started_ts":{started},"finished_ts":{finished}.25{spend}{nacks}"#);
            writeln!(
                lines,
                r#"{{"id":"{id}","ts":{ts},"kind":"{kind}","from":"a","to":"{role}","payload":{{}},"status":"{status}"{more}}}"#
            )
            .unwrap();
        }
        lines
    }
}

/// The times of the compactions, in seconds and as text, and what they take for old.
const ROUNDS: [(u64, &str, &str); 5] = [
    (1_795_953_600, NOW, "14d"),
    (1_796_040_000, "2026-11-30T12:00:00Z", "1d"),
    (1_796_644_800, "2026-12-07T12:00:00Z", "0s"),
    (1_798_977_600, "2027-01-03T12:00:00Z", "14d"),
    (1_830_513_600, "2028-01-03T12:00:00Z", "14d"),
];

/// Compacts a queue again and again while fresh records come, beside one that has the same records and is never compacted. Both must give
/// the same counters at every moment, with each of these settings of the exporter.
fn assert_counters_are_those_of_all_lines(shared: &[String], settings: &[&[&str]], chunks: &[Vec<u8>; 5]) {
    let env = TestEnv::new();
    let all = Place::new(&env, "all", "");
    let compacted = Place::new(&env, "compacted", "");
    let arguments = |setting: &[&str]| {
        let setting = setting.iter().map(|&argument| argument.to_owned());
        shared.iter().cloned().chain(setting).collect::<Vec<_>>()
    };
    let mut last: Vec<Option<Metrics>> = settings.iter().map(|_| None).collect();
    for ((_, now, older_than), chunk) in ROUNDS.into_iter().zip(chunks) {
        all.append(chunk);
        compacted.append(chunk);
        let mut live = Vec::new();
        for (setting, last) in settings.iter().zip(&last) {
            let context = format!("{now}, {setting:?}, before the compaction");
            let [expected, metrics] = [&all, &compacted].map(|place| place.metrics(now, &arguments(setting)));
            assert_same_counters(&expected, &metrics, &context);
            if let Some(last) = last {
                assert_no_counter_fell(last, &metrics, &context);
            }
            live.push(metrics);
        }
        let removed_so_far = |plan: &Value| plan["totals"]["removed_records"].as_u64().unwrap();
        let removed_before = removed_so_far(&compacted.compact(now, &["--older-than", "1000y", "--dry-run"]));
        // It knows the names that have series of their own in any of the settings.
        let arguments_of_all = arguments(&settings.concat());
        let plan = compacted
            .compact(now, &[arguments_of_all, vec!["--older-than".to_owned(), older_than.to_owned()]].concat());
        assert!(records_removed(&plan) > 0, "{now}: nothing to remove");
        assert_eq!(removed_so_far(&plan), removed_before + records_removed(&plan), "{now}");
        for ((setting, last), before) in settings.iter().zip(&mut last).zip(live) {
            let context = format!("{now}, {setting:?}, after the compaction");
            let metrics = compacted.metrics(now, &arguments(setting));
            assert_same_counters(&before, &metrics, &context);
            assert_gauges(&before, &metrics, records_removed(&plan), &context);
            *last = Some(metrics);
        }
    }

    // And what a program says that shares no code with either.
    let calls = ["all", "compacted"].map(|name| {
        let (output, queue) = (text(env.path(format!("{name}.prom"))), text(env.path(name).join("queue.jsonl")));
        let mut call = vec![output, text(in_tests("recount.py")), queue, "--now".to_owned(), ROUNDS[4].1.to_owned()];
        call.extend(arguments(settings[0]));
        call
    });
    batch(&env, calls.into_iter());
    let last = last[0].as_ref().unwrap();
    // It writes some floats in another way.
    let counters = |mut samples: Samples| {
        samples.retain(|series, _| is_counter(&series.name));
        samples
    };
    for name in ["all", "compacted"] {
        let recounted = counters(parse(&fs::read(env.path(format!("{name}.prom"))).unwrap()));
        let found = differences(&counters(last.parsed()), &recounted);
        assert!(found.is_empty(), "recounted: {name}: {:#?}", &found[..found.len().min(10)]);
    }
    for label in ["role", "kind", "model"] {
        assert_eq!(last.labels(label).len(), 51, "the labels {label} are too few to try their bound");
    }
}

/// Random queues with many names, and records with names of every sort, one of both for each compaction.
fn chunks(seed: u32) -> [Vec<u8>; 5] {
    let env = TestEnv::new();
    let (generator, readable) = (in_tests("random_queue.py"), in_tests("workers/readable_ledgers.py"));
    let seeds = [seed, seed + 10, seed + 20, seed + 30, seed + 40];
    let file = |name: &str, seed: u32| text(env.path(format!("{name}-{seed}")));
    batch(
        &env,
        seeds.into_iter().flat_map(|seed| {
            let random = vec![file("random", seed), text(generator.clone()), seed.to_string(), "150".to_owned()];
            [random, vec![file("list", seed), text(readable.clone()), file("random", seed), file("readable", seed)]]
        }),
    );
    let mut index = 0;
    seeds.map(|seed| {
        let mut random = fs::read(file("readable", seed)).unwrap();
        random.truncate(random.len() - tail_of(&random).len());
        let hostile = Numbers(seed.into()).records(150, ROUNDS[index].0).into_bytes();
        index += 1;
        [hostile, random].concat()
    })
}

#[test]
fn counters_over_many_compactions_are_those_of_all_lines() {
    let settings: [&[&str]; 3] = [
        &[],
        &["--roles", "role-3,role-70,nobody,other,quo\"te", "--kinds", "kind-1,kind-79,ledger"],
        &["--kinds", "kind-5,bell\u{fffd},unknown"],
    ];
    assert_counters_are_those_of_all_lines(&[], &settings, &chunks(100));
}

#[test]
fn counters_over_many_compactions_with_a_price_map_are_those_of_all_lines() {
    let prices = ["--prices".to_owned(), text(in_tests("data/cases/prices/prices.json"))];
    let settings: [&[&str]; 2] = [&[], &["--roles", "role-1,role-2,role-3"]];
    assert_counters_are_those_of_all_lines(&prices, &settings, &chunks(500));
}

/// A queue whose first and last names are all of records that go, with more names in between than metrics have room for.
#[test]
fn labels_stay_the_same_when_the_records_that_showed_them_first_are_gone() {
    let env = TestEnv::new();
    let line = |n: usize, ts: u64| {
        format!(
            r#"{{"id":"{n}","ts":{ts},"kind":"kind-{n}","from":"a","to":"role-{n}","payload":{{}},"status":"done","spend":{{"model":"model-{n}","cost_usd":0.5,"input_tokens":{n}}}}}"#
        ) + "\n"
    };
    let mut queue = String::new();
    for n in 0..80 {
        // Every third goes, the first and the last ones too; and those that stay show all names once more.
        queue += &line(n, if !(10..70).contains(&n) || n % 3 == 0 { OLD } else { RECENT });
    }
    (0..80).rev().for_each(|n| queue += &line(n, RECENT));
    let place = Place::new(&env, "queue", &queue);
    let before = place.metrics(NOW, &NONE);
    place.compact(NOW, &NONE);
    let after = place.metrics(NOW, &NONE);
    assert_same_counters(&before, &after, "");
    for label in ["role", "kind", "model"] {
        let expected: BTreeSet<String> = (0..50).map(|n| format!("{label}-{n}")).chain(["other".to_owned()]).collect();
        assert_eq!(after.labels(label), expected);
    }
    assert!((after.sum("handoff_records_total", &[]) - 160.0).abs() < 0.5);
    assert!(
        (after.sum("handoff_tokens_total", &[("model", "other")]) - f64::from((50..80).sum::<u32>() * 2)).abs() < 0.5
    );
}

#[test]
fn counters_survive_the_removal_of_a_flood_of_names() {
    let env = TestEnv::new();
    let queue = String::from_utf8(flood()).unwrap().replace(r#""status":"queued""#, r#""status":"done""#);
    let place = Place::new(&env, "queue", &queue);
    let before = place.metrics(NOW, &NONE);
    let plan = place.compact(NOW, &["--older-than", "0s"]);
    assert_eq!(records_removed(&plan), queue.lines().count() as u64);
    assert_same_counters(&before, &place.metrics(NOW, &NONE), "");
}

/// 3,600 pairs of roles and kinds, more than the ledger has rows, though each of the few kinds has a series of its own.
#[test]
fn kinds_keep_their_counters_however_many_roles_there_are() {
    let env = TestEnv::new();
    let mut queue = String::new();
    for n in 0..3_600 {
        let (role, kind) = (n / 4, n % 4);
        writeln!(
            queue,
            r#"{{"id":"{n}","ts":{OLD},"kind":"kind-{kind}","from":"a","to":"role-{role}","payload":{{}},"status":"done"}}"#
        )
        .unwrap();
    }
    let place = Place::new(&env, "queue", &queue);
    let before = place.metrics(NOW, &NONE);
    assert_eq!(records_removed(&place.compact(NOW, &NONE)), 3_600);
    assert_same_counters(&before, &place.metrics(NOW, &NONE), "");
}

/// Rows of names that metrics don't show must leave room for those of names that they do.
#[test]
fn names_with_series_of_their_own_keep_their_counters_after_a_flood_of_others() {
    let env = TestEnv::new();
    let line = |role: &str, kind: &str, model: &str| {
        format!(
            r#"{{"id":"x","ts":{OLD},"kind":"{kind}","from":"a","to":"{role}","payload":{{}},"status":"done","spend":{{"model":"{model}","cost_usd":1,"input_tokens":1}}}}"#
        ) + "\n"
    };
    let mut queue = String::new();
    for n in 0..50 {
        queue += &line(&format!("role-{n}"), &format!("kind-{n}"), &format!("model-{n}"));
    }
    for n in 0..3_600 {
        let (a, b) = (n / 60, n % 60);
        queue += &line(&format!("flood-{a}"), &format!("flood-{b}"), &format!("flood-{a}"));
    }
    for n in 0..50 {
        queue += &line(&format!("role-{n}"), &format!("kind-{}", 49 - n), &format!("model-{n}"));
    }
    let place = Place::new(&env, "queue", &queue);
    let before = place.metrics(NOW, &NONE);
    assert_eq!(records_removed(&place.compact(NOW, &NONE)), 3_700);
    assert_same_counters(&before, &place.metrics(NOW, &NONE), "");
}

/// Long enough for a thread to read each half. The second one shows other names than the first beside some of the same: so few that it has
/// room for all of them, though both together do not, or too many for itself.
#[test]
fn a_queue_that_several_threads_read_is_compacted_as_by_one() {
    for names in [45, 60] {
        let env = TestEnv::new();
        let (mut numbers, mut queue, mut stays) = (Numbers(7), String::new(), String::new());
        let filler = "x".repeat(5_500);
        for n in 0..2_000_u64 {
            let name = if n < 1_000 { numbers.below(40) } else { 80 - numbers.below(names) };
            // Some names never have a record that goes.
            let goes = name % 7 != 0 && numbers.below(2) == 0;
            let line = format!(
                r#"{{"id":"{n}","ts":{},"kind":"kind-{}","from":"a","to":"role-{name}","payload":{{"a":"{filler}"}},"status":"done","spend":{{"model":"model-{name}","cost_usd":0.1,"output_tokens":{n}}}}}"#,
                if goes { OLD } else { RECENT },
                n % 3,
            ) + "\n";
            queue += &line;
            if !goes {
                stays += &line;
            }
        }
        assert!(queue.len() > 2 * 5 * 1024 * 1024, "the queue is too short for two threads");
        let place = Place::new(&env, "queue", &queue);
        let before = place.metrics(NOW, &NONE);
        let plan = place.compact(NOW, &NONE);
        assert_bytes(&place.split().1, stays.as_bytes(), "the lines that stay");
        assert_eq!(plan["lines"], 2_000);
        assert_eq!(plan["kept"]["bytes"], stays.len());
        let removed = json!({ "records": 2_000 - stays.lines().count(), "bytes": queue.len() - stays.len() });
        assert_eq!(plan["removed"], removed);
        assert!(place.read("queue.gen.1") == queue.as_bytes(), "the old file has changed");
        let after = place.metrics(NOW, &NONE);
        assert_same_counters(&before, &after, "");
        assert_gauges(&before, &after, records_removed(&plan), "");
        assert_eq!(after.labels("role").len(), 51, "there are too few names to try the bound");
    }
}

// ------------------------------------------------------------------------------------------------- what broke others

/// Compacts these lines between records that go and stay: they must stay byte for byte, for these reasons, and nothing else may happen.
fn assert_stays(lines: impl AsRef<[u8]>, reasons: &[(&str, u64)]) {
    assert_stays_with(lines.as_ref(), reasons, &NONE);
}

fn assert_stays_with(lines: &[u8], reasons: &[(&str, u64)], arguments: &[&str]) {
    let env = TestEnv::new();
    let queue = [old("a").as_bytes(), lines, old("b").as_bytes(), recent("c").as_bytes()].concat();
    let place = Place::new(&env, "queue", &queue);
    let before = place.metrics(NOW, arguments);
    let plan = place.compact(NOW, arguments);
    assert_bytes(&place.split().1, &[lines, recent("c").as_bytes()].concat(), "the lines that stay");
    assert!(place.read("queue.gen.1") == queue, "the old file has changed");
    assert_eq!(records_removed(&plan), 2);
    let mut expected: BTreeMap<&str, u64> = reasons.iter().copied().collect();
    *expected.entry("recent").or_default() += 1;
    let found = plan["kept"]["reasons"].as_object().unwrap();
    let found: BTreeMap<&str, u64> = found
        .iter()
        .map(|(reason, lines)| (reason.as_str(), lines.as_u64().unwrap()))
        .filter(|(_, n)| *n > 0)
        .collect();
    assert_eq!(found, expected);
    let after = place.metrics(NOW, arguments);
    assert_same_counters(&before, &after, "");
    assert_gauges(&before, &after, 2, "");

    let before = place.state();
    place.compact(NOW, arguments);
    assert!(place.state()["queue.jsonl"] == before["queue.jsonl"], "a second run rewrites the queue");
}

/// Asserts that of each of these records, each one line, the old one goes and the recent one stays byte for byte.
fn assert_read_as_records(lines: impl Fn(u64) -> Vec<u8>) {
    assert_stays(lines(RECENT), &[("recent", 1)]);
    let env = TestEnv::new();
    let queue = [recent("a").into_bytes(), lines(OLD), recent("b").into_bytes()].concat();
    let place = Place::new(&env, "queue", &queue);
    let before = place.metrics(NOW, &NONE);
    assert_eq!(records_removed(&place.compact(NOW, &NONE)), 1);
    assert_bytes(&place.split().1, (recent("a") + &recent("b")).as_bytes(), "the lines that stay");
    assert_same_counters(&before, &place.metrics(NOW, &NONE), "");
}

/// A record that is old and done, without its `\n`, to be damaged.
fn sound() -> Vec<u8> {
    old("damaged").trim_end().as_bytes().to_vec()
}

#[test]
fn a_torn_tail_comes_back_once_as_a_line_of_its_own() {
    let env = TestEnv::new();
    let torn = &sound()[..40];
    let queue = [old("a").as_bytes(), recent("b").as_bytes(), torn].concat();
    let place = Place::new(&env, "queue", &queue);
    place.compact(NOW, &NONE);
    assert_bytes(&place.split().1, recent("b").as_bytes(), "the first run");
    assert_bytes(&place.read("queue.gen.1"), &queue, "the old file");
    // What a worker appends meanwhile is not glued to it.
    place.append(recent("c"));
    let whole = [recent("b").as_bytes(), recent("c").as_bytes(), torn, b"\n"].concat();
    for round in 0..4 {
        let plan = place.compact(NOW, &NONE);
        assert_eq!(plan["late"]["lines"], u64::from(round == 0));
        assert_bytes(&place.split().1, &whole, "later runs");
    }
    assert_eq!(place.names(), ["queue.jsonl", "queue.lock"]);
    let malformed = place.metrics(NOW, &NONE).value("handoff_queue_malformed_lines", &[("reason", "not_json")]);
    assert!((malformed - 1.0).abs() < 0.5);
}

#[test]
fn a_tail_that_lacks_only_its_newline_comes_back_as_a_record() {
    let env = TestEnv::new();
    let place = Place::new(&env, "queue", old("a") + &recent("b") + recent("c").trim_end());
    let counted = |records: f64| {
        let metrics = place.metrics(NOW, &NONE);
        assert!((metrics.sum("handoff_records_total", &[]) - records).abs() < 0.5);
    };
    counted(2.0);
    place.compact(NOW, &NONE);
    counted(2.0);
    for _ in 0..3 {
        place.compact(NOW, &NONE);
        counted(3.0);
    }
    assert_bytes(&place.split().1, (recent("b") + &recent("c")).as_bytes(), "the queue");
}

#[test]
fn an_old_tail_goes_only_after_it_has_become_a_line() {
    let env = TestEnv::new();
    let place = Place::new(&env, "queue", old("a") + &recent("b") + old("c").trim_end());
    let removed = || records_removed(&place.compact(NOW, &NONE));
    assert_eq!([removed(), removed(), removed(), removed(), removed()], [1, 0, 1, 0, 0]);
    assert_bytes(&place.split().1, recent("b").as_bytes(), "the queue");
    assert_eq!(place.names(), ["queue.jsonl", "queue.lock"]);
    assert!((place.metrics(NOW, &NONE).sum("handoff_records_total", &[]) - 3.0).abs() < 0.5);
}

#[test]
fn a_torn_line_and_a_blank_one() {
    assert_stays([&sound()[..40], b"\n\n"].concat(), &[("not_json", 1), ("blank", 1)]);
}

#[test]
fn an_append_glued_to_a_torn_line() {
    assert_stays([&sound()[..40], old("c").as_bytes()].concat(), &[("not_json", 1)]);
}

#[test]
fn two_objects_on_one_line() {
    assert_stays([&sound()[..], old("c").as_bytes()].concat(), &[("not_json", 1)]);
}

#[test]
fn one_bad_line_among_good_ones() {
    assert_stays("not json\n", &[("not_json", 1)]);
    assert_stays("\n \t\r\n{}\n[]\nnull\n7\n", &[("blank", 2), ("not_an_envelope", 4)]);
}

#[test]
fn a_run_of_nuls() {
    assert_stays([&[0; 4096][..], b"\n"].concat(), &[("not_json", 1)]);
    assert_stays([&vec![0; 300_000][..], old("c").as_bytes()].concat(), &[("not_json", 1)]);
    assert_stays([&sound()[..40], &[0; 20], &sound()[60..], b"\n"].concat(), &[("not_json", 1)]);
}

#[test]
fn a_byte_order_mark() {
    assert_read_as_records(|ts| format!("\u{feff}{}", record("c", ts, "done")).into_bytes());
    assert_stays(format!("\u{feff}\u{feff}{}", old("c")), &[("not_json", 1)]);
}

#[test]
fn a_byte_order_mark_at_the_start_of_the_queue() {
    let env = TestEnv::new();
    let (first, second) = (format!("\u{feff}{}", recent("a")), format!("\u{feff}{}", old("b")));
    let place = Place::new(&env, "queue", first.clone() + &second);
    assert_eq!(records_removed(&place.compact(NOW, &NONE)), 1);
    // The ledger goes before the mark, never between it and its line.
    assert_bytes(&place.split().1, first.as_bytes(), "the lines that stay");
}

#[test]
fn carriage_returns() {
    assert_read_as_records(|ts| record("c", ts, "done").replace('\n', "\r\n").into_bytes());
    assert_stays("\r\n\r\n", &[("blank", 2)]);
    // Alone it ends no line.
    assert_stays([&sound()[..], b"\r", old("c").as_bytes()].concat(), &[("not_json", 1)]);
}

#[test]
fn invalid_utf_8() {
    for bytes in [&b"\xff"[..], b"\xc0\x80", b"\xed\xa0\xbd", b"\xf5\x80\x80\x80", b"\xe2\x82"] {
        let line = String::from_utf8(sound()).unwrap();
        let (start, end) = line.split_once("{}").unwrap();
        let line = [start.as_bytes(), b"{\"a\":\"", bytes, b"\"}", end.as_bytes(), b"\n"].concat();
        assert_stays(line, &[("not_utf8", 1)]);
    }
}

#[test]
fn line_separators_that_are_none() {
    for separator in ['\u{2028}', '\u{2029}', '\u{85}'] {
        assert_read_as_records(|ts| {
            record("c", ts, "done").replace("{}", &format!("{{\"a\":\"x{separator}y\"}}")).into_bytes()
        });
    }
}

#[test]
fn lone_surrogates() {
    // In a payload they are nobody's business.
    assert_read_as_records(|ts| record("c", ts, "done").replace("{}", r#"{"a\udc00":"\ud83d"}"#).into_bytes());
    assert_read_as_records(|ts| record(r"\ud83d\ude00", ts, "done").into_bytes());
    assert_stays(old(r"\ud83d"), &[("lone_surrogate", 1)]);
    assert_stays(old("c").replace("researcher", r"\ude00\ud83d"), &[("lone_surrogate", 1)]);
}

#[test]
fn duplicate_keys() {
    assert_read_as_records(|ts| record("c", ts, "done").replace("{}", r#"{"status":1,"status":2}"#).into_bytes());
    for members in
        [r#","status":"done""#, r#","status":"queued""#, ",\"ts\":0", r#","id":"damaged""#, r#","p\u0061yload":{}"#]
    {
        assert_stays(record_with("c", &OLD.to_string(), "done", members), &[("duplicate_key", 1)]);
    }
    // The last one counts, also for what is a duplicate of nothing.
    assert_stays(record_with("c", &OLD.to_string(), "queued", r#","status":"done""#), &[("duplicate_key", 1)]);
}

#[test]
fn big_numbers() {
    let numbers = format!("[{},1e400,-1E-400,0.{},18446744073709551616]", "9".repeat(400), "3".repeat(400));
    assert_read_as_records(|ts| record("c", ts, "done").replace("{}", &format!("{{\"a\":{numbers}}}")).into_bytes());
    for ts in ["1e400", "123456789012345678901234567890", "-1", "1e14"] {
        assert_stays(record_with("c", ts, "done", ""), &[("not_an_envelope", 1)]);
        assert_stays(
            record_with("c", &OLD.to_string(), "done", &format!(",\"finished_ts\":{ts}")),
            &[("unreadable_time", 1)],
        );
        assert_stays(
            record_with("c", &OLD.to_string(), "done", &format!(",\"nacks\":{ts}")),
            &[("unreadable_nacks", 1)],
        );
    }
}

#[test]
fn numbers_that_are_none() {
    for number in ["NaN", "Infinity", "-Infinity"] {
        assert_stays(old("c").replace("{}", &format!("{{\"a\":[{number}]}}")), &[("non_finite_number", 1)]);
        assert_stays(record_with("c", number, "done", ""), &[("not_an_envelope", 1)]);
    }
    assert_stays(old("c").replace("{}", "{\"a\":nan}"), &[("not_json", 1)]);
}

#[test]
fn milliseconds_are_not_taken_for_seconds() {
    // Recent ones must stay: as seconds they lie far in the future. Old ones must go, or nothing ever would.
    assert_read_as_records(|ts| record("c", ts * 1_000, "done").into_bytes());
    assert_read_as_records(|ts| record_with("c", &format!("{ts}000.0"), "done", "").into_bytes());
    // Of times of both sorts in one record each is read by itself.
    assert_read_as_records(|ts| {
        record_with("c", &ts.to_string(), "done", &format!(",\"started_ts\":{ts}500,\"finished_ts\":{ts}.75"))
            .into_bytes()
    });
}

#[test]
fn a_future_timestamp() {
    for future in ["1795953601", "1795953600001", "99999999999", "99999999999999", "\"2026-11-29T12:00:00.000001Z\""] {
        assert_stays(record_with("c", future, "done", ""), &[("future_time", 1)]);
        for field in ["started_ts", "finished_ts"] {
            let line = record_with("c", &OLD.to_string(), "done", &format!(",\"{field}\":{future}"));
            assert_stays(line, &[("future_time", 1)]);
        }
    }
}

#[test]
fn nesting_of_any_depth() {
    let deep = format!("{{\"a\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    assert_read_as_records(|ts| record("c", ts, "done").replace("{}", &deep).into_bytes());
    assert_stays("{\"a\":".repeat(100_000) + "\n", &[("not_json", 1)]);
    assert_stays("[".repeat(100_000) + &"]".repeat(100_000) + "\n", &[("not_an_envelope", 1)]);
}

#[test]
fn a_line_of_70_megabytes_is_too_long_whatever_it_holds() {
    let line = old("c").replace("{}", &format!("{{\"a\":\"{}\"}}", "x".repeat(70_000_000)));
    assert_stays(line, &[("too_long", 1)]);
}

#[test]
fn a_line_of_20_megabytes_is_a_record_as_any_other() {
    let long = format!("{{\"a\":\"{}\"}}", "x".repeat(20_000_000));
    assert_read_as_records(|ts| record("c", ts, "done").replace("{}", &long).into_bytes());
}

#[test]
fn a_line_as_long_as_the_limit_goes_and_one_more_byte_stays() {
    let line = old("c");
    let limit = (line.len() - 1).to_string();
    assert_stays_with(line.replace(":{}", ": {}").as_bytes(), &[("too_long", 1)], &["--max-line", &limit]);
    let env = TestEnv::new();
    let place = Place::new(&env, "queue", &line);
    assert_eq!(records_removed(&place.compact(NOW, &["--max-line", &limit])), 1);
}

// --------------------------------------------------------------------------------------- changing nothing for nothing

#[test]
fn a_queue_with_nothing_to_remove_is_not_touched() {
    let env = TestEnv::new();
    for (index, queue) in [
        String::new(),
        recent("a"),
        record("a", OLD, "queued") + "\n\0\n",
        recent("a") + &old("torn")[..20],
        old("whole tail").trim_end().to_owned(),
    ]
    .iter()
    .enumerate()
    {
        let place = Place::new(&env, &index.to_string(), queue);
        let before = place.state();
        for _ in 0..2 {
            let plan = place.compact(NOW, &NONE);
            assert_eq!(plan["replaced"], false);
            assert_unchanged(&before, &place.state(), queue);
        }
    }
}

#[test]
fn a_second_run_rewrites_nothing_and_a_third_changes_nothing() {
    let env = TestEnv::new();
    let place = Place::new(&env, "queue", old("a") + &recent("b") + &record("c", OLD, "nack"));
    place.compact(NOW, &NONE);
    let mut before = place.state();
    let plan = place.compact(NOW, &NONE);
    assert_eq!((&plan["replaced"], &plan["removed_generations"]), (&json!(false), &json!(1)));
    assert!(before.remove("queue.gen.1").is_some());
    assert_unchanged(&before, &place.state(), "the second run");
    for _ in 0..2 {
        place.compact(NOW, &NONE);
        assert_unchanged(&before, &place.state(), "later runs");
    }
}

#[test]
fn a_dry_run_leaves_even_litter_and_locks_alone_and_tells_what_the_run_will_do() {
    let env = TestEnv::new();
    let ledger = r#"{"id":"ledger","ts":1795950000,"kind":"ledger","from":"handoff","to":"","payload":{"version":1,"totals":{"cells":[{"role":"r","kind":"k","records":5}],"reclaimed_bytes":7},"generations":{"3":0,"4":5}},"status":"ledger"}"#;
    let queue = format!("{ledger}\n{}{}\n{}", old("a"), record("b", OLD, "human"), recent("torn").split_at(30).0);
    let place = Place::new(&env, "queue", &queue);
    fs::remove_file(place.path("queue.lock")).unwrap();
    // Late lines, a drained generation, one that nobody knows, a second name of the queue, what dead runs left.
    fs::write(place.path("queue.gen.3"), recent("late")).unwrap();
    fs::write(place.path("queue.gen.4"), "long\n").unwrap();
    fs::write(place.path("queue.gen.5"), "strange\n").unwrap();
    fs::hard_link(place.path("queue.jsonl"), place.path("queue.gen.6")).unwrap();
    fs::write(place.path(".queue.jsonl.4711.a1B2c3.tmp"), "half").unwrap();
    let before = place.state();
    let preview = place.compact(NOW, &["--dry-run"]);
    assert_unchanged(&before, &place.state(), "--dry-run");
    assert_eq!(env.textfile_names(), NONE);
    assert_eq!((&preview["dry_run"], &preview["replaced"]), (&json!(true), &json!(false)));

    let plan = place.compact(NOW, &NONE);
    for key in ["queue", "lines", "removed", "kept", "ledger_lines", "totals", "done_before_timestamp_seconds"] {
        assert_eq!(preview[key], plan[key], "{key}");
    }
    assert_eq!(plan["totals"], json!({ "removed_records": 6, "reclaimed_bytes": 7 + old("a").len() }));
    assert_eq!(env.textfile_names(), ["handoff_compact.prom"]);
    let stays = record("b", OLD, "human") + "\n" + &recent("late");
    assert_bytes(&place.split().1, stays.as_bytes(), "the queue");
    assert_eq!(place.names(), ["queue.gen.3", "queue.gen.5", "queue.gen.6", "queue.jsonl", "queue.lock"]);
}

#[test]
fn what_a_dry_run_prints_for_people_changes_nothing_either() {
    let env = TestEnv::new();
    let place = Place::new(&env, "queue", old("a") + &recent("b"));
    fs::remove_file(place.path("queue.lock")).unwrap();
    let before = place.state();
    let run = run(env.compact().current_dir(env.path("queue")).arg("--dry-run"));
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert!(String::from_utf8(run.stdout).unwrap().contains("remove 1 record,"));
    assert_unchanged(&before, &place.state(), "--dry-run");
}

// -------------------------------------------------------------------------------------------------------------- clocks

/// Records with a time that is far off, in either direction, next to others: each is judged by its own times.
#[test]
fn a_record_with_a_strange_time_takes_no_other_with_it() {
    let env = TestEnv::new();
    let others = |strange: &str| {
        let mut queue = String::new();
        for status in ["queued", "running", "nack", "human", "dead", "done"] {
            for ts in [RECENT, OLD, RECENT * 1_000, OLD * 1_000] {
                queue += &record(&format!("{status}-{ts}"), ts, status);
                queue += strange;
            }
        }
        queue
    };
    let stays: String =
        others("").lines().filter(|line| !line.contains("\"done-1794")).map(|line| line.to_owned() + "\n").collect();
    assert_eq!(stays.lines().count(), 22);
    let mut index = 0;
    for ts in [
        "0",
        "0.0",
        "1",
        "1000",
        "\"1970-01-01T00:00:00Z\"",
        "99999999999",
        "100000000000",
        "99999999999999",
        "\"5138-11-16T09:46:39Z\"",
        "1795953601",
    ] {
        for (status, members) in
            [("queued", ""), ("done", ""), ("done", ",\"finished_ts\":1794000000"), ("nack", ",\"finished_ts\":0")]
        {
            index += 1;
            let strange = record_with("strange", ts, status, members);
            let place = Place::new(&env, &index.to_string(), others(&strange));
            let plan = place.compact(NOW, &NONE);
            let (_, rest) = place.split();
            let rest = String::from_utf8(rest).unwrap();
            let found: String =
                rest.lines().filter(|line| !line.contains("strange")).map(|line| line.to_owned() + "\n").collect();
            assert_bytes(found.as_bytes(), stays.as_bytes(), &strange);
            // Of the strange ones those that are done go, all or none: one of 1970 is old, whatever it looks like.
            let is_future = ts.contains("9999") || ts.contains("5138") || ts == "1795953601";
            let goes = status == "done" && !is_future;
            assert_eq!(rest.matches("strange").count(), if goes { 0 } else { 24 }, "{strange}");
            assert_eq!(records_removed(&plan), if goes { 26 } else { 2 }, "{strange}");
        }
    }
}

#[test]
fn a_clock_that_is_wrong_removes_only_what_it_may() {
    let env = TestEnv::new();
    let queue =
        old("a") + &recent("b") + &record("c", OLD, "queued") + &record("d", 0, "nack") + &record("e", 0, "running");
    // Set back to before everything: all that is done lies in the future.
    for now in ["1970-01-01T00:00:00Z", "2000-01-01T00:00:00Z"] {
        let place = Place::new(&env, now, &queue);
        let before = place.state();
        let plan = place.compact(now, &["--older-than", "0s"]);
        assert_eq!(plan["kept"]["reasons"]["future_time"], 2);
        assert_unchanged(&before, &place.state(), now);
    }
    // Set forward by centuries: what is done goes, nothing else does.
    let now = "2999-01-01T00:00:00Z";
    let place = Place::new(&env, now, &queue);
    assert_eq!(records_removed(&place.compact(now, &NONE)), 2);
    let stays = record("c", OLD, "queued") + &record("d", 0, "nack") + &record("e", 0, "running");
    assert_bytes(&place.split().1, stays.as_bytes(), now);
}

#[test]
fn the_limit_is_exact_to_the_microsecond() {
    // 14 days before NOW, and one microsecond to each side.
    let old = [r#""2026-11-15T11:59:59.999999Z""#, "1794743999.999999", "1794743999999.999"];
    let recent = [r#""2026-11-15T12:00:00Z""#, "1794744000", "1794744000000", "1794744000.000001"];
    let env = TestEnv::new();
    let line = |ts: &&str| record_with("x", ts, "done", "");
    let finished = |ts: &&str| record_with("x", "1", "done", &format!(",\"finished_ts\":{ts}"));
    let stays: String = recent.iter().map(line).chain(recent.iter().map(finished)).collect();
    let goes: String = old.iter().map(line).chain(old.iter().map(finished)).collect();
    let place = Place::new(&env, "queue", stays.clone() + &goes);
    let plan = place.compact(NOW, &NONE);
    assert_eq!((records_removed(&plan), &plan["kept"]["reasons"]["recent"]), (6, &json!(8)));
    assert_bytes(&place.split().1, stays.as_bytes(), "the lines that stay");
}

// -------------------------------------------------------------------------------------------------------------- ledger

fn ledger(totals: &str, generations: &str) -> String {
    format!(
        r#"{{"id":"ledger","ts":1795900000,"kind":"ledger","from":"handoff","to":"","payload":{{"version":1,"totals":{totals},"generations":{generations}}},"status":"ledger"}}"#
    ) + "\n"
}

fn rows_of<'v>(ledger: &'v Value, sort: &str) -> BTreeMap<(&'v str, &'v str), &'v Value> {
    let second = if sort == "cells" { "role" } else { "model" };
    let rows = ledger["payload"]["totals"][sort].as_array().unwrap().iter();
    rows.map(|row| ((row["kind"].as_str().unwrap(), row[second].as_str().unwrap()), row)).collect()
}

/// Everything in it worked out by hand.
#[test]
fn several_ledgers_and_the_removed_records_become_one() {
    let env = TestEnv::new();
    let first = ledger(
        r#"{"roles":["b"],"kinds":["k"],"models":["m"],"cells":[{"role":"b","kind":"k","records":2,"done":2,"queue_wait":{"buckets":[0,1,0,0,0,0,0,0,0,0,0,0,1],"sum_us":900000000005},"spend_usd":"0.1","unpriced":1}],"tokens":[{"kind":"k","model":"m","input":5,"output":1}],"reclaimed_bytes":100}"#,
        r#"{"7":48231}"#,
    );
    let second = ledger(
        r#"{"cells":[{"role":"b","kind":"k","records":3,"done":1,"dead":1,"nacks":4,"spend_usd":"0.2"},{"role":"c","kind":"k","records":1}],"tokens":[{"kind":"k","model":"m","input":7,"cache_read":2},{"kind":"k","model":"n","output":3}],"reclaimed_bytes":20}"#,
        "{}",
    );
    let line = |ts: u64, role: &str, kind: &str, members: &str| {
        format!(
            r#"{{"id":"1","ts":{ts},"kind":"{kind}","from":"x","to":"{role}","payload":{{}},"status":"done"{members}}}"#
        ) + "\n"
    };
    let goes = line(
        OLD,
        "a",
        "k",
        r#","started_ts":1794000020,"finished_ts":1794000400.5,"spend":[{"model":"m","cost_usd":0.25,"input_tokens":10},{"model":"o","output_tokens":1}]"#,
    );
    let also_goes = line(OLD, "b", "k", r#","spend":0.0000000000000000000000000001"#);
    let (stays, also_stays) = (line(RECENT, "z", "q", ""), line(RECENT, "y", "k", r#","spend":{"model":"p"}"#));
    let place = Place::new(&env, "queue", stays.clone() + &first + &goes + &second + &also_goes + &also_stays);
    let before = place.metrics(NOW, &NONE);
    let offset = place.read("queue.jsonl").len();
    let plan = place.compact(NOW, &NONE);
    assert_eq!(plan["ledger_lines"], 2);

    let (ledger, rest) = place.split();
    assert_bytes(&rest, (stays + &also_stays).as_bytes(), "the lines that stay");
    let members: Vec<&str> = ledger.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(members, ["from", "id", "kind", "payload", "status", "to", "ts"]);
    assert_eq!((&ledger["kind"], &ledger["from"], &ledger["to"]), (&json!("ledger"), &json!("handoff"), &json!("")));
    assert_eq!((&ledger["payload"]["version"], &ledger["status"]), (&json!(1), &json!("ledger")));
    // Generation 7 is gone, but its number is not given away a second time.
    assert_eq!(ledger["payload"]["generations"], json!({ "8": offset }));
    let totals = &ledger["payload"]["totals"];
    assert_eq!(totals["roles"], json!(["z", "b", "a", "c", "y"]));
    assert_eq!(totals["kinds"], json!(["q", "k"]));
    assert_eq!(totals["models"], json!(["m", "o", "n", "p"]));
    assert_eq!(totals["reclaimed_bytes"], 120 + goes.len() + also_goes.len());
    let histogram = |buckets: [u64; 13], sum_us: u64| json!({ "buckets": buckets, "sum_us": sum_us });
    let empty = histogram([0; 13], 0);
    let expected = [
        json!({ "role": "a", "kind": "k", "records": 1, "done": 1, "dead": 0, "nacks": 0, "spend_usd": "0.25", "unpriced": 1,
                "queue_wait": histogram([0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], 20_000_000),
                "role_time": histogram([0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0], 380_500_000) }),
        json!({ "role": "b", "kind": "k", "records": 6, "done": 4, "dead": 1, "nacks": 4, "unpriced": 1,
                "spend_usd": "0.3000000000000000000000000001",
                "queue_wait": histogram([0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1], 900_000_000_005), "role_time": empty }),
        json!({ "role": "c", "kind": "k", "records": 1, "done": 0, "dead": 0, "nacks": 0, "spend_usd": "0", "unpriced": 0,
                "queue_wait": empty, "role_time": empty }),
    ];
    assert_eq!(rows_of(&ledger, "cells").into_values().collect::<Vec<_>>(), expected.iter().collect::<Vec<_>>());
    let expected = [
        json!({ "kind": "k", "model": "m", "input": 22, "output": 1, "cache_read": 2, "cache_creation": 0 }),
        json!({ "kind": "k", "model": "n", "input": 0, "output": 3, "cache_read": 0, "cache_creation": 0 }),
        json!({ "kind": "k", "model": "o", "input": 0, "output": 1, "cache_read": 0, "cache_creation": 0 }),
    ];
    assert_eq!(rows_of(&ledger, "tokens").into_values().collect::<Vec<_>>(), expected.iter().collect::<Vec<_>>());
    assert_same_counters(&before, &place.metrics(NOW, &NONE), "");

    // What comes later comes after what was there, whether it goes or stays.
    place.append(line(RECENT, "b", "new", "") + &line(OLD, "last", "k", r#","spend":{"model":"l"}"#));
    place.compact(NOW, &NONE);
    let (ledger, _) = place.split();
    let totals = &ledger["payload"]["totals"];
    assert_eq!(totals["roles"], json!(["z", "b", "a", "c", "y", "last"]));
    assert_eq!(totals["kinds"], json!(["q", "k", "new"]));
    assert_eq!(totals["models"], json!(["m", "o", "n", "p", "l"]));
    let generations = ledger["payload"]["generations"].as_object().unwrap();
    assert_eq!(generations.keys().collect::<Vec<_>>(), ["9"], "the drained generation 8 is dropped");
}

/// A run that removes nothing has no reason to tidy up ledger lines; the next one that does merges them.
#[test]
fn several_ledgers_alone_are_no_reason_to_rewrite_the_queue() {
    let env = TestEnv::new();
    let place = Place::new(&env, "queue", ledger("{}", "{}") + &recent("a") + &ledger("{}", "{}"));
    let before = place.state();
    assert_eq!(place.compact(NOW, &NONE)["ledger_lines"], 2);
    assert_unchanged(&before, &place.state(), "");
}

#[test]
fn a_ledger_is_read_whatever_the_longest_line_is() {
    let env = TestEnv::new();
    let before = ledger(r#"{"cells":[{"role":"r","kind":"k","records":41,"done":41}],"reclaimed_bytes":5}"#, "{}");
    let place = Place::new(&env, "queue", old("a") + &before + &recent("b") + &old("c") + "too long\n");
    let plan = place.compact(NOW, &["--max-line", "7"]);
    assert_eq!((&plan["replaced"], &plan["ledger_lines"]), (&json!(false), &json!(1)));
    assert_eq!(plan["kept"]["reasons"]["too_long"], 4);
    let limit = old("a").len().to_string();
    assert!(before.len() > old("a").len());
    let plan = place.compact(NOW, &["--max-line", &limit]);
    assert_eq!(plan["totals"]["removed_records"], 43);
    let (after, _) = place.split();
    assert!(after.to_string().len() > old("a").len());
    // Its own ledger as well.
    let plan = place.compact(NOW, &["--max-line", "7"]);
    assert_eq!((&plan["ledger_lines"], &plan["totals"]["removed_records"]), (&json!(1), &json!(43)));
}

#[test]
fn no_more_names_are_remembered_than_metrics_have_room_for() {
    let env = TestEnv::new();
    let mut queue = String::new();
    for n in 0..60 {
        let ts = if n % 2 == 0 { OLD } else { RECENT };
        queue += &record("x", ts, "done").replace("researcher", &format!("role-{n}"));
    }
    let place = Place::new(&env, "queue", &queue);
    for _ in 0..2 {
        place.compact(NOW, &NONE);
        place.append(old("x"));
    }
    let roles = (0..50).map(|n| format!("role-{n}")).collect::<Vec<_>>();
    assert_eq!(place.split().0["payload"]["totals"]["roles"], json!(roles));
}

/// Whoever can write a file name or a line can make the highest number there is.
#[test]
fn the_highest_number_of_a_generation_stops_no_run_with_a_crash() {
    let env = TestEnv::new();
    let highest = u64::MAX.to_string();
    let listed = Place::new(&env, "listed", ledger("{}", &format!("{{\"{highest}\":0}}")) + &old("a") + &recent("b"));
    let on_disk = Place::new(&env, "on-disk", old("a") + &recent("b"));
    fs::write(on_disk.path(&format!("queue.gen.{highest}")), "strange\n").unwrap();
    for place in [listed, on_disk] {
        let before = place.state();
        let run = place.run(NOW, &NONE);
        assert!(matches!(run.code, Some(0 | 65 | 74)), "{}: {:?} {}", place.name, run.code, run.stderr);
        let after = place.state();
        if run.code == Some(0) {
            assert_bytes(&place.split().1, recent("b").as_bytes(), &place.name);
        } else {
            assert_unchanged(&before, &after, &place.name);
        }
    }
}

// What the README tells operators to do.

/// The script of the README that brings done records back from a generation.
fn undo(env: &TestEnv, before: &str, queue: &str) {
    let block = readme_block("**Undo.**", "```console\n");
    let (_, script) = block.split_once("<<'END'\n").expect("the README has a script");
    let (script, _) = script.split_once("\nEND\n").expect("the script has an end");
    let run = run(env.command(python()).args(["-c", script, before, queue]));
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
}

fn counters_of(env: &TestEnv) -> Vec<String> {
    let run = run(&mut env.to_stdout());
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let text = String::from_utf8(run.stdout).unwrap();
    let is_counter = |line: &&str| {
        !line.starts_with('#')
            && ["_total", "_bucket", "_sum", "_count"]
                .iter()
                .any(|end| line.split(['{', ' ']).next().unwrap().ends_with(end))
    };
    text.lines().filter(is_counter).map(str::to_owned).collect()
}

#[test]
fn a_damaged_ledger_is_mended_as_the_readme_says() {
    let env = TestEnv::new();
    env.write("queue.jsonl", fs::read(in_tests("data/week/queue.jsonl")).unwrap());
    let before = counters_of(&env);
    for older_than in ["5d", "3d"] {
        assert_eq!(run(env.compact().args(["--older-than", older_than])).code, Some(0));
    }
    let queue = fs::read(env.path("queue.jsonl")).unwrap();
    let line_1 = queue.iter().position(|byte| *byte == b'\n').unwrap();
    env.write("queue.jsonl", [&queue[..300], &queue[line_1..]].concat());
    assert_eq!(run(&mut env.compact()).code, Some(65));
    assert_ne!(counters_of(&env), before);

    let generation = fs::read(env.path("queue.gen.2")).unwrap();
    let ledger = generation.iter().position(|byte| *byte == b'\n').unwrap();
    env.write("queue.jsonl", [&generation[..ledger], &queue[line_1..]].concat());
    undo(&env, "queue.gen.2", "queue.jsonl");
    fs::remove_file(env.path("queue.gen.2")).unwrap();
    assert_eq!(counters_of(&env), before);
    assert_eq!(run(env.compact().args(["--older-than", "3d"])).code, Some(0));
    assert_eq!(counters_of(&env), before);
}
