//! `handoff work`: a worker that runs a command for each record of a role.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf, absolute};
use std::process::Command;
use std::time::{Duration, Instant};

use clap::Args;
use clap::builder::FalseyValueParser;
use serde::Deserialize;
use serde_json::value::RawValue;
use signal_hook::low_level::signal_name;

use super::{Place, Rules};
use crate::cli::child::{self, Cut, Ended, Errors, Limits, MAX_OUTPUT, Runner};
use crate::cli::exit::Exit;
use crate::cli::messages::Messages;
use crate::cli::notify::Channel;
use crate::format::owner::Owner;
use crate::format::time::Timestamp;
use crate::format::transition::{Refusal, check_spend};
use crate::store::client::{By, Changed, Client, Outcome};
use crate::store::files::{Finding, QueueFiles};
use crate::store::watch::{self, Look};
use crate::store::{Error, ErrorKind, process, put};

const EXIT_CODES: &str = "\
COMMAND's exit code: 0 done; 65 dead; 75, any other, a signal, or --timeout: once more, then a person.
Example: handoff work --role researcher --timeout 15m -- ./research.py
Exit codes: 0 told to stop, or --once and there was a record; 1 --once and there was none; 74 a file or COMMAND can't be used";

/// Run a command for each record of a role, one after the other
///
/// COMMAND gets the record's line on its standard input, and `AGENT_ROLE`, `HANDOFF_ID` and `HANDOFF_QUEUE` in its environment. Its
/// standard output may be one JSON object of result, spend and followup. Records of workers that have died are tried again.
/// After SIGTERM none is begun any more; the one at hand is finished, or handed back.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(super) struct Work {
    /// Work on the records of this role
    #[arg(long, env = "AGENT_ROLE", value_name = "ROLE")]
    role: String,

    /// Work on one record at most
    #[arg(long, env = "HANDOFF_ONCE", value_parser = FalseyValueParser::new())]
    once: bool,

    /// How often to look at the queue
    #[arg(long, env = "HANDOFF_POLL", value_name = "TIME", default_value = "2s", value_parser = humantime::parse_duration)]
    poll: Duration,

    /// How long COMMAND may take [default: no limit]
    #[arg(long, env = "HANDOFF_TIMEOUT", value_name = "TIME", value_parser = humantime::parse_duration)]
    timeout: Option<Duration>,

    /// How long it may still take after SIGTERM
    #[arg(long, env = "HANDOFF_STOP_TIMEOUT", value_name = "TIME", default_value = "30s", value_parser = humantime::parse_duration)]
    stop_timeout: Duration,

    #[command(flatten)]
    channel: Channel,

    #[command(flatten)]
    rules: Rules,

    #[command(flatten)]
    pub(super) place: Place,

    /// What to run for each record
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl Work {
    pub(super) fn run(&self) -> Result<Exit, Error> {
        // clap has seen to it that there is one.
        let [program, arguments @ ..] = self.command.as_slice() else { return Ok(Exit::Usage) };
        // Before anything is taken that could only be given back.
        let program = child::find(program).ok_or_else(|| {
            Error::new(ErrorKind::Io, Path::new(program), "is no program in PATH that this user may run")
                .advise("correct COMMAND or PATH")
        })?;
        let mut worker = Worker {
            work: self,
            program,
            arguments,
            client: self.place.client(),
            rules: self.rules.read(),
            owner: process::this()?,
            runner: Runner::catching_signals()
                .map_err(|error| Error::io(Path::new("signals"), "cannot be caught", error))?,
            messages: self.place.messages(),
            found: Vec::new(),
        };
        worker.serve()
    }
}

/// Nobody needs it sooner.
const MIN_POLL: Duration = Duration::from_millis(10);
/// How often to look, even if nothing has changed, whether another worker of the role has died.
const LOOK_AROUND: Duration = Duration::from_secs(60);
/// How often it is tried to write down what came of a record after we were told to stop.
const LAST_ATTEMPTS: u32 = 3;
/// How long the pauses between such attempts become.
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// How many findings are remembered.
const MAX_FOUND: usize = 100;
/// Longer ids don't fit into an environment, whose strings may have 128 KiB.
const MAX_ID: usize = 64 * 1024;

