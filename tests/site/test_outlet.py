"""A sink that is read where it is written: nothing is let go that a reader lacks."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from holdfast import Flow, FlowError, HostError
from holdfast import functions as F
from holdfast.api.options import Checkpoint, Options
from holdfast.connectors.outlet import Outlet, OutletWriter
from holdfast.connectors.readers import DROPPED_MAX
from holdfast.connectors.sinks import Authority, Sink
from holdfast.control.run import Run
from holdfast.core.ids import SiteId, StageId
from holdfast.net import wire
from holdfast.net.keys import Keys
from holdfast.net.reader import SinkReader, parse, url_of
from holdfast.plan.planner import plan
from holdfast.protections import pairs
from holdfast.sinks import outlet
from holdfast.site.egress import Egress
from holdfast.site.serving import Serving
from holdfast.sources import generator, rows
from holdfast.ui.cli import main
from tests.support.lines import SCHEMA, numbers, one_line
from tests.support.runs import kill, replicas, until, until_protected

ROWS = 90_000
WHOSE = Authority("flow", "out")


def batch(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"x": pa.array(values, pa.int64())})


HELD = [(0, batch(0, 1)), (2, batch(2, 3, 4)), (3, batch(5))]


# --- the writer ---------------------------------------------------------------------------------


def test_what_all_readers_have_is_let_go() -> None:
    writer = Outlet().open(WHOSE, batch().schema)
    assert writer.commit(3) == -1, "nobody has read anything"
    assert writer.answer({"do": "look"}, HELD) == ({"epoch": 3}, [])
    writer.answer({"do": "commit", "reader": "b", "epoch": -1}, HELD)
    writer.answer({"do": "commit", "reader": "a", "epoch": 2}, HELD)
    assert writer.commit(3) == -1, "b lacks everything"
    writer.answer({"do": "commit", "reader": "b", "epoch": 1}, HELD)
    assert writer.commit(3) == 1
    begin = {"do": "begin", "reader": "d"}
    assert writer.answer({**begin, "latest": 1}, HELD[1:]) == ({"epoch": 3}, [])
    assert writer.answer({**begin, "latest": 0}, HELD[1:]) == ({"epoch": 1}, [])
    writer.answer({"do": "forget", "reader": "d"}, HELD[1:])
    writer.answer({"do": "commit", "reader": "c", "epoch": 1}, HELD[1:])
    writer.answer({"do": "forget", "reader": "b"}, HELD[1:])
    writer.answer({"do": "forget", "reader": "c"}, HELD[1:])
    assert writer.commit(3) == 2


def test_nothing_is_let_go_before_all_readers_have_come_that_are_expected() -> None:
    writer = Outlet(readers=2).open(WHOSE, batch().schema)
    writer.commit(3)
    writer.answer({"do": "commit", "reader": "a", "epoch": 3}, HELD)
    assert writer.commit(3) == -1, "b is to have it, too"
    replica = Outlet(readers=2).open(WHOSE, batch().schema)
    replica.restore(writer.save())
    for one in (writer, replica):
        one.answer({"do": "commit", "reader": "a", "epoch": 3}, HELD)
        assert one.commit(3) == -1, "a is no other reader than before"
        one.answer({"do": "commit", "reader": "b", "epoch": 2}, HELD)
        assert one.commit(3) == 2
    with pytest.raises(FlowError, match="no reader would get"):
        outlet(readers=0)


def test_a_reader_goes_as_far_as_it_wants() -> None:
    writer = Outlet().open(WHOSE, batch().schema)
    writer.commit(3)

    def latest(after: int, rows: int) -> int:
        request = {"do": "latest", "reader": "a", "after": after, "rows": rows}
        return writer.answer(request, HELD)[0]["epoch"]

    assert latest(-1, -1) == 3
    assert latest(-1, 2) == 1 and latest(1, 1) == 2, "an epoch at least"
    assert latest(3, -1) == 3
    read = {"do": "read", "reader": "a"}
    values, rows = writer.answer({**read, "after": -1, "upto": 2}, HELD)
    assert values == {"epoch": 2} and [b.num_rows for b in rows] == [2, 3]
    assert writer.answer({**read, "after": -1, "upto": 1}, HELD)[0] == {"epoch": 1}
    assert writer.answer({**read, "after": 3, "upto": 9}, HELD) == ({"epoch": 3}, [])


def test_nonsense_and_strangers_are_refused() -> None:
    writer = Outlet().open(WHOSE, batch().schema)
    writer.commit(3)
    with pytest.raises(FlowError, match="unknown request 'dance'"):
        writer.answer({"do": "dance"}, HELD)
    writer.answer({"do": "commit", "reader": "a", "epoch": 2}, HELD)
    writer.commit(3)
    for late in ({"do": "read", "upto": 2}, {"do": "latest", "rows": -1}):
        with pytest.raises(FlowError, match="epochs 1 to 2 were dropped"):
            writer.answer({"after": 0, "reader": "b", **late}, HELD[2:])
    for name in ("", "x" * 201):
        with pytest.raises(FlowError, match="1 to 200 characters"):
            writer.answer({"do": "begin", "latest": 0, "reader": name}, HELD[2:])


# --- readers that do not come back --------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now

    def wait(self, writer: OutletWriter, seconds: int, held_bytes: int = 0) -> list[bool]:
        """As a site does that looks after its readers every second."""
        dropped = []
        for _ in range(seconds):
            self.now += 1
            dropped.append(writer.drop_reader(held_bytes))
        return dropped


def opened(clock: Clock, **options: Any) -> OutletWriter:
    writer = OutletWriter(WHOSE, Outlet(**options), clock)
    writer.commit(3)
    assert not writer.drop_reader(0)
    return writer


def say(writer: OutletWriter, reader: str, after: int, **more: Any) -> dict[str, int]:
    request = {"do": "latest", "reader": reader, "after": after, "rows": -1, **more}
    return writer.answer(request, HELD)[0]


def listed(writer: OutletWriter) -> dict[str, str]:
    (found,) = writer.answer({"do": "list"}, HELD)[1]
    return {row["reader"]: row["state"] for row in found.to_pylist()}


def test_a_reader_that_is_not_seen_for_too_long_is_dropped_and_told() -> None:
    clock = Clock()
    writer = opened(clock, reader_timeout=10)
    say(writer, "nightly", 0)
    say(writer, "live", 3)
    assert writer.commit(3) == 0
    for _ in range(10):
        clock.wait(writer, 1)
        say(writer, "live", 3)
    assert writer.commit(3) == 0, "there is still time"
    assert clock.wait(writer, 1) == [True] and writer.commit(3) == 3
    assert listed(writer) == {"nightly": "idle", "live": "reading"}
    lacks = (
        "'nightly' was dropped because it was inactive for 10 s; it lacks the rows of epochs 1 to 3"
    )
    replica = opened(clock, reader_timeout=10)
    replica.restore(writer.save())
    for one in (writer, replica):  # also one that takes over
        with pytest.raises(FlowError, match=lacks):
            say(one, "nightly", 0)
        with pytest.raises(FlowError, match=lacks):
            one.answer({"do": "read", "reader": "nightly", "after": 0, "upto": 2}, HELD)
        assert one.answer({"do": "begin", "reader": "nightly", "latest": 0}, []) == (
            {"epoch": 3},
            [],
        )
        assert listed(one)["nightly"] == "reading"


def test_a_reader_that_lacks_nothing_may_come_back() -> None:
    clock = Clock()
    writer = opened(clock, reader_timeout=10)
    say(writer, "slow", 0)
    say(writer, "away", 1)
    for _ in range(11):
        say(writer, "slow", 0)
        clock.wait(writer, 1)
    assert listed(writer) == {"slow": "reading", "away": "idle"}
    assert say(writer, "away", 1)["epoch"] == 3
    assert listed(writer) == {"slow": "reading", "away": "reading"}


def test_whoever_takes_over_or_was_deaf_gives_readers_their_time_again() -> None:
    clock = Clock()
    writer = opened(clock, reader_timeout=10)
    say(writer, "reader", 0)
    replica = opened(clock, reader_timeout=10)
    replica.restore(writer.save())
    clock.wait(writer, 9)
    assert not any(clock.wait(replica, 10)), "it cannot know when the reader was seen"
    clock.now += 60  # it was stopped, and could not hear
    assert not any(clock.wait(replica, 11)) and clock.wait(replica, 2) == [True, False]


def test_the_slowest_reader_is_dropped_when_too_much_is_held() -> None:
    clock = Clock()
    writer = opened(clock, readers=2, reader_bytes_max=100, unread_bytes_max=100)
    say(writer, "slow", 0)
    assert clock.wait(writer, 1, held_bytes=100) == [False], "another one is awaited"
    say(writer, "fast", 2)
    assert clock.wait(writer, 2, held_bytes=99) == [False, False]
    assert clock.wait(writer, 1, held_bytes=100) == [True] and writer.commit(3) == 2
    with pytest.raises(
        FlowError, match="more than 100 bytes were held for it; it lacks the rows of epoch"
    ):
        say(writer, "slow", 0)
    assert clock.wait(writer, 1, held_bytes=100) == [True] and writer.commit(4) == 4
    with pytest.raises(FlowError, match="'fast' was dropped"):
        say(writer, "fast", 2)


def test_a_reader_that_was_forgotten_is_told() -> None:
    writer = opened(Clock())
    say(writer, "old", 0)
    with pytest.raises(FlowError, match=r"has no reader 'odl'\n  hint: its readers: 'old'"):
        writer.answer({"do": "forget", "reader": "odl"}, HELD)
    for _ in range(2):
        writer.answer({"do": "forget", "reader": "old"}, HELD)
    assert writer.commit(3) == 3, "nobody is left, and nobody is awaited"
    with pytest.raises(FlowError, match="'old' was dropped because a user had it forgotten"):
        say(writer, "old", 0)


def test_readers_that_were_dropped_do_not_pile_up() -> None:
    clock = Clock()
    writer = opened(clock, reader_bytes_max=1)
    for n in range(DROPPED_MAX + 5):
        say(writer, f"run {n}", writer.commit(n))
        assert writer.drop_reader(1)
    assert len(listed(writer)) == DROPPED_MAX and "run 4" not in listed(writer)
    with pytest.raises(FlowError, match="were dropped"):
        say(writer, "run 4", 0)


def test_a_query_with_a_new_checkpoint_takes_the_place_of_the_old_one() -> None:
    writer = opened(Clock(), readers=2)
    say(writer, "other", 0)
    say(writer, "query", 2)
    assert writer.commit(3) == 0
    assert writer.answer({"do": "begin", "reader": "query", "latest": 0}, HELD)[0] == {"epoch": 0}
    say(writer, "other", 2)
    assert writer.commit(3) == 0, "it begins with what was kept"
    assert set(listed(writer)) == {"other", "query"}


def test_a_reader_of_the_flow_that_was_stopped_goes_on() -> None:
    old = OutletWriter(Authority("flow", "out", "first"), Outlet())
    old.commit(3)
    say(old, "known", 1, incarnation="first")
    new = OutletWriter(Authority("flow", "out", "second"), Outlet())
    new.restore(old.save())
    new.commit(3)
    for wrong in ("zeroth", ""):
        with pytest.raises(FlowError, match="another incarnation of the flow"):
            say(new, "known", 1, incarnation=wrong)
    with pytest.raises(FlowError, match="another incarnation of the flow"):
        say(new, "stranger", 1, incarnation="first")
    assert say(new, "known", 1, incarnation="first")["epoch"] == 3
    assert say(new, "known", 3, incarnation="second")["had"] == 3
    with pytest.raises(FlowError, match="another incarnation of the flow"):
        say(new, "known", 1, incarnation="first")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"reader_timeout": 0}, "reader_timeout=0: it must be positive"),
        ({"reader_bytes_max": 0}, "is not between"),
        ({"reader_bytes_max": 2, "unread_bytes_max": 1}, "at which the flow waits"),
    ],
)
def test_limits_that_make_no_sense_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(FlowError, match=complaint):
        outlet(**options)


class Told(RuleBasedStateMachine):
    """Whatever readers, clocks, limits, replicas and stops do: a reader that is answered lacks no
    row, and one that would is refused."""

    NAMES = ("a", "b", "c")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.sink = Outlet(readers=2, reader_timeout=20, reader_bytes_max=30)
        self.writer = OutletWriter(Authority("f", "out", "0"), self.sink, self.clock)
        self.life, self.taken, self.durable = 0, -1, -1
        self.held: list[tuple[int, pa.RecordBatch]] = []
        self.has: dict[str, tuple[str, int]] = {}
        """Of each reader's checkpoint: the life of the flow, and the epoch."""

    def let_go(self) -> None:
        self.durable = max(self.durable, self.writer.commit(self.taken))
        self.held = [(e, b) for e, b in self.held if e > self.durable]

    @rule(rows=st.integers(0, 2))
    def epoch(self, rows: int) -> None:
        self.taken += 1
        if rows:
            self.held.append((self.taken, batch(*[self.taken] * rows)))
        self.let_go()

    @rule(seconds=st.integers(1, 15))
    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.now += 1
            while self.writer.drop_reader(sum(b.nbytes for _, b in self.held)):
                self.let_go()

    @rule(name=st.sampled_from(NAMES), latest=st.booleans())
    def begin(self, name: str, latest: bool) -> None:
        request = {"do": "begin", "reader": name, "latest": int(latest)}
        epoch = self.writer.answer(request, self.held)[0]["epoch"]
        self.has[name] = (str(self.life), epoch)
        self.let_go()

    @rule(name=st.sampled_from(NAMES), rows=st.integers(-1, 3), commits=st.booleans())
    def read(self, name: str, rows: int, commits: bool) -> None:
        if name not in self.has:
            return
        life, after = self.has[name]
        who = {"reader": name, "incarnation": life, "after": after}
        gone = after < self.durable
        try:
            values = self.writer.answer({"do": "latest", "rows": rows, **who}, self.held)[0]
            self.let_go()
            upto = values["epoch"]
            read = {"do": "read", "upto": upto, **who}
            values, found = self.writer.answer(read, self.held)
        except FlowError as error:
            refused = "which are gone" in str(error) or "were dropped" in str(error)
            assert (gone and refused) or "another incarnation" in str(error)
            del self.has[name]
            return
        assert not gone, "there is a gap that nobody was told of"
        got = [e for b in found for e in b.column("x").to_pylist()]
        assert got == [
            e for e, b in self.held if after < e <= values["epoch"] for _ in range(b.num_rows)
        ]
        assert values["epoch"] == upto
        if commits:
            self.has[name] = (str(self.life), upto)

    @rule(name=st.sampled_from(NAMES))
    def forget(self, name: str) -> None:
        if name in listed(self.writer):
            self.writer.answer({"do": "forget", "reader": name}, self.held)
            self.let_go()

    @rule()
    def take_over(self) -> None:
        self._replica(str(self.life))

    @rule()
    def stop_and_go_on(self) -> None:
        self.life += 1
        self._replica(str(self.life))

    def _replica(self, incarnation: str) -> None:
        notes = self.writer.save()
        self.writer = OutletWriter(Authority("f", "out", incarnation), self.sink, self.clock)
        self.writer.restore(notes)
        self.let_go()


