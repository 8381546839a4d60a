"""The log of push batches: which replica is sent what, and when a run enters the flow."""

from typing import Any

import pyarrow as pa
import pytest

from holdfast.core.ids import STORE, SiteId
from holdfast.errors import ProtocolError
from holdfast.site import push_lane, push_log
from holdfast.site.push_entries import (
    AskReplica,
    EnterRun,
    FeedPlace,
    Holding,
    Known,
    Lead,
    LogEntry,
    ReleaseRows,
    SendEntry,
    TellKnown,
)
from holdfast.site.push_log import PushLog
from holdfast.site.spill import Held

LEADER, OTHER, THIRD = SiteId(1), SiteId(2), SiteId(3)
ROWS = pa.record_batch({"x": pa.array([1], pa.int64())})


def held(nbytes: int = 8) -> Held:
    return Held(ROWS, nbytes, False)


def leading(*others: SiteId, joining: tuple[SiteId, ...] = (), stored: bool = False) -> PushLog:
    """A log that leads; the other replicas have nothing, and have said so."""
    log = PushLog()
    effects = log.on_replicas(None, dict.fromkeys(others, 0), dict.fromkeys(joining, 0), 1, stored)
    assert effects == [AskReplica(site) for site in (*others, *joining)]
    for site in others:
        assert log.on_asked(site, Holding(0)) == (True, [TellKnown(site, Known(0, 0, 0))])
    return log


def following(*entries: tuple[int, int], entered: int = 0) -> PushLog:
    """A log with these push batches: each has a number and the rank of its leader."""
    log = PushLog()
    log.on_replicas(LEADER, {LEADER: 0}, {}, 1, False)
    for number, rank in entries:
        assert log.follow(LEADER, rank)
        log.on_known(Known(number - 1, 0, 0))
        given(log, number, rank=rank)
    log.on_known(Known(entered, entered, 0))
    log.check_invariants()
    return log


def submitted(log: PushLog, *pieces: Held, number: int = 0) -> list[Any]:
    return log.submit(list(pieces), FeedPlace("query", number), "", None)


def told(effects: list[Any]) -> list[tuple[Any, ...]]:
    """The effects, with the numbers of push batches."""
    short: list[tuple[Any, ...]] = []
    for effect in effects:
        match effect:
            case AskReplica(site):
                short.append(("ask", site))
            case SendEntry(site, entry):
                short.append(("send", site, entry.number))
            case TellKnown(site, known):
                short.append(("tell", site, known.matched, known.entered, known.everywhere))
            case EnterRun(entries):
                short.append(("enter", *(entry.number for entry in entries)))
            case ReleaseRows(entry):
                short.append(("release", entry.number))
    return short


def given(log: PushLog, number: int, more: bool = False, rank: int = 1) -> list[tuple[Any, ...]]:
    """The leader's push batch reaches a follower."""
    base = {1: 0}.get(rank, number - 1)
    entry = LogEntry(number, [held()], more, FeedPlace("query", number), "", Lead(rank, base))
    return told(log.receive(entry))


def has(log: PushLog, site: SiteId, number: int, entered: int = 0) -> list[tuple[Any, ...]]:
    return told(log.on_has(site, number, entered)[1])


# --- the leader -----------------------------------------------------------------------------------


def test_without_other_replicas_a_run_enters_at_once() -> None:
    log = leading()
    assert told(submitted(log, held())) == [("enter", 1), ("release", 1)]
    assert log.all_entered and log.entered_at == FeedPlace("query", 0)


def test_a_run_enters_when_every_replica_has_its_last_push_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(push_log, "PUSH_BATCH_BYTES", 10)
    log = leading(OTHER, THIRD)
    assert told(submitted(log, held(), held())) == [
        ("send", OTHER, 1),
        ("send", OTHER, 2),
        ("send", THIRD, 1),
        ("send", THIRD, 2),
    ]
    assert log.pending is not None and log.pending.number == 2
    assert has(log, OTHER, 1) == has(log, OTHER, 2) == has(log, THIRD, 1) == []
    assert has(log, THIRD, 2) == [
        ("enter", 1, 2),
        ("tell", OTHER, 2, 2, 0),
        ("tell", THIRD, 2, 2, 0),
    ]
    assert has(log, OTHER, 2, 2) == []
    assert has(log, THIRD, 2, 2) == [("release", 1), ("release", 2)], "it has entered everywhere"


