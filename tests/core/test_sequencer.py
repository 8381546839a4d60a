"""Feed events, compare the records that come out."""

import pytest

from holdfast.core.effects import ConfirmChain, CopySequencer, PassRecord, PublishRecord
from holdfast.core.events import (
    BlocksAvailable,
    ChainJoined,
    DrainRequested,
    EpochDelivered,
    PauseRequested,
    RecordPassed,
    SequencerCopied,
    SplitQuiet,
    SuccessorConnected,
)
from holdfast.core.ids import NO_EPOCH
from holdfast.core.records import Block, EpochRecord, Range, pack_step
from holdfast.core.sequencer import RESENT, STEPS_MAX, Budget, Sequencer
from holdfast.errors import ProtocolError
from tests.support.core_machines import chain

SINK = 9


def sequencer(splits=((0, 0),), site: int = 0, sites=(0,), **budget) -> Sequencer:
    """The replica at `site` of the sequencer that is at `sites`."""
    limits = {
        "epoch_rows_max": 100,
        "epochs_in_flight_max": 3,
        "bytes_in_flight_max": 10_000,
        "small_in_flight_max": 2,
    }
    machine = Sequencer(site, splits, [SINK], Budget(**(limits | budget)))
    if sites:
        assert machine.handle(chain(*sites)) == []
    return machine


def blocks(
    start: int, *lengths: int, source: int = 0, split: int = 0, time=None, again: bool = False
):
    made = []
    for length in lengths:
        steps = b"" if time is None else pack_step(start, time)
        made.append(Block(start, start + length, 10 * length, steps))
        start += length
    return BlocksAvailable(source, split, tuple(made), again)


def test_rows_are_cut_at_once_and_numbered_on() -> None:
    machine = sequencer()
    assert machine.handle(blocks(0, 5)) == [PublishRecord(EpochRecord(0, 0, (Range(0, 0, 0, 5),)))]
    assert machine.handle(blocks(5, 7)) == [PublishRecord(EpochRecord(1, 5, (Range(0, 0, 5, 12),)))]


def test_small_epochs_wait_behind_two_in_flight_and_then_go_together() -> None:
    machine = sequencer()
    machine.handle(blocks(0, 5))
    machine.handle(blocks(5, 5))
    assert machine.handle(blocks(10, 5)) == []
    assert machine.handle(blocks(15, 5)) == []
    (published,) = machine.handle(EpochDelivered(SINK, 0))
    assert published.record.ranges == (Range(0, 0, 10, 20),)


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
    machine.handle(BlocksAvailable(2, 0, (Block(1, 5, 1, pack_step(1, 77)),)))
    (published,) = machine.handle(EpochDelivered(SINK, 1))
    assert published.record == EpochRecord(
        2, 2, (Range(0, 0, 0, 2), Range(0, 1, 1, 4), Range(2, 0, 1, 5, pack_step(1, 77)))
    )


def test_the_end_of_all_splits_ends_the_flow() -> None:
    machine = sequencer(splits=[(0, 0), (0, 1)])
    machine.handle(blocks(0, 5))
    assert machine.handle(SplitQuiet(0, 0, 5, ended=True)) == []
    (published,) = machine.handle(SplitQuiet(0, 1, 0, ended=True))
    idle = ((0, 0), (0, 1))
    assert published.record == EpochRecord(1, 5, (), idle=idle, last=True, ended=True)
    assert machine.handle(EpochDelivered(SINK, 1)) == []


def test_draining_takes_no_more_rows_and_is_no_end() -> None:
    machine = sequencer()
    machine.handle(blocks(0, 100, 100, 100, 100))
    machine.handle(DrainRequested())
    (published,) = machine.handle(EpochDelivered(SINK, 0))
    assert published.record == EpochRecord(3, 300, (), last=True)


