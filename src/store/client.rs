//! What agents do with the queue: put, take, done, nack and the like, each in one commit.

use super::files::{Finding, QueueFiles};
use super::scan::ReadOptions;
use super::{Error, ErrorKind};
use crate::format::envelope::Status;
use crate::format::offload::Rule;
use crate::format::owner::Owner;
use crate::format::time::Timestamp;

/// A queue, and the rules of handing over.
#[derive(Clone, Debug)]
pub struct Client {
    /// Where it is.
    pub files: QueueFiles,
    /// How it is read.
    pub options: ReadOptions,
    /// The kinds that there are.
    pub kinds: Vec<String>,
    /// How many ancestors a record may have.
    pub max_hops: u32,
    /// What is too large for a line.
    pub rule: Rule,
}

/// What came of an operation on a record.
#[derive(Debug)]
pub struct Changed {
    /// The record's id.
    pub id: String,
    /// The kind.
    pub kind: String,
    /// What it is now.
    pub status: Status,
    /// Its line now, without the `\n`.
    pub line: String,
    /// The id and status of the follow-up that was put.
    pub followup: Option<Put>,
    /// What somebody should look at.
    pub findings: Vec<Finding>,
}

/// A record that was put, or was there.
#[derive(Debug)]
pub struct Put {
    /// Its id.
    pub id: String,
    /// What it is.
    pub status: Status,
    /// Whether the same had been put before, so that nothing was written.
    pub existed: bool,
    /// Why it is not queued.
    pub stopped: Option<String>,
    /// What somebody should look at.
    pub findings: Vec<Finding>,
}

/// What is to be put.
#[derive(Clone, Debug, Default)]
pub struct Draft {
    /// What is to be done.
    pub kind: String,
    /// The role that asks.
    pub from: String,
    /// The role that is asked.
    pub to: String,
    /// The payload, as JSON text.
    pub payload: String,
    /// The run that it belongs to.
    pub run_id: Option<String>,
    /// The exchange that it belongs to.
    pub correlation_id: Option<String>,
    /// The record that caused it.
    pub parent: Option<String>,
}

/// Who ends a record.
#[derive(Clone, Debug)]
pub enum By {
    /// This process or whoever called it: not while another holds it.
    Process(Owner),
    /// Just this owner.
    OwnerOnly(Owner),
    /// A person who insists.
    Force,
}

/// What came of a job.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The result, as JSON text.
    pub result: Option<String>,
    /// What it cost, as JSON text.
    pub spend: Option<String>,
    /// The follow-up: an object with `kind`, `to` and `payload`, perhaps `run_id` and `correlation_id`, as JSON text.
    pub followup: Option<String>,
}

/// Why a job is refused.
#[derive(Clone, Debug, Default)]
pub struct Refusal {
    /// In words.
    pub reason: String,
    /// In one word.
    pub error_class: Option<String>,
    /// Whether trying again may help.
    pub is_retryable: bool,
    /// What it cost all the same, as JSON text.
    pub spend: Option<String>,
}

impl Client {
    /// Puts a record.
    ///
    /// # Errors
    /// [`ErrorKind::BadData`] if it is none that may be put.
    pub fn put(&self, _draft: &Draft, _now: Timestamp) -> Result<Put, Error> {
        Err(self.not_built())
    }

    /// Takes the oldest queued record of a role; `None` if there is none. Its line comes back.
    ///
    /// # Errors
    /// If the queue can't be read or replaced.
    pub fn take(&self, _role: &str, _owner: Option<&Owner>, _now: Timestamp) -> Result<Option<Changed>, Error> {
        Err(self.not_built())
    }

    /// Finishes a record.
    ///
    /// # Errors
    /// [`ErrorKind::BadData`] if it can't be finished, or the outcome is not valid.
    pub fn done(&self, _id: &str, _by: &By, _outcome: &Outcome, _now: Timestamp) -> Result<Changed, Error> {
        Err(self.not_built())
    }

    /// Refuses a record.
    ///
    /// # Errors
    /// [`ErrorKind::BadData`] if it can't be refused.
    pub fn nack(&self, _id: &str, _by: &By, _refusal: &Refusal, _now: Timestamp) -> Result<Changed, Error> {
        Err(self.not_built())
    }

    /// Gives a record back that this owner holds, as if it had not been taken.
    ///
    /// # Errors
    /// [`ErrorKind::BadData`] if that owner doesn't hold it.
    pub fn hand_back(&self, _id: &str, _owner: &Owner, _now: Timestamp) -> Result<Changed, Error> {
        Err(self.not_built())
    }

    /// Refuses all running records of a role whose owners are dead.
    ///
    /// # Errors
    /// If the queue can't be read or replaced.
    pub fn reclaim(&self, _role: &str, _now: Timestamp) -> Result<Vec<Changed>, Error> {
        Err(self.not_built())
    }

    /// Says of a record that waits for a person that one has been told.
    ///
    /// # Errors
    /// [`ErrorKind::BadData`] if it doesn't wait for one any more.
    pub fn announce(&self, _id: &str, _now: Timestamp) -> Result<Changed, Error> {
        Err(self.not_built())
    }

    fn not_built(&self) -> Error {
        Error::new(ErrorKind::Io, &self.files.queue, "not built yet")
    }
}
