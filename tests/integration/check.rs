//! `handoff check`: what it finds in a queue, and that malformed lines are put aside without a loss, whenever it is killed.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::Command;

use rustix::fs::{XattrFlags, getxattr, setxattr};
use serde_json::{Value, json};

use crate::exposition::differences;
use crate::holdings::{assert_same_lines, holdings, pieces};
use crate::kill_and_inject::Call;
use crate::strace::{self, Tally, add, changes_something, context_of, fail_with, own_calls};
use crate::test_env::{
    Run, TestEnv, append, copy_of, counters, is_root, mode, names_in, record, run, shortened, small_queue,
};

fn ledger(totals: &str, generations: &str) -> String {
    format!(
        r#"{{"id":"ledger","ts":1795950000,"kind":"ledger","from":"handoff","to":"","payload":{{"version":1,"totals":{totals},"generations":{{{generations}}}}},"status":"ledger"}}"#
    ) + "\n"
}

/// A record with more members.
fn with(id: &str, status: &str, members: &str) -> String {
    record(id, "researcher", status).replace("}\n", &format!(",{members}}}\n"))
}

/// Asserts what a check finds, one line a finding, and how it ends.
fn assert_finds(env: &TestEnv, arguments: &[&str], code: i32, expected: &[&str]) -> Run {
    let run = run(env.handoff("check").args(arguments));
    let stdout = String::from_utf8(run.stdout.clone()).unwrap();
    assert_eq!(stdout.lines().collect::<Vec<_>>(), expected, "{}", run.stderr);
    assert_eq!(run.code, Some(code), "{stdout}{}", run.stderr);
    run
}

#[test]
fn a_queue_without_fault_is_just_counted() {
    let env = TestEnv::new();
    env.write("queue.jsonl", ledger("{}", "") + &small_queue() + "\n \r\n" + &ledger("{}", ""));
    env.write("queue.lock", "");
    let run = assert_finds(&env, &[], 0, &[]);
    assert_eq!(run.stderr, "handoff: queue.jsonl: 7 lines, 3 records: 0 problems, 0 notes\n");
    let run = run_quietly(&env, &["--json"]);
    let json: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!(
        json,
        json!({"queue": "queue.jsonl", "lines": 7, "records": 3, "problems": [], "notes": [], "quarantined": null})
    );
}

fn run_quietly(env: &TestEnv, arguments: &[&str]) -> Run {
    run(env.handoff("check").arg("-q").args(arguments))
}

