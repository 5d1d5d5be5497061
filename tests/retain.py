#!/usr/bin/env python3
"""Decides a second time which lines a compaction removes, from src/FORMAT.md alone, to check handoff-compact.

It reads lines as recount.py does and shares no code with the Rust side. Times are integers in microseconds.

usage: retain.py QUEUE [--now RFC3339] [--older-than SECONDS] [--max-line N] [--kept FILE]

Prints a JSON object: how many lines go and how many stay, for which reasons. With --kept, FILE gets the lines that stay, byte
for byte and in their order, without ledger lines and without what follows the last newline.
The lock is not taken and late lines in earlier generations are not looked at.
"""

import argparse
import json
import os
import sys
import time

# Run by workers/batch.py, this folder is not where Python looks for modules.
HERE = os.path.dirname(os.path.abspath(__file__))
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from recount import Malformed, doubt_of, line_of, micros_of_text, number_of_nacks, present, read, time_of, whole_lines  # noqa: E402

MALFORMED = ("too_long", "not_utf8", "not_json", "unsupported_version", "not_an_envelope")
DOUBTS = ("duplicate_key", "non_finite_number", "lone_surrogate", "unreadable_time", "unreadable_nacks")
OPEN = ("queued", "running", "nack", "human", "dead")
DONE = ("nacked", "future_time", "recent", "contradictory_times")
REASONS = (*MALFORMED, "blank", *DOUBTS, *OPEN, "unknown_status", *DONE)
LIMIT = 14 * 86_400


def reason_to_keep(doc, now, limit):
    """Why a record stays, or None if it goes."""
    doubt = doubt_of(doc)
    if doubt:
        return doubt
    status = doc.text(doc.root.value["status"])
    if status != "done":
        return status if status in OPEN else "unknown_status"
    if number_of_nacks(doc) > 0:
        return "nacked"
    ts, started, finished = (time_of(doc, present(doc.root, name)) for name in ("ts", "started_ts", "finished_ts"))
    times = [t for t in (ts, started, finished) if t is not None]
    if any(t > now for t in times):
        return "future_time"
    if (ts if finished is None else finished) + limit >= now:
        return "recent"
    return "contradictory_times" if any(t + limit >= now for t in times) else None


def retain(data, now, limit, max_line):
    """What is printed, and the lines that stay."""
    reasons = dict.fromkeys(REASONS, 0)
    removed = {"records": 0, "bytes": 0}
    lines = whole_lines(data)
    kept, ledger_lines, oldest = [], 0, None
    for line in lines:
        ts = None
        try:
            what, doc, _ = line_of(line, max_line)
            if what == "ledger":
                ledger_lines += 1
                continue
            reason = what
            if what == "record":
                reason = reason_to_keep(doc, now, limit)
                ts = time_of(doc, doc.root.value["ts"])
        except Malformed as e:
            reason = e.reason
        if reason is None:
            removed["records"] += 1
            removed["bytes"] += len(line) + 1
            continue
        kept.append(line + b"\n")
        reasons[reason] += 1
        if ts is not None:
            oldest = ts if oldest is None else min(ts, oldest)
    report = {
        "lines": len(lines),
        "removed": removed,
        "kept": {
            "lines": len(kept),
            "bytes": sum(len(line) for line in kept),
            "reasons": reasons,
            "oldest_timestamp_seconds": None if oldest is None else oldest / 1_000_000,
        },
        "ledger_lines": ledger_lines,
    }
    return report, kept


def main(argv=None):
    parser = argparse.ArgumentParser(description="Decide again which lines a compaction removes, from the format's description alone.")
    parser.add_argument("queue")
    parser.add_argument("--now")
    parser.add_argument("--older-than", type=int, default=LIMIT, metavar="SECONDS")
    parser.add_argument("--max-line", type=int, default=64 << 20)
    parser.add_argument("--kept", metavar="FILE")
    args = parser.parse_args(argv)
    now = time.time_ns() // 1000 if args.now is None else micros_of_text(args.now)
    if now is None:
        parser.error("--now is not an RFC 3339 time")
    data, _ = read(args.queue)
    report, kept = retain(data, now, args.older_than * 1_000_000, args.max_line)
    print(json.dumps(report, indent=2))
    if args.kept:
        with open(args.kept, "wb") as out:
            out.writelines(kept)


if __name__ == "__main__":
    main()
