//! The command line of handoff-offload: its flags, messages, exit codes, previews and metrics, and which blobs it prunes when.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs::{self, File, Permissions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::exposition::{Samples, differences, parse, value};
use crate::test_env::{
    Background, EARLIER, EARLIER_SECONDS, MountNamespace, NOW, NOW_SECONDS, Run, TestEnv, counters, in_tests, mode,
    names_in, python, record, run, start, tool, under,
};
use crate::validator::assert_valid;

const VARIABLES: [&str; 14] = [
    "HANDOFF_BLOB_DIR",
    "HANDOFF_DRY_RUN",
    "HANDOFF_JSON",
    "HANDOFF_LOCK",
    "HANDOFF_LOCK_TIMEOUT",
    "HANDOFF_MAX_BYTES",
    "HANDOFF_MAX_LINE",
    "HANDOFF_NOW",
    "HANDOFF_PREVIEW_BYTES",
    "HANDOFF_PRUNE_AFTER",
    "HANDOFF_QUEUE",
    "HANDOFF_QUIET",
    "HANDOFF_TEXTFILE_DIR",
    "HANDOFF_VERBOSE",
];
/// Fourteen days before the present time of most tests, in seconds since the epoch.
const LIMIT: Duration = Duration::from_secs(1_795_953_600 - 14 * 86_400);
const SECOND: Duration = Duration::from_secs(1);

// Values, handles and blobs, which the tests work out by themselves.

/// A text that no line should hold, another for each letter.
pub(crate) fn large(letter: char) -> String {
    letter.to_string().repeat(9_000)
}

/// A record with these texts in its payload.
pub(crate) fn carrying(id: &str, texts: &[&str]) -> String {
    with_payload(id, texts.iter().map(|text| serde_json::to_string(text).unwrap()))
}

/// The same when handles have taken the place of the texts.
pub(crate) fn moved(id: &str, texts: &[&str]) -> String {
    with_payload(id, texts.iter().map(|text| handle(text)))
}

fn with_payload(id: &str, values: impl Iterator<Item = String>) -> String {
    let members: Vec<String> = values.enumerate().map(|(number, value)| format!("\"text-{number}\":{value}")).collect();
    let payload = format!("\"payload\":{{{}}}", members.join(","));
    record(id, "researcher", "queued").replace("\"payload\":{}", &payload)
}

/// What stands for a text of nothing but ASCII letters.
pub(crate) fn handle(text: &str) -> String {
    let (reference, sha256, bytes, summary) =
        (reference(text), sha256(text), text.len(), &text[..text.len().min(1_024)]);
    format!(
        r#"{{"artifact_ref":"{reference}","bytes":{bytes},"sha256":"{sha256}","media_type":"text/plain","summary":"{summary}"}}"#
    )
}

pub(crate) fn sha256(content: impl AsRef<[u8]>) -> String {
    Sha256::digest(content).iter().fold(String::new(), |hex, byte| hex + &format!("{byte:02x}"))
}

/// How a handle refers to its blob, which is also the blob's path beside the queue.
pub(crate) fn reference(content: impl AsRef<[u8]>) -> String {
    let sha256 = sha256(content);
    format!("blob/{}/{sha256}", &sha256[..2])
}

/// Puts a file where the blob with some content is to be.
pub(crate) fn plant(env: &TestEnv, of: impl AsRef<[u8]>, content: impl AsRef<[u8]>) -> PathBuf {
    let path = env.path(reference(of));
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, content).unwrap();
    path
}

/// A blob that was put at a time since the epoch.
pub(crate) fn put_at(env: &TestEnv, content: &str, time: Duration) -> PathBuf {
    let path = plant(env, content, content);
    set_time(&path, time);
    path
}

/// A blob that was put a year before the limit.
pub(crate) fn old_blob(env: &TestEnv, content: &str) -> PathBuf {
    put_at(env, content, LIMIT.saturating_sub(SECOND * 86_400 * 365))
}

pub(crate) fn set_time(path: &Path, time: Duration) {
    File::options().write(true).open(path).unwrap().set_modified(SystemTime::UNIX_EPOCH + time).unwrap();
}

fn modified(path: &Path) -> SystemTime {
    fs::metadata(path).unwrap().modified().unwrap()
}

/// The names of the blobs in the store, sorted.
pub(crate) fn blobs_in(store: &Path) -> Vec<String> {
    let files = walkdir::WalkDir::new(store).min_depth(1).into_iter().map(Result::unwrap);
    let files = files.filter(|entry| !entry.file_type().is_dir());
    let mut names: Vec<String> = files.map(|entry| entry.file_name().to_str().unwrap().to_owned()).collect();
    names.sort();
    names
}

pub(crate) fn digests(contents: &[&str]) -> Vec<String> {
    let mut digests: Vec<String> = contents.iter().map(sha256).collect();
    digests.sort();
    digests
}

/// All that find(1) and sha256sum(1) can tell of what is in a directory, but for times of access.
pub(crate) fn everything(env: &TestEnv, directory: &str) -> String {
    let script = r#"find "$1" -printf '%p %y %i %m %U:%G %n %s %T@ %C@ %l\n' | sort; find "$1" -type f -print0 | sort -z | xargs -0r sha256sum"#;
    let mut sh = env.command(tool("sh", "dash"));
    stdout(sh.args(["-e", "-c", script, "sh", directory]))
}

// Queues and runs.

/// Two records with three values that are to be moved, of which two are the same, and lines that stay.
fn queue() -> String {
    let (x, y) = (large('x'), large('y'));
    let stays = record("small", "patcher", "done") + "not json\n";
    carrying("one", &[&x]) + &stays + &carrying("two", &[&y, &x])
}

/// The lines of [`queue`] after offload.
fn offloaded() -> String {
    let (x, y) = (large('x'), large('y'));
    let stays = record("small", "patcher", "done") + "not json\n";
    moved("one", &[&x]) + &stays + &moved("two", &[&y, &x])
}

fn env_with_queue() -> TestEnv {
    let env = TestEnv::new();
    env.write("queue.jsonl", queue());
    env
}

/// What is in the queue after its ledger line.
pub(crate) fn lines_after_ledger(env: &TestEnv) -> String {
    let contents = fs::read_to_string(env.path("queue.jsonl")).unwrap();
    let (ledger, rest) = contents.split_once('\n').unwrap();
    assert!(ledger.starts_with("{\"id\":\"ledger\","), "the first line is {ledger}");
    rest.to_owned()
}

fn is_offloaded(env: &TestEnv) -> bool {
    fs::read_to_string(env.path("queue.jsonl")).unwrap().ends_with(&offloaded())
}

/// Runs a command that must end so and say just one thing, if perhaps of both of its jobs, pruning and moving.
pub(crate) fn assert_message(command: &mut Command, code: i32, message: &str) -> Run {
    let run = run(command);
    assert_eq!(run.code, Some(code), "{message}: {}", run.stderr);
    // The kernel may keep one of them from learning who holds a lock, as others come and go.
    let without_holder = |line: &str| line.split(" by process ").next().map(ToOwned::to_owned);
    let mut things: Vec<_> = run.stderr.lines().map(without_holder).collect();
    things.dedup();
    assert_eq!(things.len(), 1, "not one message: {}", run.stderr);
    let says = |line: &str| line.starts_with("handoff") && line.contains(message);
    assert!(run.stderr.lines().any(says), "{:?} doesn't say {message:?}", run.stderr);
    run
}

pub(crate) fn succeed(command: &mut Command) -> Run {
    let run = run(command);
    assert_eq!(run.code, Some(0), "{command:?}: {}", run.stderr);
    run
}

pub(crate) fn stdout(command: &mut Command) -> String {
    String::from_utf8(succeed(command).stdout).unwrap()
}

/// The one line of JSON that a command has printed.
pub(crate) fn json_of(run: &Run) -> Value {
    let text = str::from_utf8(&run.stdout).unwrap();
    assert!(text.ends_with("}\n") && text.lines().count() == 1, "{text:?}");
    serde_json::from_str(text).unwrap()
}

/// Offload with nothing but variables.
fn with_variables(env: &TestEnv, variables: &[(&str, &str)]) -> Command {
    let mut command = env.bare_offload();
    command.envs([("HANDOFF_QUEUE", "queue.jsonl"), ("HANDOFF_TEXTFILE_DIR", "textfile"), ("HANDOFF_NOW", NOW)]);
    command.envs(variables.iter().copied());
    command
}

/// Offload with one setting more, by a flag or by its variable.
fn with_setting(env: &TestEnv, by_flag: bool, flag: &str, value: &str) -> Command {
    let variable = flag.replace("--", "HANDOFF_").replace('-', "_").to_uppercase();
    let mut command = with_variables(env, &[]);
    if by_flag {
        command.args([flag, value])
    } else {
        command.env(variable, value)
    };
    command
}

pub(crate) fn hold_lock(env: &TestEnv, lock: &str, how: &str) -> (Background, String) {
    let mut command = env.command(python());
    Background::spawn_and_wait_for_line(command.arg(in_tests("workers/hold_lock.py")).args([lock, how]))
}

/// Holds a lock on the store's directory, as those do who put or prune.
fn hold_store(env: &TestEnv, how: &str) -> Background {
    let mut flock = env.command(tool("flock", "util-linux"));
    flock.args([how, "--no-fork", "blob", "sh", "-c", "echo held; cat"]);
    Background::spawn_and_wait_for_line(&mut flock).0
}

#[test]
fn the_tests_name_blobs_as_sha256sum_does() {
    let env = env_with_queue();
    succeed(&mut env.offload());
    let names = blobs_in(&env.path("blob"));
    assert_eq!(names, digests(&[&large('x'), &large('y')]));
    for name in names {
        let mut sha256sum = env.command(tool("sha256sum", "coreutils"));
        let printed = stdout(sha256sum.arg(format!("blob/{}/{name}", &name[..2])));
        assert_eq!(printed.split(' ').next(), Some(name.as_str()));
    }
    assert_eq!(lines_after_ledger(&env), offloaded());
}

