#!/usr/bin/env python3
"""Writes the case folders beside it, byte for byte. Not needed to run the tests: its output is committed.

A case is a folder with queue.jsonl, expected.prom and `about`, and if it needs them `args` (one argument a line, paths
relative to the folder), prices.json, blob/ and queue.gen.<n>. The time is 2026-11-29T12:00:00Z in all of them.

The lines under "by hand" in `about` were worked out from src/FORMAT.md before anything was run. This script checks that
tests/recount.py gives every one of them, and only then writes the rest of expected.prom from it.
"""

import hashlib
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
RECOUNT = HERE.parent.parent / "recount.py"
NOW = "2026-11-29T12:00:00Z"  # 1795953600
CASES = {}


def case(name, about, queue, expect=(), absent=(), args=(), **files):
    assert name not in CASES
    flat = []
    for e in expect:
        flat.extend([e] if isinstance(e, str) else e)
    CASES[name] = (about, queue, flat, absent, args, files)


def rec(extra=b"", id=b'"a"', ts=b"1795950000", kind=b'"classify"', frm=b'"triage"', to=b'"researcher"', payload=b"{}", status=b'"done"'):
    """One line as the existing workers write it; 1795950000 is an hour before now."""
    return b'{"id":%s,"ts":%s,"kind":%s,"from":%s,"to":%s,"payload":%s,"status":%s%s}' % (
        id, ts, kind, frm, to, payload, status, b"," + extra if extra else b"")


def lines(*all):
    return b"".join(line + b"\n" for line in all)


# The expectations, in the form of expected.prom.
def at(role, kind):
    return f'kind="{kind}",role="{role}"'


def status(name, n, role="researcher", kind="classify"):
    return f'handoff_queue_records{{{at(role, kind)},status="{name}"}} {n}'


def total(n, role="researcher", kind="classify"):
    return f"handoff_records_total{{{at(role, kind)}}} {n}"


def finished(outcome, n, role="researcher", kind="classify"):
    return f'handoff_finished_total{{kind="{kind}",outcome="{outcome}",role="{role}"}} {n}'


def nacks(n, role="researcher", kind="classify"):
    return f"handoff_nacks_total{{{at(role, kind)}}} {n}"


def usd(n, role="researcher", kind="classify"):
    return f"handoff_spend_usd_total{{{at(role, kind)}}} {n}"


def unpriced(n, role="researcher", kind="classify"):
    return f"handoff_spend_unpriced_records_total{{{at(role, kind)}}} {n}"


def tokens(model, input, output, cache_read, cache_creation, kind="classify"):
    values = dict(input=input, output=output, cache_read=cache_read, cache_creation=cache_creation)
    return [f'handoff_tokens_total{{kind="{kind}",model="{model}",token_type="{t}"}} {n}' for t, n in values.items()]


def bad(**reasons):
    """Every reason that is not named is 0."""
    known = ("not_an_envelope", "not_json", "not_utf8", "too_long", "unsupported_version")
    return [f'handoff_queue_malformed_lines{{reason="{r}"}} {reasons.get(r, 0)}' for r in known]


def histogram(name, count, sum, role="researcher", **le):
    """le10=3 is the cumulative count of the bucket up to 10 s."""
    full = {"wait": "handoff_queue_wait_seconds", "time": "handoff_role_time_seconds"}[name]
    out = [f'{full}_bucket{{le="{k[2:]}",role="{role}"}} {n}' for k, n in le.items()]
    return out + [f'{full}_bucket{{le="+Inf",role="{role}"}} {count}', f'{full}_sum{{role="{role}"}} {sum}', f'{full}_count{{role="{role}"}} {count}']


def oldest(status, ts, role="researcher"):
    return f'handoff_queue_oldest_timestamp_seconds{{role="{role}",status="{status}"}} {ts}'


def oversized(n):
    return f"handoff_queue_oversized_records {n}"


def generations(n):
    return f"handoff_queue_generations {n}"


# ------------------------------------------------------------------------------------------------------- the plain ones

case("empty", "A queue of no bytes has the unlabelled families only, and nothing of a role or a kind.",
     b"",
     [bad(), "handoff_queue_bytes 0", oversized(0), generations(0), "handoff_exporter_success 1", "handoff_blob_objects 0",
      "handoff_exporter_last_success_timestamp_seconds 1795953600"],
     absent=["role=", "kind="])

case("workers", "Lines just as the existing Python workers write them; there is no series for a pair of role and kind that no record has.",
     lines(
         b'{"id":"7d0c9a3e-2f61-4d1b-9a53-0a7b6f6b1c01","ts":1795900000,"kind":"classify","from":"triage","to":"researcher","payload":{"summary":"a"},"status":"done"}',
         b'{"id":"7d0c9a3e-2f61-4d1b-9a53-0a7b6f6b1c02","ts":1795900010,"kind":"classify","from":"triage","to":"researcher","payload":{},"status":"queued"}',
         b'{"id":"7d0c9a3e-2f61-4d1b-9a53-0a7b6f6b1c03","ts":1795900005,"kind":"classify","from":"triage","to":"researcher","payload":{},"status":"queued"}',
         b'{"id":"7d0c9a3e-2f61-4d1b-9a53-0a7b6f6b1c04","ts":1795900020,"kind":"file_bug","from":"researcher","to":"patcher","payload":{},"status":"dead"}'),
     [status("done", 1), status("queued", 2), total(3), finished("done", 1), finished("dead", 0), nacks(0), usd(0), unpriced(0),
      status("dead", 1, "patcher", "file_bug"), finished("dead", 1, "patcher", "file_bug"), oldest("queued", 1795900005), bad(),
      histogram("wait", 0, 0), histogram("time", 0, 0, "patcher")],
     absent=['kind="file_bug",role="researcher"', 'kind="classify",role="patcher"', 'status="other"', "handoff_tokens_total", 'role="triage"'])

case("statuses", "The six statuses each stand for themselves; any other string, whatever its case, is `other`.",
     lines(*[rec(status=s) for s in (b'"queued"', b'"running"', b'"done"', b'"nack"', b'"human"', b'"dead"', b'"paused"', b'""', b'"Done"')]),
     [status("queued", 1), status("running", 1), status("done", 1), status("nack", 1), status("human", 1), status("dead", 1), status("other", 3),
      total(9), nacks(1), finished("done", 1), finished("dead", 1), oldest("queued", 1795950000), oldest("running", 1795950000), oldest("human", 1795950000)])

case("versions", "A version that is absent, null, 1 or 2 is read; every other value is unsupported_version, even before the envelope is looked at.",
     lines(rec(), rec(b'"protocol_version":null'), rec(b'"protocol_version":1'), rec(b'"protocol_version":2'),
           rec(b'"protocol_version":3'), rec(b'"protocol_version":0'), rec(b'"protocol_version":-1'), rec(b'"protocol_version":"1"'),
           rec(b'"protocol_version":true'), rec(b'"protocol_version":1.5'), rec(b'"protocol_version":[1]'),
           rec(b'"protocol_version":123456789012345678901234567890'),
           b'{"protocol_version":3}'),
     [total(4), bad(unsupported_version=9)])

case("nulls", "null in an optional field means absent: no doubt, no spend, no interval.",
     lines(rec(b'"protocol_version":null,"started_ts":null,"finished_ts":null,"nacks":null,"spend":null,"run_id":null,"correlation_id":null,"parent":null,"owner":null,"result":null',
               payload=b'{"big":"' + b"x" * 8200 + b'"}')),
     [total(1), nacks(0), unpriced(0), usd(0), histogram("wait", 0, 0), bad(), oversized(1)])

case("unknown_fields", "Fields that the format does not know change nothing, whatever they hold.",
     lines(rec(b'"priority":9,"":null,"Status":"queued","tags":["a",{"b":[]}],"ledger":true', status=b'"running"')),
     [status("running", 1), total(1), bad()])

case("not_an_envelope", "Not an object, or a required string missing or of another type, or an empty id. `from`, `to`, `kind` and `status` may be empty, and payload is not judged.",
     lines(b"[]", b'"text"', b"17", b"null", b"true", b"NaN", b"{}",
           b'{"ts":1795950000,"kind":"k","from":"f","to":"t","payload":{},"status":"done"}',
           b'{"id":"a","kind":"k","from":"f","to":"t","payload":{},"status":"done"}',
           b'{"id":"a","ts":1795950000,"from":"f","to":"t","payload":{},"status":"done"}',
           b'{"id":"a","ts":1795950000,"kind":"k","to":"t","payload":{},"status":"done"}',
           b'{"id":"a","ts":1795950000,"kind":"k","from":"f","payload":{},"status":"done"}',
           b'{"id":"a","ts":1795950000,"kind":"k","from":"f","to":"t","payload":{}}',
           rec(id=b'""'), rec(id=b"7"), rec(id=b"null"), rec(kind=b"null"), rec(frm=b"1"), rec(to=b'["researcher"]'), rec(status=b"true"),
           # From here on they are records.
           b'{"id":"a","ts":1795950000,"kind":"classify","from":"","to":"researcher","status":"done"}',
           rec(payload=b"null"), rec(payload=b'"text"'), rec(payload=b"[1]"), rec(id=b'" "'),
           rec(kind=b'""', to=b'""', status=b'""')),
     [bad(not_an_envelope=20), total(5), status("other", 1, "", ""), total(1, "", "")])

# ------------------------------------------------------------------------------------------------------ damaged lines

case("torn_tail", "Bytes after the last newline may be a write in flight: they are neither a record nor malformed.",
     lines(rec()) + rec(id=b'"b"')[:70],
     [total(1), bad()])

