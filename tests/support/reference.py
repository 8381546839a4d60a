"""What a flow's sinks must get, given the records of a live run: without ingress, and without cuts.

The rows of all sources are put into the recorded order, the watermark is worked out once over all
of them by a plain loop, and every stage runs once, on one site, over everything. Nothing of this
depends on how the live run was cut into epochs or spread over sites; what it gives, down to each
row's place in the order, must be the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from holdfast.connectors.sinks import Sink, discard
from holdfast.core.records import EpochRecord
from holdfast.engine.batches import is_order_name
from holdfast.lab.sim.world import World
from holdfast.plan.planner import Plan, Stage
from tests.support.harness import Input, Result, rows_of, run


class Ordered(type(discard())):  # type: ignore[misc]
    """A sink that keeps the order key, so that results can be compared row by row."""

    with_order = True


def ordered() -> Sink:
    return Ordered()


def recorded(p: Plan, records: Sequence[EpochRecord]) -> Input:
    """The rows of all sources in the order that was recorded."""
    turns: list[str] = []
    splits: list[int] = []
    taken: dict[str, list[pa.RecordBatch]] = {}
    idle: dict[int, list[list[tuple[str, int]]]] = {}
    rows = {s.id: [_all_rows(s, n) for n in range(_splits(s))] for s in p.sources}
    for s in p.sources:
        taken[s.name] = [rows[s.id][0].slice(0, 0)]
    for record in records:
        assert record.base == len(turns), "rows are numbered through"
        for r in record.ranges:
            name = p.stages[r.source].name
            taken[name].append(rows[r.source][r.split].slice(r.start, r.rows))
            turns += [name] * r.rows
            splits += [r.split] * r.rows
        if record.idle:
            # An epoch's idle splits let go behind its last row, or behind the one before it.
            idle.setdefault(len(turns) - 1, []).append(list(_places(p, record.idle)))
    batches = {name: pa.concat_batches(parts) for name, parts in taken.items()}
    return Input(batches, turns, splits, idle, ended=not records or records[-1].ended)


def _all_rows(stage: Stage, split: int) -> pa.RecordBatch:
    assert stage.source is not None
    reader = stage.source.open(split)
    empty = pa.RecordBatch.from_pylist([], schema=stage.source.schema)
    return pa.concat_batches([empty, *iter(lambda: reader.read(1_000, due=True), None)])


def _splits(stage: Stage) -> int:
    assert stage.source is not None
    return stage.source.splits


def _places(p: Plan, idle: Iterable[int | tuple[int, int]]) -> Iterable[tuple[str, int]]:
    """Records name sources, of which then all splits are idle, or single splits."""
    for entry in idle:
        if isinstance(entry, int):
            stage = p.stages[entry]
            yield from ((stage.name, n) for n in range(_splits(stage)))
        else:
            source, split = entry
            yield p.stages[source].name, split


def reference(p: Plan, records: Sequence[EpochRecord]) -> Result:
    """What the sinks get of these records."""
    return run(p, recorded(p, records))


def live(world: World) -> dict[str, list[tuple]]:
    """What the sinks got, by the rows' places in the order."""
    return {sink: _by_order(world.result(sink)) for sink in world.results}


def _by_order(table: pa.Table) -> list[tuple]:
    order = [name for name in table.schema.names if is_order_name(name)]
    assert order, "the sinks of this flow do not keep the order key; use ordered()"
    batches = table.sort_by([(name, "ascending") for name in order]).combine_chunks().to_batches()
    return rows_of(batches[0]) if batches else []


def check(world: World) -> Result:
    """Hold the results of a world that has ended to the reference; what that is."""
    right = reference(world.plan, world.records)
    if world.records and world.records[-1].ended:
        taken = sum(record.rows for record in world.records)
        there = sum(_all_rows(s, n).num_rows for s in world.plan.sources for n in range(_splits(s)))
        assert taken == there, f"{taken} rows of {there} were taken, in {len(world.records)} epochs"
    for sink, found in live(world).items():
        wanted = right.rows(sink)
        assert found == wanted, _difference(sink, found, wanted, world)
    return right


def _difference(sink: str, found: list[tuple], wanted: list[tuple], world: World) -> str:
    lost = [row for row in wanted if row not in found]
    extra = [row for row in found if row not in wanted]
    return (
        f"sink {sink!r} of {world.flow.name!r}: {len(found)} rows instead of {len(wanted)}; "
        f"lost {lost[:5]}, made up {extra[:5]}; {len(world.records)} epochs"
    )
