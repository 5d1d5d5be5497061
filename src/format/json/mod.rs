//! JSON as the queue's writers really emit it, read in place.
//!
//! The dialect is that of FORMAT.md: RFC 8259, with `NaN` and `Infinity` as values, lone surrogates, any depth. Values stay text
//! (`&str` of the line itself) until somebody needs them: money keeps its digits, and what no field needs is only skipped.
//! Skipping is strict, iterative, and the reason why this is no general parser: it is where all the time goes.

mod stops;

use std::borrow::Cow;
use std::fmt::{self, Write};
use std::ops::Range;

use serde::de::{Deserialize, Deserializer, Visitor};

use self::stops::Stops;

/// Tolerated at the start of a line.
pub(super) const BYTE_ORDER_MARK: &str = "\u{feff}";

/// Why a text is no JSON.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// It is JSON, but no object.
    NotAnObject,
    /// It isn't.
    Syntax(SyntaxFault),
}

/// Where a text stops being JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SyntaxFault {
    /// At its end: something is missing.
    End,
    /// At this byte, from 1.
    Byte(usize),
    /// At this byte, from 1, where something follows a whole value.
    Trailing(usize),
}

impl fmt::Display for SyntaxFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::End => f.write_str("the JSON is cut short"),
            Self::Byte(at) => write!(f, "no JSON at byte {at}"),
            Self::Trailing(at) => write!(f, "something follows the JSON value at byte {at}"),
        }
    }
}

/// Marks the place of a fault, which the cursor knows.
#[derive(Debug)]
pub(super) struct Stop;
type Step<T = ()> = Result<T, Stop>;

/// A text in which the ends of strings have been found.
#[derive(Debug)]
pub(super) struct Document<'a> {
    text: &'a str,
    stops: Stops,
}

impl<'a> Document<'a> {
    /// The document that `text` is, which may be no JSON.
    pub(super) fn new(text: &'a str) -> Self {
        Self { text, stops: Stops::of(text.as_bytes()) }
    }

    /// Reads the document as one object. `index` gives each key that is wanted, decoded, its place.
    pub(super) fn object<const N: usize>(&self, index: fn(&[u8]) -> Option<usize>) -> Result<Members<'a, N>, Fault> {
        let mut cursor = self.start();
        match cursor.members(index) {
            Ok(members) if cursor.end().is_ok() => Ok(members),
            _ => Err(self.syntax_fault().map_or(Fault::NotAnObject, Fault::Syntax)),
        }
    }

    /// What stops the document from being one JSON value.
    fn syntax_fault(&self) -> Option<SyntaxFault> {
        let mut cursor = self.start();
        let value = cursor.value();
        let at = cursor.at + 1;
        match value {
            Err(Stop) if at > self.text.len() => Some(SyntaxFault::End),
            Err(Stop) => Some(SyntaxFault::Byte(at)),
            Ok(_) => cursor.end().err().map(|Stop| SyntaxFault::Trailing(cursor.at + 1)),
        }
    }

    /// The place of the first value, which a byte order mark may precede.
    pub(super) fn start(&self) -> Cursor<'_, 'a> {
        let mut cursor = self.cursor(if self.text.starts_with(BYTE_ORDER_MARK) { BYTE_ORDER_MARK.len() } else { 0 });
        cursor.skip_space();
        cursor
    }

    /// The text.
    pub(super) fn text(&self) -> &'a str {
        self.text
    }

    /// A place at which a value begins.
    pub(super) fn cursor(&self, at: usize) -> Cursor<'_, 'a> {
        Cursor { text: self.text, stops: &self.stops, at, open: Open::default(), non_finite: false }
    }
}

/// The members of one object that a reader has a use for, as the text that stands in the line.
pub(super) struct Members<'a, const N: usize> {
    text: &'a str,
    spans: [Span; N],
    /// Whether one of them stood there more than once. The last one counts.
    pub(super) duplicates: bool,
    /// Whether a number anywhere in the object is none of JSON's.
    pub(super) non_finite: bool,
    has_escapes: bool,
}

