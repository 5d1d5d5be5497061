#!/usr/bin/env python3
"""Holds a lock until its standard input ends: hold_lock.py LOCK exclusive|shared. Prints its process id when it has it."""

import fcntl
import os
import sys

path, how = sys.argv[1:]
with open(path, "a") as lock:
    fcntl.flock(lock, {"exclusive": fcntl.LOCK_EX, "shared": fcntl.LOCK_SH}[how])
    print(os.getpid(), flush=True)
    sys.stdin.read()
