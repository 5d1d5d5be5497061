//! `handoff`: what people and agents do with the queue. One module a verb.

mod blob;
mod check;
mod end;
mod list;
mod notify;
mod put;
mod show;
mod status;
mod take;
mod work;

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::ExitCode;

use clap::builder::FalseyValueParser;
use clap::{Arg, ArgAction, Args, Command, CommandFactory, FromArgMatches, Parser, Subcommand};

use super::args::{self, Common};
use super::child::Runner;
use super::exit::Exit;
use super::messages::Messages;
use super::notify::Channel;
use crate::format::owner::Owner;
use crate::store::client::{By, Client};
use crate::store::files::{Finding, QueueFiles};
use crate::store::read::Pass;
use crate::store::{self, Error, ErrorKind, process};

const NAME: &str = "handoff";

/// Work with the handoff queue
///
/// Every flag can also be set by its variable; a flag wins. An empty variable counts as not set, and 0, false, no and off
/// switch a flag without a value off.
#[derive(Debug, Parser)]
#[command(name = NAME, version, after_help = EXIT_CODES)]
struct Arguments {
    #[command(subcommand)]
    command: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Put(put::Put),
    Take(take::Take),
    Done(end::Done),
    Nack(end::Nack),
    Requeue(end::Requeue),
    Cancel(end::Cancel),
    Work(work::Work),
    Notify(notify::Notify),
    /// Look at the blobs that handles in the queue stand for
    #[command(subcommand)]
    Blob(blob::Blobs),
    List(list::List),
    Show(show::Show),
    Status(status::Status),
    Check(check::Check),
}

impl Verb {
    fn place_mut(&mut self) -> &mut Place {
        match self {
            Self::Put(command) => &mut command.place,
            Self::Take(command) => &mut command.place,
            Self::Done(command) => &mut command.place,
            Self::Nack(command) => &mut command.place,
            Self::Requeue(command) => &mut command.place,
            Self::Cancel(command) => &mut command.place,
            Self::Work(command) => &mut command.place,
            Self::Notify(command) => &mut command.place,
            Self::Blob(command) => command.place_mut(),
            Self::List(command) => &mut command.place,
            Self::Show(command) => &mut command.place,
            Self::Status(command) => &mut command.place,
            Self::Check(command) => &mut command.place,
        }
    }

    fn run(&self) -> Result<Exit, Error> {
        match self {
            Self::Put(command) => command.run(),
            Self::Take(command) => command.run(),
            Self::Done(command) => command.run(),
            Self::Nack(command) => command.run(),
            Self::Requeue(command) => command.run(),
            Self::Cancel(command) => command.run(),
            Self::Work(command) => command.run(),
            Self::Notify(command) => command.run(),
            Self::Blob(command) => command.run(),
            Self::List(command) => command.run(),
            Self::Show(command) => command.run(),
            Self::Status(command) => command.run(),
            Self::Check(command) => command.run(),
        }
    }
}

#[derive(Debug, Args)]
struct Place {
    #[command(flatten)]
    common: Common,

    #[command(flatten)]
    blobs: args::Blobs,
}

impl Place {
    fn files(&self) -> QueueFiles {
        self.common.files(self.blobs.dir())
    }

    fn client(&self) -> Client {
        Client { files: self.files(), options: self.common.read_options() }
    }

    fn messages(&self) -> Messages {
        Messages::new(NAME, self.common.level())
    }

    /// Says what else was found while the queue was read.
    fn report(&self, pass: &Pass) {
        self.warn_without_queue(pass.has_queue);
        self.messages().warnings(&pass.findings);
        let Pass { lines, late_lines, queue_bytes, .. } = pass;
        let queue = self.common.queue.display();
        self.messages()
            .info(format_args!("{queue}: lines: {lines}, of which late: {late_lines}, bytes: {queue_bytes}"));
    }

    /// Without a queue there is nothing to compare a store with, and most likely another is meant.
    fn warn_without_queue(&self, has_queue: bool) {
        if !has_queue {
            let queue = self.common.queue.display();
            self.messages().warning(format_args!("{queue}: does not exist: if it should, correct the path"));
        }
    }
}

/// The rules for new records.
#[derive(Debug, Args)]
struct Rules {
    /// The kinds that there are
    #[arg(long, env = "HANDOFF_KINDS", value_name = "NAME,…", value_delimiter = ',', hide_default_value = true, value_parser = args::name,
        default_value = "classify,draft_reply,file_bug,request_human", help = "The kinds that there are [default: classify,draft_reply,file_bug,request_human]")]
    kinds: Vec<String>,

    /// The roles that there are [default: any]
    #[arg(long, env = "HANDOFF_ROLES", value_name = "NAME,…", value_delimiter = ',', value_parser = args::name)]
    roles: Vec<String>,

    /// Have a record wait for a person if it has more ancestors
    #[arg(long, env = "HANDOFF_MAX_HOPS", value_name = "NUMBER", default_value = "8", value_parser = args::hops)]
    max_hops: usize,

    #[command(flatten)]
    limit: args::Limit,
}

impl Rules {
    fn read(&self) -> store::put::Rules {
        let Self { kinds, roles, max_hops, limit } = self;
        store::put::Rules { kinds: kinds.clone(), roles: roles.clone(), max_hops: *max_hops, offload: limit.rule() }
    }
}

/// Who works on a record.
#[derive(Debug, Args)]
struct Holder {
    /// The process that works on the record, 0 for none [default: the nearest one above that leads a process group; to end it, any
    /// above]
    #[arg(long, env = "HANDOFF_OWNER", value_name = "PID")]
    owner: Option<u32>,
}

