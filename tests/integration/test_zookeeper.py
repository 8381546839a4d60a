"""The arbiter in a real ZooKeeper: the contract, and what only a server on its own can do."""

import signal
import time
import uuid
from collections.abc import Callable, Iterator

import pytest
from kazoo.client import KazooClient

from holdfast.arbiter import Arbiter, Entry, arbiter
from holdfast.arbiter.zookeeper import ZooKeeperArbiter
from holdfast.errors import ArbiterAway, Superseded
from holdfast.lab.chaos.zookeeper import ZooKeeperServer
from tests.support.arbiter_contract import (
    Contract,
    ContractBetweenProcesses,
    MakeParty,
    eventually,
    led,
)


@pytest.fixture
def url(server: ZooKeeperServer) -> Iterator[str]:
    yield server.url
    # The tests between processes all call their flow "flow".
    client = KazooClient(f"127.0.0.1:{server.port}")
    client.start()
    client.delete("/holdfast", recursive=True)
    client.stop()
    client.close()


@pytest.fixture
def party(url: str) -> Iterator[MakeParty]:
    flow, made = f"flow/{uuid.uuid4()}", []

    def make() -> Arbiter:
        made.append(arbiter(url, flow, 2.0))
        return made[-1]

    yield make
    for one in made:
        one.close()


def end_session(party: Arbiter) -> None:
    """Close the session from a second connection; the server then tells the first."""
    assert isinstance(party, ZooKeeperArbiter)
    identity = party._client.client_id
    intruder = KazooClient(party.hosts, client_id=identity)
    intruder.start()
    intruder.stop()
    intruder.close()


class TestZooKeeper(Contract, ContractBetweenProcesses):
    @pytest.fixture
    def party(self, party: MakeParty) -> MakeParty:
        return party

    def expire(self, leader: Arbiter) -> None:
        end_session(leader)


def test_a_session_that_ended_is_noticed_without_a_pause(party: MakeParty) -> None:
    a = party()
    entry = a.commit(led(a, "a"), b"view")
    end_session(a)
    assert not a.renew(entry)
    assert a.read() == entry


def test_who_closes_is_followed_at_once(party: MakeParty) -> None:
    a, b = party(), party()
    led(a, "a")
    a.close()
    assert led(b, "b").term == 2
    with pytest.raises(ArbiterAway):
        a.read()


def calls(party: Arbiter, entry: Entry) -> list[Callable[[], object]]:
    return [
        party.read,
        lambda: party.lead("a"),
        lambda: party.commit(entry, b"after"),
        lambda: party.renew(entry),
        lambda: party.resign(entry),
    ]


def test_a_server_that_is_killed_and_comes_back(party: MakeParty, server: ZooKeeperServer) -> None:
    a, b = party(), party()
    entry = a.commit(led(a, "a"), b"before")
    server.kill()
    try:
        for call in calls(a, entry):
            begin = time.monotonic()
            with pytest.raises(ArbiterAway, match="at zk://"):
                call()
            assert time.monotonic() - begin < 2
    finally:
        server.start()
    assert eventually(a.read) == entry
    go_on(a, entry)
    assert eventually(b.read).value == b"after"


def test_a_server_that_is_stopped_and_wakes(party: MakeParty, server: ZooKeeperServer) -> None:
    a = party()
    entry = led(a, "a")
    server.signal(signal.SIGSTOP)
    try:
        for call in calls(a, entry)[:3]:
            begin = time.monotonic()
            with pytest.raises(ArbiterAway):
                call()
            assert time.monotonic() - begin < 2
    finally:
        server.signal(signal.SIGCONT)
    latest = eventually(a.read)
    assert latest in (entry, Entry(2, 1, "a", b"after"))
    go_on(a, entry)
    assert eventually(a.read).value == b"after"


def go_on(leader: Arbiter, entry: Entry) -> None:
    """Commit after an outage. The session may have outlived it or not; what was committed has."""
    try:
        # Whether an earlier commit went through or not, saying it again makes it so, once.
        again = eventually(lambda: leader.commit(entry, b"after"))
        assert again == Entry(entry.version + 1, entry.term, entry.holder, b"after")
    except Superseded:
        assert not eventually(lambda: leader.renew(entry))
        new = eventually(lambda: leader.lead(entry.holder))
        assert new is not None and new.term == entry.term + 1
        eventually(lambda: leader.commit(new, b"after"))


@pytest.mark.parametrize("what", ["lead", "commit"])
def test_an_answer_that_got_lost(
    party: MakeParty, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    a, b = party(), party()
    assert isinstance(a, ZooKeeperArbiter)
    act = {"lead": lambda: a.lead("a"), "commit": lambda: a.commit(Entry(1, 1, "a"), b"view")}
    if what == "commit":
        led(a, "a")
    transact = a._transact

    def transact_unheard(*args: object) -> bool:
        transact(*args)  # type: ignore[arg-type]
        raise ArbiterAway(where="here", cause="the answer got lost")

    with monkeypatch.context() as patch:
        patch.setattr(a, "_transact", transact_unheard)
        with pytest.raises(ArbiterAway):
            act[what]()
    assert b.lead("b") is None
    assert act[what]() == b.read()
    assert a.renew(b.read())


def test_who_asks_while_another_comes_and_goes(
    party: MakeParty, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = party(), party()
    read = a.read

    def read_then_sleep() -> Entry:
        entry = read()
        b.resign(b.commit(led(b, "b"), b"view"))
        return entry

    with monkeypatch.context() as patch:
        patch.setattr(a, "read", read_then_sleep)
        assert a.lead("a") is None
    assert led(a, "a") == Entry(3, 2, "a", b"view")


def test_who_resigns_too_late_does_not_depose_the_next(
    party: MakeParty, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = party(), party()
    old = led(a, "a")
    read = a.read

    def read_then_sleep() -> Entry:
        entry = read()
        end_session(a)
        led(b, "b")
        return entry

    with monkeypatch.context() as patch:
        patch.setattr(a, "read", read_then_sleep)
        a.resign(old)
    assert b.renew(b.read())


def test_a_server_that_was_never_there(server: ZooKeeperServer) -> None:
    away = arbiter("zk://127.0.0.1:1", "flow", 1)
    for call in (away.read, lambda: away.lead("a")):
        begin = time.monotonic()
        with pytest.raises(ArbiterAway):
            call()
        assert time.monotonic() - begin < 2
    begin = time.monotonic()
    away.close()
    assert time.monotonic() - begin < 2