def test_an_idle_split_is_named_once_until_it_has_rows_again() -> None:
    machine = sequencer(splits=[(0, 0), (0, 1), (1, 0)], small_in_flight_max=9)
    machine.handle(SplitQuiet(0, 1, 0, ended=False))
    assert idle_of(machine.handle(blocks(0, 5))) == ((0, 1),)
    assert idle_of(machine.handle(blocks(5, 5))) == ()
    assert idle_of(machine.handle(blocks(0, 5, split=1))) == ()
    machine.handle(EpochDelivered(SINK, 2))
    machine.handle(SplitQuiet(0, 1, 5, ended=False))
    machine.handle(SplitQuiet(1, 0, 0, ended=True))
    assert idle_of(machine.handle(blocks(10, 5))) == ((0, 1), (1, 0))


def idle_of(effects) -> tuple:
    (published,) = effects
    return published.record.idle


def test_who_takes_over_knows_which_splits_are_known_to_be_idle() -> None:
    """From the records, or from the state that it was given."""
    splits = [(0, 0), (0, 1)]
    first = sequencer(splits=splits, small_in_flight_max=9)
    first.handle(SplitQuiet(0, 1, 0, ended=False))
    (published,) = first.handle(blocks(0, 5))
    first.handle(chain(0, joining=(1, 2), number=1))
    (copied,) = first.handle(ChainJoined(2, NO_EPOCH))
    second, third = (sequencer(splits, site=s, sites=(), small_in_flight_max=9) for s in (1, 2))
    second.handle(chain(0, 1, number=2))
    second.handle(RecordPassed(published.record))
    third.handle(SequencerCopied(copied.state))
    for machine, site in ((second, 1), (third, 2)):
        machine.handle(chain(site, number=3))
        machine.handle(SplitQuiet(0, 1, 0, ended=False))
        assert idle_of(machine.handle(blocks(5, 5))) == ()


def test_a_split_has_not_ended_before_all_of_its_rows_were_announced() -> None:
    """Who said so may be gone with rows that its successor has yet to read."""
    machine = sequencer(splits=[(0, 0), (0, 1)], small_in_flight_max=9)
    machine.handle(PauseRequested(True))
    machine.handle(blocks(0, 10))
    machine.handle(SplitQuiet(0, 0, 10, ended=True))
    machine.handle(SplitQuiet(0, 1, 0, ended=True))
    machine.handle(blocks(0, 4, again=True))
    (published,) = machine.handle(PauseRequested(False))
    assert published.record.ranges == (Range(0, 0, 0, 4),) and not published.record.ended
    assert published.record.idle == ((0, 1),)
    (published,) = machine.handle(blocks(4, 6))
    assert published.record.ended and published.record.idle == ((0, 0),)


def test_rows_that_are_announced_again_one_block_after_another_are_not_forgotten() -> None:
    """In between there is room for an epoch, and nothing waits."""
    machine = sequencer(splits=[(0, 0), (0, 1)], epochs_in_flight_max=1)
    machine.handle(blocks(0, 5, split=1))
    machine.handle(SplitQuiet(0, 1, 5, ended=True))
    machine.handle(blocks(0, 7))
    machine.handle(SplitQuiet(0, 0, 7, ended=True))
    machine.handle(SplitQuiet(0, 0, 7, ended=False))
    machine.handle(blocks(0, again=True))
    assert machine.handle(EpochDelivered(SINK, 0)) == []
    (published,) = machine.handle(blocks(0, 7))
    assert published.record.ranges == (Range(0, 0, 0, 7),) and published.record.ended


def test_idle_splits_are_told_though_no_row_comes() -> None:
    """Windows may wait for them alone. Not while epochs are on their way, nor without times."""
    machine = sequencer(splits=[(0, 0), (0, 1)])
    machine.handle(blocks(0, 5, time=30))
    assert machine.handle(SplitQuiet(0, 1, 0, ended=False)) == []
    (published,) = machine.handle(EpochDelivered(SINK, 0))
    assert published.record == EpochRecord(1, 5, (), ((0, 1),))
    assert machine.handle(EpochDelivered(SINK, 1)) == []
    untimed = sequencer(splits=[(0, 0), (0, 1)])
    untimed.handle(blocks(0, 5))
    untimed.handle(SplitQuiet(0, 1, 0, ended=False))
    assert untimed.handle(EpochDelivered(SINK, 0)) == []


