//! What can go wrong with the files around the exporter, one test each: the exit code, the message, and the file, which says
//! that the run failed or, if it can't be written, stays as it was.

use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use crate::exposition::{Samples, sum, value};
use crate::hostile_labels::flood;
use crate::test_env::{
    Background, EARLIER_SECONDS, NOW, NOW_SECONDS, Run, TestEnv, in_tests, python, record, run, small_queue, start,
    to_file_under, tool,
};

/// All that a run that could not read the queue may tell.
const HEALTH: [&str; 4] = [
    "handoff_build_info",
    "handoff_exporter_duration_seconds",
    "handoff_exporter_last_success_timestamp_seconds",
    "handoff_exporter_success",
];

/// A queue that has been exported before.
fn exported_before() -> TestEnv {
    let env = TestEnv::new();
    env.write("queue.jsonl", small_queue());
    env.run_earlier();
    env
}

/// Asserts that the file says that a run failed, and when the last one did not.
fn assert_says_failed(env: &TestEnv, last_success: f64) -> Samples {
    let samples = env.assert_only_a_good_file("after a failure");
    assert!(value(&samples, "handoff_exporter_success", &[]).abs() < 0.5, "it says success");
    let last = value(&samples, "handoff_exporter_last_success_timestamp_seconds", &[]);
    assert!((last - last_success).abs() < 1e-6, "the last success was {last_success}, not {last}");
    samples
}

/// Asserts the exit code, one message that holds `message`, and a file with nothing but health.
fn assert_fails(env: &TestEnv, run: &Run, code: i32, message: &str) {
    assert_message(run, code, message);
    let samples = assert_says_failed(env, EARLIER_SECONDS);
    let names: Vec<&str> = samples.keys().map(|series| series.name.as_str()).collect();
    assert_eq!(names, HEALTH);
    assert!(run.took < Duration::from_secs(10), "it took {:?}", run.took);
}

fn assert_message(run: &Run, code: i32, message: &str) {
    assert_eq!(run.code, Some(code), "{}", run.stderr);
    let [line] = run.stderr.lines().collect::<Vec<_>>()[..] else { panic!("not one message: {}", run.stderr) };
    assert!(line.starts_with("handoff-exporter: ") && line.contains(message), "{line:?} doesn't say {message:?}");
}

/// Asserts that a run that can't write leaves the file as it was.
fn assert_leaves_the_file(env: &TestEnv, command: &mut Command, message: &str) {
    let before = fs::read(env.prom()).unwrap();
    assert_message(&run(command), 74, message);
    assert!(fs::read(env.prom()).unwrap() == before, "the file has changed");
    assert_eq!(env.textfile_names(), ["handoff.prom"]);
}

fn assert_succeeds(env: &TestEnv, run: &Run) -> Samples {
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    let samples = env.assert_only_a_good_file("after a success");
    assert!((value(&samples, "handoff_exporter_success", &[]) - 1.0).abs() < 0.5, "it doesn't say success");
    let last = value(&samples, "handoff_exporter_last_success_timestamp_seconds", &[]);
    assert!((last - NOW_SECONDS).abs() < 1e-6);
    samples
}

fn hold_lock(env: &TestEnv, lock: &str, how: &str) -> (Background, String) {
    let mut command = env.command(python());
    Background::spawn_and_wait_for_line(command.arg(in_tests("workers/hold_lock.py")).args([lock, how]))
}

fn set_mode(env: &TestEnv, name: &str, mode: u32) {
    fs::set_permissions(env.path(name), Permissions::from_mode(mode)).unwrap();
}

// The lock.

#[test]
fn a_lock_held_by_python_is_busy() {
    let env = exported_before();
    let (_holder, id) = hold_lock(&env, "queue.lock", "exclusive");
    let busy = run(env.to_file().args(["--lock-timeout", "300ms"]));
    assert_fails(&env, &busy, 75, &format!("queue.lock: still locked after 300ms by process {id} (python"));
    assert!(busy.took >= Duration::from_millis(300), "it gave up after {:?}", busy.took);
}

