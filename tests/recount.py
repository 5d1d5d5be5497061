#!/usr/bin/env python3
"""Counts a handoff queue a second time, from src/FORMAT.md alone, to check the exporter's figures.

It shares no code with the Rust side. JSON is read by a scanner of its own, because three things are needed that the
standard module does not keep: a number's text, the extent of a value in the line, and nesting of any depth.
Money is an integer in units of 10^-28 USD and time an integer in microseconds: no floats before the last division.

usage: recount.py QUEUE --now RFC3339 [--roles a,b] [--kinds x,y] [--prices FILE] [--blob-dir DIR]
                  [--max-line N] [--max-bytes N] [--format prom|json]

The lock is not taken: call it on a queue that nobody is writing.
"""

import argparse
import bisect
import json
import os
import re
import stat
import sys
from datetime import date

U64 = 2**64 - 1
PLACES = 28
UNIT = 10**PLACES
STATUSES = ("queued", "running", "done", "nack", "human", "dead")
REASONS = ("not_an_envelope", "not_json", "not_utf8", "too_long", "unsupported_version")
BOUNDS = (10, 30, 60, 300, 900, 1800, 3600, 14400, 43200, 86400, 259200, 604800)
BOUNDS_US = [b * 1_000_000 for b in BOUNDS]
TOKEN_TYPES = ("input", "output", "cache_read", "cache_creation")
PRICES = {
    "input": "input_cost_per_token",
    "output": "output_cost_per_token",
    "cache_read": "cache_read_input_token_cost",
    "cache_creation": "cache_creation_input_token_cost",
}
MAX_BYTES = 8192
PREVIEW_BYTES = 1024
FIELDS = {"id", "ts", "kind", "from", "to", "payload", "status", "protocol_version", "started_ts", "finished_ts", "nacks", "spend",
          "run_id", "correlation_id", "parent", "owner", "result"}
MAX_VALUES = 50
MAX_LABEL = 128
LEDGER_ID = b'"id":"ledger",'
LEDGER_LINE = 5 << 20
LEDGER_PAYLOAD = 4 << 20

# --------------------------------------------------------------------------------------------------------------- JSON

SPACE = re.compile(rb"[ \t\r\n]*")
NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
PLAIN_STRING = re.compile(rb'"[^"\\\x00-\x1f]*"')
CHARACTERS = re.compile(rb'[^"\\\x00-\x1f]*')
ESCAPE = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
WORDS = ((b"true", "bool"), (b"false", "bool"), (b"null", "null"), (b"NaN", "nan"), (b"Infinity", "nan"), (b"-Infinity", "nan"))
ESCAPES = re.compile(r'\\(?:(["\\/bfnrt])|u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|u([0-9a-fA-F]{4}))')
SHORT = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class NotJson(Exception):
    pass


class Node:
    """A JSON value and where it stands: kind is object, array, string, number, bool, null or nan. Of keys that stand in an object
    more than once, `value` has the last, `members` has all pairs in their order, and `twice` has the keys."""

    __slots__ = ("kind", "value", "start", "end", "members", "twice")

    def __init__(self, kind, value, start, end):
        self.kind, self.value, self.start, self.end, self.members, self.twice = kind, value, start, end, None, frozenset()


def decode(raw):
    """The text of a string literal (quotes included) and whether it held a lone surrogate."""
    text = raw[1:-1].decode("utf-8")
    if "\\" not in text:
        return text, False
    lone = False

    def one(match):
        nonlocal lone
        short, high, low, single = match.groups()
        if short:
            return SHORT[short]
        if high:
            return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + (int(low, 16) - 0xDC00))
        code = int(single, 16)
        if 0xD800 <= code <= 0xDFFF:
            lone = True
            return "\ufffd"
        return chr(code)

    return ESCAPES.sub(one, text), lone


def end_of_string(b, i):
    match = PLAIN_STRING.match(b, i)
    if match:
        return match.end()
    if b[i : i + 1] != b'"':
        raise NotJson("a string was expected")
    i += 1
    while True:
        i = CHARACTERS.match(b, i).end()
        c = b[i : i + 1]
        if c == b'"':
            return i + 1
        match = ESCAPE.match(b, i) if c == b"\\" else None
        if not match:
            raise NotJson("bad string")
        i = match.end()


