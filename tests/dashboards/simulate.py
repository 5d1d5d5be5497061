"""A week of two boxes, as Prometheus would have scraped it: the real exporter, compaction and offload run on a simulated queue.

Every quarter of an hour the queue becomes what it is by then, the tools run with `--now`, and their files are read, as node_exporter
would. node_exporter's own series are made up. What happened is kept apart from the queue, so that figures can be counted again.
"""

import fcntl
import json
import os
import random
import re
import subprocess
import uuid
from collections import Counter
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path

START = 1_795_392_000  # 2026-11-23T00:00:00Z
DAY, HOUR, STEP = 86400, 3600, 900
END = START + 7 * DAY
DIRECTORY = "/var/lib/prometheus/node-exporter"
ROLES = ("triage", "researcher", "patcher", "reviewer")
KINDS = ("classify", "draft_reply", "file_bug", "request_human")
KIND_OF = {"triage": "classify", "researcher": "classify", "patcher": "file_bug", "reviewer": "draft_reply"}
PRICE = {"claude-sonnet-4-5": (Decimal("0.000003"), Decimal("0.000015")), "claude-haiku-4-5": (Decimal("0.000001"), Decimal("0.000005"))}
MODEL_OF = {"triage": "claude-haiku-4-5"}


def at(day, hour, minute=0):
    return START + day * DAY + hour * HOUR + minute * 60


class Job:
    """A record: what is put, and what becomes of it when. `spend` is in USD; None is a response without a known cost."""

    def __init__(self, box, put, role, kind=None, wait=60, run=240, outcome="done", nacks=0, spend="0.02", more=()):
        self.role, self.kind = role, kind or KIND_OF[role]
        self.id = str(uuid.UUID(int=box.random.getrandbits(128), version=4))
        payload = {"summary": f"ticket {box.random.randrange(10_000)}"} | dict(more)
        record = {"id": self.id, "ts": put, "kind": self.kind, "from": "intake", "to": role, "payload": payload, "status": "queued", "protocol_version": 2}
        self.events = [(put, record)]
        self.nacks, self.spent, self.unpriced = [], Decimal(0), spend is None
        time = put
        for _ in range(nacks):
            time += wait + run
            self.nacks.append({"ts": time, "by": role, "reason": "rate limited", "error_class": "rate_limited", "retryable": True})
            self.events.append((time, {"status": "queued" if len(self.nacks) == 1 else "human", "nacks": list(self.nacks)}))
        if outcome == "queued":
            return
        if nacks < 2:
            time += wait
            self.started = time
            self.events.append((time, {"status": "running", "started_ts": time}))
            if outcome == "running":
                return
            time += run
        elif outcome == "human":
            return
        else:
            time += 4 * HOUR
        model = MODEL_OF.get(role, "claude-sonnet-4-5")
        entry = {"id": "msg_" + self.id[:13], "model": model, "provider": "anthropic", "input_tokens": 2000, "output_tokens": 500,
                 "cache_read_input_tokens": 8000, "cache_creation_input_tokens": 300}
        if spend is None:
            entry["model"] = "a-model-without-a-price"
        else:
            entry["cost_usd"] = spend
            self.spent = Decimal(spend)
        self.events.append((time, {"status": outcome, "finished_ts": time, "result": {"ok": outcome == "done"}, "spend": [entry]}))

    def status(self, now):
        """What it is by then, if it is."""
        found = None
        for time, changes in self.events:
            if time <= now:
                found = changes["status"]
        return found

    def finished(self):
        return self.events[-1][0] if self.events[-1][1]["status"] in ("done", "dead") else float("inf")