impl Holder {
    fn owner(&self) -> Result<Option<Owner>, Error> {
        match self.owner {
            None => process::caller().map(Some),
            Some(0) => Ok(None),
            Some(number) => process::with_number(number).map(Some),
        }
    }

    fn by(&self, is_forced: bool) -> Result<By, Error> {
        Ok(match self.owner {
            _ if is_forced => By::Force,
            None => By::Caller,
            Some(_) => By::Process(self.owner()?),
        })
    }
}

/// Tells what was found while a record was changed, which is an error if the change may not last.
fn tell_findings(messages: &Messages, findings: &[Finding], is_durable: bool) {
    if is_durable {
        messages.warnings(findings);
    } else {
        for finding in findings {
            messages.error(finding);
        }
    }
}

/// Tells people of these records, which have just begun to wait for one.
fn tell_people(channel: &Channel, place: &Place, ids: &[&str]) {
    channel.tell_if_configured(&place.client(), &mut Runner::new(), ids, &|| place.common.now(), &place.messages());
}

/// The text that an argument means: itself, standard input for `-`, the contents of a file for `@FILE`.
fn text(place: &Place, argument: &str) -> Result<String, Error> {
    let limit = place.common.read_options().max_line as u64;
    let path = match argument.strip_prefix('@') {
        None if argument != "-" => return Ok(argument.to_owned()),
        None => Path::new("standard input"),
        Some(name) => Path::new(name),
    };
    let unreadable = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::NotFound => Error::new(ErrorKind::Io, path, "does not exist").advise("correct the path"),
        _ => Error::io(path, "cannot be read", error),
    };
    let mut bytes = Vec::new();
    // What is named may be a pipe as well, as in @<(command).
    let input: Box<dyn Read> = match argument {
        "-" => Box::new(std::io::stdin().lock()),
        _ => Box::new(File::open(path).map_err(unreadable)?),
    };
    input.take(limit.saturating_add(1)).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > limit {
        let what = format!("has more than the {limit} bytes that a line may have (--max-line)");
        return Err(Error::new(ErrorKind::BadData, path, what));
    }
    String::from_utf8(bytes).map_err(|_| Error::new(ErrorKind::BadData, path, "is not UTF-8"))
}

#[derive(Debug, Args)]
struct Output {
    /// Print JSON
    #[arg(long, env = "HANDOFF_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
}

const EXIT_CODES: &str = "\
Options of every command, each with its variable:
      --queue <PATH>         The queue [env: HANDOFF_QUEUE] [default: /var/lib/agents/queue.jsonl]
      --lock <PATH>          The lock file [env: HANDOFF_LOCK] [default: <stem>.lock]
      --lock-timeout <TIME>  How long to wait for it [env: HANDOFF_LOCK_TIMEOUT] [default: 10s]
      --max-line <SIZE>      Longer lines are malformed [env: HANDOFF_MAX_LINE] [default: 64MiB]
  -v, --verbose              Say more [env: HANDOFF_VERBOSE]
  -q, --quiet                Say nothing but errors [env: HANDOFF_QUIET]
put, done, nack and work also take what notify takes, to tell people.

Exit codes:
   0  done
   1  there is nothing to take, no such record, or a check has found problems
   2  wrong usage
  65  what is given is not valid, a record is not in a state for that, an id is ambiguous, or a blob or the queue's ledger is damaged
  74  a file can't be read or written, or isn't there
  75  the lock is busy, or the queue was rewritten without it: try again";

/// Its command line.
pub(super) fn command() -> Command {
    Arguments::command()
}

/// Runs the tool.
#[must_use]
pub fn main() -> ExitCode {
    match parse() {
        Ok(arguments) => run(arguments).into(),
        Err(error) => args::report(NAME, &error).into(),
    }
}

fn parse() -> Result<Arguments, clap::Error> {
    let mut matches = args::parse(on_a_screen(Arguments::command()), std::env::args_os())?;
    let [verbose, quiet] = args::verbosity(Arguments::command(), args::innermost(&matches))?;
    let mut arguments = Arguments::from_arg_matches_mut(&mut matches)?;
    arguments.command.place_mut().common.prefer(verbose, quiet);
    Ok(arguments)
}

/// Has the help of each command fit on a screen: one line an option, without the variables' values, and without what all have in common.
fn on_a_screen(command: Command) -> Command {
    const TEMPLATE: &str = "{before-help}{usage-heading} {usage}\n\n{all-args}{after-help}";
    const COMMON: [&str; 5] = ["lock", "lock_timeout", "max_line", "verbose", "quiet"];
    const MAIL: [&str; 4] = ["mail_to", "mail_from", "sendmail", "notify"];
    let has_channel_of_its_own = command.get_name() == "notify";
    let is_common = |arg: &Arg| {
        let id = arg.get_id().as_str();
        COMMON.contains(&id) || MAIL.contains(&id) && !has_channel_of_its_own
    };
    let help = Arg::new("help").short('h').long("help").action(ArgAction::HelpShort).help("Print help");
    let about = command.get_long_about().or(command.get_about()).cloned().unwrap_or_default();
    let command = command
        .mut_args(|arg| if is_common(&arg) { arg.hide(true) } else { arg.hide_env_values(true) })
        .before_help(about)
        .help_template(TEMPLATE);
    command.disable_help_flag(true).arg(help).mut_subcommands(on_a_screen)
}

fn run(mut arguments: Arguments) -> Exit {
    let messages = arguments.command.place_mut().messages();
    arguments.command.run().unwrap_or_else(|error| {
        messages.error(&error);
        error.kind().into()
    })
}
