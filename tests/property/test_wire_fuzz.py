"""Whatever comes in from a socket: nothing but a refusal may come of what is malformed.

Three levels. A connection that is fed mutated bytes, whole nodes that get mutated messages
from peers that know the secret, and real processes whose ports get garbage while a flow runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import threading
import tracemalloc
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from holdfast import Flow, col
from holdfast import functions as F
from holdfast.api.options import Options
from holdfast.connectors.sources import Source
from holdfast.core.events import (
    BlocksAvailable,
    CatchUpOrdered,
    ReplicaBehind,
    ReplicaReported,
    RetentionOrdered,
    SplitQuiet,
    StoreOrdered,
)
from holdfast.core.ids import SiteId
from holdfast.core.layout import Domain, PartitionGroup, View
from holdfast.core.messages import Ack, BundleKey, LogQuery, SequencerState
from holdfast.core.records import Block, EpochRecord, Range, pack_step
from holdfast.core.sequencer import Budget
from holdfast.core.upstream import Gap, Log
from holdfast.engine.batches import Track, frame_digests, to_ipc
from holdfast.errors import HostError, ProtocolError
from holdfast.lab.sim.links import CONTROLLER
from holdfast.lab.sim.world import World
from holdfast.net import bundles, protocol, wire
from holdfast.net.checks import Checks
from holdfast.net.client import Client
from holdfast.net.connection import CHUNK_BYTES, LARGE_BYTES, Connection
from holdfast.net.handshake import Party
from holdfast.net.keys import Keyring, Keys
from holdfast.plan.planner import plan, shape
from holdfast.protections import pairs
from holdfast.sinks import discard, parquet
from holdfast.site.push import PushReader
from holdfast.sources import generator, rows
from holdfast.storage.files import FileInfo
from tests.support.parties import party
from tests.support.sim_flows import Ordered, events, result

FUZZ = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)

# --- messages of every class --------------------------------------------------------------------

ROWS = pa.record_batch(
    {
        "k": pa.array([1, 2, None, 4]),
        "s": pa.array(["a", "", None, "dd"]),
        "x": pa.array([0.5, 1.5, 2.5, float("nan")]),
        "__o0": pa.array([7, 8, 9, 10]),
    },
    pa.schema(
        [
            ("k", pa.int64()),
            ("s", pa.string()),
            ("x", pa.float64()),
            pa.field("__o0", pa.int64(), False),
        ]
    ),
)
FRAMES = bundles.Frames(
    ROWS,
    Track(np.array([Track.START, 8]), np.array([3, 20])),
    frame_digests(ROWS, np.array([0, 1, 1, 0]), 2),
)
BUNDLE, BUNDLE_BODY = bundles.encode(BundleKey(1, 3, 0, 1, 0), FRAMES)
RECORD = EpochRecord(
    3, 100, (Range(0, 1, 5, 9, pack_step(5, 77)), Range(0, 2, 0, 1)), ((0, 1),), False, False
)
VIEW = View(
    2,
    7,
    (0, 3),
    (
        (PartitionGroup(0, 4, (0, 3)), PartitionGroup(4, 8, (3,), (5,))),
        (PartitionGroup(0, 1, (0,)),),
    ),
)
INFO = FileInfo(100, 3, 12345)
MARKS = dict.fromkeys(("committed", "total", "ended", "more"), 0)
IPC = bytes(to_ipc(ROWS))
EXTRAS: wire.Extras = {"counts": (1, 2, 3, 4), "ingress": None, "egress": None, "operator": {}}

MESSAGES: list[tuple[wire.Message, bytes]] = [
    (BUNDLE, b"".join(bytes(b) for b in BUNDLE_BODY)),
    *(
        (message, b"")
        for message in (
            wire.Challenge(b"n" * 16),
            wire.Hello("site", 1, "site", 0, "keys", "", b"n" * 16, b"p" * 32),
            wire.Refusal("no", b"p" * 32),
            wire.NewKeys(1, (wire.KeySet("id", "run", {"site": b"k"}),), (b"a", b"c", b"k")),
            wire.NewSecrets(1, (b"one", b"two")),
            wire.KeysHeld(("id",)),
            wire.Welcome(b"p" * 32),
            wire.Register(1, "host", 99, 5, Domain("p", "e", "h", "a")),
            wire.NewView(VIEW, {0: ("h", 1), 3: ("h", 2)}),
            wire.Seen(0, 1),
            wire.Start(1),
            wire.CatchUp(0, CatchUpOrdered((1, 0), 2)),
            wire.Retain(1, RetentionOrdered(4)),
            wire.Recorded(1, 7),
            wire.Store(1, StoreOrdered(9, None)),
            wire.TaskFiles(
                (1, 0), 9, 5, [("state", "a", True)], EXTRAS, [(8, 3)], "b", {"a": INFO}, False
            ),
            wire.NotStored((1, 0), 9, "no room", False),
            wire.ReplicaReport(ReplicaReported(3, (1, 0), 4, "failed", "it broke")),
            wire.Behind(ReplicaBehind(1, "slow")),
            wire.LogRequest(LogQuery(0, 0, 0, 2)),
            wire.LogReply(LogQuery(0, 0, 0, 2), Log(-1, 3, 1, {(1, 0): 2})),
            wire.Unheard(1, 2, "connected"),
            wire.Beat(),
            wire.Launch(1, 3),
            wire.Exited(3, "gone"),
            wire.Fenced(1),
            wire.Drain(1),
            wire.Pause(1, True),
            wire.Dismiss(1),
            wire.Finished(1),
            wire.Status(b"{}"),
            wire.Failed("FlowError", {"message": "x", "hint": None}),
            wire.Cut(RECORD),
            wire.Record(RECORD),
            wire.Pass(RECORD),
            wire.RecordsAfter(-1),
            wire.RecordsAfter(None),
            wire.JoinChain(-1, 0),
            wire.Chained(),
            wire.SequencerCopy(SequencerState(4, 104, False, 0, (9,), (True,), (RECORD,))),
            wire.Blocks(
                BlocksAvailable(0, 0, (Block(0, 5, 40), Block(5, 9, 32, pack_step(5, 7))), True)
            ),
            wire.Quiet(SplitQuiet(0, 0, 9, True)),
            wire.SplitAt(0, 0, 7, {"offset": 9}),
            wire.Acks([Ack(0, 0, 1, 0, 1, 3, True, -1, 2**64 - 1)] * 3),
            wire.Acks([Ack(0, 0, 1, 0, 1, 3, True, -1, 7, (1,), ({(1, 0): 2},))]),
            wire.Delivered(3, 2, 1, 2),
            wire.HandOverBegin(
                (1, 0), 3, 99, EXTRAS, None, {1: {0: Gap(2, -1, -1, 0, {(2, 0): 1})}}
            ),
            wire.HandOverEnd((1, 0)),
            wire.HandOverRefused((1, 0), 2, 3, 5),
            wire.PushBegin(0, "query", 0, "push"),
            wire.PushOpen(0, "push", 0, 0),
            wire.PushDone(),
            wire.PushCommit(0, "push", ((0, 1), (1, 2))),
            wire.PushEnd(0, "query"),
            wire.PushTaken(False, "not here", ("h", 1)),
            wire.PushCounted(0, 5),
            wire.PushHas(0, 3, True, 2, 5, ((4, 3), (5, 6))),
            wire.PushKnown(0, 5, 3, 2, 1),
            wire.PushLead(0, 5),
            wire.Where("out"),
            wire.There("", 3, b"schema", (("h", 1),)),
            wire.Ask(3, {"do": "read", "after": -1, "upto": 4}),
            wire.Notes(3, 1, {"query": (-1, "life", "reading")}, 0, -1),
            wire.NotesKept(3, 1),
        )
    ),
    (wire.HandOverState((1, 0), "state"), IPC),
    (wire.HandOverKept((1, 0), BUNDLE), b"".join(bytes(b) for b in BUNDLE_BODY)),
    (wire.HandOverHeld((1, 0), 3), IPC),
    (wire.PushRows(), IPC),
    (wire.PushBatch(0, 1, MARKS, [len(IPC)]), IPC),
    (wire.Answer(True, "", None, {"epoch": 3}, (len(IPC),)), IPC),
]


def encoded(message: wire.Message, body: bytes = b"") -> bytes:
    return wire.encode(message, len(body)) + body


WHOLE = [encoded(*m) for m in MESSAGES]


OF_SITES = [
    (message, body)
    for message, body in MESSAGES
    if any(rule.message is type(message) and wire.SITE in rule.senders for rule in protocol.RULES)
]


def test_the_messages_here_are_of_every_class() -> None:
    assert {type(m) for m, _ in MESSAGES} == set(wire.Message.__subclasses__())


# --- mutations ----------------------------------------------------------------------------------


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """One to four real messages with a few bytes flipped, put in, cut out, repeated or swapped."""
    data = b"".join(draw(st.lists(st.sampled_from(WHOLE), min_size=1, max_size=4)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        to = draw(st.integers(at, min(len(data), at + 40)))
        kind = draw(st.sampled_from(MUTATIONS))
        if kind == "flip" and data:
            data = data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]
        elif kind == "insert":
            data = data[:at] + draw(st.binary(max_size=20)) + data[at:]
        elif kind == "delete":
            data = data[:at] + data[to:]
        elif kind == "truncate":
            data = data[:at]
        elif kind == "repeat":
            data = data[:to] + data[at:to] + data[to:]
        elif kind == "splice":
            other = draw(st.sampled_from(WHOLE))
            data = data[:at] + other[at % len(other) :]
        elif kind == "lengths":
            lengths = wire.PREFIX.pack(*draw(st.tuples(*[st.sampled_from(LENGTHS)] * 2)))
            data = lengths + data[8:]
    return data


MUTATIONS = ["flip", "insert", "delete", "truncate", "repeat", "splice", "lengths"]
LENGTHS = [0, 1, 7, 1 << 10, (1 << 10) + 1, 1 << 17, 1 << 20, 1 << 22, 1 << 30, (1 << 32) - 1]

cuts = st.lists(st.integers(1, 300), min_size=1, max_size=12)


# --- a connection -------------------------------------------------------------------------------


class FakeTransport(asyncio.Transport):
    """Remembers what is written and whether it was aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closing = False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.closing = True


