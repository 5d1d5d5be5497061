//! `handoff blob`: prints blobs, checks the store against the queue, and sums it up, while others go on with their work.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use crate::exposition::value;
use crate::offload_settings::{
    assert_message, carrying, digests, everything, handle, hold_lock, json_of, large, lines_after_ledger, moved, plant,
    put_at, reference, set_time, sha256, stdout, succeed,
};
use crate::test_env::{TestEnv, mode, record, run, start, tell, tool, under};

// Printing a blob.

/// A store with one blob, and no queue: a blob is printed without one.
fn env_with_blob(content: &[u8]) -> TestEnv {
    let env = TestEnv::new();
    plant(&env, content, content);
    env
}

fn cat(env: &TestEnv, blob: &str) -> Command {
    let mut command = env.handoff_blob("cat");
    command.arg(blob);
    command
}

#[test]
fn a_blob_is_printed_by_reference_path_or_digest() {
    for content in [&b"some text\n"[..], b"", b"\0\xff\r\n\x1b[2J", "ünïcödé".as_bytes()] {
        let env = env_with_blob(content);
        let reference = reference(content);
        for name in [reference.as_str(), reference.strip_prefix("blob/").unwrap(), &sha256(content)] {
            let run = succeed(&mut cat(&env, name));
            assert_eq!((run.stdout.as_slice(), run.stderr.as_str()), (content, ""), "{name}");
        }
    }
}

#[test]
fn a_large_blob_is_printed_whole() {
    // Several readings, and no multiple of their size.
    let content: Vec<u8> = (0..5_000_003_u32).map(|number| (number % 251) as u8).collect();
    let env = env_with_blob(&content);
    let run = succeed(&mut cat(&env, &sha256(&content)));
    assert!(run.stdout == content);
    // A byte that is wrong at its very end is noticed, after everything is printed.
    let mut damaged = content.clone();
    *damaged.last_mut().unwrap() ^= 1;
    plant(&env, &content, &damaged);
    let run = crate::test_env::run(&mut cat(&env, &sha256(&content)));
    assert_eq!(run.code, Some(65), "{}", run.stderr);
    assert!(run.stdout == damaged);
}

#[test]
fn a_damaged_blob_is_printed_and_then_refused() {
    for damaged in ["some texT\n", "some text", "some text\n\n", ""] {
        let env = env_with_blob(b"some text\n");
        plant(&env, "some text\n", damaged);
        let reference = reference("some text\n");
        let message = format!(
            "handoff: {reference}: is damaged: its {} bytes have the SHA-256 {}: restore it from a backup\n",
            damaged.len(),
            sha256(damaged)
        );
        for arguments in [&[][..], &["-q"], &["-v"]] {
            let run = run(cat(&env, &reference).args(arguments));
            assert_eq!((run.code, run.stderr.as_str()), (Some(65), message.as_str()), "{damaged:?}");
            assert_eq!(run.stdout, damaged.as_bytes());
        }
    }
}

#[test]
fn a_blob_that_is_not_there_is_an_error() {
    let env = TestEnv::new();
    let reference = reference("never put");
    let message = format!(
        "handoff: {reference}: is not there: if this is the right store (--queue, --blob-dir), restore it from a backup; \
         handoff blob check tells what refers to it\n"
    );
    let missing = |env: &TestEnv, context: &str| {
        let run = assert_message(&mut cat(env, &reference), 74, "is not there");
        assert_eq!((run.stderr.as_str(), run.stdout.len()), (message.as_str(), 0), "{context}");
    };
    missing(&env, "no store");
    fs::create_dir(env.path("blob")).unwrap();
    missing(&env, "no directory");
    fs::create_dir(env.path("blob").join(&sha256("never put")[..2])).unwrap();
    missing(&env, "no blob");
    fs::create_dir(env.path(&reference)).unwrap();
    missing(&env, "a directory");
    // Not the one of which the name is the beginning, nor in another case.
    fs::remove_dir(env.path(&reference)).unwrap();
    plant(&env, "never put", "x");
    fs::rename(env.path(&reference), env.path(format!("{reference}0"))).unwrap();
    missing(&env, "a longer name");
}

