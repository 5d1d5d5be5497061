//! Files that others only ever see whole.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use tempfile::{Builder, NamedTempFile};

use super::{Error, require_directory, uninterrupted};

const TEMPORARY_SUFFIX: &str = ".tmp";

/// Replaces `directory/name` by a file that anyone can read.
///
/// The temporary file beside it is hidden, ends in `.tmp` and is gone after an error. One that a killed run
/// left is removed by the next.
///
/// # Errors
/// If any step fails; what stood there before then still stands there.
pub fn replace(directory: &Path, name: &str, contents: &[u8]) -> Result<(), Error> {
    let target = directory.join(name);
    let failed = |what: &'static str| move |error| Error::io(&directory.join(name), what, error);
    require_directory(directory, directory, "cannot be written into")?;
    let prefix = format!(".{name}.");
    remove_abandoned(directory, &prefix);
    let mut temporary = create_temporary(directory, &prefix)
        .map_err(|error| Error::io(directory, "cannot be written into", without_path(&error)))?;
    temporary
        .write_all(contents)
        // Temporary files are made for their owner alone, but node_exporter runs as another user.
        .and_then(|()| temporary.as_file().set_permissions(Permissions::from_mode(0o644)))
        .and_then(|()| temporary.as_file().sync_all())
        .map_err(failed("cannot be written"))?;
    temporary.persist(&target).map_err(|error| failed("cannot be replaced")(error.error))?;
    Ok(())
}

/// The error without the temporary file's name, which nobody could look for.
fn without_path(error: &io::Error) -> io::Error {
    let text = error.to_string();
    let what = text.split(" at path ").next().unwrap_or_default();
    io::Error::new(error.kind(), what)
}

/// Makes a temporary file and locks it, which tells other runs that it has an owner.
fn create_temporary(directory: &Path, prefix: &str) -> io::Result<NamedTempFile> {
    let prefix = format!("{prefix}{}.", std::process::id());
    loop {
        let file = Builder::new().prefix(&prefix).suffix(TEMPORARY_SUFFIX).tempfile_in(directory)?;
        uninterrupted(|| fs2::FileExt::lock_exclusive(file.as_file()))?;
        // Another run may have taken it for abandoned before it was locked.
        if file.as_file().metadata()?.nlink() > 0 {
            return Ok(file);
        }
    }
}

/// Removes temporary files whose writers are dead. That is housekeeping: what fails here is left to a later run.
fn remove_abandoned(directory: &Path, prefix: &str) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let is_temporary =
            name.to_str().is_some_and(|name| name.starts_with(prefix) && name.ends_with(TEMPORARY_SUFFIX));
        if is_temporary
            && entry.file_type().is_ok_and(|kind| kind.is_file())
            && let Ok(file) = File::open(entry.path())
            && fs2::FileExt::try_lock_exclusive(&file).is_ok()
        {
            drop(fs::remove_file(entry.path()));
        }
    }
}
