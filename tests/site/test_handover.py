"""A task that is handed over goes on, at its new site, to the same results as at the old one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from holdfast import Flow, KeyedFunction, col
from holdfast import functions as F
from holdfast.api.streams import Stream
from holdfast.connectors.sources import Position, Source, SplitReader
from holdfast.core.effects import HandOver, IngestEpochs, ProcessBundles
from holdfast.core.events import CatchUpOrdered, ReplicaInstalled
from holdfast.core.exchange import Kept
from holdfast.core.ids import ExchangeId, GroupId, SiteId
from holdfast.core.layout import PartitionGroup, View
from holdfast.core.protection import ProtectionSpec
from holdfast.core.records import EpochRecord, Range
from holdfast.core.upstream import Gap
from holdfast.engine.batches import Track
from holdfast.net import wire
from holdfast.net.bundles import Frames, Router
from holdfast.plan.planner import Plan, plan
from holdfast.protections import passive, upstream
from holdfast.sinks import discard
from holdfast.site import handover
from holdfast.site.handover import Incoming, IncomingCheckpoint, Outgoing
from holdfast.site.node import SiteNode
from holdfast.site.stages import TaskRunner
from holdfast.site.stages import together as split_by_time
from holdfast.sources import rows
from holdfast.storage.files import Folder
from holdfast.storage.restore_point import RestorePoint, store_state, stored_state
from tests.support.task_runner import JOINER, OPTIONS, runner

EPOCHS, ROWS = 60, 5


def events() -> pa.RecordBatch:
    rng = np.random.default_rng(7)
    n = EPOCHS * ROWS
    return pa.record_batch(
        {
            "k": pa.array(rng.integers(0, 9, n)),
            "v": pa.array(rng.normal(size=n)),
            "s": pa.array(rng.choice(["a", "bb", "c"], n).tolist()),
            "ts": pa.array(np.cumsum(rng.integers(0, 4, n)) - rng.integers(0, 2, n)),
        }
    )


class Changes(KeyedFunction):
    """Emit the difference from the key's value before."""

    state = {"before": (pa.float64(), 0.0)}  # noqa: RUF012
    output = pa.schema([("change", pa.float64())])

    def process(self, rows: Any, state: Any) -> Any:
        groups = rows.groups()
        value = rows["v"][groups.rows]
        before = np.empty_like(value)
        before[1:] = value[:-1]
        before[groups.starts] = state["before"][groups.slots]
        state["before"][groups.slots] = value[groups.lasts]
        order = np.argsort(groups.rows)
        return groups.rows[order], {"change": (value - before)[order]}


def timed(events: Stream, timeout: int = 60) -> Stream:
    """Spans that ended, and those that timed out."""
    spans = events.key_by("k").spans(
        start=col("v") > 0.5,
        end=col("v") < -1,
        emit={"k": col("k"), "s": F.at_start("s"), "ts": F.at_start("ts")},
        timeout=timeout,
    )
    both: Stream = spans.union(spans.expired)
    return both


KINDS: dict[str, Callable[[Stream], Stream]] = {
    "running": lambda s: s.key_by("k").agg(
        t=F.sum("v"), n=F.count(), f=F.first("s"), z=F.last("s")
    ),
    "row window": lambda s: s.key_by("k").window(rows=4).agg(m=F.max("v"), a=F.mean("v")),
    "time window": lambda s: s.key_by("k").window(time=30, every=10, lateness=5).agg(n=F.count()),
    "tumbling": lambda s: (
        s.key_by("k").window(time=40, lateness=2).agg(t=F.sum("v"), f=F.first("s"))
    ),
    "spans": lambda s: s.key_by("k").spans(start=col("v") > 0.5, end=col("v") < 0, time="ts"),
    "timed spans": timed,
    "join": lambda s: s.key_by("k").join(
        s.select("k", "ts", w=col("v")).key_by("k"), within=6, lateness=5
    ),
    "custom": lambda s: s.key_by("k").apply(Changes()),
}


