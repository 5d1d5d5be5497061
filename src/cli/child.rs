//! Commands that are run for a bounded time, and end with us whatever ends us.
//!
//! A command gets a process group of its own. What leads the group is not the command but a small guard: a shell that reads a pipe from us.
//! When we are gone, however we went, the pipe ends, and the guard kills the group. And for as long as the guard has not been waited for
//! its number is nobody else's, so that we never signal a stranger's group.

use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{Access, access};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, getpgid, kill_process, kill_process_group, waitid};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::format::outcome::Cut;

/// How much of a command's standard output is kept.
pub(super) const MAX_OUTPUT: usize = 16 * 1024 * 1024;
/// How much of its standard error is kept, from its end.
const MAX_TAIL: usize = 1024;
/// How long a command that is told to end may take for it.
const GRACE: Duration = Duration::from_secs(5);
/// How long to wait for the end of output that a process outside the group still holds open.
const DRAIN: Duration = Duration::from_secs(2);
/// By how much a signal that everybody gets may reach the command before us.
const SKEW: Duration = Duration::from_secs(1);

/// How long a command may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// At most, if there is a limit.
    pub(super) timeout: Option<Duration>,
    /// After we were told to stop.
    pub(super) stop_timeout: Duration,
}

/// What a command is run for. The end of its standard error is kept in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// For what it puts out. What it leaves running ends with it, and its standard error is passed on to our own.
    Work,
    /// To have a message delivered. What it leaves running goes on when it has ended by itself: sendmail may deliver in the background.
    Delivery,
}

/// What came of a command.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) status: ExitStatus,
    /// Whether we ended it.
    pub(super) cut: Option<Cut>,
    /// Its standard output.
    pub(super) output: Vec<u8>,
    /// Whether there was more than is kept.
    pub(super) has_overflowed: bool,
    /// The end of its standard error.
    pub(super) error_tail: String,
}

impl Ended {
    /// Whether it ended because of one of the signals that tell to stop, as far as its status says.
    pub(super) fn is_told_to_stop(&self) -> bool {
        // Shells and others say with such a code that a signal has ended what they ran.
        let signal = self.status.signal().or(self.status.code().map(|code| code - 128));
        signal.is_some_and(|signal| [SIGTERM, SIGINT, SIGHUP].contains(&signal))
    }
}

enum Event {
    /// We are told to stop.
    Stop,
    /// The command has ended.
    Ended,
}

/// Runs commands, one at a time.
pub(super) struct Runner {
    sender: Sender<Event>,
    events: Receiver<Event>,
    /// Whether signals come as events, and do not just end us.
    catches_signals: bool,
    /// How often we were told to stop.
    stops: u32,
}

impl Runner {
    /// For those whom a signal may end at any time.
    pub(super) fn new() -> Self {
        let (sender, events) = channel();
        Self { sender, events, catches_signals: false, stops: 0 }
    }

    /// For those who have something to finish when they are told to stop.
    pub(super) fn catching_signals() -> io::Result<Self> {
        let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
        let runner = Self { catches_signals: true, ..Self::new() };
        let sender = runner.sender.clone();
        let listen = move || signals.forever().take_while(|_| sender.send(Event::Stop).is_ok()).for_each(drop);
        thread::Builder::new().name("signals".to_owned()).spawn(listen)?;
        Ok(runner)
    }

    /// Whether we were told to stop.
    pub(super) fn is_told_to_stop(&mut self) -> bool {
        self.sleep(Duration::ZERO)
    }

    /// Waits, but not any longer than until we are told to stop. Tells whether we are.
    pub(super) fn sleep(&mut self, time: Duration) -> bool {
        let end = Instant::now().checked_add(time);
        while self.stops == 0
            && let Some(event) = self.next(end)
        {
            self.note(&event);
        }
        self.stops > 0
    }

    fn note(&mut self, event: &Event) {
        self.stops += u32::from(matches!(event, Event::Stop));
    }

    /// The next event; `None` if there is none until `end`.
    fn next(&self, end: Option<Instant>) -> Option<Event> {
        match end {
            None => self.events.recv().ok(),
            Some(end) => self.events.recv_timeout(end.saturating_duration_since(Instant::now())).ok(),
        }
    }

