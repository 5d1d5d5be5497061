//! Checking the blob store against the queue.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use memchr::memmem::Finder;

use super::blob::{Blob, BlobStore, BlobUsage};
use super::files::{OpenQueue, QueueFiles, read_error};
use super::scan::{ReadOptions, for_each_chunk};
use super::{Error, ErrorKind, lock, prune};
use crate::format::blob::{ARTIFACT_REF, Digest, Handle, References, for_each_handle};
use crate::format::envelope::{self, Line};
use crate::format::lines::{LineSplitter, RawLine};
use crate::format::time::Timestamp;

/// What is wrong with a store, or with what refers to it.
#[derive(Debug, Default)]
pub struct Problems {
    /// Blobs that are referred to, but aren't there.
    pub missing: Vec<Missing>,
    /// Blobs whose bytes are not those that they are named after, or can't be read, and why.
    pub corrupt: Vec<(Digest, String)>,
    /// Blobs that nothing refers to.
    pub orphaned: Vec<Blob>,
    /// What looks like a handle, but is none or says what isn't so.
    pub forged: Vec<Forged>,
    /// All blobs in the store.
    pub usage: BlobUsage,
    /// Whether there is a queue at all.
    pub has_queue: bool,
}

/// A blob that isn't there.
#[derive(Debug, PartialEq, Eq)]
pub struct Missing {
    /// Its name.
    pub digest: Digest,
    /// What refers to it first.
    pub path: PathBuf,
    /// In which line, from 1, if that is known.
    pub line: Option<u64>,
}

/// Something that looks like a handle.
#[derive(Debug, PartialEq, Eq)]
pub struct Forged {
    /// In which file.
    pub path: PathBuf,
    /// In which line, from 1.
    pub line: u64,
    /// The id of the record, if it is one.
    pub id: Option<Rc<str>>,
    /// What is wrong with it.
    pub what: String,
}

impl Problems {
    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.corrupt.is_empty() && self.orphaned.is_empty() && self.forged.is_empty()
    }
}

/// Compares the store with the queue, and each blob with its name.
///
/// # Errors
/// If anything can't be read.
pub fn check(files: &QueueFiles, options: &ReadOptions) -> Result<Problems, Error> {
    let mut problems = of_queue(files, options)?;
    let store = BlobStore::open(&files.blobs)?;
    let known: BTreeSet<Digest> = problems.missing.iter().map(|missing| missing.digest).collect();
    let mut missing = BTreeMap::new();
    store.for_each(|blob| {
        let (mut references, mut referred) = (References::default(), Vec::new());
        let read = store.read(&blob.digest, |bytes| {
            references.push(bytes, |digest| referred.push(digest));
            Ok(())
        });
        references.finish(|digest| referred.push(digest));
        match read {
            // One that can't be read is told like one that holds something else.
            Err(error) => problems.corrupt.push((blob.digest, error.to_string())),
            // It has been removed since it was listed.
            Ok(None) => return Ok(()),
            Ok(Some(_)) => {}
        }
        problems.usage += blob;
        for digest in referred {
            if !known.contains(&digest) && !store.exists(&digest)? {
                missing.entry(digest).or_insert_with(|| store.path_of(&blob.digest));
            }
        }
        Ok(())
    })?;
    problems.missing.extend(missing.into_iter().map(|(digest, path)| Missing { digest, path, line: None }));
    prune::for_each_unwanted(files, options.lock_timeout, NEVER, |blob| {
        problems.orphaned.push(blob);
        Ok(())
    })?;
    Ok(problems)
}

/// Later than anything.
const NEVER: Timestamp = Timestamp::from_micros(i64::MAX);

/// What the store holds, and what the queue misses in it.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// All blobs.
    pub usage: BlobUsage,
    /// Those that nothing refers to.
    pub orphaned: BlobUsage,
    /// How many bytes the largest has.
    pub largest_bytes: u64,
    /// When the oldest was put last.
    pub oldest: Option<Timestamp>,
    /// How many blobs the queue refers to that aren't there.
    pub missing: u64,
    /// Whether there is a queue at all.
    pub has_queue: bool,
}

/// Sums up the store.
///
/// # Errors
/// If anything can't be read.
pub fn stats(files: &QueueFiles, options: &ReadOptions) -> Result<Stats, Error> {
    let Problems { missing, has_queue, .. } = of_queue(files, options)?;
    let mut stats = Stats { missing: missing.len() as u64, has_queue, ..Stats::default() };
    BlobStore::open(&files.blobs)?.for_each(|blob| {
        stats.usage += blob;
        stats.largest_bytes = stats.largest_bytes.max(blob.bytes);
        stats.oldest = Some(stats.oldest.map_or(blob.modified, |oldest| oldest.min(blob.modified)));
        Ok(())
    })?;
    prune::for_each_unwanted(files, options.lock_timeout, NEVER, |blob| {
        stats.orphaned += blob;
        Ok(())
    })?;
    Ok(stats)
}

