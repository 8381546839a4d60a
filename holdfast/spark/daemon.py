"""Spark's Python daemon, with everything that a site needs loaded before it forks a worker.

Spark starts it on every executor if ``spark.python.daemon.module`` is ``holdfast.spark.daemon``,
as in all sessions that Holdfast creates. A site that replaces a dead one then starts in a few
milliseconds. Otherwise its worker first loads numpy, pyarrow, pandas and pyspark, which takes about
a second of processor time while the flow is recovering.

Spark's own daemon loads nothing, because a forked child has only one of the parent's threads. That
is safe for the threads that these packages start on import (OpenBLAS's and the memory allocator's):
both libraries restart them in a child.
"""

import gc
import sys

import pyarrow as pa
import pyspark.worker  # noqa: F401
from pyspark.daemon import manager

import holdfast.spark.host  # noqa: F401

if __name__ == "__main__":
    pa.array([0])  # makes pyarrow import pandas
    # Every task starts with ``importlib.invalidate_caches()``, which reads the directory of
    # pyspark.zip again for every cached importer of a package in it: 0.15 s.
    sys.path_importer_cache.clear()
    gc.freeze()  # a collection in a child would otherwise copy every page
    manager()
