//! Reading the queue: one consistent pass under the shared lock, with memory for one line a thread.

use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::scan::{self, Part, ReadOptions, count_lines, for_each_chunk};
use super::{Error, ErrorKind, blob, directory_of, lock, open_regular, require_directory};
use crate::format::blob::References;
use crate::format::lines::LineSplitter;
use crate::format::summary::{MalformedLine, Parameters, Summary};

/// Where a queue and what belongs to it lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueFiles {
    /// The queue itself.
    pub queue: PathBuf,
    /// The lock file.
    pub lock: PathBuf,
    /// The blob store.
    pub blobs: PathBuf,
}

impl QueueFiles {
    /// The names that derive from the queue's.
    #[must_use]
    pub fn beside(queue: PathBuf) -> Self {
        let mut lock = stem(&queue).to_owned();
        lock.push(".lock");
        Self { lock: queue.with_file_name(lock), blobs: queue.with_file_name("blob"), queue }
    }
}

/// The name that the names beside the queue begin with.
pub(super) fn stem(queue: &Path) -> &OsStr {
    let name = queue.file_name().unwrap_or_default();
    OsStr::from_bytes(name.as_bytes().strip_suffix(b".jsonl").unwrap_or(name.as_bytes()))
}

/// What a reading found.
#[derive(Debug)]
pub struct Reading {
    /// The fold over all lines, late lines of earlier generations included.
    pub summary: Summary,
    /// The queue's size.
    pub queue_bytes: u64,
    /// How many earlier generations are still on disk.
    pub generations: u64,
    /// The blob store, or why it couldn't be looked at.
    pub blobs: Result<BlobReading, Error>,
    /// What somebody should look at, though it kept nothing from being read.
    pub findings: Vec<Finding>,
    /// Whether there was a lock file to lock.
    pub locked: bool,
    /// How many bytes of the queue came after its last `\n`.
    pub unterminated_bytes: u64,
}

/// What a reading found of the blob store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlobReading {
    /// What the store holds.
    pub usage: blob::BlobUsage,
    /// How many references of lines to blobs lead nowhere.
    pub missing_references: u64,
}

/// Something that somebody should look at.
#[derive(Debug, PartialEq, Eq)]
pub struct Finding {
    /// In which file.
    pub path: PathBuf,
    /// In which line, from 1.
    pub line: Option<u64>,
    /// What it is.
    pub message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.path.display())?;
        if let Some(line) = self.line {
            write!(f, "{line}:")?;
        }
        write!(f, " {}", self.message)
    }
}

/// Reads the queue and, after it, the blob store.
///
/// # Errors
/// If the queue can't be read as a whole, or the lock can't be had in time. A blob store that can't be read is no such
/// error, see [`Reading::blobs`].
pub fn read(files: &QueueFiles, options: &ReadOptions, parameters: &Parameters) -> Result<Reading, Error> {
    // Without one this is no empty queue, but more likely a file system that isn't mounted, or a wrong path.
    require_directory(&directory_of(&files.queue), &files.queue, "cannot be read: its directory")?;
    let ((scan, queue_bytes, generations), locked) =
        lock::shared(&files.lock, options.lock_timeout, || Scan::of_queue(files, options, parameters))?;
    let blobs = match scan.blob_error {
        Some(error) => Err(error),
        None => {
            blob::count(&files.blobs).map(|usage| BlobReading { usage, missing_references: scan.missing_references })
        }
    };
    let mut findings = scan.findings;
    if scan.first_missing.len() == MAX_FIRST_MISSING {
        findings.push(Finding {
            path: files.blobs.clone(),
            line: None,
            message: format!("missing blobs are referred to in {} places; the first:", scan.missing_references),
        });
    }
    findings.extend(scan.first_missing.into_iter().map(|path| Finding {
        path: files.blobs.join(path),
        line: None,
        message: "is missing, though the queue refers to it".to_owned(),
    }));
    let told = findings.iter().filter(|finding| finding.line.is_some()).count() as u64;
    let more = scan.summary.malformed.iter().sum::<u64>() - told;
    if more > 0 {
        let message = format!("{more} more malformed lines");
        findings.push(Finding { path: files.queue.clone(), line: None, message });
    }
    let unterminated_bytes = scan.unterminated_bytes;
    Ok(Reading { summary: scan.summary, queue_bytes, generations, blobs, findings, locked, unterminated_bytes })
}