case("whole_tail", "A whole record without its newline is no line yet either.",
     lines(rec()) + rec(id=b'"b"'),
     [total(1), bad()])

case("torn_tail_then_blank", "A torn write, ended by a later newline, is one malformed line; the blank lines after it mean nothing.",
     lines(rec(), rec(id=b'"b"')[:70], b"", b" \t", rec(id=b'"c"')),
     [total(2), bad(not_json=1)])

case("glued", "Two objects on one line, and an append glued onto a torn write: malformed as a whole, not half read.",
     lines(rec() + rec(id=b'"b"'), rec() + b" " + rec(id=b'"b"'), rec()[:90] + rec(id=b'"c"'), rec(id=b'"d"')),
     [total(1), bad(not_json=3)])

case("one_bad_among_good", "One bad line costs one line.",
     lines(rec(id=b'"a"'), rec(id=b'"b"'), b"{oops", rec(id=b'"c"'), rec(id=b'"d"')),
     [total(4), status("done", 4), bad(not_json=1)])

case("nul_run", "Runs of NUL after a power loss: as a line, before a record, inside a string, and as an unterminated tail (no line). An escaped NUL in a string is well formed.",
     lines(rec(), b"\0" * 512, b"\0" * 16 + rec(), rec(payload=b'{"a":"\0\0"}'), rec(payload=b'{"a":"\\u0000"}')) + b"\0" * 64,
     [total(2), bad(not_json=3)])

case("bom", "A byte order mark at the start of any line is skipped; a second one, or one elsewhere outside a string, is not JSON. Inside a string it is content.",
     lines(b"\xef\xbb\xbf" + rec(), rec(), b"\xef\xbb\xbf" + rec(), b"\xef\xbb\xbf\xef\xbb\xbf" + rec(), rec() + b"\xef\xbb\xbf", b" \xef\xbb\xbf" + rec(),
           rec(payload=b'{"a":"\xef\xbb\xbf"}')),
     [total(4), bad(not_json=3)])

case("crlf", "CRLF is accepted, CR alone ends no line, and white space around a record or alone on a line means nothing.",
     b'{"id":"a","ts":1795950000,"kind":"classify","from":"triage","to":"researcher","payload":{},"status":"done"}\r\n'
     b"\r\n"
     b"\n"
     b" \t \r\n"
     b' \t{"id":"b","ts":1795950000,"kind":"classify","from":"triage","to":"researcher","payload":{},\r"status":"done"}\t \r\n'
     b'{"id":"c","ts":1795950000,"kind":"classify","from":"triage","to":"researcher","payload":{},"status":"done"}\r{}\n',
     [total(2), bad(not_json=1)])

case("not_utf8", "Invalid UTF-8 anywhere in a line comes before every other judgement but its length: a stray byte, an overlong form, an encoded surrogate, a code point too high, a cut character.",
     lines(rec(payload=b'{"a":"caf\xe9"}'), rec(payload=b'{"a":"\xc0\x80"}'), rec(payload=b'{"a":"\xed\xa0\xbd"}'), rec(payload=b'{"a":"\xf4\x90\x80\x80"}'),
           b"{oops \xff", b"\xe2\x82", b"\xff\xfe", rec(payload=b'{"a":"caf\xc3\xa9 \xf0\x9f\x98\x80"}')),
     [total(1), bad(not_utf8=7)])

case("line_separators", "U+2028, U+2029, U+0085, form feed and vertical tab end no line; outside a string none of them is white space.",
     lines(rec(payload=b'{"a":"x\xe2\x80\xa8y\xe2\x80\xa9z\xc2\x85"}'), rec(payload=b'{"a":"x\\u2028y"}'), rec() + b"\xe2\x80\xa8", b"\xc2\x85", b"\x0c", rec() + b"\x0b",
           b"\xc2\xa0", rec()),
     [total(3), bad(not_json=5)])

case("not_json", "What looks like JSON and is not, by RFC 8259.",
     lines(rec()[:-1] + b",}", rec() + b",", rec().replace(b'"', b"'"), rec() + b" // done", rec(ts=b"01795950000"), rec(ts=b"1795950000."), rec(ts=b"+1795950000"), rec(ts=b".5"),
           rec(ts=b"0x6B0C"), rec(payload=b'{"a":"tab\there"}'), rec(payload=b'{"a":"\\x41"}'), rec(payload=b'{"a":"\\u12g4"}'), rec(payload=b'{"a":True}'), rec(payload=b"{a:1}"),
           rec(payload=b'{"a" 1}'), rec(payload=b'{"a":[1 2]}'), rec(payload=b'{"a":[1,]}'), rec(payload=b'{"a":1e}'), rec(payload=b'{"a":-}'), rec(payload=b"{}}"), rec()[:-1],
           rec(payload=b'{"a":"\x7f"}')),
     [total(1), bad(not_json=21)])

# rec() is 107 bytes long; with {"a":"…"} of n characters in its payload it is 113 + n.
case("too_long", "--max-line 200: a line of 200 bytes is read, one of 201 is not; its carriage return counts, its newline does not. Being too long comes before bad UTF-8 and bad JSON.",
     lines(rec(payload=b'{"a":"' + b"x" * 87 + b'"}'), rec(payload=b'{"a":"' + b"x" * 88 + b'"}'), rec(payload=b'{"a":"' + b"x" * 87 + b'"}') + b"\r", b"\xff" * 201, b"{" * 201,
           b"\xff" * 200, b"{" * 200, b"x" * 200 + b"blob/cd/" + b"cd" * 32),
     [total(1), bad(too_long=5, not_utf8=1, not_json=1), "handoff_blob_missing_references 1"],
     args=["--max-line", "200"])

case("surrogates", "Lone surrogate escapes are read as U+FFFD, one for each; a pair is one character. In an envelope field they cast doubt (the record is not counted as oversized), inside payload they do not.",
     lines(rec(to=b'"r\\ud83d"'), rec(to=b'"r\\ude00x"'), rec(to=b'"\\ud83d\\ude00"'), rec(to=b'"\\ude00\\ud83d"'), rec(to=b'"\\ud83d\\ud83d\\ude00"'), rec(to=b'"\\\\ud83d"'),
           rec(id=b'"\\ud800"'),
           rec(payload=b'{"\\ud83d":"\\udc00","big":"' + b"x" * 8200 + b'"}'),
           rec(frm=b'"\\udbff"', payload=b'{"big":"' + b"x" * 8200 + b'"}'),
           rec(frm=b'"\\ud83d\\ude00"', payload=b'{"big":"' + b"x" * 8200 + b'"}')),
     [total(1, "r\ufffd"), total(1, "r\ufffdx"), total(1, "\U0001f600"), total(1, "\ufffd\ufffd"), total(1, "\ufffd\U0001f600"), total(1, "\\\\ud83d"), total(4), oversized(2), bad()])

case("duplicate_keys", "The last of duplicate keys counts, also when it makes the line malformed and when a key is written with escapes. In the envelope they cast doubt, inside payload they do not.",
     lines(b'{"id":"a","ts":1795950000,"kind":"classify","from":"triage","to":"researcher","payload":{},"status":"queued","status":"done"}',
           b'{"id":"b","ts":"never","kind":"classify","from":"triage","to":"nobody","payload":{},"status":"done","ts":1795950000,"\\u0074o":"researcher"}',
           b'{"id":"c","ts":1795950000,"kind":"classify","from":"triage","to":"researcher","payload":{},"status":"done","id":7}',
           b'{"id":"d","ts":1795950000,"kind":"classify","from":"triage","to":"researcher","payload":{},"status":"done","spend":5,"spend":0.25}',
           b'{"id":"e","ts":1795950000,"kind":"classify","from":"triage","to":"researcher","payload":{},"status":"done","protocol_version":9,"protocol_version":2}',
           rec(payload=b'{"a":1,"a":2,"big":"' + b"x" * 8200 + b'"}'),
           rec(b'"status":"done"', payload=b'{"big":"' + b"x" * 8200 + b'"}'),
           rec(b'"owner":{},"owner":null', payload=b'{"big":"' + b"x" * 8200 + b'"}'),
           rec(b'"mine":1,"mine":2', payload=b'{"big":"' + b"x" * 8200 + b'"}'),
           rec(b'"spend":{"cost_usd":9,"cost_usd":0.5}', payload=b'{"big":"' + b"x" * 8200 + b'"}')),
     [status("done", 9), status("queued", 0), total(9), usd("0.75"), unpriced(0), oversized(3), bad(not_an_envelope=1)],
     absent=["nobody"])

case("big_numbers", "Integers and floats of any size pass where the format gives no meaning to them; as a time they are unreadable, as a cost unusable, as a count unreadable.",
     lines(rec(b'"x":' + b"9" * 400, payload=b'{"a":123456789012345678901234567890,"b":1e400,"c":-1E-9999999999999999999999,"d":0.' + b"1" * 400 + b"}"),
           rec(ts=b"1e400"), rec(ts=b"9" * 400), rec(ts=b"1795950000" + b"0" * 40 + b"e-40"),
           rec(b'"started_ts":1e400,"finished_ts":' + b"9" * 400),
           rec(b'"spend":1e400'), rec(b'"spend":{"cost_usd":' + b"9" * 400 + b"}"), rec(b'"nacks":18446744073709551616'),
           rec(b'"spend":{"cost_usd":0.5,"model":"m","input_tokens":' + b"9" * 400 + b',"output_tokens":3}')),
     [total(7), bad(not_an_envelope=2), usd("0.5"), unpriced(2), nacks(0), tokens("m", 0, 3, 0, 0), histogram("wait", 0, 0)])