def test_a_split_that_ends_with_its_rows_is_told_with_them() -> None:
    machine = sequencer(splits=[(0, 0), (0, 1)], small_in_flight_max=9)
    machine.handle(SplitQuiet(0, 1, 0, ended=False))
    machine.handle(blocks(0, 5))
    machine.handle(PauseRequested(True))
    machine.handle(blocks(0, 5, split=1))
    machine.handle(SplitQuiet(0, 1, 5, ended=True))
    assert idle_of(machine.handle(PauseRequested(False))) == ((0, 1),)


def test_the_first_epoch_of_another_life_waits_for_all_splits() -> None:
    known = [EpochRecord(5, 50, (Range(0, 0, 50, 57),))]
    machine = Sequencer(
        0, [(0, 0), (0, 1)], [SINK], Budget(), 4, 50, {(0, 0): 50, (0, 1): 0}, known
    )
    (again,) = machine.handle(chain(0))
    assert not again.record.awake
    machine.handle(EpochDelivered(SINK, 5))
    (published,) = machine.handle(blocks(57, 3))
    assert published.record.awake
    machine.handle(EpochDelivered(SINK, 6))
    (published,) = machine.handle(blocks(60, 3))
    assert not published.record.awake


# --- how much, and what first -----------------------------------------------------------------


def test_an_epoch_has_no_more_rows_than_the_budget_whatever_the_blocks() -> None:
    machine = sequencer(epochs_in_flight_max=9)
    records = [p.record for p in machine.handle(blocks(0, 250))]
    assert [(r.base, r.ranges) for r in records] == [
        (0, (Range(0, 0, 0, 100),)),
        (100, (Range(0, 0, 100, 200),)),
        (200, (Range(0, 0, 200, 250),)),
    ]
    machine = sequencer(splits=[(0, 0), (0, 1)], small_in_flight_max=9)
    machine.handle(PauseRequested(True))
    machine.handle(blocks(0, 70))
    machine.handle(blocks(0, 70, split=1))
    (first, second) = machine.handle(PauseRequested(False))
    assert (first.record.rows, second.record.rows) == (100, 40)


def test_an_epoch_has_no_more_steps_than_its_record_can_carry() -> None:
    limits = {"bytes_in_flight_max": 10**9, "small_in_flight_max": 9}
    machine = sequencer(epoch_rows_max=10**6, **limits)
    rows = 2 * STEPS_MAX + 100
    steps = b"".join(pack_step(row, row) for row in range(rows))
    published = machine.handle(BlocksAvailable(0, 0, (Block(0, rows, rows, steps),)))
    assert [p.record.rows for p in published] == [STEPS_MAX, STEPS_MAX, 100]
    assert b"".join(r.steps for p in published for r in p.record.ranges) == steps


def paused(*announced, splits=((0, 0), (0, 1), (0, 2)), **budget) -> list[EpochRecord]:
    """The records that are cut of these blocks, if all were there before the first."""
    machine = sequencer(
        splits, **({"epochs_in_flight_max": 60, "small_in_flight_max": 60} | budget)
    )
    machine.handle(PauseRequested(True))
    for event in announced:
        machine.handle(event)
    return [p.record for p in machine.handle(PauseRequested(False))]


def test_the_oldest_rows_are_cut_first() -> None:
    """Splits that are read from long ago advance side by side, however far apart they are."""
    records = paused(
        BlocksAvailable(0, 0, tuple(timed(n, 1_000 + n) for n in range(6)), False),
        BlocksAvailable(0, 1, tuple(timed(n, n) for n in range(6)), False),
        BlocksAvailable(0, 2, tuple(timed(n, 3 + n) for n in range(6)), False),
        epoch_rows_max=4,
    )
    order = [(r.split, r.start) for record in records for r in record.ranges]
    assert order == [(1, 0), (1, 4), (2, 0), (2, 2), (0, 0), (0, 4)]
    assert [r.rows for r in records] == [4, 4, 4, 4, 2]


