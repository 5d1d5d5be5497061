#!/usr/bin/env python3
"""Tests of dashboards/handoff.json that need no server: the 17 rules of grafana/dashboard-linter, this project's own, and links.

Each rule must also object to a dashboard that was spoilt to break it.
"""

import copy
import re
import subprocess
import sys
import tempfile

from dashboard import README, ALERTS, load, metrics, panels, replaced, rules, selectors, targets, variables

WITH_QUERIES = ("stat", "timeseries", "table", "state-timeline")
UNITS = {"none", "short", "percentunit", "bytes", "s", "currencyUSD", "bool"}
SAMPLE = {"__rate_interval": "1m", "__range": "1d", "__interval": "15s"}


def query_variables(dashboard):
    return [variable for variable in dashboard["templating"]["list"] if variable["type"] == "query"]


def template_datasource(dashboard):
    found = [(each["name"], each["label"], each["query"]) for each in dashboard["templating"]["list"] if each["type"] == "datasource"]
    if found != [("datasource", "Data source", "prometheus")]:
        yield f"data source variables: {found}"


def template(name):
    def check(dashboard):
        variable = variables(dashboard).get(name, {})
        want = {"type": "query", "label": name.title(), "multi": True, "includeAll": True, "allValue": ".+"}
        got = {key: variable.get(key) for key in want}
        if got != want or variable.get("datasource", {}).get("uid") != "${datasource}":
            yield f"variable {name}: {got}"
    return check


def template_label_promql(dashboard):
    for variable in query_variables(dashboard):
        if not re.fullmatch(r"label_values\([a-z_]+(\{[^}]*\})?, [a-z]+\)", variable["query"]):
            yield f"variable {variable['name']}: {variable['query']}"


def template_on_time_change_reload(dashboard):
    for variable in query_variables(dashboard):
        if variable["refresh"] != 2:
            yield f"variable {variable['name']}: refresh {variable['refresh']}"


def panel_datasource(dashboard):
    for panel in panels(dashboard):
        for each in [panel, *panel["targets"]]:
            if each.get("datasource") != {"type": "prometheus", "uid": "${datasource}"}:
                yield f"{panel['title']}: {each.get('datasource')}"


def panel_title_description(dashboard):
    for panel in panels(dashboard):
        if not panel.get("title") or len(panel.get("description", "")) < 40:
            yield f"panel {panel['id']}: {panel.get('title')}: {panel.get('description')}"


def panel_units(dashboard):
    for panel in panels(dashboard):
        if panel["fieldConfig"]["defaults"].get("unit") not in UNITS:
            yield f"{panel['title']}: {panel['fieldConfig']['defaults'].get('unit')}"


def panel_no_targets(dashboard):
    for panel in panels(dashboard):
        if panel["type"] not in WITH_QUERIES or not panel.get("targets"):
            yield f"{panel['title']}: {panel['type']} without a query"


def target_logql(dashboard):
    """There is no Loki here: nothing that is LogQL, with or without $__auto, may slip in."""
    for panel, target in targets(dashboard):
        if target["datasource"]["type"] == "loki" or "|=" in target["expr"]:
            yield f"{panel['title']}: {target['expr']}"


def target_logql_auto(dashboard):
    for panel, target in targets(dashboard):
        if "$__auto" in target["expr"]:
            yield f"{panel['title']}: {target['expr']}"


def target_promql(dashboard):
    values = SAMPLE | {variable["name"]: ".+" for variable in query_variables(dashboard)}
    records = "".join(f"  - record: panel\n    labels: {{n: '{n}'}}\n    expr: |\n      {replaced(target['expr'], values)}\n"
                      for n, (_, target) in enumerate(targets(dashboard)))
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
        file.write(f"groups:\n- name: panels\n  rules:\n{records}")
        file.flush()
        run = subprocess.run(["promtool", "check", "rules", "--lint=none", file.name], capture_output=True, text=True)
    if run.returncode:
        yield run.stderr


def target_rate_interval(dashboard):
    for panel, target in targets(dashboard):
        for name, _, over, function in selectors(target["expr"]):
            if function in ("rate", "irate") and over != "[$__rate_interval]":
                yield f"{panel['title']}: {function}({name}{over})"


