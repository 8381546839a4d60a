"""The rotation of a flow's secret, as a machine."""

import itertools

import pytest

from holdfast.control.rotation import (
    Asked,
    Confirmed,
    Joined,
    Left,
    Rotation,
    RotationPhase,
)
from holdfast.errors import ProtocolError

A, B, C = ("site", 0), ("site", 1), ("agent", 1)
OFFERED, SWITCHED, RETIRED, STEADY = (
    RotationPhase.OFFERED,
    RotationPhase.SWITCHED,
    RotationPhase.RETIRED,
    RotationPhase.STEADY,
)


def begun(*members: tuple[str, int]) -> Rotation:
    rotation = Rotation()
    assert rotation.handle(Asked("old", "new", members))[0] is OFFERED
    return rotation


def test_each_phase_waits_for_everybody() -> None:
    rotation = begun(A, B, C)
    for ids, following in (
        (("old", "new"), SWITCHED),
        (("new", "old"), RETIRED),
        (("new",), STEADY),
    ):
        assert rotation.handle(Confirmed(A, ids)) == []
        assert rotation.handle(Confirmed(A, ids)) == []  # twice
        assert rotation.handle(Confirmed(C, ids)) == []
        assert rotation.handle(Confirmed(B, ids)) == [following]


def test_late_answers_of_an_earlier_phase_do_not_count() -> None:
    rotation = begun(A, B)
    rotation.handle(Confirmed(A, ("old", "new")))
    assert rotation.handle(Confirmed(B, ("old", "new"))) == [SWITCHED]
    assert rotation.handle(Confirmed(A, ("old", "new"))) == []
    assert rotation.waits_for == [A, B]


def test_who_leaves_is_not_waited_for_and_who_joins_is() -> None:
    rotation = begun(A, B)
    rotation.handle(Confirmed(A, ("old", "new")))
    rotation.handle(Joined(C))
    assert rotation.handle(Left(B)) == []
    assert rotation.handle(Confirmed(C, ("old", "new"))) == [SWITCHED]
    assert rotation.waits_for == [A, C]


def test_nobody_to_wait_for() -> None:
    assert begun().phase is STEADY


def test_two_at_once_are_refused() -> None:
    with pytest.raises(ProtocolError, match="Asked while a rotation is offered"):
        begun(A).handle(Asked("new", "newer", (A,)))


def test_neighbours_in_any_two_phases_that_meet_accept_each_other() -> None:
    """A phase begins when all are in the one before, so two processes are at most one apart."""
    rotation = begun(A)
    phases = [("old",), *(rotation.held(p) for p in (OFFERED, SWITCHED, RETIRED))]
    for one, other in itertools.pairwise(phases):
        assert one[0] in other and other[0] in one
