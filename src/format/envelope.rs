//! One line of the queue: blank, ledger, record or malformed.

use std::borrow::Cow;
use std::ops::Range;

use super::json::{self, Document, Fault, Members};
use super::ledger::{Ledger, begins_like_ledger};
use super::lines::RawLine;
use super::malformed::{Malformed, Reason};
use super::spend;
use super::time::Timestamp;

/// What a line is, if it isn't malformed.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one at a time, and nearly always a record")]
pub enum Line<'a> {
    /// White space only.
    Blank,
    /// The tools' own state.
    Ledger(Box<Ledger>),
    /// A unit of work handed over.
    Record(Envelope<'a>),
}

/// The envelope of a record, as far as the tools have a use for it.
#[derive(Debug)]
pub struct Envelope<'a> {
    /// Identifies the record.
    pub id: Cow<'a, str>,
    /// When it was queued.
    pub ts: Timestamp,
    /// What is to be done.
    pub kind: Cow<'a, str>,
    /// The role that asks.
    pub from: Cow<'a, str>,
    /// The role that is asked.
    pub to: Cow<'a, str>,
    /// Where it stands.
    pub status: Status,
    /// When the last attempt began.
    pub started_ts: Option<Timestamp>,
    /// When the last attempt ended.
    pub finished_ts: Option<Timestamp>,
    /// How often it was refused.
    pub nacks: u64,
    /// The payload, as JSON text.
    pub payload: Option<&'a str>,
    /// Why a field had to be interpreted, if one had. Such a record is counted, but never changed or removed.
    pub doubt: Option<Doubt>,
    pub(super) document: Document<'a>,
    pub(super) payload_start: Option<usize>,
    pub(super) result_start: Option<usize>,
    spend_start: Option<usize>,
}

impl<'a> Envelope<'a> {
    /// The model responses in its `spend`, of several with the same id only the last; `None` if it has no `spend`.
    pub(super) fn responses(&self) -> Option<Vec<spend::Entry<'a>>> {
        self.spend_start.map(|start| spend::entries(&mut self.document.cursor(start)))
    }
}

impl Envelope<'_> {
    /// Its line, without the `\n`.
    #[must_use]
    pub fn line(&self) -> &str {
        self.document.text()
    }

    /// Its line with these members, by name and JSON text, in place of those that it has, and every other byte as it is. To be `null` is
    /// to be absent.
    pub(super) fn with(&self, changes: &[(&str, String)]) -> String {
        let text = self.document.text();
        // The line has been read before: it is an object, and not an empty one.
        let members = self.document.object::<FIELDS>(index).ok();
        let span = |key: &str| members.as_ref().zip(index(key.as_bytes())).and_then(|(members, key)| members.span(key));
        let end = text.rfind('}').unwrap_or(text.len());
        let mut edits: Vec<(Range<usize>, String)> = Vec::new();
        for (key, json) in changes {
            match span(key) {
                Some(span) => edits.push((span, json.clone())),
                None if json == "null" => {}
                None => edits.push((end..end, format!(",\"{key}\":{json}"))),
            }
        }
        // Stable, so that new members stand in the order in which they were given.
        edits.sort_by_key(|(place, _)| place.start);
        let (mut line, mut at) = (String::with_capacity(text.len() + 256), 0);
        for (place, json) in edits {
            line.push_str(&text[at..place.start]);
            line.push_str(&json);
            at = place.end;
        }
        line.push_str(&text[at..]);
        line
    }
}

/// The fields that only those need who hand records over, look at them or change them.
#[derive(Debug)]
pub struct More<'a> {
    /// The run that it belongs to, if that is a string.
    pub run_id: Option<Cow<'a, str>>,
    /// The exchange that it belongs to, if that is a string.
    pub correlation_id: Option<Cow<'a, str>>,
    /// The id of the record that caused it, if that is a string.
    pub parent: Option<Cow<'a, str>>,
    /// The process that holds it, as JSON text.
    pub owner: Option<&'a str>,
    /// How often, or when and why, it was refused, as JSON text.
    pub nacks: Option<&'a str>,
    /// What model responses cost, as JSON text.
    pub spend: Option<&'a str>,
    /// What came of it, as JSON text.
    pub result: Option<&'a str>,
    /// When a person was told, as JSON text.
    pub notified_ts: Option<&'a str>,
    /// Why it has stopped without a nack, as JSON text.
    pub stopped: Option<&'a str>,
}

