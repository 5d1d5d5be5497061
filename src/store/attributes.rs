//! Owner, permissions, access control lists and extended attributes of files that take another's place.

use std::ffi::{CStr, CString};
use std::fs::{File, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};

use rustix::fs::{XattrFlags, fgetxattr, fgetxattr_query, flistxattr, flistxattr_query, fremovexattr, fsetxattr};
use rustix::io::Errno;

/// Gives `to`, a new file, all attributes of `from`.
///
/// # Errors
/// If one of them can't be given: the file must then not take the other's place.
pub(super) fn copy(from: &File, to: &File) -> io::Result<()> {
    let wanted = from.metadata()?;
    let is_ours = to.metadata()?;
    // In this order, so that the file is at no time open to more than the old one: the owner, whose change costs a file its set-user-id
    // bits, lists that narrow what the mode alone would allow, and at last the mode, which may keep the owner from giving attributes.
    if (wanted.uid(), wanted.gid()) != (is_ours.uid(), is_ours.gid()) {
        fchown(to, Some(wanted.uid()), Some(wanted.gid()))
            .map_err(|error| named(&format!("its owner, {}:{},", wanted.uid(), wanted.gid()), &error))?;
    }
    copy_extended(from, to)?;
    to.set_permissions(Permissions::from_mode(mode(&wanted))).map_err(|error| named("its mode", &error))?;
    let given = to.metadata()?;
    if (given.uid(), given.gid(), mode(&given)) != (wanted.uid(), wanted.gid(), mode(&wanted)) {
        return Err(io::Error::other("the file system did not take its owner and mode"));
    }
    Ok(())
}

/// Gives `to`, made beside the queue `from` for lines of that, to the owner of their directory if we are root, and lets nobody read it who
/// may not read the queue.
pub(super) fn set_aside(from: &File, to: &File, directory: &Metadata) -> io::Result<()> {
    give_to_owner_of(to, directory)?;
    copy_extended(from, to)?;
    let queue = from.metadata()?;
    let [group, others] = [3, 0].map(|shift| mode(&queue) >> shift & 0o6);
    // In another group are others than those who may use the queue as its group.
    let [group, others] = if to.metadata()?.gid() == queue.gid() { [group, others] } else { [group & others; 2] };
    to.set_permissions(Permissions::from_mode(mode(&queue) & 0o600 | group << 3 | others))
}

/// Gives `file`, made beside the queue, to the owner of its directory if we are root: workers must be able to use it.
pub(super) fn adopt(file: &File, directory: &Metadata) -> io::Result<()> {
    give_to_owner_of(file, directory)?;
    // Who may change the directory may use the file.
    file.set_permissions(Permissions::from_mode(directory.mode() & 0o666))
}

/// Gives `file` to the owner of `directory` if we are root, and at least to its group if we can.
pub(super) fn give_to_owner_of(file: &File, directory: &Metadata) -> io::Result<()> {
    if rustix::process::geteuid().is_root() {
        fchown(file, Some(directory.uid()), Some(directory.gid()))
    } else {
        // Others can give it at most to a group of theirs.
        let _ = fchown(file, None, Some(directory.gid()));
        Ok(())
    }
}

fn mode(metadata: &Metadata) -> u32 {
    metadata.mode() & 0o7777
}

/// Extended attributes, which is also how access control lists are stored.
fn copy_extended(from: &File, to: &File) -> io::Result<()> {
    let (mut wanted, inherited) = (names(from)?, names(to)?);
    // Access control lists last: like the mode, they may keep the owner from giving the others.
    wanted.sort_by_key(|name| name.to_bytes().starts_with(b"system."));
    for name in inherited.iter().filter(|name| !wanted.contains(name)) {
        // A default access control list of the directory, say.
        fremovexattr(to, name.as_c_str()).map_err(|error| named(&text(name), &error.into()))?;
    }
    for name in &wanted {
        let wanted = value(from, name)?;
        if inherited.contains(name) && value(to, name)? == wanted {
            continue;
        }
        fsetxattr(to, name.as_c_str(), &wanted, XattrFlags::empty())
            .map_err(|error| named(&text(name), &error.into()))?;
    }
    Ok(())
}

fn names(file: &File) -> io::Result<Vec<CString>> {
    let mut list = match flistxattr_query(file) {
        // This file system has none.
        Err(Errno::NOTSUP) => return Ok(Vec::new()),
        size => vec![0; size?],
    };
    let size = flistxattr(file, &mut list[..])?;
    let names = list[..size].split_inclusive(|byte| *byte == 0);
    Ok(names.filter_map(|name| CStr::from_bytes_with_nul(name).ok().map(CStr::to_owned)).collect())
}

fn value(file: &File, name: &CStr) -> io::Result<Vec<u8>> {
    let mut value = vec![0; fgetxattr_query(file, name)?];
    let size = fgetxattr(file, name, &mut value[..])?;
    value.truncate(size);
    Ok(value)
}

fn text(name: &CStr) -> String {
    format!("its attribute {}", name.to_string_lossy())
}

/// Says which attribute can't be given.
fn named(what: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what} cannot be kept: {error}"))
}