// Flags and variables.

#[test]
fn help_and_version_are_answers() {
    let env = env_with_queue();
    for flag in ["--help", "-h", "--version", "-V"] {
        let run = succeed(env.bare_offload().arg(flag));
        assert_eq!(run.stderr, "", "{flag}");
        let beginning: &[u8] = if flag.to_lowercase().contains('v') {
            b"handoff-offload 0."
        } else {
            b"Move values that are too large for a line"
        };
        assert!(run.stdout.starts_with(beginning), "{flag}");
    }
    let help = stdout(env.bare_offload().arg("--help"));
    for code in ["   0  ", "   2  ", "  65  ", "  74  ", "  75  "] {
        assert!(help.lines().any(|line| line.starts_with(code)), "exit code{code}is not explained: {help}");
    }
    assert_eq!(fs::read_to_string(env.path("queue.jsonl")).unwrap(), queue());
}

#[test]
fn each_flag_in_the_help_has_a_variable_that_is_tried_here() {
    let env = TestEnv::new();
    let help = stdout(env.bare_offload().arg("--help"));
    let shown: BTreeSet<&str> =
        help.split("[env: ").skip(1).map(|rest| &rest[..rest.find(['=', ']']).expect("a variable's end")]).collect();
    let mut known = BTreeSet::from(VARIABLES);
    known.remove("HANDOFF_NOW");
    assert_eq!(shown, known, "{help}");
    let flags = help.lines().filter(|line| line.trim_start().starts_with('-'));
    assert_eq!(flags.count(), known.len() + 2, "flags with variables, --help and --version: {help}");
    for fixed in
        ["/var/lib/agents/queue.jsonl", "10s", "64MiB", "8KiB", "1KiB", "14d", "/var/lib/prometheus/node-exporter"]
    {
        assert!(help.contains(&format!("[default: {fixed}]")), "{fixed} is missing: {help}");
    }
    assert!(help.contains("[default: beside the queue, blob/]"), "{help}");
}

#[test]
fn wrong_usage_is_refused_before_anything_is_done() {
    let wrong: [&[&str]; 33] = [
        &["--no-such-flag"],
        &["positional"],
        &["-v", "-q"],
        &["--max-bytes", "many"],
        &["--max-bytes=-1"],
        &["--max-bytes", "NaN"],
        &["--max-bytes", "1e3"],
        &["--max-bytes", "0x10"],
        &["--max-bytes", ""],
        &["--max-bytes"],
        &["--max-bytes", "99999999999999999999"],
        &["--max-bytes", "8KiB", "--max-bytes", "8KiB"],
        &["--preview-bytes", "some"],
        &["--preview-bytes=-1"],
        &["--preview-bytes", "1 KiB x"],
        &["--prune-after", "14"],
        &["--prune-after=-1d"],
        &["--prune-after", "never"],
        &["--prune-after", ""],
        &["--prune-after", "14D"],
        &["--prune-after", "18446744073709551616s"],
        &["--prune-after", "1d", "--prune-after", "2d"],
        &["--blob-dir", ""],
        &["--blob-dir"],
        &["--textfile-dir", ""],
        &["--lock-timeout", "soon"],
        &["--lock-timeout=-1s"],
        &["--max-line", "many"],
        &["--now", "yesterday"],
        &["--dry-run=perhaps"],
        &["--json=perhaps"],
        &["--queue"],
        &["--older-than", "14d"],
    ];
    let env = env_with_queue();
    old_blob(&env, "orphan");
    let before = everything(&env, ".");
    for arguments in wrong {
        let run = assert_message(with_variables(&env, &[]).args(arguments), 2, ": see --help");
        assert!(run.stderr.ends_with(": see --help\n") && run.stdout.is_empty(), "{arguments:?}: {}", run.stderr);
        assert_eq!(everything(&env, "."), before, "{arguments:?}");
    }
}

#[test]
fn wrong_variables_are_wrong_usage_too() {
    let env = env_with_queue();
    old_blob(&env, "orphan");
    let before = everything(&env, ".");
    for (name, value) in [
        ("HANDOFF_MAX_BYTES", "-1"),
        ("HANDOFF_MAX_BYTES", "8 furlongs"),
        ("HANDOFF_PREVIEW_BYTES", "NaN"),
        ("HANDOFF_PRUNE_AFTER", "14"),
        ("HANDOFF_PRUNE_AFTER", "never"),
        ("HANDOFF_LOCK_TIMEOUT", "10"),
        ("HANDOFF_MAX_LINE", "-1"),
        ("HANDOFF_NOW", "now"),
    ] {
        let run = assert_message(&mut with_variables(&env, &[(name, value)]), 2, ": see --help");
        assert!(run.stderr.contains("'--"), "{name}={value}: {}", run.stderr);
        assert_eq!(everything(&env, "."), before, "{name}={value}");
    }
}

#[test]
fn an_empty_variable_counts_as_not_set() {
    let env = env_with_queue();
    let run = succeed(env.offload().envs(VARIABLES.map(|name| (name, ""))));
    assert!(run.stdout.is_empty() && run.stderr.lines().count() == 1, "{}", run.stderr);
    assert!(is_offloaded(&env));
    assert_eq!(names_in(&env.path(".")), ["blob", "queue.gen.1", "queue.jsonl", "queue.lock", "textfile"]);
    assert_eq!(env.textfile_names(), ["handoff_offload.prom"]);
}

#[test]
fn metrics_never_take_the_place_of_the_queue_or_its_lock() {
    for flag in ["--queue", "--lock"] {
        let env = env_with_queue();
        let contents = if flag == "--queue" { queue() } else { String::new() };
        env.write("textfile/handoff_offload.prom", &contents);
        symlink("textfile", env.path("also")).unwrap();
        let before = everything(&env, ".");
        for textfile in ["textfile", "also", "./textfile/../textfile/"] {
            let mut command = env.bare_offload();
            if flag == "--lock" {
                command.args(["--queue", "queue.jsonl"]);
            }
            command.args([flag, "./textfile/../textfile/handoff_offload.prom", "--textfile-dir", textfile]);
            assert_message(&mut command, 2, "would have the metrics replace the queue or its lock");
            assert_eq!(everything(&env, "."), before, "{flag} {textfile}");
        }
    }
}

#[test]
fn each_variable_does_what_its_flag_does() {
    // The limit, to the byte: this value has 9,002 with its quotes.
    for (limit, is_moved) in [("9002", false), ("9001", true), ("9KB", true), ("8.9KiB", false), ("1EiB", false)] {
        for by_flag in [true, false] {
            let env = env_with_queue();
            succeed(&mut with_setting(&env, by_flag, "--max-bytes", limit));
            assert_eq!(is_offloaded(&env), is_moved, "{limit}, by a flag: {by_flag}");
        }
    }

    // How much a handle shows.
    for (limit, shown) in [("0", 0), ("5", 5), ("9000", 9_000), ("1EiB", 9_000)] {
        for by_flag in [true, false] {
            let env = TestEnv::new();
            env.write("queue.jsonl", carrying("one", &[&large('x')]));
            succeed(&mut with_setting(&env, by_flag, "--preview-bytes", limit));
            let line = lines_after_ledger(&env);
            let record: Value = serde_json::from_str(&line).unwrap();
            assert_eq!(record["payload"]["text-0"]["summary"], *large('x').get(..shown).unwrap(), "{limit}");
            // However long it is, a handle is none of the values that are moved.
            let again = json_of(&succeed(with_variables(&env, &[]).arg("--json")));
            assert_eq!(again["moved"], json!({ "records": 0, "values": 0 }), "{limit}");
            assert_eq!(lines_after_ledger(&env), line);
        }
    }

    // The store. What handles say does not depend on where it is.
    for by_flag in [true, false] {
        let env = env_with_queue();
        succeed(&mut with_setting(&env, by_flag, "--blob-dir", "store"));
        assert!(is_offloaded(&env) && !env.path("blob").exists());
        assert_eq!(blobs_in(&env.path("store")), digests(&[&large('x'), &large('y')]));
    }

    // The grace.
    for (grace, is_pruned) in [("13d", false), ("12d", true)] {
        for by_flag in [true, false] {
            let env = TestEnv::new();
            env.write("queue.jsonl", "");
            let blob = put_at(&env, "orphan", LIMIT + SECOND * 86_400 + SECOND);
            succeed(&mut with_setting(&env, by_flag, "--prune-after", grace));
            assert_eq!(blob.exists(), !is_pruned, "{grace}, by a flag: {by_flag}");
        }
    }

    // The preview and JSON, whose words for no are those of all switches.
    for (word, is_on) in
        [("1", true), ("true", true), ("yes", true), ("0", false), ("false", false), ("no", false), ("off", false)]
    {
        let env = env_with_queue();
        let text = stdout(&mut with_variables(&env, &[("HANDOFF_DRY_RUN", word)]));
        assert_eq!((text.ends_with("move 3 values out of 2 records\n"), is_offloaded(&env)), (is_on, !is_on), "{word}");
        let env = env_with_queue();
        let text = stdout(&mut with_variables(&env, &[("HANDOFF_JSON", word)]));
        assert_eq!(text.starts_with('{'), is_on, "{word}");
    }

    // What a line may have.
    let env = env_with_queue();
    succeed(&mut with_variables(&env, &[("HANDOFF_MAX_LINE", "9000")]));
    assert_eq!(fs::read_to_string(env.path("queue.jsonl")).unwrap(), queue(), "what is too long stays");

    // How much is said.
    let lines = |variables: &[(&str, &str)], arguments: &[&str]| {
        let env = env_with_queue();
        succeed(with_variables(&env, variables).args(arguments)).stderr.lines().count()
    };
    assert_eq!(lines(&[], &[]), 1);
    assert_eq!(lines(&[("HANDOFF_QUIET", "1")], &[]), 0);
    assert_eq!(lines(&[("HANDOFF_VERBOSE", "1")], &[]), 2);
    assert_eq!(lines(&[], &["-q"]), 0);
    assert_eq!(lines(&[], &["-v"]), 2);
    assert_eq!(lines(&[("HANDOFF_QUIET", "1")], &["-v"]), 2);
    assert_eq!(lines(&[("HANDOFF_VERBOSE", "1")], &["-q"]), 0);
}

