//! What the README tells people to do with handles, done.

use std::fs;

use serde_json::Value;

use crate::test_env::{TestEnv, python, readme_block, record, run, tool};

const TEXT: &str = "a line\nwith \"quotes\", é and \u{0} \r\n";

/// A queue of which a long text and a long list have been moved, and the records that it had.
fn offloaded(env: &TestEnv) -> Vec<Value> {
    let text = serde_json::to_string(&TEXT.repeat(1_000)).unwrap();
    let list = serde_json::to_string(&(0..3_000).collect::<Vec<u32>>()).unwrap();
    let payload = format!(r#"{{"summary":"s","tool_result":{text},"rows":[1,{{"all":{list}}}]}}"#);
    let queue = record("small", "r", "queued") + &record("large", "r", "queued").replace("{}", &payload) + "not json\n";
    env.write("queue.jsonl", &queue);
    let moved = run(env.bare_offload().args(["--queue", "queue.jsonl", "--textfile-dir", "textfile", "--json"]));
    assert_eq!(moved.code, Some(0), "{}", moved.stderr);
    assert_eq!(serde_json::from_slice::<Value>(&moved.stdout).unwrap()["moved"]["values"], 2);
    records(&queue)
}

fn records(queue: &str) -> Vec<Value> {
    let records = queue.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    records.filter(|record| record["kind"] != "ledger").collect()
}

#[test]
fn agents_read_blobs_as_the_readme_says_and_are_not_led_elsewhere() {
    let env = TestEnv::new();
    let before = offloaded(&env);
    let use_it = r#"
import os
record = [json.loads(line) for line in open("queue.jsonl") if '"large"' in line][0]
payload = record["payload"]
print(json.dumps([blob(payload["tool_result"], "."), blob(payload["rows"][1]["all"], ".")]))
handle = payload["tool_result"]
for change in {"artifact_ref": "/etc/passwd"}, {"sha256": "../" * 21 + "x"}, {"sha256": "0" * 64}:
    try:
        blob({**handle, **change}, ".")
        print("believed", change)
    except ValueError:
        pass
path = handle["artifact_ref"]
os.chmod(path, 0o600)
with open(path, "r+b") as file:
    file.write(b"?")
try:
    print("believed", blob(handle, "."))
except ValueError as error:
    print(error)
"#;
    env.write("agent.py", readme_block("**An agent that reads payloads", "```python\n") + use_it);
    let read = run(env.command(python()).arg("agent.py"));
    assert_eq!(read.code, Some(0), "{}", read.stderr);
    let output = String::from_utf8(read.stdout).unwrap();
    let (values, rest) = output.split_once('\n').unwrap();
    let values: Vec<Value> = serde_json::from_str(values).unwrap();
    let payload = &before[1]["payload"];
    assert_eq!(values, [payload["tool_result"].clone(), payload["rows"][1]["all"].clone()]);
    assert_eq!(rest, "the blob is damaged\n");
}

#[test]
fn values_go_back_into_the_lines_as_the_readme_says() {
    let env = TestEnv::new();
    let before = offloaded(&env);
    let recipe = readme_block("**Way back.**", "```console\n");
    let script: String = recipe.lines().map(|line| line.trim_start_matches("$ ").to_owned() + "\n").collect();
    env.write("way_back.sh", script.replace("/var/lib/agents", "."));
    let back = run(env.command(tool("sh", "dash")).args(["-e", "way_back.sh"]));
    assert_eq!((back.code, back.stderr.as_str()), (Some(0), ""));
    let after = fs::read_to_string(env.path("queue.jsonl")).unwrap();
    assert_eq!(records(&after), before);
    assert!(after.contains("\nnot json\n"));
    // There is still one ledger, and the values move again. Python writes lists with spaces: that is another blob.
    let again = run(env.bare_offload().args(["--queue", "queue.jsonl", "--textfile-dir", "textfile", "--json"]));
    let again: Value = serde_json::from_slice(&again.stdout).unwrap();
    assert_eq!((&again["moved"]["values"], &again["blobs"]["reused"]), (&Value::from(2), &Value::from(1)));
}
