"""A query feeds a flow through 1 to 4 replicas of a push source, and everything goes wrong.

The replicas are real `PushReader`s. Links between them keep their order. Views are committed in one
place, and each site learns of them late, or not at all; so a leader may be replaced and not know
it. Replicas die, one or several at once, up to all but one, and others join in their places, with
the state of a donor. A driver and its tasks push micro-batches, each task over a connection of its
own, to any site that says that it leads.

A row is (micro-batch, row, push, attempt): the rows of a micro-batch are known, and each push deals
them out to partitions in another way. The rows that have entered must be the same at all replicas,
and in the end, of each micro-batch, all rows once, from one push and from the attempts that it was
committed with. What the driver was told must be there whoever dies.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pyarrow as pa

from holdfast.control.checkpoint_store import not_void
from holdfast.core.ids import SiteId
from holdfast.net import wire
from holdfast.net.bundles import rows_of
from holdfast.site.push import PushReader
from holdfast.site.push_entries import Lead
from holdfast.site.staging import Staged

SCHEMA = pa.schema([("x", pa.int64())])
BATCHES, ROWS, ATTEMPTS = 5, 40, 100_000


class Replies(list[tuple[bool, str]]):
    def __call__(self, ok: bool, reason: str) -> None:
        self.append((ok, reason))


@dataclass(frozen=True)
class GroupView:
    """A view, of this source only."""

    rank: int
    replicas: tuple[SiteId, ...]
    joining: tuple[tuple[SiteId, int], ...] = ()
    joined: tuple[tuple[SiteId, int], ...] = ()
    """The rank of the view in which each replica joined that was not there at first."""

    @property
    def members(self) -> tuple[SiteId, ...]:
        return (*self.replicas, *(s for s, _ in self.joining))


@dataclass(eq=False)
class Replica:
    """A site's replica."""

    site: SiteId
    reader: PushReader
    view: GroupView | None = None
    views: deque[GroupView] = field(default_factory=deque)
    has_state: bool = False
    counted: bool = False
    read: int = 0
    """Rows that were read."""


@dataclass(eq=False)
class Task:
    replica: Replica
    push: str
    staged: Staged
    rows: list[int]


Link = tuple[SiteId, SiteId]


