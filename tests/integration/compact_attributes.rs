//! Who may use the queue after a compaction: owner, mode, access control lists, links, mounts, full disks.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::net::UnixListener;
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use walkdir::WalkDir;

use crate::test_env::{
    Background, MountNamespace, NOW, Run, TestEnv, copy_program, in_tests, is_root, mode, python, record, run, tool,
    under,
};

/// Users and groups that nobody else has.
const WORKER: u32 = 41_001;
const AGENTS: u32 = 41_002;
const STRANGER: u32 = 41_003;

/// A record that has been done for months.
fn old(id: &str) -> String {
    record(id, "researcher", "done").replace("\"ts\":1795950000", "\"ts\":1790000000")
}

/// The lines of the queue that stay.
fn kept() -> String {
    record("queued", "researcher", "queued")
        + "not json\n"
        + &record("recent", "patcher", "done")
        + "\n"
        + &record("refused", "patcher", "nack")
}

/// Some lines that go, among those that stay.
fn queue() -> String {
    kept().split_inclusive('\n').enumerate().map(|(index, line)| old(&format!("old-{index}")) + line).collect()
}

/// A directory with nothing but the queue, `agents/queue.jsonl`, below the test's own.
struct Scene {
    env: TestEnv,
}

impl Scene {
    fn new() -> Self {
        let env = TestEnv::new();
        fs::create_dir(env.path("agents")).unwrap();
        set_mode(&env.path("agents"), 0o755);
        env.write("agents/queue.jsonl", queue());
        Self { env }
    }

    /// The same with everything owned by this user and group.
    fn owned_by(uid: u32, gid: u32) -> Self {
        let scene = Self::new();
        for name in [".", "queue.jsonl"] {
            chown(scene.path(name), Some(uid), Some(gid)).unwrap();
        }
        scene
    }

    /// A path in the queue's directory.
    fn path(&self, name: &str) -> PathBuf {
        self.env.path("agents").join(name)
    }

    fn queue(&self) -> PathBuf {
        self.path("queue.jsonl")
    }

    fn write(&self, name: &str, contents: impl AsRef<[u8]>) {
        fs::write(self.path(name), contents).unwrap();
    }

    fn append(&self, name: &str, contents: &str) {
        let path = self.path(name);
        let contents = fs::read_to_string(&path).unwrap() + contents;
        fs::write(path, contents).unwrap();
    }

    fn compact(&self) -> Command {
        self.compact_path("agents/queue.jsonl")
    }

    fn compact_path(&self, queue: &str) -> Command {
        let mut command = self.env.bare_compact();
        command.args(["--queue", queue, "--textfile-dir", "textfile", "--now", NOW, "--lock-timeout", "200ms"]);
        command
    }

    /// Compaction as this user, in these groups, of which the first is the user's own. Only root can be somebody else.
    fn compact_as(&self, uid: u32, groups: &[u32]) -> Command {
        needs_root();
        let compact = self.compact();
        let copy = self.env.path("handoff-compact");
        if !copy.exists() {
            // Where it was built it may be out of the user's reach.
            copy_program(Path::new(compact.get_program()), &copy);
            set_mode(&self.env.textfile_dir(), 0o777);
        }
        let list: Vec<String> = groups.iter().map(u32::to_string).collect();
        let mut command = self.env.command(tool("setpriv", "util-linux"));
        command
            .args([format!("--reuid={uid}"), format!("--regid={}", groups[0]), format!("--groups={}", list.join(","))])
            .arg(copy)
            .args(compact.get_args());
        command
    }

    /// Compaction as an ordinary user who owns the directory and the queue.
    fn compact_as_ordinary_owner(&self) -> Command {
        if !is_root() {
            return self.compact();
        }
        for entry in WalkDir::new(self.path(".")) {
            chown(entry.unwrap().path(), Some(WORKER), Some(AGENTS)).unwrap();
        }
        self.compact_as(WORKER, &[AGENTS])
    }

