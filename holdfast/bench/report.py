"""What the benchmarks share: summing up, printing, and watching memory.

A figure is never a single run: machines are noisy, so it is the median of several, shown with
the smallest and the largest.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
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
    """As many digits as say something: ``1,234,567``, ``12.3``, ``0.123``."""
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
    """Write results for other programs to read; a `Figure` becomes an object of its parts."""
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


# --- memory and processor time of a tree of processes ---------------------------------------------

_PAGE = os.sysconf("SC_PAGE_SIZE")


def tree(root: int | None = None) -> list[int]:
    """The process `root` (by default this one) and all its descendants."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))):
            parents.setdefault(int(fields[1]), []).append(int(name))
    found = [os.getpid() if root is None else root]
    for pid in found:  # grows while it is walked
        found += parents.get(pid, [])
    return found


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command, which may itself contain blanks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return []


def rss_mb(root: int | None = None) -> float:
    """Resident memory of the tree now, in MiB. Pages that forked processes share count in each."""
    pages = [int(fields[21]) for pid in tree(root) if (fields := _stat(pid))]
    return sum(pages) * _PAGE / (1 << 20)


def cpu_s(root: int | None = None) -> float:
    """Processor time of the tree so far, in seconds; without processes that have ended."""
    ticks = [int(fields[11]) + int(fields[12]) for pid in tree(root) if (fields := _stat(pid))]
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


class PeakRss:
    """Samples the memory of a process tree in a thread, from ``with`` to its end.

    >>> with PeakRss() as memory:
    ...     data = bytes(1 << 20)
    >>> memory.peak_mb > 1
    True
    """

    def __init__(self, root: int | None = None, every_s: float = 0.5) -> None:
        self.peak_mb = 0.0
        self._root = os.getpid() if root is None else root
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-rss", daemon=True)

    def _sample(self) -> None:
        while True:
            self.peak_mb = max(self.peak_mb, rss_mb(self._root))
            if self._ended.wait(self._every_s):
                return

    def __enter__(self) -> PeakRss:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()
        self.peak_mb = max(self.peak_mb, rss_mb(self._root))