case("nan", "NaN, Infinity and -Infinity stand where a value may, and no field takes them. Anywhere in a line they cast doubt. Other spellings are not JSON.",
     lines(rec(payload=b'{"score":NaN,"a":[Infinity,-Infinity]}'), rec(payload=b'{"score":NaN,"big":"' + b"x" * 8200 + b'"}'),
           rec(b'"x":[Infinity]', payload=b'{"big":"' + b"x" * 8200 + b'"}'), rec(payload=b'{"score":"NaN","big":"' + b"x" * 8200 + b'"}'),
           rec(ts=b"NaN"), rec(ts=b"Infinity"), rec(b'"spend":NaN'), rec(b'"spend":{"cost_usd":NaN}'), rec(b'"spend":[-Infinity,0.5]'),
           rec(b'"nacks":NaN'), rec(b'"started_ts":-Infinity'), rec(b'"protocol_version":NaN'), rec(b'"status":NaN'),
           rec(ts=b"nan"), rec(ts=b"-NaN"), rec(ts=b"+Infinity"), rec(ts=b"inf"), rec(payload=b"{NaN:1}")),
     [total(9), bad(not_an_envelope=3, unsupported_version=1, not_json=5), usd("0.5"), unpriced(3), nacks(0), oversized(1), histogram("wait", 0, 0)])

case("nesting", "Nesting of a few thousand levels, of arrays and of objects, in payload, in an unknown field and where a field was expected; one bracket short is not JSON.",
     lines(rec(payload=b'{"a":' + b"[" * 3000 + b"]" * 3000 + b"}"), rec(payload=b'{"a":' * 3000 + b"{}" + b"}" * 3000), rec(b'"x":' + b"[" * 3000 + b"1" + b"]" * 3000),
           rec(b'"started_ts":' + b"[" * 3000 + b"]" * 3000), rec(b'"spend":' + b"[" * 3000 + b"]" * 3000), rec(b'"nacks":' + b"[" * 3000 + b"]" * 3000),
           rec(payload=b'{"a":' + b"[" * 3000 + b"]" * 2999 + b"}"), b"[" * 3000 + b"]" * 3000, b"[" * 3000,
           rec(payload=b'{"a":' + b"[" * 4096 + b"]" * 4096 + b"}"), rec(payload=b'{"a":' + b"[" * 4097 + b"]" * 4097 + b"}")),
     # The first is 6000 bytes and the last but one just 8192: not oversized. 3000 objects take 5 * 2999 + 2 + 2999 bytes, the last 8194.
     [total(8), bad(not_json=2, not_an_envelope=1), unpriced(1), nacks(1), oversized(2)])

# -------------------------------------------------------------------------------------------------------------- times

case("times", "Every readable form of a time, each in a role of its own, and every unreadable one.",
     lines(rec(to=b'"int"', ts=b"1795950000", status=b'"queued"'), rec(to=b'"float"', ts=b"1795950000.25", status=b'"queued"'), rec(to=b'"exp"', ts=b"1.79595E9", status=b'"queued"'),
           rec(to=b'"ms"', ts=b"1795950000250", status=b'"queued"'), rec(to=b'"msfloat"', ts=b"1795950000250.5", status=b'"queued"'), rec(to=b'"zero"', ts=b"0", status=b'"queued"'),
           rec(to=b'"lasts"', ts=b"99999999999", status=b'"queued"'), rec(to=b'"firstms"', ts=b"1e11", status=b'"queued"'), rec(to=b'"lastms"', ts=b"99999999999999", status=b'"queued"'),
           rec(to=b'"z"', ts=b'"2026-11-29T11:00:00Z"', status=b'"queued"'), rec(to=b'"lower"', ts=b'"2026-11-29t11:00:00z"', status=b'"queued"'),
           rec(to=b'"plus"', ts=b'"2026-11-29T12:30:00.25+01:30"', status=b'"queued"'), rec(to=b'"minus"', ts=b'"2026-11-29T06:00:00-05:00"', status=b'"queued"'),
           rec(to=b'"unknown_offset"', ts=b'"2026-11-29T11:00:00-00:00"', status=b'"queued"'), rec(to=b'"nanos"', ts=b'"2026-11-29T11:00:00.123456789Z"', status=b'"queued"'),
           rec(to=b'"nearest"', ts=b'"2026-11-29T11:00:00.12345651Z"', status=b'"queued"'),
           rec(to=b'"carry"', ts=b'"2026-11-29T10:59:59.9999999Z"', status=b'"queued"'), rec(to=b'"space"', ts=b'"2026-11-29 11:00:00Z"', status=b'"queued"'), rec(to=b'"leap"', ts=b'"2024-02-29T00:00:00Z"', status=b'"queued"'),
           rec(to=b'"escaped"', ts=b'"2026-11-29\\u005411:00:00Z"', status=b'"queued"'), rec(to=b'"finefloat"', ts=b"1795950000.1234567", status=b'"queued"'),
           rec(to=b'"repr"', ts=b"1795950000.9444904", status=b'"queued"'), rec(to=b'"justbelow"', ts=b"1795950000.00000049999", status=b'"queued"'),
           rec(to=b'"justabove"', ts=b"1795950000000.0005", status=b'"queued"'),
           *[rec(ts=t) for t in (b"-1", b"-0.5", b"1e14", b"1e400", b'"1795950000"', b'"2026-11-29"', b'"2026-11-29T11:00:00"', b'"2026-11-29T11:00Z"', b'"2026-11-29T11:00:00+0100"',
                                 b'"2026-02-29T11:00:00Z"', b'"2026-13-01T11:00:00Z"', b'"2026-11-29T24:00:00Z"', b'"2026-11-29T11:60:00Z"', b'"2026-11-29T11:00:00.Z"',
                                 b'"1969-12-31T23:59:59Z"', b'"5138-11-16T09:46:40Z"', b'"20261129T110000Z"', b'" 2026-11-29T11:00:00Z"', b'""', b"true", b"null", b"{}", b"[1795950000]")]),
     [oldest("queued", 1795950000, "int"), oldest("queued", "1795950000.25", "float"), oldest("queued", 1795950000, "exp"), oldest("queued", "1795950000.25", "ms"),
      oldest("queued", "1795950000.2505", "msfloat"), oldest("queued", 0, "zero"), oldest("queued", 99999999999, "lasts"), oldest("queued", 100000000, "firstms"),
      oldest("queued", "99999999999.999", "lastms"), oldest("queued", 1795950000, "z"), oldest("queued", 1795950000, "lower"), oldest("queued", "1795950000.25", "plus"),
      oldest("queued", 1795950000, "minus"), oldest("queued", 1795950000, "unknown_offset"), oldest("queued", "1795950000.123457", "nanos"), oldest("queued", "1795950000.123457", "nearest"), oldest("queued", 1795950000, "carry"),
      oldest("queued", 1795950000, "space"), oldest("queued", 1709164800, "leap"), oldest("queued", 1795950000, "escaped"), oldest("queued", "1795950000.123457", "finefloat"),
      oldest("queued", "1795950000.94449", "repr"), oldest("queued", 1795950000, "justbelow"), oldest("queued", "1795950000.000001", "justabove"), bad(not_an_envelope=23)])

case("milliseconds", "Milliseconds and seconds in one record give one duration: neither is taken for the other.",
     lines(rec(b'"started_ts":1795950020,"finished_ts":1795950080500', ts=b"1795950000000"), rec(b'"started_ts":"2026-11-29T11:00:20Z","finished_ts":1795950080.5')),
     [histogram("wait", 2, 40, le10=0, le30=2), histogram("time", 2, 121, le60=0, le300=2), bad()])

case("future", "A time in the future is counted where it stands, and no interval that ends in the future is observed.",
     lines(rec(ts=b"1899999999", status=b'"queued"'), rec(ts=b"1795950000", status=b'"queued"'), rec(b'"started_ts":1795953601'),
           rec(b'"started_ts":1795950010,"finished_ts":1895950010'), rec(b'"started_ts":1899999999', ts=b"1899999998"), rec(ts=b"4102444800000", to=b'"patcher"', status=b'"human"')),
     [total(5), status("queued", 2), oldest("queued", 1795950000), histogram("wait", 1, 10, le10=1), histogram("time", 0, 0), oldest("human", 4102444800, "patcher"), bad()])

case("intervals", "Ends up to a second before the start count as 0, from a second on not at all; an end at now is observed, a microsecond later it is not; an unreadable end is absent.",
     lines(rec(b'"started_ts":1795950020,"finished_ts":1795950065'), rec(b'"started_ts":1795949999.6,"finished_ts":1795949999.6'), rec(b'"started_ts":1795949999,"finished_ts":1795950059'),
           rec(b'"started_ts":1795949999.000001'), rec(b'"started_ts":1795953600,"finished_ts":1795953600.000001'), rec(b'"started_ts":1795953601'), rec(b'"finished_ts":1795950005'),
           rec(b'"started_ts":"soon","finished_ts":1795950005'), rec(b'"started_ts":1795950000', ts=b"1795950000.7"),
           rec(b'"started_ts":1795950000,"finished_ts":"soon"', to=b'"patcher"', status=b'"queued"')),
     # wait: 20, 0, -, 0, 3600, -, -, -, 0; time: 45, 0, 60
     [histogram("wait", 5, 3620, le10=3, le30=4, le1800=4, le3600=5), histogram("time", 3, 105, le10=1, le30=1, le60=3), histogram("wait", 1, 0, "patcher", le10=1),
      histogram("time", 0, 0, "patcher")])

