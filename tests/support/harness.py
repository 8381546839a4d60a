"""A whole cluster in one list of `StageRunner`s: what the engine does, without the engine.

`run` feeds the rows of a flow's sources through its plan, epoch by epoch, over any number of
partitions and sites. It trusts nothing that a real run would not give: rows of one exchange come
in a shuffled order of producers, state that moves goes through Arrow IPC, and the watermark is
worked out here, by a plain loop.
"""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pyarrow as pa
from hypothesis import Phase, settings

from holdfast.api.graph import Flow
from holdfast.engine.batches import Track, is_order_name, merge, order_of, with_order
from holdfast.engine.keys import key_words, partition_of
from holdfast.engine.steps import conform
from holdfast.plan.planner import Plan, Stage, plan
from holdfast.plan.stage_runner import StageRunner
from tests.support.arrays import exact

CI = bool(os.environ.get("CI"))
EXAMPLES = float(os.environ.get("HOLDFAST_EXAMPLES", "0.5"))
"""How many examples are tried of those that a test names: `make test-nightly` tries more."""


def examples(count: int) -> settings:
    """Moderate, without a deadline, and the same examples on every run of a CI machine."""
    count = max(1, round(count * EXAMPLES))
    return settings(max_examples=count, deadline=None, derandomize=CI, database=None)


def runs(count: int) -> settings:
    """For examples that are whole runs of a simulated world: looking for smaller ones that fail
    would take many minutes, and they are small anyway."""
    return settings(examples(count), phases=[Phase.explicit, Phase.generate])


@dataclass
class Input:
    """The rows of all sources in their recorded order: `turns[seq]` is the source of row `seq`."""

    batches: dict[str, pa.RecordBatch]
    turns: list[str]
    splits: list[int] | None = None
    """The split of each row; None if no source has more than one."""
    idle: Mapping[int, Sequence[Collection[tuple[str, int]]]] = field(default_factory=dict)
    """By row: the splits (and their sources) that let go of the watermark right behind it, those
    of one epoch after those of another."""
    ended: bool = True

    @classmethod
    def of(cls, **batches: pa.RecordBatch) -> Input:
        """The sources' rows one after another, a row of each in turn."""
        left = {name: b.num_rows for name, b in batches.items()}
        turns = []
        while any(left.values()):
            for name in left:
                if left[name]:
                    turns.append(name)
                    left[name] -= 1
        return cls(dict(batches), turns)

    @classmethod
    def mixed(cls, seed: int, splits: Mapping[str, int], **batches: pa.RecordBatch) -> Input:
        """Stretches of the sources' rows in an order that the seed decides, each of one split."""
        rng = random.Random(seed)
        left = {name: b.num_rows for name, b in batches.items() if b.num_rows}
        turns: list[str] = []
        found: list[int] = []
        while left:
            name = rng.choice(sorted(left))
            rows = min(rng.choice([1, 1, 3, 20]), left[name])
            turns += [name] * rows
            found += [rng.randrange(splits.get(name, 1))] * rows
            left = {n: k - rows * (n == name) for n, k in left.items() if k > rows * (n == name)}
        return cls(dict(batches), turns, found)

    def seqs(self, source: str) -> np.ndarray:
        return np.array([i for i, s in enumerate(self.turns) if s == source], np.int64)


@dataclass
class Shape:
    """How a run is cut and spread. Results must not depend on any of it."""

    cuts: Sequence[int] = ()
    partitions: int = 1
    sites: int = 1
    thin: bool = False
    """Keep only the steps of the watermark that cross one of the plan's boundaries."""
    move_at: int | None = None
    """The number of cuts after which all state moves: to fresh runners, or between these."""
    sites_after: int = 1
    fresh: bool = True
    seed: int = 0


@dataclass
class Result:
    sinks: dict[str, pa.RecordBatch] = field(default_factory=dict)
    late_rows: int = 0
    dead_rows: int = 0

    def rows(self, sink: str) -> list[tuple]:
        return rows_of(self.sinks[sink])


def run(flow: Flow | Plan, given: Input, shape: Shape | None = None) -> Result:
    return _Cluster(flow if isinstance(flow, Plan) else plan(flow), given, shape or Shape()).run()


def rows_of(batch: pa.RecordBatch) -> list[tuple]:
    """Rows as tuples that compare bit for bit: floats by their bits (but all NaNs alike)."""
    return list(zip(*(exact(c) for c in batch.columns), strict=True))


def bits_of(value: float) -> tuple[str, int]:
    """What `rows_of` makes of a float64."""
    return exact(pa.array([value], pa.float64()))[0]


