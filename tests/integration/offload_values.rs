//! Which values offload moves, and that nothing of them is lost.
//!
//! What must be moved is worked out by `offload.py`, or by hand; that it comes back is proved by `restore.py`, which knows no rule.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::RangeInclusive;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use walkdir::WalkDir;

use crate::fixtures::batch;
use crate::test_env::{NOW, Run, TestEnv, in_tests, mode, names_in, run, tell, tool};

const LEDGER_START: &[u8] = b"{\"id\":\"ledger\",";
/// What is over the limit if not told otherwise.
const LIMIT: usize = 8192;
const NO_ARGUMENTS: [&str; 0] = [];

// ------------------------------------------------------------------------------------------------------------ helpers

/// A queue in a directory of its own, with its blob store.
struct Place<'e> {
    env: &'e TestEnv,
    name: String,
}

/// What is to be told of a file: inode, time of modification in nanoseconds, mode, contents.
type State = BTreeMap<PathBuf, (u64, i128, u32, Vec<u8>)>;

impl<'e> Place<'e> {
    fn new(env: &'e TestEnv, name: &str, queue: impl AsRef<[u8]>) -> Self {
        let place = Self { env, name: name.to_owned() };
        fs::create_dir(env.path(name)).unwrap();
        // Somebody has always locked it before.
        fs::write(place.path("queue.lock"), "").unwrap();
        fs::write(place.path("queue.jsonl"), queue).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.env.path(&self.name).join(name)
    }

    fn queue(&self) -> Vec<u8> {
        fs::read(self.path("queue.jsonl")).unwrap()
    }

    fn run(&self, arguments: &[impl AsRef<str>]) -> Run {
        let mut command = self.env.bare_offload();
        command.current_dir(self.path(".")).args(["--queue", "queue.jsonl", "--now", NOW, "--textfile-dir"]);
        run(command.arg(self.env.textfile_dir()).args(arguments.iter().map(AsRef::as_ref)))
    }

    /// Offloads, which must succeed, and returns what it says for machines.
    fn offload(&self, arguments: &[impl AsRef<str>]) -> Value {
        let arguments: Vec<&str> = ["--json"].into_iter().chain(arguments.iter().map(AsRef::as_ref)).collect();
        let run = self.run(&arguments);
        assert_eq!(run.code, Some(0), "{}: {}", self.name, run.stderr);
        serde_json::from_slice(&run.stdout).unwrap()
    }

    /// How many records the exporter says the next offload would change, and the counters as it prints them.
    fn metrics(&self, arguments: &[impl AsRef<str>]) -> (u64, BTreeSet<String>) {
        let mut command = self.env.bare_exporter();
        command.current_dir(self.path(".")).args(["--queue", "queue.jsonl", "--stdout", "--now", NOW]);
        let run = run(command.args(arguments.iter().map(AsRef::as_ref)));
        assert_eq!(run.code, Some(0), "{}: {}", self.name, run.stderr);
        let printed = String::from_utf8(run.stdout).unwrap();
        let gauge =
            |line: &str| line.strip_prefix("handoff_queue_oversized_records ").map(|value| value.parse().unwrap());
        let is_counter = |line: &&str| {
            let name = line.split(['{', ' ']).next().unwrap();
            ["_total", "_bucket", "_sum", "_count"].iter().any(|end| name.ends_with(end))
        };
        let counters: BTreeSet<String> = printed.lines().filter(is_counter).map(str::to_owned).collect();
        assert!(!counters.is_empty(), "{}: there are no counters", self.name);
        (printed.lines().find_map(gauge).unwrap(), counters)
    }

    /// Everything that lies in the directory.
    fn state(&self) -> State {
        let file = |entry: walkdir::Result<walkdir::DirEntry>| {
            let entry = entry.unwrap();
            let metadata = entry.metadata().unwrap();
            let modified = i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec());
            let contents = if metadata.is_file() { fs::read(entry.path()).unwrap() } else { Vec::new() };
            (entry.into_path(), (metadata.ino(), modified, metadata.mode(), contents))
        };
        WalkDir::new(self.path(".")).into_iter().map(file).collect()
    }

    /// The queue's lines, ledgers left out.
    fn lines(&self) -> Vec<u8> {
        without_ledgers(&self.queue())
    }

    /// The blobs by their names. Asserts that nothing else is in the store, and that names and modes are right.
    fn blobs(&self) -> BTreeMap<String, Vec<u8>> {
        let mut blobs = BTreeMap::new();
        let store = self.path("blob");
        assert_eq!(mode(&store), 0o750, "{}", self.name);
        for directory in names_in(&store) {
            assert_eq!(mode(&store.join(&directory)), 0o750, "{}: {directory}", self.name);
            for name in names_in(&store.join(&directory)) {
                let path = store.join(&directory).join(&name);
                assert_eq!(mode(&path), 0o640, "{}: {name}", self.name);
                assert!(name.starts_with(&directory), "{}: {name} in {directory}", self.name);
                blobs.insert(name, fs::read(path).unwrap());
            }
        }
        let sums = sha256(self.env, &store);
        assert_eq!(sums, blobs.keys().cloned().collect(), "{}: names are not hashes", self.name);
        blobs
    }

    /// A second run must find nothing to do, and leave every line and every blob alone.
    fn assert_settled(&self, arguments: &[impl AsRef<str>]) {
        let (queue, inode) = (self.queue(), inode_of(&self.path("queue.jsonl")));
        let stored = |state: State| -> State {
            state
                .into_iter()
                .filter(|(path, _)| path.starts_with(self.path("blob")) || path.ends_with("queue.jsonl"))
                .collect()
        };
        let before = stored(self.state());
        let report = self.offload(arguments);
        assert_eq!(report["moved"], json!({"records": 0, "values": 0}), "{}", self.name);
        assert_eq!(report["blobs"], json!({"written": 0, "written_bytes": 0, "reused": 0}), "{}", self.name);
        assert_eq!(report["replaced"], json!(false), "{}", self.name);
        assert_bytes(&self.queue(), &queue, &format!("{}: the second run", self.name));
        assert_eq!(inode_of(&self.path("queue.jsonl")), inode, "{}: replaced again", self.name);
        assert!(stored(self.state()) == before, "{}: the second run touched something", self.name);
    }
}

fn inode_of(path: &Path) -> u64 {
    fs::metadata(path).unwrap().ino()
}

