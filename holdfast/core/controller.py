"""The controller: gathers the sites, starts the flow, and decides what a failure means.

It takes no part in the flow of data. Its lifecycle is the table below.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import assert_never

from holdfast.core.effects import (
    AssignSites,
    ControllerEffect,
    DrainFlow,
    EndFlow,
    RelaunchSite,
    StartFlow,
)
from holdfast.core.events import (
    ControllerEvent,
    FlowFailed,
    SiteConnected,
    SiteFailed,
    SiteFinished,
    SiteRegistered,
    StopRequested,
)
from holdfast.core.ids import SiteId
from holdfast.core.layout import Domain, Layout, Shape, place
from holdfast.errors import HostError, InvariantError, SiteLostError


class State(Enum):
    GATHERING = "gathering"
    CONNECTING = "connecting"
    RUNNING = "running"
    DRAINING = "draining"
    DONE = "done"
    FAILED = "failed"


EDGES: dict[State, set[State]] = {
    State.GATHERING: {State.CONNECTING, State.FAILED, State.DONE},
    State.CONNECTING: {State.RUNNING, State.GATHERING, State.FAILED, State.DONE},
    State.RUNNING: {State.DRAINING, State.FAILED, State.DONE},
    State.DRAINING: {State.FAILED, State.DONE},
    State.DONE: set(),
    State.FAILED: set(),
}

BACKOFF_MS = (0, 100, 500, 1_000, 2_000, 5_000)
"""How long a site waits before its n-th relaunch; the last value repeats."""

STILLBORN_MAX = 5
"""So many lives of a site in a row that ended before they registered are a fault of the set-up."""


class Controller:
    """The machine. `sites` run the flow; `standbys` register and wait."""

    def __init__(
        self, shape: Shape, sites: Sequence[SiteId], standbys: Sequence[SiteId] = ()
    ) -> None:
        self.shape = shape
        self.sites = list(sites)
        self.standbys = list(standbys)
        self.state = State.GATHERING
        self.history: deque[str] = deque(maxlen=50)
        self.layout: Layout | None = None
        self.addresses: dict[SiteId, tuple[str, int]] = {}
        self.domains: dict[SiteId, Domain] = {}
        self.attempts: dict[SiteId, int] = dict.fromkeys([*sites, *standbys], 0)
        self._stillborn: dict[SiteId, int] = dict.fromkeys(self.attempts, 0)
        self._connected: set[SiteId] = set()
        self._finished: set[SiteId] = set()

    def handle(self, event: ControllerEvent) -> list[ControllerEffect]:
        if self.state in (State.DONE, State.FAILED):
            return []
        match event:
            case SiteRegistered():
                return self._on_site_registered(event)
            case SiteConnected():
                return self._on_site_connected(event)
            case SiteFailed():
                return self._on_site_failed(event)
            case FlowFailed():
                return self._end(State.FAILED, event.error)
            case SiteFinished():
                return self._on_site_finished(event)
            case StopRequested():
                return self._on_stop_requested(event)
        assert_never(event)

    def _become(self, state: State) -> None:
        if state not in EDGES[self.state]:
            raise InvariantError(
                f"controller: no way from {self.state} to {state}; history: {list(self.history)}"
            )
        self.history.append(f"{self.state.value} -> {state.value}")
        self.state = state

    def _end(self, state: State, error: Exception | None) -> list[ControllerEffect]:
        self._become(state)
        return [EndFlow(error)]

    def _on_site_registered(self, event: SiteRegistered) -> list[ControllerEffect]:
        if event.attempt < self.attempts.get(event.site, 0) or event.site not in self.attempts:
            return []  # an earlier life of this site, or none of ours
        self.addresses[event.site] = event.address
        self.domains[event.site] = event.domain
        self._stillborn[event.site] = 0
        self.history.append(f"site {event.site} registered (attempt {event.attempt})")
        if self.state is State.GATHERING and all(s in self.addresses for s in self.sites):
            self._become(State.CONNECTING)
            self.layout = place(self.shape, self.sites)
            self._connected.clear()
            return [AssignSites(self.layout, {s: self.addresses[s] for s in self.sites})]
        return []

    def _on_site_connected(self, event: SiteConnected) -> list[ControllerEffect]:
        self._connected.add(event.site)
        if self.state is State.CONNECTING and self._connected.issuperset(self.sites):
            self._become(State.RUNNING)
            return [StartFlow()]
        return []

    def _on_site_failed(self, event: SiteFailed) -> list[ControllerEffect]:
        if event.attempt < self.attempts.get(event.site, 0):
            return []
        attempt = event.attempt + 1
        self.attempts[event.site] = attempt
        self.history.append(f"site {event.site} failed: {event.reason}")
        self._stillborn[event.site] += 1
        for known in (self.addresses, self.domains):
            known.pop(event.site, None)
        running = self.state in (State.RUNNING, State.DRAINING)
        if running and event.site in self.sites and event.site not in self._finished:
            return self._end(State.FAILED, self._lost(event))
        if self._stillborn[event.site] >= STILLBORN_MAX:
            reason = f"site {event.site} was launched {STILLBORN_MAX} times and never came up"
            return self._end(State.FAILED, HostError(f"{reason}: {event.reason}"))
        if self.state is State.CONNECTING and event.site in self.sites:
            self._become(State.GATHERING)  # the others are assigned anew when it is back
        wait = BACKOFF_MS[min(attempt - 1, len(BACKOFF_MS) - 1)]
        return [RelaunchSite(event.site, attempt, wait)]

    def _lost(self, event: SiteFailed) -> SiteLostError:
        assert self.layout is not None
        lost = self.layout.lost_with(event.site, self.shape)
        names = "; ".join(f"{name!r}: {_ranges(parts)}" for name, parts in lost.items())
        return SiteLostError(
            f"site {event.site} died ({event.reason}); its partitions were not protected: {names}",
            hint="start the flow again, or protect its stages",
        )

    def _on_site_finished(self, event: SiteFinished) -> list[ControllerEffect]:
        self._finished.add(event.site)
        if self._finished.issuperset(self.sites):
            return self._end(State.DONE, None)
        return []

    def _on_stop_requested(self, event: StopRequested) -> list[ControllerEffect]:
        if event.drain and self.state is State.RUNNING:
            self._become(State.DRAINING)
            return [DrainFlow()]
        if event.drain and self.state is State.DRAINING:
            return []
        return self._end(State.DONE, None)


def _ranges(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and spans[-1][1] == n - 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
