//! A directory of its own for each test, and programs run in it.

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::exposition::{Samples, parse};
use crate::validator::assert_valid;

/// The present time of most tests, as `--now` takes it.
pub(crate) const NOW: &str = "2026-11-29T12:00:00Z";
/// The same in seconds since the epoch.
pub(crate) const NOW_SECONDS: f64 = 1_795_953_600.0;
/// When the run before took place, in tests that have one.
pub(crate) const EARLIER: &str = "2026-11-29T11:59:45Z";
/// The same in seconds since the epoch.
pub(crate) const EARLIER_SECONDS: f64 = 1_795_953_585.0;

const EXPORTER: &str = env!("CARGO_BIN_EXE_handoff-exporter");
const COMPACT: &str = env!("CARGO_BIN_EXE_handoff-compact");
const OFFLOAD: &str = env!("CARGO_BIN_EXE_handoff-offload");
const HANDOFF: &str = env!("CARGO_BIN_EXE_handoff");
/// No run takes this long unless it hangs.
const HANG: Duration = Duration::from_secs(120);
/// Debian's `nobody` and `nogroup`.
const NOBODY: u32 = 65534;

/// A temporary directory with room for a queue and a textfile directory, and the commands that use them.
pub(crate) struct TestEnv {
    directory: TempDir,
}

impl TestEnv {
    pub(crate) fn new() -> Self {
        Self::with(TempDir::with_prefix("handoff-test-").unwrap())
    }

    /// A directory in memory, where nothing waits for a disk, if the system has such a place.
    pub(crate) fn in_memory() -> Self {
        TempDir::with_prefix_in("handoff-test-", "/dev/shm").map_or_else(|_| Self::new(), Self::with)
    }

    fn with(directory: TempDir) -> Self {
        // Tests that drop their privileges must get in.
        fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
        let env = Self { directory };
        fs::create_dir(env.textfile_dir()).unwrap();
        env
    }

    pub(crate) fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn textfile_dir(&self) -> PathBuf {
        self.path("textfile")
    }

    /// The exporter's output.
    pub(crate) fn prom(&self) -> PathBuf {
        self.path("textfile/handoff.prom")
    }

    pub(crate) fn write(&self, name: &str, contents: impl AsRef<[u8]>) {
        fs::write(self.path(name), contents).unwrap();
    }

