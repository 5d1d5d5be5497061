//! Reading a file of lines in one pass, with several threads if that is worth it, and with memory for one line a thread.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::Duration;

use super::uninterrupted;

/// How a queue is read.
#[derive(Clone, Debug)]
pub struct ReadOptions {
    /// How long to wait for the lock.
    pub lock_timeout: Duration,
    /// Longer lines, in bytes, are malformed.
    pub max_line: usize,
    /// How many bytes are read at once.
    pub(crate) buffer: usize,
    /// How many threads to use at most; by default as many as there are processors, but not more than `MAX_THREADS`.
    pub(crate) threads: Option<NonZeroUsize>,
    /// How many bytes a thread must have to do to be worth starting.
    pub(crate) min_segment: u64,
}

/// More threads than this would take more memory than the tools may, and the page cache doesn't feed many more.
const MAX_THREADS: usize = 4;

impl Default for ReadOptions {
    fn default() -> Self {
        Self {
            lock_timeout: Duration::from_secs(10),
            max_line: 64 * 1024 * 1024,
            buffer: 256 * 1024,
            threads: None,
            min_segment: 4 * 1024 * 1024,
        }
    }
}

/// What a pass makes of the lines of a file, or of a segment of it.
pub(super) trait Fold: Send + Sized {
    /// Adds the whole lines of a range that begins where a line does.
    fn add_segment(&mut self, file: &File, range: Range<u64>) -> io::Result<()>;

    /// Whether the result depends on what came before, so that only one pass over everything can tell.
    fn depends_on_order(&self) -> bool;

    /// Adds what follows.
    fn append(&mut self, later: Self);
}

/// Passes over the first `size` bytes of `file`.
pub(super) fn scan<F: Fold>(
    file: &File,
    size: u64,
    options: &ReadOptions,
    new: impl Fn() -> F + Sync,
) -> io::Result<F> {
    let one = |range: &Range<u64>| {
        let mut part = new();
        part.add_segment(file, range.clone()).map(|()| part)
    };
    let mut parts = in_parallel(&segments(file, size, options)?, one)?.into_iter();
    let Some(mut whole) = parts.next() else { return Ok(new()) };
    let later: Vec<F> = parts.collect();
    if later.iter().any(F::depends_on_order) {
        return one(&(0..size));
    }
    for part in later {
        whole.append(part);
    }
    Ok(whole)
}

/// Does a job for each item, the first on this thread and every other on one of its own.
pub(super) fn in_parallel<I: Sync, T: Send, E: Send>(
    items: &[I],
    job: impl Fn(&I) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let Some((first, rest)) = items.split_first() else { return Ok(Vec::new()) };
    let job = &job;
    thread::scope(|scope| {
        let start = |item| (item, thread::Builder::new().spawn_scoped(scope, move || job(item)));
        let threads: Vec<_> = rest.iter().map(start).collect();
        let first = job(first);
        let rest = threads.into_iter().map(|(item, thread)| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            // No thread could be had; then it takes longer.
            Err(_) => job(item),
        });
        // Every thread is waited for, whatever failed.
        let rest: Vec<Result<T, E>> = rest.collect();
        std::iter::once(first).chain(rest).collect()
    })
}

/// Cuts the first `size` bytes of `file` into one or more ranges that each begin where a line does, one a thread.
pub(super) fn segments(file: &File, size: u64, options: &ReadOptions) -> io::Result<Vec<Range<u64>>> {
    let worth_starting = size / options.min_segment.max(1);
    let threads = match options.threads {
        _ if worth_starting < 2 => 1,
        Some(threads) => threads.get(),
        None => thread::available_parallelism().map_or(1, NonZeroUsize::get).min(MAX_THREADS),
    };
    let count = worth_starting.min(threads as u64);
    let mut starts = vec![0];
    for index in 1..count {
        let start = next_line(file, (size / count * index)..size)?;
        if start > starts.last().copied().unwrap_or(0) {
            starts.push(start);
        }
    }
    let ends: Vec<u64> = starts.iter().skip(1).copied().chain([size]).collect();
    Ok(starts.into_iter().zip(ends).map(|(start, end)| start..end).collect())
}

