"""The log of push batches: which replica is sent what, and when a run enters the flow."""

from typing import Any

import pyarrow as pa
import pytest

from holdfast.core.ids import STORE, SiteId
from holdfast.site import push_log
from holdfast.site.push_log import (
    EnterRun,
    FeedPlace,
    Lead,
    LogEntry,
    PushLog,
    ReleaseRows,
    SendEntry,
)
from holdfast.site.spill import Held

OTHER, JOINER = SiteId(2), SiteId(3)
ROWS = pa.record_batch({"x": pa.array([1], pa.int64())})


def held(nbytes: int = 8) -> Held:
    return Held(ROWS, nbytes, False)


def leading(*others: SiteId, joining: tuple[SiteId, ...] = (), stored: bool = False) -> PushLog:
    log = PushLog()
    assert log.on_replicas(True, set(others), set(joining), 1, stored) == []
    return log


def submitted(log: PushLog, *pieces: Held, number: int = 0) -> list[Any]:
    return log.submit(list(pieces), FeedPlace("query", number), "", None)


def told(effects: list[Any]) -> list[tuple[Any, ...]]:
    """The effects, with the numbers of push batches."""
    short: list[tuple[Any, ...]] = []
    for effect in effects:
        match effect:
            case SendEntry(site, entry, everywhere):
                short.append(("send", site, entry.number, everywhere))
            case EnterRun(entries):
                short.append(("enter", *(entry.number for entry in entries)))
            case ReleaseRows(entry):
                short.append(("release", entry.number))
    return short


def given(log: PushLog, number: int, more: bool = False) -> tuple[int, ...]:
    """The leader's push batch reaches a follower: the run that enters."""
    entry = LogEntry(number, [held()], more, FeedPlace("query", number))
    return tuple(entry.number for entry in log.receive(entry))


def test_without_other_replicas_a_run_enters_at_once() -> None:
    log = leading()
    assert told(submitted(log, held())) == [("enter", 1), ("release", 1)]
    assert log.all_entered and log.entered_at == FeedPlace("query", 0)


def test_a_run_enters_when_every_replica_has_its_last_push_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(push_log, "PUSH_BATCH_BYTES", 10)
    log = leading(OTHER)
    assert told(submitted(log, held(), held())) == [("send", OTHER, 1, 0), ("send", OTHER, 2, 0)]
    assert log.pending is not None and log.pending.number == 2
    assert log.on_has(OTHER, 1, False) == (False, [])
    tell, effects = log.on_has(OTHER, 2, False)
    assert not tell and told(effects) == [("enter", 1, 2), ("release", 1), ("release", 2)]


def test_a_replica_is_sent_no_more_than_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_log, "WINDOW_BYTES", 10)
    log = leading(OTHER)
    assert told(submitted(log, held())) == [("send", OTHER, 1, 0)]
    assert told(submitted(log, held(), number=1)) == [("send", OTHER, 2, 0)]
    assert told(submitted(log, held(), number=2)) == []
    _, effects = log.on_has(OTHER, 1, False)
    assert told(effects) == [("send", OTHER, 3, 1), ("enter", 1), ("release", 1)]


def test_a_joining_replica_counts_once_it_has_asked() -> None:
    log = leading(joining=(JOINER,))
    assert told(submitted(log, held())) == [("send", JOINER, 1, 0), ("enter", 1)]
    tell, effects = log.on_has(JOINER, 0, True)
    assert not tell and told(effects) == [("send", JOINER, 1, 0)]
    assert told(submitted(log, held(), number=1)) == [("send", JOINER, 2, 0)], "it counts"
    tell, effects = log.on_has(JOINER, 1, False)
    assert tell and told(effects) == [("release", 1)], "it has all that entered before it counted"
    tell, effects = log.on_has(JOINER, 2, False)
    assert not tell and told(effects) == [("enter", 2), ("release", 2)]


def test_a_replica_that_asks_again_is_sent_everything_that_it_lacks() -> None:
    log = leading(OTHER)
    submitted(log, held())
    submitted(log, held(), number=1)
    tell, effects = log.on_has(OTHER, 1, True)
    assert tell and told(effects) == [("send", OTHER, 2, 1), ("enter", 1), ("release", 1)]


def test_a_replica_that_is_gone_is_not_waited_for() -> None:
    log = leading(OTHER)
    submitted(log, held())
    assert told(log.on_replicas(True, set(), set(), 2, False)) == [("enter", 1), ("release", 1)]
    assert not log.sends_to(OTHER)


def test_a_follower_enters_whole_runs_and_keeps_what_others_may_lack() -> None:
    log = PushLog()
    assert given(log, 1, more=True) == ()
    assert given(log, 2) == (1, 2)
    assert told(log.trim(1)) == [("release", 1)]
    assert given(log, 3, more=True) == ()
    assert log.trim(3) and not log.all_entered, "what has not entered is not trimmed"


def test_a_new_leader_drops_the_run_that_it_has_in_part() -> None:
    log = PushLog()
    given(log, 1)
    given(log, 2, more=True)
    effects = log.on_replicas(True, {OTHER}, set(), 7, False)
    assert told(effects) == [("release", 2), ("send", OTHER, 1, 0)]
    assert log.lead == Lead(7, 1) and log.submitted == 1
    assert log.submitted_at == FeedPlace("query", 1)
    assert told(log.on_has(OTHER, 1, False)[1]) == [("release", 1)]


def test_the_store_is_a_replica() -> None:
    log = leading(stored=True)
    assert told(submitted(log, held())) == [("send", STORE, 1, 0)]
    assert not log.is_stored(1)
    assert told(log.on_has(STORE, 1, False)[1]) == [("enter", 1), ("release", 1)]
    assert log.is_stored(1)


def test_the_store_has_what_the_leader_before_said_that_all_have() -> None:
    log = PushLog()
    given(log, 1)
    given(log, 2)
    log.trim(1)
    assert told(log.on_replicas(True, set(), set(), 3, True)) == [("send", STORE, 2, 1)]
    assert log.is_stored(1) and not log.is_stored(2)


def test_a_log_that_is_restored_begins_after_a_push_batch() -> None:
    log = PushLog()
    given(log, 1)
    assert told(log.restore(FeedPlace("query", 4), 5)) == [("release", 1)]
    assert (log.entered, log.submitted, log.all_entered) == (5, 5, True)
    assert given(log, 6) == (6,)