def timed(row: int, time: int) -> Block:
    return Block(row, row + 1, 1, pack_step(row, time))


def test_rows_of_the_far_future_are_delayed_and_not_for_ever() -> None:
    ahead = BlocksAvailable(0, 0, tuple(timed(n, 10**9) for n in range(3)), False)
    others = BlocksAvailable(0, 1, tuple(timed(n, n) for n in range(200)), False)
    machine = sequencer([(0, 0), (0, 1)], epoch_rows_max=1, epochs_in_flight_max=60)
    machine.handle(PauseRequested(True))
    machine.handle(ahead)
    machine.handle(others)
    cut = [p.record for p in machine.handle(PauseRequested(False))]
    for epoch in range(150):
        cut += [p.record for p in machine.handle(EpochDelivered(SINK, epoch))]
    assert [r.epoch for r in cut if r.ranges[0].split == 0] == [64, 129, 194]


def test_splits_without_event_time_have_their_turns() -> None:
    records = paused(
        BlocksAvailable(0, 0, tuple(timed(n, n) for n in range(4)), False),
        blocks(0, 1, 1, 1, 1, split=1),
        BlocksAvailable(0, 2, tuple(timed(n, 2 + n) for n in range(4)), False),
        epoch_rows_max=6,
    )
    assert records[0].ranges[1] == Range(0, 1, 0, 2), "a third of the epoch"


def test_a_gap_in_the_offsets_is_refused() -> None:
    machine = sequencer()
    machine.handle(blocks(0, 5))
    with pytest.raises(ProtocolError, match=r"block \[6, 8\) does not follow offset 5"):
        machine.handle(blocks(6, 2))
    with pytest.raises(ProtocolError, match="no split 4"):
        machine.handle(blocks(0, 2, split=4))


# --- the chain ----------------------------------------------------------------------------------


def record(epoch: int, start: int, end: int) -> EpochRecord:
    return EpochRecord(epoch, start, (Range(0, 0, start, end),))


FIRST = record(0, 0, 5)
SECOND = record(1, 5, 12)


def test_a_record_goes_through_the_chain_and_the_last_publishes_it() -> None:
    first, middle, last = (sequencer(site=s, sites=(0, 1, 2)) for s in (0, 1, 2))
    assert first.handle(blocks(0, 5)) == [PassRecord(1, FIRST)]
    assert middle.handle(RecordPassed(FIRST)) == [PassRecord(2, FIRST)]
    assert last.handle(RecordPassed(FIRST)) == [PublishRecord(FIRST)]
    assert [m.next_epoch for m in (first, middle, last)] == [1, 1, 1]


def test_only_the_first_cuts() -> None:
    follower = sequencer(site=1, sites=(0, 1))
    assert follower.handle(blocks(0, 500)) == []
    assert follower.handle(DrainRequested()) == []


def test_a_record_that_comes_twice_is_passed_on_again_and_counted_once() -> None:
    """Who lost it on the way needs it; who has it drops it."""
    last = sequencer(site=1, sites=(0, 1))
    for _ in range(2):
        assert last.handle(RecordPassed(FIRST)) == [PublishRecord(FIRST)]
    assert last.next_seq == 5
    with pytest.raises(ProtocolError, match="record of epoch 2, not 1"):
        last.handle(RecordPassed(record(2, 12, 13)))