/// Where the first line begins whose predecessor ends in `range`.
pub(super) fn next_line(file: &File, range: Range<u64>) -> io::Result<u64> {
    let (mut position, end) = (range.start, range.end);
    let mut found = None;
    for_each_chunk(file, range, 16 * 1024, |chunk| {
        found = memchr::memchr(b'\n', chunk).map(|newline| position + newline as u64 + 1);
        position += chunk.len() as u64;
        Ok(found.is_none())
    })?;
    Ok(found.unwrap_or(end))
}

pub(super) fn count_lines(file: &File, range: Range<u64>, buffer: usize) -> io::Result<u64> {
    let mut lines = 0;
    for_each_chunk(file, range, buffer, |chunk| {
        lines += memchr::memchr_iter(b'\n', chunk).count() as u64;
        Ok(true)
    })?;
    Ok(lines)
}

/// Where the last line ends that ends in `range`; the range's start if none does.
pub(super) fn last_line_end(file: &File, range: Range<u64>) -> io::Result<u64> {
    const BLOCK: u64 = 64 * 1024;
    let mut end = range.end;
    while end > range.start {
        let start = end.saturating_sub(BLOCK).max(range.start);
        let (mut position, mut found) = (start, None);
        for_each_chunk(file, start..end, usize::try_from(BLOCK).unwrap_or(usize::MAX), |chunk| {
            found = memchr::memrchr(b'\n', chunk).map(|newline| position + newline as u64 + 1).or(found);
            position += chunk.len() as u64;
            Ok(true)
        })?;
        if let Some(found) = found {
            return Ok(found);
        }
        end = start;
    }
    Ok(range.start)
}

/// Reads `range` of `file` in chunks of at most `buffer` bytes, for as long as `sink` says `true`.
pub(super) fn for_each_chunk(
    file: &File,
    range: Range<u64>,
    buffer: usize,
    mut sink: impl FnMut(&[u8]) -> io::Result<bool>,
) -> io::Result<()> {
    let mut memory = vec![0; buffer.max(1)];
    let mut offset = range.start;
    while offset < range.end {
        let wanted = usize::try_from(range.end - offset).unwrap_or(usize::MAX).min(memory.len());
        let read = uninterrupted(|| file.read_at(&mut memory[..wanted], offset))?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        offset += read as u64;
        if !sink(&memory[..read])? {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
#[expect(clippy::expect_used, reason = "a test that panics has failed")]
mod tests {
    use std::io::Write;

    use super::*;

    fn file_of(contents: &[u8]) -> File {
        let mut file = tempfile::tempfile().expect("a temporary file");
        file.write_all(contents).expect("a file with lines");
        file
    }

    #[test]
    fn segments_cover_the_file_and_begin_where_lines_do() {
        let file = file_of(b"aaaa\nbb\n\ncccccccccccccccc\nd\neeee");
        let size = 32;
        for threads in 1..20 {
            let options = ReadOptions { threads: NonZeroUsize::new(threads), min_segment: 1, ..ReadOptions::default() };
            let segments = segments(&file, size, &options).expect("segments");
            assert_eq!((segments[0].start, segments[segments.len() - 1].end), (0, size));
            for pair in segments.windows(2) {
                assert_eq!(pair[0].end, pair[1].start);
                assert!([5, 8, 9, 26, 28, 32].contains(&pair[1].start), "{segments:?}");
            }
        }
    }

    #[test]
    fn the_last_line_ends_at_its_newline() {
        let long = "x".repeat(200_000);
        for (text, start, expected) in [
            (String::new(), 0, 0),
            ("a\nbb\nccc".to_owned(), 0, 5),
            ("a\nbb\nccc\n".to_owned(), 0, 9),
            ("a\nbb\nccc".to_owned(), 5, 5),
            (format!("a\n{long}"), 0, 2),
            (format!("{long}\n{long}"), 0, 200_001),
            (long, 0, 0),
        ] {
            let end = last_line_end(&file_of(text.as_bytes()), start..text.len() as u64).expect("a reading");
            assert_eq!(end, expected, "{} bytes", text.len());
        }
    }
}
