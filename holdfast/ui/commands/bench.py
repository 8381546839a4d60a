"""``holdfast bench``: runs a benchmark."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from holdfast.errors import FlowError
from holdfast.ui.report import write_json

BENCHES = ("throughput", "scaling", "failover", "protections", "sim", "ends", "security")


def add_to(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="run a benchmark of Holdfast, or of Holdfast and Spark",
        description="Runs a benchmark, prints a table and optionally writes its figures as JSON. "
        "throughput: the network-monitoring flow against Structured Streaming on the same cores. "
        "scaling: cost per row as keys and partitions grow. "
        "failover: the effect of kill -9 of sites and of a Spark driver on the output, with pairs. "
        "protections: the cost of each protection, and the delay that a kill -9 causes. "
        "sim: simulated recoveries per second, and their coverage. "
        "ends: rows from Spark and Kafka into a flow and back, against Spark copying them. "
        "security: the cost of each level of security.",
    )
    bench.add_argument("name", choices=BENCHES, help="the benchmark")
    bench.add_argument("--quick", action="store_true", help="fewer rows and repeats")
    bench.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    bench.add_argument(
        "--out",
        metavar="FOLDER",
        help="folder for the chart of `protections`, as SVG (next to FILE)",
    )
    bench.set_defaults(command=execute)


def execute(options: argparse.Namespace, console: Console) -> int:
    import importlib

    module = importlib.import_module(f"holdfast.lab.bench.{options.name}")
    if options.out and not hasattr(module, "picture"):
        raise FlowError(f"bench {options.name} has no chart", hint="omit --out")
    figures = module.bench(quick=options.quick, console=console)
    if options.json:
        write_json(options.json, figures)
    if hasattr(module, "picture") and (options.out or options.json):
        drawn = Path(options.json or f"{options.name}.json").with_suffix(".svg")
        if options.out:
            drawn = Path(options.out) / drawn.name
        drawn.parent.mkdir(parents=True, exist_ok=True)
        drawn.write_text(module.picture(figures))
        console.print(f"wrote the chart to {drawn}", highlight=False, soft_wrap=True)
    return 0
