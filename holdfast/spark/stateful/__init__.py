"""Operators written for Spark, run as keyed operators of a flow.

PySpark's `StatefulProcessor` and the functions of `applyInPandasWithState` can observe how a stream
is divided into micro-batches. A flow's results must not depend on such a division. Here *every row
is a micro-batch of its own*, which is one of the divisions that Spark could choose: a call gets one
row of its key, and the watermark that results from the rows before it. Timers and timeouts fire
when the watermark advances, immediately after the row that advances it, as in the no-data batch
that Spark runs when it is idle. All of this is a function of the recorded order. Processing time is
not, so everything that needs it is refused.

The state of a key is a row of a table, as in any operator: its variables as bytes, its timers, and
the first timer in a separate column. A call reads the state of all its keys in one step, runs user
code key by key, and writes the state back in one step if nothing raised.
"""
