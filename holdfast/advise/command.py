"""``holdfast advise``: measures a flow, proposes protections, and prints the reasons."""

from __future__ import annotations

import re

from rich.console import Console
from rich.table import Table

from holdfast.advise.facts import FlowFacts
from holdfast.advise.fit import document, fit, read_figures, shipped, shipped_constants
from holdfast.advise.measure import measure
from holdfast.advise.model import Choice, Constants, Prediction, overall
from holdfast.advise.propose import Advice, Bounds, in_bytes, in_percent, in_time, propose
from holdfast.api.graph import Flow
from holdfast.api.nodes import KeyedNode
from holdfast.api.protection import Protection, none, pairs, passive, upstream
from holdfast.errors import FlowError
from holdfast.plan.planner import nodes_by_stage, plan
from holdfast.ui.report import number, show, write_json

_MS = {"ms": 1.0, "s": 1e3, "m": 60e3}


def duration_ms(text: str) -> float:
    """
    >>> [duration_ms(text) for text in ("200ms", "1.5s", "2m", "0ms")]
    [200.0, 1500.0, 120000.0, 0.0]
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(ms|s|m)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration such as 200ms, 1.5s or 2m")
    return float(match[1]) * _MS[match[2]]


def percentage(text: str) -> float:
    """
    >>> percentage("10%"), percentage("2.5 %")
    (0.1, 0.025)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", text.strip())
    if match is None or float(match[1]) >= 100:
        raise ValueError(f"{text!r} is not a percentage below 100 such as 10%")
    return float(match[1]) / 100


def advise(
    flow: Flow,
    bounds: Bounds,
    *,
    sites: int,
    partitions: int,
    seconds: float,
    fit_file: str | None = None,
    json_file: str | None = None,
    console: Console | None = None,
) -> Advice:
    """Measure a flow, and print and return the advice."""
    console = console or Console()
    if sites < 2:
        raise FlowError("protection needs at least two sites", hint="use --sites 2 or more")
    if bounds.losses < 1 or sites <= bounds.losses:
        raise FlowError(
            f"surviving {bounds.losses} losses at once needs at least {bounds.losses + 1} sites, "
            f"not {sites}",
            hint="use --sites and --losses",
        )
    if seconds <= 0:
        raise FlowError(f"--seconds must be positive, not {seconds:g}")
    constants = fit(read_figures(fit_file)) if fit_file else shipped_constants()
    console.print(
        f"{flow.name}: {seconds:g} s on {sites} processes, without protection, with no output",
        highlight=False,
    )
    facts = measure(flow, sites=sites, partitions=partitions, seconds=seconds)
    advice = propose(facts, bounds, constants)
    check(flow, advice)
    report(advice, fit_file or shipped()["from"], console)
    if json_file:
        write_json(json_file, {**advice.to_dict(), "constants": constants.to_dict()})
    return advice


def refit(fit_file: str, json_file: str | None, console: Console) -> Constants:
    """Fit the constants to a benchmark's figures and print them; with `json_file`, write a new file
    of shipped constants."""
    figures = read_figures(fit_file)
    constants = fit(figures)
    current = shipped_constants().to_dict()
    rows = [(name, value, current[name]) for name, value in constants.to_dict().items()]
    show("Constants of the models", ("", fit_file, "shipped"), rows, console)
    if json_file:
        origin = "the figures of `holdfast bench protections`"
        write_json(json_file, document(figures, origin))
        console.print(f"written to {json_file}", highlight=False, soft_wrap=True)
    return constants


def check(flow: Flow, advice: Advice) -> None:
    """Plan the flow as proposed, so that the advice is never one that the planner refuses."""
    nodes = nodes_by_stage(flow)
    before = flow.protection, {name: node.protection for name, node in nodes.items()}
    asked = flow.losses
    try:
        flow.protection = protection_of(overall(advice.choices))
        flow.losses = 0 if advice.unprotected else advice.bounds.losses
        for position, choice in advice.choices.items():
            node: KeyedNode = nodes[advice.facts.stages[position].name]
            node.protection = protection_of(choice)
        plan(flow)
    finally:
        flow.protection, flow.losses = before[0], asked
        for name, node in nodes.items():
            node.protection = before[1][name]


def protection_of(choice: Choice) -> Protection:
    match choice.name:
        case "none":
            return none()
        case "pairs":
            return pairs(replicas=choice.replicas)
        case "passive":
            return passive(interval=choice.every_ms / 1e3, standbys=choice.losses)
        case "upstream":
            return upstream()
    raise ValueError(f"{choice} is never proposed")