fn without_ledgers(queue: &[u8]) -> Vec<u8> {
    let lines = queue.split_inclusive(|byte| *byte == b'\n');
    lines.filter(|line| line.ends_with(b"\n") && !line.starts_with(LEDGER_START)).collect::<Vec<_>>().concat()
}

/// The SHA-256 of every file below a directory, as coreutils have it.
fn sha256(env: &TestEnv, directory: &Path) -> BTreeSet<String> {
    let mut command = env.command(tool("find", "findutils"));
    command.arg(directory).args(["-type", "f", "-exec"]).arg(tool("sha256sum", "coreutils")).args(["{}", "+"]);
    let run = run(&mut command);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    String::from_utf8(run.stdout).unwrap().lines().map(|line| line[..64].to_owned()).collect()
}

/// Asserts that two texts are the same, and shows where they part if they aren't.
fn assert_bytes(actual: &[u8], expected: &[u8], context: &str) {
    if actual != expected {
        let same = actual.iter().zip(expected).take_while(|(a, b)| a == b).count();
        let around =
            |bytes: &[u8]| bytes[same.saturating_sub(60)..bytes.len().min(same + 60)].escape_ascii().to_string();
        panic!(
            "{context}: {} bytes, not {}; they part at {same}:\n  {}\n  {}",
            actual.len(),
            expected.len(),
            around(actual),
            around(expected)
        );
    }
}

fn text(path: PathBuf) -> String {
    path.into_os_string().into_string().unwrap()
}

fn script(name: &str) -> String {
    text(in_tests(name))
}

/// A record's line without its end, with these fields beside the usual ones.
fn record(id: &str, fields: &str) -> String {
    format!(
        r#"{{"id":"{id}","ts":1795950000,"kind":"classify","from":"triage","to":"researcher",{fields},"status":"done"}}"#
    )
}

/// A literal of so many bytes.
fn literal(bytes: usize) -> String {
    format!("\"{}\"", "s".repeat(bytes - 2))
}

/// A value that is to be moved.
#[derive(Clone)]
struct Moved {
    pointer: &'static str,
    /// How it stands in the line.
    json: String,
    /// What its blob must be.
    content: String,
    media_type: &'static str,
}

/// A string that is written as it is, without escapes.
fn plain(pointer: &'static str, content: impl Into<String>) -> Moved {
    let content = content.into();
    Moved { pointer, json: format!("\"{content}\""), content, media_type: "text/plain" }
}

fn escaped(pointer: &'static str, json: &str, content: &str, times: usize) -> Moved {
    let json = format!("\"{}\"", json.repeat(times));
    Moved { pointer, json, content: content.repeat(times), media_type: "text/plain" }
}

fn as_json(pointer: &'static str, json: impl Into<String>) -> Moved {
    let json = json.into();
    Moved { pointer, content: json.clone(), json, media_type: "application/json" }
}

impl Moved {
    /// The handle that must stand for it, with a preview of at most so many bytes.
    fn handle(&self, sha256: &str, preview: usize) -> String {
        let end = (0..=preview.min(self.content.len())).rev().find(|end| self.content.is_char_boundary(*end)).unwrap();
        let (summary, bytes) = (serde_json::to_string(&self.content[..end]).unwrap(), self.content.len());
        // Python's splitlines takes these for ends of lines.
        let summary =
            summary.replace('\u{85}', "\\u0085").replace('\u{2028}', "\\u2028").replace('\u{2029}', "\\u2029");
        let (aa, media_type) = (&sha256[..2], self.media_type);
        format!(
            r#"{{"artifact_ref":"blob/{aa}/{sha256}","bytes":{bytes},"sha256":"{sha256}","media_type":"{media_type}","summary":{summary}}}"#
        )
    }
}

/// A line, in which `@0` and so on stand for values that must be moved.
struct Shape {
    id: &'static str,
    line: String,
    moved: Vec<Moved>,
}

impl Shape {
    fn new(id: &'static str, fields: &str, moved: impl Into<Vec<Moved>>) -> Self {
        Self { id, line: record(id, fields), moved: moved.into() }
    }

    /// The same with bytes before and after it that are none of the record's.
    fn between(before: &str, shape: Self, after: &str) -> Self {
        Self { line: format!("{before}{}{after}", shape.line), ..shape }
    }

    fn with(&self, mut stand_in: impl FnMut(&Moved) -> String) -> String {
        let mut line = self.line.clone();
        for (index, moved) in self.moved.iter().enumerate().rev() {
            let place = format!("@{index}");
            assert_eq!(line.matches(&place).count(), 1, "{}", self.line);
            line = line.replace(&place, &stand_in(moved));
        }
        line + "\n"
    }
}

/// Offloads a queue of these lines and proves that just what must move has moved.
fn prove_shapes(env: &TestEnv, name: &str, shapes: &[Shape], preview: usize, arguments: &[&str]) {
    let before: String = shapes.iter().map(|shape| shape.with(|moved| moved.json.clone())).collect();
    let place = Place::new(env, name, &before);
    let all: Vec<&Moved> = shapes.iter().flat_map(|shape| &shape.moved).collect();
    let contents: BTreeSet<&str> = all.iter().map(|moved| moved.content.as_str()).collect();
    let records = shapes.iter().filter(|shape| !shape.moved.is_empty()).count();
    let moved = json!({"records": records, "values": all.len()});

    let state = place.state();
    let preview_report = place.offload(&[&["--dry-run"], arguments].concat());
    assert!(place.state() == state, "{name}: --dry-run touched something");
    let limit: Vec<&str> = match arguments.iter().position(|argument| *argument == "--max-bytes") {
        Some(at) => arguments[at..at + 2].to_vec(),
        None => vec![],
    };
    let (oversized, counters) = place.metrics(&limit);
    let report = place.offload(arguments);

    let blobs = place.blobs();
    let hash_of: BTreeMap<&str, &str> =
        blobs.iter().map(|(sha256, blob)| (std::str::from_utf8(blob).unwrap(), sha256.as_str())).collect();
    for content in &contents {
        assert!(
            hash_of.contains_key(content),
            "{name}: no blob holds {:?}…",
            content.chars().take(60).collect::<String>()
        );
    }
    assert_eq!(blobs.len(), contents.len(), "{name}: there are blobs that nobody wants");
    let bytes: usize = contents.iter().map(|content| content.len()).sum();
    assert_eq!(report["moved"], moved, "{name}");
    assert_eq!(report["kept"], json!({"records_in_doubt": 0, "lone_surrogates": 0}), "{name}");
    assert_eq!(report["blobs"], json!({"written": contents.len(), "written_bytes": bytes, "reused": 0}), "{name}");
    assert_eq!(report["replaced"], json!(true), "{name}");

    let expected: String =
        shapes.iter().map(|shape| shape.with(|moved| moved.handle(hash_of[moved.content.as_str()], preview))).collect();
    assert_bytes(&place.lines(), expected.as_bytes(), name);

    let mut values = Vec::new();
    for (line, shape) in (1..).zip(shapes) {
        let id: String = serde_json::from_str(&format!("\"{}\"", shape.id)).unwrap();
        for Moved { pointer, content, media_type, .. } in &shape.moved {
            let (bytes, sha256) = (content.len(), hash_of[content.as_str()]);
            values.push(json!({"line": line, "id": id, "pointer": pointer, "bytes": bytes, "media_type": media_type, "sha256": sha256}));
        }
    }
    assert_eq!(preview_report["moved"], moved, "{name}");
    assert_eq!(preview_report["values"], json!(values), "{name}");

    assert_eq!(oversized, records as u64, "{name}: the gauge before");
    let after = place.metrics(&limit);
    assert_eq!(after.0, 0, "{name}: the gauge after");
    assert!(after.1 == counters, "{name}: a counter has changed");
    place.assert_settled(arguments);

    let original = place.path("original.jsonl");
    fs::write(&original, &before).unwrap();
    let (output, queue, store) = (place.path("restored"), place.path("queue.jsonl"), place.path("blob"));
    batch(
        env,
        [vec![text(output.clone()), script("restore.py"), text(original), text(queue), text(store)]].into_iter(),
    );
    let restored: Value = serde_json::from_slice(&fs::read(output).unwrap()).unwrap();
    assert_eq!(restored["values"], json!(all.len()), "{name}: not as many come back");
}