#[test]
fn a_flag_wins_over_a_variable() {
    for (variable, wrong, flag, right) in [
        ("HANDOFF_QUEUE", "missing/queue.jsonl", "--queue", "queue.jsonl"),
        ("HANDOFF_LOCK", "missing/queue.lock", "--lock", "queue.lock"),
        ("HANDOFF_MAX_BYTES", "1GiB", "--max-bytes", "8KiB"),
        ("HANDOFF_MAX_LINE", "100", "--max-line", "1MiB"),
        ("HANDOFF_PREVIEW_BYTES", "7", "--preview-bytes", "1KiB"),
        ("HANDOFF_BLOB_DIR", "missing/blob", "--blob-dir", "blob"),
        ("HANDOFF_PRUNE_AFTER", "0s", "--prune-after", "100w"),
        ("HANDOFF_TEXTFILE_DIR", "missing", "--textfile-dir", "textfile"),
        ("HANDOFF_NOW", EARLIER, "--now", NOW),
    ] {
        let env = env_with_queue();
        let orphan = put_at(&env, "orphan", LIMIT + SECOND);
        succeed(with_variables(&env, &[(variable, wrong)]).args([flag, right]));
        assert!(is_offloaded(&env) && orphan.exists(), "{flag}");
        let last_run = value(&metrics(&env), "handoff_offload_last_run_timestamp_seconds", &[]);
        assert!((last_run - NOW_SECONDS).abs() < 1e-6, "{flag}: {last_run}");
    }
}

#[test]
fn the_lock_and_the_patience_can_be_variables() {
    let env = env_with_queue();
    let (holder, id) = hold_lock(&env, "special.lock", "exclusive");
    let special = ("HANDOFF_LOCK", "special.lock");
    let busy = &mut with_variables(&env, &[special, ("HANDOFF_LOCK_TIMEOUT", "100ms")]);
    assert_message(busy, 75, &format!("special.lock: still locked after 100ms by process {id} (python"));
    assert!(!is_offloaded(&env));
    holder.finish();
    succeed(&mut with_variables(&env, &[special]));
    assert!(is_offloaded(&env) && !env.path("queue.lock").exists());
}

