#!/usr/bin/env python3
"""Proves that nothing is lost by an offload: restore.py BEFORE AFTER STORE.

Every line of AFTER must be the line of BEFORE but for handles, and where a handle stands, BEFORE has just the value that the blob holds:
JSON text byte for byte, or a string that reads as the blob's text. A blob's name must be the hash of its bytes. Ledger lines are left out
on both sides. It knows nothing of limits, and shares no code with offload.py or with the tools.

Prints how many handles took the place of values, and how many bytes of values they stand for.
"""

import hashlib
import json
import os
import re
import sys

LEDGER = b'{"id":"ledger",'
HANDLE = re.compile(
    rb'\{"artifact_ref":"blob/([0-9a-f]{2})/([0-9a-f]{64})","bytes":([0-9]+),"sha256":"([0-9a-f]{64})","media_type":"([a-z/]+)",'
    rb'"summary":"([^"\\]*(?:\\.[^"\\]*)*)"\}'
)
STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')


def lines(path):
    with open(path, "rb") as file:
        data = file.read()
    return [line for line in data.split(b"\n")[:-1] if not line.startswith(LEDGER)]


def restored(before, after, store):
    """The handles in one line that stand for values of the line as it was: [bytes of the value]."""
    at = end = 0
    values = []
    for match in HANDLE.finditer(after):
        piece = after[end : match.start()]
        assert before.startswith(piece, at), f"other bytes at {at}: {piece[:80]}"
        at += len(piece)
        end = match.end()
        if before.startswith(match[0], at):  # it has been there before
            at += len(match[0])
            continue
        directory, sha256, size, again, media_type, summary = (group.decode("utf-8") for group in match.groups())
        with open(os.path.join(store, directory, sha256), "rb") as file:
            blob = file.read()
        assert sha256 == again == hashlib.sha256(blob).hexdigest() and sha256.startswith(directory), f"{sha256} is not the hash"
        assert int(size) == len(blob), f"{sha256} has {len(blob)} bytes, not {size}"
        assert blob.decode("utf-8").startswith(json.loads(f'"{summary}"')), f"{sha256} does not begin with its summary"
        if media_type == "application/json":
            assert before.startswith(blob, at), f"other JSON at {at}"
            at += len(blob)
        else:
            assert media_type == "text/plain"
            string = STRING.match(before, at)
            assert string and json.loads(string[0]).encode("utf-8") == blob, f"another string at {at}"
            at = string.end()
        values.append(len(blob))
    assert before[at:] == after[end:], f"another end at {at}"
    return values


def main():
    before, after, store = sys.argv[1:]
    before, after = lines(before), lines(after)
    assert len(before) == len(after), f"{len(after)} lines, not {len(before)}"
    values = [size for old, new in zip(before, after) for size in restored(old, new, store)]
    print(json.dumps({"values": len(values), "bytes": sum(values)}))


if __name__ == "__main__":
    main()
