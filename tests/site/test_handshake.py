"""Handshakes without sockets: who is let in, and what somebody between the two ends can do."""

import pickle

import pytest

from holdfast.api.security import Level
from holdfast.errors import FlowError, ProtocolError
from holdfast.net import wire
from holdfast.net.handshake import EDGES, Handshake, HandshakePhase, Identity, Party
from holdfast.net.keys import Keyring, Keys, rotated
from holdfast.net.sealing import Sealer
from tests.support.parties import SECRET, party

SITE, CONTROL = (wire.SITE, 3), (wire.SERVER, 0)
READER, PUSHER, AGENT = (wire.READER, 0), (wire.PUSHER, 0), (wire.AGENT, 1)


def shake(
    dialler: Party, acceptor: Party, peer: Identity, identity: Identity | None = None
) -> tuple[Handshake, Handshake]:
    """Both ends after a handshake in the clear. Raises what either of them raises."""
    client = Handshake(dialler, identity or dialler.own, peer)
    server = Handshake(acceptor, None, peer)
    server.secured(None)
    client.handle(server.challenge)
    hello = client.secured(None)
    assert hello is not None
    answer = server.handle(hello)
    assert answer is not None
    client.handle(answer)
    return client, server


@pytest.mark.parametrize(
    ("dialler", "dialled"),
    [
        (SITE, (wire.SITE, 5)),
        (SITE, CONTROL),
        ((wire.PULSE, 3), CONTROL),
        (AGENT, CONTROL),
        (READER, CONTROL),
        (READER, SITE),
        (PUSHER, SITE),
    ],
    ids=str,
)
def test_everybody_gets_in_where_it_belongs(dialler: Identity, dialled: Identity) -> None:
    client, server = shake(party(dialler), party(dialled), dialled)
    assert client.phase is server.phase is HandshakePhase.OPEN
    assert (server.role, server.id) == dialler
    assert (client.role, client.id) == dialled


def test_every_edge_of_the_table_is_taken() -> None:
    """The paths of dialler and acceptor, and the acceptor's refusal, are all there is."""
    client, server = shake(party(SITE), party(CONTROL), CONTROL)
    assert client.phase is server.phase is HandshakePhase.OPEN
    assert set(EDGES.values()) == set(HandshakePhase) - {HandshakePhase.CHALLENGE}
    with pytest.raises(ProtocolError, match="Welcome while the handshake is over"):
        client.handle(wire.Welcome(b""))


# --- one key is one right -------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["reader", "pusher"])
@pytest.mark.parametrize("claimed", ["site", "agent", "pulse", "server", "pusher", "reader"])
def test_a_client_has_no_other_role_than_its_own(role: str, claimed: str) -> None:
    """Whoever may read one sink can neither push rows nor give orders."""
    if claimed == role:
        return
    keys = Keys.of(SECRET).for_client(role)
    (own,) = keys.held.values()
    forged = Keys(keys.id, keys.incarnation, {claimed: own, "control:3": own})
    for dialled in (SITE, CONTROL):
        with pytest.raises(ProtocolError):
            shake(Party((claimed, 3), Keyring(forged), None), party(dialled), dialled)


def test_a_site_is_neither_a_control_nor_towards_controls_another_site() -> None:
    keys = Keys.of(SECRET).for_site(3)
    three = Party(SITE, Keyring(keys), Level.AUTH)
    with pytest.raises(ProtocolError, match="no key to dial"):
        shake(three, party(CONTROL), CONTROL, identity=(wire.SITE, 4))
    own = keys.held["control:3"]
    forged = Keys(keys.id, keys.incarnation, {"control:4": own})
    with pytest.raises(ProtocolError, match="does not know the flow's secret"):
        shake(Party((wire.SITE, 4), Keyring(forged), None), party(CONTROL), CONTROL)
    # Site 4 dials what it takes for its control: site 3 cannot answer as one.
    posing = Party(CONTROL, Keyring(keys), Level.AUTH)
    with pytest.raises(ProtocolError):
        shake(party((wire.SITE, 4)), posing, CONTROL)


def test_keys_do_not_tell_of_each_other() -> None:
    everything = Keys.of(SECRET)
    assert len(set(everything.held.values())) == len(everything.held)
    site = everything.for_site(3)
    assert set(site.held) == {"site", "pusher", "reader", "control:3"}
    assert SECRET not in pickle.dumps(site)
    assert set(everything.for_client("reader").held) == {"reader"}


# --- somebody in between --------------------------------------------------------------------------


def test_a_connection_that_is_relayed_to_another_site_is_refused() -> None:
    with pytest.raises(ProtocolError, match="site 3 dialled site 5, and reached site 6"):
        shake(party(SITE), party((wire.SITE, 6)), (wire.SITE, 5))


