"""The entry point of the command line."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from rich.console import Console

from holdfast.errors import HoldfastError
from holdfast.ui.commands import advise, bench, chaos, check, demo, model, paper, readers, run, sim
from holdfast.ui.signals import Terminated

WIDTH = 132
COMMANDS = (run, check, readers, advise, demo, bench, sim, model, paper, chaos)
"""In the order in which ``holdfast --help`` lists them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Print Holdfast's own errors as one message and return exit status 2."""
    options = _parser().parse_args(argv)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # A file or a pipe has no width: tables then have up to `WIDTH` columns.
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    try:
        return int(options.command(options, console))
    except HoldfastError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return 2
    except Terminated:
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="holdfast", description="Continuous dataflows on a Spark cluster that keep running."
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_to(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