#[test]
fn a_lock_held_by_flock_is_busy_until_it_is_free() {
    let env = exported_before();
    let mut flock = env.command(tool("flock", "util-linux"));
    let (holder, _) =
        Background::spawn_and_wait_for_line(flock.args(["--no-fork", "queue.lock", "sh", "-c", "echo held; cat"]));
    let busy = run(env.to_file().args(["--lock-timeout", "100ms"]));
    assert_fails(&env, &busy, 75, &format!("by process {} (", holder.id()));

    let waiting = thread::scope(|scope| {
        let waiting = scope.spawn(|| run(env.to_file().args(["--lock-timeout", "60s"])));
        thread::sleep(Duration::from_millis(500));
        assert!(!waiting.is_finished(), "it didn't wait");
        holder.finish();
        waiting.join().unwrap()
    });
    assert!(waiting.took < Duration::from_secs(10), "it noticed after {:?} only", waiting.took);
    assert_succeeds(&env, &waiting);
}

#[test]
fn another_reader_does_not_hinder() {
    let env = exported_before();
    let (_holder, _) = hold_lock(&env, "queue.lock", "shared");
    assert_succeeds(&env, &run(env.to_file().args(["--lock-timeout", "100ms"])));
}

#[test]
fn a_lock_file_replaced_while_it_was_held_is_not_the_lock() {
    let env = exported_before();
    let (old_holder, _) = hold_lock(&env, "queue.lock", "exclusive");
    thread::scope(|scope| {
        let waiting = scope.spawn(|| run(env.to_file().args(["--lock-timeout", "3s"])));
        thread::sleep(Duration::from_millis(500));
        let (new_holder, id) = hold_lock(&env, "new.lock", "exclusive");
        fs::rename(env.path("new.lock"), env.path("queue.lock")).unwrap();
        old_holder.finish();
        // It has the lock that it waited for, but somebody else works under the one that counts now.
        let run = waiting.join().unwrap();
        assert_message(&run, 75, &format!("by process {id} ("));
        assert_says_failed(&env, EARLIER_SECONDS);
        new_holder.finish();
    });
    assert_succeeds(&env, &run(&mut env.to_file()));
}

#[test]
fn an_unreadable_lock_file_is_an_error() {
    let env = exported_before();
    env.write("queue.lock", "");
    set_mode(&env, "queue.lock", 0o000);
    assert_fails(&env, &run(&mut env.to_file_as_ordinary_user()), 74, "queue.lock: cannot be opened");
}

#[test]
fn a_reader_makes_no_lock_file() {
    let env = exported_before();
    assert_succeeds(&env, &run(&mut env.to_file()));
    assert!(!env.path("queue.lock").exists());
}

// The queue.

#[test]
fn an_unreadable_queue_is_an_error() {
    let env = exported_before();
    set_mode(&env, "queue.jsonl", 0o000);
    assert_fails(
        &env,
        &run(&mut env.to_file_as_ordinary_user()),
        74,
        "queue.jsonl: cannot be opened: Permission denied",
    );
}

#[test]
fn a_directory_is_no_queue() {
    let env = exported_before();
    fs::remove_file(env.path("queue.jsonl")).unwrap();
    fs::create_dir(env.path("queue.jsonl")).unwrap();
    assert_fails(&env, &run(&mut env.to_file()), 74, "queue.jsonl: cannot be opened: it is a directory");
}

#[test]
fn a_fifo_is_no_queue_and_does_not_hang() {
    let env = exported_before();
    fs::remove_file(env.path("queue.jsonl")).unwrap();
    assert_eq!(run(env.command(tool("mkfifo", "coreutils")).arg("queue.jsonl")).code, Some(0));
    assert_fails(&env, &run(&mut env.to_file()), 74, "queue.jsonl: cannot be opened: it is not a regular file");
}

#[test]
fn a_dangling_link_is_no_empty_queue() {
    let env = exported_before();
    fs::remove_file(env.path("queue.jsonl")).unwrap();
    symlink("moved-away.jsonl", env.path("queue.jsonl")).unwrap();
    assert_fails(&env, &run(&mut env.to_file()), 74, "queue.jsonl: cannot be opened: it is a symbolic link");
}

#[test]
fn a_queue_behind_a_link_is_read() {
    let env = exported_before();
    fs::create_dir(env.path("real")).unwrap();
    fs::rename(env.path("queue.jsonl"), env.path("real/queue.jsonl")).unwrap();
    symlink("real/queue.jsonl", env.path("queue.jsonl")).unwrap();
    let samples = assert_succeeds(&env, &run(&mut env.to_file()));
    assert!((sum(&samples, "handoff_queue_records", &[]) - 3.0).abs() < 0.5);
}

