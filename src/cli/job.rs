//! How a maintenance job runs: what went wrong, what somebody should look at, what was done, and its metrics.

use std::fmt::{Display, Write};
use std::time::Instant;

use bytesize::ByteSize;
use clap::builder::FalseyValueParser;
use clap::{Args, CommandFactory, FromArgMatches};

use super::args::{self, Common, Textfile};
use super::exit::Exit;
use super::messages::{self, Messages};
use crate::format::time::Timestamp;
use crate::metrics::{self, JobRun};
use crate::store::{Error, ErrorKind, Rewritten, atomic_file};

/// What all jobs can be told to do.
#[derive(Debug, Args)]
pub(super) struct Flags {
    /// Print what would be done, and why; change nothing
    #[arg(long, env = "HANDOFF_DRY_RUN", value_parser = FalseyValueParser::new())]
    pub(super) dry_run: bool,

    /// Print what was done, or would be, as JSON
    #[arg(long, env = "HANDOFF_JSON", value_parser = FalseyValueParser::new())]
    pub(super) json: bool,
}

/// Parses the command line of a job.
pub(super) fn parse<A: CommandFactory + FromArgMatches>(
    name: &str,
    parts: fn(&mut A) -> (&mut Common, &mut Textfile),
) -> Result<A, clap::Error> {
    let mut matches = args::parse(A::command(), std::env::args_os())?;
    let [verbose, quiet] = args::verbosity(A::command(), &matches)?;
    let wants_metrics = !args::is_default(&matches, "textfile_dir");
    let mut arguments = A::from_arg_matches_mut(&mut matches)?;
    let (common, textfile) = parts(&mut arguments);
    common.prefer(verbose, quiet);
    textfile.is_wanted = wants_metrics;
    textfile.keep_apart(&file_name(name), common, A::command())?;
    Ok(arguments)
}

/// A run of a job.
pub(super) struct Job<'a> {
    /// As in the names of metrics.
    name: &'static str,
    common: &'a Common,
    textfile: &'a Textfile,
    /// When it began.
    pub(super) now: Timestamp,
    start: Instant,
    messages: Messages,
    exit: Exit,
    last_error: Option<String>,
}

impl<'a> Job<'a> {
    pub(super) fn begin(program: &'static str, name: &'static str, common: &'a Common, textfile: &'a Textfile) -> Self {
        Self {
            name,
            common,
            textfile,
            now: common.now(),
            start: Instant::now(),
            messages: Messages::new(program, common.level()),
            exit: Exit::Done,
            last_error: None,
        }
    }

    /// Reports an error, which also decides how the run ends.
    pub(super) fn fail(&mut self, error: &Error) {
        // Two steps may fail for the same cause.
        let message = error.to_string();
        if self.last_error.as_ref() != Some(&message) {
            self.messages.error(&message);
        }
        self.last_error = Some(message);
        self.exit = error.kind().into();
    }

    /// What a step has come to, unless it failed.
    pub(super) fn check<T>(&mut self, result: Result<T, Error>) -> Option<T> {
        result.inspect_err(|error| self.fail(error)).ok()
    }

    /// Reports what somebody should look at.
    pub(super) fn report(&mut self, rewritten: &Rewritten) {
        self.messages.warnings(&rewritten.findings);
        if let Some(error) = &rewritten.unsettled {
            self.fail(error);
        }
    }

    pub(super) fn warn(&self, what: impl Display) {
        self.messages.warning(what);
    }

    /// Prints data.
    pub(super) fn print(&mut self, data: &str) {
        self.check(messages::print(data.as_bytes()));
    }

    /// Says what was done to the queue.
    pub(super) fn say(&self, what: impl Display, rewritten: &Rewritten) {
        let queue = self.common.queue.display();
        self.messages.notice(format_args!("{queue}: {what}"));
        self.messages.info(format_args!("{queue}: writers were kept out for {:?}", rewritten.locked_for));
    }

    /// Writes the metrics, and says how the run ends.
    pub(super) fn finish(self, render: impl FnOnce(JobRun) -> prometheus::Result<String>) -> Exit {
        let directory = &self.textfile.textfile_dir;
        if !self.textfile.is_wanted && !directory.exists() {
            let message = format_args!("{}: does not exist, so there are no metrics", directory.display());
            self.messages.notice(message);
            return self.exit;
        }
        let success = self.exit == Exit::Done;
        let file_name = file_name(self.name);
        let last_success = if success {
            Some(self.now.as_seconds())
        } else {
            self.textfile.last_success(&file_name, &metrics::last_success_of(self.name), &self.messages)
        };
        let duration = self.start.elapsed().as_secs_f64();
        let written = render(JobRun { success, began: self.now.as_seconds(), last_success, duration })
            .map_err(|error| {
                Error::new(ErrorKind::Io, &self.common.queue, format!("cannot be put into metrics: {error}"))
            })
            .and_then(|text| atomic_file::replace(directory, &file_name, text.as_bytes()));
        match written {
            Ok(()) => self.exit,
            Err(error) => {
                self.messages.error(&error);
                if success { error.kind().into() } else { self.exit }
            }
        }
    }

    /// How the run ends, without metrics.
    pub(super) fn finish_preview(self) -> Exit {
        self.exit
    }
}

/// The file in the textfile directory that a job writes.
pub(super) fn file_name(job: &str) -> String {
    format!("handoff_{job}.prom")
}

/// What a run would take over, for people.
pub(super) fn would_take_over(rewritten: &Rewritten) -> String {
    match rewritten.late.lines {
        0 => String::new(),
        lines => format!("take over {} from earlier generations\n", count(lines, "late line")),
    }
}

/// What is said of a queue that was replaced, after everything else.
pub(super) fn taken_over(rewritten: &Rewritten) -> String {
    let mut words = String::new();
    if rewritten.late.lines > 0 {
        let _ = write!(words, "; took over {}", count(rewritten.late.lines, "late line"));
    }
    if rewritten.removed_generations > 0 {
        let _ = write!(words, "; removed {}", count(rewritten.removed_generations, "drained generation"));
    }
    words
}

/// A number of things, in words.
pub(super) fn count(number: u64, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}

/// A number of bytes, in words.
pub(super) fn size(bytes: u64) -> String {
    ByteSize(bytes).display().iec().to_string()
}
