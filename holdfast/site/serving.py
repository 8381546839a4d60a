"""Sinks that are read where they are written: readers ask the site that leads the egress.

What a reader tells the writer must not die with that site. So the other replicas of the egress get
the writer's notes whenever they have changed, and a reader gets its answer when they have them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    """What one site has to do with the readers of sinks."""

    def __init__(
        self,
        egress: Callable[[StageId], Egress | None],
        send: Send,
        last: Callable[[], int | None],
    ) -> None:
        self._egress, self._send, self._last = egress, send, last
        self._others: dict[StageId, tuple[SiteId, ...]] = {}
        self._leaders: dict[StageId, SiteId] = {}
        self._number = 0
        self._passed: dict[StageId, dict[str, Any]] = {}
        """The notes that the other replicas were sent last."""
        self._waiting: list[_Waiting] = []

    @property
    def owes_answers(self) -> bool:
        """Whether a reader waits until other replicas have what it said."""
        return bool(self._waiting)

    def leader(self, sink: int) -> SiteId | None:
        return self._leaders.get(StageId(sink))

    def on_view(self, view: View, site: SiteId, sinks: list[StageId]) -> None:
        """Other replicas count, or other sites lead. A replica that is being made gets the notes
        with its state, and those that come meanwhile when it is one."""
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

    def ask(self, message: wire.Ask, reply: Reply, leader: tuple[str, int] | None) -> bool:
        """Answer a reader, now or soon; whether what it said has changed anything."""
        sink = StageId(message.sink)
        egress = self._egress(sink)
        if egress is None or not egress.leads:
            reply(wire.Answer(False, wire.NOT_HERE, leader), [])
            return False
        before = egress.notes
        try:
            values, rows = egress.answer(message.request)
        except HoldfastError as error:
            reply(wire.Answer(False, str(error)), [])
            return False
        except (KeyError, TypeError, ValueError) as error:
            reply(wire.Answer(False, f"not a request: {error!r}"), [])
            return False
        if "had" in values:  # and whether that is all there will be
            values["over"] = int(values["had"] == egress.taken == self._last())
        bodies = [to_ipc(batch) for batch in rows]
        answer = wire.Answer(True, "", None, values, [b.size for b in bodies])
        if egress.notes == before:
            reply(answer, list(bodies))
            return False
        self._pass_on(sink, egress)
        missing = set(self._others.get(sink, ()))
        give = lambda: reply(answer, list(bodies))  # noqa: E731
        self._waiting.append(_Waiting(sink, self._number, missing, give))
        self._give()
        return True

    def flush_notes(self) -> None:
        """Called every now and then: the other replicas hear of readers that were dropped. Until
        then one that leads in place of this one holds more than it must."""
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
            egress.note(wire.fields(message))
            self._send(site, wire.NotesKept(message.sink, message.number))

    def on_kept(self, site: SiteId, message: wire.NotesKept) -> None:
        for waiting in self._waiting:
            if waiting.sink == message.sink and waiting.number <= message.number:
                waiting.missing.discard(site)
        self._give()

    def on_connected(self, site: SiteId) -> None:
        """What was on its way to a replica may be lost."""
        for sink, others in self._others.items():
            egress = self._egress(sink)
            if site in others and egress is not None and egress.leads and egress.notes:
                self._pass_on(sink, egress)

    def _give(self) -> None:
        ready = [w for w in self._waiting if not w.missing]
        self._waiting = [w for w in self._waiting if w.missing]
        for waiting in ready:
            waiting.give()