class Document:
    """One JSON text. `nonfinite` tells whether there is such a number anywhere."""

    def __init__(self, b, i=0):
        self.b = b
        self.nonfinite = False
        self.root = self._read(i)

    def text(self, node):
        return decode(self.b[node.start : node.end])[0]

    def number(self, node):
        return self.b[node.start : node.end]

    def _read(self, i):
        b = self.b
        skip = lambda at: SPACE.match(b, at).end()
        stack = []  # [node, key of the member being read]
        i = skip(i)
        while True:
            # A value starts at i.
            c = b[i : i + 1]
            if c in (b"{", b"["):
                node = Node("object", {}, i, None) if c == b"{" else Node("array", [], i, None)
                node.members = [] if c == b"{" else None
                i = skip(i + 1)
                if b[i : i + 1] == (b"}" if c == b"{" else b"]"):
                    i += 1
                    node.end = i
                else:
                    stack.append([node, None])
                    if c == b"{":
                        i = self._key(i, stack)
                    continue
            elif c == b'"':
                end = end_of_string(b, i)
                node = Node("string", None, i, end)
                i = end
            else:
                for word, kind in WORDS:
                    if b.startswith(word, i):
                        node = Node(kind, word, i, i + len(word))
                        if kind == "nan":
                            self.nonfinite = True
                        break
                else:
                    match = NUMBER.match(b, i)
                    if not match:
                        raise NotJson("a value was expected")
                    node = Node("number", None, i, match.end())
                i = node.end
            # A value ended at i: hand it to its container, and close every container that ends here.
            while True:
                if not stack:
                    if skip(i) != len(b):
                        raise NotJson("something follows the value")
                    return node
                top, key = stack[-1]
                if top.kind == "object":
                    top.value[key] = node
                    top.members.append((key, node))
                else:
                    top.value.append(node)
                i = skip(i)
                c = b[i : i + 1]
                if c == b",":
                    i = skip(i + 1)
                    if top.kind == "object":
                        i = self._key(i, stack)
                    break
                if c != (b"}" if top.kind == "object" else b"]"):
                    raise NotJson("a comma or the end was expected")
                i += 1
                top.end = i
                node = top
                stack.pop()

    def _key(self, i, stack):
        end = end_of_string(self.b, i)
        key, _ = decode(self.b[i:end])
        node = stack[-1][0]
        if key in node.value:
            node.twice = node.twice or set()
            node.twice.add(key)
        stack[-1][1] = key
        i = SPACE.match(self.b, end).end()
        if self.b[i : i + 1] != b":":
            raise NotJson("a colon was expected")
        return SPACE.match(self.b, i + 1).end()


# ------------------------------------------------------------------------------------------------------------ numbers


def parts(raw):
    """(negative, digits, exponent) of a JSON number; digits has zeros at neither end and is empty for 0."""
    text = raw.decode("ascii")
    negative = text.startswith("-")
    mantissa, _, exponent = text.lstrip("-").replace("E", "e").partition("e")
    whole, _, fraction = mantissa.partition(".")
    minus = exponent.startswith("-")
    exponent = exponent.lstrip("+-").lstrip("0")
    power = 10**18 if len(exponent) > 18 else int(exponent or "0")
    digits = (whole + fraction).lstrip("0")
    stripped = digits.rstrip("0")
    power = (-power if minus else power) - len(fraction) + len(digits) - len(stripped)
    return negative, stripped, (power if stripped else 0)


def units(raw, limit_digits, maximum):
    """A number that is not negative, in units of 10^-28; None if it is not usable."""
    negative, digits, power = parts(raw)
    if not digits:
        return 0
    if negative or power < -PLACES or len(digits) + power > limit_digits:
        return None
    value = int(digits) * 10 ** (power + PLACES)
    return value if maximum is None or value <= maximum else None


def usable_cost(raw):
    return units(raw, 10, 10**9 * UNIT)


def whole(raw, top):
    """An integer literal from 0 to top, or None."""
    if not re.fullmatch(rb"0|[1-9][0-9]*", raw) or len(raw) > 25:
        return None
    value = int(raw)
    return value if value <= top else None


def micros_of_number(raw):
    negative, digits, power = parts(raw)
    if not digits:
        return 0
    magnitude = len(digits) + power  # 10^(magnitude-1) <= x < 10^magnitude
    if negative or magnitude > 14:
        return None
    power += 3 if magnitude > 11 else 6
    if power >= 0:
        return int(digits) * 10**power
    cut = len(digits) + power
    if cut < 0:
        return 0
    return int(digits[:cut] or "0") + (digits[cut] >= "5")


RFC3339 = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[Tt ]([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]+))?(?:[Zz]|([+-])([0-9]{2}):([0-9]{2}))"
)
EPOCH = date(1970, 1, 1).toordinal()
TIME_END = 10**11 * 1_000_000


def micros_of_text(text):
    match = RFC3339.fullmatch(text)
    if not match:
        return None
    year, month, day, hour, minute, second = (int(g) for g in match.groups()[:6])
    fraction, sign, off_hour, off_minute = match.groups()[6:]
    if hour > 23 or minute > 59 or second > 60:
        return None
    if sign and (int(off_hour) > 23 or int(off_minute) > 59):
        return None
    try:
        days = date(year, month, day).toordinal() - EPOCH
    except ValueError:
        return None
    seconds = days * 86_400 + hour * 3600 + minute * 60 + second
    if sign:
        seconds -= (1 if sign == "+" else -1) * (int(off_hour) * 3600 + int(off_minute) * 60)
    micros = seconds * 1_000_000
    if fraction:
        micros += int((fraction + "000000")[:6]) + (fraction[6:7] >= "5")
    return micros if 0 <= micros < TIME_END else None


# ------------------------------------------------------------------------------------------------------------- labels


def clean(value):
    return "".join("\ufffd" if c != "\n" and (c < " " or "\x7f" <= c <= "\x9f") else c for c in value)


