"""When tasks take checkpoints: together, and consumers before producers."""

from holdfast.core.ids import GroupId, StageId
from holdfast.core.protection import ProtectionSpec
from holdfast.site.checkpoint_schedule import PATIENCE, CheckpointSchedule, Progress

TASK = (StageId(1), GroupId(0))


def taken(
    guard: ProtectionSpec, moments: list[Progress], covered_from: float = 0.0
) -> list[Progress]:
    """The moments at which a checkpoint is due; the consumers have had theirs at such a time."""
    schedule = CheckpointSchedule()
    return [
        now
        for now in moments
        if schedule.is_due(TASK, guard, now, lambda _, now=now: now.now_s >= covered_from)  # type: ignore[misc]
    ]


def at(*seconds: float) -> list[Progress]:
    return [Progress(s, int(s * 100), 0.0) for s in seconds]


def test_tasks_that_begin_at_different_times_are_due_together() -> None:
    guard = ProtectionSpec(standbys=1, every_ms=1_000)
    ticks = [10 + n / 100 for n in range(300)]
    for first in (0, 30, 99):
        due = taken(guard, at(*ticks[first:]))
        assert [round(p.now_s, 2) for p in due] == [11.0, 12.0]


def test_so_many_epochs_are_counted_from_the_first() -> None:
    guard = ProtectionSpec(standbys=1, every_epochs=50)
    moments = [Progress(0.0, epoch, 0.0) for epoch in range(60, 210)]
    assert [p.epoch for p in taken(guard, moments)] == [100, 150, 200]


def test_a_producer_waits_for_its_consumers_but_not_for_ever() -> None:
    guard = ProtectionSpec(standbys=1, every_ms=1_000)
    moments = at(10.5, 11.0, 11.1, 11.2, 11.4, 11.6, 11.9)
    assert [p.now_s for p in taken(guard, moments, covered_from=11.2)] == [11.2]
    assert PATIENCE == 0.5 and [p.now_s for p in taken(guard, moments, covered_from=99)] == [11.6]


def test_consumers_are_to_be_covered_after_the_last_one() -> None:
    asked: list[int] = []
    schedule, guard = CheckpointSchedule(), ProtectionSpec(standbys=1, every_epochs=10)
    for epoch in (7, 12, 23):
        schedule.is_due(TASK, guard, Progress(0.0, epoch, 0.0), lambda e: asked.append(e) or True)
    assert asked == [7, 12]


def test_what_would_have_to_be_done_again_is_bounded_instead() -> None:
    guard = ProtectionSpec(standbys=1, recovery_ms=400)
    moments = [Progress(0.0, 0, work / 10) for work in range(6)]
    assert [p.work_s for p in taken(guard, moments)] == [0.2, 0.4]
    assert [p.now_s for p in taken(guard, at(0.0, 59.0, 61.0, 119.0, 122.0))] == [61.0, 122.0]