class End:
    """A connection without a socket."""

    def __init__(self, identity: tuple[str, int] | None = None) -> None:
        self.opened, self.messages = 0, []
        self.transport = FakeTransport()
        own = party(identity or (wire.SITE, 0))
        called = (self._on_open, self._on_message, lambda *_: None)
        self.connection = Connection(own, *called, identity, (wire.SITE, 0))
        self.connection.connection_made(self.transport)

    def _on_open(self, _: Connection) -> None:
        self.opened += 1

    def _on_message(self, _: Connection, message: wire.Message, body: memoryview) -> None:
        self.messages.append((message, bytes(body)))

    def feed(self, data: bytes, sizes: list[int]) -> None:
        """As a socket would: never more at once than there is room for, nothing after the end."""
        at = turn = 0
        while at < len(data) and not self.transport.closing:
            room = self.connection.get_buffer(-1)
            assert len(room) > 0
            part = data[at : at + min(len(room), sizes[turn % len(sizes)])]
            room[: len(part)] = part
            self.connection.buffer_updated(len(part))
            at, turn = at + len(part), turn + 1

    def take(self) -> bytes:
        self.connection._flush()
        written, self.transport.written = b"".join(self.transport.written), []
        return written

    @property
    def refused(self) -> bool:
        return self.transport.closing


