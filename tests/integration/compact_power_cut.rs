//! The power cut during a compaction: what is on the disk then is the old queue or the new one, whole.
//!
//! The queue lies on an ext4 file system in a file, mounted with options that keep nothing in order for us: a rename reaches the disk
//! long before the data of the renamed file, unless that was flushed. Compaction is stopped after each of its system calls that changes
//! files. What the kernel has sent to the "disk" by then is the content of that file: a copy of it is what a power cut would
//! leave. The copy is mounted, which replays its journal, and looked at.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{XattrFlags, getxattr, setxattr, syncfs};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, waitpid};
use serde_json::Value;

use crate::exposition::{Samples, differences};
use crate::test_env::{NOW, TestEnv, counters, mode, names_in, run, shortened, start, tell, tool};

/// System calls that change files, and `openat`, which may make one. Those with a `?` are not on every processor.
const CALLS: &str = "?open,openat,?creat,write,writev,pwrite64,pwritev,fsync,fdatasync,sync_file_range,?link,linkat,?rename,?renameat,\
                     renameat2,?unlink,unlinkat,?chmod,fchmod,fchmodat,?chown,fchown,fchownat,setxattr,fsetxattr,fremovexattr,ftruncate,\
                     fallocate,copy_file_range,sendfile";
/// The journal is written a second after something has changed.
const OPTIONS: &str = "loop,noauto_da_alloc,data=writeback,commit=1";
/// No call takes this long unless something hangs.
const HANG: Duration = Duration::from_secs(60);

/// What else than what compaction itself has flushed is on the disk when the power fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beside {
    /// Nothing.
    Nothing,
    /// All metadata, because some other process has flushed a file of its own and so written the journal, which all share.
    Journal,
    /// The same, because the kernel does so after a while.
    JournalInTime,
    /// Everything, as if the power had failed much later.
    Everything,
}

/// A file system in a file, mounted; unmounted and detached at the end, whatever happens.
struct Mounted {
    image: PathBuf,
    directory: PathBuf,
}

impl Mounted {
    fn new(image: PathBuf, directory: PathBuf, options: &str) -> Result<Self, String> {
        fs::create_dir_all(&directory).unwrap();
        let mut mount = Command::new(tool("mount", "mount"));
        let mounted = run(mount.args(["-t", "ext4", "-o", options]).arg(&image).arg(&directory));
        if mounted.code == Some(0) { Ok(Self { image, directory }) } else { Err(mounted.stderr) }
    }

    fn umount(&self, option: Option<&str>) -> bool {
        let mut umount = Command::new(tool("umount", "mount"));
        run(umount.args(option).arg(&self.directory)).code == Some(0)
    }

    /// How many writes to the device have ended, if none is on its way.
    fn writes(&self) -> Option<u64> {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let is_ours = |line: &&str| line.split(' ').nth(1).map(Path::new) == Some(&self.directory);
        let device = mounts.lines().find(is_ours).unwrap().split(' ').next().unwrap();
        let name = Path::new(device).file_name().unwrap();
        let stat = fs::read_to_string(Path::new("/sys/block").join(name).join("stat")).unwrap();
        let fields: Vec<u64> = stat.split_whitespace().map(|field| field.parse().unwrap()).collect();
        let (written, in_flight) = (fields[4], fields[8]);
        (in_flight == 0).then_some(written)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // A process that has just been killed may take a moment to let go of it.
        let unmounted = (0..100).any(|_| {
            let unmounted = self.umount(None);
            if !unmounted {
                thread::sleep(Duration::from_millis(20));
            }
            unmounted
        });
        // In use still, it goes as soon as it no longer is.
        let detached = unmounted || self.umount(Some("--lazy"));
        assert!(detached || thread::panicking(), "{} cannot be unmounted", self.directory.display());
    }
}

/// Compaction under strace(1), which stops it after each of the [`CALLS`]; killed at the end, whatever happens.
struct Stopped {
    child: Child,
    is_stopped: bool,
    has_ended: bool,
}

