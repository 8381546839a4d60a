"""Flows between Kafka topics, on a real broker: nothing lost, nothing twice, whoever is killed."""

import datetime
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import TopicPartition
from pyspark.sql import SparkSession

from holdfast import Flow, FlowError, HostError, InputError, OperatorError, SinkRewoundError, col
from holdfast import functions as F
from holdfast.api.options import Checkpoint, Options
from holdfast.connectors.kafka import sink, source
from holdfast.connectors.kafka.formats import Json
from holdfast.connectors.kafka.ledger import Ledger
from holdfast.connectors.sinks import Authority
from holdfast.connectors.sources import SplitReader
from holdfast.control.run import Run, start
from holdfast.lab.chaos.kafka import Broker
from holdfast.protections import none, pairs
from holdfast.sinks import discard
from holdfast.sinks import kafka as kafka_sink
from holdfast.sources import generator, rows, spark_stream
from holdfast.sources import kafka as kafka_source
from tests.support.lines import numbers
from tests.support.pages import pages_that_need, run_page
from tests.support.runs import exists, kill, pids, replicas, until, until_protected
from tests.support.topics import Kafka, Transactions

SCHEMA = numbers(0, 0, 0).schema
PATIENCE_S = 60


def plain(first: int, n: int) -> list[dict]:
    return numbers(0, first, n).to_pylist()


def totals(flow: Flow, made: object, out: object, **more: object) -> Flow:
    """Every row gives its key's count and sum so far."""
    flow.source("in", made, **more).key_by("k").agg(t=F.sum("v"), n=F.count()).sink("out", out)
    return flow


def expected(k: np.ndarray, v: np.ndarray) -> list[tuple[int, float, int]]:
    """What `totals` gives for rows in this order."""
    found, sums, counts = [], Counter(), Counter()
    for key, value in zip(k.tolist(), v.tolist(), strict=True):
        counts[key] += 1
        sums[key] = sums[key] + value
        found.append((key, float(sums[key]), counts[key]))
    return found


def found(kafka: Kafka, topic: str) -> list[tuple[int, float, int]]:
    return [(r["k"], r["t"], r["n"]) for r in kafka.rows(topic)]


# --- killed, stopped, away ----------------------------------------------------------------------


class Load:
    """Puts rows on both partitions of a topic until it is told to stop. A key is in one of them, so
    what a flow makes of it does not depend on how they interleave."""

    def __init__(self, kafka: Kafka, topic: str, first: int = 0) -> None:
        self.rows = first
        self._lines = [Transactions(kafka, topic, p) for p in (0, 1)]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(0.01):
            made = plain(self.rows, 200)
            for partition, line in enumerate(self._lines):
                line.put([r for r in made if r["k"] % 2 == partition])
            self.rows += 200

    def stop(self) -> int:
        self._stopped.set()
        self._thread.join()
        return self.rows


@pytest.fixture
def load(topics: Kafka) -> Iterator[Callable[..., Load]]:
    made = []

    def begin(topic: str, first: int = 0) -> Load:
        made.append(Load(topics, topic, first))
        return made[-1]

    yield begin
    for one in made:
        one.stop()


def until_taken(run: Run, rows: int) -> None:
    def taken() -> bool:
        assert not run.ended(0), run.error
        return run.status()["rows_in"] >= rows

    until(taken, f"{rows} rows are taken")


def finish(run: Run, load: Load, topics: Kafka, out: str) -> None:
    """All that was committed has come in, and what came out is right, each key's in its order."""
    rows = load.stop()
    until_taken(run, rows)
    run.stop(timeout=PATIENCE_S)
    assert run.state == "done" and sum(r.rows for r in run.records()) == rows
    made = numbers(0, 0, rows)
    wanted = expected(made["k"].to_numpy(), made["v"].to_numpy())
    got = found(topics, out)
    assert len(got) == rows
    assert sorted(got) == sorted(wanted), "each once, and each right"


