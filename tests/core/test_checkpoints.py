"""Checkpoints of a flow that runs: the machine that asks for them, and those that are asked."""

from holdfast.core.checkpoints import LAYERS_MAX, Checkpoints
from holdfast.core.dataflow import Dataflow
from holdfast.core.effects import (
    OrderStore,
    ProcessBundles,
    PublishRecord,
    ReportMissed,
    StoreState,
    WriteManifest,
)
from holdfast.core.events import (
    BlocksAvailable,
    DrainRequested,
    EpochDelivered,
    ManifestWritten,
    PeerLost,
    RecordPassed,
    StoreDue,
    StoreFailed,
    StoreOrdered,
    TaskStored,
)
from holdfast.core.records import Block, EpochRecord, Range
from holdfast.core.sequencer import Budget, Sequencer
from tests.support.core_machines import (
    KEYED,
    SHAPE,
    SINK,
    SOURCE,
    bundle,
    chain,
    of,
    processed,
    record,
    site,
    view,
)

HELD = ("0,1", "1,2", "2,0")


def due(ahead: int = 1, held: tuple[str, ...] = HELD) -> StoreDue:
    return StoreDue(view(0, *held).view, ahead)


def ordered(machine: Checkpoints, ahead: int = 1) -> int:
    (order,) = machine.handle(due(ahead))
    assert isinstance(order, OrderStore)
    return order.epoch


def test_a_checkpoint_counts_when_all_of_it_is_there() -> None:
    machine = Checkpoints()
    machine.handle(record(7))
    assert machine.handle(due(3)) == [OrderStore(10, None)]
    assert machine.handle(due(3)) == [], "one at a time"
    assert machine.handle(TaskStored(SOURCE, 10, "a")) == []
    assert machine.handle(TaskStored(SOURCE, 10, "a again")) == []
    assert machine.handle(TaskStored(KEYED, 9, "of another")) == []
    assert machine.handle(TaskStored(SINK, 10, "c")) == []
    stored = {SOURCE: "a", SINK: "c", KEYED: "b"}
    assert machine.handle(TaskStored(KEYED, 10, "b")) == [WriteManifest(10, stored)]
    assert machine.complete is None
    assert machine.handle(StoreFailed(10, "too late to say so", False)) == []
    machine.handle(ManifestWritten(10, ""))
    assert machine.complete == 10
    assert machine.handle(due()) == [OrderStore(8, 10)], "what has changed since"


def test_one_that_fails_leaves_the_one_before_it() -> None:
    machine = Checkpoints()
    assert ordered(machine) == 0
    machine.handle(StoreFailed(0, "told too late", True))
    assert machine.failure == "told too late" and machine.epoch is None
    assert machine.handle(TaskStored(SOURCE, 0, "a")) == [], "given up"
    assert ordered(machine) == 1, "farther ahead"
    machine.handle(StoreFailed(1, "no room", False))
    assert ordered(machine) == 1, "it was not told too late"
    for task in (SOURCE, KEYED, SINK):
        machine.handle(TaskStored(task, 1, task))
    machine.handle(ManifestWritten(1, "no room"))
    assert machine.complete is None and machine.failure == "no room"


def test_whoever_is_to_store_something_must_not_be_lost() -> None:
    machine = Checkpoints()
    ordered(machine)
    machine.handle(view(1, "0", "1,2+0", "2,0"))
    assert machine.epoch == 0, "a replica that does not lead is gone"
    machine.handle(TaskStored(KEYED, 0, "b"))
    machine.handle(view(2, "0", "2+0", "2,0"))
    assert machine.epoch == 0, "it had been stored"
    machine.handle(view(3, "0", "2+0", "0"))
    assert machine.epoch is None and "site 2" in machine.failure
    ordered(machine)
    machine.handle(PeerLost(2))
    assert machine.epoch is None, "what it said may be lost"
    assert machine.handle(due(held=("0,1", "+2", "2,0"))) == [], "a task is being rebuilt"


def test_after_so_many_increments_it_is_whole() -> None:
    machine = Checkpoints()
    orders = []
    for epoch in range(2 * LAYERS_MAX + 1):
        (order,) = machine.handle(due())
        orders.append(order.after)
        for task in (SOURCE, KEYED, SINK):
            machine.handle(TaskStored(task, order.epoch, task))
        machine.handle(ManifestWritten(order.epoch, ""))
        machine.handle(record(epoch))
    whole = [at for at, after in enumerate(orders) if after is None]
    assert whole == [0, LAYERS_MAX, 2 * LAYERS_MAX]


