//! JSON for people: every token as it stands, one member a line.

use std::ops::Range;

use super::json::{Document, Visit};

/// Lays out one valid JSON value. Each line begins with `indent`.
///
/// Numbers, escapes and keys that stand there twice are shown as they are, which a reader that makes values of them could not do.
#[must_use]
pub fn pretty(json: &str, indent: &str) -> String {
    let mut layout = Layout { json, indent, text: indent.to_owned(), open: Vec::new(), key: false };
    if Document::new(json).start().walk(&mut layout).is_err() {
        return format!("{indent}{json}");
    }
    layout.text
}

/// Deeper values are not indented any further, or a line of brackets would become a screen of blanks each.
const MAX_DEPTH: usize = 30;

struct Layout<'a> {
    json: &'a str,
    indent: &'a str,
    text: String,
    /// For each container around the place, whether anything has stood in it.
    open: Vec<bool>,
    /// Whether a key has just been written.
    key: bool,
}

impl Layout<'_> {
    /// Goes to where the next key or element begins.
    fn next(&mut self) {
        if std::mem::take(&mut self.key) {
            return;
        }
        if let Some(has_members) = self.open.last_mut() {
            if std::mem::replace(has_members, true) {
                self.text.push(',');
            }
            self.new_line();
        }
    }

    fn new_line(&mut self) {
        self.text.push('\n');
        self.text.push_str(self.indent);
        self.text.push_str(&"  ".repeat(self.open.len().min(MAX_DEPTH)));
    }

    fn push(&mut self, range: Range<usize>) {
        self.text.push_str(self.json.get(range).unwrap_or_default());
    }
}

impl Visit for Layout<'_> {
    fn open(&mut self, at: usize) {
        self.next();
        self.push(at..at + 1);
        self.open.push(false);
    }

    fn close(&mut self, end: usize) {
        if self.open.pop() == Some(true) {
            self.new_line();
        }
        self.push(end - 1..end);
    }

    fn key(&mut self, key: Range<usize>) {
        self.next();
        self.push(key);
        self.text.push_str(": ");
        self.key = true;
    }

    fn scalar(&mut self, value: Range<usize>) {
        self.next();
        self.push(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_stays() {
        let json = r#"{"a" : 1e400,"a":[ ],"b":{"c":[NaN,{ },"\ud800"]}}"#;
        let expected = r#"  {
    "a": 1e400,
    "a": [],
    "b": {
      "c": [
        NaN,
        {},
        "\ud800"
      ]
    }
  }"#;
        assert_eq!(pretty(json, "  "), expected);
        assert_eq!(pretty(" 7 ", ""), "7");
    }

    #[test]
    fn depth_costs_no_more_than_its_lines() {
        let depth = 100_000;
        let json = "[".repeat(depth) + &"]".repeat(depth);
        assert!(pretty(&json, "").len() < depth * 140);
    }
}