class Story:
    def __init__(self, seed: int, replicas: int, stored: bool) -> None:
        self.rng = random.Random(seed)
        self.wanted, self.trouble = replicas, 0.02
        often = [12, 24, *(self.rng.choice((2, 12, 30)) for _ in range(3)), 6, 20, 4]
        self.weights = [*often, *(self.rng.choice((1, 1, 4)) for _ in range(6))]
        self.flow: list[int] = []
        """Rows that are in epochs."""
        self.winners: set[int] = set()
        self.told: set[int] = set()
        """The micro-batches that the driver was told to be taken."""
        self.store: dict[tuple[int, int], dict[int, tuple[bytes, list[bytes]]]] | None = None
        self.bases: dict[tuple[int, int], int] = {}
        if stored:
            self.store = {}
        self.life, self.ranks, self.sites = 0, itertools.count(1), itertools.count(1)
        self.pushes, self.attempts = itertools.count(1), itertools.count(1)
        self.batch, self.push, self.home = 0, "", None
        self.tasks: list[Task] = []
        self.asked: Replies | None = None
        self.alive: dict[SiteId, Replica] = {}
        self.links: dict[Link, deque[tuple[wire.Message, bytes]]] = {}
        self.kept: deque[tuple[Replica, Lead, int, tuple[bytes, list[bytes]]]] = deque()
        self.leader_changed = 0
        self.reports: deque[tuple[SiteId, int]] = deque()
        """Replicas that are whole, as they were in a view of this rank."""
        self.handed: dict[
            SiteId, tuple[SiteId, dict[str, int], str, list[pa.RecordBatch], int]
        ] = {}
        """By replica that joins: what is on its way from the donor."""
        first = [self.launch() for _ in range(replicas)]
        for replica in first:
            replica.has_state = True
        self.view = GroupView(next(self.ranks), tuple(r.site for r in first))
        self.commit(self.view)

    # --- the cluster ------------------------------------------------------------------------------

    def launch(self) -> Replica:
        site = SiteId(next(self.sites))
        replica = Replica(site, PushReader(0, SCHEMA, through=False))
        replica.reader.send = lambda to, message, body: self.send(site, to, message, body)
        if self.store is not None:
            replica.reader.keep = lambda *push_batch: self.keep(replica, *push_batch)
        self.alive[site] = replica
        return replica

    def commit(self, view: GroupView) -> None:
        if self.view.replicas[:1] != view.replicas[:1]:
            self.leader_changed = view.rank
        self.view = view
        for replica in self.alive.values():
            if replica.site in view.members:
                replica.views.append(view)

    def adopt(self, replica: Replica) -> None:
        """A site learns of a view; of some never, because the next one has come."""
        if not replica.views:
            return
        view = replica.views.popleft()
        while replica.views and self.rng.random() < 0.3:
            view = replica.views.popleft()
        before, replica.view = replica.view, view
        for site in list(self.alive):
            if site not in view.members:
                for link in ((site, replica.site), (replica.site, site)):
                    self.links.pop(link, None)
        others = {s: dict(view.joined).get(s, 0) for s in view.replicas if s != replica.site}
        joining = {s: rank for s, rank in view.joining if s != replica.site}
        leader = None if view.replicas[0] == replica.site else view.replicas[0]
        replica.reader.on_replicas(leader, others, joining, view.rank)
        if before is not None and before.replicas[0] != view.replicas[0]:
            replica.counted = False
        self.ask(replica)

    def ask(self, replica: Replica) -> None:
        if replica.view is not None and replica.has_state and not replica.reader.leads:
            message = replica.reader.holding(again=True)
            self.send(replica.site, replica.view.replicas[0], message, [])

    def send(self, one: SiteId, other: SiteId, message: wire.Message, body: list[Any]) -> None:
        assert sum(len(bytes(b)) for b in body) < 20_000
        if other in self.alive and one in self.alive:
            whole = wire.decode(wire.encode(message)[wire.PREFIX.size :])
            data = b"".join(bytes(b) for b in body)
            self.links.setdefault((one, other), deque()).append((whole, data))

    def deliver(self) -> None:
        links = [link for link, queue in self.links.items() if queue]
        if links:
            self.deliver_on(self.rng.choice(links))

    def deliver_on(self, link: Link) -> None:
        message, body = self.links[link].popleft()
        site, to = link[0], self.alive.get(link[1])
        if to is None or to.view is None or site not in to.view.members:
            return
        self.receive(to, site, message, body)
        to.reader.check_invariants()

    def receive(self, to: Replica, site: SiteId, message: wire.Message, body: bytes) -> None:
        reader = to.reader
        match message:
            case wire.PushHas():
                if to.has_state and reader.on_push_has(site, message):
                    self.send(to.site, site, wire.PushCounted(0, reader.rank), [])
            case _ if not to.has_state:
                return
            case wire.PushBatch():
                if reader.on_push_batch(site, message, memoryview(body)):
                    self.send(to.site, site, reader.holding(again=False), [])
            case wire.PushKnown():
                if reader.on_push_known(site, message):
                    self.send(to.site, site, reader.holding(again=False), [])
            case wire.PushLead():
                if reader.follows(site, message.rank):
                    self.send(to.site, site, reader.holding(again=True), [])
            case wire.PushCounted():
                if reader.follows(site, message.rank):
                    self.report(to)

    def report(self, replica: Replica) -> None:
        """A replica that joins is whole: it tells the controller."""
        assert replica.view is not None
        self.reports.append((replica.site, replica.view.rank))

    def decide(self) -> None:
        """The controller learns that a replica is whole, and makes it a full one."""
        site, said = self.reports.popleft() if self.reports else (SiteId(0), 0)
        joining = dict(self.view.joining)
        if site not in joining or self.is_stale(said, joining[site]):
            return
        rest = tuple(pair for pair in self.view.joining if pair[0] != site)
        joined = (*self.view.joined, (site, joining[site]))
        self.commit(GroupView(next(self.ranks), (*self.view.replicas, site), rest, joined))

    def is_stale(self, said: int, since: int) -> bool:
        """Whether another leader must count the replica first that was whole in the view `said`."""
        return said < max(since, self.leader_changed)

    # --- faults -----------------------------------------------------------------------------------

    def lose_connection(self) -> None:
        one, other = (self.rng.choice(list(self.alive)) for _ in range(2))
        for link in ((one, other), (other, one)):
            self.links.pop(link, None)
        for site in (one, other):
            self.ask(self.alive[site])

    def kill(self) -> None:
        """Kill some replicas at once; one that counts is left."""
        full = [s for s in self.view.replicas if s in self.alive]
        count = self.rng.randint(0, len(full) - 1)
        victims = {*self.rng.sample(full, count)}
        if self.view.joining and self.rng.random() < 0.3:
            victims.add(self.view.joining[0][0])
        for site in victims:
            self.vanish(site)
        self.remove(victims)

    def vanish(self, site: SiteId) -> None:
        """End a process; some of what it has sent arrives."""
        for link in [k for k in self.links if site in k]:
            queue = self.links[link]
            while link[0] == site and queue and self.rng.random() < 0.7:
                self.deliver_on(link)
            self.links.pop(link, None)
        del self.alive[site]
        if self.home is not None and self.home.site == site:
            self.home, self.push, self.asked = None, "", None

    def remove(self, gone: set[SiteId]) -> None:
        if gone.intersection(self.view.members):
            left = tuple(s for s in self.view.replicas if s not in gone)
            joining = tuple(pair for pair in self.view.joining if pair[0] not in gone)
            self.commit(GroupView(next(self.ranks), left, joining, self.view.joined))

    def cut_off(self) -> None:
        """The leader is taken for dead, and lives on without knowing."""
        if len(self.view.replicas) > 1:
            self.remove({self.view.replicas[0]})

    def bury(self) -> None:
        """Somebody who lives on without being a member is stopped."""
        for site in [s for s in self.alive if s not in self.view.members]:
            self.vanish(site)

    def join(self) -> None:
        """A replica joins, gets the state of a donor, or is told what happened meanwhile."""
        if len(self.view.members) < self.wanted and not self.view.joining:
            site = self.launch().site
            rank = next(self.ranks)
            joining = ((site, rank),)
            self.commit(GroupView(rank, self.view.replicas, joining, self.view.joined))
            return
        for site, _ in self.view.joining:
            replica, donor = self.alive[site], self.alive[self.view.replicas[-1]]
            known = [self.alive[s].view for s in self.view.members]
            given = self.handed.pop(site, None)
            if given is not None and given[0] in self.view.replicas:
                _, saved, query, unread, read = given
                replica.reader.restore(saved, query)
                for rows in unread:
                    replica.reader._entered.add(0, replica.reader.overflow.hold(rows))
                replica.read, replica.has_state = read, True
                self.ask(replica)
            elif not replica.has_state and all(v is self.view for v in known):
                reader = donor.reader
                self.handed[site] = (
                    donor.site,
                    reader.save(),
                    reader.query,
                    reader.unread(),
                    donor.read,
                )

    # --- the store --------------------------------------------------------------------------------

    def keep(self, replica: Replica, lead: Lead, message: wire.PushBatch, bodies: Any) -> None:
        data = msgspec.msgpack.encode(message), [bytes(b) for b in bodies]
        self.kept.append((replica, lead, message.number, data))

    def write(self) -> None:
        """A site writes its next push batch. Sites write at the same time."""
        if not self.kept or self.store is None:
            return
        writer = self.rng.choice([replica for replica, *_ in self.kept])
        found = next(item for item in self.kept if item[0] is writer)
        self.kept.remove(found)
        replica, lead, number, data = found
        if replica.site in self.alive:
            at = self.life, lead.rank
            self.bases[at] = lead.base
            self.store.setdefault(at, {})[number] = data
            replica.reader.on_stored(lead, number)

    def lose_all(self) -> None:
        """All sites are gone; what is left is the store, and the query."""
        if self.store is None:
            return
        self.life += 1
        self.alive, self.links = {}, {}
        self.handed.clear()
        self.reports.clear()
        self.kept.clear()
        self.home, self.push, self.asked = None, "", None
        first = [self.launch() for _ in range(self.wanted)]
        for replica in first:
            for _, (header, bodies) in sorted(not_void(self.store, self.bases).items()):
                message = msgspec.msgpack.decode(header, type=wire.PushBatch)
                replica.reader.recover(message, [rows_of(memoryview(b)) for b in bodies])
            replica.reader.drop_part()
            replica.has_state = True
            assert self.follow(replica), "the store has what is in epochs"
        self.commit(GroupView(next(self.ranks), tuple(r.site for r in first)))

    # --- the flow ---------------------------------------------------------------------------------

    def read(self) -> None:
        """A leader reads what has entered; the others what is in epochs."""
        replica = self.rng.choice(list(self.alive.values()))
        if not replica.has_state or not self.follow(replica) or not replica.reader.leads:
            return
        rows = replica.reader.read(self.rng.randint(1, 40))
        if rows is not None:
            self.take(replica, rows)

    def follow(self, replica: Replica) -> bool:
        """Read the rows that are in epochs, as far as they have entered."""
        while lacks := len(self.flow) - replica.read:
            rows = replica.reader.read(lacks, due=True)
            if rows is None or not rows.num_rows:
                return False
            self.take(replica, rows)
        return True

    def take(self, replica: Replica, rows: pa.RecordBatch) -> None:
        found, at = rows["x"].to_pylist(), replica.read
        known = self.flow[at : at + len(found)]
        assert found[: len(known)] == known, f"site {replica.site} has other rows"
        self.flow += found[len(known) :]
        replica.read += len(found)

    # --- the query --------------------------------------------------------------------------------

    def drive(self) -> None:
        """The driver begins, commits, or goes on to the next micro-batch."""
        if self.asked:
            ok, remark = self.asked[-1]
            done = ok and (remark == "taken" or self.committed)
            if done:
                self.told.add(self.batch)
                self.batch += 1
            if done or not ok:
                self.push = ""
            self.asked = None
        elif self.asked is not None:
            if self.rng.random() < self.trouble:  # no answer comes: ask another site
                self.asked, self.push = None, ""
        elif not self.push and self.batch < BATCHES:
            self.begin()
        elif self.push and self.rng.random() < self.trouble:
            self.push = ""  # the job has failed, or another driver takes over
        elif self.push and all(self.done.values()):
            winners = [(p, self.rng.choice(found)) for p, found in self.done.items()]
            self.winners |= {attempt for _, attempt in winners}
            self.asked, self.committed = Replies(), True
            assert self.home is not None
            if self.home.reader.leads:
                self.home.reader.commit(self.push, winners, self.asked)
            else:
                self.asked(False, wire.NOT_HERE)

    def begin(self) -> None:
        leading = [r for r in self.alive.values() if r.reader.leads and r.has_state]
        if not leading:
            return
        number, self.home = next(self.pushes), self.rng.choice(leading)
        self.push, self.committed = f"push {number}", False
        said = Replies()
        self.home.reader.begin("query", self.batch, self.push, said)
        if not said or said[0] != (True, ""):
            self.asked = said
            return
        rows = [(self.batch * 100 + at) * 1_000 + number for at in range(ROWS)]
        self.rng.shuffle(rows)
        self.parts: dict[int, list[int]] = {p: [] for p in range(self.rng.randint(1, 4))}
        for row in rows:
            self.rng.choice(list(self.parts.values())).append(row)
        self.done: dict[int, list[int]] = {p: [] for p in self.parts}

    def run_task(self) -> None:
        """Begin an attempt at a partition, or go on with one: also of pushes that were given up."""
        self.tasks = [t for t in self.tasks if t.replica.site in self.alive]
        running = sum(task.push == self.push for task in self.tasks)
        if self.push and self.asked is None and self.rng.random() < 0.3 and running < 8:
            assert self.home is not None
            partition, attempt = self.rng.choice(list(self.parts)), next(self.attempts)
            staged = self.home.reader.open(self.push, partition, attempt, Replies())
            if staged is not None:
                rows = [row * ATTEMPTS + attempt for row in self.parts[partition]]
                self.tasks.append(Task(self.home, self.push, staged, rows))
        elif self.tasks:
            self.go_on(self.rng.choice(self.tasks))

    def go_on(self, task: Task) -> None:
        said, reader = Replies(), task.replica.reader
        if self.rng.random() < self.trouble or not reader.leads:
            reader.forget(task.staged)
            self.tasks.remove(task)
        elif task.rows:
            taken = self.rng.randint(1, 30)
            batch = pa.record_batch({"x": pa.array(task.rows[:taken], pa.int64())})
            reader.rows(task.staged, batch, said)
            del task.rows[:taken]
            if said != [(True, "")]:
                self.tasks.remove(task)
        else:
            reader.done(task.staged, said)
            self.tasks.remove(task)
            if said == [(True, "")] and task.push == self.push:
                self.done[task.staged.partition].append(task.staged.attempt)

    # --- from the beginning to the end ------------------------------------------------------------

    def hear(self) -> None:
        self.adopt(self.rng.choice(list(self.alive.values())))

    def step(self) -> None:
        usual = (self.drive, self.run_task, self.deliver, self.hear, self.write, self.read)
        rare = (self.lose_connection, self.kill, self.cut_off, self.bury, self.join, self.lose_all)
        self.rng.choices((*usual, self.deliver, self.decide, *rare), self.weights)[0]()
        for replica in self.alive.values():
            replica.reader.check_invariants()

    def finish(self) -> None:
        """Nothing goes wrong any more, and those who live on without being members are gone."""
        self.trouble = 0.0
        self.bury()
        if self.home is not None and self.asked == []:
            self.push, self.asked = "", None
        for _ in range(30_000):
            if self.batch == BATCHES and len(self.flow) == BATCHES * ROWS:
                break
            usual = (self.drive, self.run_task, self.deliver, self.hear, self.write, self.read)
            self.rng.choice(usual)()
            if self.asked == [] and self.home is not None and not self.home.reader.leads:
                self.push, self.asked = "", None
        else:
            raise AssertionError(f"stuck at micro-batch {self.batch} with {len(self.flow)} rows")
        self.catch_up()

    def catch_up(self) -> None:
        """All replicas get to the same rows."""
        for _ in range(3_000):
            members = [self.alive[s] for s in self.view.replicas]
            if all(self.follow(replica) for replica in members):
                return
            self.rng.choice((self.deliver, self.hear, self.write))()
        raise AssertionError("some replica does not get to the rows that are in epochs")

    def check(self) -> None:
        assert self.told == set(range(BATCHES))
        assert self.winners.issuperset(row % ATTEMPTS for row in self.flow)
        found = [row // ATTEMPTS for row in self.flow]
        for number in range(BATCHES):
            rows = found[number * ROWS : (number + 1) * ROWS]
            assert sorted(row // 1_000 - number * 100 for row in rows) == list(range(ROWS))
            assert len({row % 1_000 for row in rows}) == 1, "rows of two pushes"


def told(seed: int, replicas: int, stored: bool, steps: int = 1_500) -> Story:
    """A story from the beginning to the end."""
    story = Story(seed, replicas, stored)
    try:
        for _ in range(steps):
            story.step()
        story.finish()
        story.check()
    except Exception as error:
        raise AssertionError(f"seed {seed}, {replicas} replicas: {error}") from error
    return story
