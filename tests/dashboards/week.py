#!/usr/bin/env python3
"""Runs every expression of the dashboard and of the alerts in a real Prometheus that holds the simulated week of two boxes.

usage: week.py DIRECTORY-OF-BINARIES
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import simulate
from dashboard import load, metrics, panels, replaced, rules, targets, variables
from server import Prometheus
from simulate import DAY, END, HOUR, START, STEP, at

ONE, TWO = "agents1:9100", "agents2:9100"
VALUES = {"job": ".+", "instance": ".+", "role": ".*", "kind": ".*", "__rate_interval": "1h", "__range": "7d", "__interval": "15m"}

# When each alert's expression holds, and for which box and role, from the first quarter of an hour to the last; at no other time and for
# nothing else. See `simulate.py` for what happens then.
ALERTING = {
    "HandoffExporterStale": {(ONE, ""): [(at(6, 6), at(6, 7, 45))]},
    "HandoffMetricsAbsent": {(TWO, ""): [(at(6, 12), at(6, 13, 45))]},
    "HandoffTextfileError": {(TWO, ""): [(at(6, 12), at(6, 13, 45))]},
    "HandoffQueueStalled": {(ONE, "patcher"): [(at(3, 2, 45), at(3, 5))]},
    "HandoffRunningStuck": {(ONE, "researcher"): [(at(1, 16, 15), at(1, 18))]},
    "HandoffHumanWaiting": {(ONE, "reviewer"): [(at(2, 8), at(2, 11, 45)), (at(6, 20, 15), END)]},
    "HandoffDeadLetter": {(ONE, "triage"): [(at(2, 15), at(2, 15, 45))]},
    "HandoffBacklogGrowing": {(ONE, "triage"): [(at(5, 13), at(5, 16))]},
    "HandoffMalformedLines": {(ONE, ""): [(at(2, 20), at(3, 7, 45))]},
    "HandoffBlobMissing": {(ONE, ""): [(at(5, 20), at(5, 22, 45))]},
    "HandoffSpendUnpriced": {(ONE, "patcher"): [(at(1, 6, 15), at(2, 6)), (at(6, 12, 15), END)]},
    "HandoffCompactionStale": {(ONE, ""): [(at(4, 6, 15), at(5, 3, 45))]},
    "HandoffOffloadStale": {(ONE, ""): [(at(6, 14, 15), at(6, 15, 45))]},
}


def counted_alerting(box):
    """The same of alerts that everyday work has a part in: when it was too much is counted again."""
    ticks = range(box.begin + STEP, END + 1, STEP)
    spent = [when for when in ticks if box.spent(when, when - DAY) > 50]
    refusing = {}
    for role in simulate.ROLES:
        nacks = sorted(nack["ts"] for job in box.jobs for nack in job.nacks if job.role == role)
        done = sorted(job.finished() for job in box.jobs if job.role == role and job.events[-1][1]["status"] == "done")
        for when in ticks:
            refused, good = (sum(when - HOUR < each <= when for each in times) for times in (nacks, done))
            if refused >= 5 and refused > 0.3 * (refused + good):
                refusing.setdefault((box.instance, role), []).append(when)
    return {"HandoffSpendHigh": {(box.instance, ""): spans(spent)} if spent else {}, "HandoffNackRatioHigh": {key: spans(times) for key, times in refusing.items()}}


class Week(Prometheus):
    """The server on a directory of blocks."""

    def __init__(self, directory):
        super().__init__(directory, "")

    def week(self, expression):
        """Each series' values over the week, by time."""
        found = self.get("query_range", query=expression, start=START + STEP, end=END, step=STEP)["result"]
        return [(each["metric"], {int(when): float(value) for when, value in each["values"]}) for each in found]

    def instant(self, expression, when=END):
        return [(each["metric"], float(each["value"][1])) for each in self.get("query", query=expression, time=when)["result"]]

    def values(self, label, selector):
        return set(self.get(f"label/{label}/values", **{"match[]": selector, "start": START, "end": END}))


