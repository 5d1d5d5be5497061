//! Records that wait for a person who has not been told of them.

use std::collections::HashMap;
use std::fs::File;
use std::time::Duration;

use super::files::{Finding, QueueFiles};
use super::lock::{self, Mode};
use super::records::{Change, Each, Filter, Found, look_at_queue};
use super::scan::ReadOptions;
use super::{Error, directory_of, replace};
use crate::format::envelope::Status;
use crate::format::time::Timestamp;
use crate::format::transition::Operation;

/// A record that waits for a person who has not been told of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// Its id.
    pub id: String,
    /// Its line, without the `\n`.
    pub line: String,
    /// Why it can't be marked as announced. People would be told of it again and again.
    pub obstacle: Option<Finding>,
}

/// Finds the records that wait for a person who has not been told, in their order: all of them, or those with these ids.
///
/// # Errors
/// If the queue can't be read, the lock can't be had in time, or there are such records, but none could be marked as announced, because the
/// queue could not be replaced.
pub fn find(
    files: &QueueFiles,
    options: &ReadOptions,
    ids: Option<&[&str]>,
    now: Timestamp,
) -> Result<Vec<Waiting>, Error> {
    files.require_directory()?;
    let (found, _) = lock::shared(&files.lock, options.lock_timeout, || read(files, options, ids, now))?;
    Ok(found)
}

/// A record that waits for a person.
struct Human {
    id: String,
    /// Unless a person has been told: its line, and what that would become, or why it can't.
    lines: Option<(String, Result<String, String>)>,
}

fn read(
    files: &QueueFiles,
    options: &ReadOptions,
    ids: Option<&[&str]>,
    now: Timestamp,
) -> Result<Vec<Waiting>, Error> {
    let each: Each<'_, Human> = &|record, place, found| {
        let id = record.id.as_ref();
        if record.status != Status::Human || ids.is_some_and(|ids| !ids.contains(&id)) {
            return;
        }
        let lines = record.more().notified_ts.is_none().then(|| {
            let announced = Operation::Announce.apply(record, now).map(|transition| transition.line);
            let announced = match announced {
                Ok(line) if line.len() > options.max_line => Err("its line would be too long (--max-line)".to_owned()),
                announced => announced,
            };
            (record.line().to_owned(), announced)
        });
        found.push(Found { place, what: Human { id: id.to_owned(), lines } });
    };
    let filter = ids.map_or_else(|| Filter::all(&[Status::Human.as_str()]), Filter::any);
    let Some(mut looked) = look_at_queue(files, options, &filter, each)? else { return Ok(Vec::new()) };
    let humans = std::mem::take(&mut looked.found);
    let mut with_id: HashMap<String, u32> = HashMap::new();
    for human in &humans {
        *with_id.entry(human.what.id.clone()).or_default() += 1;
    }
    let (mut waiting, mut changes) = (Vec::new(), Vec::new());
    for Found { place, what: Human { id, lines } } in humans {
        let Some((line, announced)) = lines else { continue };
        let announced = match announced {
            Ok(_) if with_id.get(&id) != Some(&1) => {
                Err("another one has the same id: mend or remove one of the lines by hand".to_owned())
            }
            announced => announced,
        };
        let obstacle = match announced {
            Ok(line) => {
                changes.push(Change { place, line });
                None
            }
            Err(why) => {
                let id = id.escape_debug();
                let what = format!("record {id} waits for a person, and nobody is told: it can't be marked: {why}");
                Some(Finding { line: Some(place.line), ..Finding::new(&files.queue, what) })
            }
        };
        waiting.push(Waiting { id, line, obstacle });
    }
    if !changes.is_empty() {
        let note = "nobody is told of what waits for a person, for it could not be marked";
        let plan = looked.into_plan(files, &changes, &[], &[]).map_err(|error| error.note(note))?;
        replace::require_possible(files, &plan, now).map_err(|error| error.note(note))?;
    }
    Ok(waiting)
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
