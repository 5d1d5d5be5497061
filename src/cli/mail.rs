//! The mail about a record that waits for a person.

use std::fmt::Write;
use std::path::Path;

use mail_builder::MessageBuilder;
use mail_builder::headers::raw::Raw;

use super::job::count as count_of;
use super::messages::one_line;
use super::text::{beginning, cause};
use crate::format::blob::Digest;
use crate::format::cause::Cause;
use crate::format::envelope::Envelope;
use crate::format::time::Timestamp;

/// Who is told, of what, and when.
pub(super) struct Mail<'a> {
    pub(super) to: &'a [String],
    /// Whoever sendmail takes for it, if nobody is given.
    pub(super) from: Option<&'a str>,
    pub(super) record: &'a Envelope<'a>,
    pub(super) queue: &'a Path,
    pub(super) host: &'a str,
    pub(super) now: Timestamp,
}

/// How many nacks are told, the last ones.
const MAX_NACKS: usize = 10;
/// How many characters of a name stand in a subject.
const MAX_NAME: usize = 80;
/// How many characters of anything else stand in a mail.
const MAX_TEXT: usize = 2_000;

impl Mail<'_> {
    /// The mail, with lines that end as sendmail expects them.
    pub(super) fn write(&self) -> Vec<u8> {
        let Envelope { id, kind, to, .. } = self.record;
        let [id, kind, role] = [id, kind, to].map(|name| name_in_header(name));
        let mut mail = MessageBuilder::new()
            .to(self.to.iter().map(String::as_str).collect::<Vec<_>>())
            .subject(format!("handoff: {kind} for {role} waits for a person ({id})"))
            .date(self.now.whole_seconds())
            .message_id(self.message_id())
            // Nobody's absence is to be told to a program.
            .header("Auto-Submitted", Raw::new("auto-generated"))
            .text_body(self.body());
        if let Some(from) = self.from {
            mail = mail.from(from);
        }
        let mut bytes = Vec::new();
        mail.serialize(&mut bytes);
        bytes.retain(|byte| *byte != b'\r');
        bytes
    }

    /// The same for the same state of a record: should a mail be sent once more because nobody could write down that it was sent, mailboxes
    /// may know it again.
    fn message_id(&self) -> String {
        let digest = Digest::of(self.record.line().as_bytes());
        let may_stand = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-');
        let host: String = self.host.chars().filter(|c| may_stand(*c)).collect();
        format!("handoff.{digest}@{}", if host.is_empty() { "localhost" } else { &host })
    }

    fn body(&self) -> String {
        let Envelope { id, kind, from, to, ts, .. } = self.record;
        let more = self.record.more();
        let [shown_id, kind, from, to] = [id, kind, from, to].map(|name| shown(name));
        let mut text = format!(
            "A record waits for a person.\n\n\
             id:      {shown_id}\nkind:    {kind}\nfrom:    {from}\nto:      {to}\nqueued:  {ts}\n"
        );
        if let Some(summary) = self.record.summary() {
            let _ = writeln!(text, "summary: {}", shown(&summary));
        }
        if let Some(nacks) = more.nacks {
            text.push_str(&told_nacks(self.record, nacks, self.now));
        }
        if let Some(stopped) = more.stopped {
            let _ = write!(text, "\nIt was stopped:\n  {}\n", shown(&cause(&Cause::read(stopped), self.now)));
        }
        let word = shell_word(id);
        let _ = write!(
            text,
            "\nTo see it:      handoff show {word}\nTo send it on:  handoff requeue {word}\nTo give it up:  handoff cancel {word}\n\n\
             The queue is {} on {}.\n",
            shown(&self.queue.to_string_lossy()),
            shown(self.host),
        );
        text
    }
}

/// Each time that the record was refused, the last ones at least.
fn told_nacks(record: &Envelope<'_>, nacks: &str, now: Timestamp) -> String {
    let causes = Cause::of_nacks(nacks);
    let mut text = match (record.nacks, causes.len()) {
        (0, _) => return String::new(),
        (count, 0) => return format!("\nIt was refused {}.\n", count_of(count, "time")),
        (1, _) => "\nIt was refused:\n".to_owned(),
        _ => "\nIt was refused, the last time last:\n".to_owned(),
    };
    let earlier = causes.len().saturating_sub(MAX_NACKS);
    if earlier > 0 {
        let _ = writeln!(text, "  {earlier} times before these");
    }
    for nack in &causes[earlier..] {
        let _ = writeln!(text, "  {}", shown(&cause(nack, now)));
    }
    text
}

