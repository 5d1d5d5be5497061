#!/usr/bin/env python3
"""A worker that races with compaction and offload and keeps account of every line. It works until its standard input ends.

usage: racer.py [--large] ACTION …         with --large, many lines have values that offload moves, some of them the same ones

       racer.py put  QUEUE LOG ROLE        appends without the lock: in one write or several, at once or when the queue has been replaced
       racer.py lput QUEUE LOG ROLE        appends under the lock
       racer.py take QUEUE LOG ROLE        marks the role's first queued record as running, under the lock, in place
       racer.py stop QUEUE LOG ROLE WHERE  stops itself (SIGSTOP) before the line (WHERE is open) or in it (line); ends when it has gone on
       racer.py die  QUEUE LOG ROLE        appends in pieces with pauses, killed (SIGKILL) at random moments and begun anew, with LOG-1, LOG-2 …

It keeps account in files beside LOG. Times are those of the monotonic clock, in nanoseconds.
LOG.begun and LOG.done   one byte for each put, before and after it touches the queue
LOG.account              B INODE TORN LINE        a put has opened the queue, TORN (1 or 0) if that ended in the middle of a line, and will
                                                  write LINE
                         W FROM TO                it has written some of it in that time
                         E                        it has closed the queue
                         T FROM TO INODE IDS      a take has read and rewritten the file in that time, and read the records IDS, those
                                                  left out that a take before it has read
accounts/LOG             SHA256 JSON              what a blob with this name holds that a value of the next line may become, and the value;
                                                  in a directory of its own, for a hash beside the queue is a reference
"""

import fcntl
import hashlib
import json
import os
import random
import select
import signal
import sys
import time
from contextlib import contextmanager

# When records that may go were queued, in milliseconds.
OLD = 1_600_000_000_000
# How long a put waits at most for the queue to be replaced.
PATIENCE = 0.3
# Longer values are moved by offload.
LIMIT = 8192


class Log:
    """What another process reads while we write: each piece goes out in one write, to a file's end."""

    def __init__(self, path):
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def __del__(self):
        os.close(self.fd)

    def add(self, text="."):
        os.write(self.fd, text.encode())


class Turn:
    """What producers do to each other is not compaction's fault, so they keep out of each other's way: nobody has the queue open while
    another is in the middle of a line. Compaction knows nothing of it."""

    def __init__(self, alone):
        self.file = open("turns", "a")
        fcntl.flock(self.file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)

    def end(self):
        self.file.close()


def large_values(value):
    """The values in this one, and itself, whose JSON text is so long that offload may move them."""
    text = json.dumps(value, separators=(",", ":"))
    if len(text) <= LIMIT:
        return
    yield value if isinstance(value, str) else text, text
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for value in inner:
        yield from large_values(value)


