//! The power cut during a compaction: what is on the disk then is the old queue or the new one, whole.
//!
//! The queue lies on a disk of its own (disk.rs). Compaction is stopped after each of its system calls that changes files, and a copy of the
//! disk as it is then, which is what a power cut would leave, is looked at.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{XattrFlags, getxattr, setxattr};
use serde_json::Value;

use crate::disk::{Beside, Disk, FileSystem, Mounted, Stopped, Threads, append};
use crate::exposition::{Samples, differences};
use crate::test_env::{NOW, TestEnv, counters, mode, names_in, run, shortened, tell};

/// The queue and what belongs to it, as they lie on a disk.
struct Found {
    /// Whole lines, late ones included, in their order. No ledger.
    lines: Vec<String>,
    /// Unterminated bytes in earlier generations.
    tails: Vec<String>,
}

/// What the lines on the disk are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Old,
    New,
}

/// A queue on a disk, and what must be there whenever the power fails.
struct Scene {
    disk: Disk,
    /// All lines that are in the queue or have reached an earlier generation, and are on the disk.
    lines: Vec<String>,
    /// What a dead writer has left in an earlier generation.
    tail: Option<String>,
    /// All lines that there ever were, and what they amount to.
    all: Vec<String>,
    totals: Samples,
    old: usize,
    new: usize,
    bad: Vec<String>,
    env: TestEnv,
}

const OWNER: (u32, u32) = (1234, 4321);
const MODE: u32 = 0o640;
const ATTRIBUTE: (&str, &[u8]) = ("user.purpose", b"handoff");

/// A line that compaction removes. Each adds other amounts to the totals.
fn removable(number: u32) -> String {
    format!(
        r#"{{"id":"r{number}","ts":{},"kind":"classify","from":"triage","to":"researcher","payload":{{}},"status":"done","started_ts":{},"finished_ts":{},"spend":[{{"model":"m-1","cost_usd":0.{number:04},"input_tokens":{number}}}]}}"#,
        1_764_400_000 + number,
        1_764_400_007 + number * 3,
        1_764_400_107 + number * 5,
    )
}