/// Text of others in a body: one line that no terminal obeys, and not too long.
fn shown(text: &str) -> String {
    beginning(text, MAX_TEXT)
}

/// Text of others in a header, which must not become two, nor be taken for text that is encoded (RFC 2047) and turn into another.
fn name_in_header(text: &str) -> String {
    beginning(text, MAX_NAME).replace("=?", r"=\?")
}

/// An id as it can be pasted into a shell, which must not take it for anything else.
fn shell_word(id: &str) -> String {
    let dashes = if id.starts_with('-') { "-- " } else { "" };
    if id.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':' | '/' | '@')) {
        return format!("{dashes}{id}");
    }
    format!("{dashes}'{}'", one_line(id).replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::envelope::{Line, parse};

    fn mail_of(line: &str) -> String {
        let Ok(Line::Record(record)) = parse(line.as_bytes()) else { panic!("{line}") };
        let to = ["ops@example.org".to_owned(), "root".to_owned()];
        let mail = Mail {
            to: &to,
            from: None,
            record: &record,
            queue: Path::new("/q.jsonl"),
            host: "box",
            now: Timestamp::from_micros(1_764_400_000_000_000),
        };
        String::from_utf8_lossy(&mail.write()).into_owned()
    }

    #[test]
    fn nobody_writes_headers_but_we() {
        let mail = mail_of(
            r#"{"id":"1\r\nBcc: a@b\n\n","ts":1764400000,"kind":"k\r\nX-K: 1","from":"f","to":"r\nX-R: 1\u0000\u2028","payload":{"summary":"s\n.\nX: 1"},"status":"human"}"#,
        );
        let (headers, _) = mail.split_once("\n\n").unwrap_or_default();
        let names: Vec<&str> = headers
            .lines()
            .filter(|line| !line.starts_with(' '))
            .map(|line| line.split(':').next().unwrap_or_default())
            .collect();
        let expected = [
            "To",
            "Subject",
            "Date",
            "Message-ID",
            "Auto-Submitted",
            "MIME-Version",
            "Content-Type",
            "Content-Transfer-Encoding",
        ];
        let sorted = |mut names: Vec<&str>| {
            names.sort_by_key(|name| name.to_ascii_lowercase());
            names.join(" ").to_ascii_lowercase()
        };
        assert_eq!(sorted(names), sorted(expected.to_vec()), "{mail}");
    }

    #[test]
    fn ids_are_words_of_a_shell() {
        for (id, word) in [
            ("6f-1", "6f-1"),
            ("a b", "'a b'"),
            ("$(reboot)", "'$(reboot)'"),
            ("it's", r"'it'\''s'"),
            ("-f", "-- -f"),
            ("a\nb", r"'a\nb'"),
        ] {
            assert_eq!(shell_word(id), word);
        }
    }

    #[test]
    fn nacks_are_told_whatever_they_are() {
        let told = |nacks: &str| {
            let mail = mail_of(&format!(
                r#"{{"id":"1","ts":1764400000,"kind":"k","from":"f","to":"t","payload":{{}},"status":"human","nacks":{nacks}}}"#
            ));
            // The lines of the body are too short to be broken.
            mail.split("\n\n").find_map(|part| part.strip_prefix("It was refused")).unwrap_or_default().to_owned()
        };
        assert_eq!(told("3"), " 3 times.");
        assert_eq!(told("[]"), "");
        assert_eq!(
            told(r#"[{"ts":1764396400,"by":"r","reason":"a\nb","error_class":"c"}]"#),
            ":\n  2025-11-29T06:06:40Z (1h 0m ago) by r, c: a\\nb"
        );
        let many = told(&format!("[{}1]", "{},".repeat(11)));
        assert!(many.starts_with(", the last time last:\n  2 times before these\n  at a time unknown\n"), "{many}");
    }
}
