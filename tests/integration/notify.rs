//! `handoff notify`, and mail from those who escalate: through a real sendmail to a real SMTP server, once for each record.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::offload_settings::hold_lock;
use crate::test_env::{
    Background, MountNamespace, Run, TestEnv, append, copy_program, in_tests, is_root, names_in, record, run, tool,
};
use crate::work::{Running, env_with, records, status, until, worker};

/// A mail server that takes everything, and a sendmail that knows of it.
struct Post {
    _sink: Background,
}

impl Post {
    fn open(env: &TestEnv) -> Self {
        // Debian's own Python has Debian's aiosmtpd.
        let module = Path::new("/usr/lib/python3/dist-packages/aiosmtpd");
        assert!(module.exists(), "this test needs aiosmtpd, which Debian has in the package python3-aiosmtpd");
        let mut sink = env.command("/usr/bin/python3");
        sink.arg(in_tests("workers/smtp_sink.py")).arg("mails");
        let (sink, port) = Background::spawn_and_wait_for_line(&mut sink);
        direct_mail_to(env, &port);
        Self { _sink: sink }
    }
}

fn direct_mail_to(env: &TestEnv, port: &str) {
    let sendmail = fs::canonicalize(tool_in_sbin("sendmail", "msmtp-mta")).unwrap();
    assert!(sendmail.ends_with("msmtp"), "this test needs the sendmail of the package msmtp-mta");
    env.write(".msmtprc", format!("account default\nhost 127.0.0.1\nport {port}\nfrom agents@box.example\n"));
    fs::set_permissions(env.path(".msmtprc"), Permissions::from_mode(0o600)).unwrap();
}

fn tool_in_sbin(name: &str, package: &str) -> std::path::PathBuf {
    let path = Path::new("/usr/sbin").join(name);
    if path.exists() { path } else { tool(name, package) }
}

/// With the settings that a service has.
fn mailing<'a>(env: &TestEnv, command: &'a mut Command) -> &'a mut Command {
    command.env("HOME", env.path("")).env("HANDOFF_MAIL_TO", "ops@example.org, root@box.example")
}

fn notify(env: &TestEnv) -> Command {
    let mut command = env.bare_handoff();
    command.args(["notify", "--queue", "queue.jsonl"]);
    command
}

fn notify_by_mail(env: &TestEnv) -> Run {
    run(mailing(env, &mut notify(env)))
}