    /// A command that runs in the directory, without the settings of whoever runs the tests.
    pub(crate) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.directory.path()).stdin(Stdio::null()).env_remove("JOURNAL_STREAM");
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("HANDOFF_") {
                command.env_remove(name);
            }
        }
        command
    }

    /// The exporter without arguments.
    pub(crate) fn bare_exporter(&self) -> Command {
        self.command(EXPORTER)
    }

    /// The exporter on `queue.jsonl`.
    pub(crate) fn exporter(&self) -> Command {
        let mut command = self.bare_exporter();
        command.args(["--queue", "queue.jsonl"]);
        command
    }

    /// Compaction without arguments.
    pub(crate) fn bare_compact(&self) -> Command {
        self.command(tool_or_mutant(COMPACT))
    }

    /// Compaction of `queue.jsonl`, with metrics in the textfile directory.
    pub(crate) fn compact(&self) -> Command {
        let mut command = self.bare_compact();
        command.args(["--queue", "queue.jsonl", "--textfile-dir", "textfile", "--now", NOW]);
        command
    }

    /// Offload without arguments.
    pub(crate) fn bare_offload(&self) -> Command {
        self.command(tool_or_mutant(OFFLOAD))
    }

    /// The same by the real clock, which also tells a blob's age.
    pub(crate) fn offload_now(&self) -> Command {
        let mut command = self.bare_offload();
        command.args(["--queue", "queue.jsonl", "--textfile-dir", "textfile"]);
        command
    }

    /// Offload of `queue.jsonl`, with metrics in the textfile directory.
    pub(crate) fn offload(&self) -> Command {
        let mut command = self.bare_offload();
        command.args(["--queue", "queue.jsonl", "--textfile-dir", "textfile", "--now", NOW]);
        command
    }

    /// `handoff` without arguments.
    pub(crate) fn bare_handoff(&self) -> Command {
        self.command(tool_or_mutant(HANDOFF))
    }

    /// `handoff` with a verb, for `queue.jsonl`.
    pub(crate) fn handoff(&self, verb: &str) -> Command {
        let mut command = self.command(tool_or_mutant(HANDOFF));
        command.args([verb, "--queue", "queue.jsonl", "--now", NOW]);
        command
    }

    /// `handoff blob` with a verb and what is given to it, for `queue.jsonl`.
    pub(crate) fn handoff_blob(&self, verb: &str) -> Command {
        let mut command = self.bare_handoff();
        command.args(["blob", verb, "--queue", "queue.jsonl"]);
        command
    }

    pub(crate) fn to_stdout(&self) -> Command {
        let mut command = self.exporter();
        command.args(["--stdout", "--now", NOW]);
        command
    }

    pub(crate) fn to_file(&self) -> Command {
        let mut command = self.exporter();
        command.args(["--textfile-dir", "textfile", "--now", NOW]);
        command
    }

    /// [`TestEnv::to_file`] as an ordinary user, for whom permissions count.
    ///
    /// If root runs the tests, that is `nobody`, who then owns everything in the directory, and the
    /// exporter is a copy that lies where `nobody` can reach it.
    pub(crate) fn to_file_as_ordinary_user(&self) -> Command {
        if !is_root() {
            return self.to_file();
        }
        let copy = self.path("handoff-exporter");
        if !copy.exists() {
            copy_program(Path::new(EXPORTER), &copy);
        }
        for entry in walkdir::WalkDir::new(self.directory.path()) {
            chown(entry.unwrap().path(), Some(NOBODY), Some(NOBODY)).unwrap();
        }
        let mut command = self.command(tool("setpriv", "util-linux"));
        command
            .args([format!("--reuid={NOBODY}"), format!("--regid={NOBODY}"), "--clear-groups".to_owned()])
            .arg(copy)
            .args(["--queue", "queue.jsonl", "--textfile-dir", "textfile", "--now", NOW]);
        command
    }

    /// Runs the exporter, which must succeed, and reads what it wrote to standard output.
    pub(crate) fn samples(&self) -> Samples {
        let run = run(&mut self.to_stdout());
        assert_eq!(run.code, Some(0), "{}", run.stderr);
        run.samples()
    }

    /// Lays the output of an earlier, successful run.
    pub(crate) fn run_earlier(&self) {
        let run = run(self.exporter().args(["--textfile-dir", "textfile", "--now", EARLIER]));
        assert_eq!(run.code, Some(0), "{}", run.stderr);
    }

    /// The names in the textfile directory.
    pub(crate) fn textfile_names(&self) -> Vec<String> {
        let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        let mut names: Vec<_> = fs::read_dir(self.textfile_dir()).unwrap().map(name).collect();
        names.sort();
        names
    }

    /// Asserts that the textfile directory holds one file, that anyone can read it, and that it would be accepted.
    pub(crate) fn assert_only_a_good_file(&self, context: &str) -> Samples {
        assert_eq!(self.textfile_names(), ["handoff.prom"], "{context}");
        assert_eq!(mode(&self.prom()), 0o644, "{context}");
        let contents = fs::read(self.prom()).unwrap();
        assert_valid(&contents, context);
        parse(&contents)
    }
}

/// The tool as it is, or the one of the same name in `$MUTANTS`, which the tests should find wanting.
fn tool_or_mutant(tool: &str) -> PathBuf {
    let tool = Path::new(tool);
    std::env::var_os("MUTANTS")
        .map_or_else(|| tool.to_owned(), |mutants| Path::new(&mutants).join(tool.file_name().unwrap()))
}

/// [`TestEnv::to_file`] run by `program`, which takes a command as its last arguments.
pub(crate) fn to_file_under(mut program: Command) -> Command {
    program.arg(EXPORTER).args(["--queue", "queue.jsonl", "--textfile-dir", "textfile", "--now", NOW]);
    program
}

/// Whether root runs the tests.
pub(crate) fn is_root() -> bool {
    fs::metadata("/proc/self").unwrap().uid() == 0
}

/// How a program ended and what it said.
#[derive(Debug)]
pub(crate) struct Run {
    /// The exit code, unless a signal ended it.
    pub(crate) code: Option<i32>,
    pub(crate) signal: Option<i32>,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
    pub(crate) took: Duration,
}

impl Run {
    /// Standard output as metrics, which must be ones that node_exporter accepts.
    pub(crate) fn samples(&self) -> Samples {
        assert_valid(&self.stdout, "standard output");
        parse(&self.stdout)
    }
}