async def connected(role: str = wire.SITE) -> tuple[End, End]:
    """Two ends that have shaken hands; the role is the client's."""
    server, client = End(), End((role, 1))
    for _ in range(3):
        client.feed(server.take(), [7])
        server.feed(client.take(), [7])
    assert server.connection.open and client.connection.open
    return server, client


def both(main: Any) -> None:
    asyncio.run(main())


@FUZZ
@given(st.one_of(st.binary(max_size=600), mutated()), cuts, st.booleans())
@example(encoded(wire.Start(1)), [1], False)
@example(encoded(wire.Hello("site", 1, "site", 0, "", "", b"", b"")), [300], True)
@example(wire.PREFIX.pack(0, 1000) + b"\x91" * 1000, [300], False)  # nested beyond all bounds
def test_strangers_get_nowhere(data: bytes, sizes: list[int], dials: bool) -> None:
    async def main() -> None:
        end = End(("site", 0) if dials else None)
        server, client = await connected()
        end.feed(data, sizes)
        end.feed(encoded(wire.Beat()), sizes)
        assert not end.opened and not end.messages
        assert not server.refused and not client.refused

    both(main)


@FUZZ
@given(mutated(), cuts)
@example(wire.PREFIX.pack(0, 5000) + b"\x92\xadHandOverBegin" + b"\x91" * 4986, [300])
@example(wire.PREFIX.pack(0, 9) + b"\x95\xa5Hello\x80\x80", [300])
def test_who_knows_the_secret_may_say_anything(data: bytes, sizes: list[int]) -> None:
    async def main() -> None:
        server, _ = await connected()
        server.feed(data, sizes)
        for message, _ in server.messages:
            assert wire.decode(wire.encode(message)[wire.PREFIX.size :]) is not None

    both(main)


@FUZZ
@given(st.lists(st.sampled_from(OF_SITES), min_size=1, max_size=6), cuts)
def test_however_messages_are_cut_they_arrive(
    messages: list[tuple[wire.Message, bytes]], sizes: list[int]
) -> None:
    async def main() -> None:
        server, _ = await connected()
        server.feed(b"".join(encoded(*m) for m in messages), sizes)
        assert not server.refused
        assert [m for m, _ in server.messages] == [m for m, _ in messages]
        assert [b for _, b in server.messages] == [b for _, b in messages]

    both(main)


@pytest.mark.parametrize("nbytes", [CHUNK_BYTES, LARGE_BYTES, 3 * LARGE_BYTES + 5])
def test_large_messages_arrive_whole(nbytes: int) -> None:
    body = os.urandom(1 << 10) * (nbytes >> 10) + b"end"

    async def main() -> None:
        server, _ = await connected(wire.PUSHER)
        server.feed(
            encoded(wire.PushRows(), body) + encoded(wire.PushDone()), [100_000, 9, 1 << 18]
        )
        assert server.messages == [(wire.PushRows(), body), (wire.PushDone(), b"")]

    both(main)


def test_a_body_that_is_only_announced_takes_no_memory() -> None:
    """What a connection holds follows what has come: a small beginning, or four times that."""
    announced = wire.BODY_BYTES_MAX

    async def main() -> None:
        server, _ = await connected()
        tracemalloc.start()
        try:
            server.feed(wire.encode(wire.PushRows(), announced), [64])
            server.feed(bytes(CHUNK_BYTES), [1 << 16])
            assert not server.refused
            assert tracemalloc.get_traced_memory()[1] < 2 * LARGE_BYTES
            come = 0
            while come < 40 << 20:
                part = bytes(1 << 20)
                server.feed(part, [len(part)])
                come += len(part)
            assert tracemalloc.get_traced_memory()[0] < 4 * come + LARGE_BYTES < announced / 4
        finally:
            tracemalloc.stop()

    both(main)


@pytest.mark.parametrize("role", ["", "site", "pusher", "reader", "server", "pulse", "agent"])
def test_everybody_may_only_say_what_is_theirs_to_say(role: str) -> None:
    said = set()
    for message, _ in MESSAGES:
        try:
            protocol.check_sender(role, message)
            said.add(type(message))
        except ProtocolError:
            pass
    control = {wire.NewView, wire.Start, wire.Dismiss, wire.Drain, wire.Pause, wire.CatchUp}
    control |= {wire.Recorded, wire.Store, wire.Retain}
    feed = {wire.PushBegin, wire.PushOpen, wire.PushRows, wire.PushDone}
    feed |= {wire.PushCommit, wire.PushEnd}
    assert (wire.Fenced in said) == (role in ("site", "server"))
    assert bool(said & control) == (role == "server")
    assert bool(said & feed) == (role == "pusher")
    assert (wire.Ask in said) == (role == "reader")
    assert (wire.Bundle in said) == (role == "site")


