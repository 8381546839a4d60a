"""A sink's copies: when an epoch waits, and what becomes durable without another one."""

import pyarrow as pa
import pytest

from holdfast import Flow, SinkError, rows
from holdfast.flow.plan import plan
from holdfast.flow.sinks import Authority, Sink, SinkWriter
from holdfast.site.egress import Egress

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


def test_a_copy_that_does_not_lead_never_waits(sink: Slow, egress: Egress) -> None:
    sink.taken = 7
    egress.take(0, ROWS)
    assert egress.ready and [e for e, _ in egress.held] == [0]


def test_rows_become_durable_though_none_follow(sink: Slow, egress: Egress) -> None:
    egress.begin()
    egress.take(0, ROWS)
    egress.tend()
    assert (egress.durable, len(egress.held)) == (-1, 1)
    sink.reached = 0
    egress.tend()
    assert (egress.durable, egress.held) == (0, [])


def test_what_goes_wrong_is_heard_of_though_no_row_follows(sink: Slow, egress: Egress) -> None:
    egress.begin()
    egress.take(0, ROWS)
    sink.error = SinkError("the disk is full")
    with pytest.raises(SinkError, match="full"):
        egress.tend()


def test_a_sink_is_left_alone_by_whoever_leaves(sink: Slow, egress: Egress) -> None:
    egress.abandon()
    assert not sink.over, "it never had a writer"
    egress.begin()
    egress.abandon()
    assert sink.over
