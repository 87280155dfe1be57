"""How a program of this project that is no training script begins and ends."""

import os
import sys

import tyro


def run_command(main, args_class, about):
    """Reads the flags and runs main; who stops it or reads no further ends it without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # what a terminal cannot show is no fault
    try:
        code = main(tyro.cli(args_class, description=about))
        sys.stdout.flush()
    except BrokenPipeError:  # | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        code = 130
    sys.exit(code)
