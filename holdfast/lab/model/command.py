"""``holdfast model``: searches all states of the model, and shows the shortest way to a problem."""

from __future__ import annotations

from contextlib import nullcontext

from rich.console import Console
from rich.status import Status

from holdfast.lab.model.search import ModelSearch, SearchResult
from holdfast.lab.model.steps import ModelBounds
from holdfast.lab.model.trace import in_words
from holdfast.lab.sim.planted import Bug


def explore(
    bounds: ModelBounds,
    console: Console,
    bug: Bug | None = None,
    seconds_max: float = 1e9,
    reduced: bool = False,
    memory_mb_max: int = 8_000,
) -> int:
    """Search a world. Return exit status 1 if a state is wrong, 2 if time or memory ran out before
    all states were visited."""
    with bug.planted() if bug is not None else nullcontext(), console.status("searching") as bar:
        search = ModelSearch(
            bounds,
            seconds_max=seconds_max,
            memory_mb_max=memory_mb_max,
            progress=lambda f: _show(bar, f),
            reduced=reduced,
        )
        found = search.run()
        trace = in_words(search.world, found.trace) if found.problem is not None else []
    console.print(summary(found), highlight=False)
    if found.problem is None:
        return 0 if found.complete else 2
    console.print(f"[red]wrong[/red] after {len(found.trace)} events, the fewest possible:")
    for number, line in enumerate(trace):
        console.print(f"  {number:3}  {line}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"  {found.problem}", markup=False, highlight=False, soft_wrap=True)
    return 1


def _show(bar: Status, found: SearchResult) -> None:
    bar.update(f"{found.states:,} states, {found.depth} events deep")


def summary(found: SearchResult) -> str:
    """What a search has visited, and what it took."""
    all_of_them = "all states" if found.complete else "not all states"
    ends = ", ".join(sorted(found.ends))
    rate = found.states / max(found.seconds, 1e-9)
    return (
        f"{all_of_them}: {found.states:,} states, {found.transitions:,} transitions, "
        f"up to {found.depth} events deep; ends: {ends or 'none'}\n"
        f"{found.site_states:,} states of a site, {found.control_states:,} of the controller, "
        f"{found.steps:,} different steps of these\n"
        f"{found.seconds:.0f} s, {rate:,.0f} states a second, {found.memory_mb} MB"
    )
