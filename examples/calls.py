"""Call records: customers whose calls suddenly become much longer, with an operator of one's own.

holdfast run examples/calls.py --host process --quiet --seconds 5

Prints a line for each outlier.
"""

from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from holdfast import Flow, KeyedFunction, Rows, sinks, sources

CALLS = pa.schema([("customer", pa.string()), ("seconds", pa.float64())])


def make_calls(split: int, offset: int, n: int) -> pa.RecordBatch:
    at = np.arange(offset, offset + n)
    customer = pa.array([f"+49 30 {i}" for i in at % 997])
    seconds = 30.0 + at % 97 + np.where(at % 10_007 == 0, 5_000.0, 0.0)
    return pa.record_batch([customer, pa.array(seconds)], schema=CALLS)


class Outliers(KeyedFunction):
    """Emit a call that is more than ten times as long as the customer's average so far.

    The average moves by a tenth towards each call, call by call: so rounds over the ranks of a
    key's rows, each of which is one numpy operation over all keys.
    """

    state: ClassVar[dict[str, tuple[pa.DataType, Any]]] = {"average": (pa.float64(), np.nan)}
    output = pa.schema([("seconds", pa.float64()), ("average", pa.float64())])

    def process(self, rows: Rows, state: Any) -> tuple[np.ndarray, dict[str, Any]]:
        groups = rows.groups()
        seconds = rows["seconds"][groups.rows]
        before = np.empty_like(seconds)
        average = state["average"][groups.slots]
        for rank in range(int(groups.lengths.max())):
            has = groups.lengths > rank
            at = groups.starts[has] + rank
            before[at] = average[has]
            fresh = np.isnan(average[has])
            moved = average[has] + (seconds[at] - average[has]) / 10
            average[has] = np.where(fresh, seconds[at], moved)
        state["average"][groups.slots] = average
        found = np.sort(groups.rows[seconds > 10 * before])
        by_row = groups.scattered(before)
        return found, {"seconds": rows["seconds"][found], "average": by_row[found]}


flow = Flow("calls")
calls = flow.source("calls", sources.generator(make_calls, CALLS, rate=20_000))
calls.key_by("customer").apply(Outliers()).sink("outliers", sinks.console())