def test_a_client_refuses_a_server_that_talks_nonsense() -> None:
    """Its thread would end with any other error, and with it the pulse of a site."""
    answers = [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        wire.PREFIX.pack(0, 4) + b"\xc1\xc1\xc1\xc1",
        wire.PREFIX.pack(0xFFFFFFFF, 0xFFFFFFFF),
        wire.PREFIX.pack(0, 1000) + b"\x91" * 1000,
        encoded(wire.Beat()),
        encoded(wire.Challenge(b"x", wire.VERSION, "auth")) + encoded(wire.Welcome(b"y")),
    ]
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for answer in answers:
            accepted, _ = listening.accept()
            with accepted, contextlib.suppress(OSError):  # the client may have left
                accepted.sendall(answer)
                accepted.shutdown(socket.SHUT_WR)
                accepted.recv(200)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    for _ in answers:
        with pytest.raises((ProtocolError, HostError)):
            Client(listening.getsockname(), party((wire.PUSHER, 0)))
    thread.join(5)
    listening.close()


# --- bundles and what else has a body -----------------------------------------------------------


@st.composite
def mutated_body(draw: st.DrawFn, body: bytes) -> bytes:
    data = bytearray(body)
    for _ in range(draw(st.integers(1, 6))):
        if data:
            at = draw(st.integers(0, len(data) - 1))
            data[at] = draw(st.sampled_from([0, 1, 127, 128, 255, data[at] ^ 1, data[at] ^ 64]))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


NUMBERS = st.sampled_from([0, 1, 4, 8, 15, 16, 32, 1 << 20, 1 << 40])


@settings(FUZZ, max_examples=400)
@given(
    mutated_body(MESSAGES[0][1]),
    st.fixed_dictionaries({}, optional={"rows": NUMBERS, "track": NUMBERS, "digests": NUMBERS}),
)
def test_a_bundle_that_is_damaged_is_refused_or_can_be_worked_with(
    body: bytes, numbers: dict[str, int]
) -> None:
    message = msgspec.structs.replace(BUNDLE, **numbers)
    try:
        frames = bundles.decode(message, memoryview(body), ROWS.schema)
    except ProtocolError:
        return
    assert frames.batch.num_rows == message.rows
    frames.batch.to_pylist()
    frames.batch.column("__o0").to_numpy()
    Track.merged([frames.track, FRAMES.track]).before(np.array([1, 8, 9]))
    assert frames.checksum >= 0
    frame_digests(frames.batch, np.zeros(message.rows, np.int64), 2)


@pytest.mark.parametrize(
    "track",
    [
        Track(np.array([5, 8]), np.array([3, 20])),
        Track(np.array([Track.START, 8, 7]), np.array([3, 20, 21])),
        Track(np.array([Track.START, 8]), np.array([20, 3])),
    ],
)
def test_a_watermark_that_goes_back_is_refused(track: Track) -> None:
    message, body = bundles.encode(BundleKey(0, 0, 0, 0, 0), bundles.Frames(ROWS, track, None))
    with pytest.raises(ProtocolError, match="goes back"):
        bundles.decode(message, memoryview(b"".join(bytes(b) for b in body)), ROWS.schema)


def test_nulls_in_an_order_key_are_refused() -> None:
    nulls = ROWS.set_column(3, "__o0", pa.array([None, 1, 2, 3]))
    message, body = bundles.encode(
        BundleKey(0, 0, 0, 0, 0), bundles.Frames(nulls, FRAMES.track, None)
    )
    with pytest.raises(ProtocolError, match="nulls"):
        bundles.decode(message, memoryview(b"".join(bytes(b) for b in body)), ROWS.schema)


def test_offsets_beyond_the_data_are_refused() -> None:
    """Reading such a text would read memory that is not ours, or crash."""
    offsets = np.array([0, 1, 1, 1, 3], np.int32).tobytes()
    body = MESSAGES[0][1]
    assert body.count(offsets) == 1
    bad = np.array([0, 1, 1 << 20, 1, 3], np.int32).tobytes()
    with pytest.raises(ProtocolError):
        bundles.decode(BUNDLE, memoryview(body.replace(offsets, bad)), ROWS.schema)


# --- whole nodes --------------------------------------------------------------------------------

TINY = Options(
    partitions=4,
    budget=Budget(epoch_rows_max=16, epochs_in_flight_max=4, bytes_in_flight_max=1 << 20),
    window=2,
    block_rows=10,
    read_ahead_rows=40,
)
N = 120


def line() -> Flow:
    flow = Flow("line", protect=pairs(failure_domain="process"))
    source = flow.source("events", rows(events(N)), event_time="ts")
    totals = source.key_by("k").agg(x=F.sum("v")).select(k=col("k") % 3, x=col("x"))
    totals.key_by("k").agg(m=F.max("x"), n=F.count()).sink("out", Ordered())
    windows = source.key_by("g").window(time=20, every=10, lateness=5).agg(n=F.count())
    windows.sink("windows", Ordered())
    return flow


