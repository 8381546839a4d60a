"""The wire between sites, the controller and the tasks that feed a flow.

A message is a fixed prefix (body length, header length, both 32 bits), a header, and a body.
Headers are msgpack, decoded against the classes below: a peer can only ever make one of them, and
nothing is unpickled. Bodies are Arrow IPC or raw arrays.

A connection opens with a handshake in which both ends prove that they know the flow's secret:

    server -> client   Challenge(nonce)
    client -> server   Hello(role, id, nonce, proof)    proof = HMAC(secret, both nonces, role, id)
    server -> client   Welcome(proof)                   the same, with the parts swapped

Until `Welcome` no message may be longer than a kilobyte, and nothing but these three is decoded.
Then, between sites: records, bundles, acks and what makes a new replica, each in the order in which
it was sent. Whatever is not as declared is a `ProtocolError`, and ends the connection.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, TypedDict, Union

import msgspec

from holdfast.core.ids import Epoch, GroupId, StageId, TaskId
from holdfast.core.layout import Domain, View
from holdfast.core.records import Block, EpochRecord
from holdfast.errors import FlowError, ProtocolError
from holdfast.storage.files import FileInfo

PREFIX = struct.Struct("<II")
"""Lengths of the body and of the header, before every message."""
HANDSHAKE_BYTES_MAX = 1 << 10
HEADER_BYTES_MAX = 1 << 25
"""The largest header is a `SequencerState`, with as many records as the sequencer keeps."""
BODY_BYTES_MAX = 1 << 30
PIECE_BYTES = 1 << 20
"""Rows are handed over, and put on disk, in pieces of about this size."""

NOT_HERE = "another site leads the ingress"
"""Why a site refuses what only the leader of an ingress, or an egress, can do."""
TAKEN = "taken"
"""What the ingress answers to a push whose rows it has already taken."""

NUMBER_MAX = 1 << 48
"""Nothing that is counted gets this far, and sums of it still fit into 64 bits."""
Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
EpochNumber = Annotated[int, msgspec.Meta(ge=-1, le=NUMBER_MAX)]
Checksum = Annotated[int, msgspec.Meta(ge=0)]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages."""


# --- handshake ----------------------------------------------------------------------------------


class Challenge(Message, frozen=True):
    nonce: bytes


class Hello(Message, frozen=True):
    role: str
    id: Number
    nonce: bytes
    proof: bytes


class Welcome(Message, frozen=True):
    proof: bytes


# --- between a site and the controller ----------------------------------------------------------


class Register(Message, frozen=True):
    """I am up, listen here, and run there."""

    site: Number
    host: str
    port: Number
    pid: Number
    domain: Domain


class NewView(Message, frozen=True):
    """The view to act on: connect to its members, make the tasks it gives you, then say `Seen`."""

    view: View
    addresses: dict[int, tuple[str, int]]


class Seen(Message, frozen=True):
    """I act on this view, and am connected to all its members."""

    term: Number
    number: Number


class Start(Message, frozen=True):
    """Everybody is connected: read your sources."""

    term: Number


class CatchUp(Message, frozen=True):
    """Hand the task over to the new replica at `joiner`. `term` is that of the leader who says
    so."""

    term: Number
    stage: Number
    group: Number
    joiner: Number


class Retain(Message, frozen=True):
    """All members act on the view with this number: say of each task that shall be rebuilt if it
    is lost when all is kept that this takes."""

    term: Number
    number: Number


class ReplicaReport(Message, frozen=True):
    """How far the replica of a task at `site` is: see `ReplicaReported`. `number` is
    that of the view I act on: what is said of a replica that was given up since is void."""

    stage: Number
    group: Number
    site: Number
    number: Number
    phase: str
    reason: str = ""


class Behind(Message, frozen=True):
    """I must keep too much for the replicas at `site`."""

    site: Number
    reason: str


class Unheard(Message, frozen=True):
    """I have heard nothing of this member for so many leases, though I listened. `how` things stand
    between us is for whoever reads it."""

    site: Number
    leases: Number
    how: str


class Beat(Message, frozen=True):
    """I am alive; also between sites, on a connection that is quiet. `busy`: for longer than the
    lease I have not got to read what others send me, nor to beat on their connections."""

    busy: bool = False
    seconds: float = 0.0
    """Of one that is busy: for how long, and with what (see `holdfast.core.events.Call`)."""
    stage: str = ""
    epoch: int = -1


