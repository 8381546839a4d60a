"""The live table: a thin reader of ``run.status()``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from holdfast.run import Run


class Dashboard:
    """Turns successive statuses into tables; rates come from the difference of two."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, str], tuple[float, int]] = {}

    def render(self, status: dict[str, Any], now: float) -> Group:
        table = Table(title=None, expand=False, pad_edge=False)
        for name, justify in (
            ("site", "right"),
            ("stage", "left"),
            ("parts", "right"),
            ("epoch", "right"),
            ("rows/s", "right"),
            ("rows", "right"),
            ("keys", "right"),
            ("state MB", "right"),
        ):
            table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        for site in status["sites"]:
            for index, stage in enumerate(site["stages"]):
                table.add_row(*self._row(site, stage, now, first=index == 0))
            table.add_section()
        return Group(Text(self._headline(status)), table)

    def _row(
        self, site: dict[str, Any], stage: dict[str, Any], now: float, first: bool
    ) -> list[str]:
        key = (site["site"], stage["stage"])
        then, rows = self._before.get(key, (now, stage["rows_in"]))
        rate = (stage["rows_in"] - rows) / (now - then) if now > then else 0.0
        self._before[key] = (now, stage["rows_in"])
        keyed = stage["kind"] == "keyed"
        return [
            str(site["site"]) if first else "",
            stage["stage"],
            str(stage["partitions"]),
            str(stage["epoch"]),
            f"{rate:,.0f}",
            f"{stage['rows_in']:,}",
            f"{stage['keys']:,}" if keyed else "",
            f"{stage['state_bytes'] / 2**20:,.1f}" if keyed else "",
        ]

    @staticmethod
    def _headline(status: dict[str, Any]) -> str:
        latency = next((s["latency_ms"] for s in status["sites"] if s["latency_ms"]), None)
        seen = (
            f"latency p50 {latency['p50']:.1f} ms, p99 {latency['p99']:.1f} ms"
            if latency
            else "no epoch delivered yet"
        )
        return (
            f"{status['flow']}: {status['state']}, {status['seconds']:.0f} s, "
            f"{status['rows_in']:,} rows in {status['epochs']:,} epochs, {seen}"
        )


def watch(run: Run, console: Console, enough: Callable[[], bool] = lambda: False) -> None:
    """Show the live table until the flow ends, or `enough` says so."""
    board = Dashboard()
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            ended = run.ended(1.0)
            live.update(board.render(run.status(), time.monotonic()), refresh=True)
            if ended or enough():
                break
    if not console.is_terminal:
        console.print()  # Live ends without a new line there
