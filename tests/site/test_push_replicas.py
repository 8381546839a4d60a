"""Every row is taken once, whichever replicas of a push source die; see `push_story`."""

from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.net import wire
from holdfast.site import push, push_lane, push_log
from holdfast.site.push import PushReader
from holdfast.site.push_entries import Holding
from holdfast.site.push_lane import LaneState, ReplicaLane
from holdfast.site.push_log import PushLog
from holdfast.site.spill import Held
from holdfast.site.staging import Push, Staged
from tests.support.push_story import told


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(wire, "PIECE_BYTES", 48)
    monkeypatch.setattr(push_log, "PUSH_BATCH_BYTES", 100)
    monkeypatch.setattr(push_lane, "WINDOW_BYTES", 250)
    monkeypatch.setattr(push, "HELD_BYTES_MAX", 300)
    monkeypatch.setattr(push, "MEMORY_BYTES_MAX", 350)
    yield


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_every_row_is_taken_once_whichever_replicas_die(
    tiny: None, replicas: int, stored: bool
) -> None:
    for seed in range(8):
        told(seed, replicas, stored)


def _enters_in_parts(
    self: PushReader, pieces: list[Held], place: Any, reply: Any, pull_mark: str = ""
) -> None:
    for piece in pieces[:-1]:
        _submit(self, [piece], place, None)
    _submit(self, pieces[-1:], place, reply)


def _takes_any_attempt(self: Push, partition: int, attempt: int = 0) -> Staged | None:
    found = [s for (p, _), s in self._partitions.items() if p == partition]
    return found[-1] if found else None


def _believes_in_numbers(self: PushLog, holding: Holding) -> int:
    return min([self.submitted, *(n for _, n in holding.made[-1:])], default=holding.entered)


def _enters_what_arrives(self: PushLog) -> Any:
    return self._enter_up_to(self.matched)


def _drops_what_has_not_entered(
    self: PushLog, leader: Any, *args: Any, right: Any = PushLog.on_replicas
) -> Any:
    effects = []
    if leader != self._leader:
        effects = self._drop_after(self.entered)
        self.submitted_at = self.entered_at
    return effects + right(self, leader, *args)


def _counts_at_once(self: ReplicaLane, right: Any = ReplicaLane.reaches) -> bool:
    return bool(right(self)) or self.state is LaneState.BEHIND


def _follows_anybody(self: PushLog, site: Any, rank: int) -> bool:
    return not self.leads


def _trims_what_all_have(self: PushLog) -> int:
    return min([self.entered, *(lane.has for lane in self._lanes.values())])


_submit = PushReader._submit
BUGS: dict[str, tuple[Any, str, Any]] = {
    "a micro-batch enters in parts": (PushReader, "_submit", _enters_in_parts),
    "the last attempt counts": (Push, "find", _takes_any_attempt),
    "rows are answered before others have them": (
        PushLog,
        "_waited_for",
        lambda self: self.submitted,
    ),
    "equal numbers are equal push batches": (PushLog, "_equal_up_to", _believes_in_numbers),
    "rows enter where they arrive": (PushLog, "_enter_known", _enters_what_arrives),
    "a replica forgets what a lost leader sent": (
        PushLog,
        "on_replicas",
        _drops_what_has_not_entered,
    ),
    "a new replica counts at once": (ReplicaLane, "reaches", _counts_at_once),
    "a replaced leader is followed": (PushLog, "follow", _follows_anybody),
    "what all have is trimmed": (PushLog, "_everywhere", _trims_what_all_have),
}
"""What may be wrong with the protocol, and is found out."""


CAUGHT = {
    "a micro-batch enters in parts": (0, 2, True),
    "the last attempt counts": (0, 2, False),
    "rows are answered before others have them": (0, 2, True),
    "equal numbers are equal push batches": (1, 2, False),
    "rows enter where they arrive": (0, 4, True),
    "a replica forgets what a lost leader sent": (3, 2, False),
    "a new replica counts at once": (48, 3, False),
    "a replaced leader is followed": (0, 4, True),
    "what all have is trimmed": (4, 2, False),
}
"""The story that finds each of them."""


@pytest.mark.parametrize("bug", CAUGHT)
def test_such_a_story_finds_what_is_wrong(
    tiny: None, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    monkeypatch.setattr(*BUGS[bug])
    with pytest.raises(AssertionError):
        told(*CAUGHT[bug])