case("buckets", "Upper bounds are inclusive; a microsecond more is the next bucket.",
     lines(*[rec(b'"started_ts":1795950000', ts=t) for t in (
         b"1795949990", b"1795949989.999999", b"1795949970", b"1795949940", b"1795949700", b"1795949100", b"1795948200", b"1795946400", b"1795935600", b"1795906800",
         b"1795863600", b"1795690800", b"1795345200", b"1795345199.999999")]),
     [histogram("wait", 14, "1619510.000002", le10=1, le30=3, le60=4, le300=5, le900=6, le1800=7, le3600=8, le14400=9, le43200=10, le86400=11, le259200=12, le604800=13)])

case("requeued", "A requeued record keeps its nacks and shows its age by `ts`; the times of its last attempt are still observed.",
     lines(rec(b'"protocol_version":2,"started_ts":1795950060,"finished_ts":1795950090,"nacks":[{"ts":1795950090,"by":"researcher","reason":"rate limited","error_class":"http_429","retryable":true}]',
               status=b'"queued"')),
     [status("queued", 1), nacks(1), oldest("queued", 1795950000), histogram("wait", 1, 60, le30=0, le60=1), histogram("time", 1, 30, le10=0, le30=1)])

case("nacks", "nacks is the array's length or the integer; anything else is absent; a record in status nack has at least one.",
     lines(rec(b'"nacks":[{"reason":"a"},{"reason":"b"}]', to=b'"a2"'), rec(b'"nacks":[1,null,"x"]', to=b'"a3"'), rec(b'"nacks":[]', to=b'"a0"'), rec(b'"nacks":[]', to=b'"n1"', status=b'"nack"'),
           rec(b'"nacks":3', to=b'"i3"', status=b'"nack"'), rec(b'"nacks":0', to=b'"n1b"', status=b'"nack"'), rec(b'"nacks":null', to=b'"n1c"', status=b'"nack"'),
           rec(to=b'"n1d"', status=b'"nack"'), rec(b'"nacks":"2"', to=b'"text"'), rec(b'"nacks":1.5', to=b'"float"'), rec(b'"nacks":-1', to=b'"neg"'),
           rec(b'"nacks":4294967295', to=b'"max"'), rec(b'"nacks":4294967296', to=b'"over"'), rec(b'"nacks":true', to=b'"bool"'), rec(b'"nacks":{"a":1}', to=b'"obj"'),
           rec(b'"nacks":"2"', to=b'"n1e"', status=b'"nack"'), rec(b'"nacks":"2"', to=b'"doubt"', payload=b'{"big":"' + b"x" * 8200 + b'"}')),
     [nacks(2, "a2"), nacks(3, "a3"), nacks(0, "a0"), nacks(1, "n1"), nacks(3, "i3"), nacks(1, "n1b"), nacks(1, "n1c"), nacks(1, "n1d"), nacks(0, "text"), nacks(0, "float"),
      nacks(0, "neg"), nacks(4294967295, "max"), nacks(0, "over"), nacks(0, "bool"), nacks(0, "obj"), nacks(1, "n1e"), nacks(0, "doubt"), bad(), oversized(0)])

# -------------------------------------------------------------------------------------------------------------- spend

case("spend_shapes", "A number, an entry, an array of either; none, null and an empty array are no spend; anything else in an entry's place is an unpriced entry. A record counts as unpriced once, and its priced entries still add up.",
     lines(rec(b'"spend":0.25', kind=b'"number"'), rec(b'"spend":{"cost_usd":0.25,"model":"m-1","input_tokens":10,"output_tokens":2}', kind=b'"entry"'),
           rec(b'"spend":[{"cost_usd":0.1,"model":"m-1"},{"cost_usd":0.2,"model":"m-2"},0.3]', kind=b'"array"'), rec(kind=b'"none"'), rec(b'"spend":null', kind=b'"null"'),
           rec(b'"spend":[]', kind=b'"empty"'), rec(b'"spend":"0.25"', kind=b'"text"'), rec(b'"spend":true', kind=b'"bool"'), rec(b'"spend":{}', kind=b'"bare"'),
           rec(b'"spend":[0.1,"x",true,{"cost_usd":0.2}]', kind=b'"mixed"'), rec(b'"spend":[[0.1]]', kind=b'"nested"'), rec(b'"spend":0', kind=b'"zero"'), rec(b'"spend":-0.5', kind=b'"negative"')),
     [usd("0.25", kind="number"), unpriced(0, kind="number"), usd("0.25", kind="entry"), tokens("m-1", 10, 2, 0, 0, "entry"), usd("0.6", kind="array"), tokens("m-2", 0, 0, 0, 0, "array"),
      usd(0, kind="none"), unpriced(0, kind="none"), unpriced(0, kind="null"), unpriced(0, kind="empty"), unpriced(1, kind="text"), unpriced(1, kind="bool"), unpriced(1, kind="bare"),
      tokens("unknown", 0, 0, 0, 0, "bare"), usd("0.3", kind="mixed"), unpriced(1, kind="mixed"), unpriced(1, kind="nested"), usd(0, kind="nested"), usd(0, kind="zero"), unpriced(0, kind="zero"),
      unpriced(1, kind="negative"), usd(0, kind="negative")],
     absent=['handoff_tokens_total{kind="number"', 'handoff_tokens_total{kind="text"', 'handoff_tokens_total{kind="nested"'])

case("spend_ids", "Entries with the same id in one record count once, the last of them, for money, tokens and being unpriced; ids are not compared across records, and one that is not a string is none.",
     lines(rec(b'"spend":[{"id":"msg_1","cost_usd":0.1,"model":"m","input_tokens":5},{"id":"msg_2","cost_usd":0.4},{"id":"msg_1","cost_usd":0.2,"model":"m","input_tokens":7}]', kind=b'"twice"'),
           rec(b'"spend":{"id":"msg_1","cost_usd":0.1,"model":"m","input_tokens":5}', kind=b'"twice"'),
           rec(b'"spend":[{"id":"a","cost_usd":-1},{"id":"a","cost_usd":1}]', kind=b'"mended"'), rec(b'"spend":[{"id":"a","cost_usd":1},{"id":"a"}]', kind=b'"spoilt"'),
           rec(b'"spend":[{"id":7,"cost_usd":1},{"id":7,"cost_usd":1},{"id":null,"cost_usd":1},{"cost_usd":1}]', kind=b'"noid"'),
           rec(b'"spend":[{"id":"\\u0061","cost_usd":1},{"id":"a","cost_usd":2}]', kind=b'"escaped"'),
           rec(b'"spend":[{"id":"","cost_usd":1},{"id":"","cost_usd":2}]', kind=b'"empty"')),
     [usd("0.7", kind="twice"), tokens("m", 12, 0, 0, 0, "twice"), usd(1, kind="mended"), unpriced(0, kind="mended"), usd(0, kind="spoilt"), unpriced(1, kind="spoilt"), usd(4, kind="noid"),
      usd(2, kind="escaped"), usd(3, kind="empty")])

case("spend_tokens", "Anthropic's cached tokens are additional; OpenAI's are a subset, in both its interfaces; a subset larger than its whole leaves input 0 and the tokens unknown.",
     lines(rec(b'"spend":{"cost_usd":1,"model":"anthropic","input_tokens":100,"output_tokens":50,"cache_read_input_tokens":1000,"cache_creation_input_tokens":200}'),
           rec(b'"spend":{"cost_usd":1,"model":"chat","prompt_tokens":1000,"completion_tokens":50,"prompt_tokens_details":{"cached_tokens":400}}'),
           rec(b'"spend":{"cost_usd":1,"model":"chat-plain","prompt_tokens":1000,"completion_tokens":50,"total_tokens":1050}'),
           rec(b'"spend":{"cost_usd":1,"model":"responses","input_tokens":1000,"output_tokens":10,"input_tokens_details":{"cached_tokens":900}}'),
           rec(b'"spend":{"cost_usd":1,"model":"proxy","prompt_tokens":1000,"completion_tokens":1,"cache_read_input_tokens":300,"cache_creation_input_tokens":100}'),
           rec(b'"spend":{"cost_usd":1,"model":"proxy-2","prompt_tokens":1000,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":300},"cache_read_input_tokens":300,"cache_creation_input_tokens":100}'),
           rec(b'"spend":{"cost_usd":1,"model":"both","input_tokens":7,"output_tokens":3,"prompt_tokens":1000,"completion_tokens":1000}'),
           rec(b'"spend":{"cost_usd":1,"model":"too-many","prompt_tokens":10,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":20}}'),
           rec(b'"spend":{"cost_usd":1,"model":"too-many-2","input_tokens":10,"input_tokens_details":{"cached_tokens":11}}'),
           rec(b'"spend":{"cost_usd":1,"model":"too-many-3","prompt_tokens":10,"cache_read_input_tokens":6,"cache_creation_input_tokens":5}'),
           rec(b'"spend":{"cost_usd":1,"model":"no-whole","output_tokens":1,"input_tokens_details":{"cached_tokens":5}}'),
           rec(b'"spend":{"cost_usd":1,"model":"all-cached","prompt_tokens":10,"prompt_tokens_details":{"cached_tokens":10}}'),
           rec(b'"spend":{"cost_usd":1,"model":"nulls","input_tokens":null,"prompt_tokens":9,"output_tokens":null,"completion_tokens":8,"prompt_tokens_details":null,"cache_read_input_tokens":null}'),
           rec(b'"spend":{"cost_usd":1,"model":"bad","input_tokens":"100","output_tokens":-1,"cache_read_input_tokens":1.5,"cache_creation_input_tokens":4}'),
           rec(b'"spend":{"cost_usd":1,"model":"max","input_tokens":18446744073709551615,"output_tokens":18446744073709551616}'),
           rec(b'"spend":{"cost_usd":1,"model":"","input_tokens":1}'), rec(b'"spend":{"cost_usd":1,"model":null,"input_tokens":1}'), rec(b'"spend":{"cost_usd":1,"model":7,"input_tokens":1}')),
     [tokens("anthropic", 100, 50, 1000, 200), tokens("chat", 600, 50, 400, 0), tokens("chat-plain", 1000, 50, 0, 0), tokens("responses", 100, 10, 900, 0), tokens("proxy", 600, 1, 300, 100),
      tokens("proxy-2", 600, 1, 300, 100), tokens("both", 7, 3, 0, 0), tokens("too-many", 0, 1, 20, 0), tokens("too-many-2", 0, 0, 11, 0), tokens("too-many-3", 0, 0, 6, 5), tokens("no-whole", 0, 1, 0, 0), tokens("all-cached", 0, 0, 10, 0),
      tokens("nulls", 9, 8, 0, 0), tokens("bad", 0, 0, 0, 4), tokens("max", 18446744073709551615, 0, 0, 0), tokens("unknown", 3, 0, 0, 0), usd(18), unpriced(0)])

