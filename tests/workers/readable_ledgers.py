#!/usr/bin/env python3
"""Copies a queue without the ledger lines that can't be read: readable_ledgers.py QUEUE COPY. Prints their numbers as a JSON array.

Which ones they are is decided from src/FORMAT.md alone, as recount.py reads it: a line that begins like a ledger, or
an envelope of kind and status `ledger`, that is malformed.
"""

import json
import os
import sys

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from recount import Malformed, begins_like_ledger, envelope, line_of  # noqa: E402

MAX_LINE = 64 << 20


def is_unreadable_ledger(line):
    try:
        line_of(line, MAX_LINE)
        return False
    except Malformed:
        if begins_like_ledger(line):
            return True
    try:
        doc = envelope(line, MAX_LINE)
    except Malformed:
        return False
    return all(doc.text(doc.root.value[name]) == "ledger" for name in ("kind", "status"))


def main():
    queue, copy = sys.argv[1:]
    with open(queue, "rb") as f:
        *lines, tail = f.read().split(b"\n")
    unreadable = [number for number, line in enumerate(lines, 1) if is_unreadable_ledger(line)]
    with open(copy, "wb") as f:
        f.writelines(line + b"\n" for number, line in enumerate(lines, 1) if number not in unreadable)
        f.write(tail)
    print(json.dumps(unreadable))


if __name__ == "__main__":
    main()