TestTold = Told.TestCase
TestTold.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def reading(egress: Egress) -> Serving:
    """A site that leads an outlet of which site 1 has the other replica."""
    view = SimpleNamespace(
        group=lambda _: SimpleNamespace(replicas=(SiteId(0), SiteId(1)), led_by=lambda s: s == 0)
    )
    serving = Serving(
        lambda _: egress, lambda *said: SENT.append(said), lambda: egress.taken, lambda: None
    )
    serving.on_view(view, SiteId(0), [StageId(0)])  # type: ignore[arg-type]
    SENT.clear()
    return serving


SENT: list[Any] = []


def egress_of(sink: Sink) -> Egress:
    flow = Flow("f")
    flow.source("s", rows(batch(1))).sink("out", sink)
    return Egress("f", plan(flow).sinks[0], "life")


def test_other_replicas_hear_of_readers_that_were_dropped() -> None:
    egress = egress_of(outlet(reader_bytes_max=1))
    egress.begin()
    serving = reading(egress)
    egress.take(0, batch(1))
    egress.answer({"do": "begin", "reader": "a", "latest": 0})
    serving.flush_notes()
    assert [m.readers for _, m in SENT] == [{"a": (-1, "life", "reading")}]
    serving.flush_notes()
    egress.flush_notes()
    assert egress.durable == 0 and egress.held == []
    serving.flush_notes()
    _, notes = SENT[-1]
    assert len(SENT) == 2 and notes.readers == {"a": (-1, "life", "behind")}
    other = egress_of(outlet(reader_bytes_max=1))
    other.take(0, batch(1))
    other.note(msgspec.structs.asdict(notes))
    assert other.held == [] and other.durable == 0


