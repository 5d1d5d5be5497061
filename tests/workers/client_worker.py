#!/usr/bin/env python3
"""A worker that uses `handoff` for everything.

usage: client_worker.py put  HANDOFF QUEUE LOG NAME COUNT MOST   puts COUNT records, while fewer than MOST are under way
       client_worker.py take HANDOFF QUEUE LOG TROUBLE           takes and finishes them until standard input has ended and none is queued

The payload's n is NAME-<number>. LOG.put and LOG.take get a line for what is begun and one for what is done: an action, the record's n, its id or -.
A producer that was killed goes on where it was. TROUBLE is the percentage of records with which a taker is in trouble: it refuses
them, ends at once, or has its client killed and ends then. What is put and what has ended is counted in the sizes of the files puts and ends.
"""

import json
import os
import random
import select
import subprocess
import sys
import time


class Log:
    """A file that others read while we write: each entry goes out in one write, to its end."""

    def __init__(self, path):
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, text):
        os.write(self.fd, text.encode())


class Worker:
    def __init__(self, handoff, queue, log):
        self.handoff, self.queue, self.log = handoff, queue, Log(log)
        directory = os.path.dirname(os.path.abspath(queue))
        self.counts = [os.path.join(directory, name) for name in ("puts", "ends")]
        self.puts, self.ends = map(Log, self.counts)

    def note(self, action, n, id="-"):
        self.log.add(f"{action} {n} {id}\n")

    def run(self, verb, *arguments, is_killed=False):
        """Runs the client, or kills it in the middle, and this process with it."""
        command = [self.handoff, verb, "--queue", self.queue, "--lock-timeout", "60s", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        if is_killed:
            time.sleep(random.random() * 0.02)
            process.kill()
            process.wait()
            os._exit(9)
        output, _ = process.communicate()
        return process.returncode, output

    def must(self, verb, *arguments, **options):
        code, output = self.run(verb, *arguments, **options)
        if code != 0:
            sys.exit(f"handoff {verb} {arguments} ended with {code}")
        return output.strip()

    def under_way(self):
        puts, ends = (os.path.getsize(path) for path in self.counts)
        return puts - ends

    def put(self, name, count, most, begun):
        for number in range(begun, count):
            while self.under_way() >= most:
                time.sleep(0.005)
            n = f"{name}-{number}"
            self.note("begin-put", n)
            self.puts.add(".")
            payload = json.dumps({"n": n, "summary": "é" * (number % 40)}, ensure_ascii=False)
            id = self.must("put", "--kind", "classify", "--from", "triage", "--to", "researcher", "--payload", payload)
            self.note("put", n, id)

    def take(self, trouble):
        while True:
            is_over = select.select([sys.stdin], [], [], 0)[0]
            is_trouble = not is_over and random.random() * 100 < trouble
            what = random.choice(["nack", "nack", "no-retry", "exit", "kill-take", "kill-done", "kill-nack"]) if is_trouble else "done"
            code, output = self.run("take", "--role", "researcher", is_killed=what == "kill-take")
            if code == 1 and is_over:
                return
            if code == 1:
                time.sleep(0.02)
                continue
            if code != 0:
                sys.exit(f"handoff take ended with {code}")
            envelope = json.loads(output)
            id, n = envelope["id"], envelope["payload"]["n"]
            self.note("took", n, id)
            if what == "exit":
                os._exit(9)
            if what in ("done", "kill-done"):
                self.note("begin-done", n, id)
                self.must("done", id, "--spend", "0.001", "--result", '{"ok":true}', is_killed=what == "kill-done")
                self.note("done", n, id)
                self.ends.add(".")
            else:
                self.note("begin-nack", n, id)
                retry = ["--no-retry"] if what == "no-retry" else []
                status = self.must("nack", id, "--reason", "in trouble", *retry, is_killed=what == "kill-nack")
                self.note("nack", n, id)
                if status != "queued":
                    self.ends.add(".")


def main():
    action, handoff, queue, log, *more = sys.argv[1:]
    log = f"{log}.{action}"
    if action == "take":
        Worker(handoff, queue, log).take(float(more[0]))
        return
    begun = 0
    if os.path.exists(log):
        with open(log, encoding="utf-8") as file:
            begun = sum(line.startswith("begin-put ") for line in file)
    Worker(handoff, queue, log).put(more[0], int(more[1]), int(more[2]), begun)


if __name__ == "__main__":
    main()
