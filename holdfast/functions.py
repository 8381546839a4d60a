"""Functions over rows: aggregates for ``agg``, and `at_start` for ``spans``.

Import it as in PySpark: ``from holdfast import functions as F``, then ``F.sum("eur")``.
"""

from holdfast.engine.aggregates import count, first, last, max, mean, min, sum
from holdfast.engine.expressions import at_start

__all__ = ["at_start", "count", "first", "last", "max", "mean", "min", "sum"]