/// Where a value stands; an absent one takes no bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Span {
    start: u32,
    end: u32,
}

impl<'a, const N: usize> Members<'a, N> {
    /// The text of member `index`; `null` is absent.
    pub(super) fn get(&self, index: usize) -> Option<&'a str> {
        let Span { start, end } = self.spans[index];
        self.text.get(start as usize..end as usize).filter(|text| !matches!(*text, "" | "null"))
    }

    /// Where the value of member `index` stands, `null` or not.
    pub(super) fn span(&self, index: usize) -> Option<Range<usize>> {
        let Span { start, end } = self.spans[index];
        (end > 0).then_some(start as usize..end as usize)
    }

    /// Where the text of member `index` begins.
    pub(super) fn start(&self, index: usize) -> Option<usize> {
        self.get(index).map(|_| self.spans[index].start as usize)
    }

    /// Member `index`, if it is a string.
    pub(super) fn string(&self, index: usize) -> Option<Text<'a>> {
        let json = self.get(index)?;
        if self.has_escapes {
            return string(json);
        }
        let inner = json.strip_prefix('"')?.strip_suffix('"')?;
        Some(Text { text: Cow::Borrowed(inner), lossy: false })
    }
}

/// `json`, one valid JSON value, without the white space between its tokens, so that it fits into a line, also for those who take
/// U+0085, U+2028 and U+2029 for ends of lines, as Python's `splitlines` does.
pub(super) fn compact(json: &str) -> String {
    let (mut text, mut in_string, mut is_escaped) = (String::with_capacity(json.len()), false, false);
    for c in json.chars() {
        if in_string {
            in_string = is_escaped || c != '"';
            is_escaped = !is_escaped && c == '\\';
        } else if matches!(c, ' ' | '\t' | '\n' | '\r') {
            continue;
        } else {
            in_string = c == '"';
        }
        match c {
            '\u{85}' => text.push_str("\\u0085"),
            '\u{2028}' => text.push_str("\\u2028"),
            '\u{2029}' => text.push_str("\\u2029"),
            _ => text.push(c),
        }
    }
    text
}

/// A text that is the same for the same JSON value in the same order, however its strings are escaped and its floats are written: whoever
/// reads a line and writes it anew changes both.
pub(super) fn canonical(json: &str) -> String {
    struct Canonical<'a> {
        json: &'a str,
        text: String,
    }
    impl Canonical<'_> {
        fn add(&mut self, token: Range<usize>) {
            let token = self.json.get(token).unwrap_or_default();
            let is_float = token.starts_with(|first: char| first == '-' || first.is_ascii_digit())
                && token.contains(['.', 'e', 'E']);
            match (string(token), token.parse::<f64>()) {
                // Of one with a lone surrogate no text says exactly what it is.
                (Some(Text { text, lossy: false }), _) => {
                    self.text.push_str(&serde_json::Value::from(text).to_string());
                }
                (None, Ok(number)) if is_float && number.is_finite() => drop(write!(self.text, "{number:e}")),
                _ => self.text.push_str(token),
            }
            self.text.push(',');
        }
    }
    impl Visit for Canonical<'_> {
        fn open(&mut self, at: usize) {
            self.text.push_str(self.json.get(at..=at).unwrap_or_default());
        }
        fn close(&mut self, end: usize) {
            self.text.push_str(self.json.get(end - 1..end).unwrap_or_default());
        }
        fn key(&mut self, key: Range<usize>) {
            self.add(key);
        }
        fn scalar(&mut self, value: Range<usize>) {
            self.add(value);
        }
    }
    let mut canonical = Canonical { json, text: String::with_capacity(json.len()) };
    // Of a text that is no JSON it is some text.
    let _ = Document::new(json).start().walk(&mut canonical);
    canonical.text
}