@cache
def expected() -> dict[str, pa.Table]:
    world = World(line(), sites=2, options=TINY)
    world.run()
    return {sink: result(world, sink) for sink in ("out", "windows")}


ODD = ["x", b"y", 1.5, [], {}, [[1]]]
EXTREMES = [-(2**63), -(2**40), -7, -2, 2**49, 2**63 - 1, 2**64 - 1]
UNKNOWN = [17, 99, 1_000, 1 << 40]
NAMES = "exchange producer consumer stage group source split sink turn part rows track digests"
CREDIBLE = {"checksum": [-1], "joined_view": [-1, 2**49]}
"""Where almost any number could be true."""


def parts(value: Any) -> list[tuple[Any, Any]]:
    """What a message or a part of it consists of, with names or numbers."""
    if isinstance(value, msgspec.Struct):
        return [(n, getattr(value, n)) for n in value.__struct_fields__]
    if is_dataclass(value):
        return [(f.name, getattr(value, f.name)) for f in fields(value)]
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    return list(value.items()) if isinstance(value, dict) else []


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    inner = [leaf for name, part in parts(value) for leaf in leaves(part, (*path, name))]
    return inner or [(path, value)]


def plain(value: Any, at: tuple[Any, ...], instead: Any, path: tuple[Any, ...] = ()) -> Any:
    """As it is encoded, with something else in one place."""
    if path == at:
        return instead
    inner = {name: plain(part, at, instead, (*path, name)) for name, part in parts(value)}
    if isinstance(value, wire.Message):
        return [type(value).__name__, *inner.values()]
    if isinstance(value, msgspec.Struct | list | tuple):
        return list(inner.values())
    return inner if is_dataclass(value) or isinstance(value, dict) else value


def nonsense(message: wire.Message, rng: random.Random) -> bytes:
    """The header of a message with a number in it that cannot be, or something of another kind.

    Not with one that could be: no check finds out that a member says yes instead of no.
    """
    path, leaf = rng.choice(leaves(message))
    name = next((step for step in reversed(path) if isinstance(step, str)), "")
    others = list(EXTREMES if type(leaf) is int else ODD)
    if name in NAMES.split():
        others += UNKNOWN
    others = CREDIBLE.get(name, others)
    return msgspec.msgpack.encode(plain(message, path, rng.choice([*others, rng.choice(ODD)])))


def damaged(body: bytes, rng: random.Random) -> bytes:
    kind = rng.choice(["as it is", "cut", "none", "other", "noise"])
    if kind == "cut":
        return body[: rng.randrange(len(body) + 1)]
    if kind == "other":
        return IPC
    if kind == "noise":
        return rng.randbytes(rng.randrange(200))
    return b"" if kind == "none" else body


HANDING_OVER = [wire.HandOverBegin, wire.HandOverState, wire.HandOverKept, wire.HandOverHeld]


