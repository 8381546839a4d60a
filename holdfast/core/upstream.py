"""Upstream backup: a task has one replica, and is rebuilt from its input if that replica dies.

Producers therefore keep their bundles for longer than until they are received: as long as the
state of the task, and output that its consumers still lack, derive from them. The task tells its
producers up to which epoch it no longer needs its input. At level 1 that is the input which the
state after the last epoch that all consumers have received does not derive from: the task can make
again whatever they lack. At level k + 1 it is the same for what the consumers no longer need at
level k. If producers keep bundles until level k, tasks of k stages in a row may be lost at once:
the first is rebuilt from what is kept and makes again all that the next one needs at level k - 1,
and so on. Until its consumers have moved on, what a rebuilt task keeps is complete only at that
lower level.

A rebuilt task begins with empty state before the oldest input that is left, processes what follows,
and sends what its consumers lack. Its output of the first epochs may be wrong, because the state
was not empty then. No consumer lacks that output; but a consumer that is being rebuilt, too, must
not use it as input. So a task's needs travel with `ValidAfter`: for each task from there on, the
epoch after which its output is right, if it is rebuilt from what is kept then. A rebuilt task keeps
only what comes after its own epoch, and tells its consumers the rest when they ask.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from holdfast.core.ids import NO_EPOCH, Epoch, ExchangeId, GroupId, SiteId, TaskId

ProducerReplica = tuple[ExchangeId, GroupId, SiteId]

ValidAfter = Mapping[TaskId, Epoch]
"""After which epoch the output of each task is right, if the task is rebuilt."""


def merged(bounds: Iterable[ValidAfter]) -> dict[TaskId, Epoch]:
    """The latest epoch of each task: output must be right for all of the bounds."""
    found: dict[TaskId, Epoch] = {}
    for valid_after in bounds:
        for task, epoch in valid_after.items():
            found[task] = max(epoch, found.get(task, NO_EPOCH))
    return found


class Log(NamedTuple):
    """What a replica of a producer has for a consumer that shall be rebuilt."""

    after: Epoch
    """It has everything after this epoch ..."""
    upto: Epoch
    """... up to this one so far,"""
    complete_level: int
    """which is all that the consumer needs at this level."""
    valid_after: ValidAfter


class Gap(NamedTuple):
    """What a producer does not have for a consumer, as a new replica of the producer must know it:
    see the fields of the same names in `holdfast.core.exchange`."""

    trimmed_upto: Epoch
    known_stable: Epoch
    rebuilt_from: Epoch
    complete_level: int
    valid_after: ValidAfter


class Needed(NamedTuple):
    """What a consumer tells its producers of its needs, at each of `depth` levels."""

    depth: int = 0
    levels: tuple[Epoch, ...] | None = None
    """Up to which epochs it no longer needs its input; None: it needs nothing that it has
    received."""
    valid_after: tuple[ValidAfter, ...] = ()


class Needs:
    """From which input the state of a task derives, epoch by epoch."""

    def __init__(self, epoch: Epoch, needs: Epoch) -> None:
        self._log: deque[tuple[Epoch, Epoch]] = deque([(epoch, needs)])

    def processed(self, epoch: Epoch, needs: Epoch) -> None:
        """The state after `epoch` derives from the input after the epoch `needs`."""
        self._log.append((epoch, needs))

    def at(self, epoch: Epoch) -> Epoch:
        """The epoch after which the input came that the state after `epoch` derives from."""
        found = NO_EPOCH
        for known, needs in self._log:
            if known > epoch:
                break
            found = needs
        return found

    def forget(self, epoch: Epoch) -> None:
        """Drop what only epochs before this one need."""
        while len(self._log) > 1 and self._log[1][0] <= epoch:
            self._log.popleft()


class Search:
    """The answers that a task which shall be rebuilt has from its producers."""

    def __init__(self) -> None:
        self.told: dict[ProducerReplica, Log] = {}

    def begins(self, wanted: Mapping[ProducerReplica, object]) -> Log | None:
        """What all of these have together; None until each has answered."""
        if not wanted or any(replica not in self.told for replica in wanted):
            return None
        logs = [self.told[replica] for replica in wanted]
        return Log(
            max(log.after for log in logs),
            max(log.upto for log in logs),
            min(log.complete_level for log in logs),
            merged(log.valid_after for log in logs),
        )