def test_the_follower_goes_on_with_the_same_numbering() -> None:
    follower = sequencer(site=1, sites=(0, 1))
    follower.handle(RecordPassed(FIRST))
    follower.handle(RecordPassed(SECOND))
    assert follower.handle(chain(1, number=1)) == [PublishRecord(FIRST), PublishRecord(SECOND)]
    assert follower.handle(EpochDelivered(SINK, 1)) == []
    assert follower.handle(blocks(12, 3, again=True)) == [PublishRecord(record(2, 12, 15))]
    follower.check_invariants()


def test_blocks_announced_before_it_knows_that_it_leads_are_cut_then() -> None:
    follower = sequencer(site=1, sites=(0, 1))
    follower.handle(RecordPassed(FIRST))
    assert follower.handle(blocks(5, 7, again=True)) == []
    assert follower.handle(chain(1, number=1)) == [PublishRecord(FIRST), PublishRecord(SECOND)]


def test_of_blocks_that_records_have_taken_meanwhile_the_rest_is_cut() -> None:
    """The ingress knew of no epoch yet when it announced [0, 20) to the follower; then the first
    sequencer's last records came, one of which ends within a block."""
    follower = sequencer(site=1, sites=(0, 1))
    follower.handle(blocks(0, 3, 7, 10, again=True))
    follower.handle(RecordPassed(FIRST))
    *_, published = follower.handle(chain(1, number=1))
    assert published == PublishRecord(record(1, 5, 20))


def test_blocks_that_are_all_in_records_are_not_cut_again() -> None:
    follower = sequencer(site=1, sites=(0, 1))
    follower.handle(RecordPassed(FIRST))
    follower.handle(chain(1, number=1))
    assert follower.handle(blocks(0, 5, again=True)) == []
    assert follower.handle(blocks(0, 5, 4, again=True)) == [PublishRecord(record(1, 5, 9))]


def test_announced_again_replaces_what_was_announced() -> None:
    """Another replica of the ingress leads, whose blocks are cut differently."""
    machine = sequencer(small_in_flight_max=1)
    machine.handle(blocks(0, 5))
    machine.handle(blocks(5, 10, 10))
    assert machine.handle(blocks(5, 4, again=True)) == []
    assert machine.handle(blocks(9, 2)) == []
    (published,) = machine.handle(EpochDelivered(SINK, 0))
    assert published.record == record(1, 5, 11)


def test_what_is_in_flight_is_counted_by_the_follower_too() -> None:
    follower = sequencer(site=1, sites=(0, 1))
    for epoch in range(3):
        follower.handle(RecordPassed(record(epoch, 100 * epoch, 100 * epoch + 100)))
    follower.handle(EpochDelivered(SINK, 0))
    follower.handle(chain(1, number=1))
    assert follower.handle(blocks(300, 100, 100, again=True)) == [
        PublishRecord(record(3, 300, 400))
    ], "two were in flight, three may be"
    follower.check_invariants()


def test_a_finished_stream_stays_finished() -> None:
    follower = sequencer(site=1, sites=(0, 1))
    last = EpochRecord(0, 0, (), idle=((0, 0),), last=True, ended=True)
    follower.handle(RecordPassed(last))
    assert follower.handle(chain(1, number=1)) == [PublishRecord(last)]
    assert follower.handle(blocks(0, 5, again=True)) == []


def test_the_end_and_the_drain_can_be_said_again_to_the_follower() -> None:
    for event, end in ((SplitQuiet(0, 0, 0, ended=True), True), (DrainRequested(), False)):
        follower = sequencer(site=1, sites=(0, 1))
        follower.handle(RecordPassed(FIRST))
        follower.handle(chain(1, number=1))
        (published,) = follower.handle(event)
        assert (published.record.epoch, published.record.last) == (1, True)
        assert published.record.ended is end


def test_when_the_chain_gets_shorter_its_last_publishes_what_it_had_passed_on() -> None:
    first = sequencer(site=0, sites=(0, 1))
    first.handle(blocks(0, 5))
    first.handle(blocks(5, 7))
    assert first.handle(chain(0, number=1)) == [PublishRecord(FIRST), PublishRecord(SECOND)]


