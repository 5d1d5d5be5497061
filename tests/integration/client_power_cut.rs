//! The power cut during `handoff put`, `take` and `done`: the disk then has the queue as it was or as it becomes, and as it becomes once the
//! operation has said so.
//!
//! The queue lies on a disk of its own (disk.rs). An operation is stopped after each of its system calls that changes files, and a copy of
//! the disk as it is then, which is what a power cut would leave, is looked at.
//!
//! `LONG=1` has operations go on after each cut, not only after some.

use std::fs;
use std::path::{Path, PathBuf};

use crate::client_crash::{Effects, OF_RECORDS, TORN, Verb, judge, lines};
use crate::disk::{Beside, Disk, FileSystem, Mounted, Stopped, Threads};
use crate::holdings::pieces;
use crate::strace::traced;
use crate::test_env::{NOW, TestEnv, names_in, record, run, tell};

use Verb::{Done, Nack, Put, PutLarge, Requeue, Take};

/// A queue on a disk, and what must be there whenever the power fails.
struct Scene {
    disk: Disk,
    file_system: FileSystem,
    beside: Beside,
    subjects: Vec<Verb>,
    others: Vec<Vec<u8>>,
    /// What has been done.
    effects: Effects,
    old: usize,
    new: usize,
    bad: Vec<String>,
    env: TestEnv,
}

impl Scene {
    fn new(file_system: FileSystem, beside: Beside) -> Self {
        let env = TestEnv::new();
        let disk = Disk::new(&env, file_system, beside);
        let (subjects, others, effects) = (Vec::new(), Vec::new(), Effects::new());
        Self { disk, file_system, beside, subjects, others, effects, old: 0, new: 0, bad: Vec::new(), env }
    }

    fn queue(&self) -> PathBuf {
        self.disk.directory().join("queue.jsonl")
    }

    /// Writes a queue with records for all operations, and what somebody else has begun after it.
    fn with_queue(mut self, begun: &str) -> Self {
        let stays = record("stays", "reader", "done");
        fs::write(self.queue(), lines(&OF_RECORDS) + &stays + begun).unwrap();
        self.subjects = OF_RECORDS.to_vec();
        self.others = vec![stays.trim_end().into()];
        self.others.extend((!begun.is_empty()).then(|| begun.into()));
        self
    }

    /// Starts an operation, and kills it before a call.
    fn killed_before(&mut self, verb: Verb, name: &str, number: usize) {
        self.disk.settle();
        let kill = format!("inject={name}:signal=KILL:when={number}");
        let (killed, _) = traced(&self.env, &verb.command(&self.env, &self.queue()), &["-e", &kill]);
        assert_eq!(killed.signal, Some(9), "{}", killed.stderr);
    }

    /// Runs an operation and cuts the power after each of its calls that changes something, and after its end. Another one that was killed
    /// may have taken effect on the disk by then, and must have if that is `sure`.
    fn with_cuts(&mut self, verb: Verb, killed: Option<Verb>, sure: bool) {
        let mut operation = Stopped::start(&self.env, &verb.command(&self.env, &self.queue()), Threads::One);
        let mut number = 0;
        while let Some(call) = operation.go_on_until_it_changes_something(&self.env) {
            number += 1;
            self.disk.let_the_kernel_write(&call);
            let moment = format!("{verb:?} after call {number}, {call}");
            self.cut(&moment, &[&[][..], &[verb], killed.as_slice(), &[&[verb], killed.as_slice()].concat()], false);
        }
        self.effects.insert(verb);
        self.effects.extend(killed.filter(|_| sure));
        // What it says it has done is done, and stays so.
        self.cut(&format!("{verb:?} after its end"), &[&[], killed.as_slice()], true);
        self.effects.extend(killed);
    }

    /// Looks at a copy of the disk, unless that is as it was at the last cut. Some of what is not yet done for sure may be.
    fn cut(&mut self, moment: &str, may_be: &[&[Verb]], whatever: bool) {
        let Some(copy) = self.disk.copy(&self.env, whatever) else { return };
        let result = self.look_at(&copy, may_be);
        fs::remove_file(&copy).unwrap();
        match result {
            Ok(false) => self.old += 1,
            Ok(true) => self.new += 1,
            Err(problem) => self.bad.push(format!("{moment}: {problem}")),
        }
    }

    /// Judges what is on a disk after a power cut, and does something there; whether anything is there that is not done for sure.
    fn look_at(&self, image: &Path, may_be: &[&[Verb]]) -> Result<bool, String> {
        let mounted = Mounted::new(image.to_owned(), self.env.path("after"), self.file_system)?;
        let directory = mounted.queue_directory();
        let others = self.others_and_nothing(&directory);
        let found = judge(&directory, &self.subjects, &others)?;
        let with = |more: &&[Verb]| self.effects.iter().chain(*more).copied().collect::<Effects>();
        if !may_be.iter().map(with).any(|effects| effects == found) {
            return Err(format!("{found:?} have been done, and not {:?} and perhaps one of {may_be:?}", self.effects));
        }
        // Without a journal it would have to be repaired before anything is written to it.
        let is_sample = self.disk.cuts.is_multiple_of(4) || std::env::var_os("LONG").is_some();
        if self.file_system == FileSystem::Journal && is_sample {
            self.go_on(&directory, &found, &others)?;
        }
        Ok(found != self.effects)
    }