/// How many elements `json` has, if it is an array.
pub(super) fn array_len(json: &str) -> Option<u64> {
    let mut len = 0;
    let mut count = |cursor: &mut Cursor<'_, '_>| {
        len += 1;
        cursor.value().map(|_| ())
    };
    Document::new(json).start().elements(&mut count).ok().map(|()| len)
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
    // Nearly always this is all.
    if let Ok(text) = serde_json::from_str(json) {
        return Some(Text { text: Cow::Owned(text), lossy: false });
    }
    let Escaped(bytes) = serde_json::from_str(json).ok()?;
    let (text, lossy) = match String::from_utf8(bytes) {
        Ok(text) => (text, false),
        Err(error) => (replace_surrogates(error.as_bytes()), true),
    };
    Some(Text { text: Cow::Owned(text), lossy })
}

/// Whether decoding `json`, one valid JSON value, would lose something, because it is a string with a lone surrogate.
pub(super) fn is_lossy(json: &str) -> bool {
    // Few strings hold any surrogate.
    let mut escapes = memchr::memmem::find_iter(json.as_bytes(), br"\u");
    let is_surrogate = |at: usize| {
        let digits = json.as_bytes().get(at + 2..at + 4);
        matches!(digits, Some([b'd' | b'D', b'8' | b'9' | b'a'..=b'f' | b'A'..=b'F']))
    };
    escapes.any(is_surrogate) && string(json).is_some_and(|text| text.lossy)
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

/// A place in a document, moving forward over whole tokens.
pub(super) struct Cursor<'d, 'a> {
    text: &'a str,
    stops: &'d Stops,
    at: usize,
    open: Open,
    non_finite: bool,
}

impl<'a> Cursor<'_, 'a> {
    /// The object here, of which only the members with an index are kept.
    pub(super) fn members<const N: usize>(&mut self, index: fn(&[u8]) -> Option<usize>) -> Step<Members<'a, N>> {
        let has_escapes = self.stops.has_escapes;
        let spans = [Span::default(); N];
        let mut members = Members { text: self.text, spans, duplicates: false, non_finite: false, has_escapes };
        self.expect(b'{')?;
        self.skip_space();
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(members);
        }
        loop {
            let start = self.at;
            self.skip_string()?;
            let key = &self.text.as_bytes()[start..self.at];
            let index = if has_escapes && memchr::memchr(b'\\', key).is_some() {
                self.text.get(start..self.at).and_then(string).and_then(|key| index(key.text.as_bytes()))
            } else {
                index(&key[1..key.len() - 1])
            };
            self.skip_colon()?;
            let value = self.value()?;
            if let Some(index) = index {
                members.duplicates |= members.spans[index].end > 0;
                members.spans[index] = value;
            }
            if !self.comma_or(b'}')? {
                members.non_finite = self.non_finite;
                return Ok(members);
            }
        }
    }

    /// The array here: `each` must move over one element.
    pub(super) fn elements(&mut self, each: &mut dyn FnMut(&mut Self) -> Step) -> Step {
        self.expect(b'[')?;
        self.skip_space();
        if self.peek() == Some(b']') {
            self.at += 1;
            return Ok(());
        }
        loop {
            each(self)?;
            if !self.comma_or(b']')? {
                return Ok(());
            }
        }
    }

    /// The object here: `each` is given a key, as it stands in the text, and must move over its value.
    pub(super) fn entries(&mut self, each: &mut dyn FnMut(&mut Self, &'a str) -> Step) -> Step {
        self.expect(b'{')?;
        self.skip_space();
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(());
        }
        loop {
            let start = self.at;
            self.skip_string()?;
            let key = self.text.get(start..self.at).ok_or(Stop)?;
            self.skip_colon()?;
            each(self, key)?;
            if !self.comma_or(b'}')? {
                return Ok(());
            }
        }
    }

    /// The text of the scalar here.
    pub(super) fn scalar(&mut self) -> Step<&'a str> {
        let start = self.at;
        self.skip_scalar()?;
        self.text.get(start..self.at).ok_or(Stop)
    }

    /// Whether an object begins here.
    pub(super) fn is_at_object(&self) -> bool {
        self.peek() == Some(b'{')
    }

    /// Whether an array begins here.
    pub(super) fn is_at_array(&self) -> bool {
        self.peek() == Some(b'[')
    }

    /// The text of the value here.
    pub(super) fn text(&mut self) -> Step<&'a str> {
        let start = self.at;
        self.value()?;
        self.text.get(start..self.at).ok_or(Stop)
    }

    /// The value here.
    fn value(&mut self) -> Step<Span> {
        let start = self.at;
        self.walk(&mut ())?;
        let number = |at: usize| u32::try_from(at).map_err(|_| Stop);
        Ok(Span { start: number(start)?, end: number(self.at)? })
    }

    fn skip_scalar(&mut self) -> Step {
        match self.peek() {
            Some(b'"') => self.skip_string(),
            Some(b'-' | b'0'..=b'9') => self.skip_number(),
            _ => self.skip_word(),
        }
    }

    /// Moves over the value here, and shows `visit` what it consists of. Iterative, because nesting has no limit but the stack has.
    pub(super) fn walk(&mut self, visit: &mut impl Visit) -> Step {
        loop {
            let start = self.at;
            match self.peek() {
                Some(b'{') => {
                    visit.open(start);
                    self.at += 1;
                    self.skip_space();
                    if self.peek() == Some(b'}') {
                        self.at += 1;
                        visit.close(self.at);
                    } else {
                        self.open.push(true);
                        self.skip_key(visit)?;
                        continue;
                    }
                }
                Some(b'[') => {
                    visit.open(start);
                    self.at += 1;
                    self.skip_space();
                    if self.peek() == Some(b']') {
                        self.at += 1;
                        visit.close(self.at);
                    } else {
                        self.open.push(false);
                        continue;
                    }
                }
                _ => {
                    self.skip_scalar()?;
                    visit.scalar(start..self.at);
                }
            }
            // That value may have been the last one of several containers.
            loop {
                let Some(is_object) = self.open.innermost_is_object() else { return Ok(()) };
                if self.comma_or(if is_object { b'}' } else { b']' })? {
                    if is_object {
                        self.skip_key(visit)?;
                    }
                    break;
                }
                visit.close(self.at);
                self.open.pop();
            }
        }
    }

    fn skip_key(&mut self, visit: &mut impl Visit) -> Step {
        let start = self.at;
        self.skip_string()?;
        visit.key(start..self.at);
        self.skip_colon()
    }

    fn skip_colon(&mut self) -> Step {
        self.skip_space();
        self.expect(b':')?;
        self.skip_space();
        Ok(())
    }

    /// Moves over a comma and says `true`, or over the end of the container and says `false`.
    fn comma_or(&mut self, close: u8) -> Step<bool> {
        self.skip_space();
        match self.peek() {
            Some(b',') => {
                self.at += 1;
                self.skip_space();
                Ok(true)
            }
            Some(byte) if byte == close => {
                self.at += 1;
                Ok(false)
            }
            _ => Err(Stop),
        }
    }

    fn skip_string(&mut self) -> Step {
        self.expect(b'"')?;
        self.at = self.stops.next(self.at);
        self.expect(b'"')
    }

    fn skip_number(&mut self) -> Step {
        if self.peek() == Some(b'-') {
            self.at += 1;
            if self.peek() == Some(b'I') {
                return self.skip_word();
            }
        }
        if self.peek() == Some(b'0') {
            self.at += 1;
        } else {
            self.skip_digits()?;
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.skip_digits()?;
        }
        if let Some(b'e' | b'E') = self.peek() {
            self.at += 1;
            if let Some(b'+' | b'-') = self.peek() {
                self.at += 1;
            }
            self.skip_digits()?;
        }
        Ok(())
    }

    /// Moves over one or more digits.
    fn skip_digits(&mut self) -> Step {
        let digits = self.text.as_bytes()[self.at..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        self.at += digits;
        if digits > 0 { Ok(()) } else { Err(Stop) }
    }

    fn skip_word(&mut self) -> Step {
        let rest = &self.text.as_bytes()[self.at..];
        let word: &[u8] = match rest.first() {
            Some(b't') => b"true",
            Some(b'f') => b"false",
            Some(b'n') => b"null",
            Some(b'N') => b"NaN",
            Some(b'I') => b"Infinity",
            _ => return Err(Stop),
        };
        if !rest.starts_with(word) {
            return Err(Stop);
        }
        self.non_finite |= matches!(word, b"NaN" | b"Infinity");
        self.at += word.len();
        Ok(())
    }

    fn skip_space(&mut self) {
        // Nearly always there is none, which one comparison tells.
        while let Some(byte) = self.peek()
            && byte <= b' '
            && matches!(byte, b' ' | b'\t' | b'\r' | b'\n')
        {
            self.at += 1;
        }
    }

    fn expect(&mut self, byte: u8) -> Step {
        if self.peek() != Some(byte) {
            return Err(Stop);
        }
        self.at += 1;
        Ok(())
    }

    fn end(&mut self) -> Step {
        self.skip_space();
        if self.at == self.text.len() { Ok(()) } else { Err(Stop) }
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }
}