def test_a_site_owes_an_answer_until_the_other_replicas_know() -> None:
    """If it left before, the reader would ask again, and find nobody."""
    egress = egress_of(outlet())
    egress.begin()
    serving, answers = reading(egress), []
    egress.take(0, batch(1))
    commit = {"do": "commit", "reader": "a", "epoch": 0}
    serving.ask(wire.Ask(0, commit), lambda *answer: answers.append(answer), None)
    assert egress.is_drained and serving.owes_answers and not answers
    serving.on_notes_kept(SiteId(1), wire.NotesKept(0, SENT[-1][1].number))
    assert not serving.owes_answers and answers[0][0].values["over"] == 1


def test_an_address_says_where_and_proves_who() -> None:
    keys = Keys.of(b"a secret").for_client(wire.READER)
    url = url_of("a/b", keys, [("host", 1), ("::1", 2)])
    flow, reader, controls = parse(url)
    assert (flow, controls) == ("a/b", [("host", 1), ("::1", 2)])
    assert reader.ring.current == keys and reader.level is None and reader.certificate is None
    for wrong in ("", "holdfast://xyz@h:1/f", "holdfast://00@h/f", "holdfast://00@h:1"):
        with pytest.raises(FlowError, match="not the address of a flow"):
            parse(wrong)


