//! What an operation makes of a record: the state table of FORMAT.md.

use super::draft::{TOOLS, quoted, stopped};
use super::envelope::{Envelope, Status};
use super::json;
use super::ledger::Totals;
use super::owner::Owner;
use super::time::{Timestamp, interval};

/// Something that is done to a record.
#[derive(Clone, Copy, Debug)]
pub enum Operation<'a> {
    /// A worker takes it.
    Take {
        /// The process that has it then.
        owner: Option<&'a Owner>,
    },
    /// It is finished.
    Done {
        /// What came of it, as JSON text.
        result: Option<&'a str>,
        /// What it cost, as JSON text.
        spend: Option<&'a str>,
    },
    /// Its worker refuses it, or has died.
    Nack(&'a Refusal),
    /// Its worker gives it back, as if it had not taken it.
    HandBack,
    /// Somebody wants it to be tried again.
    Requeue,
    /// Somebody gives it up.
    Cancel {
        /// Why.
        reason: &'a str,
    },
    /// A person has been told that it waits for one.
    Announce,
}

/// Why a record is refused.
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

/// What an operation makes of a record.
#[derive(Debug)]
pub struct Transition {
    /// Its status.
    pub status: Status,
    /// Its line, without the `\n`.
    pub line: String,
    /// What the record amounted to, and doesn't any more: it belongs into the ledger, so that no counter falls.
    pub lost: Totals,
}

impl Operation<'_> {
    /// What it is called.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Take { .. } => "taken",
            Self::Done { .. } => "done",
            Self::Nack(_) => "refused",
            Self::HandBack => "handed back",
            Self::Requeue => "queued again",
            Self::Cancel { .. } => "cancelled",
            Self::Announce => "announced",
        }
    }

    /// Whether it may be applied to a record of this status. What holds a running one is another question.
    #[must_use]
    pub const fn applies_to(&self, status: Status) -> bool {
        use Status::{Dead, Human, Nack, Queued, Running};
        match self {
            Self::Take { .. } => matches!(status, Queued),
            Self::Done { .. } => matches!(status, Running | Human),
            Self::Nack(_) | Self::HandBack => matches!(status, Running),
            Self::Requeue => matches!(status, Human | Dead | Nack | Running),
            Self::Cancel { .. } => matches!(status, Queued | Human | Nack | Running),
            Self::Announce => matches!(status, Human),
        }
    }

    /// Applies it to a record that it [may be applied to](Self::applies_to).
    ///
    /// # Errors
    /// Says what in the record keeps it from that.
    pub fn apply(&self, record: &Envelope<'_>, now: Timestamp) -> Result<Transition, String> {
        const NULL: &str = "null";
        if let Some(doubt) = record.doubt {
            let doubt = doubt.as_str();
            return Err(format!(
                "it is in doubt ({doubt}), so that its line must not be changed: mend the line by hand"
            ));
        }
        let more = record.more();
        let mut nacks = Nacks::read(more.nacks);
        if record.status == Status::Nack && nacks.count() == 0 {
            // Whoever wrote that status did not say why. It counts as one, and must go on to.
            nacks.add("{}");
        }
        let spend = match self {
            Self::Done { spend, .. } => *spend,
            Self::Nack(refusal) => refusal.spend.as_deref(),
            _ => None,
        };
        let status = match self {
            Self::Take { .. } => Status::Running,
            Self::Done { .. } => Status::Done,
            Self::Nack(refusal) => {
                nacks.add(&refusal.to_json(&record.to, now));
                match nacks.count() {
                    _ if !refusal.is_retryable => Status::Dead,
                    1 => Status::Queued,
                    _ => Status::Human,
                }
            }
            Self::HandBack | Self::Requeue => Status::Queued,
            Self::Cancel { .. } => Status::Dead,
            Self::Announce => record.status,
        };

        let mut changes = vec![("status", quoted(status.as_str()))];
        let old = Attempt { started: record.started_ts, finished: record.finished_ts };
        let mut new = old;
        match status {
            Status::Queued => new = Attempt::default(),
            Status::Running => new = Attempt { started: Some(now), finished: None },
            Status::Human if record.status == Status::Human => {}
            // A person may come to it much later than the attempt has ended.
            _ if record.status == Status::Running || old.finished.is_none() => new.finished = Some(now),
            _ => {}
        }
        for (name, old, new) in [("started_ts", old.started, new.started), ("finished_ts", old.finished, new.finished)]
        {
            if old != new {
                changes.push((name, new.map_or_else(|| NULL.to_owned(), Timestamp::to_json)));
            }
        }
        if let Some(json) = nacks.changed() {
            changes.push(("nacks", json));
        }
        if let Some(spend) = spend {
            changes.push(("spend", with_spend(more.spend, spend)));
        }
        match self {
            Self::Take { owner } => changes.push(("owner", owner.map_or_else(|| NULL.to_owned(), Owner::to_json))),
            Self::Announce => changes.push(("notified_ts", now.to_json())),
            _ => changes.push(("owner", NULL.to_owned())),
        }
        match self {
            Self::Done { result: Some(result), .. } => changes.push(("result", json::compact(result))),
            Self::Cancel { reason } => changes.push(("stopped", stopped(TOOLS, reason, "cancelled", now))),
            _ => {}
        }
        // Whoever is told of it next is told of something else.
        if matches!(self, Self::Take { .. } | Self::Nack(_) | Self::HandBack | Self::Requeue) {
            changes.extend([("notified_ts", NULL.to_owned()), ("stopped", NULL.to_owned())]);
        }

        let ended = match self {
            // The attempt has come to an end, though the record does not show it any more.
            Self::Nack(_) if status == Status::Queued => Attempt { finished: Some(now), ..old },
            _ => old,
        };
        let mut lost = Totals::default();
        let [(old_wait, old_time), (new_wait, new_time)] =
            [ended, new].map(|attempt| attempt.observations(record.ts, now));
        if let Some(wait) = old_wait.filter(|_| old_wait != new_wait) {
            lost.queue_wait.observe(wait);
        }
        if let Some(time) = old_time.filter(|_| old_time != new_time) {
            lost.role_time.observe(time);
        }
        lost.dead = u64::from(record.status == Status::Dead && status != Status::Dead);
        lost.nacks = nacks.forgotten();
        Ok(Transition { status, line: record.with(&changes), lost })
    }
}

