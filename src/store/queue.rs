//! Reading the queue: one consistent pass under the shared lock, with memory for one line a thread.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::blob::{BlobStore, BlobUsage};
use super::files::{Finding, OpenQueue, QueueFiles, read_error};
use super::scan::{self, Fold, ReadOptions, count_lines, for_each_chunk};
use super::{Error, lock};
use crate::format::blob::{Digest, References};
use crate::format::lines::LineSplitter;
use crate::format::summary::{MalformedLine, Parameters, Summary};

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
    pub usage: BlobUsage,
    /// How many references of lines to blobs lead nowhere.
    pub missing_references: u64,
}

/// Reads the queue and, after it, the blob store.
///
/// # Errors
/// If the queue can't be read as a whole, or the lock can't be had in time. A blob store that can't be read is no such
/// error, see [`Reading::blobs`].
pub fn read(files: &QueueFiles, options: &ReadOptions, parameters: &Parameters) -> Result<Reading, Error> {
    files.require_directory()?;
    let ((scan, queue_bytes, generations, store), locked) = lock::shared(&files.lock, options.lock_timeout, || {
        // Not before the lock is held: a store that appears later would be taken for absent.
        let store = BlobStore::open(&files.blobs).map(Arc::new);
        let (scan, queue_bytes, generations) = Scan::of_queue(files, options, parameters, store.as_ref().ok())?;
        Ok((scan, queue_bytes, generations, store))
    })?;
    let blobs = match scan.blob_error {
        Some(error) => Err(error),
        None => store.and_then(|store| {
            store.usage().map(|usage| BlobReading { usage, missing_references: scan.missing_references })
        }),
    };
    let mut findings = scan.findings;
    if scan.first_missing.len() == MAX_FIRST_MISSING {
        let message = format!("missing blobs are referred to in {} places; the first:", scan.missing_references);
        findings.push(Finding::new(&files.blobs, message));
    }
    let missing =
        |digest: &Digest| Finding::new(&files.blobs.join(digest.path()), "is missing, though the queue refers to it");
    findings.extend(scan.first_missing.iter().map(missing));
    let told = findings.iter().filter(|finding| finding.line.is_some()).count() as u64;
    let more = scan.summary.malformed.iter().sum::<u64>() - told;
    if more > 0 {
        findings.push(Finding::new(&files.queue, format!("{more} more malformed lines")));
    }
    let unterminated_bytes = scan.unterminated_bytes;
    Ok(Reading { summary: scan.summary, queue_bytes, generations, blobs, findings, locked, unterminated_bytes })
}

/// One pass over lines, or over a part of them.
struct Scan<'a> {
    options: &'a ReadOptions,
    parameters: &'a Parameters,
    /// Unless it can't be looked at.
    store: Option<Arc<BlobStore>>,
    summary: Summary,
    missing_references: u64,
    /// The first blobs that are missing.
    first_missing: Vec<Digest>,
    blob_error: Option<Error>,
    /// How many bytes came after the last `\n` of what was read last.
    unterminated_bytes: u64,
    findings: Vec<Finding>,
}

/// How many missing blobs are told by name.
const MAX_FIRST_MISSING: usize = 10;

