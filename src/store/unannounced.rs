//! Records that wait for a person who has not been told of them.

use std::collections::HashMap;
use std::fs::File;
use std::time::Duration;

use super::files::{Finding, OpenQueue, QueueFiles, read_error};
use super::lock::{self, Mode};
use super::records::{Each, Filter, Found, look};
use super::scan::{ReadOptions, last_line_end};
use super::{Error, directory_of};
use crate::format::envelope::{Doubt, Status};

/// A record that waits for a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// Its id.
    pub id: String,
    /// Its line, without the `\n`.
    pub line: String,
}

/// Finds the records that wait for a person and can be marked as announced, in their order; and says which can't be.
///
/// # Errors
/// If the queue can't be read, or the lock can't be had in time.
pub fn find(files: &QueueFiles, options: &ReadOptions) -> Result<(Vec<Waiting>, Vec<Finding>), Error> {
    files.require_directory()?;
    let (found, _) = lock::shared(&files.lock, options.lock_timeout, || read(files, options))?;
    Ok(found)
}

/// A record that waits for a person, who may have been told.
struct Human {
    waiting: Waiting,
    is_announced: bool,
    doubt: Option<&'static str>,
}

fn read(files: &QueueFiles, options: &ReadOptions) -> Result<(Vec<Waiting>, Vec<Finding>), Error> {
    let Some(queue) = OpenQueue::open(files)? else { return Ok((Vec::new(), Vec::new())) };
    let size = queue.metadata.len();
    let end = last_line_end(&queue.file, 0..size).map_err(|error| read_error(&files.queue, error))?;
    let each: Each<'_, Human> = &|record, place, found| {
        if record.status == Status::Human {
            let waiting = Waiting { id: record.id.to_string(), line: record.line().to_owned() };
            let (is_announced, doubt) = (record.more().notified_ts.is_some(), record.doubt.map(Doubt::as_str));
            found.push(Found { place, what: Human { waiting, is_announced, doubt } });
        }
    };
    let filter = Filter::all(&[Status::Human.as_str()]);
    let humans = look(files, &queue.file, end, options, &filter, each)?.found;
    let mut with_id: HashMap<String, u32> = HashMap::new();
    for human in &humans {
        *with_id.entry(human.what.waiting.id.clone()).or_default() += 1;
    }
    let (mut waiting, mut findings) = (Vec::new(), Vec::new());
    for Found { place, what: human } in humans.into_iter().filter(|human| !human.what.is_announced) {
        let id = &human.waiting.id;
        let ambiguous = (with_id.get(id) != Some(&1)).then_some("another one has the same id");
        // Could it not be marked, it would be announced again and again.
        if let Some(why) = human.doubt.or(ambiguous) {
            let id = id.escape_debug();
            let message = format!("record {id}: waits for a person, but can't be marked as announced: {why}");
            findings.push(Finding { line: Some(place.line), ..Finding::new(&files.queue, message) });
        } else {
            waiting.push(human.waiting);
        }
    }
    Ok((waiting, findings))
}

/// The right to announce records of the queues in a directory, which one process at a time has. It ends with the file that comes back.
///
/// # Errors
/// [`super::ErrorKind::Busy`] when the time is up.
pub fn turn(files: &QueueFiles, timeout: Duration) -> Result<File, Error> {
    let directory = directory_of(&files.queue);
    let opened = File::open(&directory).map_err(|error| Error::io(&directory, "cannot be opened", error))?;
    lock::wait(opened, &directory, timeout, Mode::Exclusive)?.ok_or_else(|| lock::busy(&directory, timeout))
}
