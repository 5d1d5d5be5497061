//! `handoff take`: takes a record to work on it.

use clap::Args;

use super::{Holder, Place, tell_findings};
use crate::cli::exit::Exit;
use crate::cli::messages;
use crate::store::Error;

/// Take the oldest queued record of a role, and print it
///
/// It is running then, and belongs to the process that called this: the nearest one above that leads a process group, such as a script, a
/// service or an interactive shell. When that has died, handoff work and handoff requeue may have the record tried again.
#[derive(Debug, Args)]
#[command(
    after_help = "Example: handoff take --role researcher | jq .payload\nExit codes: 0 taken, 1 there is none, 65 the queue's ledger can't be read, 74 or 75 not taken, or as the message says"
)]
pub(super) struct Take {
    /// The role
    #[arg(long, env = "AGENT_ROLE", value_name = "ROLE")]
    role: String,

    #[command(flatten)]
    holder: Holder,

    #[command(flatten)]
    pub(super) place: Place,
}

impl Take {
    pub(super) fn run(&self) -> Result<Exit, Error> {
        let client = self.place.client();
        let (owner, now) = (self.holder.owner()?, self.place.common.now());
        let (taken, findings) = client.take(&self.role, owner.as_ref(), now)?;
        let messages = self.place.messages();
        tell_findings(&messages, &findings, taken.as_ref().is_none_or(|taken| taken.is_durable));
        let Some(taken) = taken else {
            messages.info(format_args!("{}: nothing is queued for {}", self.place.common.queue.display(), self.role));
            return Ok(Exit::No);
        };
        match messages::deliver([Ok(format!("{}\n", taken.line))]) {
            Ok(()) if taken.is_durable => Ok(Exit::Done),
            Ok(()) => Ok(Exit::Io),
            // Nobody has got it, so nobody would work on it.
            Err(error) => {
                match &owner {
                    Some(owner) => client.hand_back(&taken.id, owner, now)?,
                    None => client.requeue(&taken.id, true, now)?,
                };
                error.map_or(Ok(Exit::Done), Err)
            }
        }
    }
}
