//! JSON as the queue's writers really emit it, read without building a tree.
//!
//! Values stay text (`&str` of the line itself) until somebody needs them: money keeps its digits, and
//! what no field needs is only skipped. Skipping is iterative in `serde_json`, so depth costs no stack.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The members of one object that a reader has a use for, as the text that stands in the line.
pub(super) struct Members<'a, const N: usize> {
    values: [Option<&'a str>; N],
    /// Whether one of them stood there more than once. The last one counts.
    pub(super) duplicates: bool,
}

impl<'a, const N: usize> Members<'a, N> {
    /// Reads `text`, which must be one object, keeping the members called `names`.
    pub(super) fn read(text: &'a str, names: &[&str; N]) -> serde_json::Result<Self> {
        let mut json = serde_json::Deserializer::from_str(text);
        let members = MembersSeed(names).deserialize(&mut json)?;
        json.end()?;
        Ok(members)
    }

    /// The text of member `index`; `null` is absent.
    pub(super) fn get(&self, index: usize) -> Option<&'a str> {
        self.values[index].filter(|text| *text != "null")
    }
}

struct MembersSeed<'n, const N: usize>(&'n [&'n str; N]);

impl<'a, const N: usize> DeserializeSeed<'a> for MembersSeed<'_, N> {
    type Value = Members<'a, N>;

    fn deserialize<D: Deserializer<'a>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'a, const N: usize> Visitor<'a> for MembersSeed<'_, N> {
    type Value = Members<'a, N>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut members = Members { values: [None; N], duplicates: false };
        while let Some(index) = map.next_key_seed(KeySeed(self.0))? {
            match index {
                Some(index) => {
                    let value: &'a RawValue = map.next_value()?;
                    members.duplicates |= members.values[index].replace(value.get()).is_some();
                }
                None => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(members)
    }
}

/// Which of the names a key is. Keys are read as bytes: as text, a lone surrogate would be an error.
struct KeySeed<'n>(&'n [&'n str]);

impl<'de> DeserializeSeed<'de> for KeySeed<'_> {
    type Value = Option<usize>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_bytes(self)
    }
}

impl Visitor<'_> for KeySeed<'_> {
    type Value = Option<usize>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_bytes<E>(self, key: &[u8]) -> Result<Self::Value, E> {
        Ok(self.0.iter().position(|name| name.as_bytes() == key))
    }
}

/// A JSON string, decoded.
pub(super) struct Text<'a> {
    pub(super) text: Cow<'a, str>,
    /// Whether a lone surrogate was read as U+FFFD.
    pub(super) lossy: bool,
}

/// Decodes `json`, one valid JSON value, if it is a string.
pub(super) fn string(json: &str) -> Option<Text<'_>> {
    let inner = json.strip_prefix('"')?.strip_suffix('"')?;
    if memchr::memchr(b'\\', inner.as_bytes()).is_none() {
        return Some(Text { text: Cow::Borrowed(inner), lossy: false });
    }
    let Escaped(bytes) = serde_json::from_str(json).ok()?;
    let (text, lossy) = match String::from_utf8(bytes) {
        Ok(text) => (text, false),
        Err(error) => (replace_surrogates(error.as_bytes()), true),
    };
    Some(Text { text: Cow::Owned(text), lossy })
}

/// A string with escapes as `serde_json` decodes it into bytes: lone surrogates in the manner of WTF-8.
struct Escaped(Vec<u8>);

impl<'de> Deserialize<'de> for Escaped {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl Visitor<'_> for Bytes {
            type Value = Escaped;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Escaped, E> {
                Ok(Escaped(bytes.to_vec()))
            }
        }
        json.deserialize_bytes(Bytes)
    }
}

fn replace_surrogates(bytes: &[u8]) -> String {
    // The line was valid UTF-8, so all that can be invalid here is an encoded surrogate: three bytes.
    const SURROGATE: usize = 3;
    let mut text = String::with_capacity(bytes.len());
    let mut rest = bytes;
    loop {
        match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                return text;
            }
            Err(error) => {
                let (valid, bad) = rest.split_at(error.valid_up_to());
                text.push_str(&String::from_utf8_lossy(valid));
                text.push(char::REPLACEMENT_CHARACTER);
                rest = bad.get(SURROGATE..).unwrap_or_default();
            }
        }
    }
}

/// The elements of `json` as text, if it is an array.
pub(super) fn array(json: &str) -> Option<Vec<&RawValue>> {
    if json.starts_with('[') { serde_json::from_str(json).ok() } else { None }
}

/// How many elements `json` has, if it is an array.
pub(super) fn array_len(json: &str) -> Option<u64> {
    if !json.starts_with('[') {
        return None;
    }
    let elements: Vec<IgnoredAny> = serde_json::from_str(json).ok()?; // zero-sized: no allocation
    u64::try_from(elements.len()).ok()
}

