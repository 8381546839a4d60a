"""What becomes of the entries of earlier starts of a flow, in every arbiter that has a URL."""

import pytest

from holdfast.arbiter import arbiter
from holdfast.control.arbitration import ArbiterClient
from holdfast.control.knowledge import Knowledge, decode
from holdfast.control.starts import NOTED, FlowStarts, key_of, resolved_key
from holdfast.core.effects import AskCommit, AskLead, AskRead
from holdfast.core.events import Committed, EntryRead, LeadGranted, LeadRefused

LEASE_S = 2.0
RUNNING = Knowledge(None, {}, {}, {}, {}, [], True, False).encode()
ENDED = Knowledge(None, {}, {}, {}, {}, [], False, False, ended=True).encode()


def incarnation(number: int) -> str:
    return f"{number:012x}"


def left(url: str, number: int, value: bytes, flow: str = "f") -> None:
    """What a start leaves: its entry, and what it has looked up."""
    for key in (resolved_key(flow, incarnation(number)), key_of(flow, incarnation(number))):
        party = arbiter(url, key, LEASE_S)
        entry = party.lead("somebody")
        assert entry is not None
        party.resign(party.commit(entry, value))
        party.close()


def names(url: str) -> list[str]:
    """All entries but the one that notes starts."""
    party = arbiter(url, "f-ended", LEASE_S)
    found = party.names()
    party.close()
    return sorted(n for n in found if n != "f-ended")


def begin(url: str, number: int) -> ArbiterClient:
    """A start asks for the lead, and removes what others left."""
    client = ArbiterClient(url, "f", incarnation(number), LEASE_S)
    given = client.answer(AskLead(1, None), "me")
    assert isinstance(given, LeadGranted)
    assert client._cleaner is not None
    client._cleaner.join()
    return client


class StartsContract:
    """A subclass gives the `url` of an empty arbiter."""

    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    def test_entries_do_not_grow_with_starts(self, url: str) -> None:
        for number in range(5):
            client = begin(url, number)
            entry = client.arbiter.read()
            given = client.answer(AskCommit(2, entry, ENDED, True), "me")
            assert isinstance(given, Committed)
            client.arbiter.resign(given.entry)
            client.close()
            assert names(url) == [key_of("f", incarnation(number))]

    def test_what_has_not_ended_and_other_flows_stay(self, url: str) -> None:
        left(url, 1, RUNNING)
        left(url, 2, ENDED)
        left(url, 3, ENDED, flow="g")
        left(url, 4, ENDED, flow="f-000000000004")
        stays = [n for n in names(url) if "f-000000000002" not in n]
        begin(url, 5).close()
        assert names(url) == sorted([*stays, "f-000000000005"])

    def test_an_entry_that_somebody_leads_stays(self, url: str) -> None:
        left(url, 1, ENDED)
        living = arbiter(url, key_of("f", incarnation(1)), 60.0)
        assert living.lead("living") is not None
        begin(url, 2).close()
        assert living.read().value == ENDED
        living.close()

    def test_an_application_that_comes_after_the_removal_ends(self, url: str) -> None:
        left(url, 1, ENDED)
        slept = ArbiterClient(url, "f", incarnation(1), LEASE_S)
        begin(url, 2).close()
        assert key_of("f", incarnation(1)) not in names(url)
        awake = ArbiterClient(url, "f", incarnation(1), LEASE_S)
        for number, late in enumerate((slept, awake), start=3):
            assert isinstance(late.answer(AskLead(1, None), "late"), LeadRefused)
            read = late.answer(AskRead(2), "late")
            assert isinstance(read, EntryRead) and decode(read.entry.value).ended
            late.close()
            begin(url, number).close()

    def test_no_more_starts_are_noted_than_the_limit(self, url: str) -> None:
        index = arbiter(url, "f-ended", LEASE_S)
        starts = FlowStarts(url, "f", incarnation(0), LEASE_S)
        many = [incarnation(n) for n in range(1, NOTED + 10)]
        assert starts._note(index, many[:-1]) and starts._note(index, many[-1:])
        assert index.read().value.count(b"0000") >= NOTED
        assert len(index.read().value) < 14 * NOTED
        for last, known in ((many[-1], True), (many[9], True), (many[8], False)):
            assert FlowStarts(url, "f", last, LEASE_S).has_ended() is known
        index.close()