def test_sites_are_killed_between_two_topics(topics: Kafka, load, kept) -> None:
    """The records' offsets have gaps, and some records are not committed. The sequencer and an
    ingress die, and the leader of the egress in the middle of whatever it does."""
    into, out = topics.create(2), topics.create()
    flow = Flow("between", protect=pairs())
    made = kafka_source(topics.servers, into, schema=SCHEMA)
    totals(flow, made, kafka_sink(topics.servers, out, key="k", linger=0.05))
    written = load(into)
    run = flow.start(sites=3, partitions=6)
    kept.append(run)
    for victim in ("in", "out"):
        until_protected(run, 3)
        until_taken(run, run.status()["rows_in"] + 1_000)
        kill(run, replicas(run)[victim, 0][0])
    until_protected(run, 3)
    finish(run, written, topics, out)


def test_the_leader_of_the_egress_is_killed_and_another_sleeps(topics: Kafka, kept) -> None:
    """At random moments. The one that slept wakes up and believes that it leads."""
    out = topics.create()
    flow = Flow("egress", protect=pairs())
    to = kafka_sink(topics.servers, out, linger=0.02)
    totals(flow, generator(numbers, SCHEMA, rate=5_000), to)
    run = flow.start(sites=3, partitions=4, options=Options(lease=0.7))
    kept.append(run)
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    for _ in range(2):
        until_protected(run, 3)
        time.sleep(moments.random() * 0.2)
        kill(run, replicas(run)["out", 0][0])
    until_protected(run, 3)
    sleeper = replicas(run)["out", 0][0]
    pid = pids(run)[sleeper]
    time.sleep(moments.random() * 0.2)
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: sleeper in run.status()["dead"], "the sleeper is declared dead")
        until_taken(run, run.status()["rows_in"] + 2_000)
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: not exists(pid), "the sleeper leaves")
    until_taken(run, run.status()["rows_in"] + 2_000)
    run.stop(timeout=PATIENCE_S)
    total = sum(r.rows for r in run.records())
    made = numbers(0, 0, total)
    wanted = expected(made["k"].to_numpy(), made["v"].to_numpy())
    assert found(topics, out) == wanted, "all of them, each once, in order"


def test_the_broker_is_killed_and_comes_back(topics: Kafka, broker: Broker, load, kept) -> None:
    into, out = topics.create(2), topics.create()
    flow = Flow("away", protect=pairs())
    made = kafka_source(topics.servers, into, schema=SCHEMA)
    totals(flow, made, kafka_sink(topics.servers, out, linger=0.05))
    written = load(into)
    run = flow.start(sites=2, partitions=4)
    kept.append(run)
    until_protected(run, 2)
    until_taken(run, 1_000)
    before = written.stop()
    broker.kill()
    time.sleep(1)
    broker.start()
    again = load(into, before)
    until_taken(run, before + 1_000)
    finish(run, again, topics, out)


# --- where reading begins and ends --------------------------------------------------------------


def read_all(reader: SplitReader, rows_max: int = 1_000) -> list[dict]:
    made: list[dict] = []
    deadline = time.monotonic() + PATIENCE_S
    while (batch := reader.read(rows_max)) is not None:
        made += batch.to_pylist()
        assert time.monotonic() < deadline, f"only {len(made)} rows"
        if not batch.num_rows:
            time.sleep(0.01)
    reader.close()
    return made


def gappy(topics: Kafka) -> tuple[str, list[dict]]:
    """A topic with aborted records between the others and markers at its end, and its rows."""
    topic, made = topics.create(), []
    line = Transactions(topics, topic, 0)
    for at in range(0, 60, 4):
        line.put(plain(at, 4))
        made += plain(at, 4)
    return topic, made


def test_a_row_is_found_again_by_its_position(topics: Kafka) -> None:
    topic, wanted = gappy(topics)
    made = kafka_source(topics.servers, topic, schema=SCHEMA, end="latest")
    made = made.resolved(made.resolve(2))
    reader, at = made.open(0), 0
    while at < 60:
        before = reader.position()
        batch = reader.read(7)
        if batch.num_rows:
            row = at + at // 7 % batch.num_rows
            again = read_all(made.open(0, row, before))
            assert [{n: r[n] for n in ("k", "v")} for r in again] == wanted[row:]
        at += batch.num_rows
    assert read_all(reader) == []


