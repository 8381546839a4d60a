"""The rows that the tasks of one push have sent, until the driver commits it.

A *push* is one run of the Spark job that hands a micro-batch (or a whole batch DataFrame) over.
Rows are kept by partition and attempt: Spark may run a task twice, at the same time or one after
the other, and only the driver knows which attempt counts. When a push is given up, its rows are
dropped, and further rows of its tasks are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from holdfast.site.spill import Held, Overflow

Reply = Callable[[bool, str], None]

GIVEN_UP = "this hand-over was given up: another one has begun, or another site leads the ingress"


@dataclass(slots=True, eq=False)
class Staged:
    """The rows of one attempt at one partition."""

    push: str
    partition: int
    attempt: int
    pieces: list[Held] = field(default_factory=list)
    rows: int = 0
    nbytes: int = 0
    done: bool = False
    waiting: list[Reply] = field(default_factory=list)
    """Replies that wait for room."""


class Push:
    """The partitions of one push. With `single`, a later attempt at a partition replaces the
    earlier one. Without it all attempts are kept, and the commit chooses."""

    def __init__(self, name: str, query: str, batch: int, overflow: Overflow, single: bool) -> None:
        self.name, self.query, self.batch = name, query, batch
        self.nbytes = 0
        """Size of all pieces, in memory or on disk."""
        self._overflow, self._single = overflow, single
        self._partitions: dict[tuple[int, int], Staged] = {}

    def _key(self, partition: int, attempt: int) -> tuple[int, int]:
        return partition, 0 if self._single else attempt

    def open(self, partition: int, attempt: int) -> Staged:
        """Begin an attempt; rows that it sent before are dropped."""
        key = self._key(partition, attempt)
        self._drop(self._partitions.pop(key, None))
        staged = self._partitions[key] = Staged(self.name, partition, attempt)
        return staged

    def has(self, staged: Staged) -> bool:
        """Whether rows of this attempt are still accepted."""
        return self._partitions.get(self._key(staged.partition, staged.attempt)) is staged

    def find(self, partition: int, attempt: int = 0) -> Staged | None:
        return self._partitions.get(self._key(partition, attempt))

    def add(self, staged: Staged, piece: Held) -> None:
        staged.pieces.append(piece)
        staged.nbytes += piece.nbytes
        self.nbytes += piece.nbytes

    def take(self, staged: Staged) -> list[Held]:
        """Remove and return the pieces of an attempt; the caller releases them."""
        pieces, staged.pieces = staged.pieces, []
        self.nbytes -= staged.nbytes
        staged.nbytes = 0
        return pieces

    def remove(self, staged: Staged) -> None:
        """Drop an attempt with its pieces."""
        if self.has(staged):
            del self._partitions[self._key(staged.partition, staged.attempt)]
            self._drop(staged)

    def give_up(self) -> None:
        while self._partitions:
            self._drop(self._partitions.popitem()[1])

    def _drop(self, staged: Staged | None) -> None:
        if staged is not None:
            self._overflow.release(self.take(staged))
            answers, staged.waiting = staged.waiting, []
            for reply in answers:
                reply(False, GIVEN_UP)

    def waiting(self) -> Iterator[Staged]:
        """Return the attempts whose replies wait."""
        return (staged for staged in list(self._partitions.values()) if staged.waiting)