class Launch(Message, frozen=True):
    """The leading application to another: start this site."""

    term: Number
    site: Number


class Exited(Message, frozen=True):
    """And back: its process has ended."""

    site: Number
    reason: str


class Fenced(Message, frozen=True):
    """You were declared dead, or are none of ours: leave."""

    term: Number


class Drain(Message, frozen=True):
    """Take no more rows (only to the sequencer's site)."""

    term: Number


class Pause(Message, frozen=True):
    """Cut no epochs for the time being, or do again (only to the sequencer's site)."""

    term: Number
    paused: bool


class Dismiss(Message, frozen=True):
    """The flow is over, and that is committed; leave."""

    term: Number


class Finished(Message, frozen=True):
    """I have seen the last epoch through, as far as it is mine in the view with this number."""

    number: Number


class Status(Message, frozen=True):
    """Figures for whoever watches, as JSON."""

    figures: bytes


class Failed(Message, frozen=True):
    """I cannot go on. `kind` is the class of the error; `detail` what is needed to rebuild it."""

    kind: str
    detail: dict[str, str | int | None]


class Cut(Message, frozen=True):
    """The sequencer keeps the controller informed of every epoch it cuts."""

    record: EpochRecord


class Recorded(Message, frozen=True):
    """Records up to this epoch outlive all of us: sinks may take it."""

    term: Number
    epoch: EpochNumber


class Store(Message, frozen=True):
    """Store the tasks that you lead as they are after this epoch: see `StoreOrdered`. Whatever was
    ordered before is void."""

    term: Number
    epoch: EpochNumber
    after: EpochNumber | None


class TaskFiles(Message, frozen=True):
    """A task is stored as it was after `epoch`: in these files, in this order (table, name, whether
    it has what is gone), with this besides. Of a sink, `held` are the epochs of which rows are in
    the last file, and how many; of a push source, that file has the rows in no epoch. `after`: only
    what has changed since that epoch. `infos`: what each of the files must be like. `final`: it is
    the flow's last epoch, and the flow is being stopped."""

    stage: Number
    group: Number
    epoch: EpochNumber
    after: EpochNumber | None
    files: list[tuple[str, str, bool]]
    extras: Extras
    held: list[tuple[Number, Number]]
    held_file: str
    infos: dict[str, FileInfo]
    final: bool


class NotStored(Message, frozen=True):
    """A task cannot be stored as it is after `epoch`; `missed`: it was past it already."""

    stage: Number
    group: Number
    epoch: EpochNumber
    reason: str
    missed: bool


# --- between sites ------------------------------------------------------------------------------


class Record(Message, frozen=True):
    """A record that all replicas of the sequencer have."""

    record: EpochRecord


class Pass(Message, frozen=True):
    """A record for the next replica of the sequencer in the chain."""

    record: EpochRecord


class RecordsAfter(Message, frozen=True):
    """Send me the records after this epoch; None: the latest."""

    epoch: EpochNumber | None


class JoinChain(Message, frozen=True):
    """I am to have a replica of the sequencer. With `has`, the number of the next epoch, I have
    one: pass your records on to me. Without it (-1), give me your state first. `joined_view` is the
    view in which I began to join."""

    has: EpochNumber
    joined_view: Number


class Chained(Message, frozen=True):
    """From now on my records go through you."""


class SequencerState(Message, frozen=True):
    """What a new replica of the sequencer begins with."""

    next_epoch: EpochNumber
    next_seq: Number
    finished: bool
    turn: Number
    cuts: list[Number]
    let_go: list[bool]
    history: list[EpochRecord]


class Blocks(Message, frozen=True):
    source: Number
    split: Number
    blocks: tuple[Block, ...]
    again: bool


class SplitState(Message, frozen=True):
    """A split has no more rows than those before `offset`: for ever, or for a while now."""

    source: Number
    split: Number
    ended: bool
    offset: Number


class SplitAt(Message, frozen=True):
    """Where the rows of a split are that come next, for a replica that would read on from there."""

    source: Number
    split: Number
    row: Number
    position: dict[str, Number]


