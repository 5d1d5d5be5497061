#!/usr/bin/env python3
"""Prints a week of a small agents' queue, up to 2026-11-29T12:00:00Z. The same on every run: python3 generate.py > queue.jsonl

Tickets come in by day more than by night. `triage` sorts them, `researcher` looks into them, `patcher` writes fixes and
`reviewer` looks over what goes out. About a third of the lines are as the older Python workers write them (version 1).
"""

import json
import random
import sys
import uuid
from decimal import Decimal

NOW = 1795953600
WEEK = 7 * 86_400
RNG = random.Random(20261129)

# USD for a million tokens: input, output, cache read, cache creation
MODELS = {
    "claude-sonnet-4-5": ("anthropic", "3", "15", "0.30", "3.75"),
    "claude-haiku-4-5": ("anthropic", "1", "5", "0.10", "1.25"),
    "gpt-5-mini": ("openai", "0.25", "2", "0.025", "0"),
    "gpt-4.1": ("openai", "2", "8", "0.50", "0"),
}
FOR_ROLE = {
    "triage": ("claude-haiku-4-5", "gpt-5-mini"),
    "researcher": ("claude-sonnet-4-5", "gpt-4.1"),
    "patcher": ("claude-sonnet-4-5",),
    "reviewer": ("claude-sonnet-4-5", "gpt-5-mini"),
}
TOPICS = {
    "the CSV importer": ("drops the last row when the file has no final line feed", "fails for column names with umlauts", "stops at the first malformed row"),
    "invoice export": ("shows the wrong date after the clock change", "double counts refunds", "ignores the customer's locale"),
    "the webhook retry queue": ("sends the same event twice", "keeps a lock after the worker restarts"),
    "password reset": ("rejects valid addresses with a plus sign", "sends a link that has already expired"),
    "the search index": ("loses the sort order on the second page", "finds nothing for words with an apostrophe"),
    "the mobile sync endpoint": ("returns 500 when the device name is empty", "times out after about 30 seconds on large accounts"),
    "rate limiting on /v2/orders": ("answers 429 well below the documented limit", "counts preflight requests"),
    "the PDF renderer": ("leaves temporary files behind", "cuts long table cells off"),
    "the nightly backup": ("reports success when the disk was full", "takes longer than the night since the last release"),
    "single sign-on": ("loops between two pages for users of two tenants", "drops the group claims after a refresh"),
    "the audit log": ("shows entries of the day before", "misses changes made through the API"),
    "attachment upload": ("refuses files of just 25 MB", "times out behind a slow proxy"),
    "the currency converter": ("rounds twice", "uses yesterday's rate until noon"),
}
LOGGED = ("batch written", "cursor closed before the last batch", "retry 3 of 5 after timeout", "cache miss, key leaves out the tenant", "date parser: unexpected offset", "upstream answered 429", "lock taken over from a dead worker")
FINDINGS = ("Reproduced on the staging copy with the customer's file.", "Could not reproduce with a fresh account; the report mentions a migrated one.", "The log shows a retry without backoff just before each failure.",
            "The regression starts with the release of 17 November.", "Only tenants with more than 10,000 rows are affected.", "The stack trace ends in the date parser.", "Two earlier tickets describe the same behaviour.",
            "The test suite has no case for this input.", "The upstream library fixed this in its last patch release.", "A feature flag hides the new code path for most tenants.",
            "The response body is cut at 64 KiB.", "The cache key leaves out the tenant.", "The cursor is closed before the last batch is written.")