/// When the last attempt began and ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Attempt {
    started: Option<Timestamp>,
    finished: Option<Timestamp>,
}

impl Attempt {
    /// The wait and the time in role that metrics see.
    fn observations(self, queued: Timestamp, now: Timestamp) -> (Option<u64>, Option<u64>) {
        let wait = self.started.and_then(|started| interval(queued, started, now));
        let time = self.started.zip(self.finished).and_then(|(started, finished)| interval(started, finished, now));
        (wait, time)
    }
}

impl Refusal {
    fn to_json(&self, by: &str, now: Timestamp) -> String {
        let class = self.error_class.as_deref().map_or_else(|| "null".to_owned(), quoted);
        format!(
            r#"{{"ts":{},"by":{},"reason":{},"error_class":{class},"retryable":{}}}"#,
            now.to_json(),
            quoted(by),
            quoted(&self.reason),
            self.is_retryable
        )
    }
}

/// The elements of `nacks`.
struct Nacks<'a> {
    /// Those that the record has: its array without the brackets, or so many of which nothing is known.
    old: Result<&'a str, u64>,
    old_count: u64,
    added: Vec<String>,
}

impl<'a> Nacks<'a> {
    /// So many that are only counted become elements.
    const MAX_COUNTED: u64 = 1_000;

    fn read(json: Option<&'a str>) -> Self {
        let (old, old_count) = match json.map(|json| (json, json::array_len(json))) {
            Some((json, Some(count))) => (Ok(elements(json)), count),
            // Without doubt it is a number then.
            Some((json, None)) => {
                let count = json.parse().unwrap_or(0);
                (Err(count), count)
            }
            None => (Err(0), 0),
        };
        Self { old, old_count, added: Vec::new() }
    }

    fn add(&mut self, element: &str) {
        self.added.push(element.to_owned());
    }

    fn count(&self) -> u64 {
        self.old_count + self.added.len() as u64
    }

    /// How many there are no elements for, once they have become an array.
    fn forgotten(&self) -> u64 {
        match self.old {
            Err(count) if !self.added.is_empty() => count.saturating_sub(Self::MAX_COUNTED),
            _ => 0,
        }
    }

    /// All of them, if some were added.
    fn changed(&self) -> Option<String> {
        let old = match self.old {
            Ok(elements) => vec![elements],
            Err(count) => vec!["{}"; usize::try_from(count.min(Self::MAX_COUNTED)).unwrap_or(0)],
        };
        let all = old.into_iter().chain(self.added.iter().map(String::as_str)).filter(|element| !element.is_empty());
        (!self.added.is_empty()).then(|| format!("[{}]", all.collect::<Vec<_>>().join(",")))
    }
}

/// What stands between the brackets of an array.
fn elements(array: &str) -> &str {
    array.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or_default().trim()
}

