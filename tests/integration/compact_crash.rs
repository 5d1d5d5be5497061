//! Compaction killed before each system call, and each of them failing: no record is lost or doubled, and the next run leaves no trace.
//!
//! `LONG=1` sweeps more pairs of kills.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{XattrFlags, getxattr, setxattr};
use serde_json::Value;

use crate::exposition::{Samples, differences, parse, sum, value};
use crate::holdings::{assert_same_lines, holdings, is_ledger, pieces, sorted};
use crate::kill_and_inject::Call;
use crate::strace::{self, Tally, add, changes_something, context_of, deed, fail_with, own_calls, place, stop_after};
use crate::test_env::{
    Background, Run, TestEnv, append, copy_of, in_tests, is_root, mode, names_in, python, record, run, start,
};
use crate::validator::assert_valid;

// The scene: a queue with everything in it, and everything around it that earlier runs and dead writers can leave.

/// A year before the tests' present: what was done then goes.
const OLD: u64 = 1_764_400_000;
/// An hour before it: what was done then stays.
const RECENT: u64 = 1_795_950_000;
/// The scene's queue belongs to `nobody` if root runs the tests.
const OWNER: u32 = 65534;
const MODE: u32 = 0o640;
const NOTE: &[u8] = b"an attribute";

/// A line, without its `\n`, and what should become of it.
struct Line {
    text: Vec<u8>,
    fate: Fate,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// A record that goes.
    Goes,
    /// A record that stays.
    Stays,
    /// No record, and so it stays.
    IsNoRecord,
    /// A ledger line, which is replaced by another.
    IsLedger,
}

fn line(fate: Fate, text: impl Into<Vec<u8>>) -> Line {
    Line { text: text.into(), fate }
}

/// A record with an id that no other line has.
fn envelope(fate: Fate, id: &str, ts: u64, status: &str, more: &str) -> Line {
    let text = format!(
        r#"{{"id":"{id}","ts":{ts},"kind":"classify","from":"triage","to":"researcher","payload":{{}},"status":"{status}"{more}}}"#
    );
    line(fate, text)
}

fn ledger(totals: &str, generations: &str) -> Line {
    let text = format!(
        r#"{{"id":"ledger","ts":1764400000,"kind":"ledger","from":"handoff","to":"","payload":{{"version":1,"totals":{totals},"generations":{{{generations}}}}},"status":"ledger"}}"#
    );
    line(Fate::IsLedger, text)
}

/// How many records the scene's ledger lines remember, and how many bytes.
const REMEMBERED: (usize, usize) = (5, 330);