NEXT = {
    "classify": ("Sorted as a defect, priority 2.", "Sorted as a question about billing, no action in the code.", "Sorted as a duplicate of an open ticket; linked.", "Sorted as a defect, priority 1: data is lost.",
                 "Needs a closer look at the logs before it can be sorted."),
    "draft_reply": ("Draft explains the workaround and says when the fix ships.", "Draft asks for the request id and the time of the last attempt.", "Draft confirms the refund and links the changed help page.",
                    "Draft apologises for the delay and gives the expected date."),
    "file_bug": ("Please write a failing test first, then fix the parser.", "Patch should keep the public signature; a changelog line is needed.", "Please backport to the current release branch.",
                 "Smallest possible change, the module is due for a rewrite."),
    "request_human": ("The customer asks for a contract change, which no agent may answer.", "Fix needs a database migration on production: please approve.", "Two plausible readings of the report; please decide which one holds.",
                      "Refund above the limit for automatic approval."),
}
REASONS = (("rate_limited", "the provider answered 429, retry after 20 s", True), ("timeout", "no answer within 600 s", True), ("context_overflow", "prompt is longer than the model's window", False),
           ("tool_error", "git apply: patch does not apply", True), ("bad_output", "the reply was not the JSON that was asked for", True), ("auth", "token for the ticket system has expired", False))


def new_id():
    return str(uuid.UUID(int=RNG.getrandbits(128), version=4))


def arrival():
    """A second of the week, more often from 8 to 18 h and on working days."""
    while True:
        t = NOW - WEEK + RNG.randrange(WEEK)
        hour, weekday = t % 86_400 // 3600, (t // 86_400 + 3) % 7
        weight = 1.0 if 8 <= hour < 18 else 0.35 if 6 <= hour < 22 else 0.12
        if RNG.random() < weight * (0.4 if weekday >= 5 else 1):
            return t


def choose_topic():
    area = RNG.choice(list(TOPICS))
    return area, RNG.choice(TOPICS[area])


def between(low, mid, high):
    return min(high, max(low, RNG.lognormvariate(0, 1) * mid))


def summary(kind, topic):
    parts = [f"{topic[0][0].upper()}{topic[0][1:]} {topic[1]}."] + RNG.sample(FINDINGS, RNG.randint(1, 3)) + [RNG.choice(NEXT[kind])]
    return " ".join(parts)[:800]


def tool_result():
    """What a tool printed: a log, a diff or a table of more than 8 KiB."""
    out, size, goal = [], 0, RNG.randint(8_600, 24_000)
    form, t = RNG.choice(("log", "diff", "rows")), NOW - RNG.randrange(WEEK)
    while size < goal:
        t += RNG.randint(0, 9)
        if form == "log":
            line = f"2026-11-{23 + t // 86_400 % 6:02}T{t % 86_400 // 3600:02}:{t % 3600 // 60:02}:{t % 60:02}Z {RNG.choice(('INFO', 'INFO', 'WARN', 'ERROR'))} worker={RNG.randint(1, 8)} job={RNG.getrandbits(32):08x} {RNG.choice(LOGGED)}"
        elif form == "diff":
            line = f"{RNG.choice(' +- ')}    {RNG.choice(('row', 'batch', 'cursor', 'tenant'))}[{RNG.randint(0, 99)}] = parse(\"{RNG.getrandbits(24):06x}\", strict={RNG.choice(('True', 'False'))})"
        else:
            line = f"{RNG.randint(10_000, 99_999)}\t{RNG.choice(('open', 'paid', 'refunded'))}\t{RNG.randint(1, 90_000) / 100:.2f}\t{RNG.choice(('EUR', 'USD', 'CHF'))}"
        out.append(line)
        size += len(line) + 1
    return "\n".join(out)


def raw(text):
    """A number that json.dumps must write just so."""
    return f"\x01{text}\x01"


def dump(value):
    return json.dumps(value, separators=(",", ":")).replace('"\\u0001', "").replace('\\u0001"', "")