def test_where_it_starts_and_what_records_have(topics: Kafka) -> None:
    topic = topics.create(2)
    topics.fill(topic, plain(0, 10), 0)
    topics.fill(topic, plain(10, 5), 1)
    time.sleep(0.01)
    now = datetime.datetime.fromtimestamp(time.time_ns() // 10**6 / 1e3, datetime.UTC)
    topics.fill(topic, plain(15, 5), 1)

    def begins(start: object) -> list[int]:
        made = kafka_source(topics.servers, topic, schema=SCHEMA, start=start)
        return made.resolve(2)["begins"]

    assert begins("earliest") == [0, 0] and begins("latest") == [10, 10]
    assert begins(now) == [10, 5] and begins({0: 3, 1: 10}) == [3, 10]
    for bad in ({0: 3}, {0: 3, 1: 11}, {0: 0, 1: 0, 2: 0}):
        with pytest.raises(FlowError, match="partition"):
            begins(bad)
    with pytest.raises(FlowError, match="topic 'nowhere' does not exist"):
        kafka_source(topics.servers, "nowhere", schema=SCHEMA).resolve(1)
    made = kafka_source(
        topics.servers,
        topic,
        format="bytes",
        start={0: 0, 1: 8},
        end="latest",
        key="key",
        partition="p",
        offset="o",
        timestamp="at",
    )
    made = made.resolved(made.resolve(1))
    got = read_all(made.open(1), rows_max=1)
    assert [(r["p"], r["o"], r["key"]) for r in got] == [(1, 8, None), (1, 9, None)]
    assert [msgspec.json.decode(r["value"]) for r in got] == plain(18, 2)
    assert all(r["at"] >= now for r in got)


def test_nobody_answers() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "ANSWER_S_MAX", 0.5)
        with pytest.raises(HostError, match=r"no broker at 127\.0\.0\.1:1 answered"):
            kafka_source("127.0.0.1:1", "t", schema=SCHEMA).resolve(1)


def test_a_compacted_topic_is_refused_if_replicas_read_it(topics: Kafka) -> None:
    topic = topics.create(cleanup_policy="compact")
    made = kafka_source(topics.servers, topic, schema=SCHEMA)
    made.resolve(1)
    with pytest.raises(FlowError, match="is compacted"):
        made.resolve(2)


# --- what is gone, and what is wrong ------------------------------------------------------------


def until_raises(reader: SplitReader, kind: type[Exception], match: str) -> None:
    def read_on() -> None:
        until(lambda: reader.read(10) is None, "it ends")

    with pytest.raises(kind, match=match):
        read_on()
    reader.close()


def test_records_that_are_gone(topics: Kafka) -> None:
    topic = topics.create(2)
    topics.fill(topic, plain(0, 20), 1)
    made = kafka_source(topics.servers, topic, schema=SCHEMA)
    made = made.resolved(made.resolve(2))
    topics.trim(topic, 1, 12)
    where = rf"topic '{topic}', partition 1: the records at offset 0 are gone"
    until_raises(made.open(1), InputError, where)


def test_a_topic_that_is_not_what_it_was(topics: Kafka, monkeypatch) -> None:
    monkeypatch.setattr(source, "CHECK_S", 0.1)
    topic = topics.create(2)
    made = kafka_source(topics.servers, topic, schema=SCHEMA)
    made = made.resolved(made.resolve(2))
    topics.grow(topic, 3)
    until_raises(made.open(0), InputError, "has 3 partitions, and had 2")
    topics.delete(topic)
    until_raises(made.open(0), InputError, f"topic '{topic}' is gone")