/// Starts a program. All tests start theirs here, one after the other.
///
/// Until it is running, a new process has everything open that this one has, so also what another test is writing just then: a
/// generation would seem to be written into after that test has closed it. When it is this test's turn, no such process is left.
pub(crate) fn start(command: &mut Command) -> Child {
    static STARTING: Mutex<()> = Mutex::new(());
    let _turn = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
    command.spawn().unwrap_or_else(|error| panic!("{command:?} cannot be started: {error}"))
}

/// Runs a command to its end. One that hangs is killed and fails the test.
pub(crate) fn run(command: &mut Command) -> Run {
    let started = Instant::now();
    let mut child = start(command.stdout(Stdio::piped()).stderr(Stdio::piped()));
    let (sender, receiver) = mpsc::channel();
    let stdout = read_in_background(child.stdout.take().unwrap(), sender.clone());
    let stderr = read_in_background(child.stderr.take().unwrap(), sender);
    for _ in 0..2 {
        if receiver.recv_timeout(HANG.saturating_sub(started.elapsed())).is_err() {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{command:?} hangs");
        }
    }
    let status = child.wait().unwrap();
    Run {
        code: status.code(),
        signal: status.signal(),
        stdout: stdout.join().unwrap(),
        stderr: String::from_utf8(stderr.join().unwrap()).expect("messages are UTF-8"),
        took: started.elapsed(),
    }
}

fn read_in_background(mut pipe: impl Read + Send + 'static, done: mpsc::Sender<()>) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut contents = Vec::new();
        pipe.read_to_end(&mut contents).unwrap();
        // The receiver may have given up on us.
        let _ = done.send(());
        contents
    })
}

/// A program in the background, killed at the end of the test whatever happens.
pub(crate) struct Background {
    child: Child,
}

impl Background {
    /// Starts a program whose standard input is a pipe from us; it should end at the end of that.
    pub(crate) fn spawn(command: &mut Command) -> Self {
        Self { child: start(command.stdin(Stdio::piped())) }
    }