class Meddler:
    """Gives the nodes of a world messages that cannot be, in between those that can."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.rng = world, random.Random(seed)
        self.seen: dict[type, tuple[wire.Message, bytes]] = {type(m): (m, b) for m, b in MESSAGES}
        self.refused = 0
        self.passed: list[Any] = []  # to look at when a run fails

    def watch(self) -> None:
        """Learn from what is on its way, so that what is made of it is close to the truth."""
        for queue in self.world.network.values():
            for item in queue:
                if isinstance(item, tuple) and isinstance(item[0], wire.Message):
                    self.seen[type(item[0])] = (item[0], bytes(item[1]))

    def meddle(self) -> None:
        links = [k for k in self.world.network if CONTROLLER not in k and k[1] in self.world.nodes]
        if not links:
            return
        sender, receiver = self.rng.choice(links)
        message, body = self.rng.choice(list(self.seen.values()))
        replicas = [(s, task) for s, n in self.world.nodes.items() for task in n.transfers.incoming]
        if (
            replicas and self.rng.random() < 0.5
        ):  # where a replica is being made there is more to break
            receiver, task = self.rng.choice(replicas)
            sender = self.world.nodes[receiver].transfers.incoming[task].donor
            message, body = self.seen[self.rng.choice(HANDING_OVER)]
            message = msgspec.structs.replace(message, task=task)
        header, damage = msgspec.msgpack.encode(message), damaged(body, self.rng)
        if damage == body or self.rng.random() < 0.7:
            header = nonsense(message, self.rng)
        self.say(sender, receiver, header, damage)

    def say(self, sender: int, receiver: int, header: bytes, body: bytes) -> None:
        """As a site does it: who says what cannot be loses the connection."""
        node = self.world.nodes[receiver]
        try:
            message = wire.decode(header)
            protocol.check_sender("site", message)
            if not isinstance(message, wire.Fenced):
                node.receive(SiteId(sender), message, memoryview(body))
            self.passed.append((self.world.steps, sender, receiver, message))
        except ProtocolError:
            self.refused += 1
            if sender in self.world.nodes:
                self.world.reset(SiteId(sender), SiteId(receiver))
        self.world.after(node)


def meddled(seed: int, crash: bool, every: int = 12) -> Meddler:
    world = World(line(), sites=3, seed=seed, options=TINY)
    meddler = Meddler(world, seed)
    while not world.ended:
        meddler.watch()
        if world.steps % every == every - 1:
            meddler.meddle()
        if crash and world.steps == 150:
            world.crash(SiteId(seed % 3))
        assert world.step(), world.describe()
        assert world.steps < 30_000, world.describe()
    assert world.error is None, world.error
    for sink, table in expected().items():
        assert result(world, sink).equals(table)
    return meddler


@settings(FUZZ, max_examples=8)
@given(st.integers(0, 1 << 30), st.booleans())
@example(25, True)  # a bundle with rows and nothing where they should be
def test_nodes_go_on_whatever_their_peers_say(seed: int, crash: bool) -> None:
    meddled(seed, crash)


def test_a_replica_is_made_in_spite_of_them() -> None:
    """What was half handed over when something did not fit is thrown away, and handed over
    again."""
    world = World(line(), sites=3, seed=5, options=TINY)
    meddler = Meddler(world, 5)
    for _ in range(120):
        world.step()
    world.crash(SiteId(2))
    broken = 0
    while not world.ended:
        meddler.watch()
        for receiver, node in world.nodes.items():
            for task, incoming in list(node.transfers.incoming.items()):
                if broken < 8 and incoming.nbytes and incoming.donor in world.nodes:
                    broken += 1
                    header = msgspec.msgpack.encode(wire.HandOverState(task, "state"))
                    meddler.say(incoming.donor, receiver, header, IPC)
                    break
        assert world.step(), world.describe()
    assert broken == meddler.refused == 8
    for sink, table in expected().items():
        assert result(world, sink).equals(table)
    assert any("+" in line for line in world.log), "replicas were made"


def ready(seed: int = 1, steps: int = 200) -> World:
    world = World(line(), sites=3, seed=seed, options=TINY)
    for _ in range(steps):
        world.step()
    return world


NEVER = 1 << 40


IMPOSSIBLE: list[wire.Message] = [
    wire.Delivered(99, 0, 0, 0),
    wire.Delivered(0, 0, 0, 0),
    wire.Delivered(4, NEVER, 0, 0),
    wire.Delivered(3, 2, 1, 0),
    wire.PushBatch(0, 1, MARKS, []),
    wire.PushHas(0, 1, True),
    wire.Blocks(BlocksAvailable(99, 0, (), False)),
    wire.Blocks(BlocksAvailable(0, 0, (Block(9, 9, 1),), True)),
    wire.Blocks(BlocksAvailable(0, 0, (Block(-9, 9, 1),), True)),
    wire.Blocks(BlocksAvailable(0, 0, (Block(0, 9, -1),), True)),
    wire.Blocks(BlocksAvailable(0, 0, (Block(0, 9, 1, pack_step(1, 5)),), True)),
    wire.Blocks(BlocksAvailable(0, 0, (Block(0, 9, 1, pack_step(0, 5) + pack_step(9, 6)),), True)),
    wire.Blocks(BlocksAvailable(0, 0, (Block(0, 9, 1, pack_step(0, 5) + pack_step(0, 6)),), True)),
    wire.Blocks(BlocksAvailable(0, 0, (Block(0, 9, 1, b"1234"),), True)),
    wire.Quiet(SplitQuiet(0, 99, 0, True)),
    wire.SplitAt(0, 99, 7, {}),
    wire.Record(EpochRecord(-1, 0, ())),
    wire.Record(EpochRecord(NEVER, -1, ())),
    wire.Record(EpochRecord(NEVER, 0, (Range(0, 9, 0, 1),))),
    wire.Record(EpochRecord(NEVER, 0, (Range(0, 0, 5, 1),))),
    wire.Record(EpochRecord(NEVER, 0, (), (99,))),
    wire.Record(EpochRecord(NEVER, 0, (), (), False, True)),
    wire.Record(EpochRecord(0, 77, ())),  # there is another of this epoch
    wire.Pass(EpochRecord(NEVER, 0, (Range(9, 9, 0, 1),))),
    wire.SequencerCopy(SequencerState(3, 0, False, 0, (), (), ())),
    wire.SequencerCopy(SequencerState(3, 0, False, 0, (0,), (), ())),
    wire.SequencerCopy(SequencerState(3, 0, False, 1, (0,), (True,), ())),
    wire.SequencerCopy(SequencerState(3, 0, False, 0, (0,), (True,), (EpochRecord(1, 0, ()),))),
    wire.Acks([Ack(99, 0, 0, 0, 0, 1, True, -1, 0)]),
    wire.Acks([Ack(0, 99, 0, 0, 0, 1, True, -1, 0)]),
    wire.Acks([Ack(0, 0, 99, 0, 0, 1, True, -1, 0)]),
    wire.Acks([Ack(0, 0, 0, 0, NEVER, 1, True, -1, 0)]),
    wire.Acks([Ack(0, 0, 0, 0, 0, NEVER, True, -1, 0)]),
    wire.Acks([Ack(0, 0, 0, 0, 0, 2, True, 2, 0)]),
    wire.Acks([Ack(-1, 0, 0, 0, 0, 1, True, -1, 0)]),
    wire.Acks([Ack(0, -1, 0, 0, 0, 1, True, -1, 0)]),
    wire.Acks([Ack(0, 0, -1, 0, 0, 1, True, -1, 0)]),
    wire.Acks([Ack(0, 0, 0, -1, 0, 1, True, -1, 0)]),
    wire.Acks([Ack(0, 0, 0, 0, 0, 1, True, -2, 0)]),
    wire.Acks([Ack(0, 0, 0, 0, 0, 1, True, -1, -1)]),
    wire.Acks([Ack(0, 0, 0, 0, 0, 1, True, -1, 0, (-2,))]),
    wire.LogRequest(LogQuery(-1, 0, 0, 0)),
    wire.LogReply(LogQuery(0, 0, 0, 0), Log(-2, 0, 0, {})),
    wire.LogReply(LogQuery(0, 0, 0, 0), Log(-1, 0, 0, {(1, -1): 0})),
    wire.CatchUp(1, CatchUpOrdered((1, -1), 2)),
    wire.CatchUp(1, CatchUpOrdered((1, 0), -2)),
    wire.Store(1, StoreOrdered(-2, None)),
    wire.Acks([Ack(0, 0, 0, 0, 1, 2, True, 0, 0, (0,), ({(99, 0): 0},))]),
    wire.Acks([Ack(0, 0, 0, 0, 1, 2, True, 0, 0, (), ({},))]),
    wire.HandOverBegin((99, 0), 0, 0, EXTRAS, None, {}),
    wire.HandOverEnd((1, 99)),
    wire.HandOverKept((1, 0), msgspec.structs.replace(BUNDLE, key=BUNDLE.key._replace(exchange=0))),
    wire.Register(1, "h", 1, 1, Domain("p", "e", "h", "a")),
]


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    world = ready()
    node = world.nodes[SiteId(0)]

    def state() -> str:
        flow = node.dataflow
        lanes = {key: producer.lanes for key, producer in flow.exchanges.producers.items()}
        sequencer = node.sequencer and (node.sequencer.splits, node.sequencer.delivered)
        known, early = flow.records.by_epoch, flow.exchanges.early.acks
        return repr((flow.tasks, known, early, lanes, sequencer, node.sequencing.early))

    before = state()
    for message in IMPOSSIBLE:
        with pytest.raises(ProtocolError):
            node.receive(SiteId(1), message, memoryview(b""))
        assert state() == before, message
    world.run()
    for sink, table in expected().items():
        assert result(world, sink).equals(table)


WRONG: list[dict[str, Any]] = [
    {"exchange": 99},
    {"exchange": -1},
    {"producer": -1},
    {"consumer": 99},
    {"consumer": -1},
    {"joined_view": -1},
    {"epoch": 50},
    {"epoch": -2},
    {"part": 1},
    {"part": -1},
    {"last": False},
    {"rows": 1},
    {"track": 0},
    {"track": 8},
    {"digests": 8 * 99},
]


KEY = set(BundleKey._fields)


def test_a_bundle_that_cannot_be_is_refused() -> None:
    world = ready()
    (sender, receiver), (message, body) = next(
        (key, item)
        for key, queue in world.network.items()
        for item in queue
        if isinstance(item, tuple) and isinstance(item[0], wire.Bundle) and not item[0].rows
    )
    for changes in WRONG:
        with pytest.raises(ProtocolError):
            key = message.key._replace(**{f: v for f, v in changes.items() if f in KEY})
            rest = {f: v for f, v in changes.items() if f not in KEY}
            wrong = msgspec.structs.replace(message, key=key, **rest)
            world.nodes[receiver].receive(sender, wrong, body)
    world.run()
    for sink, table in expected().items():
        assert result(world, sink).equals(table)


def test_rows_need_not_be_pretty() -> None:
    """Arrow's full validation would refuse these, and the connection break again and again."""
    dirty = pa.array([b"\xff\xfe", b"ok", None]).view(pa.string())
    day = pa.array([1, 2, 3]).view(pa.date64())
    batch = pa.record_batch(
        {
            "text": dirty,
            "texts": pa.ListArray.from_arrays(pa.array([0, 2, 3, 3], pa.int32()), dirty),
            "both": pa.StructArray.from_arrays([dirty, day], ["text", "day"]),
            "day": day,
            "amount": pa.array([1, 2, None], pa.decimal128(10, 2)),
            "pairs": pa.array([[("a", "b")], None, []], pa.map_(pa.string(), pa.string())),
            "when": pa.array([1, 2, None], pa.timestamp("us", "UTC")),
            "span": pa.array([pa.MonthDayNano([1, 2, 3]), None, None]),
            "yes": pa.array([True, False, None]),
            "blob": pa.array([b"1234", None, b"5678"], pa.binary(4)),
            "large": pa.array(["a", None, "b"], pa.large_string()),
            "none": pa.nulls(3),
        }
    )
    with pytest.raises(pa.ArrowInvalid):
        batch.validate(full=True)
    message, body = bundles.encode(
        BundleKey(0, 0, 0, 0, 0), bundles.Frames(batch, FRAMES.track, None)
    )
    again = bundles.decode(message, memoryview(b"".join(bytes(b) for b in body)), batch.schema)
    assert again.batch.equals(batch)
    assert bundles.rows_of(memoryview(to_ipc(batch))).equals(batch)


