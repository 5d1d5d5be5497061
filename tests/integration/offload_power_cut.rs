//! The power cut during an offload: no line that is on the disk then refers to a blob that is not, whole and under its name.
//!
//! The queue and its store lie on a disk of their own (disk.rs). Offload is stopped after each of its system calls that changes files, and a
//! copy of the disk as it is then, which is what a power cut would leave, is looked at.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, FileTimes};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use crate::disk::{Beside, Disk, FileSystem, Mounted, Stopped, Threads, append};
use crate::holdings::held_in;
use crate::offloaded::{Oversized, entries, is_temporary};
use crate::strace::traced;
use crate::test_env::{TestEnv, names_in, run, shortened, tell};

/// A writer's last words.
const TORN: &str = r#"{"id":"never completed"#;

/// Values enough for several threads.
const MANY: usize = 60;

/// What the lines on a disk are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    /// None has been changed that was not before.
    Old,
    /// All are as they should become.
    New,
}

/// A queue and its store on a disk, and what must be there whenever the power fails.
struct Scene {
    disk: Disk,
    file_system: FileSystem,
    /// Lines of two sorts, so that there are more of them. The first knows the blobs of both.
    oversized: [Oversized; 2],
    /// The lines that are not yet as they should become: as they were, and as they become.
    changing: Vec<(String, String)>,
    /// Those of them that the present run judges.
    judged: BTreeSet<String>,
    /// All other lines.
    others: Vec<String>,
    old: usize,
    new: usize,
    bad: Vec<String>,
    env: TestEnv,
}

impl Scene {
    fn new(file_system: FileSystem, beside: Beside) -> Self {
        let env = TestEnv::new();
        // Runs after a power cut know nothing of the one that was cut off.
        fs::create_dir(env.path("textfile-after")).unwrap();
        let mut oversized = ["first", "second"].map(|seed| Oversized::with_many(&env, seed, MANY));
        let of_second = oversized[1].blobs.clone();
        oversized[0].blobs.extend(of_second);
        let scene = Self {
            disk: Disk::new(&env, file_system, beside),
            file_system,
            oversized,
            changing: Vec::new(),
            judged: BTreeSet::new(),
            others: Vec::new(),
            old: 0,
            new: 0,
            bad: Vec::new(),
            env,
        };
        fs::write(scene.queue(), "").unwrap();
        scene
    }

    fn queue(&self) -> PathBuf {
        self.disk.directory().join("queue.jsonl")
    }

    fn lines(&self) -> BTreeSet<String> {
        fs::read_to_string(self.queue()).unwrap().lines().map(str::to_owned).collect()
    }

    fn writer(&self) -> File {
        File::options().append(true).open(self.queue()).unwrap()
    }

    /// Puts lines of one of the two sorts to where the writer writes.
    fn put(&mut self, writer: &mut File, sort: usize, names: &[&str]) {
        for name in names {
            let (old, new) = (self.oversized[sort].old(name), self.oversized[sort].new_of(name));
            append(writer, &format!("{old}\n"));
            if old == new {
                self.others.push(old.to_owned());
            } else {
                self.changing.push((old.to_owned(), new.to_owned()));
            }
        }
    }

    /// Lays a blob into the store that nothing refers to, and that has been there for long.
    fn lay_orphan(&self) {
        let (store, name) = (self.disk.directory().join("blob"), self.oversized[0].other("old-orphan"));
        self.oversized[0].lay(&store, &name);
        let blob = File::options().write(true).open(store.join(&name[..2]).join(name)).unwrap();
        let time = SystemTime::now() - Duration::from_secs(100 * 24 * 60 * 60);
        blob.set_times(FileTimes::new().set_modified(time)).unwrap();
    }

    /// Offload of a queue. Its metrics go elsewhere: they are no part of what must survive.
    fn offload(&self, directory: &Path, metrics: &str) -> Command {
        let mut offload = self.env.bare_offload();
        offload.arg("--queue").arg(directory.join("queue.jsonl")).args(["--textfile-dir", metrics]);
        offload
    }

    /// Starts offload, and kills it before a call.
    fn offload_killed_before(&self, name: &str, number: usize) {
        let offload = self.offload(&self.disk.directory(), "textfile");
        let kill = format!("inject={name}:signal=KILL:when={number}");
        let (killed, _) = traced(&self.env, &offload, &["-e", &kill]);
        assert_eq!(killed.signal, Some(9), "{}", killed.stderr);
    }

