#!/usr/bin/env python3
"""Writes blobs as a careful program would that does one after the other: temporary file, fsync, rename.

    peer_offload.py BLOBS SIZES FOLDER

BLOBS holds their bytes one after the other, SIZES how many each has, a line each. They come to lie in 256 directories of FOLDER, which are
flushed at the end.
"""

import os
import sys


def main():
    blobs, sizes, folder = sys.argv[1:]
    directories = [os.path.join(folder, f"{number:02x}") for number in range(256)]
    for directory in directories:
        os.mkdir(directory)
    with open(blobs, "rb") as source, open(sizes) as lines:
        for number, size in enumerate(lines):
            name = os.path.join(directories[number % 256], str(number))
            with open(f"{name}.tmp", "xb", buffering=0) as file:
                file.write(source.read(int(size)))
                os.fsync(file.fileno())
            os.rename(f"{name}.tmp", name)
    for directory in directories:
        opened = os.open(directory, os.O_RDONLY)
        os.fsync(opened)
        os.close(opened)


if __name__ == "__main__":
    main()