class Values:
    """The values of one label: the configured ones, else the first 50 that appear, and `other`."""

    def __init__(self, configured=None):
        self.configured = None if configured is None else [v for v in dict.fromkeys(clean(v) for v in configured) if v != "other"]
        self.known = dict.fromkeys(self.configured or ())

    def label(self, raw):
        value = clean(raw)
        if len(value.encode("utf-8")) > MAX_LABEL or value == "other":
            return "other"
        if value in self.known:
            return value
        if self.configured is not None or len(self.known) >= MAX_VALUES:
            return "other"
        self.known[value] = None
        return value


# -------------------------------------------------------------------------------------------------------------- spend


def present(node, name):
    member = node.value.get(name)
    return None if member is None or member.kind == "null" else member


class Tokens:
    """The four token counts of an entry; `known` is False when one was unreadable, `given` when any was present."""

    def __init__(self, doc, entry):
        self.known, self.given = True, False
        self.doc = doc
        read = lambda name: self._count(present(entry, name))
        cached_in = lambda name: self._cached(present(entry, name))
        self.input = self.cache_read = self.cache_creation = 0
        self.output = read("output_tokens" if present(entry, "output_tokens") else "completion_tokens") or 0
        has_input, has_prompt = present(entry, "input_tokens"), present(entry, "prompt_tokens")
        self.cache_creation = read("cache_creation_input_tokens") or 0
        if has_input or has_prompt:
            whole_count = self._count(has_input or has_prompt)
            subset, cached = cached_in("input_tokens_details" if has_input else "prompt_tokens_details")
            if subset:
                self.cache_read = cached
                part = cached if has_input else cached + self.cache_creation
            else:
                self.cache_read = read("cache_read_input_tokens") or 0
                part = 0 if has_input else self.cache_read + self.cache_creation
            if part > whole_count:
                self.known = False
            self.input = max(0, whole_count - part)
        else:
            self.cache_read = read("cache_read_input_tokens") or 0

    def _count(self, node):
        """0 for an absent or unreadable count."""
        if node is None:
            return 0
        self.given = True
        value = whole(self.doc.number(node), U64) if node.kind == "number" else None
        if value is None:
            self.known = False
            return 0
        return value

    def _cached(self, details):
        """(whether cached_tokens is present, its count)"""
        node = present(details, "cached_tokens") if details is not None and details.kind == "object" else None
        return node is not None, self._count(node)

    def used(self):
        return {t: getattr(self, t) for t in TOKEN_TYPES if getattr(self, t)}


class PriceMap:
    def __init__(self, path=None):
        self.doc = None
        self.models = {}
        if path:
            with open(path, "rb") as f:
                self.doc = Document(f.read())
            self.models = {k: v for k, v in self.doc.root.value.items() if v.kind == "object"}

    def _model(self, provider, model):
        if not model:
            return None
        if provider and f"{provider}/{model}" in self.models:
            return self.models[f"{provider}/{model}"]
        return self.models.get(model)

    def _price(self, model, token_type, context):
        """The price of one token in units, or None."""
        best, found = -1, None
        for name, node in model.value.items():
            if node.kind == "null" or not name.startswith(PRICES[token_type]):
                continue
            rest = name[len(PRICES[token_type]) :]
            tier = re.fullmatch(r"_above_([0-9]+)k_tokens", rest)
            if rest and not (tier and context > int(tier[1]) * 1000):
                continue
            value = usable_cost(self.doc.number(node)) if node.kind == "number" else None
            if (int(tier[1]) if tier else 0) > best:
                best, found = (int(tier[1]) if tier else 0), value
        return found

    def cost(self, provider, model, tokens):
        """The cost in units of the tokens used, or None when it is not known."""
        entry = self._model(provider, model)
        if entry is None or not tokens.known:
            return None
        context = tokens.input + tokens.cache_read + tokens.cache_creation
        total = 0
        for token_type, count in tokens.used().items():
            price = self._price(entry, token_type, context)
            if price is None:
                return None
            total += price * count
        return total

    def free(self, provider, model, tokens):
        return self.cost(provider, model, tokens) == 0


def string_or_none(doc, node):
    return doc.text(node) if node is not None and node.kind == "string" else None


def entry_cost(doc, entry, tokens, prices):
    """Units of USD, or None for an unpriced entry."""
    node = present(entry, "cost_usd")
    provider = string_or_none(doc, present(entry, "provider"))
    model = string_or_none(doc, present(entry, "model"))
    if node is None:
        return prices.cost(provider, model, tokens) if tokens.given else None
    cost = None
    if node.kind == "number":
        cost = usable_cost(doc.number(node))
    elif node.kind == "string":
        text = doc.text(node).encode("utf-8")
        cost = usable_cost(text) if NUMBER.fullmatch(text) else None
    if cost == 0:
        nothing = tokens.known and not tokens.used()
        return 0 if nothing or prices.free(provider, model, tokens) else None
    return cost


