//! Programs under strace(1): which calls they make, and what they do when one of these is their last, or fails, or keeps them waiting.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::kill_and_inject::{Call, calls_in};
use crate::test_env::{Run, TestEnv, run, tool, under};

/// Where traces are written: not beside the queue, where offload would read them for references, and so make them longer and longer.
const TRACE: &str = "textfile/trace";

/// Arguments for strace(1) that let no thread be started. A tool does everything in one then, and the same each time.
pub(crate) const ONE_THREAD: [&str; 2] = ["-e", "inject=?clone,?clone3:error=EAGAIN"];

/// A command under strace(1), with these arguments for it. Its trace is written to the directory.
fn under_strace(env: &TestEnv, command: &Command, arguments: &[&str]) -> Command {
    let mut strace = env.command(tool("strace", "strace"));
    strace.args(["-f", "-o", TRACE]).args(arguments);
    under(strace, command)
}

/// Runs a command under strace(1) in one thread, and returns the trace too.
pub(crate) fn traced(env: &TestEnv, command: &Command, arguments: &[&str]) -> (Run, String) {
    traced_in_threads(env, command, &[&ONE_THREAD[..], arguments].concat())
}

/// The same in as many threads as it likes.
pub(crate) fn traced_in_threads(env: &TestEnv, command: &Command, arguments: &[&str]) -> (Run, String) {
    let run = run(&mut under_strace(env, command, arguments));
    (run, take_trace(env))
}

fn take_trace(env: &TestEnv) -> String {
    let trace = fs::read_to_string(env.path(TRACE)).expect("strace(1) must be allowed to trace");
    fs::remove_file(env.path(TRACE)).unwrap();
    trace
}

/// What only concerns memory, signals or threads, or asks who we are, cannot be told from the call after it.
const PASSIVE: &str = "brk mmap munmap mprotect mremap madvise sigaltstack rt_sigaction rt_sigprocmask clone clone3 getpid geteuid \
                           exit_group";

/// The calls that a trace of a tool shows from the first that is its own to the last before its end, but
/// passive ones.
pub(crate) fn own_calls(trace: &str) -> Vec<Call> {
    let calls = calls_in(trace);
    // The loader and the runtime come first. The tools begin with the queue's directory or the store.
    let is_own = |call: &Call| {
        call.line.contains("AT_FDCWD") && ["\".\"", "\"blob\""].iter().any(|name| call.line.contains(name))
    };
    let start = calls.iter().position(is_own).expect("it looks at the queue's directory");
    calls.into_iter().skip(start).filter(|call| !PASSIVE.split(' ').any(|name| name == call.name)).collect()
}

/// A call in a trace of several threads, and the lines of the trace in which it began and ended: the same one unless others came in between.
pub(crate) struct Span {
    pub(crate) call: Call,
    pub(crate) began: usize,
    pub(crate) ended: usize,
}

/// The calls that several threads have made to their ends. Which call of its name each is, in its thread, is not told.
pub(crate) fn spans(trace: &str) -> Vec<Span> {
    const UNFINISHED: &str = " <unfinished ...>";
    let (mut unfinished, mut spans) = (BTreeMap::new(), Vec::new());
    for (ended, line) in trace.lines().enumerate() {
        let (thread, text) = line.split_once(' ').unwrap();
        let text = text.trim_start();
        if let Some(beginning) = text.strip_suffix(UNFINISHED) {
            unfinished.insert(thread, (ended, beginning));
            continue;
        }
        let (began, line) = match text.strip_prefix("<... ").and_then(|rest| rest.split_once(" resumed>")) {
            Some((_, end)) => {
                let (began, beginning) = unfinished.remove(thread).expect("it began");
                (began, format!("{beginning}{end}"))
            }
            None => (ended, text.to_owned()),
        };
        let Some((name, _)) = line.split_once('(') else { continue };
        spans.push(Span { call: Call { name: name.to_owned(), number: 0, line }, began, ended });
    }
    spans
}

/// Whether a call changes what is on the disk, or makes sure of it.
pub(crate) fn changes_something(call: &Call) -> bool {
    const CHANGES: &str = "write writev pwrite64 pwritev ftruncate fallocate copy_file_range fsync fdatasync link linkat rename \
                           renameat renameat2 unlink unlinkat mkdir mkdirat rmdir chown fchown chmod fchmod utimensat fsetxattr \
                           fremovexattr";
    CHANGES.split(' ').any(|name| name == call.name) || call.line.contains("O_CREAT")
}