struct Worker<'a> {
    work: &'a Work,
    program: PathBuf,
    arguments: &'a [OsString],
    client: Client,
    rules: put::Rules,
    owner: Owner,
    runner: Runner,
    messages: Messages,
    /// What was found when records were looked for, so that it is said once.
    found: Vec<Finding>,
}

/// What is to become of a record.
#[derive(Debug)]
enum Verdict {
    Done(Outcome),
    Refused(Refusal),
    HandedBack,
}

impl Worker<'_> {
    fn serve(&mut self) -> Result<Exit, Error> {
        let mut looked_around: Option<Instant> = None;
        let mut seen: Option<Look> = None;
        while !self.runner.is_told_to_stop() {
            if looked_around.is_none_or(|time| time.elapsed() >= LOOK_AROUND) {
                let reclaimed = self.reclaim();
                self.pass_if_busy(reclaimed)?;
                looked_around = Some(Instant::now());
                seen = None;
            }
            let taken = self.take_if_changed(&mut seen);
            match self.pass_if_busy(taken)?.flatten() {
                Some(record) => self.work_on(&record)?,
                None if self.work.once => return Ok(Exit::No),
                None => {
                    self.runner.sleep(self.work.poll.max(MIN_POLL));
                    continue;
                }
            }
            if self.work.once {
                break;
            }
        }
        Ok(Exit::Done)
    }

    /// Whoever polls tries again what others are at.
    fn pass_if_busy<T>(&self, result: Result<T, Error>) -> Result<Option<T>, Error> {
        match result {
            Err(error) if error.kind() == ErrorKind::Busy && !self.work.once => {
                self.messages.warning(error);
                Ok(None)
            }
            result => result.map(Some),
        }
    }

    /// What workers of the role left when they died is refused in their name.
    fn reclaim(&mut self) -> Result<(), Error> {
        let (reclaimed, findings) = self.client.reclaim(&self.work.role, self.now())?;
        self.warn_of_new(findings);
        for record in &reclaimed {
            self.messages.warnings(&record.findings);
            let status = record.status.as_str();
            self.messages.warning(format_args!("{}: its worker died: {status}", self.name(record)));
        }
        if reclaimed.iter().any(Changed::has_escalated) {
            self.notify();
        }
        Ok(())
    }

    /// Takes a record, unless the queue looks as it did when there was none.
    fn take_if_changed(&mut self, seen: &mut Option<Look>) -> Result<Option<Changed>, Error> {
        // What is written from here on is seen next time.
        let look = watch::look(&self.client.files)?;
        if seen.as_ref() == Some(&look) {
            return Ok(None);
        }
        *seen = None;
        let (taken, findings) = self.client.take(&self.work.role, Some(&self.owner), self.now())?;
        self.warn_of_new(findings);
        if let Some(record) = &taken {
            self.messages.warnings(&record.findings);
        } else {
            *seen = Some(look);
        }
        Ok(taken)
    }

    fn work_on(&mut self, record: &Changed) -> Result<(), Error> {
        let start = Instant::now();
        let name = self.name(record);
        self.messages.notice(format_args!("{name}: taken"));
        let verdict = match self.execute(record) {
            Ok(verdict) => verdict,
            Err(error) => {
                self.commit(record, &Verdict::HandedBack, start)?;
                return Err(error.note("the record has been handed back"));
            }
        };
        self.commit(record, &verdict, start)
    }

    fn execute(&mut self, record: &Changed) -> Result<Verdict, Error> {
        let id = &record.id;
        if id.len() > MAX_ID || id.contains('\0') {
            let reason = "its id does not fit into the environment of a process".to_owned();
            return Ok(Verdict::Refused(refusal("bad_id", reason, false)));
        }
        let mut command = Command::new(&self.program);
        command.args(self.arguments).envs(self.environment()).env("HANDOFF_ID", id);
        let limits = Limits { timeout: self.work.timeout, stop_timeout: self.work.stop_timeout };
        let ended = self
            .runner
            .run(&mut command, format!("{}\n", record.line).into_bytes(), Errors::PassedOn, limits)
            .map_err(|error| Error::io(&self.program, "cannot be run", error))?;
        let is_stopping = self.runner.is_told_to_stop_too(&ended);
        Ok(judge(&ended, is_stopping))
    }

    /// What COMMAND and the tools that it runs are told of the queue.
    fn environment(&self) -> Vec<(&'static str, OsString)> {
        let files = &self.client.files;
        let full = |path: &PathBuf| absolute(path).unwrap_or_else(|_| path.clone()).into_os_string();
        let usual = QueueFiles::beside(files.queue.clone());
        let mut environment =
            vec![("AGENT_ROLE", self.work.role.clone().into()), ("HANDOFF_QUEUE", full(&files.queue))];
        for (name, path, usual) in
            [("HANDOFF_LOCK", &files.lock, usual.lock), ("HANDOFF_BLOB_DIR", &files.blobs, usual.blobs)]
        {
            if *path != usual {
                environment.push((name, full(path)));
            }
        }
        environment
    }

    /// Writes down what came of a record, however often it has to be tried.
    fn commit(&mut self, record: &Changed, verdict: &Verdict, start: Instant) -> Result<(), Error> {
        let name = self.name(record);
        let mut pause = Duration::from_secs(1);
        let mut last_attempts = 0;
        let changed = loop {
            let error = match self.attempt(record, verdict) {
                Ok(changed) => break changed,
                Err(error) if error.kind() == ErrorKind::Refused => {
                    let what = match verdict {
                        Verdict::Done(_) => "what came of it is dropped",
                        _ => "it is left as it is",
                    };
                    self.messages.warning(format_args!("{error}: somebody else has changed it meanwhile: {what}"));
                    return Ok(());
                }
                Err(error) => error,
            };
            if self.runner.is_told_to_stop() {
                last_attempts += 1;
                if last_attempts == LAST_ATTEMPTS {
                    return Err(error.note("the record stays running until the role's next worker starts"));
                }
                std::thread::sleep(Duration::from_secs(1));
            } else {
                self.messages.warning(format_args!("{error}: what came of {name} is kept, and written when it can be"));
                self.runner.sleep(pause);
                pause = MAX_PAUSE.min(pause * 2);
            }
        };
        self.messages.warnings(&changed.findings);
        let what = match verdict {
            Verdict::Done(_) => "done".to_owned(),
            Verdict::HandedBack => "handed back".to_owned(),
            Verdict::Refused(Refusal { reason, .. }) => format!("refused, {}: {reason}", changed.status.as_str()),
        };
        self.messages.notice(format_args!("{name}: {what} (after {:.1?})", start.elapsed()));
        if let Some(put) = &changed.followup {
            self.messages.warnings(&put.findings);
            let stopped = put.stopped.as_ref().map_or_else(String::new, |why| format!(": {why}"));
            self.messages.notice(format_args!("{name}: its follow-up {} is {}{stopped}", put.id, put.status.as_str()));
        }
        if changed.has_escalated() {
            self.notify();
        }
        Ok(())
    }

    fn attempt(&self, record: &Changed, verdict: &Verdict) -> Result<Changed, Error> {
        let (id, by, now) = (&record.id, By::OwnerOnly(self.owner.clone()), self.now());
        match verdict {
            Verdict::HandedBack => self.client.hand_back(id, &self.owner, now),
            Verdict::Refused(refusal) => self.client.nack(id, &by, refusal, now),
            Verdict::Done(outcome) => match self.client.done(id, &by, outcome, &self.rules, now) {
                // Either what came of it can't be accepted, or it is not ours any more: then a nack is refused likewise.
                Err(error) if matches!(error.kind(), ErrorKind::BadData | ErrorKind::Refused) => {
                    let refusal = Refusal { spend: outcome.spend.clone(), ..bad_output(&error.to_string()) };
                    self.client.nack(id, &by, &refusal, now)
                }
                result => result,
            },
        }
    }

    /// Says what is found again and again only once.
    fn warn_of_new(&mut self, findings: Vec<Finding>) {
        for finding in findings {
            if !self.found.contains(&finding) {
                self.messages.warning(&finding);
                self.found.push(finding);
            }
        }
        // Nothing is remembered for ever.
        self.found.drain(..self.found.len().saturating_sub(MAX_FOUND));
    }

    fn notify(&mut self) {
        let now = || self.work.place.common.now();
        self.work.channel.tell_if_configured(&self.client, &mut self.runner, &now, &self.messages);
    }

    fn now(&self) -> Timestamp {
        self.work.place.common.now()
    }

    fn name(&self, record: &Changed) -> String {
        format!("{}: record {} ({})", self.client.files.queue.display(), record.id, record.kind)
    }
}

