"""``holdfast readers``: lists the readers of an outlet, or forgets one."""

from __future__ import annotations

import argparse
import os
from typing import Any

from rich.console import Console

from holdfast.errors import FlowError


def add_to(commands: Any) -> None:
    readers = commands.add_parser(
        "readers",
        help="list the queries that read an outlet of a running flow, or forget one",
        description="Lists the readers of an outlet, each with its last committed epoch and the "
        "bytes held for it. With --forget the flow stops holding rows for a reader that will not "
        "return; if the reader does return and lacks rows that are gone, it is refused.",
        epilog="example: HOLDFAST_FLOW=holdfast://... holdfast readers alerts --forget nightly",
    )
    readers.add_argument("sink", metavar="SINK", help="the outlet's name in the flow")
    readers.add_argument(
        "--flow",
        metavar="URL",
        help="the value of run.url of the running flow (the environment variable HOLDFAST_FLOW, "
        "which hides the secret in the URL from other users of the machine)",
    )
    readers.add_argument("--forget", metavar="NAME", help="stop holding rows for this reader")
    readers.set_defaults(command=execute)


def execute(options: argparse.Namespace, console: Console) -> int:
    from rich.table import Table

    from holdfast.net.reader import forget_reader, readers_of

    url = options.flow or os.environ.get("HOLDFAST_FLOW")
    if not url:
        raise FlowError(
            "holdfast readers needs the address of the flow",
            hint="set HOLDFAST_FLOW or --flow to the value of run.url of the running flow",
        )
    if options.forget is not None:
        forget_reader(url, options.sink, options.forget)
    readers = readers_of(url, options.sink)
    table = Table("reader", "state", "epoch", "epochs behind", "bytes held", "seen s ago")
    for row in readers:
        seen = row["seen_s_ago"]
        figures = (row["epoch"], row["epochs_behind"], row["bytes_held"])
        ago = "" if seen is None else f"{seen:.1f}"
        table.add_row(row["reader"], row["state"], *(f"{n:,}" for n in figures), ago)
    console.print(table if readers else f"{options.sink!r} has no readers yet")
    return 0
