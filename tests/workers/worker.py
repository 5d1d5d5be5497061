#!/usr/bin/env python3
"""A worker in the manner of those that share handoff queues today. It works until its standard input ends.

usage: worker.py put  QUEUE LOG ROLE    appends records without the lock
       worker.py lput QUEUE LOG ROLE    appends records under the lock
       worker.py take QUEUE LOG ROLE    marks the role's first queued record as running, under the lock, in place

It keeps account in files beside LOG:
LOG.begun and LOG.done   one byte for each put or take, before and after it touches the queue
LOG.waits                microseconds that it waited for the lock, one number a line
LOG.lines                how many lines a take has written back, one number a line, written under the lock
"""

import fcntl
import json
import os
import random
import select
import sys
import time
from contextlib import contextmanager


class Log:
    """Numbers that another process reads while we write them: each goes out in one write, to a file's end."""

    def __init__(self, path):
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, text="."):
        os.write(self.fd, text.encode())


class Worker:
    def __init__(self, queue, log, role):
        self.queue, self.role = queue, role
        self.lock = queue.removesuffix(".jsonl") + ".lock"
        self.begun, self.done = Log(log + ".begun"), Log(log + ".done")
        self.waits, self.lines = Log(log + ".waits"), Log(log + ".lines")
        self.random = random.Random(log)
        self.count = 0

    @contextmanager
    def locked(self):
        with open(self.lock, "a") as lock:
            started = time.monotonic()
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.waits.add(f"{(time.monotonic() - started) * 1e6:.0f}\n")
            yield

    def put(self):
        self.count += 1
        # Mostly short, sometimes more than a page, sometimes more than Python's buffer.
        filler = self.random.choice([0] * 100 + [5_000, 20_000])
        envelope = {
            "id": f"{self.role}-{os.getpid()}-{self.count}",
            "ts": time.time(),
            "kind": "classify",
            "from": "triage",
            "to": self.role,
            "payload": {"summary": "x" * filler},
            "status": "queued",
        }
        self.begun.add()
        with open(self.queue, "a") as queue:
            queue.write(json.dumps(envelope, separators=(",", ":")) + "\n")
        self.done.add()

    def lput(self):
        with self.locked():
            self.put()

    def take(self):
        with self.locked(), open(self.queue, "r+") as queue:
            lines = queue.readlines()
            for number, line in enumerate(lines):
                try:
                    envelope = json.loads(line)
                except ValueError:
                    # Torn by a put that came between an earlier take's truncating and writing: passed over and copied.
                    continue
                if envelope["to"] == self.role and envelope["status"] == "queued":
                    break
            else:
                return
            envelope["status"] = "running"
            lines[number] = json.dumps(envelope, separators=(",", ":")) + "\n"
            self.begun.add()
            queue.seek(0)
            queue.truncate()
            queue.write("".join(lines))
            queue.flush()
            self.lines.add(f"{len(lines)}\n")
            self.done.add()


def main():
    action, queue, log, role = sys.argv[1:]
    worker = Worker(queue, log, role)
    act = getattr(worker, action)
    # Puts come in bursts, so that many fall into one reading; the pauses keep the queue small.
    burst, pause = (1, 0.02) if action == "take" else (5, 0.1)
    while not select.select([sys.stdin], [], [], pause * worker.random.random())[0]:
        for _ in range(burst):
            act()


if __name__ == "__main__":
    main()