def import_(directory, lines):
    """Makes blocks of samples, beside those that are there."""
    samples = directory / "samples"
    samples.write_text("\n".join(lines) + "\n# EOF\n")
    run = subprocess.run(["promtool", "tsdb", "create-blocks-from", "--max-block-duration=192h", "openmetrics", samples, directory / "data"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    samples.unlink()


def record(directory):
    """What the recording rules would have recorded. A rule that needs another's series waits for a server that has them."""
    waiting = [(name, expression) for kind, name, expression, _ in rules() if kind == "record"]
    while waiting:
        unknown = {name for name, _ in waiting}
        ready = [(name, expression) for name, expression in waiting if not metrics(expression) & unknown]
        with Week(directory) as prometheus:
            lines = [f'{name}{{{",".join(f"{label}={json.dumps(text)}" for label, text in labels.items() if label != "__name__")}}} {value!r} {when}'
                     for name, expression in ready for labels, values in prometheus.week(expression) for when, value in values.items()]
        import_(directory, lines)
        waiting = [each for each in waiting if each not in ready]


class Results:
    def __init__(self):
        self.passed = self.failed = 0

    def check(self, name, holds, detail=""):
        self.passed, self.failed = self.passed + bool(holds), self.failed + (not holds)
        if not holds:
            print(f"FAILED: {name}: {detail}")

    def same(self, name, got, want, tolerance=1e-9):
        self.check(name, math.isclose(float(got), float(want), rel_tol=tolerance, abs_tol=1e-9), f"{got}, but it should be {want}")


def real(values):
    return [value for value in values if not math.isnan(value)]


def check_panels(prometheus, results):
    dashboard = load()
    for panel, target in targets(dashboard):
        name = f"panel {panel['title']} {target['refId']}"
        expression = replaced(target["expr"], VALUES)
        found = prometheus.instant(expression) if target["instant"] else prometheus.week(expression)
        numbers = real([value for _, value in found] if target["instant"] else [value for _, values in found for value in values.values()])
        results.check(f"{name} has data", numbers, expression)
        missing = [label for metric, _ in found for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]) if label not in metric]
        results.check(f"{name} has the legend's labels", not missing, missing)
        alone = prometheus.week(replaced(target["expr"], VALUES | {"instance": "agents2:9100"}))
        results.check(f"{name} shows one box", {metric["instance"] for metric, _ in alone} <= {TWO}, alone and alone[0][0])
        nothing = prometheus.week(replaced(target["expr"], VALUES | {"job": "none"}))
        results.check(f"{name} shows one job", not nothing, nothing and nothing[0][0])
    wanted = {"job": {"node"}, "instance": {ONE, TWO}, "role": set(simulate.ROLES), "kind": set(simulate.KINDS)}
    for name, variable in variables(dashboard).items():
        if variable["type"] == "query":
            selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", replaced(variable["query"], VALUES)).groups()
            results.check(f"variable {name}", prometheus.values(label, selector) - {"other"} == wanted[name], prometheus.values(label, selector))


def check_alerts(prometheus, results, boxes):
    expected = dict(ALERTING)
    for box in boxes:
        for name, times in counted_alerting(box).items():
            expected[name] = expected.get(name, {}) | times
    alerts = {name: expression for kind, name, expression, _ in rules() if kind == "alert"}
    results.check("every alert has its times", alerts.keys() == expected.keys() and all(expected.values()), alerts.keys() ^ expected.keys())
    for name, expression in alerts.items():
        found = {(metric["instance"], metric.get("role", "")): spans(values) for metric, values in prometheus.week(expression)}
        results.check(f"{name} holds when it should, and only then", found == expected[name], f"{words(found)}, but it should be {words(expected[name])}")
    state = prometheus.get("rules")["groups"]
    bad = [(rule["name"], rule["lastError"]) for group in state for rule in group["rules"] if rule.get("lastError")]
    results.check("Prometheus has all rules", sum(len(group["rules"]) for group in state) == len(rules()) and not bad, bad)


def hours(when):
    return f"day {(when - START) // DAY} {(when - START) % DAY // HOUR:02}:{(when - START) % HOUR // 60:02}"


def spans(times):
    """Times as ranges, each from its first to its last."""
    times = set(times)
    return list(zip(sorted(when for when in times if when - STEP not in times), sorted(when for when in times if when + STEP not in times)))


def words(alerting):
    return {key: ", ".join(f"{hours(start)}–{hours(end)}" for start, end in ranges) for key, ranges in alerting.items()}