def read(source: TaskRunner, start: int, end: int) -> Range:
    """Read the source up to the row `end`; the range of an epoch that has these rows."""
    assert source.ingress is not None
    split = source.ingress.splits[0]
    assert split.read_to(end, 1_000)
    (block,) = [b for b in split.blocks() if b.start == start]
    return Range(0, 0, start, end, block.cut(end)[0].steps if block.end > end else block.steps)


def ingested(planned: Plan) -> list[dict[int, Frames]]:
    """What the source sends, epoch by epoch and by exchange."""
    source = runner(planned, 0, 1)
    assert source.ingress is not None
    made = []
    for epoch in range(EPOCHS):
        at = epoch * ROWS
        span = read(source, at, at + ROWS)
        over = epoch == EPOCHS - 1
        record = EpochRecord(
            epoch, at, (span,), idle=((0, 0),) if over else (), last=over, ended=over
        )
        (outputs,) = source.run(IngestEpochs((0, 0), (record,)))
        made.append({x: frames[GroupId(0)] for x, frames in outputs.items()})
    return made


def test_who_follows_a_source_goes_on_as_if_it_had_read_everything() -> None:
    flow = Flow("followed")
    source = flow.source("s", rows(events()), event_time="ts")
    source.key_by("k").window(time=10).agg(n=F.count()).sink("out", discard())
    planned = plan(flow)
    first, second = runner(planned, 0, 1), runner(planned, 0, 1)
    assert first.ingress is not None and second.ingress is not None
    for epoch in range(EPOCHS):
        at = epoch * ROWS
        idle = ((0, 0),) if epoch == 1 else ()
        record = EpochRecord(epoch, at, (read(first, at, at + ROWS),), idle=idle)
        (expected,) = first.run(IngestEpochs((0, 0), (record,)))
        if epoch < EPOCHS - 2:
            second.follow(record)
            assert second.ingress.save() == first.ingress.save()
        else:
            assert second.ingress.ready([record], 1_000)
            (found,) = second.run(IngestEpochs((0, 0), (record,)))
            for exchange, frames in expected.items():
                assert found[exchange][0].content == frames[0].content


