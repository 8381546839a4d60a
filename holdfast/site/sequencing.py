"""A node's replica of the sequencer, if it has one: its creation, its events and its effects.

The replicas of the sequencer are on the sites of the first task. A replica that joins later is
complete only when it has the sequencer's state from the last replica of the chain, and is in the
chain behind it. From then on every record passes through it before any site acts on the record.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import assert_never

from holdfast.api.options import Options
from holdfast.core.effects import (
    ConfirmChain,
    CopySequencer,
    PassRecord,
    PublishRecord,
    SequencerEffect,
)
from holdfast.core.events import (
    DrainRequested,
    EpochDelivered,
    PauseRequested,
    RecordPassed,
    SequencerCopied,
    SequencerEvent,
    SuccessorConnected,
    ViewCommitted,
)
from holdfast.core.ids import FIRST, NO_EPOCH, Epoch, SiteId, StageId
from holdfast.core.layout import View
from holdfast.core.messages import SequencerState
from holdfast.core.records import EpochRecord
from holdfast.core.sequencer import Sequencer
from holdfast.engine.memory import limit_bytes
from holdfast.errors import ProtocolError
from holdfast.net import wire
from holdfast.plan.planner import Plan
from holdfast.site.memory import fitting

log = logging.getLogger("holdfast.site")

EARLY_MAX = 1_000
"""Maximum events that wait for the view in which this site gets a sequencer."""


class Sequencing:
    """The sequencer of one site. `to` sends a message to a site; `publish` sends a record to all
    sites, this one included."""

    def __init__(
        self,
        plan: Plan,
        site: SiteId,
        options: Options,
        begun: Epoch,
        now: Callable[[], float],
        to: Callable[[SiteId, wire.Message], None],
        publish: Callable[[EpochRecord], None],
    ) -> None:
        self._plan, self._site, self._options = plan, site, options
        self._begun, self._now, self._to, self._publish = begun, now, to, publish
        self.sequencer: Sequencer | None = None
        self.waits_for_chain = False
        """Whether this site's replica is not in the chain yet."""
        self.early: deque[SequencerEvent] = deque(maxlen=EARLY_MAX)
        """Events from sites that have adopted a later view."""
        self.latency_ms: deque[float] = deque(maxlen=2_000)
        """Times from the cut of an epoch until all sinks have it."""
        self._cut_at: dict[int, float] = {}

    def open(self) -> None:
        """Create the replica that is here from the first view on."""
        self.sequencer = self._made()

    def close(self) -> None:
        self.sequencer, self.waits_for_chain = None, False

    def _made(self) -> Sequencer:
        sinks = [StageId(s.id) for s in self._plan.sinks]
        budget = fitting(self._options.budget, limit_bytes())
        restore_point = self._plan.restore_point
        seq = restore_point.rows if restore_point else 0
        cuts = {(StageId(s), n): o for s, n, o in restore_point.offsets} if restore_point else {}
        known = restore_point.records if restore_point else []
        begun = self._begun
        return Sequencer(self._site, self._plan.splits, sinks, budget, begun, seq, cuts, known)

    # --- events ---------------------------------------------------------------------------------

    def handle(self, event: SequencerEvent) -> None:
        if self.sequencer is None:
            self.early.append(event)
            return
        for effect in self.sequencer.handle(event):
            self._apply(effect)

    def on_pass(self, site: SiteId, message: wire.Pass) -> None:
        self.handle(RecordPassed(message.record))

    def on_blocks(self, site: SiteId, message: wire.Blocks) -> None:
        self.handle(message.available)

    def on_quiet(self, site: SiteId, message: wire.Quiet) -> None:
        self.handle(message.split)

    def on_drain(self, site: SiteId, message: wire.Drain) -> None:
        self.handle(DrainRequested())

    def on_pause(self, site: SiteId, message: wire.Pause) -> None:
        self.handle(PauseRequested(message.paused))

    def on_view(self, view: View) -> None:
        if self.sequencer is not None:
            self.handle(ViewCommitted(view))

    def take_early(self) -> None:
        """Handle the events that waited for the current view."""
        early, self.early = self.early, deque(maxlen=EARLY_MAX)
        for event in early if self.sequencer is not None else ():
            try:
                self.handle(event)
            except ProtocolError as error:  # not the fault of the sender of the view
                log.warning("site %s: in an event before its view: %s", self._site, error)

    def on_connected(self, site: SiteId) -> None:
        if self.sequencer is not None:
            self.handle(SuccessorConnected(site))

    def on_delivered(self, sink: StageId, epoch: Epoch) -> None:
        if self.sequencer is not None:
            self._note_latency(sink, epoch)
            self.handle(EpochDelivered(sink, epoch))

    def _note_cut(self, record: EpochRecord) -> None:
        """Note when an epoch is cut. Only the leader learns of the delivery of all epochs."""
        assert self.sequencer is not None
        if self.sequencer.leads:
            self._cut_at.setdefault(record.epoch, self._now())

    def _note_latency(self, sink: StageId, epoch: Epoch) -> None:
        assert self.sequencer is not None
        others = [e for other, e in self.sequencer.delivered.items() if other != sink]
        if all(e >= epoch for e in others):
            now = self._now()
            for cut in [e for e in self._cut_at if e <= epoch]:
                self.latency_ms.append((now - self._cut_at.pop(cut)) * 1e3)

    def _apply(self, effect: SequencerEffect) -> None:
        match effect:
            case PublishRecord():
                self._note_cut(effect.record)
                self._publish(effect.record)
            case PassRecord():
                self._note_cut(effect.record)
                self._to(effect.site, wire.Pass(effect.record))
            case CopySequencer():
                self._to(effect.site, wire.SequencerCopy(effect.state))
            case ConfirmChain():
                self._to(effect.site, wire.Chained())
            case _:
                assert_never(effect)

    # --- joining the chain ----------------------------------------------------------------------

    def join_chain(self, view: View) -> None:
        """Ask to become the last replica of the chain, unless this site is in it."""
        if self.waits_for_chain:
            has = self.sequencer.next_epoch if self.sequencer else NO_EPOCH
            joined_view = view.group(FIRST).joined_view_of(self._site)
            self._to(view.sequencers[-1], wire.JoinChain(has, joined_view))

    def on_state(self, state: SequencerState) -> bool:
        """Begin with the state of the last replica in the chain; False if it was not asked for."""
        if self.waits_for_chain:
            self.sequencer = self._made()
            self.handle(SequencerCopied(state))
        return self.waits_for_chain

    def on_chained(self) -> bool:
        """Note that this replica is in the chain. Return False if it was before."""
        waited, self.waits_for_chain = self.waits_for_chain, False
        return waited