#[test]
fn what_is_no_reference_is_wrong_usage() {
    let env = env_with_blob(b"text");
    let before = everything(&env, ".");
    let (hash, reference) = (sha256("text"), reference("text"));
    let upper = hash.to_uppercase();
    let wrong = [
        String::new(),
        " ".to_owned(),
        "blob".to_owned(),
        hash[1..].to_owned(),
        format!("{hash}0"),
        format!(" {hash}"),
        upper.clone(),
        format!("blob/{}/{upper}", &upper[..2]),
        format!("blob/{hash}"),
        format!("blob/00/{hash}"),
        format!("/{reference}"),
        format!("./{reference}"),
        format!("{reference}/"),
        format!("blob//{}", reference.strip_prefix("blob/").unwrap()),
        format!("blob/{reference}"),
        env.path(&reference).display().to_string(),
        "é".repeat(32),
    ];
    for name in wrong {
        let run = assert_message(
            &mut cat(&env, &name),
            2,
            "neither blob/<aa>/<sha256> nor 64 lower-case hex digits: see --help",
        );
        assert!(run.stdout.is_empty(), "{name:?}");
    }
    for arguments in [
        &["cat"][..],
        &["cat", &hash, &hash],
        &["cat", &hash, "--json"],
        &["cat", &hash, "-v", "-q"],
        &["check", "x"],
        &["stats", "x"],
        &["put"],
        &["check", "--no-such-flag"],
        &["check", "--json=perhaps"],
        &["check", "--blob-dir", ""],
        &["stats", "--max-bytes", "1"],
    ] {
        let mut command = env.bare_handoff();
        let run = run(command.arg("blob").args(arguments));
        assert_eq!((run.code, run.stdout.len()), (Some(2), 0), "{arguments:?}: {}", run.stderr);
        assert!(
            run.stderr.lines().count() == 1 && run.stderr.ends_with(": see --help\n"),
            "{arguments:?}: {}",
            run.stderr
        );
    }
    assert_eq!(everything(&env, "."), before);
}

#[test]
fn who_reads_only_the_beginning_has_got_what_they_wanted() {
    // Far more than fits in a pipe.
    let content = "a line\n".repeat(200_000);
    let env = env_with_blob(content.as_bytes());
    for lines in [0, 1] {
        let mut child = start(cat(&env, &sha256(&content)).stdout(Stdio::piped()).stderr(Stdio::piped()));
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        for _ in 0..lines {
            stdout.read_line(&mut line).unwrap();
            assert_eq!(line, "a line\n");
        }
        drop(stdout);
        let mut stderr = String::new();
        child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        assert_eq!((child.wait().unwrap().code(), stderr.as_str()), (Some(0), ""), "after {lines} lines");
    }
    let full = File::options().write(true).open("/dev/full").unwrap();
    let output = start(cat(&env, &sha256(&content)).stdout(full).stderr(Stdio::piped())).wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(74), "{stderr}");
    assert!(stderr.starts_with("handoff: standard output: cannot be written: No space"), "{stderr}");
}