/// Is shown what a value consists of, in the order of the text.
pub(super) trait Visit {
    /// An object or array begins at this place.
    fn open(&mut self, _at: usize) {}
    /// The innermost object or array that is open ends before this place.
    fn close(&mut self, _end: usize) {}
    /// The key of the next value of the innermost object.
    fn key(&mut self, _key: Range<usize>) {}
    /// A value that is neither.
    fn scalar(&mut self, _value: Range<usize>) {}
}

/// Shown nothing, to skip a value.
impl Visit for () {}

/// The containers around a place: for each whether it is an object. Kept as bits, because most lines are not deep but each is read.
#[derive(Default)]
struct Open {
    depth: usize,
    /// The innermost up to 64, the innermost of all in the lowest bit.
    bits: u64,
    /// The others, 64 at a time.
    outer: Vec<u64>,
}

impl Open {
    fn push(&mut self, is_object: bool) {
        if self.depth > 0 && self.depth.is_multiple_of(64) {
            self.outer.push(self.bits);
        }
        self.bits = self.bits << 1 | u64::from(is_object);
        self.depth += 1;
    }

    fn pop(&mut self) {
        self.depth -= 1;
        self.bits >>= 1;
        if self.depth > 0 && self.depth.is_multiple_of(64) {
            self.bits = self.outer.pop().unwrap_or_default();
        }
    }