def test_a_replica_is_sent_no_more_than_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_lane, "WINDOW_BYTES", 10)
    log = leading(OTHER)
    assert told(submitted(log, held())) == [("send", OTHER, 1)]
    assert told(submitted(log, held(), number=1)) == [("send", OTHER, 2)]
    assert told(submitted(log, held(), number=2)) == []
    assert has(log, OTHER, 1) == [("send", OTHER, 3), ("enter", 1), ("tell", OTHER, 1, 1, 0)]


def test_a_joining_replica_is_sent_nothing_until_it_says_what_it_has() -> None:
    log = leading(joining=(THIRD,))
    assert told(submitted(log, held())) == [("enter", 1)]
    tell, effects = log.on_asked(THIRD, Holding(0))
    assert not tell and told(effects) == [("tell", THIRD, 0, 1, 0), ("send", THIRD, 1)]
    assert told(submitted(log, held(), number=1)) == [("send", THIRD, 2)], "it is waited for"
    tell, effects = log.on_has(THIRD, 1, 1)
    assert tell and told(effects) == [("release", 1)], "it has all that entered before it counted"
    assert has(log, THIRD, 2, 1) == [("enter", 2), ("tell", THIRD, 2, 2, 1)]


def test_a_replica_that_asks_again_is_sent_everything_that_it_lacks() -> None:
    log = leading(OTHER)
    submitted(log, held())
    submitted(log, held(), number=1)
    tell, effects = log.on_asked(OTHER, Holding(0, ((1, 1),)))
    assert tell and told(effects) == [
        ("tell", OTHER, 1, 0, 0),
        ("send", OTHER, 2),
        ("enter", 1),
        ("tell", OTHER, 1, 1, 0),
    ]


def test_a_replica_that_is_gone_is_not_waited_for() -> None:
    log = leading(OTHER)
    submitted(log, held())
    assert told(log.on_replicas(None, {}, {}, 2, False)) == [("enter", 1), ("release", 1)]
    assert not log.sends_to(OTHER)


def test_another_replica_at_the_same_site_begins_without_anything() -> None:
    log = leading(OTHER)
    submitted(log, held())
    has(log, OTHER, 1, 0)
    submitted(log, held(), number=1)
    assert told(log.on_replicas(None, {}, {OTHER: 2}, 2, False)) == [("ask", OTHER), ("enter", 2)]
    assert has(log, OTHER, 2, 2) == [], "this was the one before"
    tell, effects = log.on_asked(OTHER, Holding(0))
    sent = [("send", OTHER, 1), ("send", OTHER, 2)]
    assert not tell and told(effects) == [("tell", OTHER, 0, 2, 0), *sent]


def test_a_replica_that_confirms_what_it_was_not_sent_is_refused() -> None:
    log = leading(OTHER)
    submitted(log, held())
    with pytest.raises(ProtocolError):
        log.on_has(OTHER, 2, 0)
    with pytest.raises(ProtocolError):
        log.on_asked(OTHER, Holding(2))


# --- other replicas -------------------------------------------------------------------------------


def test_runs_enter_at_a_follower_when_the_leader_says_so() -> None:
    log = following()
    assert log.follow(LEADER, 1)
    assert given(log, 1, more=True) == given(log, 2) == []
    assert told(log.on_known(Known(0, 1, 0))) == [], "a part of it"
    assert told(log.on_known(Known(0, 3, 1))) == [("enter", 1, 2), ("release", 1)]
    assert given(log, 3) == [("enter", 3)], "it was said before"
    assert given(log, 3) == [("release", 3)], "twice"
    assert given(log, 5) == [("release", 5)] and log.matched == 3, "too early"


def test_a_follower_replaces_what_another_leader_sent_when_it_has_something_in_its_place() -> None:
    log = following((1, 1), (2, 1), (3, 1), entered=1)
    assert log.holding() == Holding(1, ((1, 3),))
    log.on_replicas(OTHER, {OTHER: 0}, {}, 4, False)
    assert log.submitted == 3 and log.matched == 1, "they may be all that is left of it"
    assert log.follow(OTHER, 4) and not log.follow(LEADER, 1)
    assert told(log.on_known(Known(2, 1, 1))) == [("release", 1)]
    assert (log.matched, log.submitted) == (2, 3)
    assert given(log, 3, rank=4) == [("release", 3)]
    assert log.holding() == Holding(1, ((1, 2), (4, 3)))


