"""Small flows for the simulated world, and sinks that keep what they get."""

import numpy as np
import pyarrow as pa

from holdfast import Flow, col
from holdfast import functions as F
from holdfast.api.options import Options
from holdfast.core.sequencer import Budget
from holdfast.lab.sim.world import World
from holdfast.sinks import discard
from holdfast.sources import rows

SMALL = Options(
    partitions=7,
    budget=Budget(epoch_rows_max=64, epochs_in_flight_max=5, bytes_in_flight_max=1 << 20),
    window=2,
    block_rows=40,
    read_ahead_rows=120,
)


def events(n: int, seed: int = 1) -> pa.RecordBatch:
    rng = np.random.default_rng(seed)
    return pa.record_batch(
        {
            "k": pa.array(rng.integers(0, 17, n)),
            "g": pa.array(rng.integers(0, 5, n)),
            "v": pa.array(rng.normal(size=n)),
            "ts": pa.array(np.cumsum(rng.integers(0, 3, n))),
        }
    )


class Ordered(type(discard())):  # type: ignore[misc]
    """A sink that keeps the order key, so that results can be compared row by row."""

    with_order = True


def diamond(batches: list[pa.RecordBatch]) -> Flow:
    """One source, two keyed branches of different depth, one union, a stage on top."""
    flow = Flow("diamond")
    source = flow.source("events", rows(*batches), event_time="ts")
    totals = source.key_by("k").agg(x=F.sum("v")).select(k=col("k"), x=col("x"))
    means = source.key_by("g").agg(x=F.mean("v")).select(k=col("g"), x=col("x"))
    deeper = means.key_by("k").window(rows=3).agg(x=F.max("x"))
    totals.union(deeper).key_by("k").agg(top=F.max("x"), n=F.count()).sink("out", Ordered())
    windows = (
        source.key_by("g").window(time=20, every=10, lateness=5).agg(n=F.count(), s=F.sum("v"))
    )
    windows.sink("windows", Ordered())
    return flow


def result(world: World, sink: str) -> pa.Table:
    """The rows in sequence order; within an epoch that is how the sink gets them anyway."""
    table = world.result(sink)
    return table.sort_by([(n, "ascending") for n in table.schema.names if n.startswith("__o")])