    /// Runs a command with `input` on its standard input, to its end.
    ///
    /// # Errors
    /// If it can't be started.
    pub(super) fn run(
        &mut self,
        command: &mut Command,
        input: Vec<u8>,
        purpose: Purpose,
        limits: Limits,
    ) -> io::Result<Ended> {
        let mut group = Group::new()?;
        let mut child = group.spawn(command, purpose)?;
        let watched = self.watch(&mut child, input, purpose);
        // From here on it must be waited for.
        let cut = watched.is_ok().then(|| self.wait(&group, &child, limits)).flatten();
        group.goes_on = purpose == Purpose::Delivery && watched.is_ok() && cut.is_none();
        let goes_on = group.goes_on;
        drop(group);
        let status = child.wait()?;
        let Streams { output, error, ended } = watched?;
        // Nothing is ever sent: it ends when both streams have. Nobody wants to know what somebody says who goes on after all went well.
        let patience = if goes_on && status.success() { Duration::ZERO } else { DRAIN };
        let _: Result<(), RecvTimeoutError> = ended.recv_timeout(patience);
        let Kept { bytes: output, has_overflowed } = take(&output);
        Ok(Ended { status, cut, output, has_overflowed, error_tail: as_text(&take(&error).bytes) })
    }

    /// Starts what goes on beside the command.
    fn watch(&self, child: &mut Child, input: Vec<u8>, purpose: Purpose) -> io::Result<Streams> {
        let (sender, ended) = channel();
        let [output, error] = [(); 2].map(|()| Arc::new(Mutex::new(Kept::default())));
        if let Some(mut stdin) = child.stdin.take() {
            // It need not read it.
            spawn("input", move || drop(stdin.write_all(&input)))?;
        }
        if let Some(stdout) = child.stdout.take() {
            let (kept, sender) = (Arc::downgrade(&output), sender.clone());
            spawn("output", move || drop((copy(stdout, &kept, Kept::keep_beginning), sender)))?;
        }
        if let Some(stderr) = child.stderr.take() {
            let kept = Arc::downgrade(&error);
            let keep = if purpose == Purpose::Work { Kept::pass_on } else { Kept::keep_end };
            spawn("error", move || drop((copy(stderr, &kept, keep), sender)))?;
        }
        let (pid, sender) = (Pid::from_child(child), self.sender.clone());
        spawn("end", move || {
            // It stays there until it is waited for in earnest, so that its number is nobody else's.
            while waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).err() == Some(Errno::INTR) {}
            drop(sender.send(Event::Ended));
        })?;
        Ok(Streams { output, error, ended })
    }

    /// Waits until the command has ended, which it is made to when its time is up.
    fn wait(&mut self, group: &Group, child: &Child, limits: Limits) -> Option<Cut> {
        let after = |time: Duration| Instant::now().checked_add(time);
        let mut timeout = limits.timeout.and_then(after);
        // What is begun after we were told to stop has no more time than what was begun before.
        let mut stop = if self.stops > 0 { after(limits.stop_timeout) } else { None };
        let mut kill = None;
        let mut cut = None;
        loop {
            let end = [timeout, stop, kill].into_iter().flatten().min();
            match self.next(end) {
                Some(Event::Ended) => break,
                Some(event) => {
                    self.note(&event);
                    let patience = if self.stops > 1 { Duration::ZERO } else { limits.stop_timeout };
                    // Who says it once more, while the command has its time to end, is not to wait for that.
                    if cut.is_none() {
                        stop = after(patience);
                    } else if self.stops > 1 {
                        kill = after(patience);
                    }
                }
                None if cut.is_none() => {
                    cut = Some(if stop == end { Cut::Stop } else { Cut::Timeout });
                    group.signal(child, Signal::TERM);
                    (timeout, stop, kill) = (None, None, after(GRACE));
                }
                None => {
                    group.signal(child, Signal::KILL);
                    kill = None;
                }
            }
        }
        cut
    }

    /// Whether a command that ended like this may have been told to stop together with us, though we have not heard of it yet.
    pub(super) fn is_told_to_stop_too(&mut self, ended: &Ended) -> bool {
        self.sleep(if self.catches_signals && ended.is_told_to_stop() { SKEW } else { Duration::ZERO })
    }
}

/// What comes from a command.
struct Streams {
    output: Arc<Mutex<Kept>>,
    error: Arc<Mutex<Kept>>,
    /// Whether there is anybody left who adds to them.
    ended: Receiver<()>,
}

fn spawn(name: &str, job: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name(name.to_owned()).spawn(job).map(drop)
}

/// What is kept of a stream.
#[derive(Default)]
struct Kept {
    bytes: Vec<u8>,
    has_overflowed: bool,
}

