"""``holdfast paper flux04``: the experiments of *Highly-Available, Fault-Tolerant, Parallel
Dataflows* (Flux, 2004), section 5.4, on real sites that are plain processes.

- *Figure 8*: rows come at a fixed rate; one of four sites is killed, and a standby is there. How
  many rows come out, how late, and how many a source that cannot wait would have dropped. The paper
  has this for partition pairs only; cluster pairs are measured beside them.
- *The overhead comparison*: the maximum rate without protection, with cluster pairs and with
  partition pairs, measured alternately.

The flow is the paper's network monitoring (`holdfast.lab.workloads.dmz`). Every run's result is
compared with the oracle of the workload.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from holdfast.api.graph import Flow
from holdfast.api.protection import Protection, none, pairs
from holdfast.control.run import Run
from holdfast.errors import InvariantError
from holdfast.lab.bench.kills import TOO_BUSY_MS, settle, until
from holdfast.lab.bench.processes import cpu_s, tree
from holdfast.lab.workloads import dmz
from holdfast.lab.workloads.paced import Delivery, EpochLog, Paced, read_latest, read_log

SITES, STANDBYS, PARTITIONS = 4, 1, 16
PROTECTIONS: dict[str, Protection] = {
    "none": none(),
    "cluster pairs": pairs(failure_domain="process", granularity="cluster"),
    "partition pairs": pairs(failure_domain="process"),
}
HEAD = 2 * dmz.KEYS
"""Rows that are due at once: after them every connection has state, and results come."""
KILLED = ("partition pairs", "cluster pairs")
BEFORE_S, AFTER_S = 1.5, 3.0
"""The time around a kill that is shown."""
AVERAGED_S, STEP_S = 0.25, 0.05
"""The time over which rates and latencies are averaged, as in the paper, and how often."""

# What the paper's text says.
PAPER_RATES = {"none": 82_000.0, "cluster pairs": 40_000.0, "partition pairs": 36_000.0}
PAPER_INPUT_RATE = 42_000.0
PAPER_BUFFER_S = 4_000 / PAPER_INPUT_RATE
"""How long the buffer of its ingress, 4,000 tuples of 110 bytes, lasts at its input rate."""
PAPER_STEADY_S, PAPER_CAUGHT_UP_S = 0.25, 1.0
"""When its output drops after the kill, and when it comes back; state moved for 941 ms."""


@dataclass(frozen=True, slots=True)
class FluxEffort:
    """Sizes and numbers of the runs."""

    rate: float = 60_000.0
    kills: int = 5
    rows: int = 8_000_000
    repeats: int = 9
    warm_s: float = 3.0


FULL = FluxEffort()
QUICK = FluxEffort(kills=1, rows=2_000_000, repeats=2, warm_s=1.0)


# --- the flow -------------------------------------------------------------------------------------


def _source(folder: str, rate: float, head: int = 0) -> Paced:
    return Paced(folder, dmz.DmzRows(staggered=True), dmz.SCHEMA, rate, 1, head)


def _flow(folder: str, approach: str, rate: float, head: int = 0) -> Flow:
    log = EpochLog(f"{folder}/epochs")
    flow = dmz.dmz_flow(_source(folder, rate, head), log, clock=Paced.DUE.name)
    flow.protection = PROTECTIONS[approach]
    return flow


@cache
def _expected(rows: int) -> dict[str, Any]:
    return dmz.oracle(rows, staggered=True)


def _check(deliveries: Sequence[Delivery], rows: int) -> None:
    """Raise unless every result of the first `rows` rows was delivered once."""
    if len({d.epoch for d in deliveries}) < len(deliveries):
        raise InvariantError("an epoch was delivered twice")
    found = {
        "rows": sum(d.rows for d in deliveries),
        "digest": dmz.as_hex(sum(d.digest for d in deliveries)),
    }
    right = _expected(rows)
    if found != {name: right[name] for name in found}:
        raise InvariantError(f"the result is wrong: {found} instead of {right}")


# --- figure 8: a kill -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trace:
    """What came out around a kill. Times are in seconds since it."""

    ends: tuple[float, ...]
    """Where each window ends."""
    rate: tuple[float, ...]
    """Rows delivered in each window, in percent of the usual."""
    latency_ms: tuple[float | None, ...]
    """Mean latency of the rows in each window; None if there were none."""
    input_rate: float
    protected_s: float
    """When everything was protected again."""
    usual_ms: float
    """The largest latency before the kill."""
    largest_ms: float
    """The largest latency after it."""

    @property
    def gap_ms(self) -> float:
        """The additional latency of the slowest row."""
        return max(0.0, self.largest_ms - self.usual_ms)

    @property
    def too_busy(self) -> bool:
        """Whether rows were late before the kill, or none came: then the machine does not sustain
        the rate."""
        return not 0.0 < self.usual_ms <= TOO_BUSY_MS

    @property
    def lowest(self) -> float:
        return min(self._rate_after())

    @property
    def highest(self) -> float:
        return max(self._rate_after())

    @property
    def low_s(self) -> float:
        """For how long the rate was below half of the usual."""
        return sum(r < 50.0 for r in self._rate_after()) * STEP_S

    def _rate_after(self) -> list[float]:
        return [r for t, r in zip(self.ends, self.rate, strict=True) if t >= 0]

    def dropped(self, buffer_s: float) -> int:
        """The rows that a source which cannot wait would have dropped, if its buffer holds the
        input of so many seconds more than usual."""
        return round(self.input_rate * max(0.0, self.gap_ms / 1e3 - buffer_s))

    def to_dict(self) -> dict[str, Any]:
        return {
            "seconds": list(self.ends),
            "rate": list(self.rate),
            "latency_ms": list(self.latency_ms),
            "protected_s": self.protected_s,
            "usual_ms": self.usual_ms,
            "largest_ms": self.largest_ms,
            "dropped": self.dropped(PAPER_BUFFER_S),
        }


def trace(
    deliveries: Sequence[Delivery], killed: float, protected: float, input_rate: float
) -> Trace:
    """Count the deliveries around a kill.

    >>> steady = [Delivery(n, 10 + n / 100, 5, 0, (4.0, 6.0)) for n in range(-200, 400)]
    >>> stalled = [d for d in steady if not 10.2 <= d.at < 10.9]
    >>> around = trace(stalled, 10.0, 11.0, 200.0)
    >>> around.lowest, 0.5 < around.low_s < 0.8, around.highest
    (0.0, True, 100.0)
    """
    count = round((BEFORE_S + AFTER_S) / STEP_S) + 1
    ends = [round(n * STEP_S - BEFORE_S, 3) for n in range(count)]
    rows, latency = [], []
    for end in ends:
        begin = killed + end - AVERAGED_S
        window = [d for d in deliveries if begin <= d.at < begin + AVERAGED_S]
        late = [ms for d in window for ms in d.late_ms[:-1]]
        rows.append(sum(d.rows for d in window))
        latency.append(round(statistics.fmean(late), 2) if late else None)
    undisturbed = [r for r, end in zip(rows, ends, strict=True) if end <= 0]
    usual = statistics.fmean(undisturbed) or statistics.fmean(rows) or 1.0
    after = [d for d in deliveries if killed <= d.at < killed + AFTER_S]
    before = [d for d in deliveries if killed - BEFORE_S <= d.at < killed]
    return Trace(
        tuple(ends),
        tuple(round(100.0 * r / usual, 1) for r in rows),
        tuple(latency),
        input_rate,
        protected - killed,
        max((d.largest_ms for d in before), default=0.0),
        max((d.largest_ms for d in after), default=0.0),
    )


def killed_run(work: str, approach: str, effort: FluxEffort) -> Trace:
    """Kill a site while rows come in, and count what comes out."""
    folder = tempfile.mkdtemp(dir=work)
    flow = _flow(folder, approach, effort.rate, HEAD)
    with flow.start(sites=SITES, spares=STANDBYS, partitions=PARTITIONS) as run:
        until(lambda: run.protected and _is_reported(run), "everything is protected", run)
        until(lambda: _has_results(f"{folder}/epochs"), "results come", run)
        time.sleep(effort.warm_s)
        settle(f"{folder}/epochs")
        time.sleep(BEFORE_S + AVERAGED_S)
        killed = _kill(run)
        until(lambda: run.protected, "everything is protected", run)
        protected = time.time()
        time.sleep(max(0.0, killed + AFTER_S - protected))
        rows = _source(folder, effort.rate, HEAD).end(0.2)
        until(lambda: run.ended(0.02), "the flow has ended")
        run.wait()
    deliveries = read_log(f"{folder}/epochs")
    _check(deliveries, rows)
    return trace(deliveries, killed, protected, effort.rate)


def _has_results(log: str) -> bool:
    return os.path.exists(log) and any(d.rows for d in read_latest(log))


def _is_reported(run: Run) -> bool:
    return len(run.status()["sites"]) >= SITES


def _kill(run: Run) -> float:
    """Kill a site that computes and that leads neither source nor sink, if there is one: the paper
    has those on a machine that is not killed."""
    partitions = run.status()["partitions"]
    leaders = {p["replicas"][0] for p in partitions if p["stage"] in ("packets", "alerts")}
    computing = sorted({s for p in partitions for s in p["replicas"]})
    victim = next((s for s in computing if s not in leaders), computing[-1])
    pid = next(s["pid"] for s in run.status()["sites"] if s["site"] == victim)
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    until(lambda: victim in run.status()["dead"], "the site is declared dead", run, every_s=0.001)
    return killed


# --- the overhead comparison ----------------------------------------------------------------------


@dataclass(slots=True)
class Speeds:
    """The results of runs at maximum rate."""

    rows_per_s: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    """Processor time of all sites for a row."""


def speeds(work: str, effort: FluxEffort, console: Console) -> dict[str, Speeds]:
    """Measure every approach in turn, in alternating order, so that a machine that becomes slower
    or faster favours none of them."""
    found = {approach: Speeds() for approach in PROTECTIONS}
    for turn in range(effort.repeats):
        for approach in list(found)[:: 1 if turn % 2 == 0 else -1]:
            rate, cpu_us = full_speed(work, approach, effort.rows)
            found[approach].rows_per_s.append(rate)
            found[approach].cpu_us.append(cpu_us)
            console.print(f"  {approach}: {rate:,.0f} rows/s, {cpu_us:.2f} µs a row")
    return found


def full_speed(work: str, approach: str, rows: int) -> tuple[float, float]:
    """Return the rate in rows per second, until the last row is delivered, and the processor time
    of a row in microseconds. The starts of the sites do not count."""
    folder = tempfile.mkdtemp(dir=work)
    _source(folder, 1.0, head=rows).end(0.0)
    with _flow(folder, approach, 1.0, head=rows).start(sites=SITES, partitions=PARTITIONS) as run:
        begun, used = time.time(), {pid: cpu_s(pid) for pid in tree()}
        until(lambda: run.ended(0.02), "the flow has ended")
        run.wait()
    spent = [s["cpu_s"] - used.get(s["pid"], 0.0) for s in run.status()["sites"]]
    deliveries = read_log(f"{folder}/epochs")
    _check(deliveries, rows)
    seconds = max(d.at for d in deliveries) - begun
    return rows / seconds, sum(spent) / rows * 1e6


def measure(
    effort: FluxEffort, console: Console
) -> tuple[dict[str, list[Trace]], dict[str, Speeds]]:
    """Do both experiments."""
    work = tempfile.mkdtemp(prefix="holdfast-paper-")
    try:
        traces: dict[str, list[Trace]] = {approach: [] for approach in KILLED}
        for turn in range(effort.kills):
            for approach in KILLED[:: 1 if turn % 2 == 0 else -1]:
                found = killed_run(work, approach, effort)
                traces[approach].append(found)
                console.print(
                    f"  {approach}: slowest row {found.largest_ms:,.0f} ms "
                    f"(usual {found.usual_ms:,.0f}), protected after {found.protected_s:.2f} s"
                )
        return traces, speeds(work, effort, console)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def typical(traces: Sequence[Trace]) -> Trace:
    """Return the trace with the median gap."""
    return sorted(traces, key=lambda t: t.gap_ms)[len(traces) // 2]


def run(out: Path | None, quick: bool, console: Console) -> dict[str, Any]:
    """Measure, print the tables, draw the figures into the folder `out` if it is given, and return
    everything."""
    from holdfast.lab.paper import flux04_report as report

    traces, found = measure(QUICK if quick else FULL, console)
    report.show_kills(traces, console)
    report.show_speeds(found, console)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        pictures = report.pictures(traces, found)
        for name, svg in pictures.items():
            (out / f"flux04-{name}.svg").write_text(svg)
        console.print(f"{len(pictures)} figures are in {out}", highlight=False)
    return {
        "paper": "flux04",
        "kills": {a: [t.to_dict() for t in some] for a, some in traces.items()},
        "overhead": {a: {"rows_per_s": s.rows_per_s, "cpu_us": s.cpu_us} for a, s in found.items()},
    }