impl Stopped {
    fn start(env: &TestEnv, compact: &Command) -> Self {
        let mut strace = env.command(tool("strace", "strace"));
        // With -D it is compaction, not strace, that is our child.
        strace.args(["-D", "-f", "-y", "-o", "trace", "-e", &format!("trace={CALLS}"), "-e"]);
        strace.arg(format!("inject={CALLS}:signal=STOP")).arg(compact.get_program()).args(compact.get_args());
        // Where cargo has libraries looked for, only makes for more calls.
        strace.env_remove("LD_LIBRARY_PATH");
        let child = start(strace.stderr(File::create(env.path("messages")).unwrap()));
        Self { child, is_stopped: false, has_ended: false }
    }

    fn id(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    fn wait(&mut self) -> Option<WaitStatus> {
        let (_, status) = waitpid(Some(self.id()), WaitOptions::UNTRACED | WaitOptions::NOHANG).unwrap()?;
        self.has_ended |= !status.stopped();
        Some(status)
    }

    /// Waits until it has stopped again, or ended; then it returns the exit code.
    fn go_on_until_stop(&mut self) -> Option<i32> {
        if self.is_stopped {
            kill_process(self.id(), Signal::CONT).unwrap();
        }
        let started = Instant::now();
        loop {
            if let Some(status) = self.wait() {
                self.is_stopped = status.stopped();
                return (!status.stopped()).then(|| status.exit_status().expect("nobody has killed it"));
            }
            assert!(started.elapsed() < HANG, "compaction hangs");
            thread::sleep(Duration::from_micros(200));
        }
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        if !self.has_ended {
            drop(self.child.kill());
            drop(self.child.wait());
        }
    }
}

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
    mounted: Mounted,
    beside: Beside,
    /// All lines that are in the queue or have reached an earlier generation, and are on the disk.
    lines: Vec<String>,
    /// What a dead writer has left in an earlier generation.
    tail: Option<String>,
    /// All lines that there ever were, and what they amount to.
    all: Vec<String>,
    totals: Samples,
    /// How many writes the disk had seen at the last cut.
    writes: u64,
    cuts: usize,
    old: usize,
    new: usize,
    bad: Vec<String>,
    env: TestEnv,
}

/// Where the queue lies on the disk.
const PLACE: &str = "handed-over";
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

/// Appends as a producer does who wants to be sure, and flushes.
fn append(file: &mut File, text: &str) {
    file.write_all(text.as_bytes()).unwrap();
    file.sync_all().unwrap();
}

fn make_file_system(image: &Path) {
    File::create(image).unwrap().set_len(64 << 20).unwrap();
    // Nothing is left to the kernel to be initialised later: every write to the disk is to be one that a queue has caused.
    let made = run(Command::new(tool("mkfs.ext4", "e2fsprogs"))
        .args(["-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"])
        .arg(image));
    assert_eq!(made.code, Some(0), "{}", made.stderr);
}

