"""Draws the results of ``holdfast bench protections``: the cost of each protection against its
recovery time, for every flow, with the spread of the repeats as bars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.advise.fit import by_flow
from holdfast.ui.drawing import COLOURS, INK, RIGHT, TOP, WIDTH, Axis, Point, framed, text

LEAST_MS = 1.0
"""Smaller values are drawn here, because a logarithmic axis has no zero."""


@dataclass(frozen=True, slots=True)
class Spot:
    """One protection of one flow: medians, and the smallest and largest of the repeats."""

    flow: str
    protection: str
    overhead: tuple[float, float, float]
    """In percent of the rate without protection: median, least, largest."""
    recovery_ms: tuple[float, float, float]


def spots(figures: Mapping[str, Any]) -> list[Spot]:
    return [
        Spot(flow, protection, _overhead(measured), _recovery_ms(measured))
        for flow, protections in by_flow(figures).items()
        for protection, measured in protections.items()
        if protection != "none"
    ]


def _overhead(measured: Mapping[str, Any]) -> tuple[float, float, float]:
    rates = (measured["rate"], measured["rates"].highest, measured["rates"].lowest)
    middle, least, largest = (100 * (1 - rate) for rate in rates)
    return middle, least, largest


def _recovery_ms(measured: Mapping[str, Any]) -> tuple[float, float, float]:
    times, middle = measured["full_recoveries_ms"], measured["full_recovery_ms"]
    drawn = [max(LEAST_MS, ms) for ms in (middle, times.lowest, times.highest)]
    return drawn[0], drawn[1], drawn[2]


def picture(figures: Mapping[str, Any]) -> str:
    """Draw all spots as SVG: the colour shows the protection, the shape the flow."""
    all_spots = spots(figures)
    across = Axis.across([x for s in all_spots for x in s.overhead])
    upward = Axis.upward([y for s in all_spots for y in s.recovery_ms], log=True)
    parts = [part for s in all_spots for part in _bars(s, across, upward)]
    for spot in all_spots:
        at = (across.at(spot.overhead[0]), upward.at(spot.recovery_ms[0]))
        parts.append(_mark(spot.flow, COLOURS[spot.protection], at))
    return framed(
        "What protections cost, and how long they take to recover",
        "maximum rate given up, in percent (bars: all repeats)",
        "from the kill to full recovery, in ms",
        across,
        upward,
        [*parts, *_legend(all_spots)],
    )


def _bars(spot: Spot, across: Axis, upward: Axis) -> list[str]:
    x, y = across.at(spot.overhead[0]), upward.at(spot.recovery_ms[0])
    left, right = (across.at(v) for v in spot.overhead[1:])
    low, high = (upward.at(v) for v in spot.recovery_ms[1:])
    colour = COLOURS[spot.protection]
    return [
        f'<path d="M{left:.1f} {y:.1f}H{right:.1f}M{x:.1f} {low:.1f}V{high:.1f}" '
        f'stroke="{colour}" stroke-width="1.2" opacity="0.45"/>'
    ]


def _mark(flow: str, colour: str, at: Point) -> str:
    """Draw a disc, a square or a triangle."""
    x, y = at
    if flow == "events":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}" stroke="#fff"/>'
    path = f"M{x - 5:.1f} {y - 5:.1f}h10v10h-10z"
    if flow == "stateless":
        path = f"M{x:.1f} {y - 6:.1f}l6 11h-12z"
    return f'<path d="{path}" fill="{colour}" stroke="#fff"/>'


def _legend(all_spots: list[Spot]) -> list[str]:
    x, rows = WIDTH - RIGHT + 32, 0
    parts: list[str] = []
    for protection in dict.fromkeys(s.protection for s in all_spots):
        y = TOP + 10 + 20 * rows
        bar = f'<path d="M{x - 10} {y}h20" stroke="{COLOURS[protection]}" stroke-width="6"/>'
        parts += [bar, text(x + 20, y + 4, protection)]
        rows += 1
    for flow in dict.fromkeys(s.flow for s in all_spots):
        y = TOP + 24 + 20 * rows
        parts += [_mark(flow, INK, (x, y)), text(x + 20, y + 4, flow)]
        rows += 1
    return parts
