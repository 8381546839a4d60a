"""A simulated query that pushes rows into a flow, and goes by the answers that it gets.

It pushes one micro-batch after another, as a driver and its tasks do (`holdfast.net.wire.push`).
Each push has the rows of the micro-batch in another order and in other partitions, which it sends
side by side, over a connection each, to some site that says that it leads the source: also to one
that was replaced and does not know it. The query goes on to the next micro-batch only when the last
one was answered. If no answer comes, or the site dies, it begins the micro-batch again.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

import pyarrow as pa

from holdfast.connectors.sources import Source
from holdfast.core.ids import SiteId
from holdfast.errors import InvariantError
from holdfast.net import wire
from holdfast.site.push import ENDED, PushReader
from holdfast.site.staging import GIVEN_UP, Staged

if TYPE_CHECKING:
    from holdfast.lab.sim.timed import TimedWorld

QUERY = "query"
BATCH_ROWS = 50
PARTITIONS_MAX = 3
PAUSE_S = 0.0003
"""The mean time between two steps of a query."""
PATIENCE_S = 0.15
"""The longest time that it waits for an answer, or for its tasks."""


class PushedRows(Source):
    """A push source of rows that a `SimQuery` pushes."""

    pushed = True

    def __init__(self, rows: pa.RecordBatch) -> None:
        self.rows, self.schema = rows, rows.schema


class QueryState(Enum):
    IDLE = "has no push under way"
    BEGINNING = "waits for the answer to a begin"
    SENDING = "has tasks that send their partitions"
    COMMITTING = "waits for the answer to a commit"
    ENDING = "waits for the answer to an end"
    DONE = "was told that the end is taken"


class SimTask:
    """A task, which sends the rows of one partition."""

    def __init__(self, partition: int, attempt: int, rows: pa.RecordBatch) -> None:
        self.partition, self.attempt, self.rows = partition, attempt, rows
        self.staged: Staged | None = None
        self.done = False


class SimQuery:
    """Pushes the rows of a source; before the world opens its gate, at most `free_rows` of them."""

    def __init__(self, world: TimedWorld, stage: int, source: PushedRows, free_rows: int) -> None:
        self._world, self._stage, self._rows = world, stage, source.rows
        self._free_rows = free_rows
        self.state = QueryState.IDLE
        self.taken = 0
        """Rows of the micro-batches that were answered."""
        self.pushes = 0
        self._home = SiteId(-1)
        self._tasks: list[SimTask] = []
        self._patience = 0.0
        world.at(PAUSE_S, self.step)

    @property
    def _batch(self) -> pa.RecordBatch:
        return self._rows.slice(self.taken, BATCH_ROWS)

    def _enter(self, state: QueryState) -> None:
        self.state = state
        self._patience = self._world.time + PATIENCE_S * self._world.random.random()

    def step(self, world: TimedWorld) -> None:
        """Do the next thing, if the site can hear of it."""
        if world.ended or self.state is QueryState.DONE:
            return
        world.at(world.time + 2 * PAUSE_S * world.random.random(), self.step)
        if self.state is QueryState.IDLE:
            self._begin()
        elif self._home not in world.nodes or world.time > self._patience:
            self._enter(QueryState.IDLE)
        elif self.state is QueryState.SENDING:
            self._send()

    def _begin(self) -> None:
        world = self._world
        leading = [
            s for s, n in world.nodes.items() if (r := self._reader(s)) is not None and r.leads
        ]
        if not leading or (not world.gate_is_open and self.taken + BATCH_ROWS > self._free_rows):
            return
        self._home = world.random.choice(leading)
        self.pushes += 1
        ends = self.taken == self._rows.num_rows
        self._enter(QueryState.ENDING if ends else QueryState.BEGINNING)
        answer = self._answer()
        if ends:
            self._call(lambda reader: reader.end(QUERY, answer))
        else:
            number, push = self.taken // BATCH_ROWS, self._push
            self._call(lambda reader: reader.begin(QUERY, number, push, answer))

    @property
    def _push(self) -> str:
        return f"push {self.pushes}"

    def _reader(self, site: SiteId) -> PushReader | None:
        return self._world.nodes[site].stages.pushed().get(self._stage)

    def _call(self, act: Callable[[PushReader], object]) -> None:
        """Have the leading site handle a message. A site that is paused gets it later, and one that
        does not lead any more refuses it; both are like no answer."""
        reader = self._reader(self._home)
        if reader is not None and reader.leads and self._world.is_awake(self._home):
            self._world.act_at(self._home, lambda: act(reader))

    def _answer(self) -> Callable[[bool, str], None]:
        """Return what gets the answer to a message of this push."""
        pushes, state = self.pushes, self.state

        def answered(ok: bool, reason: str) -> None:
            if (self.pushes, self.state) == (pushes, state):
                self._on_answer(ok, reason)

        return answered

    def _on_answer(self, ok: bool, reason: str) -> None:
        if not ok:
            if reason not in (GIVEN_UP, ENDED):
                raise InvariantError(f"the query has {self.taken} rows taken: {reason}")
            self._enter(QueryState.IDLE)
        elif self.state is QueryState.ENDING:
            self._enter(QueryState.DONE)
        elif self.state is QueryState.COMMITTING or reason == wire.TAKEN:
            self.taken += self._batch.num_rows
            self._enter(QueryState.IDLE)
        else:
            self._enter(QueryState.SENDING)
            self._deal()

    def _deal(self) -> None:
        """Cut the micro-batch, with its rows in any order, into partitions. Some have two
        attempts."""
        random, batch = self._world.random, self._batch
        batch = batch.take(pa.array(random.sample(range(batch.num_rows), batch.num_rows)))
        cuts = [random.randint(0, batch.num_rows) for _ in range(random.randrange(PARTITIONS_MAX))]
        ends = [0, *sorted(cuts), batch.num_rows]
        self._tasks = [
            SimTask(
                partition,
                attempt,
                batch.slice(ends[partition], ends[partition + 1] - ends[partition]),
            )
            for partition in range(len(ends) - 1)
            for attempt in range(1 + (random.random() < 0.1))
        ]

    def _send(self) -> None:
        """Let one of the tasks send something, or commit when all partitions are there."""
        random = self._world.random
        under_way = [task for task in self._tasks if not task.done]
        if under_way:
            task = random.choice(under_way)
            self._call(lambda reader: self._run(task, reader))
            return
        self._enter(QueryState.COMMITTING)
        parts = dict(
            random.sample([(t.partition, t.attempt) for t in self._tasks], len(self._tasks))
        )
        push, answer = self._push, self._answer()
        self._call(lambda reader: reader.commit(push, parts.items(), answer))

    def _run(self, task: SimTask, reader: PushReader) -> None:
        answer = self._refusal()
        if task.staged is None:
            task.staged = reader.open(self._push, task.partition, task.attempt, answer)
        elif task.rows.num_rows:
            count = self._world.random.randint(1, task.rows.num_rows)
            reader.rows(task.staged, task.rows.slice(0, count), answer)
            task.rows = task.rows.slice(count)
        else:
            task.done = True
            reader.done(task.staged, answer)

    def _refusal(self) -> Callable[[bool, str], None]:
        """Return what gets the answer to a task, which is of interest if it is a refusal."""
        refused = self._answer()
        return lambda ok, reason: None if ok else refused(ok, reason)
