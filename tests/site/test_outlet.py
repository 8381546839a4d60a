"""A sink that is read where it is written: nothing is let go that a reader lacks."""

import threading

import pyarrow as pa
import pytest

from holdfast import Flow, FlowError, HostError, count, generator, outlet, pairs, sum_
from holdfast.flow.options import Options
from holdfast.flow.outlet import Outlet
from holdfast.flow.sinks import Authority, Sink
from holdfast.run import Run
from holdfast.site.reading import SinkReader, parse, url_of
from tests.site.test_pairs import (
    SCHEMA,
    copies,
    kill,
    numbers,
    one_line,
    until,
    until_protected,
)

ROWS = 90_000
WHOSE = Authority("flow", "out")


def batch(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"x": pa.array(values, pa.int64())})


HELD = [(0, batch(0, 1)), (1, batch()), (2, batch(2, 3, 4)), (3, batch(5))]


# --- the writer ---------------------------------------------------------------------------------


def test_what_all_readers_have_is_let_go() -> None:
    writer = Outlet().open(WHOSE, batch().schema)
    assert writer.commit(3) == -1, "nobody has read anything"
    assert writer.answer({"do": "begin", "latest": 0}, HELD) == ({"epoch": -1}, [])
    assert writer.answer({"do": "begin", "latest": 1}, HELD) == ({"epoch": 3}, [])
    writer.answer({"do": "commit", "reader": "b", "epoch": -1}, HELD)
    writer.answer({"do": "commit", "reader": "a", "epoch": 2}, HELD)
    assert writer.commit(3) == -1, "b lacks everything"
    writer.answer({"do": "commit", "reader": "b", "epoch": 1}, HELD)
    assert writer.commit(3) == 1
    assert writer.answer({"do": "begin", "latest": 0}, HELD[2:])[0] == {"epoch": 1}
    writer.answer({"do": "commit", "reader": "c", "epoch": 1}, HELD[2:])
    writer.answer({"do": "forget", "reader": "b"}, HELD[2:])
    writer.answer({"do": "forget", "reader": "c"}, HELD[2:])
    assert writer.commit(3) == 2


def test_nothing_is_let_go_before_all_readers_have_come_that_are_expected() -> None:
    writer = Outlet(readers=2).open(WHOSE, batch().schema)
    writer.commit(3)
    writer.answer({"do": "commit", "reader": "a", "epoch": 3}, HELD)
    assert writer.commit(3) == -1, "b is to have it, too"
    copy = Outlet(readers=2).open(WHOSE, batch().schema)
    copy.restore(writer.save())
    for one in (writer, copy):
        one.answer({"do": "commit", "reader": "a", "epoch": 3}, HELD)
        assert one.commit(3) == -1, "a is no other reader than before"
        one.answer({"do": "commit", "reader": "b", "epoch": 2}, HELD)
        assert one.commit(3) == 2
    with pytest.raises(FlowError, match="nobody would read"):
        outlet(readers=0)


def test_a_reader_goes_as_far_as_it_wants() -> None:
    writer = Outlet().open(WHOSE, batch().schema)
    writer.commit(3)

    def latest(after: int, rows: int) -> int:
        request = {"do": "latest", "reader": "a", "after": after, "rows": rows}
        return writer.answer(request, HELD)[0]["epoch"]

    assert latest(-1, -1) == 3
    assert latest(-1, 2) == 1 and latest(1, 1) == 2, "an epoch at least"
    assert latest(3, -1) == 3
    values, rows = writer.answer({"do": "read", "after": -1, "upto": 2}, HELD)
    assert values == {"epoch": 2} and [b.num_rows for b in rows] == [2, 3]
    assert writer.answer({"do": "read", "after": 3, "upto": 9}, HELD) == ({"epoch": 3}, [])


def test_nonsense_and_strangers_are_refused() -> None:
    writer = Outlet().open(WHOSE, batch().schema)
    writer.commit(3)
    with pytest.raises(FlowError, match="does not know how to 'dance'"):
        writer.answer({"do": "dance"}, HELD)
    writer.answer({"do": "commit", "reader": "a", "epoch": 2}, HELD)
    writer.commit(3)
    for late in ({"do": "read", "upto": 2}, {"do": "latest", "rows": -1, "reader": "b"}):
        with pytest.raises(FlowError, match="epoch 1 was let go"):
            writer.answer({"after": 0, **late}, HELD[3:])


