#!/usr/bin/env python3
"""What `handoff` replaces: put, take and done as Python workers do them today, one a process.

usage: peer_client.py put|take|done QUEUE ROLE|ID

Put appends without the lock. Take and done read all, and write all anew in place, under the lock. Nothing is flushed to the disk.
"""

import fcntl
import json
import sys
import time
import uuid


def put(queue, role):
    record = {
        "id": str(uuid.uuid4()),
        "ts": int(time.time()),
        "kind": "classify",
        "from": "triage",
        "to": role,
        "payload": {"summary": "an invoice was paid twice"},
        "status": "queued",
    }
    with open(queue, "a", encoding="utf-8") as file:
        file.write(json.dumps(record, separators=(",", ":")) + "\n")
    print(record["id"])


def change(queue, applies, status):
    with open(queue.removesuffix(".jsonl") + ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with open(queue, encoding="utf-8") as file:
            records = [json.loads(line) for line in file]
        changed = next(record for record in records if applies(record))
        changed["status"] = status
        with open(queue, "w", encoding="utf-8") as file:
            file.write("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records))
    print(json.dumps(changed))


def main():
    verb, queue, what = sys.argv[1:]
    if verb == "put":
        put(queue, what)
    elif verb == "take":
        change(queue, lambda record: record["to"] == what and record["status"] == "queued", "running")
    else:
        change(queue, lambda record: record["id"] == what, "done")


main()
