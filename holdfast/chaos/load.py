"""The flow that chaos is done to, and whether its answer is right.

It is the network-monitoring flow of the benchmarks: two keyed stages between ingress and egress.
Its rows depend on the offset alone, and its sink adds a line to a file for every epoch.

A site that was stopped while it wrote may add a line when it wakes up, long after another has
written that epoch. That is what `EpochLog` cannot prevent, and whoever reads it has to drop: it is
not counted as repeated, if it was written between the fault and the end of that process, and says
the same. Every other line that comes twice is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.bench import dmz
from holdfast.bench.paced import Delivery, EpochLog, Paced
from holdfast.flow.graph import Flow
from holdfast.flow.protection import pairs

SITES = 4
KEYS = 20_000
RATE = 20_000.0


def source(folder: str, rate: float = RATE) -> Paced:
    make = dmz.DmzRows(KEYS, splits=SITES, staggered=True)
    return Paced(folder, make, dmz.SCHEMA, rate, SITES)


def log_path(folder: str) -> str:
    return f"{folder}/epochs"


def flow(folder: str, rate: float = RATE) -> Flow:
    """Source and sink meet in `folder`."""
    made = dmz.dmz_flow(source(folder, rate), EpochLog(log_path(folder)), clock=Paced.DUE.name)
    made.protection = pairs(apart="process")
    return made


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
    """What the log has, against the answer of the batch job."""

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


def judge(lines: Sequence[Delivery], rows: int, absences: Iterable[Absence]) -> Verdict:
    """Compare a log with what the rows that went in must give."""
    expected = dmz.oracle(rows, KEYS, splits=SITES, staggered=True)
    kept, late, repeated, differing = _once(lines, list(absences))
    surplus = sum(line.rows for line in kept) - int(expected["rows"])
    missing = sorted(set(range(max((k.epoch for k in kept), default=-1))) - {k.epoch for k in kept})
    digest = dmz.as_hex(sum(line.digest for line in kept))
    wrong = None
    if differing:
        wrong = f"epochs with two different answers: {sorted(differing)[:10]}"
    elif missing:
        wrong = f"epochs missing: {missing[:10]}"
    elif digest != expected["digest"]:
        wrong = f"digest {digest} instead of {expected['digest']}"
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