/// What a record has cost and what it has cost now, as one `spend`.
fn with_spend(old: Option<&str>, new: &str) -> String {
    let new = json::compact(new);
    let Some(old) = old else { return new };
    let entries = |spend: &str| if spend.starts_with('[') { elements(spend).to_owned() } else { spend.to_owned() };
    let both: Vec<String> = [entries(old), entries(&new)].into_iter().filter(|entries| !entries.is_empty()).collect();
    format!("[{}]", both.join(","))
}

/// Makes sure that a result is JSON that fits into a record.
///
/// # Errors
/// Says why it doesn't.
pub fn check_result(result: &str) -> Result<(), String> {
    check("result", result).map(|_| ())
}

/// Makes sure that `spend` is a number, an entry or an array of entries.
///
/// # Errors
/// Says why it isn't.
pub fn check_spend(spend: &str) -> Result<(), String> {
    match check("spend", spend)? {
        b'{' | b'0'..=b'9' => Ok(()),
        b'[' => check_entries(spend),
        _ => Err("the spend is neither a number of USD (0 or more), an entry, nor an array of these".to_owned()),
    }
}

fn check_entries(spend: &str) -> Result<(), String> {
    let is_entry = |value: &serde_json::value::RawValue| {
        value.get().starts_with(|first: char| first == '{' || first.is_ascii_digit())
    };
    match serde_json::from_str::<Vec<&serde_json::value::RawValue>>(spend) {
        Ok(entries) if entries.iter().all(|entry| is_entry(entry)) => Ok(()),
        _ => Err("the spend's elements are not all numbers of USD (0 or more) or entries".to_owned()),
    }
}

/// The first byte of a text that is one JSON value, and has no number that makes a record doubtful.
fn check(what: &str, text: &str) -> Result<u8, String> {
    // As a member of an object, all of it is looked at.
    if text.trim().is_empty() {
        return Err(format!("the {what} is empty"));
    }
    let object = format!("{{\"x\":{text}\n}}");
    let members = json::Document::new(&object).object::<1>(|key| (key == b"x").then_some(0));
    match members {
        Ok(members) if members.non_finite => Err(format!("the {what} holds NaN or Infinity, which are no JSON")),
        Ok(members) if !members.duplicates => {
            let value = members.span(0).and_then(|span| object.get(span)).unwrap_or_default();
            let is_all = value.len() == text.trim_matches([' ', '\t', '\n', '\r']).len();
            match value.as_bytes().first() {
                Some(first) if is_all => Ok(*first),
                _ => Err(format!("the {what} is not one JSON value")),
            }
        }
        _ => Err(format!("the {what} is not JSON: a text needs quotes")),
    }
}

#[cfg(test)]
#[expect(clippy::expect_used, reason = "a test that panics has failed")]
mod tests {
    use super::super::envelope::{self, Line};
    use super::*;

    const NOW: Timestamp = Timestamp::from_micros(1_795_953_600_500_000);

    fn apply(operation: &Operation<'_>, line: &str) -> Result<Transition, String> {
        match envelope::parse(line.as_bytes()) {
            Ok(Line::Record(record)) => operation.apply(&record, NOW),
            other => panic!("{line}: {other:?}"),
        }
    }

    fn refusal(is_retryable: bool) -> Refusal {
        Refusal { reason: "a \"b\"\n".to_owned(), error_class: None, is_retryable, spend: None }
    }

    /// A record with some space in its line, and these members at the end.
    fn record(status: &str, more: &str) -> String {
        format!(
            "\u{feff} {{ \"ts\" : 1795953000, \"id\":\"1\",\"kind\":\"k\", \"status\" :\"{status}\" ,\"from\":\"a\",\"to\":\"b\",\"x\":1e400{more} }}\r"
        )
    }