    /// Runs offload and cuts the power after each of its calls that changes something, and after its end.
    fn offload_with_cuts(&mut self, threads: Threads) {
        let lines = self.lines();
        self.judged = self.changing.iter().map(|(old, _)| old.clone()).filter(|old| lines.contains(old)).collect();
        let offload = self.offload(&self.disk.directory(), "textfile");
        let mut offload = Stopped::start(&self.env, &offload, threads);
        let mut number = 0;
        while let Some(call) = offload.go_on_until_it_changes_something(&self.env) {
            number += 1;
            self.disk.let_the_kernel_write(&call);
            self.cut(&format!("after call {number}, {call}"), None);
        }
        // What it says it has done is done, and stays so.
        self.cut("after its end", Some(State::New));
        let (changed, late) =
            std::mem::take(&mut self.changing).into_iter().partition(|(old, _)| self.judged.contains(old));
        self.changing = late;
        let changed: Vec<(String, String)> = changed;
        self.others.extend(changed.into_iter().map(|(_, new)| new));
    }

    /// Looks at a copy of the disk, unless that is as it was at the last cut.
    fn cut(&mut self, moment: &str, expected: Option<State>) {
        let Some(copy) = self.disk.copy(&self.env, expected.is_some()) else { return };
        let result = self.look_at(&copy);
        fs::remove_file(&copy).unwrap();
        match result {
            Ok(state) if expected.is_some_and(|expected| expected != state) => {
                self.bad.push(format!("{moment}: {state:?} instead of {expected:?}"));
            }
            Ok(State::Old) => self.old += 1,
            Ok(State::New) => self.new += 1,
            Err(problem) => self.bad.push(format!("{moment}: {problem}")),
        }
    }

    /// Judges what is on a disk after a power cut, and lets offload run again there.
    fn look_at(&self, image: &Path) -> Result<State, String> {
        let mounted = Mounted::new(image.to_owned(), self.env.path("after"), self.file_system)?;
        let directory = mounted.queue_directory();
        let state = self.judge(&directory)?;
        if self.file_system == FileSystem::NoJournal {
            // It would have to be repaired before anything is written to it.
            return Ok(state);
        }
        for _ in 0..2 {
            let run = run(&mut self.offload(&directory, "textfile-after"));
            if run.code != Some(0) {
                return Err(format!("the next run: {:?}: {}", run.code, run.stderr));
            }
            let state = self.judge(&directory).map_err(|problem| format!("after the next run: {problem}"))?;
            if state != State::New {
                return Err(format!("after the next run: {state:?}"));
            }
        }
        let store = entries(&directory.join("blob"));
        let left =
            store.iter().map(|entry| entry.name.clone()).chain(names_in(&directory)).find(|name| is_temporary(name));
        left.map_or(Ok(state), |left| Err(format!("after two more runs there is {left}")))
    }

    /// Judges what is on a disk: each line must be there once, as it was or as it should become, those that this run judges all alike, and
    /// each reference must lead to its blob.
    fn judge(&self, directory: &Path) -> Result<State, String> {
        let held = held_in(directory)?;
        let mut times: BTreeMap<&[u8], usize> = BTreeMap::new();
        for line in &held {
            *times.entry(line).or_default() += 1;
        }
        let mut take = |line: &str| times.remove(line.as_bytes()).unwrap_or(0);
        let mut states = BTreeSet::new();
        for (old, new) in &self.changing {
            match (take(old), take(new)) {
                (1, 0) if self.judged.contains(old) => drop(states.insert(State::Old)),
                (0, 1) if self.judged.contains(old) => drop(states.insert(State::New)),
                (1, 0) | (0, 1) => {}
                (as_old, as_new) => {
                    let line = shortened(old);
                    return Err(format!("{as_old} times as it was and {as_new} times as it becomes: {line}"));
                }
            }
        }
        for line in &self.others {
            let times = take(line);
            if times != 1 {
                return Err(format!("{times} times: {}", shortened(line)));
            }
        }
        if let Some((foreign, _)) = times.pop_first() {
            return Err(format!("nobody has put {}", shortened(&String::from_utf8_lossy(foreign))));
        }
        self.oversized[0].check_references(directory)?;
        match states.into_iter().collect::<Vec<_>>()[..] {
            [state] => Ok(state),
            [] => Ok(State::New),
            _ => Err("some lines are changed, others that were judged with them are not".to_owned()),
        }
    }
}

