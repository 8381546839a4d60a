"""``holdfast model``: searches every order of events of a small world."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console


def add_to(commands: Any) -> None:
    model = commands.add_parser(
        "model",
        help="check partition pairs in every order of events",
        description="Visits every state that the machines of partition pairs can reach in a small "
        "world, whatever the order of messages, with crashes and false suspicions at any moment. "
        "Prints the shortest way to a wrong state. Exit status 1 if there is one, 2 if time or "
        "memory ran out before all states were visited.",
    )
    model.add_argument("--epochs", type=int, default=1, help="epochs of the flow (1)")
    model.add_argument("--sources", type=int, default=1, help="partitions of the first stage (1)")
    model.add_argument(
        "--partitions", type=int, default=1, help="partitions of the second stage (1)"
    )
    model.add_argument("--crashes", type=int, default=1, help="the most crashes of sites (1)")
    model.add_argument(
        "--suspicions", type=int, default=0, help="the most live sites declared dead (0)"
    )
    model.add_argument(
        "--reduced", action="store_true", help="leave orders out that make no difference"
    )
    model.add_argument("--seconds", type=float, default=1e9, help="when to stop (never)")
    model.add_argument("--memory-mb", type=int, default=8_000, help="when to stop (8000)")
    model.add_argument("--bug", help="plant a bug of `holdfast sim` and expect to catch it")
    model.set_defaults(command=execute)


def execute(options: argparse.Namespace, console: Console) -> int:
    from holdfast.lab.model import command
    from holdfast.lab.model.steps import ModelBounds
    from holdfast.lab.sim.command import bug_named

    bounds = ModelBounds(
        epochs=options.epochs,
        sources=options.sources,
        partitions=options.partitions,
        crashes=options.crashes,
        suspicions=options.suspicions,
    )
    return command.explore(
        bounds,
        console,
        bug_named(options.bug),
        options.seconds,
        options.reduced,
        options.memory_mb,
    )
