//! Any bytes as a queue: the line splitter, the envelope parser, the fold and the plan of a compaction.
//!
//! Beside not crashing it checks that chunks change nothing, that a compaction changes no total, and that what counts as JSON is what
//! serde_json takes, and nothing else unless the writers' NaN and Infinity are in it.

#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use queue_format::format::envelope;
use queue_format::format::lines::{LineSplitter, RawLine};
use queue_format::format::malformed::Reason;
use queue_format::format::retention::{Plan, Policy};
use queue_format::format::offload::Rule;
use queue_format::format::spend::Prices;
use queue_format::format::summary::{Parameters, Summary};
use queue_format::format::time::Timestamp;

fuzz_target!(|input: (u8, &[u8])| {
    let (size, queue) = input;
    let parameters = Parameters {
        now: Timestamp::from_micros(1_795_953_600_000_000),
        roles: Vec::new(),
        kinds: Vec::new(),
        prices: Prices::default(),
        offload: Rule::default(),
    };
    let fold = |size: usize| {
        let mut splitter = LineSplitter::new(1_000);
        let mut summary = Summary::new(&parameters);
        for chunk in queue.chunks(size) {
            splitter.push(chunk, |line| summary.add(line, &parameters));
        }
        (summary, splitter.unterminated_bytes())
    };
    assert_eq!(fold(usize::from(size) + 1), fold(queue.len().max(1)));

    let policy = Policy {
        now: parameters.now,
        older_than: Duration::from_secs(86_400),
        roles: Vec::new(),
        kinds: Vec::new(),
        prices: Prices::default(),
    };
    let mut plan = Plan::new(&policy);
    let (mut before, mut after, mut kept) = (Summary::new(&parameters), Summary::new(&parameters), Vec::new());
    let mut splitter = LineSplitter::new(usize::MAX);
    splitter.push(queue, |line| {
        before.add(line, &parameters);
        if let RawLine::Whole(bytes) = line
            && plan.add(line, &policy)
        {
            kept.push(bytes.to_vec());
        }
    });
    assert_eq!(plan.lines(), before.lines);
    let ledger = plan.ledger().to_line(parameters.now).expect("so few names fit");
    for line in std::iter::once(ledger.trim_end().as_bytes()).chain(kept.iter().map(Vec::as_slice)) {
        after.add(RawLine::Whole(line), &parameters);
    }
    let totals = |summary: &Summary| {
        let cells: Vec<_> =
            summary.cells().map(|(role, kind, cell)| (role.to_owned(), kind.to_owned(), cell.totals.clone())).collect();
        let tokens: Vec<_> =
            summary.tokens().map(|(kind, model, tokens)| (kind.to_owned(), model.to_owned(), *tokens)).collect();
        (cells, tokens)
    };
    assert_eq!(totals(&before), totals(&after));

    let mut splitter = LineSplitter::new(usize::MAX);
    splitter.push(queue, |line| {
        let RawLine::Whole(line) = line else { unreachable!("no line is too long") };
        let is_json = match envelope::parse(line) {
            Err(malformed) if malformed.reason == Reason::NotUtf8 => return,
            Err(malformed) => malformed.reason != Reason::NotJson,
            Ok(envelope::Line::Blank) => return,
            Ok(_) => true,
        };
        let non_finite = [&b"NaN"[..], b"Infinity"].iter().any(|word| line.windows(word.len()).any(|part| part == *word));
        let line = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line);
        let expected = serde_json::from_slice::<serde::de::IgnoredAny>(line).is_ok();
        assert!(is_json == expected || is_json && non_finite, "{}", line.escape_ascii());
    });
});