#[test]
fn each_flag_of_the_blob_commands_has_a_variable() {
    let env = TestEnv::new();
    fs::create_dir_all(env.path("far/away")).unwrap();
    plant(&env, "text", "text");
    fs::rename(env.path("blob"), env.path("far/away/store")).unwrap();
    env.write("far/other.jsonl", moved("one", &["text"]) + &moved("two", &["missing"]));
    let common = [
        "HANDOFF_BLOB_DIR",
        "HANDOFF_LOCK",
        "HANDOFF_LOCK_TIMEOUT",
        "HANDOFF_MAX_LINE",
        "HANDOFF_QUEUE",
        "HANDOFF_QUIET",
        "HANDOFF_VERBOSE",
    ];
    for (verb, blob, code) in [("cat", Some(sha256("text")), 0), ("check", None, 1), ("stats", None, 0)] {
        let mut help = env.bare_handoff();
        // What all commands have in common is shown once.
        let help = stdout(help.args(["blob", verb, "--help"])) + &stdout(env.bare_handoff().arg("--help"));
        let mut shown: Vec<&str> =
            help.split("[env:").skip(1).map(|rest| rest[..rest.find(['=', ']']).unwrap()].trim()).collect();
        shown.sort_unstable();
        shown.dedup();
        let mut known = common.to_vec();
        if verb != "cat" {
            known.insert(1, "HANDOFF_JSON");
        }
        assert_eq!(shown, known, "{help}");

        let with = |arguments: &[&str], variables: &[(&str, &str)]| {
            let mut command = env.bare_handoff();
            command.args(["blob", verb]).args(arguments).args(&blob).envs(variables.iter().copied());
            run(&mut command)
        };
        let by_flags = with(&["--queue", "far/other.jsonl", "--blob-dir", "far/away/store"], &[]);
        let variables = [("HANDOFF_QUEUE", "far/other.jsonl"), ("HANDOFF_BLOB_DIR", "far/away/store")];
        let by_variables = with(&[], &variables);
        assert_eq!(by_flags.code, Some(code), "{verb}: {}", by_flags.stderr);
        assert_eq!((by_flags.code, &by_flags.stdout), (by_variables.code, &by_variables.stdout), "{verb}");
        let text = String::from_utf8(by_flags.stdout).unwrap();
        assert!(
            text.contains(if verb == "check" { "missing blob/" } else { "text" })
                || verb == "stats" && text.contains("1 blob, 4 B"),
            "{verb}: {text}"
        );
        // A flag wins, and an empty variable counts as not set.
        let wrong = [
            ("HANDOFF_QUEUE", "nowhere/x.jsonl"),
            ("HANDOFF_BLOB_DIR", "nowhere"),
            ("HANDOFF_LOCK", ""),
            ("HANDOFF_JSON", ""),
            ("HANDOFF_MAX_LINE", ""),
        ];
        let flags = with(&["--queue", "far/other.jsonl", "--blob-dir", "far/away/store"], &wrong);
        assert_eq!((flags.code, String::from_utf8(flags.stdout).unwrap()), (Some(code), text.clone()), "{verb}");
        let empty =
            with(&["--blob-dir", "far/away/store"], &[("HANDOFF_BLOB_DIR", ""), ("HANDOFF_QUEUE", "far/other.jsonl")]);
        assert_eq!((empty.code, String::from_utf8(empty.stdout).unwrap()), (Some(code), text), "{verb}");
    }
    let mut json = env.bare_handoff();
    json.args(["blob", "stats", "--queue", "far/other.jsonl"]).env("HANDOFF_JSON", "yes");
    assert_eq!(json_of(&succeed(&mut json))["objects"], 0);
}

// Checking the store.

/// Makes something in a test's directory.
type Make = fn(&TestEnv);

fn check_json(env: &TestEnv, code: i32, context: &str) -> Value {
    let checked = run(env.handoff_blob("check").arg("--json"));
    assert_eq!(checked.code, Some(code), "{context}: {}{}", checked.stderr, String::from_utf8_lossy(&checked.stdout));
    json_of(&checked)
}

/// A handle with one member replaced.
fn forged(member: &str, value: &str) -> String {
    let mut handle: Value = serde_json::from_str(&handle("some text")).unwrap();
    handle[member] = serde_json::from_str(value).unwrap();
    handle.to_string()
}

fn with_result(id: &str, value: &str) -> String {
    record(id, "researcher", "done").replace("\"payload\":{}", &format!("\"payload\":{{}},\"result\":{value}"))
}

