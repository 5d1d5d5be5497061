#!/usr/bin/env python3
"""Tests dashboards/alerts.yml with promtool: what fires in which situation, and what the person reads who is paged.

Each case has two boxes with the same queue. `good` is healthy; `bad` differs from it as the case says. Samples and evaluations are a
minute apart (30 in cases of days), and time begins at 0. A case says of some minutes which alerts fire, all of them: whatever else
fires is a failure.
"""

import http.server
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dashboard import ALERTS
from server import Prometheus

DIRECTORY = "/var/lib/prometheus/node-exporter"
HOUR, DAY = 60, 1440
ROLES = ("triage", "researcher")
STATUSES = ("queued", "running", "done", "nack", "human", "dead", "other")


def series(name, **labels):
    return name + "{" + ",".join(f'{label}="{value}"' for label, value in labels.items()) + "}"


def mtime(file):
    return series("node_textfile_mtime_seconds", file=f"{DIRECTORY}/{file}.prom")


def records(status, role="researcher"):
    return series("handoff_queue_records", role=role, kind="classify", status=status)


def oldest(status, role="researcher"):
    return series("handoff_queue_oldest_timestamp_seconds", role=role, status=status)


def finished(outcome, role="researcher", kind="classify"):
    return series("handoff_finished_total", role=role, kind=kind, outcome=outcome)


def of_kind(name, role="researcher", kind="classify"):
    return series(name, role=role, kind=kind)


NACKS, SPEND, UNPRICED = map(of_kind, ("handoff_nacks_total", "handoff_spend_usd_total", "handoff_spend_unpriced_records_total"))
WAITS = series("handoff_queue_wait_seconds_count", role="researcher")
SUCCESS, LAST_SUCCESS = "handoff_exporter_success", "handoff_exporter_last_success_timestamp_seconds"
COMPACTED, OFFLOADED = (f"handoff_{job}_last_success_timestamp_seconds" for job in ("compact", "offload"))
MISSING = "handoff_blob_missing_references"
SCRAPE_ERROR = "node_textfile_scrape_error"


