//! Telling people of records that wait for one.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::Args;
use clap::builder::{StringValueParser, TypedValueParser};

use super::child::{self, Limits, Purpose, Runner};
use super::mail::Mail;
use super::messages::Messages;
use super::relay;
use crate::format::blob::Digest;
use crate::format::envelope::{self, Line};
use crate::format::time::Timestamp;
use crate::store::client::Client;
use crate::store::unannounced::{self, Waiting};
use crate::store::{Error, ErrorKind, process};

/// How people are told.
#[derive(Debug, Args)]
pub(super) struct Channel {
    /// Mail these people, through sendmail -t
    #[arg(long, env = "HANDOFF_MAIL_TO", value_name = "ADDRESS,…", value_delimiter = ',', value_parser = StringValueParser::new().map(trimmed))]
    mail_to: Vec<String>,

    /// The sender [default: sendmail's own idea]
    #[arg(long, env = "HANDOFF_MAIL_FROM", value_name = "ADDRESS", value_parser = StringValueParser::new().map(trimmed))]
    mail_from: Option<String>,

    /// A program, or a socket that passes mails on to one [default: in PATH, /usr/sbin or /usr/lib]
    #[arg(long, env = "HANDOFF_SENDMAIL", value_name = "PROGRAM")]
    sendmail: Option<PathBuf>,

    /// Instead of mail, have sh run this with the record's line on its standard input
    #[arg(long, env = "HANDOFF_NOTIFY", value_name = "COMMAND")]
    notify: Option<String>,
}

/// How a round of telling went.
#[derive(Debug, Default)]
pub(super) struct Told {
    /// Of how many records people have been told.
    pub(super) records: u64,
    /// How many times it failed.
    pub(super) failures: u64,
}

/// How long one message may take.
const LIMITS: Limits = Limits { timeout: Some(Duration::from_secs(60)), stop_timeout: Duration::from_secs(10) };
/// After so many failures in a row the next ones would fail too.
const MAX_FAILURES: usize = 3;

impl Channel {
    /// Whether there is anybody to be told.
    pub(super) fn is_configured(&self) -> bool {
        self.notify.is_some() || !self.mail_to.is_empty()
    }

    /// Says what is wrong with it. That must not keep whoever hands records over from it.
    pub(super) fn fault(&self) -> Option<String> {
        let wrong = self.mail_to.iter().chain(&self.mail_from).find(|address| !is_address(address))?;
        Some(format!("HANDOFF_MAIL_TO, HANDOFF_MAIL_FROM: {wrong:?} is not an address like ops@example.org"))
    }

    /// Tells people of these records, which have just begun to wait for one, if there is anybody to be told. They are on disk already, and the next
    /// run of `handoff notify` repeats what fails here.
    pub(super) fn tell_if_configured(
        &self,
        client: &Client,
        runner: &mut Runner,
        ids: &[&str],
        now: &dyn Fn() -> Timestamp,
        messages: &Messages,
    ) {
        if ids.is_empty() || !self.is_configured() {
            return;
        }
        if let Some(fault) = self.fault() {
            messages.warning(format_args!("{fault}: nobody is told"));
        } else if runner.is_told_to_stop() {
            let (queue, ids) = (client.files.queue.display(), ids.join(", "));
            messages.warning(format_args!(
                "{queue}: {ids} waits for a person: the next run of handoff notify tells people"
            ));
        } else if let Err(error) = self.tell(client, runner, Some(ids), now, messages) {
            messages.warning(format_args!("{error}: the next run of handoff notify tells people"));
        }
    }