BAD = [b"", b"{", b"[1]", b"null", b'{"k": 1}{"k": 2}', b'{"k": "one"}', b'{"s": "\xff"}', b'{"k":']


def test_a_bad_record_stops_the_flow_and_is_named(topics: Kafka, kept) -> None:
    topic = topics.create()
    topics.fill(topic, [*plain(0, 300), b'{"k": 1, "v": "much"}', *plain(300, 300)])
    made = kafka_source(topics.servers, topic, schema=SCHEMA, end="latest")
    run = totals(Flow("bad"), made, discard()).start(sites=1)
    kept.append(run)
    with pytest.raises(OperatorError) as caught:
        run.wait(PATIENCE_S)
    assert f"topic '{topic}', partition 0, offset 300: JSON parse error" in str(caught.value)
    assert '"much"' in str(caught.value)


def test_bad_records_become_dead_letters(topics: Kafka, kept) -> None:
    """Under pairs: both replicas must say the same about them."""
    topic, dead, out = topics.create(), topics.create(), topics.create()
    good = [plain(at * 40, 40) for at in range(len(BAD) + 1)]
    topics.fill(topic, good[0])
    for bad, more in zip(BAD, good[1:], strict=True):
        topics.fill(topic, [bad, *more])
    flow = Flow("dead", on_error="dead-letter", protect=pairs())
    made = kafka_source(topics.servers, topic, schema=SCHEMA, end="latest")
    totals(flow, made, kafka_sink(topics.servers, out))
    flow.dead_letters().sink("dead", kafka_sink(topics.servers, dead))
    run = flow.start(sites=2, partitions=4)
    kept.append(run)
    assert run.wait(PATIENCE_S)
    made = numbers(0, 0, 40 * len(good))
    wanted = expected(made["k"].to_numpy(), made["v"].to_numpy())
    assert found(topics, out) == wanted
    letters = topics.rows(dead)
    assert [r["row"] for r in letters] == [b.decode(errors="replace") for b in BAD]
    for at, letter in enumerate(letters):
        assert f"partition 0, offset {40 * (at + 1) + at}: " in letter["error"]


# --- the sink -----------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["json", "arrow", "bytes"])
def test_there_and_back(topics: Kafka, kept, format: str) -> None:
    topic = topics.create()
    batch = pa.record_batch(
        {
            "k": pa.array(["a", 'b\n"\\', None, "d\u2028é"]),
            "i": pa.array([1, None, 2**62 + 1, -1]),
            "x": pa.array([0.1, 1e300, None, 5e-324]),
            "t": pa.array([0, 1, None, 10**15 + 1], pa.timestamp("us", "UTC")),
            "u": pa.array([0, 1, None, 10**18 + 1], pa.timestamp("ns")),
            "d": pa.array([0, 1, None, 20_000], pa.date32()),
            "b": pa.array([True, None, False, True]),
            "l": pa.array([[1, 2], [], None, [3]], pa.list_(pa.int64())),
            "s": pa.array([{"a": 1}, {"a": None}, None, {"a": 2}], pa.struct([("a", pa.int64())])),
        }
    )
    schema = None if format == "bytes" else batch.schema
    flow = Flow(f"there {format}")
    stream = flow.source("in", rows(batch))
    if format == "bytes":
        stream = stream.select("k")
    stream.sink("out", kafka_sink(topics.servers, topic, format=format))
    run = flow.start(sites=1)
    kept.append(run)
    assert run.wait(PATIENCE_S)
    made = kafka_source(topics.servers, topic, schema=schema, format=format, end="latest")
    got = read_all(made.resolved(made.resolve(1)).open(0))
    if format == "bytes":
        assert [r["value"].decode() if r["value"] else None for r in got] == batch["k"].to_pylist()
    else:
        assert [{n: r[n] for n in batch.schema.names} for r in got] == batch.to_pylist()


def ten(topics: Kafka, name: str, topic: str) -> Flow:
    flow = Flow(name)
    to = kafka_sink(topics.servers, topic)
    flow.source("in", rows(numbers(0, 0, 10))).select(k=col("k")).sink("out", to)
    return flow