def target_matcher(label):
    def check(dashboard):
        for panel, target in targets(dashboard):
            for name, matchers, *_ in selectors(target["expr"]):
                if f'{label}=~"${label}"' not in matchers:
                    yield f"{panel['title']}: {name}{matchers}"
    return check


def target_counter_agg(dashboard):
    """The linter asks it of names that end in _total; a histogram's series are counters too."""
    for panel, target in targets(dashboard):
        for name, _, over, function in selectors(target["expr"]):
            if re.search("_(total|bucket|sum|count)$", name) and (function not in ("rate", "irate", "increase") or not over):
                yield f"{panel['title']}: {function or 'nothing'} of {name}{over}"


def uneditable_dashboard(dashboard):
    if dashboard["editable"] is not False:
        yield "it is editable"


# ------------------------------------------------------------------------------------------------------------ this project's own

def every_panel(dashboard):
    if len({panel["id"] for panel in dashboard["panels"]}) < len(dashboard["panels"]):
        yield "two panels have one id"
    for panel in panels(dashboard):
        if panel["interval"] != "15s":
            yield f"{panel['title']}: min step {panel['interval']}"
    if dashboard["schemaVersion"] != 39:
        yield f"schemaVersion {dashboard['schemaVersion']}"


def no_overlap(dashboard):
    taken = {}
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        if at["x"] + at["w"] > 24:
            yield f"{panel['title']} leaves the grid"
        for cell in ((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])):
            if taken.setdefault(cell, panel["title"]) != panel["title"]:
                yield f"{panel['title']} and {taken[cell]} overlap"
                break


def boxes_apart(dashboard):
    """Every query keeps job and instance, so that no figure is the sum of several boxes, and the legend says which box it is."""
    for panel, target in targets(dashboard):
        for grouping in re.findall(r"\b(?:by|on) \(([^)]*)\)", target["expr"]):
            if not {"job", "instance"} <= set(re.split(", ", grouping)):
                yield f"{panel['title']}: ({grouping})"
        if not re.search(r"\bby \(", target["expr"]) or ("{{instance}}" not in target["legendFormat"] and panel["type"] != "table"):
            yield f"{panel['title']}: {target['legendFormat']}"


def at_least_when_unpriced(dashboard):
    """What shows spend comes in two queries: one for what is known, and one with ≥ for what is unpriced."""
    for panel in panels(dashboard):
        spend = [target for target in panel["targets"] if 'counter="spend_usd"' in target["expr"] and "/" not in target["expr"]]
        if not spend:
            continue
        known, at_least = (target["expr"] for target in spend)
        if " unless on (" not in known or known.replace(" unless on (", " and on (") != at_least or "unpriced" not in at_least:
            yield f"{panel['title']}: {known} / {at_least}"
        shown = [override["properties"][0]["value"] for override in panel["fieldConfig"]["overrides"] if override["matcher"]["options"] == spend[1]["refId"]]
        if shown != ["prefix:≥ $"] or not spend[1]["legendFormat"].startswith("≥ "):
            yield f"{panel['title']}: {shown}"


def rows(dashboard):
    found = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    if found != ["Now", "Flow", "Money", "Health"]:
        yield f"rows: {found}"


def links(dashboard):
    headings = anchors()
    for title, link in [(panel["title"], link) for panel in panels(dashboard) for link in panel["links"]] + [("dashboard", link) for link in dashboard["links"]]:
        address, _, anchor = link["url"].partition("#")
        if anchor and (address != "${runbook:raw}" or anchor not in headings):
            yield f"{title}: {link['url']}"