# --- printing -----------------------------------------------------------------------------------


def report(advice: Advice, origin: str, console: Console) -> None:
    """Print the advice; `origin` names the figures that the models were fitted to."""
    facts = advice.facts
    _show_measured(facts, console)
    _show_proposed(advice, console)
    for proposed in advice.proposed:
        name = facts.stages[proposed.stage].name
        console.print(f"{name}: {proposed.choice}: {proposed.why}", highlight=False)
    _show_alternatives(advice, console)
    for note in advice.notes:
        console.print(f"note: {note}", highlight=False)
    if advice.missed:
        console.print("Nothing is within the bounds; this is the closest:", highlight=False)
        for missed in advice.missed:
            console.print(f"  {missed}", highlight=False)
    console.print("\nWrite:\n", highlight=False)
    used = {overall(advice.choices).name, *(c.name for c in advice.choices.values())}
    imported = f"from holdfast.protections import {', '.join(sorted(used))}"
    for line in (imported, *advice.code()):
        console.print(f"    {line}", highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"\nThe models were fitted to {origin}.\nOn a local Spark master, replicas can only be in "
        'different processes: add failure_domain="process".',
        highlight=False,
    )


def _show_measured(facts: FlowFacts, console: Console) -> None:
    columns = ("measured", "rows/s in", "rows/s out", "in", "keys", "state", "life", "of the time")
    rows = [
        (
            stage.name,
            number(round(stage.rows_in)),
            number(round(stage.rows_out)),
            f"{in_bytes(facts.bytes_in(i))}/s" if facts.into(i) else "",
            number(stage.keys) if stage.kind == "keyed" else "",
            in_bytes(stage.state_bytes) if stage.kind == "keyed" else "",
            _life(stage.bounded, stage.life_s) if stage.kind == "keyed" else "",
            in_percent(stage.work / facts.cores),
        )
        for i, stage in enumerate(facts.stages)
    ]
    title = f"{facts.seconds:.1f} s on {facts.sites} sites, which used {facts.cores:.2f} processors"
    show(title, columns, rows, console)


def _life(bounded: bool, life_s: float | None) -> str:
    if not bounded:
        return "unlimited"
    return "unknown" if life_s is None else in_time(1e3 * life_s)


def _show_proposed(advice: Advice, console: Console) -> None:
    columns = ("proposed", "protection", "costs", "bytes", "recovery", "memory")
    predicted = advice.predicted
    rows = []
    for proposed in advice.proposed:
        part = predicted.parts[proposed.stage]
        rows.append(
            (
                advice.facts.stages[proposed.stage].name,
                str(proposed.choice),
                in_percent(part.slowdown * predicted.rate),
                _more(part.extra_bytes, predicted),
                in_time(part.recovery_ms),
                in_bytes(part.memory_bytes),
            )
        )
    costs = predicted.overhead - predicted.rate * sum(p.slowdown for p in predicted.parts.values())
    extra = predicted.extra_bytes * predicted.plain_bytes
    extra -= sum(p.extra_bytes for p in predicted.parts.values())
    rows.append(("sources and sinks", "", in_percent(costs), _more(extra, predicted), "", ""))
    rows.append(("the flow", "", *_figures(predicted)))
    bounds = advice.bounds
    title = (
        f"Within {in_time(bounds.recovery_ms)} of recovery and {in_percent(bounds.overhead)} of "
        "overhead, predicted"
    )
    show(title, columns, rows, console)


def _more(extra: float, predicted: Prediction) -> str:
    """Return additional bytes relative to those sent without protection."""
    return f"{100 * extra / predicted.plain_bytes:+.0f} %" if predicted.plain_bytes else ""


def _figures(predicted: Prediction) -> tuple[str, str, str, str]:
    return (
        in_percent(predicted.overhead),
        _more(predicted.extra_bytes * predicted.plain_bytes, predicted),
        in_time(predicted.recovery_ms),
        in_bytes(predicted.memory_bytes),
    )


def _show_alternatives(advice: Advice, console: Console) -> None:
    columns = ("rejected", "protection", "costs", "bytes", "recovery", "memory", "why")
    rows = []
    for proposed in advice.proposed:
        name = advice.facts.stages[proposed.stage].name
        for other in proposed.turned_down:
            figures = _figures(other.predicted) if other.predicted else ("", "", "", "")
            rows.append((name, other.name, *figures, other.why))
            name = ""
    if rows:
        table = Table(title="The whole flow with the alternatives", title_justify="left")
        for column in columns:
            text = column in (columns[0], columns[1], columns[-1])
            table.add_column(column, justify="left" if text else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
