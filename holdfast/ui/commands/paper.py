"""``holdfast paper``: repeats a paper's simulations."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from holdfast.ui.report import write_json


def add_to(commands: Any) -> None:
    paper = commands.add_parser(
        "paper",
        help="repeat a paper's simulations, with Holdfast under the same conditions",
        description="hwang05: A Comparison of Stream-Oriented High-Availability Algorithms, 2005. "
        "Prints the cost and the recovery time of passive standby, active standby and upstream "
        "backup: in the paper, in a model of it, and in Holdfast.",
    )
    paper.add_argument("name", choices=("hwang05",), help="the paper")
    paper.add_argument("--out", metavar="FOLDER", help="write the figures to FOLDER as SVG")
    paper.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    paper.add_argument("--quick", action="store_true", help="shorter and fewer runs")
    paper.set_defaults(command=execute)


def execute(options: argparse.Namespace, console: Console) -> int:
    from holdfast.lab.paper import hwang05

    out = Path(options.out) if options.out else None
    figures = hwang05.run(out, options.quick, console)
    if options.json:
        write_json(options.json, figures)
    return 0
