"""Expressions over the columns of a batch, written like Spark's: ``col("dst") % 10``.

An expression is a small tree, evaluated on whole columns: with numpy if every operand is a plain
number without nulls, and with Arrow's kernels otherwise. Both return the same types, so evaluating
the tree on an empty batch gives the type of its result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.errors import FlowError

Column: TypeAlias = np.ndarray | pa.Array
"""A column inside the engine: numpy for plain numbers without nulls, otherwise Arrow."""


class Expr:
    """A node of an expression. Build expressions with `col`, `lit` and Python's operators."""

    def columns(self) -> Iterator[str]:
        """Return the names of the input columns that the expression reads."""
        raise NotImplementedError

    def eval(self, batch: pa.RecordBatch) -> Any:
        """Return the value over `batch`: a `Column`, or a scalar for a literal."""
        raise NotImplementedError

    def __add__(self, other: Any) -> Expr:
        return Binary("+", self, wrap(other))

    def __radd__(self, other: Any) -> Expr:
        return Binary("+", wrap(other), self)

    def __sub__(self, other: Any) -> Expr:
        return Binary("-", self, wrap(other))

    def __rsub__(self, other: Any) -> Expr:
        return Binary("-", wrap(other), self)

    def __mul__(self, other: Any) -> Expr:
        return Binary("*", self, wrap(other))

    def __rmul__(self, other: Any) -> Expr:
        return Binary("*", wrap(other), self)

    def __truediv__(self, other: Any) -> Expr:
        return Binary("/", self, wrap(other))

    def __rtruediv__(self, other: Any) -> Expr:
        return Binary("/", wrap(other), self)

    def __floordiv__(self, other: Any) -> Expr:
        return Binary("//", self, wrap(other))

    def __mod__(self, other: Any) -> Expr:
        return Binary("%", self, wrap(other))

    def __eq__(self, other: Any) -> Expr:  # type: ignore[override]
        return Binary("==", self, wrap(other))

    def __ne__(self, other: Any) -> Expr:  # type: ignore[override]
        return Binary("!=", self, wrap(other))

    def __lt__(self, other: Any) -> Expr:
        return Binary("<", self, wrap(other))

    def __le__(self, other: Any) -> Expr:
        return Binary("<=", self, wrap(other))

    def __gt__(self, other: Any) -> Expr:
        return Binary(">", self, wrap(other))

    def __ge__(self, other: Any) -> Expr:
        return Binary(">=", self, wrap(other))

    def __and__(self, other: Any) -> Expr:
        return Binary("&", self, wrap(other))

    def __or__(self, other: Any) -> Expr:
        return Binary("|", self, wrap(other))

    def __invert__(self) -> Expr:
        return Unary("not", self)

    def __neg__(self) -> Expr:
        return Binary("-", lit(0), self)

    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> bool:
        raise FlowError(
            f"the expression {self} has no truth value",
            hint="combine conditions with & | ~, each in parentheses",
        )

    def is_null(self) -> Expr:
        return Unary("is_null", self)

    def fill_null(self, value: Any) -> Expr:
        return FillNull(self, value)

    def cast(self, to: pa.DataType) -> Expr:
        return Cast(self, to)


class Col(Expr):
    def __init__(self, name: str) -> None:
        self.name = name

    def columns(self) -> Iterator[str]:
        yield self.name

    def eval(self, batch: pa.RecordBatch) -> Column:
        return column(batch, self.name)

    def __repr__(self) -> str:
        return f"col({self.name!r})"


class Lit(Expr):
    def __init__(self, value: Any) -> None:
        if isinstance(value, np.ndarray | pa.Array | pa.ChunkedArray):
            raise FlowError(
                f"lit() takes one value for all rows, not {type(value).__name__}",
                hint="use lit([1, 2]) for a list as the value of every row",
            )
        self.value = _constant(value) if isinstance(value, pa.Scalar) else value

    def columns(self) -> Iterator[str]:
        return iter(())

    def eval(self, batch: pa.RecordBatch) -> Any:
        return self.value

    def __repr__(self) -> str:
        return f"lit({self.value!r})"