def test_a_relay_that_asks_for_a_weaker_level_is_noticed() -> None:
    """A reader takes the level that the server asks for, so the proof must include it."""
    client = Handshake(party(READER), READER, SITE)
    server = Handshake(party(SITE, level=Level.MAC), None, SITE)
    server.secured(None)
    said = server.challenge
    client.handle(wire.Challenge(said.nonce, said.version, "auth"))
    hello = client.secured(None)
    assert hello is not None
    with pytest.raises(ProtocolError, match="does not know the flow's secret"):
        server.handle(hello)


def test_a_process_that_was_given_a_level_takes_no_other() -> None:
    with pytest.raises(ProtocolError, match="the peer has security 'auth', this process 'mac'"):
        shake(party(SITE, level=Level.MAC), party(CONTROL), CONTROL)


def test_a_hello_cannot_be_used_twice() -> None:
    first, second = (Handshake(party(CONTROL), None, CONTROL) for _ in range(2))
    client = Handshake(party(SITE), SITE, CONTROL)
    first.secured(None), second.secured(None)
    client.handle(first.challenge)
    hello = client.secured(None)
    assert hello is not None
    assert isinstance(first.handle(hello), wire.Welcome)
    with pytest.raises(ProtocolError):
        second.handle(hello)


def test_seals_find_messages_that_were_changed_repeated_dropped_or_reflected() -> None:
    level = Level.MAC
    client, server = shake(party(SITE, level=level), party(CONTROL, level=level), CONTROL)
    (sends, _), (replies, receives) = client.sealers() or (), server.sealers() or ()
    first, second = sends.seal([b"one"]), sends.seal([b"two"])
    receives.check([b"one"], first)
    for parts, seal in (([b"one"], first), ([b"Two"], second), ([b"two"], bytes(16))):
        with pytest.raises(ProtocolError, match="wrong seal"):
            _copy(receives).check(parts, seal)
    with pytest.raises(ProtocolError):
        _copy(receives).check([b"three"], sends.seal([b"three"]))  # "two" was dropped
    with pytest.raises(ProtocolError):
        _copy(receives).check([b"x"], replies.seal([b"x"]))
    receives.check([b"two"], second)


def _copy(sealer: Sealer) -> Sealer:
    made = Sealer(b"")
    made._mac, made._number = sealer._mac, sealer._number
    return made


# --- versions and plans ---------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, wire.VERSION + 1])
def test_another_version_is_refused_by_name(version: int) -> None:
    client = Handshake(party(SITE), SITE, CONTROL)
    with pytest.raises(ProtocolError, match=f"version {version} of the wire protocol"):
        client.handle(wire.Challenge(b"n" * 16, version, "auth"))


def test_a_challenge_of_last_week_has_no_version() -> None:
    old = b"\x92\xa9Challenge\xc4\x10" + b"n" * 16
    assert wire.decode(old, greeting=True) == wire.Challenge(b"n" * 16, 0, "")


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({"numbers": "0a0a0a0a", "totals": "ffffffff"}, "stages that differ: totals;"),
        ({"numbers": "0a0a0a0a"}, "2 stages here, 1 there"),
    ],
)
def test_two_applications_with_different_flow_files_are_told_which_stages_differ(
    there: dict[str, str], said: str
) -> None:
    leader, agent = party(CONTROL), party(AGENT)
    leader.plan, agent.plan = {"numbers": "0a0a0a0a", "totals": "0b0b0b0b"}, there
    with pytest.raises(ProtocolError, match=said):
        shake(agent, leader, CONTROL)


# --- rotation -------------------------------------------------------------------------------------


def test_a_rotated_secret_has_other_keys_of_the_same_incarnation() -> None:
    old = Keys.of(SECRET)
    new = Keys.of(rotated(old))
    assert new.incarnation == old.incarnation
    assert new.id != old.id and not set(new.held.values()) & set(old.held.values())
    assert Keys.of(rotated(new)).incarnation == old.incarnation


def test_flows_with_the_same_secret_have_other_keys() -> None:
    a, b = Keys.of(SECRET, "a"), Keys.of(SECRET, "b")
    assert a.id != b.id and a.incarnation != b.incarnation
    assert not set(a.held.values()) & set(b.held.values())
    assert Keys.of(SECRET, "a") == a


def test_a_secret_of_another_start_or_a_short_one_is_refused() -> None:
    with pytest.raises(FlowError, match="of start 0123456789ab of a flow"):
        rotated(Keys.of(SECRET), "0123456789ab:another secret altogether")
    with pytest.raises(FlowError, match="at least 16 characters"):
        rotated(Keys.of(SECRET), "short")
    with pytest.raises(FlowError, match="at least 16 characters"):
        rotated(Keys.of(SECRET), f"{Keys.of(SECRET).incarnation}:short")


def test_old_keys_are_good_until_they_are_retired() -> None:
    control, reader = party(CONTROL), party(READER)
    new = Keys.of(rotated(control.ring.current))
    control.ring.hold([new, control.ring.current])
    shake(reader, control, CONTROL)
    shake(Party.client(new, wire.READER), control, CONTROL)
    control.ring.hold([new])
    with pytest.raises(ProtocolError, match="of a secret that was rotated"):
        shake(reader, control, CONTROL)
