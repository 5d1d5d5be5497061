//! The blob store: where blobs lie, and looking at them.

use std::ffi::OsStr;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, openat, readlinkat, statat,
    unlinkat, utimensat,
};
use rustix::io::Errno;
use walkdir::{DirEntry, WalkDir};

use super::atomic_file::{self, Temporary};
use super::{Error, ErrorKind, lock, uninterrupted};
use crate::format::blob::{Digest, Hasher, is_blob_directory};
use crate::format::time::Timestamp;

/// A blob store, which may not exist yet.
///
/// Whoever may write into it may plant links in it, so none is followed.
#[derive(Debug)]
pub struct BlobStore {
    path: PathBuf,
    /// `None` if there is no store.
    directory: Option<File>,
    /// The directories in it, as far as they have been opened.
    directories: [OnceLock<File>; 256],
}

/// A blob in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blob {
    /// Its name.
    pub digest: Digest,
    /// How many bytes it has.
    pub bytes: u64,
    /// When it was put last.
    pub modified: Timestamp,
}

/// What a blob store holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlobUsage {
    /// How many blobs.
    pub objects: u64,
    /// How many bytes they have together.
    pub bytes: u64,
}

impl BlobStore {
    /// Opens the store at `path`. It may be a symbolic link only if nobody else could have planted that to have us read and write elsewhere.
    ///
    /// # Errors
    /// If what is there is no directory, or can't be opened.
    pub fn open(path: &Path) -> Result<Self, Error> {
        // A slash at the end would have the link followed.
        let path = &path.components().collect::<PathBuf>();
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let failed = |error: Errno| Error::io(path, "cannot be opened", error.into());
        let found = match openat(CWD, path, flags, Mode::empty()) {
            Ok(found) => File::from(found),
            Err(Errno::NOENT) => return Ok(Self::new(path, None)),
            Err(error) => return Err(failed(error)),
        };
        let metadata = found.metadata().map_err(|error| Error::io(path, "cannot be examined", error))?;
        if !metadata.is_symlink() {
            return Self::open_at(path, &opened(&found));
        }
        if ![0, rustix::process::geteuid().as_raw()].contains(&metadata.uid()) {
            let what =
                format!("is a symbolic link that belongs to another user, {}, and is not followed", metadata.uid());
            return Err(Error::io(path, what, io::ErrorKind::PermissionDenied.into())
                .advise("give the link to root (chown -h), or name the place itself with --blob-dir"));
        }
        // The link that was judged, whatever stands in its place by now.
        let target = readlinkat(&found, "", Vec::new()).map_err(failed)?;
        Self::open_at(path, &path.with_file_name(OsStr::from_bytes(target.to_bytes())))
    }

    fn open_at(path: &Path, place: &Path) -> Result<Self, Error> {
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(place);
        let directory = opened.map_err(|error| match error.raw_os_error() {
            Some(libc::ENOENT) => Error::io(path, "is a symbolic link to a place that is missing", error)
                .advise("mount the disk that it leads to, or correct the link"),
            Some(libc::ENOTDIR | libc::ELOOP) => {
                Error::io(path, "is no blob store", error).advise("move it away, or name the store with --blob-dir")
            }
            _ => Error::io(path, "cannot be opened", error),
        })?;
        Ok(Self::new(path, Some(directory)))
    }