/// What is wrong with the references in the queue.
fn of_queue(files: &QueueFiles, options: &ReadOptions) -> Result<Problems, Error> {
    files.require_directory()?;
    let look = || {
        // Not before the lock is held: a store that appears later would be taken for absent.
        let store = BlobStore::open(&files.blobs)?;
        let (missing, forged) = (BTreeMap::new(), Vec::new());
        let mut look = Look { store, options, missing, forged, has_queue: false };
        if let Some(queue) = OpenQueue::open(files)? {
            look.has_queue = true;
            look.add_queue(&files.queue, &queue.file, queue.metadata.len())?;
        }
        Ok(look)
    };
    let (look, _) = lock::shared(&files.lock, options.lock_timeout, look)?;
    let path = &files.queue;
    let missing = look.missing.into_iter().map(|(digest, line)| Missing { digest, path: path.clone(), line });
    let mut missing: Vec<Missing> = missing.collect();
    missing.sort_by_key(|missing| (missing.line, missing.digest));
    Ok(Problems { missing, forged: look.forged, has_queue: look.has_queue, ..Problems::default() })
}

/// A look at the references in the queue.
struct Look<'a> {
    store: BlobStore,
    options: &'a ReadOptions,
    /// With the first line that refers to each, if it is known.
    missing: BTreeMap<Digest, Option<u64>>,
    forged: Vec<Forged>,
    has_queue: bool,
}

impl Look<'_> {
    fn add_queue(&mut self, path: &Path, file: &File, size: u64) -> Result<(), Error> {
        let (reference, artifact_ref) = (Finder::new("blob"), Finder::new(ARTIFACT_REF));
        let (mut splitter, mut number, mut result) = (LineSplitter::new(self.options.max_line), 0, Ok(()));
        let mut read = for_each_chunk(file, 0..size, self.options.buffer, |chunk| {
            splitter.push(chunk, |line| {
                number += 1;
                let RawLine::Whole(line) = line else { return };
                if result.is_ok() && reference.find(line).is_some() {
                    let mut references = References::default();
                    references.push(line, |digest| self.add(digest, Some(number), &mut result));
                    references.finish(|digest| self.add(digest, Some(number), &mut result));
                }
                if result.is_ok() && artifact_ref.find(line).is_some() {
                    result = self.add_handles(path, number, line);
                }
            });
            Ok(result.is_ok())
        });
        // Once more for what lies in lines that are too long, or after the last of them.
        let mut references = References::default();
        read = read.and_then(|()| {
            for_each_chunk(file, 0..size, self.options.buffer, |chunk| {
                references.push(chunk, |digest| self.add(digest, None, &mut result));
                Ok(result.is_ok())
            })
        });
        references.finish(|digest| self.add(digest, None, &mut result));
        read.map_err(|error| read_error(path, error)).and(result)
    }

    fn add(&mut self, digest: Digest, line: Option<u64>, result: &mut Result<(), Error>) {
        match self.store.exists(&digest) {
            Ok(true) => {}
            Ok(false) => {
                self.missing.entry(digest).or_insert(line);
            }
            Err(error) => *result = Err(error),
        }
    }

    fn add_handles(&mut self, path: &Path, number: u64, line: &[u8]) -> Result<(), Error> {
        let Ok(text) = std::str::from_utf8(line) else { return Ok(()) };
        let (mut result, id) = (Ok(()), OnceCell::new());
        for_each_handle(text, |handle| {
            let fault = match &handle {
                None => Ok(Some("an object refers to a blob as a handle does, but is none".to_owned())),
                Some(handle) => self.fault_of(handle).and_then(|fault| match fault {
                    // What a damaged blob was, its handles alone may still say truly.
                    Some(_) if self.is_damaged(&handle.digest)? => Ok(None),
                    fault => Ok(fault),
                }),
            };
            match fault {
                Ok(None) => {}
                Ok(Some(what)) => {
                    let id = id.get_or_init(|| match envelope::parse(line) {
                        Ok(Line::Record(envelope)) => Some(envelope.id.as_ref().into()),
                        _ => None,
                    });
                    self.forged.push(Forged { path: path.to_owned(), line: number, id: id.clone(), what });
                }
                Err(error) => result = Err(error),
            }
        });
        result
    }

    fn is_damaged(&self, digest: &Digest) -> Result<bool, Error> {
        match self.store.read(digest, |_| Ok(())) {
            Err(error) if error.kind() == ErrorKind::BadData => Ok(true),
            read => read.map(|_| false),
        }
    }

    /// What a handle says that isn't so.
    fn fault_of(&self, handle: &Handle<'_>) -> Result<Option<String>, Error> {
        // Whose blob is missing is told anyway.
        let Some((file, size)) = self.store.open_blob(&handle.digest)? else { return Ok(None) };
        let path = self.store.path_of(&handle.digest);
        if size != handle.bytes {
            let what = format!("a handle says {} bytes of a blob that has {size}: {}", handle.bytes, path.display());
            return Ok(Some(what));
        }
        let mut beginning = vec![0; handle.summary.len()];
        let is_beginning = match file.read_exact_at(&mut beginning, 0) {
            Ok(()) => beginning == handle.summary.as_bytes(),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => false,
            Err(error) => return Err(Error::io(&path, "cannot be read", error)),
        };
        let what = || format!("a handle has a summary that is not the beginning of its blob: {}", path.display());
        Ok((!is_beginning).then(what))
    }
}
