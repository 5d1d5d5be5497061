//! `handoff done`, `nack`, `requeue` and `cancel`: what becomes of a record.

use clap::Args;
use clap::builder::FalseyValueParser;
use serde_json::Value;

use super::{Holder, Output, Place, Rules, put, tell_findings, tell_people, text};
use crate::cli::exit::Exit;
use crate::cli::messages;
use crate::cli::notify::Channel;
use crate::format::transition::Refusal;
use crate::store::Error;
use crate::store::client::{Changed, Outcome};

/// Finish a record that you have taken, or that waits for a person, and print its status
///
/// Its result, what it cost and a follow-up are written with it, all or nothing. A record has at most one follow-up: an object of `kind`, `to` and
/// `payload`, and perhaps `run_id` and `correlation_id`.
#[derive(Debug, Args)]
#[command(
    after_help = "Example: handoff done ID --result @result.json --spend 0.0125 --followup '{\"kind\":\"file_bug\",\"to\":\"patcher\",\"payload\":{}}'\nExit codes: 0 done, 65 not valid or refused, 74 or 75 not done, or as the message says"
)]
pub(super) struct Done {
    /// The record
    #[arg(value_name = "ID")]
    id: String,

    /// What came of it, any JSON: itself, - for standard input, or @ and the name of a file
    #[arg(long, env = "HANDOFF_RESULT", value_name = "JSON|-|@FILE")]
    result: Option<String>,

    /// What it cost: USD, a model's usage, or an array of these
    #[arg(long, env = "HANDOFF_SPEND", value_name = "JSON|-|@FILE")]
    spend: Option<String>,

    /// What is to follow
    #[arg(long, env = "HANDOFF_FOLLOWUP", value_name = "JSON|-|@FILE")]
    followup: Option<String>,

    #[command(flatten)]
    holder: Holder,

    #[command(flatten)]
    force: Force,

    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    rules: Rules,

    #[command(flatten)]
    channel: Channel,

    #[command(flatten)]
    pub(super) place: Place,
}

impl Done {
    pub(super) fn run(&self) -> Result<Exit, Error> {
        let [result, spend, followup] = [&self.result, &self.spend, &self.followup]
            .map(|argument| argument.as_deref().map(|argument| text(&self.place, argument)).transpose());
        let outcome = Outcome { result: result?, spend: spend?, followup: followup? };
        let (client, by) = (self.place.client(), self.holder.by(self.force.force)?);
        let changed = client.done(&self.id, &by, &outcome, &self.rules.read(), self.place.common.now())?;
        report(&self.place, &self.output, Some(&self.channel), &changed)
    }
}

/// Refuse a record that you have taken, and print its status
///
/// The first time it is queued again; the second time it waits for a person, who gets a mail. With --no-retry it is dead at once. The reason is kept in the record.
#[derive(Debug, Args)]
#[command(
    after_help = "Example: handoff nack ID --reason 'no ticket id in the payload' --class missing_field --no-retry\nExit codes: 0 refused, 65 not valid or not possible, 74 or 75 not refused, or as the message says"
)]
pub(super) struct Nack {
    /// The record
    #[arg(value_name = "ID")]
    id: String,

    /// Why, in words
    #[arg(long, env = "HANDOFF_REASON", value_name = "TEXT")]
    reason: String,

    /// Why, in one word
    #[arg(long, env = "HANDOFF_CLASS", value_name = "WORD")]
    class: Option<String>,

    /// Trying again would not help
    #[arg(long, env = "HANDOFF_NO_RETRY", value_parser = FalseyValueParser::new())]
    no_retry: bool,

    /// What it cost all the same: USD, a model's usage, or an array of these
    #[arg(long, env = "HANDOFF_SPEND", value_name = "JSON|-|@FILE")]
    spend: Option<String>,

    #[command(flatten)]
    holder: Holder,

    #[command(flatten)]
    force: Force,

    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    channel: Channel,

