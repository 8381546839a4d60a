"""Which edges of the table of a replica's life are taken."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from holdfast.core.replica import Event, Replica, State

Edge = tuple[State, Event]


@contextmanager
def taken() -> Iterator[set[Edge]]:
    """The edges that replicas take meanwhile."""
    right, edges = Replica._become, set[Edge]()

    def become(self: Replica, event: Event) -> bool:
        edges.add((self.state, event))
        return right(self, event)

    with patch.object(Replica, "_become", become):
        yield edges