def naive_marks(p: Plan, given: Input) -> list[int]:
    """The watermark after every row: the lowest, over all splits of all sources that have event
    times, of the highest time so far. A split that has shown no time yet holds it back, and one
    that is idle does not. It never falls."""
    times, highest = {}, {}
    for stage in p.sources:
        if stage.event_time is not None:
            assert stage.source is not None
            column = given.batches[stage.name].column(stage.event_time)
            times[stage.name] = iter(exact(column))
            highest |= {(stage.name, n): Track.NEVER for n in range(stage.source.splits)}
    splits = given.splits or [0] * len(given.turns)
    idle = {place for places in given.idle.get(-1, ()) for place in places}
    mark, marks = Track.NEVER, []
    for seq, place in enumerate(zip(given.turns, splits, strict=True)):
        if place in highest:
            idle.discard(place)
            highest[place] = max(highest[place], next(times[place[0]]))
            mark = _held(highest, idle, mark)
        for places in given.idle.get(seq, ()):
            idle |= set(places)
            mark = _held(highest, idle, mark)
        marks.append(mark)
    return marks


def _held(highest: Mapping[tuple[str, int], int], idle: set[tuple[str, int]], mark: int) -> int:
    """Where the watermark is after `mark`; with all splits idle, where the first of them is."""
    held = [time for place, time in highest.items() if place not in idle]
    return max(mark, min(held) if held else max(highest.values(), default=mark))


