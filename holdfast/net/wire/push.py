"""From Spark tasks and drivers that push rows into a source, and between the source's replicas.

A push is one micro-batch of a query. The driver begins it, its tasks send the partitions, each on a
connection of its own, and the driver commits it:

    driver -> leading ingress   PushBegin; later PushCommit, or PushEnd after the last
    task -> leading ingress     PushOpen, PushRows*, PushDone

Every one of these is answered with `PushTaken`, in order; a task may send ahead of the answers. A
site that does not lead the ingress refuses, and names the leader. A driver that is not sure whether
its commit arrived begins the same micro-batch again: the answer is `TAKEN` if the flow has it.

The leading ingress replicates committed rows before they enter the flow:

    leader -> replica           PushLead, when it begins to lead
    replica -> leader           PushHas(again), then; also in every view and on every connection
    leader -> replica           PushKnown, then PushBatch*; PushKnown again when rows have entered
    replica -> leader           PushHas, after each of them

A leader's messages carry its rank, and a replica ignores those of a lower rank than it knows. So
messages of a leader that was replaced may come at any time. `holdfast.site.push_log` has the rest.
"""

from __future__ import annotations

from holdfast.net.wire.base import Message, Number, NumberOrNone

NOT_HERE = "another site leads the ingress"
"""Why a site refuses what only the leader of an ingress, or an egress, can do."""
TAKEN = "taken"
"""The answer to a push whose rows the flow already has."""


class PushBegin(Message, frozen=True):
    """The driver is about to push micro-batch `batch` of a query (of a batch DataFrame: all of it,
    once more). `push` is a name that was never used before. Rows of pushes that began earlier and
    were not committed are void. Answered with `TAKEN` if the flow has the micro-batch already."""

    source: Number
    query: str
    batch: Number
    push: str


class PushOpen(Message, frozen=True):
    """A task begins to send one partition of a push. It need not if the answer is `TAKEN`."""

    source: Number
    push: str
    partition: Number
    attempt: Number


class PushRows(Message, frozen=True):
    """Rows (Arrow IPC stream in the body) of the partition opened before on this connection."""


class PushDone(Message, frozen=True):
    """The partition is complete."""


class PushCommit(Message, frozen=True):
    """The micro-batch of this push is complete and consists of these partitions, each as sent by
    this attempt. Rows of other attempts are void."""

    source: Number
    push: str
    partitions: tuple[tuple[Number, Number], ...]


class PushEnd(Message, frozen=True):
    """No batch of this query will follow."""

    source: Number
    query: str


class PushTaken(Message, frozen=True):
    """To a pusher: the ingress holds what it sent last, and has room for more. If not `ok` because
    another site leads the ingress, `leader` is where that one listens."""

    ok: bool
    reason: str
    leader: tuple[str, int] | None = None


class PushBatch(Message, frozen=True):
    """The leading ingress to its other replicas: rows that are about to enter the flow (one Arrow
    IPC stream after another in the body), and the marks of the source after them. With the mark
    `more` it is only a part: it enters with the first push batch after it that has no such mark, or
    not at all. `query` is the query whose micro-batches these are. `made` has the rank and the base
    of the leader that took the rows, and `rank` is that of the sender."""

    source: Number
    number: Number
    marks: dict[str, NumberOrNone]
    sizes: list[Number]
    pull_reader: str = ""
    query: str = ""
    rank: Number = 0
    made: tuple[Number, Number] = (0, 0)


class PushLead(Message, frozen=True):
    """The leading ingress to another replica: say what you have."""

    source: Number
    rank: Number


class PushKnown(Message, frozen=True):
    """The leading ingress to another replica: up to the push batch `matched` their logs are equal,
    those up to `entered` have entered the flow, and those up to `everywhere` at all replicas."""

    source: Number
    rank: Number
    matched: Number
    entered: Number
    everywhere: Number


class PushCounted(Message, frozen=True):
    """The leading ingress to a new replica: the replica has all push batches that have entered, and
    none enters any more that it does not have."""

    source: Number
    rank: Number = 0


class PushHas(Message, frozen=True):
    """A replica of an ingress to the leading one, whose rank is `rank`: their logs are equal up to
    this push batch, and those up to `entered` have entered at the replica. With `again` the replica
    says what it has after those (by rank of the leader that made them, the last one), and asks for
    whatever it lacks."""

    source: Number
    number: Number
    again: bool
    entered: Number = 0
    rank: Number = 0
    made: tuple[tuple[Number, Number], ...] = ()