fn mails(env: &TestEnv) -> Vec<Value> {
    let mails = fs::read_to_string(env.path("mails")).unwrap_or_default();
    mails.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn headers(mail: &Value) -> BTreeMap<String, String> {
    let mut headers = BTreeMap::new();
    for header in mail["headers"].as_array().unwrap() {
        let [name, value] = [0, 1].map(|index| header[index].as_str().unwrap().to_owned());
        assert!(headers.insert(name.clone(), value).is_none(), "two headers {name}: {mail}");
    }
    headers
}

fn is_announced(env: &TestEnv, id: &str) -> bool {
    let record = &records(env)[id];
    assert!(record["notified_ts"].is_null() || record["notified_ts"].is_number(), "{record}");
    !record["notified_ts"].is_null()
}

#[test]
fn a_record_whose_worker_dies_twice_is_mailed_about_once() {
    let env = env_with(&record("a", "researcher", "queued").replace("{}", r#"{"summary":"Customer é asks: why?"}"#));
    let _post = Post::open(&env);
    for _ in 0..2 {
        drop(fs::remove_file(env.path("child")));
        let mut command = worker(&env, &[], "echo $$ >child; exec sleep 1000");
        let worker = Running::start(&env, mailing(&env, &mut command));
        until("the command", || fs::read_to_string(env.path("child")).is_ok_and(|child| child.ends_with('\n')));
        assert_eq!(mails(&env), [] as [Value; 0]);
        worker.signal("KILL");
        worker.end();
    }
    let mut command = worker(&env, &[], "touch ran");
    let worker = Running::start(&env, mailing(&env, &mut command));
    until("the announcement", || is_announced(&env, "a"));
    worker.signal("TERM");
    let (code, _, messages) = worker.end();
    assert_eq!(code, Some(0), "{messages}");
    assert!(!env.path("ran").exists());
    for _ in 0..2 {
        let ended = notify_by_mail(&env);
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    }
    let a = &records(&env)["a"];
    assert_eq!(a["status"], "human");
    let [mail] = &mails(&env)[..] else { panic!("{:?}", mails(&env)) };
    assert_eq!((&mail["to"], &mail["defects"]), (&json!(["ops@example.org", "root@box.example"]), &json!([])));
    let headers = headers(mail);
    assert_eq!(headers["subject"], "handoff: classify for researcher waits for a person (a)");
    assert_eq!(headers["to"], "ops@example.org, root@box.example");
    assert_eq!(headers["from"], "agents@box.example");
    assert_eq!(headers["auto-submitted"], "auto-generated");
    assert_eq!(headers["content-type"], "text/plain; charset=\"utf-8\"");
    assert!(headers.contains_key("date") && headers["message-id"].starts_with("<handoff."), "{headers:?}");
    let body = mail["body"].as_str().unwrap();
    for line in [
        "id:      a",
        "kind:    classify",
        "from:    triage",
        "to:      researcher",
        "queued:  2026-11-29T11:00:00Z",
        "summary: Customer é asks: why?",
        "To see it:      handoff show a",
        "To send it on:  handoff requeue a",
    ] {
        assert!(body.lines().any(|told| told == line), "no {line:?} in {body}");
    }
    assert_eq!(body.matches("by researcher, worker_died: its worker died").count(), 2, "{body}");
}

#[test]
fn a_mail_that_fails_is_sent_by_the_next_run() {
    let env = env_with(&(record("a", "researcher", "human") + &record("b", "patcher", "human")));
    // Nobody listens there.
    direct_mail_to(&env, "1");
    let before = fs::read(env.path("queue.jsonl")).unwrap();
    for _ in 0..2 {
        let ended = notify_by_mail(&env);
        assert_eq!(ended.code, Some(74), "{}", ended.stderr);
        let lines: Vec<&str> = ended.stderr.lines().collect();
        assert_eq!(lines.len(), 2, "{}", ended.stderr);
        for (line, id) in lines.iter().zip(["a", "b"]) {
            assert!(line.contains("sendmail: failed (exit status: ") && line.contains("cannot connect"), "{line}");
            assert!(
                line.ends_with(&format!("nobody has been told of record {id}: the next run tries again")),
                "{line}"
            );
        }
        assert_eq!(fs::read(env.path("queue.jsonl")).unwrap(), before);
    }
    let _post = Post::open(&env);
    let ended = notify_by_mail(&env);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(notify_by_mail(&env).code, Some(0));
    let subjects: Vec<String> = mails(&env).iter().map(|mail| headers(mail)["subject"].clone()).collect();
    let expected = ["researcher waits for a person (a)", "patcher waits for a person (b)"];
    assert_eq!(subjects, expected.map(|end| format!("handoff: classify for {end}")));
}

#[test]
fn after_some_failures_the_rest_is_left_to_the_next_run() {
    let queue: String = (0..5).map(|number| record(&number.to_string(), "researcher", "human")).collect();
    let env = env_with(&queue);
    let ended = run(notify(&env).args(["--notify", "cat >>tried; exit 1"]));
    assert_eq!(ended.code, Some(74), "{}", ended.stderr);
    let last = ended.stderr.lines().last().unwrap();
    assert!(last.ends_with("queue.jsonl: 2 more wait for a person and are left to the next run"), "{last}");
    assert_eq!(fs::read_to_string(env.path("tried")).unwrap().lines().count(), 3);
    assert_eq!(fs::read_to_string(env.path("queue.jsonl")).unwrap(), queue);
}

#[test]
fn records_of_python_workers_get_mail_too() {
    let old = r#"{"id": "old-1", "ts": 1795950000123, "kind": "draft_reply", "from": "triage", "to": "", "payload": [1, NaN], "status": "human"}"#;
    let counted = r#"{"id": "old-2", "ts": "2026-11-29T10:00:00.5+01:00", "kind": "draft_reply", "from": "triage", "to": "researcher", "payload": {"summary": "lone \ud83d"}, "status": "human", "nacks": 2, "extra": [1]}"#;
    let told =
        r#"{"id":"told","ts":1,"kind":"k","from":"a","to":"b","payload":{},"status":"human","notified_ts":1795950000}"#;
    // What can't be marked would be announced for ever.
    let same = record("same", "researcher", "human").repeat(2);
    let unterminated = record("begun", "researcher", "human");
    let queue = format!("{old}\n{counted}\n{told}\n{same}not json\n{}", unterminated.trim_end());
    let env = env_with(&queue);
    let _post = Post::open(&env);
    let ended = notify_by_mail(&env);
    // Somebody must hear of them all the same: the timer's unit fails.
    assert_eq!(ended.code, Some(74), "{}", ended.stderr);
    let nobody = "waits for a person, and nobody is told: it can't be marked";
    for message in [
        format!("queue.jsonl:1: record old-1 {nobody}: it is in doubt (non_finite_number), so that its line"),
        format!("queue.jsonl:4: record same {nobody}: another one has the same id"),
        format!("queue.jsonl:5: record same {nobody}: another one has the same id"),
    ] {
        assert_eq!(ended.stderr.matches(&message).count(), 1, "{message}: {}", ended.stderr);
    }
    let [mail] = &mails(&env)[..] else { panic!("{:?}", mails(&env)) };
    assert_eq!(headers(mail)["subject"], "handoff: draft_reply for researcher waits for a person (old-2)");
    let body = mail["body"].as_str().unwrap();
    assert!(body.contains("It was refused 2 times.") && body.contains("summary: lone \u{fffd}"), "{body}");
    assert!(body.contains("queued:  2026-11-29T09:00:00Z"), "{body}");
    // All but the mark is as it was.
    let after = fs::read_to_string(env.path("queue.jsonl")).unwrap();
    let line = after.lines().find(|line| line.contains("old-2")).unwrap();
    let (before, mark) = line.split_at(counted.len() - 1);
    assert_eq!(before, &counted[..counted.len() - 1]);
    assert!(mark.starts_with(",\"notified_ts\":"), "{mark}");
}

/// Tells people of the one record twice, which must fail each time for this reason, and tell nobody.
fn assert_nobody_is_told(env: &TestEnv, command: impl Fn() -> Command, code: i32, why: &str) {
    for _ in 0..2 {
        let ended = run(command().env("HANDOFF_NOTIFY", "cat >>\"$TOLD\"").env("TOLD", env.path("told")));
        assert_eq!(ended.code, Some(code), "{why}: {}", ended.stderr);
        assert!(ended.stderr.contains(why) && ended.stderr.contains("nobody is told"), "{why}: {}", ended.stderr);
    }
    assert!(!env.path("told").exists(), "{why}");
}

#[test]
fn nobody_is_told_again_and_again_of_what_can_not_be_marked() {
    let human = record("a", "researcher", "human");
    let at = |env: &TestEnv| {
        let mut command = env.bare_handoff();
        command.args(["notify", "--queue", "queue.jsonl"]);
        command
    };

    let env = env_with(&format!("{}\n{human}", r#"{"id":"ledger","ts":1,"kind":"ledger"#));
    assert_nobody_is_told(&env, || at(&env), 65, "the ledger cannot be read");

    let env = env_with(&human);
    fs::hard_link(env.path("queue.jsonl"), env.path("other")).unwrap();
    assert_nobody_is_told(&env, || at(&env), 74, "has 2 names");

    let env = env_with(&human);
    fs::rename(env.path("queue.jsonl"), env.path("real.jsonl")).unwrap();
    std::os::unix::fs::symlink("real.jsonl", env.path("queue.jsonl")).unwrap();
    env.write("queue.lock", "");
    env.write("real.lock", "");
    assert_nobody_is_told(&env, || at(&env), 74, "there is another lock");

    let env = env_with(&human);
    let (holder, _) = hold_lock(&env, "queue.jsonl", "exclusive");
    assert_nobody_is_told(&env, || at(&env), 75, "is locked itself");
    holder.finish();

    // There is room for the line as it is, and no more.
    let env = env_with(&human);
    let with_limit = || {
        let mut command = at(&env);
        command.args(["--max-line", &(human.len() - 1).to_string()]);
        command
    };
    assert_nobody_is_told(&env, with_limit, 74, "its line would be too long");

    let env = env_with(&human);
    let mounts = MountNamespace::new(&env, "mount --bind queue.jsonl queue.jsonl");
    assert_nobody_is_told(&env, || mounts.inside(&env, &at(&env)), 74, "is a mount point of its own");
    drop(mounts);
    // It was not for another reason.
    let ended = run(at(&env).env("HANDOFF_NOTIFY", "cat >told"));
    assert_eq!((ended.code, fs::read_to_string(env.path("told")).unwrap()), (Some(0), human), "{}", ended.stderr);
}

#[test]
fn without_room_for_a_mark_nobody_is_told() {
    let env = TestEnv::new();
    fs::create_dir(env.path("agents")).unwrap();
    let mounts = MountNamespace::new(&env, "mount -t tmpfs -o size=64k,mode=755 tmpfs agents");
    let agents = mounts.path("agents");
    fs::write(agents.join("queue.jsonl"), record("a", "researcher", "human")).unwrap();
    fs::write(agents.join("queue.lock"), "").unwrap();
    let filled = run(&mut mounts.inside(&env, env.command("sh").args(["-c", "cat /dev/zero >agents/fill"])));
    assert_ne!(filled.code, Some(0), "it is not full");
    let notify = || {
        let mut command = env.bare_handoff();
        command.args(["notify", "--queue", "agents/queue.jsonl"]);
        mounts.inside(&env, &command)
    };
    assert_nobody_is_told(&env, notify, 74, "make room for it");
    fs::remove_file(agents.join("fill")).unwrap();
    let ended = run(notify().args(["--notify", "cat >told"]));
    assert_eq!((ended.code, env.path("told").exists()), (Some(0), true), "{}", ended.stderr);
}

#[test]
fn who_may_not_replace_the_queue_tells_nobody() {
    assert!(is_root(), "this test needs several users, and so has to be run by root");
    for (mode, why) in [(0o755, "cannot be written into"), (0o777, "its owner, 0:0, cannot be kept")] {
        let env = env_with(&record("a", "researcher", "human"));
        env.write("queue.lock", "");
        copy_program(Path::new(env.bare_handoff().get_program()), &env.path("handoff"));
        fs::set_permissions(env.path("."), Permissions::from_mode(mode)).unwrap();
        let notify = || {
            let mut command = env.command(tool("setpriv", "util-linux"));
            command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
            command.args(["./handoff", "notify", "--queue", "queue.jsonl"]);
            command
        };
        assert_nobody_is_told(&env, notify, 74, why);
        assert_eq!(names_in(&env.path(".")), ["handoff", "queue.jsonl", "queue.lock", "textfile"]);
    }
}

#[test]
fn what_sendmail_leaves_in_the_background_goes_on() {
    let env = env_with(&record("a", "researcher", "human"));
    env.write("text", "#!/bin/sh\ncat >mail\n(while [ ! -e go ]; do sleep 0.01; done; mv mail delivered) &\n");
    copy_program(&env.path("text"), &env.path("sendmail"));
    let ended = run(mailing(&env, notify(&env).args(["--sendmail", "./sendmail"])));
    assert_eq!((ended.code, is_announced(&env, "a")), (Some(0), true), "{}", ended.stderr);
    env.write("go", "");
    until("the delivery", || env.path("delivered").exists());
    assert!(fs::read_to_string(env.path("delivered")).unwrap().contains("waits for a person (a)"));
}

/// A sendmail behind a socket, as the units have it, with these settings.
fn behind_a_socket(env: &TestEnv, sendmail: &str, settings: &[&str]) -> Background {
    env.write("text", format!("#!/bin/sh\n{sendmail}\n"));
    copy_program(&env.path("text"), &env.path("sendmail"));
    let mut activation = env.command(tool("systemd-socket-activate", "systemd"));
    activation
        .args(["--accept", "--inetd", "--setenv=HANDOFF_SENDMAIL=./sendmail", "--listen"])
        .arg(env.path("socket"));
    activation.args(settings.iter().map(|setting| format!("--setenv={setting}")));
    let activation = Background::spawn(activation.arg(in_tests("../systemd/handoff-sendmail")));
    until("the socket", || env.path("socket").exists());
    activation
}

#[test]
fn a_socket_can_take_the_place_of_sendmail() {
    let env = env_with(&record("a", "researcher", "human"));
    // One that goes on in the background with all that it has open, and whose last line has no end.
    let sendmail = "echo \"$@\" >arguments; cat >mail; sleep 1000 & printf 'queued as 123'";
    let settings = ["HANDOFF_MAIL_TO=ops@example.org, *,root@box.example"];
    let _relay = behind_a_socket(&env, sendmail, &settings);
    let ended = run(mailing(&env, notify(&env).args(["--sendmail", "socket"])));
    assert_eq!((ended.code, is_announced(&env, "a")), (Some(0), true), "{}", ended.stderr);
    let mail = fs::read_to_string(env.path("mail")).unwrap();
    assert!(mail.starts_with("To: ") && mail.contains("The queue is "), "{mail}");
    // Those of the settings, whatever the mail says, and one argument each.
    assert_eq!(fs::read_to_string(env.path("arguments")).unwrap(), "-i -- ops@example.org * root@box.example\n");
}

#[test]
fn what_a_sendmail_behind_a_socket_says_is_passed_on() {
    for (sendmail, settings, why) in [
        (
            "cat >/dev/null; echo one; echo two >&2; exit 75",
            "HANDOFF_MAIL_TO=a@b",
            "failed (exit status: 75): one\\ntwo",
        ),
        ("exit 3", "HANDOFF_MAIL_TO=a@b", "failed (exit status: 3)"),
        ("kill $$", "HANDOFF_MAIL_TO=a@b", "failed (exit status: 143)"),
        ("exit 0", "HANDOFF_MAIL_TO=", "failed (exit status: 1): HANDOFF_MAIL_TO is not set in /etc/default/handoff"),
        // Its parent is what limits its time, and that one's the relay.
        ("kill -KILL $(cut -d ' ' -f 4 /proc/$PPID/stat)", "HANDOFF_MAIL_TO=a@b", "says nothing"),
    ] {
        let env = env_with(&record("a", "researcher", "human"));
        let relay = behind_a_socket(&env, sendmail, &[settings]);
        let ended = run(mailing(&env, notify(&env).args(["--sendmail", "socket"])));
        assert_eq!((ended.code, is_announced(&env, "a")), (Some(74), false), "{sendmail}: {}", ended.stderr);
        let start = format!("handoff: socket: {why}");
        assert!(ended.stderr.starts_with(&start), "{sendmail}: {}", ended.stderr);
        drop(relay);
        // The socket stays, and nobody listens.
        let ended = run(mailing(&env, notify(&env).args(["--sendmail", "socket"])));
        assert_eq!((ended.code, is_announced(&env, "a")), (Some(74), false), "{}", ended.stderr);
        assert!(ended.stderr.starts_with("handoff: socket: passes no mail on: Connection refused"), "{}", ended.stderr);
    }
}

#[test]
fn nobody_adds_headers_or_recipients() {
    let evil = r#"{"id":"i\r\nBcc: a@evil.example\r\n\r\nbody","ts":1795950000,"kind":"k\nTo: b@evil.example","from":"f\u0000\u001b[2J","to":"r\r\n\tX-More: 1\u2028é","payload":{"summary":"one\n.\r\n.\nBcc: c@evil.example\n"},"status":"human","nacks":[{"ts":1,"by":"x\ny","reason":"\n.\n\u001b]0;owned\u0007"},7,{}]}"#;
    let env = env_with(&format!("{evil}\n"));
    let _post = Post::open(&env);
    let ended = notify_by_mail(&env);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
    let [mail] = &mails(&env)[..] else { panic!("{:?}", mails(&env)) };
    assert_eq!((&mail["to"], &mail["defects"]), (&json!(["ops@example.org", "root@box.example"]), &json!([])));
    let headers = headers(mail);
    let names: Vec<&str> = headers.keys().map(String::as_str).collect();
    let expected = [
        "auto-submitted",
        "content-transfer-encoding",
        "content-type",
        "date",
        "from",
        "message-id",
        "mime-version",
        "subject",
        "to",
    ];
    assert_eq!(names, expected, "{mail}");
    let subject = r"handoff: k\nTo: b@evil.example for r\r\n\tX-More: 1\u{2028}é waits for a person (i\r\nBcc: a@evil.example\r\n\r\nbody)";
    assert_eq!(headers["subject"], subject);
    let body = mail["body"].as_str().unwrap();
    assert!(!body.chars().any(|c| c.is_control() && c != '\n'), "{body:?}");
    assert!(body.contains(r"summary: one\n.\r\n.\nBcc: c@evil.example\n") && body.contains("The queue is /"), "{body}");
    assert!(body.lines().filter(|line| *line == "  at a time unknown").count() == 2, "{body}");
}

#[test]
fn a_subject_shows_names_as_they_stand_in_the_queue() {
    // Short enough to be sent as it is, and what a reader would decode or turn around.
    let names = [("=?utf-8?Q?hi?=", r"=\?utf-8?Q?hi?="), ("=?=?", r"=\?=\?"), ("\u{202e}gpj.exe", r"\u{202e}gpj.exe")];
    let env = env_with(&names.map(|(name, _)| record(name, "r", "human")).concat());
    let _post = Post::open(&env);
    assert_eq!(notify_by_mail(&env).code, Some(0));
    let subjects: Vec<String> = mails(&env).iter().map(|mail| headers(mail)["subject"].clone()).collect();
    let expected = names.map(|(_, shown)| format!("handoff: classify for r waits for a person ({shown})"));
    assert_eq!(subjects, expected);
}

#[test]
fn runs_at_the_same_time_send_each_mail_once() {
    let queue: String = (0..6).map(|number| record(&number.to_string(), "researcher", "human")).collect();
    let env = env_with(&queue);
    let _post = Post::open(&env);
    let runs: Vec<Running<'_>> =
        (0..4).map(|_| Running::start(&env, mailing(&env, notify(&env).args(["--lock-timeout", "60s"])))).collect();
    for run in runs {
        let (code, _, messages) = run.end();
        assert_eq!(code, Some(0), "{messages}");
    }
    let mut subjects: Vec<String> = mails(&env).iter().map(|mail| headers(mail)["subject"].clone()).collect();
    subjects.sort();
    assert_eq!(subjects.len(), 6, "{subjects:?}");
    subjects.dedup();
    assert_eq!(subjects.len(), 6, "{subjects:?}");
    // Who can't wait for the others leaves it to them.
    append(&env, "queue.jsonl", &record("new", "researcher", "human"));
    let slow =
        Running::start(&env, notify(&env).args(["--notify", "echo >started; while [ ! -e go ]; do sleep 0.01; done"]));
    until("the first run", || env.path("started").exists());
    let ended = run(notify(&env).args(["--lock-timeout", "100ms", "--notify", "touch second"]));
    assert_eq!(ended.code, Some(75), "{}", ended.stderr);
    // What comes meanwhile is seen by the run that goes on.
    append(&env, "queue.jsonl", &record("later", "researcher", "human"));
    env.write("go", "");
    assert_eq!(slow.end().0, Some(0));
    assert!(is_announced(&env, "new") && is_announced(&env, "later") && !env.path("second").exists());
}

#[test]
fn a_command_can_take_the_place_of_mail() {
    let env = env_with(&record("a", "researcher", "human"));
    let mut command = notify(&env);
    command.env("HANDOFF_MAIL_TO", "ops@example.org").env("HANDOFF_SENDMAIL", "/bin/false");
    let ended = run(command.env("HANDOFF_NOTIFY", "cat >>\"$(echo told)\"; echo to nobody"));
    assert_eq!((ended.code, ended.stdout.as_slice()), (Some(0), &b""[..]), "{}", ended.stderr);
    assert_eq!(fs::read_to_string(env.path("told")).unwrap(), record("a", "researcher", "human"));
    assert!(is_announced(&env, "a"));
    let ended = run(&mut command);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    assert_eq!(fs::read_to_string(env.path("told")).unwrap().lines().count(), 1);
}

#[test]
fn a_command_that_fails_says_why() {
    let env = env_with(&record("a", "researcher", "human"));
    for (script, why) in [
        ("echo the pager is down >&2; exit 7", "failed (exit status: 7): the pager is down"),
        ("kill -9 $$", "failed (signal: 9 (SIGKILL))"),
        ("no-such-program-at-all", "failed (exit status: 127): "),
    ] {
        let ended = run(notify(&env).args(["--notify", script]));
        assert_eq!(ended.code, Some(74), "{}", ended.stderr);
        assert!(ended.stderr.contains(&format!("HANDOFF_NOTIFY: {why}")), "{}", ended.stderr);
        assert!(!is_announced(&env, "a"));
    }
    let ended = run(mailing(&env, notify(&env).args(["--sendmail", "./no-such-sendmail"])));
    assert_eq!(ended.code, Some(74), "{}", ended.stderr);
    assert!(ended.stderr.contains("./no-such-sendmail: cannot be run: No such file"), "{}", ended.stderr);
}

#[test]
fn nobody_to_tell_is_wrong_usage() {
    let env = env_with(&record("a", "researcher", "human"));
    for (name, value, expected) in [
        ("HANDOFF_NOTIFY", "", "nobody to tell: set HANDOFF_MAIL_TO (--mail-to) or HANDOFF_NOTIFY (--notify)"),
        ("HANDOFF_MAIL_TO", "ops@example.org\nBcc: x@y", "not an address like ops@example.org"),
        ("HANDOFF_MAIL_TO", "Ops <ops@example.org>", "not an address like ops@example.org"),
        ("HANDOFF_MAIL_TO", "a@b,,", "not an address like ops@example.org"),
    ] {
        let ended = run(notify(&env).env(name, value));
        assert_eq!(ended.code, Some(2), "{value}: {}", ended.stderr);
        assert!(ended.stderr.contains(expected) && ended.stderr.lines().count() == 1, "{}", ended.stderr);
    }
    let empty = TestEnv::new();
    let ended = run(notify(&empty).args(["--notify", "touch told"]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(!empty.path("told").exists() && !empty.path("queue.jsonl").exists());
}

#[test]
fn whoever_escalates_tells_people_and_is_not_kept_from_its_work_by_failure() {
    let nacked = record("a", "researcher", "running").replace("}\n", ",\"nacks\":[{}]}\n");
    let chain: String = (0..9)
        .map(|number| {
            record(&format!("c-{number}"), "r", "done").replace("}\n", &format!(",\"parent\":\"c-{}\"}}\n", number + 1))
        })
        .collect();
    let nack = ["nack", "--queue", "queue.jsonl", "a", "--reason", "no ticket"];
    let put = ["put", "--queue", "queue.jsonl", "--kind", "classify", "--from", "a", "--to", "b", "--parent", "c-0"];
    for (queue, arguments) in [(&nacked, &nack[..]), (&chain, &put[..])] {
        for (script, told) in [("cat >>told", true), ("exit 1", false)] {
            // Others are left to the timer, even one whose line names the new one.
            let older = record("older", "researcher", "human").replace("{}", r#"{"about":["a"]}"#);
            let env = env_with(&(older + queue));
            let ended = run(env.bare_handoff().args(arguments).env("HANDOFF_NOTIFY", script));
            assert_eq!(ended.code, Some(0), "{}", ended.stderr);
            let is_new = |(id, record): &(String, Value)| id != "older" && record["status"] == "human";
            let (id, _) = records(&env).into_iter().find(is_new).unwrap();
            assert!(
                !is_announced(&env, "older")
                    && !fs::read_to_string(env.path("told")).unwrap_or_default().contains("older")
            );
            assert_eq!(is_announced(&env, &id), told, "{}", ended.stderr);
            assert_eq!(fs::read_to_string(env.path("told")).unwrap_or_default().contains(&id), told);
            assert_eq!(ended.stderr.contains("the next run tries again"), !told, "{}", ended.stderr);
        }
        // Nobody to tell is no failure.
        let env = env_with(queue);
        let ended = run(env.bare_handoff().args(arguments));
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    }
    // A worker, of the record and of its follow-up.
    let env = env_with(&(nacked.replace("running", "queued") + &chain));
    let ended = run(worker(&env, &["--once"], "exit 1").env("HANDOFF_NOTIFY", "cat >>told"));
    assert_eq!((ended.code, is_announced(&env, "a")), (Some(0), true), "{}", ended.stderr);
    append(&env, "queue.jsonl", &record("d", "researcher", "queued").replace("}\n", ",\"parent\":\"c-1\"}\n"));
    let script = r#"echo '{"followup":{"kind":"classify","to":"x"}}'"#;
    let ended = run(worker(&env, &["--once"], script).env("HANDOFF_NOTIFY", "cat >>told"));
    assert_eq!((ended.code, status(&env, "d").as_str()), (Some(0), "done"), "{}", ended.stderr);
    let told = fs::read_to_string(env.path("told")).unwrap();
    assert_eq!(told.lines().count(), 2, "{told}");
    assert!(told.lines().last().unwrap().contains("too_many_hops"), "{told}");
}

#[test]
fn a_record_that_waits_once_more_is_announced_once_more() {
    let env = env_with(&record("a", "researcher", "human"));
    for expected in 1..=3 {
        assert_eq!(run(notify(&env).args(["--notify", "cat >>told"])).code, Some(0));
        assert_eq!(fs::read_to_string(env.path("told")).unwrap().lines().count(), expected);
        let requeued = run(env.bare_handoff().args(["requeue", "--queue", "queue.jsonl", "a"]));
        assert_eq!(requeued.code, Some(0), "{}", requeued.stderr);
        assert!(!is_announced(&env, "a"));
        for _ in 0..2 {
            if status(&env, "a") == "queued" {
                run(&mut worker(&env, &["--once"], "exit 1"));
            }
        }
        assert_eq!(status(&env, "a"), "human");
    }
}

#[test]
fn a_record_that_is_dealt_with_while_people_are_told_is_left_alone() {
    let env = env_with(&(record("a", "researcher", "human") + &record("b", "researcher", "human")));
    let script = format!("grep -q '\"id\":\"b\"' || {} cancel --queue queue.jsonl a", env!("CARGO_BIN_EXE_handoff"));
    let ended = run(notify(&env).args(["--notify", &script]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("record a is dead, and can't be announced"), "{}", ended.stderr);
    assert_eq!(status(&env, "a"), "dead");
    assert!(is_announced(&env, "b"));
}

#[test]
fn a_record_that_comes_to_wait_for_another_reason_while_people_are_told_is_told_of_once_more() {
    let env = env_with(&record("a", "researcher", "human"));
    let handoff = env!("CARGO_BIN_EXE_handoff");
    env.write(
        "again",
        format!(
            "set -e; {handoff} requeue a; for n in 1 2; do {handoff} take --role researcher; {handoff} nack a --reason $n; done"
        ),
    );
    let mut command = notify(&env);
    command.env("HANDOFF_QUEUE", "queue.jsonl");
    let ended = run(command.args(["--notify", "cat >>told; [ -e once ] || { touch once; sh ./again; }"]));
    assert_eq!((ended.code, is_announced(&env, "a")), (Some(0), true), "{}", ended.stderr);
    let told = fs::read_to_string(env.path("told")).unwrap();
    let nacks: Vec<usize> = told.lines().map(|line| line.matches("\"reason\"").count()).collect();
    assert_eq!(nacks, [0, 2], "{told}: {}", ended.stderr);
}

#[test]
fn a_mail_that_is_sent_twice_because_of_a_crash_is_known_by_its_id() {
    let env = env_with(&record("a", "researcher", "human"));
    let _post = Post::open(&env);
    env.write("text", "#!/bin/sh\n/usr/sbin/sendmail \"$@\" && kill -KILL $PPID\n");
    copy_program(&env.path("text"), &env.path("sendmail-and-crash"));
    let ended = run(mailing(&env, notify(&env).args(["--sendmail", "./sendmail-and-crash"])));
    assert_eq!((ended.code, ended.signal), (None, Some(9)), "{}", ended.stderr);
    assert!(!is_announced(&env, "a"));
    assert_eq!(notify_by_mail(&env).code, Some(0));
    let ids: Vec<String> = mails(&env).iter().map(|mail| headers(mail)["message-id"].clone()).collect();
    assert_eq!(ids.len(), 2);
    assert_eq!(ids[0], ids[1]);
}
