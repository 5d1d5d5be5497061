//! What can go wrong around the blob store: links and other things planted in it, full and read-only disks, other users, damaged blobs.
//! The queue is then as it was, nothing outside the store is touched, and the message says which file and what to do.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, SystemTime};

use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::exposition::value;
use crate::offload_settings::{
    Expected, assert_message, assert_metrics, blobs_in, carrying, digests, everything, handle, json_of, large,
    lines_after_ledger, metrics, moved, old_blob, plant, reference, sha256, stdout, succeed,
};
use crate::test_env::{MountNamespace, Run, TestEnv, copy_program, is_root, mode, names_in, record, run, tool, under};

/// Users and groups that nobody else has, and Debian's `nobody`.
const WORKER: u32 = 41_001;
const AGENTS: u32 = 41_002;
const STRANGER: u32 = 41_003;
const NOBODY: u32 = 65_534;

fn needs_root() {
    assert!(is_root(), "this test needs several users, and so has to be run by root");
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// A queue with one value to move, and a directory that is no business of the store's.
fn scene() -> TestEnv {
    let env = TestEnv::new();
    env.write("queue.jsonl", carrying("one", &[&large('x')]));
    fs::create_dir(env.path("elsewhere")).unwrap();
    env.write("elsewhere/secret", "a secret");
    env
}

fn is_offloaded(env: &TestEnv) -> bool {
    fs::read_to_string(env.path("queue.jsonl")).unwrap().ends_with(&moved("one", &[&large('x')]))
}

/// Runs a command under strace(1), which tells the real path of each file that is used. Nothing elsewhere may be.
fn run_without_looking_elsewhere(env: &TestEnv, command: &Command, context: &str) -> Run {
    // Not beside the queue: what stands there could refer to blobs.
    fs::create_dir_all(env.path("traces")).unwrap();
    let mut strace = env.command(tool("strace", "strace"));
    strace.args(["-f", "-y", "-s", "0", "-o", "traces/trace", "-e", "trace=%file,%desc", "--"]);
    let run = run(&mut under(strace, command));
    let trace = fs::read_to_string(env.path("traces/trace")).unwrap();
    assert!(trace.contains("\"blob\""), "{context}: nothing was traced: {}", run.stderr);
    // What stands beside the queue may be a file that refers to blobs, and have a lock, so it is asked what it is.
    let is_only_asked = |line: &str| {
        line.contains("statx(")
            && ["elsewhere", "elsewhere.lock"]
                .iter()
                .any(|name| line.contains(&format!("/{name}\", AT_STATX_SYNC_AS_STAT")))
    };
    let looks: Vec<&str> = trace.lines().filter(|line| line.contains("elsewhere") && !is_only_asked(line)).collect();
    assert!(looks.is_empty(), "{context}: {looks:#?}");
    assert!(run.took < Duration::from_secs(20), "{context}: it took {:?}", run.took);
    run
}

/// All of a directory that its owner can tell, but for the number of links, which whoever plants one changes.
fn victims(env: &TestEnv) -> String {
    let mut find = env.command(tool("find", "findutils"));
    let seen = stdout(find.args(["elsewhere", "-printf", "%p %y %i %m %U:%G %s %T@ %l\\n"]));
    let contents = fs::read_dir(env.path("elsewhere")).unwrap().map(|entry| fs::read(entry.unwrap().path()).ok());
    format!("{seen}{:?}", contents.collect::<Vec<_>>())
}

// Links and other things that somebody has planted.

/// What stands somewhere, and makes it there.
type Plant = (&'static str, fn(&TestEnv, &Path));
/// Makes something in a test's directory.
type Make = fn(&TestEnv);

#[test]
fn a_store_that_is_another_users_link_is_not_used() {
    needs_root();
    for has_work in [true, false] {
        let env = scene();
        // What could be pruned, or be taken for a dead run's.
        old_blob(&env, "orphan");
        env.write("blob/.blob.4711.abcdef.tmp", "left");
        fs::remove_dir_all(env.path("elsewhere")).unwrap();
        fs::rename(env.path("blob"), env.path("elsewhere")).unwrap();
        symlink("elsewhere", env.path("blob")).unwrap();
        lchown(env.path("blob"), Some(NOBODY), Some(NOBODY)).unwrap();
        if !has_work {
            env.write("queue.jsonl", record("small", "patcher", "done"));
        }
        let before = everything(&env, "elsewhere") + &everything(&env, "queue.jsonl");
        let run = run(&mut env.offload());
        assert_eq!(run.code, Some(74), "{}", run.stderr);
        let message =
            "handoff-offload: blob: is a symbolic link that belongs to another user, 65534, and is not followed: ";
        let first = run.stderr.lines().next().unwrap();
        assert!(first.starts_with(message) && first.ends_with("--blob-dir"), "{}", run.stderr);
        assert_eq!(everything(&env, "elsewhere") + &everything(&env, "queue.jsonl"), before);
        assert!(value(&metrics(&env), "handoff_offload_success", &[]).abs() < 0.5);
        // As it says.
        succeed(env.offload().args(["--blob-dir", "elsewhere"]));
        assert!(!env.path(reference("orphan").replace("blob/", "elsewhere/")).exists());
        assert_eq!(is_offloaded(&env), has_work);
    }
}

#[test]
fn a_store_that_is_our_own_link_is_used() {
    let env = scene();
    set_mode(&env.path("elsewhere"), 0o711);
    fs::remove_file(env.path("elsewhere/secret")).unwrap();
    symlink("elsewhere", env.path("blob")).unwrap();
    succeed(&mut env.offload());
    assert!(is_offloaded(&env));
    assert_eq!(blobs_in(&env.path("elsewhere")), digests(&[&large('x')]));
    assert!(fs::symlink_metadata(env.path("blob")).unwrap().is_symlink());
    assert_eq!(mode(&env.path("elsewhere")), 0o711);
    // An ordinary user follows one that root has made.
    if is_root() {
        let env = scene();
        symlink("elsewhere", env.path("blob")).unwrap();
        let mut command = offload_as_ordinary_user(&env);
        lchown(env.path("blob"), Some(0), Some(0)).unwrap();
        succeed(&mut command);
        assert!(is_offloaded(&env));
    }
}

#[test]
fn what_is_no_directory_is_no_store() {
    let kinds: [Plant; 4] = [
        ("a dangling link", |_, path| symlink("elsewhere/store", path).unwrap()),
        ("a regular file", |_, path| fs::write(path, "text").unwrap()),
        ("a link to a file", |_, path| symlink("elsewhere/secret", path).unwrap()),
        ("a FIFO", |_, path| mknodat(CWD, path, FileType::Fifo, Mode::RWXU, 0).unwrap()),
    ];
    for (kind, make) in kinds {
        let env = scene();
        make(&env, &env.path("blob"));
        let before = everything(&env, "queue.jsonl") + &everything(&env, "elsewhere") + &everything(&env, "blob");
        let mut dry = env.offload();
        dry.arg("--dry-run");
        for command in [env.offload(), env.offload(), env.handoff_blob("check"), env.handoff_blob("stats")] {
            let mut command = command;
            let run = run(&mut command);
            assert_eq!(run.code, Some(74), "{kind}: {command:?}: {}", run.stderr);
            let message = if kind == "a dangling link" {
                "is a symbolic link to a place that is missing"
            } else {
                "is no blob store"
            };
            assert!(run.stderr.contains(&format!(": blob: {message}: ")), "{kind}: {}", run.stderr);
            assert!(run.took < Duration::from_secs(20), "{kind}: {:?}", run.took);
        }
        let after = everything(&env, "queue.jsonl") + &everything(&env, "elsewhere") + &everything(&env, "blob");
        assert_eq!(after, before, "{kind}");
        // Without it, all is well again.
        fs::remove_file(env.path("blob")).unwrap();
        succeed(&mut env.offload());
        assert!(is_offloaded(&env), "{kind}");
    }
}

#[test]
fn no_directory_of_the_store_is_a_link() {
    let text = large('x');
    let directory = format!("blob/{}", &sha256(&text)[..2]);
    let kinds: [Plant; 5] = [
        ("a link to a directory", |_, path| symlink("../elsewhere", path).unwrap()),
        ("a link to the store", |_, path| symlink(".", path).unwrap()),
        ("a dangling link", |_, path| symlink("../elsewhere/nowhere", path).unwrap()),
        ("a file", |_, path| fs::write(path, "text").unwrap()),
        ("a FIFO", |_, path| mknodat(CWD, path, FileType::Fifo, Mode::RWXU, 0).unwrap()),
    ];
    for (kind, make) in kinds {
        let env = scene();
        // The right content, elsewhere, and so old that it could be pruned.
        env.write(&format!("elsewhere/{}", sha256(&text)), &text);
        let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        let file = File::options().write(true).open(env.path(format!("elsewhere/{}", sha256(&text)))).unwrap();
        file.set_modified(long_ago).unwrap();
        drop(file);
        fs::create_dir(env.path("blob")).unwrap();
        make(&env, &env.path(&directory));
        let before = victims(&env) + &everything(&env, "queue.jsonl");
        let refused = run_without_looking_elsewhere(&env, &env.offload(), kind);
        assert_eq!(refused.code, Some(74), "{kind}: {}", refused.stderr);
        let message =
            format!("handoff-offload: {directory}: is no directory, and no link is followed inside the store: ");
        assert!(refused.stderr.starts_with(&message), "{kind}: {}", refused.stderr);
        assert!(
            refused.stderr.ends_with(": move it away\n") && refused.stderr.lines().count() == 1,
            "{}",
            refused.stderr
        );
        assert_eq!(victims(&env) + &everything(&env, "queue.jsonl"), before, "{kind}");
        assert_eq!(names_in(&env.path("blob")).len(), 1, "{kind}: something was left in the store");
        assert_metrics(&env, &Expected::of_failure(0.0), kind);

        // Nor is one followed that a line refers to.
        let mut cat = env.handoff_blob("cat");
        cat.arg(reference(&text));
        let missing = run_without_looking_elsewhere(&env, &cat, kind);
        assert_eq!((missing.code, missing.stdout.len()), (Some(74), 0), "{kind}: {}", missing.stderr);
        env.write("queue.jsonl", moved("one", &[&text]));
        let mut check = env.handoff_blob("check");
        check.arg("--json");
        let checked = run_without_looking_elsewhere(&env, &check, kind);
        let expected = json!([{ "artifact_ref": reference(&text), "file": "queue.jsonl", "line": 1 }]);
        assert_eq!((checked.code, &json_of(&checked)["missing"]), (Some(1), &expected), "{kind}");
        let samples = env.samples();
        for (name, expected) in [("handoff_blob_objects", 0.0), ("handoff_blob_missing_references", 1.0)] {
            assert!((value(&samples, name, &[]) - expected).abs() < 0.5, "{kind}: {name}");
        }
        // And nothing is pruned behind it.
        env.write("queue.jsonl", "");
        let pruned = run_without_looking_elsewhere(&env, env.offload().args(["--prune-after", "0s", "--json"]), kind);
        assert_eq!(json_of(&pruned)["pruned"], json!({ "objects": 0, "bytes": 0 }), "{kind}");
        assert!(
            victims(&env) + &everything(&env, "queue.jsonl") != before && before.starts_with(&victims(&env)),
            "{kind}"
        );

        // As it says.
        fs::remove_file(env.path(&directory)).unwrap();
        env.write("queue.jsonl", carrying("one", &[&text]));
        succeed(&mut env.offload());
        assert!(is_offloaded(&env), "{kind}");
    }
}

const NO_BLOBS: [Plant; 8] = [
    ("a link to the same content", |env, path| {
        env.write("elsewhere/same", large('x'));
        symlink("../../elsewhere/same", path).unwrap();
    }),
    ("a link to other content", |_, path| symlink("../../elsewhere/secret", path).unwrap()),
    ("an absolute link", |env, path| symlink(env.path("elsewhere/secret"), path).unwrap()),
    ("a link to a directory", |_, path| symlink("../../elsewhere", path).unwrap()),
    ("a dangling link", |_, path| symlink("../../elsewhere/nowhere", path).unwrap()),
    ("a link to an endless device", |_, path| symlink("/dev/zero", path).unwrap()),
    ("a FIFO", |_, path| mknodat(CWD, path, FileType::Fifo, Mode::RWXU, 0).unwrap()),
    ("a socket", |_, path| mknodat(CWD, path, FileType::Socket, Mode::RWXU, 0).unwrap()),
];

#[test]
fn what_is_planted_in_a_blobs_place_is_neither_read_nor_written() {
    let text = large('x');
    for (kind, make) in NO_BLOBS {
        let env = scene();
        // The blob is referred to already, and more is to be moved into it.
        env.write("queue.jsonl", moved("known", &[&text]) + &carrying("one", &[&text]));
        let place = env.path(reference(&text));
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        make(&env, &place);
        let before = victims(&env);
        let mut cat = env.handoff_blob("cat");
        cat.arg(sha256(&text));
        let missing = run_without_looking_elsewhere(&env, &cat, kind);
        assert_eq!((missing.code, missing.stdout.len()), (Some(74), 0), "{kind}: {}", missing.stderr);
        let mut check = env.handoff_blob("check");
        check.arg("--json");
        let checked = run_without_looking_elsewhere(&env, &check, kind);
        let expected = json!({
            "objects": 0, "bytes": 0, "corrupt": [], "forged": [], "orphaned": [],
            "missing": [{ "artifact_ref": reference(&text), "file": "queue.jsonl", "line": 1 }],
        });
        assert_eq!((checked.code, json_of(&checked)), (Some(1), expected), "{kind}");
        assert!((value(&env.samples(), "handoff_blob_missing_references", &[]) - 1.0).abs() < 0.5, "{kind}");

        let offloaded = run_without_looking_elsewhere(&env, &env.offload(), kind);
        assert_eq!(offloaded.code, Some(0), "{kind}: {}", offloaded.stderr);
        assert!(is_offloaded(&env), "{kind}");
        let metadata = fs::symlink_metadata(&place).unwrap();
        assert_eq!((metadata.is_file(), metadata.nlink(), metadata.mode() & 0o7777), (true, 1, 0o640), "{kind}");
        assert!(fs::read_to_string(&place).unwrap() == text, "{kind}");
        assert_eq!(victims(&env), before, "{kind}");
        assert_eq!(run(env.handoff_blob("check").arg("-q")).code, Some(0), "{kind}");
    }
}

#[test]
fn what_is_planted_is_neither_pruned_nor_given_a_new_time() {
    let text = large('x');
    for (kind, make) in NO_BLOBS {
        for is_referred_to in [false, true] {
            let env = scene();
            // Something to prune, so that each step of it is taken.
            old_blob(&env, "orphan");
            let place = env.path(reference(&text));
            fs::create_dir_all(place.parent().unwrap()).unwrap();
            make(&env, &place);
            let mut touch = env.command(tool("touch", "coreutils"));
            succeed(touch.args(["--no-dereference", "--date=2001-09-09"]).arg(&place));
            // A blob that refers to it, in the queue and yet to be put.
            let refers = format!("{} {}", reference(&text), large('y'));
            let queue = if is_referred_to { carrying("two", &[&refers]) } else { String::new() };
            env.write("queue.jsonl", queue);
            let before = victims(&env);
            for arguments in [&["--prune-after", "1d"][..], &["--prune-after", "0s"]] {
                let run = run_without_looking_elsewhere(&env, env.offload().args(arguments), kind);
                assert_eq!(run.code, Some(0), "{kind}: {}", run.stderr);
                assert_eq!(victims(&env), before, "{kind}");
                assert!(fs::symlink_metadata(&place).is_ok(), "{kind}: it was removed");
                assert!(!env.path(reference("orphan")).exists());
            }
        }
    }
}

#[test]
fn a_hard_link_to_something_else_is_a_damaged_blob_and_the_other_file_stays() {
    let text = large('x');
    let env = scene();
    let place = env.path(reference(&text));
    fs::create_dir_all(place.parent().unwrap()).unwrap();
    fs::hard_link(env.path("elsewhere/secret"), &place).unwrap();
    let before = victims(&env);
    let damaged = format!("{}: is damaged: its 8 bytes have the SHA-256 {}", reference(&text), sha256("a secret"));
    let cat = run(env.handoff_blob("cat").arg(sha256(&text)));
    assert_eq!((cat.code, &cat.stdout[..]), (Some(65), &b"a secret"[..]));
    assert!(cat.stderr.contains(&damaged), "{}", cat.stderr);
    let run = run_without_looking_elsewhere(&env, &env.offload(), "a hard link");
    assert!(run.stderr.contains(&format!("{}: was damaged, and has been written again", reference(&text))));
    assert!(is_offloaded(&env) && fs::read_to_string(&place).unwrap() == text);
    assert_eq!(victims(&env), before);
}

#[test]
fn a_directory_in_a_blobs_place_is_an_error_that_names_it() {
    let env = scene();
    let place = env.path(reference(large('x')));
    fs::create_dir_all(place.join("inner")).unwrap();
    let before = everything(&env, "blob") + &everything(&env, "queue.jsonl");
    let message = format!("{}: cannot be written: Is a directory", reference(large('x')));
    assert_message(&mut env.offload(), 74, &message);
    let after = everything(&env, "blob") + &everything(&env, "queue.jsonl");
    // The store's directory itself has seen a temporary file come and go.
    let but_for_the_store =
        |text: &str| text.lines().filter(|line| !line.starts_with("blob d ")).collect::<Vec<_>>().join("\n");
    assert_eq!(but_for_the_store(&after), but_for_the_store(&before));
    assert_eq!(names_in(&env.path("blob")), [&sha256(large('x'))[..2]]);
    assert_metrics(&env, &Expected::of_failure(0.0), "a directory");
    assert_eq!(run(env.handoff_blob("cat").arg(sha256(large('x')))).code, Some(74));
    fs::remove_dir_all(&place).unwrap();
    succeed(&mut env.offload());
    assert!(is_offloaded(&env));
}

#[test]
fn only_temporary_files_of_dead_runs_are_cleaned_up() {
    let env = scene();
    fs::create_dir(env.path("blob")).unwrap();
    let at = |name: &str| env.path(format!("blob/{name}"));
    symlink("../elsewhere/secret", at(".blob.1.link.tmp")).unwrap();
    symlink("../elsewhere", at(".blob.2.directory.tmp")).unwrap();
    symlink("/dev/zero", at(".blob.3.zero.tmp")).unwrap();
    mknodat(CWD, at(".blob.4.fifo.tmp"), FileType::Fifo, Mode::RWXU, 0).unwrap();
    mknodat(CWD, at(".blob.5.socket.tmp"), FileType::Socket, Mode::RWXU, 0).unwrap();
    fs::create_dir(at(".blob.6.directory.tmp")).unwrap();
    let foreign = [
        ".blob.x.abcdef.tmp",
        ".blob.7.tmp",
        ".blob.7.a.b.tmp",
        ".blob.7.abcdef",
        "blob.7.abcdef.tmp",
        ".blobs.7.abcdef.tmp",
        "notes",
        ".blob.7.a-b.tmp",
    ];
    for name in foreign {
        fs::write(at(name), "somebody's").unwrap();
    }
    // One that is still being written is locked.
    fs::write(at(".blob.8.living.tmp"), "half").unwrap();
    let (living, _) = crate::offload_settings::hold_lock(&env, "blob/.blob.8.living.tmp", "exclusive");
    let kept = names_in(&env.path("blob"));
    fs::write(at(".blob.9.dead.tmp"), "half").unwrap();
    fs::hard_link(env.path("elsewhere/secret"), at(".blob.10.hard.tmp")).unwrap();
    let before = victims(&env);
    let run = run_without_looking_elsewhere(&env, &env.offload(), "temporary files");
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let mut expected = kept;
    expected.push(sha256(large('x'))[..2].to_owned());
    expected.sort();
    assert_eq!(names_in(&env.path("blob")), expected);
    assert_eq!(victims(&env), before);
    assert!(is_offloaded(&env));
    living.finish();
    succeed(&mut env.offload());
    assert!(!at(".blob.8.living.tmp").exists());
}

#[test]
fn no_name_in_a_record_leads_out_of_the_store() {
    let env = scene();
    let outside = env.path("elsewhere/secret").display().to_string();
    let names = [
        "../../elsewhere/secret",
        "elsewhere/secret",
        "..",
        ".",
        "/",
        "\\u0000",
        "a\\u0000/../elsewhere/secret",
        &outside,
    ];
    let mut queue = String::new();
    for name in names {
        // As an id with something to move; as what a handle refers to; as another member of one.
        queue += &carrying(name, &[&large('x')]);
        let forged = handle("text").replace(&reference("text"), name);
        let sha256 =
            handle("text").replace(&format!("\"sha256\":\"{}\"", sha256("text")), &format!("\"sha256\":\"{name}\""));
        let both = sha256.replace(&reference("text"), &format!("blob/{name}"));
        for value in [forged, sha256, both] {
            queue += &record("forged", "researcher", "queued").replace("{}", &format!("{{\"value\":{value}}}"));
        }
    }
    env.write("queue.jsonl", &queue);
    let before = victims(&env);
    let run = run_without_looking_elsewhere(&env, &env.offload(), "names");
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let expected = queue.replace(&serde_json::to_string(&large('x')).unwrap(), &handle(&large('x')));
    assert!(lines_after_ledger(&env) == expected, "a line has changed otherwise");
    assert_eq!(blobs_in(&env.path("blob")), digests(&[&large('x')]));
    let mut check = env.handoff_blob("check");
    check.arg("--json");
    let checked = run_without_looking_elsewhere(&env, &check, "names");
    let lines: Vec<u64> =
        json_of(&checked)["forged"].as_array().unwrap().iter().map(|entry| entry["line"].as_u64().unwrap()).collect();
    // The ledger line comes first, then four lines a name, of which the first is no forgery.
    let expected: Vec<u64> = (0..names.len() as u64).flat_map(|index| [3, 4, 5].map(|line| index * 4 + line)).collect();
    assert_eq!((checked.code, lines), (Some(1), expected));
    for name in names.iter().filter(|name| !name.contains('\\')) {
        for argument in [
            (*name).to_owned(),
            format!("blob/{name}"),
            format!("blob/aa/{name}"),
            format!("{}/../{name}", reference("text")),
        ] {
            let mut cat = env.handoff_blob("cat");
            cat.arg(&argument);
            let wrong = crate::test_env::run(&mut cat);
            assert_eq!((wrong.code, wrong.stdout.len()), (Some(2), 0), "{argument}: {}", wrong.stderr);
            assert!(
                wrong.stderr.contains("neither blob/<aa>/<sha256> nor 64 lower-case hex digits"),
                "{}",
                wrong.stderr
            );
        }
    }
    assert_eq!(victims(&env), before);
}

// Full disks.

/// Many texts, all different.
fn texts(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("{number:04}") + &large('x')).collect()
}

fn queue_of(texts: &[String]) -> String {
    texts.iter().map(|text| carrying(&text[..4], &[text])).collect()
}

fn moved_queue_of(texts: &[String]) -> String {
    texts.iter().map(|text| moved(&text[..4], &[text])).collect()
}

/// Offload at the true time: what a run leaves is then younger than the grace for the next.
fn offload_now(env: &TestEnv, arguments: &[&str]) -> Command {
    let mut command = env.bare_offload();
    command.args(["--queue", "queue.jsonl", "--textfile-dir", "textfile"]).args(arguments);
    command
}

fn last_success(env: &TestEnv) -> f64 {
    value(&metrics(env), "handoff_offload_last_success_timestamp_seconds", &[])
}

/// Asserts that a run failed, and that the metrics say so and since when.
fn assert_failed(env: &TestEnv, run: &Run, last_success: f64, message: &str) {
    assert_eq!(run.code, Some(74), "{message}: {}", run.stderr);
    let [line] = run.stderr.lines().collect::<Vec<_>>()[..] else { panic!("not one message: {}", run.stderr) };
    assert!(line.starts_with("handoff-offload: ") && line.contains(message), "{line:?} doesn't say {message:?}");
    let samples = metrics(env);
    assert!(value(&samples, "handoff_offload_success", &[]).abs() < 0.5, "it says success");
    let kept = value(&samples, "handoff_offload_last_success_timestamp_seconds", &[]);
    assert!((kept - last_success).abs() < 1e-6, "the last success was {last_success}, not {kept}");
    assert!(samples.keys().all(|series| !series.name.contains("last_run_objects")), "nobody knows what it did");
}

#[test]
fn a_full_store_leaves_the_queue_and_no_pieces_and_the_next_run_goes_on() {
    // Several threads put batches of blobs. In the second case some batches are in their place before there is no room for the others.
    for (count, size, in_place) in [(40, "256k", 0..=21), (400, "3840k", 32..=320)] {
        let env = TestEnv::new();
        fs::create_dir(env.path("store")).unwrap();
        let script = format!("mount -t tmpfs -o size={size},mode=755 tmpfs store");
        let mounts = MountNamespace::new(&env, &script);
        let offload = || run(&mut mounts.inside(&env, &offload_now(&env, &["--blob-dir", "store", "--json"])));
        env.write("queue.jsonl", record("small", "patcher", "done"));
        assert_eq!(offload().code, Some(0));
        let succeeded = last_success(&env);
        assert!(succeeded > 0.0);

        let texts = texts(count);
        env.write("queue.jsonl", queue_of(&texts));
        let before = everything(&env, "queue.jsonl");
        let full = offload();
        assert_failed(&env, &full, succeeded, ": cannot be written: No space left on device");
        assert!(full.stderr.starts_with("handoff-offload: store/"), "{}", full.stderr);
        assert!(full.stderr.ends_with(": the queue is left as it was: make room for it\n"), "{}", full.stderr);
        assert!(full.stdout.is_empty());
        assert_eq!(everything(&env, "queue.jsonl"), before);
        // What is there is whole, and nothing else is.
        let store = mounts.path("store");
        let left = blobs_in(&store);
        assert!(in_place.contains(&left.len()), "{}", left.len());
        for name in &left {
            assert_eq!(&sha256(fs::read(store.join(&name[..2]).join(name)).unwrap()), name);
        }

        mounts.sh(&env, "mount -o remount,size=16m store");
        let done = offload();
        assert_eq!(done.code, Some(0), "{}", done.stderr);
        let written = count - left.len();
        let bytes: usize = written * texts[0].len();
        let expected = json!({ "written": written, "written_bytes": bytes, "reused": left.len() });
        assert_eq!(json_of(&done)["blobs"], expected);
        assert!(lines_after_ledger(&env) == moved_queue_of(&texts));
        assert_eq!(blobs_in(&store), digests(&texts.iter().map(String::as_str).collect::<Vec<_>>()));
        assert!(last_success(&env) > succeeded);
    }
}

#[test]
fn a_store_without_room_for_a_name_is_full_too() {
    let env = scene();
    fs::create_dir(env.path("store")).unwrap();
    // Its own directory takes the only inode, then two and three are given.
    let mounts = MountNamespace::new(&env, "mount -t tmpfs -o nr_inodes=1,mode=755 tmpfs store");
    let offload = || run(&mut mounts.inside(&env, &offload_now(&env, &["--blob-dir", "store"])));
    let before = everything(&env, "queue.jsonl");
    let text = large('x');
    let directory = format!("store/{}", &sha256(&text)[..2]);
    assert_failed(&env, &offload(), 0.0, &format!("{directory}: cannot be made: No space left on device"));
    mounts.sh(&env, "mount -o remount,nr_inodes=2 store");
    let message = format!("{directory}/{}: cannot be written: No space left on device", sha256(&text));
    assert_failed(&env, &offload(), 0.0, &message);
    assert_eq!(everything(&env, "queue.jsonl"), before);
    mounts.sh(&env, "mount -o remount,nr_inodes=3 store");
    let done = offload();
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert!(is_offloaded(&env));
}

#[test]
fn a_disk_that_is_too_full_for_the_new_queue_leaves_the_old_one() {
    let env = TestEnv::new();
    fs::create_dir(env.path("agents")).unwrap();
    let mounts = MountNamespace::new(&env, "mount -t tmpfs -o size=3m,mode=755 tmpfs agents");
    let agents = mounts.path("agents");
    let stays = record("small", "patcher", "done").repeat(10_000);
    let queue = stays.clone() + &carrying("one", &[&large('x')]);
    fs::write(agents.join("queue.jsonl"), &queue).unwrap();
    let identity = || fs::metadata(agents.join("queue.jsonl")).map(|found| (found.ino(), found.mtime_nsec())).unwrap();
    let before = identity();
    mounts.sh(&env, "head -c 1000000 /dev/zero >agents/fill");
    let mut command = env.bare_offload();
    command.args(["--queue", "agents/queue.jsonl", "--textfile-dir", "textfile", "--json"]);
    let full = run(&mut mounts.inside(&env, &command));
    assert_failed(&env, &full, 0.0, "agents/queue.jsonl: is left as it was: its new file needs ");
    assert!(
        full.stderr.contains("agents has only ") && full.stderr.ends_with(": make room for it\n"),
        "{}",
        full.stderr
    );
    assert_eq!(identity(), before);
    assert!(fs::read_to_string(agents.join("queue.jsonl")).unwrap() == queue);
    // The blob is there already, for the next run.
    assert_eq!(names_in(&agents), ["blob", "fill", "queue.jsonl", "queue.lock"]);
    assert_eq!(blobs_in(&agents.join("blob")), digests(&[&large('x')]));

    fs::remove_file(agents.join("fill")).unwrap();
    let done = run(&mut mounts.inside(&env, &command));
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert_eq!(json_of(&done)["blobs"], json!({ "written": 0, "written_bytes": 0, "reused": 1 }));
    let text = fs::read_to_string(agents.join("queue.jsonl")).unwrap();
    assert!(text.split_once('\n').unwrap().1 == stays + &moved("one", &[&large('x')]));
}

/// What a queue that has been given another name for a moment still has.
fn identity_and_contents(env: &TestEnv) -> (u64, u64, SystemTime, Vec<u8>) {
    let metadata = fs::metadata(env.path("queue.jsonl")).unwrap();
    let contents = fs::read(env.path("queue.jsonl")).unwrap();
    (metadata.ino(), metadata.nlink(), metadata.modified().unwrap(), contents)
}

/// Offload whose system call of a name and number, as strace(1) counts them in each thread, fails.
fn failing(env: &TestEnv, call: &str, number: usize, error: &str) -> Run {
    let mut strace = env.command(tool("strace", "strace"));
    fs::create_dir_all(env.path("traces")).unwrap();
    strace.args(["-f", "-o", "traces/trace", "-e", &format!("inject={call}:error={error}:when={number}")]);
    run(&mut under(strace, &offload_now(env, &[])))
}

#[test]
fn wherever_room_runs_out_nothing_is_lost_and_the_next_run_goes_on() {
    let lay_out = || {
        let env = scene();
        env.write("queue.lock", "");
        env.write("queue.jsonl", record("small", "patcher", "done") + &carrying("one", &[&large('x')]));
        env
    };
    let mut tried = 0;
    for call in ["mkdirat", "pwrite64", "fsync", "fdatasync", "renameat", "rename", "linkat", "link"] {
        // In whichever threads come so far.
        for number in 1.. {
            let env = lay_out();
            let before = identity_and_contents(&env);
            let error = if number % 2 == 0 { "ENOSPC" } else { "EDQUOT" };
            let run = failing(&env, call, number, error);
            let trace = fs::read_to_string(env.path("traces/trace")).unwrap();
            let Some(injected) = trace.lines().find(|line| line.contains("(INJECTED)")) else { break };
            tried += 1;
            let context = format!("{error} for {injected}");
            assert_eq!(run.code, Some(74), "{context}: {}", run.stderr);
            // The metrics may have met the same fate, in another thread's count.
            let is_summary = |line: &&str| line.contains("moved 1 value");
            let errors: Vec<&str> = run.stderr.lines().filter(|line| !is_summary(line)).collect();
            let advise = errors.iter().all(|line| line.ends_with(": make room for it"));
            assert!(advise && !errors.is_empty() && errors.len() <= 2, "{context}: {errors:#?}");
            if identity_and_contents(&env) == before {
                assert!(!env.path("queue.gen.1").exists(), "{context}");
                assert!(!run.stderr.lines().any(|line| is_summary(&line)), "{context}: {}", run.stderr);
            } else {
                let comes_after = |line: &&str| {
                    line.contains("the queue has been replaced") || line.contains("handoff_offload.prom: ")
                };
                assert!(errors.iter().any(comes_after) && is_offloaded(&env), "{context}: {errors:#?}");
                assert!(env.path("queue.gen.1").exists(), "{context}");
            }
            let is_temporary = |name: &String| Path::new(name).extension().is_some_and(|extension| extension == "tmp");
            for directory in
                [".", "blob", "textfile"].map(|name| env.path(name)).into_iter().filter(|path| path.exists())
            {
                let left: Vec<_> = names_in(&directory).into_iter().filter(is_temporary).collect();
                assert!(left.is_empty(), "{context}: {left:?}");
            }
            let blob = env.path(reference(large('x')));
            assert!(!blob.exists() || fs::read_to_string(blob).unwrap() == large('x'), "{context}");

            succeed(&mut offload_now(&env, &[]));
            let expected = record("small", "patcher", "done") + &moved("one", &[&large('x')]);
            assert_eq!(lines_after_ledger(&env), expected, "{context}");
            assert_eq!(run_check(&env), Some(0), "{context}");
        }
    }
    assert!(tried >= 12, "only {tried} calls were tried");
}

fn run_check(env: &TestEnv) -> Option<i32> {
    run(env.handoff_blob("check").arg("-q")).code
}

#[test]
fn a_limit_on_the_size_of_files_is_an_error_that_leaves_no_trace() {
    // In blocks of 512 bytes.
    for script in ["trap '' XFSZ; ulimit -f 8; exec \"$@\"", "ulimit -f 8; exec \"$@\""] {
        let env = scene();
        let before = everything(&env, "queue.jsonl");
        let mut sh = env.command(tool("sh", "dash"));
        sh.args(["-c", script, "sh"]);
        let run = run(&mut under(sh, &offload_now(&env, &[])));
        assert_failed(&env, &run, 0.0, &format!("{}: cannot be written: File too large", reference(large('x'))));
        assert_eq!(blobs_in(&env.path("blob")), Vec::<String>::new());
        assert_eq!(everything(&env, "queue.jsonl"), before);
        succeed(&mut offload_now(&env, &[]));
        assert!(is_offloaded(&env));
        assert_eq!(blobs_in(&env.path("blob")), digests(&[&large('x')]), "something is left");
    }
}

#[test]
fn a_read_only_store_is_an_error_and_the_next_run_goes_on() {
    let env = scene();
    fs::create_dir(env.path("store")).unwrap();
    let mounts = MountNamespace::new(&env, "mount -t tmpfs -o mode=755 tmpfs store");
    let offload = || run(&mut mounts.inside(&env, &offload_now(&env, &["--blob-dir", "store", "--json"])));
    let queue = fs::read_to_string(env.path("queue.jsonl")).unwrap();
    let before = everything(&env, "queue.jsonl");
    let text = large('x');
    let directory = format!("store/{}", &sha256(&text)[..2]);
    mounts.sh(&env, "mount -o remount,ro store");
    assert_failed(&env, &offload(), 0.0, &format!("{directory}: cannot be made: Read-only file system"));
    mounts.sh(&env, &format!("mount -o remount,rw store; mkdir {directory}; mount -o remount,ro store"));
    let blob = format!("{directory}/{}", sha256(&text));
    assert_failed(&env, &offload(), 0.0, &format!("{blob}: cannot be written: Read-only file system"));
    assert_eq!(everything(&env, "queue.jsonl"), before);
    mounts.sh(&env, "mount -o remount,rw store");
    assert_eq!(offload().code, Some(0));
    assert!(is_offloaded(&env));

    // The blob is there, but can't be given a new time.
    env.write("queue.jsonl", &queue);
    let before = everything(&env, "queue.jsonl");
    let succeeded = last_success(&env);
    mounts.sh(&env, "mount -o remount,ro store");
    assert_failed(&env, &offload(), succeeded, &format!("{blob}: cannot be given a new time: Read-only file system"));
    assert_eq!(everything(&env, "queue.jsonl"), before);

    // What cannot be pruned is told, and the rest is done.
    mounts.sh(&env, &format!("mount -o remount,rw store; touch -d 2001-09-09 {blob}; mount -o remount,ro store"));
    env.write("queue.jsonl", record("small", "patcher", "done"));
    for generation in names_in(&env.path(".")).iter().filter(|name| name.starts_with("queue.gen.")) {
        fs::remove_file(env.path(generation)).unwrap();
    }
    let run = offload();
    assert_eq!(run.code, Some(74), "{}", run.stderr);
    let lines: Vec<&str> = run.stderr.lines().collect();
    assert!(
        lines.len() == 2 && lines[0].contains(&format!("{blob}: cannot be removed: Read-only file system")),
        "{lines:#?}"
    );
    assert!(lines[1].ends_with("queue.jsonl: nothing over 8.0 KiB to move"), "{lines:#?}");
    assert_eq!(json_of(&run)["pruned"], Value::Null);
    let samples = metrics(&env);
    assert!(value(&samples, "handoff_offload_success", &[]).abs() < 0.5);
    assert!(value(&samples, "handoff_offload_last_run_objects", &[]).abs() < 0.5);
    assert!(samples.keys().all(|series| !series.name.contains("pruned")), "nobody knows what was pruned");
    mounts.sh(&env, "mount -o remount,rw store");
    assert_eq!(json_of(&offload())["pruned"], json!({ "objects": 1, "bytes": text.len() }));
}

// Other users.

/// Offload as an ordinary user, for whom permissions count: `nobody` if root runs the tests, who then owns everything in the directory.
fn offload_as_ordinary_user(env: &TestEnv) -> Command {
    if is_root() {
        for entry in walkdir::WalkDir::new(env.path(".")) {
            lchown(entry.unwrap().path(), Some(NOBODY), Some(NOBODY)).unwrap();
        }
    }
    offload_as(env, NOBODY, &[NOBODY])
}

/// Offload as some user in these groups, of which the first is the user's own. Only root can be somebody else.
fn offload_as(env: &TestEnv, uid: u32, groups: &[u32]) -> Command {
    let offload = env.offload();
    if !is_root() {
        return offload;
    }
    // Where it was built it may be out of the user's reach. Not beside the queue, whose directory is compared.
    let copy = env.path("bin/handoff-offload");
    if !copy.exists() {
        fs::create_dir(env.path("bin")).unwrap();
        copy_program(Path::new(offload.get_program()), &copy);
    }
    set_mode(&env.textfile_dir(), 0o777);
    let list: Vec<String> = groups.iter().map(u32::to_string).collect();
    let mut command = env.command(tool("setpriv", "util-linux"));
    command
        .args([format!("--reuid={uid}"), format!("--regid={}", groups[0]), format!("--groups={}", list.join(","))])
        .arg(copy)
        .args(offload.get_args());
    command
}

/// Asserts that the metrics say that the first run of all has failed.
fn assert_says_failed(env: &TestEnv) {
    let samples = metrics(env);
    for name in ["handoff_offload_success", "handoff_offload_last_success_timestamp_seconds"] {
        assert!(value(&samples, name, &[]).abs() < 0.5, "{name}");
    }
}

#[test]
fn a_store_that_this_user_may_not_use_is_an_error() {
    let text = large('x');
    let directory = format!("blob/{}", &sha256(&text)[..2]);
    let blob = reference(&text);
    // What may not be used, its mode, whether something lies there, and the message.
    let cases = [
        (".", 0o555, false, "blob: cannot be made".to_owned()),
        ("blob", 0o000, false, "blob: cannot be opened".to_owned()),
        ("blob", 0o555, false, format!("{directory}: cannot be made")),
        ("blob", 0o555, true, format!("{blob}: cannot be written")),
        (&directory, 0o000, true, format!("{directory}: cannot be opened")),
        (&directory, 0o555, true, format!("{blob}: cannot be written")),
        (&blob, 0o000, true, format!("{blob}: cannot be opened")),
    ];
    for (path, forbidden, is_there, message) in cases {
        let env = scene();
        env.write("queue.lock", "");
        if path != "." {
            fs::create_dir_all(env.path(if is_there { &directory } else { "blob" })).unwrap();
        }
        if path == blob {
            env.write(path, &text);
        }
        let mut command = offload_as_ordinary_user(&env);
        let (allowed, before) = (mode(&env.path(path)), everything(&env, "queue.jsonl"));
        set_mode(&env.path(path), forbidden);
        let refused = run(&mut command);
        set_mode(&env.path(path), allowed);
        assert_eq!(refused.code, Some(74), "{message}: {}", refused.stderr);
        let expected = format!("handoff-offload: {message}: Permission denied (os error 13)");
        // Pruning may have met it before.
        assert!(refused.stderr.lines().any(|line| line.starts_with(&expected)), "{expected}: {}", refused.stderr);
        let is_advice = |line: &str| line.ends_with(": give this user access to it");
        assert!(refused.stderr.lines().all(is_advice), "{}", refused.stderr);
        assert_eq!(everything(&env, "queue.jsonl"), before, "{message}");
        assert_says_failed(&env);
        succeed(&mut command);
        assert!(is_offloaded(&env), "{message}");
    }
}

#[test]
fn a_store_of_another_user_is_an_error() {
    needs_root();
    let text = large('x');
    let directory = format!("blob/{}", &sha256(&text)[..2]);
    for (forbidden, message) in
        [(0o755, format!("{directory}: cannot be made")), (0o750, "blob: cannot be opened".to_owned())]
    {
        let env = scene();
        let mut command = offload_as_ordinary_user(&env);
        fs::create_dir(env.path("blob")).unwrap();
        chown(env.path("blob"), Some(STRANGER), Some(STRANGER)).unwrap();
        set_mode(&env.path("blob"), forbidden);
        let before = everything(&env, "queue.jsonl") + &everything(&env, "blob");
        assert_message(&mut command, 74, &format!("{message}: Permission denied (os error 13)"));
        assert_eq!(everything(&env, "queue.jsonl") + &everything(&env, "blob"), before);
        assert_says_failed(&env);
        // In a store for everybody, this user's blobs are this user's.
        set_mode(&env.path("blob"), 0o777);
        succeed(&mut command);
        assert!(is_offloaded(&env));
        assert_eq!((mode(&env.path("blob")), owner(&env.path("blob"))), (0o777, (STRANGER, STRANGER)));
        assert_eq!((mode(&env.path(&directory)), owner(&env.path(&directory))), (0o750, (NOBODY, NOBODY)));
    }
}

#[test]
fn an_unreadable_file_beside_the_queue_keeps_every_blob() {
    let text = large('x');
    let kinds: [(&str, &str, Make); 4] = [
        ("secret", "secret", |env| {
            env.write("secret", "x");
            set_mode(&env.path("secret"), 0o000);
        }),
        ("queue.gen.44", "queue.gen.44", |env| {
            env.write("queue.gen.44", "x");
            set_mode(&env.path("queue.gen.44"), 0o000);
        }),
        // It may be another queue that shares the store.
        ("other.jsonl", "elsewhere", |env| {
            symlink("elsewhere/secret", env.path("other.jsonl")).unwrap();
            set_mode(&env.path("elsewhere"), 0o000);
        }),
        ("blob/ab", "blob/ab", |env| {
            fs::create_dir(env.path("blob/ab")).unwrap();
            set_mode(&env.path("blob/ab"), 0o000);
        }),
    ];
    for (name, locked, make) in kinds {
        let env = scene();
        let orphan = old_blob(&env, "orphan");
        let mut command = offload_as_ordinary_user(&env);
        make(&env);
        if is_root() {
            lchown(env.path(name), Some(NOBODY), Some(NOBODY)).unwrap();
        }
        let mut dry = offload_as(&env, NOBODY, &[NOBODY]);
        let previewed = run(dry.args(["--dry-run", "--json"]));
        let refused = run(command.arg("--json"));
        set_mode(&env.path(locked), 0o700);
        for run in [&previewed, &refused] {
            assert_eq!(run.code, Some(74), "{name}: {}", run.stderr);
            let first = run.stderr.lines().next().unwrap();
            assert!(first.contains(&format!("{name}: cannot be ")), "{name}: {}", run.stderr);
            assert!(
                first.ends_with(": Permission denied (os error 13): give this user access to it"),
                "{name}: {}",
                run.stderr
            );
            assert_eq!(json_of(run)["pruned"], Value::Null, "{name}");
        }
        assert!(orphan.exists(), "{name}");
        // Everything else is done.
        assert!(
            refused.stderr.lines().last().is_some_and(|line| line.contains("moved 1 value")),
            "{name}: {}",
            refused.stderr
        );
        assert!(is_offloaded(&env), "{name}");
        #[expect(clippy::cast_precision_loss, reason = "a few thousand")]
        let written = Some((1.0, text.len() as f64));
        assert_metrics(&env, &Expected { written, pruned: None, ..Expected::of_failure(0.0) }, name);
        // Who can read it removes what nothing refers to.
        assert_eq!(json_of(&succeed(&mut command))["pruned"]["objects"], 1, "{name}");
        assert!(!orphan.exists(), "{name}");
    }
    // Where nothing is old, nobody looks.
    let env = scene();
    let mut command = offload_as_ordinary_user(&env);
    env.write("secret", "x");
    set_mode(&env.path("secret"), 0o000);
    succeed(&mut command);
    assert!(is_offloaded(&env));
}

// Owners and modes.

fn owner(path: &Path) -> (u32, u32) {
    let metadata = fs::symlink_metadata(path).unwrap();
    (metadata.uid(), metadata.gid())
}

/// A queue and its directory, `agents`, that belong to a worker.
fn agents() -> TestEnv {
    let env = TestEnv::new();
    fs::create_dir(env.path("agents")).unwrap();
    env.write("agents/queue.jsonl", carrying("one", &[&large('x'), &large('y')]));
    for name in ["agents", "agents/queue.jsonl"] {
        chown(env.path(name), Some(WORKER), Some(AGENTS)).unwrap();
    }
    env
}

/// The arguments after the queue's, of which each flag may stand only once.
fn on_agents(env: &TestEnv, mut command: Command, arguments: &[&str]) -> Command {
    let all: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
    let mut changed = env.command(command.get_program());
    for argument in all {
        changed.arg(if argument == "queue.jsonl" { "agents/queue.jsonl".into() } else { argument });
    }
    changed.args(arguments);
    command = changed;
    command
}

fn with_umask(env: &TestEnv, umask: &str, command: &Command) -> Command {
    let mut sh = env.command(tool("sh", "dash"));
    sh.args(["-c", &format!("umask {umask}; exec \"$@\""), "sh"]);
    under(sh, command)
}

/// Each file and directory in the store and the store itself, with mode and owner.
fn store_modes(store: &Path) -> Vec<(PathBuf, u32, (u32, u32))> {
    let entries = walkdir::WalkDir::new(store).into_iter().map(|entry| entry.unwrap().path().to_owned());
    entries.map(|path| (path.clone(), mode(&path), owner(&path))).collect()
}

fn assert_made_for(store: &Path, expected: (u32, u32), context: &str) {
    let found = store_modes(store);
    assert_eq!(found.len(), 5, "a store, two directories and two blobs: {found:#?}");
    for (path, mode, owner) in found {
        let expected_mode = if path.is_dir() { 0o750 } else { 0o640 };
        assert_eq!((mode, owner), (expected_mode, expected), "{context}: {}", path.display());
    }
}

#[test]
fn what_root_makes_belongs_to_the_owner_of_the_queues_directory() {
    needs_root();
    for umask in ["000", "022", "027", "077", "177", "277", "777"] {
        for store in ["agents/blob", "store"] {
            let env = agents();
            let blob_dir = ["--blob-dir", store];
            let arguments = if store == "store" { &blob_dir[..] } else { &[] };
            succeed(&mut with_umask(&env, umask, &on_agents(&env, env.offload(), arguments)));
            assert_made_for(&env.path(store), (WORKER, AGENTS), &format!("{umask} {store}"));
        }
    }
    // The directory's owner counts, not the queue's.
    let env = agents();
    chown(env.path("agents/queue.jsonl"), Some(STRANGER), Some(STRANGER)).unwrap();
    succeed(&mut on_agents(&env, env.offload(), &[]));
    assert_made_for(&env.path("agents/blob"), (WORKER, AGENTS), "another owner of the queue");
    assert_eq!(owner(&env.path("agents/queue.jsonl")), (STRANGER, STRANGER));
    // That of a link's directory, where the store is.
    let env = agents();
    fs::create_dir(env.path("real")).unwrap();
    fs::rename(env.path("agents/queue.jsonl"), env.path("real/queue.jsonl")).unwrap();
    symlink("../real/queue.jsonl", env.path("agents/queue.jsonl")).unwrap();
    succeed(&mut on_agents(&env, env.offload(), &[]));
    assert_made_for(&env.path("agents/blob"), (WORKER, AGENTS), "a link");
}

#[test]
fn what_an_ordinary_user_makes_is_that_users_and_the_directorys_groups() {
    needs_root();
    for umask in ["000", "022", "077"] {
        for (groups, expected) in [(&[WORKER, AGENTS][..], AGENTS), (&[WORKER], WORKER)] {
            let env = agents();
            let command = on_agents(&env, offload_as(&env, WORKER, groups), &[]);
            // A queue of this user's own groups: its group can be kept.
            chown(env.path("agents/queue.jsonl"), None, Some(WORKER)).unwrap();
            succeed(&mut with_umask(&env, umask, &command));
            assert_made_for(&env.path("agents/blob"), (WORKER, expected), &format!("{umask} {groups:?}"));
        }
    }
}

#[test]
fn directories_that_are_there_keep_their_modes_and_owners() {
    needs_root();
    let directory = sha256(large('x'))[..2].to_owned();
    for store_mode in [0o755, 0o770, 0o2770, 0o2750, 0o1777, 0o711] {
        for store_owner in [(0, 0), (WORKER, AGENTS), (STRANGER, STRANGER)] {
            let env = agents();
            let store = env.path("agents/blob");
            fs::create_dir_all(store.join(&directory)).unwrap();
            // A blob of long ago, for what is empty may be what a killed run has left.
            let blob = store.join(&directory).join(format!("{directory}{}", "0".repeat(62)));
            fs::write(&blob, "").unwrap();
            for path in [&store, &store.join(&directory), &blob] {
                chown(path, Some(store_owner.0), Some(store_owner.1)).unwrap();
                set_mode(path, store_mode);
            }
            succeed(&mut on_agents(&env, env.offload(), &[]));
            let context = format!("{store_mode:o} {store_owner:?}");
            for (path, mode, owner) in store_modes(&store) {
                let expected = if path == store || path == store.join(&directory) || path == blob {
                    (store_mode, store_owner)
                } else {
                    // What is new is as anywhere else: a bit for the group's sake is no reason to open it further.
                    (if path.is_dir() { 0o750 } else { 0o640 }, (WORKER, AGENTS))
                };
                assert_eq!((mode, owner), expected, "{context}: {}", path.display());
            }
        }
    }
}

#[test]
fn a_blob_is_at_no_time_open_to_more_than_in_the_end() {
    let env = scene();
    fs::create_dir(env.path("traces")).unwrap();
    let mut strace = env.command(tool("strace", "strace"));
    strace.args([
        "-f",
        "-y",
        "-o",
        "traces/trace",
        "-e",
        "trace=openat,mkdirat,fchown,fchmod,pwrite64,fsync,renameat,renameat2",
    ]);
    succeed(&mut under(strace, &with_umask(&env, "000", &env.offload())));
    let trace = fs::read_to_string(env.path("traces/trace")).unwrap();
    let steps: Vec<&str> = trace.lines().filter(|line| line.contains("/.blob.")).collect();
    let made = |step: &str, what: &str| {
        let found = steps.iter().position(|line| line.contains(step) && line.contains(what));
        found.unwrap_or_else(|| panic!("no {step} {what}: {steps:#?}"))
    };
    let order = [
        made("openat(", "O_EXCL|O_CLOEXEC, 0600)"),
        made("pwrite64(", ""),
        made("fchmod(", ", 0640)"),
        made("fsync(", ""),
        made("renameat(", &sha256(large('x'))),
    ];
    assert!(order.is_sorted(), "{steps:#?}");
    if is_root() {
        assert!(made("fchown(", "") < order[2], "{steps:#?}");
    }
    for line in trace.lines().filter(|line| line.contains("mkdirat(")) {
        assert!(line.contains(", 0700)") || line.contains(", 0750)"), "{line}");
    }
}

// Damaged blobs.

#[test]
fn a_damaged_blob_is_written_again_by_whoever_has_its_content() {
    let text = large('x');
    let flipped = format!("{}y", &text[1..]);
    for (kind, content) in [
        ("same size", flipped.as_str()),
        ("shorter", &text[1..]),
        ("longer", &(text.clone() + "x")),
        ("empty", ""),
        ("of zeros", &"\0".repeat(text.len())),
    ] {
        let env = scene();
        let place = plant(&env, &text, content);
        let inode = fs::metadata(&place).unwrap().ino();
        env.write("queue.jsonl", moved("known", &[&text]) + &carrying("one", &[&text]));
        let checked = run(env.handoff_blob("check").arg("--json"));
        let what = format!("is damaged: its {} bytes have the SHA-256 {}", content.len(), sha256(content));
        let mut found = json_of(&checked);
        assert_eq!(checked.code, Some(1), "{kind}");
        let corrupt = found["corrupt"].as_array().unwrap();
        assert_eq!((corrupt.len(), &corrupt[0]["artifact_ref"]), (1, &json!(reference(&text))), "{kind}");
        assert!(corrupt[0]["problem"].as_str().unwrap().contains(&what), "{kind}: {}", corrupt[0]);
        assert_eq!(found["missing"].take(), json!([]), "{kind}");
        assert_eq!(run(env.handoff_blob("cat").arg(sha256(&text))).code, Some(65), "{kind}");

        let done = succeed(env.offload().arg("--json"));
        let [warning, summary] = done.stderr.lines().collect::<Vec<_>>()[..] else { panic!("{kind}: {}", done.stderr) };
        let expected = format!("handoff-offload: {}: was damaged, and has been written again", reference(&text));
        assert_eq!(warning, expected, "{kind}");
        assert!(summary.contains("moved 1 value"), "{kind}: {summary}");
        let expected = json!({ "written": 1, "written_bytes": text.len(), "reused": 0 });
        assert_eq!(json_of(&done)["blobs"], expected, "{kind}");
        assert!(is_offloaded(&env), "{kind}");
        assert!(fs::metadata(&place).unwrap().ino() != inode, "{kind}: it was changed in place");
        assert_eq!(mode(&place), 0o640, "{kind}");
        let cat = succeed(env.handoff_blob("cat").arg(reference(&text)));
        assert!(cat.stdout == text.as_bytes(), "{kind}");
        assert_eq!(run_check(&env), Some(0), "{kind}");
        // Once is enough.
        assert!(!succeed(&mut env.offload()).stderr.contains("damaged"), "{kind}");
    }
}

#[test]
fn a_damaged_blob_that_nobody_has_the_content_of_stays_as_it_is() {
    let env = scene();
    plant(&env, "lost", "damaged");
    env.write("queue.jsonl", moved("known", &["lost"]) + &carrying("one", &[&large('x')]));
    let before = everything(&env, &reference("lost"));
    succeed(&mut env.offload());
    assert_eq!(everything(&env, &reference("lost")), before);
    assert_eq!(run_check(&env), Some(1));
}

#[test]
fn a_store_in_a_directory_that_may_only_be_passed_through_is_used() {
    needs_root();
    let env = scene();
    let mut command = offload_as_ordinary_user(&env);
    fs::create_dir_all(env.path("outer/store")).unwrap();
    chown(env.path("outer/store"), Some(NOBODY), Some(NOBODY)).unwrap();
    set_mode(&env.path("outer"), 0o711);
    succeed(command.args(["--blob-dir", "outer/store"]));
    assert!(is_offloaded(&env));
}

/// A store full of somebody else's files, and a link to it that belongs to `nobody`.
fn scene_with_another_users_link() -> TestEnv {
    needs_root();
    let env = scene();
    plant(&env, "text", "text");
    fs::remove_dir_all(env.path("elsewhere")).unwrap();
    fs::rename(env.path("blob"), env.path("elsewhere")).unwrap();
    set_mode(&env.path("elsewhere"), 0o700);
    symlink("elsewhere", env.path("blob")).unwrap();
    lchown(env.path("blob"), Some(NOBODY), Some(NOBODY)).unwrap();
    env
}

#[test]
fn however_it_is_spelt_another_users_link_is_not_used() {
    for spelling in ["blob", "blob/", "./blob/", "blob/.", "blob//"] {
        let env = scene_with_another_users_link();
        let before = everything(&env, "elsewhere") + &everything(&env, "queue.jsonl");
        let run = run(env.offload().args(["--blob-dir", spelling]));
        assert_eq!(run.code, Some(74), "{spelling}: {}", run.stderr);
        assert!(run.stderr.contains("is a symbolic link that belongs to another user"), "{spelling}: {}", run.stderr);
        assert_eq!(everything(&env, "elsewhere") + &everything(&env, "queue.jsonl"), before, "{spelling}");
    }
}

/// Stops offload after a system call, swaps the store for a link, and lets it go on. Says which call that was, if there was one.
fn swap_the_store_after(env: &TestEnv, call: &str, number: usize) -> Option<String> {
    fs::create_dir(env.path("traces")).unwrap();
    let mut strace = env.command(tool("strace", "strace"));
    let (trace, inject) = (format!("trace={call}"), format!("inject={call}:signal=STOP:when={number}"));
    strace.args(["-f", "-o", "traces/trace", "-e", &trace, "-e", &inject]);
    let mut command = under(strace, &env.offload());
    let stopped = || {
        let trace = fs::read_to_string(env.path("traces/trace")).ok()?;
        let at = trace.lines().position(|line| line.ends_with("--- stopped by SIGSTOP ---"))?;
        let thread = trace.lines().nth(at)?.split(' ').next()?;
        let status = fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
        let process =
            status.lines().find_map(|line| line.strip_prefix("Tgid:"))?.trim().parse().ok().and_then(Pid::from_raw)?;
        let before = trace.lines().take(at).filter(|line| line.contains(call)).last()?;
        Some((process, before.to_owned()))
    };
    thread::scope(|scope| {
        let run = scope.spawn(|| run(&mut command));
        let (process, after) = loop {
            match stopped() {
                Some(stopped) => break stopped,
                None if run.is_finished() => return None,
                None => thread::sleep(Duration::from_millis(1)),
            }
        };
        // There may be no store yet.
        let _ = fs::rename(env.path("blob"), env.path("moved-away"));
        symlink("elsewhere", env.path("blob")).unwrap();
        lchown(env.path("blob"), Some(NOBODY), Some(NOBODY)).unwrap();
        // Another thread may come as far, and stop all of them again.
        while !run.is_finished() {
            let _ = kill_process(process, Signal::CONT);
            thread::sleep(Duration::from_millis(1));
        }
        // It may fail or succeed; what was moved away is not what is looked at here.
        let run = run.join().unwrap();
        assert!(run.code.is_some(), "{run:?}");
        Some(after)
    })
}

/// Calls on the store or what is in it, by name and by how many of that name came before in their thread, as strace(1) counts them.
fn calls_on_the_store(env: &TestEnv) -> BTreeSet<(String, usize)> {
    fs::create_dir(env.path("traces")).unwrap();
    let mut strace = env.command(tool("strace", "strace"));
    strace.args(["-f", "-y", "-o", "traces/trace", "-e", "trace=%file,%desc"]);
    succeed(&mut under(strace, &env.offload()));
    let trace = fs::read_to_string(env.path("traces/trace")).unwrap();
    let mut counts = BTreeMap::new();
    let mut calls = BTreeSet::new();
    for line in trace.lines() {
        let (thread, call) = line.split_once(' ').unwrap();
        let Some((name, _)) = call.trim_start().split_once('(') else { continue };
        let count: &mut usize = counts.entry((thread, name)).or_default();
        *count += 1;
        // Whoever only writes or closes looks for no name.
        if line.contains("blob") && !["write", "pread64", "close", "fcntl", "fstat", "lseek"].contains(&name) {
            calls.insert((name.to_owned(), *count));
        }
    }
    calls
}

#[test]
fn a_link_that_somebody_plants_meanwhile_is_not_used_either() {
    needs_root();
    for is_there in [false, true] {
        let lay_out = || {
            let env = scene();
            // Like the home directory of somebody who has nothing to do with this.
            set_mode(&env.path("elsewhere"), 0o700);
            chown(env.path("."), Some(NOBODY), Some(NOBODY)).unwrap();
            if is_there {
                fs::create_dir(env.path("blob")).unwrap();
            }
            env
        };
        let calls = calls_on_the_store(&lay_out());
        let mut swapped = 0;
        for (call, number) in &calls {
            let env = lay_out();
            let before = everything(&env, "elsewhere");
            if let Some(after) = swap_the_store_after(&env, call, *number) {
                assert_eq!(everything(&env, "elsewhere"), before, "a store before: {is_there}; after {after}");
                swapped += 1;
            }
        }
        assert!(swapped > 10, "only {swapped} swaps for {calls:?}");
    }
}

/// Root's home, say. What a killed run has left is empty.
#[test]
fn what_was_there_before_is_not_given_away_because_only_its_owner_may_use_it() {
    needs_root();
    let directory = sha256(large('x'))[..2].to_owned();
    for mode_before in [0o700, 0o2700, 0o1700] {
        let env = agents();
        let store = env.path("store");
        fs::create_dir_all(store.join(&directory)).unwrap();
        for path in [&store, &store.join(&directory)] {
            fs::write(path.join("private"), "a secret").unwrap();
            set_mode(path, mode_before);
        }
        succeed(&mut on_agents(&env, env.offload(), &["--blob-dir", "store"]));
        for path in [&store, &store.join(&directory)] {
            assert_eq!((mode(path), owner(path)), (mode_before, (0, 0)), "{}", path.display());
        }
    }
}

#[test]
fn nobody_looks_behind_another_users_link() {
    let env = scene_with_another_users_link();
    let (mut dry, mut cat, mut exporter) = (env.offload(), env.handoff_blob("cat"), env.to_stdout());
    dry.arg("--dry-run");
    cat.arg(sha256("text"));
    exporter.arg("--quiet");
    for command in [env.offload(), dry, cat, env.handoff_blob("check"), env.handoff_blob("stats"), exporter] {
        let context = format!("{command:?}");
        let run = run_without_looking_elsewhere(&env, &command, &context);
        assert_eq!(run.code, Some(74), "{context}: {}", run.stderr);
    }
}

#[test]
fn an_ordinary_users_umask_may_be_odd() {
    needs_root();
    for umask in ["0177", "0277"] {
        let env = agents();
        let command = on_agents(&env, offload_as(&env, WORKER, &[AGENTS]), &[]);
        succeed(&mut with_umask(&env, umask, &command));
        assert_made_for(&env.path("agents/blob"), (WORKER, AGENTS), umask);
    }
}

#[test]
fn another_users_blob_with_the_same_content_is_no_obstacle() {
    needs_root();
    let env = agents();
    let store = env.path("agents/blob");
    let place = env.path("agents").join(reference(large('x')));
    fs::create_dir_all(place.parent().unwrap()).unwrap();
    fs::write(&place, large('x')).unwrap();
    set_mode(&place, 0o640);
    // A store for a group, in which each member's blobs are that member's.
    for path in [&store, &place.parent().unwrap().to_owned(), &place] {
        chown(path, Some(STRANGER), Some(AGENTS)).unwrap();
        if path.is_dir() {
            set_mode(path, 0o2770);
        }
    }
    let run = run(&mut on_agents(&env, offload_as(&env, WORKER, &[AGENTS]), &[]));
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert!(fs::read_to_string(&place).unwrap() == large('x'));
}

#[test]
fn each_refusal_says_what_to_do() {
    let advises = |run: &Run, context: &str| {
        assert_eq!(run.code, Some(74), "{context}: {}", run.stderr);
        // What an error of the system's ends with is no advice.
        let line = run.stderr.lines().next().unwrap();
        let advice = line.rsplit(": ").next().unwrap();
        assert!(
            !advice.ends_with(')') && !advice.contains("not found") && !advice.contains("as it was"),
            "{context}: {line}"
        );
    };
    let kinds: [Plant; 5] = [
        ("a dangling link", |_, path| symlink("elsewhere/store", path).unwrap()),
        ("a regular file", |_, path| fs::write(path, "text").unwrap()),
        ("a FIFO", |_, path| mknodat(CWD, path, FileType::Fifo, Mode::RWXU, 0).unwrap()),
        ("a link to itself", |_, path| symlink("blob", path).unwrap()),
        ("a directory in a blob's place", |env, _| fs::create_dir_all(env.path(reference(large('x')))).unwrap()),
    ];
    for (kind, make) in kinds {
        let env = scene();
        make(&env, &env.path("blob"));
        advises(&run(&mut env.offload()), kind);
    }
    let env = scene();
    advises(&run(env.offload().args(["--blob-dir", "nowhere/blob"])), "no directory for the store");
    fs::create_dir(env.path("store")).unwrap();
    let mounts = MountNamespace::new(&env, "mount -t tmpfs tmpfs store; mount -o remount,ro store");
    let read_only = run(&mut mounts.inside(&env, &offload_now(&env, &["--blob-dir", "store"])));
    advises(&read_only, "a read-only store");
    let mut sh = env.command(tool("sh", "dash"));
    sh.args(["-c", "trap '' XFSZ; ulimit -f 8; exec \"$@\"", "sh"]);
    advises(&run(&mut under(sh, &env.offload())), "a limit on the size of files");
}

/// Only what a killed run could have left is like new: a mode that no umask makes of 0750 was somebody's intention.
#[test]
fn an_empty_store_that_root_has_made_keeps_a_mode_that_we_would_not_give() {
    needs_root();
    for intended in [0o2770, 0o755, 0o1777] {
        let env = agents();
        fs::create_dir(env.path("agents/blob")).unwrap();
        chown(env.path("agents/blob"), Some(0), Some(AGENTS)).unwrap();
        set_mode(&env.path("agents/blob"), intended);
        succeed(&mut on_agents(&env, env.offload(), &[]));
        assert_eq!((mode(&env.path("agents/blob")), owner(&env.path("agents/blob"))), (intended, (0, AGENTS)));
    }
}