class Box:
    def __init__(self, directory, bin, instance, seed, begin):
        self.directory, self.bin, self.instance, self.begin = Path(directory), Path(bin), instance, begin
        self.random = random.Random(seed)
        self.jobs, self.metrics = [], []
        self.textfiles = self.directory / "textfiles"
        self.textfiles.mkdir(parents=True)
        self.queue, self.lock = self.directory / "queue.jsonl", self.directory / "queue.lock"
        self.queue.touch()
        self.lock.touch()
        self.ran = {}

    def everyday(self):
        """Work as it comes on any day: a ticket every 12 minutes or so, and all that follows from it."""
        time = self.begin + 60
        while time < END - 60:
            self.add(time, "triage", run=self.random.randrange(20, 90), spend=f"0.00{self.random.randrange(100, 999)}")
            more = self.random.random()
            if more < 0.6:
                self.add(time + 200, "researcher", run=self.random.randrange(120, 900), nacks=self.random.random() < 0.05, spend=f"0.0{self.random.randrange(100, 999)}",
                         more={"tool_result": "x" * 20_000} if more < 0.05 else {})
            if more < 0.3:
                self.add(time + 1300, "reviewer", run=self.random.randrange(60, 400), spend=f"0.0{self.random.randrange(100, 999)}")
            time += self.random.randrange(400, 1100)

    def patches(self, asleep):
        """Work for the patcher every half hour, whom nobody helps while they are asleep."""
        begin, end = asleep
        for time in range(self.begin + 600, END - 1800, 1800):
            wait = end + 60 - time if begin <= time < end else 120
            self.add(time, "patcher", wait=wait, run=300)

    def add(self, put, role, **more):
        if put < END:
            self.jobs.append(Job(self, put, role, **more))
        return self.jobs[-1]

    def run(self, tool, now, *arguments, wait="10s", code=0):
        environment = {"PATH": os.environ["PATH"], "HANDOFF_QUEUE": str(self.queue), "HANDOFF_ROLES": ",".join(ROLES), "HANDOFF_KINDS": ",".join(KINDS),
                       "HANDOFF_LOCK_TIMEOUT": wait}
        run = subprocess.run([self.bin / tool, *arguments, "--now", rfc3339(now)], env=environment, capture_output=True, text=True)
        assert run.returncode == code, f"{tool} {arguments} at {now}: {run.returncode}: {run.stderr}"
        return run

    def become(self, now, junk):
        """Writes into the queue what has happened by now; lines that don't change stay as they are."""
        changes, new = {}, []
        for job in self.jobs:
            due = [changes for time, changes in job.events if now - STEP < time <= now]
            if due and "id" in due[0]:
                new.append(json.dumps({key: value for each in due for key, value in each.items()}))
            elif due:
                changes[job.id] = {key: value for each in due for key, value in each.items()}
        lines = self.queue.read_text().splitlines()
        for number, line in enumerate(lines):
            found = re.match(r'\{"id": ?"([^"]*)"', line)
            if found and found[1] in changes:
                lines[number] = json.dumps(json.loads(line) | changes[found[1]])
        self.queue.write_text("".join(line + "\n" for line in lines + new + junk))

    def tick(self, now, compacts=False, offloads=True, locked=False, junk=(), served=True):
        self.become(now, list(junk))
        if compacts:
            self.run("handoff-compact", now, "--quiet", "--older-than", "1d", "--textfile-dir", str(self.textfiles))
            self.ran["handoff_compact"] = now
        if offloads:
            self.run("handoff-offload", now, "--quiet", "--textfile-dir", str(self.textfiles))
            self.ran["handoff_offload"] = now
        with open(self.lock) as lock:
            if locked:
                fcntl.flock(lock, fcntl.LOCK_EX)
            self.run("handoff-exporter", now, "--quiet", "--textfile-dir", str(self.textfiles), wait="10ms" if locked else "10s", code=75 if locked else 0)
        self.ran["handoff"] = now
        self.scrape(now, served)

    def scrape(self, now, served):
        labels = f'job="node",instance="{self.instance}"'
        lines = [f"up{{{labels}}} 1 {now}", f"node_textfile_scrape_error{{{labels}}} {int(not served)} {now}"]
        for file, when in self.ran.items():
            if file == "handoff" and not served:
                continue
            lines.append(f'node_textfile_mtime_seconds{{file="{DIRECTORY}/{file}.prom",{labels}}} {when} {now}')
            for line in (self.textfiles / f"{file}.prom").read_text().splitlines():
                if not line.startswith("#"):
                    series, _, value = line.rpartition(" ")
                    series = series[:-1] + "," + labels + "}" if series.endswith("}") else f"{series}{{{labels}}}"
                    lines.append(f"{series} {value} {now}")
        self.metrics += lines

    # ------------------------------------------------------------------------------------------ what happened, without the queue

    def depth(self, now):
        return Counter((job.role, job.kind, job.status(now)) for job in self.jobs if job.status(now))

    def counted(self, now):
        """The counters by then, as (name, role, kind) or with an outcome."""
        counted = Counter()
        for job in self.jobs:
            if not job.status(now):
                continue
            counted["handoff_records_total", job.role, job.kind] += 1
            counted["handoff_nacks_total", job.role, job.kind] += sum(nack["ts"] <= now for nack in job.nacks)
            if job.finished() <= now:
                counted["handoff_finished_total", job.role, job.kind, job.events[-1][1]["status"]] += 1
                counted["handoff_spend_unpriced_records_total", job.role, job.kind] += job.unpriced
        return counted

    def spent(self, now, since=0):
        return sum((job.spent for job in self.jobs if since < job.finished() <= now), Decimal(0))