case("spend_too_many", "10,000 entries are believed, 10,001 are one unpriced entry.",
     lines(rec(b'"spend":[' + b",".join([b"0.0001"] * 10000) + b"]", kind=b'"most"'), rec(b'"spend":[' + b",".join([b"0.0001"] * 10001) + b"]", kind=b'"more"')),
     [usd(1, kind="most"), unpriced(0, kind="most"), usd(0, kind="more"), unpriced(1, kind="more")])

case("spend_costs", "Without a price map: which reported costs are usable, and when a cost of 0 is believed.",
     lines(*[rec(b'"spend":{"cost_usd":%s}' % cost, kind=b'"%s"' % kind) for kind, cost in (
         (b"int", b"2"), (b"text", b'"0.0375"'), (b"exp", b"1.5E-1"), (b"textexp", b'"15e-2"'), (b"longest", b"0.1234567890123456789012345678"), (b"toolong", b"0.12345678901234567890123456789"),
         (b"zeros", b"0.5" + b"0" * 40), (b"million", b"1000000000"), (b"over", b"1000000000.01"), (b"negative", b"-0.01"), (b"nan", b"NaN"), (b"word", b'"free"'), (b"space", b'" 0.1"'),
         (b"plus", b'"+0.1"'), (b"dot", b'".5"'), (b"lead", b'"00.5"'), (b"comma", b'"0,5"'), (b"emptytext", b'""'), (b"bool", b"true"), (b"object", b'{"usd":1}'), (b"null", b"null"),
         (b"wide", b"123456789.1234567890123456789012345678"), (b"zero", b"0"), (b"zerotext", b'"0.00"'), (b"nantext", b'"NaN"'))],
           rec(b'"spend":{"cost_usd":0,"input_tokens":0,"output_tokens":0}', kind=b'"zero_of_none"'),
           rec(b'"spend":{"cost_usd":0,"input_tokens":1}', kind=b'"zero_of_some"'),
           rec(b'"spend":{"cost_usd":0,"cache_read_input_tokens":1}', kind=b'"zero_of_cached"'),
           rec(b'"spend":{"cost_usd":0,"input_tokens":"many"}', kind=b'"zero_of_unknown"'),
           rec(b'"spend":{"input_tokens":100,"output_tokens":10,"model":"m-1"}', kind=b'"no_map"')),
     [usd(2, kind="int"), usd("0.0375", kind="text"), usd("0.15", kind="exp"), usd("0.15", kind="textexp"), usd("0.12345678901234568", kind="longest"), unpriced(0, kind="longest"),
      usd("123456789.12345679", kind="wide"), unpriced(0, kind="wide"), unpriced(1, kind="toolong"), usd(0, kind="toolong"), usd("0.5", kind="zeros"), usd(1000000000, kind="million"), unpriced(0, kind="million"), unpriced(1, kind="over"), usd(0, kind="over"),
      [unpriced(1, kind=k) for k in ("negative", "nan", "word", "space", "plus", "dot", "lead", "comma", "emptytext", "bool", "object", "null", "nantext")],
      unpriced(0, kind="zero"), unpriced(0, kind="zerotext"), unpriced(0, kind="zero_of_none"), unpriced(1, kind="zero_of_some"), unpriced(1, kind="zero_of_cached"),
      unpriced(1, kind="zero_of_unknown"), unpriced(1, kind="no_map"), tokens("m-1", 100, 10, 0, 0, "no_map")])

case("spend_everywhere", "Spend counts in every status, and the optional fields are read whatever the version says.",
     lines(rec(b'"spend":0.5', status=b'"queued"'), rec(b'"spend":0.25', status=b'"nack"'), rec(b'"spend":0.125', status=b'"paused"'),
           rec(b'"protocol_version":1,"spend":1,"nacks":2,"started_ts":1795950005,"finished_ts":1795950010', status=b'"dead"'), rec(b'"spend":{"cost_usd":null}', status=b'"human"')),
     [usd("1.875"), unpriced(1), nacks(3), histogram("wait", 1, 5), histogram("time", 1, 5), total(5), tokens("unknown", 0, 0, 0, 0)])

case("spend_exact", "Sums are exact decimals: ten times 0.1 is 1, 0.1 + 0.2 is 0.3, and a small amount survives beside a large one.",
     lines(*[rec(b'"spend":0.1', kind=b'"ten"')] * 10, *[rec(b'"spend":[0.1,0.2]', kind=b'"three"')] * 1,
           rec(b'"spend":1000000000', kind=b'"apart"'), rec(b'"spend":0.0000001', kind=b'"apart"'),
           *[rec(b'"spend":0.000000000000001', kind=b'"tiny"')] * 3,
           rec(b'"spend":[999999999.99,0.01,"x"]', kind=b'"round"')),
     [usd(1, kind="ten"), usd("0.3", kind="three"), usd("1000000000.0000001", kind="apart"), usd("3e-15", kind="tiny"), usd(1000000000, kind="round"), unpriced(1, kind="round")])

PRICES = b"""{
  "sample_spec": "not a model",
  "m-paid": {"input_cost_per_token": 3e-06, "output_cost_per_token": 1.5e-05, "cache_read_input_token_cost": 3e-07, "cache_creation_input_token_cost": 3.75e-06, "mode": "chat"},
  "vendor/m-paid": {"input_cost_per_token": 0.000002, "output_cost_per_token": 0.00001},
  "m-free": {"input_cost_per_token": 0, "output_cost_per_token": 0.0},
  "m-half": {"input_cost_per_token": 1e-6},
  "m-null": {"input_cost_per_token": null, "output_cost_per_token": 1e-6, "output_cost_per_token_above_200k_tokens": null},
  "m-huge": {"input_cost_per_token": 2000000000},
  "void/m-paid": null,
  "m-worse": {"input_cost_per_token": 1e-6, "input_cost_per_token_above_200k_tokens": "dear"},
  "m-tier": {"input_cost_per_token": 1.25e-06, "input_cost_per_token_above_200k_tokens": 2.5e-06, "output_cost_per_token": 1e-05, "output_cost_per_token_above_200k_tokens": 1.5e-05,
             "cache_read_input_token_cost": 1.25e-07, "cache_read_input_token_cost_above_200k_tokens": 2.5e-07},
  "m-tiers": {"input_cost_per_token": 1e-6, "input_cost_per_token_above_200k_tokens": 3e-6, "input_cost_per_token_above_128k_tokens": 2e-6, "output_cost_per_token": 1e-6}
}
"""
case("prices", "A price map gives a cost where none is reported: looked up as provider/model, then as model; a missing price and one of 0 differ; the tier is chosen by input, cache read and cache creation together.",
     lines(*[rec(b'"spend":{%s}' % spend, kind=b'"%s"' % kind) for kind, spend in (
         (b"k01", b'"model":"m-paid","input_tokens":1000,"output_tokens":100,"cache_read_input_tokens":10000,"cache_creation_input_tokens":2000'),
         (b"k02", b'"provider":"vendor","model":"m-paid","input_tokens":1000,"output_tokens":100'),
         (b"k03", b'"provider":"other","model":"m-paid","input_tokens":1000,"output_tokens":100'),
         (b"k04", b'"model":"m-paid","prompt_tokens":1000,"completion_tokens":100,"prompt_tokens_details":{"cached_tokens":400}'),
         (b"k05", b'"model":"m-unheard-of","input_tokens":1000,"output_tokens":100'),
         (b"k06", b'"model":"m-free","input_tokens":100,"output_tokens":100'),
         (b"k07", b'"model":"m-free","cost_usd":0,"input_tokens":100,"output_tokens":100'),
         (b"k08", b'"model":"m-paid","cost_usd":0,"input_tokens":100,"output_tokens":100'),
         (b"k09", b'"model":"m-half","input_tokens":1000'),
         (b"k10", b'"model":"m-half","input_tokens":1000,"output_tokens":1'),
         (b"k11", b'"model":"m-half","input_tokens":1000,"output_tokens":0'),
         (b"k12", b'"model":"m-paid"'),
         (b"k13", b'"model":"m-paid","input_tokens":0'),
         (b"k14", b'"model":"m-tier","input_tokens":200000,"output_tokens":1000'),
         (b"k15", b'"model":"m-tier","input_tokens":150000,"output_tokens":1000,"cache_read_input_tokens":50001'),
         (b"k16", b'"model":"m-tiers","input_tokens":150000'),
         (b"k17", b'"model":"m-tiers","input_tokens":250000'),
         (b"k18", b'"model":"m-paid","cost_usd":0.5,"input_tokens":1000'),
         (b"k19", b'"model":"m-paid","cost_usd":-0.5,"input_tokens":1000'),
         (b"k20", b'"model":"m-paid","input_tokens":1000,"output_tokens":"many"'),
         (b"k21", b'"model":"m-null","input_tokens":1000,"output_tokens":1000'),
         (b"k22", b'"model":"m-null","output_tokens":1000'),
         (b"k23", b'"model":"m-free","cost_usd":0,"input_tokens":1,"cache_read_input_tokens":1'),
         (b"k24", b'"model":"sample_spec","input_tokens":1'),
         (b"k25", b'"model":"m-tiers","input_tokens":100000,"cache_creation_input_tokens":28001,"cost_usd":null'),
         (b"k26", b'"input_tokens":1000'),
         (b"k27", b'"model":"m-paid","prompt_tokens":10,"prompt_tokens_details":{"cached_tokens":20}'),
         (b"k28", b'"model":"m-tiers","input_tokens":128000'),
         (b"k29", b'"model":"m-worse","input_tokens":200000'),
         (b"k30", b'"model":"m-worse","input_tokens":200001'),
         (b"k31", b'"model":"m-huge","input_tokens":1'),
         (b"k32", b'"provider":"void","model":"m-paid","input_tokens":1000,"output_tokens":100'))]),
     # k01: .003 + .0015 + .003 + .0075; k04: 600 * 3e-6 + 400 * 3e-7 + 100 * 1.5e-5; k15: 150000 * 2.5e-6 + 50001 * 2.5e-7 + 1000 * 1.5e-5
     [[usd(v, kind=k) for k, v in dict(k01="0.015", k02="0.003", k03="0.0045", k04="0.00342", k05=0, k06=0, k07=0, k08=0, k09="0.001", k10=0, k11="0.001", k12=0, k13=0, k14="0.26", k15="0.40250025",
                                      k16="0.3", k17="0.75", k18="0.5", k19=0, k20=0, k21=0, k22="0.001", k23=0, k24=0, k25=0, k26=0, k27=0, k28="0.128", k29="0.2", k30=0, k31=0, k32="0.0045").items()],
      [unpriced(1 if k in ("k05", "k08", "k10", "k12", "k19", "k20", "k21", "k23", "k24", "k25", "k26", "k27", "k30", "k31") else 0, kind=k) for k in (f"k{n:02}" for n in range(1, 33))]],
     args=["--prices", "prices.json"], **{"prices.json": PRICES})