def anchors():
    """The anchors of the README's headings, as code hosts make them."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", README.read_text(), re.M)}


def spoil(change):
    """A dashboard with one fault."""
    spoilt = copy.deepcopy(load())
    change(spoilt, next(panels(spoilt)))
    return spoilt


def set_variable(name, key, value):
    return lambda dashboard, _: variables(dashboard)[name].update({key: value})


def set_expression(old, new):
    def change(dashboard, _):
        target = next(target for _, target in targets(dashboard) if old in target["expr"])
        target["expr"] = target["expr"].replace(old, new, 1)
    return change


SUM = "sum by (job, instance, role) (increase(handoff_records_total"
CHECKS = {
    "template-datasource": (template_datasource, set_variable("datasource", "name", "prometheus")),
    "template-job": (template("job"), set_variable("job", "allValue", ".*")),
    "template-instance": (template("instance"), set_variable("instance", "multi", False)),
    "template-label-promql": (template_label_promql, set_variable("role", "query", "label_value(up, role)")),
    "template-on-time-change-reload": (template_on_time_change_reload, set_variable("kind", "refresh", 1)),
    "panel-datasource": (panel_datasource, lambda _, panel: panel.update(datasource={"type": "prometheus", "uid": "abc"})),
    "panel-title-description": (panel_title_description, lambda _, panel: panel.pop("description")),
    "panel-units": (panel_units, lambda _, panel: panel["fieldConfig"]["defaults"].update(unit="seconds")),
    "panel-no-targets": (panel_no_targets, lambda _, panel: panel.update(targets=[])),
    "target-logql": (target_logql, set_expression(SUM, '{a="b"} |= ' + SUM)),
    "target-logql-auto": (target_logql_auto, set_expression("[1h]", "[$__auto]")),
    "target-promql": (target_promql, set_expression(SUM, "sum by (job) ((increase(handoff_records_total")),
    "target-rate-interval": (target_rate_interval, set_expression(SUM, "sum by (job, instance) (rate(handoff_records_total")),
    "target-job": (target_matcher("job"), set_expression('job=~"$job"', 'job="$job"')),
    "target-instance": (target_matcher("instance"), set_expression('instance=~"$instance"', 'role=~"$role"')),
    "target-counter-agg": (target_counter_agg, set_expression(SUM, "sum by (job, instance) (last_over_time(handoff_records_total")),
    "uneditable-dashboard": (uneditable_dashboard, lambda dashboard, _: dashboard.update(editable=True)),
    "every panel has a min step of 15 s and an id": (every_panel, lambda _, panel: panel.update(interval="1m")),
    "panels don't overlap": (no_overlap, lambda _, panel: panel["gridPos"].update(w=24)),
    "boxes are kept apart": (boxes_apart, set_expression("by (job, instance, role)", "by (role)")),
    "spend says ≥ when records are unpriced": (at_least_when_unpriced, set_expression(" and on (job, instance) sum", " unless on (job, instance) sum")),
    "rows": (rows, lambda dashboard, _: dashboard["panels"].pop(0)),
    "links lead to a heading of the README": (links, lambda _, panel: panel["links"].append({"url": "${runbook:raw}#nowhere"})),
}


def runbook():
    """Each alert's runbook_url is a heading of its own in the README, and the runbook has no others."""
    alerts = [name for kind, name, *_ in rules() if kind == "alert"]
    urls = re.findall(r"runbook_url: file:///usr/share/handoff-queue/README\.md#(\S+)", ALERTS.read_text())
    section = re.search(r"^## Runbook\n(.*?)^## ", README.read_text(), re.M | re.S)
    headings = re.findall(r"^### (.+)$", section[1] if section else "", re.M)
    if [alert.lower() for alert in alerts] != urls or sorted(alerts) != sorted(headings) or len(alerts) != 15:
        yield f"{sorted(set(alerts) ^ set(headings))}: in alerts.yml or the runbook only; {urls}"


def main():
    dashboard, failed, passed = load(), 0, 0
    results = [(f"{name}", list(check(dashboard))) for name, (check, _) in CHECKS.items()]
    results += [(f"{name}: objects to a fault", [] if list(check(spoil(fault))) else ["it does not"]) for name, (check, fault) in CHECKS.items()]
    results += [("the runbook has each alert", list(runbook()))]
    results += [("selectors are found", [] if metrics('a{x="b{"}[5m] + sum by (c) (rate(d[1h] offset 2d)) > 1e9 or e unless on (f) g') == {"a", "d", "e", "g"} else ["wrong"])]
    for name, complaints in results:
        passed, failed = passed + (not complaints), failed + bool(complaints)
        if complaints:
            print(f"FAILED: {name}", *complaints[:10], sep="\n  ")
    print(f"lint: {passed} passed, {failed} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
