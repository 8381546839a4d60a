"""Nexmark: an auction site as a stream of persons, auctions and bids, and queries over it.

The events follow the public rules of the Nexmark generator: of 50 consecutive events one is a new
person, three are new auctions and 46 are bids; event times advance at a fixed rate; half of the
bids go to a hot auction; three quarters of the bids and of the auctions come from a hot person, and
the rest from persons that are active or about to be. Every event is a function of seed and event
number alone, so any number of readers can read any split from any offset.

The queries are Nexmark's 5, 7 and 8, and one over sessions. Their results depend on the events
alone, not on the order in which splits and sources are read: no row is late as long as the sources
keep their order, or the windows wait for the maximum delay of events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from holdfast import functions as F
from holdfast.api.graph import Flow
from holdfast.api.streams import Stream
from holdfast.connectors.sinks import Sink, discard
from holdfast.connectors.sources import Generator, Source
from holdfast.engine.expressions import col, lit

CYCLE = 50
"""Events per cycle: one person, three auctions and the rest bids, in this order."""
PERSON, AUCTION, BID = 0, 1, 2
SHARE = {PERSON: 1, AUCTION: 3, BID: 46}
_FIRST_IN_CYCLE = {PERSON: 0, AUCTION: 1, BID: 4}
FIRST_ID = 1_000
FIRST_CATEGORY = 10
CATEGORIES = 5
START_MS = 1_700_000_000_000
"""The time of the first event."""

HOT_EVERY = 100
"""One of this many consecutive auctions is hot; so are one bidder and one seller."""
HOT_AUCTION_RATIO = 2
HOT_BIDDER_RATIO = 4
HOT_SELLER_RATIO = 4
"""An event refers to a hot one with a probability of 1 - 1 / ratio."""
IN_FLIGHT = 100
"""Number of auctions that still get bids."""
ACTIVE_PERSONS = 1_000
LEAD = 10
"""Maximum number of future persons or auctions to which an event may refer."""

PERSON_SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("name", pa.string()),
        ("city", pa.string()),
        ("state", pa.string()),
        ("ts", pa.int64()),
    ]
)
AUCTION_SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("seller", pa.int64()),
        ("category", pa.int64()),
        ("initial_bid", pa.int64()),
        ("reserve", pa.int64()),
        ("expires", pa.int64()),
        ("ts", pa.int64()),
    ]
)
BID_SCHEMA = pa.schema(
    [("auction", pa.int64()), ("bidder", pa.int64()), ("price", pa.int64()), ("ts", pa.int64())]
)
SCHEMAS = {PERSON: PERSON_SCHEMA, AUCTION: AUCTION_SCHEMA, BID: BID_SCHEMA}
EVENT_SCHEMA = pa.unify_schemas(
    [pa.schema([("kind", pa.int8()), ("ts", pa.int64())]), *SCHEMAS.values()]
)
"""The columns of all three kinds; those of the other kinds are null."""
NAMES = {PERSON: "persons", AUCTION: "auctions", BID: "bids"}

_PERSON_NAMES = pa.array(
    [
        f"{first} {last}"
        for first in ("Ada", "Alan", "Barbara", "Donald", "Edsger", "Frances", "Grace", "Leslie")
        for last in ("Adler", "Brandt", "Castro", "Dietz", "Eklund", "Garcia", "Huber", "Ivanova")
    ]
)
_CITIES = pa.array(["Bend", "Boise", "Cheyenne", "Kent", "Phoenix", "Portland", "Seattle"])
_STATES = pa.array(["AZ", "CA", "ID", "OR", "WA", "WY"])

_STRIDE = 953
"""A prime, so that it is coprime to the size of every shuffled group of events."""


@dataclass(frozen=True)
class Nexmark:
    """The events of one run: `cycles` of 50 events (None: endless), with `rate` events per second
    of event time. With `group`, the events of that many cycles at a time are shuffled.

    The sources distribute events over their `splits` in turn. All splits have the same length, and
    no group is cut at the end, so `cycles` must be a multiple of `splits` and of `group`.

    >>> events = Nexmark(cycles=4)
    >>> [events.table(kind).num_rows for kind in (PERSON, AUCTION, BID)]
    [4, 12, 184]
    """

    cycles: int | None = None
    seed: int = 1
    rate: int = 10_000
    group: int = 0
    splits: int = 1

    def __post_init__(self) -> None:
        if self.splits < 1 or self.rate < 1 or self.group < 0:
            raise ValueError("splits and rate must be positive, and group not negative")
        if self.group % _STRIDE == 0 and self.group:
            raise ValueError(f"group must not be a multiple of {_STRIDE}")
        for parts in (self.splits, self.group):
            if self.cycles is not None and parts and self.cycles % parts:
                raise ValueError(f"cycles must be a multiple of {parts}, not {self.cycles}")

    @property
    def disorder_ms(self) -> int:
        """How far an event's time may be behind that of an earlier one; 0 if they are in order."""
        return -(-self.group * CYCLE * 1_000 // self.rate)

    # --- sources ----------------------------------------------------------------------------------

    def source(self, kind: int, pace: float | None = None) -> Source:
        """Return a source of the events of one kind, at a `pace` in events of all kinds per second
        of wall-clock time, or as fast as the flow reads them."""
        rows = None if self.cycles is None else self.cycles * SHARE[kind]
        rate = None if pace is None else pace * SHARE[kind] / CYCLE
        make = partial(self._read, kind)
        return Generator(make, SCHEMAS[kind], rows=rows, rate=rate, splits=self.splits)

    def combined(self, pace: float | None = None) -> Source:
        """Return a source of all events, with a column for their kind."""
        rows = None if self.cycles is None else self.cycles * CYCLE
        make = partial(self._read, None)
        return Generator(make, EVENT_SCHEMA, rows=rows, rate=pace, splits=self.splits)

    def _read(self, kind: int | None, split: int, offset: int, n: int) -> pa.RecordBatch:
        places = np.arange(offset, offset + n) * self.splits + split
        return self.events(places) if kind is None else self.rows(kind, places)

    def table(self, kind: int) -> pa.Table:
        """Return all events of one kind in the order of a source with one split."""
        assert self.cycles is not None, "the events are endless"
        places = np.arange(self.cycles * SHARE[kind])
        return pa.Table.from_batches([self.rows(kind, places)])

    # --- events -----------------------------------------------------------------------------------

    def events(self, places: np.ndarray) -> pa.RecordBatch:
        """Return the events at these positions in the order of all events."""
        number = self._shuffled(places, CYCLE, salt=0)
        offset = number % CYCLE
        kinds = np.searchsorted(list(_FIRST_IN_CYCLE.values()), offset, "right") - 1
        parts = []
        rows = [np.flatnonzero(kinds == kind) for kind in SCHEMAS]
        for kind, mine in zip(SCHEMAS, rows, strict=True):
            batch = self._made(kind, number[mine])
            columns = {n: batch.column(n) for n in batch.schema.names}
            columns["kind"] = pa.array(np.full(mine.size, kind, np.int8))
            absent = [n for n in EVENT_SCHEMA.names if n not in columns]
            columns |= {n: pa.nulls(mine.size, EVENT_SCHEMA.field(n).type) for n in absent}
            arrays = [columns[n] for n in EVENT_SCHEMA.names]
            parts.append(pa.RecordBatch.from_arrays(arrays, schema=EVENT_SCHEMA))
        return pa.concat_batches(parts).take(pa.array(np.argsort(np.concatenate(rows))))

    def rows(self, kind: int, places: np.ndarray) -> pa.RecordBatch:
        """Return the events of one kind at these positions in the order of that kind."""
        share = SHARE[kind]
        nth = self._shuffled(places, share, salt=1 + kind)
        return self._made(kind, nth // share * CYCLE + _FIRST_IN_CYCLE[kind] + nth % share)

    def _shuffled(self, places: np.ndarray, per_cycle: int, salt: int) -> np.ndarray:
        """Return the number of the event at each position: every group has a different order."""
        size = self.group * per_cycle
        if size == 0:
            return places
        group, at = np.divmod(places, size)
        turn = _random(self.seed, salt, group) % np.uint64(size)
        return group * size + (at * _STRIDE + turn.astype(np.int64)) % size

    def _made(self, kind: int, number: np.ndarray) -> pa.RecordBatch:
        make = {PERSON: self._persons, AUCTION: self._auctions, BID: self._bids}[kind]
        columns = make(number) | {"ts": self._time(number)}
        arrays = [pa.array(columns[f.name], f.type) for f in SCHEMAS[kind]]
        return pa.RecordBatch.from_arrays(arrays, schema=SCHEMAS[kind])

    def _time(self, number: np.ndarray) -> np.ndarray:
        return START_MS + number * 1_000 // self.rate

    def _persons(self, number: np.ndarray) -> dict[str, np.ndarray | pa.Array]:
        return {
            "id": FIRST_ID + _last_person(number),
            "name": _PERSON_NAMES.take(pa.array(self._below(len(_PERSON_NAMES), 10, number))),
            "city": _CITIES.take(pa.array(self._below(len(_CITIES), 11, number))),
            "state": _STATES.take(pa.array(self._below(len(_STATES), 12, number))),
        }

    def _auctions(self, number: np.ndarray) -> dict[str, np.ndarray | pa.Array]:
        initial = self._price(22, number)
        horizon_ms = IN_FLIGHT * CYCLE // SHARE[AUCTION] * 1_000 // self.rate
        return {
            "id": FIRST_ID + _last_auction(number),
            "seller": FIRST_ID + self._person(number, HOT_SELLER_RATIO, hot=0, salt=20),
            "category": FIRST_CATEGORY + self._below(CATEGORIES, 23, number),
            "initial_bid": initial,
            "reserve": initial + self._price(24, number),
            "expires": self._time(number) + 1 + self._below(max(2 * horizon_ms, 1), 25, number),
        }

    def _bids(self, number: np.ndarray) -> dict[str, np.ndarray | pa.Array]:
        last = _last_auction(number)
        oldest = np.maximum(last - IN_FLIGHT, 0)
        any_ = oldest + self._below(last - oldest + 1 + LEAD, 30, number)
        is_hot = self._below(HOT_AUCTION_RATIO, 31, number) > 0
        return {
            "auction": FIRST_ID + np.where(is_hot, last // HOT_EVERY * HOT_EVERY, any_),
            "bidder": FIRST_ID + self._person(number, HOT_BIDDER_RATIO, hot=1, salt=32),
            "price": self._price(34, number),
        }

    def _person(self, number: np.ndarray, ratio: int, hot: int, salt: int) -> np.ndarray:
        """Return an active person, mostly the hot one, which differs for sellers and bidders."""
        persons = _last_person(number) + 1
        active = np.minimum(persons, ACTIVE_PERSONS)
        any_ = persons - active + self._below(active + LEAD, salt, number)
        is_hot = self._below(ratio, salt + 1, number) > 0
        return np.where(is_hot, (persons - 1) // HOT_EVERY * HOT_EVERY + hot, any_)

    def _price(self, salt: int, number: np.ndarray) -> np.ndarray:
        """Return prices in cents: log-uniform from one to a million dollars."""
        even = (_random(self.seed, salt, number) >> np.uint64(11)) * 2.0**-53
        return np.rint(10.0 ** (even * 6) * 100).astype(np.int64)

    def _below(self, limit: int | np.ndarray, salt: int, number: np.ndarray) -> np.ndarray:
        """Return a number from 0 to `limit` - 1 for each event."""
        drawn = _random(self.seed, salt, number) % np.asarray(limit, np.uint64)
        return drawn.astype(np.int64)


def _last_person(number: np.ndarray) -> np.ndarray:
    """Return the number of persons before the newest one at the time of an event."""
    return number // CYCLE


def _last_auction(number: np.ndarray) -> np.ndarray:
    """Return the same for auctions. A person precedes the auctions of its cycle."""
    cycle, offset = np.divmod(number, CYCLE)
    return cycle * SHARE[AUCTION] + np.clip(offset - 1, -1, SHARE[AUCTION] - 1)


def _random(seed: int, salt: int, number: np.ndarray) -> np.ndarray:
    """Return 64 random bits for each number, by SplitMix64's finalizer."""
    with np.errstate(over="ignore"):
        word = number.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        word += np.uint64((seed * 0xD1342543DE82EF95 + salt * 0x2545F4914F6CDD1D) % 2**64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            word ^= word >> np.uint64(shift)
            word *= np.uint64(factor)
        return word ^ (word >> np.uint64(31))


# --- queries --------------------------------------------------------------------------------------

SIZE_MS = 10_000
EVERY_MS = 2_000
BURST = 2
"""Minimum number of a person's bids in one period that starts a session."""
TIMEOUT_MS = 20_000


Streams = Mapping[int, Stream]
"""The streams of events by kind, from one source or three."""


def q5(events: Streams, lateness: int = 0) -> Stream:
    """Hot items: the auctions with the most bids of every sliding window, and their number."""
    sliding = events[BID].key_by("auction").window(time=SIZE_MS, every=EVERY_MS, lateness=lateness)
    counted = sliding.agg(num=F.count())
    counts = counted.select("window_start", "auction", "num", at=col("window_start"))
    highest = counts.key_by("at").window(time=EVERY_MS).agg(most=F.max("num"))
    most = highest.select("window_start", "at", "most")
    both = counts.key_by("at").join(most.key_by("at"), within=EVERY_MS)
    return both.filter(col("num") == col("most")).select("auction", "num", starttime=col("at"))


def q7(events: Streams, lateness: int = 0) -> Stream:
    """Highest bid: the bids with the highest price of a tumbling window. As in Nexmark, a bid
    exactly at the end of a window still counts if it has that price."""
    each = events[BID].key_by("auction").window(time=SIZE_MS, lateness=lateness)
    tops = each.agg(price=F.max("price")).with_columns(all=lit(0))
    windows = tops.key_by("all").window(time=SIZE_MS).agg(price=F.max("price"))
    highest = windows.select("window_start", "window_end", "price")
    both = events[BID].key_by("price").join(highest.key_by("price"), within=SIZE_MS)
    inside = (col("ts") >= col("window_start")) & (col("ts") <= col("window_end"))
    return both.filter(inside).select("auction", "bidder", "price", "ts")


def q8(events: Streams, lateness: int = 0) -> Stream:
    """New users: persons who opened an auction in the tumbling window in which they registered."""
    registered = events[PERSON].key_by("id", "name").window(time=SIZE_MS, lateness=lateness)
    opened = events[AUCTION].key_by("seller").window(time=SIZE_MS, lateness=lateness)
    persons = registered.agg(n=F.count()).select("id", "name", "window_start")
    sellers = opened.agg(n=F.count()).select("window_start", id=col("seller"))
    both = persons.key_by("id", "window_start").join(
        sellers.key_by("id", "window_start"), within=SIZE_MS
    )
    return both.select("id", "name", starttime=col("window_start"))


def sessions(events: Streams, lateness: int = 0) -> Stream:
    """Sessions of a bidder: from a period with several bids to the next one with a single bid, if
    it follows within the timeout. Windows give a key's rows in the order of their times, so the row
    that ends a session does not depend on the order of the bids."""
    periods = events[BID].key_by("bidder").window(time=EVERY_MS, lateness=lateness)
    emit = {
        "bidder": col("bidder"),
        "begun": F.at_start("window_start"),
        "ended": col("window_start"),
        "bids": F.at_start("bids"),
    }
    bursts = (
        periods.agg(bids=F.count())
        .key_by("bidder")
        .spans(start=col("bids") >= BURST, end=col("bids") == 1, emit=emit, timeout=TIMEOUT_MS)
    )
    # An end on the same row that makes the session time out still ends it.
    return bursts.filter(col("ended") - col("begun") <= TIMEOUT_MS)


QUERIES: dict[str, Callable[[Streams, int], Stream]] = {
    "q5": q5,
    "q7": q7,
    "q8": q8,
    "sessions": sessions,
}
READS = {"q5": [BID], "q7": [BID], "q8": [PERSON, AUCTION], "sessions": [BID]}
"""The kinds of events that each query reads."""


def nexmark_flow(
    query: str,
    events: Nexmark,
    sink: Sink,
    *,
    sources: int = 1,
    lateness: int | None = None,
    pace: float | None = None,
) -> Flow:
    """Return the flow of a query over one source of all events, or over three.

    With three, the flow also has the sources that the query does not read, and they count for event
    time. The windows wait for `lateness`, by default the maximum delay of events.
    """
    flow, reads = Flow(query), READS[query]
    if sources == 1:
        streams = _combined(flow, events, reads, pace)
    else:
        streams = _separate(flow, events, pace)
    wait = events.disorder_ms if lateness is None else lateness
    QUERIES[query](streams, wait).sink("out", sink)
    if sources != 1:
        for kind in [k for k in streams if k not in reads]:
            streams[kind].sink(f"other {NAMES[kind]}", discard())
    return flow


def _combined(flow: Flow, events: Nexmark, kinds: Iterable[int], pace: float | None) -> Streams:
    stream = flow.source("events", events.combined(pace), event_time="ts")
    return {k: stream.filter(col("kind") == k).select(*SCHEMAS[k].names) for k in kinds}


def _separate(flow: Flow, events: Nexmark, pace: float | None) -> Streams:
    return {k: flow.source(n, events.source(k, pace), event_time="ts") for k, n in NAMES.items()}
