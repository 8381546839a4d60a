"""Sources and sinks whose second replica only follows the first, until it comes to lead."""

from holdfast.core.dataflow import Dataflow
from holdfast.core.effects import FollowEpoch, IngestEpochs, ProcessBundles, SendAck
from holdfast.core.events import AckArrived, PeerConnected, SinkDurable
from holdfast.core.layout import Shape, StageShape
from holdfast.core.messages import Ack
from holdfast.core.protection import ProtectionSpec
from tests.support.core_machines import KEYED, SINK, SOURCE, record, view

LAZY = ProtectionSpec(replicas=2, deterministic=False, followers=True)
SHAPE = Shape(
    (
        StageShape(0, "packets", "source", 1, (), (0,), guard=LAZY),
        StageShape(
            1, "windows", "keyed", 1, (0,), (1,), guard=ProtectionSpec(level=1, rebuild_level=1)
        ),
        StageShape(2, "alerts", "sink", 1, (1,), (), guard=LAZY),
    ),
    producer_of=(0, 1),
    consumer_of=(1, 2),
)


def site(number: int, *replicas: str) -> Dataflow:
    machine = Dataflow(number, SHAPE, window=3)
    for other in {0, 1, 2} - {number}:
        machine.handle(PeerConnected(other))
    machine.handle(view(0, *replicas))
    return machine


def needed_no_more(epoch: int, received: int) -> AckArrived:
    return AckArrived(2, Ack(0, 0, 0, 0, received, received + 3, False, -1, 0, (epoch,)))


def test_a_source_leaves_out_what_nobody_needs_and_reads_the_rest_when_it_leads() -> None:
    second = site(1, "0,1", "2", "0,1")
    for epoch in range(4):
        assert not [e for e in second.handle(record(epoch)) if isinstance(e, IngestEpochs)]
    followed = second.handle(needed_no_more(1, received=3))
    assert [e.record.epoch for e in followed if isinstance(e, FollowEpoch)] == [0, 1]
    assert second.tasks[SOURCE].finished == 1
    ingested = [e for e in second.handle(view(1, "1", "2", "1")) if isinstance(e, IngestEpochs)]
    (again,) = (e.records for e in ingested)
    assert [r.epoch for r in again] == [2], "what was received is needed again"


def test_a_sink_takes_nothing_before_it_leads_and_then_what_is_not_durable() -> None:
    second = site(1, "0,1", "2", "0,1")
    acks = [e for e in second.handle(SinkDurable(SINK, 4)) if isinstance(e, SendAck)]
    assert [(a.ack.exchange, a.site, a.ack.received, a.ack.subscribe) for a in acks] == [
        (1, 2, 4, False)
    ]
    assert not second.handle(SinkDurable(SINK, 3)), "that was known"
    asked = [e for e in second.handle(view(1, "1", "2", "1")) if isinstance(e, SendAck)]
    assert [(a.ack.received, a.ack.subscribe) for a in asked if a.ack.exchange == 1] == [(4, True)]


def test_the_first_replica_works_and_is_who_consumers_take_from() -> None:
    first = site(0, "0,1", "2", "0,1")
    assert [type(e) for e in first.handle(record(0))] == [IngestEpochs]
    assert not first.handle(SinkDurable(SINK, 0)), "it knows best itself"
    keyed = site(2, "0,1", "2", "0,1")
    taken = keyed.handle(view(1, "0,1", "2", "0,1"))
    asked = {
        e.site: e.ack.subscribe for e in taken if isinstance(e, SendAck) and e.ack.exchange == 0
    }
    assert asked == {0: True, 1: False}
    assert not [e for e in taken if isinstance(e, ProcessBundles)] and KEYED in keyed.tasks
