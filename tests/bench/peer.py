#!/usr/bin/env python3
"""The peer: what an operator would write in plain Python instead of the exporter.

    peer.py QUEUE             a loop over json.loads: records, nacks and spend
    peer.py QUEUE OUT.prom    the exporter's job: also ages, durations, tokens and what has no price; replaces OUT.prom

Both hold a shared lock. Floats and few imports, because those are the faster choices; nothing odd in the queue is handled.
"""

import fcntl
import json
import os
import sys
from bisect import bisect_left

BOUNDS = (10, 30, 60, 300, 900, 1800, 3600, 14400, 43200, 86400, 259200, 604800)
TOKENS = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


def lines(path):
    with open(os.path.splitext(path)[0] + ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        with open(path, "rb") as queue:
            yield from queue


def loop(path):
    records, nacks, spend = {}, {}, {}
    for line in lines(path):
        record = json.loads(line)
        kind = record["kind"]
        key = record["to"], kind, record["status"]
        records[key] = records.get(key, 0) + 1
        key = key[:2]
        if found := len(record.get("nacks", ())) or record["status"] == "nack":
            nacks[key] = nacks.get(key, 0) + found
        for entry in record.get("spend", ()):
            spend[key] = spend.get(key, 0) + entry.get("cost_usd", 0)
    return records, nacks, spend


def job(path):
    records, oldest, nacks, spend, unpriced, tokens, histograms = {}, {}, {}, {}, {}, {}, {}

    def observe(name, role, seconds):
        histogram = histograms.setdefault((name, role), [0] * (len(BOUNDS) + 1) + [0.0])
        histogram[bisect_left(BOUNDS, seconds)] += 1
        histogram[-1] += seconds

    for line in lines(path):
        record = json.loads(line)
        role, kind, status, ts = record["to"], record["kind"], record["status"], record["ts"]
        key = role, kind, status
        records[key] = records.get(key, 0) + 1
        key = role, status
        oldest[key] = min(ts, oldest.get(key, ts))
        key = role, kind
        if found := len(record.get("nacks", ())) or status == "nack":
            nacks[key] = nacks.get(key, 0) + found
        if started := record.get("started_ts"):
            observe("wait", role, started - ts)
            if finished := record.get("finished_ts"):
                observe("time", role, finished - started)
        missing = False
        for entry in record.get("spend", ()):
            cost = entry.get("cost_usd")
            missing |= cost is None
            spend[key] = spend.get(key, 0) + (cost or 0)
            for token_type in TOKENS:
                token = kind, entry.get("model"), token_type
                tokens[token] = tokens.get(token, 0) + entry.get(token_type, 0)
        unpriced[key] = unpriced.get(key, 0) + missing
    return records, oldest, nacks, spend, unpriced, tokens, histograms


def render(records, oldest, nacks, spend, unpriced, tokens, histograms):
    text = ""
    for name, kind, labels, values in (
        ("handoff_queue_records", "gauge", ("role", "kind", "status"), records),
        ("handoff_queue_oldest_timestamp_seconds", "gauge", ("role", "status"), oldest),
        ("handoff_nacks_total", "counter", ("role", "kind"), nacks),
        ("handoff_spend_usd_total", "counter", ("role", "kind"), spend),
        ("handoff_spend_unpriced_records_total", "counter", ("role", "kind"), unpriced),
        ("handoff_tokens_total", "counter", ("kind", "model", "token_type"), tokens),
    ):
        text += f"# TYPE {name} {kind}\n"
        for key, value in sorted(values.items()):
            pairs = ",".join(f'{label}="{part}"' for label, part in zip(labels, key))
            text += f"{name}{{{pairs}}} {value}\n"
    for name, family in ("wait", "handoff_queue_wait_seconds"), ("time", "handoff_role_time_seconds"):
        text += f"# TYPE {family} histogram\n"
        for (which, role), (*buckets, total) in sorted(histograms.items()):
            if which == name:
                count = 0
                for bound, found in zip((*BOUNDS, "+Inf"), buckets):
                    count += found
                    text += f'{family}_bucket{{role="{role}",le="{bound}"}} {count}\n'
                text += f'{family}_sum{{role="{role}"}} {total}\n{family}_count{{role="{role}"}} {count}\n'
    return text


def replace(path, text):
    folder, name = os.path.split(os.path.abspath(path))
    temporary = f"{folder}/.{name}.{os.getpid()}.tmp"
    with open(temporary, "x") as out:
        out.write(text)
        out.flush()
        os.fchmod(out.fileno(), 0o644)
        os.fsync(out.fileno())
    os.rename(temporary, path)


def main():
    if len(sys.argv) > 2:
        replace(sys.argv[2], render(*job(sys.argv[1])))
    else:
        print(*loop(sys.argv[1]))


main()