#[test]
fn a_store_without_faults_is_found_so() {
    let env = TestEnv::new();
    let nothing = json!({ "objects": 0, "bytes": 0, "missing": [], "corrupt": [], "forged": [], "orphaned": [] });
    assert_eq!(check_json(&env, 0, "neither queue nor store"), nothing);
    env.write("queue.jsonl", carrying("one", &[&large('x'), &large('y')]) + "not json\n");
    assert_eq!(check_json(&env, 0, "no store"), nothing);
    succeed(&mut env.offload());
    let expected = json!({ "objects": 2, "bytes": 18_000, "missing": [], "corrupt": [], "forged": [], "orphaned": [] });
    assert_eq!(check_json(&env, 0, "after offload"), expected);
    let checked = succeed(&mut env.handoff_blob("check"));
    assert!(checked.stdout.is_empty());
    assert_eq!(
        checked.stderr,
        "handoff: blob: 2 blobs, 17.6 KiB: 0 missing, 0 corrupt, 0 orphaned; 0 handles forged\n"
    );
    assert_eq!(succeed(env.handoff_blob("check").arg("-q")).stderr, "");
    // Other files in the store are none of its.
    env.write("blob/.blob.1.abcdef.tmp", "left");
    env.write("blob/notes", "x");
    fs::create_dir_all(env.path("blob/lost+found/deep")).unwrap();
    fs::create_dir_all(env.path("blob/zz")).unwrap();
    fs::write(env.path("blob/zz").join(sha256("zz")), "zz").unwrap();
    let directory = env.path(reference(large('x'))).parent().unwrap().to_owned();
    fs::write(directory.join(".blob.1.abcdef.tmp"), "left").unwrap();
    fs::write(directory.join("x".repeat(64)), "x").unwrap();
    // Where this one belongs is another directory.
    let misplaced = sha256(large('y'));
    fs::copy(env.path(reference(large('y'))), directory.join(&misplaced)).unwrap();
    assert_eq!(check_json(&env, 0, "other files"), expected);
}

/// A blob that refers to another, but not at its beginning, which its handle shows.
fn nested() -> String {
    format!("a blob that refers to {} {}", "x".repeat(2_000), reference("gone too"))
}

/// What stands in the place of [`nested`]'s neighbour: its last byte is wrong, and nothing that a handle says of it.
fn torn() -> (String, String) {
    (large('t'), large('t')[1..].to_owned() + "T")
}

/// A queue and a store with a problem of every sort, at the lines that are counted here.
fn env_with_problems() -> TestEnv {
    let env = TestEnv::new();
    let at = Duration::from_millis(1_795_000_000_250);
    for content in ["some text", "kept", &nested()] {
        plant(&env, content, content);
    }
    plant(&env, torn().0, torn().1);
    put_at(&env, "orphan", at);
    put_at(&env, "another", at + Duration::from_secs(1));
    let (x, y) = (sha256("some text"), sha256("kept"));
    let short = format!("{{\"a\":{},\"b\":{}}}", forged("summary", "\"some\""), forged("summary", "\"\""));
    let own_summary = handle("kept").replace("\"summary\":\"kept\"", "\"summary\":\"mine\"");
    let lines = [
        // 1: nothing wrong, with a summary that is shorter than it may be, and one that is empty.
        record("fine", "researcher", "queued").replace("{}", &short),
        // 2 and 3: a blob that is gone, of which the first line is told, and one that is damaged.
        moved("first", &["gone", &torn().0]),
        moved("second", &["gone"]),
        // 4 to 10: forgeries.
        with_result("sha256", &forged("sha256", &format!("\"{y}\""))),
        with_result("bytes", &forged("bytes", "8")),
        with_result("text for bytes", &forged("bytes", "\"9\"")),
        with_result("summary", &forged("summary", "\"some lies\"")),
        with_result("too much summary", &forged("summary", "\"some text and more\"")),
        with_result("artifact_ref", &forged("artifact_ref", &format!("\"../blob/{}/{x}\"", &x[..2]))),
        with_result("more", &format!("{{\"more\":1,{}", &handle("some text")[1..])),
        // 11: somebody else's blob with a summary of one's own, deep within.
        with_result("own summary", &format!("[[{{\"inner\":{own_summary}}}]]")),
        // 12: artifacts of another sort.
        with_result(
            "other",
            r#"[{"artifact_ref":"runs/0c5e/research.md","summary":"what was found"},{"artifact_ref":7},{"sha256":"x"}]"#,
        ),
        // 13: a reference in a line that is none.
        format!("{{\"torn\": {}\n", handle("gone in a malformed line")),
        // 14: a blob that refers to another that is gone.
        moved("nested", &[&nested()]),
        // In no line yet.
        handle("gone in the tail"),
    ];
    env.write("queue.jsonl", lines.concat());
    // What lies beside the queue is a reason to keep a blob, and no more.
    env.write("queue.gen.3", moved("late", &["gone in a generation", "gone"]));
    env.write("backup.jsonl", moved("old", &["gone from a backup", "kept"]));
    env
}

