"""``holdfast demo``: the network-monitoring flow, with kills."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console


def add_to(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="run the network-monitoring flow, kill a site and a Spark driver, check the result",
        description="Runs the papers' network-monitoring flow in two Spark applications, kills a "
        "site and then the driver of one of them, and checks the result against the same flow as a "
        "Spark batch job. Exit status 1 if they differ.",
    )
    demo.add_argument(
        "--seconds", type=float, default=5.0, help="seconds before and after each kill (5)"
    )
    demo.add_argument("--sites", type=int, default=4, help="number of sites (4)")
    demo.set_defaults(command=execute)


def execute(options: argparse.Namespace, console: Console) -> int:
    from holdfast.lab.demo import demo

    return 0 if demo(options.seconds, options.sites, console) else 1