    #[command(flatten)]
    pub(super) place: Place,
}

impl Nack {
    pub(super) fn run(&self) -> Result<Exit, Error> {
        let refusal = Refusal {
            reason: self.reason.clone(),
            error_class: self.class.clone(),
            is_retryable: !self.no_retry,
            spend: self.spend.as_deref().map(|argument| text(&self.place, argument)).transpose()?,
        };
        let (client, by) = (self.place.client(), self.holder.by(self.force.force)?);
        let changed = client.nack(&self.id, &by, &refusal, self.place.common.now())?;
        report(&self.place, &self.output, Some(&self.channel), &changed)
    }
}

/// Have a record tried again that waits for a person, is dead or refused, or whose worker has died, and print its status
#[derive(Debug, Args)]
#[command(
    after_help = "Example: handoff requeue ID\nExit codes: 0 queued again, 65 not possible, 74 or 75 not queued, or as the message says"
)]
pub(super) struct Requeue {
    /// The record, or how its id begins if no other begins so
    #[arg(value_name = "ID")]
    id: String,

    #[command(flatten)]
    force: Force,

    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    pub(super) place: Place,
}

impl Requeue {
    pub(super) fn run(&self) -> Result<Exit, Error> {
        let client = self.place.client();
        let changed = client.requeue(&self.id, self.force.force, self.place.common.now())?;
        report(&self.place, &self.output, None, &changed)
    }
}

/// Give a record up that is queued, waits for a person or was refused, or whose worker has died, and print its status
#[derive(Debug, Args)]
#[command(
    after_help = "Example: handoff cancel ID --reason 'the customer has withdrawn'\nExit codes: 0 dead now, 65 not possible, 74 or 75 not changed, or as the message says"
)]
pub(super) struct Cancel {
    /// The record, or how its id begins if no other begins so
    #[arg(value_name = "ID")]
    id: String,

    /// Why, in words
    #[arg(long, env = "HANDOFF_REASON", value_name = "TEXT", default_value = "cancelled by hand")]
    reason: String,

    #[command(flatten)]
    force: Force,

    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    pub(super) place: Place,
}

impl Cancel {
    pub(super) fn run(&self) -> Result<Exit, Error> {
        let client = self.place.client();
        let changed = client.cancel(&self.id, self.force.force, &self.reason, self.place.common.now())?;
        report(&self.place, &self.output, None, &changed)
    }
}

#[derive(Debug, Args)]
struct Force {
    /// Do it to a running record whoever holds it: you know that its worker does not go on
    #[arg(long, env = "HANDOFF_FORCE", value_parser = FalseyValueParser::new())]
    force: bool,
}

/// Tells what has become of a record, people too if one has to.
fn report(place: &Place, output: &Output, channel: Option<&Channel>, changed: &Changed) -> Result<Exit, Error> {
    let Changed { id, status, line, followup, is_durable, findings, .. } = changed;
    tell_findings(&place.messages(), findings, *is_durable);
    if let Some(followup) = followup {
        // The record is done, whatever its follow-up has become.
        let _: Exit = put::report(place, followup);
        let (queue, status) = (place.common.queue.display(), followup.status.as_str());
        place.messages().notice(format_args!("{queue}: record {id}: its follow-up {} is {status}", followup.id));
    }
    if let Some(channel) = channel {
        tell_people(channel, place, &changed.escalated());
    }
    let text = if output.json {
        let followup = followup.as_ref().map_or(Value::Null, put::as_json);
        let id = Value::from(id.as_str());
        // The record goes last, as it stands in the queue.
        format!(r#"{{"id":{id},"status":"{}","followup":{followup},"record":{line}}}"#, status.as_str())
    } else {
        status.as_str().to_owned()
    };
    let printed = messages::print(format!("{text}\n").as_bytes());
    printed.map_err(|error| error.note("the record has been changed all the same"))?;
    Ok(if *is_durable { Exit::Done } else { Exit::Io })
}
