"""The flows that chaos is done to, and whether their answers are right.

*dmz* is the network-monitoring flow of the benchmarks: two keyed stages between ingress and egress,
whose state comes from all rows of a key. *windows* is one over event time, as `upstream` and
`rollback` demand it. Their rows depend on the offset alone, and their sink adds a line to a file
for every epoch.

A site that was stopped while it wrote may add a line when it wakes up, long after another has
written that epoch. That is what `EpochLog` cannot prevent, and whoever reads it has to drop: it is
not counted as repeated, if it was written between the fault and the end of that process, and says
the same. Every other line that comes twice is.
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
    """A flow, and how it is protected. Source and sink meet in a folder."""

    protection: str = "pairs"
    name: str = "dmz"

    @classmethod
    def of(cls, protection: str, name: str | None = None) -> Load:
        """With the flow that says most of those that can be protected so."""
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
            made = windows.windows_flow(source, sink)
        else:
            made = dmz.dmz_flow(source, sink, clock=Paced.DUE.name)
        made.protection = PROTECTIONS[self.protection]
        return made

    def oracle(self, rows: int) -> dict[str, Any]:
        """What the rows that went in must give."""
        if self.name == "windows":
            return windows.oracle(rows)
        return dmz.oracle(rows, KEYS, splits=SITES, staggered=True)

    def rebuilt(self) -> set[str]:
        """The stages of which no replica need be left, as all that they need is kept elsewhere."""
        stages = plan(self.flow("")).stages
        return {s.name for s in stages if s.protection is not None and s.protection.rebuild_level}


@dataclass(frozen=True, slots=True)
class Absence:
    """A process that was stopped or cut off, and was declared dead for it."""

    writer: int
    since: float
    until: float

    MARGIN_S = 0.1
    """A line says when it was made, which may be just before the process was stopped."""

    def excuses(self, line: Delivery) -> bool:
        return (
            line.writer == self.writer and self.since - self.MARGIN_S <= line.at <= self.until + 1.0
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the log has, against the right answer."""

    expected_rows: int
    lost_rows: int
    repeated_rows: int
    late_lines: int
    """Lines that sites which were declared dead added after that."""
    wrong: str | None
    """What else is not as it should be."""

    @property
    def right(self) -> bool:
        return not (self.lost_rows or self.repeated_rows or self.wrong)


def judge(
    lines: Sequence[Delivery], expected: Mapping[str, Any], absences: Iterable[Absence]
) -> Verdict:
    """Compare a log with what an oracle says."""
    kept, late, repeated, differing = _once(lines, list(absences))
    surplus = sum(line.rows for line in kept) - int(expected["rows"])
    digest = dmz.as_hex(sum(line.digest for line in kept))
    wrong = None
    if differing:
        wrong = f"epochs with two different answers: {sorted(differing)[:10]}"
    elif digest != expected["digest"]:
        missing = set(range(max((k.epoch for k in kept), default=-1))) - {k.epoch for k in kept}
        wrong = f"digest {digest} instead of {expected['digest']}"
        # Whoever takes over leaves those out that had no rows.
        wrong += f"; epochs missing: {sorted(missing)[:10]}" if missing else ""
    lost, again = max(0, -surplus), repeated + max(0, surplus)
    return Verdict(int(expected["rows"]), lost, again, late, wrong)


def _once(
    lines: Sequence[Delivery], absences: list[Absence]
) -> tuple[list[Delivery], int, int, set[int]]:
    """Each epoch's first line; lines dropped as late; rows repeated; epochs whose lines differ."""
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
