#!/usr/bin/env python3
"""Checks dashboards/handoff.json against Grafana's own types: npm's @grafana/schema, read by TypeScript, in a directory of its own.

Dashboards with one fault each must be refused.
"""

import copy
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from dashboard import load, panels

PACKAGES = ("@grafana/schema@12.3.0", "tslib@2.8.1", "typescript@5.9.3")
FAULTS = {
    "a version in quotes": lambda dashboard, _: dashboard.update(schemaVersion="39"),
    "a member that nobody knows": lambda dashboard, _: dashboard.update(refreshes="30s"),
    "a kind of variable that nobody knows": lambda dashboard, _: dashboard["templating"]["list"][1].update(type="label"),
    "a refresh that nobody knows": lambda dashboard, _: dashboard["templating"]["list"][1].update(refresh=7),
    "an option of another kind of panel": lambda _, kinds: kinds["timeseries"]["options"].update(cellHeight="sm"),
    "a colour mode that nobody knows": lambda _, kinds: kinds["stat"]["options"].update(colorMode="colour"),
    "a line style that nobody knows": lambda _, kinds: kinds["timeseries"]["fieldConfig"]["defaults"]["custom"].update(drawStyle="dots"),
    "a threshold that is text": lambda _, kinds: kinds["stat"]["fieldConfig"]["defaults"]["thresholds"]["steps"][1].update(value="60"),
    "a query without an expression": lambda _, kinds: kinds["table"]["targets"][0].pop("expr"),
    "a place without a width": lambda _, kinds: kinds["row"]["gridPos"].pop("w"),
    "a kind of panel that nobody knows": lambda _, kinds: kinds["state-timeline"].update(type="graph"),
}


def spoilt(fault):
    dashboard = copy.deepcopy(load())
    fault(dashboard, {panel["type"]: panel for panel in [*dashboard["panels"], *panels(dashboard)]})
    return dashboard


def main():
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--no-save", *PACKAGES]
        (directory / "package.json").write_text('{"private": true}')
        subprocess.run(install, cwd=directory, check=True)
        shutil.copy(Path(__file__).with_name("dashboard.ts"), directory)
        given = {"dashboard": load()} | {f"fault{n}": spoilt(fault) for n, fault in enumerate(FAULTS.values())}
        for name, dashboard in given.items():
            (directory / f"{name}.given.ts").write_text(
                f"import type {{ Checked }} from './dashboard';\nexport const dashboard: Checked = {json.dumps(dashboard, indent=1)};\n")
        run = subprocess.run(["npx", "--no-install", "tsc", "--noEmit", "--strict", "--skipLibCheck", "--target", "es2022", "--module", "nodenext",
                              "--moduleResolution", "nodenext", "--pretty", "false", *(f"{name}.given.ts" for name in given)],
                             cwd=directory, capture_output=True, text=True)
    errors = re.findall(r"^(\w+)(\..*)$", run.stdout, re.M)
    refused = {name for name, _ in errors}
    unexpected = [f"{name}{text}" for name, text in errors if not name.startswith("fault")]
    failed = 0
    if unexpected or run.stderr:
        failed += 1
        print("FAILED: handoff.json is not what Grafana's types say", *unexpected[:20], run.stderr, sep="\n  ")
    for n, name in enumerate(FAULTS):
        if f"fault{n}" not in refused:
            failed += 1
            print(f"FAILED: {name} is not refused")
    print(f"types: {1 + len(FAULTS) - failed} passed, {failed} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
