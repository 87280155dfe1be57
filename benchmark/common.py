"""What the benchmarks share: where the project is, how they begin, what runs came to, and tables of it as Markdown."""

import json
import os
import socket
import statistics
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from envs.command import run_command  # noqa: E402, F401


def any_unknown(names, runs, flag="--only"):
    """Says which of the names given by a flag stand for nothing. -> whether there are any"""
    unknown = sorted(set(names) - set(runs))
    if unknown:
        print(f"error: {flag} {' '.join(unknown)}: there are {', '.join(runs)}", file=sys.stderr)
    return bool(unknown)


def results(folder, name):
    """What a finished run came to; None of another."""
    path = os.path.join(folder, name, "results.json")
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def spread(values, digits=3):
    """Median and range, or how many have a value where some have none."""
    known = [value for value in values if value is not None]
    if not known:
        return f"never ({len(values)} seeds)"
    text = f"{statistics.median(known):.{digits}f} ({min(known):.{digits}f} to {max(known):.{digits}f})"
    return text if len(known) == len(values) else f"{text}, {len(values) - len(known)} never"


def markdown(head, rows):
    """A table of texts."""
    first, *others = ("| " + " | ".join(row) + " |" for row in (head, *rows))
    return "\n".join([first, "|" + "---|" * len(head), *others])


def write(path, text):
    """Writes a file, whole or not at all, for others read it at the same time."""
    new = f"{path}.{socket.gethostname()}-{os.getpid()}.new"
    with open(new, "w", encoding="utf-8") as file:
        file.write(text)
    while True:
        try:
            return os.replace(new, path)
        except PermissionError:  # Windows, while another reads it
            if os.name != "nt":
                raise
            time.sleep(0.1)


def keep(text, path):
    """Prints the tables made so far, and writes them to a file."""
    print(text, flush=True)
    write(path, text + "\n")
