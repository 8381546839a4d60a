"""``holdfast sim``: runs schedules of faults, and shows those that fail."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from holdfast.errors import FlowError
from holdfast.lab.sim.bugs import BUGS
from holdfast.lab.sim.explore import Case, Outcome, run, shrink
from holdfast.lab.sim.faults import PAIRS
from holdfast.lab.sim.planted import Bug
from holdfast.lab.sim.timeline import TimelineEvent
from holdfast.lab.sim.timeline_picture import svg_timeline
from holdfast.lab.sim.timeline_text import text_timeline

CHUNK = 4


def bug_named(name: str | None) -> Bug | None:
    """Return the bug of this name."""
    if name is None:
        return None
    found = [bug for bug in BUGS if bug.name == name]
    if not found:
        raise FlowError(f"no bug {name!r}", hint="one of: " + ", ".join(b.name for b in BUGS))
    return found[0]


def explore(
    cases: Sequence[Case], out: Path, console: Console, bug: Bug | None = None, jobs: int = 0
) -> int:
    """Run cases with a progress bar. If one fails, show it minimised and return the exit status of
    its kind of `Failure`."""
    hit: set[tuple[str, str]] = set()
    done = stopped = 0
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("simulating", total=len(cases))
        for outcome in _outcomes(cases, bug, jobs or os.cpu_count() or 1):
            done, stopped = done + 1, stopped + outcome.stopped
            hit.update(outcome.done)
            bar.advance(task)
            if outcome.failure is not None:
                bar.stop()
                show_failure(outcome.case, out, console, bug)
                return outcome.failure.value
    console.print(
        f"{done} runs, all right; {stopped} stopped as they should; "
        f"{len(hit.intersection(PAIRS))} of {len(PAIRS)} pairs of phase and fault were hit"
    )
    return 0


def _outcomes(cases: Sequence[Case], bug: Bug | None, jobs: int) -> Iterator[Outcome]:
    if jobs == 1 or len(cases) < 2 * CHUNK:
        for case in cases:
            yield _run(case, bug)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        names = [bug.name if bug else None] * len(cases)
        yield from pool.map(_run_named, cases, names, chunksize=CHUNK)


def _run_named(case: Case, name: str | None) -> Outcome:
    return _run(case, bug_named(name))


def _run(case: Case, bug: Bug | None, trace: bool = False) -> Outcome:
    with bug.planted() if bug is not None else nullcontext():
        outcome = run(case, trace=trace)
    if outcome.problem is not None:  # an exception may not survive pickling
        outcome.problem = AssertionError(f"{type(outcome.problem).__name__}: {outcome.problem}")
    return outcome


def show_failure(
    case: Case, out: Path, console: Console, bug: Bug | None = None, again: str | None = None
) -> None:
    """Print and draw a failure, with the fewest faults that cause it, and the command that repeats
    it."""
    with bug.planted() if bug is not None else nullcontext():
        small = shrink(case)
    outcome = _run(small, bug, trace=True)
    kind = outcome.failure.name.lower() if outcome.failure else "not any more"
    console.print(f"[red]seed {case.seed} fails[/red] ({case.flow}, {case.protocol}): {kind}")
    for fault in small.schedule():
        console.print(f"  {fault}", markup=False, highlight=False)
    text = str(outcome.problem).splitlines()[0]
    console.print(f"  {text}", markup=False, highlight=False)
    for path in draw(outcome, out):
        console.print(f"  see {path}", markup=False, highlight=False)
    console.print(f"  again: {again or _command(case, bug)}", markup=False, soft_wrap=True)


def _command(case: Case, bug: Bug | None) -> str:
    again = f"holdfast sim --flow {case.flow} --protocol {case.protocol} --seed {case.seed} --trace"
    again += f" --then {case.then}" if case.then else ""
    again += f" --apps {case.apps}" if case.apps > 1 else ""
    return again + (f" --bug '{bug.name}'" if bug else "")


def save(path: str | Path, events: Iterable[TimelineEvent], title: str) -> None:
    """Write a picture if the path ends in ``.svg``, text if not."""
    events = list(events)
    picture = str(path).endswith(".svg")
    Path(path).write_text(svg_timeline(events, title) if picture else text_timeline(events))


def draw(outcome: Outcome, out: Path) -> list[Path]:
    """Write the timeline of a traced run as text and as a picture."""
    case, events = outcome.case, [TimelineEvent(*entry) for entry in outcome.trace]
    out.mkdir(parents=True, exist_ok=True)
    title = f"{case.flow} under {case.protocol}, seed {case.seed}"
    paths = [out / f"sim-{case.flow}-{case.seed}{end}" for end in (".txt", ".svg")]
    for path in paths:
        save(path, events, title)
    return paths


def replay(case: Case, out: Path, console: Console, bug: Bug | None = None) -> int:
    """Repeat a run, and show its timeline."""
    outcome = _run(case, bug, trace=True)
    events = [TimelineEvent(*entry) for entry in outcome.trace]
    console.print(text_timeline(events), markup=False, highlight=False)
    for path in draw(outcome, out):
        console.print(f"see {path}", markup=False, highlight=False)
    if outcome.failure is not None:
        console.print(f"[red]{outcome.failure.name.lower()}[/red] {outcome.problem}")
        return outcome.failure.value
    ended = "stopped as it should" if outcome.stopped else "ended with the right rows"
    console.print(f"{outcome.steps} steps, {outcome.seconds * 1e3:.0f} ms: {ended}")
    return 0


def cases_of(
    seeds: Sequence[int],
    what: tuple[str, str, str | None, str | None],
    bug: Bug | None,
    apps: int = 0,
) -> list[Case]:
    """Return the cases of these seeds in `apps` applications, or those of a bug. `what` is the
    flow, its protection, and the first and the later protection of its first keyed stage."""
    if bug is not None:
        return [bug.case(seed) for seed in seeds]
    return [Case(seed, *what, apps=apps) for seed in seeds]
