"""What the Nexmark queries must give, twice: as plain loops over the rows, and as Spark SQL.

Neither knows of splits, epochs or watermarks, and neither uses anything of the engine: no row of
the tests' inputs is late, so the results are a function of the rows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from holdfast.lab.workloads.nexmark import BURST, EVERY_MS, SIZE_MS, TIMEOUT_MS

Row = dict[str, object]
Rows = Counter[tuple]
"""Rows as tuples, and how often each occurs."""

COLUMNS = {
    "q5": ["auction", "num", "starttime"],
    "q7": ["auction", "bidder", "price", "ts"],
    "q8": ["id", "name", "starttime"],
    "sessions": ["bidder", "begun", "ended", "bids"],
}


def rows_of(query: str, rows: Iterable[Row]) -> Rows:
    """Result rows in the form in which they are compared."""
    return Counter(tuple(row[name] for name in COLUMNS[query]) for row in rows)


def q5(persons: list[Row], auctions: list[Row], bids: list[Row]) -> Iterable[tuple]:
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for bid in bids:
        newest = bid["ts"] - bid["ts"] % EVERY_MS
        for start in range(newest, bid["ts"] - SIZE_MS, -EVERY_MS):
            counts[start][bid["auction"]] += 1
    for start, by_auction in counts.items():
        most = max(by_auction.values())
        yield from ((a, n, start) for a, n in by_auction.items() if n == most)


def q7(persons: list[Row], auctions: list[Row], bids: list[Row]) -> Iterable[tuple]:
    highest: dict[int, int] = {}
    for bid in bids:
        start = bid["ts"] - bid["ts"] % SIZE_MS
        highest[start] = max(highest.get(start, 0), bid["price"])
    for bid in bids:
        for start, price in highest.items():
            if start <= bid["ts"] <= start + SIZE_MS and bid["price"] == price:
                yield bid["auction"], bid["bidder"], bid["price"], bid["ts"]


def q8(persons: list[Row], auctions: list[Row], bids: list[Row]) -> Iterable[tuple]:
    opened = {(a["seller"], a["ts"] - a["ts"] % SIZE_MS) for a in auctions}
    for person in persons:
        start = person["ts"] - person["ts"] % SIZE_MS
        if (person["id"], start) in opened:
            yield person["id"], person["name"], start


def sessions(persons: list[Row], auctions: list[Row], bids: list[Row]) -> Iterable[tuple]:
    periods: Counter[tuple[int, int]] = Counter()
    for bid in bids:
        periods[bid["bidder"], bid["ts"] - bid["ts"] % EVERY_MS] += 1
    begun: dict[int, tuple[int, int]] = {}
    for (bidder, start), n in sorted(periods.items()):
        if n >= BURST:
            begun[bidder] = start, n
        elif bidder in begun:
            since, n = begun.pop(bidder)
            if start - since <= TIMEOUT_MS:
                yield bidder, since, start, n


MODELS: dict[str, Callable[..., Iterable[tuple]]] = {
    "q5": q5,
    "q7": q7,
    "q8": q8,
    "sessions": sessions,
}


def expected(query: str, persons: list[Row], auctions: list[Row], bids: list[Row]) -> Rows:
    return Counter(MODELS[query](persons, auctions, bids))


SQL = {
    "q5": f"""
        with hops as (
            select auction, ts - ts % {EVERY_MS} - hop * {EVERY_MS} starttime
            from bids lateral view explode(sequence(0, {SIZE_MS // EVERY_MS - 1})) as hop
        ), counts as (
            select auction, starttime, count(*) num from hops group by auction, starttime
        ), most as (
            select starttime, max(num) num from counts group by starttime
        )
        select auction, num, starttime from counts join most using (starttime, num)
    """,
    "q7": f"""
        with highest as (
            select ts - ts % {SIZE_MS} starttime, max(price) price from bids group by 1
        )
        select auction, bidder, b.price, ts from bids b join highest h
        on b.price = h.price and ts between starttime and starttime + {SIZE_MS}
    """,
    "q8": f"""
        select p.id, p.name, p.ts - p.ts % {SIZE_MS} starttime from persons p
        left semi join auctions a
        on p.id = a.seller and p.ts - p.ts % {SIZE_MS} = a.ts - a.ts % {SIZE_MS}
    """,
    "sessions": f"""
        with periods as (
            select bidder, ts - ts % {EVERY_MS} start, count(*) n from bids group by 1, 2
        ), marked as (
            select *, lag(start) over key begun, lag(n) over key bids from periods
            where n >= {BURST} or n = 1
            window key as (partition by bidder order by start)
        )
        select bidder, begun, start ended, bids from marked
        where n = 1 and bids >= {BURST} and start - begun <= {TIMEOUT_MS}
    """,
}
