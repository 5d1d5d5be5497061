//! `handoff put`, `take`, `done`, `nack` and `requeue` killed before each system call, and each of these failing: every record is there
//! once, each operation took effect wholly or not at all, and whatever comes next works.
//!
//! `LONG=1` kills and fails before any call, not only those that change or lock something, and sweeps more pairs of kills.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::compact_crash::Writer;
use crate::exposition::Samples;
use crate::holdings::{held_in, pieces};
use crate::kill_and_inject::Call;
use crate::offload_crash::without_descriptor;
use crate::offload_settings::sha256;
use crate::offloaded::{is_temporary, references};
use crate::strace::{
    self, Tally, add, changes_something, context_of, deed, fail_with, kill_before, own_calls, place, stop_after,
    with_stops,
};
use crate::test_env::{
    Background, MountNamespace, NOW, Run, TestEnv, copy_of, counters, in_tests, names_in, python, record, run,
    shortened, tell, tool, under,
};

/// The present time of [`NOW`].
const NOW_SECONDS: u64 = 1_795_953_600;
/// When the records were put, and when those that run were taken.
const PUT: u64 = 1_795_950_000;
const TAKEN: u64 = PUT + 90;
/// What a writer has left or not yet completed.
pub(crate) const TORN: &str = r#"{"id":"x","ts":1"#;
const LATE_TORN: &str = r#"{"id":"late-torn","#;
/// What killed runs have left.
const LEFT: &str = ".queue.jsonl.999.abc.tmp";
const LARGE: usize = 9_000;

// What is done.

/// What is done to the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verb {
    Put,
    /// With a value that becomes a blob.
    PutLarge,
    Take,
    /// With a result that becomes a blob, spend, and a follow-up.
    Done,
    Nack,
    Requeue,
}

use Verb::{Done, Nack, Put, PutLarge, Requeue, Take};

/// Those that change a record that is there.
pub(crate) const OF_RECORDS: [Verb; 4] = [Take, Done, Nack, Requeue];
const ALL: [Verb; 6] = [Put, PutLarge, Take, Done, Nack, Requeue];

fn large(letter: char) -> String {
    letter.to_string().repeat(LARGE)
}

/// What stands in a line in place of a large text.
fn handle(text: &str) -> Value {
    let digest = sha256(text);
    json!({
        "artifact_ref": format!("blob/{}/{digest}", &digest[..2]), "bytes": text.len(), "sha256": digest,
        "media_type": "text/plain", "summary": &text[..1_024],
    })
}

/// This process as an owner, as FORMAT.md has it.
fn owner() -> Value {
    let read = |path: &str| fs::read_to_string(path).unwrap().trim().to_owned();
    let stat = read("/proc/self/stat");
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().collect();
    json!({
        "host": read("/proc/sys/kernel/hostname"), "boot_id": read("/proc/sys/kernel/random/boot_id"),
        "pid": std::process::id(), "start_time": fields[22 - 3].parse::<u64>().unwrap(),
        "pid_namespace": fs::metadata("/proc/self/ns/pid").unwrap().ino(),
    })
}

