"""The rotation of a flow's secret, as a machine."""

import itertools

import pytest

from holdfast.control.credentials import Credentials
from holdfast.control.rotating import KeyRotator
from holdfast.control.rotation import (
    Asked,
    Confirmed,
    Joined,
    Left,
    Rotation,
    RotationPhase,
    TermEnded,
)
from holdfast.control.site_connections import SiteConnections
from holdfast.errors import HostError, ProtocolError
from holdfast.net import wire
from holdfast.net.keys import Keys

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


def test_a_rotation_ends_with_the_term_of_its_leader() -> None:
    rotation = begun(A, B)
    assert rotation.handle(TermEnded()) == []
    assert rotation.phase is STEADY and rotation.waits_for == []
    assert rotation.handle(Confirmed(A, ("old", "new"))) == []
    assert rotation.handle(Asked("old", "newer", (A,))) == [OFFERED]


class Apps:
    """A control of three applications whose connections are lists."""

    def __init__(self) -> None:
        self.sent: list[wire.Message] = []
        self.leads = True
        self.credentials = Credentials(b"a secret of this test", None, ["127.0.0.1"], 0, {})
        self.rotator = KeyRotator(
            self.credentials,
            SiteConnections(),
            {1: self},  # type: ignore[dict-item]
            term=lambda: 3,
            leads=lambda: self.leads,
            members=lambda: ((wire.AGENT, 1), (wire.AGENT, 2)),
            stretch=lambda _, then: then(),
        )

    def send(self, message: wire.Message) -> None:
        self.sent.append(message)

    def confirm(self, app: int) -> None:
        self.role, self.id = wire.AGENT, app
        ids = tuple(Keys.of(s).id for s in self.credentials.secrets)
        self.rotator.on_keys_held(self, wire.KeysHeld(ids))  # type: ignore[arg-type]


def test_an_application_that_is_away_is_waited_for() -> None:
    """It would hold no key that others accept, and could still come to lead."""
    apps = Apps()
    done = apps.rotator.ask(None)
    for _ in range(3):
        apps.confirm(1)
    assert not done.done() and apps.rotator.waits_for == [(wire.AGENT, 2)]
    for _ in range(3):
        apps.confirm(2)
        apps.confirm(1)
    assert done.done() and len(apps.credentials.secrets) == 1
    assert all(isinstance(m, wire.NewSecrets) for m in apps.sent)


def test_asking_again_for_the_same_goes_on_and_another_is_refused() -> None:
    apps = Apps()
    done = apps.rotator.ask("a secret of the operator's")
    assert apps.rotator.ask("a secret of the operator's") is done
    assert apps.rotator.ask(None) is done
    with pytest.raises(HostError, match="by another one already"):
        apps.rotator.ask("another secret altogether")


def test_a_leader_that_is_deposed_does_not_go_on_alone() -> None:
    apps = Apps()
    done = apps.rotator.ask(None)
    held = apps.credentials.secrets
    apps.leads = False
    apps.rotator.follow_members()
    with pytest.raises(HostError, match="no longer leads"):
        done.result(0)
    assert apps.credentials.secrets == held and len(held) == 2
    # The next leader rotates: this one follows.
    apps.role, apps.id = wire.SERVER, 1
    new = Keys.of(b"0123456789ab:the next leader's secret")
    secrets = (b"0123456789ab:the next leader's secret", b"a secret of this test")
    apps.rotator.on_new_secrets(apps, wire.NewSecrets(4, secrets))  # type: ignore[arg-type]
    assert apps.sent[-1] == wire.KeysHeld((new.id, Keys.of(b"a secret of this test").id))
    with pytest.raises(ProtocolError, match="does not lead"):
        apps.rotator.on_new_secrets(apps, wire.NewSecrets(2, secrets))  # type: ignore[arg-type]


def test_only_the_leader_tells_others_which_keys_to_hold() -> None:
    """One that follows may be a phase behind, and would send a site back to the old keys."""
    apps = Apps()
    apps.rotator.ask(None)
    apps.sent.clear()
    apps.rotator.on_joined((wire.AGENT, 1))
    assert [type(m) for m in apps.sent] == [wire.NewSecrets]
    apps.leads = False
    apps.rotator.on_joined((wire.AGENT, 1))
    assert len(apps.sent) == 1
