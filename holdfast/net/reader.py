"""Readers of a sink that is read from the egress, for processes outside the flow. The leader of the
egress answers.

The address of a flow names the controllers of its applications, and contains the flow's
incarnation and the key of readers: ``holdfast://INCARNATION:KEYS-KEY@host:port,host:port/flow``.
The level of security and the authority of certificates follow. A process that has the address can
read the flow's sinks, and nothing else.
"""

from __future__ import annotations

import base64
import json
import re
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

import pyarrow as pa

from holdfast.api.security import Level
from holdfast.errors import FlowError, HoldfastError, HostError
from holdfast.net import wire
from holdfast.net.bundles import rows_of
from holdfast.net.client import Client
from holdfast.net.handshake import Party
from holdfast.net.keys import Keys
from holdfast.net.tls import Certificate

PATIENCE_S = 30.0
"""How long a reader waits for an answer, for example while a lost site or driver is replaced."""
PAUSE_S = 0.05
CA_BYTES_MAX = 1 << 16

Trust = tuple[Level | None, Certificate | None]
"""The level that a client insists on, and what it checks certificates by."""

Address = tuple[str, int]


def url_of(flow: str, keys: Keys, controls: Sequence[Address], trust: Trust = (None, None)) -> str:
    """Return the address of a flow. `trust` is the flow's level of security, and what certificates
    are checked by.

    >>> keys = Keys("0123456789ab", "c0ffee012345", {"reader": b"abc"})
    >>> url_of("alerts", keys, [("localhost", 7000), ("localhost", 7001)])
    'holdfast://c0ffee012345:0123456789ab-616263@localhost:7000,localhost:7001/alerts'
    """
    listed = ",".join(f"{host}:{port}" for host, port in controls)
    key = f"{keys.id}-{keys.held[wire.READER].hex()}"
    level, certificate = trust
    query = {"security": level.value} if level is not None else {}
    if certificate is not None:
        query["ca"] = base64.urlsafe_b64encode(zlib.compress(certificate.ca)).decode()
        query["of"] = "flow" if certificate.of_flow else "user"
    asked = f"?{urlencode(query)}" if query else ""
    return f"holdfast://{keys.incarnation}:{key}@{listed}/{quote(flow, safe='')}{asked}"


_URL = re.compile(r"holdfast://(\w+):(\w+)-((?:[0-9a-f]{2})+)@([^/]+)/([^/?]+)(?:\?(.*))?")


def parse(url: str) -> tuple[str, Party, list[Address]]:
    """The inverse of `url_of`: the flow's name, a reader, and the controls."""
    found = _URL.fullmatch(url)
    listed = [a.rpartition(":") for a in found[4].split(",")] if found else []
    if found is None or not all(host and port.isdigit() for host, _, port in listed):
        raise _not_an_address()
    controls = [(host, int(port)) for host, _, port in listed]
    keys = Keys(found[2], found[1], {wire.READER: bytes.fromhex(found[3])})
    return unquote(found[5]), Party.client(keys, wire.READER, *_trust(found[6] or "")), controls


def _trust(query: str) -> Trust:
    said = dict(parse_qsl(query))
    try:
        level = Level(said["security"]) if "security" in said else None
        if "ca" not in said:
            return level, None
        ca = zlib.decompressobj().decompress(base64.urlsafe_b64decode(said["ca"]), CA_BYTES_MAX)
        return level, Certificate(ca, b"", b"", of_flow=said.get("of") == "flow")
    except (ValueError, zlib.error):
        raise _not_an_address() from None


def _not_an_address() -> FlowError:
    return FlowError(
        "this is not the address of a flow", hint="use the value of run.url of the running flow"
    )


