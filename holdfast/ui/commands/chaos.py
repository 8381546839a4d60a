"""``holdfast chaos``: injects faults into a flow in real processes."""

from __future__ import annotations

import argparse
import random
from typing import Any

from rich.console import Console

from holdfast.ui.report import write_json


def add_to(commands: Any) -> None:
    chaos = commands.add_parser(
        "chaos",
        help="kill, pause and partition sites of a flow under load, and check the result",
        description="Runs a flow under load with the given protection on 4 sites. Kills and pauses "
        "its sites, breaks their connections and partitions their network at times chosen by a "
        "seed, never more than the protection promises to survive. On Spark it also kills "
        "executors. With the flow in two applications it kills drivers, and kills or pauses their "
        "ZooKeeper, which returns. Prints the effect on the output. "
        "Exit status 1 if a row is lost, repeated or wrong, if the flow fails, or if it is not "
        "protected again at the end.",
        epilog="example: holdfast chaos --faults 50 --seed 7",
    )
    long = chaos.add_mutually_exclusive_group()
    long.add_argument("--faults", type=int, help="number of faults (50)")
    long.add_argument("--minutes", type=float, help="inject faults for this time instead")
    chaos.add_argument("--seed", type=int, help="seed that chooses the faults (a random one)")
    chaos.add_argument(
        "--host",
        choices=("spark", "process"),
        default="process",
        help="where sites run: as Spark tasks, or as plain processes (process)",
    )
    chaos.add_argument(
        "--apps",
        type=int,
        choices=(1, 2),
        default=1,
        help="with 2, inject only faults of applications and their arbiter, on either host (1)",
    )
    chaos.add_argument(
        "--protection",
        choices=("pairs", "active", "passive", "upstream", "rollback"),
        default="pairs",
        help="protection of the flow (pairs)",
    )
    chaos.add_argument(
        "--flow",
        choices=("dmz", "windows"),
        help="the network-monitoring flow, or windows over event time (dmz; windows with "
        "upstream and rollback, which refuse state that depends on all rows of a key)",
    )
    chaos.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    chaos.add_argument("--verbose", action="store_true", help="print each action")
    chaos.set_defaults(command=execute)


def execute(options: argparse.Namespace, console: Console) -> int:
    from holdfast.lab.chaos.command import chaos

    outcome = chaos(
        count=options.faults or (None if options.minutes else 50),
        minutes=options.minutes,
        seed=random.randrange(1 << 16) if options.seed is None else options.seed,
        host=options.host,
        apps=options.apps,
        protection=options.protection,
        flow=options.flow,
        console=console,
        verbose=options.verbose,
    )
    if options.json:
        write_json(options.json, outcome.to_dict())
    return 1 if outcome.failures else 0
