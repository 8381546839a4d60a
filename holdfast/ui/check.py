"""``holdfast check``: what a store holds, whether all of it is as it was written, and what to do.

It reads everything that a flow would begin with, in the same way, and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from holdfast.control.checkpoint_store import fed_up_to, known, read_records
from holdfast.errors import HoldfastError
from holdfast.storage import generations, layout
from holdfast.storage.files import Folder, located
from holdfast.storage.restore_point import Kind, Past

LOOKS_MAX = 5
"""How often to look at a store that a running flow replaces meanwhile."""


@dataclass
class Report:
    """What was found in a store."""

    place: str
    contents: list[str] = field(default_factory=list)
    damage: list[tuple[str, str]] = field(default_factory=list)
    """By file: what is wrong with it."""
    advice: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not self.damage

    def lines(self) -> Iterator[str]:
        yield from self.contents
        if self.damage:
            yield f"damaged: {len(self.damage)} of its files"
            yield from (f"  {file}: {wrong}" for file, wrong in self.damage)
        else:
            yield "nothing is damaged"
        yield from self.advice


def check_store(place: str) -> Report:
    """Look at everything in a store. A flow that runs may replace its checkpoint meanwhile: then
    what seems to be missing was removed, and the store is looked at again."""
    place = located(place)
    looks = 0
    while True:
        report, looks = Report(place), looks + 1
        try:
            past = Past.load(place)
        except HoldfastError as error:
            _describe_nothing(report, error)
            return report
        _check_files(report, past)
        if report.sound or looks == LOOKS_MAX or _load(place) == past:
            _describe(report, past)
            return report


def _load(place: str) -> Past | None:
    try:
        return Past.load(place)
    except HoldfastError:
        return None


def _check_files(report: Report, past: Past) -> None:
    folder, home = Folder(past.place), Folder(past.home)
    for name in past.named():
        _note(report, name, partial(folder.read, name, past.files.get(name)))
    earlier = [file for files in past.portions.values() for file in files]
    portions = dict.fromkeys([*earlier, *home.list(f"{layout.PORTIONS}/{past.life:06d}")])
    for name in portions:
        _note(report, name, partial(home.read_data, name))
    for name in home.list(f"{layout.RECORDS}/{past.life:06d}"):
        _note(report, name, partial(read_records, home, name))
    if report.sound:  # what is missing between them
        _note(report, layout.manifest_file(past.life), partial(known, past, home))


def _note(report: Report, name: str, read: Callable[[], object]) -> None:
    try:
        read()
    except HoldfastError as error:
        wrong = error.message.split(" has written: ", 1)[-1]
        report.damage.append((name, wrong))


def _describe_nothing(report: Report, error: HoldfastError) -> None:
    """There is no manifest that could be read."""
    folder = Folder(report.place)
    last = layout.latest(folder.list(layout.MANIFESTS))
    if last < 0:
        report.damage.append((layout.MANIFESTS, error.message))
        report.advice += [error.hint] if error.hint else []
        return
    wrong = error.message.split(" has written: ", 1)[-1]
    report.damage.append((layout.manifest_file(last), wrong))
    report.advice += _what_can_be_done(report.place)


def _describe(report: Report, past: Past) -> None:
    report.contents += [
        f"flow {past.flow!r} at {report.place}: {_how(past)}, generation {past.life}",
        f"  {_stored(past)}, {past.partitions} partitions; stages: {', '.join(past.stages)}",
        f"  {len(past.named())} files of state, "
        f"{sum(info.nbytes for info in past.files.values()):,} bytes{_elsewhere(past)}",
    ]
    holder = generations.holder(Folder(past.home), past.life)
    if holder is not None:
        report.contents.append(f"  last used by {holder.who}")
    if past.kind is Kind.RUNNING and report.sound:
        report.contents.append(f"  {_since(past)}")
    left = _left_over(past)
    if left:
        report.contents.append(f"  {left} files that nobody needs any more; the flow removes them")
    if report.damage:
        report.advice += _what_can_be_done(report.place)
    else:
        report.advice.append(_how_to_go_on(past, report.place))


def _how(past: Past) -> str:
    after = f"after epoch {past.epochs - 1}, {past.rows:,} rows"
    match past.kind:
        case Kind.STOPPED:
            return f"stopped {after}"
        case Kind.ENDED:
            return f"ended {after}"
        case _:
            return f"runs, or was lost; stored {after}" if past.epochs else "runs, or was lost"


def _stored(past: Past) -> str:
    if past.every_ms:
        return f"stored every {past.every_ms / 1e3:g} s"
    return "stored when it is stopped"


def _elsewhere(past: Past) -> str:
    return f" at {past.place}" if past.elsewhere else ""


def _since(past: Past) -> str:
    found = known(past, Folder(past.home))
    portions = sum(len(files) for files in found.portions.values())
    taken = sum(fed_up_to(past, source)[0] for source in found.portions)
    said = f"since then the records of {len(found.records)} epochs"
    return f"{said}, and {portions} portions of rows after {taken}" if portions else said


def _left_over(past: Past) -> int:
    folder = Folder(past.home)
    needed = {*past.named(), *(f for files in past.portions.values() for f in files)}
    current = (f"{layout.RECORDS}/{past.life:06d}/", f"{layout.PORTIONS}/{past.life:06d}/")
    last = generations.last_generation(folder)
    found = [
        name
        for name in folder.list()
        if name not in needed
        and not name.startswith(current)
        and layout.generation_of(name) not in (past.life, last)
    ]
    return len(found) + len(folder.unfinished())


def _how_to_go_on(past: Past, place: str) -> str:
    if past.kind is Kind.ENDED:
        return "its sources have ended: there is nothing to go on with"
    if past.kind is Kind.RUNNING and not past.every_ms:
        return (
            "it was to be stored only when it is stopped: stop it if it runs; if it was lost, what "
            "its sinks have got since is not known, and only with another --store can it go on"
        )
    return f"it can be resumed: holdfast run FLOW.py --resume {place}"


def _what_can_be_done(place: str) -> list[str]:
    return [
        "it cannot be resumed as it is: rows would be missing, or others than they were",
        f"  put these files back from a backup of {place}, if there is one: only the right ones "
        "fit",
        "  if not, start the flow from its sources again, into sinks that have none of its results",
    ]