def entry(role, turn):
    model = RNG.choice(FOR_ROLE[role])
    provider, p_in, p_out, p_read, p_create = MODELS[model]
    fresh, out = RNG.randint(400, 6_000), RNG.randint(80, 1_800)
    read = RNG.randint(5_000, 60_000) if turn else 0
    create = RNG.randint(1_000, 9_000) if provider == "anthropic" and RNG.random() < 0.6 else 0
    cost = (fresh * Decimal(p_in) + out * Decimal(p_out) + read * Decimal(p_read) + create * Decimal(p_create)) / 1_000_000
    text = format(cost.normalize(), "f")
    if provider == "anthropic":
        e = {"id": f"msg_01{RNG.getrandbits(80):020x}", "model": model, "provider": provider, "cost_usd": raw(text), "input_tokens": fresh, "output_tokens": out,
             "cache_read_input_tokens": read, "cache_creation_input_tokens": create}
    elif model == "gpt-5-mini":
        e = {"id": f"resp_{RNG.getrandbits(96):024x}", "model": model, "provider": provider, "cost_usd": text, "input_tokens": fresh + read, "output_tokens": out,
             "input_tokens_details": {"cached_tokens": read}}
    else:
        e = {"id": f"chatcmpl-{RNG.getrandbits(80):020x}", "model": model, "provider": provider, "cost_usd": raw(text), "prompt_tokens": fresh + read, "completion_tokens": out,
             "prompt_tokens_details": {"cached_tokens": read}}
    chance = RNG.random()
    if chance < 0.012:
        del e["cost_usd"]
    elif chance < 0.018:
        e["cost_usd"] = 0
    return e


def spend(role):
    turns = RNG.choice((1, 1, 1, 2, 3, 4, 6)) if role != "triage" else 1
    entries = [entry(role, turn) for turn in range(turns)]
    if turns == 1:
        return entries[0]
    if RNG.random() < 0.08:
        entries.insert(1, dict(entries[0]))  # logged twice
    return entries


def nack(ts, role):
    error, reason, retryable = RNG.choice(REASONS)
    return {"ts": ts, "by": role, "reason": reason, "error_class": error, "retryable": retryable}


def record(ts, kind, source, role, topic, ticket, parent):
    """A record that has run its course as far as the clock lets it; returns (record, when it was done or None)."""
    payload = {"summary": summary(kind, topic), "ticket": ticket}
    if kind == "file_bug":
        payload["files"] = [f"src/{topic[0].split()[-1].strip('/').replace('/', '_')}.py", "tests/test_regression.py"]
    wait = between(2, {"triage": 25, "researcher": 240, "patcher": 900, "reviewer": 600}[role], 5 * 3600)
    work = between(20, {"triage": 35, "researcher": 260, "patcher": 500, "reviewer": 150}[role], 2400)
    started = round(ts + wait, 3)
    finished = round(started + work, 3)
    old = RNG.random() < (0.6 if source == "intake" else 0.15)
    status, chance = "done", RNG.random()
    if finished > NOW:
        status = "running" if started <= NOW else "queued"
    elif kind == "request_human":
        status = "human" if ts > NOW - 40 * 3600 else "done"
    elif chance < 0.03:
        status = "nack"
    elif chance < 0.045:
        status = "dead"
    r = {"id": new_id(), "ts": ts, "kind": kind, "from": source, "to": role, "payload": payload, "status": status}
    if old:
        if status in ("nack", "dead"):
            r["nacks"] = 1 if status == "nack" else 3
        elif status == "done" and RNG.random() < 0.05:
            r["nacks"] = RNG.randint(1, 2)
        if status not in ("queued", "running") and RNG.random() < 0.8:
            r["spend"] = raw(format(Decimal(RNG.randint(900, 9_000 if role == "triage" else 90_000)) / 1_000_000, "f").rstrip("0"))
        return r, finished if status == "done" else None
    if RNG.random() < 0.15:
        r["ts"] = ts * 1000 + RNG.randrange(1000)
    r["protocol_version"] = 2
    r["run_id"] = f"run-{RNG.getrandbits(40):010x}"
    r["correlation_id"] = ticket
    if parent:
        r["parent"] = parent
    if status != "queued":
        r["started_ts"] = started
    if status in ("done", "nack", "dead", "human"):
        r["finished_ts"] = finished
    if status == "running":
        r["owner"] = {"host": "agents-1", "boot_id": "5c0f7d3e-8a51-4b6e-9a0d-3c1f0f3b7a42", "pid": RNG.randint(900, 32_000), "start_time": RNG.randint(10_000, 60_000_000)}
    times = {"nack": RNG.randint(1, 2), "dead": 3}.get(status, 1 if RNG.random() < 0.06 else 0)
    if times:
        r["nacks"] = [nack(round(ts + (started - ts) * (n + 1) / (times + 1), 3), role) for n in range(times)]
    if status not in ("queued", "running"):
        r["spend"] = spend(role)
    if status == "done":
        r["result"] = {"summary": RNG.choice(FINDINGS)}
    return r, finished if status == "done" else None