/// How each forgery is told: its line, its record, and what is wrong.
fn forgeries() -> Vec<(u32, &'static str, String)> {
    let none = || "an object refers to a blob as a handle does, but is none".to_owned();
    let of = |what: &str, content: &str| format!("a handle {what}: {}", reference(content));
    let summary = "has a summary that is not the beginning of its blob";
    vec![
        (4, "sha256", none()),
        (5, "bytes", of("says 8 bytes of a blob that has 9", "some text")),
        (6, "text for bytes", none()),
        (7, "summary", of(summary, "some text")),
        (8, "too much summary", of(summary, "some text")),
        (9, "artifact_ref", none()),
        (10, "more", none()),
        (11, "own summary", of(summary, "kept")),
    ]
}

#[test]
fn each_problem_is_found_with_its_place() {
    let env = env_with_problems();
    let before = everything(&env, ".");
    let found = check_json(&env, 1, "all at once");
    let by_reference = |list: &Value| {
        let mut list = list.as_array().unwrap().clone();
        list.sort_by_key(|entry| entry["artifact_ref"].as_str().unwrap().to_owned());
        list
    };
    let missing = |content: &str, file: &str, line: Value| {
        let artifact_ref = reference(content);
        json!({ "artifact_ref": artifact_ref, "file": file, "line": line })
    };
    let expected = json!([
        missing("gone", "queue.jsonl", json!(2)),
        missing("gone in a malformed line", "queue.jsonl", json!(13)),
        missing("gone in the tail", "queue.jsonl", Value::Null),
        missing("gone too", &reference(nested()), Value::Null),
    ]);
    assert_eq!(by_reference(&found["missing"]), by_reference(&expected));
    let corrupt = found["corrupt"].as_array().unwrap();
    let problem = corrupt[0]["problem"].as_str().unwrap();
    assert_eq!((corrupt.len(), &corrupt[0]["artifact_ref"]), (1, &json!(reference(torn().0))));
    assert!(
        problem.contains(&format!("is damaged: its 9000 bytes have the SHA-256 {}", sha256(torn().1))),
        "{problem}"
    );
    let orphan = |content: &str, at: f64| {
        let artifact_ref = reference(content);
        json!({ "artifact_ref": artifact_ref, "bytes": content.len(), "put_timestamp_seconds": at })
    };
    let expected = json!([orphan("orphan", 1_795_000_000.25), orphan("another", 1_795_000_001.25)]);
    assert_eq!(by_reference(&found["orphaned"]), by_reference(&expected));
    let expected: Vec<Value> = forgeries()
        .iter()
        .map(|(line, id, problem)| json!({ "file": "queue.jsonl", "line": line, "id": id, "problem": problem }))
        .collect();
    assert_eq!(found["forged"].as_array().unwrap(), &expected);
    assert_eq!((&found["objects"], &found["bytes"]), (&json!(6), &json!(9 + 4 + nested().len() + 9_000 + 6 + 7)));
    assert_eq!(found.as_object().unwrap().len(), 6);
    // It has only looked.
    assert_eq!(everything(&env, "."), before);

    // The exporter counts each place in the queue.
    let samples = env.samples();
    for (name, expected) in [("handoff_blob_objects", 6.0), ("handoff_blob_missing_references", 4.0)] {
        assert!((value(&samples, name, &[]) - expected).abs() < 0.5, "{name} is {}", value(&samples, name, &[]));
    }
}

