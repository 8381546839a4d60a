"""The phases of a flow, and what leads from one phase to the next."""

from __future__ import annotations

from collections import deque
from enum import Enum

from holdfast.errors import InvariantError

HISTORY_MAX = 50


class FlowPhase(Enum):
    GATHERING = "gathering"
    """Not all sites have registered."""
    CONNECTING = "connecting"
    """The first view is committed, and not all members act on it."""
    RUNNING = "running"
    DRAINING = "draining"
    """No more rows are taken in; those that were are still processed."""
    DONE = "done"
    FAILED = "failed"


class PhaseEvent(Enum):
    PLACED = "all sites have registered, and a view is placed on them"
    SITE_LOST = "a site is lost before the flow has started"
    CONNECTED = "all members act on the first view"
    RESUMED = "a new controller continues a flow that has started"
    DRAIN_REQUESTED = "the user stops the flow and wants its rows processed"
    ENDED = "all sites have finished, or the user stops the flow"
    FLOW_FAILED = "the flow cannot continue"


_P, _E = FlowPhase, PhaseEvent

TABLE: dict[tuple[FlowPhase, PhaseEvent], FlowPhase] = {
    (_P.GATHERING, _E.PLACED): _P.CONNECTING,
    (_P.GATHERING, _E.SITE_LOST): _P.GATHERING,
    (_P.GATHERING, _E.RESUMED): _P.RUNNING,
    (_P.GATHERING, _E.ENDED): _P.DONE,
    (_P.GATHERING, _E.FLOW_FAILED): _P.FAILED,
    (_P.CONNECTING, _E.SITE_LOST): _P.GATHERING,
    (_P.CONNECTING, _E.CONNECTED): _P.RUNNING,
    (_P.CONNECTING, _E.ENDED): _P.DONE,
    (_P.CONNECTING, _E.FLOW_FAILED): _P.FAILED,
    (_P.RUNNING, _E.DRAIN_REQUESTED): _P.DRAINING,
    (_P.RUNNING, _E.ENDED): _P.DONE,
    (_P.RUNNING, _E.FLOW_FAILED): _P.FAILED,
    (_P.DRAINING, _E.ENDED): _P.DONE,
    (_P.DRAINING, _E.FLOW_FAILED): _P.FAILED,
}


class Lifecycle:
    """The phase that a flow is in, and the last things that happened to it."""

    def __init__(self) -> None:
        self.phase = FlowPhase.GATHERING
        self.history: deque[str] = deque(maxlen=HISTORY_MAX)

    @property
    def running(self) -> bool:
        """Whether sites process rows."""
        return self.phase in (FlowPhase.RUNNING, FlowPhase.DRAINING)

    @property
    def over(self) -> bool:
        return self.phase in (FlowPhase.DONE, FlowPhase.FAILED)

    def note(self, text: str) -> None:
        """Add a line to the history."""
        self.history.append(text)

    def advance(self, event: PhaseEvent) -> None:
        """Enter the phase that an event leads to."""
        phase = TABLE.get((self.phase, event))
        if phase is None:
            raise InvariantError(
                f"controller: {event.name} in phase {self.phase.name}; "
                f"history: {list(self.history)}"
            )
        if phase is not self.phase:
            self.note(f"{self.phase.value} -> {phase.value}")
            self.phase = phase
