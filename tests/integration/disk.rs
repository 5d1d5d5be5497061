//! A disk whose power can fail at any system call of a tool.
//!
//! It is an ext4 file system in a file, mounted with options that keep nothing in order for us: a rename reaches the disk long before the
//! data of the renamed file, unless that was flushed. A tool is stopped after each of its system calls that changes files. What the kernel
//! has sent to the "disk" by then is the content of that file: a copy of it is what a power cut would leave. The copy is mounted, which
//! replays its journal, and looked at.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::syncfs;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, waitpid};

use crate::strace::ONE_THREAD;
use crate::test_env::{TestEnv, is_root, run, start, tool, under};

/// System calls that change files, and `openat`, which may make one. Those with a `?` are not on every processor.
const CALLS: &str = "?open,openat,?creat,write,writev,pwrite64,pwritev,fsync,fdatasync,sync_file_range,?link,linkat,?rename,?renameat,\
                     renameat2,?unlink,unlinkat,?mkdir,mkdirat,?chmod,fchmod,fchmodat,?chown,fchown,fchownat,setxattr,fsetxattr,\
                     fremovexattr,utimensat,ftruncate,fallocate,copy_file_range,sendfile";
/// Advice to write back early need not be taken. Here it isn't, so that nothing is on the disk but what is flushed.
const ADVICE: &str = "fadvise64";
/// No call takes this long unless something hangs.
const HANG: Duration = Duration::from_secs(60);
/// Where the queue lies on the disk.
const PLACE: &str = "handed-over";

/// What keeps the disk in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileSystem {
    /// A journal of all metadata, which the first flush of any file writes. It is written a second after something has changed at the latest.
    Journal,
    /// Nothing: only what was flushed itself is there, names in directories too.
    NoJournal,
}

impl FileSystem {
    fn options(self) -> &'static str {
        match self {
            Self::Journal => "loop,noauto_da_alloc,data=writeback,commit=1",
            Self::NoJournal => "loop,noauto_da_alloc",
        }
    }

    fn make(self, image: &Path) {
        File::create(image).unwrap().set_len(64 << 20).unwrap();
        // Nothing is left to the kernel to be initialised later: every write to the disk is to be one that a queue has caused.
        let mut command = Command::new(tool("mkfs.ext4", "e2fsprogs"));
        command.args(["-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"]);
        if self == Self::NoJournal {
            command.args(["-O", "^has_journal"]);
        }
        let made = run(command.arg(image));
        assert_eq!(made.code, Some(0), "{}", made.stderr);
    }
}

/// What else than what the tool itself has flushed is on the disk when the power fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beside {
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
pub(crate) struct Mounted {
    image: PathBuf,
    directory: PathBuf,
}

impl Mounted {
    pub(crate) fn new(image: PathBuf, directory: PathBuf, file_system: FileSystem) -> Result<Self, String> {
        fs::create_dir_all(&directory).unwrap();
        let mut mount = Command::new(tool("mount", "mount"));
        let mounted = run(mount.args(["-t", "ext4", "-o", file_system.options()]).arg(&image).arg(&directory));
        if mounted.code == Some(0) { Ok(Self { image, directory }) } else { Err(mounted.stderr) }
    }

