"""Which (state, event) pairs of the machines' tables simulated runs reach.

A pair that no run reaches is either a rare one, which a test must reach, or one that cannot happen,
which the table should not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any, NamedTuple

from holdfast.core import flow_phase, leadership, replica
from holdfast.site import ending


class Edge(NamedTuple):
    """A pair of a machine's table, by names: it travels between processes."""

    machine: str
    state: str
    event: str

    def __str__(self) -> str:
        return f"{self.machine}: {self.event} in {self.state}"


class _Machine(NamedTuple):
    """A machine with a literal table, and its one method that changes the state."""

    name: str
    owner: type
    method: str
    state: str
    """The attribute that has the state."""
    table: Mapping[Any, Any]

    def edge(self, state: Enum, event: Any) -> Edge:
        event_name = event.name if isinstance(event, Enum) else event.__name__
        return Edge(self.name, state.name, event_name)

    @contextmanager
    def watched(self, reached: set[Edge]) -> Iterator[None]:
        """Record meanwhile the pairs that machines of this kind reach."""
        right: Callable[..., Any] = getattr(self.owner, self.method)

        def become(machine: Any, event: Any) -> Any:
            reached.add(self.edge(getattr(machine, self.state), event))
            return right(machine, event)

        setattr(self.owner, self.method, become)
        try:
            yield
        finally:
            setattr(self.owner, self.method, right)


_STEPS = {(step, then): then for step, follow in ending.STEPS.items() for then in follow}
_MACHINES = (
    _Machine("replica", replica.Replica, "_become", "state", replica.TABLE | replica.STALE),
    _Machine("flow", flow_phase.Lifecycle, "advance", "phase", flow_phase.TABLE),
    _Machine("leadership", leadership.Leadership, "_become", "role", leadership.TABLE),
    _Machine("ending", ending.Ending, "_become", "step", _STEPS),
)
EDGES = frozenset(m.edge(*pair) for m in _MACHINES for pair in m.table)
"""All pairs: of a replica those of late events, too. The ending of a site has no events of its own;
the step that follows stands for the event."""
NAMES = tuple(machine.name for machine in _MACHINES)


@contextmanager
def reached() -> Iterator[set[Edge]]:
    """Record the pairs that all machines of this process reach meanwhile."""
    found: set[Edge] = set()
    with ExitStack() as stack:
        for machine in _MACHINES:
            stack.enter_context(machine.watched(found))
        yield found


def share(found: set[Edge]) -> float:
    """The share of all pairs that were reached."""
    return len(EDGES & found) / len(EDGES)


def summary(found: set[Edge]) -> str:
    """
    >>> summary({Edge("flow", "RUNNING", "ENDED")}).split(", ")[1]
    'flow 1 of 14'
    """
    parts = []
    for name in NAMES:
        own = {edge for edge in EDGES if edge.machine == name}
        parts.append(f"{name} {len(own & found)} of {len(own)}")
    return ", ".join(parts)