#[test]
fn a_missing_queue_is_an_empty_one() {
    let env = exported_before();
    fs::remove_file(env.path("queue.jsonl")).unwrap();
    let empty = run(&mut env.to_file());
    assert_message(&empty, 0, "queue.jsonl: does not exist, and is read as an empty queue");
    let samples = env.assert_only_a_good_file("of no queue");
    assert!((value(&samples, "handoff_exporter_success", &[]) - 1.0).abs() < 0.5, "it doesn't say success");
    assert!(value(&samples, "handoff_queue_bytes", &[]).abs() < 0.5);
    assert!(sum(&samples, "handoff_queue_records", &[]).abs() < 0.5);
    let seeded = run(env.to_file().args(["--quiet", "--roles", "researcher", "--kinds", "classify"]));
    let samples = assert_succeeds(&env, &seeded);
    let labels = [("role", "researcher"), ("kind", "classify"), ("status", "queued")];
    assert!(value(&samples, "handoff_queue_records", &labels).abs() < 0.5);
}

#[test]
fn a_missing_directory_is_no_empty_queue() {
    let env = exported_before();
    let mut command = env.bare_exporter();
    command.args(["--queue", "unmounted/queue.jsonl", "--textfile-dir", "textfile", "--now", NOW]);
    assert_fails(
        &env,
        &run(&mut command),
        74,
        "unmounted/queue.jsonl: cannot be read: its directory: No such file or directory",
    );
}

#[test]
fn an_unreadable_blob_store_hides_only_itself() {
    let env = exported_before();
    fs::create_dir(env.path("blob")).unwrap();
    set_mode(&env, "blob", 0o000);
    let run = run(&mut env.to_file_as_ordinary_user());
    assert_message(&run, 74, "blob: cannot be opened");
    let samples = assert_says_failed(&env, EARLIER_SECONDS);
    assert!((sum(&samples, "handoff_queue_records", &[]) - 3.0).abs() < 0.5);
    assert!(samples.keys().all(|series| !series.name.starts_with("handoff_blob")), "blobs that nobody could count");
    // So that the temporary directory can be removed by an ordinary user.
    set_mode(&env, "blob", 0o755);
}

#[test]
fn a_failure_after_a_failure_keeps_the_time_of_the_last_success() {
    let env = exported_before();
    let queue = fs::read(env.path("queue.jsonl")).unwrap();
    fs::remove_file(env.path("queue.jsonl")).unwrap();
    fs::create_dir(env.path("queue.jsonl")).unwrap();
    for _ in 0..3 {
        assert_fails(&env, &run(&mut env.to_file()), 74, "queue.jsonl");
    }
    fs::remove_dir(env.path("queue.jsonl")).unwrap();
    env.write("queue.jsonl", queue);
    assert_succeeds(&env, &run(&mut env.to_file()));
}

#[test]
fn a_first_run_that_fails_says_that_none_succeeded() {
    let env = TestEnv::new();
    fs::create_dir(env.path("queue.jsonl")).unwrap();
    assert_message(&run(&mut env.to_file()), 74, "queue.jsonl");
    assert_says_failed(&env, 0.0);
}

#[test]
fn a_damaged_file_of_an_earlier_run_is_replaced() {
    let env = exported_before();
    for damaged in [&b""[..], b"\xff\xfe\0", b"handoff_exporter_last_success_timestamp_seconds NaN\n"] {
        fs::write(env.prom(), damaged).unwrap();
        assert_message(&run(env.to_file().args(["--prices", "missing.json"])), 74, "missing.json");
        assert_says_failed(&env, 0.0);
        assert_succeeds(&env, &run(&mut env.to_file()));
    }
}

// Prices.

#[test]
fn a_price_map_that_is_none_is_bad_data() {
    let env = exported_before();
    for bad in ["{", "[]", "", "{\"m\":{\"input_cost_per_token\":"] {
        env.write("prices.json", bad);
        assert_fails(&env, &run(env.to_file().args(["--prices", "prices.json"])), 65, "prices.json");
    }
}

#[test]
fn a_missing_price_map_is_an_error() {
    let env = exported_before();
    assert_fails(
        &env,
        &run(env.to_file().args(["--prices", "prices.json"])),
        74,
        "prices.json: does not exist: correct the path",
    );
}

