//! Files that others only ever see whole.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use tempfile::{Builder, NamedTempFile};

use super::{Error, require_directory, uninterrupted};

/// Replaces `directory/name` by a file that anyone can read.
///
/// # Errors
/// If any step fails; what stood there before then still stands there.
pub fn replace(directory: &Path, name: &str, contents: &[u8]) -> Result<(), Error> {
    let target = directory.join(name);
    let failed = |what: &'static str| move |error| Error::io(&directory.join(name), what, error);
    require_directory(directory, directory, "cannot be written into")?;
    let temporary = Temporary::beside(directory, OsStr::new(name))
        .map_err(|error| Error::io(directory, "cannot be written into", error))?;
    let mut file = temporary.file();
    file.write_all(contents)
        // Temporary files are made for their owner alone, but node_exporter runs as another user.
        .and_then(|()| file.set_permissions(Permissions::from_mode(0o644)))
        .and_then(|()| file.sync_all())
        .map_err(failed("cannot be written"))?;
    temporary.persist(&target).map(|_| ()).map_err(failed("cannot be replaced"))
}

/// A file that is not yet where it is to be, and that its owner alone may use.
///
/// It is hidden, ends in `.tmp`, and is gone after an error. One that a killed run left is removed by the next that makes one.
#[derive(Debug)]
pub(super) struct Temporary(NamedTempFile);

impl Temporary {
    /// One that is to become `directory/name`.
    pub(super) fn beside(directory: &Path, name: &OsStr) -> io::Result<Self> {
        remove_abandoned(directory, name);
        Self::new(directory, name)
    }

    /// One in `directory`, for `name`. What dead runs have left is not looked for.
    pub(super) fn new(directory: &Path, name: &OsStr) -> io::Result<Self> {
        let mut prefix = prefix(name);
        prefix.push(format!("{}.", std::process::id()));
        loop {
            let file = Builder::new()
                .prefix(&prefix)
                .suffix(SUFFIX)
                .tempfile_in(directory)
                .map_err(|error| without_path(&error))?;
            // Locked, it tells other runs that it has an owner.
            uninterrupted(|| fs2::FileExt::lock_exclusive(file.as_file()))?;
            // Another run may have taken it for abandoned before it was locked.
            if file.as_file().metadata()?.nlink() > 0 {
                return Ok(Self(file));
            }
        }
    }

    /// The file.
    pub(super) fn file(&self) -> &File {
        self.0.as_file()
    }

    /// Moves it to `target`, in place of what stands there. It is locked until it is closed.
    pub(super) fn persist(self, target: &Path) -> io::Result<File> {
        self.0.persist(target).map_err(|error| error.error)
    }

    /// Has `rename` move it away from its path, and closes it.
    pub(super) fn persist_by<E>(self, rename: impl FnOnce(&Path) -> Result<(), E>) -> Result<(), E> {
        rename(self.0.path())?;
        // What is no longer there need not be removed.
        let (_, path) = self.0.into_parts();
        drop(path.keep());
        Ok(())
    }

    /// Moves it to `target`, where nothing must stand.
    pub(super) fn persist_new(self, target: &Path) -> io::Result<()> {
        self.0.persist_noclobber(target).map(|_| ()).map_err(|error| error.error)
    }
}

const SUFFIX: &str = ".tmp";

fn prefix(name: &OsStr) -> OsString {
    let mut prefix = OsString::from(".");
    prefix.push(name);
    prefix.push(".");
    prefix
}

/// The error without the temporary file's name, which nobody could look for.
fn without_path(error: &io::Error) -> io::Error {
    let text = error.to_string();
    let what = text.split(" at path ").next().unwrap_or_default();
    io::Error::new(error.kind(), what)
}

/// Removes temporary files for `directory/name` whose writers are dead. That is housekeeping: what fails here is left to a later run.
pub(super) fn remove_abandoned(directory: &Path, name: &OsStr) {
    let prefix = prefix(name);
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        if is_temporary(name.as_bytes(), prefix.as_bytes())
            && entry.file_type().is_ok_and(|kind| kind.is_file())
            && let Ok(file) = File::open(entry.path())
            && fs2::FileExt::try_lock_exclusive(&file).is_ok()
        {
            drop(fs::remove_file(entry.path()));
        }
    }
}

/// Whether a name is one that [`Temporary::beside`] gives: the prefix, a process, a dot, something random, the suffix.
fn is_temporary(name: &[u8], prefix: &[u8]) -> bool {
    let middle = name.strip_prefix(prefix).and_then(|rest| rest.strip_suffix(SUFFIX.as_bytes()));
    middle.and_then(|middle| std::str::from_utf8(middle).ok()?.split_once('.')).is_some_and(|(process, random)| {
        !process.is_empty()
            && process.bytes().all(|byte| byte.is_ascii_digit())
            && !random.is_empty()
            && random.bytes().all(|byte| byte.is_ascii_alphanumeric())
    })
}