def test_a_flow_that_is_started_again_adds_to_what_is_there(topics: Kafka, kept) -> None:
    topic = topics.create()
    for times in (1, 2):
        run = ten(topics, "anew", topic).start(sites=1)
        kept.append(run)
        assert run.wait(PATIENCE_S)
        assert topics.rows(topic) == [{"k": r["k"]} for r in plain(0, 10)] * times


def test_started_twice_with_one_secret(topics: Kafka, kept) -> None:
    topic = topics.create()
    run = start(ten(topics, "secret", topic), options=Options(sites=1), secret=b"0123456789abcdef")
    kept.append(run)
    assert run.wait(PATIENCE_S)
    again = ten(topics, "secret", topic)
    with pytest.raises(FlowError, match="was already started with the same secret"):
        kept.append(start(again, options=Options(sites=1), secret=b"0123456789abcdef"))
    assert len(topics.rows(topic)) == 10


def test_two_flows_of_one_name(topics: Kafka, kept) -> None:
    """The second takes the place of the first, which says so."""
    topic = topics.create()
    flow = Flow("twins")
    totals(flow, generator(numbers, SCHEMA, rate=1_000), kafka_sink(topics.servers, topic))
    run = flow.start(sites=1)
    kept.append(run)
    until(lambda: topics.read(topic), "the first writes")
    second = Flow("twins")
    totals(second, generator(numbers, SCHEMA, rate=1_000), kafka_sink(topics.servers, topic))
    other = second.start(sites=1)
    kept.append(other)
    with pytest.raises(FlowError, match="another flow named 'twins' has fenced this one"):
        run.wait(PATIENCE_S)
    other.stop(timeout=PATIENCE_S)


def test_a_topic_that_is_not_there(topics: Kafka, kept) -> None:
    with pytest.raises(FlowError, match=r"topic 'nowhere' at .*: the topic does not exist"):
        kept.append(ten(topics, "nowhere", "nowhere").start(sites=1))


class Writers:
    """Leaders of one sink, after one another, without a flow around them."""

    def __init__(self, topics: Kafka) -> None:
        self.topics, self.topic = topics, topics.create()
        self.sink = kafka_sink(topics.servers, self.topic)

    def make(
        self, term: int, fresh: bool = False, confirmed: int | None = None, **more: Any
    ) -> Ledger:
        assert isinstance(self.sink, sink.KafkaSink)
        whose = Authority("writers", self.topic, **{"incarnation": "life", "term": term, **more})
        format = Json(pa.schema([("e", pa.int64())]))
        return Ledger(
            self.sink,
            whose,
            format,
            new_incarnation=fresh,
            confirmed=confirmed,
            stopped=lambda: False,
        )

    @property
    def group(self) -> str:
        return f"holdfast-writers-{self.topic}"

    @property
    def epochs(self) -> list[int]:
        return [r["e"] for r in self.topics.rows(self.topic)]


def group(*epochs: int) -> sink.Group:
    return [(e, pa.record_batch({"e": pa.array([e])})) for e in epochs]


def test_a_new_leader_goes_on_where_the_last_one_was(topics: Kafka) -> None:
    writers = Writers(topics)
    with writers.make(1, fresh=True) as old, writers.make(2) as new:
        assert old.begin() == -1
        assert old.append(group(0, 3)) == 3
        assert new.begin() == 3
        assert old.append(group(4)) is None, "it leads no more"
        assert old.begin() is None
        assert new.append(group(4)) == 4
    assert writers.epochs == [0, 3, 4]


def test_one_who_comes_late_does_not_stop_the_leader(topics: Kafka) -> None:
    """It wakes up between its look at who leads and its taking over."""
    writers = Writers(topics)
    with writers.make(1, fresh=True) as late, writers.make(2) as leader:
        assert leader.begin() == -1 and leader.append(group(0)) == 0
        late._connect()
        assert late.begin() is None
        assert leader.append(group(1)) == 0, "it was refused, and leads again"
        assert leader.append(group(1)) == 1
    assert writers.epochs == [0, 1]


