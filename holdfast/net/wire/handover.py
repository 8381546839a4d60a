"""Handing a task over to a new replica, or a checkpoint of it to a standby.

    donor -> joiner    HandOverBegin, HandOverKept*, HandOverHeld*, HandOverState*, HandOverEnd
    standby -> donor   HandOverRefused

The parts follow each other in this order, between other messages, a little at a time. A second
`HandOverBegin` for a task voids what came before. The joiner installs the state at `HandOverEnd`
and reports to the leader; if the connection breaks before, both ends report that the hand-over has
failed, and the joiner joins again under a new view.

A standby that has a later checkpoint than the one that begins, or another than the one that it
builds on, answers `HandOverRefused` and ignores the rest. The donor then sends its whole state,
once that is as late.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.ids import ExchangeId, GroupId, TaskId
from holdfast.core.upstream import Gap
from holdfast.net.wire.base import EpochNumber, Message, Number
from holdfast.net.wire.control import Extras
from holdfast.net.wire.data import Bundle


class HandOverBegin(Message, frozen=True):
    """The task's state after `epoch` follows."""

    task: TaskId
    epoch: EpochNumber
    nbytes: Number
    """About how much will follow."""
    extras: Extras
    after: EpochNumber | None
    """If set: only what has changed after this epoch."""
    gaps: Mapping[ExchangeId, Mapping[GroupId, Gap]]
    """What the donor does not have for its consumers."""
    joined_view: Number = 0
    """The view in which the replica joined that the state is for."""


class HandOverState(Message, frozen=True):
    """Rows of a table (Arrow IPC in the body); if `gone`, keys that are no longer in it."""

    task: TaskId
    table: str
    gone: bool = False


class HandOverKept(Message, frozen=True):
    """A bundle that the donor keeps for a consumer; the body is the bundle's."""

    task: TaskId
    bundle: Bundle


class HandOverHeld(Message, frozen=True):
    """Rows that only the replicas of this task have (Arrow IPC): see `TaskRunner.held`."""

    task: TaskId
    number: Number


class HandOverEnd(Message, frozen=True):
    """The state is complete: install it."""

    task: TaskId


class HandOverRefused(Message, frozen=True):
    """The standby keeps the checkpoint that it has."""

    task: TaskId
    joined_view: Number
    """The view in which the standby joined."""
    offered: EpochNumber
    has: EpochNumber