    /// Tells people of each record, or each with one of these ids, that waits for one and of which they have not been told.
    ///
    /// # Errors
    /// If others are at it all the time, or the queue can't be read or changed. That one can't be told is only counted.
    pub(super) fn tell(
        &self,
        client: &Client,
        runner: &mut Runner,
        ids: Option<&[&str]>,
        now: &dyn Fn() -> Timestamp,
        messages: &Messages,
    ) -> Result<Told, Error> {
        let _turn = unannounced::turn(&client.files, client.options.lock_timeout)?;
        let (mut told, mut tried, mut in_a_row) = (Told::default(), BTreeSet::new(), 0);
        // Who could not wait for their turn relies on this run to see what they have added.
        loop {
            let waiting = unannounced::find(&client.files, &client.options, ids, now())?;
            // One that waits once more is another one.
            let digest = |waiting: &Waiting| Digest::of(waiting.line.as_bytes());
            let fresh: Vec<Waiting> = waiting.into_iter().filter(|waiting| !tried.contains(&digest(waiting))).collect();
            tried.extend(fresh.iter().map(digest));
            if fresh.is_empty() {
                return Ok(told);
            }
            for obstacle in fresh.iter().filter_map(|waiting| waiting.obstacle.as_ref()) {
                messages.error(obstacle);
                told.failures += 1;
            }
            let mut fresh: Vec<&Waiting> = fresh.iter().filter(|waiting| waiting.obstacle.is_none()).collect();
            // A few that can't be told must not keep the others from it for ever, so that each minute begins elsewhere.
            let minute = usize::try_from(now().whole_seconds() / 60).unwrap_or_default();
            if fresh.len() > MAX_FAILURES {
                let first = minute % fresh.len();
                fresh.rotate_left(first);
            }
            for (index, waiting) in fresh.iter().enumerate() {
                if runner.is_told_to_stop() || in_a_row == MAX_FAILURES {
                    let left = fresh.len() - index;
                    let queue = client.files.queue.display();
                    messages
                        .warning(format_args!("{queue}: {left} more wait for a person and are left to the next run"));
                    return Ok(told);
                }
                let id = waiting.id.escape_debug();
                if let Err(error) = self.send(client, runner, waiting, now()) {
                    messages.warning(format_args!(
                        "{error}: nobody has been told of record {id}: the next run tries again"
                    ));
                    told.failures += 1;
                    in_a_row += 1;
                    continue;
                }
                in_a_row = 0;
                told.records += 1;
                match client.announce(&waiting.id, &waiting.line, now()) {
                    Ok(changed) => {
                        messages.warnings(&changed.findings);
                        messages.notice(format_args!("{}: told people of record {id}", client.files.queue.display()));
                    }
                    // It does not wait any more, or once more: somebody was faster.
                    Err(error) if error.kind() == ErrorKind::Refused => messages.warning(error),
                    Err(error) => return Err(error.note("people have been told, and will be told once more")),
                }
            }
        }
    }

    fn send(&self, client: &Client, runner: &mut Runner, waiting: &Waiting, now: Timestamp) -> Result<(), Error> {
        if let Some(notify) = &self.notify {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", notify]);
            return execute(
                runner,
                &mut command,
                Path::new("HANDOFF_NOTIFY"),
                format!("{}\n", waiting.line).into_bytes(),
            );
        }
        let queue = &client.files.queue;
        let Ok(Line::Record(record)) = envelope::parse(waiting.line.as_bytes()) else {
            return Err(Error::new(ErrorKind::BadData, queue, "a record can't be read any more"));
        };
        let host = process::this()?.host;
        let queue = &std::path::absolute(queue).unwrap_or_else(|_| queue.clone());
        let mail =
            Mail { to: &self.mail_to, from: self.mail_from.as_deref(), record: &record, queue, host: &host, now };
        let sendmail = self.sendmail()?;
        if relay::is_socket(&sendmail) {
            return relay::send(&sendmail, &mail.write(), runner, LIMITS);
        }
        // A line of one dot is not the end.
        execute(runner, Command::new(&sendmail).args(["-t", "-i"]), &sendmail, mail.write())
    }

    fn sendmail(&self) -> Result<PathBuf, Error> {
        if let Some(sendmail) = &self.sendmail {
            return Ok(sendmail.clone());
        }
        let places = ["sendmail", "/usr/sbin/sendmail", "/usr/lib/sendmail"];
        places.into_iter().find_map(|place| child::find(place.as_ref())).ok_or_else(|| {
            Error::new(ErrorKind::Io, Path::new("sendmail"), "is not there")
                .advise("install one (Debian: msmtp-mta), or set HANDOFF_SENDMAIL or HANDOFF_NOTIFY")
        })
    }
}

fn execute(runner: &mut Runner, command: &mut Command, name: &Path, input: Vec<u8>) -> Result<(), Error> {
    let ended = runner
        .run(command, input, Purpose::Delivery, LIMITS)
        .map_err(|error| Error::io(name, "cannot be run", error))?;
    if ended.status.success() {
        return Ok(());
    }
    let why = if ended.cut.is_some() { "took too long".to_owned() } else { format!("failed ({})", ended.status) };
    let last = ended.error_tail.trim();
    Err(Error::new(ErrorKind::Io, name, if last.is_empty() { why } else { format!("{why}: {last}") }))
}

/// What is wrong with an address is said when it is used.
#[expect(clippy::needless_pass_by_value, reason = "clap passes it so")]
fn trimmed(address: String) -> String {
    address.trim().to_owned()
}

/// Whether a text is an address, and not the beginning of another header.
fn is_address(text: &str) -> bool {
    let is_wrong = |c: char| c.is_whitespace() || c.is_control() || matches!(c, '<' | '>' | '(' | ')' | '"' | ';');
    !text.is_empty() && !text.contains(is_wrong)
}
