"""Aggregates, as a user writes them: ``F.sum("eur")``. They have the names that Spark gives them,
so this module does without the built-in functions of these names."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.engine.expressions import Col, Expr, wrap


class Aggregate:
    """A function of the rows of a group: what `count`, `sum`, `mean` and their like give."""

    def __init__(self, kind: str, expr: Expr | None) -> None:
        self.kind, self.expr = kind, expr

    def columns(self) -> Iterator[str]:
        return iter(()) if self.expr is None else self.expr.columns()

    def __repr__(self) -> str:
        return f"{self.kind}({'' if self.expr is None else self.expr})"


def _operand(what: str | Expr) -> Expr:
    return Col(what) if isinstance(what, str) else wrap(what)


def count() -> Aggregate:
    """The number of rows."""
    return Aggregate("count", None)


def sum(what: str | Expr) -> Aggregate:
    """The sum, folded strictly in sequence order; of integers as int64. A row that takes it out of
    int64 is refused, as by Spark: it stops the flow or becomes a dead letter."""
    return Aggregate("sum", _operand(what))


def mean(what: str | Expr) -> Aggregate:
    """The arithmetic mean, as float64; the sum is folded strictly in sequence order."""
    return Aggregate("mean", _operand(what))


def max(what: str | Expr) -> Aggregate:
    """The largest value."""
    return Aggregate("max", _operand(what))


def min(what: str | Expr) -> Aggregate:
    """The smallest value."""
    return Aggregate("min", _operand(what))


def first(what: str | Expr) -> Aggregate:
    """The value of the first row in sequence order, null if it is null there: as in Spark, nulls
    are not passed over."""
    return Aggregate("first", _operand(what))


def last(what: str | Expr) -> Aggregate:
    """The value of the last row in sequence order, null if it is null there."""
    return Aggregate("last", _operand(what))