fn lines_of_the_queue(taken_over: usize) -> Vec<Line> {
    use Fate::{Goes, IsNoRecord, Stays};
    let times = format!(r#","started_ts":{},"finished_ts":{}"#, OLD + 20, OLD + 400);
    let spend = r#","spend":[{"id":"x","model":"m-1","cost_usd":"0.0125","input_tokens":100,"output_tokens":20},{"model":"m-2","input_tokens":5}]"#;
    let first = ledger(
        r#"{"roles":["researcher"],"kinds":["classify"],"models":["m-0"],"cells":[{"role":"researcher","kind":"classify","records":3,"done":3,"queue_wait":{"buckets":[0,3,0,0,0,0,0,0,0,0,0,0,0],"sum_us":60000000},"spend_usd":"0.1","unpriced":1}],"tokens":[{"kind":"classify","model":"m-0","input":7}],"reclaimed_bytes":300}"#,
        r#""3":1,"4":7"#,
    );
    let second = ledger(
        r#"{"cells":[{"role":"patcher","kind":"draft_reply","records":2,"done":2}],"reclaimed_bytes":30}"#,
        &format!(r#""3":{taken_over}"#),
    );
    vec![
        first,
        envelope(Goes, "goes-1", OLD, "done", ""),
        envelope(Stays, "stays-queued", OLD, "queued", ""),
        envelope(Stays, "stays-running", OLD, "running", &format!(r#","started_ts":{}"#, OLD + 5)),
        envelope(Goes, "goes-2", OLD, "done", &format!("{times}{spend}")),
        line(IsNoRecord, "stays, as it is not JSON"),
        line(IsNoRecord, ""),
        envelope(Stays, "stays-nack", OLD, "nack", r#","nacks":[{"ts":1764400100,"by":"x","reason":"no"}]"#),
        envelope(Stays, "stays-human", OLD, "human", ""),
        second,
        line(IsNoRecord, " \t"),
        line(IsNoRecord, &b"\xff\xfe stays, as it is not UTF-8"[..]),
        line(IsNoRecord, &b"\0\0\0\0\0\0"[..]),
        envelope(Stays, "stays-dead", OLD, "dead", &format!(r#"{times},"spend":0.5"#)),
        envelope(Stays, "stays-nacked", OLD, "done", r#","nacks":2"#),
        line(
            Goes,
            [b"\xef\xbb\xbf", &envelope(Goes, "goes-3", OLD, "done", r#","spend":0.25"#).text[..], b"\r"].concat(),
        ),
        envelope(Stays, "stays-recent", RECENT, "done", ""),
        envelope(Stays, "stays-future", RECENT + 7_200, "done", ""),
        envelope(Stays, "stays-contradictory", RECENT, "done", &format!(r#","finished_ts":{OLD}"#)),
        line(IsNoRecord, r#"{"stays":1}{"glued":2}"#),
        line(IsNoRecord, "\r"),
        envelope(Stays, "stays-unknown", OLD, "paused", ""),
        envelope(Stays, "stays-twice", OLD, "done", r#","status":"done""#),
        envelope(Stays, "stays-nan", OLD, "done", r#","cost":NaN"#),
        envelope(Stays, "stays-time", OLD, "done", r#","finished_ts":"soon""#),
        line(IsNoRecord, r#"{"stays":"of the next version","protocol_version":3}"#),
        line(
            Goes,
            r#"{"id":"goes-4","protocol_version":2,"ts":"2025-11-29T10:00:00Z","kind":"draft_reply","from":"triage","to":"patcher","payload":{"blank":" "},"status":"done","new":[1]}"#,
        ),
    ]
}

fn late_lines() -> Vec<Line> {
    vec![
        envelope(Fate::Stays, "late-queued", RECENT, "queued", ""),
        line(Fate::IsNoRecord, "late, and not JSON"),
        // The run that takes it over doesn't judge it; the next one does.
        envelope(Fate::Goes, "late-done", OLD, "done", r#","spend":{"cost_usd":1}"#),
        envelope(Fate::Stays, "late-dead", OLD, "dead", ""),
    ]
}

/// What nobody is left to complete.
const LATE_END: &[u8] = br#"{"id":"late-torn","ts":17"#;
const END: &[u8] = br#"{"id":"torn","#;
const END_LINE: &[u8] = b"{\"id\":\"torn\",\n";

/// What the queue may hold at some time, and what is gone by then.
struct Stage {
    name: &'static str,
    is_replaced: bool,
    /// What the queue begins with, after its new ledger line if it has been replaced.
    beginning: Vec<u8>,
    /// What follows, in any order: lines come late in one order or another.
    then: Vec<Vec<u8>>,
    gone: Vec<Vec<u8>>,
}

/// The scene as a directory to be copied, and what may become of it.
struct Scene {
    env: TestEnv,
    /// What is appended to the queue while compaction is at it.
    appended: String,
    stages: Vec<Stage>,
    /// All lines, without their `\n`, and unterminated ends: all but ledger lines.
    all: Vec<Vec<u8>>,
    /// How many lines are records.
    records: usize,
    /// The counters and histograms that the exporter made of it.
    counters: Samples,
    /// What `handoff-compact` counts at the end: removed records and their bytes.
    removed: (usize, usize),
}

fn joined<'a>(lines: impl IntoIterator<Item = &'a Line>) -> Vec<u8> {
    lines.into_iter().flat_map(|line| [&line.text[..], b"\n"].concat()).collect()
}

fn staying(lines: &[Line]) -> Vec<u8> {
    joined(lines.iter().filter(|line| matches!(line.fate, Fate::Stays | Fate::IsNoRecord)))
}

fn going(lines: &[Line]) -> Vec<Vec<u8>> {
    lines.iter().filter(|line| line.fate == Fate::Goes).map(|line| line.text.clone()).collect()
}

impl Scene {
    /// The queue with an unterminated end.
    fn new() -> Self {
        Self::with(END, "")
    }

    /// The queue with a line that is appended too late for the first new file, so that the same run makes a second one.
    fn with_late_line() -> Self {
        Self::with(b"", &record("appended", "researcher", "queued"))
    }

    fn with(end: &[u8], appended: &str) -> Self {
        let taken_over = joined(&[envelope(Fate::Stays, "stays-queued", OLD, "queued", "")]);
        let (lines, late) = (lines_of_the_queue(taken_over.len()), late_lines());
        let queue = [&joined(&lines), end].concat();

        let env = TestEnv::new();
        env.write("queue.jsonl", &queue);
        // This one was taken over up to an offset, and more came after it.
        env.write("queue.gen.3", [&taken_over, &joined(&late), LATE_END].concat());
        env.write("queue.gen.4", "drained");
        // What killed runs leave.
        fs::hard_link(env.path("queue.jsonl"), env.path("queue.gen.5")).unwrap();
        env.write(".queue.jsonl.999.abc.tmp", "never completed");
        if !appended.is_empty() {
            // The first run makes the lock file, unless it has other things to show.
            env.write("queue.lock", "");
        }
        if is_root() {
            for name in ["queue.jsonl", "queue.gen.3", "queue.gen.4"] {
                chown(env.path(name), Some(OWNER), Some(OWNER)).unwrap();
            }
        }
        fs::set_permissions(env.path("queue.jsonl"), fs::Permissions::from_mode(MODE)).unwrap();
        setxattr(env.path("queue.jsonl"), "user.note", NOTE, XattrFlags::empty()).unwrap();

        let (late_end, end_line) = ([LATE_END, b"\n"].concat(), if end.is_empty() { &b""[..] } else { END_LINE });
        let gone_last = [going(&lines), going(&late)].concat();
        let removed = REMEMBERED.1 + gone_last.iter().map(|line| line.len() + 1).sum::<usize>();
        let removed = (REMEMBERED.0 + gone_last.len(), removed);
        let new = |name, then: &[&[u8]], gone| {
            let then = pieces(&then.concat());
            Stage { name, is_replaced: true, beginning: staying(&lines), then, gone }
        };
        let old = [&queue, appended.as_bytes()].concat();
        let mut stages = vec![
            Stage { name: "old", is_replaced: false, beginning: old, then: Vec::new(), gone: Vec::new() },
            // If nothing proves that nobody will complete the end of a generation, it has to wait.
            new("new but for an end", &[&joined(&late)], going(&lines)),
            new("new", &[&joined(&late), &late_end], going(&lines)),
            new("last", &[&staying(&late), &late_end, appended.as_bytes(), end_line], gone_last),
        ];
        if !appended.is_empty() {
            // The same run takes over what arrives late in the course of it.
            stages.push(new("settled", &[&joined(&late), &late_end, appended.as_bytes()], going(&lines)));
        }

        let text = |line: &Line| (line.fate != Fate::IsLedger).then(|| line.text.clone());
        let mut all: Vec<_> = lines.iter().chain(&late).filter_map(text).collect();
        all.extend([LATE_END, end, appended.as_bytes()].into_iter().flat_map(pieces));
        let is_record = |line: &&Line| matches!(line.fate, Fate::Goes | Fate::Stays);
        let records = lines.iter().chain(&late).filter(is_record).count() + appended.lines().count();

        let mut scene =
            Self { env, appended: appended.to_owned(), stages, all, records, counters: Samples::new(), removed };
        // What is appended later is counted as if it had been.
        let copy = scene.copy();
        append(&copy, "queue.jsonl", appended);
        scene.counters = counters(&copy.samples());
        let counted = sum(&scene.counters, "handoff_records_total", &[]);
        assert_eq!(count(counted), scene.records + REMEMBERED.0, "the exporter doesn't count the scene's records");
        scene
    }

    /// Another directory with the same in it.
    fn copy(&self) -> TestEnv {
        copy_of(&self.env)
    }

    /// Asserts that the queue is as it should be at one of the stages, which is returned, and that nothing is lost or there twice.
    fn assert_whole(&self, env: &TestEnv, context: &str) -> &Stage {
        let queue = fs::read(env.path("queue.jsonl")).unwrap();
        let end_of_ledger = queue.iter().position(|byte| *byte == b'\n').map_or(0, |newline| newline + 1);
        let is = |stage: &&Stage| {
            let start = if stage.is_replaced { end_of_ledger } else { 0 };
            let then = queue[start..].strip_prefix(&stage.beginning[..]);
            then.is_some_and(|then| {
                (then.is_empty() || then.ends_with(b"\n")) && sorted(pieces(then)) == sorted(stage.then.clone())
            })
        };
        let stage = self.stages.iter().find(is).unwrap_or_else(|| {
            panic!("{context}: neither the old queue nor a new one:\n{}", String::from_utf8_lossy(&queue))
        });
        let context = format!("{context}: {} queue", stage.name);
        assert_attributes(env, &context);

        let mut expected = self.all.clone();
        for gone in &stage.gone {
            let index = expected.iter().position(|line| line == gone).unwrap();
            expected.remove(index);
        }
        assert_same_lines(holdings(env, &context), expected, &context);

        let samples = env.samples();
        assert_eq!(differences(&counters(&samples), &self.counters), Vec::<String>::new(), "{context}: counters");
        let live = count(sum(&samples, "handoff_queue_records", &[]));
        assert_eq!(live, self.records - stage.gone.len(), "{context}: records");
        stage
    }

    /// Asserts that runs without disturbance bring the queue to its last stage, and leave nothing beside it.
    fn assert_settles(&self, env: &TestEnv, context: &str) {
        // One takes over what is late, one what was unterminated in the queue, and one removes the last generations.
        for number in 1..=3 {
            let run = run(env.compact().arg("-q"));
            assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{context}: run {number} after it");
        }
        let context = format!("{context}: at last");
        let stage = self.assert_whole(env, &context);
        assert_eq!(stage.name, "last", "{context}");
        assert_eq!(names_in(&env.path("")), ["queue.jsonl", "queue.lock", "textfile"], "{context}");
        assert_eq!(env.textfile_names(), ["handoff_compact.prom"], "{context}");
        let samples = compact_samples(env).unwrap();
        let value = |name| count(value(&samples, name, &[]));
        assert_eq!(value("handoff_compact_success"), 1, "{context}");
        let removed = (value("handoff_compact_removed_records_total"), value("handoff_compact_reclaimed_bytes_total"));
        assert_eq!(removed, self.removed, "{context}");
    }
}

/// What must not change, whatever moves from the queue to the ledger.
fn counters(samples: &Samples) -> Samples {
    let is_counter = |name: &str| ["_total", "_bucket", "_sum", "_count"].iter().any(|end| name.ends_with(end));
    samples
        .iter()
        .filter(|(series, _)| is_counter(&series.name))
        .map(|(series, value)| (series.clone(), *value))
        .collect()
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small counts")]
fn count(sample: f64) -> usize {
    sample.round() as usize
}

/// What the last run of compaction said of itself.
fn compact_samples(env: &TestEnv) -> Option<Samples> {
    let contents = fs::read(env.path("textfile/handoff_compact.prom")).ok()?;
    assert_valid(&contents, "handoff_compact.prom");
    Some(parse(&contents))
}

fn assert_attributes(env: &TestEnv, context: &str) {
    let queue = env.path("queue.jsonl");
    let metadata = fs::symlink_metadata(&queue).unwrap();
    if is_root() {
        assert_eq!((metadata.uid(), metadata.gid()), (OWNER, OWNER), "{context}: owner");
    }
    assert_eq!(mode(&queue), MODE, "{context}: mode");
    let mut note = [0; 64];
    let length = getxattr(&queue, "user.note", &mut note[..]).unwrap_or_else(|_| panic!("{context}: no attribute"));
    assert_eq!(&note[..length], NOTE, "{context}: attribute");
}

// Traces.

/// Compaction that says only what is wrong.
fn quiet(env: &TestEnv) -> Command {
    let mut compact = env.compact();
    compact.arg("-q");
    compact
}

/// Runs compaction under strace(1), and returns the trace too.
fn traced(env: &TestEnv, arguments: &[&str]) -> (Run, String) {
    strace::traced(env, &quiet(env), arguments)
}

/// Runs compaction under strace(1), with arguments that stop it; see [`strace::with_stops`].
fn with_stops(env: &TestEnv, arguments: &[&str], meanwhile: impl FnMut(usize)) -> (Run, String, usize) {
    strace::with_stops(env, &quiet(env), arguments, meanwhile)
}

impl Scene {
    /// Runs compaction under strace(1) with these arguments. What is to be appended to the queue is appended when the last look at
    /// the queue has been taken, and before the commit.
    fn traced(&self, env: &TestEnv, arguments: &[&str], but_not_at: &str) -> (Run, String) {
        if self.appended.is_empty() {
            return traced(env, arguments);
        }
        // The attributes are given to the new file then. One call can't both be stopped after and something else.
        let stop = if but_not_at == "fsetxattr" { stop_after("fchmod", "1") } else { stop_after("fsetxattr", "1") };
        let arguments = [&["-e", &stop], arguments].concat();
        let (run, trace, stops) = with_stops(env, &arguments, |_| append(env, "queue.jsonl", &self.appended));
        assert_eq!(stops, 1, "it was not stopped: {}", run.stderr);
        (run, trace)
    }

    /// The calls of a run, with the paths of the files that they are about, and how many of them come before anything is appended.
    fn calls(&self, env: &TestEnv) -> (Vec<Call>, usize) {
        let (run, trace) = self.traced(env, &["-y"], "");
        assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
        let calls = own_calls(&trace);
        let stop = calls.iter().position(|call| call.name == "fsetxattr").map_or(0, |stop| stop + 1);
        (calls, if self.appended.is_empty() { 0 } else { stop })
    }

    /// Kills compaction before a call, and returns what stage the queue is at.
    fn kill_before(&self, env: &TestEnv, call: &Call, context: &str) -> &'static str {
        let (killed, _) = self.traced(env, &["-e", &strace::kill_before(call)], &call.name);
        assert_eq!((killed.code, killed.signal), (None, Some(9)), "not {context}: {}", killed.stderr);
        self.assert_whole(env, context).name
    }
}

// Kills.

/// Kills compaction before each of its calls.
fn kill_everywhere(scene: &Scene) -> Tally {
    let (calls, start) = scene.calls(&scene.copy());
    let commit = calls.iter().position(|call| call.name == "renameat" && call.line.contains("queue.jsonl")).unwrap();
    let mut stages = Tally::new();
    for (index, call) in calls.iter().enumerate().skip(start) {
        let context = context_of("killed before", call);
        let env = scene.copy();
        let stage = scene.kill_before(&env, call, &context);
        assert_eq!(stage == "old", index <= commit, "{context}: {stage} queue");
        scene.assert_settles(&env, &context);
        add(&mut stages, stage);
    }
    let expected =
        ["pread64", "pwrite64", "fdatasync", "fsync", "linkat", "renameat", "fchmod", "fsetxattr", "fcntl", "statx"];
    for name in expected {
        assert!(calls.iter().any(|call| call.name == name), "the run makes no {name}");
    }
    stages
}

#[test]
fn killed_before_any_call_it_loses_and_doubles_nothing() {
    let stages = kill_everywhere(&Scene::new());
    assert!(stages["old"] > 50 && stages["new"] > 20, "{stages:?}");
}

#[test]
fn killed_while_it_takes_over_late_lines_it_loses_and_doubles_nothing() {
    let stages = kill_everywhere(&Scene::with_late_line());
    assert!(stages["old"] > 5 && stages["new"] > 50 && stages["settled"] > 20, "{stages:?}");
}

/// Kills compaction before each call that changes something, and the run after it before each that does. With `LONG`, the first is
/// killed before any call, and also while it takes over late lines. Several tests share the work.
fn kill_twice(share: usize, shares: usize) {
    let is_long = std::env::var_os("LONG").is_some();
    let scenes = [
        (Scene::new(), &["old, old", "old, new", "new, new", "new, last"][..]),
        (Scene::with_late_line(), &["old, settled", "new, new", "new, last", "settled, settled", "settled, last"][..]),
    ];
    for (scene, expected) in scenes.into_iter().take(if is_long { 2 } else { 1 }) {
        let (calls, start) = scene.calls(&scene.copy());
        let mut stages = Tally::new();
        let firsts = calls[start..].iter().filter(|call| is_long || changes_something(call));
        for first in firsts.skip(share).step_by(shares) {
            kill_again(&scene, first, &mut stages);
        }
        for expected in expected {
            assert!(stages.get(*expected).is_some_and(|times| *times > 3), "{expected}: {stages:?}");
        }
    }
}

/// Kills compaction before one call, and the run after it before each that changes something.
fn kill_again(scene: &Scene, first: &Call, stages: &mut Tally) {
    let context = context_of("killed before", first);
    let killed = scene.copy();
    let stage = scene.kill_before(&killed, first, &context);
    // What was to be appended has been.
    let (rerun, trace) = traced(&copy_of(&killed), &[]);
    assert_eq!((rerun.code, rerun.stderr.as_str()), (Some(0), ""), "{context}: the run after it");
    for second in own_calls(&trace).iter().filter(|call| changes_something(call)) {
        let context = format!("{context}; then {}", context_of("killed before", second));
        let env = copy_of(&killed);
        let (killed, _) = traced(&env, &["-e", &strace::kill_before(second)]);
        assert_eq!(killed.signal, Some(9), "not {context}: {}", killed.stderr);
        add(stages, &format!("{stage}, {}", scene.assert_whole(&env, &context).name));
        scene.assert_settles(&env, &context);
    }
}

#[test]
fn killed_once_more_in_the_next_run_it_loses_and_doubles_nothing_first_half() {
    kill_twice(0, 2);
}

#[test]
fn killed_once_more_in_the_next_run_it_loses_and_doubles_nothing_second_half() {
    kill_twice(1, 2);
}

// Failures.

/// The errors that a call is made to fail with.
fn errors_for(call: &Call) -> &'static [&'static str] {
    match call.name.as_str() {
        "openat" if call.line.contains("O_CREAT") => &["EIO", "ENOSPC", "EDQUOT", "EACCES", "EMFILE"],
        "openat" => &["EIO", "EACCES", "EMFILE"],
        "write" | "pwrite64" | "fsync" | "fdatasync" => &["EIO", "ENOSPC", "EDQUOT"],
        "linkat" | "renameat" | "renameat2" => &["EIO", "ENOSPC", "EDQUOT", "EACCES"],
        "fchown" | "fchmod" | "fsetxattr" => &["EIO", "ENOSPC", "EDQUOT", "EPERM"],
        "flock" => &["EIO", "ENOLCK"],
        "read" | "pread64" | "getdents64" => &["EIO"],
        // One that strace(1) lets fail does not take place, whereas the kernel closes a file whatever it returns.
        "close" => &[],
        _ => &["EIO", "EACCES"],
    }
}

/// Whether a run may do without a call: what dead runs left can be looked for and removed later, a generation that nothing proves
/// drained stays, whether one is a second name of the queue will show in the number of its names, and whether there is a queue when it is
/// opened.
fn can_be_done_without(call: &Call) -> bool {
    call.line.contains("queue.jsonl.999")
        || call.line.contains("queue.gen.") && call.line.contains("AT_SYMLINK_NOFOLLOW")
        || call.name == "statx" && call.line.contains(" \"queue.jsonl\"")
        || ["fcntl", "newfstatat", "getdents64"].contains(&call.name.as_str())
        || call.name == "openat" && call.line.contains("O_DIRECTORY")
}

/// Lets a call fail, and asserts that the run says so and leaves nothing behind.
fn assert_fails_well(scene: &Scene, calls: &[Call], index: usize, error: &str) -> &'static str {
    let call = &calls[index];
    let context = context_of(&format!("{error} for"), call);
    let index_of = |name: &str, file: &str| {
        let is = |call: &Call| call.name == name && call.line.contains(file);
        calls.iter().position(is).unwrap_or_else(|| panic!("no {name} of {file}"))
    };
    let env = scene.copy();
    let inode = |name: &str| fs::metadata(env.path(name)).map(|metadata| metadata.ino()).ok();
    let before = inode("queue.jsonl");
    let (run, trace) = scene.traced(&env, &["-e", &fail_with(error, call)], &call.name);
    assert!(trace.contains("(INJECTED)"), "not {context}");

    let stage = scene.assert_whole(&env, &context);
    let says_success = compact_samples(&env).map(|samples| count(value(&samples, "handoff_compact_success", &[])));
    if run.code == Some(0) {
        assert!(can_be_done_without(call), "{context}: it says that all is well");
        assert_eq!((stage.is_replaced, says_success), (true, Some(1)), "{context}");
        assert_eq!(run.stderr, "", "{context}");
    } else {
        assert_eq!(run.code, Some(74), "{context}: {}", run.stderr);
        assert_eq!(stage.is_replaced, index > index_of("renameat", "queue.jsonl"), "{context}: {}", run.stderr);
        assert_ne!(says_success, Some(1), "{context}");
        assert_says_why(&run.stderr, stage.is_replaced, &context);
        if call.name == "pwrite64" {
            assert!(run.stderr.contains("queue.jsonl: cannot be rewritten"), "{context}: {}", run.stderr);
        }
    }
    if !stage.is_replaced {
        assert_eq!(inode("queue.jsonl"), before, "{context}: the queue is another file");
    }
    // What dead runs left may still be there if it has not come to that, but nothing of this run may.
    let left = |name: &&String| match name.as_str() {
        "queue.jsonl" | "queue.lock" | "textfile" | "queue.gen.3" | "queue.gen.4" => false,
        ".queue.jsonl.999.abc.tmp" => index > index_of("unlink", "queue.jsonl.999"),
        "queue.gen.5" => !stage.is_replaced && index > index_of("unlink", "queue.gen.5"),
        "queue.gen.6" => stage.name != "settled",
        _ => true,
    };
    assert_eq!(names_in(&env.path("")).iter().find(left), None, "{context}: it is left behind");
    let mut in_textfile = env.textfile_names().into_iter();
    assert_eq!(in_textfile.find(|name| name != "handoff_compact.prom"), None, "{context}: it is left behind");
    scene.assert_settles(&env, &context);
    if run.code == Some(0) { "done without" } else { stage.name }
}

/// Asserts that there is one message with a cause, and that it says whether the queue has been replaced, as `--help` promises.
fn assert_says_why(message: &str, is_replaced: bool, context: &str) {
    let is_one_message = message.starts_with("handoff-compact: ") && message.lines().count() == 1;
    let says_why = ["(os error ", "has 2 names (hard links)"].iter().any(|cause| message.contains(cause));
    assert!(is_one_message && says_why, "{context}: {message}");
    // If there are only no metrics, then all is well with the queue.
    if !message.starts_with("handoff-compact: textfile") {
        assert_eq!(message.contains("has been replaced"), is_replaced, "{context}: {message}");
    }
}

/// Lets each call fail.
fn fail_everywhere(scene: &Scene) -> Tally {
    let (calls, start) = scene.calls(&scene.copy());
    let mut outcomes = Tally::new();
    for index in start..calls.len() {
        for error in errors_for(&calls[index]) {
            add(&mut outcomes, assert_fails_well(scene, &calls, index, error));
        }
    }
    outcomes
}

#[test]
fn whatever_fails_it_says_so_and_leaves_no_trace() {
    let outcomes = fail_everywhere(&Scene::new());
    assert!(outcomes["old"] > 100 && outcomes["new"] > 50, "{outcomes:?}");
}

#[test]
fn whatever_fails_while_it_takes_over_late_lines_it_says_so_and_leaves_no_trace() {
    let outcomes = fail_everywhere(&Scene::with_late_line());
    assert!(outcomes["old"] > 10 && outcomes["new"] > 50 && outcomes["settled"] > 20, "{outcomes:?}");
}

#[test]
fn what_cannot_even_be_cleaned_up_is_removed_by_the_next_run() {
    let scene = Scene::new();
    let (calls, _) = scene.calls(&scene.copy());
    let unlinks = calls.iter().filter(|call| call.name == "unlink").count();
    let env = scene.copy();
    let unlink = format!("inject=unlink:error=EIO:when={}+", unlinks + 1);
    let (failed, _) = traced(&env, &["-e", "inject=renameat:error=EIO:when=1", "-e", &unlink]);
    assert_eq!(failed.code, Some(74), "{}", failed.stderr);
    assert_eq!(scene.assert_whole(&env, "without cleaning up").name, "old");
    let left = names_in(&env.path(""));
    assert!(left.contains(&"queue.gen.5".to_owned()) && left[0].starts_with(".queue.jsonl."), "{left:?}");
    scene.assert_settles(&env, "without cleaning up");
}

#[test]
fn a_run_with_nothing_else_to_do_removes_what_dead_runs_left_and_nothing_more() {
    let env = TestEnv::new();
    env.write("queue.jsonl", record("stays", "researcher", "queued"));
    fs::hard_link(env.path("queue.jsonl"), env.path("queue.gen.1")).unwrap();
    env.write(".queue.jsonl.1.dead.tmp", "");
    // Somebody still writes this one, and these are not of this queue.
    let mut holder = env.command(python());
    holder.arg(in_tests("workers/hold_lock.py")).args([".queue.jsonl.2.alive.tmp", "exclusive"]);
    let (_holder, _) = Background::spawn_and_wait_for_line(&mut holder);
    let others = [".other.jsonl.1.dead.tmp", ".queue.jsonl.1.dead", "queue.jsonl.1.tmp"];
    for other in others {
        env.write(other, "");
    }
    let inode = fs::metadata(env.path("queue.jsonl")).unwrap().ino();
    compact_well(&env, "nothing to do");
    assert_eq!(fs::metadata(env.path("queue.jsonl")).unwrap().ino(), inode, "the queue has been rewritten");
    let mut left = vec![".queue.jsonl.2.alive.tmp", "queue.jsonl", "queue.lock", "textfile"];
    left.extend(others);
    left.sort_unstable();
    assert_eq!(names_in(&env.path("")), left);
}

#[test]
fn a_lock_file_that_a_dead_run_began_is_removed_though_somebody_else_has_made_it_since() {
    let env = TestEnv::new();
    env.write("queue.jsonl", record("stays", "researcher", "queued"));
    let (killed, _) = traced(&env, &["-e", "inject=renameat2:signal=KILL:when=1"]);
    assert_eq!(killed.signal, Some(9), "{}", killed.stderr);
    assert!(names_in(&env.path(""))[0].starts_with(".queue.lock."), "{:?}", names_in(&env.path("")));
    env.write("queue.lock", "");
    compact_well(&env, "with a lock file");
    assert_eq!(names_in(&env.path("")), ["queue.jsonl", "queue.lock", "textfile"]);
}

#[test]
fn whatever_a_signal_interrupts_is_tried_again() {
    let scene = Scene::new();
    let (calls, _) = scene.calls(&scene.copy());
    let mut interrupted = 0;
    let can_be = |call: &&Call| {
        let names = ["openat", "read", "pread64", "write", "pwrite64", "fsync", "fdatasync", "flock"];
        // Opening a directory never has to wait.
        names.contains(&call.name.as_str()) && !call.line.contains("O_DIRECTORY")
    };
    for call in calls.iter().filter(can_be) {
        let context = context_of("EINTR for", call);
        let env = scene.copy();
        let (run, trace) = traced(&env, &["-e", &fail_with("EINTR", call)]);
        assert!(trace.contains("(INJECTED)"), "not {context}");
        assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{context}");
        assert!(scene.assert_whole(&env, &context).is_replaced, "{context}");
        scene.assert_settles(&env, &context);
        interrupted += 1;
    }
    assert!(interrupted > 30, "only {interrupted} calls were interrupted");
}

// Writers without the lock, at chosen moments of a run.

/// A process that appends to the queue, one step at a time.
pub(crate) struct Writer {
    child: Child,
    answers: BufReader<ChildStdout>,
}

impl Writer {
    fn start(env: &TestEnv, file: &str) -> Self {
        let mut command = env.command(python());
        command.arg(in_tests("workers/writer.py")).arg(file).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = start(&mut command);
        let answers = BufReader::new(child.stdout.take().unwrap());
        Self { child, answers }
    }

    /// One that has the queue open.
    pub(crate) fn with_queue_open(env: &TestEnv) -> Self {
        let mut writer = Self::start(env, "queue.jsonl");
        writer.step("open");
        writer
    }

    fn begin(&mut self, step: &str) {
        writeln!(self.child.stdin.as_ref().unwrap(), "{step}").unwrap();
    }

    /// Waits until the step that was begun is done.
    fn wait(&mut self) {
        let mut answer = String::new();
        self.answers.read_line(&mut answer).unwrap();
        assert_eq!(answer, "done\n", "the writer has failed");
    }

    pub(crate) fn step(&mut self, step: &str) {
        self.begin(step);
        self.wait();
    }

    pub(crate) fn write(&mut self, text: &str) {
        self.step(&format!("write {}", Value::from(text)));
    }

    /// Kills it, with whatever it has begun.
    pub(crate) fn die(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // It may have been killed.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// A line of a record that goes.
fn old(id: &str) -> String {
    record(id, "researcher", "done").replace(&RECENT.to_string(), &OLD.to_string())
}

fn queued(id: &str) -> String {
    record(id, "researcher", "queued")
}

/// A queue with a record that goes and one that stays.
fn small_scene() -> TestEnv {
    let env = TestEnv::new();
    env.write("queue.lock", "");
    env.write("queue.jsonl", old("goes") + &queued("stays"));
    env
}

/// Asserts that the queue itself has just these lines, each once, and the ledger's.
fn assert_queue_has(env: &TestEnv, lines: &[&str], context: &str) {
    let queue = fs::read(env.path("queue.jsonl")).unwrap();
    assert!(queue.ends_with(b"\n"), "{context}: an unterminated line");
    let records = pieces(&queue).into_iter().filter(|line| !is_ledger(line)).collect();
    let expected = lines.iter().map(|line| line.strip_suffix('\n').unwrap_or(line).as_bytes().to_vec()).collect();
    assert_same_lines(records, expected, context);
}

fn compact_well(env: &TestEnv, context: &str) -> Run {
    let run = run(&mut env.compact());
    assert_eq!(run.code, Some(0), "{context}: {}", run.stderr);
    run
}

/// Asserts that after two more runs the queue has these lines, that nothing is left beside it, and that they are counted with those
/// `gone` before.
fn assert_arrives(env: &TestEnv, lines: &[&str], gone: usize, context: &str) {
    for _ in 0..2 {
        compact_well(env, context);
    }
    assert_queue_has(env, lines, context);
    compact_well(env, context);
    assert_queue_has(env, lines, context);
    let context = format!("{context}: at last");
    assert_eq!(names_in(&env.path("")), ["queue.jsonl", "queue.lock", "textfile"], "{context}");
    let records = sum(&env.samples(), "handoff_records_total", &[]);
    let whole = lines.iter().filter(|line| serde_json::from_str::<Value>(line).is_ok()).count();
    assert_eq!(count(records), whole + gone, "{context}: records");
}

/// The calls of a run over the small scene that a writer comes after, in their order.
const MOMENTS: [&str; 5] = [
    "pwrite64",  // the snapshot has been taken, and its lines are written
    "fdatasync", // they are on disk
    "fchmod",    // the last look at the queue has been taken, and the ledger is written
    "linkat",    // the queue is also a generation
    "renameat",  // the queue is only a generation
];

/// Runs compaction with a stop after the first call of this name.
fn with_stop_after(env: &TestEnv, name: &str, meanwhile: impl FnOnce()) -> Run {
    let mut meanwhile = Some(meanwhile);
    let (run, _, stops) = with_stops(env, &["-e", &stop_after(name, "1")], |_| meanwhile.take().unwrap()());
    assert_eq!((run.code, stops), (Some(0), 1), "after {name}: {}", run.stderr);
    run
}

#[test]
fn what_is_appended_at_any_moment_arrives_in_the_same_run() {
    let (stays, early, fresh) = (&queued("stays"), &queued("early"), &queued("fresh"));
    for moment in MOMENTS {
        let env = small_scene();
        let mut writer = Writer::with_queue_open(&env);
        with_stop_after(&env, moment, || {
            writer.write(early);
            append(&env, "queue.jsonl", fresh);
        });
        let context = format!("after {moment}");
        assert_queue_has(&env, &[stays, early, fresh], &context);
        writer.step("close");
        assert_arrives(&env, &[stays, early, fresh], 1, &context);
    }
}

#[test]
fn a_line_begun_before_the_snapshot_and_completed_at_any_moment_stays_whole() {
    let (stays, line) = (&queued("stays"), &queued("in two pieces"));
    let (beginning, end) = line.split_at(50);
    for moment in MOMENTS {
        let env = small_scene();
        let mut writer = Writer::with_queue_open(&env);
        writer.write(beginning);
        with_stop_after(&env, moment, || writer.write(end));
        let context = format!("after {moment}");
        assert_queue_has(&env, &[stays, line], &context);
        writer.step("close");
        assert_arrives(&env, &[stays, line], 1, &context);
    }
    let env = small_scene();
    let mut writer = Writer::with_queue_open(&env);
    writer.write(beginning);
    for _ in 0..3 {
        compact_well(&env, "begun");
        assert_queue_has(&env, &[stays], "begun");
    }
    writer.write(end);
    writer.step("close");
    assert_arrives(&env, &[stays, line], 1, "completed after three runs");
}

#[test]
fn writers_stopped_between_open_and_write_for_several_runs_lose_nothing() {
    let env = small_scene();
    let mut writers = Vec::new();
    for round in 0..4 {
        let context = format!("round {round}");
        writers.push(Writer::with_queue_open(&env));
        append(&env, "queue.jsonl", &old(&format!("goes-{round}")));
        let run = compact_well(&env, &context);
        // The generations before this round's have been proven in use.
        assert_eq!(run.stderr.matches("somebody has it open for writing").count(), round, "{context}: {}", run.stderr);
        // One without anything to remove.
        compact_well(&env, &context);
        let kept = names_in(&env.path("")).into_iter().filter(|name| name.starts_with("queue.gen.")).count();
        assert_eq!(kept, round + 1, "{context}: generations");
    }
    let lines: Vec<String> = (0..4).map(|number| queued(&format!("written-{number}"))).collect();
    for (writer, line) in writers.iter_mut().zip(&lines).rev() {
        writer.write(line);
    }
    let seen = sum(&env.samples(), "handoff_queue_records", &[("status", "queued")]);
    assert_eq!(count(seen), 5, "the exporter counts late lines");
    compact_well(&env, "written, but open");
    for mut writer in writers {
        writer.step("close");
    }
    let stays = queued("stays");
    let expected: Vec<&str> = lines.iter().chain([&stays]).map(String::as_str).collect();
    assert_queue_has(&env, &expected, "before they have closed it");
    assert_arrives(&env, &expected, 5, "after they have closed it");
}

#[test]
fn no_line_is_glued_to_what_a_dying_writer_leaves() {
    let (stays, line, torn) = (&queued("stays"), &queued("early"), &queued("torn")[..40]);
    for moment in MOMENTS {
        let env = small_scene();
        let mut writer = Writer::with_queue_open(&env);
        with_stop_after(&env, moment, || {
            writer.write(line);
            // After the rename this one writes into the new queue, before what is late in the old one has been taken over.
            let mut dying = Writer::with_queue_open(&env);
            dying.write(torn);
            dying.die();
        });
        let context = format!("after {moment}");
        writer.step("close");
        assert_arrives(&env, &[stays, line, torn], 1, &context);
    }
}

#[test]
fn a_last_line_that_only_lacks_its_end_becomes_one_when_its_writer_has_died() {
    let (stays, line) = (&queued("stays"), &queued("complete"));
    for moment in MOMENTS {
        let env = small_scene();
        let mut writer = Writer::with_queue_open(&env);
        with_stop_after(&env, moment, || writer.write(line.trim_end()));
        compact_well(&env, moment);
        assert_queue_has(&env, &[stays], &format!("after {moment}, while its writer lives"));
        writer.die();
        assert_arrives(&env, &[stays, line], 1, &format!("after {moment}"));
    }
}

#[test]
fn lines_that_come_late_again_and_again_end_no_run_and_are_lost_by_none() {
    let env = small_scene();
    let mut writers = vec![Writer::with_queue_open(&env)];
    let mut lines = vec![queued("stays")];
    let (run, _, stops) = with_stops(&env, &["-e", &stop_after("renameat", "1+")], |stop| {
        // All who have had the queue open since an earlier commit.
        for (number, writer) in writers.iter_mut().enumerate() {
            lines.push(queued(&format!("late-{stop}-{number}")));
            writer.write(lines.last().unwrap());
        }
        writers.push(Writer::with_queue_open(&env));
    });
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    // Five commits, and the metrics.
    assert_eq!(stops, 6, "{}", run.stderr);
    for mut writer in writers {
        writer.step("close");
    }
    let expected: Vec<&str> = lines.iter().map(String::as_str).collect();
    assert_arrives(&env, &expected, 1, "late after each commit");
}

#[test]
fn a_generation_that_somebody_opens_while_it_is_being_proven_drained_stays() {
    for removes_something in [true, false] {
        let env = small_scene();
        compact_well(&env, "the first run");
        let gone = if removes_something { 2 } else { 1 };
        if removes_something {
            append(&env, "queue.jsonl", &old("goes too"));
        }
        let inode = fs::metadata(env.path("queue.gen.1")).unwrap().ino();
        let mut writer = Writer::start(&env, "queue.gen.1");
        // The first thing to be flushed is the queue, before its drained generation goes.
        with_stop_after(&env, "fsync", || {
            assert!(env.path("queue.gen.1").exists(), "it is gone before anything is flushed");
            writer.begin("open");
            wait_until("the writer waits for the lease", || {
                let locks = fs::read_to_string("/proc/locks").unwrap();
                locks.lines().any(|line| line.contains("BREAKING") && line.contains(&format!(":{inode} ")))
            });
        });
        let context = format!("with something to remove: {removes_something}");
        assert!(env.path("queue.gen.1").exists(), "{context}: it has been removed");
        writer.wait();
        let (stays, line) = (&queued("stays"), &queued("written after all"));
        writer.write(line);
        let seen = sum(&env.samples(), "handoff_queue_records", &[]);
        assert_eq!(count(seen), 2, "{context}: the exporter doesn't count the late line");
        writer.step("close");
        assert_arrives(&env, &[stays, line], gone, &context);
    }
}

#[test]
fn what_was_made_under_a_lock_that_no_longer_counts_is_thrown_away() {
    for moment in ["pwrite64", "fdatasync", "fchmod", "linkat"] {
        let env = small_scene();
        let before = fs::read(env.path("queue.jsonl")).unwrap();
        env.write("new.lock", "");
        let (run, _, stops) = with_stops(&env, &["-e", &stop_after(moment, "1")], |_| {
            fs::rename(env.path("new.lock"), env.path("queue.lock")).unwrap();
        });
        assert_eq!((run.code, stops), (Some(75), 1), "after {moment}: {}", run.stderr);
        assert_eq!(run.stderr.lines().count(), 1, "after {moment}: {}", run.stderr);
        assert_eq!(fs::read(env.path("queue.jsonl")).unwrap(), before, "after {moment}: the queue has changed");
        assert_eq!(names_in(&env.path("")), ["queue.jsonl", "queue.lock", "textfile"], "after {moment}");
        assert_arrives(&env, &[&queued("stays")], 1, &format!("after {moment}"));
    }
}

#[test]
fn a_queue_that_somebody_puts_in_place_of_the_other_is_not_replaced_by_what_the_other_held() {
    for moment in ["pwrite64", "fdatasync", "fchmod"] {
        let env = small_scene();
        env.write("other.jsonl", queued("of the other queue"));
        let (run, _, stops) = with_stops(&env, &["-e", &stop_after(moment, "1")], |_| {
            fs::rename(env.path("other.jsonl"), env.path("queue.jsonl")).unwrap();
        });
        assert_eq!((run.code, stops), (Some(75), 1), "after {moment}: {}", run.stderr);
        assert_eq!(run.stderr.lines().count(), 1, "after {moment}: {}", run.stderr);
        assert_eq!(names_in(&env.path("")), ["queue.jsonl", "queue.lock", "textfile"], "after {moment}");
        assert_arrives(&env, &[&queued("of the other queue")], 0, &format!("after {moment}"));
    }
}

#[test]
fn a_generation_gets_a_number_above_all_in_the_ledger_and_on_disk() {
    for (listed, on_disk, expected) in [(r#""7":5"#, None, 8), (r#""7":5"#, Some(9), 10), ("", Some(3), 4)] {
        let env = TestEnv::new();
        let ledger = joined(&[ledger("{}", listed)]);
        env.write("queue.jsonl", [ledger, (old("goes") + &queued("stays")).into_bytes()].concat());
        if let Some(number) = on_disk {
            env.write(&format!("queue.gen.{number}"), "of unknown origin\n");
        }
        compact_well(&env, "the first run");
        assert!(env.path(format!("queue.gen.{expected}")).exists(), "no {expected}: {:?}", names_in(&env.path("")));
    }
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < Duration::from_secs(60), "{what}: not so after a minute");
        thread::sleep(Duration::from_millis(1));
    }
}

// The order in which things get to the disk.

/// What a run does that removes a drained generation, takes over late lines of another, and replaces the queue a second time because
/// of a line that comes late.
fn deeds() -> Vec<String> {
    let scene = Scene::with_late_line();
    let env = scene.copy();
    let directory = fs::canonicalize(env.path("")).unwrap();
    let (calls, _) = scene.calls(&env);
    calls.iter().map(|call| deed(call, directory.to_str().unwrap())).collect()
}

#[test]
fn a_new_queue_is_on_disk_before_it_has_its_name_and_the_name_before_anything_else_is_done() {
    let deeds = deeds();
    let commits: Vec<usize> = (0..deeds.len()).filter(|index| deeds[*index] == "renameat NEW queue.jsonl").collect();
    assert_eq!(commits.len(), 2, "{deeds:#?}");
    let mut start = 0;
    for commit in commits {
        let cycle = &deeds[start..commit];
        for change in ["pwrite64 NEW", "fchmod NEW", "fsetxattr NEW"] {
            place(cycle, change);
        }
        let looks = ["openat", "flock", "fstat", "fgetxattr", "flistxattr", "fdatasync", "fsync", "pread64", "fcntl"];
        let is_change =
            |deed: &String| deed.ends_with(" NEW") && !looks.contains(&deed.split([' ', '(']).next().unwrap());
        let last_change = cycle.iter().rposition(is_change).unwrap();
        let synced = last_change + place(&cycle[last_change..], "fsync NEW");
        let linked = place(cycle, "linkat queue.jsonl queue.gen.");
        assert!(synced < linked, "{cycle:#?}");
        place(&cycle[linked..], "fsync DIR");
        let next = |deed: &&String| !["close", "fcntl", "openat"].contains(&deed.split(' ').next().unwrap());
        assert_eq!(deeds[commit + 1..].iter().find(next).unwrap(), "fsync DIR", "{deeds:#?}");
        start = commit + 1;
    }
}

#[test]
fn a_generation_goes_only_after_the_proof_and_when_its_lines_are_on_disk_elsewhere() {
    let deeds = deeds();
    let removed = place(&deeds, "unlink queue.gen.4");
    let proof = place(&deeds, "fcntl(F_SETLEASE, F_RDLCK) queue.gen.4");
    let between = &deeds[proof..removed];
    place(between, "fstat queue.gen.4");
    assert!(!between.iter().any(|deed| deed.contains("F_UNLCK")), "{between:#?}");
    let flushed = place(between, "fsync queue.jsonl");
    let flushed = flushed + place(&between[flushed..], "fsync DIR");
    place(&between[flushed..], "fcntl(F_GETLEASE) queue.gen.4");

    for generation in ["queue.gen.3", "queue.gen.4"] {
        let proof = place(&deeds, &format!("fcntl(F_SETLEASE, F_RDLCK) {generation}"));
        let read = format!("pread64 {generation}");
        assert!(!deeds[..proof].contains(&read), "it is read before the proof: {deeds:#?}");
        place(&deeds[proof..], &format!("fstat {generation}"));
    }
    place(&deeds, "pread64 queue.gen.3");
}

#[test]
fn all_that_is_done_is_done_under_the_lock() {
    let deeds = deeds();
    let (locked, unlocked) = (place(&deeds, "flock(LOCK_EX) queue.lock"), place(&deeds, "close queue.lock"));
    let concerns =
        |deed: &String| ["queue.jsonl", "queue.gen.", "NEW", "fsync DIR"].iter().any(|name| deed.contains(name));
    let first = deeds.iter().position(concerns).unwrap();
    let last = deeds.iter().rposition(concerns).unwrap();
    assert!(locked < first && last < unlocked, "{deeds:#?}");
}