impl Scene {
    fn new(beside: Beside) -> Self {
        assert_eq!(fs::metadata("/proc/self").unwrap().uid(), 0, "only root may mount what this test mounts");
        let env = TestEnv::new();
        // Runs after a power cut know nothing of the one that was cut off.
        fs::create_dir(env.path("textfile-after")).unwrap();
        make_file_system(&env.path("disk"));
        let mounted = Mounted::new(env.path("disk"), env.path("mounted"), OPTIONS).unwrap();
        fs::create_dir(mounted.directory.join(PLACE)).unwrap();
        fs::create_dir(mounted.directory.join("beside")).unwrap();
        let scene = Self {
            mounted,
            beside,
            lines: Vec::new(),
            tail: None,
            all: Vec::new(),
            totals: Samples::new(),
            writes: 0,
            cuts: 0,
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

    /// Brings everything to the disk, where it must be before a compaction.
    fn settle_disk(&mut self) {
        syncfs(File::open(&self.mounted.directory).unwrap()).unwrap();
        self.writes = loop {
            if let Some(writes) = self.mounted.writes() {
                break writes;
            }
        };
    }

    fn directory(&self) -> PathBuf {
        self.mounted.directory.join(PLACE)
    }

    fn queue(&self) -> PathBuf {
        self.directory().join("queue.jsonl")
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
        let mut compaction = Stopped::start(&self.env, &self.compact(&self.directory(), "textfile"));
        let mut number = 0;
        let code = loop {
            if let Some(code) = compaction.go_on_until_stop() {
                break code;
            }
            let call = last_call(&self.env);
            if !call.contains(PLACE) || (call.starts_with("open") && !call.contains("O_CREAT")) {
                continue;
            }
            number += 1;
            if let (Some(writer), Some((moment, later))) = (&mut writer, moments.split_first())
                && call.starts_with(moment)
                && call.contains("queue.jsonl")
            {
                moments = later;
                let number = u32::try_from(self.all.len()).unwrap();
                self.put(writer, &[kept(number)]);
            }
            self.let_the_kernel_write(&call);
            self.cut(&format!("after call {number}, {call}"), &go, None);
        };
        assert_eq!(code, 0, "{}", fs::read_to_string(self.env.path("messages")).unwrap());
        assert!(moments.is_empty(), "there was no {moments:?}");
        // What it says it has done is done, and stays so.
        self.cut("after its end", &go, Some(State::New));
        self.lines.retain(|line| !go.contains(line));
        self.lines.extend(self.tail.take());
    }

    /// Brings to the disk what is to be there beside what compaction has flushed.
    fn let_the_kernel_write(&self, call: &str) {
        match self.beside {
            Beside::Nothing => {}
            Beside::Journal => {
                let path = self.mounted.directory.join("beside/file");
                append(&mut File::options().create(true).append(true).open(path).unwrap(), "something else\n");
            }
            Beside::JournalInTime => {
                // After calls that change names, which is what must not come too early.
                if ["link", "rename", "unlink"].iter().any(|name| call.starts_with(name)) {
                    let (before, started) = (self.mounted.writes(), Instant::now());
                    while self.mounted.writes() == before && started.elapsed() < Duration::from_secs(3) {
                        thread::sleep(Duration::from_millis(10));
                    }
                    thread::sleep(Duration::from_millis(50));
                }
            }
            Beside::Everything => syncfs(File::open(&self.mounted.directory).unwrap()).unwrap(),
        }
    }

    /// Copies the disk as it is now, unless it is as it was at the last cut, and looks at the copy.
    fn cut(&mut self, moment: &str, go: &BTreeSet<String>, expected: Option<State>) {
        // A name of its own: what is still attached to a device must not be taken for this one.
        let copy = self.env.path(format!("copy-{}", self.cuts));
        let writes = loop {
            let before = self.mounted.writes();
            if before == Some(self.writes) && expected.is_none() {
                return;
            }
            let copied =
                run(Command::new(tool("cp", "coreutils")).arg("--sparse=always").args([&self.mounted.image, &copy]));
            assert_eq!(copied.code, Some(0), "{}", copied.stderr);
            // A power cut takes no time: nothing may have been written while we copied.
            if let Some(writes) = before
                && self.mounted.writes() == before
            {
                break writes;
            }
        };
        self.writes = writes;
        self.cuts += 1;
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
        let mounted = Mounted::new(image.to_owned(), self.env.path("after"), OPTIONS)?;
        let directory = mounted.directory.join(PLACE);
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

/// The call after which compaction has just stopped.
fn last_call(env: &TestEnv) -> String {
    let trace = fs::read_to_string(env.path("trace")).unwrap();
    let last = trace.lines().rev().find(|line| !line.contains(" --- ")).unwrap();
    last.split_once(' ').unwrap().1.trim_start().to_owned()
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
    scene.settle_disk();
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
    fs::write(scene.directory().join(".queue.jsonl.1.dead.tmp"), "half of a li").unwrap();
    fs::hard_link(scene.queue(), scene.directory().join("queue.gen.9")).unwrap();
    scene.settle_disk();
    scene.compact_with_cuts(None);

    // Generations to be removed, and late lines that may go.
    scene.settle_disk();
    scene.compact_with_cuts(None);

    // Nothing but a generation to be removed.
    let mut writer = scene.writer();
    scene.put(&mut writer, &[kept(400)]);
    drop(writer);
    scene.settle_disk();
    scene.compact_with_cuts(None);
    assert_eq!(names_in(&scene.directory()), ["queue.jsonl", "queue.lock"]);
    scene
}

/// Asserts that every cut left a good disk, and that there were cuts before and after the commit.
fn assert_all_good(scene: &Scene) {
    let Scene { cuts, old, new, bad, .. } = scene;
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