#[test]
fn people_are_told_the_same() {
    let env = env_with_problems();
    let checked = run(&mut env.handoff_blob("check"));
    assert_eq!(checked.code, Some(1));
    let text = String::from_utf8(checked.stdout).unwrap();
    let mut printed: Vec<&str> = text.lines().collect();
    let missing = |content: &str, place: &str| format!("missing {}: {place} refers to it", reference(content));
    let mut expected = vec![
        missing("gone", "queue.jsonl:2"),
        missing("gone in a malformed line", "queue.jsonl:13"),
        missing("gone in the tail", "queue.jsonl"),
        missing("gone too", &reference(nested())),
        format!(
            "corrupt {0}: is damaged: its 9000 bytes have the SHA-256 {1}: restore it from a backup",
            reference(torn().0),
            sha256(torn().1)
        ),
        format!("orphaned {}: 6 B, put 2026-11-18T11:06:40Z", reference("orphan")),
        format!("orphaned {}: 7 B, put 2026-11-18T11:06:41Z", reference("another")),
    ];
    expected
        .extend(forgeries().iter().map(|(line, id, what)| format!("forged queue.jsonl:{line}: record {id}: {what}")));
    printed.sort_unstable();
    expected.sort_unstable();
    assert_eq!(printed, expected);
    let summary = "handoff: blob: 6 blobs, 10.9 KiB: 4 missing, 1 corrupt, 2 orphaned; 8 handles forged\n";
    assert_eq!(checked.stderr, summary);
}

#[test]
fn each_sort_of_problem_alone_is_a_no() {
    let sorts: [(&str, Make); 4] = [
        ("missing", |env| fs::remove_file(env.path(reference("some text"))).unwrap()),
        ("corrupt", |env| drop(plant(env, "some text", "some texT"))),
        ("orphaned", |env| drop(plant(env, "orphan", "orphan"))),
        ("forged", |env| {
            env.write("queue.jsonl", moved("one", &["some text"]) + &with_result("two", &forged("bytes", "10")));
        }),
    ];
    for (sort, make) in sorts {
        let env = TestEnv::new();
        env.write(
            "queue.jsonl",
            record("one", "researcher", "done").replace("{}", &format!("{{\"value\":{}}}", forged("summary", "\"\""))),
        );
        plant(&env, "some text", "some text");
        assert_eq!(check_json(&env, 0, sort)["objects"], 1);
        make(&env);
        let found = check_json(&env, 1, sort);
        for other in ["missing", "corrupt", "orphaned", "forged"] {
            assert_eq!(found[other].as_array().unwrap().len(), usize::from(other == sort), "{sort}: {found}");
        }
        // Even if nobody looks.
        assert_eq!(run(env.handoff_blob("check").arg("-q")).code, Some(1), "{sort}");
        let mut child = start(env.handoff_blob("check").stdout(Stdio::piped()).stderr(Stdio::null()));
        drop(child.stdout.take());
        assert_eq!(child.wait().unwrap().code(), Some(1), "{sort}");
    }
}

#[test]
fn what_a_check_cannot_read_is_an_error_and_no_answer() {
    let env = TestEnv::new();
    env.write("queue.jsonl", moved("one", &["some text"]));
    plant(&env, "some text", "some text");
    for verb in ["check", "stats"] {
        let (holder, id) = hold_lock(&env, "queue.lock", "exclusive");
        let mut command = env.handoff_blob(verb);
        let message = format!("queue.lock: still locked after 100ms by process {id} (python");
        let busy = assert_message(command.args(["--lock-timeout", "100ms", "--json"]), 75, &message);
        assert!(busy.stdout.is_empty());
        holder.finish();
        // Nobody needs the lock to print a blob, and readers don't exclude each other.
        let (reader, _) = hold_lock(&env, "queue.lock", "shared");
        succeed(env.handoff_blob(verb).args(["--lock-timeout", "100ms"]));
        reader.finish();
        let mut lost = env.bare_handoff();
        lost.args(["blob", verb, "--queue", "nowhere/queue.jsonl"]);
        assert_message(&mut lost, 74, "nowhere/queue.jsonl: cannot be read: its directory: No such file");
    }
    let (_holder, _) = hold_lock(&env, "queue.lock", "exclusive");
    succeed(cat(&env, &sha256("some text")).args(["--lock-timeout", "100ms"]));
}

#[test]
fn a_check_makes_nothing_and_leaves_times_as_they_are() {
    let env = TestEnv::new();
    env.write("queue.jsonl", moved("one", &["some text", "gone"]));
    let blob = plant(&env, "some text", "some text");
    set_time(&blob, Duration::from_secs(1_000_000_000));
    plant(&env, "orphan", "orphan");
    env.write("blob/.blob.1.abcdef.tmp", "left");
    let before = everything(&env, ".");
    for verb in ["check", "stats"] {
        for arguments in [&[][..], &["--json"], &["-v"]] {
            run(env.handoff_blob(verb).args(arguments));
            assert_eq!(everything(&env, "."), before, "{verb} {arguments:?}");
        }
    }
    succeed(&mut cat(&env, &sha256("some text")));
    assert_eq!(everything(&env, "."), before);
}