# --- on sites -----------------------------------------------------------------------------------


class Reading(threading.Thread):
    """Reads a sink to its end, and says epoch by epoch that it has the rows."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__(daemon=True)
        self._url, self.name = url, name
        self.rows: list[pa.RecordBatch] = []
        self.error: Exception | None = None
        self.epoch = -1
        self.start()

    def run(self) -> None:
        try:
            with SinkReader(self._url, "out") as reader:
                self._read(reader)
        except Exception as error:
            self.error = error

    def _read(self, reader: SinkReader) -> None:
        who = {"reader": self.name}
        self.epoch = reader.ask({"do": "begin", "latest": 0, **who})[0]["epoch"]
        over = False
        while not over:
            latest = {"do": "latest", "after": self.epoch, "rows": -1, **who}
            upto = reader.ask(latest)[0]["epoch"]
            while self.epoch < upto:
                ask = {"do": "read", "after": self.epoch, "upto": upto, **who}
                values, rows = reader.ask(ask)
                self.rows += rows
                self.epoch = values["epoch"]
            committed = reader.ask({"do": "commit", "epoch": self.epoch, **who})[0]
            over = bool(committed["over"])

    def table(self) -> pa.Table:
        self.join(120)
        assert self.error is None and not self.is_alive(), self.error
        return pa.Table.from_batches(self.rows)


def paced(sink: Sink) -> Flow:
    """Rows for three seconds, two replicas of everything."""
    flow = Flow("line", protect=pairs(failure_domain="process"))
    source = flow.source("numbers", generator(numbers, SCHEMA, rows=ROWS, rate=ROWS / 3))
    source.key_by("k").agg(t=F.sum("v"), n=F.count()).sink("out", sink)
    return flow


def expected() -> pa.Table:
    """The same on one site, undisturbed."""
    run = one_line(outlet(), rows=ROWS).start(sites=1)
    table = Reading(run.url, "only").table()
    run.wait(60)
    return table


def begin(flow: Flow, kept: list[Run], **options: object) -> Run:
    run = flow.start(sites=3, partitions=6, options=Options(**options))  # type: ignore[arg-type]
    kept.append(run)
    return run


def test_readers_get_every_row_once_whoever_dies(kept: list[Run]) -> None:
    run = begin(paced(outlet(readers=2)), kept)
    until_protected(run, 3)
    readers = [Reading(run.url, "one"), Reading(run.url, "other")]
    until(lambda: all(r.epoch >= 0 for r in readers), "both have begun")
    kill(run, replicas(run)["out", 0][0])
    right = expected()
    assert all(reader.table().equals(right) for reader in readers)
    assert run.wait(60), "it ends when they have everything"


def test_a_reader_that_never_comes_back_is_forgotten(
    kept: list[Run], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when another site leads than the one that has heard it."""
    run = begin(paced(outlet()), kept)
    until_protected(run, 3)
    with SinkReader(run.url, "out") as gone:
        gone.ask({"do": "begin", "reader": "gone", "latest": 0})
    other = Reading(run.url, "other")
    kill(run, replicas(run)["out", 0][0])
    other.table()
    found = {row["reader"]: row for row in run.readers("out")}
    assert set(found) == {"gone", "other"} and not run.ended(0)
    assert found["gone"]["bytes_held"] > found["other"]["bytes_held"] == 0
    monkeypatch.setenv("HOLDFAST_FLOW", run.url)
    assert main(["readers", "out", "--forget", "gnoe"]) == 2
    assert "its readers: 'gone', 'other'" in capsys.readouterr().err
    assert main(["readers", "out"]) == 0
    assert "reading" in capsys.readouterr().out
    run.forget_reader("out", "gone")
    assert run.wait(60), "nobody lacks anything now"
    monkeypatch.delenv("HOLDFAST_FLOW")
    assert main(["readers", "out"]) == 2 and "HOLDFAST_FLOW" in capsys.readouterr().err