    /// The names in the queue's directory.
    fn names(&self) -> Vec<String> {
        names(&self.path("."))
    }
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn needs_root() {
    assert!(is_root(), "this test needs several users or mounts, and so has to be run by root");
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// Runs a program that must succeed, and returns what it prints.
fn output(command: &mut Command) -> String {
    let run = run(command);
    assert_eq!(run.code, Some(0), "{command:?}: {}", run.stderr);
    String::from_utf8(run.stdout).unwrap()
}

/// What others can tell of a file without looking at its times.
#[derive(Debug, PartialEq, Eq)]
struct Entry {
    inode: u64,
    /// With the file's type.
    mode: u32,
    owner: (u32, u32),
    links: u64,
    /// Of files, which alone matter here.
    modified: Option<(i64, i64)>,
    contents: Option<Vec<u8>>,
    target: Option<PathBuf>,
}

/// Everything in a directory.
fn everything(directory: &Path) -> BTreeMap<PathBuf, Entry> {
    WalkDir::new(directory)
        .into_iter()
        .map(|entry| {
            let path = entry.unwrap().path().to_owned();
            let metadata = fs::symlink_metadata(&path).unwrap();
            let entry = Entry {
                inode: metadata.ino(),
                mode: metadata.mode(),
                owner: (metadata.uid(), metadata.gid()),
                links: metadata.nlink(),
                modified: metadata.is_file().then(|| (metadata.mtime(), metadata.mtime_nsec())),
                // Some tests make files that nobody may read.
                contents: if metadata.is_file() { fs::read(&path).ok() } else { None },
                target: metadata.is_symlink().then(|| fs::read_link(&path).unwrap()),
            };
            (path, entry)
        })
        .collect()
}

/// Asserts that nothing has changed in a directory but for a lock file, which every writer may make.
fn assert_unchanged(before: &BTreeMap<PathBuf, Entry>, directory: &Path, context: &str) {
    let after = everything(directory);
    let paths: BTreeSet<&PathBuf> = before.keys().chain(after.keys()).collect();
    for path in paths {
        let is_new_lock = !before.contains_key(path) && path.extension().is_some_and(|extension| extension == "lock");
        if !is_new_lock && before.get(path) != after.get(path) {
            // Not the contents, which can be long.
            let of = |entry: Option<&Entry>| entry.map(|entry| (entry.inode, entry.mode, entry.owner, entry.links));
            panic!("{context}: {} has changed: {:?} → {:?}", path.display(), of(before.get(path)), of(after.get(path)));
        }
    }
}

/// Runs a compaction that must refuse with one message, and change nothing in the queue's directory.
fn assert_refuses(scene: &Scene, command: &mut Command, code: i32, message: &str) {
    let before = everything(&scene.path("."));
    let run = run(command);
    assert_message(&run, code, message);
    assert_unchanged(&before, &scene.path("."), message);
    let metrics = fs::read_to_string(scene.env.path("textfile/handoff_compact.prom")).unwrap();
    assert!(metrics.contains("\nhandoff_compact_success 0\n"), "{message}: {metrics}");
}

fn assert_message(run: &Run, code: i32, message: &str) {
    assert_eq!((run.code, &*run.stdout), (Some(code), &b""[..]), "{message}: {}", run.stderr);
    let [line] = run.stderr.lines().collect::<Vec<_>>()[..] else { panic!("not one message: {}", run.stderr) };
    assert!(line.starts_with("handoff-compact: ") && line.contains(message), "{line:?} doesn't say {message:?}");
}

/// Runs a compaction that must succeed; returns its messages.
fn succeed(command: &mut Command) -> Vec<String> {
    let run = run(command);
    assert_eq!(run.code, Some(0), "{command:?}: {}", run.stderr);
    run.stderr.lines().map(str::to_owned).collect()
}

/// Asserts that a queue holds a ledger and, after it, just these lines; returns the ledger's payload.
fn assert_holds(path: &Path, lines: &str) -> serde_json::Value {
    let contents = fs::read_to_string(path).unwrap();
    let (ledger, rest) = contents.split_once('\n').unwrap();
    assert!(ledger.starts_with("{\"id\":\"ledger\","), "{}: the first line is {ledger}", path.display());
    assert!(rest == lines, "{} holds\n{rest}", path.display());
    serde_json::from_str::<serde_json::Value>(ledger).unwrap()["payload"].clone()
}

/// Asserts that the queue has been compacted.
fn assert_compacted(path: &Path) -> serde_json::Value {
    assert_holds(path, &kept())
}

fn ledger(generations: &str) -> String {
    format!(
        r#"{{"id":"ledger","ts":1795950000,"kind":"ledger","from":"handoff","to":"","payload":{{"version":1,"totals":{{}},"generations":{{{generations}}}}},"status":"ledger"}}"#
    ) + "\n"
}

fn strace(scene: &Scene, arguments: &[&str], command: &Command) -> Command {
    let mut strace = scene.env.command(tool("strace", "strace"));
    strace.args(["-f", "-o", "trace"]).args(arguments);
    under(strace, command)
}

// Owner, mode, access control list, attributes.

/// Everything that decides who may do what with a file, and every extended attribute.
fn attributes(path: &Path) -> (u32, u32, u32, String) {
    let metadata = fs::metadata(path).unwrap();
    let mut getfattr = Command::new(tool("getfattr", "attr"));
    let extended = output(getfattr.args(["--dump", "--match=-", "--encoding=hex", "--absolute-names"]).arg(path));
    // The first line is the file's name.
    let extended = extended.split_once('\n').map_or(String::new(), |(_, rest)| rest.to_owned());
    (metadata.uid(), metadata.gid(), metadata.mode(), extended)
}

fn set_acl(path: &Path, arguments: &[&str]) {
    output(Command::new(tool("setfacl", "acl")).args(arguments).arg(path));
}

fn acl(path: &Path) -> Vec<String> {
    let mut getfacl = Command::new(tool("getfacl", "acl"));
    let text = output(getfacl.args(["--omit-header", "--numeric", "--absolute-names", "--no-effective"]).arg(path));
    text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

fn set_attribute(path: &Path, name: &str, value: &str) {
    output(Command::new(tool("setfattr", "attr")).args(["--name", name, "--value", value]).arg(path));
}

/// Compacts and asserts that there is a new file with the old one's attributes, of which `setup` has made some.
fn assert_keeps(scene: &Scene, command: &mut Command, context: &str) {
    let (before, inode) = (attributes(&scene.queue()), fs::metadata(scene.queue()).unwrap().ino());
    succeed(command);
    assert_compacted(&scene.queue());
    assert_ne!(fs::metadata(scene.queue()).unwrap().ino(), inode, "{context}: the queue has not been replaced");
    assert_eq!(attributes(&scene.queue()), before, "{context}");
    let generation = scene.path("queue.gen.1");
    assert_eq!((fs::metadata(&generation).unwrap().ino(), attributes(&generation)), (inode, before), "{context}");
    assert_eq!(scene.names(), ["queue.gen.1", "queue.jsonl", "queue.lock"], "{context}");
}

const MODES: [u32; 14] =
    [0o600, 0o640, 0o644, 0o660, 0o664, 0o666, 0o400, 0o200, 0o000, 0o755, 0o2664, 0o4755, 0o1644, 0o7777];

#[test]
fn every_mode_and_owner_survives() {
    for queue_mode in MODES {
        let owners: &[(u32, u32)] = if is_root() { &[(0, 0), (WORKER, AGENTS), (0, AGENTS)] } else { &[(0, 0)] };
        for &(uid, gid) in owners {
            let scene = Scene::new();
            if is_root() {
                chown(scene.queue(), Some(uid), Some(gid)).unwrap();
            } else if queue_mode & 0o400 == 0 {
                continue; // one's own queue that one may not read
            }
            set_mode(&scene.queue(), queue_mode);
            assert_eq!(mode(&scene.queue()), queue_mode);
            assert_keeps(&scene, &mut scene.compact(), &format!("{queue_mode:o} of {uid}:{gid}"));
            assert_eq!(mode(&scene.queue()), queue_mode);
        }
    }
}

#[test]
fn the_mode_survives_whatever_the_umask() {
    for umask in ["000", "027", "777"] {
        for queue_mode in [0o600, 0o664] {
            let scene = Scene::new();
            set_mode(&scene.queue(), queue_mode);
            let mut sh = scene.env.command(tool("sh", "dash"));
            sh.args(["-c", &format!("umask {umask}; exec \"$@\""), "sh"]);
            assert_keeps(&scene, &mut under(sh, &scene.compact()), &format!("umask {umask}"));
            assert_eq!((mode(&scene.queue()), mode(&scene.path("queue.lock"))), (queue_mode, 0o644), "umask {umask}");
        }
    }
}

#[test]
fn access_control_lists_survive() {
    // The list, and the permission bits that go with it: with a list, those of the group are its mask.
    let lists = [
        ("u:41001:rw,g:41002:r", 0o664),
        ("u:41001:rwx,u:41003:---,g:41002:rwx,m::r", 0o644),
        ("u::r,u:41001:rw,g::-,o::-,m::rw", 0o460),
        ("g:41002:---", 0o640),
    ];
    for (list, expected) in lists {
        let scene = Scene::new();
        set_mode(&scene.queue(), 0o640);
        set_acl(&scene.queue(), &["--modify", list]);
        if list.starts_with("u:41001:rw,") {
            set_mode(&scene.queue(), 0o664);
        }
        let before = acl(&scene.queue());
        assert!(before.len() > 4, "no list was set: {before:?}");
        assert_keeps(&scene, &mut scene.compact(), list);
        assert_eq!(acl(&scene.queue()), before, "{list}");
        assert_eq!(mode(&scene.queue()) & 0o770, expected & 0o770, "{list}: {before:?}");
    }
}

#[test]
fn the_directorys_default_list_does_not_leak_onto_the_queue() {
    for queue_mode in [0o600, 0o640, 0o664] {
        let scene = Scene::new();
        set_mode(&scene.queue(), queue_mode);
        set_acl(&scene.path("."), &["--default", "--modify", "u:41001:rwx,g:41002:rwx,o::rwx"]);
        // Whatever is made there gets the list.
        scene.write("probe", "");
        assert!(acl(&scene.path("probe")).contains(&"user:41001:rwx".to_owned()), "{:?}", acl(&scene.path("probe")));
        fs::remove_file(scene.path("probe")).unwrap();

        let plain = acl(&scene.queue());
        assert_eq!(plain.len(), 3, "{plain:?}");
        assert_keeps(&scene, &mut scene.compact(), "a default list");
        assert_eq!((acl(&scene.queue()), mode(&scene.queue())), (plain, queue_mode));
    }
}

#[test]
fn the_queues_own_list_wins_over_the_directorys() {
    let scene = Scene::new();
    set_acl(&scene.queue(), &["--modify", "u:41003:r"]);
    set_acl(&scene.path("."), &["--default", "--modify", "u:41001:rwx,g:41002:rwx"]);
    let own = acl(&scene.queue());
    assert_keeps(&scene, &mut scene.compact(), "two lists");
    assert_eq!(acl(&scene.queue()), own);
    assert!(own.contains(&"user:41003:r--".to_owned()) && own.len() == 5, "{own:?}");
}

/// Whether this user, in this group only, can read a file.
fn can_read(path: &Path, uid: u32, gid: u32) -> bool {
    let mut command = Command::new(tool("setpriv", "util-linux"));
    command.args([format!("--reuid={uid}"), format!("--regid={gid}"), "--clear-groups".to_owned()]);
    run(command.arg(tool("cat", "coreutils")).arg(path)).code == Some(0)
}

/// How a queue is laid out, who may not read it, and who may.
type Case = (fn(&Scene), (u32, u32), (u32, u32));

#[test]
fn nobody_who_may_not_read_the_queue_can_read_the_new_file_at_any_time() {
    needs_root();
    let cases: [Case; 3] = [
        // The directory's default list would let the first in.
        (
            |scene| {
                chown(scene.queue(), Some(0), Some(AGENTS)).unwrap();
                set_mode(&scene.queue(), 0o660);
                set_acl(&scene.path("."), &["--default", "--modify", "u:41001:rw"]);
            },
            (WORKER, WORKER),
            (STRANGER, AGENTS),
        ),
        // The mode alone would let the group in, which the list keeps out.
        (
            |scene| {
                chown(scene.queue(), Some(0), Some(AGENTS)).unwrap();
                set_mode(&scene.queue(), 0o600);
                set_acl(&scene.queue(), &["--modify", "g::-,u:41003:rw,m::rw"]);
            },
            (WORKER, AGENTS),
            (STRANGER, STRANGER),
        ),
        // The mode would let the wrong group in before there is the right one.
        (
            |scene| {
                chown(scene.queue(), Some(WORKER), Some(AGENTS)).unwrap();
                set_mode(&scene.queue(), 0o640);
            },
            (STRANGER, 0),
            (STRANGER, AGENTS),
        ),
    ];
    let mut problems = Vec::new();
    for (case, (lay_out, denied, allowed)) in cases.into_iter().enumerate() {
        let mut looked = 0;
        // Runs are killed before each call that changes who may do what, and when it is done.
        for call in ["fchown", "fchmod", "fsetxattr", "fremovexattr", "fsync", "linkat"] {
            for number in 1.. {
                let scene = Scene::new();
                scene.write("queue.lock", "");
                lay_out(&scene);
                assert!(
                    !can_read(&scene.queue(), denied.0, denied.1) && can_read(&scene.queue(), allowed.0, allowed.1)
                );
                let inject = format!("inject={call}:signal=KILL:when={number}");
                let run = run(&mut strace(&scene, &["-e", &inject], &scene.compact()));
                if run.signal.is_none() {
                    assert_eq!(run.code, Some(0), "{}", run.stderr);
                    break;
                }
                for temporary in scene.names().iter().filter(|name| name.starts_with(".queue.jsonl.")) {
                    looked += 1;
                    if can_read(&scene.path(temporary), denied.0, denied.1) {
                        problems.push(format!("case {case}: before {call} number {number}"));
                    }
                }
            }
        }
        assert!(looked >= 3, "case {case}: only {looked} runs were killed while there was a new file");
    }
    assert!(problems.is_empty(), "it was open to others: {problems:#?}");
}

#[test]
fn extended_attributes_survive() {
    let scene = Scene::new();
    set_attribute(&scene.queue(), "user.origin", "0x00ff0a22");
    set_attribute(&scene.queue(), "user.empty", "");
    set_attribute(&scene.queue(), &format!("user.{}", "n".repeat(250)), &"v".repeat(1_500));
    if is_root() {
        set_attribute(&scene.queue(), "trusted.note", "for root's eyes");
        set_attribute(&scene.queue(), "security.handoff", "checked");
    }
    set_acl(&scene.queue(), &["--modify", "u:41001:rw"]);
    let before = attributes(&scene.queue()).3;
    assert!(before.lines().count() >= 4, "{before}");
    assert_keeps(&scene, &mut scene.compact(), "attributes");
}

#[test]
fn attributes_of_a_queue_that_its_owner_may_not_write_survive() {
    for queue_mode in [0o400, 0o440, 0o640] {
        let scene = Scene::new();
        set_attribute(&scene.queue(), "user.origin", "here");
        if queue_mode == 0o640 {
            // The same by a list.
            set_acl(&scene.queue(), &["--modify", "u::r,u:41003:r"]);
        }
        let mut command = scene.compact_as_ordinary_owner();
        if queue_mode != 0o640 {
            set_mode(&scene.queue(), queue_mode);
        }
        assert_keeps(&scene, &mut command, &format!("{queue_mode:o}"));
    }
}

#[test]
fn an_attribute_that_cannot_be_given_is_an_error() {
    let scene = Scene::new();
    set_attribute(&scene.queue(), "user.origin", "here");
    let mut command = strace(&scene, &["-e", "inject=fsetxattr:error=EOPNOTSUPP"], &scene.compact());
    assert_refuses(&scene, &mut command, 74, "its attribute user.origin cannot be kept: ");
    let injected = fs::read_to_string(scene.env.path("trace")).unwrap();
    assert!(injected.contains("(INJECTED)"), "nothing was injected, so that this proves nothing");
}

// Users.

#[test]
fn root_leaves_the_workers_queue_to_the_worker() {
    needs_root();
    let scene = Scene::owned_by(WORKER, AGENTS);
    set_mode(&scene.queue(), 0o640);
    assert_keeps(&scene, &mut scene.compact(), "by root");
    for name in ["queue.jsonl", "queue.gen.1", "queue.lock"] {
        let metadata = fs::metadata(scene.path(name)).unwrap();
        assert_eq!((metadata.uid(), metadata.gid()), (WORKER, AGENTS), "{name}");
    }
    // The worker can go on, and root after them.
    scene.append("queue.jsonl", &old("older"));
    succeed(&mut scene.compact_as(WORKER, &[AGENTS]));
    assert_compacted(&scene.queue());
    assert_eq!(scene.names(), ["queue.gen.2", "queue.jsonl", "queue.lock"]);
    scene.append("queue.jsonl", &old("oldest"));
    succeed(&mut scene.compact());
    assert_compacted(&scene.queue());
    assert_eq!(scene.names(), ["queue.gen.3", "queue.jsonl", "queue.lock"]);
    let metadata = fs::metadata(scene.queue()).unwrap();
    assert_eq!((metadata.uid(), metadata.gid(), metadata.mode() & 0o7777), (WORKER, AGENTS, 0o640));
}

#[test]
fn the_owner_needs_no_root() {
    let scene = Scene::new();
    let mut command = scene.compact_as_ordinary_owner();
    assert_keeps(&scene, &mut command, "by its owner");
    succeed(&mut command);
    assert_eq!(scene.names(), ["queue.jsonl", "queue.lock"], "the generation can be proven drained by its owner");
}

#[test]
fn an_owner_in_the_queues_group_can_keep_it() {
    needs_root();
    let scene = Scene::owned_by(WORKER, AGENTS);
    set_mode(&scene.queue(), 0o2660);
    assert_keeps(&scene, &mut scene.compact_as(WORKER, &[WORKER, AGENTS]), "by a member of the group");
}

#[test]
fn who_owns_the_queue_but_not_the_sticky_directory_can_replace_it() {
    needs_root();
    let scene = Scene::owned_by(WORKER, AGENTS);
    chown(scene.path("."), Some(0), Some(0)).unwrap();
    set_mode(&scene.path("."), 0o1777);
    let mut command = scene.compact_as(WORKER, &[AGENTS]);
    assert_keeps(&scene, &mut command, "in a sticky directory");
    succeed(&mut command);
    assert_eq!(scene.names(), ["queue.jsonl", "queue.lock"]);
}

#[test]
fn who_does_not_own_the_queue_cannot_replace_it() {
    needs_root();
    for (directory_mode, uid, groups, owner) in [
        (0o777, STRANGER, &[STRANGER][..], "41001:41002"),
        // Not even with all access to it.
        (0o777, STRANGER, &[AGENTS], "41001:41002"),
        (0o1777, STRANGER, &[AGENTS], "41001:41002"),
        (0o2775, STRANGER, &[STRANGER, AGENTS], "41001:41002"),
        // The owner, who may not give away the group.
        (0o777, WORKER, &[WORKER], "41001:41002"),
    ] {
        let scene = Scene::owned_by(WORKER, AGENTS);
        set_mode(&scene.queue(), 0o666);
        set_mode(&scene.path("."), directory_mode);
        scene.write("queue.lock", "");
        let message =
            format!("queue.jsonl: cannot be rewritten, and is left as it was: its owner, {owner}, cannot be kept");
        assert_refuses(&scene, &mut scene.compact_as(uid, groups), 74, &message);
        assert_eq!(scene.names(), ["queue.jsonl", "queue.lock"]);
    }
}

#[test]
fn a_set_group_id_bit_that_the_kernel_drops_is_an_error() {
    needs_root();
    // The directory gives the group to the new file, but only its members may set the bit.
    let scene = Scene::owned_by(WORKER, AGENTS);
    set_mode(&scene.path("."), 0o2755);
    set_mode(&scene.queue(), 0o2664);
    let mut command = scene.compact_as(WORKER, &[WORKER]);
    assert_refuses(&scene, &mut command, 74, "is left as it was: the file system did not take its owner and mode");
    set_mode(&scene.queue(), 0o664);
    assert_keeps(&scene, &mut command, "without the bit");
}

// Links.

/// Where the temporary file lies when a run is killed just before it links the generation.
fn temporary_of_a_killed_run(scene: &Scene, queue: &str) -> PathBuf {
    let mut command = strace(scene, &["-e", "inject=link,linkat:signal=KILL"], &scene.compact_path(queue));
    let killed = run(&mut command);
    assert_eq!((killed.code, killed.signal), (None, Some(9)), "{}", killed.stderr);
    let is_temporary = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "tmp");
    let found: Vec<PathBuf> = everything(&scene.path(".")).into_keys().filter(is_temporary).collect();
    let [temporary] = &found[..] else { panic!("not one temporary file: {found:?}") };
    temporary.clone()
}

#[test]
fn a_queue_behind_links_is_replaced_where_it_lies() {
    // The links, each with its target, from the queue's name on.
    let layouts: [&[(&str, &str)]; 5] = [
        &[("queue.jsonl", "data/real.jsonl")],
        &[("queue.jsonl", "/data/real.jsonl")],
        &[("queue.jsonl", "./data/../data/real.jsonl")],
        &[("queue.jsonl", "links/second"), ("links/second", "/links/third"), ("links/third", "../data/real.jsonl")],
        // A directory among the links.
        &[("queue.jsonl", "links/elsewhere/real.jsonl"), ("links/elsewhere", "../data")],
    ];
    for links in layouts {
        let scene = Scene::new();
        fs::create_dir(scene.path("data")).unwrap();
        fs::create_dir(scene.path("links")).unwrap();
        fs::rename(scene.queue(), scene.path("data/real.jsonl")).unwrap();
        set_mode(&scene.path("data/real.jsonl"), 0o640);
        let resolved = |target: &str| match target.strip_prefix('/') {
            Some(absolute) => scene.path(absolute),
            None => PathBuf::from(target),
        };
        for (link, target) in links {
            symlink(resolved(target), scene.path(link)).unwrap();
        }
        let real = scene.path("data/real.jsonl");
        let before = (attributes(&real), fs::metadata(&real).unwrap().ino());

        let temporary = temporary_of_a_killed_run(&scene, "agents/queue.jsonl");
        assert_eq!(temporary.parent().unwrap(), scene.path("data"), "{links:?}");
        succeed(&mut scene.compact());
        assert_compacted(&real);
        assert_eq!(attributes(&real), before.0, "{links:?}");
        for (link, target) in links {
            assert_eq!(fs::read_link(scene.path(link)).unwrap(), resolved(target), "{links:?}");
        }
        let of_links: Vec<&str> = links
            .iter()
            .filter_map(|(link, _)| link.strip_prefix("links/"))
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect();
        assert_eq!(scene.names(), ["data", "links", "queue.jsonl", "queue.lock"], "{links:?}");
        assert_eq!(names(&scene.path("links")), of_links, "{links:?}");
        assert_eq!(names(&scene.path("data")), ["real.gen.1", "real.jsonl"], "{links:?}");
        assert_eq!(fs::metadata(scene.path("data/real.gen.1")).unwrap().ino(), before.1, "{links:?}");

        // Late lines are found there too, and the generation is removed there.
        scene.append("data/real.gen.1", &record("late", "researcher", "queued"));
        succeed(&mut scene.compact());
        succeed(&mut scene.compact());
        succeed(&mut scene.compact());
        assert_holds(&real, &(kept() + &record("late", "researcher", "queued")));
        assert_eq!(names(&scene.path("data")), ["real.jsonl"], "{links:?}");
    }
}

#[test]
fn a_link_locks_by_its_own_name() {
    let scene = Scene::new();
    fs::create_dir(scene.path("data")).unwrap();
    fs::rename(scene.queue(), scene.path("data/real.jsonl")).unwrap();
    symlink("data/real.jsonl", scene.queue()).unwrap();
    let (holder, id) = hold_lock(&scene, "agents/queue.lock", "exclusive");
    assert_refuses(
        &scene,
        &mut scene.compact(),
        75,
        &format!("agents/queue.lock: still locked after 200ms by process {id}"),
    );
    holder.finish();
    succeed(&mut scene.compact());
    assert_compacted(&scene.path("data/real.jsonl"));
}

#[test]
fn two_locks_for_one_queue_are_one_too_many() {
    let scene = Scene::new();
    fs::create_dir(scene.path("data")).unwrap();
    fs::rename(scene.queue(), scene.path("data/real.jsonl")).unwrap();
    symlink("data/real.jsonl", scene.queue()).unwrap();
    // Somebody knows the queue by its real name, and would not be kept out.
    scene.write("data/real.lock", "");
    let message = "agents/queue.lock: there is another lock, ";
    assert_refuses(&scene, &mut scene.compact(), 74, message);
    let before = everything(&scene.path("."));
    assert_eq!(run(scene.compact().arg("--dry-run")).code, Some(0), "a preview only reads");
    assert_unchanged(&before, &scene.path("."), "a preview");

    // By two names it is one lock all the same.
    fs::remove_file(scene.path("queue.lock")).unwrap();
    symlink("data/real.lock", scene.path("queue.lock")).unwrap();
    let (holder, id) = hold_lock(&scene, "agents/data/real.lock", "exclusive");
    assert_refuses(&scene, &mut scene.compact(), 75, &format!("still locked after 200ms by process {id}"));
    holder.finish();
    succeed(&mut scene.compact());
    assert_compacted(&scene.path("data/real.jsonl"));
}

#[test]
fn links_that_lead_nowhere_are_errors() {
    for (target, message) in [
        ("moved-away.jsonl", "queue.jsonl: cannot be opened: it is a symbolic link to a file that is missing"),
        ("queue.jsonl", "queue.jsonl: cannot be opened: Too many levels of symbolic links"),
        ("/dev/null", "queue.jsonl: cannot be opened: it is not a regular file"),
        (".", "queue.jsonl: cannot be opened: it is a directory"),
    ] {
        let scene = Scene::new();
        fs::remove_file(scene.queue()).unwrap();
        symlink(target, scene.queue()).unwrap();
        assert_refuses(&scene, &mut scene.compact(), 74, message);
        assert_refuses_dry(&scene, message);
    }
}

/// A preview refuses likewise.
fn assert_refuses_dry(scene: &Scene, message: &str) {
    let before = everything(&scene.path("."));
    assert_message(&run(scene.compact().arg("--dry-run")), 74, message);
    assert_unchanged(&before, &scene.path("."), message);
}

#[test]
fn a_queue_with_a_second_name_is_refused() {
    for (others, message) in [
        (&["agents/other.jsonl"][..], "has 2 names (hard links)"),
        (&["elsewhere.jsonl"], "has 2 names (hard links)"),
        (&["agents/queue.jsonl.bak", "agents/queue.gen.x", "agents/queue.gen.01"], "has 4 names (hard links)"),
    ] {
        let scene = Scene::new();
        for other in others {
            fs::hard_link(scene.queue(), scene.env.path(other)).unwrap();
        }
        assert_refuses(&scene, &mut scene.compact(), 74, message);
        for other in others {
            assert_eq!(fs::read_to_string(scene.env.path(other)).unwrap(), queue());
            fs::remove_file(scene.env.path(other)).unwrap();
        }
        succeed(&mut scene.compact());
        assert_compacted(&scene.queue());
    }
}

#[test]
fn a_second_name_that_only_a_dead_run_can_have_made_goes() {
    let scene = Scene::new();
    fs::hard_link(scene.queue(), scene.path("queue.gen.6")).unwrap();
    succeed(&mut scene.compact());
    assert_compacted(&scene.queue());
    assert_eq!(scene.names(), ["queue.gen.1", "queue.jsonl", "queue.lock"]);
}

// Mounts.

#[test]
fn a_mounted_queue_file_is_refused() {
    // From elsewhere, and over itself.
    for source in ["elsewhere.jsonl", "agents/queue.jsonl"] {
        let scene = Scene::new();
        scene.env.write("elsewhere.jsonl", queue());
        let script = format!("mount --bind {source} agents/queue.jsonl");
        let mounts = MountNamespace::new(&scene.env, &script);
        let (inside, outside) = (mounts.path("agents"), scene.path("."));
        let before = [everything(&inside), everything(&outside)];
        let refused = run(&mut mounts.inside(&scene.env, &scene.compact()));
        let message = "queue.jsonl: cannot be replaced, and is left as it was: it is a mount point of its own";
        assert_message(&refused, 74, message);
        assert!(refused.stderr.ends_with(": mount its directory instead\n"), "{}", refused.stderr);
        assert_unchanged(&before[0], &inside, source);
        assert_unchanged(&before[1], &outside, source);
        assert_eq!(scene.names(), ["queue.jsonl", "queue.lock"], "{source}");
        assert_eq!(fs::read_to_string(scene.env.path("elsewhere.jsonl")).unwrap(), queue());
    }
}

#[test]
fn a_generation_that_is_mounted_as_the_queue_keeps_its_only_name() {
    for is_listed in [false, true] {
        let scene = Scene::new();
        let ledger = if is_listed { ledger(r#""5":0"#) } else { String::new() };
        scene.write("queue.gen.5", ledger.clone() + &queue());
        let mounts = MountNamespace::new(&scene.env, "mount --bind agents/queue.gen.5 agents/queue.jsonl");
        let refused = run(&mut mounts.inside(&scene.env, &scene.compact()));
        assert_eq!(refused.code, Some(74), "{}", refused.stderr);
        assert!(refused.stderr.contains("it is a mount point of its own"), "{}", refused.stderr);
        assert_eq!(scene.names(), ["queue.gen.5", "queue.jsonl", "queue.lock"]);
        assert_eq!(fs::read_to_string(scene.path("queue.gen.5")).unwrap(), ledger + &queue());
    }
}

#[test]
fn a_queue_from_a_containers_image_is_replaced() {
    needs_root();
    let scene = Scene::new();
    // A tmpfs below, because the test's directory may be such an overlay itself.
    let script = "
        cp -a agents image; mount -t tmpfs tmpfs agents; mkdir agents/lower agents/upper agents/work agents/merged
        cp -a image/. agents/lower
        mount -t overlay -o lowerdir=agents/lower,upperdir=agents/upper,workdir=agents/work overlay agents/merged
        mount --bind agents/merged agents";
    let mounts = MountNamespace::new(&scene.env, script);
    let inside = mounts.path("agents");
    assert_eq!(names(&inside), ["queue.jsonl"]);
    succeed(&mut mounts.inside(&scene.env, &scene.compact()));
    assert_compacted(&inside.join("queue.jsonl"));
    assert_eq!(fs::read_to_string(inside.join("queue.gen.1")).unwrap(), queue());
    succeed(&mut mounts.inside(&scene.env, &scene.compact()));
    assert_eq!(names(&inside), ["queue.jsonl", "queue.lock"]);
}

#[test]
fn a_mounted_directory_is_as_good_as_any() {
    let scene = Scene::new();
    fs::create_dir(scene.env.path("mounted")).unwrap();
    let mounts = MountNamespace::new(&scene.env, "mount --bind agents mounted");
    succeed(&mut mounts.inside(&scene.env, &scene.compact_path("mounted/queue.jsonl")));
    assert_compacted(&scene.queue());
    assert_eq!(scene.names(), ["queue.gen.1", "queue.jsonl", "queue.lock"]);
}

#[test]
fn a_read_only_file_system_is_an_error_to_a_run_but_not_to_a_preview() {
    for lock in [true, false] {
        let scene = Scene::new();
        if lock {
            scene.write("queue.lock", "");
        }
        let mounts = MountNamespace::new(&scene.env, "mount --bind agents agents; mount -o remount,bind,ro agents");
        let message = if lock {
            "agents: cannot be written into, so the queue is left as it was: Read-only file system"
        } else {
            "queue.lock: cannot be created: Read-only file system"
        };
        assert_refuses(&scene, &mut mounts.inside(&scene.env, &scene.compact()), 74, message);
        let preview = run(&mut mounts.inside(&scene.env, scene.compact().arg("--dry-run")));
        assert_eq!((preview.code, preview.stderr.as_str()), (Some(0), ""));
        assert!(String::from_utf8(preview.stdout).unwrap().contains("\nremove 5 records, "));
    }
}

/// A queue on a small tmpfs, and what is to be done after the mounting.
fn on_tmpfs(options: &str, then: &str) -> (Scene, MountNamespace) {
    let scene = Scene::new();
    let lines = [old("large"), record("large", "researcher", "queued")];
    let large = lines.map(|line| line.replace("{}", &format!("{{\"text\":\"{}\"}}", "x".repeat(100_000)))).concat();
    scene.append("queue.jsonl", &large);
    scene.write("queue.lock", "");
    let script = format!(
        "cp -a agents before; mount -t tmpfs -o {options},mode=755 tmpfs agents; cp -a before/. agents; {then}"
    );
    let mounts = MountNamespace::new(&scene.env, &script);
    (scene, mounts)
}

/// Asserts that a run in the namespace fails with exit code 74 and changes nothing there.
fn assert_refuses_inside(scene: &Scene, mounts: &MountNamespace, command: &Command, message: &str) -> String {
    let inside = mounts.path("agents");
    let before = everything(&inside);
    let run = run(&mut mounts.inside(&scene.env, command));
    assert_message(&run, 74, message);
    assert_unchanged(&before, &inside, message);
    run.stderr
}

/// Asserts that a run in the namespace succeeds, and returns the size of the queue.
fn assert_succeeds_inside(scene: &Scene, mounts: &MountNamespace) -> u64 {
    succeed(&mut mounts.inside(&scene.env, &scene.compact()));
    let path = mounts.path("agents/queue.jsonl");
    let contents = fs::read_to_string(&path).unwrap();
    let (first, rest) = contents.split_once('\n').unwrap();
    assert!(first.starts_with("{\"id\":\"ledger\",") && rest.starts_with(&kept()), "{rest:.1000}");
    assert_eq!(rest.lines().count(), 6);
    contents.len() as u64
}

#[test]
fn a_disk_too_full_for_the_new_file_is_told_before_it_is_written() {
    // 16 blocks are left.
    let (scene, mounts) = on_tmpfs("size=2m", "fallocate -l $((($(stat -fc %a agents) - 16) * 4096)) agents/fill");
    let available: u64 = mounts.sh(&scene.env, "stat -fc %a agents").trim().parse::<u64>().unwrap() * 4096;
    assert_eq!(available, 16 * 4096);
    let message = "queue.jsonl: is left as it was: its new file needs ";
    let stderr = assert_refuses_inside(&scene, &mounts, &scene.compact(), message);
    assert!(stderr.contains(&format!("agents has only {available}: ")), "{stderr}");
    assert!(stderr.ends_with(": make room for it\n"), "{stderr}");
    let needed: u64 = stderr.split_once(" needs ").unwrap().1.split_once(" bytes").unwrap().0.parse().unwrap();

    // It was never begun: even a run whose every write fails says so.
    let trace = ["-e", "inject=pwrite64:error=EIO", "-e", "trace=pwrite64,openat"];
    assert_refuses_inside(&scene, &mounts, &strace(&scene, &trace, &scene.compact()), message);

    // The preview needs no room, and says that a run would.
    let preview = run(&mut mounts.inside(&scene.env, scene.compact().arg("--dry-run")));
    assert_eq!(preview.code, Some(0), "{}", preview.stderr);
    assert!(
        preview.stderr.contains("queue.jsonl: a run would refuse: ") && preview.stderr.contains("has only"),
        "{}",
        preview.stderr
    );

    mounts.sh(&scene.env, "rm agents/fill");
    assert_eq!(assert_succeeds_inside(&scene, &mounts), needed, "the message named another number");
}

#[test]
fn a_disk_with_just_enough_room_is_enough() {
    let (scene, mounts) = on_tmpfs("size=2m", "fallocate -l $((($(stat -fc %a agents) - 25) * 4096)) agents/fill");
    let size = assert_succeeds_inside(&scene, &mounts);
    assert!((24 * 4096..=25 * 4096).contains(&size), "the new queue has {size} bytes, so that this proves nothing");
}

#[test]
fn a_disk_that_fills_up_meanwhile_leaves_the_queue() {
    let (scene, mounts) = on_tmpfs("size=2m", "");
    let mut injected = 0;
    // All writes to the new file: its lines, and at last its ledger.
    for when in ["1", "2"] {
        let inject = format!("inject=pwrite64:error=ENOSPC:when={when}");
        let command = strace(&scene, &["-e", "trace=pwrite64", "-e", &inject], &scene.compact());
        let message = "queue.jsonl: cannot be rewritten, and is left as it was: No space left on device";
        let stderr = assert_refuses_inside(&scene, &mounts, &command, message);
        assert!(stderr.ends_with(": make room for it\n"), "{stderr}");
        injected += fs::read_to_string(scene.env.path("trace")).unwrap().matches("(INJECTED)").count();
    }
    assert_eq!(injected, 2);
    assert_succeeds_inside(&scene, &mounts);
}

/// Runs a command that strace(1) stops once, and does `meanwhile` while it is stopped.
fn stopped_once(scene: &Scene, command: &mut Command, meanwhile: impl FnOnce()) -> Run {
    let stopped = || {
        let trace = fs::read_to_string(scene.env.path("trace")).unwrap_or_default();
        let line = trace.lines().find(|line| line.ends_with(" --- stopped by SIGSTOP ---"))?;
        Pid::from_raw(line.split_once(' ').unwrap().0.parse().unwrap())
    };
    thread::scope(|scope| {
        let running = scope.spawn(|| run(command));
        while stopped().is_none() {
            assert!(!running.is_finished(), "it was not stopped: {}", running.join().unwrap().stderr);
            thread::sleep(Duration::from_millis(2));
        }
        // Whatever becomes of the test, the process goes on, or `run` would wait for it.
        let outcome = panic::catch_unwind(AssertUnwindSafe(meanwhile));
        kill_process(stopped().unwrap(), Signal::CONT).unwrap();
        let run = running.join().unwrap();
        outcome.unwrap_or_else(|panic| panic::resume_unwind(panic));
        run
    })
}

/// Compaction that is stopped right after its first call of this name.
fn stopping_after(scene: &Scene, call: &str) -> Command {
    let inject = format!("inject={call}:signal=STOP:when=1");
    strace(scene, &["-e", &format!("trace={call}"), "-e", &inject], &scene.compact())
}

#[test]
fn a_disk_that_really_fills_up_after_the_check_leaves_the_queue() {
    let (scene, mounts) = on_tmpfs("size=2m", "");
    let inside = mounts.path("agents");
    let before = everything(&inside);
    // As soon as it knows how much room there is.
    let mut command = mounts.inside(&scene.env, &stopping_after(&scene, "statfs"));
    let full = stopped_once(&scene, &mut command, || {
        mounts.sh(&scene.env, "fallocate -l $((($(stat -fc %a agents) - 10) * 4096)) agents/fill");
    });
    let message = "queue.jsonl: cannot be rewritten, and is left as it was: No space left on device";
    assert_message(&full, 74, message);
    fs::remove_file(inside.join("fill")).unwrap();
    assert_unchanged(&before, &inside, message);
    assert_succeeds_inside(&scene, &mounts);
}

#[test]
fn a_disk_without_inodes_leaves_the_queue() {
    // On a tmpfs each name takes one: of the new file, of the generation, and of the lock file before.
    let message = "agents: cannot be written into, so the queue is left as it was: No space left on device";
    for (left, lock, message) in [
        (0, true, message),
        (1, true, "queue.jsonl: cannot be replaced, and is left as it was: No space left on device"),
        (0, false, "queue.lock: cannot be created: No space left on device"),
    ] {
        let then = format!(
            "{} i=$(stat -fc %d agents); while [ $i -gt {left} ]; do : >agents/fill-$i; i=$((i - 1)); done",
            if lock { "" } else { "rm agents/queue.lock;" }
        );
        let (scene, mounts) = on_tmpfs("size=2m,nr_inodes=12", &then);
        assert_eq!(mounts.sh(&scene.env, "stat -fc %d agents").trim(), left.to_string());
        let stderr = assert_refuses_inside(&scene, &mounts, &scene.compact(), message);
        assert!(stderr.ends_with(": make room for it\n"), "{stderr}");
        assert_eq!(mounts.sh(&scene.env, "stat -fc %d agents").trim(), left.to_string(), "something was left");
        mounts.sh(&scene.env, "rm agents/fill-*");
        assert_succeeds_inside(&scene, &mounts);
    }
}

// Files and directories that may not be changed.

#[test]
fn immutable_files_and_directories_are_errors() {
    needs_root();
    let scene = Scene::new();
    let script = "
        truncate -s 4M image; mkfs.ext4 -q -F image; mkdir mounted; mount -o loop image mounted
        cp -a agents mounted; : >mounted/agents/queue.lock; mount --bind mounted/agents agents";
    let tool_for_images = tool_in_sbin("mkfs.ext4", "e2fsprogs");
    let script = script.replace("mkfs.ext4", &tool_for_images.display().to_string());
    let mounts = MountNamespace::new(&scene.env, &script);
    let chattr = tool("chattr", "e2fsprogs").display().to_string();
    for (flag, target, message) in [
        ("i", "queue.jsonl", "queue.jsonl: cannot be replaced, and is left as it was: Operation not permitted"),
        ("a", "queue.jsonl", "queue.jsonl: cannot be replaced, and is left as it was: Operation not permitted"),
        ("i", ".", "agents: cannot be written into, so the queue is left as it was: Operation not permitted"),
    ] {
        mounts.sh(&scene.env, &format!("{chattr} +{flag} agents/{target}"));
        assert_refuses_inside(&scene, &mounts, &scene.compact(), message);
        let preview = run(&mut mounts.inside(&scene.env, scene.compact().arg("--dry-run")));
        assert_eq!((preview.code, preview.stderr.as_str()), (Some(0), ""));
        mounts.sh(&scene.env, &format!("{chattr} -{flag} agents/{target}"));
    }

    // In a directory to which names can only be added nothing can be taken back: it must then not get worse with each run.
    mounts.sh(&scene.env, &format!("{chattr} +a agents"));
    let inside = mounts.path("agents");
    let counts = [(); 3].map(|()| {
        let run = run(&mut mounts.inside(&scene.env, &scene.compact()));
        assert_message(&run, 74, "Operation not permitted");
        assert_eq!(fs::read_to_string(inside.join("queue.jsonl")).unwrap(), queue());
        names(&inside).len()
    });
    assert!(counts[1] == counts[0] && counts[2] == counts[0], "{counts:?}");
    mounts.sh(&scene.env, &format!("{chattr} -a agents"));

    succeed(&mut mounts.inside(&scene.env, &scene.compact()));
    assert_compacted(&inside.join("queue.jsonl"));
    assert_eq!(names(&inside), ["queue.gen.1", "queue.jsonl", "queue.lock"]);
}

/// A tool that only root has in its `PATH`.
fn tool_in_sbin(name: &str, package: &str) -> PathBuf {
    let path = Path::new("/usr/sbin").join(name);
    if path.is_file() { path } else { tool(name, package) }
}

#[test]
fn a_directory_that_may_not_be_written_into_is_an_error() {
    for (lock, message) in [
        (true, "agents: cannot be written into, so the queue is left as it was: Permission denied"),
        (false, "queue.lock: cannot be created: Permission denied"),
    ] {
        let scene = Scene::new();
        if lock {
            scene.write("queue.lock", "");
        }
        let mut command = scene.compact_as_ordinary_owner();
        // The queue itself could be written.
        set_mode(&scene.queue(), 0o666);
        set_mode(&scene.path("."), 0o555);
        assert_refuses(&scene, &mut command, 74, message);
        let preview = run(command.arg("--dry-run"));
        assert_eq!((preview.code, preview.stderr.as_str()), (Some(0), ""));
        set_mode(&scene.path("."), 0o755);
    }
}

#[test]
fn a_directory_that_may_not_be_written_into_is_no_error_if_there_is_nothing_to_do() {
    let scene = Scene::new();
    scene.write("queue.lock", "");
    scene.write("queue.jsonl", kept());
    let mut command = scene.compact_as_ordinary_owner();
    set_mode(&scene.path("."), 0o555);
    let before = everything(&scene.path("."));
    succeed(&mut command);
    assert_unchanged(&before, &scene.path("."), "nothing to do");
    set_mode(&scene.path("."), 0o755);
}

#[test]
fn a_limit_on_the_size_of_files_leaves_the_queue() {
    let scene = Scene::new();
    scene.write("queue.lock", "");
    let lines = queue().repeat(100);
    scene.write("queue.jsonl", &lines);
    let before = everything(&scene.path("."));
    // Enough for the metrics.
    let limit = "--fsize=20000";
    assert!(kept().len() * 100 > 20_000);
    let mut prlimit = scene.env.command(tool("prlimit", "util-linux"));
    prlimit.arg(limit);
    // By default a signal ends the process, which then can't take anything back, least of all the temporary file.
    let limited = run(&mut under(prlimit, &scene.compact()));
    assert!(limited.code == Some(74) || limited.signal == Some(25), "{limited:?}");
    let mut after = everything(&scene.path("."));
    after.retain(|path, _| path.extension().is_none_or(|extension| extension != "tmp"));
    assert!(after == before, "something has changed: {:#?}", after.keys());

    // Where the signal is ignored, as below Python and other supervisors, the call fails.
    let mut sh = scene.env.command(tool("sh", "dash"));
    sh.args(["-c", "trap '' XFSZ; exec \"$@\"", "sh"]).arg(tool("prlimit", "util-linux")).arg(limit);
    let limited = run(&mut under(sh, &scene.compact()));
    assert_message(&limited, 74, "queue.jsonl: cannot be rewritten, and is left as it was: File too large");
    assert!(everything(&scene.path(".")) == before, "what the killed run left has not gone, or something has changed");

    succeed(&mut scene.compact());
    assert_holds(&scene.queue(), &kept().repeat(100));
    assert_eq!(scene.names(), ["queue.gen.1", "queue.jsonl", "queue.lock"]);
}

// What is no queue.

/// Makes something else than a file.
type Make = fn(&Path);

/// What is no file, and what is said of it.
const NO_FILES: [(&str, Make); 3] = [
    ("it is a directory, not a file", |path| fs::create_dir(path).unwrap()),
    ("it is not a regular file", |path| {
        output(Command::new(tool("mkfifo", "coreutils")).arg(path));
    }),
    ("it is not a regular file", |path| drop(UnixListener::bind(path).unwrap())),
];

#[test]
fn what_is_no_file_is_no_queue() {
    for (message, make) in NO_FILES {
        let scene = Scene::new();
        fs::remove_file(scene.queue()).unwrap();
        make(&scene.queue());
        let message = format!("queue.jsonl: cannot be opened: {message}");
        assert_refuses(&scene, &mut scene.compact(), 74, &message);
        assert_refuses_dry(&scene, &message);
    }
}

#[test]
fn a_missing_queue_is_nothing_to_compact() {
    let scene = Scene::new();
    fs::remove_file(scene.queue()).unwrap();
    for arguments in [&[][..], &["--dry-run"]] {
        let run = run(scene.compact().args(arguments));
        assert_eq!(run.code, Some(0), "{}", run.stderr);
        let first = run.stderr.lines().next().unwrap();
        assert!(
            first.ends_with("queue.jsonl: does not exist, so there is nothing to do: if it should, correct the path"),
            "{first}"
        );
        // A wrong path must leave nothing behind.
        assert_eq!(scene.names(), [""; 0], "{arguments:?}");
    }
}

#[test]
fn a_missing_directory_is_an_error() {
    let scene = Scene::new();
    for arguments in [&[][..], &["--dry-run"]] {
        let run = run(scene.compact_path("unmounted/queue.jsonl").args(arguments));
        assert_message(&run, 74, "unmounted/queue.jsonl: cannot be read: its directory: No such file or directory");
        assert!(!scene.env.path("unmounted").exists());
    }
}

#[test]
fn a_queue_that_is_gone_but_for_a_generation_is_an_error() {
    let scene = Scene::new();
    fs::rename(scene.queue(), scene.path("queue.gen.3")).unwrap();
    let message =
        "queue.jsonl: is missing, though it has an earlier generation, agents/queue.gen.3: it has been removed";
    assert_refuses(&scene, &mut scene.compact(), 74, message);
    assert_refuses_dry(&scene, message);
}

// The lock file.

fn hold_lock(scene: &Scene, lock: &str, how: &str) -> (Background, String) {
    let mut command = scene.env.command(python());
    Background::spawn_and_wait_for_line(command.arg(in_tests("workers/hold_lock.py")).args([lock, how]))
}

#[test]
fn a_lock_file_is_made_for_the_users_of_the_directory() {
    for (directory_mode, expected) in [
        (0o755, 0o644),
        (0o700, 0o600),
        (0o750, 0o640),
        (0o770, 0o660),
        (0o775, 0o664),
        (0o777, 0o666),
        (0o1777, 0o666),
        (0o2775, 0o664),
    ] {
        let owners: &[(u32, u32)] = if is_root() { &[(0, 0), (WORKER, AGENTS)] } else { &[(0, 0)] };
        for &(uid, gid) in owners {
            let scene = Scene::new();
            if is_root() {
                chown(scene.path("."), Some(uid), Some(gid)).unwrap();
            }
            set_mode(&scene.path("."), directory_mode);
            let mut sh = scene.env.command(tool("sh", "dash"));
            sh.args(["-c", "umask 077; exec \"$@\"", "sh"]);
            succeed(&mut under(sh, &scene.compact()));
            let (lock, directory) =
                [scene.path("queue.lock"), scene.path(".")].map(|path| fs::metadata(path).unwrap()).into();
            let context = format!("{directory_mode:o} of {uid}:{gid}");
            assert_eq!(lock.mode() & 0o7777, expected, "{context}");
            assert_eq!((lock.uid(), lock.gid()), (directory.uid(), directory.gid()), "{context}");
            assert_eq!(lock.len(), 0, "{context}");
        }
    }
}

#[test]
fn an_existing_lock_file_stays_as_it_is() {
    for lock_mode in [0o400, 0o600, 0o666] {
        let scene = Scene::new();
        scene.write("queue.lock", "held by humans\n");
        if is_root() {
            chown(scene.path("queue.lock"), Some(STRANGER), Some(AGENTS)).unwrap();
        }
        set_mode(&scene.path("queue.lock"), lock_mode);
        let lock = |scene: &Scene| everything(&scene.path("queue.lock"));
        let before = lock(&scene);
        succeed(&mut scene.compact());
        assert_compacted(&scene.queue());
        assert!(lock(&scene) == before, "{lock_mode:o}: {:#?}", lock(&scene));
    }
}

#[test]
fn a_lock_that_somebody_holds_is_busy() {
    for how in ["exclusive", "shared"] {
        let scene = Scene::new();
        scene.write("queue.lock", "");
        let (holder, id) = hold_lock(&scene, "agents/queue.lock", how);
        let message = format!("queue.lock: still locked after 200ms by process {id} (python");
        assert_refuses(&scene, &mut scene.compact(), 75, &message);
        let preview = run(scene.compact().arg("--dry-run"));
        assert_eq!(preview.code, Some(if how == "shared" { 0 } else { 75 }), "{how}: {}", preview.stderr);
        holder.finish();
        succeed(&mut scene.compact());
        assert_compacted(&scene.queue());
    }
}

#[test]
fn a_queue_that_somebody_has_locked_itself_is_busy() {
    // As another run has, that was told of another lock; and as a worker may that follows its own rules.
    for how in ["exclusive", "shared"] {
        let scene = Scene::new();
        let (holder, id) = hold_lock(&scene, "agents/queue.jsonl", how);
        let message = format!("queue.jsonl: is locked itself by process {id} (python");
        assert_refuses(&scene, &mut scene.compact(), 75, &message);
        assert_eq!(run(scene.compact().arg("--dry-run")).code, Some(0), "a preview only reads");
        holder.finish();
        succeed(&mut scene.compact());
        assert_compacted(&scene.queue());
    }
}

#[test]
fn the_queue_is_not_its_own_lock() {
    for (lock, make) in [("agents/queue.jsonl", None), ("agents/link", Some("link")), ("agents/name", Some("name"))] {
        let scene = Scene::new();
        match make {
            Some("link") => symlink("queue.jsonl", scene.path("link")).unwrap(),
            Some(name) => fs::hard_link(scene.queue(), scene.path(name)).unwrap(),
            None => {}
        }
        let mut command = scene.compact();
        assert_refuses(&scene, command.args(["--lock", lock]), 74, &format!("{lock}: is the queue itself"));
        assert!(!scene.path("queue.lock").exists());
    }
}

#[test]
fn a_lock_file_that_is_replaced_meanwhile_is_no_lock_any_more() {
    let scene = Scene::new();
    scene.write("queue.lock", "");
    scene.write("other.lock", "");
    let before = everything(&scene.queue());
    // When the new file is written; somebody else then works under the lock that counts.
    let (holder, _) = hold_lock(&scene, "agents/other.lock", "exclusive");
    let refused = stopped_once(&scene, &mut stopping_after(&scene, "fdatasync"), || {
        fs::rename(scene.path("other.lock"), scene.path("queue.lock")).unwrap();
    });
    assert_message(&refused, 75, "agents/queue.lock: ");
    assert_unchanged(&before, &scene.queue(), "the lock was replaced");
    assert_eq!(scene.names(), ["queue.jsonl", "queue.lock"]);
    holder.finish();
    succeed(&mut scene.compact());
    assert_compacted(&scene.queue());
}

#[test]
fn a_queue_that_is_cut_in_place_meanwhile_is_not_overwritten() {
    let scene = Scene::new();
    let new = record("new", "researcher", "queued");
    // As copytruncate does, while the new file is written.
    let refused = stopped_once(&scene, &mut stopping_after(&scene, "fdatasync"), || {
        File::options().write(true).open(scene.queue()).unwrap().set_len(0).unwrap();
        scene.append("queue.jsonl", &new);
    });
    assert_message(&refused, 75, "queue.jsonl: was cut or removed while it was read");
    assert_eq!(fs::read_to_string(scene.queue()).unwrap(), new);
    assert_eq!(scene.names(), ["queue.jsonl", "queue.lock"]);
}

#[test]
fn a_queue_that_is_replaced_or_removed_meanwhile_is_not_overwritten() {
    let edited = record("edited", "researcher", "queued");
    for is_replaced in [true, false] {
        let scene = Scene::new();
        let refused = stopped_once(&scene, &mut stopping_after(&scene, "fdatasync"), || {
            if is_replaced {
                // As editors save.
                scene.write("edited", &edited);
                fs::rename(scene.path("edited"), scene.queue()).unwrap();
            } else {
                fs::remove_file(scene.queue()).unwrap();
            }
        });
        assert!(matches!(refused.code, Some(74 | 75)), "{refused:?}");
        if is_replaced {
            assert_eq!(fs::read_to_string(scene.queue()).unwrap(), edited);
            assert_eq!(scene.names(), ["queue.jsonl", "queue.lock"], "{}", refused.stderr);
        } else {
            assert_eq!(scene.names(), ["queue.lock"], "{}", refused.stderr);
        }
    }
}

#[test]
fn what_is_no_lock_file_is_an_error_that_does_not_hang() {
    let others: [(&str, Make); 2] = [
        ("it is a symbolic link to a file that is missing", |path| symlink("nowhere", path).unwrap()),
        ("Permission denied", |path| {
            fs::write(path, "").unwrap();
            set_mode(path, 0o000);
        }),
    ];
    for (message, make) in NO_FILES.into_iter().chain(others) {
        let scene = Scene::new();
        make(&scene.path("queue.lock"));
        let mut command =
            if message == "Permission denied" { scene.compact_as_ordinary_owner() } else { scene.compact() };
        assert_refuses(&scene, &mut command, 74, &format!("queue.lock: cannot be opened: {message}"));
    }
}

// Earlier generations.

/// A queue that has been compacted once, and its generation.
fn compacted_once() -> (Scene, PathBuf) {
    let scene = Scene::new();
    succeed(&mut scene.compact());
    assert_compacted(&scene.queue());
    let generation = scene.path("queue.gen.1");
    (scene, generation)
}

#[test]
fn a_generation_of_another_user_is_drained_but_kept_and_reported() {
    needs_root();
    let (scene, generation) = compacted_once();
    let mut command = scene.compact_as_ordinary_owner();
    chown(&generation, Some(STRANGER), Some(STRANGER)).unwrap();
    set_mode(&generation, 0o644);
    for _ in 0..2 {
        let messages = succeed(&mut command);
        let warning = "queue.gen.1: is kept: nothing can prove that nobody writes into it any more: ";
        assert!(messages.len() == 2 && messages[0].contains(warning), "{messages:#?}");
        assert!(generation.exists());
        assert_compacted(&scene.queue());
    }
    // What reaches it is taken over nevertheless, once.
    scene.append("queue.gen.1", &record("late", "researcher", "queued"));
    for _ in 0..2 {
        succeed(&mut command);
        let ledger = assert_holds(&scene.queue(), &(kept() + &record("late", "researcher", "queued")));
        assert_eq!(ledger["generations"]["1"], fs::metadata(&generation).unwrap().len());
    }
    // Root may do what they may not.
    succeed(&mut scene.compact());
    assert!(!generation.exists());
}

#[test]
fn a_generation_that_somebody_writes_into_is_kept_until_they_close_it() {
    for how in [">>", "<>"] {
        let (scene, generation) = compacted_once();
        let mut writer = scene.env.command(tool("sh", "dash"));
        let script =
            format!("exec 3{how}agents/queue.gen.1; echo open; read line; printf '%s\\n' \"$line\" >&3; read line");
        writer.args(["-c", &script]);
        let (mut writer, _) = Background::spawn_and_wait_for_line(&mut writer);
        for _ in 0..2 {
            let messages = succeed(&mut scene.compact());
            let warning = "queue.gen.1: is kept: somebody has it open for writing: fuser tells who";
            assert!(messages.len() == 2 && messages[0].contains(warning), "{messages:#?}");
            assert_compacted(&scene.queue());
            assert_eq!(scene.names(), ["queue.gen.1", "queue.jsonl", "queue.lock"]);
        }
        if how == ">>" {
            let late = record("late", "researcher", "queued");
            writer.say(&late);
            while !fs::read_to_string(&generation).unwrap().ends_with(&late) {
                thread::yield_now();
            }
            succeed(&mut scene.compact());
            assert_holds(&scene.queue(), &(kept() + &late));
            assert!(generation.exists());
        }
        drop(writer);
        // The next run finds it drained, and the one after it what that one left.
        succeed(&mut scene.compact());
        assert!(!generation.exists(), "{how}");
        succeed(&mut scene.compact());
        assert_eq!(scene.names(), ["queue.jsonl", "queue.lock"], "{how}");
    }
}

#[test]
fn a_generation_that_somebody_opens_just_before_it_is_removed_stays_in_the_ledger() {
    let (scene, generation) = compacted_once();
    scene.append("queue.jsonl", &old("older"));
    succeed(&mut strace(&scene, &["-e", "trace=fcntl"], scene.compact().arg("--older-than=1000w")));
    let trace = fs::read_to_string(scene.env.path("trace")).unwrap();
    let calls: Vec<&str> = trace.lines().filter(|line| line.contains(" fcntl(")).collect();
    let asked = 1 + calls.iter().position(|call| call.contains("F_GETLEASE")).expect("the lease is looked at again");
    assert!(!generation.exists(), "that run removes it");

    let (scene, generation) = compacted_once();
    scene.append("queue.jsonl", &old("older"));
    // The lease is broken, the kernel says: there is none any more.
    let inject = format!("inject=fcntl:retval=2:when={asked}");
    succeed(&mut strace(&scene, &["-e", &inject], &scene.compact()));
    assert!(fs::read_to_string(scene.env.path("trace")).unwrap().contains("(INJECTED)"));
    assert!(generation.exists());
    assert!(
        !assert_compacted(&scene.queue())["generations"]["1"].is_null(),
        "it is still there, but not in the ledger"
    );
    // Who opened it writes now.
    scene.append("queue.gen.1", &record("late", "researcher", "queued"));
    succeed(&mut scene.compact());
    assert_holds(&scene.queue(), &(kept() + &record("late", "researcher", "queued")));
}

#[test]
fn a_reader_of_a_generation_does_not_keep_it() {
    let (scene, generation) = compacted_once();
    let reader = File::open(&generation).unwrap();
    succeed(&mut scene.compact());
    assert!(!generation.exists());
    drop(reader);
}

#[test]
fn a_generation_that_the_ledger_does_not_list_is_reported_and_never_touched() {
    let (scene, _) = compacted_once();
    scene.write("queue.gen.9", record("foreign", "researcher", "queued") + &old("foreign") + "a tail");
    scene.write("queue.gen.007", "not of that form\n");
    scene.write("queue.gen.1.bak", "not of that form\n");
    let foreign = ["queue.gen.9", "queue.gen.007", "queue.gen.1.bak"].map(|name| everything(&scene.path(name)));
    for round in 0..3 {
        scene.append("queue.jsonl", &old("more"));
        let messages = succeed(scene.compact().args(["--older-than", "1d"]));
        let warning = "queue.gen.9: a generation that the queue's ledger does not list: not read, never deleted";
        assert!(messages.len() == 2 && messages[0].contains(warning), "{messages:#?}");
        // A new number is above all that are there, or it could be taken for the foreign one.
        let ledger = assert_compacted(&scene.queue());
        let own = (10 + round).to_string();
        assert_eq!(ledger["generations"].as_object().unwrap().keys().collect::<Vec<_>>(), [&own]);
        for entry in &foreign {
            let (path, _) = entry.first_key_value().unwrap();
            assert!(everything(path) == *entry, "{} has changed", path.display());
        }
    }
}

#[test]
fn a_number_is_not_used_again_while_the_ledger_lists_it() {
    let scene = Scene::new();
    scene.write("queue.jsonl", ledger(r#""7":48231"#) + &queue());
    succeed(&mut scene.compact());
    let ledger = assert_compacted(&scene.queue());
    assert_eq!(ledger["generations"].as_object().unwrap().keys().collect::<Vec<_>>(), ["8"]);
    assert_eq!(scene.names(), ["queue.gen.8", "queue.jsonl", "queue.lock"]);
}

#[test]
fn the_largest_number_there_is_leads_to_no_crash() {
    let largest = format!("queue.gen.{}", u64::MAX);
    for is_listed in [false, true] {
        let scene = Scene::new();
        scene.write(&largest, "");
        if is_listed {
            scene.write("queue.jsonl", ledger(&format!("\"{}\":0", u64::MAX)) + &queue());
        }
        let before = everything(&scene.queue());
        let run = run(&mut scene.compact());
        assert_message(&run, 65, "has an earlier generation with the largest number there is");
        assert_unchanged(&before, &scene.queue(), "no number is left");
        // A listed one that is drained goes before.
        assert_eq!(scene.path(&largest).exists(), !is_listed);
    }
}

#[test]
fn a_generation_shorter_than_its_offset_is_reported_and_left_alone() {
    let scene = Scene::new();
    scene.write("queue.jsonl", ledger(r#""4":5000"#) + &queue());
    scene.write("queue.gen.4", record("short", "researcher", "queued"));
    let before = everything(&scene.path("queue.gen.4"));
    let size = fs::metadata(scene.path("queue.gen.4")).unwrap().len();
    for _ in 0..3 {
        let messages = succeed(&mut scene.compact());
        let warning = format!(
            "queue.gen.4: has {size} bytes, but the queue's ledger says that 5000 have been taken over: left alone"
        );
        assert!(messages.len() == 2 && messages[0].ends_with(&warning), "{messages:#?}");
        // Forgotten, it would be foreign; with a smaller offset, what it may yet get would count twice.
        assert_eq!(assert_compacted(&scene.queue())["generations"]["4"], 5000);
        assert!(everything(&scene.path("queue.gen.4")) == before);
    }
}

/// Makes something that is named like a generation and is no file.
type Maker<'a> = &'a dyn Fn(&Scene, &Path);

#[test]
fn what_is_only_named_like_a_generation_is_reported_and_never_removed() {
    let late = record("not-a-late-line", "researcher", "queued");
    let makers: [(&str, Maker<'_>); 7] = [
        ("a directory", &|_, path| fs::create_dir(path).unwrap()),
        ("a FIFO", &|_, path| {
            output(Command::new(tool("mkfifo", "coreutils")).arg(path));
        }),
        ("a socket", &|_, path| drop(UnixListener::bind(path).unwrap())),
        ("a dangling link", &|_, path| symlink("nowhere", path).unwrap()),
        ("a link to itself", &|_, path| symlink(path.file_name().unwrap(), path).unwrap()),
        ("a link to the queue", &|_, path| symlink("queue.jsonl", path).unwrap()),
        ("a link to a file", &|scene, path| {
            scene.env.write("elsewhere.jsonl", &late);
            symlink(scene.env.path("elsewhere.jsonl"), path).unwrap();
        }),
    ];
    let mut problems = Vec::new();
    for (what, make) in makers {
        for is_listed in [false, true] {
            let scene = Scene::new();
            if is_listed {
                scene.write("queue.jsonl", ledger(r#""5":0"#) + &queue());
            }
            make(&scene, &scene.path("queue.gen.5"));
            let all = everything(&scene.path("."));
            let strange =
                || fs::symlink_metadata(scene.path("queue.gen.5")).map(|found| (found.ino(), found.mode())).ok();
            let before = strange();
            for round in 1..=2 {
                let mut problem =
                    |problem: &str| problems.push(format!("{what}, listed: {is_listed}, run {round}: {problem}"));
                let run = run(&mut scene.compact());
                match run.code {
                    // What the ledger lists and can't be read may hold late lines: that is a reason not to go on.
                    Some(74) if is_listed => assert_unchanged(&all, &scene.path("."), what),
                    Some(0) if !is_listed => {
                        let contents = fs::read_to_string(scene.queue()).unwrap();
                        let (_, rest) = contents.split_once('\n').unwrap();
                        // What lies behind a link may be somebody else's, and none of the queue's readers' business.
                        if rest != kept() {
                            problem("the queue holds other lines than it should");
                        }
                    }
                    _ => problem(&format!("exit code {:?}", run.code)),
                }
                if !run.stderr.contains("queue.gen.5: ") {
                    problem("it is not reported");
                }
                if strange() != before {
                    problem("it is gone or another");
                }
            }
            if what == "a link to a file" {
                assert_eq!(fs::read_to_string(scene.env.path("elsewhere.jsonl")).unwrap(), late);
            }
        }
    }
    assert!(problems.is_empty(), "{problems:#?}");
}

#[test]
fn what_is_only_named_like_a_temporary_file_is_never_read_or_removed() {
    let scene = Scene::new();
    fs::create_dir(scene.path(".queue.jsonl.1.a1B2c1.tmp")).unwrap();
    symlink("queue.jsonl", scene.path(".queue.jsonl.2.a1B2c2.tmp")).unwrap();
    output(Command::new(tool("mkfifo", "coreutils")).arg(scene.path(".queue.jsonl.3.a1B2c3.tmp")));
    let others = [
        ".queue.jsonl.swp",
        ".queue.jsonltmp",
        ".queue.jsonl-1.tmp",
        ".queue.jsonl.7.tmp",
        ".queue.jsonl.x.tmp",
        ".queue.jsonl.8.a-b.tmp",
        "queue.jsonl.4.tmp",
        ".other.jsonl.5.tmp",
    ];
    for name in others {
        scene.write(name, name);
    }
    // A run that is still at it, elsewhere.
    scene.write(".queue.jsonl.6.d4E5f6.tmp", "");
    let (holder, _) = hold_lock(&scene, "agents/.queue.jsonl.6.d4E5f6.tmp", "exclusive");
    scene.write(".queue.jsonl.7.a1B2c3.tmp", "of a dead run");
    let mut expected = scene.names();
    expected.retain(|name| name != ".queue.jsonl.7.a1B2c3.tmp");
    expected.extend(["queue.gen.1", "queue.lock"].map(str::to_owned));
    expected.sort();
    succeed(&mut scene.compact());
    assert_compacted(&scene.queue());
    assert_eq!(scene.names(), expected);
    holder.finish();
    // Where a dead run's file is concerned there is always something to do.
    scene.write(".queue.jsonl.8.g7H8i9.tmp", "of a dead run");
    succeed(&mut scene.compact());
    assert!(!scene.path(".queue.jsonl.8.g7H8i9.tmp").exists());
}