# ------------------------------------------------------------------------------------------------------------- labels

case("configured", "Configured roles and kinds are there with 0 in every pair; what is outside of them is `other`, in both labels.",
     lines(rec(to=b'"a"', kind=b'"x"', status=b'"queued"'), rec(to=b'"c"', kind=b'"z"'), rec(to=b'"d"', kind=b'"z"'), rec(to=b'"b"', kind=b'"x"')),
     [status("queued", 1, "a", "x"), total(0, "a", "y"), total(0, "b", "y"), status("human", 0, "b", "y"), total(1, "b", "x"), total(2, "other", "other"), total(0, "other", "x"), total(0, "a", "other"),
      histogram("wait", 0, 0, "b"), histogram("time", 0, 0, "other"), usd(0, "b", "y"), unpriced(0, "a", "y"), finished("done", 0, "b", "y")],
     absent=['role="c"', 'kind="z"'], args=["--roles", "a,b", "--kinds", "x,y"])

case("configured_empty", "An empty queue shows the configured roles and kinds with 0, without `other` and without an oldest time.",
     b"",
     [status("queued", 0, "triage", "classify"), total(0, "researcher", "file_bug"), histogram("wait", 0, 0, "triage"), bad()],
     absent=["other", "oldest", "handoff_tokens_total"], args=["--roles", "triage,researcher", "--kinds", "classify,file_bug"])

case("configured_roles", "With roles alone configured, the kinds are those that the queue shows, each for every role.",
     lines(rec(to=b'"a"', kind=b'"x"'), rec(to=b'"a"', kind=b'"y"')),
     [total(1, "a", "x"), total(1, "a", "y"), total(0, "b", "x"), total(0, "b", "y")], absent=["other"], args=["--roles", "a,b"])

case("configured_twice", "A name that is configured twice, and `other` as a configured name, make no series twice.",
     lines(rec(to=b'"a"'), rec(to=b'"b"')),
     [total(1, "a"), total(1, "other")], args=["--roles", "a,a,other"])

case("configured_kinds", "With kinds alone configured, the roles are those that the queue shows.",
     lines(rec(to=b'"a"', kind=b'"x"'), rec(to=b'"b"', kind=b'"q"')),
     [total(1, "a", "x"), total(0, "b", "x"), total(0, "a", "y"), total(1, "b", "other"), total(0, "a", "other")], absent=['kind="q"', 'role="other"'], args=["--kinds", "x,y"])

case("labels", "Hostile names: quotes, line feeds and backslashes are escaped, other control characters are U+FFFD, more than 128 bytes is `other`; a name like a label's and an empty one are just values.",
     lines(rec(to=b'"a\\"b"'), rec(to=b'"a\\nb"'), rec(to=b'"a\\rb"'), rec(to=b'"a\\\\b"'), rec(to=b'"a\\\\nb"'), rec(to=b'"__name__"'), rec(to=b'""'), rec(to=b'"' + b"x" * 128 + b'"'),
           rec(to=b'"' + b"x" * 129 + b'"'), rec(to=b'"' + b"\xc3\xa9" * 64 + b'"'), rec(to=b'"' + b"\xc3\xa9" * 65 + b'"'), rec(to=b'"\\u0000\\u001f\\u007f"'), rec(to=b'"a\\tb"'),
           rec(to=b'"{le=\\"1\\"} 5"'), rec(to=b'"caf\xc3\xa9"'), rec(to=b'"caf\\u00e9"'), rec(to=b'" "'), rec(to=b'"a\\u2028b"'), rec(to=b'"a\\rb"', kind=b'"a\\"\\n\\\\"'),
           rec(b'"spend":{"cost_usd":1,"model":"m\\"\\n\\r\\\\","input_tokens":1}', to=b'"model"')),
     [total(1, 'a\\"b'), total(1, "a\\nb"), total(1, "a\ufffdb", "a\\\"\\n\\\\"), total(1, "a\\\\b"), total(1, "a\\\\nb"), total(1, "__name__"), total(1, ""), total(1, "x" * 128), total(2, "other"),
      total(1, "\u00e9" * 64), total(1, "\ufffd\ufffd\ufffd"), total(2, "a\ufffdb"), total(1, '{le=\\"1\\"} 5'), total(2, "caf\u00e9"), total(1, " "), total(1, "a\u2028b"),
      tokens('m\\"\\n\ufffd\\\\', 1, 0, 0, 0), bad()])

case("sixty_roles", "Sixty roles, kinds and models: the first fifty stand for themselves, ten are `other`, and a known one stays known at the end.",
     lines(*[rec(b'"spend":{"cost_usd":0.01,"model":"m%02d","input_tokens":1}' % n, to=b'"r%02d"' % n, kind=b'"k%02d"' % n) for n in range(60)],
           rec(to=b'"r00"', kind=b'"k49"'), rec(to=b'"r49"', kind=b'"k50"'), rec(to=b'"r59"', kind=b'"k00"')),
     [total(1, "r00", "k00"), total(1, "r49", "k49"), total(10, "other", "other"), total(1, "r00", "k49"), total(1, "r49", "other"), total(1, "other", "k00"), usd("0.1", "other", "other"),
      tokens("m49", 1, 0, 0, 0, "k49"), tokens("other", 10, 0, 0, 0, "other")],
     absent=['"r50"', '"k50"', '"m50"', '"m59"'])

# ---------------------------------------------------------------------------------------------------- payload and blobs

case("oversized", "More than 8192 bytes for a value in payload or result, or for a result or a payload that is no object, as JSON text in the line: quotes, escapes and inner spaces count, spaces around it do not. A payload that is an object is no value, so its members do not add up; those of an object in it do.",
     lines(rec(payload=b'{"a":"' + b"x" * 8190 + b'"}', to=b'"just"'), rec(payload=b'{"a":"' + b"x" * 8191 + b'"}', to=b'"one more"'),
           rec(payload=b'{"a": \t "' + b"x" * 8190 + b'" \t }', to=b'"around"'), rec(payload=b'{"a":[' + b" " * 8192 + b"]}", to=b'"inner"'),
           rec(payload=b'{"a":"' + b"\\u0041" * 1366 + b'"}', to=b'"escapes"'), rec(payload=b'{"a":"' + b"x" * 5000 + b'","b":"' + b"y" * 5000 + b'"}', to=b'"sum"'),
           rec(payload=b'{"a":{"b":"' + b"x" * 5000 + b'","c":"' + b"y" * 5000 + b'"}}', to=b'"nested"'), rec(payload=b'{"a":1' + b"0" * 8191 + b',"b":1}', to=b'"number, just"'),
           rec(payload=b'{"a":1' + b"0" * 8192 + b"}", to=b'"number"'), rec(payload=b'"' + b"x" * 9000 + b'"', to=b'"no object"'), rec(payload=b'["' + b"x" * 9000 + b'"]', to=b'"array"'),
           rec(b'"result":{"a":"' + b"x" * 9000 + b'"}', to=b'"elsewhere"'), rec(payload=b'{"' + b"k" * 9000 + b'":1}', to=b'"key"'),
           rec(payload=b'{"a":"' + b"x" * 9000 + b'","b":"' + b"x" * 9000 + b'"}', to=b'"two"', status=b'"queued"'),
           rec(b'"started_ts":"soon"', payload=b'{"a":"' + b"x" * 9000 + b'"}', to=b'"doubt"')),
     # one more, inner (8194), escapes (8198), nested (10015), number (8193), no object (9002), array (its string), elsewhere, two
     [oversized(9), bad()])

