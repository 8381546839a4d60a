"""The live table, rendered from ``run.status()``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text


class Dashboard:
    """Renders successive statuses as tables; a rate is the difference of two statuses."""

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
            ("late", "right"),
            ("keys", "right"),
            ("state MB", "right"),
        ):
            table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        for site in status["sites"]:
            for index, stage in enumerate(_by_stage(site["stages"])):
                table.add_row(*self._row(site, stage, now, first=index == 0))
            table.add_section()
        parts: list[Text | Table] = [Text(self._headline(status)), table]
        if any(p["phase"] != "not protected" for p in status["partitions"]):
            parts.append(_recovery(status["partitions"]))
        parts += [Text(text, style="yellow") for text in status["exposed"]]
        return Group(*parts)

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
            f"{stage['late_rows']:,}" if keyed else "",
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


def _by_stage(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Combine a site's tasks of the same stage into one row."""
    rows: dict[str, dict[str, Any]] = {}
    for task in tasks:
        row = rows.get(task["stage"])
        if row is None:
            rows[task["stage"]] = dict(task)
            continue
        for name in ("partitions", "rows_in", "late_rows", "keys", "state_bytes"):
            row[name] += task[name]
        row["epoch"] = min(row["epoch"], task["epoch"])
    return list(rows.values())


def _recovery(partitions: list[dict[str, Any]]) -> Table | Text:
    """Return a table of the partitions that are not protected, with the time to recover."""
    missing = [p for p in partitions if p["phase"] not in ("protected", "not protected")]
    if not missing:
        return Text("every partition is protected", style="green")
    table = Table(title=None, expand=False, pad_edge=False)
    for name in ("recovering", "partitions", "phase", "replicas", "to", "MB to go", "epochs", "s"):
        table.add_column(name, no_wrap=True)
    for p in missing:
        first, last = p["partitions"]
        table.add_row(
            p["stage"],
            str(first) if first == last else f"{first}-{last}",
            p["phase"] + (f": {p['reason']}" if p["reason"] else ""),
            " ".join(str(s) for s in p["replicas"]),
            " ".join([*map(str, p["joining"]), *(f"-{s}" for s in p["leaving"])]),
            f"{p['bytes_to_go'] / 1e6:,.1f}",
            str(p["epochs_to_go"]),
            f"{p['seconds_to_go']:.1f}",
        )
    return table


class WatchedFlow(Protocol):
    """A flow that can be watched: a `Run`, or `Apps`."""

    def status(self) -> dict[str, Any]: ...

    def ended(self, timeout: float | None = None) -> bool: ...


def watch(run: WatchedFlow, console: Console, enough: Callable[[], bool] = lambda: False) -> None:
    """Show the live table until the flow ends or `enough` returns True."""
    board = Dashboard()
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            ended = run.ended(1.0)
            live.update(board.render(run.status(), time.monotonic()), refresh=True)
            if ended or enough():
                break
    if not console.is_terminal:
        console.print()  # Live does not end with a newline there


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal. Yields a function of the tasks done and their total."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tasks"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, known: bar.update(task, completed=done, total=known or None)
