//! `handoff notify`: tells people of records that wait for one.

use clap::error::ErrorKind as UsageError;
use clap::{Args, CommandFactory};

use super::{Arguments, NAME, Place};
use crate::cli::args;
use crate::cli::child::Runner;
use crate::cli::exit::Exit;
use crate::cli::job::count;
use crate::cli::notify::Channel;
use crate::store::Error;

const EXIT_CODES: &str = "\
Example: HANDOFF_MAIL_TO=ops@example.org handoff notify
Exit codes: 0 all are told, 2 there is nobody to tell, 65 the ledger is damaged, 74 nobody could be told of some, 75 another run is at it";

/// Tell people of each record that waits for one, once
///
/// put, done, nack and work tell of their own records. Have a timer repeat it: it tells what they could not, and of records that others wrote.
/// A record that people have been told of has `notified_ts`. Of one that could not be marked so nobody is told; this says which.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(super) struct Notify {
    #[command(flatten)]
    channel: Channel,

    #[command(flatten)]
    pub(super) place: Place,
}

impl Notify {
    pub(super) fn run(&self) -> Result<Exit, Error> {
        if !self.channel.is_configured() {
            let message = "nobody to tell: set HANDOFF_MAIL_TO (--mail-to) or HANDOFF_NOTIFY (--notify)";
            return Ok(args::report(NAME, &Arguments::command().error(UsageError::MissingRequiredArgument, message)));
        }
        if let Some(fault) = self.channel.fault() {
            return Ok(args::report(NAME, &Arguments::command().error(UsageError::InvalidValue, fault)));
        }
        let (common, messages) = (&self.place.common, self.place.messages());
        let told = self.channel.tell(&self.place.client(), &mut Runner::new(), None, &|| common.now(), &messages)?;
        let queue = common.queue.display();
        messages.info(format_args!("{queue}: told people of {}", count(told.records, "record")));
        Ok(if told.failures == 0 { Exit::Done } else { Exit::Io })
    }
}
