"""What every arbiter promises; the tests of each implementation inherit these.

A subclass says how to make a `party` and how the leader's lease comes to its end.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import pytest

from holdfast.arbiter import Arbiter, Entry, arbiter
from holdfast.errors import ArbiterAway, Superseded

MakeParty = Callable[[], Arbiter]
T = TypeVar("T")

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.support.arbiter_contract", "holdfast.arbiter.file"])


def eventually(call: Callable[[], T], seconds: float = 10) -> T:
    """What `call` gives as soon as the arbiter can be reached."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except ArbiterAway:
            if time.monotonic() > deadline:
                raise


def led(party: Arbiter, holder: str) -> Entry:
    entry = party.lead(holder)
    assert entry is not None
    return entry


def a_version_before(entry: Entry) -> Entry:
    return replace(entry, version=entry.version - 1)


class Contract:
    LEASE_S = 0.6

    @pytest.fixture
    def party(self) -> Iterator[MakeParty]:
        raise NotImplementedError
        yield

    def expire(self, leader: Arbiter) -> None:
        time.sleep(self.LEASE_S * 1.1)

    def test_in_the_beginning_there_is_an_empty_entry(self, party: MakeParty) -> None:
        assert party().read() == Entry(0, 0, "", b"")

    def test_the_first_to_ask_leads_and_everybody_can_read_where(self, party: MakeParty) -> None:
        a, b = party(), party()
        assert led(a, "a:1") == Entry(1, 1, "a:1", b"")
        assert b.lead("b:2") is None
        assert b.read() == Entry(1, 1, "a:1", b"")

    def test_a_leader_that_asks_again_gets_its_latest_entry(self, party: MakeParty) -> None:
        a = party()
        entry = a.commit(led(a, "a"), b"view")
        assert a.lead("a") == entry
        assert a.lead("somebody else") is None

    def test_a_commit_changes_version_and_value_only(self, party: MakeParty) -> None:
        a, b = party(), party()
        value = bytes(range(256)) * 400
        entry = a.commit(led(a, "a"), value)
        assert entry == Entry(2, 1, "a", value) == b.read()
        assert a.commit(entry, b"") == Entry(3, 1, "a", b"") == b.read()

    def test_a_commit_after_a_version_that_is_not_the_latest(self, party: MakeParty) -> None:
        a = party()
        first = led(a, "a")
        second = a.commit(first, b"one")
        with pytest.raises(Superseded, match="version 1 is now 2"):
            a.commit(first, b"another")
        assert a.read() == second

    def test_a_commit_said_twice_is_one(self, party: MakeParty) -> None:
        a = party()
        entry = led(a, "a")
        assert a.commit(entry, b"one") == a.commit(entry, b"one") == a.read()

    def test_only_the_leader_commits(self, party: MakeParty) -> None:
        a, b = party(), party()
        with pytest.raises(Superseded):
            b.commit(b.read(), b"nobody leads")
        led(a, "a")
        with pytest.raises(Superseded, match="does not lead the flow"):
            b.commit(b.read(), b"another leads")
        assert not b.renew(b.read())
        b.resign(b.read())
        assert a.renew(a.read())

    def test_who_resigns_is_followed_at_once(self, party: MakeParty) -> None:
        a, b = party(), party()
        old = a.commit(led(a, "a"), b"view")
        a.resign(old)
        assert led(b, "b") == Entry(3, 2, "b", b"view")
        assert not a.renew(old)
        with pytest.raises(Superseded):
            a.commit(old, b"void")

    def test_who_renews_leads_on(self, party: MakeParty) -> None:
        a, b = party(), party()
        entry = led(a, "a")
        end = time.monotonic() + self.LEASE_S * 1.5
        while time.monotonic() < end:
            assert a.renew(entry)
            assert b.lead("b") is None
            time.sleep(self.LEASE_S / 5)
        assert a.commit(entry, b"view").term == 1

    def test_a_lease_that_has_run_out_is_over_even_if_nobody_follows(
        self, party: MakeParty
    ) -> None:
        a = party()
        entry = led(a, "a")
        self.expire(a)
        with pytest.raises(Superseded, match="has expired"):
            a.commit(entry, b"void")
        assert not a.renew(entry)
        assert led(a, "a") == Entry(2, 2, "a", b"")

    def test_who_was_followed_cannot_disturb_the_next(self, party: MakeParty) -> None:
        a, b = party(), party()
        old = led(a, "a")
        self.expire(a)
        new = led(b, "b")
        assert new == Entry(2, 2, "b", b"")
        assert not a.renew(old)
        a.resign(old)
        with pytest.raises(Superseded, match="term 2 of b"):
            a.commit(old, b"void")
        assert a.lead("a") is None
        assert b.commit(new, b"view") == b.read()

    def test_an_entry_that_is_removed_was_never_there(self, party: MakeParty) -> None:
        a, b = party(), party()
        entry = a.commit(led(a, "a"), b"view")
        assert a.names() == [a.flow]
        assert not b.remove(entry), "a leads"
        a.resign(entry)
        assert not b.remove(a_version_before(entry)) and b.read() == entry
        assert b.remove(entry)
        assert b.names() == []
        assert led(party(), "c") == Entry(1, 1, "c", b"")

    def test_of_two_that_ask_at_once_one_leads(self, party: MakeParty) -> None:
        won: dict[str, list[int]] = {"a": [], "b": []}

        def run(me: str) -> None:
            mine = party()
            while mine.read().term < 40:
                entry = mine.lead(me)
                if entry is not None:
                    won[me].append(entry.term)
                    mine.resign(mine.commit(entry, me.encode()))

        threads = [threading.Thread(target=run, args=(me,)) for me in won]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        terms = won["a"] + won["b"]
        assert sorted(terms) == list(range(1, len(terms) + 1))


class ContractBetweenProcesses:
    """For arbiters that have an address; a subclass gives it as `url`."""

    LEASE_S = 0.6

    def test_a_leader_stopped_past_its_lease_has_lost_it(self, url: str) -> None:
        mine, theirs = PROCESSES.Pipe()
        child = PROCESSES.Process(target=_lead_then_commit, args=(url, self.LEASE_S, theirs))
        child.start()
        theirs.close()
        assert child.pid is not None
        try:
            assert mine.recv() == Entry(1, 1, "child", b"")
            os.kill(child.pid, signal.SIGSTOP)
            here = arbiter(url, "flow", self.LEASE_S)
            entry = _lead_within(here, 10)
            assert entry == Entry(2, 2, "parent", b"")
            os.kill(child.pid, signal.SIGCONT)
            mine.send("go")
            assert mine.recv() == ("Superseded", False)
            assert here.read() == entry
            here.close()
        finally:
            child.kill()
            child.join()


def _lead_within(party: Arbiter, seconds: float) -> Entry | None:
    deadline = time.monotonic() + seconds
    while (entry := party.lead("parent")) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return entry


def _lead_then_commit(url: str, lease_s: float, pipe: Connection) -> None:
    party = arbiter(url, "flow", lease_s)
    entry: Any = party.lead("child")
    pipe.send(entry)
    while not pipe.poll(lease_s / 5):
        eventually(lambda: party.renew(entry))
    try:
        eventually(lambda: party.commit(entry, b"void"))
        outcome = "committed"
    except Superseded:
        outcome = "Superseded"
    pipe.send((outcome, eventually(lambda: party.renew(entry))))