/// What becomes of a record whose command has ended like this.
fn judge(ended: &Ended, is_stopping: bool) -> Verdict {
    let Ended { status, cut, .. } = ended;
    let output = read(ended);
    let spend = output.as_ref().ok().and_then(|output| output.spend.clone());
    let with_errors = |what: String| match ended.error_tail.trim() {
        "" => what,
        tail => format!("{what}: {tail}"),
    };
    let refused = |class: &str, what: String, is_retryable: bool| {
        Verdict::Refused(Refusal { spend: spend.clone(), ..refusal(class, with_errors(what), is_retryable) })
    };
    if *cut == Some(Cut::Timeout) {
        return refused("timeout", "took longer than --timeout".to_owned(), true);
    }
    match status.code() {
        // Who has ended because we said so may not have done anything.
        Some(0) if *cut == Some(Cut::Stop) && is_blank(&ended.output) => Verdict::HandedBack,
        Some(0) => match output {
            Ok(outcome) => Verdict::Done(outcome),
            Err(what) => Verdict::Refused(bad_output(&what)),
        },
        Some(code @ (65 | 75)) => refused(&format!("exit_{code}"), format!("exit code {code}"), code == 75),
        _ if is_stopping && (*cut == Some(Cut::Stop) || status.signal().is_some() || ended.is_told_to_stop()) => {
            Verdict::HandedBack
        }
        Some(code) => refused(&format!("exit_{code}"), format!("exit code {code}"), true),
        None => {
            let signal = status.signal().unwrap_or_default();
            let name = signal_name(signal).map_or_else(|| signal.to_string(), str::to_owned);
            let class = format!("signal_{}", name.trim_start_matches("SIG").to_ascii_lowercase());
            refused(&class, format!("ended by signal {name}"), true)
        }
    }
}