def ticket_records(ts, number):
    topic, ticket = choose_topic(), f"T-{number}"
    out = []

    def step(ts, kind, source, role, parent):
        if ts is None or ts > NOW:
            return None, None
        r, done = record(int(ts), kind, source, role, topic, ticket, parent)
        out.append((int(ts), r))
        return done and done + RNG.randint(0, 2), r["id"]

    t, first = step(ts, "classify", "intake", "triage", None)
    if RNG.random() < 0.15:
        return out
    if RNG.random() < 0.3:
        step(t, "draft_reply", "triage", "reviewer", first)
        return out
    t, second = step(t, "classify", "triage", "researcher", first)
    way = RNG.random()
    if way < 0.45:
        t, third = step(t, "file_bug", "researcher", "patcher", second)
        if RNG.random() < 0.12:
            step(t, "request_human", "patcher", "reviewer", third)
        else:
            step(t, "draft_reply", "patcher", "reviewer", third)
    elif way < 0.9:
        step(t, "draft_reply", "researcher", "reviewer", second)
    else:
        step(t, "request_human", "researcher", "reviewer", second)
    return out


def main():
    records = []
    for number, ts in enumerate(sorted(arrival() for _ in range(300)), 48_100):
        records += ticket_records(ts, number)
    # The last hour, so that something is under way.
    for age, kind, source, role in ((3100, "classify", "triage", "researcher"), (2400, "file_bug", "researcher", "patcher"), (1500, "file_bug", "researcher", "patcher"), (900, "draft_reply", "patcher", "reviewer"),
                                    (700, "classify", "triage", "researcher"), (240, "classify", "triage", "researcher"), (90, "classify", "intake", "triage"), (12, "classify", "intake", "triage")):
        r, _ = record(NOW - age, kind, source, role, choose_topic(), f"T-{48_500 + age}", new_id())
        for name in ("started_ts", "finished_ts", "nacks", "spend", "result", "owner"):
            r.pop(name, None)
        r["status"] = "queued"
        if age in (2400, 900):
            r["status"] = "running"
            r["started_ts"] = NOW - age + 310
            r["owner"] = {"host": "agents-1", "boot_id": "5c0f7d3e-8a51-4b6e-9a0d-3c1f0f3b7a42", "pid": RNG.randint(900, 32_000), "start_time": RNG.randint(10_000, 60_000_000)}
            r.setdefault("protocol_version", 2)
        if age in (1500, 3100):  # requeued by hand
            r["nacks"] = [nack(NOW - age + 400, role)]
            r.setdefault("protocol_version", 2)
        records.append((NOW - age, r))
    records.sort(key=lambda pair: pair[0])
    big = RNG.sample([r for _, r in records if r["from"] != "intake"], 13)
    for r in big:
        r["payload"]["tool_result"] = tool_result()
    lines = [dump(r).encode() for _, r in records]

    # What a week does to a file: a torn write, two appends glued, a power loss, a newer worker, a wrong encoding.
    at = lambda share: int(len(lines) * share)
    lines.insert(at(0.12), lines[at(0.12)][:211])
    glued = at(0.31)
    lines[glued : glued + 2] = [lines[glued] + lines[glued + 1]]
    lines.insert(at(0.55), b"\0" * 1024)
    newer = dict(records[at(0.7)][1], id=new_id(), protocol_version=3)
    lines.insert(at(0.7), dump(newer).encode())
    wrong = dump(dict(records[at(0.84)][1], id=new_id(), payload={"summary": "Kunde meldet: Rechnung f@r November fehlt."})).encode()
    lines.insert(at(0.84), wrong.replace(b"f@r", b"f\xfcr"))
    sys.stdout.buffer.write(b"".join(line + b"\n" for line in lines))


if __name__ == "__main__":
    main()
