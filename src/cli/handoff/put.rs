//! `handoff put`: hands a record over.

use clap::Args;
use serde_json::json;

use super::{Output, Place, Rules, tell_people, text};
use crate::cli::exit::Exit;
use crate::cli::messages;
use crate::cli::notify::Channel;
use crate::format::draft::Draft;
use crate::format::envelope::Status;
use crate::store::Error;
use crate::store::put::Put as Outcome;

/// Put a record into the queue, and print its id
///
/// It is on the disk when this ends. Values of the payload that are too large for a line are put into the blob store. The same run, kind, role and correlation
/// again is the same record; a record that hands over to itself is kept as dead, and one at the end of a long chain waits for a person.
#[derive(Debug, Args)]
#[command(
    after_help = "Example: handoff put --kind classify --from triage --to researcher --payload '{\"summary\":\"…\"}'\nExit codes: 0 put, or there already; 65 not valid or refused, or kept as dead; 74 or 75 not put, or as the message says"
)]
pub(super) struct Put {
    /// What is to be done, one of --kinds
    #[arg(long, env = "HANDOFF_KIND", value_name = "KIND")]
    kind: String,

    /// The role that asks
    #[arg(long, env = "HANDOFF_FROM", value_name = "ROLE")]
    from: String,

    /// The role that is asked
    #[arg(long, env = "HANDOFF_TO", value_name = "ROLE")]
    to: String,

    /// A JSON object: itself, - for standard input, or @ and the name of a file
    #[arg(long, env = "HANDOFF_PAYLOAD", value_name = "JSON|-|@FILE", default_value = "{}")]
    payload: String,

    /// The run that it belongs to
    #[arg(long, env = "HANDOFF_RUN_ID", value_name = "ID")]
    run_id: Option<String>,

    /// The exchange that it belongs to; makes putting it twice harmless
    #[arg(long, env = "HANDOFF_CORRELATION_ID", value_name = "ID")]
    correlation_id: Option<String>,

    /// The record that it follows from, which may have one follow-up
    #[arg(long, env = "HANDOFF_PARENT", value_name = "ID")]
    parent: Option<String>,

    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    rules: Rules,

    #[command(flatten)]
    channel: Channel,

    #[command(flatten)]
    pub(super) place: Place,
}

impl Put {
    pub(super) fn run(&self) -> Result<Exit, Error> {
        let draft = Draft {
            kind: self.kind.clone(),
            from: self.from.clone(),
            to: self.to.clone(),
            payload: text(&self.place, &self.payload)?,
            run_id: self.run_id.clone(),
            correlation_id: self.correlation_id.clone(),
            parent: self.parent.clone(),
        };
        let put = self.place.client().put(&draft, &self.rules.read(), self.place.common.now())?;
        let exit = report(&self.place, &put);
        if put.status == Status::Human && !put.existed {
            tell_people(&self.channel, &self.place, &[&put.id]);
        }
        let text = if self.output.json { as_json(&put).to_string() } else { put.id.clone() };
        if let Err(error) = messages::print(format!("{text}\n").as_bytes()) {
            self.place.messages().error(format_args!("{error}: record {} has been put all the same", put.id));
            return Ok(Exit::Io);
        }
        Ok(exit)
    }
}

/// Says what is to be said of a record that was put, and how the command ends for it.
pub(super) fn report(place: &Place, put: &Outcome) -> Exit {
    let messages = place.messages();
    let queue = place.common.queue.display();
    messages.warnings(&put.findings);
    let Outcome { id, status, existed, stopped, .. } = put;
    match stopped {
        Some(why) if *status == Status::Dead => {
            messages.error(format_args!("{queue}: record {id} is kept as dead: {why}"));
            Exit::BadData
        }
        Some(why) => {
            messages.warning(format_args!("{queue}: record {id} waits for a person: {why}"));
            Exit::Done
        }
        None if *existed => {
            messages.info(format_args!("{queue}: record {id} is there already, {}", status.as_str()));
            Exit::Done
        }
        None => Exit::Done,
    }
}

pub(super) fn as_json(put: &Outcome) -> serde_json::Value {
    json!({ "id": put.id, "status": put.status.as_str(), "existed": put.existed })
}
