"""The flows of chaos runs, and the check of their results.

*dmz* is the network-monitoring flow of the benchmarks: two keyed stages between ingress and egress,
whose state depends on all rows of a key. *windows* is a flow over event time, as `upstream` and
`rollback` require. The rows of both depend on the offset alone, and their sink appends a line to a
file for every epoch.

A site that was stopped while it wrote may append its line when it wakes up, long after another site
has written that epoch. `EpochLog` cannot prevent this, and readers of its log must drop such lines.
They do not count as repeated if they were written between the fault and the end of the process, and
equal the other line. All other duplicate lines do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.api.graph import Flow
from holdfast.api.protection import Protection, active, pairs, passive, rollback, upstream
from holdfast.lab.chaos import windows
from holdfast.lab.workloads import dmz
from holdfast.lab.workloads.paced import Delivery, EpochLog, Paced
from holdfast.plan.planner import plan

SITES = 4
KEYS = 20_000
RATE = 20_000.0
FLOWS = ("dmz", "windows")
PROTECTIONS: dict[str, Protection] = {
    "pairs": pairs(failure_domain="process"),
    "active": active(failure_domain="process"),
    "passive": passive(interval=0.2, failure_domain="process"),
    "upstream": upstream(failure_domain="process"),
    "rollback": rollback(failure_domain="process"),
}


def log_path(folder: str) -> str:
    return f"{folder}/epochs"


@dataclass(frozen=True, slots=True)
class Load:
    """A flow and its protection. Source and sink share a folder."""

    protection: str = "pairs"
    name: str = "dmz"

    @classmethod
    def of(cls, protection: str, name: str | None = None) -> Load:
        """Return a load under `protection`; without a `name`, with the flow that tests it best."""
        return cls(
            protection, name or ("windows" if PROTECTIONS[protection].rebuild_level else "dmz")
        )

    def source(self, folder: str) -> Paced:
        if self.name == "windows":
            return Paced(folder, windows.ROWS, dmz.SCHEMA, RATE, 1)
        make = dmz.DmzRows(KEYS, splits=SITES, staggered=True)
        return Paced(folder, make, dmz.SCHEMA, RATE, SITES)

    def flow(self, folder: str) -> Flow:
        source, sink = self.source(folder), EpochLog(log_path(folder))
        if self.name == "windows":
            flow = windows.windows_flow(source, sink)
        else:
            flow = dmz.dmz_flow(source, sink, clock=Paced.DUE.name)
        flow.protection = PROTECTIONS[self.protection]
        return flow

    def oracle(self, rows: int) -> dict[str, Any]:
        """Return the expected result of the first `rows` rows."""
        if self.name == "windows":
            return windows.oracle(rows)
        return dmz.oracle(rows, KEYS, splits=SITES, staggered=True)

    def rebuilt(self) -> set[str]:
        """Return the stages that need no surviving replica, because they are rebuilt from retained
        input."""
        stages = plan(self.flow("")).stages
        return {s.name for s in stages if s.protection is not None and s.protection.rebuild_level}


@dataclass(frozen=True, slots=True)
class Absence:
    """A process that was stopped or cut off, and therefore declared dead."""

    writer: int
    since: float
    until: float

    MARGIN_S = 0.1
    """A line's time is that of its creation, which may be just before the process was stopped."""

    def excuses(self, line: Delivery) -> bool:
        return (
            line.writer == self.writer and self.since - self.MARGIN_S <= line.at <= self.until + 1.0
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of comparing a log with the expected result."""

    expected_rows: int
    lost_rows: int
    repeated_rows: int
    late_lines: int
    """Lines that sites appended after they were declared dead."""
    wrong: str | None
    """Any other error."""

    @property
    def right(self) -> bool:
        return not (self.lost_rows or self.repeated_rows or self.wrong)


def judge(
    lines: Sequence[Delivery], expected: Mapping[str, Any], absences: Iterable[Absence]
) -> Verdict:
    """Compare a log with the oracle's result."""
    kept, late, repeated, differing = _once(lines, list(absences))
    surplus = sum(line.rows for line in kept) - int(expected["rows"])
    digest = dmz.as_hex(sum(line.digest for line in kept))
    wrong = None
    if differing:
        wrong = f"epochs with two different answers: {sorted(differing)[:10]}"
    elif digest != expected["digest"]:
        missing = set(range(max((k.epoch for k in kept), default=-1))) - {k.epoch for k in kept}
        wrong = f"digest {digest} instead of {expected['digest']}"
        # Epochs without rows are missing too: a new leader leaves them out.
        wrong += f"; epochs missing: {sorted(missing)[:10]}" if missing else ""
    lost, again = max(0, -surplus), repeated + max(0, surplus)
    return Verdict(int(expected["rows"]), lost, again, late, wrong)


def _once(
    lines: Sequence[Delivery], absences: list[Absence]
) -> tuple[list[Delivery], int, int, set[int]]:
    """Return each epoch's first line, the number of lines dropped as late, the number of rows
    repeated, and the epochs whose lines differ."""
    by_epoch: dict[int, list[Delivery]] = {}
    for line in lines:
        by_epoch.setdefault(line.epoch, []).append(line)
    late, repeated, differing = 0, 0, set()
    for epoch, same in by_epoch.items():
        if len({(line.rows, line.digest) for line in same}) > 1:
            differing.add(epoch)
        excused = sum(any(a.excuses(line) for a in absences) for line in same)
        dropped = min(excused, len(same) - 1)
        late += dropped
        repeated += same[0].rows * (len(same) - 1 - dropped)
    return [same[0] for same in by_epoch.values()], late, repeated, differing