/// A line that stays.
fn kept(number: u32) -> String {
    let long = "x".repeat(20_000);
    let (status, more) = match number % 6 {
        0 => ("done", r#","nacks":2"#),
        1 => ("nack", ""),
        2 => ("queued", r#","unknown":[1,{"a":null}]"#),
        3 => return format!(r#"{{"torn":"k{number}"#),
        4 => ("running", &*format!(r#","payload":{{"long":"{long}"}}"#)),
        _ => ("human", r#","started_ts":1764400100"#),
    };
    format!(
        r#"{{"id":"k{number}","ts":1764400000,"kind":"draft_reply","from":"triage","to":"patcher","payload":{{}},"status":"{status}"{more}}}"#
    )
}

fn is_removable(line: &str) -> bool {
    line.starts_with(r#"{"id":"r"#)
}

fn sorted<'a>(lines: impl IntoIterator<Item = &'a String>) -> Vec<&'a String> {
    let mut lines: Vec<_> = lines.into_iter().collect();
    lines.sort();
    lines
}

impl Scene {
    fn new(beside: Beside) -> Self {
        let env = TestEnv::new();
        // Runs after a power cut know nothing of the one that was cut off.
        fs::create_dir(env.path("textfile-after")).unwrap();
        let scene = Self {
            disk: Disk::new(&env, FileSystem::Journal, beside),
            lines: Vec::new(),
            tail: None,
            all: Vec::new(),
            totals: Samples::new(),
            old: 0,
            new: 0,
            bad: Vec::new(),
            env,
        };
        let queue = scene.queue();
        fs::write(&queue, "").unwrap();
        fs::set_permissions(&queue, fs::Permissions::from_mode(MODE)).unwrap();
        chown(&queue, Some(OWNER.0), Some(OWNER.1)).unwrap();
        setxattr(&queue, ATTRIBUTE.0, ATTRIBUTE.1, XattrFlags::empty()).unwrap();
        scene
    }

    fn queue(&self) -> PathBuf {
        self.disk.directory().join("queue.jsonl")
    }

    fn writer(&self) -> File {
        File::options().append(true).open(self.queue()).unwrap()
    }

    /// Puts lines to where the writer writes.
    fn put(&mut self, writer: &mut File, lines: &[String]) {
        append(writer, &(lines.join("\n") + "\n"));
        self.lines.extend_from_slice(lines);
        self.all.extend_from_slice(lines);
        self.env.write("reference.jsonl", self.all.join("\n") + "\n");
        let exported = run(self.env.bare_exporter().args(["--stdout", "--now", NOW, "--queue", "reference.jsonl"]));
        self.totals = counters(exported.samples());
        assert!(self.totals.len() > 20, "{:?}", self.totals);
    }

    /// Compaction of a queue. Its metrics go elsewhere: they are no part of what must survive.
    fn compact(&self, directory: &Path, metrics: &str) -> Command {
        let mut compact = self.env.bare_compact();
        compact.arg("--queue").arg(directory.join("queue.jsonl")).args(["--textfile-dir", metrics, "--now", NOW]);
        compact
    }

    /// Runs compaction and cuts the power after each of its calls that changes something, and after its end. A writer who has had the queue
    /// open since before puts a line after each of some calls, given in their order.
    fn compact_with_cuts(&mut self, writer: Option<(&mut File, &[&str])>) {
        let queue = fs::read_to_string(self.queue()).unwrap();
        let go: BTreeSet<String> = queue.lines().filter(|line| is_removable(line)).map(str::to_owned).collect();
        let (mut writer, mut moments) = writer.map_or((None, &[][..]), |(writer, moments)| (Some(writer), moments));
        let compact = self.compact(&self.disk.directory(), "textfile");
        let mut compaction = Stopped::start(&self.env, &compact, Threads::One);
        let mut number = 0;
        while let Some(call) = compaction.go_on_until_it_changes_something(&self.env) {
            number += 1;
            if let (Some(writer), Some((moment, later))) = (&mut writer, moments.split_first())
                && call.starts_with(moment)
                && call.contains("queue.jsonl")
            {
                moments = later;
                let number = u32::try_from(self.all.len()).unwrap();
                self.put(writer, &[kept(number)]);
            }
            self.disk.let_the_kernel_write(&call);
            self.cut(&format!("after call {number}, {call}"), &go, None);
        }
        assert!(moments.is_empty(), "there was no {moments:?}");
        // What it says it has done is done, and stays so.
        self.cut("after its end", &go, Some(State::New));
        self.lines.retain(|line| !go.contains(line));
        self.lines.extend(self.tail.take());
    }

    /// Looks at a copy of the disk, unless that is as it was at the last cut.
    fn cut(&mut self, moment: &str, go: &BTreeSet<String>, expected: Option<State>) {
        let Some(copy) = self.disk.copy(&self.env, expected.is_some()) else { return };
        let result = self.look_at(&copy, go).and_then(|state| match expected {
            Some(expected) if expected != state => Err(format!("{state:?} instead of {expected:?}")),
            _ => Ok(state),
        });
        fs::remove_file(&copy).unwrap();
        match result {
            Ok(State::Old) => self.old += 1,
            Ok(State::New) => self.new += 1,
            Err(problem) => self.bad.push(format!("{moment}: {problem}")),
        }
    }

    /// Judges what is on a disk after a power cut, and lets compaction run again there.
    fn look_at(&self, image: &Path, go: &BTreeSet<String>) -> Result<State, String> {
        let mounted = Mounted::new(image.to_owned(), self.env.path("after"), FileSystem::Journal)?;
        let directory = mounted.queue_directory();
        let found = find(&directory)?;
        let new: Vec<&String> = self.lines.iter().filter(|line| !go.contains(*line)).chain(&self.tail).collect();
        let state = if sorted(&found.lines) == sorted(new.iter().copied()) && found.tails.is_empty() {
            State::New
        } else if sorted(&found.lines) == sorted(&self.lines)
            && found.tails == self.tail.iter().cloned().collect::<Vec<_>>()
        {
            State::Old
        } else {
            return Err(format!("neither the old lines nor the new, but {}", self.describe(&found)));
        };
        self.check_totals(&directory)?;

        // Whoever comes next completes the work: nothing is left but the queue and its lock.
        let mut names = Vec::new();
        for _ in 0..4 {
            let compacted = run(&mut self.compact(&directory, "textfile-after"));
            if compacted.code != Some(0) {
                return Err(format!("the next run: {:?}: {}", compacted.code, compacted.stderr));
            }
            self.check_totals(&directory)?;
            names = names_in(&directory);
            if names == ["queue.jsonl", "queue.lock"] {
                break;
            }
        }
        if names != ["queue.jsonl", "queue.lock"] {
            return Err(format!("after four more runs there are {names:?}"));
        }
        let settled = find(&directory)?;
        let expected = self.lines.iter().filter(|line| !is_removable(line)).chain(&self.tail);
        if sorted(&settled.lines) != sorted(expected) || !settled.tails.is_empty() {
            return Err(format!("after the next runs {}", self.describe(&settled)));
        }
        Ok(state)
    }

    fn check_totals(&self, directory: &Path) -> Result<(), String> {
        let mut exporter = self.env.bare_exporter();
        let run = run(exporter.args(["--stdout", "--now", NOW, "--queue"]).arg(directory.join("queue.jsonl")));
        if run.code != Some(0) {
            return Err(format!("the exporter: {:?}: {}", run.code, run.stderr));
        }
        let differences = differences(&counters(run.samples()), &self.totals);
        if differences.is_empty() { Ok(()) } else { Err(format!("the totals: {differences:?}")) }
    }

    fn describe(&self, found: &Found) -> String {
        let lines: BTreeSet<&String> = found.lines.iter().collect();
        let missing: Vec<_> =
            self.lines.iter().filter(|line| !lines.contains(line)).map(|line| shortened(line)).collect();
        let foreign: Vec<_> =
            found.lines.iter().filter(|line| !self.all.contains(line)).map(|line| shortened(line)).collect();
        format!(
            "{} lines ({} different), tails {:?}; missing of what was there: {missing:?}; foreign: {foreign:?}",
            found.lines.len(),
            lines.len(),
            found.tails
        )
    }
}

/// Reads a queue and its generations as src/FORMAT.md has them.
fn find(directory: &Path) -> Result<Found, String> {
    let path = directory.join("queue.jsonl");
    let read = |path: &Path| fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()));
    let text = read(&path)?;
    if !text.ends_with('\n') {
        return Err(format!("the queue ends in the middle of a line, after {} bytes", text.len()));
    }
    let metadata = fs::metadata(&path).unwrap();
    let mut value = [0; 100];
    let size = getxattr(&path, ATTRIBUTE.0, &mut value).map_err(|error| format!("no attribute: {error}"))?;
    if (metadata.uid(), metadata.gid()) != OWNER || mode(&path) != MODE || &value[..size] != ATTRIBUTE.1 {
        return Err(format!("other attributes: {metadata:?}"));
    }
    let is_ledger = |line: &&str| line.starts_with(r#"{"id":"ledger""#);
    let ledgers: Vec<&str> = text.lines().filter(is_ledger).collect();
    if ledgers.len() > 1 {
        return Err(format!("{} ledgers", ledgers.len()));
    }
    let ledger = ledgers.first().map(|line| serde_json::from_str::<Value>(line));
    let ledger = ledger.transpose().map_err(|error| format!("the ledger: {error}"))?.unwrap_or_default();
    let mut found =
        Found { lines: text.lines().filter(|line| !is_ledger(line)).map(str::to_owned).collect(), tails: Vec::new() };
    for name in names_in(directory) {
        let Some(number) = name.strip_prefix("queue.gen.") else { continue };
        let path = directory.join(&name);
        if fs::metadata(&path).unwrap().ino() == metadata.ino() {
            continue;
        }
        let Some(offset) = ledger["payload"]["generations"][number].as_u64() else {
            return Err(format!("{name} is not in the ledger"));
        };
        let text = read(&path)?;
        let late = text.get(usize::try_from(offset).unwrap()..).ok_or(format!("{name} is shorter than its offset"))?;
        let (whole, tail) = late.split_at(late.rfind('\n').map_or(0, |end| end + 1));
        found.lines.extend(whole.lines().map(str::to_owned));
        found.tails.extend((!tail.is_empty()).then(|| tail.to_owned()));
    }
    Ok(found)
}

/// The life of a queue, with cuts at every moment of its compactions.
fn live_with_cuts(beside: Beside) -> Scene {
    let mut scene = Scene::new(beside);
    let numbers = |numbers: std::ops::Range<u32>| numbers.flat_map(|number| [removable(number), kept(number)]);

    // The first compaction, beside a writer who has had the queue open since before and puts a line whenever that is most awkward: while
    // the new file is written, when the queue has been linked, when it has been replaced.
    let mut writer = scene.writer();
    scene.put(&mut writer, &numbers(100..112).collect::<Vec<_>>());
    scene.disk.settle();
    scene.compact_with_cuts(Some((&mut writer, &["pwrite64", "link", "rename"])));

    // Late lines, one of which may go and one that its writer never completes. A run before that was killed before its commit.
    scene.put(&mut writer, &[kept(201), removable(202), kept(200)]);
    let tail = r#"{"id":"never completed"#;
    append(&mut writer, tail);
    scene.tail = Some(tail.to_owned());
    drop(writer);
    let mut writer = scene.writer();
    scene.put(&mut writer, &numbers(300..303).collect::<Vec<_>>());
    drop(writer);
    fs::write(scene.disk.directory().join(".queue.jsonl.1.dead.tmp"), "half of a li").unwrap();
    fs::hard_link(scene.queue(), scene.disk.directory().join("queue.gen.9")).unwrap();
    scene.disk.settle();
    scene.compact_with_cuts(None);

    // Generations to be removed, and late lines that may go.
    scene.disk.settle();
    scene.compact_with_cuts(None);

    // Nothing but a generation to be removed.
    let mut writer = scene.writer();
    scene.put(&mut writer, &[kept(400)]);
    drop(writer);
    scene.disk.settle();
    scene.compact_with_cuts(None);
    assert_eq!(names_in(&scene.disk.directory()), ["queue.jsonl", "queue.lock"]);
    scene
}

/// Asserts that every cut left a good disk, and that there were cuts before and after the commit.
fn assert_all_good(scene: &Scene) {
    let Scene { disk, old, new, bad, .. } = scene;
    let cuts = disk.cuts;
    assert!(bad.is_empty(), "{} of {cuts} power cuts left a bad disk:\n{}", bad.len(), bad.join("\n"));
    tell(&format!("{cuts} power cuts: {old} left the old queue, {new} the new one"));
    assert!(*old >= 5 && *new >= 5, "{old} cuts left the old queue and {new} the new one");
}

#[test]
fn the_queue_is_whole_with_nothing_on_the_disk_but_what_it_has_flushed() {
    assert_all_good(&live_with_cuts(Beside::Nothing));
}

#[test]
fn the_queue_is_whole_with_the_journal_ahead_of_the_data() {
    assert_all_good(&live_with_cuts(Beside::Journal));
}

#[test]
fn the_queue_is_whole_as_the_kernel_writes_its_journal_in_time() {
    assert_all_good(&live_with_cuts(Beside::JournalInTime));
}

#[test]
fn the_queue_is_whole_with_everything_on_the_disk() {
    assert_all_good(&live_with_cuts(Beside::Everything));
}