def spend_of(doc, node, prices):
    """(units, unpriced?, [(model or None, Tokens)]) of a spend field."""
    if node is None:
        return 0, False, []
    entries = node.value if node.kind == "array" else [node]
    if len(entries) > 10_000:
        return 0, True, []
    last = {}
    for at, entry in enumerate(entries):
        if entry.kind == "object":
            name = string_or_none(doc, present(entry, "id"))
            if name:
                last[name] = at
    total, unpriced, used = 0, False, []
    for at, entry in enumerate(entries):
        if entry.kind == "object":
            name = string_or_none(doc, present(entry, "id"))
            if name and last[name] != at:
                continue
            tokens = Tokens(doc, entry)
            used.append((string_or_none(doc, present(entry, "model")), tokens))
            cost = entry_cost(doc, entry, tokens, prices)
        elif entry.kind == "number":
            cost = usable_cost(doc.number(entry))
        else:
            cost = None
        if cost is None:
            unpriced = True
        else:
            total += cost
    return total, unpriced, used


# -------------------------------------------------------------------------------------------------------------- lines


class Malformed(Exception):
    def __init__(self, reason):
        self.reason = reason


def time_of(doc, node):
    if node is None:
        return None
    if node.kind == "number":
        return micros_of_number(doc.number(node))
    if node.kind == "string":
        return micros_of_text(doc.text(node))
    return None


BOM = b"\xef\xbb\xbf"


def begins_like_ledger(line):
    return LEDGER_ID in line[:64].translate(None, b" \t\n\r\f")


def is_blank(line):
    return not (line[3:] if line.startswith(BOM) else line).strip(b" \t\r")


def envelope(line, max_line):
    """The document of a line that is a record or a ledger line by its envelope."""
    if len(line) > (max(max_line, LEDGER_LINE) if begins_like_ledger(line) else max_line):
        raise Malformed("too_long")
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        raise Malformed("not_utf8") from None
    try:
        doc = Document(line, 3 if line.startswith(BOM) else 0)
    except NotJson:
        raise Malformed("not_json") from None
    root = doc.root
    if root.kind != "object":
        raise Malformed("not_an_envelope")
    version = present(root, "protocol_version")
    if version is not None and not (version.kind == "number" and doc.number(version) in (b"1", b"2")):
        raise Malformed("unsupported_version")
    for name in ("id", "kind", "from", "to", "status"):
        member = root.value.get(name)
        if member is None or member.kind != "string":
            raise Malformed("not_an_envelope")
    if not doc.text(root.value["id"]) or time_of(doc, root.value.get("ts")) is None:
        raise Malformed("not_an_envelope")
    return doc


# --------------------------------------------------------------------------------------------------- oversized values

HANDLE = ("artifact_ref", "bytes", "sha256", "media_type", "summary")
ARTIFACT_REF = re.compile(r"blob/([0-9a-f]{2})/(\1[0-9a-f]{62})")
ESCAPED = {c: f"\\u{c:04x}" for c in range(0x20)} | {ord(c): "\\" + e for e, c in SHORT.items() if e != "/"} | {c: f"\\u{c:04x}" for c in (0x85, 0x2028, 0x2029)}


def handle(sha256, size, media_type, beginning, preview):
    """The handle of a blob, as it is written. `beginning` holds at least the first bytes that it shows, and as many more as it likes."""
    shown = beginning[:preview].decode("utf-8", "ignore").translate(ESCAPED)
    return (
        f'{{"artifact_ref":"blob/{sha256[:2]}/{sha256}","bytes":{size},"sha256":"{sha256}",'
        f'"media_type":"{media_type}","summary":"{shown}"}}'
    ).encode("utf-8")


def is_handle(doc, node):
    if node.kind != "object" or len(node.members) != len(HANDLE) or set(node.value) != set(HANDLE):
        return False
    texts = {key: doc.text(node.value[key]) for key in HANDLE if node.value[key].kind == "string"}
    if len(texts) != len(HANDLE) - 1 or node.value["bytes"].kind != "number":
        return False
    named = ARTIFACT_REF.fullmatch(texts["artifact_ref"])
    return bool(named) and named[2] == texts["sha256"] and whole(doc.number(node.value["bytes"]), U64) is not None