/// One pass over lines, or over a part of them.
struct Scan<'a> {
    options: &'a ReadOptions,
    parameters: &'a Parameters,
    blobs: &'a Path,
    summary: Summary,
    missing_references: u64,
    /// The first blobs that are missing, by their paths below the store.
    first_missing: Vec<String>,
    blob_error: Option<Error>,
    /// How many bytes came after the last `\n` of what was read last.
    unterminated_bytes: u64,
    findings: Vec<Finding>,
}

/// How many missing blobs are told by name.
const MAX_FIRST_MISSING: usize = 10;

impl<'a> Scan<'a> {
    fn new(files: &'a QueueFiles, options: &'a ReadOptions, parameters: &'a Parameters) -> Self {
        Self {
            options,
            parameters,
            blobs: &files.blobs,
            summary: Summary::new(parameters),
            missing_references: 0,
            first_missing: Vec::new(),
            blob_error: None,
            unterminated_bytes: 0,
            findings: Vec::new(),
        }
    }

    /// Reads the queue and the late lines of its generations; also tells the queue's size and the number of generations.
    fn of_queue(
        files: &'a QueueFiles,
        options: &'a ReadOptions,
        parameters: &'a Parameters,
    ) -> Result<(Self, u64, u64), Error> {
        let Some(file) = open_regular(&files.queue)? else {
            missing(files)?;
            let mut scan = Self::new(files, options, parameters);
            scan.findings.push(Finding {
                path: files.queue.clone(),
                line: None,
                message: "does not exist, and is read as an empty queue: if it should, correct the path".to_owned(),
            });
            return Ok((scan, 0, 0));
        };
        let failed = |error| read_error(&files.queue, error);
        let real = fs::canonicalize(&files.queue).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        // Writers without the lock may append while we read. What they append now is for the next reading.
        let size = metadata.len();
        let mut scan = scan::scan(&file, size, options, || Self::new(files, options, parameters)).map_err(failed)?;
        if file.metadata().map_err(failed)?.len() < size {
            return Err(failed(io::ErrorKind::UnexpectedEof.into()));
        }
        scan.take_malformed(&files.queue, 0, 0);
        scan.compare_locks(files, &real);
        let generations = scan.add_generations(&directory_of(&real), stem(&real), &metadata)?;
        Ok((scan, size, generations))
    }

    fn add_reference(&mut self, path: &str) {
        if self.blob_error.is_none() {
            match blob::exists(self.blobs, path) {
                Ok(true) => {}
                Ok(false) => {
                    self.missing_references += 1;
                    self.remember_missing(path.to_owned());
                }
                Err(error) => self.blob_error = Some(error),
            }
        }
    }

    fn remember_missing(&mut self, path: String) {
        if self.first_missing.len() < MAX_FIRST_MISSING && !self.first_missing.contains(&path) {
            self.first_missing.push(path);
        }
    }

    /// Turns the malformed lines met since the last call into findings about `path`. `before` lines were read before it, and
    /// `skipped` of its own were not read.
    fn take_malformed(&mut self, path: &Path, before: u64, skipped: u64) {
        for MalformedLine { line, malformed } in self.summary.first_malformed.drain(..) {
            let (reason, detail) = (malformed.reason.as_str(), malformed.detail);
            self.findings.push(Finding {
                path: path.to_owned(),
                line: Some(line - before + skipped),
                message: format!("malformed line ({reason}): {detail}: kept as it is, but counted as no record"),
            });
        }
    }