fn refusal(class: &str, reason: String, is_retryable: bool) -> Refusal {
    Refusal { reason, error_class: Some(class.to_owned()), is_retryable, spend: None }
}

fn bad_output(what: &str) -> Refusal {
    refusal("bad_output", format!("its output can't be accepted: {what}"), true)
}

fn is_blank(output: &[u8]) -> bool {
    output.trim_ascii().is_empty()
}

/// Reads what came of a record from standard output; no output is no more than that.
fn read(ended: &Ended) -> Result<Outcome, String> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Output<'a> {
        #[serde(borrow)]
        result: Option<&'a RawValue>,
        #[serde(borrow)]
        spend: Option<&'a RawValue>,
        #[serde(borrow)]
        followup: Option<&'a RawValue>,
    }
    let Ended { output, has_overflowed, .. } = ended;
    let begins_with = || format!(", beginning with: {}", String::from_utf8_lossy(&output[..output.len().min(200)]));
    if *has_overflowed {
        return Err(format!("there is more than {MAX_OUTPUT} bytes of it{}", begins_with()));
    }
    if is_blank(output) {
        return Ok(Outcome::default());
    }
    // A derived implementation would also take an array.
    if !output.trim_ascii_start().starts_with(b"{") {
        return Err(format!("it is no JSON object{}", begins_with()));
    }
    let Output { result, spend, followup } = std::str::from_utf8(output)
        .map_err(|error| error.to_string())
        .and_then(|output| serde_json::from_str(output).map_err(|error| error.to_string()))
        .map_err(|error| format!("{error}{}", begins_with()))?;
    let text = |json: Option<&RawValue>| json.map(|json| json.get().to_owned());
    let outcome = Outcome { result: text(result), spend: text(spend), followup: text(followup) };
    outcome.spend.as_deref().map_or(Ok(()), check_spend)?;
    Ok(outcome)
}
