//! The lock that guards the queue: `flock(2)` on a file of its own.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::atomic_file::Temporary;
use super::files::{QueueFiles, identity};
use super::{Error, ErrorKind, attributes, directory_of, open_regular, require_directory, uninterrupted};

/// Reads something that writers change only under the exclusive lock, and tells whether there was a lock file.
///
/// A reader creates no lock file: one that belongs to another user could lock the workers out. A lock file is never
/// removed, so if it is absent before and after a reading, no writer has held the lock in between. Otherwise it reads again.
///
/// # Errors
/// Those of `read`; [`ErrorKind::Busy`] when the time is up, [`ErrorKind::Io`] when the file can't be opened or locked.
pub(super) fn shared<T>(
    path: &Path,
    timeout: Duration,
    mut read: impl FnMut() -> Result<T, Error>,
) -> Result<(T, bool), Error> {
    let start = Instant::now();
    let mut attempts = 0;
    loop {
        let file = if let Some(file) = open_regular(path)? {
            let Some(file) = lock(file, path, start, timeout, Mode::Shared)? else { continue };
            Some(file)
        } else {
            require_directory_of(path)?;
            None
        };
        let result = read();
        let kept_writers_out = match &file {
            Some(file) => is_still_at(file, path)?,
            None => open_regular(path)?.is_none(),
        };
        if kept_writers_out {
            return result.map(|value| (value, file.is_some()));
        }
        // What was read beside a writer means nothing, and neither does an error met then.
        attempts += 1;
        if attempts > 1 && start.elapsed() > timeout {
            return Err(Error::new(ErrorKind::Busy, path, "is replaced again and again: try again"));
        }
    }
}

/// An exclusive lock, held until it is dropped.
#[derive(Debug)]
#[must_use]
pub(super) struct ExclusiveLock {
    path: PathBuf,
    file: File,
    since: Instant,
}

impl ExclusiveLock {
    /// Waits for the lock, whose file is made if there is none.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] when the time is up, [`ErrorKind::Io`] when the file can't be made, opened or locked.
    pub(super) fn acquire(files: &QueueFiles, timeout: Duration) -> Result<Self, Error> {
        let (path, start) = (&files.lock, Instant::now());
        loop {
            let Some(file) = open_regular(path)? else {
                require_directory_of(path)?;
                create(path, &directory_of(&files.queue))?;
                continue;
            };
            if let Some(file) = lock(file, path, start, timeout, Mode::Exclusive)? {
                return Ok(Self { path: path.to_owned(), file, since: Instant::now() });
            }
        }
    }

    /// Whether the lock file is still the one that is locked. If somebody has replaced it, others are not kept out.
    ///
    /// # Errors
    /// If that can't be found out.
    pub(super) fn is_effective(&self) -> Result<bool, Error> {
        is_still_at(&self.file, &self.path)
    }

    /// The lock file's name.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// How long it has been held.
    pub(super) fn held_for(&self) -> Duration {
        self.since.elapsed()
    }
}

/// A wrong path must not switch the locking off, nor put a lock where nobody looks.
fn require_directory_of(path: &Path) -> Result<(), Error> {
    require_directory(&directory_of(path), path, "cannot be the lock file: its directory")
}

/// Makes the lock file, unless somebody else does at the same time. It appears with its owner and mode: nobody must find it and be
/// refused.
fn create(path: &Path, queue_directory: &Path) -> Result<(), Error> {
    let failed = |error| Error::io(path, "cannot be created", error);
    let name = path.file_name().ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?;
    let temporary = Temporary::beside(&directory_of(path), name).map_err(failed)?;
    let queue_directory = fs::metadata(queue_directory).map_err(failed)?;
    attributes::adopt(temporary.file(), &queue_directory).map_err(failed)?;
    match temporary.persist_new(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(failed(error)),
        _ => Ok(()),
    }
}

/// Who else may hold a lock.
#[derive(Clone, Copy)]
pub(super) enum Mode {
    /// All who share it.
    Shared,
    /// Nobody.
    Exclusive,
}

