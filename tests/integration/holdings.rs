//! What a queue holds, its earlier generations included, read as src/FORMAT.md has it.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde_json::Value;

use crate::test_env::{TestEnv, names_in};

pub(crate) fn is_ledger(line: &[u8]) -> bool {
    line.starts_with(br#"{"id":"ledger","#)
}

/// Bytes cut at each `\n`; what follows the last one is a piece too if there is anything.
pub(crate) fn pieces(bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut pieces: Vec<_> = bytes.split(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
    pieces.pop_if(|end| end.is_empty());
    pieces
}

/// All lines, but ledger lines, of the queue and of its generations from their offsets on, with unterminated ends.
pub(crate) fn holdings(env: &TestEnv, context: &str) -> Vec<Vec<u8>> {
    held_in(&env.path("")).unwrap_or_else(|problem| panic!("{context}: {problem}"))
}

/// The same in any directory, or what is wrong there.
pub(crate) fn held_in(directory: &Path) -> Result<Vec<Vec<u8>>, String> {
    let queue = directory.join("queue.jsonl");
    let read = |path: &Path| fs::read(path).map_err(|error| format!("{}: {error}", path.display()));
    let (ledgers, mut lines): (Vec<_>, Vec<_>) = pieces(&read(&queue)?).into_iter().partition(|line| is_ledger(line));
    let mut offsets = BTreeMap::new();
    for ledger in ledgers {
        let ledger: Value = serde_json::from_slice(&ledger).map_err(|error| format!("a ledger line: {error}"))?;
        for (number, offset) in ledger["payload"]["generations"].as_object().ok_or("a ledger line without offsets")? {
            let largest = offsets.entry(number.clone()).or_insert(0);
            *largest = offset.as_u64().unwrap().max(*largest);
        }
    }
    for name in names_in(directory) {
        let Some(number) = name.strip_prefix("queue.gen.") else { continue };
        let path = directory.join(&name);
        if fs::metadata(&path).unwrap().ino() == fs::metadata(&queue).unwrap().ino() {
            continue;
        }
        let offset = offsets.get(number).ok_or_else(|| format!("no ledger lists {name}"))?;
        let late = read(&path)?.get(usize::try_from(*offset).unwrap()..).map(pieces);
        lines.extend(late.ok_or_else(|| format!("{name} is shorter than its offset"))?);
    }
    Ok(lines)
}

pub(crate) fn sorted(mut lines: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    lines.sort();
    lines
}

pub(crate) fn assert_same_lines(actual: Vec<Vec<u8>>, expected: Vec<Vec<u8>>, context: &str) {
    let (actual, expected) = (sorted(actual), sorted(expected));
    let text = |lines: &[Vec<u8>]| lines.iter().map(|line| String::from_utf8_lossy(line) + "\n").collect::<String>();
    assert!(actual == expected, "{context}: the lines are\n{}and not\n{}", text(&actual), text(&expected));
}