pub(crate) fn context_of(what: &str, call: &Call) -> String {
    format!("{what} {} number {}: {}", call.name, call.number, call.line)
}

/// The argument for strace(1) that kills a process before a call.
pub(crate) fn kill_before(call: &Call) -> String {
    format!("inject={}:signal=KILL:when={}", call.name, call.number)
}

/// The argument for strace(1) that lets a call fail.
pub(crate) fn fail_with(error: &str, call: &Call) -> String {
    format!("inject={}:error={error}:when={}", call.name, call.number)
}

/// The argument for strace(1) that stops a process right after a call, which is told by its name and number, or by `1+` for all.
pub(crate) fn stop_after(name: &str, number: &str) -> String {
    format!("inject={name}:signal=STOP:when={number}")
}

/// Continues a process that has been stopped; kills it if the test has failed by then.
struct Stopped(Option<Pid>);

impl Stopped {
    fn go_on(mut self) {
        kill_process(self.0.take().unwrap(), Signal::CONT).unwrap();
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        if let Some(pid) = self.0 {
            // It may have ended by itself.
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

/// Runs a command under strace(1) in one thread, with arguments that stop it; does `meanwhile` at each stop, which it is told the number of from
/// 0 on. Returns the trace and the number of stops too.
pub(crate) fn with_stops(
    env: &TestEnv,
    command: &Command,
    arguments: &[&str],
    mut meanwhile: impl FnMut(usize),
) -> (Run, String, usize) {
    const STOPPED: &str = " --- stopped by SIGSTOP ---";
    let mut strace = under_strace(env, command, &[&ONE_THREAD[..], arguments].concat());
    let mut stops = 0;
    let run = thread::scope(|scope| {
        let running = scope.spawn(|| run(&mut strace));
        loop {
            let has_ended = running.is_finished();
            let trace = fs::read_to_string(env.path(TRACE)).unwrap_or_default();
            if let Some(line) = trace.lines().filter(|line| line.ends_with(STOPPED)).nth(stops) {
                let pid = line.split_once(' ').unwrap().0.parse().unwrap();
                let stopped = Stopped(Pid::from_raw(pid));
                meanwhile(stops);
                stops += 1;
                stopped.go_on();
            } else if has_ended {
                return running.join().unwrap();
            }
            thread::sleep(Duration::from_millis(1));
        }
    });
    (run, take_trace(env), stops)
}

/// How often each thing was seen.
pub(crate) type Tally = BTreeMap<String, usize>;

pub(crate) fn add(tally: &mut Tally, what: &str) {
    *tally.entry(what.to_owned()).or_default() += 1;
}

/// What a call does with which files of a directory, as in "linkat queue.jsonl queue.gen.5". A file that is to become the queue is called
/// NEW, the directory itself DIR, and the look at a file that is open fstat.
pub(crate) fn deed(call: &Call, directory: &str) -> String {
    // An opened file's name comes last, also where it was opened by a relative one.
    let text = if call.name == "openat" { call.line.rsplit_once(" = ").unwrap().1 } else { &call.line };
    let mut names = Vec::new();
    for (start, _) in text.match_indices(directory).filter(|(start, _)| !text[..*start].ends_with("AT_FDCWD<")) {
        let name = text[start + directory.len()..].split(['"', '>']).next().unwrap();
        names.push(match name.trim_start_matches('/') {
            "" => "DIR",
            new if new.starts_with(".queue.jsonl.") => "NEW",
            name => name,
        });
    }
    let name = if call.line.contains("AT_EMPTY_PATH") { "fstat" } else { &call.name };
    let details = ["O_CREAT", "LOCK_EX", "LOCK_SH", "F_SETLEASE, F_RDLCK", "F_SETLEASE, F_UNLCK", "F_GETLEASE"];
    let detail = details.iter().find(|detail| call.line.contains(*detail));
    format!("{name}{} {}", detail.map_or_else(String::new, |detail| format!("({detail})")), names.join(" "))
}

/// Where the first of the deeds is that begins so.
pub(crate) fn place(deeds: &[String], deed: &str) -> usize {
    deeds.iter().position(|is| is.starts_with(deed)).unwrap_or_else(|| panic!("no {deed} in {deeds:#?}"))
}
