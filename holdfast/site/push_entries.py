"""What is in the log of a push source, what replicas tell each other about it, and its effects.

`holdfast.site.push_log` says how they are used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from holdfast.core.ids import SiteId
from holdfast.net import wire
from holdfast.site.spill import Held
from holdfast.site.staging import Reply


@dataclass(frozen=True, slots=True)
class Lead:
    """A leadership of the ingress: the rank of the view in which it began, and the number of push
    batches that the leader had then. Stored push batches of earlier leaders are void beyond it. Up
    to it, those of the latest leader count, as long as each follows the one before: it was made
    under the same lead, or is the first one after the base of its own."""

    rank: int = 0
    base: int = 0


@dataclass(frozen=True, slots=True)
class FeedPlace:
    """The position of a feed after a push batch. It distinguishes rows that were taken from new
    ones."""

    query: str = ""
    committed: int = -1
    """The last micro-batch of the query that was taken."""
    total: int = 0
    """Through: the number of rows that were taken."""
    ended: bool = False

    @classmethod
    def after(cls, message: wire.PushBatch) -> FeedPlace:
        return cls.restored(message.marks, message.query)

    @classmethod
    def restored(cls, marks: dict[str, int], query: str) -> FeedPlace:
        return cls(query, marks["committed"], marks["total"], bool(marks["ended"]))

    def marks(self) -> dict[str, int]:
        return {"committed": self.committed, "total": self.total, "ended": int(self.ended)}

    def refusal(self, query: str, batch: int) -> str:
        """Return why a micro-batch cannot be taken here; empty if it can."""
        if self.committed < 0:
            return ""  # nothing was taken yet, so nothing can be missing or come twice
        if self.query and query != self.query:
            return (
                f"the flow is fed by the streaming query with id {self.query}, and this is query "
                f"{query}: its checkpoint location is another one, and so are its micro-batches. "
                "Start it with the checkpoint location that the flow was fed from "
                "(spark_stream(df, checkpoint=...), the same in all applications); to begin with "
                "this one, start the flow without restore_from="
            )
        if batch in (self.committed, self.committed + 1):
            return ""
        return (
            f"micro-batch {batch} of query {query} does not follow on {self.committed}, the last "
            "one that the flow has: "
            + (
                "the checkpoint location was set back. "
                if batch < self.committed
                else "those between were given to another flow with this checkpoint location. "
            )
            + "Start the query with the checkpoint location as it was when the flow was last fed; "
            "to begin with this one, start the flow without restore_from="
        )


@dataclass(slots=True, eq=False)
class LogEntry:
    """A push batch in the log."""

    number: int
    rows: list[Held]
    more: bool
    """Whether it enters the flow only together with the next one."""
    place: FeedPlace
    pull_mark: str = ""
    """The position of a pull source after these rows."""
    lead: Lead = Lead()
    """The leadership under which it was made."""
    answers: list[tuple[Reply, str]] = field(default_factory=list)
    """Replies to pushers, with their remarks, that are due when the run has entered."""

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self.rows)


@dataclass(frozen=True, slots=True)
class Holding:
    """What a replica has: the push batches that have entered there, and the ranks under which those
    after them were made, each with the number of the last one."""

    entered: int
    made: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Known:
    """What a leader tells another replica."""

    matched: int
    """Up to this number the replica's log equals the leader's."""
    entered: int
    """The number of push batches that have entered at the leader."""
    everywhere: int
    """The number of push batches that have entered at all replicas."""


@dataclass(frozen=True, slots=True)
class AskReplica:
    """Ask another replica what it has."""

    site: SiteId


@dataclass(frozen=True, slots=True)
class SendEntry:
    """Send a push batch to another replica, or to the store."""

    site: SiteId
    entry: LogEntry


@dataclass(frozen=True, slots=True)
class TellKnown:
    """Tell another replica what the leader knows."""

    site: SiteId
    known: Known


@dataclass(frozen=True, slots=True)
class EnterRun:
    """Let the rows of these push batches, which are a whole run, enter the flow."""

    entries: tuple[LogEntry, ...]


@dataclass(frozen=True, slots=True)
class ReleaseRows:
    """Release the rows of a push batch that left the log. If it has not entered, it never will:
    refuse what waits for it."""

    entry: LogEntry


LogEffect: TypeAlias = AskReplica | SendEntry | TellKnown | EnterRun | ReleaseRows