def test_what_was_not_committed_is_not_there(topics: Kafka) -> None:
    writers = Writers(topics)
    with writers.make(1, fresh=True) as old, writers.make(2) as new:
        assert old.begin() == -1
        old._producer.begin_transaction()
        old._produce(group(0)[0][1])
        at = TopicPartition(writers.topic, 0, 1, "")
        old._producer.send_offsets_to_transaction([at], old._consumer.consumer_group_metadata())
        assert new.begin() == -1
        assert new.append(group(0)) == 0
    assert writers.epochs == [0]


def test_a_flow_is_known_to_the_broker_before_it_takes_rows(topics: Kafka) -> None:
    """So a flow that is lost before its sink has written anything can continue. So can one that
    places its sink elsewhere because a site died before the start."""
    writers = Writers(topics)
    schema = pa.schema([("e", pa.int64())])
    for term in (0, 1):
        whose = Authority("writers", writers.topic, incarnation="life", term=term)
        writer = writers.sink.open(whose, schema)
        with writers.make(2) as reader:
            claim = reader._peek()
        assert (claim.incarnation, claim.term, claim.epoch) == ("life", term, -1)
        writer.abandon()
    writer, durable = writers.sink.resume(replace(whose, lost=True, term=2), schema, -1)
    assert durable == -1
    writer.write(*group(0)[0])
    until(lambda: writer.commit(0) == 0, "the epoch is durable")
    writer.close()
    assert writers.epochs == [0]


def test_a_broker_that_does_not_answer_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "CLAIM_S_MAX", 0.5)
    made = kafka_sink("127.0.0.1:1", "t")
    with pytest.raises(HostError, match=r"sink 'out'.*127\.0\.0\.1:1.*did not answer"):
        made.open(Authority("away", "out"), pa.schema([("e", pa.int64())]))


# --- a broker that has less than before ---------------------------------------------------------


def test_a_claim_that_the_broker_has_forgotten_is_noticed(topics: Kafka) -> None:
    """By whoever wrote, by whoever leads next, and by a flow that was lost."""
    writers = Writers(topics)
    with writers.make(1, fresh=True) as old:
        assert old.begin() == -1 and old.append(group(0, 3)) == 3
        topics.forget(writers.group, writers.topic)
        with pytest.raises(SinkRewoundError) as caught:
            old.begin()
        assert (caught.value.committed, caught.value.found) == (3, -1)
    for known in (3, -1):
        with writers.make(2, confirmed=known) as new, pytest.raises(SinkRewoundError):
            new.begin()
    topics.set_offset(writers.group, writers.topic, 4)  # as the error says
    with writers.make(3, confirmed=3) as new:
        assert new.begin() == 3 and new.append(group(4)) == 4
    assert writers.epochs == [0, 3, 4]


def test_a_claim_of_less_than_was_confirmed_is_noticed(topics: Kafka) -> None:
    writers = Writers(topics)
    with writers.make(1, fresh=True) as old, writers.make(2, confirmed=5) as new:
        assert old.begin() == -1 and old.append(group(0, 3)) == 3
        with pytest.raises(SinkRewoundError) as caught:
            new.begin()
    assert (caught.value.committed, caught.value.found) == (5, 3)


def test_a_flow_goes_on_from_a_stopped_one_only_where_its_results_are(topics: Kafka) -> None:
    writers = Writers(topics)
    with writers.make(1, fresh=True) as first:
        assert first.begin() == -1 and first.append(group(0, 3)) == 3
    goes_on = {"fresh": True, "after": 6, "incarnation": "second"}
    with (
        writers.make(1, **goes_on, before=("life", 4)) as short,
        pytest.raises(SinkRewoundError),
    ):
        short.begin()
    with writers.make(1, **goes_on, before=("life", 3)) as second:
        assert second.begin() == 6 and second.begin() == 6 and second.append(group(8)) == 8
    with writers.make(1, **{**goes_on, "incarnation": "third"}, before=("life", 3)) as third:
        assert third.begin() == 6, "another flow wrote since: the claim says nothing"


