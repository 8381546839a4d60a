"""Upstream backup: a task has one replica, and is rebuilt from its input if that dies.

So its producers keep their bundles for longer than until they are received: as long as the state
of the task, and the output that its own consumers do not have yet, come from them. The task says
up to where they are not needed any more. At level 1 that is what its state does not come from, as
it was after the last epoch that all its consumers have received: whatever they lack can then be
made again. At level k + 1, the same of what they do not need any more at level k. With bundles that
are kept until level k, tasks of k stages in a row may be lost at once: the first is rebuilt from
what is kept, and makes again all that the next one needs at level k - 1, and so on. Until its
consumers have moved on, what a task that was rebuilt keeps is complete only at that level.

The task that is rebuilt begins with empty state behind the oldest input that is left, processes
what follows, and sends what its consumers lack; they know their epochs. What it makes of earlier
epochs may be wrong, as the state was not empty then, and nobody lacks that; but a consumer that is
rebuilt, too, must not take it for its input. So what a task says of its needs goes with a *line*:
the epoch that each task from there on must reach until what it makes is right, if it is rebuilt
from what is kept then. A task that is rebuilt keeps what comes after its own, and tells the rest
to its consumers, if they ask.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from holdfast.core.ids import NO_EPOCH, Epoch, ExchangeId, GroupId, SiteId, TaskId

Source = tuple[ExchangeId, GroupId, SiteId]
"""A replica of a producer."""


Line = Mapping[TaskId, Epoch]
"""After which epochs what tasks make is right, if they are rebuilt."""


def merged(lines: Iterable[Line]) -> dict[TaskId, Epoch]:
    """Of several lines the latest: what has been right before is right for later beginnings only
    if it is later, too."""
    found: dict[TaskId, Epoch] = {}
    for line in lines:
        for task, epoch in line.items():
            found[task] = max(epoch, found.get(task, NO_EPOCH))
    return found


class Log(NamedTuple):
    """What a replica of a producer has for a consumer that is to be rebuilt."""

    after: Epoch
    """It has everything after this epoch ..."""
    upto: Epoch
    """... up to this one so far,"""
    credit: int
    """which is all that the consumer needs at this level."""
    line: Line


class Gap(NamedTuple):
    """What a producer does not have for a consumer, as another replica of it must know."""

    let_go: Epoch
    known: Epoch
    base: Epoch
    credit: int
    line: Line


class Needed(NamedTuple):
    """What a consumer tells its producers of its needs, at each of so many levels."""

    depth: int = 0
    levels: tuple[Epoch, ...] | None = None
    """Up to which epochs it does not need its input any more; None: nothing that it has."""
    lines: tuple[Line, ...] = ()


class Needs:
    """Which input the state of a task comes from, epoch by epoch."""

    def __init__(self, epoch: Epoch, needs: Epoch) -> None:
        self._log: deque[tuple[Epoch, Epoch]] = deque([(epoch, needs)])

    def processed(self, epoch: Epoch, needs: Epoch) -> None:
        """The state after `epoch` comes from the input after the epoch `needs`."""
        self._log.append((epoch, needs))

    def at(self, epoch: Epoch) -> Epoch:
        """From which input the state after `epoch` comes, or one before it."""
        found = NO_EPOCH
        for known, needs in self._log:
            if known > epoch:
                break
            found = needs
        return found

    def forget(self, epoch: Epoch) -> None:
        """Nobody will ask for epochs before this one."""
        while len(self._log) > 1 and self._log[1][0] <= epoch:
            self._log.popleft()


class Search:
    """A task that is to be rebuilt asks its producers from where on it can be."""

    def __init__(self) -> None:
        self.told: dict[Source, Log] = {}

    def begins(self, wanted: Mapping[Source, object]) -> Log | None:
        """What there is of all of these together; None if not all have said it."""
        if not wanted or any(source not in self.told for source in wanted):
            return None
        said = [self.told[source] for source in wanted]
        afters, uptos, credits, lines = zip(*said, strict=True)
        return Log(max(afters), max(uptos), min(credits), merged(lines))