def test_an_address_says_where_and_proves_who() -> None:
    url = url_of("a/b", b"secret", [("host", 1), ("::1", 2)])
    assert parse(url) == ("a/b", b"secret", [("host", 1), ("::1", 2)])
    for wrong in ("", "holdfast://xyz@h:1/f", "holdfast://00@h/f", "holdfast://00@h:1"):
        with pytest.raises(FlowError, match="not the address of a flow"):
            parse(wrong)


# --- on sites -----------------------------------------------------------------------------------


class Reading(threading.Thread):
    """Reads a sink to its end, and says epoch by epoch that it has the rows."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__(daemon=True)
        self._url, self.name = url, name
        self.rows: list[pa.RecordBatch] = []
        self.error: Exception | None = None
        self.epoch = -1
        self.start()

    def run(self) -> None:
        try:
            with SinkReader(self._url, "out") as reader:
                self._read(reader)
        except Exception as error:
            self.error = error

    def _read(self, reader: SinkReader) -> None:
        who = {"reader": self.name}
        self.epoch = reader.ask({"do": "begin", "latest": 0})[0]["epoch"]
        over = False
        while not over:
            latest = {"do": "latest", "after": self.epoch, "rows": -1, **who}
            upto = reader.ask(latest)[0]["epoch"]
            while self.epoch < upto:
                ask = {"do": "read", "after": self.epoch, "upto": upto}
                values, rows = reader.ask(ask)
                self.rows += rows
                self.epoch = values["epoch"]
            committed = reader.ask({"do": "commit", "epoch": self.epoch, **who})[0]
            over = bool(committed["over"])

    def table(self) -> pa.Table:
        self.join(120)
        assert self.error is None and not self.is_alive(), self.error
        return pa.Table.from_batches(self.rows)


def paced(sink: Sink) -> Flow:
    """Rows for three seconds, two copies of everything."""
    flow = Flow("line", protect=pairs(apart="process"))
    source = flow.source("numbers", generator(numbers, SCHEMA, rows=ROWS, rate=ROWS / 3))
    source.key_by("k").agg(t=sum_("v"), n=count()).sink("out", sink)
    return flow


def expected() -> pa.Table:
    """The same on one site, undisturbed."""
    run = one_line(outlet(), rows=ROWS).start(sites=1)
    table = Reading(run.url, "only").table()
    run.wait(60)
    return table


def begin(flow: Flow, kept: list[Run], **options: object) -> Run:
    run = flow.start(sites=3, partitions=6, options=Options(**options))  # type: ignore[arg-type]
    kept.append(run)
    return run


def test_readers_get_every_row_once_whoever_dies(kept: list[Run]) -> None:
    run = begin(paced(outlet()), kept)
    until_protected(run, 3)
    readers = [Reading(run.url, "one"), Reading(run.url, "other")]
    until(lambda: all(r.epoch >= 0 for r in readers), "both have begun")
    kill(run, copies(run)["out", 0][0])
    right = expected()
    assert all(reader.table().equals(right) for reader in readers)
    assert run.wait(60), "it ends when they have everything"


def test_a_flow_waits_for_its_readers(kept: list[Run]) -> None:
    run = begin(one_line(outlet(unread_bytes_max=50_000), rows=200_000), kept)
    until(lambda: run.sink_report("out").get("epoch", -1) >= 0, "there are results")
    reached = -1

    def stands() -> bool:
        nonlocal reached
        before, reached = reached, len(run.records())
        return before == reached

    until(stands, "nothing is taken in any more")
    assert not run.ended(0)
    assert Reading(run.url, "late").table().num_rows == 200_000
    assert run.wait(60)


def test_where_there_is_nothing_to_read(kept: list[Run]) -> None:
    run = begin(one_line(outlet()), kept)
    with pytest.raises(FlowError, match="has no sink 'uot', but \\['out'\\]"):
        SinkReader(run.url, "uot").ask({"do": "begin", "latest": 0})
    run.stop(drain=False)
    with pytest.raises(HostError, match="cannot find sink 'out'"):
        _ = SinkReader(run.url, "out").schema