def test_when_the_middle_is_gone_the_first_passes_on_to_the_last() -> None:
    first = sequencer(site=0, sites=(0, 1, 2))
    first.handle(blocks(0, 5))
    assert first.handle(chain(0, 2, number=1)) == [PassRecord(2, FIRST)]


def test_a_new_connection_to_the_next_replica_gets_everything_again() -> None:
    first = sequencer(site=0, sites=(0, 1))
    first.handle(blocks(0, 5))
    assert first.handle(SuccessorConnected(7)) == []
    assert first.handle(SuccessorConnected(1)) == [PassRecord(1, FIRST)]


def test_a_new_replica_is_in_the_chain_before_it_counts() -> None:
    first = sequencer(site=0, sites=(0,))
    first.handle(blocks(0, 5))
    first.handle(EpochDelivered(SINK, 0))
    assert first.handle(chain(0, joining=(3,), number=1)) == [], "the chain is as it was"
    (copied,) = first.handle(ChainJoined(3, NO_EPOCH))
    assert isinstance(copied, CopySequencer) and copied.site == 3
    new = sequencer(site=3, sites=())
    assert new.handle(SequencerCopied(copied.state)) == []
    # Until it says that it has the state, nothing waits for it.
    joined = ChainJoined(3, new.next_epoch)
    assert first.handle(joined) == [PassRecord(3, FIRST), ConfirmChain(3)]
    # From now on no record is acted on that the new replica does not have.
    assert first.handle(blocks(5, 7)) == [PassRecord(3, SECOND)]
    assert new.handle(RecordPassed(SECOND)) == [PublishRecord(SECOND)]
    # Views in which it still joins leave it in the chain, ...
    assert first.handle(chain(0, joining=(3,), number=2)) == []
    # ... and with the one in which it counts, it can go on alone.
    first.handle(chain(0, 3, number=3))
    new.handle(chain(0, 3, number=3))
    assert new.handle(chain(3, number=4))[-1] == PublishRecord(SECOND)
    new.handle(EpochDelivered(SINK, 1))
    assert new.handle(blocks(12, 1, again=True)) == [PublishRecord(record(2, 12, 13))]


def test_a_new_replica_that_is_not_wanted_any_more_leaves_the_chain() -> None:
    first = sequencer(site=0, sites=(0,))
    first.handle(chain(0, joining=(3,), number=1))
    assert first.handle(ChainJoined(3, 0)) == [ConfirmChain(3)]
    assert first.handle(blocks(0, 5)) == [PassRecord(3, FIRST)]
    assert first.handle(chain(0, number=2)) == [PublishRecord(FIRST)]


def test_who_does_not_join_is_not_let_into_the_chain() -> None:
    """It was given up, and does not know yet."""
    first = sequencer(site=0, sites=(0,))
    first.handle(chain(0, joining=(3,), number=1))
    first.handle(chain(0, number=2))
    assert first.handle(ChainJoined(3, 0)) == []
    assert first.handle(blocks(0, 5)) == [PublishRecord(FIRST)]


def test_a_replica_restores_every_split() -> None:
    first = sequencer(splits=[(0, 0), (0, 1)], small_in_flight_max=9)
    first.handle(chain(0, joining=(3,), number=1))
    first.handle(blocks(0, 5))
    first.handle(blocks(0, 3, split=1))
    (copied,) = first.handle(ChainJoined(3, NO_EPOCH))
    new = sequencer(splits=[(0, 0), (0, 1)], site=3, sites=(3,))
    new.handle(SequencerCopied(copied.state))
    assert (new.next_epoch, new.next_seq) == (2, 8)
    assert [s.cut for s in new.splits.values()] == [5, 3]
    with pytest.raises(ProtocolError, match="does not follow offset 3"):
        new.handle(blocks(4, 1, split=1))


def test_more_is_sent_again_than_can_be_in_flight() -> None:
    assert Budget().epochs_in_flight_max < RESENT