class Oversized:
    """What becomes of the values of a record. `moved` has [path, value] for each that is moved, in the order of the line; a path is
    the last step to the value and the path before that, or None. `staying` counts the strings that are over the limit and stay
    because no text says just what they say. Whether the record is in doubt is not looked at.

    A payload that is a handle is left alone like any other: otherwise a second run would move its long summary."""

    def __init__(self, doc, max_bytes=MAX_BYTES, preview=PREVIEW_BYTES):
        self.doc, self.max_bytes, self.preview = doc, max_bytes, preview
        self.moved, self.staying = [], 0
        for name in ("payload", "result"):
            node = present(doc.root, name)
            if node is not None:
                self._judge(name, node)
        self.moved.sort(key=lambda found: found[1].start)

    def _parts(self, node):
        """What lies directly in a value and might be moved: [step, value]."""
        if node.kind == "object":
            parts = [] if is_handle(self.doc, node) else node.members
        else:
            parts = enumerate(node.value) if node.kind == "array" else []
        return [(step, part) for step, part in parts if part.end - part.start > self.max_bytes]

    def content(self, node):
        """(bytes, media type) of the blob that a value becomes; None if there is no such blob."""
        raw = self.doc.b[node.start : node.end]
        if node.kind != "string":
            return raw, "application/json"
        text, lone = decode(raw)
        return None if lone else (text.encode("utf-8"), "text/plain")

    def _bytes_of_handle(self, node):
        """How long the handle of a value would be; None if it can't have one. Digests are all equally long."""
        if node.kind == "string":
            found = self.content(node)
            return found and len(handle("0" * 64, len(found[0]), found[1], found[0], self.preview))
        beginning = self.doc.b[node.start : min(node.end, node.start + self.preview)]
        return len(handle("0" * 64, node.end - node.start, "application/json", beginning, self.preview))

    def _judge(self, name, root):
        stays = name == "payload" and root.kind == "object"
        if not stays and root.end - root.start <= self.max_bytes:
            return
        # Every value that might be moved, containers before what lies in them, with how to get there and where its parts stand.
        values, parts = [((name, None), root)], []
        for path, node in values:
            found = self._parts(node)
            parts.append(range(len(values), len(values) + len(found)))
            values.extend(((step, path), part) for step, part in found)
        size = [node.end - node.start for _, node in values]
        goes = [False] * len(values)
        for at, (_, node) in reversed(list(enumerate(values))):
            for part in parts[at]:
                size[at] += size[part] - (values[part][1].end - values[part][1].start)
            if size[at] > self.max_bytes and not (at == 0 and stays) and not is_handle(self.doc, node):
                in_its_place = self._bytes_of_handle(node)
                if in_its_place is not None:
                    size[at], goes[at] = in_its_place, True
        todo = [0]
        while todo:
            at = todo.pop()
            if goes[at]:
                self.moved.append(values[at])
            elif values[at][1].kind == "string":
                self.staying += 1
            else:
                todo.extend(parts[at])


def pointer(path):
    """A path as a JSON pointer (RFC 6901)."""
    steps = []
    while path:
        step, path = path
        steps.append("/" + str(step).replace("~", "~0").replace("/", "~1"))
    return "".join(reversed(steps))


class Histogram:
    def __init__(self):
        self.buckets = [0] * (len(BOUNDS) + 1)
        self.sum_us = 0

    def observe(self, us):
        self.buckets[bisect.bisect_left(BOUNDS_US, us)] += 1
        self.sum_us += us

    def add(self, buckets, sum_us):
        self.buckets = [a + b for a, b in zip(self.buckets, buckets)]
        self.sum_us += sum_us


def ledger_of(doc):
    """The ledger as plain data: (names by sort, cells, tokens, generations)."""
    wrong = Malformed("not_an_envelope")

    def once(node, *names):
        if node.twice & set(names):
            raise wrong

    payload = doc.root.value.get("payload")
    if payload is None or payload.kind != "object":
        raise wrong
    once(payload, "version")
    version = payload.value.get("version")
    literal = doc.number(version) if version is not None and version.kind == "number" else b""
    if not re.fullmatch(rb"-?(?:0|[1-9][0-9]*)", literal):
        raise wrong
    if literal != b"1":
        raise Malformed("unsupported_version")
    if payload.end - payload.start > LEDGER_PAYLOAD:
        raise wrong

    def member(node, name, kind, default=None):
        found = node.value.get(name)
        if found is None:
            if default is None:
                raise wrong
            return default
        if found.kind != kind:
            raise wrong
        return found

    def integer(node):
        value = whole(doc.number(node), U64) if node.kind == "number" else None
        if value is None:
            raise wrong
        return value

    def integer_in(node, name):
        found = node.value.get(name)
        return 0 if found is None else integer(found)

    def histogram(cell, name):
        found = member(cell, name, "object", False)
        if not found:
            return [0] * (len(BOUNDS) + 1), 0
        once(found, "buckets", "sum_us")
        buckets = member(found, "buckets", "array", False)
        buckets = [integer(n) for n in buckets.value] if buckets else [0] * (len(BOUNDS) + 1)
        if len(buckets) != len(BOUNDS) + 1:
            raise wrong
        return buckets, integer_in(found, "sum_us")

    def money(cell):
        found = member(cell, "spend_usd", "string", False)
        if not found:
            return 0
        text = doc.text(found).encode("utf-8")
        value = units(text, 40, None) if NUMBER.fullmatch(text) else None
        if value is None:
            raise wrong
        return value

    once(payload, "totals", "generations")
    totals = member(payload, "totals", "object")
    generations = member(payload, "generations", "object")
    once(totals, "roles", "kinds", "models", "cells", "tokens", "reclaimed_bytes")
    names, cells, tokens = {}, [], []
    for sort in ("roles", "kinds", "models"):
        listed = member(totals, sort, "array", False)
        names[sort] = []
        for name in listed.value if listed else ():
            if name.kind != "string":
                raise wrong
            names[sort].append(doc.text(name))
    listed = member(totals, "cells", "array", False)
    for cell in listed.value if listed else ():
        if cell.kind != "object":
            raise wrong
        once(cell, "role", "kind", "records", "done", "dead", "nacks", "queue_wait", "role_time", "spend_usd", "unpriced")
        one = {name: integer_in(cell, name) for name in ("records", "done", "dead", "nacks", "unpriced")}
        one.update((name, doc.text(member(cell, name, "string"))) for name in ("role", "kind"))
        one.update(wait=histogram(cell, "queue_wait"), time=histogram(cell, "role_time"), spend=money(cell))
        cells.append(one)
    listed = member(totals, "tokens", "array", False)
    for cell in listed.value if listed else ():
        if cell.kind != "object":
            raise wrong
        once(cell, "kind", "model", *TOKEN_TYPES)
        one = {name: integer_in(cell, name) for name in TOKEN_TYPES}
        one.update((name, doc.text(member(cell, name, "string"))) for name in ("kind", "model"))
        tokens.append(one)
    integer_in(totals, "reclaimed_bytes")
    offsets = {}
    once(generations, *generations.value)
    for name, node in generations.value.items():
        if not re.fullmatch(r"0|[1-9][0-9]*", name):
            raise wrong
        offsets[int(name)] = integer(node)
    return names, cells, tokens, offsets