#[test]
fn the_smallest_limits_move_most_and_once_is_enough() {
    let env = TestEnv::new();
    let (text, number) = ("a".repeat(31), "1".repeat(33));
    // With their quotes and commas 33 bytes, 32, 33; and 33 without any.
    let list = format!("[\"{}\",12345]", "b".repeat(23));
    let members = format!(r#""payload":{{"a":"{text}","b":"{}","c":{list}}},"result":{number}"#, "c".repeat(30));
    env.write("queue.jsonl", record("one", "researcher", "done").replace(r#""payload":{}"#, &members));
    succeed(env.offload().args(["--max-bytes", "32", "--preview-bytes", "0"]));
    let after = lines_after_ledger(&env);
    let record: Value = serde_json::from_str(&after).unwrap();
    for (pointer, content, media_type) in [
        ("/payload/a", &text, "text/plain"),
        ("/payload/c", &list, "application/json"),
        ("/result", &number, "application/json"),
    ] {
        let sha256 = sha256(content);
        assert_eq!(
            record.pointer(pointer).unwrap(),
            &json!({
                "artifact_ref": reference(content), "bytes": content.len(), "sha256": sha256, "media_type": media_type, "summary": ""
            })
        );
        assert_eq!(&fs::read_to_string(env.path(reference(content))).unwrap(), content);
    }
    assert_eq!(record["payload"]["b"], "c".repeat(30));
    let again = json_of(&succeed(env.offload().args(["--max-bytes", "32", "--json"])));
    assert_eq!(again["replaced"], false, "{again}");
    assert_eq!(lines_after_ledger(&env), after);
}

#[test]
fn a_limit_that_makes_lines_grow_is_warned_of() {
    for (limit, warns) in [("0", true), ("8", true), ("239", true), ("240", false), ("8KiB", false)] {
        let env = env_with_queue();
        let run = succeed(env.offload().args(["--max-bytes", limit]));
        let [lines @ .., summary] = &run.stderr.lines().collect::<Vec<_>>()[..] else { panic!("{limit} says nothing") };
        assert_eq!(lines.len(), usize::from(warns), "{limit}: {}", run.stderr);
        assert!(lines.iter().all(|line| line.contains("is a unit missing, as in 8KiB?")), "{limit}: {}", run.stderr);
        assert!(summary.contains("moved 3 values") && is_offloaded(&env), "{limit}: {summary}");
    }
}

// What is said.

#[test]
fn the_summary_says_what_was_done() {
    let env = env_with_queue();
    let run = succeed(&mut env.offload());
    let expected =
        "handoff-offload: queue.jsonl: moved 3 values over 8.0 KiB out of 2 records: 2 new blobs, 17.6 KiB\n";
    assert_eq!((run.stderr.as_str(), run.stdout), (expected, Vec::new()));
    let again = succeed(&mut env.offload());
    let expected = "handoff-offload: queue.jsonl: nothing over 8.0 KiB to move; removed 1 drained generation\n";
    assert_eq!(again.stderr, expected);
    let third = succeed(&mut env.offload());
    assert_eq!(third.stderr, "handoff-offload: queue.jsonl: nothing over 8.0 KiB to move\n");

    // One of each, which is no plural, and what stays.
    let env = TestEnv::new();
    let doubtful = carrying("doubtful", &[&large('d')]).replace("\"status\"", "\"status\":\"done\",\"status\"");
    let surrogate = carrying("surrogate", &[&large('s')]).replace("\"text-0\":\"s", "\"text-0\":\"\\ud83d");
    env.write("queue.jsonl", carrying("one", &[&large('x')]) + &doubtful + &surrogate);
    old_blob(&env, "orphan");
    let run = succeed(env.offload().arg("-v"));
    let lines: Vec<&str> = run.stderr.lines().collect();
    let expected = "handoff-offload: queue.jsonl: moved 1 value over 8.0 KiB out of 1 record: 1 new blob, 8.8 KiB; \
                    left 1 record in doubt; left 1 string with lone surrogates, which no text says exactly; \
                    removed 1 blob that nothing refers to, 6 B";
    assert_eq!(lines[0], expected);
    let [_, detail] = lines[..] else { panic!("{lines:#?}") };
    assert!(detail.starts_with("handoff-offload: queue.jsonl: writers were kept out for "), "{detail}");
    assert_eq!(lines_after_ledger(&env), moved("one", &[&large('x')]) + &doubtful + &surrogate);

    // What is there already is not written again.
    let env = env_with_queue();
    plant(&env, large('y'), large('y'));
    let run = succeed(&mut env.offload());
    let expected = "moved 3 values over 8.0 KiB out of 2 records: 1 new blob, 8.8 KiB, 1 blob there already\n";
    assert!(run.stderr.ends_with(expected), "{}", run.stderr);
}

#[test]
fn a_preview_says_what_would_be_done_and_changes_nothing_at_all() {
    let lay_out = || {
        let env = env_with_queue();
        fs::create_dir(env.path("other")).unwrap();
        plant(&env, large('y'), "damaged");
        old_blob(&env, "orphan");
        // Things that a run would clean up.
        env.write("blob/.blob.4711.abcdef.tmp", "left");
        env.write(".queue.jsonl.4711.abcdef.tmp", "left");
        fs::hard_link(env.path("queue.jsonl"), env.path("queue.gen.9")).unwrap();
        env
    };
    let env = lay_out();
    let before = everything(&env, ".");
    let run = succeed(env.offload().arg("--dry-run"));
    let expected = "queue.jsonl:1: one /payload/text-0: 8.8 KiB, text/plain\n\
                    queue.jsonl:4: two /payload/text-0: 8.8 KiB, text/plain\n\
                    queue.jsonl:4: two /payload/text-1: 8.8 KiB, text/plain\n\
                    move 3 values out of 2 records\n\
                    remove 1 blob that nothing refers to, 6 B\n";
    assert_eq!((String::from_utf8(run.stdout).unwrap().as_str(), run.stderr.as_str()), (expected, ""));
    for arguments in
        [&["--json"][..], &["-q"], &["-v"], &["--prune-after", "0s"], &["--max-bytes", "32"], &["--lock", "other.lock"]]
    {
        succeed(env.offload().arg("--dry-run").args(arguments));
        assert_eq!(everything(&env, "."), before, "{arguments:?}");
    }
    // A run has something to do in all these places, so that the comparison says something.
    succeed(&mut env.offload());
    let after = everything(&env, ".");
    for name in ["orphan", ".blob.4711", ".queue.jsonl.4711", "queue.gen.9"] {
        let name = if name == "orphan" { sha256(name) } else { name.to_owned() };
        assert!(before.contains(&name) && !after.contains(&name), "{name}: {after}");
    }

    // Where there is nothing, nothing is made.
    let env = env_with_queue();
    let before = everything(&env, ".");
    succeed(env.offload().args(["--dry-run", "--blob-dir", "store"]));
    assert_eq!(everything(&env, "."), before);
}

#[test]
fn json_says_the_same_to_machines() {
    let env = env_with_queue();
    let doubtful = carrying("doubtful", &[&large('d')]).replace("\"status\"", "\"status\":\"done\",\"status\"");
    let surrogate = carrying("surrogate", &[&large('s')]).replace("\"text-0\":\"s", "\"text-0\":\"\\ud83d");
    env.write("queue.jsonl", queue() + &doubtful + &surrogate);
    plant(&env, large('y'), large('y'));
    old_blob(&env, "orphan");
    old_blob(&env, "another orphan");
    let value = |line: u64, id: &str, pointer: &str, content: &str| {
        json!({
            "line": line, "id": id, "pointer": pointer, "bytes": content.len(), "media_type": "text/plain", "sha256": sha256(content)
        })
    };
    let (x, y) = (large('x'), large('y'));
    let values = [
        value(1, "one", "/payload/text-0", &x),
        value(4, "two", "/payload/text-0", &y),
        value(4, "two", "/payload/text-1", &x),
    ];
    for is_preview in [true, false] {
        let run = succeed(env.offload().arg("--json").args(is_preview.then_some("--dry-run")));
        let mut outcome = json_of(&run);
        let held = outcome.as_object_mut().unwrap().remove("lock_held_seconds").unwrap().as_f64().unwrap();
        assert_eq!(held > 0.0, !is_preview, "{held}");
        let (written, bytes, reused) = if is_preview { (0, 0, 0) } else { (1, 9_000, 1) };
        let mut expected = json!({
            "queue": "queue.jsonl",
            "dry_run": is_preview,
            "moved": { "records": 2, "values": 3 },
            "blobs": { "written": written, "written_bytes": bytes, "reused": reused },
            "kept": { "records_in_doubt": 1, "lone_surrogates": 1 },
            "pruned": { "objects": 2, "bytes": 20 },
            "late": { "lines": 0, "bytes": 0 },
            "removed_generations": 0,
            "replaced": !is_preview,
        });
        if is_preview {
            expected["values"] = values.iter().cloned().collect();
        }
        assert_eq!(outcome, expected);
    }
    // A second run has nothing to do but to remove the generation, and what is late to take over.
    let late = record("late", "researcher", "queued");
    let generation = fs::read_to_string(env.path("queue.gen.1")).unwrap();
    env.write("queue.gen.1", generation + &late);
    let again = json_of(&succeed(env.offload().arg("--json")));
    assert_eq!(again["moved"], json!({ "records": 0, "values": 0 }));
    assert_eq!(again["blobs"], json!({ "written": 0, "written_bytes": 0, "reused": 0 }));
    assert_eq!(again["pruned"], json!({ "objects": 0, "bytes": 0 }));
    assert_eq!((&again["late"], &again["replaced"]), (&json!({ "lines": 1, "bytes": late.len() }), &json!(true)));
    let third = json_of(&succeed(env.offload().arg("--json")));
    assert_eq!((&third["removed_generations"], &third["replaced"]), (&json!(2), &json!(false)));
}

#[test]
fn json_is_all_that_standard_output_gets_whatever_is_said_beside_it() {
    let env = env_with_queue();
    // A warning, a summary and a detail.
    env.write("queue.gen.4", "");
    let run = succeed(env.offload().args(["--json", "-v"]));
    assert_eq!(run.stderr.lines().count(), 3, "{}", run.stderr);
    assert_eq!(json_of(&run)["moved"]["values"], 3);
    let silent = succeed(env.offload().args(["--json", "-q"]));
    assert_eq!(silent.stderr, "");
    json_of(&silent);
    // A failure prints none, so that nobody takes it for a result.
    let (_holder, _) = hold_lock(&env, "queue.lock", "exclusive");
    let busy = assert_message(env.offload().args(["--json", "--lock-timeout", "10ms"]), 75, "still locked");
    assert!(busy.stdout.is_empty());
}

#[test]
fn quiet_is_silent_unless_it_fails() {
    let env = env_with_queue();
    env.write("queue.gen.4", "");
    plant(&env, large('x'), "damaged");
    old_blob(&env, "orphan");
    for arguments in [&["-q"][..], &["--quiet"], &["-q", "--max-bytes", "32"], &["-q", "--prune-after", "0s"]] {
        let run = succeed(env.offload().args(arguments));
        assert_eq!((run.stdout, run.stderr.as_str()), (Vec::new(), ""), "{arguments:?}");
    }
    let (_holder, _) = hold_lock(&env, "queue.lock", "exclusive");
    assert_message(env.offload().args(["-q", "--lock-timeout", "10ms"]), 75, "queue.lock: still locked after 10ms");
}

#[test]
fn odd_names_break_no_line() {
    for name in [&b"a\nb\x1b[2J.jsonl"[..], b"\xff\xfe.jsonl", "\u{9b}\u{2028}.jsonl".as_bytes(), b"-q", b" "] {
        let env = TestEnv::new();
        let name = std::ffi::OsStr::from_bytes(name);
        fs::write(env.path(name), queue()).unwrap();
        let mut argument = std::ffi::OsString::from("--queue=");
        argument.push(name);
        let mut command = env.bare_offload();
        command.arg(argument).args(["--textfile-dir", "textfile", "--now", NOW, "--json", "-v"]);
        let run = succeed(&mut command);
        assert_eq!(run.stderr.lines().count(), 2, "{name:?}: {}", run.stderr);
        assert!(run.stderr.lines().all(|line| line.starts_with("handoff-offload: ")), "{name:?}: {}", run.stderr);
        assert!(!run.stderr.contains(|c: char| c.is_control() && c != '\n'), "{name:?}: {:?}", run.stderr);
        assert_eq!(json_of(&run)["queue"], *name.to_string_lossy());
        assert!(fs::read_to_string(env.path(name)).unwrap().ends_with(&offloaded()));
    }
    // What the queue itself says gets to the terminal in previews only.
    let env = TestEnv::new();
    let odd = carrying("x\\u001b[2J\\n/..", &[&large('x')]).replace("text-0", "\\u001b[31m~/\\n");
    env.write("queue.jsonl", odd);
    let text = stdout(env.offload().arg("--dry-run"));
    assert_eq!(
        text,
        "queue.jsonl:1: x\\u{1b}[2J\\n/.. /payload/\\u{1b}[31m~0~1\\n: 8.8 KiB, text/plain\nmove 1 value out of 1 record\n"
    );
}

#[test]
fn the_journal_gets_priorities() {
    let env = env_with_queue();
    env.write("queue.gen.4", "");
    let journaled = |stream: &str, arguments: &[&str]| {
        let mut sh = env.command(tool("sh", "dash"));
        sh.args(["-c", &format!("exec 2>err; export JOURNAL_STREAM={stream}; exec \"$@\""), "sh"]);
        run(under(sh, &env.offload()).args(arguments));
        fs::read_to_string(env.path("err")).unwrap()
    };
    let own = "$(stat -c %d:%i err)";
    let priorities = |text: &str| -> Vec<String> {
        text.lines().map(|line| line.split_once("handoff-offload: ").unwrap().0.to_owned()).collect()
    };
    assert_eq!(priorities(&journaled(own, &["-v"])), ["<4>", "<5>", "<6>"], "a warning, a notice, a detail");
    assert_eq!(priorities(&journaled(own, &["--lock", "missing/lock"])), ["<3>"], "an error");
    assert_eq!(priorities(&journaled(own, &["--no-such-flag"])), ["<3>"], "wrong usage");
    // It is another's journal, or none.
    for stream in ["8:1", "", "journal", "1:2:3"] {
        assert_eq!(priorities(&journaled(stream, &[])), ["", ""], "{stream}");
    }
}

#[test]
fn standard_output_that_cannot_be_written_is_an_error_after_the_work() {
    let env = env_with_queue();
    let full = File::options().write(true).open("/dev/full").unwrap();
    let child = start(env.offload().arg("--json").stdout(full).stderr(Stdio::piped()));
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(74), "{stderr}");
    let lines: Vec<&str> = stderr.lines().collect();
    assert!(lines[0].starts_with("handoff-offload: standard output: cannot be written: No space"), "{stderr}");
    // The summary still says what was done.
    assert!(lines.len() == 2 && lines[1].contains("moved 3 values"), "{stderr}");
    assert!(is_offloaded(&env));
    assert_metrics(&env, &Expected { success: false, last_success: 0.0, ..Expected::of_first_run() }, "/dev/full");

    // Who reads only the beginning has got what they wanted, and so has who wants nothing.
    let env = env_with_queue();
    let mut child = start(env.offload().arg("--json").stdout(Stdio::piped()).stderr(Stdio::piped()));
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(is_offloaded(&env));
    for closed in ["exec \"$@\" >&-", "exec \"$@\" 2>&-", "exec \"$@\" <&- >&- 2>&-"] {
        let env = env_with_queue();
        let mut sh = env.command(tool("sh", "dash"));
        sh.args(["-c", closed, "sh"]);
        succeed(under(sh, &env.offload()).arg("--json"));
        assert!(is_offloaded(&env), "{closed}");
        let queue = fs::read(env.path("queue.jsonl")).unwrap();
        assert!(queue.starts_with(b"{\"id\":\"ledger\","), "{closed}: a message went into a file");
        for (content, name) in [(large('x'), reference(large('x'))), (large('y'), reference(large('y')))] {
            assert!(fs::read_to_string(env.path(name)).unwrap() == content, "{closed}: a message went into a blob");
        }
    }
}

// Metrics.

/// The metrics of offload, which must be ones that node_exporter accepts and can read.
pub(crate) fn metrics(env: &TestEnv) -> Samples {
    let path = env.path("textfile/handoff_offload.prom");
    assert_eq!(mode(&path), 0o644);
    let is_ours = |name: &&String| name.contains("offload");
    assert_eq!(env.textfile_names().iter().filter(is_ours).count(), 1, "{:?}", env.textfile_names());
    let contents = fs::read(path).unwrap();
    assert_valid(&contents, "handoff_offload.prom");
    parse(&contents)
}

/// What the metrics should say of the last run.
#[derive(Clone, Copy)]
pub(crate) struct Expected {
    pub(crate) success: bool,
    pub(crate) last_run: f64,
    pub(crate) last_success: f64,
    /// Blobs and their bytes, if they are known.
    pub(crate) written: Option<(f64, f64)>,
    pub(crate) pruned: Option<f64>,
}

impl Expected {
    /// A first run over [`queue`].
    fn of_first_run() -> Self {
        let now = NOW_SECONDS;
        Self { success: true, last_run: now, last_success: now, written: Some((2.0, 18_000.0)), pruned: Some(0.0) }
    }

    /// A run that moved nothing because it failed, after it had looked for what nothing refers to.
    pub(crate) fn of_failure(last_success: f64) -> Self {
        Self { success: false, last_run: NOW_SECONDS, last_success, written: None, pruned: Some(0.0) }
    }
}

pub(crate) fn assert_metrics(env: &TestEnv, expected: &Expected, context: &str) {
    let mut samples = metrics(env);
    let duration = value(&samples, "handoff_offload_duration_seconds", &[]);
    assert!(duration > 0.0 && duration < 60.0, "{context}: {duration}");
    samples.retain(|series, _| series.name != "handoff_offload_duration_seconds");
    let success = u8::from(expected.success);
    let (last_run, last_success) = (expected.last_run, expected.last_success);
    let mut text = format!(
        "handoff_offload_success {success}\nhandoff_offload_last_run_timestamp_seconds {last_run}\n\
         handoff_offload_last_success_timestamp_seconds {last_success}\n"
    );
    if let Some((objects, bytes)) = expected.written {
        write!(text, "handoff_offload_last_run_objects {objects}\nhandoff_offload_last_run_bytes {bytes}\n").unwrap();
    }
    if let Some(objects) = expected.pruned {
        writeln!(text, "handoff_offload_last_run_pruned_objects {objects}").unwrap();
    }
    assert_eq!(differences(&samples, &parse(text.as_bytes())), Vec::<String>::new(), "{context}");
}

/// Offload at another time.
fn offload_at(env: &TestEnv, now: &str) -> Command {
    let mut command = env.bare_offload();
    command.args(["--queue", "queue.jsonl", "--textfile-dir", "textfile", "--lock-timeout", "100ms", "--now", now]);
    command
}

#[test]
fn the_metrics_file_is_exactly_this() {
    let env = env_with_queue();
    for orphan in ["1", "2", "3"] {
        old_blob(&env, orphan);
    }
    succeed(&mut env.offload());
    let text = fs::read_to_string(env.path("textfile/handoff_offload.prom")).unwrap();
    let duration = text.lines().find_map(|line| line.strip_prefix("handoff_offload_duration_seconds ")).unwrap();
    assert!(duration.parse::<f64>().unwrap() > 0.0, "{duration}");
    let expected = format!(
        "# HELP handoff_offload_duration_seconds How long the last run took.\n\
         # TYPE handoff_offload_duration_seconds gauge\n\
         handoff_offload_duration_seconds {duration}\n\
         # HELP handoff_offload_last_run_timestamp_seconds When the last run began.\n\
         # TYPE handoff_offload_last_run_timestamp_seconds gauge\n\
         handoff_offload_last_run_timestamp_seconds 1795953600\n\
         # HELP handoff_offload_last_success_timestamp_seconds When a run last did all it should, 0 if never.\n\
         # TYPE handoff_offload_last_success_timestamp_seconds gauge\n\
         handoff_offload_last_success_timestamp_seconds 1795953600\n\
         # HELP handoff_offload_success Whether the last run did all it should (1) or not (0).\n\
         # TYPE handoff_offload_success gauge\n\
         handoff_offload_success 1\n\
         # HELP handoff_offload_last_run_bytes Size of the blobs that the last run wrote.\n\
         # TYPE handoff_offload_last_run_bytes gauge\n\
         handoff_offload_last_run_bytes 18000\n\
         # HELP handoff_offload_last_run_objects Blobs that the last run wrote.\n\
         # TYPE handoff_offload_last_run_objects gauge\n\
         handoff_offload_last_run_objects 2\n\
         # HELP handoff_offload_last_run_pruned_objects Blobs that nothing referred to, and that the last run removed.\n\
         # TYPE handoff_offload_last_run_pruned_objects gauge\n\
         handoff_offload_last_run_pruned_objects 3\n"
    );
    assert_eq!(text, expected);
    let promtool = tool("promtool", "prometheus");
    let file = File::open(env.path("textfile/handoff_offload.prom")).unwrap();
    let check = run(env.command(promtool).args(["check", "metrics"]).stdin(file));
    assert_eq!((check.code, &*check.stdout, &*check.stderr), (Some(0), &b""[..], ""), "promtool objects");
}

#[test]
fn metrics_are_those_of_the_last_run() {
    let env = env_with_queue();
    succeed(&mut offload_at(&env, EARLIER));
    let mut expected =
        Expected { last_run: EARLIER_SECONDS, last_success: EARLIER_SECONDS, ..Expected::of_first_run() };
    assert_metrics(&env, &expected, "the first run");
    succeed(&mut env.offload());
    expected = Expected { written: Some((0.0, 0.0)), ..Expected::of_first_run() };
    assert_metrics(&env, &expected, "a run with nothing to do");
    // Reused is not written, and pruned is.
    env.write("queue.jsonl", queue());
    fs::remove_file(env.path(reference(large('y')))).unwrap();
    set_time(&env.path(reference(large('x'))), LIMIT + SECOND);
    old_blob(&env, "orphan");
    succeed(&mut env.offload());
    expected = Expected { written: Some((1.0, 9_000.0)), pruned: Some(1.0), ..expected };
    assert_metrics(&env, &expected, "one written, one reused, one pruned");
    // A preview is no run.
    let before = fs::read(env.path("textfile/handoff_offload.prom")).unwrap();
    succeed(env.offload().args(["--dry-run", "--max-bytes", "32"]));
    assert!(fs::read(env.path("textfile/handoff_offload.prom")).unwrap() == before);
}

#[test]
fn after_a_failure_metrics_say_so_and_keep_the_last_success() {
    let later = |seconds: u32| format!("2026-11-29T12:01:{seconds:02}Z");
    let later_seconds = |seconds: u32| NOW_SECONDS + 60.0 + f64::from(seconds);
    for has_succeeded in [true, false] {
        let env = TestEnv::new();
        env.write("queue.jsonl", record("small", "patcher", "done"));
        if has_succeeded {
            succeed(&mut env.offload());
        }
        env.write("queue.jsonl", queue());
        let mut expected = Expected::of_failure(if has_succeeded { NOW_SECONDS } else { 0.0 });
        let mut runs = 0;
        let mut fails = |command: &mut dyn FnMut(&str) -> Command, code: i32, message: &str| {
            runs += 1;
            assert_message(&mut command(&later(runs)), code, message);
            expected.last_run = later_seconds(runs);
            assert_metrics(&env, &expected, &format!("has succeeded: {has_succeeded}, {message}"));
            assert!(
                fs::read_to_string(env.path("queue.jsonl")).is_ok_and(|now| now.starts_with(&queue())),
                "{message}"
            );
        };

        let (holder, _) = hold_lock(&env, "queue.lock", "exclusive");
        fails(&mut |now| offload_at(&env, now), 75, "queue.lock: still locked after 100ms");
        holder.finish();
        let mut elsewhere = |now: &str| {
            let mut command = offload_at(&env, now);
            command.args(["--blob-dir", "missing/blob"]);
            command
        };
        fails(&mut elsewhere, 74, "missing/blob: ");
        let mut full = |now: &str| {
            let mut strace = env.command(tool("strace", "strace"));
            strace.args(["-f", "-o", "trace", "-e", "inject=pwrite64:error=ENOSPC"]);
            under(strace, &offload_at(&env, now))
        };
        fails(&mut full, 74, ": cannot be written: No space left on device");
        env.write("queue.jsonl", queue() + UNREADABLE_LEDGER);
        fails(&mut |now| offload_at(&env, now), 65, "queue.jsonl:5: the ledger cannot be read");

        env.write("queue.jsonl", queue());
        succeed(&mut offload_at(&env, &later(59)));
        let now = later_seconds(59);
        let expected = Expected { last_run: now, last_success: now, ..Expected::of_first_run() };
        assert_metrics(&env, &expected, "recovered");
    }
}

#[test]
fn a_damaged_file_of_an_earlier_run_is_replaced() {
    for damaged in [&b""[..], b"\xff\xfe\0", b"handoff_offload_last_success_timestamp_seconds NaN\n"] {
        let env = env_with_queue();
        env.write("textfile/handoff_offload.prom", damaged);
        assert_message(env.offload().args(["--lock", "missing/lock"]), 74, "missing/lock");
        assert_metrics(&env, &Expected::of_failure(0.0), "damaged");
    }
}

#[test]
fn anyone_may_read_the_metrics_whatever_the_umask() {
    for umask in ["000", "077", "777"] {
        let env = TestEnv::new();
        env.write("queue.jsonl", record("small", "patcher", "done"));
        let mut sh = env.command(tool("sh", "dash"));
        sh.args(["-c", &format!("umask {umask}; exec \"$@\""), "sh"]);
        succeed(&mut under(sh, &env.offload()));
        metrics(&env);
    }
}

#[test]
fn metrics_that_cannot_be_written_are_an_error_after_the_work() {
    // The directory is named by a flag or a variable, so that somebody wants them.
    for by_flag in [true, false] {
        let env = env_with_queue();
        fs::remove_dir(env.textfile_dir()).unwrap();
        let mut command = if by_flag { env.offload() } else { with_variables(&env, &[]) };
        let run = run(&mut command);
        assert_eq!(run.code, Some(74), "{}", run.stderr);
        let lines: Vec<&str> = run.stderr.lines().collect();
        assert!(lines.len() == 2 && lines[0].contains("moved 3 values"), "{lines:#?}");
        let message = "handoff-offload: textfile: cannot be written into: No such file";
        assert!(
            lines[1].starts_with(message) && lines[1].ends_with("create the directory or correct the path"),
            "{lines:#?}"
        );
        assert!(is_offloaded(&env) && !env.textfile_dir().exists());
    }
    // A directory stands in the file's place.
    let env = env_with_queue();
    fs::create_dir(env.path("textfile/handoff_offload.prom")).unwrap();
    let run = run(&mut env.offload());
    assert_eq!(run.code, Some(74), "{}", run.stderr);
    assert!(run.stderr.contains("handoff_offload.prom: cannot be replaced"), "{}", run.stderr);
    assert!(is_offloaded(&env));
    assert_eq!(env.textfile_names(), ["handoff_offload.prom"]);
}

#[test]
fn the_default_directory_is_used_only_if_it_is_there() {
    let env = env_with_queue();
    let mounts = MountNamespace::new(&env, "mkdir -p /var/lib; mount -t tmpfs tmpfs /var/lib");
    let mut command = env.bare_offload();
    command.args(["--queue", "queue.jsonl", "--now", NOW]);
    let run = succeed(&mut mounts.inside(&env, &command));
    assert_eq!(run.stderr.lines().count(), 2, "{}", run.stderr);
    let said = "/var/lib/prometheus/node-exporter: does not exist, so there are no metrics\n";
    assert!(run.stderr.ends_with(said), "{}", run.stderr);
    assert!(is_offloaded(&env));
    assert_eq!(mounts.sh(&env, "ls -A /var/lib"), "", "it has made a directory");
    // As a flag or a variable, the same directory is wanted.
    let mut wanted = mounts.inside(&env, &command);
    wanted.env("HANDOFF_TEXTFILE_DIR", "/var/lib/prometheus/node-exporter");
    assert_eq!(crate::test_env::run(&mut wanted).code, Some(74));

    mounts.sh(&env, "mkdir -p /var/lib/prometheus/node-exporter");
    succeed(&mut mounts.inside(&env, &command));
    assert_eq!(mounts.sh(&env, "ls -A /var/lib/prometheus/node-exporter"), "handoff_offload.prom\n");
}

// Queues.

/// One of a version that nobody knows.
const UNREADABLE_LEDGER: &str = "{\"id\":\"ledger\",\"ts\":1,\"kind\":\"ledger\",\"from\":\"\",\"to\":\"\",\"payload\":{\"version\":2},\"status\":\"ledger\"}\n";

/// A ledger line with so many records done, which lists these generations.
fn ledger(done: u32, generations: &str) -> String {
    let cell =
        format!(r#"{{"role":"researcher","kind":"classify","records":{done},"done":{done},"spend_usd":"0.25"}}"#);
    let totals =
        format!(r#"{{"roles":["researcher"],"kinds":["classify"],"models":[],"cells":[{cell}],"reclaimed_bytes":7}}"#);
    format!(
        r#"{{"id":"ledger","ts":1,"kind":"ledger","from":"handoff","to":"","payload":{{"version":1,"totals":{totals},"generations":{generations}}},"status":"ledger"}}"#
    ) + "\n"
}

#[test]
fn without_a_queue_there_is_nothing_to_do_and_nothing_is_pruned() {
    let env = TestEnv::new();
    old_blob(&env, "orphan");
    let before = everything(&env, "blob");
    let run = succeed(&mut env.offload());
    let lines: Vec<&str> = run.stderr.lines().collect();
    let message =
        "handoff-offload: queue.jsonl: does not exist, so there is nothing to do: if it should, correct the path";
    assert!(lines.len() == 2 && lines[0] == message && lines[1].contains("nothing over 8.0 KiB to move"), "{lines:#?}");
    assert_eq!(everything(&env, "blob"), before);
    assert_metrics(&env, &Expected { written: Some((0.0, 0.0)), ..Expected::of_first_run() }, "without a queue");
    let outcome = json_of(&succeed(env.offload().args(["--json", "-q"])));
    assert_eq!((&outcome["moved"]["records"], &outcome["pruned"]["objects"]), (&json!(0), &json!(0)));
    let preview = json_of(&succeed(env.offload().args(["--json", "--dry-run"])));
    assert_eq!((&preview["moved"]["records"], &preview["pruned"]["objects"]), (&json!(0), &json!(0)));
    assert_eq!(names_in(&env.path(".")), ["blob", "textfile"], "a lock file was made");

    // No store either: none is made.
    let env = TestEnv::new();
    succeed(&mut env.offload());
    assert_eq!(names_in(&env.path(".")), ["textfile"]);
}

#[test]
fn a_queue_that_should_be_there_is_no_missing_one() {
    let env = TestEnv::new();
    old_blob(&env, "orphan");
    let before = everything(&env, "blob");
    let mut unmounted = env.bare_offload();
    unmounted.args(["--queue", "unmounted/queue.jsonl", "--blob-dir", "blob", "--textfile-dir", "textfile"]);
    assert_message(
        &mut unmounted,
        74,
        "unmounted/queue.jsonl: cannot be read: its directory: No such file or directory",
    );
    env.write("queue.gen.3", queue());
    assert_message(
        &mut env.offload(),
        74,
        "queue.jsonl: is missing, though it has an earlier generation, ./queue.gen.3",
    );
    fs::remove_file(env.path("queue.gen.3")).unwrap();
    symlink("moved-away.jsonl", env.path("queue.jsonl")).unwrap();
    assert_message(
        &mut env.offload(),
        74,
        "queue.jsonl: cannot be opened: it is a symbolic link to a file that is missing",
    );
    assert_eq!(everything(&env, "blob"), before, "something was pruned");
    assert_eq!(names_in(&env.path(".")), ["blob", "queue.jsonl", "textfile"]);
}

#[test]
fn a_busy_lock_is_told_and_nothing_is_done() {
    let env = env_with_queue();
    // There is no queue lock yet, so that its holder makes it.
    let (holder, id) = hold_lock(&env, "queue.lock", "exclusive");
    old_blob(&env, "orphan");
    let before = everything(&env, "blob") + &everything(&env, "queue.jsonl");
    let unchanged = |context: &str| {
        assert_eq!(everything(&env, "blob") + &everything(&env, "queue.jsonl"), before, "{context}");
        assert_metrics(&env, &Expected { pruned: None, ..Expected::of_failure(0.0) }, context);
    };
    let patience = ["--lock-timeout", "100ms"];
    let message = format!("queue.lock: still locked after 100ms by process {id} (python");
    let busy = assert_message(env.offload().args(patience), 75, &message);
    assert!(
        busy.stderr.ends_with(": try again\n") && busy.took < Duration::from_secs(5),
        "{}: {:?}",
        busy.stderr,
        busy.took
    );
    unchanged("the queue is locked");
    assert_message(env.offload().args(patience).arg("--dry-run"), 75, &message);
    holder.finish();

    // A reader of the queue keeps it from being rewritten or pruned, not from being read.
    let (holder, _) = hold_lock(&env, "queue.lock", "shared");
    assert_message(env.offload().args(patience), 75, "queue.lock: still locked after 100ms");
    assert!(!is_offloaded(&env) && env.path(reference("orphan")).exists());
    succeed(env.offload().args(patience).arg("--dry-run"));
    holder.finish();
    fs::remove_file(env.path(reference("orphan"))).unwrap();

    // Nobody puts while somebody prunes.
    let holder = hold_store(&env, "--exclusive");
    let message = format!("blob: still locked after 100ms by process {} (", holder.id());
    assert_message(env.offload().args(patience), 75, &message);
    assert!(!is_offloaded(&env));
    holder.finish();
    // Several may put, and nobody prunes meanwhile.
    old_blob(&env, "orphan");
    let holder = hold_store(&env, "--shared");
    let run = run(env.offload().args(patience).arg("--json"));
    assert_eq!(run.code, Some(75), "{}", run.stderr);
    assert!(run.stderr.contains("blob: still locked after 100ms by process"), "{}", run.stderr);
    assert_eq!((&json_of(&run)["moved"]["values"], &json_of(&run)["pruned"]), (&json!(3), &Value::Null));
    assert!(is_offloaded(&env) && env.path(reference("orphan")).exists());
    holder.finish();
    succeed(env.offload().args(patience));
    assert!(!env.path(reference("orphan")).exists());
}

#[test]
fn a_lock_that_is_no_file_of_its_own_is_refused() {
    for (lock, message) in [
        (
            "queue.jsonl",
            "queue.jsonl: is the queue itself, and a new file would take its place: lock a file of its own",
        ),
        ("textfile", "textfile: cannot be opened: it is a directory, not a file"),
        ("nowhere/queue.lock", "nowhere/queue.lock: cannot be the lock file: its directory: No such file or directory"),
    ] {
        let env = env_with_queue();
        let before = everything(&env, "queue.jsonl");
        assert_message(env.offload().args(["--lock", lock]), 74, message);
        assert_eq!(everything(&env, "queue.jsonl"), before, "{lock}");
        assert_metrics(&env, &Expected::of_failure(0.0), lock);
    }
}

#[test]
fn a_ledger_that_cannot_be_read_stops_everything() {
    let torn = "{\"id\":\"ledger\",\"ts\":1,\"kind\":\"led\n".to_owned();
    let twice = ledger(1, "{}").replace("\"version\":1", "\"version\":1,\"version\":1");
    for bad in [UNREADABLE_LEDGER.to_owned(), torn, twice] {
        for place in 0..2 {
            let env = env_with_queue();
            let contents = if place == 0 { bad.clone() + &queue() } else { queue() + &bad };
            env.write("queue.jsonl", &contents);
            let before = everything(&env, "queue.jsonl");
            let message = format!("queue.jsonl:{}: the ledger cannot be read (", if place == 0 { 1 } else { 5 });
            let run = assert_message(&mut env.offload(), 65, &message);
            let advice = ": mend it as the README says of a damaged ledger; without it, counters start again\n";
            assert!(run.stderr.ends_with(advice), "{}", run.stderr);
            assert_eq!(everything(&env, "queue.jsonl"), before);
            assert_eq!(names_in(&env.path(".")), ["queue.jsonl", "textfile"], "{bad}");
            assert_metrics(&env, &Expected::of_failure(0.0), &bad);
            assert_message(env.offload().arg("--dry-run"), 65, &message);
        }
    }
}

#[test]
fn no_counter_changes_however_many_ledgers_there_are() {
    for (ledgers, lists) in [(1, "{}"), (2, "{}"), (3, "{\"1\":10,\"2\":20}")] {
        let env = TestEnv::new();
        let mut contents = queue();
        for number in 0..ledgers {
            let line = ledger(number + 3, lists);
            contents = if number % 2 == 0 { line + &contents } else { contents + &line };
        }
        env.write("queue.jsonl", &contents);
        let before = env.samples();
        let records = f64::from((0..ledgers).map(|number| number + 3).sum::<u32>() + 3);
        let records_of = |samples: &Samples| crate::exposition::sum(samples, "handoff_records_total", &[]);
        assert!((records_of(&before) - records).abs() < 0.5, "{ledgers} ledgers: {}", records_of(&before));
        assert!((value(&before, "handoff_queue_oversized_records", &[]) - 2.0).abs() < 0.5);
        succeed(&mut env.offload());
        let after = env.samples();
        assert_eq!(differences(&counters(after.clone()), &counters(before)), Vec::<String>::new(), "{ledgers} ledgers");
        for (name, expected) in [
            ("handoff_queue_oversized_records", 0.0),
            ("handoff_blob_objects", 2.0),
            ("handoff_blob_bytes", 18_000.0),
            ("handoff_blob_missing_references", 0.0),
        ] {
            assert!((value(&after, name, &[]) - expected).abs() < 0.5, "{name}");
        }
        let lines = fs::read_to_string(env.path("queue.jsonl")).unwrap();
        assert!(lines.contains(&moved("one", &[&large('x')])), "{lines}");
        // A number that some ledger lists is never given to another generation.
        let expected = if lists == "{}" { "queue.gen.1" } else { "queue.gen.3" };
        assert!(env.path(expected).exists(), "{:?}", names_in(&env.path(".")));
    }
}

#[test]
fn a_run_with_nothing_to_do_changes_nothing() {
    let env = TestEnv::new();
    let contents =
        record("queued", "r", "queued") + "\n\u{feff}not json\r\n" + &moved("done", &[&large('x')]) + "a tail";
    env.write("queue.jsonl", contents);
    fs::set_permissions(env.path("queue.jsonl"), Permissions::from_mode(0o640)).unwrap();
    old_blob(&env, &large('x'));
    let before = everything(&env, "queue.jsonl") + &everything(&env, "blob");
    for _ in 0..2 {
        assert_eq!(json_of(&succeed(env.offload().arg("--json")))["replaced"], false);
        assert_eq!(everything(&env, "queue.jsonl") + &everything(&env, "blob"), before);
        // Not even a lock file: it has only read.
        assert_eq!(names_in(&env.path(".")), ["blob", "queue.jsonl", "textfile"]);
    }
}

// Pruning.

/// An empty queue and a store with these blobs.
fn env_with_old_blobs(contents: &[&str]) -> TestEnv {
    let env = TestEnv::new();
    env.write("queue.jsonl", "");
    for content in contents {
        old_blob(&env, content);
    }
    env
}

#[test]
fn what_nothing_refers_to_goes_when_the_grace_is_over_and_not_a_second_before() {
    let micro = Duration::from_micros(1);
    let put = [
        ("long ago", Duration::ZERO),
        ("a second before", LIMIT.saturating_sub(SECOND)),
        ("just before", LIMIT.saturating_sub(micro)),
        ("at the limit", LIMIT),
        ("just after", LIMIT + micro),
        ("a second after", LIMIT + SECOND),
        ("now", LIMIT + SECOND * 14 * 86_400),
        ("in the future", LIMIT + SECOND * 900 * 86_400),
    ];
    let env = TestEnv::new();
    env.write("queue.jsonl", record("small", "patcher", "done"));
    for (content, time) in put {
        put_at(&env, content, time);
    }
    let removed: usize = put[..3].iter().map(|(content, _)| content.len()).sum();
    let expected = json!({ "objects": 3, "bytes": removed });
    let preview = succeed(env.offload().arg("--dry-run"));
    let text = format!("move 0 values out of 0 records\nremove 3 blobs that nothing refers to, {removed} B\n");
    assert_eq!(String::from_utf8(preview.stdout).unwrap(), text);
    assert_eq!(json_of(&succeed(env.offload().args(["--dry-run", "--json"])))["pruned"], expected);
    assert_eq!(blobs_in(&env.path("blob")).len(), put.len());

    let run = succeed(env.offload().arg("--json"));
    assert_eq!(json_of(&run)["pruned"], expected);
    let message = format!("nothing over 8.0 KiB to move; removed 3 blobs that nothing refers to, {removed} B\n");
    assert!(run.stderr.ends_with(&message), "{}", run.stderr);
    assert_eq!(blobs_in(&env.path("blob")), digests(&put[3..].iter().map(|(content, _)| *content).collect::<Vec<_>>()));
    assert_metrics(
        &env,
        &Expected { written: Some((0.0, 0.0)), pruned: Some(3.0), ..Expected::of_first_run() },
        "after pruning",
    );
    // The same time again: nothing more. A microsecond later: that at the limit.
    assert_eq!(json_of(&succeed(env.offload().arg("--json")))["pruned"]["objects"], 0);
    let mut later = env.bare_offload();
    later.args([
        "--queue",
        "queue.jsonl",
        "--textfile-dir",
        "textfile",
        "--now",
        "2026-11-29T12:00:00.000001Z",
        "--json",
    ]);
    assert_eq!(json_of(&succeed(&mut later))["pruned"]["objects"], 1);
    assert!(!env.path(reference("at the limit")).exists() && env.path(reference("just after")).exists());
}

#[test]
fn the_longest_grace_keeps_everything_and_none_keeps_what_is_not_older_than_now() {
    for grace in ["18446744073709551615s", "584542046090y", "100y"] {
        let env = env_with_old_blobs(&["orphan"]);
        succeed(env.offload().args(["--prune-after", grace]));
        assert!(env.path(reference("orphan")).exists(), "{grace}");
    }
    let env = TestEnv::new();
    env.write("queue.jsonl", "");
    let now = LIMIT + SECOND * 14 * 86_400;
    let (before, at) = (put_at(&env, "before", now.saturating_sub(Duration::from_micros(1))), put_at(&env, "at", now));
    succeed(env.offload().args(["--prune-after", "0s"]));
    assert!(!before.exists() && at.exists());
}

/// A name for each place beside the queue in which a reference counts, and what is written there.
fn places() -> Vec<(&'static str, String)> {
    let bare = |content: &str| format!("\0\u{1}… {} …", reference(content));
    vec![
        ("queue.jsonl", String::new()),
        ("queue.gen.1", bare("listed") + &"x".repeat(300_000)),
        ("queue.gen.77", bare("unlisted")),
        (".queue.jsonl.4711.abcdef.tmp", bare("temporary")),
        ("other.jsonl", bare("other")),
        ("other.gen.1", bare("other generation")),
        ("queue.jsonl.bak", bare("backup")),
        (".hidden", bare("hidden")),
        ("without a newline", "x".repeat(262_144 - 40) + &reference("across two readings")),
        ("twice", reference("twice") + "/" + &reference("twice too")),
        // A digest alone is enough, whatever has become of what was around it.
        ("digests", format!("\"sha256\":\"{}\" blob/00/{}", sha256("digest alone"), sha256("torn"))),
    ]
}

/// Contents whose blobs are referred to in [`places`].
const REFERRED: [&str; 12] = [
    "listed",
    "unlisted",
    "temporary",
    "other",
    "other generation",
    "backup",
    "hidden",
    "across two readings",
    "twice",
    "twice too",
    "digest alone",
    "torn",
];
/// The same for those in the queue, by the sort of their line.
const IN_QUEUE: [&str; 6] = ["handle", "malformed", "in doubt", "too long", "ledger", "tail"];

#[test]
fn a_reference_in_any_file_of_the_directory_keeps_a_blob() {
    let contents: Vec<&str> = REFERRED.into_iter().chain(IN_QUEUE).collect();
    let env = env_with_old_blobs(&contents);
    for (name, text) in places() {
        env.write(name, text);
    }
    let doubtful = moved("x", &["in doubt"]).replace("\"status\"", "\"status\":\"done\",\"status\"");
    let long = format!("{}{}{}\n", "y".repeat(6_000), reference("too long"), "y".repeat(6_000));
    // All of the generation has been taken over: it goes with this run, but after pruning.
    let listed = fs::metadata(env.path("queue.gen.1")).unwrap().len();
    let lists = ledger(1, &format!("{{\"1\":{listed}}}"));
    let lists = lists.replace("\"roles\":[\"researcher\"]", &format!("\"roles\":[\"{}\"]", reference("ledger")));
    let queue = lists
        + &moved("x", &["handle"])
        + "{\"broken\": "
        + &handle("malformed")
        + "\n"
        + &doubtful
        + &long
        + &handle("tail");
    env.write("queue.jsonl", &queue);
    // Nothing of this is a reference.
    let hash = sha256("longer");
    let near = [
        format!("blob/{}/{hash}0", &hash[..2]),
        format!("blob/{}/{}", sha256("upper")[..2].to_uppercase(), sha256("upper").to_uppercase()),
        format!("{} {}", &reference("in two parts")[..30], &reference("in two parts")[30..]),
    ];
    env.write("near", near.join("\n"));
    let unwanted = ["longer", "upper", "in two parts", "in a subdirectory"];
    for content in unwanted {
        old_blob(&env, content);
    }
    fs::create_dir(env.path("subdirectory")).unwrap();
    env.write("subdirectory/queue.jsonl", reference("in a subdirectory"));
    // What can't refer to anything is not waited for.
    assert_eq!(run(env.command(tool("mkfifo", "coreutils")).arg("fifo")).code, Some(0));
    let _socket = UnixListener::bind(env.path("socket")).unwrap();
    symlink("nowhere", env.path("dangling")).unwrap();
    symlink("/dev/zero", env.path("zero")).unwrap();
    env.write("empty", "");

    let expected =
        json!({ "objects": unwanted.len(), "bytes": unwanted.iter().map(|content| content.len()).sum::<usize>() });
    let command = || {
        let mut command = env.offload();
        command.args(["--json", "--max-line", "10000"]);
        command
    };
    assert_eq!(json_of(&succeed(command().arg("--dry-run")))["pruned"], expected);
    assert_eq!(json_of(&succeed(&mut command()))["pruned"], expected);
    assert_eq!(blobs_in(&env.path("blob")), digests(&contents));
    assert!(fs::read_to_string(env.path("queue.jsonl")).unwrap() == queue);
    assert!(!env.path("queue.gen.1").exists());

    // It was these files that kept them, and nothing else: each goes with its file.
    for (name, _) in places().iter().skip(1).filter(|(name, _)| env.path(name).exists()) {
        fs::remove_file(env.path(name)).unwrap();
    }
    assert_eq!(json_of(&succeed(&mut command()))["pruned"]["objects"], REFERRED.len());
    assert_eq!(blobs_in(&env.path("blob")), digests(&IN_QUEUE));
    env.write("queue.jsonl", "");
    assert_eq!(json_of(&succeed(&mut command()))["pruned"]["objects"], IN_QUEUE.len());
    assert_eq!(blobs_in(&env.path("blob")), Vec::<String>::new());
}

#[test]
fn what_a_kept_blob_refers_to_is_kept_at_any_depth() {
    // Not at the beginning, which a handle shows.
    let refers = |to: &str| format!("{} [{}]", large('x'), reference(to));
    // So long that no order in which a store may be listed has them one after the other.
    let mut chain = vec!["the last".to_owned()];
    for _ in 0..12 {
        chain.push(refers(chain.last().unwrap()));
    }
    let unwanted = ["unwanted second".to_owned(), refers("unwanted second")];
    let recent = ["of a recent one".to_owned(), refers("of a recent one")];
    let all: Vec<&str> = chain.iter().chain(&unwanted).chain(&recent).map(String::as_str).collect();
    let env = env_with_old_blobs(&all);
    // It stays for its age alone, and what it refers to stays with it.
    put_at(&env, &recent[1], LIMIT);
    env.write("queue.jsonl", moved("x", &[chain.last().unwrap()]));
    let expected = json!({ "objects": 2, "bytes": unwanted[0].len() + unwanted[1].len() });
    assert_eq!(json_of(&succeed(env.offload().args(["--dry-run", "--json"])))["pruned"], expected);
    assert_eq!(json_of(&succeed(env.offload().arg("--json")))["pruned"], expected);
    let kept: Vec<&str> = chain.iter().chain(&recent).map(String::as_str).collect();
    assert_eq!(blobs_in(&env.path("blob")), digests(&kept));
    assert_eq!(json_of(&succeed(env.offload().arg("--json")))["pruned"]["objects"], 0);
    assert_eq!(blobs_in(&env.path("blob")), digests(&kept));
    // Without the first, all of its chain go; when the other is old, it goes with its own.
    env.write("queue.jsonl", "");
    for content in &kept {
        old_blob(&env, content);
    }
    assert_eq!(json_of(&succeed(env.offload().arg("--json")))["pruned"]["objects"], kept.len());
}

#[test]
fn what_becomes_wanted_while_pruning_waits_for_its_locks_stays() {
    let second = format!("{} {}", large('x'), reference("nested"));
    let env = env_with_old_blobs(&["orphan", "refreshed", "referred to", &second, "nested"]);
    let holder = hold_store(&env, "--shared");
    thread::scope(|scope| {
        let pruning = scope.spawn(|| succeed(env.offload().args(["--json", "--lock-timeout", "60s"])));
        let mut waits = 0;
        // It has chosen what to remove, and waits for those who put.
        while !fs::read_to_string("/proc/locks").unwrap().lines().any(|line| {
            let inode = format!(":{} ", fs::metadata(env.path("blob")).unwrap().ino());
            line.contains("->") && line.contains(&inode)
        }) {
            assert!(!pruning.is_finished() && waits < 2_000, "it doesn't wait");
            waits += 1;
            thread::sleep(Duration::from_millis(5));
        }
        set_time(&env.path(reference("refreshed")), LIMIT + SECOND);
        env.write("queue.jsonl", moved("one", &["referred to"]) + &moved("two", &[&second]));
        holder.finish();
        let outcome = json_of(&pruning.join().unwrap());
        assert_eq!(outcome["pruned"], json!({ "objects": 1, "bytes": "orphan".len() }));
    });
    assert_eq!(blobs_in(&env.path("blob")), digests(&["refreshed", "referred to", &second, "nested"]));
}

#[test]
fn putting_the_same_again_renews_the_grace() {
    let start = SystemTime::now();
    let is_new = |path: &Path| (start - SECOND..=SystemTime::now() + SECOND).contains(&modified(path));
    let env = TestEnv::new();
    let (x, y) = (large('x'), large('y'));
    env.write("queue.jsonl", carrying("one", &[&x, &y]));
    // Within the grace, or pruning would come first.
    let known = put_at(&env, &x, LIMIT + SECOND);
    let unchanged = put_at(&env, "not put", LIMIT + SECOND);
    let inode = fs::metadata(&known).unwrap().ino();
    let outcome = json_of(&succeed(env.offload().arg("--json")));
    assert_eq!(outcome["blobs"], json!({ "written": 1, "written_bytes": y.len(), "reused": 1 }));
    assert_eq!(fs::metadata(&known).unwrap().ino(), inode, "it was written again");
    assert!(is_new(&known), "{:?}", modified(&known));
    assert_eq!(modified(&unchanged), SystemTime::UNIX_EPOCH + LIMIT + SECOND);

    // What is too old and unwanted is removed first, and then written as anything else is.
    let env = env_with_old_blobs(&[&x]);
    env.write("queue.jsonl", carrying("one", &[&x]));
    let outcome = json_of(&succeed(env.offload().arg("--json")));
    assert_eq!((&outcome["pruned"]["objects"], &outcome["blobs"]["written"]), (&json!(1), &json!(1)));
    assert!(fs::read_to_string(env.path(reference(&x))).unwrap() == x);
    assert_eq!(lines_after_ledger(&env), moved("one", &[&x]));
}

#[test]
fn a_link_to_the_queue_or_to_another_keeps_what_is_referred_to_behind_it() {
    // The queue is a link: what lies beside the link counts, and what lies beside the file.
    let contents = ["in the queue", "beside the link", "beside the file", "generation"];
    let env = env_with_old_blobs(&contents);
    fs::create_dir(env.path("real")).unwrap();
    fs::remove_file(env.path("queue.jsonl")).unwrap();
    symlink("real/queue.jsonl", env.path("queue.jsonl")).unwrap();
    env.write("real/queue.jsonl", moved("x", &["in the queue"]));
    env.write("backup", reference("beside the link"));
    env.write("real/backup", reference("beside the file"));
    env.write("real/queue.gen.5", reference("generation"));
    old_blob(&env, "orphan");
    assert_eq!(json_of(&succeed(env.offload().arg("--json")))["pruned"]["objects"], 1);
    assert_eq!(blobs_in(&env.path("blob")), digests(&contents));

    // Another queue that shares the store is a link, relative or absolute, over another link.
    let contents = ["relative", "absolute", "link to a link"];
    let env = env_with_old_blobs(&contents);
    fs::create_dir_all(env.path("elsewhere/deep")).unwrap();
    for content in contents {
        env.write(&format!("elsewhere/deep/{content}.jsonl"), moved("x", &[content]));
    }
    symlink("elsewhere/deep/relative.jsonl", env.path("one.jsonl")).unwrap();
    symlink(env.path("elsewhere/deep/absolute.jsonl"), env.path("two.jsonl")).unwrap();
    symlink("deep/link to a link.jsonl", env.path("elsewhere/three.jsonl")).unwrap();
    symlink("elsewhere/three.jsonl", env.path("three.jsonl")).unwrap();
    old_blob(&env, "orphan");
    assert_eq!(json_of(&succeed(env.offload().arg("--json")))["pruned"]["objects"], 1);
    assert_eq!(blobs_in(&env.path("blob")), digests(&contents));
}

/// Escapes that mean the same: PHP's encoder writes the first of its own accord, others may write the second.
#[test]
fn a_handle_that_is_written_with_escapes_keeps_its_blob_too() {
    for slash in ["\\/", "\\u002f", "\\u002F"] {
        let env = env_with_old_blobs(&["referred to"]);
        let escaped = moved("one", &["referred to"])
            .replace(&reference("referred to"), &reference("referred to").replace('/', slash));
        env.write("queue.jsonl", &escaped);
        // It is a handle: however small the limit is, nothing of it is moved.
        let outcome = json_of(&succeed(env.offload().args(["--json", "--max-bytes", "32"])));
        assert_eq!(outcome["moved"]["values"], 0, "{slash}");
        assert_eq!(outcome["pruned"]["objects"], 0, "{slash}");
        assert!(env.path(reference("referred to")).exists(), "{slash}");
    }
}

#[test]
fn a_link_that_leads_nowhere_does_not_keep_everything_from_being_pruned() {
    for target in ["nowhere", "nowhere/deeper", "queue.jsonl/file", "self"] {
        let env = env_with_old_blobs(&["orphan"]);
        symlink(target, env.path("self")).unwrap();
        assert_eq!(json_of(&succeed(env.offload().arg("--json")))["pruned"]["objects"], 1, "{target}");
    }
}

#[test]
fn a_busy_lock_is_waited_for_and_told_only_once() {
    let env = env_with_old_blobs(&["orphan"]);
    let (_holder, _) = hold_lock(&env, "queue.lock", "exclusive");
    let busy = run(env.offload().args(["--lock-timeout", "1s"]));
    assert_eq!((busy.code, busy.stderr.lines().count()), (Some(75), 1), "{}", busy.stderr);
    assert!(busy.took < Duration::from_millis(1_800), "{:?}", busy.took);
}