    fn innermost_is_object(&self) -> Option<bool> {
        (self.depth > 0).then_some(self.bits & 1 == 1)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde::de::IgnoredAny;

    use super::*;

    fn index(key: &[u8]) -> Option<usize> {
        Some(match key {
            b"a" => 0,
            b"b" => 1,
            b"c" => 2,
            _ => return None,
        })
    }

    fn read(text: &str) -> Result<Members<'_, 3>, Fault> {
        Document::new(text).object(index)
    }

    fn syntax_fault(text: &str) -> Option<SyntaxFault> {
        Document::new(text).syntax_fault()
    }

    #[test]
    fn members_of_other_names_are_skipped_and_the_last_duplicate_counts() {
        let members = read(r#" {"x":[1,{"a":9}],"a":1,"b":null,"a" : "two" } "#).ok();
        let members = members.as_ref();
        assert_eq!(members.and_then(|m| m.get(0)), Some("\"two\""));
        assert_eq!(members.and_then(|m| m.get(1)), None);
        assert_eq!(members.and_then(|m| m.get(2)), None);
        assert_eq!(members.map(|m| m.duplicates), Some(true));
    }

    #[test]
    fn keys_are_compared_decoded() {
        let members = read("{\"\\u0061\":1,\"\\ud83d\":2}").ok();
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
    fn non_finite_numbers_are_values_and_nothing_else() {
        for text in [r#"{"a":NaN}"#, r#"{"x":[-Infinity, Infinity]}"#] {
            assert!(read(text).is_ok_and(|members| members.non_finite), "{text}");
        }
        assert!(read(r#"{"a":"NaN"}"#).is_ok_and(|members| !members.non_finite));
        for text in [
            "1NaN",
            "NaN1",
            "-NaN",
            "1e-Infinity",
            "nullNaN",
            "NaNNaN",
            "{NaN:1}",
            "--Infinity",
            "+Infinity",
            "nan",
            "Inf",
        ] {
            assert!(syntax_fault(text).is_some(), "{text}");
        }
    }

    #[test]
    fn a_fault_names_its_place() {
        for (text, fault) in [
            ("{\"a\":1}{\"a\":2}", SyntaxFault::Trailing(8)),
            ("{\"a\":1", SyntaxFault::End),
            ("{\"a\":\"x", SyntaxFault::End),
            ("\0\0", SyntaxFault::Byte(1)),
            ("{\"a\":01}", SyntaxFault::Byte(7)),
            ("{\"a\":\"\u{1}\"}", SyntaxFault::Byte(7)),
            ("{\"a\":tru}", SyntaxFault::Byte(6)),
        ] {
            assert_eq!(read(text).err(), Some(Fault::Syntax(fault)), "{text}");
        }
        assert_eq!(read("[1]").err(), Some(Fault::NotAnObject));
    }

    #[test]
    fn depth_costs_no_stack() {
        let alternating = format!("{{\"a\":{}1{}}}", "[{\"b\":".repeat(100_000), "}]".repeat(100_000));
        assert!(read(&alternating).is_ok());
        assert!(read(&alternating.replacen("]}", "}]", 1)).is_err());
        let depth = 200_000;
        let text = format!("{{\"a\":{}{}}}", "[".repeat(depth), "]".repeat(depth));
        assert!(read(&text).is_ok());
        let text = format!("{{\"a\":{}1{}}}", "{\"b\":".repeat(depth), "}".repeat(depth));
        assert!(read(&text).is_ok());
    }

    #[test]
    fn strings_of_every_length_and_escapes_in_every_place() {
        for len in 0..200 {
            let text = "x".repeat(len);
            assert_eq!(syntax_fault(&format!("\"{text}\"")), None);
            assert_eq!(syntax_fault(&format!("\"{text}")), Some(SyntaxFault::End));
            assert_eq!(syntax_fault(&format!("\"{text}\u{0}\"")), Some(SyntaxFault::Byte(len + 2)));
            for (escape, is_valid) in [
                (r"\n", true),
                (r#"\""#, true),
                (r"\\\\", true),
                (r"\ud8Ff", true),
                (r"\u12g4", false),
                (r"\x", false),
                (r"\", false),
            ] {
                let text = format!("\"{text}{escape}{text}\"");
                let expected = serde_json::from_str::<IgnoredAny>(&text).is_ok();
                assert_eq!((syntax_fault(&text).is_none(), is_valid && expected), (expected, is_valid), "{text}");
            }
        }
    }

    /// Text that is JSON more often than not.
    fn almost_json() -> impl Strategy<Value = String> {
        let token = prop_oneof![
            Just("{"),
            Just("}"),
            Just("["),
            Just("]"),
            Just(","),
            Just(":"),
            Just("\""),
            Just("\\"),
            Just("\"a\""),
            Just("\"\\ud800\""),
            Just("\"\\n\""),
            Just("\"\\x\""),
            Just("0"),
            Just("-1.5e+3"),
            Just("01"),
            Just("1."),
            Just("1e"),
            Just("-"),
            Just("true"),
            Just("null"),
            Just("nul"),
            Just(" "),
            Just("\t"),
            Just("\u{1}"),
            Just("é"),
            Just("\"a\":1"),
            Just("\"b\":[{}]"),
            Just("[[],{}]"),
            Just("1e999"),
        ];
        proptest::collection::vec(token, 0..12).prop_map(|tokens| tokens.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]
        #[test]
        fn what_serde_json_takes_is_taken_and_nothing_else(text in almost_json()) {
            prop_assert_eq!(syntax_fault(&text).is_none(), serde_json::from_str::<IgnoredAny>(&text).is_ok(), "{}", text);
        }
    }
}
