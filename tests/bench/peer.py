#!/usr/bin/env python3
"""The peer: what an operator would write in plain Python instead of the exporter.

    peer.py QUEUE [OUT.prom]

Counts records, nacks and spend under a shared lock, and replaces OUT.prom (else writes to standard
output). Floats and few imports, because those are the faster choices.
"""

import fcntl
import json
import os
import sys


def scan(path):
    records, nacks, spend = {}, {}, {}
    with open(os.path.splitext(path)[0] + ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        with open(path, "rb") as queue:
            for line in queue:
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


def render(records, nacks, spend):
    text = "# TYPE handoff_queue_records gauge\n"
    for (role, kind, status), value in sorted(records.items()):
        text += f'handoff_queue_records{{role="{role}",kind="{kind}",status="{status}"}} {value}\n'
    for name, values in ("handoff_nacks_total", nacks), ("handoff_spend_usd_total", spend):
        text += f"# TYPE {name} counter\n"
        for (role, kind), value in sorted(values.items()):
            text += f'{name}{{role="{role}",kind="{kind}"}} {value}\n'
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
    text = render(*scan(sys.argv[1]))
    if len(sys.argv) > 2:
        replace(sys.argv[2], text)
    else:
        sys.stdout.write(text)


main()