def test_a_flow_ends_though_a_reader_never_comes_back(kept: list[Run]) -> None:
    run = begin(one_line(outlet(reader_timeout=1.0), rows=2_000), kept)
    with SinkReader(run.url, "out") as reader:
        reader.ask({"do": "begin", "reader": "gone", "latest": 0})
    assert run.wait(60)


def test_a_reader_goes_on_with_a_flow_that_was_stopped(kept: list[Run], tmp_path: Path) -> None:
    """It is away when the flow is stopped: what it lacks is stored, and so is that it will come."""
    store = str(tmp_path / "store")
    flow = Flow("line", protect=pairs(failure_domain="process"))
    flow.source("numbers", generator(numbers, SCHEMA, rate=20_000.0)).sink("out", outlet())
    run = flow.start(sites=3, partitions=6, checkpoint=Checkpoint(store))
    kept.append(run)
    who = {"reader": "nightly", "incarnation": parse(run.url)[1].ring.current.incarnation}
    with SinkReader(run.url, "out") as reader:
        until(lambda: reader.ask({"do": "look"})[0]["epoch"] > 3, "there are results")
        reader.ask({"do": "begin", "latest": 0, **who})
        values, found = reader.ask({"do": "read", "after": -1, "upto": 2, **who})
        assert values["epoch"] == 2
        reader.ask({"do": "commit", "epoch": 2, **who})
    run.stop()
    before = sum(record.rows for record in run.records())
    got, after = list(found), 2
    assert sum(b.num_rows for b in got) < before
    again = flow.start(sites=2, partitions=6, restore_from=store)
    kept.append(again)
    until_protected(again, 2)
    kill(again, replicas(again)["out", 0][0])  # the other replica knows the reader, too
    assert [row["epoch"] for row in again.readers("out")] == [after]
    until(lambda: again.status()["rows_in"] > before + 1_000, "it goes on")
    with SinkReader(again.url, "out") as reader:
        upto = reader.ask({"do": "latest", "after": after, "rows": -1, **who})[0]["epoch"]
        while after < upto:
            values, more = reader.ask({"do": "read", "after": after, "upto": upto, **who})
            got, after = got + more, values["epoch"]
    table = pa.Table.from_batches(got)
    assert table.num_rows >= before
    assert table.equals(pa.Table.from_batches([numbers(0, 0, table.num_rows)]))


def test_a_flow_waits_for_its_readers(kept: list[Run]) -> None:
    run = begin(one_line(outlet(unread_bytes_max=50_000), rows=200_000), kept)
    until(lambda: run.sink_report("out").get("epoch", -1) >= 0, "there are results")
    reached = -1

    def standby() -> bool:
        nonlocal reached
        before, reached = reached, len(run.records())
        return before == reached

    until(standby, "nothing is taken in any more")
    assert not run.ended(0)
    assert Reading(run.url, "late").table().num_rows == 200_000
    assert run.wait(60)


def test_where_there_is_nothing_to_read(kept: list[Run]) -> None:
    run = begin(one_line(outlet()), kept)
    with pytest.raises(FlowError, match="has no sink 'uot', but \\['out'\\]"):
        SinkReader(run.url, "uot").ask({"do": "look"})
    run.stop(drain=False)
    with pytest.raises(HostError, match="cannot find sink 'out'"):
        _ = SinkReader(run.url, "out").schema