class Bundle(Message, frozen=True):
    """All frames from one partition group to another in one epoch of an exchange. The body is the
    track of the watermark (`track` bytes), then the digest of each of the consumer's partitions'
    frames (`digests` bytes), then an Arrow record batch (nothing, if there are no rows)."""

    exchange: Number
    epoch: Number
    producer: Number
    consumer: Number
    joined_view: Number
    part: Number
    last: bool
    rows: Number
    track: Number
    digests: Number


Line = tuple[tuple[Number, Number, EpochNumber], ...]
"""By stage and partition group: see `holdfast.core.upstream.Line`."""


def line(found: Mapping[TaskId, Epoch]) -> Line:
    """As it is sent."""
    return tuple((*task, epoch) for task, epoch in found.items())


def from_line(said: Line) -> dict[TaskId, Epoch]:
    return {(StageId(s), GroupId(c)): Epoch(epoch) for s, c, epoch in said}


class Ack(msgspec.Struct, frozen=True, array_like=True):
    """See `AckArrived`."""

    exchange: Number
    producer: Number
    consumer: Number
    joined_view: Number
    received: EpochNumber
    credit: EpochNumber
    take: bool
    finished: EpochNumber
    checksum: Checksum
    levels: tuple[EpochNumber, ...] = ()
    lines: tuple[Line, ...] = ()


class Acks(Message, frozen=True):
    """All that a site has to acknowledge to another just now."""

    acks: list[Ack]


class AskLog(Message, frozen=True):
    """See `LogAsked`."""

    exchange: Number
    producer: Number
    consumer: Number
    joined_view: Number


class TellLog(Message, frozen=True):
    """See `LogTold`."""

    exchange: Number
    producer: Number
    consumer: Number
    joined_view: Number
    after: EpochNumber
    upto: EpochNumber
    credit: Number
    line: Line


class Delivered(Message, frozen=True):
    """A sink has taken everything up to `epoch`, and up to `durable` so that it outlives the site
    that wrote it; between that and `safe` there were no rows."""

    sink: Number
    epoch: EpochNumber
    durable: EpochNumber
    safe: EpochNumber


# --- handing a task over to a new replica ---------------------------------------------------------


class IngressExtras(TypedDict):
    offsets: dict[str, Number]
    positions: dict[str, dict[str, Number]]
    """Of splits whose readers need more than the offset."""
    mark: bytes
    push_readers: list[dict[str, EpochNumber]]
    pull_readers: list[str]
    queries: NotRequired[list[str]]
    """By whom each was fed; not in what was stored before queries were told apart."""


class EgressExtras(TypedDict):
    taken: EpochNumber
    durable: EpochNumber
    replayed_results: Number
    writer: dict[str, Any]
    incarnation: NotRequired[str]
    """By which the sink's store knows the flow."""


class Extras(TypedDict):
    """What a task knows besides its tables, kept bundles and held rows."""

    counts: tuple[Number, Number, Number, Number]
    ingress: IngressExtras | None
    egress: EgressExtras | None
    operator: dict[str, int] | None


class Gap(msgspec.Struct, frozen=True, array_like=True):
    """What is not kept for a consumer any more: see `holdfast.core.upstream.Gap`."""

    exchange: Number
    consumer: Number
    let_go: EpochNumber
    known: EpochNumber
    base: EpochNumber
    credit: Number
    line: Line


class HandOverBegin(Message, frozen=True):
    """The task's state after `epoch` follows; whatever came before of it is void."""

    stage: Number
    group: Number
    epoch: EpochNumber
    nbytes: Number
    """About how much will follow."""
    extras: Extras
    after: EpochNumber | None
    """Only what has changed after this epoch."""
    gaps: list[Gap]
    joined_view: Number = 0
    """Of the replica that it is for, and not for one before it at the same site."""


class HandOverState(Message, frozen=True):
    """Part of a table (Arrow IPC in the body); or keys that are not in it any more."""

    stage: Number
    group: Number
    table: str
    gone: bool = False


class HandOverKept(Message, frozen=True):
    """A bundle that the donor keeps for its consumers; the body is the bundle's."""

    stage: Number
    group: Number
    bundle: Bundle