    /// Starts a program and waits for its first line of output.
    pub(crate) fn spawn_and_wait_for_line(command: &mut Command) -> (Self, String) {
        let mut background = Self::spawn(command.stdout(Stdio::piped()));
        let mut line = String::new();
        BufReader::new(background.child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.ends_with('\n'), "{command:?} said nothing");
        line.pop();
        (background, line)
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Writes to the program's standard input.
    pub(crate) fn say(&mut self, text: &str) {
        self.child.stdin.as_mut().unwrap().write_all(text.as_bytes()).unwrap();
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Closes the program's standard input, waits for its end, and returns its exit code, unless a signal has ended it.
    pub(crate) fn exit_code(&mut self) -> Option<i32> {
        drop(self.child.stdin.take());
        self.child.wait().unwrap().code()
    }

    /// Closes the program's standard input and waits for its end, which must be a good one.
    pub(crate) fn finish(mut self) {
        let code = self.exit_code();
        assert_eq!(code, Some(0), "a program in the background failed");
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        // It may have ended by itself.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// A program that the tests need, found in `PATH`.
pub(crate) fn tool(name: &str, package: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|directory| directory.join(name))
        .find(|candidate| candidate.is_file())
        .unwrap_or_else(|| panic!("this test needs `{name}`, which Debian has in the package {package}"))
}

pub(crate) fn python() -> PathBuf {
    tool("python3", "python3")
}

/// A file or directory of the repository's `tests/`.
pub(crate) fn in_tests(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name);
    assert!(path.exists(), "{} is missing", path.display());
    path
}

/// The block of code that follows a text of the README.
pub(crate) fn readme_block(after: &str, fence: &str) -> String {
    let readme = fs::read_to_string(in_tests("../README.md")).unwrap();
    let (_, rest) = readme.split_once(after).expect("the text before the code");
    rest.split_once(fence).and_then(|(_, rest)| rest.split_once("```")).expect("a block of code").0.to_owned()
}

/// The permission bits of a file.
pub(crate) fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

/// One line of a queue.
pub(crate) fn record(id: &str, to: &str, status: &str) -> String {
    format!(
        r#"{{"id":"{id}","ts":1795950000,"kind":"classify","from":"triage","to":"{to}","payload":{{}},"status":"{status}"}}"#
    ) + "\n"
}

/// A small queue: three records, two of them queued.
pub(crate) fn small_queue() -> String {
    record("a", "researcher", "queued") + &record("b", "researcher", "done") + &record("c", "patcher", "queued")
}

/// `program`, which takes a command as its last arguments, with `command`.
pub(crate) fn under(mut program: Command, command: &Command) -> Command {
    program.arg(command.get_program()).args(command.get_args());
    program
}

/// A mount namespace of its own, so that no mount outlives the test. An ordinary user gets one in which they count as root.
pub(crate) struct MountNamespace {
    holder: Background,
    directory: PathBuf,
}

impl MountNamespace {
    /// Runs a script, which mounts what it wants, in the test's directory.
    pub(crate) fn new(env: &TestEnv, script: &str) -> Self {
        let mut unshare = env.command(tool("unshare", "util-linux"));
        if !is_root() {
            unshare.arg("--map-root-user");
        }
        let script = format!("set -e\n{script}\necho ready\nexec cat");
        unshare.args(["--mount", "sh", "-c", &script]);
        let (holder, _) = Background::spawn_and_wait_for_line(&mut unshare);
        Self { holder, directory: env.directory.path().to_owned() }
    }

    /// The same command within.
    pub(crate) fn inside(&self, env: &TestEnv, command: &Command) -> Command {
        let mut nsenter = env.command(tool("nsenter", "util-linux"));
        nsenter.arg(format!("--target={}", self.holder.id())).arg("--mount");
        if !is_root() {
            nsenter.args(["--user", "--preserve-credentials"]);
        }
        nsenter.arg(format!("--wdns={}", self.directory.display())).arg("--");
        under(nsenter, command)
    }

    /// Runs a script within, which must succeed.
    pub(crate) fn sh(&self, env: &TestEnv, script: &str) -> String {
        let mut sh = env.command(tool("sh", "dash"));
        sh.args(["-e", "-c", script]);
        let run = run(&mut self.inside(env, &sh));
        assert_eq!(run.code, Some(0), "{script}: {}", run.stderr);
        String::from_utf8(run.stdout).unwrap()
    }

    /// A path of the test's directory as it is seen within.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        let within = self.directory.join(name);
        Path::new("/proc").join(self.holder.id().to_string()).join("root").join(within.strip_prefix("/").unwrap())
    }
}

/// Copies a program so that anyone can run it.
pub(crate) fn copy_program(from: &Path, to: &Path) {
    // Not in this process: nobody can run a file that somebody else has open for writing, see `start`.
    let mut install = Command::new(tool("install", "coreutils"));
    let installed = run(install.arg("--mode=755").args([from, to]));
    assert_eq!(installed.code, Some(0), "{}", installed.stderr);
}

/// The series that must never fall, whatever compaction does.
pub(crate) fn counters(mut samples: Samples) -> Samples {
    samples.retain(|series, _| ["_total", "_bucket", "_count", "_sum"].iter().any(|end| series.name.ends_with(end)));
    samples
}

/// The names in a directory, sorted.
pub(crate) fn names_in(directory: &Path) -> Vec<String> {
    let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut names: Vec<String> = fs::read_dir(directory).unwrap().map(name).collect();
    names.sort();
    names
}

/// Copies a directory by another process. Had we the copy open for writing, then a program that another test starts just then
/// could have it open for a moment, and there would be no lease.
pub(crate) fn copy_of(env: &TestEnv) -> TestEnv {
    let copy = TestEnv::new();
    let run = run(env.command("cp").arg("-a").arg(".").arg(copy.path("")));
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    copy
}

/// Appends to a file as a process of its own, which opens it just for that.
pub(crate) fn append(env: &TestEnv, name: &str, text: &str) {
    let run = run(env.command("sh").args(["-c", r#"printf %s "$1" >>"$2""#, "sh", text, name]));
    assert_eq!(run.code, Some(0), "{}", run.stderr);
}

/// The beginning and the end of a line, for messages.
pub(crate) fn shortened(line: &str) -> String {
    if line.len() < 200 { line.to_owned() } else { format!("{} … {}", &line[..100], &line[line.len() - 60..]) }
}

/// Says how much a test has tried, which `cargo test -- --show-output` shows.
#[expect(clippy::print_stdout, reason = "it is the test's output")]
pub(crate) fn tell(what: &str) {
    println!("{what}");
}
