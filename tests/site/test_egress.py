"""A sink's replicas: when an epoch waits, and what becomes durable without another one."""

from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from holdfast import Flow, FlowError, SinkError
from holdfast.connectors.sinks import Authority, Sink, SinkWriter
from holdfast.plan.planner import plan
from holdfast.sinks import outlet
from holdfast.site.egress import Egress
from holdfast.sources import rows
from holdfast.storage.files import Folder
from holdfast.storage.restore_point import Kind, RestorePoint, Stored

ROWS = pa.record_batch({"n": [1, 2]})


class Slow(Sink, SinkWriter):
    """Makes rows durable when it is told to, and has room for one epoch that is not."""

    def __init__(self) -> None:
        self.taken = self.reached = -1
        self.error: Exception | None = None
        self.over = False

    def open(self, whose: Authority, schema: pa.Schema) -> SinkWriter:
        return self

    def write(self, epoch: int, batch: pa.RecordBatch) -> None:
        self.taken = epoch

    def commit(self, epoch: int) -> int:
        if self.error is not None:
            raise self.error
        return self.reached

    def room(self) -> bool:
        return self.taken <= self.reached

    def abandon(self) -> None:
        self.over = True


@pytest.fixture
def sink() -> Slow:
    return Slow()


@pytest.fixture
def egress(sink: Slow) -> Egress:
    flow = Flow("f")
    flow.source("s", rows(ROWS)).sink("out", sink)
    return Egress("f", plan(flow).sinks[0])


def test_an_epoch_waits_while_the_sink_has_no_room(sink: Slow, egress: Egress) -> None:
    egress.begin()
    assert egress.ready
    egress.take(0, ROWS)
    assert not egress.ready
    sink.reached = 0
    assert egress.ready


def test_a_replica_that_does_not_lead_never_waits(sink: Slow, egress: Egress) -> None:
    sink.taken = 7
    egress.take(0, ROWS)
    assert egress.ready and [e for e, _ in egress.held] == [0]


def test_rows_become_durable_though_none_follow(sink: Slow, egress: Egress) -> None:
    egress.begin()
    egress.take(0, ROWS)
    egress.flush_notes()
    assert (egress.durable, len(egress.held)) == (-1, 1)
    sink.reached = 0
    egress.flush_notes()
    assert (egress.durable, egress.held) == (0, [])


def test_an_epoch_without_rows_is_safe_though_it_is_not_durable(sink: Slow, egress: Egress) -> None:
    egress.begin()
    for epoch in (0, 1):
        egress.take(epoch, ROWS.slice(2))
    assert (egress.durable, egress.safe, egress.held) == (-1, 1, [])
    egress.take(2, ROWS)
    egress.take(3, ROWS.slice(2))
    assert egress.safe == 1 and [e for e, _ in egress.held] == [2]
    egress.drop_durable(2)
    assert (egress.durable, egress.safe, egress.held) == (2, 3, [])


def test_a_reader_gets_past_epochs_without_rows_and_nobody_holds_them() -> None:
    """Behind a filter there may be very many until a reader comes."""
    flow = Flow("f")
    flow.source("s", rows(ROWS)).sink("out", outlet())
    egress = Egress("f", plan(flow).sinks[0])
    egress.begin()
    egress.take(0, ROWS.slice(2))
    assert (egress.held, egress.safe, egress.is_drained) == ([], 0, False)
    answer, _ = egress.answer({"do": "latest", "reader": "r", "after": -1, "rows": -1})
    assert answer["epoch"] == 0 and not egress.is_drained
    egress.answer({"do": "commit", "reader": "r", "epoch": 0})
    assert egress.is_drained


def test_what_goes_wrong_is_heard_of_though_no_row_follows(sink: Slow, egress: Egress) -> None:
    egress.begin()
    egress.take(0, ROWS)
    sink.error = SinkError("the disk is full")
    with pytest.raises(SinkError, match="full"):
        egress.flush_notes()


def test_a_sink_is_left_alone_by_whoever_leaves(sink: Slow, egress: Egress) -> None:
    egress.abandon()
    assert not sink.over, "it never had a writer"
    egress.begin()
    egress.abandon()
    assert sink.over


# --- what the store must have ---------------------------------------------------------------------


class Asked(Slow):
    """Notes in whose name, and after which epoch, it is gone on with."""

    whose: Authority
    after: int

    def go_on(self, whose: Authority, schema: pa.Schema, durable: int) -> SinkWriter:
        self.whose, self.after = whose, durable
        return self

    def resume(self, whose: Authority, schema: pa.Schema, durable: int) -> tuple[SinkWriter, int]:
        self.whose, self.after = whose, durable
        return self, durable


