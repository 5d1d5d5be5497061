//! `handoff work`: a worker that runs a command for each record of a role.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf, absolute};
use std::process::Command;
use std::time::{Duration, Instant};

use clap::Args;
use clap::builder::FalseyValueParser;
use signal_hook::low_level::signal_name;

use super::{Place, Rules};
use crate::cli::child::{self, Limits, Purpose, Runner};
use crate::cli::exit::Exit;
use crate::cli::messages::Messages;
use crate::cli::notify::Channel;
use crate::format::outcome::{Ending, Verdict, bad_output, judge, refusal};
use crate::format::owner::Owner;
use crate::format::time::Timestamp;
use crate::format::transition::Refusal;
use crate::store::client::{By, Changed, Client};
use crate::store::files::{Finding, QueueFiles};
use crate::store::process::{self, Life};
use crate::store::watch::{self, Look};
use crate::store::{Error, ErrorKind, put};

const EXIT_CODES: &str = "\
COMMAND's exit code: 0 done; 65 dead; 75, any other, a signal, or --timeout: once more, then a person.
Example: handoff work --role researcher --timeout 15m -- ./research.py
Exit codes: 0 told to stop, or --once and there was a record; 1 --once and there was none; 65 the ledger or, with --once, the
record can't be changed; 74 a file or COMMAND can't be used";

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
            held: None,
            found: Vec::new(),
        };
        worker.serve()
    }
}

/// Nobody needs it sooner.
const MIN_POLL: Duration = Duration::from_millis(10);
/// How often to look whether another worker of the role has died, if that is more often than with each 30th look at the queue.
const LOOK_AROUND: Duration = Duration::from_secs(60);
/// How often it is tried to write down what came of a record after we were told to stop.
const LAST_ATTEMPTS: u32 = 2;
/// How long each of these attempts waits for a lock.
const LAST_LOCK_TIMEOUT: Duration = Duration::from_secs(5);
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
    /// Who held records of the role, and what the queue looked like then.
    held: Option<(Look, Vec<Option<Owner>>)>,
    /// What was found when records were looked for, so that it is said once.
    found: Vec<Finding>,
}