REFERENCE = re.compile(rb"(?=blob\\?/([0-9a-f]{2})\\?/(\1[0-9a-f]{62})(?![0-9a-f]))")


def number_of_nacks(doc):
    """What `nacks` says, 0 if it is absent and None if it is unreadable. That a record's status is `nack` is not looked at."""
    nacks = present(doc.root, "nacks")
    if nacks is None:
        return 0
    if nacks.kind == "array":
        return len(nacks.value)
    return whole(doc.number(nacks), 2**32 - 1) if nacks.kind == "number" else None


def doubt_of(doc):
    """The first reason why a record is in doubt, or None."""
    root = doc.root
    if root.twice & FIELDS:
        return "duplicate_key"
    if doc.nonfinite:
        return "non_finite_number"
    if any(decode(doc.number(root.value[name]))[1] for name in ("id", "kind", "from", "to", "status")):
        return "lone_surrogate"
    for name in ("started_ts", "finished_ts"):
        node = present(root, name)
        if node is not None and time_of(doc, node) is None:
            return "unreadable_time"
    return "unreadable_nacks" if number_of_nacks(doc) is None else None


def line_of(line, max_line):
    """What a line is: (blank, record or ledger; its document; what it says as a ledger). Anything else raises Malformed."""
    if is_blank(line):
        return "blank", None, None
    doc = envelope(line, max_line)
    if any(doc.text(doc.root.value[name]) != "ledger" for name in ("kind", "status")):
        return "record", doc, None
    if doubt_of(doc):
        raise Malformed("not_an_envelope")
    return "ledger", doc, ledger_of(doc)


class Count:
    """Everything that the exporter shows, added up line by line."""

    def __init__(self, now, roles, kinds, prices, max_line, blob_dir, max_bytes=MAX_BYTES):
        self.now, self.prices, self.max_line, self.blob_dir, self.max_bytes = now, prices, max_line, blob_dir, max_bytes
        self.roles, self.kinds, self.models = Values(roles), Values(kinds), Values()
        self.pairs, self.tokens, self.oldest = {}, {}, {}
        self.wait, self.time = {}, {}
        self.malformed = []
        self.oversized = self.missing = 0
        self.generations = {}

    def pair(self, role, kind):
        cell = self.pairs.get((role, kind))
        if cell is None:
            cell = self.pairs[role, kind] = dict.fromkeys(("records", "done", "dead", "nacks", "spend", "unpriced"), 0)
            cell["status"] = {}
            for histograms in (self.wait, self.time):
                histograms.setdefault(role, Histogram())
        return cell

    def add_tokens(self, kind, model, counts):
        total = self.tokens.setdefault((kind, model), dict.fromkeys(TOKEN_TYPES, 0))
        for token_type in TOKEN_TYPES:
            total[token_type] += counts[token_type]

    def model(self, raw):
        return self.models.label(raw or "unknown")

    def references(self, data):
        for digest in REFERENCE.findall(data):
            aa, name = (part.decode("ascii") for part in digest)
            if not is_regular(os.path.join(self.blob_dir, aa, name)):
                self.missing += 1

    def line(self, line, number):
        try:
            what, doc, ledger = line_of(line, self.max_line)
        except Malformed as e:
            self.malformed.append([number, e.reason])
            return
        if what == "ledger":
            self.ledger(ledger)
        elif what == "record":
            self.record(doc)

    def ledger(self, ledger):
        names, cells, tokens, offsets = ledger
        for sort, label in (("roles", self.roles.label), ("kinds", self.kinds.label), ("models", self.model)):
            for name in names[sort]:
                label(name)
        for one in cells:
            role, kind = self.roles.label(one["role"]), self.kinds.label(one["kind"])
            cell = self.pair(role, kind)
            for name in ("records", "done", "dead", "nacks", "unpriced", "spend"):
                cell[name] += one[name]
            self.wait[role].add(*one["wait"])
            self.time[role].add(*one["time"])
        for one in tokens:
            self.add_tokens(self.kinds.label(one["kind"]), self.model(one["model"]), one)
        for n, offset in offsets.items():
            self.generations[n] = max(offset, self.generations.get(n, 0))

    def interval(self, histogram, start, end):
        if start is None or end is None or end > self.now or start - end >= 1_000_000:
            return
        histogram.observe(max(0, end - start))

    def record(self, doc):
        root = doc.root
        role = self.roles.label(doc.text(root.value["to"]))
        kind = self.kinds.label(doc.text(root.value["kind"]))
        cell = self.pair(role, kind)
        status = doc.text(root.value["status"])
        status = status if status in STATUSES else "other"

        cell["records"] += 1
        cell["status"][status] = cell["status"].get(status, 0) + 1
        if status in ("done", "dead"):
            cell[status] += 1

        ts = time_of(doc, root.value["ts"])
        if status in ("queued", "running", "human"):
            self.oldest[role, status] = min(ts, self.oldest.get((role, status), ts))

        started, finished = (time_of(doc, present(root, name)) for name in ("started_ts", "finished_ts"))
        self.interval(self.wait[role], ts, started)
        self.interval(self.time[role], started, finished)

        cell["nacks"] += max(number_of_nacks(doc) or 0, 1 if status == "nack" else 0)

        spend, unpriced, used = spend_of(doc, present(root, "spend"), self.prices)
        cell["spend"] += spend
        cell["unpriced"] += unpriced
        for model, tokens in used:
            self.add_tokens(kind, self.model(model), {t: getattr(tokens, t) for t in TOKEN_TYPES})

        if not doubt_of(doc):
            self.oversized += bool(Oversized(doc, self.max_bytes).moved)