/// The life of a queue, with cuts at every moment of its offloads.
fn live_with_cuts(file_system: FileSystem, beside: Beside) -> Scene {
    let mut scene = Scene::new(file_system, beside);

    // The first offload makes the store. A writer has the queue open since before.
    let mut writer = scene.writer();
    scene.put(&mut writer, 0, &["small", "one", "in-doubt", "duplicates", "in-part"]);
    scene.disk.settle();
    scene.offload_with_cuts(Threads::One);

    // Late lines, one of which its writer never completes, and a run before that was killed when it had renamed a blob of several, but
    // flushed no directory.
    scene.put(&mut writer, 1, &["one"]);
    append(&mut writer, TORN);
    scene.others.push(TORN.to_owned());
    drop(writer);
    let mut writer = scene.writer();
    scene.put(&mut writer, 1, &["in-part", "result", "small"]);
    drop(writer);
    scene.disk.settle();
    scene.offload_killed_before("renameat", 2);
    scene.offload_with_cuts(Threads::One);

    // A value of which there is the blob already, and a blob that is to be removed.
    let mut writer = scene.writer();
    scene.put(&mut writer, 0, &["late-too"]);
    drop(writer);
    scene.lay_orphan();
    scene.disk.settle();
    scene.offload_with_cuts(Threads::One);
    assert_eq!(scene.changing, Vec::new(), "lines that no run has changed");
    scene
}

/// Asserts that every cut left a good disk, and that there were so many cuts before and after the commit at least.
fn assert_good(scene: &Scene, least: usize) {
    let Scene { disk, old, new, bad, .. } = scene;
    let cuts = disk.cuts;
    assert!(bad.is_empty(), "{} of {cuts} power cuts left a bad disk:\n{}", bad.len(), bad.join("\n"));
    tell(&format!("{cuts} power cuts: {old} left the old lines, {new} the new ones"));
    assert!(*old >= least && *new >= least, "{old} cuts left the old lines and {new} the new ones");
}

fn assert_all_good(scene: &Scene) {
    assert_good(scene, 5);
}

#[test]
fn no_line_is_ahead_of_its_blob_with_nothing_on_the_disk_but_what_was_flushed() {
    assert_all_good(&live_with_cuts(FileSystem::Journal, Beside::Nothing));
}

#[test]
fn no_line_is_ahead_of_its_blob_without_a_journal_that_flushes_more_than_is_asked_for() {
    assert_all_good(&live_with_cuts(FileSystem::NoJournal, Beside::Nothing));
}

#[test]
fn no_line_is_ahead_of_its_blob_with_the_journal_ahead_of_the_data() {
    assert_all_good(&live_with_cuts(FileSystem::Journal, Beside::Journal));
}

#[test]
fn no_line_is_ahead_of_its_blob_as_the_kernel_writes_its_journal_in_time() {
    assert_all_good(&live_with_cuts(FileSystem::Journal, Beside::JournalInTime));
}

#[test]
fn no_line_is_ahead_of_its_blob_with_everything_on_the_disk() {
    assert_all_good(&live_with_cuts(FileSystem::Journal, Beside::Everything));
}

#[test]
fn no_line_is_ahead_of_its_blob_whichever_thread_puts_it() {
    // Without a journal more has to be flushed, so that alone would do.
    let file_systems = [FileSystem::NoJournal, FileSystem::Journal];
    let is_long = std::env::var_os("LONG").is_some();
    for file_system in file_systems.into_iter().take(if is_long { 2 } else { 1 }) {
        let mut scene = Scene::new(file_system, Beside::Nothing);
        let numbers: Vec<String> = (0..MANY).map(|number| number.to_string()).collect();
        let mut writer = scene.writer();
        scene.put(&mut writer, 0, &numbers.iter().map(String::as_str).collect::<Vec<_>>());
        drop(writer);
        scene.disk.settle();
        scene.offload_with_cuts(Threads::Many);
        assert_good(&scene, 2);
        assert!(scene.old > 20, "only {} cuts while blobs were put", scene.old);
    }
}
