"""What a plan consists of, as a small value: two plans can be compared stage by stage.

`describe` says of every stage what it is, in text. `fingerprint` is a digest of it that is the same
in every process, whatever its hash seed, for flows that were written alike. Two applications whose
fingerprints differ do not run the same flow. A store keeps the descriptions, so that a flow that
cannot continue from it is told which stages differ, and how (`differences`).

Left out is what may change while a flow runs or is known only when it starts: protection, the
number of partitions and of splits, what sources have resolved. Steps and the code of functions are
in the fingerprint, but state does not depend on them: a flow may continue with newer ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from types import CodeType
from typing import Any

import pyarrow as pa

from holdfast.engine.expressions import Expr
from holdfast.engine.operators.base import Agg, KeyedOperator
from holdfast.plan.planner import Plan, PlannedStep, Stage


@dataclass(frozen=True, slots=True)
class StageDescription:
    """What a stage is. Every field is text that a user can read."""

    name: str
    kind: str
    operator: str
    """The operator with its parameters, or the class of the source or sink."""
    key: str
    schema: str
    """The columns that the stage reads, per input."""
    inputs: str
    """The stages that its rows come from."""
    steps: str = ""
    code: str = ""
    """A digest of the functions that it calls."""

    def aspects(self) -> dict[str, str]:
        return asdict(self)


STATE_ASPECTS = ("name", "kind", "operator", "key", "schema")
"""What stored state depends on. A flow that differs in one of these cannot continue from it."""


def describe(plan: Plan) -> tuple[StageDescription, ...]:
    """What the stages of a plan are, in their order."""
    return tuple(_described(plan, stage) for stage in plan.stages)


def fingerprint(plan: Plan) -> str:
    """A digest of the plan, in hexadecimal: the same in every process for the same flow."""
    stages = [description.aspects() for description in describe(plan)]
    whole = {"flow": plan.flow, "on_error": plan.on_error, "stages": stages}
    text = json.dumps(whole, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


STAGES_MARKED_MAX = 64


def stage_marks(plan: Plan) -> dict[str, str]:
    """A short digest of each stage by its name, for handshakes, which have to be short. A plan of
    very many stages has one for all."""
    described = describe(plan)
    if len(described) > STAGES_MARKED_MAX:
        return {plan.flow: fingerprint(plan)[:8]}
    return {d.name: _short(json.dumps(d.aspects(), sort_keys=True)) for d in described}


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def differences(
    here: Sequence[StageDescription],
    there: Sequence[StageDescription],
    aspects: Sequence[str] = STATE_ASPECTS,
) -> list[str]:
    """Which stages differ between two plans, and how: a sentence for each."""
    found: list[str] = []
    for mine, theirs in _paired(here, there):
        if theirs is None and mine is not None:
            found.append(f"stage {mine.name!r} is new")
        elif mine is None and theirs is not None:
            found.append(f"stage {theirs.name!r} is missing")
        elif mine is not None and theirs is not None:
            own, other = mine.aspects(), theirs.aspects()
            changed = [f"{a} is {own[a]}, not {other[a]}" for a in aspects if own[a] != other[a]]
            if changed:
                found.append(f"stage {mine.name!r}: {'; '.join(changed)}")
    if not found and [d.name for d in here] != [d.name for d in there]:
        orders = [", ".join(repr(d.name) for d in side) for side in (here, there)]
        found.append(f"the stages are in the order {orders[0]}, not {orders[1]}")
    return found


def _paired(
    here: Sequence[StageDescription], there: Sequence[StageDescription]
) -> Iterator[tuple[StageDescription | None, StageDescription | None]]:
    """The stages of two plans that correspond to each other. Those whose names differ correspond in
    their order if they are of one kind: by default a stage is named after its operator and key."""
    names, theirs = {d.name for d in here}, {d.name: d for d in there}
    renamed = [d for d in there if d.name not in names]
    for mine in here:
        other = theirs.get(mine.name) or next((d for d in renamed if d.kind == mine.kind), None)
        if other in renamed:
            renamed.remove(other)
        yield mine, other
    for missing in renamed:
        yield None, missing


def stored(descriptions: Iterable[StageDescription]) -> list[dict[str, str]]:
    """The descriptions as plain values, for a manifest."""
    return [description.aspects() for description in descriptions]


def from_stored(values: Iterable[Mapping[str, str]]) -> tuple[StageDescription, ...]:
    """The inverse of `stored`. Aspects that a later version has added are left out."""
    names = [field.name for field in fields(StageDescription)]
    return tuple(StageDescription(**{n: value.get(n, "") for n in names}) for value in values)


# --- one stage ----------------------------------------------------------------------------------


def _described(plan: Plan, stage: Stage) -> StageDescription:
    operator = stage.operator
    head = operator or stage.source or stage.sink
    producers = [plan.stages[e.producer].name for e in stage.inputs]
    called = [operator.called if operator is not None else None]
    called += [getattr(planned.step, "function", None) for planned in stage.steps]
    return StageDescription(
        stage.name,
        stage.kind,
        _operator(operator) if operator is not None else type(head).__name__,
        ", ".join(operator.keys) if operator is not None else "",
        _schemas(stage),
        ", ".join(dict.fromkeys(producers)),
        "; ".join(_step(planned) for planned in stage.steps),
        _digest(called),
    )


def _operator(operator: KeyedOperator) -> str:
    return f"{operator.label}({_listed(operator.parameters())})"


def _step(planned: PlannedStep) -> str:
    text = f"{planned.step.label}({_listed(planned.step.parameters())})"
    return f"{planned.target} = {text} of {planned.source}"


def _schemas(stage: Stage) -> str:
    if stage.source is not None:
        timed = f" by {stage.event_time}" if stage.event_time is not None else ""
        return _schema(stage.source.schema) + timed
    if stage.operator is None:
        return " | ".join(dict.fromkeys(_schema(e.schema) for e in stage.inputs))
    reads = zip(stage.operator.inputs, stage.operator.needs, strict=True)
    return " | ".join(_schema([f for f in port.schema if f.name in need]) for port, need in reads)


def _schema(columns: Iterable[pa.Field]) -> str:
    shown = [f"{f.name}: {f.type}{'' if f.nullable else ' not null'}" for f in columns]
    return f"({', '.join(shown)})"


# --- values in text that is the same in every process -------------------------------------------


def _listed(parameters: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_text(value)}" for name, value in parameters.items())


def _text(value: Any) -> str:
    """A parameter in text. Objects are named by their class: their `repr` may have an address."""
    match value:
        case Agg():
            return f"{value.kind}({'' if value.expr is None else value.expr}): {value.result_type}"
        case None | bool() | int() | float() | str() | bytes() | Expr() | pa.DataType():
            return repr(value) if not isinstance(value, pa.DataType) else str(value)
        case pa.Schema():
            return _schema(value)
        case dict():
            return f"{{{', '.join(f'{k}: {_text(v)}' for k, v in value.items())}}}"
        case list() | tuple():
            return f"[{', '.join(_text(v) for v in value)}]"
        case set() | frozenset():
            return f"[{', '.join(sorted(_text(v) for v in value))}]"
    return str(getattr(value, "__name__", type(value).__name__))


# --- the code of functions ----------------------------------------------------------------------


def _digest(called: Iterable[object]) -> str:
    """A digest of the functions that a stage calls; empty if it calls none."""
    parts = [part for what in called if what is not None for part in _code_of(what)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16] if parts else ""


def _code_of(what: object) -> Iterator[str]:
    """The code of a function, or of the methods of an object's class."""
    if (code := _own_code(what)) is not None:
        yield from _code(code)
        return
    for name, member in sorted(vars(type(what)).items()):
        if (code := _own_code(member)) is not None:
            yield name
            yield from _code(code)


def _own_code(what: object) -> CodeType | None:
    function: Callable[..., Any] | Any = getattr(what, "__func__", what)
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _code(code: CodeType) -> Iterator[str]:
    """What a function does, without where it was written: names, constants and instructions."""
    yield code.co_code.hex()
    yield " ".join((*code.co_names, *code.co_varnames))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        else:
            yield _text(constant)