impl<'a> Envelope<'a> {
    /// Reads these fields too.
    #[must_use]
    pub fn more(&self) -> More<'a> {
        // The line has been read before.
        let members = self.document.object::<FIELDS>(index).ok();
        let get = |field: usize| members.as_ref().and_then(|members| members.get(field));
        let text = |field: usize| members.as_ref().and_then(|members| members.string(field)).map(|text| text.text);
        More {
            run_id: text(RUN_ID),
            correlation_id: text(CORRELATION_ID),
            parent: text(PARENT),
            owner: get(OWNER),
            nacks: get(NACKS),
            spend: get(SPEND),
            result: get(RESULT),
            notified_ts: get(NOTIFIED_TS),
            stopped: get(STOPPED),
        }
    }
}

impl<'a> Envelope<'a> {
    /// What the payload says in short, if that is a string.
    #[must_use]
    pub fn summary(&self) -> Option<Cow<'a, str>> {
        let payload = Document::new(self.payload?);
        let members = payload.object::<1>(|key| (key == b"summary").then_some(0)).ok()?;
        members.string(0).map(|text| text.text)
    }

    /// The fields that the format does not name: their keys, decoded, and their values as JSON text.
    #[must_use]
    pub fn unknown_fields(&self) -> Vec<(Cow<'a, str>, &'a str)> {
        let mut fields = Vec::new();
        // The line has been read before, so that nothing stops the cursor.
        let _ = self.document.start().entries(&mut |cursor, key| {
            let (key, value) = (json::string(key), cursor.text()?);
            fields.extend(key.filter(|key| index(key.text.as_bytes()).is_none()).map(|key| (key.text, value)));
            Ok(())
        });
        fields
    }
}

/// Why a record can't be read with certainty. The first one that applies counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Doubt {
    /// A field of the format's stands there twice.
    DuplicateKey,
    /// A number is none of JSON's.
    NonFiniteNumber,
    /// A name isn't Unicode.
    LoneSurrogate,
    /// `started_ts` or `finished_ts` is no time.
    UnreadableTime,
    /// `nacks` is neither an array nor a count.
    UnreadableNacks,
}

impl Doubt {
    /// Its name, as in plans.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::DuplicateKey => "duplicate_key",
            Self::NonFiniteNumber => "non_finite_number",
            Self::LoneSurrogate => "lone_surrogate",
            Self::UnreadableTime => "unreadable_time",
            Self::UnreadableNacks => "unreadable_nacks",
        }
    }
}

/// Where a record stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Status {
    /// Waits for a worker of its role.
    Queued,
    /// A worker has it.
    Running,
    /// Finished.
    Done,
    /// Refused by its worker.
    Nack,
    /// Waits for a person.
    Human,
    /// Given up.
    Dead,
    /// None of the format's.
    Other,
}

impl Status {
    /// Every status.
    pub const ALL: [Self; 7] =
        [Self::Queued, Self::Running, Self::Done, Self::Nack, Self::Human, Self::Dead, Self::Other];

    /// The word in the envelope; `other` for the last.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Done => "done",
            Self::Nack => "nack",
            Self::Human => "human",
            Self::Dead => "dead",
            Self::Other => "other",
        }
    }

    fn read(word: &str) -> Self {
        Self::ALL.into_iter().find(|status| status.as_str() == word).unwrap_or(Self::Other)
    }
}

/// Reads one line as the splitter passes it on.
///
/// # Errors
/// Says why the line is malformed.
pub fn parse_raw(line: RawLine<'_>) -> Result<Line<'_>, Malformed> {
    match line {
        RawLine::Whole(line) => parse(line),
        RawLine::TooLong { bytes, is_ledger } => {
            let fault = Malformed::new(Reason::TooLong, format!("{bytes} bytes are more than a line may have"));
            Err(Malformed { is_ledger, ..fault })
        }
    }
}

/// Reads one line, without its `\n`.
///
/// # Errors
/// Says why the line is malformed.
pub fn parse(line: &[u8]) -> Result<Line<'_>, Malformed> {
    // A damaged ledger is a lost ledger, whatever the damage.
    parse_any(line).map_err(|fault| Malformed { is_ledger: fault.is_ledger || begins_like_ledger(line), ..fault })
}

