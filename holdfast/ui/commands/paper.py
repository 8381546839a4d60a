"""``holdfast paper``: repeats a paper's experiments."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from holdfast.ui.report import write_json


def add_to(commands: Any) -> None:
    paper = commands.add_parser(
        "paper",
        help="repeat a paper's experiments, with Holdfast under the same conditions",
        description="Prints the figures of a paper beside those of Holdfast, and why they differ.",
    )
    papers = paper.add_subparsers(metavar="PAPER", required=True)
    _add(
        papers,
        "hwang05",
        _hwang05,
        "cost and recovery time of passive standby, active standby and upstream backup",
        "A Comparison of Stream-Oriented High-Availability Algorithms, 2005: the paper, a model of "
        "it, and Holdfast.",
    )
    _add(
        papers,
        "flux04",
        _flux04,
        "output around a kill, and the cost of cluster pairs and partition pairs",
        "The experiments of Highly-Available, Fault-Tolerant, Parallel Dataflows, 2004, on sites "
        "that are plain processes: figure 8 and the overhead comparison.",
    )
    _add(
        papers,
        "fluxlb",
        _fluxlb,
        "load balancing on 32 simulated machines, by the thesis' rules and by Holdfast's",
        "The simulations of the Flux thesis, chapter 4: buffers against short bursts, moving "
        "partitions away from loaded machines and from those without memory.",
    )
    mttf = _add(
        papers,
        "mttf",
        _mttf,
        "mean time to failure of cluster pairs and partition pairs",
        "The formulas of Highly-Available, Fault-Tolerant, Parallel Dataflows, 2004, beside a "
        "Monte Carlo simulation of Holdfast's placement and of its controller.",
    )
    for name, seconds, what in (
        ("--site-mttf", 30 * 86_400.0, "mean time between failures of a site, in seconds"),
        ("--repair", 600.0, "mean time until a failed site is back, in seconds"),
        ("--catch-up", 5.0, "mean time until a new site has its state, in seconds"),
    ):
        mttf.add_argument(
            name, type=_positive, default=seconds, metavar="S", help=f"{what} (%(default)g)"
        )


def _add(papers: Any, name: str, command: Any, summary: str, description: str) -> Any:
    parser = papers.add_parser(name, help=summary, description=description)
    parser.add_argument("--out", metavar="FOLDER", help="write the figures to FOLDER as SVG")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--quick", action="store_true", help="shorter and fewer runs")
    parser.set_defaults(command=command)
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be more than 0, not {text}")
    return value


def _hwang05(options: argparse.Namespace, console: Console) -> int:
    from holdfast.lab.paper import hwang05

    return _written(options, hwang05.run(_folder(options), options.quick, console))


def _flux04(options: argparse.Namespace, console: Console) -> int:
    from holdfast.lab.paper import flux04

    return _written(options, flux04.run(_folder(options), options.quick, console))


def _fluxlb(options: argparse.Namespace, console: Console) -> int:
    from holdfast.lab.paper import fluxlb

    return _written(options, fluxlb.run(_folder(options), options.quick, console))


def _mttf(options: argparse.Namespace, console: Console) -> int:
    from holdfast.lab.paper import mttf
    from holdfast.lab.paper.reliability import Times

    times = Times(options.site_mttf, options.repair, options.catch_up)
    return _written(options, mttf.run(_folder(options), times, options.quick, console))


def _folder(options: argparse.Namespace) -> Path | None:
    return Path(options.out) if options.out else None


def _written(options: argparse.Namespace, figures: dict[str, Any]) -> int:
    if options.json:
        write_json(options.json, figures)
    return 0
