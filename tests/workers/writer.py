#!/usr/bin/env python3
"""A writer without the lock that does one step at a time, as the lines of its standard input say: writer.py FILE

open        opens the file to append to it
write TEXT  writes TEXT, a JSON string, at once
close       closes the file

After each step it prints a line. At the end of its input it is gone without a further word, as if it had been killed.
"""

import json
import os
import sys

file = -1
for line in sys.stdin:
    step, _, text = line.strip().partition(" ")
    if step == "open":
        file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    elif step == "write":
        data = json.loads(text).encode()
        if os.write(file, data) != len(data):
            sys.exit("the text was not written in one piece")
    elif step == "close":
        os.close(file)
    else:
        sys.exit(f"no such step: {line!r}")
    print("done", flush=True)
os._exit(0)
