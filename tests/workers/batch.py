#!/usr/bin/env python3
"""Runs Python scripts one after the other in one interpreter, because starting one for each takes most of the time.

Each line of standard input is a JSON array: the file for the script's standard output, the script, its arguments.
"""

import io
import json
import runpy
import sys


def run(output, script, *arguments):
    """Runs one script as if it were called on its own; its failure is ours."""
    captured = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    stdout, argv = sys.stdout, sys.argv
    sys.stdout, sys.argv = captured, [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.stdout, sys.argv = stdout, argv
    captured.flush()
    with open(output, "wb") as file:
        file.write(captured.buffer.getvalue())


if __name__ == "__main__":
    for line in sys.stdin:
        run(*json.loads(line))