// -------------------------------------------------------------------------------------------------------------- shapes

/// A handle that stands in the queue before any run; its blob is not there, which does not matter.
fn old_handle(summary: &str) -> String {
    let sha256 = "ab".repeat(32);
    format!(
        r#"{{"artifact_ref":"blob/ab/{sha256}","bytes":48231,"sha256":"{sha256}","media_type":"text/plain","summary":"{summary}"}}"#
    )
}

fn long() -> String {
    "what a tool said. ".repeat(500)
}

/// What looks like base64.
fn base64() -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    (0..90_000_u32).map(|n| char::from(DIGITS[(n.wrapping_mul(2_654_435_761) >> 26) as usize])).collect()
}

/// Many small values.
fn hits(count: usize) -> String {
    let hit = |n| format!(r#"{{"url":"https://example.org/{n}","score":0.{n},"seen":false,"by":null}}"#);
    (0..count).map(hit).collect::<Vec<_>>().join(", ")
}

/// An object with many members.
fn members(count: usize) -> String {
    format!("{{{}}}", (0..count).map(|n| format!(r#""member {n}":{n}"#)).collect::<Vec<_>>().join(","))
}

#[test]
fn texts_go_and_come_back() {
    let escapes = (
        r#"line\r\n\t\"quoted\" \\ \/ \b\f \u00e9\u20AC \ud83d\ude00 é€😀 \u0000\u001f\u007F "#,
        "line\r\n\t\"quoted\" \\ / \u{8}\u{c} é€ 😀 é€😀 \0\u{1f}\u{7f} ",
    );
    let shapes = [
        Shape::new(
            "tool result",
            r#""payload":{"tool_result":@0,"summary":"short"}"#,
            [plain("/payload/tool_result", long())],
        ),
        Shape::new(
            "500 KB",
            r#""payload":{"a":@0}"#,
            [escaped("/payload/a", escapes.0, escapes.1, 500_000 / escapes.0.len())],
        ),
        Shape::new("base64", r#""payload":{"image":{"data":@0}}"#, [plain("/payload/image/data", base64())]),
        Shape::new(
            "JSON in a string",
            r#""payload":{"a":@0}"#,
            [escaped("/payload/a", r#"{\"b\":[1,\"\\n\"]},"#, r#"{"b":[1,"\n"]},"#, 600)],
        ),
        Shape::new("NULs", r#""payload":{"a":@0}"#, [escaped("/payload/a", r"\u0000", "\0", 2_000)]),
        Shape::new(
            "no escapes needed",
            r#""payload":{"a":@0}"#,
            [escaped("/payload/a", "\u{7f}\u{2028}\u{85}\u{feff}", "\u{7f}\u{2028}\u{85}\u{feff}", 1_000)],
        ),
        Shape::new(
            "a preview of whole characters",
            r#""payload":{"a":@0}"#,
            [plain("/payload/a", format!("{}😀{}", "x".repeat(1_022), long()))],
        ),
    ];
    prove_shapes(&TestEnv::new(), "texts", &shapes, 1_024, &[]);
}

#[test]
fn other_values_go_and_come_back() {
    let digits = "1234567890".repeat(1_000);
    let with_handle = format!("[{}, {}]", old_handle("before"), hits(200));
    let shapes = [
        Shape::new(
            "a crowd",
            r#""payload":{"hits":@0,"hit":{"score":0.5}}"#,
            [as_json("/payload/hits", format!("[{}]", hits(2_000)))],
        ),
        Shape::new(
            "a crowd in an object",
            r#""payload":{"a":{"hits":@0}}"#,
            [as_json("/payload/a/hits", members(1_000).replace(',', " ,\t"))],
        ),
        Shape::new("digits", r#""payload":{"a":[@0,-0.1e5]}"#, [as_json("/payload/a/0", &*digits)]),
        Shape::new("an exponent", r#""payload":{"a":@0}"#, [as_json("/payload/a", format!("-1.{digits}E-7"))]),
        Shape::new("all of the result", r#""payload":{"a":"short"},"result":@0"#, [as_json("/result", members(1_001))]),
        Shape::new("a crowd for a payload", r#""payload":@0"#, [as_json("/payload", format!("[{}]", hits(201)))]),
        Shape::new("with a handle", r#""payload":{"a":@0}"#, [as_json("/payload/a", with_handle)]),
    ];
    prove_shapes(&TestEnv::new(), "other", &shapes, 1_024, &[]);
}

#[test]
fn values_are_found_wherever_they_lie() {
    let tool_result = r#""messages":[{"role":"user","content":[{"type":"text","text":"go on"},{"type":"tool_result","tool_use_id":"toolu_01","content":[{"type":"text","text":@0},{"type":"image","source":{"type":"base64","media_type":"image/png","data":@1}}]}]}]"#;
    let tool_message = r#""messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"call_1","type":"function","function":{"name":"search","arguments":@0}}]},{"role":"tool","tool_call_id":"call_1","content":@1}]"#;
    let shapes = [
        Shape::new(
            "content blocks",
            &format!(r#""payload":{{{tool_result}}}"#),
            [
                plain("/payload/messages/0/content/1/content/0/text", long()),
                plain("/payload/messages/0/content/1/content/1/source/data", &base64()[7..]),
            ],
        ),
        Shape::new(
            "tool messages",
            &format!(r#""payload":{{{tool_message}}}"#),
            [
                escaped(
                    "/payload/messages/0/tool_calls/0/function/arguments",
                    r#"{\"q\":\"é\"} "#,
                    r#"{"q":"é"} "#,
                    1_000,
                ),
                plain("/payload/messages/1/content", long()),
            ],
        ),
        Shape::new(
            "deep content blocks",
            &format!(r#""payload":{{"history":[[{{{tool_result}}}]]}}"#),
            [
                plain("/payload/history/0/0/messages/0/content/1/content/0/text", long()),
                plain("/payload/history/0/0/messages/0/content/1/content/1/source/data", &base64()[9..]),
            ],
        ),
        Shape::new("nested", r#""payload":{"a":{"b":[1,{"c":@0},[]]}}"#, [plain("/payload/a/b/1/c", long())]),
        Shape::new("result", r#""payload":{},"result":@0"#, [plain("/result", long())]),
        Shape::new(
            "in the result",
            r#""payload":{"a":"short"},"result":{"text":@0,"tokens":7}"#,
            [plain("/result/text", long())],
        ),
        Shape::new(
            "result and payload",
            r#""result":[@0,"short"],"payload":{"a":@1}"#,
            [plain("/result/0", long() + "1"), plain("/payload/a", long() + "2")],
        ),
        Shape::new("a string for a payload", r#""payload": @0 "#, [plain("/payload", long())]),
        Shape::new(
            "an array for a payload",
            r#""payload":[@0,"short",{"a":@1}]"#,
            [plain("/payload/0", long() + "3"), plain("/payload/2/a", long() + "4")],
        ),
    ];
    prove_shapes(&TestEnv::new(), "places", &shapes, 1_024, &[]);
}

#[test]
fn what_is_around_values_stays_as_it_is() {
    let shapes = [
        Shape::new(
            "twice",
            r#""payload":{"a":@0,"b":1,"a":@1,"a":2}"#,
            [plain("/payload/a", long() + "5"), plain("/payload/a", long() + "6")],
        ),
        Shape::new(
            "blanks",
            "\"payload\" : {\t\"a\" :\r @0 \t, \"b\":[ @1\t]\r}",
            [plain("/payload/a", long() + "7"), plain("/payload/b/0", long() + "8")],
        ),
        Shape::new(
            "odd keys",
            r#""payload":{"":@0,"a/b~":{"\u00e9\n\u0022":[0,@1]},"\ud83d":@2}"#,
            [
                plain("/payload/", long() + "9"),
                plain("/payload/a~1b~0/é\n\"/1", long() + "10"),
                plain("/payload/\u{fffd}", long() + "11"),
            ],
        ),
        Shape::new(
            "beside a handle",
            &format!(r#""payload":{{"a":{},"b":@0}}"#, old_handle("s")),
            [plain("/payload/b", long() + "12")],
        ),
        Shape::new(
            "the same again",
            r#""payload":{"a":@0,"b":[@1],"c":@2}"#,
            [
                plain("/payload/a", long()),
                plain("/payload/b/0", long()),
                as_json("/payload/c", format!("[{}]", hits(2_000))),
            ],
        ),
        Shape::new("i\\u0064 \\\"\\n", r#""payload":{"a":@0}"#, [plain("/payload/a", long() + "13")]),
        Shape::between("", Shape::new("CRLF", r#""payload":{"a":@0}"#, [plain("/payload/a", long() + "14")]), "\r"),
        Shape::between(
            "\u{feff} ",
            Shape::new("byte order mark", r#""payload":{"a":@0}"#, [plain("/payload/a", long() + "15")]),
            " \t",
        ),
        Shape::new(
            "other fields",
            &format!(r#""x":{},"payload":{{"a":@0}},"spend":0.5"#, literal(9_000)),
            [plain("/payload/a", long() + "16")],
        ),
        Shape::new("small", r#""payload":{"a":[1,"short"]},"result":null"#, []),
    ];
    prove_shapes(&TestEnv::new(), "around", &shapes, 1_024, &[]);
}

// ------------------------------------------------------------------------------------------------------- at the limit

#[test]
fn a_byte_decides() {
    let env = TestEnv::new();
    for limit in [400, LIMIT] {
        let mut shapes = Vec::new();
        for (size, is_over) in [(limit - 1, false), (limit, false), (limit + 1, true)] {
            let content = "s".repeat(size - 2);
            let array = format!("[{}0]", "0,".repeat((size - 3) / 2) + if size % 2 == 0 { " " } else { "" });
            let object = format!(r#"{{"a":0,"b":0,{}"c":null}}"#, " ".repeat(size - 22));
            let escapes = (size - 2) / 6;
            let padding = "x".repeat(size - 2 - 6 * escapes);
            let values = [
                plain("", content),
                // One character, two bytes; and one character, six bytes.
                plain("", "é".repeat((size - 2) / 2) + if size % 2 == 0 { "" } else { "x" }),
                Moved {
                    json: format!("\"{}{padding}\"", r"\u0041".repeat(escapes)),
                    content: format!("{}{padding}", "A".repeat(escapes)),
                    ..plain("", "")
                },
                as_json("", array),
                as_json("", object),
                as_json("", "7".repeat(size)),
                as_json("", format!("0.{}", "3".repeat(size - 2))),
            ];
            for value in values {
                assert_eq!(value.json.len(), size, "{}", value.json);
                for (pointer, fields, has_room) in [
                    ("/payload/a", r#""payload":{"a":@0}"#, true),
                    ("/result", r#""payload":{},"result": @0 "#, true),
                    // What is around a value that is nearly over the limit is over it itself, but not what is around its handle.
                    ("/payload/0", r#""payload":[ @0 ]"#, false),
                    ("/payload/a/b/0", r#""payload":{"a":{"b":[@0]}}"#, false),
                    ("/result/a", r#""result":{"a":@0}"#, false),
                ] {
                    let moved = Moved { pointer, ..value.clone() };
                    if is_over {
                        shapes.push(Shape::new("over", fields, [moved]));
                    } else if has_room {
                        shapes.push(Shape::new("not over", &fields.replace("@0", &moved.json), []));
                    }
                }
            }
        }
        let name = format!("limit-{limit}");
        let limit = limit.to_string();
        prove_shapes(&env, &name, &shapes, 40, &["--max-bytes", &limit, "--preview-bytes", "40"]);
    }
}

#[test]
fn what_is_around_handles_goes_only_if_it_is_still_over_the_limit() {
    let env = TestEnv::new();
    let long = plain("", "l".repeat(20_000));
    let handle_bytes = long.handle(&"0".repeat(64), 1_024).len();
    let mut shapes = Vec::new();
    for (size, is_over) in [(LIMIT - 1, false), (LIMIT, false), (LIMIT + 1, true)] {
        for (before, after, pointers) in [
            ("[@0,", "]", &["/payload/x/0"][..]),
            ("[[ @0 ],", "]", &["/payload/x/0/0"]),
            (r#"{"a":@0,"b":"#, "}", &["/payload/x/a"]),
            ("[@0,@1,", "]", &["/payload/x/0", "/payload/x/1"]),
        ] {
            let handles = pointers.len();
            let rest = size - (before.len() - 2 * handles) - after.len() - handles * handle_bytes;
            let container = format!("{before}{}{after}", literal(rest));
            let inside: Vec<Moved> = pointers.iter().map(|pointer| Moved { pointer, ..long.clone() }).collect();
            if is_over {
                let all = container.replace("@0", &long.json).replace("@1", &long.json);
                shapes.push(Shape::new("over", r#""payload":{"x":@0}"#, [as_json("/payload/x", &*all)]));
                // What is around that has room for its handle.
                let all = [as_json("/payload/x/y/0", all)];
                shapes.push(Shape::new("deeper", r#""payload":{"x":{"y":[@0,{"z":null}]}}"#, all));
            } else {
                shapes.push(Shape::new("not over", &format!(r#""payload":{{"x":{container}}}"#), inside));
            }
        }
    }
    // Lone surrogates can't go by themselves, but in what is around them they can.
    let no_text = format!(r#""{}\ud83d""#, "s".repeat(LIMIT));
    shapes.push(Shape::new("lone", r#""payload":{"x":@0}"#, [as_json("/payload/x", format!("[1,{no_text}]"))]));
    shapes.push(Shape::new(
        "lone",
        r#""result":{"y":[@0,2]}"#,
        [as_json("/result/y/0", format!(r#"{{"x":{no_text},"z":{}}}"#, long.json))],
    ));
    prove_shapes(&env, "around", &shapes, 1_024, &[]);
}

#[test]
fn nesting_of_any_depth() {
    let env = TestEnv::new();
    let mut shapes = Vec::new();
    for (open, close, step) in [("[", "]", "/0"), (r#"{"a":"#, "}", "/a")] {
        let pair = open.len() + close.len();
        let levels = |count: usize| format!("{}1{}", open.repeat(count), close.repeat(count));
        let handle_bytes = |json: String| as_json("", json).handle(&"0".repeat(64), 1_024).len();
        // The innermost that is over the limit goes, and again whatever is then over it around its handle.
        let mut whole = (LIMIT - 1) / pair + 1;
        loop {
            let more = (LIMIT - handle_bytes(levels(whole))) / pair + 1;
            if whole + more > 200_000 {
                break;
            }
            whole += more;
        }
        let rest = 200_000 - whole;
        let pointer = format!("/payload/x{}", step.repeat(rest)).leak();
        let fields = format!(r#""payload":{{"x":{}@0{}}}"#, open.repeat(rest), close.repeat(rest));
        shapes.push(Shape::new("deep", &fields, [as_json(pointer, levels(whole))]));
        // Too deep for most readers, and in nobody's way.
        let small = levels(LIMIT / pair - 1);
        shapes.push(Shape::new("not over", &format!(r#""payload":{{"x":{small}}},"x":{}"#, levels(20_000)), []));
    }
    prove_shapes(&env, "deep", &shapes, 1_024, &[]);
}

#[test]
fn the_settings_are_what_they_say() {
    let env = TestEnv::new();
    let mixed = format!("é\n{}", "x😀".repeat(5_000));
    for (index, (arguments, preview)) in [
        (vec!["--preview-bytes", "0"], 0),
        (vec!["--preview-bytes", "1"], 1),
        (vec!["--preview-bytes", "2"], 2),
        (vec!["--preview-bytes", "7"], 7),
        (vec!["--preview-bytes", "5KiB"], 5 * 1024),
    ]
    .into_iter()
    .enumerate()
    {
        let value =
            Moved { json: serde_json::to_string(&mixed).unwrap(), content: mixed.clone(), ..plain("/payload/a", "") };
        let shapes = [Shape::new("mixed", r#""payload":{"a":@0}"#, [value])];
        prove_shapes(&env, &format!("preview-{index}"), &shapes, preview, &arguments);
    }
    for (index, (arguments, shapes)) in [
        // All but the smallest values: what holds one goes too, for a handle has no room in it.
        (
            ["--max-bytes", "10"],
            vec![
                Shape::new("small", r#""payload":{"a":@0,"b":"12345678","c":1}"#, [plain("/payload/a", "123456789")]),
                Shape::new("list", r#""payload":{"a":@0}"#, [as_json("/payload/a", "[0, 1.50 ,null]")]),
                Shape::new("result", r#""result":@0"#, [as_json("/result", r#"{"a":"1234567890"}"#)]),
            ],
        ),
        (
            ["--max-bytes", "20KB"],
            vec![
                Shape::new("just", &format!(r#""payload":{{"a":{}}}"#, literal(20_000)), []),
                Shape::new("over", r#""payload":{"a":@0}"#, [plain("/payload/a", "s".repeat(19_999))]),
            ],
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let number = if arguments[1] == "20KB" { "20000" } else { "10" };
        prove_shapes(&env, &format!("limit-{index}"), &shapes, 1_024, &arguments);
        prove_shapes(&env, &format!("number-{index}"), &shapes, 1_024, &["--max-bytes", number]);
    }
}

// ---------------------------------------------------------------------------------------------------------- what stays

/// Asserts that a run neither changes nor makes anything but metrics, whatever it counts.
fn assert_nothing_moves(place: &Place<'_>, arguments: &[&str], kept: &Value) {
    let before = place.state();
    for dry in [&["--dry-run"][..], &[]] {
        let report = place.offload(&[dry, arguments].concat());
        assert_eq!(report["moved"], json!({"records": 0, "values": 0}), "{}", place.name);
        assert_eq!(report["kept"], *kept, "{}", place.name);
        assert_eq!(report["replaced"], json!(false), "{}", place.name);
        assert!(place.state() == before, "{}: something was touched", place.name);
    }
    assert_eq!(place.metrics(arguments).0, 0, "{}", place.name);
}

#[test]
fn what_is_in_doubt_or_no_record_stays() {
    let env = TestEnv::new();
    let long = literal(9_000);
    let big = format!(r#""payload":{{"a":{long},"b":{long}}}"#);
    let doubts = [
        record("twice", &format!(r#"{big},"result":1,"result":2"#)),
        record("twice too", &format!(r#"{big},"own\u0065r":null,"owner":null"#)),
        record("payload twice", &format!(r#""payload":{{}},{big}"#)),
        record("not finite", &format!(r#"{big},"x":[NaN]"#)),
        record("not finite within", &format!(r#""payload":{{"a":{long},"b":-Infinity}}"#)),
        record(r"lone \ud83d", &big),
        record("no time", &format!(r#"{big},"started_ts":"soon""#)),
        record("no nacks", &format!(r#"{big},"nacks":-1"#)),
        // Nothing in it would be moved, so it isn't counted.
        record("small", r#""payload":{},"x":NaN"#),
    ];
    let lines = [
        record("cut", &big)[..9_000].to_owned(),
        record("glued", &big) + &record("glued", &big),
        record("comma", &big).replace("},", ",},"),
        record("version", &format!(r#"{big},"protocol_version":3"#)),
        record("", &big),
        record("no kind", &big).replace("\"kind\"", "\"Kind\""),
        format!("[{}]", record("in an array", &big)),
        long.clone(),
        "\0".repeat(10_000),
        " ".repeat(10_000),
        String::new(),
        "\u{feff}\u{feff}".to_owned() + &record("two marks", &big),
        record("elsewhere", &format!(r#""payload":{{}},"spend":{{"note":{long}}},"x":{long}"#)),
        record("a large object", &format!(r#""payload":{{{}"z":0}}"#, r#""s":"short","#.repeat(1_000))),
        record("a large key", &format!(r#""payload":{{{long}:1}}"#)),
        record("nothing", r#""payload":null,"result":null"#),
    ];
    let mut queue: Vec<u8> = doubts.iter().chain(&lines).flat_map(|line| format!("{line}\n").into_bytes()).collect();
    // Not UTF-8, and at the end something whole that isn't yet.
    let mut broken = record("broken", &big).into_bytes();
    broken[2_000] = 0xff;
    queue.extend([&broken, b"\n".as_slice(), record("no line yet", &big).as_bytes()].concat());
    let place = Place::new(&env, "doubts", queue);
    assert_nothing_moves(&place, &[], &json!({"records_in_doubt": 8, "lone_surrogates": 0}));

    let place = Place::new(&env, "too long", record("long", &big) + "\n" + &record("short", r#""payload":{}"#) + "\n");
    assert_nothing_moves(&place, &["--max-line", "10000"], &json!({"records_in_doubt": 0, "lone_surrogates": 0}));
    assert_nothing_moves(&place, &["--max-bytes", "1MiB"], &json!({"records_in_doubt": 0, "lone_surrogates": 0}));
    assert_eq!(place.offload(&NO_ARGUMENTS)["moved"], json!({"records": 1, "values": 2}));

    // Between them records whose values are moved. All else stays where it stands, byte for byte.
    let shape = Shape::new("moved", r#""payload":{"a":@0}"#, [plain("/payload/a", "m".repeat(9_000))]);
    let all: Vec<&str> = doubts.iter().chain(&lines).map(String::as_str).collect();
    // Each line after one like this.
    let after = |line: &str| [line, &all.join(&format!("\n{line}")), "\n"].concat();
    let place = Place::new(&env, "mixed", after(&shape.with(|moved| moved.json.clone())));
    let report = place.offload(&NO_ARGUMENTS);
    assert_eq!(report["moved"], json!({"records": all.len(), "values": all.len()}));
    assert_eq!(report["kept"], json!({"records_in_doubt": 8, "lone_surrogates": 0}));
    let blobs = place.blobs();
    assert_eq!(blobs.values().collect::<Vec<_>>(), [shape.moved[0].content.as_bytes()]);
    let expected = after(&shape.with(|moved| moved.handle(blobs.keys().next().unwrap(), 1_024)));
    assert_bytes(&place.lines(), expected.as_bytes(), "mixed");
    place.assert_settled(&NO_ARGUMENTS);
}

#[test]
fn strings_that_no_text_says_stay_and_are_counted() {
    let env = TestEnv::new();
    let text = "s".repeat(9_000);
    let mut queue = String::new();
    for lone in [r"\ud83d", r"\uDE00", r"\ud83d\ud83d\ude00", r"\ude00\ud83d", r"\ud83dx\ude00", r"\uD83D\n"] {
        let value = format!("\"{text}{lone}\"");
        queue += &(record("lone", &format!(r#""payload":{{"a":{value},"b":{value}}},"result":{value}"#)) + "\n");
        queue += &(record("short", &format!(r#""payload":{{"a":"{lone}","b":[{{"c":"{lone}"}}]}}"#)) + "\n");
    }
    queue += &(record("a payload", &format!(r#""payload":"{text}\udfff""#)) + "\n");
    let place = Place::new(&env, "lone", &queue);
    assert_nothing_moves(&place, &[], &json!({"records_in_doubt": 0, "lone_surrogates": 19}));

    // Pairs, and what only looks like an escape, are no lone surrogates.
    let values = [
        (r"\ud83d\ude00", "😀"),
        (r"\uD83D\uDe00", "😀"),
        (r"\\ud83d", r"\ud83d"),
        (r"\ufffd", "\u{fffd}"),
        ("\u{fffd}", "\u{fffd}"),
    ];
    let shapes: Vec<Shape> = values
        .iter()
        .map(|(json, content)| {
            Shape::new("pair", r#""payload":{"a":@0}"#, [escaped("/payload/a", json, content, 3_000)])
        })
        .collect();
    // The last two are the same text, written in two ways.
    prove_shapes(&env, "pairs", &shapes, 1_024, &[]);
}

#[test]
fn handles_that_are_there_already_stay() {
    let env = TestEnv::new();
    let handle = old_handle(&"s".repeat(9_000));
    let digest = "ab".repeat(32);
    let reversed = format!(
        r#"{{"summary":"{}","media_type":"image/png","sha256":"{digest}","bytes":0,"artifact_ref":"blob\/ab/{digest}"}}"#,
        r"\ud83d".repeat(2_000)
    );
    let mut queue = String::new();
    for handle in [
        handle.clone(),
        reversed,
        handle.replace(':', " : ").replace(',', "\t,\r"),
        handle.replace("48231", "18446744073709551615"),
        handle.replace("\"bytes\"", r#""\u0062ytes""#),
        handle.replace("text/plain", ""),
    ] {
        for fields in [r#""payload":{"a":@}"#, r#""payload":{"a":1},"result":@"#] {
            queue += &(record("handle", &fields.replace('@', &handle)) + "\n");
        }
    }
    let place = Place::new(&env, "handles", &queue);
    assert_nothing_moves(&place, &[], &json!({"records_in_doubt": 0, "lone_surrogates": 0}));

    // Not quite handles: objects like any other, whose summaries can go.
    let summary = plain("/payload/a/summary", "s".repeat(9_000));
    let shapes: Vec<Shape> = [
        handle.replace("blob/ab", "blob/ba"),
        handle.replace("blob/ab", "/blob/ab"),
        handle.replace("\"sha256\":\"ab", "\"sha256\":\"aa"),
        handle.replace(&digest, &digest.to_uppercase()),
        handle.replace(&digest, &digest[..63]),
        handle.replace("48231", "-48231"),
        handle.replace("48231", "48231.0"),
        handle.replace("48231", "4e4"),
        handle.replace("48231", "\"48231\""),
        handle.replace("48231", "18446744073709551616"),
        handle.replace("48231", "null"),
        handle.replace("\"text/plain\"", "null"),
        handle.replace("{\"", "{\"more\":1,\""),
        handle.replace("\"bytes\":48231", "\"bytes\":48231,\"bytes\":48231"),
        handle.replace("\"bytes\":48231,", ""),
        handle.replace("\"bytes\"", "\"Bytes\""),
    ]
    .iter()
    .map(|object| {
        Shape::new(
            "not quite",
            &format!(r#""payload":{{"a":{}}}"#, object.replace(&summary.json, "@0")),
            [summary.clone()],
        )
    })
    .collect();
    prove_shapes(&env, "not quite", &shapes, 1_024, &[]);
}

#[test]
fn a_payload_or_result_that_became_a_handle_is_left_alone_by_the_next_run() {
    let env = TestEnv::new();
    for (index, arguments) in [
        vec!["--preview-bytes", "16KiB"],
        vec!["--max-bytes", "50"],
        vec!["--max-bytes", "300", "--preview-bytes", "2000"],
    ]
    .into_iter()
    .enumerate()
    {
        let queue = ["payload", "result"]
            .map(|field| record(field, &format!(r#""{field}":{}"#, literal(40_000))) + "\n")
            .concat();
        let place = Place::new(&env, &format!("again-{index}"), queue);
        assert_eq!(place.offload(&arguments)["moved"], json!({"records": 2, "values": 2}), "{arguments:?}");
        place.assert_settled(&arguments);
    }
}

// ------------------------------------------------------------------------------------------------------- one blob each

#[test]
fn the_same_content_is_one_blob() {
    let env = TestEnv::new();
    let content = "what many were told. ".repeat(1_000);
    let lines: Vec<String> =
        (0..200).map(|n| record(&n.to_string(), &format!(r#""payload":{{"a":"{content}"}}"#)) + "\n").collect();
    let place = Place::new(&env, "same", lines.concat());
    let report = place.offload(&NO_ARGUMENTS);
    assert_eq!(report["moved"], json!({"records": 200, "values": 200}));
    assert_eq!(report["blobs"]["written"], json!(1));
    assert_eq!(report["blobs"]["written_bytes"], json!(content.len()));
    let blobs = place.blobs();
    assert_eq!(blobs.values().collect::<Vec<_>>(), [content.as_bytes()]);
    let sha256 = blobs.keys().next().unwrap();
    let path = place.path("blob").join(&sha256[..2]).join(sha256);

    // Long after that somebody says the same: the blob is taken again, and is as good as new to whoever prunes.
    let long_ago = SystemTime::now() - Duration::from_secs(30 * 86_400);
    fs::File::options().append(true).open(&path).unwrap().set_modified(long_ago).unwrap();
    let inode = inode_of(&path);
    fs::write(place.path("queue.jsonl"), [place.queue(), lines[0].clone().into_bytes()].concat()).unwrap();
    let started = SystemTime::now() - Duration::from_secs(2);
    let report = place.offload(&NO_ARGUMENTS);
    assert_eq!(report["moved"], json!({"records": 1, "values": 1}));
    assert_eq!(report["blobs"], json!({"written": 0, "written_bytes": 0, "reused": 1}));
    assert_eq!(place.blobs(), blobs);
    assert_eq!(inode_of(&path), inode, "it was written again");
    assert!(fs::metadata(&path).unwrap().modified().unwrap() > started, "it is as old as before");
}

#[test]
fn what_is_shown_to_people_names_each_value() {
    let env = TestEnv::new();
    let long = literal(9_000);
    let place = Place::new(&env, "shown", record("one", &format!(r#""payload":{{"a":{long},"b":[{long}]}}"#)) + "\n");
    let before = place.state();
    let shown = place.run(&["--dry-run"]);
    assert_eq!(shown.code, Some(0), "{}", shown.stderr);
    let shown = String::from_utf8(shown.stdout).unwrap();
    for pointer in ["/payload/a", "/payload/b/0"] {
        assert_eq!(shown.lines().filter(|line| line.contains(pointer)).count(), 1, "{shown}");
    }
    assert!(place.state() == before, "--dry-run touched something");
}

#[test]
fn a_ledger_is_no_record_however_large() {
    let env = TestEnv::new();
    let names: Vec<String> = (0..50).map(|n| format!("\"{n:0>128}\"")).collect();
    let ledger = format!(
        r#"{{"id":"ledger","ts":1795900000,"kind":"ledger","from":"handoff","to":"","payload":{{"version":1,"totals":{{"roles":[{0}],"kinds":[{0}],"cells":[{{"role":"researcher","kind":"classify","records":7,"done":7,"spend_usd":"0.5"}}]}},"generations":{{}}}},"status":"ledger","result":{1}}}"#,
        names.join(","),
        literal(9_000)
    );
    let place = Place::new(&env, "ledger", ledger.clone() + "\n" + &record("small", r#""payload":{}"#) + "\n");
    assert_nothing_moves(&place, &[], &json!({"records_in_doubt": 0, "lone_surrogates": 0}));
    let long = record("long", &format!(r#""payload":{{"a":{}}}"#, literal(9_000))) + "\n";
    let place = Place::new(&env, "with-ledger", ledger + "\n" + &long);
    let (oversized, before) = place.metrics(&NO_ARGUMENTS);
    assert_eq!(oversized, 1);
    assert_eq!(place.offload(&NO_ARGUMENTS)["moved"], json!({"records": 1, "values": 1}));
    let (oversized, after) = place.metrics(&NO_ARGUMENTS);
    assert_eq!(oversized, 0);
    assert!(after == before, "a counter has changed");
    assert_eq!(place.blobs().values().collect::<Vec<_>>(), ["s".repeat(8_998).as_bytes()]);
}

// -------------------------------------------------------------------------------------------------------------- random

/// A limit and a preview, and how many lines a queue has.
type Settings = (&'static str, &'static str, &'static str);

#[test]
fn random_queues_are_offloaded_as_a_second_program_says() {
    prove_random_queues(1..=15, [("8192", "1024", "20"), ("1000", "100", "40"), ("2000", "1900", "30")]);
}

#[test]
fn random_queues_are_offloaded_so_whatever_the_settings() {
    // Handles that are over the limit themselves; previews of nothing.
    prove_random_queues(16..=30, [("300", "40", "40"), ("64", "0", "40"), ("700", "2000", "40")]);
}

/// Compares what becomes of these queues with what `offload.py` makes of them, and proves that `restore.py` finds all in it again.
fn prove_random_queues(seeds: RangeInclusive<u32>, settings: [Settings; 3]) {
    let env = TestEnv::new();
    let cases: Vec<(u32, Settings)> = seeds.zip(settings.into_iter().cycle()).collect();
    let file = |name: &str, seed: u32| text(env.path(format!("{name}-{seed}")));
    batch(
        &env,
        cases.iter().flat_map(|(seed, (limit, preview, lines))| {
            let settings = ["--max-bytes", limit, "--preview-bytes", preview].map(str::to_owned);
            let random = [file("random", *seed), script("random_offload.py"), seed.to_string()];
            let random = [&random[..], &[settings[1].clone(), settings[3].clone(), (*lines).to_owned()]].concat();
            let expected = [
                file("report", *seed),
                script("offload.py"),
                file("random", *seed),
                file("lines", *seed),
                file("store", *seed),
            ];
            [random, [expected.to_vec(), settings.to_vec()].concat()]
        }),
    );

    let mut seen: BTreeMap<&str, u64> = BTreeMap::new();
    for (seed, (limit, preview, _)) in &cases {
        let arguments = ["--max-bytes", limit, "--preview-bytes", preview];
        let place = Place::new(&env, &format!("seed-{seed}"), fs::read(file("random", *seed)).unwrap());
        let expected: Value = serde_json::from_slice(&fs::read(file("report", *seed)).unwrap()).unwrap();
        let context = format!("seed {seed}, {arguments:?}");
        for (name, count) in [
            ("records", &expected["moved"]["records"]),
            ("values", &expected["moved"]["values"]),
            ("in doubt", &expected["kept"]["records_in_doubt"]),
            ("lone", &expected["kept"]["lone_surrogates"]),
            ("ledgers", &expected["ledger_lines"]),
        ] {
            *seen.entry(name).or_default() += count.as_u64().unwrap();
        }

        let before = place.state();
        let shown = place.offload(&[&["--dry-run"], &arguments[..]].concat());
        assert!(place.state() == before, "{context}: --dry-run touched something");
        for field in ["moved", "kept", "values"] {
            assert_eq!(shown[field], expected[field], "{context}: {field} of --dry-run");
        }
        // The exporter knows the usual preview only.
        let gauge = place.metrics(&arguments[..2]);
        let report = place.offload(&arguments);
        for field in ["moved", "kept"] {
            assert_eq!(report[field], expected[field], "{context}: {field}");
        }
        let written =
            json!({"written": expected["blobs"]["objects"], "written_bytes": expected["blobs"]["bytes"], "reused": 0});
        assert_eq!(report["blobs"], written, "{context}");
        assert_eq!(report["replaced"], json!(true), "{context}: nothing to do, which is no test");

        assert_bytes(&place.lines(), &fs::read(file("lines", *seed)).unwrap(), &context);
        let blobs: BTreeMap<String, Vec<u8>> = WalkDir::new(file("store", *seed))
            .into_iter()
            .map(Result::unwrap)
            .filter(|entry| entry.file_type().is_file())
            .map(|entry| (entry.file_name().to_string_lossy().into_owned(), fs::read(entry.path()).unwrap()))
            .collect();
        assert!(place.blobs() == blobs, "{context}: other blobs");
        let gauge_after = place.metrics(&arguments[..2]);
        assert_eq!(gauge.0, expected["moved"]["records"], "{context}: the gauge before");
        assert_eq!(gauge_after.0, 0, "{context}: the gauge after");
        assert!(gauge_after.1 == gauge.1, "{context}: a counter has changed");
        fs::copy(place.path("queue.jsonl"), file("after", *seed)).unwrap();
    }
    batch(
        &env,
        cases.iter().map(|(seed, ..)| {
            let store = text(env.path(format!("seed-{seed}/blob")));
            vec![file("restored", *seed), script("restore.py"), file("random", *seed), file("after", *seed), store]
        }),
    );
    for (seed, (limit, preview, _)) in &cases {
        let [restored, expected] = ["restored", "report"]
            .map(|name| serde_json::from_slice::<Value>(&fs::read(file(name, *seed)).unwrap()).unwrap());
        assert_eq!(restored["values"], expected["moved"]["values"], "seed {seed}: not as many come back");
        let place = Place { env: &env, name: format!("seed-{seed}") };
        let arguments = ["--max-bytes", limit, "--preview-bytes", preview];
        // What followed the last newline is known to be finished now: the next run makes a line of it, and the one after that judges the line.
        if !fs::read(file("random", *seed)).unwrap().ends_with(b"\n") {
            place.offload(&arguments);
            place.offload(&arguments);
        }
        place.assert_settled(&arguments);
    }
    for (name, least) in [("records", 150), ("values", 250), ("in doubt", 30), ("lone", 3), ("ledgers", 5)] {
        assert!(seen[name] >= least, "the seeds try too little: {seen:?}");
    }
    tell(&format!("{seen:?}"));
}
