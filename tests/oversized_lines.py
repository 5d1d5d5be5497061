#!/usr/bin/env python3
"""Makes lines of a queue with values that offload moves, and says what must become of them: oversized_lines.py SEED MANY

Nothing is judged here: each value is known to be moved or to stay because it was made so, see src/FORMAT.md. Prints a JSON object:
lines   name -> {"old": the line, "new": what it is after an offload}, without their newlines; SEED makes other contents. Lines with
        names as below, and MANY more, each with a value of its own, named by their numbers
blobs   SHA-256 -> the blob's text
"""

import hashlib
import json
import sys

PREVIEW = 1024


class Moved:
    """A value that is moved: its JSON text as it stands in a line, and what its blob holds."""

    blobs = {}

    def __init__(self, text, content, media_type):
        data = content.encode()
        sha256 = hashlib.sha256(data).hexdigest()
        self.blobs[sha256] = content
        handle = {
            "artifact_ref": f"blob/{sha256[:2]}/{sha256}",
            "bytes": len(data),
            "sha256": sha256,
            "media_type": media_type,
            "summary": data[:PREVIEW].decode(errors="ignore"),
        }
        self.old = text
        self.new = json.dumps(handle, separators=(",", ":"), ensure_ascii=False)


def text(content, **options):
    return Moved(json.dumps(content, **options), content, "text/plain")


def whole(value, **options):
    """An object or array of which no part is too large by itself, or none can be moved by itself."""
    json_text = value if isinstance(value, str) else json.dumps(value, **options)
    return Moved(json_text, json_text, "application/json")


def line(name, payload, more=()):
    """A record whose payload, and what follows its status, consists of these pieces."""
    pieces = [
        f'{{"id":"{name}","ts":1795950000,"kind":"classify","from":"triage","to":"researcher","payload":',
        *payload,
        ',"status":"queued"',
        *more,
        "}",
    ]
    old, new = ("".join(getattr(piece, side, piece) for piece in pieces) for side in ("old", "new"))
    return {"old": old, "new": new}


def lines(seed):
    def filler(word, size=9_000):
        word = f"{word} {seed}; "
        return (word * (size // len(word) + 1))[:size]

    # Between two of its characters a cut after 1,024 bytes would leave half a one.
    wide = "ä" + filler("größer als erlaubt — 😀", 8_000)
    rows = json.dumps([{"row": number, "text": filler("cell", 40)} for number in range(200)])
    result = json.dumps({f"answer {number}": filler("short", 90) for number in range(120)}, indent=1).replace("\n", " ")
    return {
        "one": line("one", ['{"summary":"a","tool_result":', text(filler("one")), "}"]),
        "several": line(
            "several",
            [
                '{ "a" : ',
                text(filler('tab\tquote" back\\slash\nnewline \x01\x7f')),
                ' ,"kept":[1,2,{"deep":[',
                text(filler("deep")),
                ',"small",',
                text(wide, ensure_ascii=False),
                ']}], "rows":',
                whole(rows),
                ',"summary":"several"}',
            ],
            [', "unknown" : {"stays":"', filler("unknown"), '"}'],
        ),
        # The same content as above and twice, once with other escapes.
        "duplicates": line(
            "duplicates",
            ['{"x":', text(filler("one")), ',"y":', text(wide), ',"z":', text(filler("one")), "}"],
            [',"result":', whole(result)],
        ),
        "result": line("result", ["{}"], [',"result":', text(filler("result"))]),
        "in-part": line(
            "in-part", ['{"x":"\\ud83d', filler("no text says this exactly"), '","y":', text(filler("but this")), "}"]
        ),
        "in-doubt": line("in-doubt", ['{"x":"', filler("in doubt"), '"}'], [',"cost":NaN']),
        "no-record": {side: '{"id":"no-record","payload":"' + filler("torn") for side in ("old", "new")},
        "small": line("small", ['{"x": [ ] , "y":"', filler("small", 5_000), '"}']),
        "late": line("late", ['{"late":', text(filler("late")), "}"]),
        "late-too": line("late-too", ['{"late":', text(filler("one")), "}"]),
        "end": line("end", ['{"end":', text(filler("end")), "}"]),
        "appended": line("appended", ['{"appended":', text(filler("appended")), "}"]),
        "put-before": line("put-before", ['{"before":', text(filler("put before")), "}"]),
        "damaged": line("damaged", ['{"damaged":', text(filler("damaged")), "}"]),
        # What refers to a blob that no line refers to.
        "refers": line("refers", ['{"rows":', whole([filler("row", 80)] * 100 + [{"artifact_ref": REFERENCES["inner"]}]), "}"]),
        "handle": line("handle", ['{"before":', text(filler("handle")).new, "}"]),
        "reference": {side: f'torn {REFERENCES["of-malformed"]}' for side in ("old", "new")},
        "taken-over": line("taken-over", ['{"before":', text(filler("taken over")).new, "}"]),
    }


# Contents that no line has, only their references: of some blobs that have been in the store for long, and of some that nothing refers to.
CONTENTS = {name: f"{name} " * 2_000 for name in ("inner", "of-malformed", "recent-orphan")}


def reference(content):
    sha256 = hashlib.sha256(content.encode()).hexdigest()
    Moved.blobs[sha256] = content
    return f"blob/{sha256[:2]}/{sha256}"


REFERENCES = {name: reference(content) for name, content in CONTENTS.items()}
REFERENCES["old-inner-orphan"] = reference("old inner orphan " * 1_000)
REFERENCES["old-orphan"] = reference(f'["{REFERENCES["old-inner-orphan"]}"]')

if __name__ == "__main__":
    seed, many = sys.argv[1:]
    made = lines(seed)
    for number in range(int(many)):
        made[f"{number}"] = line(f"{number}", ['{"value":', text(f"{number} of {many} {seed}; " * 900), "}"])
    json.dump({"lines": made, "blobs": Moved.blobs, "references": REFERENCES}, sys.stdout)