def stopped(place: Path, sink: Slow, **more: object) -> RestorePoint:
    """A flow that has taken epochs 0 to 4; its store has confirmed epoch 2, and then came no
    rows."""
    flow = Flow("f")
    flow.source("s", rows(ROWS)).sink("out", sink)
    (stage,) = plan(flow).sinks
    egress = Egress("f", stage, "first")
    egress.begin()
    for epoch in range(5):
        egress.take(epoch, ROWS if epoch < 3 else ROWS.slice(2))
    sink.reached = 2
    egress.close()
    stored = Stored(msgspec.msgpack.encode(egress.save()))
    named = {"kind": Kind.STOPPED, "sources": {0: b""}, "sinks": {stage.id: stored}} | more
    return RestorePoint(str(place), 5, 10, b"", {}, {}, **named)


def egress_of(sink: Sink, incarnation: str, restore_point: RestorePoint) -> Egress:
    flow = Flow("f")
    flow.source("s", rows(ROWS)).sink("out", sink)
    egress = Egress("f", plan(flow).sinks[0], incarnation, restore_point)
    egress.recover(restore_point)
    return egress


def test_a_flow_that_goes_on_knows_what_the_stopped_one_was_told(tmp_path: Path) -> None:
    """The store was told of no epoch after the last one with rows."""
    sink = Asked()
    egress_of(sink, "second", stopped(tmp_path, sink)).begin(1)
    assert sink.after == sink.whose.after == 4 and sink.whose.before == ("first", 2)
    assert sink.whose.confirmed(4) is None, "the store may not know this one yet"
    assert sink.whose.confirmed(5) == 5


def test_whoever_leads_before_anybody_has_written_expects_nothing(tmp_path: Path) -> None:
    sink = Asked()
    egress_of(sink, "second", stopped(tmp_path, sink)).lead(2)
    assert sink.whose.confirmed(sink.after) is None


def test_a_flow_that_was_lost_expects_what_it_was_told_last(tmp_path: Path) -> None:
    sink = Asked()
    lost = {
        "kind": Kind.RUNNING,
        "every_ms": 100,
        "incarnation": "first",
        "flow": "f",
        "generation": 1,
    }
    egress_of(sink, "second", stopped(tmp_path, sink, **lost)).begin(1)
    assert sink.whose.incarnation == "first" and sink.whose.confirmed(sink.after) == 2


def test_a_checkpoint_of_an_earlier_version_raises_no_false_alarm(tmp_path: Path) -> None:
    """It counted epochs without rows as durable, though the store was not told of them."""
    sink = Asked()
    lost = {"every_ms": 100, "incarnation": "first", "flow": "f", "generation": 1}
    restore_point = stopped(tmp_path, sink, **lost)
    ((stage, stored),) = restore_point.sinks.items()
    saved = msgspec.msgpack.decode(stored.saved)
    del saved["incarnation"]
    saved["durable"] = 4
    restore_point.sinks[stage] = Stored(msgspec.msgpack.encode(saved))
    egress_of(sink, "second", restore_point).begin(1)
    assert sink.after == 4 and sink.whose.confirmed(4) is None and sink.whose.confirmed(5) == 5


# --- a flow with a past --------------------------------------------------------------------------


class Log(Slow):
    """Keeps what it is given, and all of it is durable up to the epoch it was told."""

    def __init__(self, replicated: bool = False) -> None:
        super().__init__()
        self.replicated = replicated
        self.rows: list[tuple[int, list[int]]] = []

    def write(self, epoch: int, batch: pa.RecordBatch) -> None:
        super().write(epoch, batch)
        self.rows.append((epoch, batch.column("n").to_pylist()))

    def resume(self, whose: Authority, schema: pa.Schema, durable: int) -> tuple[SinkWriter, int]:
        return self, self.reached


def with_restore_point(log: Log, place: Path, epochs: int = 4) -> Egress:
    """A sink that gets the rows ``[0, 1]``, ``[2, 3]``, ... and then an epoch without any."""
    flow = Flow("f")
    flow.source("s", rows(ROWS)).sink("out", log)
    (stage,) = plan(flow).sinks
    files = [f"results/{n}.arrow" for n in range(epochs - 1)]
    for n, file in enumerate(files):
        stored = pa.record_batch({"n": [2 * n, 2 * n + 1], "__o0": [2 * n, 2 * n + 1]})
        Folder(str(place)).write(file, [stored])
    restore_point = RestorePoint(str(place), epochs, 2 * epochs, b"", {}, {stage.id: files})
    return Egress("f", stage, restore_point=restore_point)


