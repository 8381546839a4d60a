"""``holdfast sim``: injects faults into a simulated cluster."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console


def add_to(commands: Any) -> None:
    sim = commands.add_parser(
        "sim",
        help="inject faults into a simulated cluster, and check the result",
        description="Runs flows on simulated sites in virtual time, with faults chosen by seeds, "
        "and checks after every run that the result is exact and all partitions are protected "
        "again. A failing schedule is minimised and drawn. Exit status: 1 if a machine raises an "
        "error, 3 if a result is wrong, 4 if a flow does not end or recover.",
    )
    sim.add_argument("--seeds", type=int, default=200, help="number of runs (200)")
    sim.add_argument("--seed", type=int, help="the first seed (0); with --trace, the only one")
    sim.add_argument(
        "--minutes",
        type=float,
        help="search for this time over all flows, protections and changes of them, mixes, "
        "numbers of sites and applications; prints what was tried",
    )
    sim.add_argument(
        "--drawn", action="store_true", help="with --trace: the run that --minutes has for --seed"
    )
    sim.add_argument("--trace", action="store_true", help="print and draw the run of --seed")
    sim.add_argument(
        "--flow",
        choices=("dmz", "splits", "windows", "times", "timeouts", "diamond", "poison"),
        default="dmz",
    )
    protocols = ("pairs", "triples", "active", "passive", "upstream", "rollback")
    whole = ("dataflow", "cluster")
    sim.add_argument("--protocol", choices=(*protocols, *whole), default="pairs")
    sim.add_argument(
        "--then",
        choices=protocols,
        help="change the first keyed stage to this protection during the run",
    )
    sim.add_argument(
        "--apps", type=int, default=0, help="applications (several for one run in eight)"
    )
    sim.add_argument("--bug", help="plant a bug and expect to catch it; 'list' lists the bugs")
    sim.add_argument(
        "--exhaustive", action="store_true", help="try every crash point of a small flow"
    )
    sim.add_argument("--out", default=".", help="folder for drawings of failures (.)")
    sim.set_defaults(command=execute)


def execute(options: argparse.Namespace, console: Console) -> int:
    from holdfast.lab.sim import command, exhaust, search
    from holdfast.lab.sim.bugs import BUGS

    out = Path(options.out)
    if options.bug == "list":
        for known in BUGS:
            console.print(f"{known.name}: {known.what}", highlight=False)
        return 0
    bug = command.bug_named(options.bug)
    if options.exhaustive:
        return exhaust.explore(console, bug)
    if options.minutes is not None:
        return search.search(options.minutes, options.seed or 0, out, console)
    if options.drawn:
        return command.replay(search.drawn(options.seed or 0), out, console, bug)
    first, what = options.seed or 0, (options.flow, options.protocol, None, options.then)
    if options.trace:
        (case,) = command.cases_of(range(first, first + 1), what, bug, options.apps)
        return command.replay(case, out, console, bug)
    cases = command.cases_of(range(first, first + options.seeds), what, bug, options.apps)
    return command.explore(cases, out, console, bug)