def test_a_bundle_without_the_rows_it_has_is_refused() -> None:
    """Arrow calls an empty stream an end of file, which is no error of its own kind."""
    with pytest.raises(ProtocolError):
        head = BUNDLE.track + BUNDLE.digests
        bundles.decode(BUNDLE, memoryview(MESSAGES[0][1])[:head], ROWS.schema)
    with pytest.raises(ProtocolError):
        bundles.rows_of(memoryview(b""))


def test_what_came_too_early_is_not_the_fault_of_a_view() -> None:
    """It is looked at when the view comes that it belongs to; by then the controller is talking."""
    world = World(line(), sites=2, seed=3, options=TINY)
    node = world.nodes[SiteId(0)]
    node.sequencing.early.append(BlocksAvailable(0, 0, (Block(50, 60, 80),)))
    world.run()
    for sink, table in expected().items():
        assert result(world, sink).equals(table)


# --- feeds --------------------------------------------------------------------------------------


class Pushed(Source):
    """A source that would be fed."""

    pushed, splits, schema = True, 1, ROWS.schema.remove(3)


def test_a_portion_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    flow = Flow("pushed")
    source = flow.source("pushed", Pushed())
    source.key_by("k").agg(n=F.count()).sink("out", discard())
    shaped = plan(flow)
    checks = Checks(shaped, shape(shaped, 4), 2)
    reader = PushReader(0, ROWS.schema, False)
    reader.on_replicas(SiteId(1), {SiteId(1): 0}, {})
    rng = random.Random(0)
    push_batch = wire.PushBatch(0, 1, MARKS, [len(IPC)])
    before = reader.save()
    for _ in range(300):
        header, body = nonsense(push_batch, rng), damaged(IPC, rng)
        with contextlib.suppress(ProtocolError):
            message = wire.decode(header)
            protocol.validate(checks, message, memoryview(body))
            reader.on_push_batch(SiteId(1), message, memoryview(body))
            before = reader.save()
        assert reader.save() == before
    reader = PushReader(0, ROWS.schema, False)
    with pytest.raises(ProtocolError):
        reader.on_push_batch(SiteId(1), push_batch, memoryview(IPC[:-40]))
    reader.on_push_batch(SiteId(1), push_batch, memoryview(IPC))
    assert reader.has == 1 and not reader.unread()
    reader.on_push_known(SiteId(1), wire.PushKnown(0, 0, 1, 1, 0))
    assert reader.unread()[0].num_rows == 4