def healthy():
    """What node_exporter serves of a box, by minute: a record put, taken and finished every five minutes, for a cent."""
    box = {
        "up": lambda minute: 1,
        SCRAPE_ERROR: lambda minute: 0,
        SUCCESS: lambda minute: 1,
        LAST_SUCCESS: lambda minute: 60 * minute,
        COMPACTED: lambda minute: 86400 * (minute // DAY),
        OFFLOADED: lambda minute: 300 * (minute // 5),
        MISSING: lambda minute: 0,
        "handoff_queue_bytes": lambda minute: 1000,
        mtime("handoff"): lambda minute: 60 * minute,
        mtime("handoff_compact"): lambda minute: 86400 * (minute // DAY),
        mtime("handoff_offload"): lambda minute: 300 * (minute // 5),
    }
    for reason in ("not_json", "not_utf8"):
        box[series("handoff_queue_malformed_lines", reason=reason)] = lambda minute: 0
    for role in ROLES:
        for status in STATUSES:
            box[records(status, role)] = lambda minute: 0
        box[records("done", role)] = lambda minute: minute // 5
        for outcome in ("done", "dead"):
            box[finished(outcome, role)] = lambda minute: 0
        box[finished("done", role)] = lambda minute: minute // 5
        box[series("handoff_queue_wait_seconds_count", role=role)] = lambda minute: minute // 5
        box[of_kind("handoff_records_total", role)] = lambda minute: minute // 5
        box[of_kind("handoff_nacks_total", role)] = lambda minute: 0
        box[of_kind("handoff_spend_usd_total", role)] = lambda minute: 0.01 * (minute // 5)
        box[of_kind("handoff_spend_unpriced_records_total", role)] = lambda minute: 0
    return box


def constant(value):
    return lambda minute: value


def from_minute(start, value, before=0):
    """`value` (a number, or None for no sample) from a minute on."""
    return lambda minute: value if minute >= start else before


def until(end, value):
    return lambda minute: value if minute < end else None


def in_file(name, file):
    jobs = {"handoff_compact": "handoff_compact_", "handoff_offload": "handoff_offload_"}
    return name.startswith(jobs[file]) if file in jobs else name.startswith("handoff_") and not name.startswith(tuple(jobs.values()))


def frozen(start, box):
    """The exporter isn't started any more from a minute on: its file stays as it was."""
    return {name: (lambda value: lambda minute: value(min(minute, start)))(value)
            for name, value in box.items() if in_file(name, "handoff") or name == mtime("handoff")}


def vanished(start, box, *files, end=10**9):
    """node_exporter serves nothing of some files for a while."""
    gone = [name for name in box if any(in_file(name, file) or name == mtime(file) for file in files)]
    return {name: (lambda value: lambda minute: None if start <= minute < end else value(minute))(box[name]) for name in gone}


def unreadable(start, box, last_success=True, end=10**9):
    """Runs fail for a while: the file has the health series only."""
    changes = vanished(start, box, "handoff", end=end)
    changes[SUCCESS] = lambda minute: int(not start <= minute < end)
    changes[mtime("handoff")] = box[mtime("handoff")]
    changes[LAST_SUCCESS] = lambda minute: 60 * minute if not start <= minute < end else 60 * (start - 1) if last_success else None
    return changes


def off(start, end, box):
    """The box is off for a while."""
    return {name: (lambda value: lambda minute: None if start <= minute < end else value(minute))(value) for name, value in box.items()}


def moved(minute, value, old, new):
    """What one series has counted is in another from a minute on."""
    return {old: lambda m: value if m < minute else 0, new: from_minute(minute, value, None)}


def of_role(name, role="researcher"):
    return {"alertname": name, "instance": "bad", "role": role}


def of_box(name, **labels):
    return {"alertname": name, "instance": "bad"} | labels


# Shared by cases: a record that waits for a person since minute 5, one that has been queued then with no work done, one that runs.
HUMAN = {records("human"): from_minute(5, 1), oldest("human"): from_minute(5, 290, None)}
UNTOUCHED = {WAITS: constant(9), finished("done"): constant(9)}
QUEUED = {records("queued"): from_minute(5, 1), oldest("queued"): from_minute(5, 290, None)}
RUNNING = {records("running"): from_minute(5, 1), oldest("running"): from_minute(5, 290, None)}
GROWING = {records("queued"): lambda minute: minute // 2, oldest("queued"): lambda minute: max(0, 60 * (minute - 10))}

DEAD_BEFORE = {finished("dead"): constant(3), SPEND: constant(400), UNPRICED: constant(7)}


def clock(ahead):
    """What the exporter writes by a clock that is wrong by some seconds."""
    return {name: lambda minute: 60 * minute + ahead for name in (LAST_SUCCESS, mtime("handoff"))}


CASES = {}


def case(name, changes, expected, sees=("handoff", "handoff_compact", "handoff_offload")):
    """`changes` of the bad box, or a function that makes them of its series; `expected`: alerts by minute."""
    box = healthy()
    if callable(changes):
        changes = changes(box)
    box |= changes
    for file in {"handoff", "handoff_compact", "handoff_offload"} - set(sees):
        box = {name: value for name, value in box.items() if not in_file(name, file) and name != mtime(file)}
    assert name not in CASES, name
    CASES[name] = box, expected


STALE, ABSENT, TEXTFILE = map(of_box, ("HandoffExporterStale", "HandoffMetricsAbsent", "HandoffTextfileError"))
WAITS_FOR_A_PERSON, STALLED, STUCK, DEAD = map(of_role, ("HandoffHumanWaiting", "HandoffQueueStalled", "HandoffRunningStuck", "HandoffDeadLetter"))

case("All is well, for three days", {}, {30: [], 60: [], 50 * HOUR: [], 72 * HOUR: []})

# ------------------------------------------------------------------------------------------------------------ no sight of the queue

case("The exporter dies", lambda box: frozen(20, box), {22: [], 23: [], 24: [STALE], 90: [STALE]})
case("A run comes late", lambda box: {LAST_SUCCESS: lambda minute: 60 * (minute // 3 * 3)}, {30: [], 31: [], 32: [], 33: []})
case("Runs fail", lambda box: unreadable(20, box), {22: [], 24: [STALE], 90: [STALE]})
case("Runs fail, and don't know when one succeeded", lambda box: unreadable(20, box, last_success=False), {20: [], 22: [STALE]})
case("No run has ever succeeded", lambda box: unreadable(0, box) | {LAST_SUCCESS: constant(0)}, {0: [], 2: [STALE], 5: [STALE]})
case("The exporter dies on a box whose clock is ahead", lambda box: frozen(20, box | clock(600) | QUEUED | UNTOUCHED), {19: [], 24: [STALE], 90: [STALE]})
case("A box's clock is behind", lambda box: clock(-600) | HUMAN | QUEUED | UNTOUCHED, {30: [WAITS_FOR_A_PERSON], 60: [WAITS_FOR_A_PERSON, STALLED]})
case("The exporter dies: what fired goes on, and nothing else starts",
     lambda box: frozen(30, box | HUMAN | QUEUED | RUNNING) | {WAITS: from_minute(30, 9), finished("done"): constant(9)},
     {29: [WAITS_FOR_A_PERSON], 60: [WAITS_FOR_A_PERSON, STALE], 85: [WAITS_FOR_A_PERSON, STALE]})
case("The exporter dies while somebody works on what is old", lambda box: frozen(60, box | QUEUED), {60: [], 100: [STALE], 118: [STALE]})
case("Runs fail: what fired goes on, and nothing else starts",
     lambda box: unreadable(90, box | HUMAN | QUEUED | UNTOUCHED | {oldest("running", "triage"): from_minute(60, 3590, None),
                                                                    records("running", "triage"): from_minute(60, 1)}),
     {89: [WAITS_FOR_A_PERSON, STALLED], 145: [WAITS_FOR_A_PERSON, STALLED, STALE]})
case("The box can't be reached: what fired goes on",
     lambda box: off(30, 10**9, box | HUMAN),
     {29: [WAITS_FOR_A_PERSON], 33: [WAITS_FOR_A_PERSON], 36: [WAITS_FOR_A_PERSON, ABSENT], 80: [WAITS_FOR_A_PERSON, ABSENT]})
case("handoff.prom is removed", lambda box: vanished(20, box, "handoff"), {24: [], 26: [ABSENT], 200: [ABSENT]})
case("node_exporter is restarted", lambda box: vanished(20, box, "handoff", "handoff_compact", "handoff_offload", end=24),
     {minute: [] for minute in range(19, 31)})
case("node_exporter can't use handoff.prom", lambda box: vanished(20, box, "handoff") | {SCRAPE_ERROR: from_minute(20, 1)},
     {24: [], 26: [ABSENT, TEXTFILE | {"file": f"{DIRECTORY}/handoff.prom"}]})
case("node_exporter can't use handoff_compact.prom", lambda box: vanished(20, box, "handoff_compact") | {SCRAPE_ERROR: from_minute(20, 1)},
     {24: [], 26: [TEXTFILE | {"file": f"{DIRECTORY}/handoff_compact.prom"}]})
case("Runs fail for two hours: what was given up and spent before is no news",
     lambda box: unreadable(60, box | DEAD_BEFORE, end=200), {59: [], 120: [STALE], 199: [STALE]} | {minute: [] for minute in (200, 201, 205, 230, 259, 261, 320, 330)})
case("Runs fail for two hours: what was given up meanwhile is news",
     lambda box: unreadable(60, box | {finished("dead"): from_minute(130, 4, 3)}, end=200), {199: [STALE], 201: [DEAD], 257: [DEAD], 262: []})
case("node_exporter can't use a file of somebody else", {SCRAPE_ERROR: constant(1)}, {10: [], 60: []})

# ---------------------------------------------------------------------------------------------------------------------- the queue

case("Nobody works", QUEUED | UNTOUCHED, {34: [], 45: [STALLED], 120: [STALLED]})
case("A box comes back with something to do", lambda box: off(60, 100, box | UNTOUCHED | {records("queued"): from_minute(100, 1), oldest("queued"): from_minute(100, 6000, None)}),
     {90: [ABSENT], 101: [], 105: [], 110: [], 129: [], 137: [STALLED]})
case("Nobody works, and there is nothing to do", UNTOUCHED, {45: [], 120: []})
case("The oldest record is old, and somebody works", QUEUED, {45: [], 120: []})
case("Workers that write no started_ts work", QUEUED | {WAITS: constant(0)}, {45: [], 120: []})
case("Records are taken, and none is finished yet", QUEUED | {finished("done"): constant(9)}, {45: [], 120: []})
case("A role that only refuses works", QUEUED | UNTOUCHED | {NACKS: lambda minute: minute // 20}, {45: [], 120: []})
case("Somebody works again", {records("queued"): lambda minute: 5 <= minute < 60, oldest("queued"): lambda minute: 290 if 5 <= minute < 60 else None,
                              WAITS: from_minute(60, 10, 9), finished("done"): constant(9)}, {59: [STALLED], 61: []})
case("Nobody works, and what is queued is from the future", QUEUED | UNTOUCHED | {oldest("queued"): from_minute(5, 10**6, None)},
     {34: [], 45: [STALLED], 120: [STALLED]})
case("A record runs for more than half an hour while another is queued", QUEUED | RUNNING | UNTOUCHED, {45: [], 64: [], 67: [STUCK], 120: [STUCK]})
case("A record that was queued long ago is queued again", QUEUED | UNTOUCHED | {records("queued"): from_minute(60, 1), oldest("queued"): from_minute(60, -86400, None)},
     {65: [], 89: [], 96: [STALLED]})
case("A record runs for more than an hour", RUNNING | UNTOUCHED, {64: [], 67: [STUCK], 120: [STUCK]})
case("A record from the future runs for more than an hour", RUNNING | UNTOUCHED | {oldest("running"): from_minute(5, 10**6, None)}, {64: [], 67: [STUCK]})
case("Records that were queued in the same second run one after the other, or one hangs while others don't", RUNNING,
     {67: [], 120: [], 363: [], 367: [STUCK], 420: [STUCK]})
case("A record that had waited for long is taken", RUNNING | {oldest("running"): lambda minute: 60 * (minute // 30 * 30) - 86400}, {67: [], 120: []})
case("A record waits for a person", HUMAN, {4: [], 5: [WAITS_FOR_A_PERSON], 60: [WAITS_FOR_A_PERSON]})
case("A record from the future waits for a person", HUMAN | {oldest("human"): from_minute(5, 10**6, None)}, {4: [], 5: [WAITS_FOR_A_PERSON], 60: [WAITS_FOR_A_PERSON]})
case("A person has answered", {records("human"): lambda minute: int(5 <= minute < 20), oldest("human"): lambda minute: 290 if 5 <= minute < 20 else None},
     {19: [WAITS_FOR_A_PERSON], 20: []})
case("A record is given up", {finished("dead"): from_minute(30, 4, 3)}, {29: [], 31: [DEAD], 88: [DEAD], 92: []})
case("Records of another role are given up", {finished("dead"): constant(1), finished("dead", "triage"): from_minute(30, 2)},
     {29: [], 31: [DEAD | {"role": "triage"}], 88: [DEAD | {"role": "triage"}], 92: []})
case("The first record of its kind is given up at once", {finished("dead", kind="draft_reply"): from_minute(150, 1, None)},
     {149: [], 151: [DEAD], 208: [DEAD], 271: []})
case("The first record of its role is given up at once", {finished("dead", role="patcher"): from_minute(150, 1, None)},
     {149: [], 151: [DEAD | {"role": "patcher"}], 208: [DEAD | {"role": "patcher"}], 271: []})
case("The first record of all is given up at once",
     lambda box: {name: (lambda value: lambda minute: value(minute) if minute >= 150 else None)(value) for name, value in box.items() if "role=" in name}
     | {finished("dead"): from_minute(150, 1, None)}, {149: [], 151: [DEAD], 208: [DEAD], 271: []})
RENAMED = moved(120, 3, finished("dead", "other"), finished("dead", "patcher")) | {
    key: value for name, count in (("handoff_spend_usd_total", 400), ("handoff_spend_unpriced_records_total", 7))
    for key, value in moved(120, count, of_kind(name, "other"), of_kind(name, "patcher")).items()}
case("A role gets its name later: its history is no news", RENAMED, {minute: [] for minute in (119, 120, 121, 150, 178, 181, 300)})
case("A role gets its name later, and another's record is given up", RENAMED | {finished("dead"): from_minute(130, 1)}, {129: [], 131: [DEAD], 188: [DEAD], 192: []})
case("A worker queues again what was given up, by other means", {finished("dead"): lambda minute: 3 if minute < 60 else 2}, {minute: [] for minute in (59, 60, 61, 100, 125)})
case("Records were given up long ago", {finished("dead"): constant(3), records("dead"): constant(3)}, {2: [], 30: [], 90: []})
case("Half of what is tried is refused", {NACKS: lambda minute: minute // 5}, {5: [], 60: [of_role("HandoffNackRatioHigh")]})
case("Two of three are refused", {NACKS: from_minute(10, 2), finished("done"): from_minute(20, 1)}, {30: [], 60: []})
case("One of ten is refused", {NACKS: lambda minute: minute // 9, finished("done"): lambda minute: minute}, {60: [], 90: []})
case("More is put than is taken", GROWING, {60: [], 80: [of_role("HandoffBacklogGrowing")], 200: [of_role("HandoffBacklogGrowing")]})
case("A burst", {records("queued"): lambda minute: max(0, 60 - (minute - 60) // 3) if minute >= 60 else 0}, {m: [] for m in range(60, 200, 10)})
case("Lines are malformed", {series("handoff_queue_malformed_lines", reason="not_json"): from_minute(10, 2)},
     {14: [], 16: [of_box("HandoffMalformedLines", reason="not_json")]})
case("A line is malformed for a moment", {series("handoff_queue_malformed_lines", reason="not_json"): lambda m: 1 if 10 <= m < 13 else 0}, {12: [], 16: []})
case("A blob is missing", {MISSING: from_minute(10, 2)}, {14: [], 16: [of_box("HandoffBlobMissing")]})
case("A blob is missing for a moment", {MISSING: lambda minute: 1 if 10 <= minute < 13 else 0}, {12: [], 16: []})

# ---------------------------------------------------------------------------------------------------------------------- the money

HIGH, UNKNOWN = of_box("HandoffSpendHigh"), of_role("HandoffSpendUnpriced") | {"kind": "classify"}
case("60 USD in a day", {SPEND: lambda minute: 0.0417 * minute}, {12 * HOUR: [], 23 * HOUR: [HIGH]})
case("40 USD in a day", {SPEND: lambda minute: 0.0278 * minute}, {12 * HOUR: [], 48 * HOUR: []})
case("The first record of its kind costs 60 USD", {of_kind("handoff_spend_usd_total", kind="draft_reply"): from_minute(60, 60, None)},
     {30: [], 60: [HIGH], 24 * HOUR: [HIGH], 26 * HOUR: []})
case("The first record of its kind is unpriced", {of_kind("handoff_spend_unpriced_records_total", kind="draft_reply"): from_minute(60, 1, None)},
     {30: [], 60: [UNKNOWN | {"kind": "draft_reply"}], 24 * HOUR: [UNKNOWN | {"kind": "draft_reply"}], 26 * HOUR: []})
case("A new price map knows what was unpriced: that is as if it were spent now", {SPEND: from_minute(60, 100, 20), UNPRICED: from_minute(60, 0, 9)},
     {30: [], 60: [HIGH], 24 * HOUR: [HIGH], 26 * HOUR: []})
case("A record is unpriced", {UNPRICED: from_minute(60, 1)}, {30: [], 60: [UNKNOWN], 23 * HOUR: [UNKNOWN], 25 * HOUR: []})
case("Records were unpriced long ago", {UNPRICED: constant(7)}, {2: [], 30: [], 90: []})

# ----------------------------------------------------------------------------------------------------------------------- the jobs

COMPACTION, OFFLOAD = map(of_box, ("HandoffCompactionStale", "HandoffOffloadStale"))
case("Compaction fails from the second day on", {COMPACTED: lambda minute: 0 if minute < DAY else 86400},
     {75 * HOUR: [], 76 * HOUR: [COMPACTION]})
case("Compaction has failed ever since", {COMPACTED: constant(0)}, {51 * HOUR: [], 52 * HOUR: [COMPACTION]})
case("Compaction has never run", {}, {51 * HOUR: [], 52 * HOUR: [COMPACTION]}, sees=("handoff", "handoff_offload"))
case("Compaction misses one day", {COMPACTED: lambda minute: 86400 * (minute // DAY) if not DAY <= minute < 2 * DAY else 0},
     {47 * HOUR: [], 49 * HOUR: [], 51 * HOUR: []})
case("The box was off for 60 hours, and its timer lets an hour pass",
     lambda box: off(30 * HOUR, 90 * HOUR, box | {COMPACTED: lambda minute: 86400 if minute <= 91 * HOUR else 60 * (91 * HOUR + 5)}),
     {29 * HOUR: [], 80 * HOUR: [ABSENT]} | {90 * HOUR + minute: [] for minute in (0, 30, 60, 90, 180)})
case("Compaction runs: done records leave, their sums go into the ledger",
     {records("done"): lambda minute: minute // 5 if minute < 2 * DAY else minute // 5 - 500, "handoff_queue_generations": from_minute(2 * DAY, 1),
      "handoff_queue_bytes": lambda minute: 1000 * (minute // 5 if minute < 2 * DAY else minute // 5 - 500),
      "handoff_compact_removed_records_total": from_minute(2 * DAY, 500), "handoff_compact_reclaimed_bytes_total": from_minute(2 * DAY, 500_000)},
     {2 * DAY + minute: [] for minute in (-30, 0, 30, 60, 120)})
case("Offload fails", {OFFLOADED: lambda minute: 300 * min(minute // 5, 6)}, {62: [], 67: [OFFLOAD]})
case("Offload has never run", {}, {24: [], 42: [OFFLOAD]}, sees=("handoff", "handoff_compact"))
case("The box was off for half an hour, and the first run comes after a period",
     lambda box: off(30, 61, box | {OFFLOADED: lambda minute: 1500 if minute < 67 else 300 * (minute // 5)}), {29: [], 50: [ABSENT]} | {minute: [] for minute in range(61, 80)})
case("Offload misses two runs", {OFFLOADED: lambda minute: 900 * (minute // 15)}, {m: [] for m in range(10, 70, 5)})

# What is read by who is paged, in cases in which it fires alone: minute, summary, description.
TEXTS = {
    "The exporter dies": (24, "The handoff queue on bad is not being read",
        "The last good run of handoff-exporter was 4m 0s ago. What dashboards show of this queue is old or missing. "
        "Run on the box: journalctl -u handoff-exporter -n 5"),
    "handoff.prom is removed": (26, "No handoff metrics from bad",
        "Prometheus has no handoff series of bad any more; the last good reading is 7m 0s old. "
        'Ask Prometheus whether it reaches the box: up{instance="bad"}. '
        "Then run on the box: ls -l /var/lib/prometheus/node-exporter; systemctl status handoff-exporter.timer prometheus-node-exporter"),
    "node_exporter can't use handoff_compact.prom": (26, f"node_exporter on bad cannot use {DIRECTORY}/handoff_compact.prom",
        "The last file that it could use was written 26m 0s ago. Its series are missing. "
        f"Run on the box: journalctl -u prometheus-node-exporter -n 20; ls -l {DIRECTORY}/handoff_compact.prom"),
    "Nobody works": (45, "Nobody works for role researcher on bad",
        "A record for researcher was queued 40m 10s ago. None of that role is running, and for 30 minutes none was taken, finished or refused. "
        "Run on the box: handoff status; systemctl status 'handoff-worker@researcher'"),
    "A record runs for more than an hour": (67, "A record of role researcher on bad has been running for more than an hour",
        "It was queued 1h 2m 10s ago. Its worker has died, hangs, or is very slow. "
        "Run on the box: handoff status. If the worker is dead: handoff requeue ID"),
    "A record waits for a person": (5, "A record of role researcher on bad waits for a person",
        "The oldest such record was queued 10s ago. Nobody but a person goes on with it. "
        "Run on the box: handoff list --status human --role 'researcher'; handoff show ID. Then handoff requeue ID, handoff done ID or handoff cancel ID"),
    "A record is given up": (31, "Records of role researcher on bad have been given up",
        "Within the last hour: 1. Refused for good, cancelled, or handed over to the role that they came from, they are done by nobody. "
        "Run on the box: handoff list --status dead --since 1h --role 'researcher'; handoff show ID. To have one tried again: handoff requeue ID"),
    "Half of what is tried is refused": (60, "Role researcher on bad refuses 50% of its records",
        "Of what researcher tried within the last hour 50% was refused. The reasons are in the records. "
        "Run on the box: handoff list --role 'researcher' --json | grep '\"nacks\"' | tail -n 3"),
    "More is put than is taken": (80, "Role researcher on bad falls behind",
        "Records queued for researcher: 40. In each of the last two half hours more came than were taken. "
        "Run on the box: handoff status. Then slow the producers down, or start another worker of that role"),
    "Lines are malformed": (16, "The queue on bad has lines that are no records (not_json)",
        "Lines that nobody will take: 2. If one is the ledger, compaction refuses to run. "
        "Run on the box: handoff check. Mend the lines, or put them aside: handoff check --quarantine"),
    "A blob is missing": (16, "Records on bad refer to blobs that are gone",
        "References without a blob: 2. Whoever takes these records cannot read them. "
        "Run on the box: handoff blob check. Restore what it names from a backup"),
    "60 USD in a day": (23 * HOUR, "Agents on bad have spent $60.31 in 24 hours",
        "More than the limit; and it is at least that much if records are unpriced. The dashboard's row \"Money\" shows which role and kind. "
        "To stop the worker of a role: systemctl stop handoff-worker@ROLE. What it has at hand is finished or handed back"),
    "A record is unpriced": (60, "The spend of researcher on bad is not known",
        "Records (classify) within a day with a model response whose cost is not known: 1. The spend shown is too low by them. "
        "Write cost_usd with the response, or give HANDOFF_PRICES in /etc/default/handoff a map with that model"),
    "Compaction fails from the second day on": (76 * HOUR, "The queue on bad is not compacted",
        "The last good run of handoff-compact was 2d 4h 0m 0s ago, and it should run daily. The queue only grows. "
        "Run on the box: systemctl status handoff-compact.timer; journalctl -u handoff-compact -n 5; handoff-compact --dry-run"),
    "Offload fails": (67, "Large values on bad are not moved into the blob store",
        "The last good run of handoff-offload was 37m 0s ago, and it should run every 5 minutes. Large values stay in the queue's lines. "
        "Run on the box: systemctl status handoff-offload.timer; journalctl -u handoff-offload -n 5"),
}


# ------------------------------------------------------------------------------------------------------------------------ promtool

GROUPS = re.findall(r"^  - name: (\S+)", ALERTS.read_text(), re.M)
SEVERITIES = {rule["alert"]: rule["severity"] for rule in
              (match.groupdict() for match in re.finditer(r"- alert: (?P<alert>\w+)\n(?:(?!- alert:).)*?severity: (?P<severity>\w+)", ALERTS.read_text(), re.S))}


def notation(value, minutes):
    """A series in promtool's notation. Prometheus marks a series as stale when a scrape no longer has it."""
    numbers = [value(minute) for minute in minutes]
    there = [number is not None for number in numbers]
    return " ".join(repr(float(number)) if number is not None else "stale" if before else "_" for number, before in zip(numbers, [False] + there))


def labelled(name, **labels):
    more = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return name[:-1] + "," + more + "}" if "{" in name else name + "{" + more + "}"


def firing(alerts):
    return [{"labels": labelled("ALERTS", alertstate="firing", job="node", severity=SEVERITIES[alert["alertname"]], **alert), "value": 1} for alert in alerts]


def texts(name, expected):
    if name not in TEXTS:
        return []
    minute, summary, description = TEXTS[name]
    labels = {"job": "node"} | expected[minute][0]
    alert = labels.pop("alertname")
    annotations = {"summary": summary, "description": description, "runbook_url": f"file:///usr/share/handoff-queue/README.md#{alert.lower()}"}
    return [{"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": [{"exp_labels": labels | {"severity": SEVERITIES[alert]}, "exp_annotations": annotations}]}]


def as_test(name, box, expected):
    step = 1 if max(expected) <= 10 * HOUR else 30
    minutes = range(0, max(expected) + 1, step)
    assert all(minute in minutes for minute in expected), name
    boxes = {"good": healthy(), "bad": box} if box else {}
    return {
        "name": name,
        "interval": f"{step}m",
        "input_series": [{"series": labelled(series, job="node", instance=instance), "values": notation(value, minutes)}
                         for instance, of_box in boxes.items() for series, value in of_box.items()],
        "promql_expr_test": [{"expr": 'ALERTS{alertstate="firing"}', "eval_time": f"{minute}m", "exp_samples": firing(alerts)}
                             for minute, alerts in expected.items()],
        "alert_rule_test": texts(name, expected),
    }


def promtool(test):
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
        json.dump({"rule_files": [str(ALERTS)], "evaluation_interval": test["interval"], "group_eval_order": GROUPS, "tests": [test]}, file)
        file.flush()
        return subprocess.run(["promtool", "test", "rules", file.name], capture_output=True, text=True)


def never(directory):
    """What a new Prometheus tells, first of boxes that it has never seen, then of one on which nothing has ever succeeded. promtool's
    time begins at 0, where that can't be told from what succeeded then."""
    served = [f"handoff_{job}_last_success_timestamp_seconds 0" for job in ("compact", "offload")]

    class Box(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(("\n".join(served) + "\n").encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Box) as box:
        threading.Thread(target=box.serve_forever, daemon=True).start()
        target = f"127.0.0.1:{box.server_port}"
        config = ("global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
                  f"scrape_configs: [{{job_name: node, static_configs: [{{targets: ['{target}']}}]}}]\n")
        with Prometheus(directory, config) as prometheus:
            for alert, text in (("HandoffMetricsAbsent", "no handoff series any more; no good reading is known"),
                                ("HandoffCompactionStale", "No run of handoff-compact is known to have succeeded, and"),
                                ("HandoffOffloadStale", "No run of handoff-offload is known to have succeeded, and"),
                                ("HandoffExporterStale", "No run of handoff-exporter is known to have succeeded.")):
                if alert == "HandoffExporterStale":
                    served.append("handoff_exporter_success 0\nhandoff_exporter_last_success_timestamp_seconds 0")
                started, descriptions = time.monotonic(), []
                while not any(text in description for description in descriptions) and time.monotonic() < started + 30:
                    time.sleep(0.1)
                    descriptions = [each["annotations"]["description"] for each in prometheus.get("alerts")["alerts"] if each["labels"]["alertname"] == alert]
                if not any(text in description for description in descriptions):
                    yield f"{alert}: {descriptions}"
        box.shutdown()


def main():
    passed, failed = 0, []
    tests = [as_test(name, box, expected) for name, (box, expected) in CASES.items()]
    nobody = as_test("No box has ever been seen", None, {4: [], 6: []})
    nobody["promql_expr_test"][1]["exp_samples"] = [
        {"labels": 'ALERTS{alertname="HandoffMetricsAbsent",alertstate="firing",severity="critical"}', "value": 1}]
    tests.append(nobody)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = list(pool.map(promtool, tests))
    for test, run in zip(tests, runs):
        if run.returncode == 0:
            passed += 1
        else:
            failed.append(test["name"])
            print(f"FAILED: {test['name']}\n{run.stdout}{run.stderr}")
    fired = {alert["alertname"] for _, expected in CASES.values() for alerts in expected.values() for alert in alerts}
    with tempfile.TemporaryDirectory() as directory:
        wrong = list(never(Path(directory)))
    passed, failed = passed + (not wrong), failed + wrong
    print(*(f"FAILED: what has never succeeded: {each}" for each in wrong), sep="\n", end="\n" if wrong else "")
    told = {expected[TEXTS[name][0]][0]["alertname"] for name, (_, expected) in CASES.items() if name in TEXTS}
    for name in SEVERITIES.keys() - told:
        failed.append(name)
        print(f"FAILED: the text of {name} is not looked at")
    for name in SEVERITIES.keys() - fired:
        failed.append(name)
        print(f"FAILED: no case in which {name} fires")
    print(f"alerts: {passed} passed, {len(failed)} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