// The output.

#[test]
fn a_missing_textfile_directory_is_an_error_and_not_made() {
    let env = TestEnv::new();
    env.write("queue.jsonl", small_queue());
    fs::remove_dir(env.textfile_dir()).unwrap();
    assert_message(&run(&mut env.to_file()), 74, "textfile: cannot be written into: No such file");
    assert!(!env.textfile_dir().exists());
}

#[test]
fn a_read_only_textfile_directory_is_an_error() {
    let env = exported_before();
    set_mode(&env, "textfile", 0o555);
    assert_leaves_the_file(
        &env,
        &mut env.to_file_as_ordinary_user(),
        "textfile: cannot be written into: Permission denied",
    );
    set_mode(&env, "textfile", 0o755);
}

#[test]
fn a_directory_in_the_place_of_the_file_is_an_error() {
    let env = TestEnv::new();
    env.write("queue.jsonl", small_queue());
    fs::create_dir(env.prom()).unwrap();
    assert_message(&run(&mut env.to_file()), 74, "handoff.prom: cannot be replaced");
    assert_eq!(env.textfile_names(), ["handoff.prom"]);
}

#[test]
fn a_full_disk_leaves_the_file_and_nothing_else() {
    let env = exported_before();
    fs::rename(env.prom(), env.path("before.prom")).unwrap();
    // In a mount namespace of its own, so that no mount outlives the test.
    let script = "
        set -e
        mount -t tmpfs -o size=64k,mode=755 tmpfs textfile
        cp before.prom textfile/handoff.prom
        if cat /dev/zero >textfile/fill 2>/dev/null; then exit 90; fi
        code=0
        \"$@\" || code=$?
        ls -A textfile
        cmp before.prom textfile/handoff.prom || exit 91
        rm textfile/fill
        \"$@\" || exit 92
        ls -A textfile
        stat -c %a textfile/handoff.prom
        exit $code";
    let mut unshare = env.command(tool("unshare", "util-linux"));
    unshare.args(["--map-root-user", "--mount", "sh", "-c", script, "sh"]);
    let run = run(&mut to_file_under(unshare));
    assert_message(&run, 74, "handoff.prom: cannot be written: No space left on device");
    assert_eq!(String::from_utf8_lossy(&run.stdout), "fill\nhandoff.prom\nhandoff.prom\n644\n");
}

#[test]
fn a_full_device_as_standard_output_is_an_error() {
    let env = exported_before();
    let mut command = env.to_stdout();
    command.stdout(File::options().write(true).open("/dev/full").unwrap()).stderr(Stdio::piped());
    let output = start(&mut command).wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(74), "{stderr}");
    assert!(stderr.starts_with("handoff-exporter: standard output: cannot be written: No space"), "{stderr}");
}

#[test]
fn who_reads_only_the_first_line_has_got_what_they_wanted() {
    let env = TestEnv::new();
    // Far more than fits in a pipe.
    env.write("queue.jsonl", flood());
    for lines in [0, 1] {
        let mut child = start(env.to_stdout().stdout(Stdio::piped()).stderr(Stdio::piped()));
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        for _ in 0..lines {
            stdout.read_line(&mut line).unwrap();
            assert!(line.starts_with("# HELP "), "{line}");
        }
        drop(stdout);
        let mut stderr = String::new();
        child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        let status = child.wait().unwrap();
        assert_eq!((status.code(), stderr.as_str()), (Some(0), ""), "after {lines} lines");
    }
}

#[test]
fn a_closed_standard_error_changes_nothing() {
    let env = exported_before();
    let mut sh = env.command(tool("sh", "dash"));
    sh.args(["-c", "exec \"$@\" 2>&-", "sh"]);
    let run = run(to_file_under(sh).args(["--prices", "missing.json"]));
    assert_eq!((run.code, run.stderr.as_str()), (Some(74), ""));
    assert_says_failed(&env, EARLIER_SECONDS);
}

#[test]
fn anyone_may_read_the_file_whatever_the_umask() {
    for umask in ["000", "022", "077", "777"] {
        let env = exported_before();
        set_mode(&env, "textfile/handoff.prom", 0o600);
        let mut sh = env.command(tool("sh", "dash"));
        sh.args(["-c", &format!("umask {umask}; exec \"$@\""), "sh"]);
        assert_succeeds(&env, &run(&mut to_file_under(sh)));
    }
}