    /// The directory that the queue lies in.
    pub(crate) fn queue_directory(&self) -> PathBuf {
        self.directory.join(PLACE)
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

/// A disk with a queue on it.
pub(crate) struct Disk {
    mounted: Mounted,
    beside: Beside,
    /// How many writes it had seen at the last cut.
    writes: u64,
    pub(crate) cuts: usize,
}

impl Disk {
    pub(crate) fn new(env: &TestEnv, file_system: FileSystem, beside: Beside) -> Self {
        assert!(is_root(), "only root may mount what this test mounts");
        file_system.make(&env.path("disk"));
        let mounted = Mounted::new(env.path("disk"), env.path("mounted"), file_system).unwrap();
        fs::create_dir(mounted.queue_directory()).unwrap();
        fs::create_dir(mounted.directory.join("beside")).unwrap();
        Self { mounted, beside, writes: 0, cuts: 0 }
    }

    /// The directory that the queue lies in.
    pub(crate) fn directory(&self) -> PathBuf {
        self.mounted.queue_directory()
    }

    /// Brings everything to the disk, where it must be before the tool runs.
    pub(crate) fn settle(&mut self) {
        syncfs(File::open(&self.mounted.directory).unwrap()).unwrap();
        self.writes = loop {
            if let Some(writes) = self.mounted.writes() {
                break writes;
            }
        };
    }

    /// Brings to the disk what is to be there beside what the tool has flushed.
    pub(crate) fn let_the_kernel_write(&self, call: &str) {
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

    /// Cuts the power: copies the disk as it is now, unless it is as it was at the last cut.
    pub(crate) fn copy(&mut self, env: &TestEnv, whatever: bool) -> Option<PathBuf> {
        // A name of its own: what is still attached to a device must not be taken for this one.
        let copy = env.path(format!("copy-{}", self.cuts));
        self.writes = loop {
            let before = self.mounted.writes();
            if before == Some(self.writes) && !whatever {
                return None;
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
        self.cuts += 1;
        Some(copy)
    }
}

/// Appends as a producer does who wants to be sure, and flushes.
pub(crate) fn append(file: &mut File, text: &str) {
    file.write_all(text.as_bytes()).unwrap();
    file.sync_all().unwrap();
}

/// How many threads a tool may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Threads {
    /// One: it then does the same each time.
    One,
    /// As many as it likes.
    Many,
}

/// A tool under strace(1), which stops it after each of the [`CALLS`]; killed at the end, whatever happens.
pub(crate) struct Stopped {
    child: Child,
    is_stopped: bool,
    has_ended: bool,
}

impl Stopped {
    pub(crate) fn start(env: &TestEnv, command: &Command, threads: Threads) -> Self {
        let mut strace = env.command(tool("strace", "strace"));
        // With -D it is the tool, not strace, that is our child.
        strace.args(["-D", "-f", "-y", "-o", "trace", "-e", &format!("trace={CALLS},{ADVICE},?clone,?clone3")]);
        if threads == Threads::One {
            strace.args(ONE_THREAD);
        }
        strace.args(["-e", &format!("inject={CALLS}:signal=STOP"), "-e", &format!("inject={ADVICE}:retval=0")]);
        let mut strace = under(strace, command);
        // Where cargo has libraries looked for, only makes for more calls.
        strace.env_remove("LD_LIBRARY_PATH");
        let child = start(strace.stdout(Stdio::null()).stderr(File::create(env.path("messages")).unwrap()));
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
            assert!(started.elapsed() < HANG, "the tool hangs");
            thread::sleep(Duration::from_micros(200));
        }
    }

    /// Waits until it has changed something where the queue lies, and returns the call that did; `None` if it has ended, which must be well.
    pub(crate) fn go_on_until_it_changes_something(&mut self, env: &TestEnv) -> Option<String> {
        loop {
            if let Some(code) = self.go_on_until_stop() {
                assert_eq!(code, 0, "{}", fs::read_to_string(env.path("messages")).unwrap());
                return None;
            }
            let call = last_call(env);
            // What a call was about is told where it began, if another thread has come in between.
            if call.starts_with("<... ") {
                return Some(call);
            }
            if call.contains(PLACE) && (!call.starts_with("open") || call.contains("O_CREAT")) {
                return Some(call);
            }
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

/// The call after which the tool has just stopped.
fn last_call(env: &TestEnv) -> String {
    let trace = fs::read_to_string(env.path("trace")).unwrap();
    let last = trace.lines().rev().find(|line| !line.contains(" --- ")).unwrap();
    last.split_once(' ').unwrap().1.trim_start().to_owned()
}
