//! Which values of a record belong in the blob store, and what the line is without them.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::fmt::Write;
use std::ops::Range;

use super::blob::{Digest, Handle, MediaType, beginning};
use super::envelope::Envelope;
use super::json::{self, Document, Visit};

/// What is too large for a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// A value with more JSON text than this many bytes is moved.
    pub max_bytes: usize,
    /// How many bytes of a blob its handle shows at most.
    pub preview_bytes: usize,
}

impl Default for Rule {
    fn default() -> Self {
        Self { max_bytes: 8 * 1024, preview_bytes: 1024 }
    }
}

impl Rule {
    /// Whether the next offload would move a value of this record.
    #[must_use]
    pub fn would_move(&self, envelope: &Envelope<'_>) -> bool {
        envelope.doubt.is_none() && !self.judge(envelope).values.is_empty()
    }

    /// Finds the values of a record that are to be moved. Whether the record is in doubt is not asked.
    #[must_use]
    pub fn judge<'a>(&self, envelope: &Envelope<'a>) -> Oversized<'a> {
        let text = envelope.document.text();
        let mut oversized = Oversized { text, rule: *self, values: Vec::new(), inexact: 0, roots: Vec::new() };
        // No value is longer than its line.
        if text.len() > self.max_bytes {
            let payload_stays = envelope.payload.is_some_and(|payload| payload.starts_with('{'));
            let payload = envelope.payload_start.map(|start| (start, "/payload", payload_stays));
            let result = envelope.result_start.map(|start| (start, "/result", false));
            for (start, name, stays) in payload.into_iter().chain(result) {
                oversized.add(&envelope.document, start, name, stays);
            }
            oversized.values.sort_unstable_by_key(|value| value.start);
        }
        oversized
    }
}

/// The values of a record that are to be moved into the blob store.
#[derive(Debug)]
pub struct Oversized<'a> {
    text: &'a str,
    rule: Rule,
    /// Where they stand in the line, in order.
    values: Vec<Range<usize>>,
    /// How many more would be moved, but hold a lone surrogate, so that no text says exactly the same.
    pub inexact: u64,
    /// Where `payload` and `result` stand, and their names.
    roots: Vec<(usize, &'static str)>,
}

impl<'a> Oversized<'a> {
    fn add(&mut self, document: &Document<'a>, start: usize, name: &'static str, stays: bool) {
        let mut judge = Judge { document, rule: self.rule, stays, open: Vec::new(), found: Vec::new() };
        // The line has been read before: it is JSON.
        if document.cursor(start).walk(&mut judge).is_ok() {
            for Found { value, is_exact, .. } in judge.found {
                if is_exact {
                    self.values.push(value);
                } else {
                    self.inexact += 1;
                }
            }
            self.roots.push((start, name));
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// What becomes blobs, in the order of the line.
    #[must_use]
    pub fn contents(&self) -> Vec<Content<'a>> {
        self.values.iter().map(|value| Content::of(self.text.get(value.clone()).unwrap_or_default())).collect()
    }

    /// The line with handles in place of the values, given [what becomes blobs](Self::contents) and the names of these.
    #[must_use]
    pub fn replaced(&self, contents: &[Content<'_>], digests: &[Digest]) -> String {
        let (mut line, mut end) = (String::new(), 0);
        for (value, (content, digest)) in self.values.iter().zip(contents.iter().zip(digests)) {
            line.push_str(&self.text[end..value.start]);
            line.push_str(&content.handle(digest, &self.rule).to_json());
            end = value.end;
        }
        line.push_str(&self.text[end..]);
        line
    }

    /// Where the values stand, as JSON pointers (RFC 6901) into the line.
    #[must_use]
    pub fn pointers(&self) -> Vec<String> {
        let document = Document::new(self.text);
        let mut pointers = Vec::new();
        for &(root, name) in &self.roots {
            let (path, next) = (Vec::new(), Step::Index(0));
            let mut finder = Pointers { text: self.text, name, values: &self.values, path, next, found: Vec::new() };
            if document.cursor(root).walk(&mut finder).is_ok() {
                pointers.append(&mut finder.found);
            }
        }
        pointers.sort_unstable();
        pointers.into_iter().map(|(_, pointer)| pointer).collect()
    }
}

/// What becomes a blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content<'a> {
    /// Its bytes.
    pub text: Cow<'a, str>,
    /// What it is.
    pub media_type: MediaType,
}

impl<'a> Content<'a> {
    /// That of a value, which a text can say exactly.
    fn of(json: &'a str) -> Self {
        match json::string(json) {
            Some(string) => Self { text: string.text, media_type: MediaType::Text },
            None => Self { text: json.into(), media_type: MediaType::Json },
        }
    }