#[test]
fn a_price_map_that_is_a_fifo_does_not_hang() {
    let env = exported_before();
    assert_eq!(run(env.command(tool("mkfifo", "coreutils")).arg("prices.json")).code, Some(0));
    let run = run(env.to_file().args(["--prices", "prices.json"]));
    assert_fails(&env, &run, 74, "prices.json: cannot be opened: it is not a regular file");
}

#[test]
fn a_wrong_path_to_the_lock_does_not_switch_locking_off() {
    let env = exported_before();
    let run = run(env.to_file().args(["--lock", "nowhere/queue.lock"]));
    assert_fails(
        &env,
        &run,
        74,
        "nowhere/queue.lock: cannot be the lock file: its directory: No such file or directory",
    );
}

#[test]
fn a_queue_that_was_there_and_is_gone_is_no_empty_one() {
    let env = exported_before();
    fs::rename(env.path("queue.jsonl"), env.path("queue.gen.3")).unwrap();
    let run = run(&mut env.to_file());
    assert_fails(&env, &run, 74, "queue.jsonl: is missing, though it has an earlier generation");
}

#[test]
fn missing_blobs_are_named_once_each() {
    let env = exported_before();
    let reference = |digits: &str| format!("{{\"text\":\"blob/{digits}/{}\"}}", digits.repeat(32));
    let referring = |digits: &str| record("a", "researcher", "done").replace("{}", &reference(digits));
    env.write("queue.jsonl", referring("ab").repeat(20) + &referring("cd"));
    let run = run(&mut env.to_file());
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let named =
        |digits: &str| format!("blob/{digits}/{}: is missing, though the queue refers to it", digits.repeat(32));
    let messages: Vec<&str> = run.stderr.lines().collect();
    assert!(
        messages.len() == 2 && messages[0].ends_with(&named("ab")) && messages[1].ends_with(&named("cd")),
        "{messages:#?}"
    );
    let samples = env.assert_only_a_good_file("with missing blobs");
    assert!((value(&samples, "handoff_blob_missing_references", &[]) - 21.0).abs() < 0.5);
}

#[test]
fn what_else_lies_in_the_blob_store_is_not_looked_at() {
    let env = exported_before();
    fs::create_dir_all(env.path("blob/lost+found")).unwrap();
    let mut command = env.to_file_as_ordinary_user();
    fs::set_permissions(env.path("blob/lost+found"), Permissions::from_mode(0o000)).unwrap();
    let samples = assert_succeeds(&env, &run(&mut command));
    fs::set_permissions(env.path("blob/lost+found"), Permissions::from_mode(0o700)).unwrap();
    assert!(value(&samples, "handoff_blob_objects", &[]).abs() < 0.5);
}

#[test]
fn a_price_map_without_a_price_is_bad_data() {
    for map in ["{}", "{\"m\":null}", "{\"m\":{\"input\":1}}", "{\"m\":{\"input_cost_per_token\":\"dear\"}}"] {
        let env = exported_before();
        env.write("prices.json", map);
        let run = run(env.to_file().args(["--prices", "prices.json"]));
        assert_fails(&env, &run, 65, "prices.json: not a price map: no model has a usable input_cost_per_token");
    }
}

#[test]
fn a_blob_store_that_is_no_directory_is_not_an_empty_one() {
    let env = exported_before();
    env.write("blob", "");
    let run = run(&mut env.to_file());
    assert_message(&run, 74, "blob: is no blob store: ");
    let samples = assert_says_failed(&env, EARLIER_SECONDS);
    assert!(sum(&samples, "handoff_queue_records", &[]) > 0.5, "the queue itself was read");
    assert!(samples.keys().all(|series| !series.name.starts_with("handoff_blob")), "what blobs are there is not known");
}

/// Runs the exporter where no thread can be started.
fn without_threads(env: &TestEnv, arguments: &[&str]) -> Run {
    let mut strace = env.command(tool("strace", "strace"));
    strace.args(["-f", "-o", "trace", "-e", "inject=clone3,clone:error=EAGAIN"]);
    run(to_file_under(strace).args(arguments))
}

