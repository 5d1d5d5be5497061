#!/usr/bin/env python3
"""The peer: what an operator would write in plain Python instead of handoff-compact.

    peer_compact.py QUEUE BEFORE OUT    drops what was done, without ever being refused, before that time in epoch seconds

The result takes the place of OUT rather than of QUEUE, so that every run finds the same queue. It holds the queue's exclusive lock.
There is no ledger, nothing odd in the queue is handled, and lines that arrive without the lock are lost.
"""

import fcntl
import json
import os
import sys


def goes(record, before):
    if record["status"] != "done" or record.get("nacks"):
        return False
    return (record.get("finished_ts") or record["ts"]) < before


def main():
    path, before, target = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    temporary = f"{target}.{os.getpid()}.tmp"
    with open(os.path.splitext(path)[0] + ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with open(path, "rb") as queue, open(temporary, "xb", buffering=1 << 20) as out:
            for line in queue:
                if not goes(json.loads(line), before):
                    out.write(line)
            out.flush()
            os.fsync(out.fileno())
        os.rename(temporary, target)


main()
