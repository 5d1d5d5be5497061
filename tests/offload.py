#!/usr/bin/env python3
"""Moves oversized values a second time, from src/FORMAT.md alone, to check handoff-offload.

It reads and judges lines as recount.py does and shares no code with the Rust side. Values keep their place in the line: all that is
not replaced by a handle is copied as it stands.

usage: offload.py QUEUE OUT_QUEUE OUT_STORE [--max-bytes N] [--preview-bytes N] [--max-line N]

OUT_QUEUE gets the lines as they must be afterwards, without ledger lines and without what follows the last newline: those are not
offload's matter but that of every tool that rewrites. OUT_STORE, which it makes, gets the blobs that must be there. Printed is a JSON
object: what must be moved, what stays although it is over the limit, and each value.
The lock is not taken and late lines in earlier generations are not looked at.
"""

import argparse
import hashlib
import json
import os
import sys

# Run by workers/batch.py, this folder is not where Python looks for modules.
HERE = os.path.dirname(os.path.abspath(__file__))
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from recount import MAX_BYTES, PREVIEW_BYTES, Malformed, Oversized, doubt_of, handle, line_of, pointer, read, whole_lines  # noqa: E402


class Offload:
    """The lines as they must be, the blobs, and what is to be told of them."""

    def __init__(self, data, max_bytes=MAX_BYTES, preview=PREVIEW_BYTES, max_line=64 << 20):
        self.max_bytes, self.preview, self.max_line = max_bytes, preview, max_line
        self.lines, self.blobs, self.values = [], {}, []
        self.records = self.records_in_doubt = self.values_in_doubt = self.lone_surrogates = self.ledger_lines = 0
        for number, line in enumerate(whole_lines(data), 1):
            self._line(number, line)

    def _line(self, number, line):
        try:
            what, doc, _ = line_of(line, self.max_line)
        except Malformed:
            what = "malformed"
        if what == "ledger":
            self.ledger_lines += 1
            return
        self.lines.append(self._record(number, line, doc) if what == "record" else line)

    def _record(self, number, line, doc):
        oversized = Oversized(doc, self.max_bytes, self.preview)
        if doubt_of(doc):
            self.records_in_doubt += bool(oversized.moved)
            self.values_in_doubt += len(oversized.moved)
            return line
        self.lone_surrogates += oversized.staying
        self.records += bool(oversized.moved)
        pieces, end = [], 0
        for path, node in oversized.moved:
            content, media_type = oversized.content(node)
            sha256 = hashlib.sha256(content).hexdigest()
            self.blobs[sha256] = content
            self.values.append({"line": number, "id": doc.text(doc.root.value["id"]), "pointer": pointer(path),
                                "bytes": len(content), "media_type": media_type, "sha256": sha256})
            pieces += [line[end : node.start], handle(sha256, len(content), media_type, content, self.preview)]
            end = node.end
        return b"".join(pieces) + line[end:]

    def report(self):
        return {
            "moved": {"records": self.records, "values": len(self.values)},
            "blobs": {"objects": len(self.blobs), "bytes": sum(map(len, self.blobs.values()))},
            "kept": {"records_in_doubt": self.records_in_doubt, "lone_surrogates": self.lone_surrogates},
            "values_in_doubt": self.values_in_doubt,
            "ledger_lines": self.ledger_lines,
            "values": self.values,
        }

    def write(self, queue, store):
        with open(queue, "wb") as out:
            out.writelines(line + b"\n" for line in self.lines)
        os.makedirs(store)
        for sha256, content in self.blobs.items():
            os.makedirs(os.path.join(store, sha256[:2]), exist_ok=True)
            with open(os.path.join(store, sha256[:2], sha256), "wb") as out:
                out.write(content)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Move oversized values again, from the format's description alone.")
    parser.add_argument("queue")
    parser.add_argument("out_queue")
    parser.add_argument("out_store")
    parser.add_argument("--max-bytes", type=int, default=MAX_BYTES)
    parser.add_argument("--preview-bytes", type=int, default=PREVIEW_BYTES)
    parser.add_argument("--max-line", type=int, default=64 << 20)
    args = parser.parse_args(argv)
    offload = Offload(read(args.queue)[0], args.max_bytes, args.preview_bytes, args.max_line)
    offload.write(args.out_queue, args.out_store)
    print(json.dumps(offload.report()))


if __name__ == "__main__":
    main()