# --- real processes -----------------------------------------------------------------------------


def numbers(split: int, offset: int, n: int) -> pa.RecordBatch:
    at = np.arange(offset, offset + n)
    return pa.record_batch({"k": pa.array(at % 13), "v": pa.array(at)})


class Nuisance(threading.Thread):
    """Sends garbage to ports, from several sockets at once, some of which know the secret."""

    def __init__(self, addresses: list[tuple[str, int]], keys: Keys, seed: int) -> None:
        super().__init__(daemon=True)
        self.addresses, self.keys, self.rng = addresses, keys, random.Random(seed)
        self.over = threading.Event()
        self.rounds = 0

    def run(self) -> None:
        while not self.over.is_set() and self.rounds < 400:
            self.rounds += 1
            with contextlib.suppress(OSError, HostError, ProtocolError):
                self._bother(self.rng.choice(self.addresses))

    def _bother(self, address: tuple[str, int]) -> None:
        with contextlib.ExitStack() as stack:
            sockets = [
                stack.enter_context(socket.create_connection(address, timeout=2))
                for _ in range(self.rng.randrange(1, 4))
            ]
            if self.rng.random() < 0.6:
                role = self.rng.choice([("site", 77), ("pusher", 0), ("nobody", 3), ("server", 0)])
                client = Client(address, Party(role, Keyring(self.keys), None))
                stack.callback(client.close)
                sockets.append(client._socket)
            for one in sockets:
                one.sendall(self._garbage())

    def _garbage(self) -> bytes:
        kind = self.rng.randrange(4)
        if kind == 0:
            return self.rng.randbytes(self.rng.randrange(1, 2_000))
        message, body = self.rng.choice(MESSAGES)
        if kind == 1:
            return wire.encode(message, wire.BODY_BYTES_MAX) + body
        header, body = nonsense(message, self.rng), damaged(body, self.rng)
        return wire.PREFIX.pack(len(body), len(header)) + header + body


def test_real_sites_work_on_while_their_ports_get_garbage(tmp_path, capfd) -> None:
    total = 300_000
    flow = Flow("sums")
    source = flow.source("numbers", generator(numbers, numbers(0, 0, 0).schema, rows=total))
    source.key_by("k").agg(total=F.sum("v"), n=F.count()).sink("out", parquet(tmp_path / "out"))
    options = Options(budget=Budget(epoch_rows_max=2_000), block_rows=1_000, read_ahead_rows=2_000)
    with flow.start(sites=2, options=options) as run:
        addresses = list(run._controller.addresses.values())
        pests = [Nuisance(addresses, run._control.credentials.keys, seed) for seed in range(4)]
        for pest in pests:
            pest.start()
        assert run.wait(60)
        for pest in pests:
            pest.over.set()
            pest.join(10)
    assert sum(p.rounds for p in pests) > 20
    table = pq.read_table(tmp_path / "out")
    assert table.num_rows == total
    v = np.arange(total)
    for k in range(13):
        mine = table.filter(pa.compute.equal(table["k"], k))
        assert np.array_equal(mine["total"].to_numpy(), np.cumsum(v[v % 13 == k]))
    assert "Traceback" not in capfd.readouterr().err