    /// Looks whether workers that know the queue by its real name, not by the link, lock another file.
    fn compare_locks(&mut self, files: &QueueFiles, real: &Path) {
        let other = QueueFiles::beside(real.to_owned()).lock;
        let file = |path: &Path| fs::metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()));
        if fs::symlink_metadata(&files.queue).is_ok_and(|metadata| metadata.is_symlink())
            && file(&other).is_some_and(|other| file(&files.lock) != Some(other))
        {
            self.findings.push(Finding {
                path: files.lock.clone(),
                line: None,
                message: format!("there is another lock, {}: workers that use it are not kept out", other.display()),
            });
        }
    }

    /// Adds the late lines of the generations in `directory` and counts the generations.
    fn add_generations(&mut self, directory: &Path, stem: &OsStr, queue: &fs::Metadata) -> Result<u64, Error> {
        let mut count = 0;
        let mut unlisted = Vec::new();
        for (number, path) in generations(directory, stem)? {
            let failed = |error| read_error(&path, error);
            let metadata = match fs::metadata(&path).or_else(|_| fs::symlink_metadata(&path)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                metadata => metadata.map_err(failed)?,
            };
            if (queue.dev(), queue.ino()) == (metadata.dev(), metadata.ino()) {
                continue; // a second name of the queue, which a killed run left
            }
            count += 1;
            let Some(&offset) = self.summary.generations.get(&number) else {
                unlisted.push(path);
                continue;
            };
            let Some(file) = open_regular(&path)? else { continue };
            let size = file.metadata().map_err(failed)?.len();
            if offset > size {
                self.findings.push(Finding {
                    path,
                    line: None,
                    message: format!(
                        "has {size} bytes, but the queue's ledger says that {offset} have been taken over"
                    ),
                });
                continue;
            }
            let (before, unterminated_bytes) = (self.summary.lines, self.unterminated_bytes);
            self.add_range(&file, offset..size).map_err(failed)?;
            self.unterminated_bytes = unterminated_bytes;
            if !self.summary.first_malformed.is_empty() {
                let skipped = count_lines(&file, 0..offset, self.options.buffer).map_err(failed)?;
                self.take_malformed(&path, before, skipped);
            }
        }
        if let [path, more @ ..] = unlisted.as_slice() {
            let message = match more.len() {
                0 => "a generation that the queue's ledger does not list: not read, never deleted".to_owned(),
                more => format!(
                    "this and {more} more generations that the queue's ledger does not list: not read, never deleted"
                ),
            };
            self.findings.push(Finding { path: path.clone(), line: None, message });
        }
        Ok(count)
    }
}

impl Part for Scan<'_> {
    fn add_range(&mut self, file: &File, range: Range<u64>) -> io::Result<()> {
        let mut splitter = LineSplitter::new(self.options.max_line);
        let mut references = References::default();
        for_each_chunk(file, range, self.options.buffer, |chunk| {
            splitter.push(chunk, |line| self.summary.add(line, self.parameters));
            references.push(chunk, |path| self.add_reference(path));
            Ok(true)
        })?;
        references.finish(|path| self.add_reference(path));
        self.unterminated_bytes = splitter.unterminated_bytes();
        Ok(())
    }

    fn depends_on_order(&self) -> bool {
        self.summary.overflowed()
    }

    fn append(&mut self, later: Self) {
        self.summary.merge(later.summary);
        self.missing_references += later.missing_references;
        later.first_missing.into_iter().for_each(|path| self.remember_missing(path));
        self.unterminated_bytes = later.unterminated_bytes;
        self.blob_error = self.blob_error.take().or(later.blob_error);
    }
}

/// What it means that there is no queue file: an empty queue.
///
/// # Errors
/// If there are earlier generations, so that there was one.
pub(super) fn missing(files: &QueueFiles) -> Result<(), Error> {
    match generations(&directory_of(&files.queue), stem(&files.queue))?.first() {
        None => Ok(()),
        Some((_, path)) => {
            let what =
                format!("is missing, though it has an earlier generation, {}: it has been removed", path.display());
            Err(Error::new(ErrorKind::Io, &files.queue, what))
        }
    }
}

/// What is wrong when a file of the queue can't be read.
pub(super) fn read_error(path: &Path, error: io::Error) -> Error {
    if matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::NotFound) {
        let what = "was cut or removed while it was read: somebody changes it without the lock: try again";
        return Error::new(ErrorKind::Busy, path, what);
    }
    Error::io(path, "cannot be read", error)
}

/// The files in `directory` that are named like generations, in ascending order.
pub(super) fn generations(directory: &Path, stem: &OsStr) -> Result<Vec<(u64, PathBuf)>, Error> {
    let failed = |error| Error::io(directory, "cannot be listed to look for earlier generations of the queue", error);
    let mut prefix = stem.to_owned();
    prefix.push(".gen.");
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let digits =
            name.as_bytes().strip_prefix(prefix.as_bytes()).and_then(|digits| std::str::from_utf8(digits).ok());
        if let Some(digits) = digits
            && let Ok(number) = digits.parse::<u64>()
            && number.to_string() == digits
        {
            found.push((number, entry.path()));
        }
    }
    found.sort_unstable();
    Ok(found)
}

#[cfg(test)]
#[expect(clippy::expect_used, reason = "a test that panics has failed")]
mod tests {
    use std::num::NonZeroUsize;

    use proptest::prelude::*;

    use super::*;
    use crate::format::lines::RawLine;
    use crate::format::spend::Prices;
    use crate::format::time::Timestamp;

