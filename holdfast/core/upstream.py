"""Upstream backup: a unit has one copy, and is made anew from its input if that dies.

So its producers keep their bundles for longer than until they are received: as long as the state
of the unit, and the output that its own consumers do not have yet, come from them. The unit says
up to where they are not needed any more. At level 1 that is what its state does not come from, as
it was after the last epoch that all its consumers have received: whatever they lack can then be
made again. At level k + 1, the same of what they do not need any more at level k. With bundles that
are kept until level k, units of k stages in a row may be lost at once: the first is made anew from
what is kept, and makes again all that the next one needs at level k - 1, and so on. Until its
consumers have moved on, what a unit that was made anew keeps is complete only at that level.

The unit that is made anew begins with empty state behind the oldest input that is left, processes
what follows, and sends what its consumers lack; they know their epochs. What it makes of earlier
epochs may be wrong, as the state was not empty then, but nobody lacks that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from holdfast.core.ids import NO_EPOCH, CohortId, Epoch, ExchangeId, SiteId

Source = tuple[ExchangeId, CohortId, SiteId]
"""A copy of a producer."""


class Needs:
    """Which input the state of a unit comes from, epoch by epoch."""

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
    """A unit that is to be made anew asks its producers from where on it can be."""

    def __init__(self) -> None:
        self.told: dict[Source, tuple[Epoch, Epoch, int]] = {}

    def begins(self, wanted: Mapping[Source, object]) -> tuple[Epoch, Epoch, int] | None:
        """After which epoch, up to where others have come since, and at which level that is enough;
        None if not all of these have said what they have."""
        if not wanted or any(source not in self.told for source in wanted):
            return None
        said = [self.told[source] for source in wanted]
        afters, uptos, credits = zip(*said, strict=True)
        return max(afters), max(uptos), min(credits)