# -------------------------------------------------------------------------------------------------------------- files


def is_regular(path):
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def whole_lines(data):
    lines = data.split(b"\n")
    lines.pop()  # after the last newline: maybe a write in flight
    return lines


def read(path):
    try:
        with open(path, "rb") as f:
            return f.read(), os.fstat(f.fileno())
    except FileNotFoundError:
        return b"", None


def stem(name):
    return name[: -len(".jsonl")] if name.endswith(".jsonl") else name


def count_queue(path, count):
    """Counts the queue and its late lines; returns (bytes of the queue, generations not yet drained)."""
    folder, name = os.path.split(os.path.abspath(path))
    data, status = read(path)
    count.references(data)
    for number, line in enumerate(whole_lines(data), 1):
        count.line(line, number)
    prefix = stem(name) + ".gen."
    found = []
    for other in os.listdir(folder):
        digits = other[len(prefix) :] if other.startswith(prefix) else ""
        if re.fullmatch(r"0|[1-9][0-9]*", digits) and is_regular(os.path.join(folder, other)):
            found.append(int(digits))
    undrained = 0
    for n in sorted(found):
        earlier, inode = read(os.path.join(folder, f"{prefix}{n}"))
        if n in count.generations:
            undrained += 1
            offset = count.generations[n]
            before = earlier.count(b"\n", 0, offset)
            count.references(earlier[offset:])
            for number, line in enumerate(whole_lines(earlier[offset:]), before + 1):
                count.line(line, f"gen.{n}:{number}")
        elif status is None or (inode.st_dev, inode.st_ino) != (status.st_dev, status.st_ino):
            undrained += 1
    return len(data), undrained


def blobs(folder):
    """(objects, bytes) of the blob store."""
    objects = size = 0
    if not os.path.isdir(folder):
        return 0, 0
    for aa in os.listdir(folder):
        if not re.fullmatch(r"[0-9a-f]{2}", aa) or not os.path.isdir(os.path.join(folder, aa)):
            continue
        for name in os.listdir(os.path.join(folder, aa)):
            path = os.path.join(folder, aa, name)
            if re.fullmatch(r"[0-9a-f]{64}", name) and name.startswith(aa) and is_regular(path):
                objects += 1
                size += os.lstat(path).st_size
    return objects, size


# ------------------------------------------------------------------------------------------------------------- output