/// Whether a direct member of the object `json` takes more than `limit` bytes as JSON text.
pub(super) fn has_member_over(json: &str, limit: usize) -> bool {
    struct Longest(usize);
    impl<'de> Deserialize<'de> for Longest {
        fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
            struct Object;
            impl<'de> Visitor<'de> for Object {
                type Value = Longest;
                fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    f.write_str("an object")
                }
                fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Longest, A::Error> {
                    let mut longest = 0;
                    while map.next_key_seed(KeySeed(&[]))?.is_some() {
                        let value: &'de RawValue = map.next_value()?;
                        longest = longest.max(value.get().len());
                    }
                    Ok(Longest(longest))
                }
            }
            json.deserialize_map(Object)
        }
    }
    json.len() > limit && serde_json::from_str(json).is_ok_and(|Longest(longest)| longest > limit)
}

/// `text` with Python's bare `NaN`, `Infinity` and `-Infinity` replaced by a number that no field accepts,
/// or `None` if there are none. Nothing that was no JSON otherwise becomes JSON by it.
pub(super) fn replace_non_finite(text: &str) -> Option<String> {
    // The blanks keep it from fusing with a number or a word next to it.
    const REPLACEMENT: &str = " -1 ";
    let bytes = text.as_bytes();
    let mut replaced = String::new();
    let mut copied = 0;
    let mut at = 0;
    while at < bytes.len() {
        match bytes[at] {
            b'"' => at = end_of_string(bytes, at + 1),
            b'N' | b'I' | b'-' => {
                let token = ["NaN", "Infinity", "-Infinity"]
                    .into_iter()
                    .find(|token| bytes[at..].starts_with(token.as_bytes()));
                if let Some(token) = token {
                    replaced.push_str(&text[copied..at]);
                    replaced.push_str(REPLACEMENT);
                    at += token.len();
                    copied = at;
                } else {
                    at += 1;
                }
            }
            _ => at += 1,
        }
    }
    if copied == 0 {
        return None;
    }
    replaced.push_str(&text[copied..]);
    Some(replaced)
}

/// The position after the quote that ends the string whose content starts at `at`.
fn end_of_string(bytes: &[u8], mut at: usize) -> usize {
    while let Some(step) = memchr::memchr2(b'"', b'\\', &bytes[at.min(bytes.len())..]) {
        at += step;
        if bytes[at] == b'"' {
            return at + 1;
        }
        at += 2;
    }
    bytes.len()
}

/// The message of a `serde_json` error with its place in the line, without the "line 1" that it counts for itself.
pub(super) fn describe(error: &serde_json::Error) -> String {
    let message = error.to_string();
    let what = message.rfind(" at line ").map_or(message.as_str(), |end| &message[..end]);
    format!("{what} at byte {}", error.column())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_of_other_names_are_skipped_and_the_last_duplicate_counts() {
        let members = Members::read(r#"{"x":[1,{"a":9}],"a":1,"b":null,"a" : "two" }"#, &["a", "b", "c"]).ok();
        let members = members.as_ref();
        assert_eq!(members.and_then(|m| m.get(0)), Some("\"two\""));
        assert_eq!(members.and_then(|m| m.get(1)), None);
        assert_eq!(members.and_then(|m| m.get(2)), None);
        assert_eq!(members.map(|m| m.duplicates), Some(true));
    }

    #[test]
    fn keys_are_compared_decoded() {
        let members = Members::read("{\"\\u0061\":1,\"\\ud83d\":2}", &["a"]).ok();
        assert_eq!(members.and_then(|m| m.get(0)), Some("1"));
    }

    #[test]
    fn a_lone_surrogate_is_one_replacement_character() {
        let text = string(r#""a\ud83db\udc00""#);
        assert!(text.as_ref().is_some_and(|t| t.lossy));
        assert_eq!(text.map(|t| t.text.into_owned()).as_deref(), Some("a\u{fffd}b\u{fffd}"));
        assert_eq!(string(r#""\ud83d\ude00""#).map(|t| t.text.into_owned()).as_deref(), Some("\u{1f600}"));
    }

    #[test]
    fn non_finite_numbers_are_replaced_outside_strings_only() {
        assert_eq!(replace_non_finite(r#"{"a":"NaN \" NaN"}"#), None);
        assert_eq!(
            replace_non_finite(r#"{"a":NaN,"Infinity":[-Infinity,Infinity]}"#).as_deref(),
            Some(r#"{"a": -1 ,"Infinity":[ -1 , -1 ]}"#)
        );
        for broken in ["1NaN", "NaN1", "-NaN", "1e-Infinity", "nullNaN", "NaNNaN", "{NaN:1}", "--Infinity", "\"a"] {
            let text = replace_non_finite(broken).unwrap_or_else(|| broken.to_owned());
            assert!(serde_json::from_str::<IgnoredAny>(&text).is_err(), "{broken} became {text}");
        }
    }

    #[test]
    fn depth_costs_no_stack() {
        let depth = 1_000_000;
        let text = format!("{{\"a\":{}{}}}", "[".repeat(depth), "]".repeat(depth));
        assert!(Members::read(&text, &["b"]).is_ok());
        assert!(Members::read(&text, &["a"]).is_ok());
    }
}
