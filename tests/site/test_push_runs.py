"""Queries that push micro-batches while leaders die, on real processes."""

import itertools
import threading
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

from holdfast import Flow
from holdfast import functions as F
from holdfast.connectors.sources import Locate, Source
from holdfast.control.run import Run
from holdfast.core.protection import ProtectionSpec
from holdfast.errors import HostError
from holdfast.net import wire
from holdfast.net.client import to_leader
from holdfast.protections import pairs
from holdfast.sinks import discard
from holdfast.site.push import MEMORY_BYTES_MAX
from holdfast.sources import generator
from tests.support.lines import SCHEMA, numbers
from tests.support.runs import PATIENCE_S, kill, replicas, until, until_protected

SIZES = [10_000, 4_300_000, 10_000]
PARTITIONS = 3


class Query:
    """Feeds like Spark's driver and its tasks, each over a connection of its own. `workers` of the
    tasks run at the same time."""

    def __init__(
        self,
        sizes: Iterable[int],
        before_commit: Callable[[int], None] = lambda batch: None,
        workers: int = 1,
    ) -> None:
        self.failed: Callable[[Exception], None] = lambda error: None
        self._sizes, self._before_commit = sizes, before_commit
        self._tasks = ThreadPoolExecutor(workers)
        self.pushes = self.batches = self.rows = 0
        """Pushes that began; micro-batches that were taken, and their rows."""

    def start(self, locate: Locate, access: Any, source: int, name: str, flow: str) -> None:
        self._locate, self._access, self._source = locate, access, source
        threading.Thread(target=self._feed, daemon=True).start()

    def _say(self, message: wire.Message) -> str:
        client, remark = to_leader(self._locate(), self._access, message)
        client.close()
        return remark

    def _feed(self) -> None:
        for batch, size in enumerate(self._sizes):
            while not self._push(batch, self.rows, size):
                pass
            self.batches, self.rows = batch + 1, self.rows + size
        self._say(wire.PushEnd(self._source, "query"))

    def _push(self, batch: int, first: int, size: int) -> bool:
        """Whether the micro-batch is taken. It is cut into partitions otherwise each time."""
        self.pushes += 1
        push = uuid.uuid4().hex
        try:
            if self._say(wire.PushBegin(self._source, "query", batch, push)) == "taken":
                return True
            ends = [size * (p + 1) // PARTITIONS - self.pushes for p in range(PARTITIONS - 1)]
            parts = [
                (first + at, end - at) for at, end in zip([0, *ends], [*ends, size], strict=True)
            ]
            run = [
                self._tasks.submit(self._run_task, push, p, *part) for p, part in enumerate(parts)
            ]
            attempts = tuple([task.result() for task in run])
            self._before_commit(batch)
            self._say(wire.PushCommit(self._source, push, attempts))
        except (HostError, OSError):
            return False
        return True

    def _run_task(self, push: str, partition: int, first: int, rows: int) -> tuple[int, int]:
        attempt = self.pushes
        opening = wire.PushOpen(self._source, push, partition, attempt)
        client, _ = to_leader(self._locate(), self._access, opening)
        with closing(client):
            client.send_rows(numbers(0, first, rows))
            client.ask(wire.PushDone())
        return partition, attempt

    def stop(self) -> None: ...


class Pushed(Source):
    pushed, schema = True, SCHEMA

    def __init__(self, query: Query) -> None:
        self.query: Query | None = query

    def __getstate__(self) -> dict[str, object]:
        return {"query": None}

    def pusher(self) -> Query:
        assert self.query is not None
        return self.query


def totals(source: Source, protect: ProtectionSpec | None) -> Flow:
    flow = Flow("pushed", protect=protect)
    keyed = flow.source("numbers", source).key_by("k")
    keyed.agg(t=F.sum("v"), n=F.count()).sink("out", discard())
    return flow


def test_the_leader_dies_with_a_micro_batch_that_does_not_fit_into_memory(kept: list[Run]) -> None:
    """First when it has all of it, and then at some moment after the commit."""
    assert 16 * SIZES[1] > MEMORY_BYTES_MAX

    def kill_leader(run: Run) -> None:
        leader = replicas(run)["numbers", 0][0]
        kill(run, leader)
        until(lambda: leader in run.status()["dead"], "its death is noticed")

    def before_commit(batch: int) -> None:
        run = kept[0]
        died = len(run.status()["dead"])
        if batch == 1 and died < 2:
            until_protected(run, 3)
        if batch == 1 and died == 0:
            kill_leader(run)
        elif batch == 1 and died == 1:
            threading.Timer(0.1, kill_leader, [run]).start()

    query = Query(SIZES, before_commit)
    run = totals(Pushed(query), pairs(failure_domain="process")).start(sites=3, partitions=6)
    kept.append(run)
    assert run.wait(2 * PATIENCE_S)
    assert query.pushes > len(SIZES), "it was pushed again"
    assert query.rows == sum(SIZES)
    check(run, query, kept)


def check(run: Run, query: Query, kept: list[Run]) -> None:
    """The result is that of the rows that the query was told to be taken, each once."""
    undisturbed = totals(generator(numbers, SCHEMA, rows=query.rows), None)
    kept.append(undisturbed.start(sites=1, partitions=6))
    assert kept[-1].wait(2 * PATIENCE_S)
    assert run.sink_report("out") == kept[-1].sink_report("out")


def test_leaders_of_three_replicas_die_one_after_the_other_and_two_at_once(kept: list[Run]) -> None:
    """A query is fed over several connections all the while."""
    enough = threading.Event()
    query = Query(
        itertools.takewhile(lambda _: not enough.is_set(), itertools.repeat(3_000)), workers=3
    )
    protect = pairs(replicas=3, failure_domain="process")
    run = totals(Pushed(query), protect).start(sites=4, partitions=6)
    kept.append(run)
    for victims in (1, 2, 1, 2):
        until_protected(run, 4)
        before = query.batches
        until(lambda before=before: query.batches > before + 3, "micro-batches are taken")
        sites = replicas(run)["numbers", 0]
        assert len(sites) == 3
        kill(run, *sites[:victims])
    before = query.batches
    until(lambda: query.batches > before + 3, "micro-batches are taken")
    enough.set()
    assert run.wait(2 * PATIENCE_S)
    assert len(run.status()["dead"]) == 6
    check(run, query, kept)
