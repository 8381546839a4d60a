"""What a user writes: a `Flow`.

Nothing runs here. Every call checks what can be known before the run (columns, types, names) and
adds a node to a graph (`holdfast.api.nodes`); `holdfast.plan.planner` cuts the graph into stages.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from holdfast.api.columns import declared, require_time
from holdfast.api.nodes import NAMED, DeadLetterNode, FlowNode, SinkNode, SourceNode
from holdfast.api.options import Checkpoint, Http, Options
from holdfast.api.protection import Protection, none
from holdfast.api.streams import Stream
from holdfast.connectors.sources import Source
from holdfast.engine.operators.base import Port, require_columns
from holdfast.errors import FlowError
from holdfast.storage.restore_point import RestorePoint

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from holdfast.control.run import Run
    from holdfast.core.records import EpochRecord


class Flow:
    """A dataflow: sources, what is done to their rows, and sinks.

    Nothing runs before `start`, `batch` or `stream`. `on_error` says what happens to a row that
    makes a step raise: ``"stop"`` ends the flow with an error that names the row,
    ``"dead-letter"`` puts the row aside into `dead_letters`.

    `protect` is the protection of all stages that name no other. Sources and sinks have replicas
    for as many losses at once as the strongest protection of a stage survives. `losses` asks for
    so many, of the whole flow: stages that survive fewer are refused.

    >>> import pyarrow as pa
    >>> from holdfast import Flow, functions as F, sinks, sources
    >>> flow = Flow("totals")
    >>> rows = pa.record_batch({"shop": [1, 2, 1], "eur": [5, 7, 9]})
    >>> sales = flow.source("sales", sources.rows(rows))
    >>> sales.key_by("shop").agg(total=F.sum("eur")).sink("totals", sinks.discard())
    """

    def __init__(
        self,
        name: str,
        *,
        on_error: Literal["stop", "dead-letter"] = "stop",
        protect: Protection | None = None,
        losses: int = 0,
    ) -> None:
        if losses < 0:
            raise FlowError(f"flow {name!r}: losses must not be negative, not {losses}")
        if on_error not in ("stop", "dead-letter"):
            raise FlowError(f"flow {name!r}: on_error is 'stop' or 'dead-letter', not {on_error!r}")
        self.name = name
        self.on_error = on_error
        self.protection = protect or none()
        self.losses = losses
        self.nodes: list[FlowNode] = []
        self.resolved: dict[str, Any] = {}
        """What sources had to find out before the start, by name; see
        `holdfast.control.bootstrap`."""
        self.restore_point: RestorePoint | None = None
        """What it begins with, if not with nothing."""

    def source(self, name: str, source: Source, *, event_time: str | None = None) -> Stream:
        """Rows from `source`; `event_time` names the column that says when each happened."""
        where = f"flow {self.name!r}, source {name!r}"
        if not isinstance(source, Source):
            raise FlowError(
                f"{where}: {type(source).__name__} is not a source",
                hint="wrap a DataFrame in spark_batch(df) or spark_stream(df)",
            )
        self._refuse_taken(name, where)
        schema = declared(source.schema, where)
        if event_time is not None:
            require_columns([event_time], schema, f"{where}, event_time")
            require_time(schema, event_time, where)
            source = source.timed(event_time)
        port = Port(schema, 1, event_time)
        node = SourceNode(name, source=source, port=port)
        return self._add(node, port)

    def dead_letters(self) -> Stream:
        """The rows that steps raised on, with stage, operator, error and the row as text."""
        if self.on_error != "dead-letter":
            raise FlowError(
                f'flow {self.name!r}: dead letters need Flow(..., on_error="dead-letter")'
            )
        for node in self.nodes:
            if isinstance(node, DeadLetterNode):
                return Stream(self, node, "out", node.port)
        dead = DeadLetterNode("dead letters")
        return self._add(dead, dead.port)

    def _refuse_taken(self, name: str, where: str) -> None:
        """A name that is given says which source, stage or sink is meant, whatever it is."""
        for kind, owner in NAMED.items():
            if any(isinstance(n, kind) and n.name == name for n in self.nodes):
                raise FlowError(f"{where}: there is a {owner} of that name already")

    def _add(self, node: FlowNode, port: Port) -> Stream:
        self.nodes.append(node)
        return Stream(self, node, "out", port)

    def start(
        self,
        spark: SparkSession | None = None,
        *,
        sites: int | None = None,
        spares: int | None = None,
        partitions: int | None = None,
        checkpoint: Checkpoint | None = None,
        restore_from: str | os.PathLike[str] | None = None,
        http: str | Http | None = None,
        history: DataFrame | Mapping[str, DataFrame] | None = None,
        options: Options | None = None,
    ) -> Run:
        """Run the flow, and return as soon as its rows flow.

        With a SparkSession every site is a long-lived Spark task; without one a process on this
        machine. There are `sites` of them (2), and `spares` more (0) that wait to take the place
        of one that dies. Each keyed stage has `partitions` partitions (32). With `http`
        ("host:port") the flow's metrics, status and tables are served there. All of this, and
        whatever else can be set, can also be given in `options`.

        With `checkpoint` the flow's state is written to a folder when it is stopped, and, if the
        checkpoint has an interval, while it runs: then the flow can go on even if everything is
        lost. With `restore_from` a flow of the same stages goes on from such a folder, where all
        sources and sinks were, and is stored in the same folder, as often as before, from then on;
        one that was stopped may be stored elsewhere.

        `history` is what came before: a DataFrame with the rows of the source, or a dict of them by
        source. The flow is first run over it as a Spark batch job and goes on from its state, as if
        it had streamed everything; sinks get its results first. The sources must begin where it
        ends.
        """
        from holdfast.control.run import start

        merged = (options or Options()).merged(
            sites=sites,
            spares=spares,
            partitions=partitions,
            checkpoint=checkpoint,
            restore_from=restore_from,
            http=http,
        )
        return start(self, spark, options=merged, history=history)

    @overload
    def batch(
        self,
        spark: SparkSession,
        inputs: Mapping[str, DataFrame],
        *,
        sink: str | None = None,
        records: Sequence[EpochRecord | Mapping[str, Any]] | None = None,
        partitions: int = 8,
        with_order: bool = False,
    ) -> DataFrame: ...

    @overload
    def batch(
        self,
        spark: SparkSession,
        inputs: Mapping[str, DataFrame],
        *,
        sink: Iterable[str],
        records: Sequence[EpochRecord | Mapping[str, Any]] | None = None,
        partitions: int = 8,
        with_order: bool = False,
    ) -> dict[str, DataFrame]: ...

    def batch(
        self,
        spark: SparkSession,
        inputs: Mapping[str, DataFrame],
        *,
        sink: str | Iterable[str] | None = None,
        records: Sequence[EpochRecord | Mapping[str, Any]] | None = None,
        partitions: int = 8,
        with_order: bool = False,
    ) -> DataFrame | dict[str, DataFrame]:
        """The same flow as an ordinary Spark job: the rows of its sink as a DataFrame, of several
        sinks those of the one that `sink` names, or a dict of those that it names.

        `inputs` has a DataFrame for each source. Their rows come in the order of the DataFrame, or
        of its source's ``order_by`` columns (which should tell all rows apart), and one source
        after the other; with `records`, what ``run.records()`` gives, in the order of that run. A
        column ``__split`` says which split of the source a row is of. With `records` a source with
        several splits needs it; without, its rows come split after split, or, if there is no such
        column either, by event time. `with_order` adds the order key of every result, ``__o0`` and
        so on, by which the DataFrame can be sorted.
        """
        from holdfast.spark.batch import batch

        found = batch(
            self,
            spark,
            inputs,
            sinks=self._sinks(sink),
            records=records,
            partitions=partitions,
            with_order=with_order,
        )
        return found[next(iter(found))] if sink is None or isinstance(sink, str) else found

    @overload
    def stream(
        self,
        spark: SparkSession,
        inputs: Mapping[str, DataFrame],
        *,
        sink: str | None = None,
        checkpoint: str | None = None,
        partitions: int = 8,
    ) -> DataFrame: ...

    @overload
    def stream(
        self,
        spark: SparkSession,
        inputs: Mapping[str, DataFrame],
        *,
        sink: Iterable[str],
        checkpoint: str | None = None,
        partitions: int = 8,
    ) -> dict[str, DataFrame]: ...

    def stream(
        self,
        spark: SparkSession,
        inputs: Mapping[str, DataFrame],
        *,
        sink: str | Iterable[str] | None = None,
        checkpoint: str | None = None,
        partitions: int = 8,
    ) -> DataFrame | dict[str, DataFrame]:
        """The same operators under Structured Streaming: the rows of the flow's sink as a streaming
        DataFrame; of several sinks as with `batch`.

        Rows are taken micro-batch by micro-batch; inside one by the ``order_by`` columns of their
        source, or else as Spark has them: source by source, partition by partition. If a source has
        several splits, a column ``__split`` says which a row is of; without it rows of such a
        source come by event time inside a micro-batch. `checkpoint` is where queries of this
        session keep their checkpoints unless they name a place of their own. Set
        ``spark.sql.shuffle.partitions`` to `partitions` or less: more tasks would have no bucket.
        """
        from holdfast.spark.stream import stream

        found = stream(
            self,
            spark,
            inputs,
            sinks=self._sinks(sink),
            checkpoint=checkpoint,
            partitions=partitions,
        )
        return found[next(iter(found))] if sink is None or isinstance(sink, str) else found

    def _sinks(self, wanted: str | Iterable[str] | None) -> list[str]:
        """The names of the sinks that are asked for."""
        names = [node.name for node in self.nodes if isinstance(node, SinkNode)]
        if wanted is None:
            if len(names) > 1:
                raise FlowError(
                    f"flow {self.name!r} has several sinks: {', '.join(map(repr, names))}",
                    hint="name one with sink=, or all that are wanted in a list",
                )
            return names
        found = [wanted] if isinstance(wanted, str) else list(wanted)
        for name in found:
            if name not in names:
                raise FlowError(
                    f"flow {self.name!r} has no sink {name!r}",
                    hint=f"it has {', '.join(map(repr, names)) or 'none'}",
                )
        return found