// Summing it up.

#[test]
fn stats_are_those_of_the_store() {
    let env = TestEnv::new();
    let nothing = json!({
        "store": "blob", "objects": 0, "bytes": 0, "largest_bytes": 0, "oldest_timestamp_seconds": null,
        "orphaned": { "objects": 0, "bytes": 0 }, "missing": 0,
    });
    assert_eq!(json_of(&succeed(env.handoff_blob("stats").arg("--json"))), nothing);
    let text = stdout(&mut env.handoff_blob("stats"));
    assert_eq!(text, "blob: 0 blobs, 0 B\nnothing refers to 0 blobs, 0 B\nmissing 0 blobs\n");

    let at = Duration::from_millis(1_795_000_000_500);
    for (content, seconds) in [("some text", 0), ("kept by a backup", 10), ("orphan", 20), ("another orphan", 30)] {
        put_at(&env, content, at + Duration::from_secs(seconds));
    }
    let largest = large('x');
    put_at(&env, &largest, at + Duration::from_secs(40));
    env.write(
        "queue.jsonl",
        moved("one", &["some text", "gone", "gone"]) + &moved("two", &["gone", "gone too", &largest]),
    );
    env.write("backup", reference("kept by a backup"));
    let bytes = 9 + 16 + 6 + 14 + 9_000;
    let expected = json!({
        "store": "blob", "objects": 5, "bytes": bytes, "largest_bytes": 9_000, "oldest_timestamp_seconds": 1_795_000_000.5,
        "orphaned": { "objects": 2, "bytes": 20 }, "missing": 2,
    });
    let run = succeed(env.handoff_blob("stats").arg("--json"));
    assert_eq!((json_of(&run), run.stderr.as_str()), (expected, ""));
    let text = stdout(&mut env.handoff_blob("stats"));
    let expected = "blob: 5 blobs, 8.8 KiB, the largest 8.8 KiB, the oldest from 2026-11-18T11:06:40Z\n\
                    nothing refers to 2 blobs, 20 B\nmissing 2 blobs\n";
    assert_eq!(text, expected);
}

// Beside others.

#[test]
fn a_queue_behind_a_link_has_its_store_beside_the_link() {
    let env = TestEnv::new();
    fs::create_dir(env.path("real")).unwrap();
    env.write("real/queue.jsonl", carrying("one", &[&large('x')]));
    symlink("real/queue.jsonl", env.path("queue.jsonl")).unwrap();
    succeed(&mut env.offload());
    assert!(!env.path("real/blob").exists());
    assert_eq!(check_json(&env, 0, "a link")["objects"], 1);
    succeed(&mut cat(&env, &sha256(large('x'))));
    // By its other name it has another store, where the blob is missing.
    let mut other = env.bare_handoff();
    let other = run(other.args(["blob", "check", "--queue", "real/queue.jsonl", "--json"]));
    assert_eq!((other.code, json_of(&other)["missing"].as_array().unwrap().len()), (Some(1), 1));
}