def handle(of=b"alpha\n", summary=b"s" * 9000, bytes=b"6", colon=b":", more=b"", sha256=None):
    """A handle; with a colon or more that are not the usual ones, what looks like one."""
    digest = hashlib.sha256(of).hexdigest().encode()
    members = ((b"artifact_ref", b'"blob/%s/%s"' % (digest[:2], digest)), (b"bytes", bytes), (b"sha256", b'"%s"' % (sha256 or digest)), (b"media_type", b'"text/plain"'), (b"summary", b'"%s"' % summary))
    return b"{" + b",".join(b'"%s"%s%s' % (name, colon, value) for name, value in members) + more + b"}"


LONG = b'"' + b"x" * 9000 + b'"'
case("oversized_inside", "Values are looked at wherever they lie, and of containers what lies in them first. A handle stays, whatever its size and its blanks, and so does a string with a lone surrogate, unless what is around them is too large because of them. What is not quite a handle is an object like any other.",
     lines(rec(payload=b'{"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"toolu_1","content":[{"type":"text","text":' + LONG + b"}]}]}]}", to=b'"content blocks"'),
           rec(payload=b'{"messages":[{"role":"assistant","content":null},{"role":"tool","tool_call_id":"call_1","content":' + LONG + b"}]}", to=b'"tool message"'),
           rec(b'"result":[[[[' + LONG + b"]]]]", to=b'"deep result"'), rec(b'"result":' + LONG, to=b'"result"'), rec(b'"result":1' + b"0" * 8192, to=b'"result, a number"'),
           rec(payload=b'{"a":{' + b",".join(b'"k%04d":%d' % (i, i % 10) for i in range(1000)) + b"}}", to=b'"many"'), rec(payload=b"{" + b",".join(b'"k%04d":%d' % (i, i % 10) for i in range(1000)) + b"}", to=b'"many, payload itself"'),
           rec(payload=b'{"a":' + LONG + b',"a":1}', to=b'"the first of two"'),
           rec(payload=b'{"a":' + handle() + b"}", to=b'"handle"'), rec(payload=b'{"a":' + handle(colon=b" :\t") + b"}", to=b'"handle with blanks"'), rec(payload=b'{"a":[' + handle() + b"]}", to=b'"handle in an array"'), rec(b'"result":' + handle(bytes=b"18446744073709551615"), to=b'"result, a handle"'),
           rec(payload=b'{"a":' + handle(more=b',"more":1') + b"}", to=b'"one member more"'), rec(payload=b'{"a":' + handle(more=b',"bytes":6') + b"}", to=b'"a member twice"'),
           rec(payload=b'{"a":' + handle(bytes=b"18446744073709551616") + b"}", to=b'"too many bytes"'), rec(payload=b'{"a":' + handle(bytes=b"6.0") + b"}", to=b'"no digits only"'),
           rec(payload=b'{"a":' + handle(sha256=b"0" * 64) + b"}", to=b'"another blob"'),
           rec(payload=b'{"a":' + LONG[:-1] + b'\\ud83d"}', to=b'"lone"'), rec(payload=b'{"a":[' + LONG[:-1] + b'\\ud83d"]}', to=b'"lone, in an array"'), rec(payload=b'{"a":' + LONG[:-1] + b'\\ud83d\\ude00"}', to=b'"pair"')),
     # content blocks, tool message, the three results (9010, 9002, 8193 bytes), many (8 digits and a colon, 1000 times: 10001), the first of two, handle in an array, five that are no handles, lone in an array, pair
     [oversized(15), bad()])

case("oversized_limit", "The limit can be another. A number or a word can then be too long; a string is too long with its quotes and escapes.",
     lines(rec(payload=b'{"a":"' + b"x" * 98 + b'"}'), rec(payload=b'{"a":"' + b"x" * 99 + b'"}'), rec(payload=b'{"a":[' + b",".join([b"1"] * 50) + b"]}"), rec(payload=b'{"a":[' + b",".join([b"1"] * 49) + b"]}"),
           rec(payload=b'{"a":' + handle() + b"}"), rec(payload=b'{"a":"' + b"\\u0000" * 17 + b'"}'), rec(b'"result":' + b"7" * 100), rec(b'"result":' + b"7" * 101)),
     # The second (101), the third (101; the fourth has 99), the NULs (104), the last.
     [oversized(4), bad()], args=["--max-bytes", "100"])

B1, B2, B3, B4 = (hashlib.sha256(b).hexdigest().encode() for b in (b"alpha\n", b"beta\n", b"gamma\n", b"delta\n"))


def ref(digest):
    return b"blob/" + digest[:2] + b"/" + digest


def path(digest):
    return ref(digest).decode()


case("blobs", "Objects are the regular files named as the store names them. A reference is the text in a line's raw bytes, before a slash perhaps a backslash, each time that it stands there, also in a malformed line and in an unterminated tail.",
     lines(rec(payload=b'{"a":"%s"}' % ref(B1)), rec(payload=b'{"a":{"handle":"see %s."},"b":"%s"}' % (ref(B3), ref(B3))), rec(payload=b'{"a":"%s"}' % ref(B3)), b"{oops " + ref(B4),
           b"\xff" + ref(B4) + b"\xff", rec(payload=b'{"a":"%s","b":"%s"}' % (ref(B3), ref(B4))), b"blob/00/" + B3, ref(B3).upper(), ref(B3).replace(B3, B3.upper()), ref(B3) + b"0",
           ref(B3)[:-1], ref(B3).replace(b"/", b"\\/"), ref(B3) + b"G", b"xblob/x/" + ref(B2)) + ref(B4),
     # The missing ones: B3 in lines 2 (twice), 3, 6, 12 (with backslashes) and 13, B4 in lines 4, 5, 6 and behind the last one.
     ["handoff_blob_objects 2", "handoff_blob_bytes 11", "handoff_blob_missing_references 10", total(4), bad(not_json=9, not_utf8=1)],
     **{path(B1): b"alpha\n", path(B2): b"beta\n", "blob/00/" + B1.decode(): b"misplaced", path(B1) + ".tmp": b"temporary", "blob/README": b"no blob", path(B4).upper().replace("BLOB", "blob"): b"upper case",
        f"blob/{B4.decode()}": b"no directory"})

case("blob_dir", "--blob-dir names another store; the text of a reference is the same.",
     lines(rec(payload=b'{"a":"%s"}' % ref(B1)), rec(payload=b'{"a":"%s"}' % ref(B2))),
     ["handoff_blob_objects 1", "handoff_blob_bytes 6", "handoff_blob_missing_references 1"],
     args=["--blob-dir", "elsewhere"], **{path(B1).replace("blob/", "elsewhere/", 1): b"alpha\n", path(B2): b"beta\n"})

# ------------------------------------------------------------------------------------------------- ledger, generations


def ledger(payload, extra=b""):
    return b'{"id":"ledger","ts":1795900000,"kind":"ledger","from":"handoff","to":"","payload":%s,"status":"ledger"%s}' % (payload, extra)


CELL = (b'{"role":"researcher","kind":"classify","records":3,"done":3,"dead":0,"nacks":2,"queue_wait":{"buckets":[0,2,0,0,1,0,0,0,0,0,0,0,0],"sum_us":401000000},'
        b'"role_time":{"buckets":[0,0,0,3,0,0,0,0,0,0,0,0,0],"sum_us":900000000},"spend_usd":"0.0375","unpriced":1}')
TOTALS = b'{"cells":[' + CELL + b'],"tokens":[{"kind":"classify","model":"m-1","input":1200,"output":300,"cache_read":0,"cache_creation":7}],"reclaimed_bytes":4312}'
LEDGER = ledger(b'{"version":1,"totals":' + TOTALS + b',"generations":{}}')
LIVE = rec(b'"protocol_version":2,"started_ts":1795950020,"finished_ts":1795950520,"nacks":1,"spend":{"cost_usd":0.1,"model":"m-1","input_tokens":10}')

case("ledger", "The ledger's totals are added to what is live, in counters and histograms; no gauge counts it, and it is no record. Its `to` is no role.",
     lines(LEDGER, LIVE),
     [status("done", 1), total(4), finished("done", 4), nacks(3), usd("0.1375"), unpriced(1), histogram("wait", 4, 421, le10=0, le30=3, le300=3, le900=4),
      histogram("time", 4, 1400, le60=0, le300=3, le900=4), tokens("m-1", 1210, 300, 0, 7), bad(), generations(0)],
     absent=['role=""', 'kind="ledger"'])

