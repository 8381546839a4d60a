"""``holdfast advise``: measures a flow and proposes how to protect it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from rich.console import Console

from holdfast.api.graph import Flow
from holdfast.errors import FlowError
from holdfast.ui.flow_file import flow_definition, made_flow, session_of


def add_to(commands: Any) -> None:
    advise = commands.add_parser(
        "advise",
        help="measure a flow and propose how to protect it",
        description="Runs a flow file unprotected on plain processes for a while, with its sinks "
        "replaced by ones that only count, and predicts the cost of each protection and the delay "
        "that a loss causes, with models fitted to `holdfast bench protections`. Proposes for "
        "every stage the cheapest protection within both bounds, and lists the alternatives. Exit "
        "status 1 if no protection is within the bounds.",
        epilog="example: holdfast advise examples/dmz.py --recovery 200ms --overhead 10%",
    )
    advise.add_argument("file", metavar="FLOW.py", nargs="?", help="the file that defines the flow")
    advise.add_argument(
        "--recovery",
        metavar="TIME",
        type=_argument("duration_ms"),
        help="maximum delay of a row by a loss, counted from its detection: 200ms, 1.5s",
    )
    advise.add_argument(
        "--overhead",
        metavar="PERCENT",
        type=_argument("percentage"),
        help="maximum share of the throughput to give up: 10%%",
    )
    advise.add_argument(
        "--losses",
        type=int,
        help="number of losses at once to survive (1, or as many as the flow asks for)",
    )
    advise.add_argument(
        "--sites", type=int, default=4, help="number of sites that will run the flow (4)"
    )
    advise.add_argument(
        "--partitions", type=int, default=32, help="partitions of a keyed stage (32)"
    )
    advise.add_argument("--seconds", type=float, default=10.0, help="seconds to measure (10)")
    advise.add_argument(
        "--master", help="Spark master for a file that defines `flow(spark)` (an embedded one)"
    )
    advise.add_argument(
        "--fit",
        metavar="FILE",
        help="fit the models to this output of `holdfast bench protections`; without FLOW.py, "
        "print the fitted constants, and with --json write them in the shipped format",
    )
    advise.add_argument("--json", metavar="FILE", help="write the advice to FILE")
    advise.set_defaults(command=execute)


def _argument(name: str) -> Callable[[str], float]:
    """Return a parser of `holdfast.advise.command` as an argparse type."""

    def parse(text: str) -> float:
        from holdfast.advise import command

        try:
            return float(getattr(command, name)(text))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def execute(options: argparse.Namespace, console: Console) -> int:
    from holdfast.advise import command
    from holdfast.advise.propose import Bounds

    if options.file is None:
        if options.fit is None:
            raise FlowError("advise needs a FLOW.py, or --fit FILE to print its constants")
        command.refit(options.fit, options.json, console)
        return 0
    if options.recovery is None or options.overhead is None:
        raise FlowError(
            "advise needs both --recovery and --overhead",
            hint="for example --recovery 200ms --overhead 10%",
        )
    defined, spark = flow_definition(options.file), None
    if not isinstance(defined, Flow):  # Spark pushes its rows, though its sites are processes
        spark = session_of(options.master, options.sites)
    try:
        flow = defined if isinstance(defined, Flow) else made_flow(options.file, defined, spark)
        losses = max(1, flow.losses) if options.losses is None else options.losses
        advice = command.advise(
            flow,
            Bounds(options.recovery, options.overhead, losses),
            sites=options.sites,
            partitions=options.partitions,
            seconds=options.seconds,
            fit_file=options.fit,
            json_file=options.json,
            console=console,
        )
    finally:
        if spark is not None:
            spark.stop()
    return 1 if advice.missed else 0