    /// Its digest.
    #[must_use]
    pub fn digest(&self) -> Digest {
        Digest::of(self.text.as_bytes())
    }

    /// What stands for it.
    fn handle(&self, digest: &Digest, rule: &Rule) -> Handle<'_> {
        Handle {
            digest: *digest,
            bytes: self.text.len() as u64,
            media_type: self.media_type.as_str().into(),
            summary: beginning(&self.text, rule.preview_bytes).into(),
        }
    }
}

/// Judges the values of `payload` or `result`, those inside others first.
struct Judge<'d, 'a> {
    document: &'d Document<'a>,
    rule: Rule,
    /// Whether the outermost value stays whatever its size.
    stays: bool,
    /// Where the containers begin that are open. Nesting has no limit, so this has to be small.
    open: Vec<u32>,
    /// In order; none lies in another.
    found: Vec<Found>,
}

/// A value over the limit.
struct Found {
    value: Range<usize>,
    /// Whether some text says exactly the same.
    is_exact: bool,
    /// How many bytes less the line has when it is moved, once that has been worked out.
    saved_bytes: OnceCell<i64>,
}

impl Judge<'_, '_> {
    fn text(&self, value: &Range<usize>) -> &str {
        self.document.text().get(value.clone()).unwrap_or_default()
    }

    /// How many bytes less the line has when a value is moved; negative if it has more.
    fn saved_bytes(&self, found: &Found) -> i64 {
        *found.saved_bytes.get_or_init(|| {
            if !found.is_exact {
                return 0;
            }
            // Every digest takes the same room.
            let handle = Content::of(self.text(&found.value)).handle(&Digest::of(b""), &self.rule).to_json();
            signed(found.value.len()) - signed(handle.len())
        })
    }
}

fn signed(bytes: usize) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

impl Visit for Judge<'_, '_> {
    fn open(&mut self, at: usize) {
        // Places in a line fit.
        self.open.push(u32::try_from(at).unwrap_or(u32::MAX));
    }

    fn close(&mut self, end: usize) {
        let start = self.open.pop().map_or(end, |start| start as usize);
        let is_root = self.open.is_empty();
        if end - start <= self.rule.max_bytes {
            return;
        }
        let inside = self.found.iter().rposition(|found| found.value.start < start).map_or(0, |before| before + 1);
        if Handle::read(self.document.cursor(start)).is_some() {
            self.found.truncate(inside);
            return;
        }
        if is_root && self.stays {
            return;
        }
        let saved: i64 = self.found[inside..].iter().map(|found| self.saved_bytes(found)).sum();
        if signed(end - start) - saved > signed(self.rule.max_bytes) {
            self.found.truncate(inside);
            self.found.push(Found { value: start..end, is_exact: true, saved_bytes: OnceCell::new() });
        }
    }

    fn scalar(&mut self, value: Range<usize>) {
        if value.len() > self.rule.max_bytes {
            let is_exact = !json::is_lossy(self.text(&value));
            self.found.push(Found { value, is_exact, saved_bytes: OnceCell::new() });
        }
    }
}

/// Finds out how to get to values.
struct Pointers<'o> {
    text: &'o str,
    /// What the outermost value is called.
    name: &'static str,
    /// The values, in order.
    values: &'o [Range<usize>],
    /// The steps to the innermost container that is open, the first of which is the name. Nesting has no limit, so this has to be small.
    path: Vec<Step>,
    /// The step from there to the next value.
    next: Step,
    found: Vec<(usize, String)>,
}