#[test]
fn each_fault_is_told_with_its_line() {
    let env = TestEnv::new();
    let digest = "ab".to_owned() + &"0".repeat(62);
    let reference = format!("blob/ab/{digest}");
    // Two of at most 10 s and one of 30 to 60 s make 30 s at least.
    let cell = |more: &str| format!(r#"{{"cells":[{{"role":"r","kind":"k",{more}}}]}}"#);
    let lines = [
        ledger(
            &cell(r#""records":1,"done":2,"queue_wait":{"buckets":[2,0,1,0,0,0,0,0,0,0,0,0,0],"sum_us":29999999}"#),
            "",
        ),
        record("plain", "researcher", "queued"),
        "not json\n".to_owned(),
        record("plain", "patcher", "done"),
        with("doubtful", "queued", r#""status":"queued""#),
        with("doubtful-too", "done", r#""cost":NaN"#),
        record("paused", "researcher", "paused"),
        with("seconds", "done", r#""started_ts":1795950,"finished_ts":1795954000"#),
        with("skewed", "done", r#""finished_ts":1795953899"#),
        with("future", "done", r#""finished_ts":1795953901"#),
        with("dangling", "done", &format!(r#""result":"{reference}""#)),
        with("dangling-too", "done", &format!(r#""result":["{reference}","{reference}"]"#)),
        with("held", "running", r#""owner":{"host":"elsewhere","boot_id":"b","pid":1,"start_time":1}"#),
        "\u{feff}[1]\n".to_owned(),
    ];
    env.write("queue.jsonl", [lines.concat().as_bytes(), b"\xff\n", br#"{"id":"torn"#].concat());
    let found = [
        "queue.jsonl:1: implausible_totals: the totals of role r and kind k can't be so: 2 are done, of 1 records",
        "queue.jsonl:1: implausible_totals: the totals of role r and kind k can't be so: the buckets of queue_wait don't make its sum",
        "queue.jsonl:3: not_json: no JSON at byte 1",
        "queue.jsonl:4: duplicate_id: record plain: has the same id as the record in queue.jsonl:2",
        "queue.jsonl:5: duplicate_key: record doubtful: is in doubt, and queued: nobody can take it",
        "queue.jsonl:6: note: non_finite_number: record doubtful-too: is in doubt, and done: it is kept for ever",
        "queue.jsonl:7: unknown_status: record paused: has a status that is none of the format's: nobody acts on it",
        "queue.jsonl:8: implausible_time: record seconds: `started_ts` is 1970-01-21T18:52:30Z: is it in another unit?",
        "queue.jsonl:8: future_time: record seconds: `finished_ts` lies in the future: 2026-11-29T12:06:40Z",
        "queue.jsonl:10: future_time: record future: `finished_ts` lies in the future: 2026-11-29T12:05:01Z",
        &format!("queue.jsonl:11: missing_blob: {reference} is missing, and is referred to here first of 2 places"),
        "queue.jsonl:13: note: unknown_owner: record held: runs, and nobody here can tell whether its owner lives",
        "queue.jsonl:14: not_an_envelope: not a JSON object",
        "queue.jsonl:15: not_utf8: invalid UTF-8 at byte 1",
        "queue.jsonl: note: unterminated: 11 bytes after the last newline may be a write in flight: if they stay, their writer has died, and the next run of handoff-compact ends the line",
    ];
    let run = assert_finds(&env, &[], 1, &found);
    assert_eq!(run.stderr, "handoff: queue.jsonl: 15 lines, 11 records: 12 problems, 3 notes\n");

    let run = run_quietly(&env, &["--json"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(1), ""));
    let json: Value = serde_json::from_slice(&run.stdout).unwrap();
    let what = |list: &str| -> Vec<String> {
        json[list].as_array().unwrap().iter().map(|item| item["what"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(what("notes"), ["non_finite_number", "unknown_owner", "unterminated"]);
    assert_eq!(what("problems").len(), 12);
    assert_eq!(
        json["problems"][3],
        json!({"what": "duplicate_id", "file": "queue.jsonl", "line": 4, "id": "plain", "detail": "has the same id as the record in queue.jsonl:2"})
    );

    // The blob is there now.
    fs::create_dir_all(env.path("blob/ab")).unwrap();
    env.write(&reference, "");
    let run = run_quietly(&env, &[]);
    assert!(!String::from_utf8(run.stdout).unwrap().contains("missing_blob"));
}

#[test]
fn a_record_that_what_must_come_next_cannot_be_done_to_is_told() {
    let env = TestEnv::new();
    // Each of these is as long as a line may be, and becomes longer when it is taken, refused or announced.
    let full = |id: &str, status: &str, members: &str| {
        let line = with(id, status, members);
        let filler = "x".repeat(1_025 + "{}".len() - r#"{"text":""}"#.len() - line.len());
        line.replacen("{}", &format!(r#"{{"text":"{filler}"}}"#), 1)
    };
    let notified = r#""notified_ts":1795950000"#;
    let lines = [
        record("taken", "researcher", "queued"),
        full("queued", "queued", r#""x":1"#),
        full("running", "running", r#""x":1"#),
        full("human", "human", r#""x":1"#),
        full("told", "human", notified),
        full("over", "dead", r#""x":1"#),
        full("doubtful", "queued", r#""status":"queued""#),
    ];
    assert!(lines[1..].iter().all(|line| line.len() == 1_025));
    env.write("queue.jsonl", lines.concat());
    let too_long = "its line would be too long: move large values out of it (handoff-offload), or have all tools allow more (--max-line)";
    let found = [
        format!("queue.jsonl:2: stuck: record queued: is queued, and can't be taken: {too_long}"),
        format!("queue.jsonl:3: stuck: record running: is running, and can't be refused: {too_long}"),
        "queue.jsonl:3: note: no_owner: record running: runs without an owner, as workers leave it that don't use handoff".to_owned(),
        format!("queue.jsonl:4: stuck: record human: is human, and can't be announced: {too_long}"),
        "queue.jsonl:7: duplicate_key: record doubtful: is in doubt, and queued: nobody can take it".to_owned(),
    ];
    assert_finds(&env, &["--max-line", "1KiB"], 1, &found.each_ref().map(String::as_str));
    // It is as the check says, and so is the advice.
    let nack =
        |max_line: &str| run(env.handoff("nack").args(["running", "--reason", "r", "--max-line", max_line])).code;
    assert_eq!(nack("1KiB"), Some(65));
    assert_finds(&env, &["--max-line", "2KiB"], 1, &[&found[2], &found[4]]);
    assert_eq!(
        run(env.offload().args(["--max-line", "1KiB", "--max-bytes", "512B", "--preview-bytes", "16", "-q"])).code,
        Some(0)
    );
    let after = String::from_utf8(run_quietly(&env, &["--max-line", "1KiB"]).stdout).unwrap();
    assert!(!after.contains("stuck"), "{after}");
    assert_eq!(nack("1KiB"), Some(0));
}

#[test]
fn every_malformed_line_is_told_and_every_doubled_id() {
    let env = TestEnv::new();
    let lines = 3_000;
    let queue: String = (0..lines)
        .map(|n| if n % 3 == 0 { "x\n".to_owned() } else { record(&format!("id-{}", n % 1_000), "r", "done") })
        .collect();
    env.write("queue.jsonl", queue);
    let stdout = String::from_utf8(run_quietly(&env, &[]).stdout).unwrap();
    assert_eq!(stdout.matches(": not_json: ").count(), 1_000);
    // Each of 1,000 ids stands there twice, in lines of which a third is none: n and n + 1000 differ by one modulo 3.
    assert_eq!(stdout.matches(": duplicate_id: ").count(), 1_000);
}

#[test]
fn generations_are_checked_too() {
    let env = TestEnv::new();
    let old = record("old", "researcher", "queued");
    let reference = format!("blob/cd/cd{}", "1".repeat(62));
    env.write(
        "queue.gen.3",
        old.clone() + &with("late", "queued", &format!(r#""result":"{reference}""#)) + "garbage\n" + &old + "torn",
    );
    env.write("queue.gen.5", "short");
    env.write("queue.gen.6", record("stray", "researcher", "queued"));
    env.write("queue.gen.7", "middle\n".to_owned() + &record("late-2", "researcher", "queued"));
    env.write(
        "queue.jsonl",
        ledger("{}", &format!(r#""3":{},"5":6,"7":3"#, old.len())) + &record("old", "researcher", "done"),
    );
    let path = |name: &str| env.path("").canonicalize().unwrap().join(name).display().to_string();
    let [third, fifth, sixth, seventh] = ["queue.gen.3", "queue.gen.5", "queue.gen.6", "queue.gen.7"].map(path);
    let expected = [
        format!("{third}:2: missing_blob: {reference} is missing, and is referred to here first of 1 places"),
        format!("{third}:3: not_json: no JSON at byte 1"),
        format!("{third}:4: duplicate_id: record old: has the same id as the record in queue.jsonl:2"),
        format!("{seventh}:1: not_json: no JSON at byte 1"),
        "queue.jsonl: note: late_lines: 5 lie in earlier generations, where workers don't see them: the next run of handoff-compact takes them over".to_owned(),
        format!("{third}: note: unterminated: 4 bytes after the last newline may be a write in flight: if they stay, their writer has died, and the next run of handoff-compact ends the line"),
        format!("{fifth}: generation: has 5 bytes, but the queue's ledger says that 6 have been taken over"),
        format!("{sixth}: generation: a generation that the queue's ledger does not list: not read, never deleted: remove it if the queue has all its lines"),
        format!("{seventh}: generation: the ledger says that 3 bytes have been taken over, but there no line begins"),
    ];
    assert_finds(&env, &[], 1, &expected.each_ref().map(String::as_str));
}

#[test]
fn who_may_use_the_files_is_checked() {
    let env = TestEnv::new();
    env.write("queue.jsonl", small_queue());
    env.write("queue.lock", "");
    fs::create_dir(env.path("blob")).unwrap();
    assert_finds(&env, &[], 0, &[]);
    // Under links everything is as it should be too.
    fs::create_dir(env.path("real")).unwrap();
    for name in ["queue.jsonl", "queue.lock"] {
        fs::rename(env.path(name), env.path("real").join(name)).unwrap();
        symlink(Path::new("real").join(name), env.path(name)).unwrap();
    }
    assert_finds(&env, &[], 0, &[]);
    fs::remove_file(env.path("queue.lock")).unwrap();
    env.write("queue.lock", "");
    let real = env.path("real").canonicalize().unwrap();
    let other = format!(
        "queue.lock: lock: there is another lock, {}: workers that use it are not kept out",
        real.join("queue.lock").display()
    );
    assert_finds(&env, &[], 1, &[&other]);
    fs::remove_file(env.path("real/queue.lock")).unwrap();

    for (name, mode) in [("real/queue.jsonl", 0o666), ("queue.lock", 0o666), ("real", 0o777), ("blob", 0o757)] {
        let before = fs::metadata(env.path(name)).unwrap().permissions();
        fs::set_permissions(env.path(name), Permissions::from_mode(mode)).unwrap();
        let shown = match name {
            "real/queue.jsonl" => "queue.jsonl".to_owned(),
            "real" => real.display().to_string(),
            name => name.to_owned(),
        };
        let expected = format!("{shown}: permissions: everybody may write to it (mode {mode:04o}): chmod o-w");
        assert_finds(&env, &[], 1, &[&expected]);
        fs::set_permissions(env.path(name), before).unwrap();
    }
    fs::set_permissions(env.path("blob"), Permissions::from_mode(0o1777)).unwrap();
    assert_finds(&env, &[], 0, &[]);

    fs::hard_link(env.path("real/queue.jsonl"), env.path("copy")).unwrap();
    assert_finds(
        &env,
        &[],
        1,
        &["queue.jsonl: names: has 2 names (hard links), so that it is never rewritten: find -samefile lists them"],
    );
    fs::remove_file(env.path("copy")).unwrap();
    // What a killed run leaves is no fault.
    fs::hard_link(env.path("real/queue.jsonl"), env.path("real/queue.gen.1")).unwrap();
    assert_finds(&env, &[], 0, &[]);
}

#[test]
fn the_owner_of_the_queue_must_be_able_to_lock_it() {
    let env = TestEnv::new();
    env.write("queue.jsonl", small_queue());
    env.write("queue.lock", "");
    let lock = |mode| fs::set_permissions(env.path("queue.lock"), Permissions::from_mode(mode)).unwrap();
    if !is_root() {
        let user = fs::metadata(env.path("queue.jsonl")).unwrap().uid();
        lock(0o444);
        assert_finds(
            &env,
            &[],
            1,
            &[&format!(
                "queue.lock: permissions: the queue's owner, user {user}, may not write to it (mode 0444, user {user}): give it to them"
            )],
        );
        return;
    }
    // Each case: the owner and group of queue and lock, the lock's mode, and what is found.
    let refused = |mode: &str, holder: u32| {
        format!(
            "queue.lock: permissions: the queue's owner, user 501, may not write to it (mode {mode}, user {holder}): give it to them"
        )
    };
    let other = "queue.lock: note: owners: belongs to user 0, but the queue to user 501".to_owned();
    let cases = [
        ((501, 501), (501, 501), 0o600, 0, vec![]),
        ((501, 501), (501, 501), 0o460, 1, vec![refused("0460", 501)]),
        ((501, 501), (0, 501), 0o660, 0, vec![other]),
        ((501, 501), (0, 501), 0o640, 1, vec![refused("0640", 0)]),
        ((501, 501), (0, 0), 0o660, 1, vec![refused("0660", 0)]),
        ((0, 0), (0, 0), 0o400, 0, vec![]),
    ];
    for ((user, group), (lock_user, lock_group), mode, code, expected) in cases {
        chown(env.path("queue.jsonl"), Some(user), Some(group)).unwrap();
        chown(env.path("queue.lock"), Some(lock_user), Some(lock_group)).unwrap();
        lock(mode);
        assert_finds(&env, &[], code, &expected.iter().map(String::as_str).collect::<Vec<_>>());
    }
}

// Putting malformed lines aside.

/// Malformed lines, in their order.
const BAD: [&[u8]; 5] =
    [b"not json", b"\xff\xfe", b"{\"glued\":1}{\"glued\":2}", b"\0\0\0", br#"{"id":"new","protocol_version":3}"#];

/// A queue with malformed lines, a ledger, blank lines, records in doubt and a torn end; all but the malformed come back too.
fn damaged() -> (Vec<u8>, Vec<Vec<u8>>) {
    let totals = r#"{"roles":["researcher"],"kinds":["classify"],"cells":[{"role":"researcher","kind":"classify","records":3,"done":3,"spend_usd":"0.5"}],"reclaimed_bytes":99}"#;
    let good = [
        record("a", "researcher", "queued"),
        with("b", "done", r#""status":"done""#),
        "\r\n".to_owned(),
        record("c", "patcher", "human"),
    ];
    let mut queue = ledger(totals, "").into_bytes();
    queue.extend([BAD[0], b"\n"].concat());
    queue.extend(good[0].as_bytes());
    queue.extend([BAD[1], b"\n", BAD[2], b"\n"].concat());
    queue.extend((good[1].clone() + &good[2]).as_bytes());
    queue.extend([BAD[3], b"\n"].concat());
    queue.extend(good[3].as_bytes());
    queue.extend([BAD[4], b"\n{\"id\":\"torn"].concat());
    let mut lines = pieces(good.concat().as_bytes());
    lines.push(b"{\"id\":\"torn".to_vec());
    (queue, lines)
}

fn bad_lines() -> Vec<u8> {
    BAD.iter().flat_map(|line| [*line, b"\n"].concat()).collect()
}

fn quarantine(env: &TestEnv) -> Command {
    let mut command = env.handoff("check");
    command.args(["--quarantine", "-q"]);
    command
}

#[test]
fn malformed_lines_are_put_aside_and_nothing_else_is() {
    let env = TestEnv::new();
    let (queue, good) = damaged();
    env.write("queue.jsonl", &queue);
    fs::set_permissions(env.path("queue.jsonl"), Permissions::from_mode(0o640)).unwrap();
    setxattr(env.path("queue.jsonl"), "user.note", b"kept", XattrFlags::empty()).unwrap();
    env.write("queue.lock", "");
    let before = counters(env.samples());
    let run = run(env.handoff("check").arg("--quarantine"));
    // The record in doubt is no problem, as it is done, and the torn line is none yet.
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let path = env.path("").canonicalize().unwrap().join("queue.bad.jsonl");
    let moved = format!("handoff: queue.jsonl: moved 5 malformed lines (73 B) to {}\n", path.display());
    assert!(run.stderr.starts_with(&moved), "{}", run.stderr);
    assert_eq!(fs::read(&path).unwrap(), bad_lines());
    assert_same_lines(holdings(&env, "moved"), good, "moved");
    assert_eq!(differences(&counters(env.samples()), &before), Vec::<String>::new());
    assert_eq!(mode(&path), 0o640);
    let mut note = [0; 8];
    assert_eq!(getxattr(&path, "user.note", &mut note[..]), Ok(4));
    assert!(
        getxattr(&path, "user.handoff.uncommitted", &mut note[..]).is_err(),
        "a run that came to its end leaves its note"
    );

    // The same line again is another, and so is a torn one that nobody will complete.
    append(&env, "queue.jsonl", "not json\n");
    let run = run_json(&env);
    assert_eq!(run["quarantined"]["lines"], 2);
    let all = [&bad_lines()[..], b"{\"id\":\"torn\nnot json\n"].concat();
    assert_same_lines(pieces(&fs::read(&path).unwrap()), pieces(&all), "again");
    // There is nothing more to move.
    let run = run_json(&env);
    assert_eq!(run["quarantined"], json!({"lines": 0, "bytes": 0, "file": null}));
    assert_same_lines(pieces(&fs::read(&path).unwrap()), pieces(&all), "nothing more");
}

fn run_json(env: &TestEnv) -> Value {
    let run = run(quarantine(env).arg("--json"));
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    serde_json::from_slice(&run.stdout).unwrap()
}

#[test]
fn the_quarantine_belongs_to_the_owner_of_the_directory_and_is_open_to_nobody_whom_the_queue_is_not_open_to() {
    // Each case: the group and mode of the queue, those of the quarantine if root has made it, and its mode if another has.
    let cases = [
        (602, 0o640, (602, 0o640), 0o640),
        (502, 0o664, (602, 0o644), 0o664),
        (502, 0o640, (602, 0o600), 0o640),
        (602, 0o400, (602, 0o400), 0o400),
    ];
    for (group, queue_mode, (new_group, new_mode), mode_by_user) in cases {
        let env = TestEnv::new();
        env.write("queue.jsonl", small_queue() + "garbage\n");
        env.write("queue.lock", "");
        if is_root() {
            chown(env.path(""), Some(601), Some(602)).unwrap();
            for name in ["queue.jsonl", "queue.lock"] {
                chown(env.path(name), Some(501), Some(group)).unwrap();
            }
        }
        fs::set_permissions(env.path("queue.jsonl"), Permissions::from_mode(queue_mode)).unwrap();
        assert_eq!(run(&mut quarantine(&env)).code, Some(0));
        let metadata = fs::metadata(env.path("queue.bad.jsonl")).unwrap();
        let found = (metadata.uid(), metadata.gid(), mode(&env.path("queue.bad.jsonl")));
        if is_root() {
            assert_eq!(found, (601, new_group, new_mode), "{group} {queue_mode:o}");
        } else {
            assert_eq!(found.2, mode_by_user, "{queue_mode:o}");
        }
        assert_eq!(mode(&env.path("queue.jsonl")), queue_mode);
    }
}

#[test]
fn lines_that_are_too_long_are_put_aside_unread_and_late_ones_too() {
    let env = TestEnv::new();
    let long = "y".repeat(3_000_000);
    let old = record("old", "researcher", "queued");
    env.write("queue.gen.2", old.clone() + "late garbage\n" + &record("late", "patcher", "queued"));
    env.write(
        "queue.jsonl",
        ledger("{}", &format!(r#""2":{}"#, old.len())) + &long + "\n" + &small_queue() + &long + "\n",
    );
    let run = run(quarantine(&env).args(["--max-line", "1MiB"]));
    assert_eq!(
        (run.code, run.stdout.len(), run.stderr.as_str()),
        (Some(0), 0, ""),
        "{}",
        shortened(&String::from_utf8_lossy(&run.stdout))
    );
    assert!(fs::read(env.path("queue.bad.jsonl")).unwrap() == format!("{long}\n{long}\nlate garbage\n").as_bytes());
    let good = small_queue() + &record("late", "patcher", "queued");
    assert_same_lines(holdings(&env, "moved"), pieces(good.as_bytes()), "moved");
}

#[test]
fn an_unreadable_ledger_stays_and_keeps_all_else_from_being_moved() {
    let env = TestEnv::new();
    let queue = format!("not json\n{}{}", ledger("{}", "").replace("\"version\":1", "\"version\":2"), small_queue());
    env.write("queue.jsonl", &queue);
    let run = assert_finds(
        &env,
        &["--quarantine"],
        65,
        &[
            "queue.jsonl:1: not_json: no JSON at byte 1",
            "queue.jsonl:2: unreadable_ledger: the ledger's `version` is not 1: nothing can be rewritten until it is mended",
        ],
    );
    assert!(run.stderr.contains("handoff: queue.jsonl:2: the ledger cannot be read"), "{}", run.stderr);
    assert_eq!(fs::read_to_string(env.path("queue.jsonl")).unwrap(), queue);
    assert!(!env.path("queue.bad.jsonl").exists());
}

#[test]
fn the_quarantine_is_a_file_of_its_own_beside_the_real_queue() {
    let env = TestEnv::new();
    fs::create_dir(env.path("real")).unwrap();
    env.write("real/work.jsonl", small_queue() + "garbage\n");
    symlink("real/work.jsonl", env.path("queue.jsonl")).unwrap();
    assert_eq!(run(&mut quarantine(&env)).code, Some(0));
    assert_eq!(names_in(&env.path("real")), ["work.bad.jsonl", "work.gen.1", "work.jsonl"]);

    // A last line without its end gets one: what somebody has put there by hand, say.
    fs::remove_file(env.path("queue.jsonl")).unwrap();
    env.write("queue.jsonl", small_queue() + "garbage\n");
    env.write("queue.bad.jsonl", "by hand");
    assert_eq!(run(&mut quarantine(&env)).code, Some(0));
    assert_eq!(fs::read_to_string(env.path("queue.bad.jsonl")).unwrap(), "by hand\ngarbage\n");

    // Nobody leads us elsewhere.
    let queue = small_queue() + "garbage\n";
    for planted in ["link", "fifo", "directory", "name"] {
        drop(fs::remove_dir_all(env.path("queue.bad.jsonl")).or_else(|_| fs::remove_file(env.path("queue.bad.jsonl"))));
        env.write("queue.jsonl", &queue);
        env.write("elsewhere", "precious");
        match planted {
            "link" => symlink("elsewhere", env.path("queue.bad.jsonl")).unwrap(),
            "fifo" => assert_eq!(run(env.command("mkfifo").arg("queue.bad.jsonl")).code, Some(0)),
            "directory" => fs::create_dir(env.path("queue.bad.jsonl")).unwrap(),
            _ => fs::hard_link(env.path("elsewhere"), env.path("queue.bad.jsonl")).unwrap(),
        }
        let refused = run(&mut quarantine(&env));
        assert_eq!(refused.code, Some(74), "{planted}: {}", refused.stderr);
        assert!(
            refused.stderr.contains("queue.bad.jsonl: cannot be written, so the queue is left as it was"),
            "{planted}: {}",
            refused.stderr
        );
        assert_eq!(fs::read_to_string(env.path("queue.jsonl")).unwrap(), queue, "{planted}");
        assert_eq!(fs::read_to_string(env.path("elsewhere")).unwrap(), "precious", "{planted}");
    }
}

/// The damaged queue, and a quarantine with a line in it.
fn scene() -> TestEnv {
    let env = TestEnv::new();
    env.write("queue.jsonl", damaged().0);
    env.write("queue.bad.jsonl", "before\n");
    env
}

/// Asserts that the queue and the quarantine hold all lines, the queue none of them twice. Says whether the malformed ones have left it.
fn assert_whole(env: &TestEnv, context: &str) -> bool {
    let (_, good) = damaged();
    let (held, bad) = (holdings(env, context), fs::read(env.path("queue.bad.jsonl")).unwrap());
    let malformed = BAD.map(<[u8]>::to_vec).to_vec();
    let has_left = !held.contains(&malformed[0]);
    if has_left {
        assert_same_lines(held, good, context);
        assert_eq!(bad, [b"before\n", &bad_lines()[..]].concat(), "{context}");
    } else {
        assert_same_lines(held, [good, malformed].concat(), context);
        assert!(
            [b"before\n", &bad_lines()[..]].concat().starts_with(&bad),
            "{context}: {}",
            String::from_utf8_lossy(&bad)
        );
    }
    has_left
}

/// Asserts that runs without disturbance bring everything to an end, with each malformed line in the quarantine once.
fn assert_settles(env: &TestEnv, context: &str) {
    // The torn line may by now have been proven to be left by somebody dead.
    for _ in 0..3 {
        let run = run(&mut quarantine(env));
        assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{context}: the run after it");
    }
    let (_, mut good) = damaged();
    let torn = good.pop().unwrap();
    assert_same_lines(holdings(env, context), good, context);
    let expected = [b"before\n", &bad_lines()[..], &torn, b"\n"].concat();
    assert_eq!(fs::read(env.path("queue.bad.jsonl")).unwrap(), expected, "{context}");
    assert_eq!(names_in(&env.path("")), ["queue.bad.jsonl", "queue.jsonl", "queue.lock", "textfile"], "{context}");
}

fn calls_of(env: &TestEnv) -> Vec<Call> {
    let (run, trace) = strace::traced(env, &quarantine(env), &["-y"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    own_calls(&trace)
}

#[test]
fn killed_before_any_call_it_loses_no_line_and_doubles_none() {
    let scene = scene();
    let calls = calls_of(&copy_of(&scene));
    let commit = calls.iter().position(|call| call.name == "renameat" && call.line.contains("queue.jsonl")).unwrap();
    let mut seen = Tally::new();
    for (index, call) in calls.iter().enumerate() {
        let context = context_of("killed before", call);
        let env = copy_of(&scene);
        let (killed, _) = strace::traced(&env, &quarantine(&env), &["-e", &strace::kill_before(call)]);
        assert_eq!((killed.code, killed.signal), (None, Some(9)), "not {context}: {}", killed.stderr);
        let has_left = assert_whole(&env, &context);
        assert_eq!(has_left, index > commit, "{context}");
        let in_both = !has_left && fs::read(env.path("queue.bad.jsonl")).unwrap().len() > b"before\n".len();
        add(
            &mut seen,
            if has_left {
                "new"
            } else if in_both {
                "in both"
            } else {
                "old"
            },
        );
        assert_settles(&env, &context);
    }
    assert!(["old", "in both", "new"].iter().all(|state| seen.get(*state).is_some_and(|times| *times > 5)), "{seen:?}");
    for name in ["fsetxattr", "fremovexattr", "fsync", "pwrite64", "linkat"] {
        assert!(calls.iter().any(|call| call.name == name), "the run makes no {name}");
    }
}

#[test]
fn killed_once_more_in_the_next_run_it_loses_no_line_and_doubles_none() {
    let scene = scene();
    let calls = calls_of(&copy_of(&scene));
    // When the lines are half written, when they are in both files, and when they have left the queue, but the note hasn't been removed.
    let write =
        calls.iter().rposition(|call| call.name == "pwrite64" && call.line.contains("queue.bad.jsonl")).unwrap();
    let commit = calls.iter().position(|call| call.name == "renameat" && call.line.contains("queue.jsonl")).unwrap();
    for first in [write, commit, commit + 1] {
        let (first, killed) = (&calls[first], copy_of(&scene));
        let (run, _) = strace::traced(&killed, &quarantine(&killed), &["-e", &strace::kill_before(first)]);
        assert_eq!(run.signal, Some(9));
        for second in calls_of(&copy_of(&killed)).iter().filter(|call| changes_something(call)) {
            let context =
                format!("{}; then {}", context_of("killed before", first), context_of("killed before", second));
            let env = copy_of(&killed);
            let (again, _) = strace::traced(&env, &quarantine(&env), &["-e", &strace::kill_before(second)]);
            assert_eq!(again.signal, Some(9), "not {context}: {}", again.stderr);
            assert_settles(&env, &context);
        }
    }
}

#[test]
fn killed_while_the_queue_moves_on_it_doubles_no_line() {
    let scene = scene();
    let calls = calls_of(&copy_of(&scene));
    let commit = calls.iter().position(|call| call.name == "renameat" && call.line.contains("queue.jsonl")).unwrap();
    let env = copy_of(&scene);
    let (killed, _) = strace::traced(&env, &quarantine(&env), &["-e", &strace::kill_before(&calls[commit])]);
    assert_eq!(killed.signal, Some(9));
    // Another tool replaces the queue, and more that is malformed comes.
    append(&env, "queue.jsonl", "\n");
    assert_eq!(run(env.compact().arg("-q")).code, Some(0));
    append(&env, "queue.jsonl", "not json\n");
    assert_eq!(run(&mut quarantine(&env)).code, Some(0));
    let expected = [b"before\n", &bad_lines()[..], b"{\"id\":\"torn\nnot json\n"].concat();
    assert_eq!(fs::read(env.path("queue.bad.jsonl")).unwrap(), expected);
}

#[test]
fn a_call_that_fails_leaves_the_queue_as_it_was_or_says_what_was_done() {
    let scene = scene();
    let calls = calls_of(&copy_of(&scene));
    let mut failures = 0;
    for call in calls.iter().filter(|call| changes_something(call)) {
        let errors: &[&str] = match call.name.as_str() {
            "fsync" | "fdatasync" => &["EIO"],
            "pwrite64" => &["EIO", "ENOSPC"],
            "fsetxattr" => &["ENOSPC", "EPERM"],
            "linkat" | "renameat" => &["EIO", "EPERM"],
            _ => continue,
        };
        for error in errors {
            let context = context_of(&format!("{error} for"), call);
            let env = copy_of(&scene);
            let (failed, _) = strace::traced(&env, &quarantine(&env), &["-e", &fail_with(error, call)]);
            assert_eq!(failed.code, Some(74), "{context}: {}", failed.stderr);
            assert_eq!(failed.stderr.lines().count(), 1, "{context}: {}", failed.stderr);
            if assert_whole(&env, &context) {
                assert!(failed.stderr.contains("has been replaced"), "{context}: {}", failed.stderr);
            }
            assert_settles(&env, &context);
            failures += 1;
        }
    }
    assert!(failures > 20, "only {failures} failures were tried");
}

#[test]
fn lines_are_on_the_disk_before_they_leave_the_queue() {
    let env = scene();
    let (run, trace) = strace::traced(&env, &quarantine(&env), &["-y"]);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let directory = env.path("").display().to_string();
    let deeds: Vec<String> =
        own_calls(&trace).iter().map(|call| strace::deed(call, directory.trim_end_matches('/'))).collect();
    let place = |deed: &str| strace::place(&deeds, deed);
    let last_write = deeds.iter().rposition(|deed| deed.starts_with("pwrite64 queue.bad.jsonl")).unwrap();
    let flushed = deeds[last_write..].iter().position(|deed| deed == "fsync queue.bad.jsonl").unwrap() + last_write;
    let directory_flushed = deeds[flushed..].iter().position(|deed| deed == "fsync DIR").unwrap() + flushed;
    let read_back =
        deeds[last_write..].iter().position(|deed| deed.starts_with("pread64 queue.bad.jsonl")).unwrap() + last_write;
    let noted = place("fsetxattr queue.bad.jsonl");
    let first_flush = place("fsync queue.bad.jsonl");
    assert!(noted < first_flush && first_flush < last_write && read_back < flushed, "{deeds:#?}");
    assert!(
        directory_flushed < place("linkat") && place("renameat NEW") < place("fremovexattr queue.bad.jsonl"),
        "{deeds:#?}"
    );
}