    fn new(path: &Path, directory: Option<File>) -> Self {
        Self { path: path.to_owned(), directory, directories: [const { OnceLock::new() }; 256] }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where a blob is, or would be.
    #[must_use]
    pub fn path_of(&self, digest: &Digest) -> PathBuf {
        self.path.join(digest.path())
    }

    /// The store's directory.
    ///
    /// # Errors
    /// If there is none.
    pub(super) fn directory(&self) -> Result<&File, Error> {
        let missing = || Error::io(&self.path, "is no blob store", io::ErrorKind::NotFound.into());
        self.directory.as_ref().ok_or_else(missing)
    }

    /// The directory of the blobs whose digests begin with a byte; `None` if there is none.
    pub(super) fn directory_of(&self, first: u8) -> Result<Option<&File>, Error> {
        let slot = &self.directories[usize::from(first)];
        if let (None, Some(store)) = (slot.get(), &self.directory) {
            let name = format!("{first:02x}");
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            match openat(store, &name, flags, Mode::empty()) {
                Ok(directory) => drop(slot.set(directory.into())),
                // A link or a file is none.
                Err(Errno::NOENT | Errno::LOOP | Errno::NOTDIR) => {}
                Err(error) => return Err(Error::io(&self.path.join(name), "cannot be opened", error.into())),
            }
        }
        Ok(slot.get())
    }

    /// A temporary file in the store.
    pub(super) fn temporary(&self) -> io::Result<Temporary> {
        let directory = self.directory.as_ref().ok_or(io::ErrorKind::NotFound)?;
        // Not by its own path, which somebody may turn into another's.
        Temporary::new(&opened(directory), OsStr::new(TEMPORARY))
    }

    /// Removes temporary files that dead runs have left.
    pub(super) fn remove_abandoned(&self) {
        if let Some(directory) = &self.directory {
            atomic_file::remove_abandoned(&opened(directory), OsStr::new(TEMPORARY));
        }
    }

    /// Locks the store: shared by those who put, exclusively by who prunes.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] when the time is up.
    pub(super) fn lock(&self, timeout: Duration, mode: lock::Mode) -> Result<File, Error> {
        let failed = |error: Errno| Error::io(&self.path, "cannot be opened", error.into());
        // A description of its own, for that is what a lock belongs to.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = File::from(openat(self.directory()?, ".", flags, Mode::empty()).map_err(failed)?);
        let lock = lock::wait(directory, &self.path, timeout, mode)?.ok_or_else(|| lock::busy(&self.path, timeout))?;
        self.require_in_place(&lock).map(|()| lock)
    }

    /// Makes sure that the store has not been moved away since it was opened.
    pub(super) fn require_in_place(&self, directory: &File) -> Result<(), Error> {
        if lock::is_still_at(directory, &self.path)? {
            return Ok(());
        }
        let what = "was moved away or replaced while it was in use, so no line refers to what is new in it";
        Err(Error::new(ErrorKind::Busy, &self.path, what).advise("try again"))
    }

    /// Sets the time of modification of a blob to now, if it is there.
    ///
    /// # Errors
    /// If that can't be done, because it belongs to somebody else say.
    pub(super) fn refresh(&self, digest: &Digest) -> io::Result<()> {
        // What can't be opened is told by whoever reads it.
        let Ok(Some(directory)) = self.directory_of(digest.first()) else { return Ok(()) };
        let only = |tv_nsec| Timespec { tv_sec: 0, tv_nsec };
        let now = Timestamps { last_access: only(UTIME_OMIT), last_modification: only(UTIME_NOW) };
        match utimensat(directory, digest.to_string(), &now, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes a blob.
    pub(super) fn remove(&self, digest: &Digest) -> Result<(), Error> {
        let Some(directory) = self.directory_of(digest.first())? else { return Ok(()) };
        match unlinkat(directory, digest.to_string(), AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(Error::io(&self.path_of(digest), "cannot be removed", error.into())),
        }
    }

    /// Opens a blob for reading, with its size; `None` if it isn't there.
    ///
    /// # Errors
    /// If it can't be opened.
    pub(crate) fn open_blob(&self, digest: &Digest) -> Result<Option<(File, u64)>, Error> {
        let Some(directory) = self.directory_of(digest.first())? else { return Ok(None) };
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let failed = |error| Error::io(&self.path_of(digest), "cannot be opened", error);
        let file = match openat(directory, digest.to_string(), flags, Mode::empty()) {
            Ok(file) => File::from(file),
            // A link or a socket is no blob.
            Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => return Ok(None),
            Err(error) => return Err(failed(error.into())),
        };
        let metadata = file.metadata().map_err(failed)?;
        Ok(metadata.is_file().then_some((file, metadata.len())))
    }

    /// Whether a blob is there.
    ///
    /// # Errors
    /// If that can't be found out.
    pub(crate) fn exists(&self, digest: &Digest) -> Result<bool, Error> {
        let Some(directory) = self.directory_of(digest.first())? else { return Ok(false) };
        match statat(directory, digest.to_string(), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(FileType::from_raw_mode(stat.st_mode).is_file()),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(Error::io(&self.path_of(digest), "cannot be examined", error.into())),
        }
    }

    /// Passes on the bytes of a blob, and says how many there were; `None` if it isn't there.
    ///
    /// # Errors
    /// [`ErrorKind::BadData`], after the last byte, if they are not those that the blob is named after. Those of `sink`, and of reading.
    pub fn read(
        &self,
        digest: &Digest,
        mut sink: impl FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<Option<u64>, Error> {
        let Some((mut file, _)) = self.open_blob(digest)? else { return Ok(None) };
        let path = self.path_of(digest);
        let (mut hasher, mut bytes, mut buffer) = (Hasher::default(), 0, vec![0; BUFFER]);
        loop {
            let read = uninterrupted(|| io::Read::read(&mut file, &mut buffer));
            let read = read.map_err(|error| Error::io(&path, "cannot be read", error))?;
            if read == 0 {
                break;
            }
            bytes += read as u64;
            hasher.update(&buffer[..read]);
            sink(&buffer[..read])?;
        }
        let found = hasher.finish();
        if found != *digest {
            let what = format!("is damaged: its {bytes} bytes have the SHA-256 {found}");
            return Err(Error::new(ErrorKind::BadData, &path, what).advise("restore it from a backup"));
        }
        Ok(Some(bytes))
    }

    /// Passes on each blob in the store, for as long as `each` has no error. Files of other names are none.
    ///
    /// # Errors
    /// If a directory can't be read.
    pub(crate) fn for_each(&self, mut each: impl FnMut(Blob) -> Result<(), Error>) -> Result<(), Error> {
        // What else lies there, a file system's lost+found say, is nobody's business here.
        let is_ours =
            |entry: &DirEntry| entry.depth() != 1 || entry.file_name().to_str().is_some_and(is_blob_directory);
        for entry in WalkDir::new(&self.path).max_depth(2).into_iter().filter_entry(is_ours) {
            let blob = entry.and_then(|entry| {
                let digest =
                    entry.path().strip_prefix(&self.path).ok().and_then(Path::to_str).and_then(Digest::parse_path);
                match digest {
                    Some(digest) if entry.file_type().is_file() => Ok(Some(Blob::new(digest, &entry.metadata()?))),
                    _ => Ok(None),
                }
            });
            match blob {
                Ok(blob) => blob.map_or(Ok(()), &mut each)?,
                Err(error) => {
                    let path = error.path().unwrap_or(&self.path).to_owned();
                    let error = error.into_io_error().unwrap_or_else(|| io::Error::other("a loop of links"));
                    // Blobs may be removed while we walk, and the store appears with the first one.
                    if error.kind() != io::ErrorKind::NotFound {
                        return Err(Error::io(&path, "cannot be read", error));
                    }
                }
            }
        }
        Ok(())
    }

    /// Counts the blobs in the store.
    ///
    /// # Errors
    /// If a directory can't be read.
    pub(crate) fn usage(&self) -> Result<BlobUsage, Error> {
        let mut usage = BlobUsage::default();
        self.for_each(|blob| {
            usage += blob;
            Ok(())
        })?;
        Ok(usage)
    }
}

impl std::ops::AddAssign<Blob> for BlobUsage {
    fn add_assign(&mut self, blob: Blob) {
        self.objects += 1;
        self.bytes += blob.bytes;
    }
}

impl std::ops::AddAssign for BlobUsage {
    fn add_assign(&mut self, more: Self) {
        self.objects += more.objects;
        self.bytes += more.bytes;
    }
}

impl Blob {
    fn new(digest: Digest, metadata: &Metadata) -> Self {
        let micros = metadata.mtime().saturating_mul(1_000_000).saturating_add(metadata.mtime_nsec() / 1_000);
        Self { digest, bytes: metadata.len(), modified: Timestamp::from_micros(micros) }
    }
}

/// How many bytes are read at once.
pub(super) const BUFFER: usize = 256 * 1024;

/// What temporary files in the store are named after.
const TEMPORARY: &str = "blob";

/// A path that leads to what is open, wherever that is now.
fn opened(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}
