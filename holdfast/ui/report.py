"""Results on the terminal and in files: numbers, tables, JSON.

Machines are noisy, so a figure is the median of several runs, shown with the smallest and the
largest value.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity over several runs.

    >>> Figure((3.0, 1.0, 2.0)).median
    2.0
    >>> str(Figure((1_234_567.0,)))
    '1,234,567'
    """

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def lowest(self) -> float:
        return min(self.values)

    @property
    def highest(self) -> float:
        return max(self.values)

    def to_dict(self) -> dict[str, Any]:
        return {
            "median": self.median,
            "min": self.lowest,
            "max": self.highest,
            "values": list(self.values),
        }

    def __str__(self) -> str:
        if len(self.values) == 1:
            return number(self.median)
        return f"{number(self.median)} ({number(self.lowest)}..{number(self.highest)})"


def number(value: float) -> str:
    """Format a number with its significant digits: ``1,234,567``, ``12.3``, ``0.123``."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def show(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    console: Console | None = None,
) -> None:
    """Print a table: the first column is text, the others are figures."""
    table = Table(title=title, title_justify="left")
    for position, name in enumerate(columns):
        table.add_column(name, justify="left" if position == 0 else "right")
    for row in rows:
        table.add_row(*[number(v) if isinstance(v, int | float) else str(v) for v in row])
    (console or Console()).print(table)


def write_json(path: str | os.PathLike[str], results: Mapping[str, Any]) -> None:
    """Write results as JSON; a `Figure` becomes an object of its parts."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dict(results), indent=2, default=_plain)
    hidden = target.with_name(f".{target.name}.tmp")
    hidden.write_text(text + "\n")
    os.replace(hidden, target)  # a reader never sees half a file


def _plain(value: Any) -> Any:
    if isinstance(value, Figure):
        return value.to_dict()
    if hasattr(value, "item"):  # numpy's scalars
        return value.item()
    return str(value)
