//! The blob store, as far as it is only looked at.

use std::fs;
use std::io;
use std::path::Path;

use walkdir::{DirEntry, WalkDir};

use super::Error;
use crate::format::blob::{is_blob_directory, is_blob_path};

/// What the blob store holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlobUsage {
    /// How many blobs.
    pub objects: u64,
    /// How many bytes they have together.
    pub bytes: u64,
}

/// Whether the blob at `path`, relative to `store`, is there.
///
/// # Errors
/// If that can't be found out.
pub fn exists(store: &Path, path: &str) -> Result<bool, Error> {
    let path = store.join(path);
    match fs::symlink_metadata(&path) {
        Ok(metadata) => Ok(metadata.is_file()),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(false),
        Err(error) => Err(Error::io(&path, "cannot be examined", error)),
    }
}

/// Counts the blobs below `store`. One that doesn't exist holds none; files of other names are none.
///
/// # Errors
/// If a directory can't be read.
pub fn count(store: &Path) -> Result<BlobUsage, Error> {
    if fs::metadata(store).is_ok_and(|metadata| !metadata.is_dir()) {
        return Err(Error::io(store, "is no blob store", io::ErrorKind::NotADirectory.into()));
    }
    let mut usage = BlobUsage::default();
    // What else lies there, a file system's lost+found say, is nobody's business here.
    let is_ours = |entry: &DirEntry| entry.depth() != 1 || entry.file_name().to_str().is_some_and(is_blob_directory);
    for entry in WalkDir::new(store).max_depth(2).into_iter().filter_entry(is_ours) {
        let result = entry.and_then(|entry| {
            let path = entry.path().strip_prefix(store).ok().and_then(Path::to_str);
            if entry.file_type().is_file() && path.is_some_and(is_blob_path) {
                usage.bytes += entry.metadata()?.len();
                usage.objects += 1;
            }
            Ok(())
        });
        if let Err(error) = result {
            let path = error.path().unwrap_or(store).to_owned();
            let error = error.into_io_error().unwrap_or_else(|| io::Error::other("a loop of links"));
            // Blobs may be collected while we walk, and the store appears with the first one.
            if error.kind() != io::ErrorKind::NotFound {
                return Err(Error::io(&path, "cannot be read", error));
            }
        }
    }
    Ok(usage)
}
