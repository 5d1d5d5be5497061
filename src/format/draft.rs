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
    pub fn check(mut self, kinds: &[String], roles: &[String]) -> Result<Self, String> {
        if !kinds.contains(&self.kind) {
            let (kind, kinds) = (self.kind.escape_debug(), kinds.join(", "));
            return Err(format!("there is no kind {kind}: it is one of {kinds} (--kinds)"));
        }
        if !roles.is_empty() && !roles.contains(&self.to) {
            let (role, roles) = (self.to.escape_debug(), roles.join(", "));
            return Err(format!("there is no role {role}: it is one of {roles} (--roles)"));
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
            Fault::Syntax(_) if self.payload.trim().is_empty() => "the payload is empty".to_owned(),
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
        json::canonical(&self.payload) == json::canonical(payload)
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
    json::compact(&serde_json::Value::from(text).to_string())
}

#[cfg(test)]
#[expect(clippy::expect_used, reason = "a test that panics has failed")]
mod tests {
    use super::super::envelope::{self, Line};
    use super::*;

    const NOW: Timestamp = Timestamp::from_micros(1_795_953_600_000_000);

    fn kinds() -> Vec<String> {
        vec!["classify".to_owned()]
    }

    fn draft(payload: &str) -> Draft {
        Draft { kind: "classify".into(), from: "a".into(), to: "b".into(), payload: payload.into(), ..Draft::default() }
    }

    fn with_summary(text: &str) -> Result<Draft, String> {
        draft(&format!(r#"{{"summary":"{text}"}}"#)).check(&kinds(), &[])
    }

    #[test]
    fn a_payload_is_put_on_one_line_and_otherwise_as_it_is() {
        let payload = "\u{feff}\r\n{ \"a b\" :\t[1.50, 1e400, \"\\\" , \\\\\", \"\\ud83d\"],\n \"a b\": {} }\n";
        let checked = draft(payload).check(&kinds(), &[]).expect("a draft");
        assert_eq!(checked.payload, "{\"a b\":[1.50,1e400,\"\\\" , \\\\\",\"\\ud83d\"],\"a b\":{}}");
        let line = checked.to_line("1", None, NOW);
        assert!(
            matches!(envelope::parse(line.as_bytes()), Ok(Line::Record(record)) if record.doubt.is_none()),
            "{line}"
        );
    }

    #[test]
    fn a_payload_is_the_same_after_a_worker_has_written_it_anew() {
        let put = draft(r#"{"a":"é\/","n":[1e3,12345678901234567890,-0.5],"b":{}}"#);
        let same = r#"{"a": "\u00e9/", "n": [1000.0, 12345678901234567890, -0.50], "b": {}}"#;
        assert!(put.has_payload(same));
        for (from, to) in [
            ("90,", "91,"),
            ("e9", "ea"),
            ("1000.0", "1000"),
            ("{}", "[]"),
            ("\"b\"", "\"c\""),
            ("a\":", "a\\ud800\":"),
        ] {
            assert!(!put.has_payload(&same.replace(from, to)), "{from} {to}");
        }
    }

    #[test]
    fn a_summary_is_measured_in_characters() {
        assert!(with_summary(&"é".repeat(800)).is_ok());
        assert!(with_summary(&"\u{1f600}".repeat(800)).is_ok());
        assert!(with_summary(&r"\n".repeat(800)).is_ok());
        assert!(with_summary(&"é".repeat(801)).is_err_and(|what| what.contains("801 characters")));
    }

    #[test]
    fn what_must_not_be_put_is_refused() {
        for payload in [
            "",
            "[]",
            "1",
            "{",
            "{}{}",
            "{\"a\":NaN}",
            "{\"summary\":1}",
            "{\"summary\":\"a\",\"summary\":\"b\"}",
            "{\"a\":\"\n\"}",
        ] {
            assert!(draft(payload).check(&kinds(), &[]).is_err(), "{payload:?}");
        }
        assert!(Draft { kind: "other".into(), ..draft("{}") }.check(&kinds(), &[]).is_err());
        assert!(draft("{}").check(&kinds(), &["a".to_owned()]).is_err());
        assert!(Draft { to: String::new(), ..draft("{}") }.check(&kinds(), &[]).is_err());
        assert!(Draft { run_id: Some(String::new()), ..draft("{}") }.check(&kinds(), &[]).is_err());
    }

    #[test]
    fn names_of_any_sort_are_kept() {
        let name = "a/\"b\"\n\u{1f600}\\";
        let drafted = Draft { to: name.into(), parent: Some(name.into()), ..draft("{}") };
        let line = drafted.to_line(name, drafted.cycle().as_ref(), NOW);
        match envelope::parse(line.as_bytes()) {
            Ok(Line::Record(record)) => {
                assert_eq!((&*record.id, &*record.to, record.more().parent.as_deref()), (name, name, Some(name)));
            }
            other => panic!("{line}: {other:?}"),
        }
        assert!(!line.contains('\n'));
    }

    #[test]
    fn a_follow_up_says_what_it_is_and_nothing_else() {
        let read = |text: &str| Draft::follow_up(text, "b", "1");
        let follow_up = read(r#" {"kind":"k","to":"c","payload":{"a":1.0},"run_id":"r"} "#).expect("a draft");
        assert_eq!((follow_up.from.as_str(), follow_up.parent.as_deref()), ("b", Some("1")));
        assert_eq!((follow_up.payload.as_str(), follow_up.run_id.as_deref()), (r#"{"a":1.0}"#, Some("r")));
        for bad in ["[]", "{}", r#"{"kind":"k"}"#, r#"{"kind":"k","to":"c","form":"x"}"#, r#"{"kind":"k","to":1}"#, "x"]
        {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