impl Verb {
    /// The record that it is done to: its line, without the `\n`. Only this role has one that is queued.
    fn subject(self) -> Option<String> {
        let (role, status, more) = match self {
            Put | PutLarge => return None,
            Take => ("researcher", "queued", r#","unknown":[1, 2.50]"#.to_owned()),
            Done => {
                let spend = r#"{"id":"s-1","model":"m","cost_usd":"0.25"}"#;
                ("writer", "running", format!(r#","started_ts":{TAKEN},"owner":{},"spend":{spend}"#, owner()))
            }
            Nack => ("patcher", "running", format!(r#","owner":{},"started_ts":{TAKEN}"#, owner())),
            Requeue => (
                "archivist",
                "dead",
                format!(r#","nacks":[{{"reason":"no"}}],"started_ts":{TAKEN},"finished_ts":{}"#, TAKEN + 7),
            ),
        };
        let id = self.id();
        Some(format!(
            r#"{{"id":"{id}","ts":{PUT},"kind":"classify","from":"triage","to":"{role}","payload":{{}},"status":"{status}"{more}}}"#
        ))
    }

    fn id(self) -> &'static str {
        match self {
            Put | PutLarge => "",
            Take => "to-take",
            Done => "to-finish",
            Nack => "to-refuse",
            Requeue => "to-requeue",
        }
    }

    /// What becomes of the record.
    fn changed(self) -> Option<Value> {
        let mut record: Value = serde_json::from_str(&self.subject()?).unwrap();
        let mut set = |name: &str, value: Value| record[name] = value;
        match self {
            Put | PutLarge => {}
            Take => {
                set("status", json!("running"));
                set("started_ts", json!(NOW_SECONDS));
                set("owner", owner());
            }
            Done => {
                set("status", json!("done"));
                set("finished_ts", json!(NOW_SECONDS));
                set("owner", Value::Null);
                set("result", json!({ "text": handle(&large('r')) }));
                let old = json!({ "id": "s-1", "model": "m", "cost_usd": "0.25" });
                set("spend", json!([old, { "id": "s-2", "model": "m", "cost_usd": "0.5" }]));
            }
            Nack => {
                set("status", json!("queued"));
                set("started_ts", Value::Null);
                set("owner", Value::Null);
                let (by, reason) = ("patcher", "no ticket");
                set(
                    "nacks",
                    json!([{ "ts": NOW_SECONDS, "by": by, "reason": reason, "error_class": "missing", "retryable": true }]),
                );
            }
            Requeue => {
                for name in ["started_ts", "finished_ts"] {
                    set(name, Value::Null);
                }
                set("status", json!("queued"));
            }
        }
        Some(without_null(record))
    }

    /// What is put, but for its id.
    fn added(self) -> Option<Value> {
        let (kind, from, to, payload) = match self {
            Put => ("file_bug", "triage", "reader", json!({ "n": 1 })),
            PutLarge => ("file_bug", "triage", "listener", json!({ "text": handle(&large('p')) })),
            Done => ("draft_reply", "writer", "reviewer", json!({ "of": "to-finish" })),
            Take | Nack | Requeue => return None,
        };
        let mut record = json!({
            "ts": NOW_SECONDS, "kind": kind, "from": from, "to": to, "payload": payload, "status": "queued",
            "protocol_version": 2,
        });
        if self == Done {
            record["parent"] = json!("to-finish");
        } else {
            record["correlation_id"] = json!("c-1");
        }
        Some(record)
    }

    /// The command, which says only what is wrong.
    pub(crate) fn command(self, env: &TestEnv, queue: &Path) -> Command {
        let pid = std::process::id().to_string();
        let mut command = env.bare_handoff();
        let mut add = |arguments: &[&str]| {
            command.args(arguments);
        };
        let put = ["put", "--kind", "file_bug", "--from", "triage", "--correlation-id", "c-1"];
        match self {
            Put => {
                add(&put);
                add(&["--to", "reader", "--payload", r#"{ "n": 1 }"#]);
            }
            PutLarge => {
                add(&put);
                add(&["--to", "listener", "--payload", &json!({ "text": large('p') }).to_string()]);
            }
            Take => add(&["take", "--role", "researcher", "--owner", &pid]),
            Done => {
                add(&["done", "to-finish", "--owner", &pid, "--result", &json!({ "text": large('r') }).to_string()]);
                add(&["--spend", r#"{"id":"s-2","model":"m","cost_usd":"0.5"}"#, "--followup"]);
                add(&[r#"{"kind":"draft_reply","to":"reviewer","payload":{"of":"to-finish"}}"#]);
            }
            Nack => add(&["nack", "to-refuse", "--owner", &pid, "--reason", "no ticket", "--class", "missing"]),
            Requeue => add(&["requeue", "to-requeue"]),
        }
        command.args(["-q", "--now", NOW, "--queue"]).arg(queue);
        command
    }

    fn run(self, env: &TestEnv) -> Run {
        run(&mut self.command(env, Path::new("queue.jsonl")))
    }

    /// Its exit code if it has been done before.
    fn code_of_second(self) -> i32 {
        match self {
            Put | PutLarge => 0,
            Take => 1,
            Done | Nack | Requeue => 65,
        }
    }

    /// Whether it appends a line, so that what dead runs have left stays.
    fn appends(self) -> bool {
        matches!(self, Put | PutLarge)
    }
}

/// A member that is `null` is as good as none.
fn without_null(mut record: Value) -> Value {
    if let Some(members) = record.as_object_mut() {
        members.retain(|_, value| !value.is_null());
    }
    record
}

// What is there.

/// Which operations have taken effect, each wholly.
pub(crate) type Effects = BTreeSet<Verb>;

/// Says which operations have taken effect by the lines that there are, which must be all of `others`, once each, and nothing but what the
/// operations, which are done to the records of `subjects`, have changed or added; or says what is wrong.
pub(crate) fn judge(directory: &Path, subjects: &[Verb], others: &[Vec<u8>]) -> Result<Effects, String> {
    let is_there = directory.join("queue.jsonl").exists();
    let mut rest = if is_there || !others.is_empty() { held_in(directory)? } else { Vec::new() };
    let text = |line: &[u8]| shortened(&String::from_utf8_lossy(line));
    for other in others {
        let index = rest.iter().position(|line| line == other);
        rest.swap_remove(index.ok_or_else(|| format!("lost: {}", text(other)))?);
    }
    let mut records = Vec::new();
    for line in &rest {
        let record: Value =
            serde_json::from_slice(line).map_err(|_| format!("too much, and no record: {}", text(line)))?;
        records.push(without_null(record));
        // Never a line without its blob.
        for name in references(line) {
            let path = directory.join("blob").join(&name[..2]).join(&name);
            let blob = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
            if sha256(&blob) != name {
                return Err(format!("{} has {} other bytes", path.display(), blob.len()));
            }
        }
    }
    let mut count = |is: &dyn Fn(&Value) -> bool| {
        let before = records.len();
        records.retain(|record| !is(record));
        before - records.len()
    };
    let mut effects = Effects::new();
    for verb in ALL {
        let is_subject = subjects.contains(&verb);
        if !is_subject && !verb.appends() {
            continue;
        }
        let old: Option<Value> = verb.subject().map(|line| without_null(serde_json::from_str(&line).unwrap()));
        let as_it_was = count(&|record| Some(record) == old.as_ref());
        let changed = verb.changed();
        let as_it_becomes = count(&|record| Some(record) == changed.as_ref());
        let new = verb.added();
        let added = count(&|record| {
            let mut record = record.clone();
            let id = record.as_object_mut().and_then(|members| members.remove("id"));
            id.is_some_and(|id| id.as_str().is_some_and(|id| id.len() == 36)) && Some(&record) == new.as_ref()
        });
        let (subjects, new) = (usize::from(old.is_some()), usize::from(new.is_some()));
        match (as_it_was, as_it_becomes, added) {
            found if found == (subjects, 0, 0) => {}
            found if found == (0, subjects, new) => drop(effects.insert(verb)),
            found => {
                let lines: Vec<String> = rest.iter().map(|line| text(line)).collect();
                return Err(format!("{verb:?} is there {found:?} times (as it was, as it becomes, new) in {lines:#?}"));
            }
        }
    }
    match records.first() {
        Some(foreign) => Err(format!("too much, or changed: {foreign}")),
        None => Ok(effects),
    }
}

/// A directory to be copied.
struct Scene {
    env: TestEnv,
    /// Which operations have their records in it.
    subjects: Vec<Verb>,
    /// All other lines, and unterminated ends.
    others: Vec<Vec<u8>>,
    counters: Samples,
}

impl Scene {
    fn of(env: TestEnv, subjects: &[Verb], others: &[&str]) -> Self {
        let others = others.iter().flat_map(|text| pieces(text.as_bytes())).collect();
        let counters = counters(env.samples());
        let scene = Self { env, subjects: subjects.to_vec(), others, counters };
        assert_eq!(scene.judge(&scene.env, "at first"), Effects::new());
        scene
    }

    /// Neither a queue nor a lock.
    fn empty() -> Self {
        Self::of(TestEnv::new(), &[], &[])
    }

    /// A queue with one record, or two if that one is to be changed, and a lock.
    fn small(verb: Verb) -> Self {
        let (env, stays) = (TestEnv::new(), record("stays", "reader", "done"));
        let subjects: Vec<Verb> = Some(verb).into_iter().filter(|verb| !verb.appends()).collect();
        env.write("queue.lock", "");
        env.write("queue.jsonl", lines(&subjects) + &stays);
        Self::of(env, &subjects, &[&stays])
    }

    /// The same with a line that somebody has begun.
    fn torn(verb: Verb) -> Self {
        let (env, stays) = (TestEnv::new(), record("stays", "reader", "done"));
        let subjects: Vec<Verb> = Some(verb).into_iter().filter(|verb| !verb.appends()).collect();
        env.write("queue.jsonl", stays.clone() + &lines(&subjects) + TORN);
        Self::of(env, &subjects, &[&stays, TORN])
    }

    /// A queue with a ledger, records for all operations, lines that are no records, an earlier generation with late lines, one of which
    /// was never completed, one that is drained, and what killed runs leave.
    fn lived_in() -> Self {
        let env = TestEnv::new();
        let taken_over = record("taken-over", "reader", "done");
        let late = record("late", "reader", "queued") + "late, and not JSON\n";
        env.write("queue.gen.3", taken_over.clone() + &late + LATE_TORN);
        env.write("queue.gen.4", "drained");
        env.write(LEFT, "never completed");
        let cell = r#"{"role":"reader","kind":"classify","records":3,"done":3,"nacks":1,"spend_usd":"0.1"}"#;
        let ledger = format!(
            r#"{{"id":"ledger","ts":1764400000,"kind":"ledger","from":"handoff","to":"","payload":{{"version":1,"totals":{{"cells":[{cell}],"reclaimed_bytes":300}},"generations":{{"3":{},"4":7}}}},"status":"ledger"}}"#,
            taken_over.len()
        ) + "\n";
        let bad = "not JSON\n\n{\"a\":1}{\"b\":2}\n";
        let many: String = (0..5).map(|number| record(&format!("r-{number}"), "reader", "done")).collect();
        env.write("queue.jsonl", taken_over.clone() + &lines(&OF_RECORDS) + bad + &ledger + &many);
        fs::hard_link(env.path("queue.jsonl"), env.path("queue.gen.5")).unwrap();
        Self::of(env, &OF_RECORDS, &[&taken_over, bad, &many, &late, LATE_TORN])
    }

    /// Those for an operation: all of them with `LONG`, otherwise without those that another operation like it goes through.
    fn all(verb: Verb) -> Vec<Self> {
        let (small, torn) = (|| Self::small(verb), || Self::torn(verb));
        match verb {
            Put => vec![small(), torn(), Self::lived_in(), Self::empty()],
            PutLarge if is_long() => vec![small(), torn(), Self::lived_in(), Self::empty()],
            PutLarge => vec![Self::empty(), torn()],
            Take => vec![small(), torn(), Self::lived_in()],
            _ if is_long() => vec![small(), torn(), Self::lived_in()],
            Done | Nack | Requeue => vec![Self::lived_in()],
        }
    }

    fn copy(&self) -> TestEnv {
        copy_of(&self.env)
    }

    fn judge(&self, env: &TestEnv, context: &str) -> Effects {
        let effects =
            judge(&env.path(""), &self.subjects, &self.others).unwrap_or_else(|problem| panic!("{context}: {problem}"));
        let now = counters(env.samples());
        for (series, before) in &self.counters {
            assert!(
                now.get(series).is_some_and(|now| now >= before),
                "{context}: {series} fell from {before}: {now:?}"
            );
        }
        effects
    }

    /// Asserts that whatever comes next works: one operation, told by a number, and then compaction, until nothing is left to do.
    fn assert_goes_on(&self, env: &TestEnv, mut effects: Effects, first: Verb, number: usize, context: &str) {
        let mut next: Vec<Verb> = vec![first, Put];
        next.extend(&self.subjects);
        let next = next[number % next.len()];
        let context = format!("{context}; then {next:?}");
        let has_been_done = effects.contains(&next);
        let done = next.run(env);
        let expected = if has_been_done { next.code_of_second() } else { 0 };
        assert_eq!(done.code, Some(expected), "{context}: {}", done.stderr);
        effects.insert(next);
        assert_eq!(self.judge(env, &context), effects, "{context}");
        if !next.appends() && self.others.iter().all(|line| line != TORN.as_bytes()) {
            assert_eq!(temporary(&env.path("")), Vec::<String>::new(), "{context}: left behind");
        }
        if next.appends() {
            let id = String::from_utf8(done.stdout).unwrap();
            let queue = fs::read_to_string(env.path("queue.jsonl")).unwrap_or_default();
            let line = format!("{{\"id\":\"{}\",", id.trim());
            assert_eq!(queue.lines().filter(|text| text.starts_with(&line)).count(), 1, "{context}: {id}");
        }
        for _ in 0..4 {
            let run = run(env.compact().arg("-q"));
            assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{context}: compaction");
        }
        // Nobody but who prunes looks for what dead runs have left in the store.
        if env.path("blob").exists() {
            let run = run(env.offload_now().arg("-q"));
            assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{context}: offload");
            assert_eq!(temporary(&env.path("blob")), Vec::<String>::new(), "{context}: left behind");
        }
        let context = format!("{context}: at last");
        assert_eq!(self.judge(env, &context), effects, "{context}");
        let names = names_in(&env.path(""));
        let names: Vec<&str> = names.iter().map(String::as_str).filter(|name| *name != "blob").collect();
        assert_eq!(names, ["queue.jsonl", "queue.lock", "textfile"], "{context}");
    }

    /// The calls of an undisturbed operation.
    fn calls(&self, verb: Verb) -> Vec<Call> {
        let env = self.copy();
        let (run, trace) = traced(&env, verb, &["-y"]);
        assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{verb:?}");
        assert_eq!(self.judge(&env, "undisturbed"), Effects::from([verb]));
        own_calls(&trace)
    }

    /// Kills an operation before a call.
    fn kill_before(&self, env: &TestEnv, verb: Verb, call: &Call, context: &str) -> Effects {
        let (killed, _) = traced(env, verb, &["-e", &kill_before(call)]);
        assert_eq!((killed.code, killed.signal), (None, Some(9)), "not {context}: {}", killed.stderr);
        self.judge(env, context)
    }
}

pub(crate) fn lines(subjects: &[Verb]) -> String {
    subjects.iter().filter_map(|verb| verb.subject()).map(|line| line + "\n").collect()
}

fn traced(env: &TestEnv, verb: Verb, arguments: &[&str]) -> (Run, String) {
    strace::traced(env, &verb.command(env, Path::new("queue.jsonl")), arguments)
}

/// The temporary files that there are in a directory.
fn temporary(directory: &Path) -> Vec<String> {
    let names = if directory.exists() { names_in(directory) } else { Vec::new() };
    names.into_iter().filter(|name| is_temporary(name)).collect()
}

fn is_long() -> bool {
    std::env::var_os("LONG").is_some()
}

/// Whether a call is one that is swept in any case.
fn matters(call: &Call) -> bool {
    changes_something(call) || call.name == "flock" || call.line.contains("F_SETLEASE") || is_long()
}

// Kills.

fn kill_everywhere(verb: Verb) {
    let (mut outcomes, mut number) = (Tally::new(), 0);
    for scene in Scene::all(verb) {
        for call in scene.calls(verb).iter().filter(|call| matters(call)) {
            let context = context_of(&format!("{verb:?} killed before"), call);
            let env = scene.copy();
            let effects = scene.kill_before(&env, verb, call, &context);
            add(&mut outcomes, if effects.is_empty() { "not at all" } else { "wholly" });
            assert!(effects.iter().all(|effect| *effect == verb), "{context}: {effects:?}");
            scene.assert_goes_on(&env, effects, verb, number, &context);
            number += 1;
        }
    }
    tell(&format!("{verb:?} took effect {outcomes:?}"));
    assert!(outcomes["not at all"] > 15 && outcomes["wholly"] > 2, "{outcomes:?}");
}

#[test]
fn put_that_is_killed_before_any_call_has_put_its_record_once_or_not() {
    kill_everywhere(Put);
}

#[test]
fn put_of_a_large_value_that_is_killed_before_any_call_leaves_no_line_without_its_blob() {
    kill_everywhere(PutLarge);
}

#[test]
fn take_that_is_killed_before_any_call_has_taken_the_record_or_not() {
    kill_everywhere(Take);
}

#[test]
fn done_that_is_killed_before_any_call_has_written_everything_or_nothing() {
    kill_everywhere(Done);
}

#[test]
fn nack_that_is_killed_before_any_call_has_refused_the_record_or_not() {
    kill_everywhere(Nack);
}

#[test]
fn requeue_that_is_killed_before_any_call_has_queued_the_record_or_not() {
    kill_everywhere(Requeue);
}

/// Kills one operation, and the next one too; some of all pairs, or all with `LONG`.
#[test]
fn killed_twice_it_is_as_whole_as_killed_once() {
    let step = if is_long() { 1 } else { 5 };
    let (mut outcomes, mut number) = (Tally::new(), 0);
    let pairs = [(Put, Put), (Put, Take), (Take, Put), (Take, Done), (Done, Done), (Nack, Requeue)];
    for (first, second) in pairs {
        let scene = Scene::lived_in();
        for (shift, call) in scene.calls(first).iter().filter(|call| changes_something(call)).enumerate().step_by(step)
        {
            let context = context_of(&format!("{first:?} killed before"), call);
            let killed = scene.copy();
            let before = scene.kill_before(&killed, first, call, &context);
            let (_, trace) = traced(&copy_of(&killed), second, &["-y"]);
            let calls = own_calls(&trace);
            let changing = calls.iter().filter(|call| changes_something(call));
            for call in changing.skip(shift % step).step_by(step * 2) {
                let context = format!("{context}; then {}", context_of(&format!("{second:?} before"), call));
                let env = copy_of(&killed);
                let effects = scene.kill_before(&env, second, call, &context);
                assert!(effects.is_superset(&before), "{context}: from {before:?} to {effects:?}");
                assert!(
                    effects.iter().all(|effect| before.contains(effect) || *effect == second),
                    "{context}: {effects:?}"
                );
                add(&mut outcomes, &format!("{} then {}", before.len(), effects.len()));
                scene.assert_goes_on(&env, effects, second, number, &context);
                number += 1;
            }
        }
    }
    tell(&format!("{number} pairs: {outcomes:?}"));
    assert!(number > 30 && outcomes.len() > 2, "{number}: {outcomes:?}");
}

// Failures.

/// The errors that a call is made to fail with: one of two in turn, or both with `LONG`.
fn errors_for(call: &Call, number: usize) -> Vec<&'static str> {
    match call.name.as_str() {
        // The kernel closes a file whatever it returns.
        "close" => Vec::new(),
        "flock" => vec![["EIO", "ENOLCK"][number % 2]],
        "fcntl" => vec!["EAGAIN"],
        _ if is_long() => vec!["EIO", "ENOSPC"],
        _ => vec![["EIO", "ENOSPC"][number % 2]],
    }
}

/// Whether an operation may do without a call: what dead runs left can be removed later, a generation that can't be proven drained stays.
fn can_be_done_without(call: &Call) -> bool {
    call.line.contains(LEFT)
        || call.line.contains("queue.gen.") && call.line.contains("AT_SYMLINK_NOFOLLOW")
        || call.name == "statx" && (call.line.contains(" \"queue.jsonl\"") || call.line.contains("AT_SYMLINK_NOFOLLOW"))
        // Room can't be reserved everywhere.
        || ["fcntl", "newfstatat", "getdents64", "fadvise64", "prlimit64"].contains(&call.name.as_str())
        || call.name == "openat" && call.line.contains("O_DIRECTORY")
        || call.name == "write" && call.line.starts_with("write(2")
}

/// Lets a call fail, which may be `needless`, and asserts that the operation says so, and took effect wholly or not at all.
fn assert_fails_well(
    (scene, verb): (&Scene, Verb),
    call: &Call,
    error: &str,
    needless: bool,
    number: usize,
) -> &'static str {
    let context = context_of(&format!("{verb:?}: {error} for"), call);
    let env = scene.copy();
    let (run, trace) = traced(&env, verb, &["-y", "-e", &fail_with(error, call)]);
    let injected =
        trace.lines().position(|line| line.contains("(INJECTED)") && line.contains(&format!(" {}(", call.name)));
    let injected = injected.unwrap_or_else(|| panic!("not {context}"));
    let effects = scene.judge(&env, &context);
    assert!(effects.iter().all(|effect| *effect == verb), "{context}: {effects:?}");
    let has_effect = !effects.is_empty();
    let outcome = match run.code {
        Some(0) => {
            assert!(has_effect, "{context}: it says that all is well");
            assert!(error == "EINTR" || needless || can_be_done_without(call), "{context}: it says that all is well");
            "done all the same"
        }
        code => {
            assert!(code == Some(74) || code == Some(75), "{context}: {code:?}: {}", run.stderr);
            let is_message = |line: &str| line.starts_with("handoff: ") && line.len() > 30;
            assert!(!run.stderr.is_empty() && run.stderr.lines().all(is_message), "{context}: {}", run.stderr);
            if has_effect {
                let says = ["may be in the queue", "has been replaced", "all the same"];
                assert!(says.iter().any(|what| run.stderr.contains(what)), "{context}: {}", run.stderr);
            }
            if has_effect { "failed, but done" } else { "failed" }
        }
    };
    // One that was interrupted has not failed.
    if call.name.contains("sync") && error != "EINTR" {
        let file = |line: &str| line.split_once('<').and_then(|(_, rest)| Some(rest.split_once('>')?.0.to_owned()));
        let mut after = trace.lines().skip(injected);
        let failed = file(after.next().unwrap());
        let again = after.find(|line| line.contains("sync(") && file(line) == failed);
        assert_eq!(again, None, "{context}: flushed again");
    }
    let may_be_left = |name: &String| name == LEFT || call.name.starts_with("unlink");
    let left = [temporary(&env.path("")), temporary(&env.path("blob"))].concat();
    let left: Vec<String> = left.into_iter().filter(|name| !may_be_left(name)).collect();
    assert_eq!(left, Vec::<String>::new(), "{context}: left behind");
    scene.assert_goes_on(&env, effects, verb, number, &context);
    outcome
}

fn fail_everywhere(verb: Verb) {
    let (mut outcomes, mut number) = (Tally::new(), 0);
    for scene in Scene::all(verb) {
        let calls = scene.calls(verb);
        let commit = calls.iter().rposition(|call| call.name == "renameat" && call.line.contains("/queue.jsonl\") ="));
        for (index, call) in calls.iter().enumerate().filter(|(_, call)| matters(call)) {
            number += 1;
            for error in errors_for(call, number) {
                // Whether lines have come late is not what was asked for.
                let needless = commit.is_some_and(|commit| index > commit) && !call.name.contains("sync");
                add(&mut outcomes, assert_fails_well((&scene, verb), call, error, needless, number));
            }
        }
    }
    tell(&format!("{verb:?} {outcomes:?}"));
    assert!(outcomes["failed"] > 10 && outcomes["failed, but done"] > 0, "{outcomes:?}");
}

#[test]
fn whatever_fails_put_says_so_and_the_record_is_there_once_or_not() {
    fail_everywhere(Put);
}

#[test]
fn whatever_fails_put_of_a_large_value_says_so_and_no_line_lacks_its_blob() {
    fail_everywhere(PutLarge);
}

#[test]
fn whatever_fails_take_says_so_and_the_record_is_taken_or_not() {
    fail_everywhere(Take);
}

#[test]
fn whatever_fails_done_says_so_and_everything_is_written_or_nothing() {
    fail_everywhere(Done);
}

#[test]
fn whatever_fails_nack_and_requeue_say_so_and_the_record_is_changed_or_not() {
    fail_everywhere(Nack);
    fail_everywhere(Requeue);
}

#[test]
fn whatever_a_signal_interrupts_is_tried_again_or_refused() {
    let mut outcomes = Tally::new();
    for verb in [Put, Take, Done] {
        let scene = Scene::lived_in();
        let names = ["openat", "read", "pread64", "write", "pwrite64", "fsync", "fdatasync", "flock", "fallocate"];
        let calls = scene.calls(verb);
        let can_be = |call: &&Call| names.contains(&call.name.as_str()) && !call.line.contains("O_DIRECTORY");
        let step = if is_long() { 1 } else { 4 };
        for (number, call) in calls.iter().filter(can_be).enumerate().step_by(step) {
            add(&mut outcomes, assert_fails_well((&scene, verb), call, "EINTR", false, number));
        }
    }
    tell(&format!("interrupted: {outcomes:?}"));
    assert!(outcomes["done all the same"] > 15, "{outcomes:?}");
}

// Writers without the lock, and others, at chosen moments.

/// The record that put prints the id of is there once, as a line of its own, in the queue itself.
fn assert_is_put(env: &TestEnv, run: &Run, context: &str) {
    assert_eq!(run.code, Some(0), "{context}: {}", run.stderr);
    let id = String::from_utf8(run.stdout.clone()).unwrap();
    let queue = pieces(&fs::read(env.path("queue.jsonl")).unwrap());
    let is_it = |line: &&Vec<u8>| {
        // FORMAT.md skips a byte order mark.
        let line = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(line);
        let record: Option<Value> = serde_json::from_slice(line).ok();
        record.is_some_and(|record| record["id"] == id.trim())
    };
    assert_eq!(queue.iter().filter(is_it).count(), 1, "{context}: {id}");
}

/// How often a line is in the queue itself.
fn times(env: &TestEnv, line: &str) -> usize {
    let queue = fs::read(env.path("queue.jsonl")).unwrap();
    pieces(&queue).iter().filter(|is| is.as_slice() == line.trim_end().as_bytes()).count()
}

/// A queue with one record, and who has it open.
fn with_writer() -> (TestEnv, Writer) {
    let env = TestEnv::new();
    env.write("queue.lock", "");
    env.write("queue.jsonl", record("stays", "reader", "done"));
    let writer = Writer::with_queue_open(&env);
    (env, writer)
}

/// Runs put, stopped after each call of a name whose number is told, with `meanwhile` at each stop.
fn put_stopped_after(env: &TestEnv, name: &str, number: &str, meanwhile: impl FnMut(usize)) -> (Run, usize) {
    let put = Put.command(env, Path::new("queue.jsonl"));
    let (run, _, stops) = with_stops(env, &put, &["-e", &stop_after(name, number)], meanwhile);
    (run, stops)
}

#[test]
fn a_line_that_somebody_has_begun_is_neither_glued_to_nor_lost_whoever_rewrites_next() {
    let line = record("slow", "reader", "done");
    let (beginning, end) = line.split_at(40);
    for next in [Put, Take, Done, Requeue] {
        let (env, mut writer) = with_writer();
        let subjects: Vec<Verb> = [next].into_iter().filter(|verb| !verb.appends()).collect();
        writer.write(&lines(&subjects));
        writer.write(beginning);
        let context = format!("{next:?}");
        let others = [record("stays", "reader", "done").trim_end().as_bytes().to_vec(), beginning.into()];
        assert_is_put(&env, &Put.run(&env), &context);
        assert_eq!(judge(&env.path(""), &subjects, &others), Ok(Effects::from([Put])), "{context}");
        assert!(fs::read(env.path("queue.jsonl")).unwrap().ends_with(b"\n"), "{context}");

        writer.write(end);
        let done = if next == Put {
            // Appending looks at no generation, but this one is not done by appending either.
            writer.write("");
            run(env.compact().arg("-q"))
        } else {
            next.run(&env)
        };
        assert_eq!(done.code, Some(0), "{context}: {}", done.stderr);
        assert_eq!(times(&env, &line), 1, "{context}: the other's line");
        writer.step("close");
        let others = [others[0].clone(), line.trim_end().into()];
        for _ in 0..3 {
            run(env.compact().arg("-q"));
        }
        assert_eq!(judge(&env.path(""), &subjects, &others), Ok(Effects::from([Put, next])), "{context}");
        assert_eq!(names_in(&env.path("")), expected_names(&env), "{context}");
    }
}

fn expected_names(env: &TestEnv) -> Vec<&'static str> {
    let names = ["blob", "queue.jsonl", "queue.lock", "textfile"];
    names.into_iter().filter(|name| *name != "blob" || env.path("blob").exists()).collect()
}

#[test]
fn what_a_dead_writer_has_begun_becomes_a_line_of_its_own() {
    let env = TestEnv::new();
    let stays = record("stays", "reader", "done");
    env.write("queue.jsonl", stays.clone() + TORN);
    assert_is_put(&env, &Put.run(&env), "put");
    let others = [stays.trim_end().as_bytes().to_vec(), TORN.into()];
    assert_eq!(judge(&env.path(""), &[], &others), Ok(Effects::from([Put])));
    assert_eq!(times(&env, TORN), 0);
    let taken = run(env.bare_handoff().args(["take", "--role", "nobody", "-q", "--queue", "queue.jsonl"]));
    assert_eq!(taken.code, Some(1), "{}", taken.stderr);
    assert_eq!(times(&env, TORN), 1);
    assert_eq!(judge(&env.path(""), &[], &others), Ok(Effects::from([Put])));
}

/// Beginnings of lines that another writer may write at the very moment that we do. The last ones make no line of what follows on them.
const BEGINNINGS: [&str; 5] = [r#"{"id":"slow","ts":17"#, r#"{"id":"whole but for its end"}"#, " ", "\u{feff}", "\r"];

#[test]
fn a_line_begun_at_the_very_moment_of_ours_does_not_swallow_it() {
    for beginning in BEGINNINGS {
        // Between our look at the end of the queue and our write.
        let (env, mut writer) = with_writer();
        let (run, stops) = put_stopped_after(&env, "fallocate", "1", |_| writer.write(beginning));
        assert_eq!(stops, 1, "{}", run.stderr);
        let context = format!("begun with {beginning:?}");
        assert_is_put(&env, &run, &context);
        // What the other writes after that is a line too.
        writer.write("the rest\n");
        assert_eq!(times(&env, "the rest"), 1, "{context}");
        writer.step("close");
        assert_is_put(&env, &Put.run(&env), &format!("{context}: again"));
        let queue = fs::read(env.path("queue.jsonl")).unwrap();
        assert!(queue.windows(beginning.len()).any(|bytes| bytes == beginning.as_bytes()), "{context}: lost");
        assert!(queue.ends_with(b"\n"), "{context}");
    }
}

#[test]
fn lines_that_are_begun_again_and_again_keep_put_from_its_end_for_a_while_only() {
    for (times_begun, expected) in [(3, 0), (usize::MAX, 75)] {
        let (env, mut writer) = with_writer();
        let (run, stops) = put_stopped_after(&env, "fallocate", "1+", |stop| {
            if stop < times_begun {
                writer.write(r#"{"id":"slow","#);
            }
        });
        assert_eq!(run.code, Some(expected), "{}", run.stderr);
        assert!(stops < 20, "{stops}");
        if expected == 0 {
            assert_is_put(&env, &run, "in the end");
        }
        writer.step("close");
        assert_is_put(&env, &Put.run(&env), "again");
    }
}

#[test]
fn a_whole_line_that_somebody_appends_at_the_same_moment_stays_a_line() {
    let line = record("other", "reader", "done");
    for (name, number) in [("openat", "1+"), ("fallocate", "1"), ("write", "1"), ("fsync", "1")] {
        let (env, mut writer) = with_writer();
        let mut written = 0;
        let (run, stops) = put_stopped_after(&env, name, number, |_| {
            writer.write(&line);
            written += 1;
        });
        assert!(stops > 0, "no {name}: {}", run.stderr);
        assert_is_put(&env, &run, name);
        assert_eq!(times(&env, &line), written, "{name}");
    }
}

#[test]
fn a_queue_that_somebody_rewrites_in_place_while_a_line_is_appended_is_told() {
    for name in ["write", "fsync"] {
        let (env, _writer) = with_writer();
        let (run, stops) = put_stopped_after(&env, name, "1", |_| {
            // Without the lock, as nobody should: of the same size, or another file.
            let size = fs::metadata(env.path("queue.jsonl")).unwrap().len();
            let other = "x".repeat(usize::try_from(size).unwrap() - 1) + "\n";
            let path = if name == "write" { "queue.jsonl" } else { "other" };
            env.write(path, other);
            fs::rename(env.path(path), env.path("queue.jsonl")).unwrap();
        });
        assert_eq!((run.code, stops), (Some(74), 1), "after {name}: {}", run.stderr);
        assert!(run.stderr.contains("the new line may be in the queue or not"), "{}", run.stderr);
    }
}

#[test]
fn nobody_is_beside_an_operation_whatever_it_does() {
    let scene = Scene::lived_in();
    for mode in ["shared", "exclusive"] {
        for verb in ALL {
            let mut holder = scene.env.command(python());
            holder.arg(in_tests("workers/hold_lock.py")).args(["queue.lock", mode]);
            let (holder, _) = Background::spawn_and_wait_for_line(&mut holder);
            let busy = run(verb.command(&scene.env, Path::new("queue.jsonl")).args(["--lock-timeout", "100ms"]));
            assert_eq!(busy.code, Some(75), "{verb:?} beside a {mode} lock: {}", busy.stderr);
            drop(holder);
            assert_eq!(scene.judge(&scene.env, "busy"), Effects::new(), "{verb:?} beside a {mode} lock");
        }
    }
}

// The order in which things get to the disk.

#[test]
fn a_line_is_read_back_and_on_the_disk_before_put_says_so_and_nobody_is_beside_it() {
    let scene = Scene::small(Put);
    let deeds_of = |verb: Verb| {
        let env = scene.copy();
        let directory = fs::canonicalize(env.path("")).unwrap();
        let (run, trace) = traced(&env, verb, &["-y"]);
        assert_eq!(run.code, Some(0), "{}", run.stderr);
        let store = directory.join("blob");
        let mut calls = own_calls(&trace);
        for call in &mut calls {
            call.line = without_descriptor(&call.line, store.to_str().unwrap());
        }
        let deeds: Vec<String> = calls.iter().map(|call| deed(call, directory.to_str().unwrap())).collect();
        (calls, deeds)
    };
    let (_, deeds) = deeds_of(Put);
    let (locked, written) = ("flock(LOCK_EX) queue.lock", "write queue.jsonl");
    let mut at = 0;
    for next in [locked, written, "pread64 queue.jsonl", "fsync queue.jsonl", "fsync DIR", "close queue.lock", "write "]
    {
        at += place(&deeds[at..], next);
    }
    // A blob is on the disk before its line is written, and nobody prunes the store until that is on the disk.
    let (calls, deeds) = deeds_of(PutLarge);
    let shared = place(&deeds, "flock(LOCK_SH) blob");
    let descriptor = calls[shared].line.split(['(', '<']).nth(1).unwrap();
    let close = format!("close({descriptor}<");
    let closed = shared + calls[shared..].iter().position(|call| call.line.starts_with(&close)).unwrap();
    let mut at = shared;
    for next in ["renameat blob/.blob.", "fsync blob", locked, written, "fsync queue.jsonl"] {
        at += place(&deeds[at..], next);
    }
    assert!(at < closed, "{deeds:#?}");
}

// No room.

/// A queue on a small file system, and room for `free` bytes more, or a page less.
fn on_a_full_disk(env: &TestEnv, queue: &str) -> MountNamespace {
    fs::create_dir(env.path("agents")).unwrap();
    let mounts = MountNamespace::new(env, "mount -t tmpfs -o size=64k,mode=755 tmpfs agents");
    fs::write(mounts.path("agents/queue.jsonl"), queue).unwrap();
    fs::write(mounts.path("agents/queue.lock"), "").unwrap();
    let filled = run(&mut mounts.inside(env, env.command("sh").args(["-c", "cat /dev/zero >agents/fill"])));
    assert_ne!(filled.code, Some(0), "it is not full");
    mounts
}

/// Lines of all subjects, and as many more as it takes for the queue to end so many bytes before the end of a page.
fn queue_with_room(room: usize) -> (String, Vec<Vec<u8>>) {
    const PAGE: usize = 4_096;
    let (start, filler) = (lines(&OF_RECORDS), |length| record(&"f".repeat(length), "reader", "done"));
    let least = start.len() + filler(1).len();
    let line = filler(1 + (2 * PAGE - room - least) % PAGE);
    assert_eq!((start.len() + line.len() + room) % PAGE, 0);
    let others = vec![line.trim_end().as_bytes().to_vec()];
    (start + &line, others)
}

#[test]
fn on_a_full_disk_the_queue_is_left_as_it_was_and_it_works_when_there_is_room() {
    for (room, verbs) in [(1, &ALL[..]), (50, &[Put][..])] {
        for verb in verbs {
            let env = TestEnv::new();
            let (queue, others) = queue_with_room(room);
            let mounts = on_a_full_disk(&env, &queue);
            let agents = mounts.path("agents");
            let act = || run(&mut mounts.inside(&env, &verb.command(&env, Path::new("agents/queue.jsonl"))));
            let full = act();
            let context = format!("{verb:?} with room for {room} bytes");
            assert_eq!(full.code, Some(74), "{context}: {}", full.stderr);
            assert!(full.stderr.ends_with("make room for it\n"), "{context}: {}", full.stderr);
            assert!(fs::read_to_string(agents.join("queue.jsonl")).unwrap() == queue, "{context}: it has changed");
            let left = names_in(&agents).into_iter().find(|name| is_temporary(name));
            assert_eq!(left, None, "{context}: left behind");
            fs::remove_file(agents.join("fill")).unwrap();
            let done = act();
            assert_eq!(done.code, Some(0), "{context}: {}", done.stderr);
            assert_eq!(judge(&agents, &OF_RECORDS, &others), Ok(Effects::from([*verb])), "{context}");
        }
    }
}

#[test]
fn where_no_room_can_be_reserved_half_a_line_is_set_apart() {
    for room in [1, 50, 100] {
        let env = TestEnv::new();
        let (queue, mut others) = queue_with_room(room);
        let mounts = on_a_full_disk(&env, &queue);
        let agents = mounts.path("agents");
        let put = || Put.command(&env, Path::new("agents/queue.jsonl"));
        let mut strace = env.command(tool("strace", "strace"));
        strace.args(["-f", "-o", "/dev/null", "-e", "inject=fallocate:error=EOPNOTSUPP"]);
        let full = run(&mut mounts.inside(&env, &under(strace, &put())));
        let context = format!("room for {room} bytes");
        assert_eq!(full.code, Some(74), "{context}: {}", full.stderr);
        assert!(full.stderr.contains("could be appended to only in part"), "{context}: {}", full.stderr);
        let now = fs::read_to_string(agents.join("queue.jsonl")).unwrap();
        let half = now.strip_prefix(&queue).unwrap_or_else(|| panic!("{context}: {now}")).to_owned();
        assert_eq!(half.trim_end().len(), room, "{context}: {half}");

        fs::remove_file(agents.join("fill")).unwrap();
        let done = run(&mut mounts.inside(&env, &put()));
        assert_eq!(done.code, Some(0), "{context}: {}", done.stderr);
        others.push(half.trim_end().into());
        assert_eq!(judge(&agents, &OF_RECORDS, &others), Ok(Effects::from([Put])), "{context}");
        // Another run makes a line of it.
        let done = run(&mut mounts.inside(&env, &Take.command(&env, Path::new("agents/queue.jsonl"))));
        assert_eq!(done.code, Some(0), "{context}: {}", done.stderr);
        assert_eq!(judge(&agents, &OF_RECORDS, &others), Ok(Effects::from([Put, Take])), "{context}");
        let queue = pieces(&fs::read(agents.join("queue.jsonl")).unwrap());
        assert_eq!(queue.iter().filter(|line| line.as_slice() == half.trim_end().as_bytes()).count(), 1, "{context}");
    }
}

#[test]
fn a_limit_on_the_size_of_files_is_an_error_or_a_death_that_changes_nothing() {
    // In blocks of 512 bytes. The queue is just as large.
    let (queue, others) = queue_with_room(1);
    let blocks = (queue.len() + 1) / 512;
    for (ignored, trap) in [(true, "trap '' XFSZ;"), (false, "")] {
        for verb in ALL {
            let env = TestEnv::new();
            env.write("queue.jsonl", &queue);
            env.write("queue.lock", "");
            let mut sh = env.command(tool("sh", "dash"));
            sh.args(["-c", &format!("{trap} ulimit -f {blocks}; exec \"$@\""), "sh"]);
            let limited = run(&mut under(sh, &verb.command(&env, Path::new("queue.jsonl"))));
            let context = format!("{verb:?}, ignored: {ignored}");
            if ignored || verb == Put {
                assert_eq!(limited.code, Some(74), "{context}: {}", limited.stderr);
                assert!(limited.stderr.contains("ulimit -f"), "{context}: {}", limited.stderr);
            } else {
                // By SIGXFSZ, unless it is told beforehand.
                assert!(limited.code == Some(74) || limited.signal == Some(25), "{context}: {limited:?}");
            }
            assert!(fs::read_to_string(env.path("queue.jsonl")).unwrap() == queue, "{context}: it has changed");
            let done = verb.run(&env);
            assert_eq!(done.code, Some(0), "{context}: {}", done.stderr);
            assert_eq!(judge(&env.path(""), &OF_RECORDS, &others), Ok(Effects::from([verb])), "{context}");
        }
    }
}