class AtStart(Expr):
    """A column of the row that opened a span; only inside ``spans(emit=...)``."""

    PREFIX = "start."

    def __init__(self, name: str) -> None:
        self.name = name

    def columns(self) -> Iterator[str]:
        yield self.PREFIX + self.name

    def eval(self, batch: pa.RecordBatch) -> Column:
        return column(batch, self.PREFIX + self.name)

    def __repr__(self) -> str:
        return f"at_start({self.name!r})"


class Binary(Expr):
    def __init__(self, op: str, left: Expr, right: Expr) -> None:
        self.op, self.left, self.right = op, left, right

    def columns(self) -> Iterator[str]:
        yield from self.left.columns()
        yield from self.right.columns()

    def eval(self, batch: pa.RecordBatch) -> Any:
        left, right = self.left.eval(batch), self.right.eval(batch)
        if self.op in ("%", "//"):
            _refuse_zero(self, right)
        if not isinstance(left, _ARROW_FORMS) and not isinstance(right, _ARROW_FORMS):
            with np.errstate(all="ignore"):
                return _NUMPY[self.op](left, right)
        return _eval_arrow(self.op, left, right)

    def __repr__(self) -> str:
        return f"({self.left} {self.op} {self.right})"


class Unary(Expr):
    def __init__(self, op: str, arg: Expr) -> None:
        self.op, self.arg = op, arg

    def columns(self) -> Iterator[str]:
        yield from self.arg.columns()

    def eval(self, batch: pa.RecordBatch) -> Any:
        value = self.arg.eval(batch)
        if self.op == "not":
            if not isinstance(value, _ARROW_FORMS):
                return np.invert(value)
            whole = pa.types.is_integer(value.type)
            return pc.bit_wise_not(value) if whole else pc.invert(value)
        return unwrap(pc.is_null(_as_arrow(value)))

    def __repr__(self) -> str:
        return f"{self.op}({self.arg})"


class Cast(Expr):
    def __init__(self, arg: Expr, to: pa.DataType) -> None:
        self.arg, self.to = arg, to

    def columns(self) -> Iterator[str]:
        yield from self.arg.columns()

    def eval(self, batch: pa.RecordBatch) -> Any:
        return unwrap(_as_arrow(self.arg.eval(batch)).cast(self.to))

    def __repr__(self) -> str:
        return f"{self.arg}.cast({self.to})"


class FillNull(Expr):
    def __init__(self, arg: Expr, value: Any) -> None:
        self.arg, self.value = arg, value

    def columns(self) -> Iterator[str]:
        yield from self.arg.columns()

    def eval(self, batch: pa.RecordBatch) -> Any:
        value = self.arg.eval(batch)
        kind = type_of(value)
        fill = pa.scalar(
            self.value, kind
        )  # converted even without a null, so that a wrong type fails early
        return unwrap(pc.fill_null(value, fill)) if isinstance(value, _ARROW_FORMS) else value

    def __repr__(self) -> str:
        return f"{self.arg}.fill_null({self.value!r})"


def col(name: str) -> Expr:
    """The column `name` of the input."""
    return Col(name)


def lit(value: Any) -> Expr:
    """A constant."""
    return Lit(value)


def at_start(name: str) -> Expr:
    """In ``spans(emit=...)``: the column `name` of the row that opened the span."""
    return AtStart(name)


def wrap(value: Any) -> Expr:
    return value if isinstance(value, Expr) else Lit(value)


def computed(exprs: Mapping[str, Any], where: str) -> dict[str, Expr]:
    """Convert a user's new columns to expressions. A string is refused, because it could mean a
    column or a constant, and the wrong choice would go unnoticed."""
    for name, value in exprs.items():
        if isinstance(value, str):
            raise FlowError(
                f"{where}: {name}={value!r} is ambiguous: a column or a constant",
                hint=f"use col({value!r}) for the column, lit({value!r}) for the constant",
            )
    return {name: wrap(value) for name, value in exprs.items()}