#[derive(Clone, Copy)]
enum Step {
    /// A key, by where it begins and ends in the line.
    Key(u32, u32),
    Index(u32),
}

impl Pointers<'_> {
    fn value(&mut self, at: usize) {
        if self.values.binary_search_by_key(&at, |value| value.start).is_err() {
            return;
        }
        let mut pointer = self.name.to_owned();
        for step in self.path.iter().chain([&self.next]).skip(1) {
            match *step {
                Step::Key(start, end) => {
                    let key = self.text.get(start as usize..end as usize).and_then(json::string);
                    let key = key.map(|key| key.text).unwrap_or_default();
                    pointer.push('/');
                    pointer.push_str(&key.replace('~', "~0").replace('/', "~1"));
                }
                Step::Index(index) => drop(write!(pointer, "/{index}")),
            }
        }
        self.found.push((at, pointer));
    }

    fn advance(&mut self) {
        if let Step::Index(index) = &mut self.next {
            *index += 1;
        }
    }
}

impl Visit for Pointers<'_> {
    fn open(&mut self, at: usize) {
        self.value(at);
        self.path.push(self.next);
        self.next = Step::Index(0);
    }

    fn close(&mut self, _end: usize) {
        if let Some(step) = self.path.pop() {
            self.next = step;
        }
        self.advance();
    }

    fn key(&mut self, key: Range<usize>) {
        let place = |at: usize| u32::try_from(at).unwrap_or(u32::MAX);
        self.next = Step::Key(place(key.start), place(key.end));
    }

    fn scalar(&mut self, value: Range<usize>) {
        self.value(value.start);
        self.advance();
    }
}

#[cfg(test)]
#[expect(clippy::expect_used, reason = "a test that panics has failed")]
mod tests {
    use proptest::prelude::*;

    use super::super::envelope::{self, Line};
    use super::*;

    const RULE: Rule = Rule { max_bytes: 300, preview_bytes: 20 };

    fn line(payload: &str, result: &str) -> String {
        format!(
            r#"{{"id":"1","ts":1764400000,"payload": {payload} ,"kind":"k","from":"a","to":"b","result":{result},"status":"done","x":"{}"}}"#,
            "y".repeat(RULE.max_bytes)
        )
    }

    fn with_oversized<'a, T>(line: &'a str, read: impl FnOnce(Oversized<'a>) -> T) -> T {
        match envelope::parse(line.as_bytes()) {
            Ok(Line::Record(envelope)) => read(RULE.judge(&envelope)),
            other => panic!("no record: {other:?}: {line}"),
        }
    }

    fn replaced(oversized: &Oversized<'_>) -> String {
        let contents = oversized.contents();
        let digests: Vec<Digest> = contents.iter().map(Content::digest).collect();
        oversized.replaced(&contents, &digests)
    }

    /// What is moved of a payload, with its pointer.
    fn moved(payload: &str) -> Vec<(String, String)> {
        with_oversized(&line(payload, "null"), |oversized| {
            oversized
                .pointers()
                .into_iter()
                .zip(oversized.contents().into_iter().map(|content| content.text.into_owned()))
                .collect()
        })
    }

    fn pointers(payload: &str) -> Vec<String> {
        moved(payload).into_iter().map(|(pointer, _)| pointer).collect()
    }

    /// A string whose JSON text has so many bytes.
    fn string(bytes: usize) -> String {
        format!("\"{}\"", "s".repeat(bytes - 2))
    }

