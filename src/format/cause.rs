//! Why a record was refused, or has stopped.

use std::borrow::Cow;

use super::json::{Document, Members};
use super::time::Timestamp;

/// An element of `nacks`, or `stopped`. What can't be read is absent.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Cause<'a> {
    /// When.
    pub ts: Option<Timestamp>,
    /// The role that refused, or whoever else stopped it.
    pub by: Option<Cow<'a, str>>,
    /// Why, in words.
    pub reason: Option<Cow<'a, str>>,
    /// Why, in one word.
    pub error_class: Option<Cow<'a, str>>,
    /// Whether trying again may help.
    pub retryable: Option<bool>,
}

impl<'a> Cause<'a> {
    /// Reads one from one valid JSON value.
    #[must_use]
    pub fn read(json: &'a str) -> Self {
        let Ok(members) = Document::new(json).object::<5>(index) else { return Self::default() };
        let text = |members: &Members<'a, 5>, field| members.string(field).map(|text| text.text);
        Self {
            ts: members.get(0).and_then(Timestamp::from_json),
            by: text(&members, 1),
            reason: text(&members, 2),
            error_class: text(&members, 3),
            retryable: members.get(4).and_then(|json| json.parse().ok()),
        }
    }

    /// Reads `nacks`, which are none if they are just a number.
    #[must_use]
    pub fn of_nacks(json: &'a str) -> Vec<Self> {
        let mut causes = Vec::new();
        // What isn't an array has no elements.
        let _ = Document::new(json).start().elements(&mut |cursor| {
            causes.push(Self::read(cursor.text()?));
            Ok(())
        });
        causes
    }
}

fn index(key: &[u8]) -> Option<usize> {
    [&b"ts"[..], b"by", b"reason", b"error_class", b"retryable"].iter().position(|name| *name == key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_be_read_is_and_the_rest_is_absent() {
        let nacks =
            r#"[{"ts":1764400000,"by":"r","reason":"no\n","error_class":"c","retryable":false},7,{"reason":3}]"#;
        let first = Cause {
            ts: Some(Timestamp::from_micros(1_764_400_000_000_000)),
            by: Some("r".into()),
            reason: Some("no\n".into()),
            error_class: Some("c".into()),
            retryable: Some(false),
        };
        assert_eq!(Cause::of_nacks(nacks), [first, Cause::default(), Cause::default()]);
        assert_eq!(Cause::of_nacks("3"), []);
    }
}
