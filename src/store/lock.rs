//! The reader's side of the lock that guards the queue.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::{Error, ErrorKind, directory_of, open_regular, require_directory, uninterrupted};

/// A shared `flock(2)` on the lock file, or the knowledge that there is none.
///
/// A reader creates no lock file: one that belongs to another user could lock the workers out. A lock file is never
/// removed, so if it is absent before and after a reading, no writer has held the lock in between.
#[derive(Debug)]
#[must_use]
pub struct SharedLock {
    path: PathBuf,
    /// The locked file; closing it unlocks.
    file: Option<File>,
}

impl SharedLock {
    /// Waits for the lock until `timeout` after `start`.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] when the time is up, [`ErrorKind::Io`] when the file can't be opened or locked.
    pub fn acquire(path: &Path, start: Instant, timeout: Duration) -> Result<Self, Error> {
        loop {
            let Some(file) = open_regular(path)? else {
                // A wrong path must not switch the locking off.
                require_directory(&directory_of(path), path, "cannot be the lock file: its directory")?;
                return Ok(Self { path: path.to_owned(), file: None });
            };
            let remaining = timeout.saturating_sub(start.elapsed());
            let file = lock_shared(file, path, remaining)?.ok_or_else(|| busy(path, timeout))?;
            if is_still_at(&file, path)? {
                return Ok(Self { path: path.to_owned(), file: Some(file) });
            }
            // The lock file was replaced while we waited: whoever locks now, locks the new one.
            if start.elapsed() > timeout {
                return Err(busy(path, timeout));
            }
        }
    }

    /// Whether there was a file to lock.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.file.is_some()
    }

    /// Whether no writer that takes the lock can have been at work since [`SharedLock::acquire`].
    ///
    /// # Errors
    /// If that can't be found out.
    pub fn kept_writers_out(&self) -> Result<bool, Error> {
        match &self.file {
            Some(file) => is_still_at(file, &self.path),
            None => Ok(open_regular(&self.path)?.is_none()),
        }
    }
}

/// Locks `file`; `None` if that takes longer than `timeout`.
fn lock_shared(file: File, path: &Path, timeout: Duration) -> Result<Option<File>, Error> {
    let failed = |error| Error::io(path, "cannot be locked", error);
    match uninterrupted(|| fs2::FileExt::try_lock_shared(&file)) {
        Ok(()) => return Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
        Err(error) => return Err(failed(error)),
    }
    // Trying again and again starves behind busy lockers, but who waits inside flock(2) gets its turn. A thread
    // that is still waiting when the time is up unlocks as soon as it gets the lock.
    let (sender, receiver) = mpsc::channel();
    let wait = move || {
        let locked = uninterrupted(|| fs2::FileExt::lock_shared(&file));
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

fn is_still_at(file: &File, path: &Path) -> Result<bool, Error> {
    let failed = |error| Error::io(path, "cannot be examined", error);
    let held = file.metadata().map_err(failed)?;
    match fs::metadata(path) {
        Ok(named) => Ok((held.dev(), held.ino()) == (named.dev(), named.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(failed(error)),
    }
}

fn busy(path: &Path, timeout: Duration) -> Error {
    Error::new(ErrorKind::Busy, path, format!("still locked after {timeout:?}{}", held_by(path))).advise("try again")
}

/// Who holds the lock, as far as the kernel tells.
fn held_by(path: &Path) -> String {
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