class HandOverHeld(Message, frozen=True):
    """Rows that only the replicas of this task have (Arrow IPC): see `TaskRunner.held`."""

    stage: Number
    group: Number
    number: Number


class HandOverEnd(Message, frozen=True):
    stage: Number
    group: Number


# --- from the tasks that feed a source ----------------------------------------------------------


class PushBegin(Message, frozen=True):
    """The driver: I am about to push micro-batch `batch` of the query with this id (of a batch
    DataFrame: all of it, once more). `push` is a name that nobody has used before. Rows of pushes
    that began earlier and were not committed are void. Answered with "taken" if the flow has the
    micro-batch already."""

    source: Number
    query: str
    batch: Number
    push: str


class PushOpen(Message, frozen=True):
    """A task begins to hand over one partition of a push. It need not if the answer is "taken"."""

    source: Number
    push: str
    partition: Number
    attempt: Number


class PushRows(Message, frozen=True):
    """Rows (Arrow IPC stream in the body) of the partition opened before on this connection."""


class PushDone(Message, frozen=True):
    """The partition is complete."""


class PushCommit(Message, frozen=True):
    """The driver: the micro-batch of this push is complete and consists of these partitions, each
    as this attempt at it has sent it; take it, once. Rows of other attempts are void."""

    source: Number
    push: str
    partitions: tuple[tuple[Number, Number], ...]


class PushEnd(Message, frozen=True):
    """The driver: no batch will follow."""

    source: Number
    query: str


class PushTaken(Message, frozen=True):
    """To a pusher: what it sent last is held, and there is room for more. If it is not, because
    another site leads the ingress, `leader` is where that one listens."""

    ok: bool
    reason: str
    leader: tuple[str, int] | None = None


class PushBatch(Message, frozen=True):
    """The leading ingress to its other replicas: rows that are about to enter the flow (one Arrow
    IPC stream after another in the body), and where the feed stands after them. With the mark
    `more` it is only a part: it enters with the first push batch after it that has no such mark, or
    not at all. `query` is whose micro-batches these are."""

    source: Number
    number: Number
    marks: dict[str, EpochNumber]
    sizes: list[Number]
    pull_reader: str = ""
    query: str = ""


class PushCounted(Message, frozen=True):
    """The leading ingress to a new replica: you have all push batches that have entered, and none
    enters any more that you do not have."""

    source: Number


class PushHas(Message, frozen=True):
    """A replica of an ingress to the leading one: I have so many push batches; `again`: what
    follows may have been lost."""

    source: Number
    number: Number
    again: bool


# --- from those who read a sink -----------------------------------------------------------------


class Where(Message, frozen=True):
    """A reader to a control: which sites have this sink?"""

    sink: str


class There(Message, frozen=True):
    """A control to a reader: the number of the sink's stage, the schema of its rows (Arrow IPC),
    and where the sites listen that can be asked, the likeliest first. `reason` if it cannot say."""

    reason: str
    stage: Number = 0
    schema: bytes = b""
    addresses: list[tuple[str, int]] = []


class Ask(Message, frozen=True):
    """A reader to the site that leads a sink's egress: see `SinkWriter.answer`."""

    sink: Number
    request: dict[str, str | int]


class Answer(Message, frozen=True):
    """To a reader: rows (Arrow IPC streams of these sizes in the body) and plain values. If not
    `ok`, why not; and where the site listens that leads the egress, if this one does not."""

    ok: bool
    reason: str = ""
    leader: tuple[str, int] | None = None
    values: dict[str, EpochNumber] = {}
    sizes: list[Number] = []


ReaderWord = Literal["reading", "idle", "behind", "forgotten"]


class Notes(Message, frozen=True):
    """The leading egress to its other replicas: up to which epoch each of its readers has
    everything, of which incarnation, and whether it reads on or was dropped (see `ReaderState`);
    how many of them are yet to come, and what was let go."""

    sink: Number
    number: Number
    readers: dict[str, tuple[EpochNumber, str, ReaderWord]]
    awaited: Number
    durable: EpochNumber


class NotesKept(Message, frozen=True):
    """A replica of an egress to the leading one: I have those notes."""

    sink: Number
    number: Number


