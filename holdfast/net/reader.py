"""Reading a sink where it is written, from outside the flow: whoever leads its egress answers.

The address of a flow names the controls of its applications and carries its secret:
``holdfast://SECRET@host:port,host:port/flow``. Whoever has it can read, and could feed.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa

from holdfast.errors import FlowError, HoldfastError, HostError
from holdfast.net import wire
from holdfast.net.bundles import rows_of
from holdfast.net.client import Client

PATIENCE_S = 30.0
"""How long nobody may answer: while a site or a driver that is gone is being replaced."""
PAUSE_S = 0.05

Address = tuple[str, int]


def url_of(flow: str, secret: bytes, controls: Sequence[Address]) -> str:
    """The address of a flow.

    >>> url_of("alerts", b"abc", [("localhost", 7000), ("localhost", 7001)])
    'holdfast://616263@localhost:7000,localhost:7001/alerts'
    """
    listed = ",".join(f"{host}:{port}" for host, port in controls)
    return f"holdfast://{secret.hex()}@{listed}/{quote(flow, safe='')}"


def parse(url: str) -> tuple[str, bytes, list[Address]]:
    """The inverse of `url_of`."""
    found = re.fullmatch(r"holdfast://((?:[0-9a-f]{2})+)@([^/]+)/([^/]+)", url)
    listed = [a.rpartition(":") for a in found[2].split(",")] if found else []
    if found is None or not all(host and port.isdigit() for host, _, port in listed):
        raise FlowError(
            "this is not the address of a flow", hint="give what run.url of the running flow says"
        )
    controls = [(host, int(port)) for host, _, port in listed]
    return unquote(found[3]), bytes.fromhex(found[1]), controls


class SinkReader:
    """Questions to one sink. Not for several threads at once."""

    def __init__(self, url: str, sink: str) -> None:
        self.flow, self._secret, self._controls = parse(url)
        self.sink = sink
        self.incarnation = wire.incarnation(self._secret)
        self._there: wire.There | None = None
        self._last: wire.There | None = None
        self._client: Client | None = None

    @property
    def schema(self) -> pa.Schema:
        """Of the rows."""
        return pa.ipc.read_schema(pa.py_buffer(self._locate().schema))

    def ask(self, request: dict[str, str | int]) -> tuple[dict[str, int], list[pa.RecordBatch]]:
        """Ask whoever leads the egress, wherever that is by now."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._ask(request)
            except (HostError, OSError) as error:
                self.close()
                self._there = None
                if time.monotonic() > deadline:
                    raise HostError(
                        f"nobody answers for sink {self.sink!r} of flow {self.flow!r}: {error}",
                        hint="does the flow still run?",
                    ) from error
                time.sleep(PAUSE_S)

    def _ask(self, request: dict[str, str | int]) -> tuple[dict[str, int], list[pa.RecordBatch]]:
        there = self._locate()
        message, untried = wire.Ask(there.stage, request), list(there.addresses)
        while True:
            if self._client is None:
                if not untried:
                    raise HostError("no site leads it")
                self._client = Client(untried.pop(0), self._secret, (wire.READER, 0))
            answer, body = self._client.exchange(message, wire.Answer)
            if answer.ok:
                return answer.values, _rows(body, answer.sizes)
            if answer.reason != wire.NOT_HERE:
                raise FlowError(answer.reason)
            self.close()
            if answer.leader is not None and answer.leader in untried:
                untried.remove(answer.leader)
                untried.insert(0, answer.leader)

    def _locate(self) -> wire.There:
        """What a control says; if none does, data flows on, and the sites are where they were."""
        if self._there is None:
            try:
                self._there = self._last = self._find()
            except HostError:
                if self._last is None:
                    raise
                return self._last
        return self._there

    def _find(self) -> wire.There:
        """Ask the controls in turn: the one that leads knows."""
        said = "no control answers"
        for address in self._controls:
            try:
                client = Client(address, self._secret, (wire.READER, 0))
                there, _ = client.exchange(wire.Where(self.sink), wire.There)
                client.close()
            except (HoldfastError, OSError) as error:
                said = str(error)
                continue
            if there.addresses:
                return there
            if "has no sink" in there.reason:
                raise FlowError(there.reason)
            said = there.reason
        raise HostError(f"cannot find sink {self.sink!r} of flow {self.flow!r}: {said}")

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def __enter__(self) -> SinkReader:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def readers_of(url: str, sink: str) -> list[dict[str, Any]]:
    """Who reads a sink that is an outlet: of each its name, its state, up to which epoch it has
    everything, how many epochs and bytes it is behind, and how long ago it was seen."""
    with SinkReader(url, sink) as reader:
        return [row for batch in reader.ask({"do": "list"})[1] for row in batch.to_pylist()]


def forget_reader(url: str, sink: str, name: str) -> None:
    """Hold no rows any more for a reader that will not come back. If it does, and lacks some that
    have gone, it is refused."""
    with SinkReader(url, sink) as reader:
        reader.ask({"do": "forget", "reader": name})


class TableReader:
    """Reads a table while the flow runs: see `holdfast.sinks.table`."""

    def __init__(self, url: str, sink: str) -> None:
        self._reader = SinkReader(url, sink)

    @property
    def schema(self) -> pa.Schema:
        return self._reader.schema

    def get(self, *key: Any) -> dict[str, Any] | None:
        """The latest row of a key; None if there is none."""
        found = self.get_all([key])
        return found.to_pylist()[0] if found.num_rows else None

    def get_all(self, keys: Sequence[Sequence[Any]]) -> pa.RecordBatch:
        """The latest rows of those of these keys that have one."""
        listed = json.dumps([list(key) for key in keys], default=str)
        return self._reader.ask({"do": "get", "keys": listed})[1][0]

    def scan(self) -> Iterator[pa.RecordBatch]:
        """All rows as they are after one epoch, in no particular order. If the site that gives
        them dies meanwhile, that is an error: begin again."""
        number = self._reader.ask({"do": "scan"})[0]["scan"]
        while parts := self._reader.ask({"do": "go on", "scan": number})[1]:
            yield from parts

    def to_arrow(self) -> pa.Table:
        """All rows, as an Arrow table."""
        return pa.Table.from_batches(self.scan(), self.schema)

    def close(self) -> None:
        """Let go of the connection."""
        self._reader.close()

    def __enter__(self) -> TableReader:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _rows(body: bytes, sizes: Sequence[int]) -> list[pa.RecordBatch]:
    found, at, view = [], 0, memoryview(body)
    for size in sizes:
        found.append(rows_of(view[at : at + size]))
        at += size
    return found