class Racer:
    def __init__(self, queue, log, role, large=False):
        self.queue, self.log, self.role, self.large = queue, log, role, large
        self.contents = Log(f"accounts/{log}") if large else None
        self.lock = queue.removesuffix(".jsonl") + ".lock"
        self.begun, self.done, self.account = Log(log + ".begun"), Log(log + ".done"), Log(log + ".account")
        self.random = random.Random(log)
        self.count = 0
        self.read = set()

    def envelope(self):
        """About half may go. Each of these was worked on for another number of milliseconds."""
        self.count += 1
        number = self.count
        # Mostly short, sometimes more than a page, sometimes more than Python's buffer.
        filler = self.random.choice([0] * 60 + [300] * 30 + [5_000] * 2 + [9_000] * 4 + [20_000] * 4)
        envelope = {
            "id": f"{self.log}-{number}",
            "ts": OLD + number,
            "kind": self.random.choice(["classify", "draft_reply"]),
            "from": "triage",
            "to": self.role,
        }
        if self.random.random() < 0.5:
            more = {
                "status": "done",
                "started_ts": OLD + 10_000 + number,
                "finished_ts": OLD + 10_000 + 3 * number,
                "spend": [{"model": "m-1", "cost_usd": 0.0001 * number, "input_tokens": number}],
            }
        else:
            # These stay for ever, so few of them are long.
            filler = filler if self.random.random() < 0.2 else min(filler, 300)
            more = self.random.choice(
                [{"status": "queued"}] * 6
                + [{"status": "nack", "nacks": 1}, {"status": "human"}, {"status": "dead"}, {"status": "done", "nacks": 2}]
            )
        payload = {"summary": "x" * filler}
        if self.large:
            if self.random.random() < 0.3:
                payload = self.random.choice([self.same, self.text, self.rows, self.nested])(number)
            for content, text in large_values(payload):
                self.contents.add(f"{hashlib.sha256(content.encode()).hexdigest()} {text}\n")
        return {**envelope, "payload": payload, **more}

    # Payloads with values that are moved.

    def same(self, number):
        """One of a few that all producers have."""
        return {"summary": "the same", "tool_result": "the same again; " * self.random.choice([600, 700, 800])}

    def text(self, number):
        return {"summary": "a text", "tool_result": f'"{self.log}" – {number}\t😀\n' * 800}

    def rows(self, number):
        return {"rows": [[self.log, number, row, "\u00e9"] for row in range(600)], "kept": {"summary": "rows"}}

    def nested(self, number):
        text = f"{self.log} and {number} " * 700
        return {"outer": [{"inner": {"one": text, "again": text}}, "x" * 9_000, number]}

    def open(self, line):
        """Opens the queue to append a line to it, and says so."""
        queue = open(self.queue, "a")
        inode = os.fstat(queue.fileno()).st_ino
        self.account.add(f"B {inode} {self.is_torn(queue)} {line}\n")
        self.begun.add()
        return queue

    def is_torn(self, queue):
        # This very file, whatever its name leads to by now.
        with open(f"/proc/self/fd/{queue.fileno()}", "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            return int(file.read(1) not in (b"", b"\n"))

    def ended(self):
        self.account.add("E\n")
        self.done.add()

    @contextmanager
    def writing(self, queue):
        began = time.monotonic_ns()
        yield
        queue.flush()
        self.account.add(f"W {began} {time.monotonic_ns()}\n")

    def is_replaced(self, queue):
        return os.stat(self.queue).st_ino != os.fstat(queue.fileno()).st_ino

    def wait_for_replacement(self, queue):
        deadline = time.monotonic() + PATIENCE
        while not self.is_replaced(queue) and time.monotonic() < deadline:
            time.sleep(0.002)

    def put(self):
        how = self.random.choice([self.whole] * 6 + [self.in_two, self.dump] * 3 + [self.late] * 2 + [self.late_rest])
        self.append(how, Turn(alone=how not in (self.whole, self.late)))

    def lput(self):
        with self.locked():
            self.append(self.random.choice([self.whole, self.in_two, self.dump]), None)

    def append(self, how, turn):
        envelope = self.envelope()
        line = json.dumps(envelope, separators=(",", ":"))
        with self.open(line) as queue:
            how(queue, line, envelope, turn)
        if turn:
            turn.end()
        self.ended()

    # The ways to write a line. Beyond Python's buffer of 8 KiB, `in_two` takes two system calls and `dump` three.

    def whole(self, queue, line, envelope, turn):
        with self.writing(queue):
            queue.write(line + "\n")

    def in_two(self, queue, line, envelope, turn):
        with self.writing(queue):
            queue.write(line)
            queue.write("\n")

    def dump(self, queue, line, envelope, turn):
        with self.writing(queue):
            json.dump(envelope, queue, separators=(",", ":"))
            queue.write("\n")

    def late(self, queue, line, envelope, turn):
        self.wait_for_replacement(queue)
        self.whole(queue, line, envelope, turn)

    def late_rest(self, queue, line, envelope, turn):
        half = self.random.randrange(len(line))
        with self.writing(queue):
            queue.write(line[:half])
        self.wait_for_replacement(queue)
        if self.is_replaced(queue):
            # From now on nobody else opens this file, so the others need not wait for us: they write into the new one.
            turn.end()
            time.sleep(0.03 * self.random.random())
        self.whole(queue, line[half:], envelope, turn)

    @contextmanager
    def locked(self):
        with open(self.lock, "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def take(self):
        with self.locked():
            began = time.monotonic_ns()
            with open(self.queue, "r+") as queue:
                inode = os.fstat(queue.fileno()).st_ino
                lines = queue.readlines()
                ids, found = [], False
                for number, line in enumerate(lines):
                    try:
                        envelope = json.loads(line)
                    except ValueError:
                        # Torn by an earlier take: passed over and copied.
                        continue
                    if envelope["id"] not in self.read:
                        ids.append(envelope["id"])
                    if not found and envelope["to"] == self.role and envelope["status"] == "queued":
                        found = True
                        envelope["status"] = "running"
                        lines[number] = json.dumps(envelope, separators=(",", ":")) + "\n"
                if not found:
                    return
                queue.seek(0)
                queue.truncate()
                queue.write("".join(lines))
                queue.flush()
            self.read.update(ids)
            self.account.add(f"T {began} {time.monotonic_ns()} {inode} {','.join(ids)}\n")

    def stop(self, where):
        line = json.dumps(self.envelope(), separators=(",", ":"))
        half = {"open": 0, "line": len(line) // 2}[where]
        with self.open(line) as queue:
            with self.writing(queue):
                queue.write(line[:half])
            print("about to stop", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
            with self.writing(queue):
                queue.write(line[half:] + "\n")
        self.ended()

    def put_slowly(self):
        line = json.dumps(self.envelope(), separators=(",", ":"))
        with self.open(line) as queue:
            text = line + "\n"
            cuts = sorted(self.random.randrange(len(text)) for _ in range(self.random.randrange(5)))
            # Often the newline alone is late.
            cuts += [len(line)] if self.random.random() < 0.5 else []
            for start, end in zip([0, *cuts], [*cuts, len(text)]):
                with self.writing(queue):
                    queue.write(text[start:end])
                time.sleep(0.002 * self.random.random())
        self.ended()


def die(queue, log, role):
    """One life after the other, until standard input ends."""
    rng = random.Random(log)
    lives = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        lives += 1
        racer = Racer(queue, f"{log}-{lives}", role)
        child = os.fork()
        if not child:
            while True:
                racer.put_slowly()
        time.sleep(0.02 * rng.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def main():
    large = sys.argv[1] == "--large"
    action, queue, log, role, *where = sys.argv[2:] if large else sys.argv[1:]
    if action == "die":
        die(queue, log, role)
        return
    racer = Racer(queue, log, role, large)
    if action == "stop":
        racer.stop(*where)
        return
    act = getattr(racer, action)
    # Puts come in bursts, so that many fall into one compaction; the pauses keep the queue small.
    burst, pause = (1, 0.03) if action == "take" else (4, 0.15)
    while not select.select([sys.stdin], [], [], pause * racer.random.random())[0]:
        for _ in range(burst):
            act()


if __name__ == "__main__":
    main()
