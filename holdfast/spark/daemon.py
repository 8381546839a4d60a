"""Spark's Python daemon with all that a site needs loaded before the first worker is forked.

Spark starts it on every executor if ``spark.python.daemon.module`` is ``holdfast.spark.daemon``,
as in all sessions that Holdfast makes. A site that replaces a dead one then starts in a few
milliseconds. Otherwise its worker first loads numpy, pyarrow, pandas and pyspark: about a second
of processor time, and just when the flow has least of it to spare.

Spark's own daemon loads nothing, because a fork takes only one thread along. The threads that
these packages start as they are loaded (OpenBLAS's and the memory allocator's) are made for that:
both libraries start again in a child.
"""

import gc
import sys

import pyarrow as pa
import pyspark.worker  # noqa: F401
from pyspark.daemon import manager

import holdfast.spark.host  # noqa: F401

if __name__ == "__main__":
    pa.array([0])  # only now pyarrow imports pandas
    # Every task begins with ``importlib.invalidate_caches()``, which reads the directory of
    # pyspark.zip again for every package that came out of it: 0.15 s, if they are remembered here.
    sys.path_importer_cache.clear()
    gc.freeze()  # so that a collection in a child does not copy every page
    manager()
