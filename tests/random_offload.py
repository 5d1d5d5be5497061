#!/usr/bin/env python3
"""Prints a random queue with oversized values: random_offload.py SEED MAX_BYTES PREVIEW_BYTES [LINES]. The same arguments give the
same bytes.

Its lines are those of random_queue.py with payloads and results made for an offload with these limits: values of just the limit and a
byte beside it, containers that just fit once handles stand in them, what models and tools send, handles that are there already, and
what only looks like one. Give it to offload.py and to handoff-offload, and compare. Its ledger lines are all sound.
"""

import base64
import hashlib
import json
import os
import sys

# Run by workers/batch.py, this folder is not where Python looks for modules.
HERE = os.path.dirname(os.path.abspath(__file__))
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from random_queue import Maker  # noqa: E402
from recount import handle  # noqa: E402

LEDGER = (b'{"id":"ledger","ts":1795900000,"kind":"ledger","from":"handoff","to":"","payload":{"version":1,"totals":{"cells":[{"role":"role1",'
          b'"kind":"kind1","records":%d,"done":%d,"spend_usd":"0.25"}],"reclaimed_bytes":7},"generations":{}},"status":"ledger"}')


class OffloadMaker(Maker):
    def __init__(self, seed, limit, preview):
        super().__init__(seed)
        self.limit, self.preview = limit, preview
        # What several records share: tools are called twice, and messages are sent again with each turn.
        self.shared = [self.long() for _ in range(3)]

    def status(self):
        return super().status().replace("ledger", "paused")

    # ----------------------------------------------------------------------------------------------------------- strings

    def some(self, size):
        """So much text, or a little more, of one sort, with nothing that must be escaped. Each sort takes another number of bytes a character."""
        sort = self.rng.randrange(5)
        if sort == 0:
            return base64.b64encode(self.rng.randbytes(size * 3 // 4 + 3)).decode("ascii")
        return self.pick("x", "\u00e9", "\u20ac", "\U0001f600", "a\u00e9\u20ac\U0001f600 ") * (size // self.pick(1, 2, 4) + 1)

    def escaped(self, size):
        """The inside of a literal in which nearly everything is an escape."""
        unit = self.pick(r"\n", r"\"", r"\\", r"\/", r"\u0000", r"\u001F\b", r"\ud83d\ude00", r"\u00E9x", r"line \u2028\r\n\t", "\x7f\u2028", r"\u0022\u005c", r"\"\\\f")
        return unit * (size // len(unit) + 1)

    def long(self):
        """A literal that is over the limit, sometimes by far."""
        size = self.limit + self.rng.randrange(self.pick(3, 60, self.limit + 3))
        inside = self.pick(self.some, self.escaped)(size)
        begin = self.pick("", "", '\\"', "\\u0001\\u007f", "\u00e9", "<html>", "\\\\")
        return f'"{begin}{inside}"'

    def just(self, size):
        """A literal of exactly so many bytes."""
        inside = self.pick(self.some, self.escaped)(size).encode("utf-8")[: max(0, size - 2)].decode("utf-8", "ignore")
        while inside.endswith("\\") or "\\u" in inside[-6:] or "\\ud" in inside[-12:]:
            inside = inside[:-1]
        return f'"{inside + "x" * (size - 2 - len(inside.encode("utf-8")))}"'

    def lone(self):
        """A literal that no text can be made of, of any size."""
        return self.pick(self.just, self.just, lambda _: self.long())(self.near())[:-1] + self.pick(r'\ud83d"', r'\udc00"', r'\ud83dx"', r'\ud83d\ud83d\ude00"')

    def near(self):
        return max(2, self.limit + self.rng.randrange(-2, 3))

    # ------------------------------------------------------------------------------------------------------------ handles

    def handle_of(self, literal):
        """The handle that an ordinary literal becomes."""
        return self.handle(json.loads(literal).encode("utf-8"), "text/plain")

    def handle(self, content, media_type):
        return handle(hashlib.sha256(content).hexdigest(), len(content), media_type, content, self.preview).decode("utf-8")

    def there_already(self):
        """A handle, or something that nearly is one."""
        text = self.handle(self.rng.randbytes(4).hex().encode(), self.pick("text/plain", "application/json", "image/png"))
        if self.chance(0.4):  # somebody has kept more of it
            text = text.replace('"summary":"', '"summary":"' + self.just(self.near())[1:-1])
        if self.chance(0.3):
            text = text.replace(",", self.pick(" ,", ", ", ",\t\r")).replace("{", "{ ")
        if self.chance(0.2):
            text = text.replace('"bytes":8', '"bytes":' + self.pick("0", "18446744073709551615"))
        if self.chance(0.2):
            text = text.replace("artifact_ref", self.pick("\\u0061rtifact_ref", "artifact_re\\u0066"))
        if self.chance(0.5):
            return text
        change = self.rng.randrange(9)
        if change == 0:
            return text.replace('"bytes":', self.pick('"bytes":-', '"bytes":0.', '"bytes":1e', '"bytes":99999999999999999999'))
        if change == 1:
            return text.replace("}", self.pick(',"more":1}', ',"bytes":8}', ',"summary":"' + "s" * self.limit + '"}'))
        if change == 2:
            return text.replace('"blob/', self.pick('"/blob/', '"blob/0', '"Blob/', '"blob//'))
        if change == 3:
            return text.replace('"sha256":"', self.pick('"sha256":"0', '"sha256":"\\n', '"sha-256":"'))
        if change == 4:
            return text.replace('"media_type":"', '"media_type":null,"x":"')
        if change == 5:
            return text.replace('"summary":"', self.pick('"summary":["', '"summary":{"":"')) .replace('"}', self.pick('"]}', '"}}'))
        if change == 6:
            return text.replace("blob/", "blob\\/")  # which reads the same
        if change == 7:
            at = text.index('"sha256":"') + 10
            return text[:at] + text[at : at + 64].upper() + text[at + 64 :]
        return text.replace('"media_type":"', self.pick('"media_type":"\\ud83d', '"media_type":"', '"media_type":"\\u0000'))

    # --------------------------------------------------------------------------------------------------------- containers

    def fitting(self):
        """A container that is as large as the limit, or a byte beside it, once handles stand in it."""
        inside = [self.long() for _ in range(self.rng.randrange(1, 4))]
        rest = self.near() - sum(len(self.handle_of(literal).encode("utf-8")) for literal in inside)
        shape, frame = ("[%s]", 2) if self.chance(0.5) else ('{"part":[%s]}', 11)
        rest -= frame + len(inside)  # the brackets, and a comma before each but the first
        if rest < 2:
            return shape % ",".join(inside)
        filler = self.just(rest) if rest <= self.limit else "[" + " " * (rest - 2) + "]"
        inside.insert(self.rng.randrange(len(inside) + 1), filler)
        return shape % ",".join(inside)

    def crowd(self):
        """Many small things that are over the limit together, or just not."""
        size = self.near()
        if self.chance(0.5):
            text = "[" + ",".join(["1"] * (size // 2))[: size - 2]
            return (text + "1" if text.endswith(",") else text) + "]"
        text, at = "{", 0
        while len(text) < size - 20:
            text += f'"k{at % 70}":{at % 10},'  # later ones have the names of earlier ones
            at += 1
        return text[:-1] + " " * max(0, size - len(text)) + "}" if at else "{}"

    def scalar(self):
        r = self.rng.randrange(10)
        if r == 0:
            return self.pick("true", "false", "null", "1", "-0.5e7", '""')
        if r == 1:
            size = self.near()
            return self.pick("1" * size, "-" + "9" * (size - 1), "0." + "3" * (size - 2) if size > 2 else "0", "1e" + "0" * (size - 2) if size > 2 else "1")
        if r == 2:
            return self.lone()
        if r == 3:
            return self.string(self.text())
        if r == 4:
            return self.rng.choice(self.shared)
        return self.long() if r < 7 else self.just(self.near())

    def value(self, depth=0):
        r = self.rng.randrange(12)
        if r < 4 or depth > 4:
            return self.scalar()
        if r == 4:
            return self.fitting()
        if r == 5:
            return self.crowd()
        if r == 6:
            return self.there_already()
        if r == 7:
            return self.array([self.value(depth + 1) for _ in range(self.rng.randrange(1, 4))])
        if r == 8:
            keys = [self.pick("a", "b", "a/b", "m~n", "", "\u00e9", "\n", "0", "artifact_ref", "summary") for _ in range(self.rng.randrange(1, 4))]
            return self.object([(self.string(key), self.value(depth + 1)) for key in keys])
        if r == 9:
            levels = self.rng.randrange(1, self.pick(5, self.limit // 2 + 5))
            open, close = self.pick(("[", "]"), ('{"a":', "}"), ("[1,", "]"))
            return open * levels + (self.scalar() if self.chance(0.5) else "1") + close * levels
        return self.message(depth)

    def message(self, depth):
        """What is sent to models and comes back from tools."""
        text, more = self.scalar(), self.value(depth + 1)
        return self.pick(
            '{"role":"user","content":[{"type":"tool_result","tool_use_id":"toolu_1","is_error":false,"content":[{"type":"text","text":%s},{"type":"image","source":{"type":"base64","data":%s}}]}]}',
            '{"role":"assistant","content":[{"type":"text","text":%s},{"type":"tool_use","id":"toolu_1","name":"search","input":{"query":%s}}]}',
            '{"role":"tool","tool_call_id":"call_1","content":%s,"x":%s}',
            '{"role":"assistant","content":null,"tool_calls":[{"id":"call_1","type":"function","function":{"name":"search","arguments":%s}},%s]}',
            '{"tool_result":%s,"exit_code":0,"meta":%s}',
        ) % (text, more)

    # ------------------------------------------------------------------------------------------------------------- lines

    def payload(self):
        if self.chance(0.12):
            return self.value()
        if self.chance(0.15):
            return '{"messages":%s}' % self.array([self.message(0) for _ in range(self.rng.randrange(1, 4))])
        names = ("summary", "tool_result", "a/b", "c\n", "")
        return self.object([(self.string(self.pick(*names)), self.value() if self.chance(0.6) else self.junk(3)) for _ in range(self.rng.randrange(5))])

    def record(self):
        line = super().record()
        if self.chance(0.5) and b'"result"' not in line:
            result = b'"result":' + (self.value() if self.chance(0.8) else "null").encode("utf-8")
            line = b"{" + result + b"," + line[1:] if self.chance(0.5) else line[:-1] + b"," + result + b"}"
        return line

    def odd(self):
        return super().odd() if self.chance(0.2) else self.junk()

    def bad_time(self):
        return super().bad_time() if self.chance(0.2) else "null"

    def ledger(self):
        return LEDGER % (self.rng.randrange(5, 9), self.rng.randrange(5))


def main():
    seed, limit, preview = (int(argument) for argument in sys.argv[1:4])
    maker = OffloadMaker(seed, limit, preview)
    count = int(sys.argv[4]) if len(sys.argv) > 4 else 40
    out = b"".join(maker.line() + b"\n" for _ in range(count))
    if maker.chance(0.3):
        out += maker.record()[: maker.rng.randrange(1, 2 * limit)]
    sys.stdout.buffer.write(out)


if __name__ == "__main__":
    main()
