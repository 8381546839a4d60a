"""A source that holds its last rows back, so that a flow does not end before it has recovered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from holdfast.connectors.sources import Position, Source, SplitReader
from holdfast.engine.batches import empty

if TYPE_CHECKING:
    from holdfast.lab.sim.timed import TimedWorld


class GatedSource(Source):
    """Replaces a source of a flow. Each split gives `rows` rows before the world opens the gate."""

    def __init__(self, world: TimedWorld, source: Source, rows: int) -> None:
        self.world, self._source, self._rows = world, source, rows
        self.schema, self.splits = source.schema, source.splits

    def open(self, split: int, offset: int = 0, position: Position | None = None) -> SplitReader:
        reader = self._source.open(split, offset, position)
        return GatedReader(self, reader, self._rows - offset)


class GatedReader(SplitReader):
    """Reads a split of a gated source."""

    def __init__(self, source: GatedSource, reader: SplitReader, rows: int) -> None:
        self._source, self._reader, self._free = source, reader, rows

    def position(self) -> Position | None:
        return self._reader.position()

    def read(self, rows_max: int, *, due: bool = False) -> pa.RecordBatch | None:
        if due or self._source.world.gate_is_open:
            batch = self._reader.read(rows_max, due=due)
        elif self._free > 0:
            batch = self._reader.read(min(rows_max, self._free))
        else:
            return empty(self._source.schema)
        self._free -= batch.num_rows if batch is not None else 0
        return batch