STORED = [(0, [0, 1]), (1, [2, 3]), (2, [4, 5]), (3, [])]


def test_what_is_stored_comes_first_and_no_faster_than_there_is_room(tmp_path: Path) -> None:
    log = Log()
    egress = with_restore_point(log, tmp_path)
    egress.begin()
    for epoch in range(4):
        assert not egress.ready and not egress.is_drained
        egress.replay_results()
        egress.replay_results()
        assert log.rows == STORED[: epoch + 1], "one at a time"
        log.reached = epoch
    assert egress.ready and egress.is_drained
    egress.replay_results()
    egress.take(4, ROWS)
    assert log.rows == [*STORED, (4, [1, 2])]


def test_whoever_leads_next_goes_on_with_what_is_stored(tmp_path: Path) -> None:
    """One that did not lead has taken later epochs meanwhile: they wait."""
    log = Log()
    egress = with_restore_point(log, tmp_path)
    assert egress.ready and egress.is_drained, "another one leads"
    egress.replay_results()
    egress.take(4, ROWS)
    assert log.rows == []
    log.reached = log.taken = 1
    egress.lead(1)
    assert log.rows == [] and not egress.ready
    assert [e for e, _ in egress.held] == [4], "a new replica would get it"
    egress.replay_results()
    log.reached = 2
    assert log.rows == STORED[2:3]
    egress.replay_results()
    assert log.rows == [*STORED[2:], (4, [1, 2])]
    log.reached = 4
    egress.flush_notes()
    assert egress.held == [] and egress.durable == 4


class Told(Log):
    """Believes what it is told: everything up to the epoch that is committed is durable."""

    def commit(self, epoch: int) -> int:
        self.reached = max(self.reached, epoch)
        return self.reached


def test_what_is_stored_is_not_said_to_be_written_before_it_is(tmp_path: Path) -> None:
    """A new leader has later epochs, which wait, and is tended to before it recalls any."""
    log = Told()
    egress = with_restore_point(log, tmp_path)
    egress.take(4, ROWS)
    egress.lead(1)
    egress.flush_notes()
    assert log.reached == -1 and egress.durable == -1
    while not egress.ready:
        egress.replay_results()
        egress.flush_notes()
    assert log.rows == [*STORED, (4, [1, 2])] and egress.durable == 4


def test_an_egress_is_not_finished_before_its_sink_is(sink: Slow, egress: Egress) -> None:
    """Epochs without rows count: whoever goes on later expects the sink to have come so far."""
    egress.take(0, ROWS)
    assert egress.finish(), "another one leads"
    committed: list[int] = []
    sink.commit = lambda epoch: committed.append(epoch) or sink.reached  # type: ignore[method-assign]
    sink.finish = lambda: sink.reached >= committed[-1]  # type: ignore[method-assign]
    egress.lead(1)
    egress.take(1, ROWS.slice(2))
    assert not egress.finish() and committed[-1] == 1
    sink.reached = 1
    assert egress.finish() and egress.held == []


def test_a_replica_that_was_made_of_a_leader_replays_nothing_twice(tmp_path: Path) -> None:
    one, other = Log(), Log()
    old, new = with_restore_point(one, tmp_path), with_restore_point(other, tmp_path)
    old.begin()
    for _ in range(4):
        old.replay_results()
        one.taken = -1  # there is room, but nothing becomes durable
    old.take(4, ROWS)
    new.restore(old.save(), old.held)
    new.lead(1)
    while not new.ready:
        new.replay_results()
        other.taken = -1
    assert other.rows == [*STORED, (4, [1, 2])]


def test_every_replica_of_a_replicated_sink_replays(tmp_path: Path) -> None:
    one, other = Log(replicated=True), Log(replicated=True)
    old, new = with_restore_point(one, tmp_path), with_restore_point(other, tmp_path)
    one.reached = other.reached = 9
    old.replay_results()
    assert one.rows == STORED[:1] and not old.ready
    new.restore(old.save(), old.held)
    for _ in range(5):
        new.replay_results()
    assert other.rows == STORED[1:] and new.ready


def test_a_past_that_is_not_there_is_named(tmp_path: Path) -> None:
    egress = with_restore_point(Log(), tmp_path)
    (tmp_path / "results" / "0.arrow").unlink()
    egress.begin()
    with pytest.raises(FlowError, match=r"no restore point at .*: results/0.arrow is missing"):
        egress.replay_results()
