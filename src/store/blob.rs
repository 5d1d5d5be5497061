//! The blob store: where blobs lie, and looking at them.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, openat, statat};
use rustix::io::Errno;
use walkdir::{DirEntry, WalkDir};

use super::{Error, ErrorKind, uninterrupted};
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
    /// The directories in it, as far as they have been opened: `None` for what can't be one.
    directories: [OnceLock<Option<OwnedFd>>; 256],
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
    /// Opens the store at `path`.
    ///
    /// # Errors
    /// If what is there is no directory, or can't be opened.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let directory = match OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(path) {
            Ok(directory) => Some(directory),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                return Err(Error::io(path, "is no blob store", error));
            }
            Err(error) => return Err(Error::io(path, "cannot be opened", error)),
        };
        Ok(Self { path: path.to_owned(), directory, directories: [const { OnceLock::new() }; 256] })
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

    /// The directory that a blob lies in; `None` if there is none.
    pub(super) fn directory_of(&self, digest: &Digest) -> Result<Option<&OwnedFd>, Error> {
        let Some(store) = &self.directory else { return Ok(None) };
        let slot = &self.directories[usize::from(digest.first())];
        if slot.get().is_none() {
            let name = digest.directory();
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            match uninterrupted(|| Ok(openat(store, &name, flags, Mode::empty())?)) {
                Ok(directory) => drop(slot.set(Some(directory))),
                // A directory may still be made, but a link or a file is in its way.
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(error) if is_no_directory(&error) => drop(slot.set(None)),
                Err(error) => return Err(Error::io(&self.path.join(name), "cannot be opened", error)),
            }
        }
        Ok(slot.get().and_then(Option::as_ref))
    }

    /// Opens a blob for reading, with its size; `None` if it isn't there.
    ///
    /// # Errors
    /// If it can't be opened.
    pub fn open_blob(&self, digest: &Digest) -> Result<Option<(File, u64)>, Error> {
        let Some(directory) = self.directory_of(digest)? else { return Ok(None) };
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let open = || -> io::Result<(File, Metadata)> {
            let file = File::from(uninterrupted(|| Ok(openat(directory, digest.to_string(), flags, Mode::empty())?))?);
            let metadata = file.metadata()?;
            Ok((file, metadata))
        };
        match open() {
            Ok((file, metadata)) => Ok(metadata.is_file().then_some((file, metadata.len()))),
            // A link, or a socket.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ELOOP | libc::ENXIO)) => Ok(None),
            Err(error) => Err(Error::io(&self.path_of(digest), "cannot be opened", error)),
        }
    }

    /// Whether a blob is there.
    ///
    /// # Errors
    /// If that can't be found out.
    pub fn exists(&self, digest: &Digest) -> Result<bool, Error> {
        let Some(directory) = self.directory_of(digest)? else { return Ok(false) };
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
    pub fn for_each(&self, mut each: impl FnMut(Blob) -> Result<(), Error>) -> Result<(), Error> {
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
    pub fn usage(&self) -> Result<BlobUsage, Error> {
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

impl Blob {
    fn new(digest: Digest, metadata: &Metadata) -> Self {
        let micros = metadata.mtime().saturating_mul(1_000_000).saturating_add(metadata.mtime_nsec() / 1_000);
        Self { digest, bytes: metadata.len(), modified: Timestamp::from_micros(micros) }
    }
}

/// How many bytes are read at once.
pub(super) const BUFFER: usize = 256 * 1024;

/// Whether a directory can't be opened because it is a link or a file.
pub(super) fn is_no_directory(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ELOOP | libc::ENOTDIR))
}
