"""``holdfast check``: verifies a folder in which a flow is stored."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console


def add_to(commands: Any) -> None:
    check = commands.add_parser(
        "check",
        help="verify a folder that --checkpoint has written",
        description="Reads all files of a folder in which a flow is stored, and reports its "
        "contents, the damage, and what to do. Exit status 1 if something is damaged, or if there "
        "is no state to resume from. Does not disturb a running flow.",
        epilog="example: holdfast check s3://bucket/calls",
    )
    check.add_argument("folder", metavar="FOLDER", help="the folder, or URL")
    check.set_defaults(command=execute)


def execute(options: argparse.Namespace, console: Console) -> int:
    from holdfast.ui.check import check_store

    report = check_store(options.folder)
    for line in report.lines():
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0 if report.sound else 1
