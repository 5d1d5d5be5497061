//! Messages for people, one line each, on standard error.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::store::Error;

/// Where messages go and how many.
#[derive(Debug)]
pub(super) struct Messages {
    program: &'static str,
    max_level: Level,
    /// Whether the journal reads standard error and understands priorities.
    journal: bool,
}

/// How much a message matters; the numbers are those of syslog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    Error = 3,
    Warning = 4,
    Notice = 5,
    Info = 6,
}

impl Messages {
    pub(super) fn new(program: &'static str, max_level: Level) -> Self {
        Self { program, max_level, journal: standard_error_is_the_journal() }
    }

    pub(super) fn error(&self, message: impl Display) {
        self.print(Level::Error, &message);
    }

    pub(super) fn warning(&self, message: impl Display) {
        self.print(Level::Warning, &message);
    }

    /// What somebody should look at.
    pub(super) fn warnings<D: Display>(&self, messages: impl IntoIterator<Item = D>) {
        for message in messages {
            self.warning(message);
        }
    }

    pub(super) fn notice(&self, message: impl Display) {
        self.print(Level::Notice, &message);
    }

    pub(super) fn info(&self, message: impl Display) {
        self.print(Level::Info, &message);
    }

    fn print(&self, level: Level, message: &dyn Display) {
        if level > self.max_level {
            return;
        }
        let priority = if self.journal { format!("<{}>", level as u8) } else { String::new() };
        let line = format!("{priority}{}: {}\n", self.program, one_line(&message.to_string()));
        // There is nowhere to report that standard error is closed.
        drop(io::stderr().write_all(line.as_bytes()));
    }
}

/// Prints data to standard output.
pub(super) fn print(data: &[u8]) -> Result<(), Error> {
    print_each([Ok(data)])
}

/// Prints pieces of data one after the other, for as long as somebody reads them.
pub(super) fn print_each<D: AsRef<[u8]>>(pieces: impl IntoIterator<Item = Result<D, Error>>) -> Result<(), Error> {
    // Who reads only the beginning, as head(1) does, has got what they wanted.
    deliver(pieces).or_else(|undelivered| undelivered.map_or(Ok(()), Err))
}

/// Prints data to standard output that somebody must get.
///
/// # Errors
/// If nobody has; without an error if nobody reads any more.
pub(super) fn deliver<D: AsRef<[u8]>>(pieces: impl IntoIterator<Item = Result<D, Error>>) -> Result<(), Option<Error>> {
    let undelivered = |error: io::Error| match error.kind() {
        io::ErrorKind::BrokenPipe => None,
        _ => Some(Error::io(Path::new("standard output"), "cannot be written", error)),
    };
    let mut stdout = BufWriter::new(io::stdout().lock());
    for piece in pieces {
        stdout.write_all(piece.map_err(Some)?.as_ref()).map_err(undelivered)?;
    }
    stdout.flush().map_err(undelivered)
}

/// Tells somebody who has said too little what can be said.
pub(super) fn print_help(help: &str) {
    drop(io::stderr().write_all(help.as_bytes()));
}

/// Escapes what a terminal would obey instead of showing it, control characters and those that turn the direction of text: file names and
/// records may hold them.
pub(super) fn one_line(text: &str) -> String {
    let is_obeyed = |c: char| {
        c.is_control()
            || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    text.chars().flat_map(|c| if is_obeyed(c) { c.escape_default().collect() } else { vec![c] }).collect()
}

#[expect(clippy::disallowed_methods, reason = "cli owns the environment")]
fn standard_error_is_the_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    let Ok(stderr) = io::stderr().as_fd().try_clone_to_owned() else { return false };
    File::from(stderr).metadata().is_ok_and(|metadata| stream == format!("{}:{}", metadata.dev(), metadata.ino()))
}

#[cfg(test)]
mod tests {
    use super::one_line;

    #[test]
    fn a_message_is_one_line_that_no_terminal_obeys() {
        assert_eq!(one_line("a\nb\u{1b}[2Jé\u{9b}\u{202e}"), "a\\nb\\u{1b}[2Jé\\u{9b}\\u{202e}");
    }
}
