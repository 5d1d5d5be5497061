"""dashboards/handoff.json for the tests: its panels, its expressions with variables replaced, and the metrics that expressions name."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "dashboards/handoff.json"
ALERTS = ROOT / "dashboards/alerts.yml"
README = ROOT / "README.md"

# What a selector looks like, once what can be mistaken for one is gone: strings, and label lists of aggregations and matchings.
GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?\s*(\{(?:[^{}\"]|\"[^\"]*\")*\})?\s*(\[[^\]]*\])?")
WORDS = {"and", "or", "unless", "bool", "offset"}


def load():
    return json.loads(FILE.read_text())


def panels(dashboard):
    """All panels but rows, those in collapsed rows too."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


def targets(dashboard):
    for panel in panels(dashboard):
        for target in panel.get("targets", []):
            yield panel, target


def variables(dashboard):
    return {variable["name"]: variable for variable in dashboard["templating"]["list"]}


def replaced(text, values):
    """An expression as Grafana sends it."""
    for name in sorted(values, key=len, reverse=True):
        text = text.replace("${" + name + "}", values[name]).replace("$" + name, values[name])
    return text


def selectors(expression):
    """Each selector's name, matchers and range, with the function that is applied to it."""
    expression = GROUPING.sub(" ", expression)
    found = []
    for match in SELECTOR.finditer(expression):
        name, matchers, over = match.groups()
        after = expression[match.end():].lstrip()
        if not (name or matchers) or name in WORDS or (not matchers and not over and after.startswith("(")):
            continue
        if re.fullmatch(r"[0-9.]+.*|\d+[smhdwy]|e\d+", name or "x") or (match.start() and expression[match.start() - 1].isdigit()):
            continue
        function = re.search(r"([a-z_]+)\s*\(\s*$", expression[:match.start()])
        found.append((name, matchers or "", over or "", function[1] if function else ""))
    return found


def metrics(expression):
    return {name for name, *_ in selectors(expression) if name}


def rules():
    """Of alerts.yml: what is recorded or alerted of, its name, and its expression. A plain reader for the plain YAML that it is."""
    found = []
    for block in re.split(r"^ {6}- ", ALERTS.read_text(), flags=re.M)[1:]:
        kind, name = re.match(r"(record|alert): (\S+)", block).groups()
        expression = re.search(r"^ {8}expr: (?:\|\n((?: {10}.*\n)+)|(.+)\n)", block, re.M)
        found.append((kind, name, (expression[1] or expression[2]).strip(), block))
    return found
