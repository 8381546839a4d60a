"""Runs what pushes rows into push sources, as long as this application leads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from holdfast.connectors.sources import Pusher
from holdfast.control.hosting import Address
from holdfast.net.handshake import Party
from holdfast.plan.planner import Plan


class SourceFeeder:
    """The pushers of a flow's push sources."""

    def __init__(
        self,
        plan: Plan,
        flow: str,
        access: Party,
        locate: Callable[[int], list[Address]],
        failed: Callable[[Exception], None],
    ) -> None:
        self._plan, self._flow, self._access = plan, flow, access
        self._locate, self._failed = locate, failed
        self._pushers: list[Pusher] = []

    def start(self) -> None:
        """Start a pusher for each source that sites do not pull from themselves."""
        for stage in self._plan.sources:
            assert stage.source is not None
            if stage.source.pushed and not stage.source.pulled:
                pusher = stage.source.pusher()
                pusher.failed = self._failed
                where = partial(self._locate, stage.id)
                pusher.start(where, self._access, stage.id, stage.name, self._flow)
                self._pushers.append(pusher)

    def stop(self) -> None:
        pushers, self._pushers = self._pushers, []
        for pusher in pushers:
            pusher.stop()