/// Says that the time is up.
pub(super) fn busy(path: &Path, timeout: Duration) -> Error {
    let what = format!("still locked after {timeout:?}{}", held_by(path));
    Error::new(ErrorKind::Busy, path, what).advise("try again")
}

/// Locks `file`, which was opened at `path`, until `timeout` after `start`; `None` if the lock file has been replaced meanwhile, so
/// that whoever locks now locks another.
fn lock(file: File, path: &Path, start: Instant, timeout: Duration, mode: Mode) -> Result<Option<File>, Error> {
    let remaining = timeout.saturating_sub(start.elapsed());
    let file = wait(file, path, remaining, mode)?.ok_or_else(|| busy(path, timeout))?;
    if is_still_at(&file, path)? {
        return Ok(Some(file));
    }
    if start.elapsed() > timeout { Err(busy(path, timeout)) } else { Ok(None) }
}

/// Locks `file`; `None` if that takes longer than `timeout`.
pub(super) fn wait(file: File, path: &Path, timeout: Duration, mode: Mode) -> Result<Option<File>, Error> {
    let failed = |error| Error::io(path, "cannot be locked", error);
    let tried = uninterrupted(|| match mode {
        Mode::Shared => fs2::FileExt::try_lock_shared(&file),
        Mode::Exclusive => fs2::FileExt::try_lock_exclusive(&file),
    });
    match tried {
        Ok(()) => return Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
        Err(error) => return Err(failed(error)),
    }
    // Trying again and again starves behind busy lockers, but who waits inside flock(2) gets its turn. A thread
    // that is still waiting when the time is up unlocks as soon as it gets the lock.
    let (sender, receiver) = mpsc::channel();
    let wait = move || {
        let locked = uninterrupted(|| match mode {
            Mode::Shared => fs2::FileExt::lock_shared(&file),
            Mode::Exclusive => fs2::FileExt::lock_exclusive(&file),
        });
        // Nobody listens any more after the time-out; the file is then closed here.
        drop(sender.send(locked.map(|()| file)));
    };
    thread::Builder::new()
        .spawn(wait)
        .map_err(|error| Error::io(path, "is locked, and no thread can be started to wait for it", error))?;
    match receiver.recv_timeout(timeout) {
        Ok(locked) => locked.map(Some).map_err(failed),
        Err(_) => Ok(None),
    }
}

/// Whether the name still leads to the file.
pub(super) fn is_still_at(file: &File, path: &Path) -> Result<bool, Error> {
    let failed = |error| Error::io(path, "cannot be examined", error);
    let held = file.metadata().map_err(failed)?;
    match fs::metadata(path) {
        Ok(named) => Ok(identity(&held) == identity(&named)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(failed(error)),
    }
}

/// Who holds the lock, as far as the kernel tells.
pub(super) fn held_by(path: &Path) -> String {
    let Ok(metadata) = fs::metadata(path) else { return String::new() };
    // The kernel's numbers for the device are hexadecimal, and packed in its own way.
    let (device, inode) = (metadata.dev(), metadata.ino());
    let major = device >> 8 & 0xfff | device >> 32 & !0xfff;
    let minor = device & 0xff | device >> 12 & !0xff;
    let file = format!("{major:02x}:{minor:02x}:{inode}");
    // The kernel writes its list piece by piece, so that a lock can be missing from it while others come and go.
    let holders = (0..3).map(|_| holders_of(&file)).find(|holders| !holders.is_empty()).unwrap_or_default();
    if holders.is_empty() { String::new() } else { format!(" by {}", holders.join(", ")) }
}

fn holders_of(file: &str) -> Vec<String> {
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    locks
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        // "1: FLOCK ADVISORY WRITE 1234 08:01:131090 0 EOF"; who waits has "->" in the second place.
        .filter(|fields| fields.get(1) == Some(&"FLOCK") && fields.get(5) == Some(&file))
        .map(|fields| match fs::read_to_string(format!("/proc/{}/comm", fields[4])) {
            Ok(name) => format!("process {} ({})", fields[4], name.trim_end()),
            // It has ended and left the lock to a child, or lives in another namespace.
            Err(_) => format!("process {} (gone)", fields[4]),
        })
        .collect()
}