def test_several_epochs_at_once_give_what_each_of_them_gives() -> None:
    """To several partition groups; with rows that steps leave out, double, or put aside."""

    def inverse(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.set_column(0, "k", pc.divide(720, batch["k"]))

    def twice(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray]:
        at = np.repeat(np.arange(batch.num_rows), 2)
        return batch.take(pa.array(at)), at

    flow = Flow("behind", on_error="dead-letter")
    source = flow.source("s", rows(events()), event_time="ts")
    made = source.filter(col("k") != 3).map(inverse, events().schema)
    made.flat_map(twice, events().schema).map(inverse, events().schema).union(source).key_by(
        "k"
    ).window(time=10).agg(n=F.count()).sink("out", discard())
    flow.dead_letters().sink("dead", discard())
    planned = plan(flow)
    groups = [PartitionGroup(0, 1, (0,)), PartitionGroup(1, 3, (0,)), PartitionGroup(3, 4, (0,))]
    routers = {
        ExchangeId(e.id): Router(
            e, groups if e.keys else [PartitionGroup(0, 1, (0,))], digests=True
        )
        for e in planned.exchanges
    }
    records = [
        EpochRecord(e, e * ROWS, (Range(0, 0, e * ROWS, (e + 1) * ROWS),)) for e in range(EPOCHS)
    ]
    records[2] = EpochRecord(2, 2 * ROWS, (), idle=((0, 0),))  # and one without rows
    records[3] = EpochRecord(3, 2 * ROWS, (Range(0, 0, 2 * ROWS, 3 * ROWS),))
    one_by_one, together = (
        TaskRunner(planned, planned.stages[0], PartitionGroup(0, 1, (0,)), OPTIONS, routers)
        for _ in range(2)
    )
    for task in (one_by_one, together):
        assert task.ingress is not None and task.ingress.ready(records[:4], 1_000)
    expected = [one_by_one.run(IngestEpochs((0, 0), (r,)))[0] for r in records[:4]]
    found = together.run(IngestEpochs((0, 0), tuple(records[:4])))
    assert together.epoch == 3 and one_by_one.runner.dead_rows == together.runner.dead_rows > 0
    assert together.metrics()["rows_out"] == one_by_one.metrics()["rows_out"] > 0
    for one, other in zip(expected, found, strict=True):
        assert list(one) == list(other)
        for exchange, frames in one.items():
            assert {c: f.content for c, f in frames.items()} == {
                c: f.content for c, f in other[exchange].items()
            }


@pytest.mark.parametrize("at_once", [2, 7, 60])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_that_is_behind_gives_what_each_epoch_gives(kind: str, at_once: int) -> None:
    flow = Flow("behind")
    KINDS[kind](flow.source("events", rows(events()), event_time="ts")).sink("out", discard())
    planned = plan(flow)
    made = ingested(planned)
    one_by_one, together = runner(planned, 1, 4), runner(planned, 1, 4)
    for task in (one_by_one, together):
        task.protect(ProtectionSpec(level=1, rebuild_level=1))
    inputs = [{e.id: [frames[e.id]] for e in one_by_one.stage.inputs} for frames in made]
    expected, found, came_from = [], [], []
    for epoch, taken in enumerate(inputs):
        expected += one_by_one.run(ProcessBundles((1, 0), epoch, True, taken))
        came_from.append(one_by_one.came_from(epoch))
    for begin in range(0, EPOCHS, at_once):
        *earlier, last = inputs[begin : begin + at_once]
        epoch = begin + len(earlier)
        found += together.run(ProcessBundles((1, 0), epoch, True, last, tuple(earlier)))
        assert together.came_from(epoch) <= came_from[epoch], "state is not taken for younger"
    assert len(found) == EPOCHS and any(f[0].batch.num_rows for o in found for f in o.values())
    for one, other in zip(expected, found, strict=True):
        assert list(one) == list(other)
        for exchange, frames in one.items():
            assert frames[GroupId(0)].content == other[exchange][GroupId(0)].content
    if one_by_one.operator is not None:
        assert one_by_one.operator.state_rows() == together.operator.state_rows()  # type: ignore[union-attr]


def test_time_that_passes_at_the_end_of_an_epoch_ends_what_goes_together() -> None:
    flow = Flow("idle")
    source = flow.source("s", rows(events()), event_time="ts")
    source.key_by("k").window(time=10).agg(n=F.count()).sink("out", discard())
    frames = [made[0] for made in ingested(plan(flow))[:4]]
    still, track = frames[1].batch.slice(0, 0), frames[1].track
    beyond = int(frames[2].batch.column("__o0")[0].as_py())
    at_the_end = Track(np.append(track.seqs, beyond), np.append(track.marks, track.final + 99))
    ends = Frames(frames[1].batch, at_the_end, None)
    order = ProcessBundles(
        (1, 0), 3, True, {0: [frames[3]]}, tuple({0: [f]} for f in (frames[0], ends, frames[2]))
    )
    parts = [(o.first, o.epoch, begins) for o, begins in split_by_time(order)]
    assert [(first, last) for first, last, _ in parts] == [(0, 1), (2, 3)]
    nothing = {0: [Frames(still, Track.flat(0), None)]}
    quiet = ProcessBundles((1, 0), 1, True, {0: [frames[0]]}, (nothing,))
    assert [(o.first, o.epoch) for o, _ in split_by_time(quiet)] == [(0, 1)]


def processed(task: TaskRunner, epoch: int, frames: dict[int, Frames]) -> list[pa.RecordBatch]:
    inputs = {e.id: [frames[e.id]] for e in task.stage.inputs}
    (outputs,) = task.run(ProcessBundles((task.stage.id, 0), epoch, True, inputs))
    return [outputs[x][GroupId(0)].batch for x in sorted(outputs)]


def handed(
    planned: Plan,
    task: TaskRunner,
    epoch: int,
    kept: Any = None,
    between: Callable[[], object] = lambda: None,
    after: int | None = None,
    standby: TaskRunner | None = None,
) -> tuple[TaskRunner, ReplicaInstalled]:
    """Give the task's state to a fresh one, or what has changed to standby; `between`
    happens between the parts."""
    key = (task.stage.id, 0)
    gaps = {x: dict.fromkeys(lanes, Gap(-1, -1, -1, 0, {})) for x, lanes in (kept or {}).items()}
    outgoing = Outgoing(HandOver(key, JOINER, epoch, kept or {}, gaps, after), task)
    new = standby or runner(planned, task.stage.id, task.group.end)
    incoming: Incoming | None = None
    while (part := outgoing.next()) is not None:
        between()
        message, body = part
        again = wire.decode(wire.encode(message)[wire.PREFIX.size :])
        data = memoryview(b"".join(bytes(memoryview(b)) for b in body or []))
        if isinstance(again, wire.HandOverBegin):
            incoming = (IncomingCheckpoint if standby else Incoming)(again, 0, new)
        elif isinstance(again, wire.HandOverEnd):
            assert incoming is not None
            assert outgoing.nbytes_left == 0
            return new, incoming.install(key)
        else:
            assert incoming is not None
            incoming.take(planned, again, data)
    raise AssertionError("the end was not said")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", [0, 9, 30])
def test_an_operator_goes_on_as_if_nothing_had_happened(
    kind: str, when: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "PART_BYTES", 64)  # many parts
    flow = Flow("one")
    KINDS[kind](flow.source("events", rows(events()), event_time="ts")).sink("out", discard())
    planned = plan(flow)
    sent = ingested(planned)
    old = runner(planned, 1, OPTIONS.partitions)
    for epoch in range(when):
        processed(old, epoch, sent[epoch])
    # The old replica goes on while it gives its state out.
    rest = iter(range(when, EPOCHS))
    ahead: list[list[pa.RecordBatch]] = []

    def work() -> None:
        for epoch in rest:
            ahead.append(processed(old, epoch, sent[epoch]))
            break

    new, installed = handed(planned, old, when - 1, between=work)
    for epoch in rest:
        ahead.append(processed(old, epoch, sent[epoch]))
    assert installed.epoch == new.epoch == when - 1
    found = [processed(new, epoch, sent[epoch]) for epoch in range(when, EPOCHS)]
    assert sum(b.num_rows for epoch in ahead for b in epoch) > 0
    for epoch, (wanted, got) in enumerate(zip(ahead, found, strict=True), when):
        assert all(a.equals(b) for a, b in zip(wanted, got, strict=True)), f"epoch {epoch}"
    assert (new.rows_in, new.rows_out, new.calls) == (old.rows_in, old.rows_out, old.calls)
    assert new.metrics()["late_rows"] == old.metrics()["late_rows"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_standby_goes_on_from_its_last_checkpoint(kind: str, monkeypatch) -> None:
    """It gets only what has changed, while the other goes on; and in the end steps in."""
    monkeypatch.setattr(handover, "PART_BYTES", 64)
    flow = Flow("one", protect=passive())
    KINDS[kind](flow.source("events", rows(events()), event_time="ts")).sink("out", discard())
    planned = plan(flow)
    sent = ingested(planned)
    old, new = (runner(planned, 1, OPTIONS.partitions) for _ in range(2))
    rest = iter(range(EPOCHS))
    made: list[list[pa.RecordBatch]] = []

    def work() -> None:
        for epoch in rest:
            made.append(processed(old, epoch, sent[epoch]))
            break

    given = -1
    for until in (3, 11, 12, 30, 41):
        while len(made) <= until:
            work()
        epoch = len(made) - 1
        handed(planned, old, epoch, between=work, after=given, standby=new)
        given = epoch
    for _ in rest:
        made.append(processed(old, len(made), sent[len(made)]))
    assert 41 <= new.epoch == given < EPOCHS - 1
    for epoch in range(given + 1, EPOCHS):
        got = processed(new, epoch, sent[epoch])
        assert all(a.equals(b) for a, b in zip(made[epoch], got, strict=True)), f"epoch {epoch}"
    assert new.metrics()["late_rows"] == old.metrics()["late_rows"]


@pytest.mark.parametrize("kind", ["time window", "tumbling", "timed spans", "join"])
def test_what_an_operator_knows_comes_from_where_it_says(kind: str) -> None:
    """From there on, a fresh one gives the same after that epoch; and it is not the beginning."""
    flow = Flow("one", protect=upstream())
    KINDS[kind](flow.source("events", rows(events()), event_time="ts")).sink("out", discard())
    planned = plan(flow)
    sent = ingested(planned)
    old = runner(planned, 1, OPTIONS.partitions)
    made, needs = [], []
    for epoch in range(EPOCHS):
        made.append(processed(old, epoch, sent[epoch]))
        needs.append(old.came_from(epoch))
    assert needs[10] < 10 and needs[40] > 20 and needs == sorted(needs)
    for epoch in range(0, EPOCHS - 1, 7):
        new = runner(planned, 1, OPTIONS.partitions)
        again = {e: processed(new, e, sent[e]) for e in range(needs[epoch] + 1, EPOCHS)}
        for later in range(epoch + 1, EPOCHS):
            assert all(a.equals(b) for a, b in zip(made[later], again[later], strict=True)), later


def test_of_spans_only_those_are_held_that_are_open_and_only_as_of_their_last_start() -> None:
    """In each epoch one key starts again, two others start, and two of the last epoch end."""
    at = np.arange(EPOCHS * ROWS)
    epoch_of, place = at // ROWS, at % ROWS
    key = np.where(place == 0, -9, 2 * (epoch_of - (place > 2)) + place % 2)
    columns = {"k": key, "v": np.where(place > 2, -2.0, 1.0), "s": ["s"] * at.size, "ts": at}
    flow = Flow("one", protect=upstream())
    source = flow.source("events", rows(pa.record_batch(columns)), event_time="ts")
    timed(source, timeout=10 * at.size).sink("out", discard())
    planned = plan(flow)
    task = runner(planned, 1, OPTIONS.partitions)
    for epoch, frames in enumerate(ingested(planned)[:-1]):
        ended, expired = processed(task, epoch, frames)
        assert task.operator is not None and expired.num_rows == 0
        assert ended.num_rows == (2 if epoch else 0)
        assert (task.operator.state_rows(), task.came_from(epoch)) == (3, epoch - 1)


def test_a_source_is_read_on_from_where_the_epochs_are() -> None:
    """Rows that were read and are in no epoch yet are read again by the new replica."""
    flow = Flow("one")
    KINDS["time window"](flow.source("events", rows(events()), event_time="ts")).sink(
        "out", discard()
    )
    planned = plan(flow)
    old = runner(planned, 0, 1)
    assert old.ingress is not None
    old.ingress.splits[0].read(100)
    records = [EpochRecord(e, 40 * e, (Range(0, 0, 40 * e, 40 * e + 40),)) for e in range(3)]
    for record in records[:2]:
        old.run(IngestEpochs((0, 0), (record,)))
    new, _ = handed(planned, old, 1)
    assert new.ingress is not None
    for task in (old, new):
        assert task.ingress is not None and task.ingress.ready([records[2]], 7)
    (one,), (other,) = (u.run(IngestEpochs((0, 0), (records[2],))) for u in (old, new))
    for exchange, by_group in one.items():
        assert all(f.content == other[exchange][c].content for c, f in by_group.items())


class Gaps(Source):
    """Row n is at place n * n, so nobody finds it by counting; a read stops at every 16th row."""

    schema = events().schema

    def open(self, split: int, offset: int = 0, position: Position | None = None) -> SplitReader:
        assert offset == 0 or position is not None, "only the first row is found without help"
        return GapsReader(offset, position or {"row": 0, "place": 0})


class GapsReader(SplitReader):
    def __init__(self, offset: int, position: Position) -> None:
        assert position["place"] == position["row"] ** 2 and position["row"] <= offset
        self._next = offset

    def read(self, rows_max: int, *, due: bool = False) -> pa.RecordBatch | None:
        batch = events().slice(self._next, min(rows_max, 16 - self._next % 16))
        self._next += batch.num_rows
        return batch

    def position(self) -> Position:
        row = self._next // 16 * 16
        return {"row": row, "place": row * row}


@pytest.mark.parametrize("taken", [0, 1, 16, 20, 40, 48])
def test_a_source_with_gaps_is_found_again_by_its_position(taken: int) -> None:
    """Whether rows were read ahead or not, and wherever in a batch the epochs end."""
    flow = Flow("one")
    flow.source("events", Gaps()).sink("out", discard())
    planned = plan(flow)
    old = runner(planned, 0, 1)
    assert old.ingress is not None
    while old.ingress.splits[0].rows_held < 48:
        old.ingress.splits[0].read(13)
    spans = (Range(0, 0, 0, taken),) if taken else ()
    old.run(IngestEpochs((0, 0), (EpochRecord(0, 0, spans),)))
    new, _ = handed(planned, old, 0)
    assert new.ingress is not None
    following = EpochRecord(1, taken, (Range(0, 0, taken, taken + 30),))
    for task in (old, new):
        assert task.ingress is not None and task.ingress.ready([following], 7)
        ((frames,),) = (out.values() for out in task.run(IngestEpochs((0, 0), (following,))))
        assert frames[GroupId(0)].batch["v"].equals(events()["v"].slice(taken, 30))


def test_a_sink_gives_over_what_is_not_durable() -> None:
    flow = Flow("one")
    flow.source("events", rows(events())).sink("out", discard())
    planned = plan(flow)
    sent = ingested(planned)
    old = runner(planned, 1, 1)
    assert old.egress is not None
    for epoch in range(4):
        processed(old, epoch, sent[epoch])
    old.egress.drop_durable(1)
    new, _ = handed(planned, old, 3)
    assert new.egress is not None
    assert (new.egress.taken, new.egress.durable) == (3, old.egress.durable)
    assert [(e, b.num_rows) for e, b in new.egress.held] == [
        (e, b.num_rows) for e, b in old.egress.held
    ]
    for task in (old, new):
        processed(task, 4, sent[4])
        assert task.egress is not None
        task.egress.lead(1)
    assert old.egress.report() == new.egress.report()


def test_kept_bundles_come_along_with_what_they_say() -> None:
    flow = Flow("one")
    KINDS["running"](flow.source("events", rows(events()), event_time="ts")).sink("out", discard())
    planned = plan(flow)
    sent = ingested(planned)
    digests = np.arange(4, dtype=np.uint64)
    bundle = Frames(sent[0][0].batch, sent[0][0].track, digests)
    empty = Frames(bundle.batch.slice(0, 0), bundle.track, None)
    source = runner(planned, 0, 1)
    kept = {0: {0: [Kept(5, True, bundle), Kept(6, True, empty)], 1: []}}
    _, installed = handed(planned, source, 6, kept)
    one, other = installed.kept[0][0]
    assert (one.epoch, one.last, other.epoch, other.bundle.batch.num_rows) == (5, True, 6, 0)
    assert one.bundle.batch.equals(bundle.batch)
    assert one.bundle.checksum == bundle.checksum == 6
    assert one.bundle.track.to_bytes() == bundle.track.to_bytes()


def test_what_stands_by_begins_with_the_flows_past_like_what_computes(tmp_path) -> None:
    """And with nothing, if all of its state is about to come."""
    flow = Flow("one", protect=passive())
    KINDS["running"](flow.source("events", rows(events()), event_time="ts")).sink("out", discard())
    planned = plan(flow)
    old = runner(planned, 1, OPTIONS.partitions)
    old.protect(old.guard)
    for epoch, frames in enumerate(ingested(planned)[:9]):
        processed(old, epoch, frames)
    folder = Folder(str(tmp_path))
    store_state(folder, 1, old.operator.tables())
    restore_point = RestorePoint(str(tmp_path), 9, 9 * ROWS, b"", stored_state(folder), {})
    elsewhere = PartitionGroup(0, 1, (SiteId(0),))
    keyed = PartitionGroup(0, OPTIONS.partitions, (SiteId(0),), standbys=(SiteId(1),))
    view = View(0, 0, (SiteId(0), SiteId(1)), ((elsewhere,), (keyed,), (elsewhere,)))
    node = SiteNode(replace(planned, restore_point=restore_point), SiteId(1), OPTIONS, Silence())
    node.on_view(view)
    by_key = [("__low", "ascending")]
    tables = (u.operator.extract()["groups"] for u in (node.stages.tasks[1, 0], old))
    found, wanted = (pa.Table.from_batches([t]).sort_by(by_key) for t in tables)
    assert found.equals(wanted) and wanted.num_rows > 0
    node.stages.open((1, 0), view, begins=False)
    assert node.stages.tasks[1, 0].operator.state_rows() == 0


def joining(term: int, number: int, since: int) -> View:
    """Site 0 has everything, and site 1 joins its keyed stage."""
    alone = PartitionGroup(0, 1, (SiteId(0),))
    keyed = PartitionGroup(0, OPTIONS.partitions, (SiteId(0),)).joined_by(SiteId(1), since)
    return View(term, number, (SiteId(0), SiteId(1)), ((alone,), (keyed,), (alone,)))


class Told:
    """A transport that remembers what the controller was told of replicas."""

    def __init__(self) -> None:
        self.replicas: list[tuple[int, int, str]] = []

    def send(self, site: int, message: wire.Message, body: Any = None) -> None: ...

    def tell(self, message: wire.Message) -> None:
        if isinstance(message, wire.ReplicaReport):
            report = message.report
            self.replicas.append((report.site, report.number, report.phase))

    def taken(self) -> list[tuple[int, int, str]]:
        found, self.replicas = self.replicas, []
        return found


def one_keyed_stage() -> Plan:
    flow = Flow("one")
    KINDS["running"](flow.source("events", rows(events()), event_time="ts")).sink("out", discard())
    return plan(flow)


def test_a_donor_reports_a_failed_replica_until_a_view_has_given_it_up() -> None:
    """The controller that heard of it may die before it has committed the next view."""
    told = Told()
    node = SiteNode(one_keyed_stage(), SiteId(0), OPTIONS, told)
    node.on_view(joining(0, 2, since=2))
    order = CatchUpOrdered((1, 0), 1)
    node.receive(SiteId(-1), wire.CatchUp(0, order), memoryview(b""))  # without a connection
    assert told.taken() == [(1, 2, "failed")]
    node.on_view(joining(1, 3, since=2))
    node.report_again()
    assert told.taken() == [(1, 3, "failed")]
    node.receive(SiteId(-1), wire.CatchUp(1, order), memoryview(b""))
    assert told.taken() == [(1, 3, "failed")]
    node.on_view(joining(1, 4, since=4))  # another attempt
    node.report_again()
    assert told.taken() == []
    node.on_connected(SiteId(1))
    node.receive(SiteId(-1), wire.CatchUp(1, order), memoryview(b""))
    assert told.taken() == [] and ((1, 0), 1) in node.transfers.outgoing
    node.on_lost(SiteId(1))
    assert told.taken() == [(1, 4, "failed")]
    node.report_again()
    assert told.taken() == [(1, 4, "failed")]


def test_a_joiner_reports_a_failed_replica_until_it_is_handed_over_again() -> None:
    told = Told()
    node = SiteNode(one_keyed_stage(), SiteId(1), OPTIONS, told)
    node.on_view(joining(0, 2, since=2))
    node.on_connected(SiteId(0))
    begin = wire.HandOverBegin((1, 0), 5, 0, {}, None, {}, joined_view=2)
    earlier = wire.HandOverBegin((1, 0), 5, 0, {}, None, {}, joined_view=1)
    node.receive(SiteId(0), earlier, memoryview(b""))
    assert not node.transfers.incoming, "for a replica that was here before"
    node.receive(SiteId(0), begin, memoryview(b""))
    assert (1, 0) in node.transfers.incoming
    node.on_lost(SiteId(0))
    assert told.taken() == [(1, 2, "failed")]
    node.report_again()
    assert told.taken() == [(1, 2, "failed")]
    node.on_connected(SiteId(0))
    node.receive(SiteId(0), begin, memoryview(b""))
    node.report_again()
    assert told.taken() == []


class Silence:
    """A transport that takes nothing anywhere."""

    def send(self, site: int, message: wire.Message, body: Any = None) -> None: ...

    def tell(self, message: wire.Message) -> None: ...
