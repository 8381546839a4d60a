"""What travels on the links of the model. A message is a hashable value."""

from __future__ import annotations

from typing import Any, NamedTuple

from holdfast.core.ids import Epoch, SiteId, TaskId
from holdfast.core.layout import View
from holdfast.core.messages import Ack, BundleKey
from holdfast.lab.model.flow import Frame


class LinkUp(NamedTuple):
    """The connection is established."""

    up: bool = True


class LinkDown(NamedTuple):
    """The connection is lost, with everything that was behind this."""

    down: bool = True


class BundleSent(NamedTuple):
    key: BundleKey
    frame: Frame


class AcksSent(NamedTuple):
    """All acks to one site that follow from one event, as a site sends them."""

    acks: tuple[Ack, ...]


class StateOffer(NamedTuple):
    task: TaskId
    epoch: Epoch
    joined_view: int


class StateSent(NamedTuple):
    """The state after an epoch. The real hand-over has more messages between begin and end."""

    task: TaskId
    epoch: Epoch
    state: int
    results: tuple[int, ...]
    kept: tuple[Any, ...]
    gaps: tuple[Any, ...]


class ViewSent(NamedTuple):
    view: View


class CatchUpSent(NamedTuple):
    task: TaskId
    joiner: SiteId


class FenceSent(NamedTuple):
    """The controller has declared the site dead: it ends."""

    fenced: bool = True


class ViewActedOn(NamedTuple):
    term: int
    number: int


class ReplicaSaid(NamedTuple):
    """As `ReplicaReported`, without the reason."""

    site: SiteId
    task: TaskId
    number: int
    phase: str


class SiteDone(NamedTuple):
    number: int