impl<'a> Scan<'a> {
    fn new(options: &'a ReadOptions, parameters: &'a Parameters, store: Option<&Arc<BlobStore>>) -> Self {
        Self {
            options,
            parameters,
            store: store.cloned(),
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
        files: &QueueFiles,
        options: &'a ReadOptions,
        parameters: &'a Parameters,
        store: Option<&Arc<BlobStore>>,
    ) -> Result<(Self, u64, u64), Error> {
        let Some(queue) = OpenQueue::open(files)? else {
            let mut scan = Self::new(options, parameters, store);
            let message = "does not exist, and is read as an empty queue: if it should, correct the path";
            scan.findings.push(Finding::new(&files.queue, message));
            return Ok((scan, 0, 0));
        };
        let failed = |error| read_error(&files.queue, error);
        // Writers without the lock may append while we read. What they append now is for the next reading.
        let size = queue.metadata.len();
        let new = || Self::new(options, parameters, store);
        let mut scan = scan::scan(&queue.file, size, options, new).map_err(failed)?;
        if queue.file.metadata().map_err(failed)?.len() < size {
            return Err(failed(io::ErrorKind::UnexpectedEof.into()));
        }
        scan.take_malformed(&files.queue, 0, 0);
        if let Some(other) = queue.other_lock(files) {
            let message = format!("there is another lock, {}: workers that use it are not kept out", other.display());
            scan.findings.push(Finding::new(&files.lock, message));
        }
        let generations = scan.add_generations(&queue)?;
        Ok((scan, size, generations))
    }

    fn add_reference(&mut self, digest: Digest) {
        if let Some(store) = &self.store
            && self.blob_error.is_none()
        {
            match store.exists(&digest) {
                Ok(true) => {}
                Ok(false) => {
                    self.missing_references += 1;
                    self.remember_missing(digest);
                }
                Err(error) => self.blob_error = Some(error),
            }
        }
    }

    fn remember_missing(&mut self, digest: Digest) {
        if self.first_missing.len() < MAX_FIRST_MISSING && !self.first_missing.contains(&digest) {
            self.first_missing.push(digest);
        }
    }

    /// Turns the malformed lines met since the last call into findings about `path`. `before` lines were read before it, and
    /// `skipped` of its own were not read.
    fn take_malformed(&mut self, path: &Path, before: u64, skipped: u64) {
        for MalformedLine { line, malformed } in self.summary.first_malformed.drain(..) {
            let (reason, detail) = (malformed.reason.as_str(), &malformed.detail);
            self.findings.push(Finding {
                path: path.to_owned(),
                line: Some(line - before + skipped),
                message: if malformed.is_ledger {
                    format!(
                        "unreadable ledger ({reason}): {detail}: what compaction removed is missing from all counters"
                    )
                } else {
                    format!("malformed line ({reason}): {detail}: kept as it is, but counted as no record")
                },
            });
        }
    }

    /// Adds the late lines of the queue's generations, and counts these.
    fn add_generations(&mut self, queue: &OpenQueue) -> Result<u64, Error> {
        let (offsets, mut findings) = (self.summary.generations.clone(), Vec::new());
        let count = queue.for_each_late(&offsets, &mut findings, |path, file, range| {
            let failed = |error| read_error(path, error);
            let (before, unterminated_bytes) = (self.summary.lines, self.unterminated_bytes);
            let offset = range.start;
            self.add_segment(file, range).map_err(failed)?;
            self.unterminated_bytes = unterminated_bytes;
            if !self.summary.first_malformed.is_empty() {
                let skipped = count_lines(file, 0..offset, self.options.buffer).map_err(failed)?;
                self.take_malformed(path, before, skipped);
            }
            Ok(())
        });
        self.findings.append(&mut findings);
        count
    }
}

impl Fold for Scan<'_> {
    fn add_segment(&mut self, file: &File, range: Range<u64>) -> io::Result<()> {
        let mut splitter = LineSplitter::new(self.options.max_line);
        let mut references = References::default();
        for_each_chunk(file, range, self.options.buffer, |chunk| {
            splitter.push(chunk, |line| self.summary.add(line, self.parameters));
            references.push(chunk, |digest| self.add_reference(digest));
            Ok(true)
        })?;
        references.finish(|digest| self.add_reference(digest));
        self.unterminated_bytes = splitter.unterminated_bytes();
        Ok(())
    }

    fn depends_on_order(&self) -> bool {
        self.summary.overflowed()
    }

    fn append(&mut self, later: Self) {
        self.summary.merge(later.summary);
        self.missing_references += later.missing_references;
        later.first_missing.into_iter().for_each(|digest| self.remember_missing(digest));
        self.unterminated_bytes = later.unterminated_bytes;
        self.blob_error = self.blob_error.take().or(later.blob_error);
    }
}

#[cfg(test)]
#[expect(clippy::expect_used, reason = "a test that panics has failed")]
mod tests {
    use std::fs;
    use std::num::NonZeroUsize;

    use proptest::prelude::*;

    use super::*;
    use crate::format::lines::RawLine;
    use crate::format::offload;
    use crate::format::spend::Prices;
    use crate::format::time::Timestamp;

    fn parameters() -> Parameters {
        let now = Timestamp::from_micros(1_795_953_600_000_000);
        Parameters {
            now,
            roles: Vec::new(),
            kinds: Vec::new(),
            prices: Prices::default(),
            offload: offload::Rule::default(),
        }
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
                let raw = if line.len() > max_line { RawLine::TooLong { bytes: line.len() as u64, is_ledger: false } } else { RawLine::Whole(line) };
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
}
