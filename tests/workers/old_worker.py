#!/usr/bin/env python3
"""A worker with the put and take that handoff queues began with: put appends without the lock, take rewrites in place under it.

usage: old_worker.py put  QUEUE LOG NAME COUNT PAUSE   puts COUNT records for the role researcher, with up to PAUSE seconds in between
       old_worker.py take QUEUE LOG                    takes its records until standard input has ended and nothing is queued

The payload's n is NAME-<number>. LOG gets one line for each record that was put or taken: its n. Unlike the original, which fails at a torn
line again and again, take passes over it.
"""

import fcntl
import json
import os
import random
import select
import sys
import time
import uuid
from pathlib import Path


def put(queue, n):
    envelope = {
        "id": str(uuid.uuid4()),
        "ts": int(time.time()),
        "kind": "classify",
        "from": "triage",
        "to": "researcher",
        "payload": {"n": n},
        "status": "queued",
    }
    with queue.open("a", encoding="utf-8") as file:
        file.write(json.dumps(envelope, separators=(",", ":")) + "\n")


def take(queue):
    lock = queue.with_suffix(".lock")
    lock.touch(exist_ok=True)
    with lock.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = queue.read_text(encoding="utf-8").splitlines() if queue.exists() else []
        kept, taken = [], None
        for line in lines:
            try:
                envelope = json.loads(line)
            except ValueError:
                kept.append(line)
                continue
            if taken is None and envelope["to"] == "researcher" and envelope["status"] == "queued":
                envelope["status"] = "running"
                taken = envelope
            kept.append(json.dumps(envelope, separators=(",", ":")))
        queue.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        return taken


def main():
    action, queue, log, *more = sys.argv[1:]
    queue, log = Path(queue), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(n):
        os.write(log, f"{n}\n".encode())

    if action == "put":
        name, count, pause = more[0], int(more[1]), float(more[2])
        for number in range(count):
            put(queue, f"{name}-{number}")
            note(f"{name}-{number}")
            if pause:
                time.sleep(random.random() * pause)
        return
    while True:
        is_over = select.select([sys.stdin], [], [], 0)[0]
        taken = take(queue)
        if taken is not None:
            note(taken["payload"]["n"])
        elif is_over:
            return
        else:
            time.sleep(0.001)


if __name__ == "__main__":
    main()
