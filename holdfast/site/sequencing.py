"""A node's replica of the sequencer, if it has one: how it comes to be, and what goes in and out.

The sequencer lives with the first task. A replica of that which is made later is whole only when
the sequencer's state has come from the last of the chain, and the new one is in the chain behind
it: from then on every record passes through it before anybody acts on it.
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
    EpochDelivered,
    SequencerCopied,
    SequencerEvent,
    SuccessorConnected,
    ViewCommitted,
)
from holdfast.core.ids import FIRST, NO_EPOCH, Epoch, SiteId, StageId
from holdfast.core.layout import View
from holdfast.core.records import EpochRecord
from holdfast.core.sequencer import Sequencer
from holdfast.engine.memory import limit_bytes
from holdfast.errors import ProtocolError
from holdfast.net import wire
from holdfast.plan.planner import Plan
from holdfast.site.memory import fitting

log = logging.getLogger("holdfast.site")

EARLY_MAX = 1_000
"""So much is remembered of what comes before the view in which there is a sequencer here."""


class Sequencing:
    """`to` reaches any site; `publish` tells all of them of a record, this one included."""

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
        """Whether the replica that is here is not in the chain yet."""
        self.early: deque[SequencerEvent] = deque(maxlen=EARLY_MAX)
        """From sites that act on a later view than this one."""
        self.latency_ms: deque[float] = deque(maxlen=2_000)
        """From when an epoch was cut until all sinks had it."""
        self._cut_at: dict[int, float] = {}

    def open(self) -> None:
        """It is here from the first view on."""
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

    def on_view(self, view: View) -> None:
        if self.sequencer is not None:
            self.handle(ViewCommitted(view))

    def take_early(self) -> None:
        """What came for the view that is there now."""
        early, self.early = self.early, deque(maxlen=EARLY_MAX)
        for event in early if self.sequencer is not None else ():
            try:
                self.handle(event)
            except ProtocolError as error:  # not the fault of whoever sent the view
                log.warning("site %s: of what came before its view: %s", self._site, error)

    def on_connected(self, site: SiteId) -> None:
        if self.sequencer is not None:
            self.handle(SuccessorConnected(site))

    def on_delivered(self, sink: StageId, epoch: Epoch) -> None:
        if self.sequencer is not None:
            self._note_latency(sink, epoch)
            self.handle(EpochDelivered(sink, epoch))

    def _note_cut(self, record: EpochRecord) -> None:
        """Only who leads hears of all epochs that they are delivered."""
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
                self._to(effect.site, wire.SequencerState(**effect.state))
            case ConfirmChain():
                self._to(effect.site, wire.Chained())
            case _:
                assert_never(effect)

    # --- joining the chain ----------------------------------------------------------------------

    def join_chain(self, view: View) -> None:
        """Ask to be the last of it, if it is not in it yet."""
        if self.waits_for_chain:
            has = self.sequencer.next_epoch if self.sequencer else NO_EPOCH
            joined_view = view.group(FIRST).joined_view_of(self._site)
            self._to(view.sequencers[-1], wire.JoinChain(has, joined_view))

    def on_state(self, message: wire.SequencerState) -> bool:
        """What the last of the chain knows; False if it is not asked for."""
        if self.waits_for_chain:
            self.sequencer = self._made()
            self.handle(SequencerCopied(wire.fields(message)))
        return self.waits_for_chain

    def on_chained(self) -> bool:
        """It is in the chain; False if it was before."""
        waited, self.waits_for_chain = self.waits_for_chain, False
        return waited