def test_a_task_is_stored_after_the_epoch_and_goes_on() -> None:
    machine = site(1, *HELD)
    assert machine.handle(StoreOrdered(1, None)) == [], "nothing has come so far"
    machine.handle(bundle(0, 0))
    machine.handle(bundle(0, 1))
    assert not of(StoreState, machine.handle(processed(KEYED, 0, x1="a")))
    effects = machine.handle(processed(KEYED, 1, x1="b"))
    assert of(StoreState, effects) == [StoreState(KEYED, 1)], "the source is led elsewhere"
    machine.handle(bundle(0, 2))
    assert not of(StoreState, machine.handle(processed(KEYED, 2, x1="c")))
    effects = machine.handle(StoreOrdered(2, 1))
    assert effects == [StoreState(KEYED, 2, after=1)], "only what has changed"
    effects = machine.handle(StoreOrdered(2, 1))
    assert effects == [StoreState(KEYED, 2)], "what was given before is not what counts"


def test_a_task_that_is_past_the_epoch_says_so() -> None:
    machine = site(1, *HELD)
    machine.handle(bundle(0, 0))
    machine.handle(processed(KEYED, 0, x1="a"))
    assert of(ProcessBundles, machine.handle(bundle(0, 1)))
    assert machine.handle(StoreOrdered(0, None)) == [ReportMissed(KEYED, 0)], "it is at work"
    machine.handle(processed(KEYED, 1, x1="b"))
    assert machine.handle(StoreOrdered(0, None)) == [ReportMissed(KEYED, 0)]


def test_a_later_order_replaces_one_that_waits() -> None:
    machine = site(1, *HELD)
    machine.handle(StoreOrdered(0, None))
    machine.handle(StoreOrdered(1, None))
    machine.handle(view(1, "0,1", "1,2", "2,0"))
    machine.handle(bundle(0, 0))
    assert not of(StoreState, machine.handle(processed(KEYED, 0, x1="a")))
    machine.handle(bundle(0, 1))
    assert of(StoreState, machine.handle(processed(KEYED, 1, x1="b")))


def test_who_leads_no_more_stores_nothing() -> None:
    machine = Dataflow(1, SHAPE, window=3)
    machine.handle(view(0, "0", "1,2", "2"))
    machine.handle(StoreOrdered(0, None))
    machine.handle(view(1, "0", "2,1", "2"))
    machine.handle(bundle(0, 0))
    assert not of(StoreState, machine.handle(processed(KEYED, 0, x1="a")))


# --- the sequencer ------------------------------------------------------------------------------

KNOWN = [
    EpochRecord(5, 50, (Range(0, 0, 50, 57),)),
    EpochRecord(6, 57, (Range(0, 0, 57, 60),)),
    EpochRecord(7, 60, (Range(0, 0, 60, 66),)),
]


def lost(site: int = 0, in_flight: int = 2) -> Sequencer:
    budget = Budget(epoch_rows_max=100, epochs_in_flight_max=in_flight, small_in_flight_max=1)
    return Sequencer(site, [(0, 0)], [9], budget, 4, 50, {(0, 0): 50}, KNOWN)


def block(start: int, end: int, again: bool = False) -> BlocksAvailable:
    return BlocksAvailable(0, 0, (Block(start, end, 1),), again)


def test_epochs_that_were_cut_before_come_again_as_they_were() -> None:
    machine = lost()
    assert machine.handle(chain(0)) == [PublishRecord(r) for r in KNOWN[:2]], "as many as have room"
    assert machine.handle(block(50, 63)) == []
    assert machine.handle(DrainRequested()) == [], "not before all of them"
    assert machine.handle(EpochDelivered(9, 5)) == [PublishRecord(KNOWN[2])]
    effects = machine.handle(EpochDelivered(9, 7))
    assert effects == [PublishRecord(EpochRecord(8, 66, (), last=True, awake=True))]


def test_rows_that_were_announced_are_cut_once() -> None:
    machine = lost(in_flight=6)
    machine.handle(chain(0))
    assert machine.handle(block(50, 63)) == [], "they are in epochs"
    assert machine.handle(block(63, 70)) == []
    machine.handle(EpochDelivered(9, 7))
    assert machine.history[-1] == EpochRecord(8, 66, (Range(0, 0, 66, 70),), awake=True)


def test_a_successor_goes_on_with_those_that_are_left() -> None:
    machine = lost(site=1)
    assert machine.handle(chain(0, 1)) == []
    assert machine.handle(RecordPassed(KNOWN[0])) == [PublishRecord(KNOWN[0])]
    effects = machine.handle(chain(1, number=1))
    published = [e.record.epoch for e in effects]
    assert published == [5, 6], "5 again, as it may not have been heard"
    assert machine.handle(EpochDelivered(9, 5)) == [PublishRecord(KNOWN[2])]
