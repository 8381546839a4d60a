"""The hand-overs of a site: state that leaves for new replicas and standbys, and state that comes.

A hand-over travels a part at a time, between other messages (`holdfast.net.wire.handover`). The
core decides when one begins and which ones are void; this class moves the parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.core.dataflow import Dataflow
from holdfast.core.effects import HandOver, ReceiveState
from holdfast.core.events import CheckpointRefused, HandOverBegun, SiteEvent
from holdfast.core.ids import SiteId, TaskId
from holdfast.core.layout import View
from holdfast.net import wire
from holdfast.plan.planner import Plan
from holdfast.site.handover import Incoming, IncomingCheckpoint, Outgoing
from holdfast.site.sourcing import Sourcing
from holdfast.site.stages import SiteStages


class Transfers:
    """`handle` gives an event to the dataflow, `send` reaches another site."""

    def __init__(
        self,
        plan: Plan,
        stages: SiteStages,
        dataflow: Dataflow,
        sourcing: Sourcing,
        now: Callable[[], float],
        send: Callable[..., None],
        handle: Callable[[SiteEvent], None],
    ) -> None:
        self._plan, self._stages, self._dataflow = plan, stages, dataflow
        self._sourcing = sourcing
        self._now, self._send, self._handle = now, send, handle
        self.outgoing: dict[tuple[TaskId, SiteId], Outgoing] = {}
        self.incoming: dict[TaskId, Incoming] = {}
        self.freeze_ms = 0.0
        """The longest time that freezing a task's state took."""

    @property
    def _view(self) -> View:
        assert self._dataflow.view is not None
        return self._dataflow.view

    # --- leaving --------------------------------------------------------------------------------

    def begin(self, effect: HandOver) -> None:
        begun = self._now()
        outgoing = Outgoing(effect, self._stages.tasks[effect.task])
        self.outgoing[effect.task, effect.joiner] = outgoing
        self.freeze_ms = max(self.freeze_ms, (self._now() - begun) * 1e3)

    def is_under_way(self, task: TaskId, joiner: SiteId) -> bool:
        return (task, joiner) in self.outgoing

    def abandon(self, task: TaskId, joiner: SiteId) -> None:
        outgoing = self.outgoing.pop((task, joiner), None)
        if outgoing is not None:
            outgoing.close()

    def send_part(self) -> int | None:
        """Send the next part of a hand-over. Return its size, 0 at the end of one; None if there is
        no hand-over."""
        for key, outgoing in self.outgoing.items():
            part = outgoing.next()
            if part is None:
                del self.outgoing[key]
                return 0
            message, body = part
            self._send(outgoing.joiner, message, body)
            return sum(memoryview(b).nbytes for b in body or [])
        return None

    def metrics(self) -> list[dict[str, Any]]:
        return [
            {"task": list(task), "to": joiner, "bytes_left": o.nbytes_left, "bytes": o.nbytes}
            for (task, joiner), o in self.outgoing.items()
        ]

    # --- coming ---------------------------------------------------------------------------------

    def receive_state(self, effect: ReceiveState) -> None:
        """Accept what a donor has begun to hand over; what came in before is void."""
        task = effect.task
        if effect.checkpoint:
            runner = self._stages.tasks[task]
            self.incoming[task] = IncomingCheckpoint(effect.offer, effect.sender, runner)
            return
        self.empty(task)
        self.incoming[task] = Incoming(effect.offer, effect.sender, self._stages.tasks[task])

    def discard_state(self, task: TaskId) -> None:
        """Drop what has come in for a task."""
        self.incoming.pop(task, None)

    def empty(self, task: TaskId) -> None:
        """Open a task again, without state."""
        self._stages.shut(task)
        self._stages.open(task, self._view, begins=False)
        self._stages.on_view(self._view)

    def on_hand_over_begin(self, site: SiteId, message: wire.HandOverBegin) -> None:
        ends = (message.task, site, message, message.joined_view)
        self._handle(HandOverBegun(*ends, message.epoch, message.after))

    def on_hand_over_refused(self, site: SiteId, message: wire.HandOverRefused) -> None:
        ends = (message.task, site, message.joined_view)
        self._handle(CheckpointRefused(*ends, message.offered, message.has))

    def on_hand_over_state(
        self, site: SiteId, message: wire.HandOverState, body: memoryview
    ) -> None:
        self._take(site, message, body)

    def on_hand_over_kept(self, site: SiteId, message: wire.HandOverKept, body: memoryview) -> None:
        self._take(site, message, body)

    def on_hand_over_held(self, site: SiteId, message: wire.HandOverHeld, body: memoryview) -> None:
        self._take(site, message, body)

    def _take(
        self,
        site: SiteId,
        message: wire.HandOverState | wire.HandOverKept | wire.HandOverHeld,
        body: memoryview,
    ) -> None:
        incoming = self.incoming.get(message.task)
        if incoming is not None and incoming.donor == site:
            incoming.take(self._plan, message, body)

    def on_hand_over_end(self, site: SiteId, message: wire.HandOverEnd) -> None:
        task = message.task
        incoming = self.incoming.get(task)
        if incoming is None or incoming.donor != site:
            return
        if isinstance(incoming, IncomingCheckpoint) and incoming.begin.after is None:
            self.empty(task)
            incoming.put_into(self._stages.tasks[task])
        installed = incoming.install(task)
        del self.incoming[task]
        self._handle(installed)
        self._stages.on_view(self._view)
        self._sourcing.ask_for_push_batches()