def rfc3339(time):
    return datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def troubled(directory, bin):
    """A box on which all goes wrong once: see `week.py` for when which alert must fire."""
    box = Box(directory, bin, "agents1:9100", 1, START)
    box.everyday()
    box.patches(asleep=(at(3, 2), at(3, 5)))
    box.add(at(1, 6), "patcher", spend=None)
    box.add(at(6, 12), "patcher", spend=None)
    box.add(at(1, 10), "researcher", wait=300, run=8 * HOUR)
    box.add(at(2, 8) - 600, "reviewer", kind="request_human", nacks=2)
    box.add(at(6, 20), "reviewer", kind="request_human", nacks=2, outcome="human")
    box.add(at(2, 15) - 600, "triage", outcome="dead")
    for n in range(14):
        box.add(at(4, 9) + 480 * n, "reviewer", nacks=1)
    for n in range(80):
        put = at(5, 12) + 180 * n
        box.add(put, "triage", wait=at(5, 17) + 60 * n - put, run=50)
    for n in range(15):
        box.add(at(4, 18) + 480 * n, "researcher", spend="4.00")
    keeper = box.add(at(5, 18), "researcher", nacks=1, more={"tool_result": "kept" * 5000})
    aside = None
    for now in range(START + STEP, END + 1, STEP):
        hour = (now - START) / HOUR
        junk = ['{"id":"cut', "not a record"] if now == at(2, 20) else []
        if now == at(3, 8):
            box.run("handoff", now, "check", "--quarantine", code=0)
        if now == at(5, 20):
            blob = next(path for path in (box.directory / "blob").rglob("*") if path.is_file() and b"kept" in path.read_bytes()[:8])
            aside = blob.rename(box.directory / "aside")
        if now == at(5, 23):
            aside.rename(blob)
        box.tick(now, compacts=now in (at(1, 4), at(2, 4), at(5, 4), at(6, 4)), offloads=not 6 * 24 + 14 <= hour < 6 * 24 + 16,
                 locked=6 * 24 + 6 <= hour < 6 * 24 + 8, junk=junk)
    assert keeper.nacks
    return box


def late(directory, bin):
    """A box that is installed on the fifth day, and whose node_exporter can't use handoff.prom for two hours."""
    box = Box(directory, bin, "agents2:9100", 2, at(4, 0))
    box.everyday()
    box.patches(asleep=(0, 0))
    for now in range(at(4, 0) + STEP, END + 1, STEP):
        box.tick(now, compacts=now == at(5, 4) or now == at(6, 4), served=not at(6, 12) <= now < at(6, 14))
    return box
