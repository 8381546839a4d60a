"""Machines of the core, and events for them."""

from dataclasses import dataclass

from holdfast.core.dataflow import Dataflow
from holdfast.core.effects import SiteEffect
from holdfast.core.events import (
    BundleArrived,
    PeerConnected,
    RecordArrived,
    TaskProcessed,
    ViewCommitted,
)
from holdfast.core.layout import PartitionGroup, Shape, StageShape, View
from holdfast.core.messages import BundleKey
from holdfast.core.protection import ProtectionSpec
from holdfast.core.records import EpochRecord

SHAPE = Shape(
    (
        StageShape(0, "packets", "source", 1, (), (0,), guard=ProtectionSpec(replicas=2)),
        StageShape(1, "sessions", "keyed", 1, (0,), (1,), guard=ProtectionSpec(replicas=2)),
        StageShape(2, "alerts", "sink", 1, (1,), (), guard=ProtectionSpec(replicas=2)),
    ),
    producer_of=(0, 1),
    consumer_of=(1, 2),
)


SOURCE, KEYED, SINK = (0, 0), (1, 0), (2, 0)


@dataclass(frozen=True)
class Frames:
    name: str
    checksum: int = 0
    nbytes: int = 1


def view(number: int, *replicas: str) -> ViewCommitted:
    """``view(3, "0,1", "1+2", "2")``: who holds the source, the keyed stage and the sink."""
    groups = []
    for held in replicas:
        full, *joining = held.split("+")
        sites = tuple(int(s) for s in full.split(",") if s)
        groups.append((PartitionGroup(0, 1, sites, tuple(int(s) for s in joining)),))
    members = tuple(sorted({s for (c,) in groups for s in c.all}))
    return ViewCommitted(View(0, number, members, tuple(groups)))


def site(number: int, *replicas: str, connected: tuple[int, ...] = ()) -> Dataflow:
    machine = Dataflow(number, SHAPE, window=3)
    for other in connected:
        machine.handle(PeerConnected(other))
    machine.handle(view(0, *replicas))
    return machine


def record(epoch: int, last: bool = False) -> RecordArrived:
    return RecordArrived(EpochRecord(epoch, epoch, (), last=last))


def bundle(exchange: int, epoch: int, name: str = "b") -> BundleArrived:
    return BundleArrived(BundleKey(exchange, epoch, 0, 0, 0), Frames(name))


def processed(task: tuple[int, int], epoch: int, **outputs: str) -> TaskProcessed:
    made = {int(x[1:]): {0: Frames(name)} for x, name in outputs.items()}
    return TaskProcessed(task, epoch, True, made)


def of(kind: type, effects: list[SiteEffect]) -> list:
    return [e for e in effects if isinstance(e, kind)]


def chain(*sites: int, joining: tuple[int, ...] = (), number: int = 0) -> ViewCommitted:
    """A view in which these sites have the replicas of the sequencer."""
    members = (*sites, *joining)
    return ViewCommitted(View(0, number, members, ((PartitionGroup(0, 1, sites, joining),),)))
