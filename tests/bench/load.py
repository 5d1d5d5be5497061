#!/usr/bin/env python3
"""What is lost under load: 2 producers and 1 consumer at full speed, 4,000 records.

usage: load.py HANDOFF [RECORDS [RUNS]]     HANDOFF: the client, target/release/handoff

Unlike the original, the old consumer passes over a torn line instead of failing at it for ever. Four pairs of producers and consumers: the old put and take (tests/workers/old_worker.py), the old put beside `handoff take`, `handoff put`
beside the old take, and `handoff` alone. A record is lost if it was put without an error, was not taken, and is not in the queue in the end.
"""

import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORKERS = Path(__file__).resolve().parent.parent / "workers"
PRODUCERS = 2


def entries(path, *actions):
    """What a log has: each line's only word, or the record of each that tells of one of these actions."""
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [words[-1] if not actions else words[1] for words in lines if not actions or words[0] in actions]


def left(queue):
    """The records that are in the queue, and how many lines are none."""
    there, torn = set(), 0
    for path in [queue, *queue.parent.glob("queue.gen.*")]:
        for line in path.read_bytes().split(b"\n"):
            try:
                there.add(json.loads(line)["payload"]["n"])
            except ValueError:
                torn += path == queue and bool(line.strip())
            except (KeyError, TypeError):
                pass  # the ledger
    return there, torn


def run(handoff, new_put, new_take, records):
    with tempfile.TemporaryDirectory() as directory:
        queue = Path(directory, "queue.jsonl")
        queue.touch()
        log = Path(directory, "log")

        def start(is_new, action, name, *more):
            script = WORKERS / ("client_worker.py" if is_new else "old_worker.py")
            tool = [handoff] if is_new else []
            command = [sys.executable, script, action, *tool, queue, log if is_new else f"{log}.{action}", *more]
            return subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, process_group=0)

        started = time.monotonic()
        consumer = start(new_take, "take", "consumer", *([0] if new_take else []))
        producers = []
        for number in range(PRODUCERS):
            log = Path(directory, f"log{number}")
            limit = [10**9] if new_put else [0]
            producers.append(start(new_put, "put", number, f"p{number}", records // PRODUCERS, *limit))
        for producer in producers:
            if producer.wait() != 0:
                sys.exit("a producer failed")
        consumer.stdin.close()
        if consumer.wait() != 0:
            sys.exit("the consumer failed")
        took = time.monotonic() - started
        put = [n for number in range(PRODUCERS) for n in entries(Path(directory, f"log{number}.put"), *(["put"] if new_put else []))]
        taken = entries(Path(directory, "log.take"), *(["took"] if new_take else []))
        there, torn = left(queue)
        lost = set(put) - set(taken) - there
        twice = sum(count > 1 for count in collections.Counter(taken).values())
        return len(put), len(lost), twice, torn, took


def main():
    handoff = os.path.abspath(sys.argv[1])
    records, runs = (list(map(int, sys.argv[2:])) + [4_000, 3][len(sys.argv) - 2 :])[:2]
    for name, new_put, new_take in [
        ("old put, old take", False, False),
        ("old put, handoff take", False, True),
        ("handoff put, old take", True, False),
        ("handoff put, handoff take", True, True),
    ]:
        for _ in range(runs):
            put, lost, twice, torn, took = run(handoff, new_put, new_take, records)
            print(f"{name}: {lost} of {put} lost, {twice} taken twice, {torn} torn lines, {took:.1f} s", flush=True)


if __name__ == "__main__":
    main()