def test_a_leader_knows_what_a_follower_has_by_the_leads_that_made_it() -> None:
    """Four replicas: the first leader sent push batches to one of the others only, and the second
    one sent others with the same numbers."""
    log = following((1, 1), (2, 2), (3, 2), entered=1)
    assert told(log.on_replicas(None, {OTHER: 0}, {}, 5, False)) == [("ask", OTHER)]
    assert log.lead == Lead(5, 3) and log.pending is not None
    _, effects = log.on_asked(OTHER, Holding(1, ((1, 4),)))
    sent = [("send", OTHER, 2), ("send", OTHER, 3)]
    assert told(effects) == [("tell", OTHER, 1, 1, 1), *sent, ("release", 1)]
    _, effects = log.on_asked(OTHER, Holding(1, ((2, 2),)))
    assert told(effects)[:2] == [("tell", OTHER, 2, 1, 1), ("send", OTHER, 3)]
    tell, effects = log.on_asked(OTHER, Holding(1, ((2, 3), (4, 7))))
    assert tell and told(effects)[0] == ("tell", OTHER, 3, 2, 1) and log.all_entered


def test_a_new_leader_drops_the_run_that_it_has_in_part_and_keeps_whole_ones() -> None:
    log = following((1, 1), (2, 1), entered=1)
    assert given(log, 3, more=True) == []
    effects = log.on_replicas(None, {OTHER: 0}, {}, 7, False)
    assert told(effects) == [("release", 3), ("ask", OTHER)]
    assert log.lead == Lead(7, 2) and log.submitted == 2 and log.entered == 1
    assert log.submitted_at == FeedPlace("query", 2)
    assert told(log.on_asked(OTHER, Holding(1, ((1, 2),)))[1]) == [
        ("tell", OTHER, 2, 1, 1),
        ("enter", 2),
        ("tell", OTHER, 2, 2, 1),
        ("release", 1),
    ]


def test_a_leader_that_was_replaced_and_does_not_know_it_is_ignored() -> None:
    log = following((1, 1))
    assert log.follow(OTHER, 4), "it has the next view before this site has"
    assert not log.follow(LEADER, 1)
    log.on_replicas(OTHER, {OTHER: 0}, {}, 4, False)
    assert log.follow(OTHER, 4) and not log.follow(THIRD, 4) and not log.follow(LEADER, 3)
    log.on_replicas(None, {}, {}, 5, False)
    assert not log.follow(OTHER, 6), "it leads, until it has a view that says otherwise"


# --- the store ------------------------------------------------------------------------------------


def test_the_store_is_a_replica() -> None:
    log = leading(stored=True)
    assert told(submitted(log, held())) == [("send", STORE, 1)]
    assert has(log, STORE, 1, 1) == [("enter", 1), ("release", 1)]


def test_a_new_leader_stores_again_what_has_not_entered() -> None:
    log = following((1, 1), (2, 1), entered=1)
    log.on_known(Known(0, 0, 1))
    assert told(log.on_replicas(None, {}, {}, 3, True)) == [("send", STORE, 2)]
    assert has(log, STORE, 2, 2) == [("enter", 2), ("release", 2)]


def test_what_is_recovered_was_one_log() -> None:
    """The first leader stored 1 to 3, another one 2 and 3 of its own, which a third one was storing
    again when all were lost: its 2 is there, and the 3 that does not follow it."""
    log = PushLog()
    for number, lead in [(1, Lead(1)), (2, Lead(2, 1)), (3, Lead(1)), (4, Lead(1))]:
        entry = LogEntry(number, [held()], False, FeedPlace("query", number), "", lead)
        log.recover(entry)
    assert log.entered == 2
    assert log.recover(LogEntry(3, [], False, FeedPlace(), "", Lead(9, 2)))


def test_a_log_that_is_restored_begins_after_a_push_batch() -> None:
    log = following((1, 1))
    assert told(log.restore(FeedPlace("query", 4), 5)) == [("release", 1)]
    assert (log.entered, log.submitted, log.all_entered) == (5, 5, True)
    log.on_known(Known(5, 6, 0))
    assert given(log, 6) == [("enter", 6)]
