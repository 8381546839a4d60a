"""Feed events, compare the records that come out."""

import pytest

from holdfast.core.effects import PublishRecord
from holdfast.core.events import (
    BlocksAvailable,
    DrainRequested,
    EpochDelivered,
    SplitEnded,
    SplitIdle,
)
from holdfast.core.records import Block, EpochRecord, Range
from holdfast.core.sequencer import Budget, Sequencer
from holdfast.errors import ProtocolError

SINK = 9


def sequencer(splits=((0, 0),), **budget) -> Sequencer:
    limits = {
        "epoch_rows_max": 100,
        "epochs_in_flight_max": 3,
        "bytes_in_flight_max": 10_000,
        "small_in_flight_max": 2,
    }
    return Sequencer(splits, [SINK], Budget(**(limits | budget)))


def blocks(start: int, *lengths: int, source: int = 0, split: int = 0, time_max=None):
    made = []
    for length in lengths:
        made.append(Block(start, start + length, 10 * length, time_max))
        start += length
    return BlocksAvailable(source, split, tuple(made))


def test_rows_are_cut_at_once_and_numbered_on() -> None:
    machine = sequencer()
    assert machine.handle(blocks(0, 5)) == [
        PublishRecord(EpochRecord(0, 0, (Range(0, 0, 0, 5, None),)))
    ]
    assert machine.handle(blocks(5, 7)) == [
        PublishRecord(EpochRecord(1, 5, (Range(0, 0, 5, 12, None),)))
    ]


def test_small_epochs_wait_behind_two_in_flight_and_then_go_together() -> None:
    machine = sequencer()
    machine.handle(blocks(0, 5))
    machine.handle(blocks(5, 5))
    assert machine.handle(blocks(10, 5)) == []
    assert machine.handle(blocks(15, 5)) == []
    (published,) = machine.handle(EpochDelivered(SINK, 0))
    assert published.record.ranges == (Range(0, 0, 10, 20, None),)


def test_a_full_epoch_does_not_wait() -> None:
    machine = sequencer()
    machine.handle(blocks(0, 5))
    machine.handle(blocks(5, 5))
    assert len(machine.handle(blocks(10, 60))) == 1


def test_no_more_epochs_than_the_budget() -> None:
    machine = sequencer()
    assert len(machine.handle(blocks(0, *[100] * 5))) == 3
    assert [p.record.epoch for p in machine.handle(EpochDelivered(SINK, 1))] == [3, 4]
    machine.check_invariants()


def test_no_more_bytes_than_the_budget() -> None:
    machine = sequencer(bytes_in_flight_max=1_000)
    assert len(machine.handle(blocks(0, 100, 100))) == 1
    assert len(machine.handle(EpochDelivered(SINK, 0))) == 1


def test_within_an_epoch_rows_stand_by_source_and_split() -> None:
    machine = sequencer(splits=[(0, 0), (0, 1), (2, 0)], epoch_rows_max=1_000)
    machine.handle(blocks(0, 1, source=2))
    machine.handle(blocks(0, 1, source=0, split=1))
    machine.handle(BlocksAvailable(0, 1, (Block(1, 4, 1),)))
    machine.handle(blocks(0, 2, source=0, split=0))
    machine.handle(BlocksAvailable(2, 0, (Block(1, 5, 1, 77),)))
    (published,) = machine.handle(EpochDelivered(SINK, 1))
    assert published.record == EpochRecord(
        2, 2, (Range(0, 0, 0, 2, None), Range(0, 1, 1, 4, None), Range(2, 0, 1, 5, 77))
    )


def test_the_end_of_all_splits_ends_the_flow() -> None:
    machine = sequencer(splits=[(0, 0), (0, 1)])
    machine.handle(blocks(0, 5))
    assert machine.handle(SplitEnded(0, 0)) == []
    (published,) = machine.handle(SplitEnded(0, 1))
    assert published.record == EpochRecord(1, 5, (), idle=(0,), last=True, ended=True)
    assert machine.handle(EpochDelivered(SINK, 1)) == []


def test_draining_takes_no_more_rows_and_is_no_end() -> None:
    machine = sequencer()
    machine.handle(blocks(0, 100, 100, 100, 100))
    machine.handle(DrainRequested())
    (published,) = machine.handle(EpochDelivered(SINK, 0))
    assert published.record == EpochRecord(3, 300, (), last=True)


def test_an_idle_source_is_named_until_it_has_rows_again() -> None:
    machine = sequencer(splits=[(0, 0), (1, 0)])
    machine.handle(SplitIdle(1, 0))
    (published,) = machine.handle(blocks(0, 5))
    assert published.record.idle == (1,)
    (published,) = machine.handle(blocks(0, 5, source=1))
    assert published.record.idle == ()


def test_a_gap_in_the_offsets_is_refused() -> None:
    machine = sequencer()
    machine.handle(blocks(0, 5))
    with pytest.raises(ProtocolError, match=r"block \[6, 8\) does not follow offset 5"):
        machine.handle(blocks(6, 2))
    with pytest.raises(ProtocolError, match="no split 4"):
        machine.handle(blocks(0, 2, split=4))