class _Cluster:
    def __init__(self, p: Plan, given: Input, shape: Shape) -> None:
        self.plan, self.given, self.shape = p, given, shape
        self.random = random.Random(shape.seed)
        self.marks = naive_marks(p, given)
        self.result = Result()
        self.collected: dict[str, list[pa.RecordBatch]] = {s.name: [] for s in p.sinks}
        self.sites = shape.sites
        self.owner = self._place()
        self.sources = {s.id: [StageRunner(p, s, 1) for _ in range(2)] for s in p.sources}
        self.keyed = {s.id: self._runners(s) for s in p.stages if s.kind == "keyed"}

    def _place(self) -> list[int]:
        return [self.random.randrange(self.sites) for _ in range(self.shape.partitions)]

    def _runners(self, stage: Stage) -> list[StageRunner]:
        return [StageRunner(self.plan, stage, self.shape.partitions) for _ in range(self.sites)]

    def run(self) -> Result:
        total = len(self.given.turns)
        bounds = [0, *sorted(min(c, total) for c in self.shape.cuts), total]
        for epoch, (start, stop) in enumerate(pairwise(bounds)):
            if epoch == self.shape.move_at:
                self._move()
            self._epoch(epoch, start, stop, last=epoch == len(bounds) - 2)
        for stage in self.plan.sinks:
            schema = stage.inputs[0].schema
            tables = [pa.Table.from_batches([b.cast(schema)]) for b in self.collected[stage.name]]
            batches = pa.concat_tables(tables).combine_chunks().to_batches()
            self.result.sinks[stage.name] = batches[0] if batches else merge([], schema)
        runners = [r for rs in [*self.sources.values(), *self.keyed.values()] for r in rs]
        self.result.late_rows += sum(r.operator.late_rows for r in runners if r.operator)
        self.result.dead_rows += sum(r.dead_rows for r in runners)
        return self.result

    # --- one epoch -------------------------------------------------------------------------------

    def _epoch(self, epoch: int, start: int, stop: int, last: bool) -> None:
        track = self._track(start, stop, last)
        frames: dict[int, list[pa.RecordBatch]] = {e.id: [] for e in self.plan.exchanges}
        for stage in self.plan.stages:
            if stage.kind == "source":
                outputs = self._run_source(stage, epoch, start, stop)
            elif stage.kind == "keyed":
                outputs = self._run_keyed(stage, frames, track, epoch)
            else:
                given = [b for e in stage.inputs for b in self._shuffled(frames[e.id])]
                merged = merge(given, stage.inputs[0].schema)
                _require_unique_order(merged, stage.name)
                self.collected[stage.name].append(merged)
                continue
            for output in outputs:
                for exchange, batch in output.items():
                    frames[exchange].append(batch)

    def _track(self, start: int, stop: int, last: bool) -> Track:
        mark = self.marks[start - 1] if start else Track.NEVER
        seqs, marks = [Track.START], [mark]
        for seq in range(start, stop):
            if self.marks[seq] > marks[-1] and self._noticed(marks[-1], self.marks[seq]):
                seqs.append(seq)
                marks.append(self.marks[seq])
        if last and self.given.ended:
            seqs.append(len(self.given.turns))
            marks.append(Track.END)
        track = Track(np.array(seqs, np.int64), np.array(marks, np.int64))
        return Track.from_bytes(track.to_bytes())

    def _noticed(self, before: int, after: int) -> bool:
        if not self.shape.thin:
            return True
        return any((after - o) // p > (before - o) // p for p, o in self.plan.boundaries)

    def _run_source(self, stage: Stage, epoch: int, start: int, stop: int) -> list[dict]:
        seqs = self.given.seqs(stage.name)
        here = np.flatnonzero((seqs >= start) & (seqs < stop))
        runners = self.sources[stage.id]
        outputs = []
        for i, runner in enumerate(runners):
            rows = here[i :: len(runners)]
            given = self.given.batches[stage.name]
            batch = conform(given, stage.ports["out"].schema, stage.name).take(pa.array(rows))
            batch = batch.select(stage.used["out"])
            arrays = [*batch.columns, pa.array(seqs[rows])]
            batch = pa.RecordBatch.from_arrays(arrays, schema=with_order(batch.schema, 1))
            outputs.append(runner.run_source(batch, epoch))
        return outputs

    def _run_keyed(self, stage: Stage, frames: Mapping, track: Track, epoch: int) -> list[dict]:
        self._check_inputs(stage, frames)
        outputs = []
        for site, runner in enumerate(self.keyed[stage.id]):
            inputs = []
            for exchange in stage.inputs:
                mine = [self._mine(b, exchange.keys, site) for b in frames[exchange.id]]
                inputs.append(self._shuffled(mine))
            for batches, exchange in zip(inputs, stage.inputs, strict=True):
                for batch in batches:
                    assert batch.schema.equals(exchange.schema), (batch.schema, exchange.schema)
            outputs.append(runner.run_keyed(inputs, track, epoch))
        return outputs

    def _check_inputs(self, stage: Stage, frames: Mapping) -> None:
        for position in {e.input for e in stage.inputs}:
            exchanges = [e for e in stage.inputs if e.input == position]
            batches = [b for e in exchanges for b in frames[e.id]]
            _require_unique_order(merge(batches, exchanges[0].schema), stage.name)

    def _mine(self, batch: pa.RecordBatch, keys: list[str], site: int) -> pa.RecordBatch:
        if batch.num_rows == 0:
            return batch
        part = partition_of(key_words([batch.column(k) for k in keys]), self.shape.partitions)
        return batch.take(pa.array(np.flatnonzero(np.array(self.owner)[part] == site)))

    def _shuffled(self, batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
        return self.random.sample(batches, len(batches))

    # --- moving state ----------------------------------------------------------------------------

    def _move(self) -> None:
        """All partitions get new owners."""
        before, old = self.owner, self.keyed
        if self.shape.fresh:
            self.sites = self.shape.sites_after
            self.keyed = {i: self._runners(self.plan.stages[i]) for i in old}
        self.owner = self._place()
        for stage, runners in old.items():
            for site, runner in enumerate(runners):
                self._move_from(runner, site, before, self.keyed[stage])

    def _move_from(
        self, runner: StageRunner, site: int, before: list[int], to: list[StageRunner]
    ) -> None:
        operator = runner.operator
        assert operator is not None
        if self.shape.fresh:
            self.result.late_rows += operator.late_rows
            self.result.dead_rows += runner.dead_rows
        for target, receiver in enumerate(to):
            moving = [
                p
                for p, owner in enumerate(self.owner)
                if before[p] == site and owner == target and receiver is not runner
            ]
            state = {n: through_ipc(b) for n, b in operator.extract(moving).items()}
            if not self.shape.fresh:
                for table in operator.tables().values():
                    table.drop(moving)
            receiver.operator.install(state)


def through_ipc(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch as another process would get it."""
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, batch.schema) as writer:
        writer.write_batch(batch)
    return pa.ipc.open_stream(out.getvalue()).read_next_batch()


def _require_unique_order(batch: pa.RecordBatch, stage: str) -> None:
    """An order key that two rows share would leave their order to chance."""
    keys = list(zip(*(c.tolist() for c in order_of(batch)), strict=True))
    twice = [(a, b) for a, b in pairwise(keys) if a >= b]
    assert not twice, f"into {stage!r}: order keys not ascending: {twice[0]}"


def without_order(batch: pa.RecordBatch, *keep: str) -> pa.RecordBatch:
    names = [n for n in batch.schema.names if not is_order_name(n) or n in keep]
    return batch.select(names)


__all__ = [
    "Input",
    "Result",
    "Shape",
    "bits_of",
    "examples",
    "naive_marks",
    "rows_of",
    "run",
    "runs",
    "through_ipc",
    "without_order",
]