case("ledger_dressed", "A ledger line is found behind a byte order mark, before a carriage return, between blanks, and with its members in another order.",
     lines(b"\xef\xbb\xbf" + LEDGER + b"\r", b"",
           b'\t{ "status" : "ledger", "payload" : { "generations" : {}, "totals" : { "cells" : [ { "spend_usd" : "1", "kind" : "classify", "role" : "researcher" } ] }, "version" : 1 }, '
           b'"to" : "", "from" : "x", "ts" : "2026-11-29T10:00:00Z", "kind" : "ledger", "id" : "another" } '),
     [total(3), usd("1.0375"), bad(), finished("done", 3)])

case("ledger_only", "What compaction removed is still shown when nothing is live: counters keep their values and the gauges of that pair are 0.",
     lines(LEDGER),
     [status("done", 0), status("queued", 0), total(3), finished("done", 3), usd("0.0375"), histogram("wait", 3, 401, le10=0, le30=2, le900=3)], absent=["oldest"])

case("ledger_sparse", "Members of totals and of a cell may be absent and are 0; a cell's role outside the configured set is `other`.",
     lines(ledger(b'{"version":1,"totals":{},"generations":{}}'),
           ledger(b'{"version":1,"totals":{"cells":[{"role":"researcher","kind":"classify","records":2},{"role":"patcher","kind":"classify","spend_usd":"1.5"},{"role":"gone","kind":"old","dead":4}]},"generations":{}}')),
     [total(2), finished("done", 0), total(0, "patcher"), usd("1.5", "patcher"), finished("dead", 4, "other", "other"), histogram("wait", 0, 0), bad()],
     args=["--roles", "researcher,patcher", "--kinds", "classify"])

case("ledgers", "Several ledger lines add up, wherever they stand.",
     lines(LEDGER, LIVE, LEDGER, ledger(b'{"version":1,"totals":{"cells":[{"role":"researcher","kind":"classify","records":5,"spend_usd":"0.1"},{"role":"researcher","kind":"classify","records":6,"spend_usd":"0.2"}]},"generations":{}}', b',"protocol_version":2')),
     # records 3 + 1 + 3 + 5 + 6, money 0.0375 + 0.1 + 0.0375 + 0.1 + 0.2
     [total(18), usd("0.475"), histogram("wait", 7, 822), unpriced(2), tokens("m-1", 2410, 600, 0, 14), bad()])

case("ledger_unreadable", "A ledger line without the ledger's shape is malformed, and nothing of it is taken over, not even its sound parts. The envelope comes first.",
     lines(*[ledger(p) for p in (
         b"null", b"[]", b"{}", b'{"version":1,"totals":[],"generations":{}}', b'{"version":1,"totals":{},"generations":[]}', b'{"version":1,"totals":{"cells":{}},"generations":{}}',
         b'{"version":1,"totals":{"cells":[' + CELL + b',{"kind":"classify","records":1}]},"generations":{}}', b'{"version":1,"totals":{"cells":[{"role":"r","kind":"k","records":-1}]},"generations":{}}',
         b'{"version":1,"totals":{"cells":[{"role":"r","kind":"k","records":"1"}]},"generations":{}}', b'{"version":1,"totals":{"cells":[{"role":"r","kind":"k","spend_usd":0.5}]},"generations":{}}',
         b'{"version":1,"totals":{"cells":[{"role":"r","kind":"k","spend_usd":"much"}]},"generations":{}}',
         b'{"version":1,"totals":{"cells":[{"role":"r","kind":"k","queue_wait":{"buckets":[1,2,3],"sum_us":5}}]},"generations":{}}',
         b'{"version":1,"totals":{"cells":[7]},"generations":{}}', b'{"version":1,"totals":' + TOTALS + b',"generations":{"7":-1}}', b'{"version":1,"totals":' + TOTALS + b',"generations":{"seven":1}}',
         b'{"version":1,"totals":{"tokens":[{"kind":"classify","input":1}]},"generations":{}}')],
           b'{"ts":1795900000,"kind":"ledger","from":"handoff","to":"","payload":{"version":1,"totals":{},"generations":{}},"status":"ledger"}',
           b'{"id":"ledger","ts":1795900000,"kind":"ledger","fro', LIVE),
     [bad(not_an_envelope=17, not_json=1), total(1), usd("0.1"), tokens("m-1", 10, 0, 0, 0)], absent=['role="r"'])

case("ledger_versions", "A ledger of another integer version is unsupported_version, one whose version is no integer is not_an_envelope, and a protocol version other than 1 or 2 is unsupported in a ledger line too.",
     lines(ledger(b'{"version":2,"totals":' + TOTALS + b',"generations":{}}'), ledger(b'{"version":0}'), ledger(b'{"version":"1","totals":{},"generations":{}}'),
           ledger(b'{"totals":{},"generations":{}}'), ledger(b'{"version":null,"totals":{},"generations":{}}'), ledger(b'{"version":1,"totals":{},"generations":{}}', b',"protocol_version":3'), LIVE),
     [bad(unsupported_version=3, not_an_envelope=3), total(1)])

case("ledger_lookalikes", "Only kind and status `ledger` together make a ledger line; one of them alone is a record.",
     lines(rec(kind=b'"ledger"', status=b'"queued"'), rec(status=b'"ledger"'), rec(id=b'"ledger"', frm=b'"handoff"', kind=b'"Ledger"', status=b'"ledger"')),
     [status("queued", 1, kind="ledger"), status("other", 1), status("other", 1, kind="Ledger"), bad()])

TAKEN = lines(rec(id=b'"old1"'), rec(id=b'"old2"'))
LATE7 = lines(rec(id=b'"late1"', status=b'"queued"', ts=b"1795949000"), b"{oops", b"", rec(id=b'"late2"', to=b'"patcher"'))
LATE9 = lines(rec(id=b'"late3"', payload=b'{"a":"' + b"x" * 9000 + b'","b":"%s"}' % ref(B3)))
case("late_lines", "Lines of a generation after the offset count as if they stood at the end of the queue, malformed ones and blob references too; what lies before it, and an unterminated tail, do not. A listed generation that is not on disk is nothing.",
     lines(ledger(b'{"version":1,"totals":{},"generations":{"7":%d,"9":0,"8":100}}' % len(TAKEN)), rec(id=b'"live"', status=b'"queued"')),
     [status("queued", 2), oldest("queued", 1795949000), total(3), total(1, "patcher"), bad(not_json=1), oversized(1), generations(2), "handoff_blob_missing_references 1"],
     **{"queue.gen.7": TAKEN + LATE7 + rec(id=b'"torn"')[:50], "queue.gen.9": LATE9 + rec(id=b'"whole but not ended"')})

case("late_lines_drained", "A generation that has been taken over to its end has no late lines and is still there to be drained; of several offsets the largest counts, and one beyond the end is no error.",
     lines(ledger(b'{"version":1,"totals":{},"generations":{"3":%d,"4":5}}' % len(TAKEN)), ledger(b'{"version":1,"totals":{},"generations":{"3":10,"4":99999}}'), rec()),
     [total(1), bad(), generations(2)], **{"queue.gen.3": TAKEN, "queue.gen.4": TAKEN})

case("stray_generation", "A generation that the ledger does not list and that is another file is reported and not read; files whose names are not a generation's are nothing.",
     lines(rec()), [total(1), bad(), generations(2)],
     **{"queue.gen.3": TAKEN, "queue.gen.0": TAKEN, "queue.gen.03": TAKEN, "queue.gen.x": TAKEN, "queue.gen.": TAKEN, "queue.gen.3.tmp": TAKEN, "queue.gen.-1": TAKEN, "other.gen.3": TAKEN})

case("everything_damaged", "One queue with a bad line of every reason among good ones, a ledger, blanks and a torn tail.",
     b"\xef\xbb\xbf" + lines(LEDGER, rec() + b"\r", b"", b"\0\0\0\0", rec() + rec(), rec(payload=b'{"a":"\xff"}'), rec(b'"protocol_version":3'), rec(ts=b'"yesterday"'),
                             b"x" * 2001, rec(payload=b'{"a":NaN,"b":"\\ud83d","b":' + b"7" * 50 + b"}"), b"\r", rec(status=b'"human"')) + b'{"id":"torn',
     [total(6), status("done", 2), status("human", 1), bad(not_json=2, not_utf8=1, unsupported_version=1, not_an_envelope=1, too_long=1)], args=["--max-line", "2000"])


# ---------------------------------------------------------------------------------------------------------------------


def main():
    for old in HERE.iterdir():
        if old.is_dir():
            shutil.rmtree(old)
    failed = 0
    for name, (about, queue, expect, absent, args, files) in CASES.items():
        folder = HERE / name
        folder.mkdir()
        (folder / "queue.jsonl").write_bytes(queue)
        for file, content in files.items():
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        if args:
            (folder / "args").write_text("".join(a + "\n" for a in args))
        hand = "".join(line + "\n" for line in expect)
        none = "".join(f"no line with {a}\n" for a in absent)
        (folder / "about").write_text(f"{about}\n\nBy hand:\n{hand}{none}", encoding="utf-8")
        run = subprocess.run([sys.executable, str(RECOUNT), "queue.jsonl", "--now", NOW, *args], cwd=folder, stdout=subprocess.PIPE, check=True)
        (folder / "expected.prom").write_bytes(run.stdout)
        got = set(run.stdout.decode("utf-8").split("\n"))
        for line in expect:
            if line not in got:
                failed += 1
                near = sorted(g for g in got if g.split(" ")[0] == line.rsplit(" ", 1)[0]) or "no such series"
                print(f"{name}: by hand {line}, recounted {near}")
        for text in absent:
            for line in sorted(g for g in got if text in g):
                failed += 1
                print(f"{name}: by hand nothing with {text}, recounted {line}")
    print(f"{len(CASES)} cases, {failed} differences")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