fn parse_any(line: &[u8]) -> Result<Line<'_>, Malformed> {
    let text = simdutf8::compat::from_utf8(line).map_err(|error| {
        Malformed::new(Reason::NotUtf8, format!("invalid UTF-8 at byte {}", error.valid_up_to() + 1))
    })?;
    let document = Document::new(text);
    let members = match document.object(index) {
        Ok(members) => members,
        Err(_) if is_blank(line) => return Ok(Line::Blank),
        Err(Fault::NotAnObject) => return Err(Malformed::new(Reason::NotAnEnvelope, "not a JSON object")),
        Err(Fault::Syntax(fault)) => return Err(Malformed::new(Reason::NotJson, fault.to_string())),
    };
    let duplicate = members.duplicates.then_some(Doubt::DuplicateKey);
    let doubt = duplicate.or(members.non_finite.then_some(Doubt::NonFiniteNumber));
    Reader { document, members, doubt }.read()
}

fn is_blank(line: &[u8]) -> bool {
    let line = line.strip_prefix(json::BYTE_ORDER_MARK.as_bytes()).unwrap_or(line);
    line.iter().all(|byte| matches!(byte, b' ' | b'\t' | b'\r'))
}

const ID: usize = 0;
const TS: usize = 1;
const KIND: usize = 2;
const FROM: usize = 3;
const TO: usize = 4;
const PAYLOAD: usize = 5;
const STATUS: usize = 6;
const PROTOCOL_VERSION: usize = 7;
const STARTED_TS: usize = 8;
const FINISHED_TS: usize = 9;
const NACKS: usize = 10;
const SPEND: usize = 11;
const RESULT: usize = 12;
// Of these it only matters to metrics whether they stand there twice.
const RUN_ID: usize = 13;
const CORRELATION_ID: usize = 14;
const PARENT: usize = 15;
const OWNER: usize = 16;
const NOTIFIED_TS: usize = 17;
const STOPPED: usize = 18;
const FIELDS: usize = 19;

fn index(key: &[u8]) -> Option<usize> {
    Some(match key {
        b"id" => ID,
        b"ts" => TS,
        b"kind" => KIND,
        b"from" => FROM,
        b"to" => TO,
        b"payload" => PAYLOAD,
        b"status" => STATUS,
        b"protocol_version" => PROTOCOL_VERSION,
        b"started_ts" => STARTED_TS,
        b"finished_ts" => FINISHED_TS,
        b"nacks" => NACKS,
        b"spend" => SPEND,
        b"run_id" => RUN_ID,
        b"correlation_id" => CORRELATION_ID,
        b"parent" => PARENT,
        b"owner" => OWNER,
        b"result" => RESULT,
        b"notified_ts" => NOTIFIED_TS,
        b"stopped" => STOPPED,
        _ => return None,
    })
}

/// Reads an envelope's fields and remembers why any of them had to be interpreted.
struct Reader<'a> {
    document: Document<'a>,
    members: Members<'a, FIELDS>,
    doubt: Option<Doubt>,
}

impl<'a> Reader<'a> {
    fn read(mut self) -> Result<Line<'a>, Malformed> {
        if let Some(version) = self.members.get(PROTOCOL_VERSION)
            && !matches!(version, "1" | "2")
        {
            return Err(Malformed::new(Reason::UnsupportedVersion, "`protocol_version` is neither 1 nor 2"));
        }
        let id = self.text(ID, "`id` is missing or not a string")?;
        if id.is_empty() {
            return Err(Malformed::new(Reason::NotAnEnvelope, "`id` is empty"));
        }
        let kind = self.text(KIND, "`kind` is missing or not a string")?;
        let from = self.text(FROM, "`from` is missing or not a string")?;
        let to = self.text(TO, "`to` is missing or not a string")?;
        let status = self.text(STATUS, "`status` is missing or not a string")?;
        let ts = self.members.get(TS).and_then(Timestamp::from_json);
        let ts = ts.ok_or(Malformed::new(Reason::NotAnEnvelope, "`ts` is missing or not a readable time"))?;
        let payload = self.members.get(PAYLOAD);

