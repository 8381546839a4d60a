"""The report of a chaos run: metrics by kind of fault, and the verdict."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from holdfast.lab.chaos.engine import Done
from holdfast.lab.chaos.load import Load, Verdict
from holdfast.lab.workloads.paced import Delivery


@dataclass(slots=True)
class ChaosOutcome:
    """The results of a chaos run."""

    seed: int
    host: str
    load: Load = field(default_factory=Load)
    seconds: float = 0.0
    rows_in: int = 0
    done: list[Done] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    """The output gap of each injected fault."""
    usual_ms: float = 0.0
    verdicts: list[Verdict] = field(default_factory=list)
    fenced: int = 0
    left: int = 0
    unexpected: dict[int, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Kinds of faults that were left out, and why."""
    error: str | None = None

    @property
    def failures(self) -> list[str]:
        """The reasons why the run failed; empty if it succeeded."""
        reasons = [self.error] if self.error else []
        for verdict in self.verdicts:
            if verdict.lost_rows or verdict.repeated_rows:
                reasons.append(
                    f"{verdict.lost_rows} rows lost, {verdict.repeated_rows} rows repeated"
                )
            if verdict.wrong:
                reasons.append(verdict.wrong)
        for site, why in self.unexpected.items():
            if "silent" not in why:  # a machine may be too busy for a heartbeat
                reasons.append(f"site {site} was healthy but was declared dead: {why}")
        return reasons

    @property
    def replaced(self) -> int:
        """How often one site was killed because the flow could spare no two."""
        return sum(d.kind is not d.fault.kind for d in self.done)

    def to_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "host": self.host,
            "protection": self.load.protection,
            "flow": self.load.name,
            "seconds": self.seconds,
            "rows_in": self.rows_in,
            "faults": len(self.done),
            "kinds": {row["kind"]: row for row in self.by_kind()},
            "usual_latency_ms": self.usual_ms,
            "rows_out": sum(v.expected_rows for v in self.verdicts),
            "lost_rows": sum(v.lost_rows for v in self.verdicts),
            "repeated_rows": sum(v.repeated_rows for v in self.verdicts),
            "late_lines_dropped": sum(v.late_lines for v in self.verdicts),
            "fenced": self.fenced,
            "fenced_and_left": self.left,
            "declared_dead_unexpectedly": {str(s): w for s, w in self.unexpected.items()},
            "one_killed_instead_of_two": self.replaced,
            "left_out": self.left_out,
            "failures": self.failures,
            "list": [str(d) for d in self.done],
        }

    def by_kind(self) -> list[dict[str, Any]]:
        kinds: dict[str, list[tuple[Done, float]]] = {}
        for done, gap in zip(self.done, self.gaps_ms, strict=True):
            kinds.setdefault(done.kind.name, []).append((done, gap))
        return [_kind_row(name, rows) for name, rows in sorted(kinds.items())]


def _kind_row(name: str, rows: Sequence[tuple[Done, float]]) -> dict[str, Any]:
    gaps = [gap for _, gap in rows]
    recoveries = [d.recovered_at - d.at for d, _ in rows if d.recovered_at is not None]
    return {
        "kind": name,
        "faults": len(rows),
        "during_recovery": sum(d.unprotected for d, _ in rows),
        "gap_ms": _median_max(gaps),
        "recovery_s": _median_max(recoveries),
    }


def _median_max(values: Sequence[float]) -> dict[str, float] | None:
    return {"median": statistics.median(values), "max": max(values)} if values else None


def gaps(lines: Sequence[Delivery], done: Sequence[Done]) -> tuple[float, list[float]]:
    """Return the usual latency of an epoch's slowest row, and the gap of every fault: by how much
    the slowest row that was in flight or due between it and the next fault exceeded that."""
    usual = statistics.median([line.largest_ms for line in lines if line.rows] or [0.0])
    gaps_ms = [0.0] * len(done)
    begun = [d.at - usual / 1e3 for d in done]
    for line in lines:
        last = bisect_right(begun, line.at - line.largest_ms / 1e3) - 1
        if last >= 0:
            gaps_ms[last] = max(gaps_ms[last], line.largest_ms - usual)
    return usual, gaps_ms


def show(outcome: ChaosOutcome, console: Console) -> None:
    """Print the tables; after a failure also the faults."""
    console.print(_kinds_table(outcome))
    for name, why in outcome.left_out.items():
        console.print(f"{name} was left out: {why}", markup=False, highlight=False)
    console.print(_verdict_table(outcome))
    if outcome.failures:
        console.print(f"[bold red]failed[/]: {len(outcome.failures)} reasons; seed {outcome.seed}")
        for why in outcome.failures:
            console.print(f"  {why}", markup=False, highlight=False)
        console.print("faults:")
        for done in outcome.done:
            console.print(f"  {done}", markup=False, highlight=False)


def _kinds_table(outcome: ChaosOutcome) -> Table:
    title = f"{len(outcome.done)} faults in {outcome.seconds:.0f} s, seed {outcome.seed}"
    table = Table(title=title, title_justify="left")
    table.add_column("fault")
    for name in ("injected", "in recovery", "gap, ms", "max", "recovery, s", "max"):
        table.add_column(name, justify="right")
    for row in outcome.by_kind():
        table.add_row(
            row["kind"],
            str(row["faults"]),
            str(row["during_recovery"]),
            *_cells(row["gap_ms"], ".0f"),
            *_cells(row["recovery_s"], ".2f"),
        )
    for name in outcome.left_out:
        table.add_row(name, "left out")
    return table


def _cells(metrics: Mapping[str, float] | None, form: str) -> tuple[str, str]:
    if metrics is None:
        return "–", "–"
    return format(metrics["median"], form), format(metrics["max"], form)


def _verdict_table(outcome: ChaosOutcome) -> Table:
    metrics = outcome.to_dict()
    title = f"{outcome.load.name} on 4 sites under {outcome.load.protection}, host {outcome.host}"
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    table.add_column("", justify="right")
    rows = {
        "rows in": metrics["rows_in"],
        "rows out": metrics["rows_out"],
        "rows lost": metrics["lost_rows"],
        "rows repeated": metrics["repeated_rows"],
        "late lines of fenced sites, dropped": metrics["late_lines_dropped"],
        "sites fenced": metrics["fenced"],
        "  of these ended by themselves": metrics["fenced_and_left"],
        "one site killed instead of two": outcome.replaced,
        "declared dead unexpectedly": len(outcome.unexpected),
        "usual latency of an epoch's slowest row, ms": round(outcome.usual_ms),
    }
    for name, value in rows.items():
        table.add_row(name, f"{value:,}")
    return table
