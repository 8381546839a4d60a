"""What a replica owes to others: its state, to those that join, that are standbys, and to the
store.

The replica hands its state over at an epoch boundary. A joiner needs a boundary that everything
which producers have dropped lies before; the store wants one epoch and no other; a standby takes
what there is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from holdfast.core.effects import HandOver, ReportJoinFailed, StoreState
from holdfast.core.exchange import Producer
from holdfast.core.ids import STORE, Epoch, ExchangeId, SiteId, TaskId
from holdfast.core.layout import PartitionGroup

Outputs = Mapping[ExchangeId, Producer]


class Donor:
    """The hand-overs of one replica."""

    __slots__ = ("due", "given", "handed", "key")

    def __init__(self, key: TaskId) -> None:
        self.key = key
        self.due: dict[SiteId, Epoch] = {}
        """To whom the state goes once this epoch is finished."""
        self.handed: dict[SiteId, int] = {}
        """To whom it has gone, and the view in which that replica joined."""
        self.given: dict[SiteId, Epoch] = {}
        """To whom it has gone that has kept it, and after which epoch that was. The next time only
        what has changed since goes there."""

    def begin(self, standbys: Iterable[SiteId], epoch: Epoch) -> None:
        """The flow begins after `epoch`: these standbys have the same state as the replica."""
        self.given = dict.fromkeys(standbys, epoch)

    def upto(self, otherwise: Epoch) -> Epoch:
        """Behind which epoch nothing may be processed in the same call."""
        return min(self.due.values(), default=otherwise)

    def order(self, joiner: SiteId, epoch: Epoch) -> None:
        """The state is wanted there, after this epoch or a later one."""
        self.due[joiner] = epoch

    def cancel(self, joiner: SiteId) -> None:
        """It is not wanted there any more."""
        self.due.pop(joiner, None)

    def order_checkpoints(self, standbys: tuple[SiteId, ...], finished: Epoch, busy: bool) -> None:
        """Standbys get the state, unless nothing has happened since the last time."""
        for site in standbys:
            if busy or self.given.get(site) != finished:
                self.due[site] = finished

    def hand_over(
        self,
        finished: Epoch,
        group: PartitionGroup,
        outputs: Outputs,
        connected: Collection[SiteId],
        stored: Epoch | None,
    ) -> list[HandOver | StoreState | ReportJoinFailed]:
        """To all for whom it is time. `stored` is the last epoch that is known to be stored."""
        effects: list[HandOver | StoreState | ReportJoinFailed] = []
        for joiner in [s for s, epoch in self.due.items() if finished >= epoch]:
            del self.due[joiner]
            after = self.given.pop(joiner, None)
            if joiner == STORE:  # what was given before may not have become part of a checkpoint
                after = after if after == stored else None
                self.given[joiner] = finished
                effects.append(StoreState(self.key, finished, after))
                continue
            joined_view = self.handed[joiner] = group.joined_view_of(joiner)
            if joiner not in connected:
                if joiner in group.joining:
                    reason = "it has no connection to its donor"
                    effects.append(ReportJoinFailed(self.key, joiner, reason))
                continue  # a standby gets all of it the next time
            self.given[joiner] = finished
            kept = {x: p.export(after) for x, p in outputs.items()}
            gaps = {x: p.gaps() for x, p in outputs.items()}
            over = HandOver(self.key, joiner, finished, kept, gaps, after, joined_view)
            effects.append(over)
        return effects

    def on_view(self, group: PartitionGroup, leads: bool) -> list[SiteId]:
        """Only those in the view get the state. The answer is to whom it was on its way in vain."""
        wanted = group.joining + group.standbys + ((STORE,) if leads else ())
        self.due = {s: e for s, e in self.due.items() if s in wanted}
        self.given = {s: e for s, e in self.given.items() if s in wanted}
        gone = [
            s for s, n in self.handed.items() if s not in wanted or group.joined_view_of(s) != n
        ]
        for site in gone:
            del self.handed[site]
            self.given.pop(site, None)
        return gone

    def on_lost(self, site: SiteId) -> bool:
        """The connection broke: some of it may not have arrived, so all of it goes there the next
        time. Whether something had gone there."""
        self.given.pop(site, None)
        return site in self.handed