def canonical(numerator, denominator=1):
    """An integer as such, anything else as the shortest text of the nearest double."""
    if numerator % denominator == 0:
        return str(numerator // denominator)
    return repr(numerator / denominator)


def escape(value):
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def sample(name, value, **labels):
    inner = ",".join(f'{k}="{escape(v)}"' for k, v in sorted(labels.items()))
    return f"{name}{{{inner}}} {value}" if labels else f"{name} {value}"


def shown(count):
    """(roles, kinds, pairs) that get series."""
    seen_roles = {role for role, _ in count.pairs}
    seen_kinds = {kind for _, kind in count.pairs}
    roles, kinds = seen_roles, seen_kinds
    if count.roles.configured is not None:
        roles = set(count.roles.configured) | (seen_roles & {"other"})
    if count.kinds.configured is not None:
        kinds = set(count.kinds.configured) | (seen_kinds & {"other"})
    if count.roles.configured is None and count.kinds.configured is None:
        pairs = set(count.pairs)
    else:
        pairs = {(role, kind) for role in roles for kind in kinds}
    return roles, kinds, pairs


def prom(count, size, undrained, objects, blob_bytes):
    out = []
    roles, _, pairs = shown(count)
    empty = dict.fromkeys(("records", "done", "dead", "nacks", "spend", "unpriced"), 0)
    empty["status"] = {}
    for role, kind in pairs:
        cell = count.pairs.get((role, kind), empty)
        at = dict(role=role, kind=kind)
        for status in STATUSES + (("other",) if cell["status"].get("other") else ()):
            out.append(sample("handoff_queue_records", cell["status"].get(status, 0), status=status, **at))
        out.append(sample("handoff_records_total", cell["records"], **at))
        for outcome in ("done", "dead"):
            out.append(sample("handoff_finished_total", cell[outcome], outcome=outcome, **at))
        out.append(sample("handoff_nacks_total", cell["nacks"], **at))
        out.append(sample("handoff_spend_usd_total", canonical(cell["spend"], UNIT), **at))
        out.append(sample("handoff_spend_unpriced_records_total", cell["unpriced"], **at))
    for name, histograms in (("handoff_queue_wait_seconds", count.wait), ("handoff_role_time_seconds", count.time)):
        for role in roles:
            histogram = histograms.get(role) or Histogram()
            total = 0
            for bound, n in zip([str(b) for b in BOUNDS] + ["+Inf"], histogram.buckets):
                total += n
                out.append(sample(name + "_bucket", total, role=role, le=bound))
            out.append(sample(name + "_sum", canonical(histogram.sum_us, 1_000_000), role=role))
            out.append(sample(name + "_count", total, role=role))
    for (role, status), us in count.oldest.items():
        out.append(sample("handoff_queue_oldest_timestamp_seconds", canonical(us, 1_000_000), role=role, status=status))
    for (kind, model), tokens in count.tokens.items():
        for token_type, n in tokens.items():
            out.append(sample("handoff_tokens_total", n, kind=kind, model=model, token_type=token_type))
    for reason in REASONS:
        n = sum(1 for _, r in count.malformed if r == reason)
        out.append(sample("handoff_queue_malformed_lines", n, reason=reason))
    out.append(sample("handoff_queue_bytes", size))
    out.append(sample("handoff_queue_oversized_records", count.oversized))
    out.append(sample("handoff_queue_generations", undrained))
    out.append(sample("handoff_blob_objects", objects))
    out.append(sample("handoff_blob_bytes", blob_bytes))
    out.append(sample("handoff_blob_missing_references", count.missing))
    out.append(sample("handoff_exporter_success", 1))
    out.append(sample("handoff_exporter_last_success_timestamp_seconds", canonical(count.now, 1_000_000)))
    return b"".join(sorted(line.encode("utf-8") + b"\n" for line in out))


def money_text(value):
    integer, fraction = divmod(value, UNIT)
    fraction = str(fraction).zfill(PLACES).rstrip("0")
    return f"{integer}.{fraction}" if fraction else str(integer)


def headline(count):
    _, kinds, _ = shown(count)
    depth, nacks = {}, {}
    spend, unpriced = dict.fromkeys(sorted(kinds), 0), dict.fromkeys(sorted(kinds), 0)
    for (role, kind), cell in sorted(count.pairs.items()):
        for status, n in sorted(cell["status"].items()):
            by_status = depth.setdefault(role, {})
            by_status[status] = by_status.get(status, 0) + n
        nacks[role] = nacks.get(role, 0) + cell["nacks"]
        spend[kind] += cell["spend"]
        unpriced[kind] += cell["unpriced"]
    return {
        "depth": depth,
        "nacks": nacks,
        "spend_usd": {kind: money_text(v) for kind, v in spend.items()},
        "unpriced": unpriced,
        "malformed": count.malformed,
    }


def main(argv=None):
    parser = argparse.ArgumentParser(description="Count a handoff queue again, from the format's description alone.")
    parser.add_argument("queue")
    parser.add_argument("--now", required=True)
    parser.add_argument("--roles", type=lambda s: [v for v in s.split(",") if v])
    parser.add_argument("--kinds", type=lambda s: [v for v in s.split(",") if v])
    parser.add_argument("--prices")
    parser.add_argument("--blob-dir")
    parser.add_argument("--max-line", type=int, default=64 << 20)
    parser.add_argument("--max-bytes", type=int, default=MAX_BYTES)
    parser.add_argument("--format", choices=("prom", "json"), default="prom")
    args = parser.parse_args(argv)
    now = micros_of_text(args.now)
    if now is None:
        parser.error("--now is not an RFC 3339 time")
    blob_dir = args.blob_dir or os.path.join(os.path.dirname(os.path.abspath(args.queue)), "blob")
    count = Count(now, args.roles, args.kinds, PriceMap(args.prices), args.max_line, blob_dir, args.max_bytes)
    size, undrained = count_queue(args.queue, count)
    if args.format == "json":
        print(json.dumps(headline(count), indent=2, ensure_ascii=True))
    else:
        sys.stdout.buffer.write(prom(count, size, undrained, *blobs(blob_dir)))


if __name__ == "__main__":
    main()