class SinkReader:
    """Sends requests to one sink. Not thread-safe."""

    def __init__(self, url: str, sink: str) -> None:
        self.flow, self._party, self._controls = parse(url)
        self.sink = sink
        self.incarnation = self._party.ring.current.incarnation
        self._there: wire.There | None = None
        self._last: wire.There | None = None
        self._client: Client | None = None

    @property
    def schema(self) -> pa.Schema:
        """The schema of the rows."""
        return pa.ipc.read_schema(pa.py_buffer(self._locate().schema))

    def ask(self, request: dict[str, str | int]) -> tuple[dict[str, int], list[pa.RecordBatch]]:
        """Send a request to the leader of the egress, also after the leader has changed."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._ask(request)
            except (HostError, OSError) as error:
                self.close()
                self._there = None
                if time.monotonic() > deadline:
                    raise HostError(
                        f"no answer from sink {self.sink!r} of flow {self.flow!r}: {error}",
                        hint="is the flow still running?",
                    ) from error
                time.sleep(PAUSE_S)

    def _ask(self, request: dict[str, str | int]) -> tuple[dict[str, int], list[pa.RecordBatch]]:
        there = self._locate()
        message, untried = wire.Ask(there.stage, request), list(there.addresses)
        while True:
            if self._client is None:
                if not untried:
                    raise HostError("no site leads the sink")
                self._client = Client(untried.pop(0), self._party)
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
        """Return where the sink is. If no controller answers, return its last known place: sites
        continue without a controller."""
        if self._there is None:
            try:
                self._there = self._last = self._find()
            except HostError:
                if self._last is None:
                    raise
                return self._last
        return self._there

    def _find(self) -> wire.There:
        """Ask the controllers in turn; the leading one knows."""
        reason = "no controller answers"
        for address in self._controls:
            try:
                client = Client(address, self._party, peer=(wire.SERVER, -1))
                there, _ = client.exchange(wire.Where(self.sink), wire.There)
                client.close()
            except (HoldfastError, OSError) as error:
                reason = str(error)
                continue
            if there.addresses:
                return there
            if "has no sink" in there.reason:
                raise FlowError(there.reason)
            reason = there.reason
        raise HostError(f"cannot find sink {self.sink!r} of flow {self.flow!r}: {reason}")

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def __enter__(self) -> SinkReader:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def readers_of(url: str, sink: str) -> list[dict[str, Any]]:
    """Return the readers of an outlet, each with its name, its state, its last committed epoch, how
    many epochs and bytes it is behind, and how long ago it was active."""
    with SinkReader(url, sink) as reader:
        return [row for batch in reader.ask({"do": "list"})[1] for row in batch.to_pylist()]


def forget_reader(url: str, sink: str, name: str) -> None:
    """Stop holding rows for a reader that will not return. If it does return and lacks rows that
    are gone, it is refused."""
    with SinkReader(url, sink) as reader:
        reader.ask({"do": "forget", "reader": name})


class TableReader:
    """Reads a table while the flow runs; see `holdfast.sinks.table`."""

    def __init__(self, url: str, sink: str) -> None:
        self._reader = SinkReader(url, sink)

    @property
    def schema(self) -> pa.Schema:
        return self._reader.schema

    def get(self, *key: Any) -> dict[str, Any] | None:
        """Return the latest row of a key; None if there is none."""
        found = self.get_all([key])
        return found.to_pylist()[0] if found.num_rows else None

    def get_all(self, keys: Sequence[Sequence[Any]]) -> pa.RecordBatch:
        """Return the latest rows of those of these keys that have one."""
        listed = json.dumps([list(key) for key in keys], default=str)
        return self._reader.ask({"do": "get", "keys": listed})[1][0]

    def scan(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows as of one epoch, in no particular order. Raises if the site that serves
        the scan dies; start the scan again then."""
        number = self._reader.ask({"do": "scan"})[0]["scan"]
        while parts := self._reader.ask({"do": "go on", "scan": number})[1]:
            yield from parts

    def to_arrow(self) -> pa.Table:
        """Return all rows as an Arrow table."""
        return pa.Table.from_batches(self.scan(), self.schema)

    def close(self) -> None:
        """Close the connection."""
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