#[test]
fn a_thread_that_cannot_be_started_only_costs_time() {
    let env = exported_before();
    let line = small_queue();
    let repeated = 40_000_000 / line.len();
    env.write("queue.jsonl", line.repeat(repeated));
    let records = u32::try_from(repeated * line.lines().count()).unwrap();
    let run = without_threads(&env, &[]);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let trace = fs::read_to_string(env.path("trace")).unwrap();
    assert!(trace.contains("EAGAIN"), "it started no thread, so that this proves nothing");
    let samples = env.assert_only_a_good_file("without threads");
    assert!((sum(&samples, "handoff_queue_records", &[]) - f64::from(records)).abs() < 0.5);
}

#[test]
fn a_lock_that_no_thread_can_wait_for_is_an_error() {
    let env = exported_before();
    let (_holder, _) = hold_lock(&env, "queue.lock", "exclusive");
    let run = without_threads(&env, &[]);
    assert_fails(&env, &run, 74, "queue.lock: is locked, and no thread can be started to wait for it");
}

#[test]
fn a_lock_file_that_appears_while_it_is_looked_for_is_no_dangling_link() {
    let env = exported_before();
    fs::remove_file(env.path("queue.lock")).unwrap_or_default();
    let mut strace = env.command(tool("strace", "strace"));
    strace.args(["-f", "-o", "trace", "-P", "queue.lock", "-e", "inject=statx:delay_exit=1500000:when=1"]);
    let run = thread::scope(|scope| {
        let run = scope.spawn(|| run(&mut to_file_under(strace)));
        thread::sleep(Duration::from_millis(700));
        env.write("queue.lock", "");
        run.join().unwrap()
    });
    assert!(
        fs::read_to_string(env.path("trace")).unwrap().contains("(DELAYED)"),
        "nothing was delayed, so that this proves nothing"
    );
    assert_succeeds(&env, &run);
}

#[test]
fn workers_that_lock_another_file_are_reported() {
    let env = exported_before();
    fs::create_dir(env.path("real")).unwrap();
    fs::rename(env.path("queue.jsonl"), env.path("real/queue.jsonl")).unwrap();
    symlink("real/queue.jsonl", env.path("queue.jsonl")).unwrap();
    env.write("queue.lock", "");
    assert_eq!(run(&mut env.to_file()).stderr, "");
    env.write("real/queue.lock", "");
    let two_locks = run(&mut env.to_file());
    assert_message(&two_locks, 0, "queue.lock: there is another lock, ");
}

#[test]
fn a_directory_that_may_not_be_looked_into_is_not_a_missing_one() {
    let env = TestEnv::new();
    env.write("queue.jsonl", small_queue());
    fs::create_dir(env.path("private")).unwrap();
    fs::rename(env.textfile_dir(), env.path("private/textfile")).unwrap();
    symlink("private/textfile", env.textfile_dir()).unwrap();
    let mut command = env.to_file_as_ordinary_user();
    fs::set_permissions(env.path("private"), Permissions::from_mode(0o000)).unwrap();
    let run = run(&mut command);
    fs::set_permissions(env.path("private"), Permissions::from_mode(0o700)).unwrap();
    assert_eq!(run.code, Some(74), "{}", run.stderr);
    let message = "textfile: cannot be written into: Permission denied (os error 13): give this user access to it\n";
    assert!(run.stderr.ends_with(message), "{}", run.stderr);
}

#[test]
fn the_last_success_is_found_in_the_largest_file_that_a_run_can_leave() {
    let env = exported_before();
    let mut file = fs::read(env.prom()).unwrap();
    let padding = format!("handoff_queue_bytes{{x=\"{}\"}} 1\n", "\\\"".repeat(1_000));
    file.splice(0..0, padding.repeat(25_000_000 / padding.len()).into_bytes());
    fs::write(env.prom(), file).unwrap();
    fs::remove_file(env.path("queue.jsonl")).unwrap();
    fs::create_dir(env.path("queue.jsonl")).unwrap();
    let run = run(&mut env.to_file());
    assert_fails(&env, &run, 74, "queue.jsonl: cannot be opened: it is a directory");
}

#[test]
fn a_price_map_of_nothing_but_tiers_is_one() {
    let env = exported_before();
    env.write("prices.json", "{\"m\":{\"input_cost_per_token_above_0k_tokens\":1}}");
    assert_succeeds(&env, &run(env.to_file().args(["--prices", "prices.json"])));
}
