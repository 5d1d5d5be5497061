#!/usr/bin/env python3
"""Writes N handoff records to standard output, the same ones every time.

    generate.py N > queue.jsonl

The first records of a longer queue are those of a shorter one. About 1.5 KB a record: 30 % of protocol
version 1, the others of version 2 with spend; 2 % carry a tool result of 9-64 KiB, 1 % a reference to a
blob, 5 % text that isn't ASCII. Only random() and getrandbits() are used, which Python keeps stable.
"""

import json
import sys
from bisect import bisect_left
from random import Random

ROLES = ["triage", "researcher", "writer", "operator"]
KINDS = ["classify", "draft_reply", "file_bug", "request_human"]
STATUSES = ["done"] * 88 + ["queued"] * 4 + ["running"] * 2 + ["nack"] * 3 + ["human"] * 2 + ["dead"]
# Name, provider, USD per million input and output tokens.
MODELS = [
    ("large-2", "alpha", 5, 25),
    ("medium-4", "alpha", 3, 15),
    ("small-4", "alpha", 1, 5),
    ("coder-1", "beta", 2, 8),
]
REASONS = ["missing ticket id", "tool timed out", "kind not handled here", "rate limited by the provider"]
WORDS = (
    "the a of to in and for with from on is was no not ticket customer invoice refund login error timeout retry "
    "server disk queue worker reply draft sent order account password reset upgrade version crash report log "
    "attached steps reproduce expected actual result please check confirm asked before after twice since Monday"
).split()
FOREIGN = "Zürich naïve café 東京 サポート Привет заказ naprawić żółty São mañana Ελλάδα 😀 — „Rechnung“ größer".split()
START = 1_760_000_000.0  # long past, so that no interval ends in the future
STEP = 1.2  # a million records in two weeks

rng = Random(20251009)
random, getrandbits = rng.random, rng.getrandbits


def pick(values):
    return values[int(random() * len(values))]


def sentence(words, length):
    text = pick(words)
    while len(text) < length:
        text += " " + pick(words)
    return json.dumps(text[:length], ensure_ascii=False)


def tool_line():
    path = "/".join(pick(WORDS) for _ in range(3))
    return f'{int(random() * 900) + 1}:\t{{"path": "{path}", "took": {random():.4f}, "note": {sentence(WORDS, 40)}}}\n'


PLAIN = [sentence(WORDS, 60 + int(random() * 300)) for _ in range(1000)]
UNICODE = [sentence(WORDS[::4] + FOREIGN, 60 + int(random() * 300)) for _ in range(200)]
SHORT = [sentence(WORDS, 20 + int(random() * 30)) for _ in range(500)]

# One long tool result as JSON text, and where its lines start: slices of it never cut an escape in two.
TOOL, TOOL_LINES = "", [0]
while len(TOOL) < 400_000:
    TOOL += json.dumps(tool_line())[1:-1]
    TOOL_LINES.append(len(TOOL))


def uuid():
    h = f"{getrandbits(128):032x}"
    return f"{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"


def tool_result():
    size = 9 * 1024 + int(random() * 55 * 1024)
    first = int(random() * len(TOOL_LINES) / 2)
    last = bisect_left(TOOL_LINES, TOOL_LINES[first] + size) - 1
    return f'"{TOOL[TOOL_LINES[first]:TOOL_LINES[last]]}"'


def payload(kind):
    summary = pick(UNICODE if random() < 0.05 else PLAIN)
    text = f'{{"ticket":"T-{getrandbits(20)}","summary":{summary}'
    if kind != "classify":
        text += f',"paths":["/srv/tickets/{getrandbits(16)}.md","/srv/logs/{getrandbits(24):x}.log"]'
    text += f',"facts":[{pick(SHORT)},{pick(SHORT)}]'
    special = random()
    if special < 0.02:
        text += f',"tool_result":{tool_result()}'
    elif special < 0.03:
        sha = f"{getrandbits(256):064x}"
        text += f',"tool_result":{{"blob":"blob/{sha[:2]}/{sha}","bytes":{8193 + getrandbits(16)},"preview":{pick(PLAIN)}}}'
    return text + "}"


def spend_entry():
    model, provider, input_price, output_price = pick(MODELS)
    tokens_in, tokens_out, cached = getrandbits(12), getrandbits(10), getrandbits(13)
    micro_usd = tokens_in * input_price + tokens_out * output_price + cached * input_price // 10
    # One in a hundred isn't priced.
    cost = f'"cost_usd":{micro_usd // 1_000_000}.{micro_usd % 1_000_000:06d},' if random() < 0.99 else ""
    return (
        f'{{"id":"msg_{getrandbits(80):020x}","model":"{model}","provider":"{provider}",{cost}'
        f'"input_tokens":{tokens_in},"output_tokens":{tokens_out},"cache_read_input_tokens":{cached}}}'
    )


def record(number):
    ts = START + number * STEP
    status, kind = pick(STATUSES), pick(KINDS)
    source = int(random() * 4)
    target = (source + 1 + int(random() * 3)) % 4
    version2 = random() < 0.7
    line = (
        f'{{"id":"{uuid()}","ts":{f"{ts:.3f}" if version2 else int(ts)},"kind":"{kind}","from":"{ROLES[source]}",'
        f'"to":"{ROLES[target]}","payload":{payload(kind)},"status":"{status}"'
    )
    if not version2:
        return line + "}\n"
    line += f',"protocol_version":2,"run_id":"run-{number // 50}","correlation_id":"{uuid()}"'
    if status == "queued":
        return line + "}\n"
    started = ts + random() ** 4 * 7200
    line += f',"started_ts":{started:.3f}'
    if status == "running":
        line += f',"owner":{{"host":"box","boot_id":"{uuid()}","pid":{getrandbits(15)},"start_time":{getrandbits(24)}}}'
    else:
        line += f',"finished_ts":{started + 1 + random() ** 3 * 900:.3f}'
    if status == "nack" or random() < 0.005:
        line += f',"nacks":[{{"ts":{started:.3f},"by":"{ROLES[target]}","reason":"{pick(REASONS)}","retryable":true}}]'
    entries = spend_entry()
    if random() < 0.4:
        entries += "," + spend_entry()
    return f'{line},"spend":[{entries}]}}\n'


def main():
    if len(sys.argv) != 2 or not sys.argv[1].isdecimal():
        sys.exit("usage: generate.py N > FILE")
    with open(1, "w", encoding="utf-8", newline="\n", buffering=1 << 20) as out:
        for number in range(int(sys.argv[1])):
            out.write(record(number))


if __name__ == "__main__":
    main()