def test_a_claim_is_renewed_while_there_are_no_rows(
    topics: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker forgets it when it is old, but an idle flow must be able to go on."""
    monkeypatch.setattr(sink, "RENEW_S", 0.01)
    topic = topics.create()
    made = kafka_sink(topics.servers, topic)
    writer = made.open(Authority("idle", topic, "life", 1), pa.schema([("e", pa.int64())]))
    until(lambda: writer.report()["transactions"] > 3, "it says again where it is")
    writer.write(0, group(0)[0][1])
    until(lambda: writer.commit(0) == 0, "the row is there")
    writer.close()
    with Ledger(
        made, Authority("idle", topic, "life", 2), Json(pa.schema([("e", pa.int64())])),
        new_incarnation=False, confirmed=0, stopped=lambda: False,
    ) as new:  # fmt: skip
        assert new.begin() == 0


def test_a_flow_that_was_stopped_for_too_long_says_what_to_do(
    topics: Kafka, kept, tmp_path
) -> None:
    out, store = topics.create(), str(tmp_path / "store")

    def start(**more: str) -> Run:
        flow = Flow("paused", protect=none())
        flow.source("in", generator(numbers, SCHEMA, rate=5_000.0)).sink(
            "out", kafka_sink(topics.servers, out)
        )
        kept.append(flow.start(sites=2, partitions=4, **more))
        return kept[-1]

    run = start(checkpoint=Checkpoint(store))
    until_taken(run, 1_000)
    run.stop(timeout=PATIENCE_S)
    rows = sum(r.rows for r in run.records())
    topics.forget("holdfast-paused-out", out)
    with pytest.raises(SinkRewoundError) as caught:
        start(restore_from=store).wait(PATIENCE_S)
    assert caught.value.committed >= 0 and caught.value.found == -1
    topics.set_offset("holdfast-paused-out", out, caught.value.committed + 1)
    run = start(restore_from=store, checkpoint=Checkpoint(str(tmp_path / "next")))
    until_taken(run, rows + 1_000)
    run.stop(timeout=PATIENCE_S)
    rows += sum(r.rows for r in run.records())
    assert [r["v"] for r in topics.rows(out)] == numbers(0, 0, rows)["v"].to_pylist()


# --- Spark's own connector ----------------------------------------------------------------------


def test_a_flow_is_fed_by_sparks_own_connector(topics: Kafka, spark: SparkSession, kept) -> None:
    topic, out = topics.create(2), topics.create()
    for partition in (0, 1):
        topics.fill(topic, [r for r in plain(0, 2_000) if r["k"] % 2 == partition], partition)
    df = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", topics.servers)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .load()
        .selectExpr(
            "from_json(cast(value as string), 'k bigint, v double') as r", "partition", "offset"
        )
        .selectExpr("r.k", "r.v", "partition", "offset")
    )
    made = spark_stream(df, order_by=["partition", "offset"], trigger={"availableNow": True})
    flow = totals(Flow("connected", protect=none()), made, kafka_sink(topics.servers, out))
    run = flow.start(spark, sites=2, partitions=4)
    kept.append(run)
    assert run.wait(PATIENCE_S)
    made = numbers(0, 0, 2_000)
    assert sorted(found(topics, out)) == sorted(
        expected(made["k"].to_numpy(), made["v"].to_numpy())
    )


def test_a_topic_is_followed_from_where_the_history_ends(
    topics: Kafka, spark: SparkSession, kept
) -> None:
    """Spark reads up to some offsets, and the flow from them on: though more has come meanwhile."""
    topic, out = topics.create(2), topics.create()
    rows = [[r for r in plain(0, 3_000) if r["k"] % 2 == p] for p in (0, 1)]
    for partition in (0, 1):
        topics.fill(topic, rows[partition], partition)
    ends = {0: 400, 1: 900}
    before = (
        spark.read.format("kafka")
        .option("kafka.bootstrap.servers", topics.servers)
        .option("subscribe", topic)
        .option("endingOffsets", json.dumps({topic: ends}))
        .load()
        .orderBy("partition", "offset")
        .selectExpr("from_json(cast(value as string), 'k bigint, v double') as r")
        .selectExpr("r.k", "r.v")
    )
    source = kafka_source(topics.servers, topic, schema=SCHEMA, start=ends, end="latest")
    flow = totals(
        Flow("followed", protect=pairs(failure_domain="process")),
        source,
        kafka_sink(topics.servers, out),
    )
    run = flow.start(spark, sites=2, partitions=4, history=before)
    kept.append(run)
    assert run.wait(PATIENCE_S)
    assert sum(r.rows for r in run.records()) == 3_000 - 1_300
    made = numbers(0, 0, 3_000)
    assert sorted(found(topics, out)) == sorted(
        expected(made["k"].to_numpy(), made["v"].to_numpy())
    )


def test_a_flow_that_was_stopped_goes_on_behind_what_it_had_read(
    topics: Kafka, kept, tmp_path
) -> None:
    topic, out, store = topics.create(2), topics.create(), str(tmp_path / "store")

    def start(first: int, count: int, **more: str) -> Run:
        for partition in (0, 1):
            made = [r for r in plain(first, count) if r["k"] % 2 == partition]
            Transactions(topics, topic, partition).put(made)
        source = kafka_source(topics.servers, topic, schema=SCHEMA, start="earliest")
        flow = totals(Flow("stopped", protect=none()), source, kafka_sink(topics.servers, out))
        kept.append(flow.start(sites=2, partitions=4, **more))
        return kept[-1]

    run = start(0, 3_000, checkpoint=Checkpoint(store))
    until_taken(run, 3_000)
    run.stop(timeout=PATIENCE_S)
    run = start(3_000, 2_000, restore_from=store)
    until_taken(run, 5_000)
    run.stop(timeout=PATIENCE_S)
    made = numbers(0, 0, 5_000)
    assert sorted(found(topics, out)) == sorted(
        expected(made["k"].to_numpy(), made["v"].to_numpy())
    )


def test_a_flow_that_is_lost_goes_on_between_two_topics(
    topics: Kafka, load, kept, tmp_path
) -> None:
    """Also with what came between the last checkpoint and its end, which one topic has and the
    other has or has not."""
    into, out, store = topics.create(2), topics.create(), str(tmp_path / "store")

    def start(**more: object) -> Run:
        made = kafka_source(topics.servers, into, schema=SCHEMA)
        flow = Flow("lost", protect=pairs(failure_domain="process"))
        totals(flow, made, kafka_sink(topics.servers, out, key="k", linger=0.05))
        kept.append(flow.start(sites=2, partitions=4, **more))
        return kept[-1]

    def until_stored(run: Run) -> None:
        until(lambda: run.status()["checkpoint"]["epoch"] is not None, "a checkpoint is complete")

    run = start(checkpoint=Checkpoint(store, interval=0.3))
    written = load(into)
    for _ in range(2):
        until_protected(run, 2)
        until_taken(run, run.status()["rows_in"] + 1_000)
        until_stored(run)
        for pid in pids(run).values():
            os.kill(pid, signal.SIGKILL)
        assert run.ended(PATIENCE_S)
        run = start(restore_from=store)
    rows = written.stop()
    until_taken(run, rows)
    run.stop(timeout=PATIENCE_S)
    made = numbers(0, 0, rows)
    got = found(topics, out)
    assert len(got) == rows
    assert sorted(got) == sorted(expected(made["k"].to_numpy(), made["v"].to_numpy()))


def test_the_page_shows_what_its_programs_print(broker: Broker, tmp_path: Path) -> None:
    (page,) = pages_that_need("kafka")
    run_page(page, tmp_path, replaced={"localhost:9092": broker.servers})
