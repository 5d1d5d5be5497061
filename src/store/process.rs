//! Processes that hold records: which one we are, and whether another still lives.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::process::{Pid, getpid, getppid, test_kill_process};
use rustix::system::uname;

use super::{Error, ErrorKind};
use crate::format::owner::Owner;

/// Whether an owner lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// It does.
    Alive,
    /// It doesn't, for certain.
    Dead,
    /// Nobody here can tell.
    Unknown,
}

impl Life {
    /// Its name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Alive => "alive",
            Self::Dead => "dead",
            Self::Unknown => "unknown",
        }
    }
}

/// This process as an owner.
///
/// # Errors
/// If `/proc` can't be read.
pub fn this() -> Result<Owner, Error> {
    of(getpid())
}

/// The nearest ancestor that leads a process group: not the shell of a pipeline or of `$(…)`, which ends at once, but the script, the service or
/// the interactive shell that has called us.
///
/// # Errors
/// If `/proc` doesn't show the process that has called us.
pub fn caller() -> Result<Owner, Error> {
    let mut pid = getppid().unwrap_or(Pid::INIT);
    let mut seen =
        stat(pid).map_err(|error| error.advise("say with --owner which process works on the record, or 0"))?;
    while seen.group != pid.as_raw_nonzero().get()
        && let Some(parent) = Pid::from_raw(seen.parent)
        // Where /proc hides the processes of other users, the last one of ours will do.
        && let Ok(next) = stat(parent)
    {
        (pid, seen) = (parent, next);
    }
    of(pid)
}

/// Whether an owner is this process or has, directly or not, started it.
#[must_use]
pub fn is_above_us(owner: &Owner) -> bool {
    let is_here = life(owner).is_ok_and(|life| life == Life::Alive);
    let mut next = is_here.then(getpid);
    while let Some(pid) = next {
        let Ok(stat) = stat(pid) else { return false };
        if pid.as_raw_nonzero().get().unsigned_abs() == owner.pid && stat.start_time == owner.start_time {
            return true;
        }
        next = Pid::from_raw(stat.parent);
    }
    false
}

/// The process with this number as an owner.
///
/// # Errors
/// If there is none, or `/proc` can't be read.
pub fn with_number(number: u32) -> Result<Owner, Error> {
    let pid = i32::try_from(number).ok().and_then(Pid::from_raw);
    let none = || {
        Error::new(
            ErrorKind::BadData,
            &directory(i64::from(number)),
            "there is no such process that could hold a record",
        )
    };
    let pid = pid.ok_or_else(none)?;
    if test_kill_process(pid) == Err(Errno::SRCH) { Err(none()) } else { of(pid) }
}

fn of(pid: Pid) -> Result<Owner, Error> {
    Ok(Owner {
        host: host(),
        boot_id: boot_id()?,
        pid: pid.as_raw_nonzero().get().unsigned_abs(),
        start_time: stat(pid)?.start_time,
        pid_namespace: namespace(),
    })
}

/// Whether an owner lives.
///
/// # Errors
/// If `/proc` can't be read.
pub fn life(owner: &Owner) -> Result<Life, Error> {
    if owner.host != host() {
        return Ok(Life::Unknown);
    }
    if owner.boot_id != boot_id()? {
        return Ok(Life::Dead);
    }
    if owner.pid_namespace.is_some_and(|namespace| self::namespace() != Some(namespace)) {
        return Ok(Life::Unknown);
    }
    let Some(pid) = i32::try_from(owner.pid).ok().and_then(Pid::from_raw) else { return Ok(Life::Unknown) };
    // Where /proc hides the processes of other users, only this tells whether there is one.
    if test_kill_process(pid) == Err(Errno::SRCH) {
        return Ok(Life::Dead);
    }
    match stat(pid) {
        Ok(stat) if stat.start_time != owner.start_time || stat.has_ended => Ok(Life::Dead),
        Ok(_) => Ok(Life::Alive),
        Err(_) => Ok(Life::Unknown),
    }
}

/// The same of an owner as it stands in a record.
///
/// # Errors
/// If `/proc` can't be read.
pub fn life_of(owner: &str) -> Result<Life, Error> {
    Owner::read(owner).map_or(Ok(Life::Unknown), |owner| life(&owner))
}

fn host() -> String {
    uname().nodename().to_string_lossy().into_owned()
}

fn boot_id() -> Result<String, Error> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    fs::read_to_string(path).map(|id| id.trim().to_owned()).map_err(|error| Error::io(path, "cannot be read", error))
}

/// The namespace of the numbers that `/proc` shows us.
fn namespace() -> Option<u64> {
    fs::metadata("/proc/self/ns/pid").ok().map(|metadata| metadata.ino())
}

/// What `/proc` tells of a process.
struct Stat {
    parent: i32,
    group: i32,
    start_time: u64,
    /// Whether only its parent's wait keeps it there.
    has_ended: bool,
}

fn stat(pid: Pid) -> Result<Stat, Error> {
    let path = directory(pid.as_raw_nonzero().get().into()).join("stat");
    let text = fs::read_to_string(&path).map_err(|error| Error::io(&path, "cannot be read", error))?;
    // The name, in parentheses, may hold anything.
    let fields: Vec<&str> =
        text.rsplit_once(')').map(|(_, rest)| rest.split_ascii_whitespace().collect()).unwrap_or_default();
    let field = |number: usize| fields.get(number - 3).copied().unwrap_or_default();
    let parsed = || {
        Some(Stat {
            parent: field(4).parse().ok()?,
            group: field(5).parse().ok()?,
            start_time: field(22).parse().ok()?,
            has_ended: matches!(field(3), "Z" | "X"),
        })
    };
    parsed().ok_or_else(|| Error::io(&path, "cannot be read", io::ErrorKind::InvalidData.into()))
}

fn directory(pid: i64) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}"))
}
