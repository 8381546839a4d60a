"""Records what happens in a run, for its timeline."""

from __future__ import annotations

from holdfast.lab.sim.links import Link
from holdfast.net import wire

TraceEntry = tuple[float, str, int, str, int | None, float | None]
"""The fields of a `TimelineEvent`: time, kind, lane, text, other lane, end."""


class RunTrace:
    """The entries of a run. None are recorded before `begin`."""

    def __init__(self) -> None:
        self.entries: list[TraceEntry] = []
        self.recording = False

    def begin(self) -> None:
        self.recording = True

    def note(
        self,
        at: float,
        kind: str,
        lane: int,
        text: str,
        other: int | None = None,
        until: float | None = None,
    ) -> None:
        if self.recording:
            self.entries.append((at, kind, lane, text, other, until))

    def message(self, at: float, link: Link, message: wire.Message, due: float) -> None:
        """Record a message that is sent now and arrives at `due`."""
        if not self.recording:
            return
        match message:
            case wire.Bundle():
                kind, text = "send", f"bundle x{message.key.exchange} epoch {message.key.epoch}"
            case wire.Acks():
                kind, text = "ack", "ack"
            case wire.NewView():
                kind, text = "send", f"view {message.view.term}.{message.view.number}"
            case _:
                kind, text = "send", type(message).__name__
        self.note(at, kind, link[0], text, link[1], due)
