//! Leases: the kernel's word that nobody has a file open for writing.
//!
//! `fcntl(2)` with `F_SETLEASE` is the only way to learn that, and no maintained crate wraps it. Hence the one unsafe call.
#![expect(unsafe_code, reason = "see above: fcntl(2) with integer arguments only")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Chooses the signal that tells of a broken lease; the crate libc lacks it.
const F_SETSIG: libc::c_int = 10;

/// A read lease on a file, held until it is dropped with the file.
#[derive(Debug)]
pub(super) struct Lease<'f> {
    file: &'f File,
}

impl<'f> Lease<'f> {
    /// Takes a lease on a file that was opened for reading only. An error is why there is none, in words.
    pub(super) fn acquire(file: &'f File) -> Result<Self, String> {
        // Who opens the file for writing now breaks the lease, and a signal tells us. The default one would end the process; this
        // one is ignored by default.
        let lease = fcntl(file, F_SETSIG, libc::SIGURG).and_then(|_| fcntl(file, libc::F_SETLEASE, libc::F_RDLCK));
        match lease {
            Ok(_) => Ok(Self { file }),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                Err("somebody has it open for writing: fuser tells who".to_owned())
            }
            // Only its owner is granted one, or who has CAP_LEASE; some file systems grant none.
            Err(error) => Err(format!("nothing can prove that nobody writes into it any more: {error}")),
        }
    }

    /// Whether still nobody has tried to open the file for writing.
    pub(super) fn is_unbroken(&self) -> bool {
        fcntl(self.file, libc::F_GETLEASE, 0).is_ok_and(|lease| lease == libc::F_RDLCK)
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        // Should this fail, closing the file gives it up.
        drop(fcntl(self.file, libc::F_SETLEASE, libc::F_UNLCK));
    }
}

fn fcntl(file: &File, command: libc::c_int, argument: libc::c_int) -> io::Result<libc::c_int> {
    // SAFETY: the descriptor is open, and these commands take an integer and touch no memory of ours.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, argument) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
#[expect(clippy::expect_used, reason = "a test that panics has failed")]
mod tests {
    use std::fs::OpenOptions;
    use std::os::unix::fs::OpenOptionsExt;

    use super::*;

    #[test]
    fn it_is_refused_while_somebody_writes_and_broken_by_who_would() {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        let reader = File::open(file.path()).expect("a reader");
        assert!(Lease::acquire(&reader).is_err_and(|why| why.contains("open for writing")));

        let path = file.into_temp_path();
        let lease = Lease::acquire(&reader).expect("a lease");
        assert!(lease.is_unbroken());
        let second_reader = File::open(&path);
        assert!(second_reader.is_ok() && lease.is_unbroken());
        let writer = OpenOptions::new().append(true).custom_flags(libc::O_NONBLOCK).open(&path);
        assert!(writer.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock));
        assert!(!lease.is_unbroken());
        drop(lease);
        assert!(OpenOptions::new().append(true).open(&path).is_ok());
    }
}