#[test]
fn looking_at_the_store_hinders_nobody_and_finds_no_fault_in_work_that_goes_on() {
    let env = TestEnv::new();
    env.write("queue.jsonl", "");
    env.write("queue.lock", "");
    let text = |number: u32| format!("{number:05}{}", large('x'));
    let (stop, checks) = (AtomicBool::new(false), AtomicU32::new(0));
    let mut appended = 0;
    thread::scope(|scope| {
        let watchers = [
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let run = run(env.handoff_blob("check").args(["--json", "-q"]));
                    assert!(matches!(run.code, Some(0 | 1)), "{}", run.stderr);
                    let found = json_of(&run);
                    for sort in ["missing", "corrupt", "forged"] {
                        assert_eq!(found[sort], json!([]), "{found}");
                    }
                    checks.fetch_add(1, Ordering::Relaxed);
                }
            }),
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    succeed(&mut env.handoff_blob("stats"));
                    let samples = env.samples();
                    assert!(value(&samples, "handoff_blob_missing_references", &[]).abs() < 0.5);
                }
            }),
        ];
        let started = SystemTime::now();
        while started.elapsed().unwrap() < Duration::from_secs(2)
            && watchers.iter().all(|watcher| !watcher.is_finished())
        {
            // As a worker's put() does.
            let lines: String = (0..4).map(|more| carrying("x", &[&text(appended + more)])).collect();
            appended += 4;
            let mut flock = env.command(tool("flock", "util-linux"));
            flock.args(["queue.lock", "sh", "-c", "cat new >>queue.jsonl"]);
            env.write("new", lines);
            succeed(&mut flock);
            succeed(env.offload().arg("-q"));
            succeed(&mut cat(&env, &sha256(text(appended - 1))));
        }
        stop.store(true, Ordering::Relaxed);
    });
    let expected: String = (0..appended).map(|number| moved("x", &[&text(number)])).collect();
    assert!(lines_after_ledger(&env) == expected);
    assert_eq!(check_json(&env, 0, "in the end")["objects"], appended);
    let contents: Vec<String> = (0..appended).map(text).collect();
    let digests = digests(&contents.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(crate::offload_settings::blobs_in(&env.path("blob")) == digests);
    tell(&format!("{appended} values were moved during {} checks", checks.load(Ordering::Relaxed)));
    assert!(checks.load(Ordering::Relaxed) > 1 && appended > 8);
}

#[test]
fn a_closed_standard_error_or_output_changes_nothing() {
    let env = TestEnv::new();
    plant(&env, "some text", "some text");
    for (closed, printed) in
        [("exec \"$@\" 2>&-", "some text"), ("exec \"$@\" >&-", ""), ("exec \"$@\" <&- >&- 2>&-", "")]
    {
        let mut sh = env.command(tool("sh", "dash"));
        sh.args(["-c", closed, "sh"]);
        assert_eq!(stdout(&mut under(sh, &cat(&env, &sha256("some text")))), printed, "{closed}");
        assert_eq!(fs::read_to_string(env.path(reference("some text"))).unwrap(), "some text");
    }
    assert_eq!(mode(&env.path(reference("some text"))) & 0o600, 0o600);
}

#[test]
fn a_handle_is_not_forged_because_its_blob_is_damaged() {
    for damaged in ["some texT", "shorter", "SOME text", ""] {
        let env = TestEnv::new();
        env.write("queue.jsonl", moved("one", &["some text"]));
        plant(&env, "some text", damaged);
        let found = check_json(&env, 1, damaged);
        assert_eq!(found["corrupt"].as_array().unwrap().len(), 1, "{found}");
        assert_eq!(found["forged"], json!([]), "{damaged:?}");
    }
}

#[test]
fn who_says_too_little_is_told_what_can_be_said() {
    let env = TestEnv::new();
    for (arguments, verb) in [(&[][..], "blob"), (&["blob"], "cat")] {
        let run = run(env.bare_handoff().args(arguments));
        assert_eq!((run.code, run.stdout.len()), (Some(2), 0), "{arguments:?}");
        assert!(run.stderr.lines().any(|line| line.trim_start().starts_with(&format!("{verb} "))), "{}", run.stderr);
    }
    // Even an argument of several lines does not hide what is wrong with it.
    let odd = format!("{}\n", sha256("text"));
    assert_message(&mut cat(&env, &odd), 2, "neither blob/<aa>/<sha256> nor 64 lower-case hex digits");
}

#[test]
fn a_handle_with_escapes_refers_to_its_blob_too() {
    let env = TestEnv::new();
    let escaped =
        |content: &str| moved("one", &[content]).replace(&reference(content), &reference(content).replace('/', "\\/"));
    env.write("queue.jsonl", escaped("there") + &escaped("gone"));
    plant(&env, "there", "there");
    let found = check_json(&env, 1, "escapes");
    assert_eq!(found["missing"], json!([{ "artifact_ref": reference("gone"), "file": "queue.jsonl", "line": 2 }]));
    assert_eq!(found["orphaned"], json!([]));
}