impl Kept {
    fn keep_beginning(&mut self, chunk: &[u8]) {
        let room = MAX_OUTPUT - self.bytes.len();
        self.bytes.extend_from_slice(&chunk[..chunk.len().min(room)]);
        self.has_overflowed |= chunk.len() > room;
    }

    fn pass_on(&mut self, chunk: &[u8]) {
        // There is nowhere to report that standard error is closed.
        drop(io::stderr().write_all(chunk));
        self.keep_end(chunk);
    }

    fn keep_end(&mut self, chunk: &[u8]) {
        self.bytes.extend_from_slice(chunk);
        self.bytes.drain(..self.bytes.len().saturating_sub(MAX_TAIL));
    }
}

/// Reads a stream to its end, or until nobody wants it any more.
fn copy(mut stream: impl Read, kept: &Weak<Mutex<Kept>>, keep: fn(&mut Kept, &[u8])) {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        match stream.read(&mut buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => return,
            Ok(read) => {
                let Some(kept) = kept.upgrade() else { return };
                keep(&mut kept.lock().unwrap_or_else(PoisonError::into_inner), &buffer[..read]);
            }
        }
    }
}

fn take(kept: &Mutex<Kept>) -> Kept {
    std::mem::take(&mut *kept.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The end of a text that may have been cut within a character.
fn as_text(tail: &[u8]) -> String {
    let is_continuation = |byte: &u8| byte & 0xc0 == 0x80;
    let cut = tail.iter().take(3).take_while(|byte| is_continuation(byte)).count();
    String::from_utf8_lossy(&tail[cut..]).into_owned()
}

/// A process group, which ends when it is dropped, unless it is to go on.
struct Group {
    guard: Child,
    /// Whether only the guard ends, and what else is left in the group goes on.
    goes_on: bool,
}

impl Group {
    /// Nothing that the command may send to its group ends the guard early, but what nobody can catch.
    const GUARD: &str = "trap '' HUP INT QUIT TERM PIPE USR1 USR2 ALRM; read -r _; kill -KILL 0";

    fn new() -> io::Result<Self> {
        let mut guard = Command::new("/bin/sh");
        guard.args(["-c", Self::GUARD]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let failed = |error: io::Error| io::Error::other(format!("/bin/sh: {error}"));
        guard.process_group(0).spawn().map(|guard| Self { guard, goes_on: false }).map_err(failed)
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.guard)
    }

    fn spawn(&self, command: &mut Command, purpose: Purpose) -> io::Result<Child> {
        let pid = self.pid().as_raw_nonzero();
        // What the command takes from a queue belongs to the guard, which lives as long as the command may, and not to us.
        command.process_group(pid.get()).env("HANDOFF_OWNER", pid.to_string());
        // Who goes on without us must not fail because nobody reads any more.
        let output = if purpose == Purpose::Work { Stdio::piped() } else { Stdio::null() };
        command.stdin(Stdio::piped()).stdout(output).stderr(Stdio::piped()).spawn()
    }

    /// Signals all in the group, and the command itself even if it has left it.
    fn signal(&self, child: &Child, signal: Signal) {
        // What has ended needs no signal.
        let _ = kill_process_group(self.pid(), signal);
        let pid = Pid::from_child(child);
        if getpgid(Some(pid)) != Ok(self.pid()) {
            let _ = kill_process(pid, signal);
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = if self.goes_on {
            kill_process(self.pid(), Signal::KILL)
        } else {
            kill_process_group(self.pid(), Signal::KILL)
        };
        drop(self.guard.wait());
    }
}

/// Finds a program as a shell does; `None` if there is none that we may run.
#[expect(clippy::disallowed_methods, reason = "cli owns the environment")]
pub(super) fn find(program: &OsStr) -> Option<PathBuf> {
    let is_program = |path: &PathBuf| path.is_file() && access(path, Access::EXEC_OK).is_ok();
    if program.as_encoded_bytes().contains(&b'/') {
        return Some(PathBuf::from(program)).filter(is_program);
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(Path::new(program))).find(is_program)
}

#[cfg(test)]
mod tests {
    use super::as_text;

    #[test]
    fn a_tail_begins_with_a_character() {
        assert_eq!(as_text("é".as_bytes()), "é");
        assert_eq!(as_text(&"é!".as_bytes()[1..]), "!");
        assert_eq!(as_text(&"😀!".as_bytes()[1..]), "!");
        assert_eq!(as_text(b"\xffa\n"), "\u{fffd}a\n");
        assert_eq!(as_text(b""), "");
    }
}