    #[test]
    fn only_what_an_operation_means_changes_in_a_line() {
        let owner = Owner { host: "h".into(), boot_id: "b".into(), pid: 7, start_time: 9, pid_namespace: None };
        let taken = apply(
            &Operation::Take { owner: Some(&owner) },
            &record("queued", r#","owner":null,"payload":{"status":"queued"}"#),
        );
        let expected = record(
            "running",
            r#","owner":{"host":"h","boot_id":"b","pid":7,"start_time":9},"payload":{"status":"queued"} ,"started_ts":1795953600.500000"#,
        );
        assert_eq!(taken.expect("a transition").line, expected.replace("500000 }", "500000}"));
        let done = apply(&Operation::Done { result: Some("[1,\n 2]"), spend: Some("0.5") }, &record("running", ""));
        let done = done.expect("a transition");
        assert_eq!((done.status, done.lost), (Status::Done, Totals::default()));
        let added = r#""x":1e400 ,"finished_ts":1795953600.500000,"spend":0.5,"result":[1,2]}"#;
        assert!(done.line.ends_with(&format!("{added}\r")), "{}", done.line);
    }

    #[test]
    fn the_first_nack_queues_the_second_waits_for_a_person_and_none_is_forgotten() {
        let nacked = |status: &str, more: &str, is_retryable: bool| {
            let transition =
                apply(&Operation::Nack(&refusal(is_retryable)), &record(status, more)).expect("a transition");
            let nacks = transition.line.split_once("\"nacks\":").map_or(String::new(), |(_, rest)| rest.to_owned());
            (transition.status, nacks)
        };
        let one = r#"{"ts":1795953600.500000,"by":"b","reason":"a \"b\"\n","error_class":null,"retryable":true}"#;
        assert_eq!(nacked("running", "", true), (Status::Queued, format!("[{one}]}}\r")));
        assert_eq!(nacked("running", r#","nacks":[{"old":1} ]"#, true).0, Status::Human);
        assert!(nacked("running", r#","nacks":[{"old":1} ]"#, true).1.starts_with(&format!(r#"[{{"old":1}},{one}]"#)));
        assert!(nacked("running", r#","nacks":2"#, true).1.starts_with(&format!("[{{}},{{}},{one}]")));
        assert!(nacked("running", r#","nacks":[]"#, true).1.starts_with(&format!("[{one}]")));
        assert_eq!(nacked("running", "", false).0, Status::Dead);
        let many =
            apply(&Operation::Nack(&refusal(true)), &record("running", r#","nacks":5000"#)).expect("a transition");
        assert_eq!((many.line.matches("{}").count(), many.lost.nacks), (1_000, 4_000));
        // Whoever wrote `nack` without saying why has refused it once.
        let requeued = apply(&Operation::Requeue, &record("nack", "")).expect("a transition");
        assert!(requeued.line.contains(r#""nacks":[{}]"#), "{}", requeued.line);
    }

    #[test]
    fn what_an_attempt_amounted_to_goes_to_the_ledger() {
        let times = r#","started_ts":1795953060,"finished_ts":1795953160"#;
        let lost = |operation: &Operation<'_>, status: &str, more: &str| {
            let Totals { dead, queue_wait, role_time, .. } =
                apply(operation, &record(status, more)).expect("a transition").lost;
            (dead, queue_wait.sum_us / 1_000_000, role_time.sum_us / 1_000_000)
        };
        // Queued at …000, started at …060, now is …600.
        let started = r#","started_ts":1795953060"#;
        let (first, second) = (refusal(true), refusal(true));
        assert_eq!(lost(&Operation::Nack(&first), "running", started), (0, 60, 540));
        assert_eq!(lost(&Operation::Nack(&second), "running", &format!(r#","nacks":1{started}"#)), (0, 0, 0));
        assert_eq!(lost(&Operation::HandBack, "running", started), (0, 60, 0));
        assert_eq!(lost(&Operation::Requeue, "human", times), (0, 60, 100));
        assert_eq!(lost(&Operation::Requeue, "dead", times), (1, 60, 100));
        assert_eq!(lost(&Operation::Take { owner: None }, "queued", times), (0, 60, 100));
        assert_eq!(lost(&Operation::Done { result: None, spend: None }, "human", times), (0, 0, 0));
        assert_eq!(lost(&Operation::Cancel { reason: "r" }, "queued", ""), (0, 0, 0));
        assert_eq!(lost(&Operation::Announce, "human", times), (0, 0, 0));
    }

    #[test]
    fn costs_add_up() {
        for (old, new, both) in [
            (None, "0.5", "0.5"),
            (Some("0.25"), "0.5", "[0.25,0.5]"),
            (Some("[ ]"), "[{\"a\": 1}]", "[{\"a\":1}]"),
            (Some("{\"a\":1}"), "[2, 3]", "[{\"a\":1},2,3]"),
            (Some("[1 , 2]"), "[]", "[1 , 2]"),
        ] {
            assert_eq!(with_spend(old, new), both);
        }
    }

    #[test]
    fn what_is_given_must_be_one_json_value() {
        for good in ["1", " {} ", "[1,\n\"a\"]", "\"text\"", "null"] {
            assert_eq!(check_result(good), Ok(()), "{good}");
        }
        for bad in ["", " ", "text", "1,\"y\":2", "1}", "{}{}", "[NaN]", "1,\"x\":2", "\u{1}"] {
            assert!(check_result(bad).is_err(), "{bad:?}");
        }
        for good in ["0.5", "{\"cost_usd\":1}", "[1,{\"model\":\"m\"}]", "[]"] {
            assert_eq!(check_spend(good), Ok(()), "{good}");
        }
        for bad in ["-1", "[-1]", "\"0.5\"", "null", "[[1]]", "[\"a\"]", "true"] {
            assert!(check_spend(bad).is_err(), "{bad}");
        }
    }
}
