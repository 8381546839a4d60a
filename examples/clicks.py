"""Click streams: visits per page and minute, and which page visits end in a purchase.

holdfast run examples/clicks.py --host process --quiet --seconds 15

Prints large orders, and the visits of a page when its minute of event time is over. Revenue by
page is a table: ask for it with ``--http 127.0.0.1:9090`` at ``/tables/revenue``.
"""

import numpy as np
import pyarrow as pa

from holdfast import Flow, col, sinks, sources
from holdfast import functions as F

CLICKS = pa.schema([("user", pa.int32()), ("page", pa.int32()), ("ts", pa.int64())])
ORDERS = pa.schema([("user", pa.int32()), ("cents", pa.int64()), ("ts", pa.int64())])


def make_clicks(split: int, offset: int, n: int) -> pa.RecordBatch:
    """Ten clicks a millisecond; the same offsets always give the same clicks."""
    at = np.arange(offset, offset + n)
    user, page = at * 7_919 % 5_000, at * 104_729 % 40
    return pa.record_batch([user.astype("i4"), page.astype("i4"), at // 10], schema=CLICKS)


def make_orders(split: int, offset: int, n: int) -> pa.RecordBatch:
    """One order every 10 milliseconds."""
    at = np.arange(offset, offset + n)
    user, cents = at * 15_485_863 % 5_000, 500 + at * 31 % 9_500
    return pa.record_batch([user.astype("i4"), cents, at * 10], schema=ORDERS)


flow = Flow("clicks")
clicks = flow.source("clicks", sources.generator(make_clicks, CLICKS, rate=50_000), event_time="ts")
orders = flow.source("orders", sources.generator(make_orders, ORDERS, rate=500), event_time="ts")

per_minute = clicks.key_by("page").window(time=60_000, lateness=1_000).agg(visits=F.count())
per_minute.sink("visits per minute", sinks.console())

bought = clicks.key_by("user").join(orders.key_by("user"), within=2_000)
revenue = bought.select("page", "cents").key_by("page")
revenue.agg(orders=F.count(), cents=F.sum("cents"), latest=F.last("cents")).sink(
    "revenue", sinks.table("page")
)
orders.filter(col("cents") > 9_900).sink("large orders", sinks.console())