impl Worker<'_> {
    fn serve(&mut self) -> Result<Exit, Error> {
        let poll = self.work.poll.max(MIN_POLL);
        let look_around = LOOK_AROUND.min(poll.saturating_mul(30));
        let mut looked_around: Option<Instant> = None;
        let mut seen: Option<Look> = None;
        while !self.is_told_to_stop() {
            if looked_around.is_none_or(|time| time.elapsed() >= look_around) {
                let looked = self.look_around();
                self.pass_if_busy(looked)?;
                looked_around = Some(Instant::now());
                // That may have taken long.
                continue;
            }
            let taken = self.take_if_changed(&mut seen);
            match self.pass_if_busy(taken)?.flatten() {
                Some(record) if self.is_told_to_stop() => {
                    self.commit(&record, Verdict::HandedBack, Instant::now())?;
                }
                Some(record) => self.work_on(&record)?,
                None if self.work.once => return Ok(Exit::No),
                None => {
                    self.runner.sleep(poll);
                    continue;
                }
            }
            if self.work.once {
                break;
            }
        }
        Ok(Exit::Done)
    }

    /// Whether we are told to stop. Then nothing is waited for any longer than whoever has told us may wait.
    fn is_told_to_stop(&mut self) -> bool {
        let is_told = self.runner.is_told_to_stop();
        if is_told {
            let timeout = &mut self.client.options.lock_timeout;
            *timeout = LAST_LOCK_TIMEOUT.min(*timeout);
        }
        is_told
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

    /// Looks whether workers of the role have died. Who holds its records is read only if the queue has changed.
    fn look_around(&mut self) -> Result<(), Error> {
        let Client { files, options } = &self.client;
        // What is written from here on is seen next time.
        let look = watch::look(files)?;
        let holders = match self.held.take() {
            Some((then, holders)) if then == look => holders,
            _ => watch::holders(files, options, &self.work.role)?,
        };
        let may_live = |holder: &Option<Owner>| {
            holder.as_ref().is_some_and(|owner| !matches!(process::life(owner), Ok(Life::Dead)))
        };
        let (alive, lost): (Vec<_>, Vec<_>) = holders.into_iter().partition(may_live);
        if !lost.is_empty() {
            self.reclaim()?;
        }
        self.held = Some((look, alive));
        Ok(())
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
        self.notify(&reclaimed.iter().flat_map(Changed::escalated).collect::<Vec<_>>());
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
                self.commit(record, Verdict::HandedBack, start)?;
                return Err(error.note("the record has been handed back"));
            }
        };
        self.commit(record, verdict, start)
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
            .run(&mut command, format!("{}\n", record.line).into_bytes(), Purpose::Work, limits)
            .map_err(|error| Error::io(&self.program, "cannot be run", error))?;
        let is_stopping = self.runner.is_told_to_stop_too(&ended);
        let signal = ended.status.signal();
        let name = signal.map(|signal| signal_name(signal).map_or_else(|| signal.to_string(), str::to_owned));
        Ok(judge(&Ending {
            status: ended.status.code().ok_or(name.as_deref().unwrap_or_default()),
            cut: ended.cut,
            is_stopped: is_stopping && (signal.is_some() || ended.is_told_to_stop()),
            output: &ended.output,
            has_overflowed: ended.has_overflowed,
            error_tail: &ended.error_tail,
        }))
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
    fn commit(&mut self, record: &Changed, mut verdict: Verdict, start: Instant) -> Result<(), Error> {
        let name = self.name(record);
        let mut pause = Duration::from_secs(1);
        let mut last_attempts = 0;
        let changed = loop {
            last_attempts += u32::from(self.is_told_to_stop());
            let error = match self.attempt(record, &verdict) {
                Ok(changed) => break changed,
                Err(error) => error,
            };
            let is_refused = match error.kind() {
                ErrorKind::Refused => true,
                // It can't be accepted, unless nothing is, because of a ledger that may be mended.
                ErrorKind::BadData => watch::require_ledger(&self.client.files, &self.client.options).is_ok(),
                ErrorKind::Io | ErrorKind::Busy => false,
            };
            match &verdict {
                Verdict::Done(outcome) if is_refused => {
                    // If the record is not ours any more, that is refused likewise.
                    let refusal = bad_output(&error.to_string());
                    verdict = Verdict::Refused(Refusal { spend: outcome.spend.clone(), ..refusal });
                    continue;
                }
                _ if is_refused => return self.give_up(error),
                _ => {}
            }
            if last_attempts == LAST_ATTEMPTS {
                return Err(error.note("the record stays running until the role's next worker starts"));
            }
            if self.is_told_to_stop() {
                std::thread::sleep(Duration::from_secs(1));
            } else {
                self.messages.warning(format_args!("{error}: what came of {name} is kept, and written when it can be"));
                self.runner.sleep(pause);
                pause = MAX_PAUSE.min(pause * 2);
            }
        };
        self.messages.warnings(&changed.findings);
        let what = match &verdict {
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
        self.notify(&changed.escalated());
        Ok(())
    }

    /// Leaves a record as it is, of which nothing can be written down.
    fn give_up(&self, error: Error) -> Result<(), Error> {
        if error.kind() == ErrorKind::Refused {
            let what = "somebody else has changed it meanwhile: what came of it is dropped";
            self.messages.warning(format_args!("{error}: {what}"));
            return Ok(());
        }
        let what =
            "what came of it is dropped, and it stays running until its line is mended and handoff requeue --force";
        let error = error.note(what);
        if self.work.once {
            return Err(error);
        }
        self.messages.error(error);
        Ok(())
    }

    fn attempt(&self, record: &Changed, verdict: &Verdict) -> Result<Changed, Error> {
        let (id, by, now) = (&record.id, By::OwnerOnly(self.owner.clone()), self.now());
        match verdict {
            Verdict::HandedBack => self.client.hand_back(id, &self.owner, now),
            Verdict::Refused(refusal) => self.client.nack(id, &by, refusal, now),
            Verdict::Done(outcome) => self.client.done(id, &by, outcome, &self.rules, now),
        }
    }

    /// Says what is found again and again only once.
    fn warn_of_new(&mut self, findings: Vec<Finding>) {
        for finding in findings {
            // Their lines move whenever others are added or removed.
            let is_known = |known: &Finding| (&known.path, &known.message) == (&finding.path, &finding.message);
            if !self.found.iter().any(is_known) {
                self.messages.warning(&finding);
                self.found.push(finding);
            }
        }
        // Nothing is remembered for ever.
        self.found.drain(..self.found.len().saturating_sub(MAX_FOUND));
    }

    fn notify(&mut self, ids: &[&str]) {
        let now = || self.work.place.common.now();
        self.work.channel.tell_if_configured(&self.client, &mut self.runner, ids, &now, &self.messages);
    }

    fn now(&self) -> Timestamp {
        self.work.place.common.now()
    }

    fn name(&self, record: &Changed) -> String {
        format!("{}: record {} ({})", self.client.files.queue.display(), record.id, record.kind)
    }
}
