//! A record that is to be put: what it must be, and its line.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::envelope::Status;
use super::json::{self, Document, Fault};
use super::time::Timestamp;

/// A record that is to be put.
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
    /// The id of the record that caused it.
    pub parent: Option<String>,
}

/// Why a record is put that nobody is to take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// What it is instead of queued.
    pub status: Status,
    /// Why, in words.
    pub reason: String,
    /// Why, in one word.
    pub error_class: &'static str,
}

impl Stopped {
    /// Of a record with so many ancestors, or more, where `most` are allowed.
    #[must_use]
    pub fn too_many_hops(hops: usize, most: usize) -> Self {
        let reason = format!("it has {hops} ancestors or more, and may have {most}: this looks like a loop");
        Self { status: Status::Human, reason, error_class: "too_many_hops" }
    }

    pub(super) fn to_json(&self, by: &str, now: Timestamp) -> String {
        stopped(by, &self.reason, self.error_class, now)
    }
}

/// What `stopped` holds.
pub(super) fn stopped(by: &str, reason: &str, error_class: &str, now: Timestamp) -> String {
    let [by, reason] = [by, reason].map(quoted);
    format!(r#"{{"ts":{},"by":{by},"reason":{reason},"error_class":"{error_class}"}}"#, now.to_json())
}

/// The longest `summary`, in characters.
pub const MAX_SUMMARY: usize = 800;

/// The tools' own name in `by`.
pub(super) const TOOLS: &str = "handoff";

impl Draft {
    /// The follow-up of a record of the role `from`, read from JSON text.
    ///
    /// # Errors
    /// Says why it is none.
    pub fn follow_up(text: &str, from: &str, parent: &str) -> Result<Self, String> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct FollowUp<'a> {
            kind: String,
            to: String,
            #[serde(borrow, default)]
            payload: Option<&'a RawValue>,
            #[serde(default)]
            run_id: Option<String>,
            #[serde(default)]
            correlation_id: Option<String>,
        }
        let is_object = text.trim_start().starts_with('{');
        let read = is_object.then(|| serde_json::from_str(text)).ok_or("the follow-up is no JSON object")?;
        let FollowUp { kind, to, payload, run_id, correlation_id } =
            read.map_err(|error| format!("the follow-up is not valid: {error}"))?;
        Ok(Self {
            kind,
            from: from.to_owned(),
            to,
            payload: payload.map_or("{}", RawValue::get).to_owned(),
            run_id,
            correlation_id,
            parent: Some(parent.to_owned()),
        })
    }

    /// Makes sure that it may be put, and has its payload fit into a line.
    ///
    /// # Errors
    /// Says why it may not be put.
    pub fn check(mut self, kinds: &[String]) -> Result<Self, String> {
        if !kinds.contains(&self.kind) {
            let (kind, kinds) = (self.kind.escape_debug(), kinds.join(", "));
            return Err(format!("there is no kind {kind}: it is one of {kinds} (--kinds)"));
        }
        for (name, role) in [("from", &self.from), ("to", &self.to)] {
            if role.is_empty() {
                return Err(format!("`{name}` is empty: name a role"));
            }
        }
        let keys = [("run_id", &self.run_id), ("correlation_id", &self.correlation_id), ("parent", &self.parent)];
        if let Some((name, _)) = keys.into_iter().find(|(_, key)| key.as_ref().is_some_and(String::is_empty)) {
            return Err(format!("`{name}` is empty: leave it out or name one"));
        }
        let members = Document::new(&self.payload).object::<1>(|key| (key == b"summary").then_some(0));
        let members = members.map_err(|fault| match fault {
            Fault::NotAnObject => "the payload is not a JSON object".to_owned(),
            Fault::Syntax(fault) => format!("the payload is not JSON: {fault}"),
        })?;
        if members.non_finite {
            return Err("the payload holds NaN or Infinity, which are no JSON: write null or a string".to_owned());
        }
        if members.duplicates {
            return Err("the payload has two members `summary`: which one is meant?".to_owned());
        }
        if members.get(0).is_some() {
            let summary = members.string(0).ok_or("the payload's `summary` is not a string")?;
            let length = summary.text.chars().count();
            if length > MAX_SUMMARY {
                return Err(format!(
                    "the payload's `summary` has {length} characters, more than {MAX_SUMMARY}: put the text into another member"
                ));
            }
        }
        self.payload = json::compact(self.payload.trim_start_matches(json::BYTE_ORDER_MARK));
        Ok(self)
    }

    /// Why it is put as one that nobody takes, if it hands over to who has it already.
    #[must_use]
    pub fn cycle(&self) -> Option<Stopped> {
        (self.from == self.to).then(|| Stopped {
            status: Status::Dead,
            reason: format!("it is from {0} to {0}, and a role must not hand over to itself", self.from.escape_debug()),
            error_class: "cycle",
        })
    }

    /// Whether it has this payload, as JSON text.
    #[must_use]
    pub fn has_payload(&self, payload: &str) -> bool {
        self.payload == json::compact(payload)
    }

    /// Its line, without `\n`.
    #[must_use]
    pub fn to_line(&self, id: &str, stopped: Option<&Stopped>, now: Timestamp) -> String {
        let status = stopped.map_or(Status::Queued, |stopped| stopped.status);
        let mut line = format!(
            r#"{{"id":{},"ts":{},"kind":{},"from":{},"to":{},"payload":{},"status":"{}","protocol_version":2"#,
            quoted(id),
            now.to_json(),
            quoted(&self.kind),
            quoted(&self.from),
            quoted(&self.to),
            self.payload,
            status.as_str(),
        );
        let mut add = |name: &str, json: &str| line.extend([",\"", name, "\":", json]);
        let keys = [("run_id", &self.run_id), ("correlation_id", &self.correlation_id), ("parent", &self.parent)];
        for (name, key) in keys {
            if let Some(key) = key {
                add(name, &quoted(key));
            }
        }
        if let Some(stopped) = stopped {
            if status == Status::Dead {
                add("finished_ts", &now.to_json());
            }
            add("stopped", &stopped.to_json(TOOLS, now));
        }
        line.push('}');
        line
    }
}

/// A string of JSON.
pub(super) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