_NUMPY = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.true_divide,
    "//": np.floor_divide,
    "%": np.mod,
    "==": np.equal,
    "!=": np.not_equal,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "&": np.bitwise_and,
    "|": np.bitwise_or,
}
_ARROW = {
    "+": pc.add,
    "-": pc.subtract,
    "*": pc.multiply,
    "/": pc.divide,
    "==": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
    "&": pc.and_kleene,
    "|": pc.or_kleene,
}
_NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)


def is_plain(kind: pa.DataType) -> bool:
    """Return whether columns of this type, if without nulls, are numpy arrays in the engine."""
    return any(test(kind) for test in _NUMBERS)


def type_of(value: Any) -> pa.DataType:
    """Return the Arrow type of a result of `Expr.eval`."""
    if isinstance(value, _ARROW_FORMS):
        return value.type
    if isinstance(value, np.ndarray | np.generic):
        return pa.from_numpy_dtype(value.dtype)
    return pa.scalar(value).type


def unwrap(array: pa.Array) -> Column:
    """Convert Arrow to the engine's form: numpy, if possible without copying."""
    if isinstance(array, pa.Scalar):
        return _constant(array)
    if array.null_count == 0 and is_plain(array.type):
        return array.to_numpy(zero_copy_only=False)
    return array


def column(batch: pa.RecordBatch, name: str) -> Column:
    return unwrap(batch.column(name))


_ARROW_FORMS = (pa.Array, pa.Scalar)


def _constant(scalar: pa.Scalar) -> Any:
    """Convert a typed constant to the engine's form: numpy for a number, otherwise Arrow."""
    if not scalar.is_valid or not is_plain(scalar.type):
        return scalar
    return np.dtype(scalar.type.to_pandas_dtype()).type(scalar.as_py())


def _as_arrow(value: Any) -> Any:
    """Convert a value to an Arrow array, or to a scalar if it is a constant."""
    if isinstance(value, _ARROW_FORMS):
        return value
    return pa.array(value) if isinstance(value, np.ndarray) else pa.scalar(value)


def _refuse_zero(expr: Binary, divisor: Any) -> None:
    if isinstance(divisor, pa.Scalar):
        return  # a null
    values = unwrap(divisor.drop_null()) if isinstance(divisor, pa.Array) else np.asarray(divisor)
    if np.issubdtype(values.dtype, np.integer) and np.any(values == 0):
        raise ZeroDivisionError(f"division by zero in {expr}")


def _eval_arrow(op: str, left: Any, right: Any) -> Column:
    """Evaluate an operator with nulls. Numbers still use numpy's operator, so that a row's value
    does not depend on nulls in other rows."""
    operands = [_as_arrow(side) for side in (left, right)]
    kinds = [a.type for a in operands]
    logical = op in ("&", "|") and all(pa.types.is_boolean(k) for k in kinds)
    if logical or not all(is_plain(k) for k in kinds):
        return unwrap(_ARROW[op](*operands))
    return unwrap(_masked(op, left, right))


def _masked(op: str, *sides: Any) -> Any:
    """Apply numpy's operator where both sides are present; other rows are null."""
    rows = [len(s) for s in sides if isinstance(s, pa.Array | np.ndarray)]
    null = np.zeros(max(rows, default=1), bool)
    filled = []
    for side in sides:
        if isinstance(side, pa.Array):
            null |= pc.is_null(side).to_numpy(zero_copy_only=False)
            one = pa.scalar(1, pa.int64()).cast(side.type)
            side = pc.fill_null(side, one).to_numpy(zero_copy_only=False)
        elif isinstance(side, pa.Scalar):  # a null constant: null in every row
            null[:] = True
            side = np.dtype(side.type.to_pandas_dtype()).type(1)
        filled.append(side)
    with np.errstate(all="ignore"):
        result = np.broadcast_to(_NUMPY[op](*filled), null.shape)
    array = pa.array(result, mask=null)
    return array if rows else array[0]
