//! Messages for people, one line each, on standard error.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, Write};
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
    // Who reads only the beginning, as head(1) does, has got what they wanted.
    deliver(data).or_else(|undelivered| undelivered.map_or(Ok(()), Err))
}

/// Prints data to standard output that somebody must get.
///
/// # Errors
/// If nobody has; without an error if nobody reads any more.
pub(super) fn deliver(data: &[u8]) -> Result<(), Option<Error>> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(data).and_then(|()| stdout.flush()).map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => None,
        _ => Some(Error::io(Path::new("standard output"), "cannot be written", error)),
    })
}

/// Tells somebody who has said too little what can be said.
pub(super) fn print_help(help: &str) {
    drop(io::stderr().write_all(help.as_bytes()));
}

/// Escapes control characters: file names may hold them, and a terminal would obey them.
fn one_line(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
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
        assert_eq!(one_line("a\nb\u{1b}[2Jé\u{9b}"), "a\\nb\\u{1b}[2Jé\\u{9b}");
    }
}