def check_figures(prometheus, results, boxes):
    """Against what was counted without the queue."""
    for box in boxes:
        here = f'instance="{box.instance}"'
        for when in [at(2, 12), at(3, 4), at(5, 16), END]:
            if when < box.begin:
                continue
            depth = box.depth(when)
            for metric, value in prometheus.instant(f"handoff_queue_records{{{here}, status=~'queued|running|human|dead'}}", when):
                key = metric["role"], metric["kind"], metric["status"]
                results.same(f"depth {box.instance} {key} {hours(when)}", value, depth[key])
            counted = box.counted(when)
            for name in sorted({key[0] for key in counted}):
                for metric, value in prometheus.instant(f"{name}{{{here}}}", when):
                    key = tuple(metric[label] for label in ("__name__", "role", "kind", "outcome") if label in metric)
                    results.same(f"{box.instance} {key} {hours(when)}", value, counted[key])
            results.same(f"spend {box.instance} {hours(when)}", prometheus.instant(f"sum(handoff_spend_usd_total{{{here}}})", when)[0][1], box.spent(when))
        results.check("something was removed", prometheus.instant(f"handoff_compact_removed_records_total{{{here}}}")[0][1] > 100)
    counters = [name for name in prometheus.get("label/__name__/values") if re.fullmatch("handoff_.+_(total|bucket|count|sum)", name)]
    falls = [name for name in counters for _, value in prometheus.instant(f"resets({name}[8d])") if value]
    results.check("no counter falls, compaction or not", len(counters) > 8 and not falls, falls)
    dashboard = {panel["title"]: panel for panel in panels(load())}

    def shown(title, when=END, target=0, values=VALUES, **labels):
        found = prometheus.instant(replaced(dashboard[title]["targets"][target]["expr"], values), when)
        return next((value for metric, value in found if labels.items() <= metric.items()), None)

    one, two = boxes
    results.same("panel Spend within 24 h", shown("Spend within 24 h", at(6, 0), instance=ONE), one.spent(at(6, 0), at(5, 0)))
    results.same("panel Spend within 24 h, unpriced", shown("Spend within 24 h", target=1, instance=ONE), one.spent(END, at(6, 0)))
    results.same("panel Spend in this time range", shown("Spend in this time range", instance=TWO), two.spent(END, two.begin + STEP))
    done = sum(at(4, 23) < job.finished() <= at(5, 0) and job.role == "triage" for job in one.jobs)
    results.same("panel Finished per hour", shown("Finished per hour, by role", at(5, 0), instance=ONE, role="triage", outcome="done"), done)
    results.same("panel Waiting for a person", shown("Waiting for a person", instance=ONE), 1)
    results.same("panel Oldest waiting for a person", shown("Oldest waiting for a person", instance=ONE), END - at(6, 20))
    nobody, unknown = at(2, 7), at(6, 7)  # who waits for whom while the queue can't be read is not known
    results.same("panel Oldest waiting for a person: nobody", shown("Oldest waiting for a person", nobody, instance=ONE), 0)
    results.check("panel Oldest waiting for a person: not known", shown("Oldest waiting for a person", unknown, instance=ONE) is None)
    results.same("panel Last good reading", shown("Last good reading", unknown, instance=ONE), unknown - at(6, 5, 45))
    results.same("panel Last compaction", shown("Last compaction", instance=ONE), END - at(6, 4))
    results.check("panel Last compaction: never", shown("Last compaction", at(1, 3), instance=ONE) > 1e9)
    results.check("panel Last compaction: not known", shown("Last compaction", at(6, 13), instance=TWO) == 9 * HOUR and shown("Last compaction", at(3, 0), instance=TWO) is None)
    results.same("panel Given up within 24 h", shown("Given up within 24 h", at(2, 20), instance=ONE), 1)
    finished = sum(at(6, 0) < job.finished() <= END for job in two.jobs)
    results.same("panel Cost of a finished record", shown("Cost of a finished record", instance=TWO), float(two.spent(END, at(6, 0))) / finished)
    idle = VALUES | {"role": "triage", "kind": "file_bug"}
    results.check("panel Cost of a finished record: none finished", shown("Cost of a finished record", values=idle, instance=TWO) is None)
    results.same("panel Age of the oldest queued record", shown("Age of the oldest queued record", at(3, 4), instance=ONE, role="patcher"), 2 * HOUR - 600)
    results.same("panel Age of the oldest running record", shown("Age of the oldest running record", at(1, 13), instance=ONE, role="researcher"), 3 * HOUR)
    times = sorted(job.finished() - job.started for job in one.jobs if at(4, 18) < job.finished() <= at(5, 0) and job.role == "patcher")
    results.check("panel Time in role", 60 <= shown("Time in role", at(5, 0), instance=ONE, role="patcher") <= 300 and set(times) == {300}, times)


def check_inventory(prometheus, results):
    """What the tools export and what is asked for are the same."""
    def family(name):
        return re.sub(r"_(bucket|sum|count)$", "", name)
    exported = {family(name) for name in prometheus.get("label/__name__/values") if name.startswith("handoff_")}
    asked = set().union(*(metrics(expression) for _, _, expression, _ in rules()), *(metrics(target["expr"]) for _, target in targets(load())))
    ours = {family(name) for name in asked if name.startswith("handoff_")}
    results.check("every metric that is asked for exists", ours <= exported, ours - exported)
    results.check("every metric that exists is asked for", exported <= ours, exported - ours)


def main():
    binaries, results = sys.argv[1], Results()
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            boxes = [each.result() for each in [pool.submit(simulate.troubled, directory / "1", binaries), pool.submit(simulate.late, directory / "2", binaries)]]
        import_(directory, [line for box in boxes for line in box.metrics])
        record(directory)
        with Week(directory) as prometheus:
            check_panels(prometheus, results)
            check_alerts(prometheus, results, boxes)
            check_figures(prometheus, results, boxes)
            check_inventory(prometheus, results)
    print(f"week: {results.passed} passed, {results.failed} failed")
    return bool(results.failed)


if __name__ == "__main__":
    sys.exit(main())
