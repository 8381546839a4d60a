"""``holdfast check``: reports the contents of a store, damaged files, and what to do.

It reads everything that a resumed flow would read, in the same way, and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from holdfast.control.checkpoint_store import known, pushed_up_to, read_records
from holdfast.errors import HoldfastError
from holdfast.storage import generations, layout
from holdfast.storage.files import Folder, located
from holdfast.storage.restore_point import Kind, RestorePoint

ATTEMPTS_MAX = 5
"""Maximum attempts to check a store whose checkpoint a running flow replaces."""


@dataclass
class StoreReport:
    """The result of a check."""

    place: str
    contents: list[str] = field(default_factory=list)
    damage: list[tuple[str, str]] = field(default_factory=list)
    """Damaged files, each with its damage."""
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


def check_store(place: str) -> StoreReport:
    """Check all files of a store. A running flow may replace its checkpoint during the check, which
    makes removed files look missing; then the check starts again."""
    place = located(place)
    attempts = 0
    while True:
        report, attempts = StoreReport(place), attempts + 1
        try:
            restore_point = RestorePoint.load(place)
        except HoldfastError as error:
            _describe_nothing(report, error)
            return report
        _check_files(report, restore_point)
        if report.sound or attempts == ATTEMPTS_MAX or _load(place) == restore_point:
            _describe(report, restore_point)
            return report


def _load(place: str) -> RestorePoint | None:
    try:
        return RestorePoint.load(place)
    except HoldfastError:
        return None


def _check_files(report: StoreReport, restore_point: RestorePoint) -> None:
    folder, home = Folder(restore_point.place), Folder(restore_point.home)
    for name in restore_point.named():
        _note(report, name, partial(folder.read, name, restore_point.files.get(name)))
    earlier = [file for files in restore_point.push_batches.values() for file in files]
    push_batches = dict.fromkeys(
        [*earlier, *home.list(f"{layout.PUSH_BATCHES}/{restore_point.generation:06d}")]
    )
    for name in push_batches:
        _note(report, name, partial(home.read_data, name))
    for name in home.list(f"{layout.RECORDS}/{restore_point.generation:06d}"):
        _note(report, name, partial(read_records, home, name))
    if report.sound:  # finds gaps between the files
        _note(
            report,
            layout.manifest_file(restore_point.generation),
            partial(known, restore_point, home),
        )


def _note(report: StoreReport, name: str, read: Callable[[], object]) -> None:
    try:
        read()
    except HoldfastError as error:
        wrong = error.message.split(" has written: ", 1)[-1]
        report.damage.append((name, wrong))


def _describe_nothing(report: StoreReport, error: HoldfastError) -> None:
    """Describe a store without a readable manifest."""
    folder = Folder(report.place)
    last = layout.latest(folder.list(layout.MANIFESTS))
    if last < 0:
        report.damage.append((layout.MANIFESTS, error.message))
        report.advice += [error.hint] if error.hint else []
        return
    wrong = error.message.split(" has written: ", 1)[-1]
    report.damage.append((layout.manifest_file(last), wrong))
    report.advice += _repair_advice(report.place)


def _describe(report: StoreReport, restore_point: RestorePoint) -> None:
    report.contents += [
        f"flow {restore_point.flow!r} at {report.place}: {_state(restore_point)}, generation "
        f"{restore_point.generation}",
        f"  {_schedule(restore_point)}, {restore_point.partitions} partitions; stages: "
        f"{', '.join(restore_point.stages)}",
        f"  {len(restore_point.named())} files of state, "
        f"{sum(info.nbytes for info in restore_point.files.values()):,} "
        f"bytes{_elsewhere(restore_point)}",
    ]
    holder = generations.holder(Folder(restore_point.home), restore_point.generation)
    if holder is not None:
        report.contents.append(f"  last used by {holder.who}")
    if restore_point.kind is Kind.RUNNING and report.sound:
        report.contents.append(f"  {_since(restore_point)}")
    left = _left_over(restore_point)
    if left:
        report.contents.append(f"  {left} files that are no longer needed; the flow removes them")
    if report.damage:
        report.advice += _repair_advice(report.place)
    else:
        report.advice.append(_how_to_resume(restore_point, report.place))


def _state(restore_point: RestorePoint) -> str:
    after = f"after epoch {restore_point.epochs - 1}, {restore_point.rows:,} rows"
    match restore_point.kind:
        case Kind.STOPPED:
            return f"stopped {after}"
        case Kind.ENDED:
            return f"ended {after}"
        case _:
            return (
                f"running, or lost; stored {after}" if restore_point.epochs else "running, or lost"
            )


def _schedule(restore_point: RestorePoint) -> str:
    if restore_point.every_ms:
        return f"stored every {restore_point.every_ms / 1e3:g} s"
    return "stored when it is stopped"


def _elsewhere(restore_point: RestorePoint) -> str:
    return f" at {restore_point.place}" if restore_point.elsewhere else ""


def _since(restore_point: RestorePoint) -> str:
    found = known(restore_point, Folder(restore_point.home))
    push_batches = sum(len(files) for files in found.push_batches.values())
    taken = sum(pushed_up_to(restore_point, source)[0] for source in found.push_batches)
    records = f"since then the records of {len(found.records)} epochs"
    if not push_batches:
        return records
    return f"{records}, and {push_batches} push batches of rows after {taken}"


def _left_over(restore_point: RestorePoint) -> int:
    folder = Folder(restore_point.home)
    needed = {
        *restore_point.named(),
        *(f for files in restore_point.push_batches.values() for f in files),
    }
    current = (
        f"{layout.RECORDS}/{restore_point.generation:06d}/",
        f"{layout.PUSH_BATCHES}/{restore_point.generation:06d}/",
    )
    last = generations.last_generation(folder)
    found = [
        name
        for name in folder.list()
        if name not in needed
        and not name.startswith(current)
        and layout.generation_of(name) not in (restore_point.generation, last)
    ]
    return len(found) + len(folder.unfinished())


def _how_to_resume(restore_point: RestorePoint, place: str) -> str:
    if restore_point.kind is Kind.ENDED:
        return "its sources have ended: there is nothing to resume"
    if restore_point.kind is Kind.RUNNING and not restore_point.every_ms:
        return (
            "the flow is stored only when it is stopped: stop it if it is running; if it was lost, "
            "the checkpoint does not tell what its sinks have received since, and the flow can "
            "only continue with another --checkpoint"
        )
    return f"it can be resumed: holdfast run FLOW.py --restore-from {place}"


def _repair_advice(place: str) -> list[str]:
    return [
        "it cannot be resumed as it is: rows would be missing or wrong",
        f"  restore these files from a backup of {place}, if there is one; only the original "
        "files pass the check",
        "  otherwise start the flow from its sources again, into sinks without its results",
    ]