    /// All that others have written, and what a file system that keeps nothing in order may have made of a line that was not flushed: its
    /// length, without its bytes.
    fn others_and_nothing(&self, directory: &Path) -> Vec<Vec<u8>> {
        let queue = fs::read(directory.join("queue.jsonl")).unwrap_or_default();
        let end = pieces(&queue).pop().filter(|_| !queue.ends_with(b"\n")).unwrap_or_default();
        let is_nothing = !end.is_empty() && end.iter().all(|byte| *byte == 0) && self.beside == Beside::Journal;
        self.others.iter().cloned().chain(is_nothing.then_some(end)).collect()
    }

    /// Whatever comes next works.
    fn go_on(&self, directory: &Path, found: &Effects, others: &[Vec<u8>]) -> Result<(), String> {
        let queue = directory.join("queue.jsonl");
        let mut effects = found.clone();
        for verb in [Put].iter().chain(&self.subjects) {
            let done = run(&mut verb.command(&self.env, &queue));
            if done.code != Some(0) && !found.contains(verb) {
                return Err(format!("{verb:?} after it: {:?}: {}", done.code, done.stderr));
            }
            effects.insert(*verb);
            let now = judge(directory, &self.subjects, others)?;
            if now != effects {
                return Err(format!("{verb:?} after it: {now:?} instead of {effects:?}"));
            }
        }
        for _ in 0..4 {
            let mut compact = self.env.bare_compact();
            compact.args(["-q", "--textfile-dir", "textfile", "--now", NOW, "--queue"]).arg(&queue);
            let compacted = run(&mut compact);
            if compacted.code != Some(0) {
                return Err(format!("compaction after it: {:?}: {}", compacted.code, compacted.stderr));
            }
        }
        let names: Vec<String> = names_in(directory).into_iter().filter(|name| name != "blob").collect();
        let effects_now = judge(directory, &self.subjects, others)?;
        if effects_now == effects && names == ["queue.jsonl", "queue.lock"] {
            return Ok(());
        }
        Err(format!("at last {effects_now:?} and {names:?}"))
    }

    /// Asserts that every cut left a good disk, and that there were so many before and after the operations took effect.
    fn assert_good(&self, old: usize, new: usize) {
        let (cuts, bad) = (self.disk.cuts, &self.bad);
        assert!(bad.is_empty(), "{} of {cuts} power cuts left a bad disk:\n{}", bad.len(), bad.join("\n"));
        tell(&format!("{cuts} power cuts: {} left the old queue, {} a new one", self.old, self.new));
        assert!(self.old >= old && self.new >= new, "{} old, {} new", self.old, self.new);
    }
}

/// The life of a queue, from its first record on.
fn live_with_cuts(file_system: FileSystem, beside: Beside) {
    let mut scene = Scene::new(file_system, beside);
    scene.disk.settle();
    // The first makes the queue, the second finds one.
    scene.with_cuts(Put, None, false);
    scene.disk.settle();
    scene.with_cuts(PutLarge, None, false);
    scene.assert_good(2, 0);

    let mut scene = Scene::new(file_system, beside).with_queue("");
    for verb in [Take, Done, Nack, Put, Requeue] {
        scene.disk.settle();
        scene.with_cuts(verb, None, false);
    }
    scene.assert_good(5, 2);

    let mut scene = Scene::new(file_system, beside).with_queue(TORN);
    scene.disk.settle();
    scene.with_cuts(Put, None, false);
    scene.assert_good(2, 1);
}

#[test]
fn what_was_done_is_done_with_nothing_on_the_disk_but_what_was_flushed() {
    live_with_cuts(FileSystem::Journal, Beside::Nothing);
}

#[test]
fn what_was_done_is_done_without_a_journal_that_flushes_more_than_is_asked_for() {
    live_with_cuts(FileSystem::NoJournal, Beside::Nothing);
}

#[test]
fn what_was_done_is_done_with_the_journal_ahead_of_the_data() {
    live_with_cuts(FileSystem::Journal, Beside::Journal);
}

#[test]
fn what_was_done_is_done_with_everything_on_the_disk() {
    live_with_cuts(FileSystem::Journal, Beside::Everything);
}

#[test]
fn a_record_that_is_found_instead_of_put_again_is_on_the_disk_too() {
    for file_system in [FileSystem::Journal, FileSystem::NoJournal] {
        // Killed when its line was written, but not flushed.
        let mut scene = Scene::new(file_system, Beside::Nothing).with_queue("");
        scene.killed_before(Put, "fsync", 1);
        scene.with_cuts(Put, None, false);
        scene.assert_good(0, 0);
        // Killed when the queue had its name, but its directory was not flushed.
        let mut scene = Scene::new(file_system, Beside::Nothing);
        scene.killed_before(Put, "fsync", 2);
        assert!(scene.queue().exists());
        scene.with_cuts(Put, None, false);
        scene.assert_good(0, 0);
    }
}

#[test]
fn a_line_that_is_appended_to_a_queue_whose_new_name_was_not_flushed_is_on_the_disk() {
    for file_system in [FileSystem::Journal, FileSystem::NoJournal] {
        // The one before the last call of the sort flushes the new file's directory for its second name.
        let mut scene = Scene::new(file_system, Beside::Nothing).with_queue("");
        scene.killed_before(Take, "fsync", 3);
        let effects = judge(&scene.disk.directory(), &scene.subjects, &scene.others).unwrap();
        assert_eq!(effects, Effects::from([Take]), "killed before the commit");
        scene.with_cuts(Put, Some(Take), false);
        scene.assert_good(0, 0);
    }
}