    #[test]
    fn the_limit_is_one_of_json_text() {
        assert_eq!(pointers(&format!(r#"{{"a":{}}}"#, string(300))), [""; 0]);
        assert_eq!(pointers(&format!(r#"{{"a":{}}}"#, string(301))), ["/payload/a"]);
        // 100 characters that take six bytes each.
        let escaped = format!("\"{}\"", r"\u0041".repeat(100));
        assert_eq!(moved(&format!(r#"{{"a":{escaped}}}"#)), [("/payload/a".to_owned(), "A".repeat(100))]);
        let digits = "7".repeat(301);
        assert_eq!(moved(&format!(r#"{{"a":{digits}}}"#)), [("/payload/a".to_owned(), digits)]);
        // White space around a value isn't part of it, white space in it is.
        let list = |space: usize| format!("[1,{}2]", " ".repeat(space));
        assert_eq!(pointers(&format!(r#"{{"a":   {}   }}"#, list(295))), [""; 0]);
        assert_eq!(pointers(&format!(r#"{{"a":{}}}"#, list(296))), ["/payload/a"]);
    }

    #[test]
    fn an_object_payload_stays_and_everything_else_may_go() {
        let many = format!("{{{}}}", (0..100).map(|i| format!(r#""k{i}":{i}"#)).collect::<Vec<_>>().join(","));
        assert_eq!(pointers(&many), [""; 0]);
        assert_eq!(pointers(&format!(r#"{{"a":{many}}}"#)), ["/payload/a"]);
        assert_eq!(pointers(&format!("[{many}]")), ["/payload/0"]);
        assert_eq!(pointers(&many.replace('{', "[").replace('}', "]").replace(':', ",")), ["/payload"]);
        assert_eq!(pointers(&string(301)), ["/payload"]);
        assert_eq!(with_oversized(&line("{}", &many), |oversized| oversized.pointers()), ["/result"]);
    }

    #[test]
    fn a_container_goes_as_a_whole_only_if_its_parts_do_not_help() {
        let (long, short) = (string(2_000), string(90));
        assert_eq!(pointers(&format!(r#"{{"a":{{"b/c~":[1,{long}],"d":2}}}}"#)), ["/payload/a/b~1c~0/1"]);
        // Four handles and three short strings are more than 300 bytes.
        let parts = format!("[{short},{short},{short},{long}]");
        assert_eq!(moved(&format!(r#"{{"a":{parts}}}"#)), [("/payload/a".to_owned(), parts.clone())]);
        // The innermost that is too large goes, and what is around it is then small enough.
        assert_eq!(pointers(&format!(r#"{{"a":{{"b":{parts}}}}}"#)), ["/payload/a/b"]);
    }

    #[test]
    fn what_no_text_says_exactly_stays_and_is_counted() {
        let lone = format!(r#""{}\ud83d""#, "s".repeat(301));
        let judged = |payload: &str| {
            with_oversized(&line(payload, "null"), |oversized| (oversized.inexact, oversized.pointers()))
        };
        assert_eq!(judged(&format!(r#"{{"a":{lone}}}"#)), (1, vec![]));
        // But its JSON text does, so what is around it may go.
        assert_eq!(judged(&format!(r#"{{"a":[{lone}]}}"#)), (0, vec!["/payload/a".to_owned()]));
        let pair = lone.replace(r"\ud83d", r"\ud83d\ude00");
        assert_eq!(judged(&format!(r#"{{"a":{pair}}}"#)), (0, vec!["/payload/a".to_owned()]));
    }

    #[test]
    fn a_handle_stays_and_what_only_looks_like_one_does_not() {
        let content = Content { text: "s".repeat(1_000).into(), media_type: MediaType::Text };
        let handle = content.handle(&content.digest(), &Rule { preview_bytes: 400, ..RULE }).to_json();
        assert!(handle.len() > RULE.max_bytes);
        assert_eq!(pointers(&format!(r#"{{"a":{handle}}}"#)), [""; 0]);
        assert_eq!(pointers(&format!(r#"{{"a":{}}}"#, handle.replace(':', " : ").replace(',', "\t,"))), [""; 0]);
        for (from, to) in [
            ("blob/", "/blob/"),
            ("\"sha256\":\"4", "\"sha256\":\"5"),
            ("\"bytes\":1000", "\"bytes\":1e3"),
            ("\"bytes\":1000", "\"bytes\":-1"),
            ("\"bytes\":1000", "\"bytes\":\"1000\""),
            ("\"bytes\":1000,", ""),
            ("\"bytes\":1000", "\"bytes\":1000,\"bytes\":1000"),
            ("\"bytes\":1000", "\"bytes\":1000,\"more\":1"),
            ("\"text/plain\"", "null"),
        ] {
            let sha256 = content.digest().to_string();
            let changed = handle.replacen(from, to, 1).replacen(
                "\"sha256\":\"5",
                &format!("\"sha256\":\"{}", if sha256.starts_with('5') { '6' } else { '5' }),
                1,
            );
            if changed != handle {
                assert_ne!(pointers(&format!(r#"{{"a":{changed}}}"#)), [""; 0], "{changed}");
            }
        }
    }

    #[test]
    fn the_preview_ends_with_a_whole_character() {
        let text = format!("{}é{}", "x".repeat(19), "y".repeat(400));
        let line = line(&format!(r#"{{"a":"{text}"}}"#), "null");
        let replaced = with_oversized(&line, |oversized| replaced(&oversized));
        let summary = format!(r#""summary":"{}"}}"#, "x".repeat(19));
        assert!(replaced.contains(&summary), "{replaced}");
    }

    #[test]
    fn depth_costs_neither_stack_nor_time() {
        for (open, close) in
            [("[", "]"), (r#"{"a":"#, "}"), (r#"{"summary":"#, "}"), (r#"[{"artifact_ref":"x","summary":"#, "}]")]
        {
            let depth = 200_000;
            let deep = format!("{}1{}", open.repeat(depth), close.repeat(depth));
            assert_eq!(pointers(&format!(r#"{{"a":{deep}}}"#)).len(), 1);
        }
        // All containers around the string are over the limit, and none is once it is moved.
        let rule = Rule { max_bytes: 1_000_000, preview_bytes: 20 };
        let deep = format!("{}{}{}", "[".repeat(400_000), string(2_000_000), "]".repeat(400_000));
        let line = line(&format!(r#"{{"a":{deep}}}"#), "null");
        match envelope::parse(line.as_bytes()) {
            Ok(Line::Record(envelope)) => assert_eq!(rule.judge(&envelope).len(), 1),
            other => panic!("no record: {other:?}"),
        }
    }

    /// JSON text with values around the limit.
    fn json() -> impl Strategy<Value = String> {
        let leaf = prop_oneof![
            (0..40_usize).prop_map(|n| format!("\"{}\"", "é\\n".repeat(n))),
            (290..310_usize).prop_map(string),
            Just("1e5".to_owned()),
            Just("null".to_owned()),
            Just(r#""\u0000\ud83d""#.to_owned()),
            (300..400_usize).prop_map(|n| format!(r#""{}\udc00""#, "z".repeat(n))),
            Just(Content { text: "x".into(), media_type: MediaType::Json }.handle(&Digest::of(b"x"), &RULE).to_json()),
        ];
        leaf.prop_recursive(4, 40, 6, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..6).prop_map(|parts| format!("[{}]", parts.join(" ,"))),
                proptest::collection::vec((0..9_u8, inner), 0..6).prop_map(|parts| {
                    let members: Vec<_> =
                        parts.into_iter().map(|(key, value)| format!("\"k{key}\": {value}")).collect();
                    format!("{{{}}}", members.join(","))
                }),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        #[test]
        fn handles_stand_exactly_where_values_stood(payload in json(), result in json()) {
            let line = line(&payload, &result);
            let (replaced, contents) = with_oversized(&line, |oversized| (replaced(&oversized), oversized.contents()));
            // Put back one after the other, the contents make the same line again.
            let mut restored = replaced.clone();
            for content in contents.iter().rev() {
                let handle = content.handle(&content.digest(), &RULE).to_json();
                let value = match content.media_type {
                    MediaType::Json => content.text.clone().into_owned(),
                    MediaType::Text => serde_json::to_string(&content.text).expect("a string"),
                };
                let at = restored.rfind(&handle).expect("its handle");
                restored.replace_range(at..at + handle.len(), &value);
            }
            prop_assert_eq!(&restored, &line);
            // Nothing that could be moved is left, and a second run changes nothing.
            with_oversized(&replaced, |oversized| assert!(oversized.is_empty(), "{replaced}"));
            let is_json = serde_json::from_str::<serde::de::IgnoredAny>(&replaced).is_ok();
            prop_assert!(is_json);
        }
    }
}