        let started_ts = self.optional(STARTED_TS, Timestamp::from_json, Doubt::UnreadableTime);
        let finished_ts = self.optional(FINISHED_TS, Timestamp::from_json, Doubt::UnreadableTime);
        let nacks = self.optional(NACKS, nacks, Doubt::UnreadableNacks).unwrap_or(0);
        if kind == "ledger" && status == "ledger" {
            if self.doubt.is_some() {
                return Err(Malformed::ledger(Reason::NotAnEnvelope, "unreadable ledger: it is ambiguous"));
            }
            return Ok(Line::Ledger(Box::new(Ledger::read(payload.unwrap_or_default())?)));
        }
        let status = Status::read(&status);
        Ok(Line::Record(Envelope {
            id,
            ts,
            kind,
            from,
            to,
            status,
            started_ts,
            finished_ts,
            nacks: nacks.max(u64::from(status == Status::Nack)),
            payload,
            doubt: self.doubt,
            payload_start: self.members.start(PAYLOAD),
            result_start: self.members.start(RESULT),
            spend_start: self.members.start(SPEND),
            document: self.document,
        }))
    }

    fn text(&mut self, index: usize, otherwise: &'static str) -> Result<Cow<'a, str>, Malformed> {
        let text = self.members.string(index);
        let text = text.ok_or(Malformed::new(Reason::NotAnEnvelope, otherwise))?;
        if text.lossy {
            self.doubt(Doubt::LoneSurrogate);
        }
        Ok(text.text)
    }

    fn optional<T>(&mut self, index: usize, read: impl FnOnce(&'a str) -> Option<T>, otherwise: Doubt) -> Option<T> {
        let json = self.members.get(index)?;
        let value = read(json);
        if value.is_none() {
            self.doubt(otherwise);
        }
        value
    }

    fn doubt(&mut self, doubt: Doubt) {
        self.doubt = self.doubt.or(Some(doubt));
    }
}

fn nacks(json: &str) -> Option<u64> {
    json::array_len(json).or_else(|| json.parse::<u32>().ok().map(u64::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(members: &str) -> String {
        format!(
            r#"{{"id":"1","ts":1764400000,"kind":"k","from":"a","to":"b","payload":{{}},"status":"queued"{members}}}"#
        )
    }

    fn reason(line: &[u8]) -> Option<Reason> {
        parse(line).err().map(|malformed| malformed.reason)
    }

    fn check(members: &str, expected: impl FnOnce(&Envelope<'_>) -> bool) {
        let line = with(members);
        match parse(line.as_bytes()) {
            Ok(Line::Record(envelope)) => assert!(expected(&envelope), "{envelope:?}"),
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn plain_records_are_not_in_doubt() {
        check("", |e| e.doubt.is_none() && e.status == Status::Queued && e.nacks == 0);
        check(r#","started_ts":null,"nacks":null,"protocol_version":null,"new":[1]"#, |e| e.doubt.is_none());
    }

    #[test]
    fn what_is_interpreted_is_in_doubt() {
        check(r#","status":"done""#, |e| e.doubt == Some(Doubt::DuplicateKey) && e.status == Status::Done);
        check(r#","started_ts":"soon""#, |e| e.doubt == Some(Doubt::UnreadableTime) && e.started_ts.is_none());
        check(r#","finished_ts":[],"nacks":-1"#, |e| e.doubt == Some(Doubt::UnreadableTime));
        check(r#","nacks":-1"#, |e| e.doubt == Some(Doubt::UnreadableNacks) && e.nacks == 0);
        check(r#","x":[NaN]"#, |e| e.doubt == Some(Doubt::NonFiniteNumber));
        check(r#","kind":"\ud800""#, |e| e.doubt == Some(Doubt::DuplicateKey) && e.kind == "\u{fffd}");
        check(r#","x":{"a":1,"a":2,"b":"\ud800"}"#, |e| e.doubt.is_none());
        let surrogate = with("").replace("\"b\"", r#""\ud800""#);
        assert!(matches!(parse(surrogate.as_bytes()), Ok(Line::Record(e)) if e.doubt == Some(Doubt::LoneSurrogate)));
    }

    #[test]
    fn a_damaged_ledger_is_known_as_one() {
        let is_ledger = |line: &str| parse(line.as_bytes()).is_err_and(|malformed| malformed.is_ledger);
        let ledger = |payload: &str| {
            let members = r#""id":"l","ts":1,"from":"handoff","to":"","kind":"ledger","status":"ledger""#;
            format!("{{{members},\"payload\":{payload}}}")
        };
        assert!(parse(ledger(r#"{"version":1,"totals":{},"generations":{}}"#).as_bytes()).is_ok());
        assert!(is_ledger(&ledger("{}")));
        assert!(is_ledger(&ledger(r#"{"version":2}"#)));
        assert!(is_ledger(&ledger(r#"{"version":1,"totals":{},"generations":{}},"status":"ledger""#)));
        assert!(is_ledger(r#"{"id":"ledger","ts":17"#));
        assert!(is_ledger("\u{feff} { \"id\" : \"ledger\" , \"ts\": 17"));
        assert!(is_ledger(r#"{"from": "handoff", "id": "ledger", "kind": "led"#));
        assert!(is_ledger(r#"x"id":"ledger","ts":17"#));
        assert!(!is_ledger(r#"{"id":"ledgers","ts":17"#));
        assert!(!is_ledger(&format!("{{\"x\":\"{}\",\"id\":\"ledger\",", "x".repeat(64))));
        assert!(!is_ledger(r#"{"id":"1","ts":17"#));
        assert!(!is_ledger("{}"));
    }

    #[test]
    fn nacks_of_both_forms() {
        check(r#","nacks":[{"ts":1},{"ts":2}]"#, |e| e.nacks == 2);
        check(r#","nacks":3"#, |e| e.nacks == 3);
        let nacked = with("").replace("queued", "nack");
        assert!(matches!(parse(nacked.as_bytes()), Ok(Line::Record(e)) if e.nacks == 1));
    }

    #[test]
    fn each_reason() {
        for (line, expected) in [
            (&b"\xff{}"[..], Reason::NotUtf8),
            (b"\0\0\0\0", Reason::NotJson),
            (b"{}{}", Reason::NotJson),
            (b"5 x", Reason::NotJson),
            (b"{\"id\":\"1\"", Reason::NotJson),
            (b"5", Reason::NotAnEnvelope),
            (b"[NaN]", Reason::NotAnEnvelope),
            (b"[NaN}", Reason::NotJson),
            (b"{}", Reason::NotAnEnvelope),
            (b"{\"protocol_version\":3}", Reason::UnsupportedVersion),
        ] {
            assert_eq!(reason(line), Some(expected), "{}", line.escape_ascii());
        }
        for (field, json) in [
            ("id", "\"1\""),
            ("kind", "\"k\""),
            ("from", "\"a\""),
            ("to", "\"b\""),
            ("status", "\"queued\""),
            ("ts", "1764400000"),
        ] {
            let key = format!("\"{field}\":{json}");
            for bad in [format!("\"{field}\":null"), format!("\"{field}\":7e20"), format!("\"x{field}\":{json}")] {
                let line = with("").replace(&key, &bad);
                assert_eq!(reason(line.as_bytes()), Some(Reason::NotAnEnvelope), "{line}");
            }
        }
    }

    #[test]
    fn blank_lines_and_byte_order_marks() {
        for blank in [&b""[..], b"\r", b" \t\r", b"\xef\xbb\xbf"] {
            assert!(matches!(parse(blank), Ok(Line::Blank)), "{blank:?}");
        }
        let line = format!("\u{feff}{}\r", with(""));
        assert!(matches!(parse(line.as_bytes()), Ok(Line::Record(_))));
    }
}
