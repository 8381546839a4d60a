"""Hand-overs of a replica: its state, to replicas that join, to standbys, and to the store.

The replica hands its state over at an epoch boundary. A joining replica needs a boundary that is
not before anything that producers have dropped; the store needs one particular epoch; a standby
takes any.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from holdfast.core.effects import (
    AbandonHandOver,
    HandOver,
    ReportJoinFailed,
    ReportMissed,
    StoreState,
)
from holdfast.core.events import CheckpointRefused
from holdfast.core.exchange import Producer
from holdfast.core.ids import STORE, Epoch, ExchangeId, SiteId, TaskId
from holdfast.core.layout import PartitionGroup

Outputs = Mapping[ExchangeId, Producer]


class Donor:
    """The hand-overs of one replica."""

    __slots__ = ("_stored", "due", "given", "handed", "key")

    def __init__(self, key: TaskId) -> None:
        self.key = key
        self.due: dict[SiteId, Epoch] = {}
        """By receiver: the epoch after which the state goes there."""
        self.handed: dict[SiteId, int] = {}
        """By receiver that the state has gone to: the view in which that replica joined."""
        self.given: dict[SiteId, Epoch] = {}
        """By receiver that has kept the state: after which epoch that was. Next time only what has
        changed since goes there."""
        self._stored: Epoch | None = None
        """The epoch of the last checkpoint that is known to be stored, when the store is due."""

    def begin(self, standbys: Iterable[SiteId], epoch: Epoch) -> None:
        """The flow begins after `epoch`: these standbys have the same state as the replica."""
        self.given = dict.fromkeys(standbys, epoch)

    def upto(self, otherwise: Epoch) -> Epoch:
        """The last epoch that may be processed in the same call."""
        return min(self.due.values(), default=otherwise)

    def order(self, joiner: SiteId, epoch: Epoch) -> None:
        """Hand the state over to `joiner`, after this epoch or a later one."""
        self.due[joiner] = epoch

    def cancel(self, joiner: SiteId) -> None:
        """Do not hand the state over to `joiner`."""
        self.due.pop(joiner, None)

    def order_store(self, epoch: Epoch, after: Epoch | None, reached: Epoch) -> list[ReportMissed]:
        """Store the state after `epoch`: what has changed after `after`, if that was stored last.
        It is too late if the replica has finished or is processing a later epoch (`reached`)."""
        if reached > epoch:
            self.cancel(STORE)
            return [ReportMissed(self.key, epoch)]
        self.due[STORE], self._stored = epoch, after
        return []

    def order_checkpoints(self, standbys: tuple[SiteId, ...], finished: Epoch, busy: bool) -> None:
        """Hand the state over to standbys, unless nothing has happened since the last time."""
        for site in standbys:
            if busy or self.given.get(site) != finished:
                self.due[site] = max(finished, self.due.get(site, finished))

    def hand_over(
        self,
        finished: Epoch,
        group: PartitionGroup,
        outputs: Outputs,
        connected: Collection[SiteId],
    ) -> list[HandOver | StoreState | ReportJoinFailed]:
        """Hand over to all receivers whose epoch is finished."""
        effects: list[HandOver | StoreState | ReportJoinFailed] = []
        for joiner in [s for s, epoch in self.due.items() if finished >= epoch]:
            del self.due[joiner]
            after = self.given.pop(joiner, None)
            if joiner == STORE:  # the state given last may not be part of a checkpoint
                after = after if after == self._stored else None
                self.given[joiner] = finished
                effects.append(StoreState(self.key, finished, after))
                continue
            joined_view = self.handed[joiner] = group.joined_view_of(joiner)
            if joiner not in connected:
                if joiner in group.joining:
                    reason = "it has no connection to its donor"
                    effects.append(ReportJoinFailed(self.key, joiner, reason))
                continue  # a standby gets the whole state next time
            self.given[joiner] = finished
            kept = {x: p.export(after) for x, p in outputs.items()}
            gaps = {x: p.gaps() for x, p in outputs.items()}
            over = HandOver(self.key, joiner, finished, kept, gaps, after, joined_view)
            effects.append(over)
        return effects

    def on_view(self, group: PartitionGroup, leads: bool) -> list[AbandonHandOver]:
        """Drop receivers that are not in the view, and abandon hand-overs to them."""
        wanted = group.joining + group.standbys + ((STORE,) if leads else ())
        self.due = {s: e for s, e in self.due.items() if s in wanted}
        self.given = {s: e for s, e in self.given.items() if s in wanted}
        gone = [
            s for s, n in self.handed.items() if s not in wanted or group.joined_view_of(s) != n
        ]
        for site in gone:
            del self.handed[site]
            self.given.pop(site, None)
        return [AbandonHandOver(self.key, site) for site in gone]

    def on_refused(self, event: CheckpointRefused) -> list[AbandonHandOver]:
        """A standby has a later checkpoint than the one that this replica began with when it took
        over. The whole state goes there as soon as it is as late. A refusal of an earlier
        hand-over does not count: the standby refuses those that build on it, too."""
        site = event.standby
        if self.handed.get(site) != event.joined_view or self.given.get(site) != event.offered:
            return []
        del self.given[site]
        self.due[site] = event.has
        return [AbandonHandOver(self.key, site)]

    def on_lost(
        self, site: SiteId, group: PartitionGroup, own_site: SiteId
    ) -> list[AbandonHandOver | ReportJoinFailed]:
        """The connection to a receiver broke, and the state may not have arrived: the whole state
        goes there next time."""
        self.given.pop(site, None)
        if site not in self.handed:
            return []
        effects: list[AbandonHandOver | ReportJoinFailed] = [AbandonHandOver(self.key, site)]
        if site in group.joining:
            reason = f"its connection to site {own_site} broke"
            effects.append(ReportJoinFailed(self.key, site, reason))
        return effects