_decoder = msgspec.msgpack.Decoder(type=Union[tuple(Message.__subclasses__())])  # noqa: UP007
_greetings = msgspec.msgpack.Decoder(type=Challenge | Hello | Welcome)
_encoder = msgspec.msgpack.Encoder()

_CONTROLLERS_ONLY = (NewView, Start, CatchUp, Retain, Drain, Pause, Dismiss, Recorded, Store)
_FEEDERS_ONLY = (PushBegin, PushOpen, PushRows, PushDone, PushCommit, PushEnd)
ORDERS = (*_CONTROLLERS_ONLY, Fenced)
"""What a leading control tells sites. All of it carries the term of that leader."""
READER = "reader"
PULSE = "pulse"
"""A thread of a site, which says that the site lives while that is at work."""
SERVER = "server"
"""Whoever was dialled and is no site: a controller. Nobody else gives orders."""


def decode(header: bytes | memoryview, greeting: bool = False) -> Message:
    """One of the messages above; with `greeting` one of the handshake's."""
    try:
        return (_greetings if greeting else _decoder).decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a header that is no message: {error}") from error


def check_lengths(body: int, header: int, greeting: bool = False) -> None:
    """Whether a message of this size is taken at all."""
    if greeting and (body or header > HANDSHAKE_BYTES_MAX):
        raise ProtocolError("a message before the handshake is too long")
    if header == 0 or header > HEADER_BYTES_MAX or body > BODY_BYTES_MAX:
        raise ProtocolError(f"a message of {header} + {body} bytes")


def check_speaker(role: str, message: Message) -> None:
    """Whether it is for someone in this role to say that to a site. A controller is a "server":
    the one side that a site dials and that is no site."""
    expected: tuple[str, ...] = ("site",)
    if isinstance(message, _CONTROLLERS_ONLY):
        expected = (SERVER,)
    elif isinstance(message, _FEEDERS_ONLY):
        expected = ("pusher",)
    elif isinstance(message, Ask):
        expected = (READER,)
    elif isinstance(message, Fenced):
        expected = ("site", SERVER)
    if role not in expected:
        raise ProtocolError(f"{type(message).__name__} is not for a {role} to say")


def term_of(message: Message) -> int | None:
    """The term of the leader that gives an order; None if it is no order."""
    if isinstance(message, NewView):
        return message.view.term
    return getattr(message, "term", None) if isinstance(message, ORDERS) else None


def encode(message: Message, body_length: int = 0) -> bytes:
    """What goes before the body. Nobody takes a message that is too long, however often it is
    sent, so it is not sent at all."""
    header = _encoder.encode(message)
    if len(header) > HEADER_BYTES_MAX or body_length > BODY_BYTES_MAX:
        raise FlowError(
            f"{type(message).__name__} has {len(header)} + {body_length} bytes, and a message has "
            f"at most {HEADER_BYTES_MAX} + {BODY_BYTES_MAX}",
            hint="are there rows of hundreds of megabytes, or epochs of that size?",
        )
    return PREFIX.pack(body_length, len(header)) + header


def fields(message: Message) -> dict[str, Any]:
    """A message as keyword arguments."""
    return {name: getattr(message, name) for name in message.__struct_fields__}


def proof(secret: bytes, *parts: bytes | str | int) -> bytes:
    """What only someone with the secret can say about these parts."""
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        mac.update(len(data).to_bytes(4, "little") + data)
    return mac.digest()


def incarnation(secret: bytes) -> str:
    """The name of one life of a flow: one that is started again has another secret."""
    return hashlib.sha256(secret).hexdigest()[:12]


def hello(secret: bytes, challenge: Challenge, nonce: bytes, role: str, id_: int) -> Hello:
    """What a client answers to a challenge."""
    return Hello(role, id_, nonce, proof(secret, "client", challenge.nonce, nonce, role, id_))


def check_welcome(secret: bytes, challenge: Challenge, nonce: bytes, welcome: Welcome) -> None:
    """What a client makes of the server's own proof."""
    expected = proof(secret, "server", nonce, challenge.nonce)
    if not hmac.compare_digest(expected, welcome.proof):
        raise ProtocolError("the server does not know the flow's secret")


def is_wildcard(host: str) -> bool:
    """Whether a listening address stands for all of the machine's."""
    return host in ("", "0.0.0.0", "::")
