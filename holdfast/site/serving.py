"""Serves the readers of sinks: they ask the site that leads the egress.

What a reader tells the writer must survive the loss of that site. So the leader sends the writer's
notes to the other replicas of the egress whenever they change, and answers a reader when these
replicas have them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.core.ids import GroupId, SiteId, StageId
from holdfast.core.layout import View
from holdfast.engine.batches import to_ipc
from holdfast.errors import HoldfastError
from holdfast.net import wire
from holdfast.site.egress import Egress

Reply = Callable[[wire.Answer, list[Any]], None]
Send = Callable[[SiteId, wire.Message], None]


@dataclass(slots=True)
class _Waiting:
    """An answer that waits until all replicas have the notes with this number."""

    sink: StageId
    number: int
    missing: set[SiteId]
    give: Callable[[], None]


class Serving:
    """The readers that one site serves."""

    def __init__(
        self,
        egress: Callable[[StageId], Egress | None],
        send: Send,
        last: Callable[[], int | None],
        changed: Callable[[], None],
    ) -> None:
        """`last` is the flow's last epoch once it is known. `changed` is called when readers, or
        other replicas, have reported something."""
        self._egress, self._send, self._last, self._changed = egress, send, last, changed
        self._others: dict[StageId, tuple[SiteId, ...]] = {}
        self._leaders: dict[StageId, SiteId] = {}
        self._number = 0
        self._passed: dict[StageId, dict[str, Any]] = {}
        """The notes that were sent to the other replicas last."""
        self._waiting: list[_Waiting] = []

    @property
    def owes_answers(self) -> bool:
        """Whether a reader waits until other replicas have its notes."""
        return bool(self._waiting)

    def leader(self, sink: int) -> SiteId | None:
        return self._leaders.get(StageId(sink))

    def on_view(self, view: View, site: SiteId, sinks: list[StageId]) -> None:
        """Adopt a view. A joining replica gets the notes with its state, and the notes that change
        in the meantime when it has become a replica."""
        for sink in sinks:
            group = view.group((sink, GroupId(0)))
            self._others[sink] = tuple(s for s in group.replicas if s != site)
            self._leaders[sink] = group.replicas[0]
            egress = self._egress(sink)
            if egress is not None and group.led_by(site) and egress.notes:
                self._pass_on(sink, egress)
        for waiting in self._waiting:
            waiting.missing &= set(self._others[waiting.sink])
        self._give()

    def ask(self, message: wire.Ask, reply: Reply, leader: tuple[str, int] | None) -> None:
        """Answer a reader: now, or when the other replicas have its notes."""
        sink = StageId(message.sink)
        egress = self._egress(sink)
        if egress is None or not egress.leads:
            reply(wire.Answer(False, wire.NOT_HERE, leader), [])
            return
        before = egress.notes
        try:
            values, rows = egress.answer(message.request)
        except HoldfastError as error:
            reply(wire.Answer(False, str(error)), [])
            return
        except (KeyError, TypeError, ValueError) as error:
            reply(wire.Answer(False, f"not a request: {error!r}"), [])
            return
        if "had" in values:  # add whether the reader has all rows that there will be
            values["over"] = int(values["had"] == egress.taken == self._last())
        bodies = [to_ipc(batch) for batch in rows]
        answer = wire.Answer(True, "", None, values, tuple(b.size for b in bodies))
        if egress.notes == before:
            reply(answer, list(bodies))
            return
        self._pass_on(sink, egress)
        missing = set(self._others.get(sink, ()))
        give = lambda: reply(answer, list(bodies))  # noqa: E731
        self._waiting.append(_Waiting(sink, self._number, missing, give))
        self._give()
        self._changed()

    def flush_notes(self) -> None:
        """Tell the other replicas about dropped readers. Called at intervals. Until then a new
        leader would hold more rows than necessary."""
        for sink in self._others:
            egress = self._egress(sink)
            led = egress is not None and egress.leads
            if egress is not None and led and egress.notes != self._passed.get(sink, {}):
                self._pass_on(sink, egress)

    def _pass_on(self, sink: StageId, egress: Egress) -> None:
        self._number += 1
        self._passed[sink] = egress.notes
        for site in self._others.get(sink, ()):
            self._send(site, wire.Notes(sink, self._number, **egress.notes))

    def on_notes(self, site: SiteId, message: wire.Notes) -> None:
        egress = self._egress(StageId(message.sink))
        if egress is not None and not egress.leads and self.leader(message.sink) == site:
            egress.note(msgspec.structs.asdict(message))
            self._send(site, wire.NotesKept(message.sink, message.number))
        self._changed()

    def on_notes_kept(self, site: SiteId, message: wire.NotesKept) -> None:
        for waiting in self._waiting:
            if waiting.sink == message.sink and waiting.number <= message.number:
                waiting.missing.discard(site)
        self._give()
        self._changed()

    def on_connected(self, site: SiteId) -> None:
        """Send the notes again: they may have been lost with the last connection."""
        for sink, others in self._others.items():
            egress = self._egress(sink)
            if site in others and egress is not None and egress.leads and egress.notes:
                self._pass_on(sink, egress)

    def _give(self) -> None:
        ready = [w for w in self._waiting if not w.missing]
        self._waiting = [w for w in self._waiting if w.missing]
        for waiting in ready:
            waiting.give()
