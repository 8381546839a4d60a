"""What sources find out before the start: once, though several applications start the flow."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast import Flow, OperatorError
from holdfast import functions as F
from holdfast.connectors.sources import Position, Source, SplitReader
from holdfast.control.bootstrap import resolved
from holdfast.control.hosting import Place
from holdfast.engine.batches import DECODE_ERROR
from holdfast.plan.planner import plan
from holdfast.sinks import discard, parquet

INCARNATION = "0123456789ab"
LEASE_S = 0.3


class Asked(Source):
    """Has another number of splits each time it is asked."""

    schema = pa.schema([("k", pa.int64())])

    def __init__(self, pause_s: float = 0.0) -> None:
        self.times, self.pause_s = 0, pause_s

    def resolve(self, replicas: int, known: Sequence[str] = ()) -> dict[str, int]:
        self.times += 1
        time.sleep(self.pause_s)
        return {"splits": self.times + 1}

    def resolved(self, values: dict[str, int]) -> Source:
        made = Asked()
        made.splits = values["splits"]
        return made


def asking(source: Source) -> Flow:
    flow = Flow("asking")
    flow.source("in", source).key_by("k").agg(n=F.count()).sink("out", discard())
    return flow


def test_it_is_asked_once_for_each_start() -> None:
    flow = asking(Asked())
    first = resolved(flow, Place(), INCARNATION, 1.0)
    second = resolved(flow, Place(), INCARNATION, 1.0)
    assert [len(plan(f).splits) for f in (flow, first, second)] == [1, 2, 3]


@pytest.mark.parametrize("pause_s", [0.0, 1.0])
def test_all_applications_go_by_what_the_first_has_found(tmp_path: Path, pause_s: float) -> None:
    """Also if it takes the first much longer than a lease."""
    source, found = Asked(pause_s), []
    place = Place(arbiter_url=f"file:{tmp_path}")

    def start() -> None:
        found.append(resolved(asking(source), place, INCARNATION, LEASE_S).resolved)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [{"in": {"splits": 2}}] * 4
    start()
    assert found[-1] == found[0], "also one that comes back later"
    other = resolved(asking(source), place, "ba9876543210", 1.0)
    assert other.resolved == {"in": {"splits": source.times + 1}}


# --- rows that could not be read ----------------------------------------------------------------


class Torn(Source):
    """Every fifth row cannot be read."""

    schema = pa.schema([pa.field("k", pa.int64(), nullable=False), ("ts", pa.int64())])
    has_decode_errors = True

    def open(self, split: int, offset: int = 0, position: Position | None = None) -> SplitReader:
        return TornReader(offset)


class TornReader(SplitReader):
    def __init__(self, offset: int) -> None:
        self._next = offset

    def read(self, rows_max: int, *, due: bool = False) -> pa.RecordBatch | None:
        at = range(self._next, min(self._next + min(rows_max, 7), 100))
        if not at:
            return None
        self._next = at.stop
        torn = [i % 5 == 4 for i in at]
        values = [None if t else i for i, t in zip(at, torn, strict=True)]
        decode_errors = [
            f'["no {i}", "row {i}"]' if t else None for i, t in zip(at, torn, strict=True)
        ]
        columns = [pa.array(values, pa.int64())] * 2 + [pa.array(decode_errors, pa.string())]
        return pa.RecordBatch.from_arrays(columns, ["k", "ts", DECODE_ERROR])


def test_rows_that_could_not_be_read_are_set_aside_and_move_no_watermark(kept_rows) -> None:
    flow = Flow("torn", on_error="dead-letter")
    read = flow.source("in", Torn(), event_time="ts")
    read.key_by("k").window(time=10).agg(n=F.count()).sink("windows", kept_rows("windows"))
    flow.dead_letters().sink("dead", kept_rows("dead"))
    flow.start(sites=2, partitions=4).wait(60)
    assert sorted(kept_rows.of("windows")["k"]) == [i for i in range(100) if i % 5 != 4]
    letters = kept_rows.of("dead")
    assert letters["error"] == [f"no {i}" for i in range(4, 100, 5)]
    assert letters["row"] == [f"row {i}" for i in range(4, 100, 5)]
    assert set(letters["stage"]) == {"in"} and set(letters["operator"]) == {"read"}


def test_such_a_row_stops_the_flow() -> None:
    flow = Flow("torn")
    flow.source("in", Torn()).key_by("k").agg(n=F.count()).sink("out", discard())
    with pytest.raises(OperatorError, match=r"operator 'read', epoch 0: no 4\n  at row: .*row 4"):
        flow.start(sites=1).wait(60)


@pytest.fixture
def kept_rows(tmp_path: Path):
    """Sinks that can be looked at afterwards."""

    class Kept:
        def __call__(self, name: str):
            return parquet(tmp_path / name)

        def of(self, name: str) -> dict[str, list]:
            return pq.read_table(tmp_path / name).to_pydict()

    return Kept()