    fn parameters() -> Parameters {
        let now = Timestamp::from_micros(1_795_953_600_000_000);
        Parameters { now, roles: Vec::new(), kinds: Vec::new(), prices: Prices::default() }
    }

    fn queue_of(contents: &[u8]) -> (tempfile::TempDir, QueueFiles) {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let files = QueueFiles::beside(directory.path().join("queue.jsonl"));
        io::Write::write_all(
            &mut fs::OpenOptions::new().create_new(true).write(true).open(&files.queue).expect("a queue"),
            contents,
        )
        .expect("a queue with lines");
        (directory, files)
    }

    /// Lines of every sort: records with roles of few or many names, malformed ones, blanks, long ones, a ledger.
    fn line() -> impl Strategy<Value = Vec<u8>> {
        let record = (0..4_u8, 0..80_u8, 0..60_usize).prop_map(|(status, role, size)| {
            let status = ["queued", "done", "nack", "human"][usize::from(status)];
            let role = if role < 20 { role % 4 } else { role };
            let text = "x".repeat(size * size);
            format!(
                "{{\"id\":\"1\",\"ts\":17959500{role:02},\"kind\":\"k{}\",\"from\":\"a\",\"to\":\"role-{role}\",\"payload\":{{\"text\":\"{text}\"}},\
                 \"status\":\"{status}\",\"started_ts\":1795950100,\"finished_ts\":17959502{role:02},\
                 \"spend\":[{{\"cost_usd\":0.{role},\"model\":\"m-{role}\",\"input_tokens\":{role}}}]}}",
                role % 3
            )
            .into_bytes()
        });
        let ledger = br#"{"id":"ledger","ts":1,"kind":"ledger","from":"handoff","to":"","payload":{"version":1,"totals":{"cells":[{"role":"role-1","kind":"k1","records":3}]},"generations":{"7":12}},"status":"ledger"}"#;
        prop_oneof![
            20 => record,
            1 => Just(b"\0\0\0\0".to_vec()),
            1 => Just(b"{}{}".to_vec()),
            1 => Just(b"\xff".to_vec()),
            1 => Just(b"\r".to_vec()),
            1 => Just(ledger.to_vec()),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]

        /// However a queue is cut into reads and segments, the fold is the same as over its lines one by one.
        #[test]
        fn chunking_and_threads_change_nothing(
            lines in proptest::collection::vec(line(), 0..250),
            tail in prop_oneof![Just(Vec::new()), line()],
            buffer in prop_oneof![Just(1_usize), 2..100_usize, Just(4_096), Just(1024 * 1024)],
            threads in 1..5_usize,
            max_line in prop_oneof![Just(1_000_usize), Just(100_000)],
        ) {
            let parameters = parameters();
            let mut expected = Summary::new(&parameters);
            let mut queue = Vec::new();
            for line in &lines {
                let raw = if line.len() > max_line { RawLine::TooLong { bytes: line.len() as u64 } } else { RawLine::Whole(line) };
                expected.add(raw, &parameters);
                queue.extend_from_slice(line);
                queue.push(b'\n');
            }
            queue.extend_from_slice(&tail);
            expected.first_malformed.clear(); // they are findings now

            let (_directory, files) = queue_of(&queue);
            let options = ReadOptions { max_line, buffer, threads: NonZeroUsize::new(threads), min_segment: 100, ..ReadOptions::default() };
            let reading = read(&files, &options, &parameters).expect("a reading");
            prop_assert_eq!(reading.summary, expected);
            prop_assert_eq!(reading.queue_bytes, queue.len() as u64);
            let numbers: Vec<u64> = reading.findings.iter().filter_map(|finding| finding.line).collect();
            let malformed = |line: &&Vec<u8>| line.len() > max_line || matches!(line[0], 0 | 0xff) || line.starts_with(b"{}");
            let expected_numbers: Vec<u64> =
                (1..).zip(&lines).filter(|(_, line)| malformed(line)).map(|(number, _)| number).take(10).collect();
            prop_assert_eq!(numbers, expected_numbers);
        }
    }

    #[test]
    fn names_derive_from_the_stem() {
        let files = QueueFiles::beside("/var/lib/agents/x.jsonl".into());
        assert_eq!(files.lock, Path::new("/var/lib/agents/x.lock"));
        assert_eq!(files.blobs, Path::new("/var/lib/agents/blob"));
        assert_eq!(QueueFiles::beside("x.json".into()).lock, Path::new("x.json.lock"));
    }
}
