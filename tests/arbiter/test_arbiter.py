"""Arbiters that need nothing but this host."""

import contextlib
import json
import os
import pickle
import random
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from holdfast.arbiter import FORMAT, Arbiter, Entry, arbiter
from holdfast.arbiter.file import KEPT, FileArbiter
from holdfast.arbiter.memory import ArbiterMemory, MemoryArbiter
from holdfast.errors import ArbiterAway, FlowError, HoldfastError, HostError, Superseded
from tests.support.arbiter_contract import (
    PROCESSES,
    Contract,
    ContractBetweenProcesses,
    MakeParty,
    led,
)


class TestMemory(Contract):
    @pytest.fixture
    def party(self) -> Iterator[MakeParty]:
        store = ArbiterMemory()
        yield lambda: MemoryArbiter("flow", self.LEASE_S, store)


class TestFile(Contract, ContractBetweenProcesses):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"file:{tmp_path}"

    @pytest.fixture
    def party(self, url: str) -> Iterator[MakeParty]:
        yield lambda: arbiter(url, "flow", self.LEASE_S)


def names(party: FileArbiter, prefix: str = "") -> list[str]:
    return sorted(n for n in os.listdir(party.directory) if n.startswith(prefix))


def test_old_versions_leases_and_temporary_files_are_removed(tmp_path: Path) -> None:
    party = FileArbiter(str(tmp_path), "flow", 10)
    for _ in range(3):
        entry = led(party, "a")
        assert party.renew(entry)
        (party.directory / f"temporary-{entry.version:012d}-left").touch()
        (party.directory / f"temporary-lease-{entry.term - 1:012d}-left").touch()
        for _ in range(KEPT):
            entry = party.commit(entry, b"view")
        party.resign(entry)
    assert entry.version == 3 * (KEPT + 1)
    versions = range(entry.version - KEPT + 1, entry.version + 1)
    assert names(party) == ["lease-000000000003", *(f"version-{v:012d}" for v in versions)]


def test_a_number_that_is_free_again_is_not_the_next_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader sleeps between its last look and its link, until its number was removed."""
    sleeper, other = (FileArbiter(str(tmp_path), "flow", 0.5) for _ in range(2))
    old = led(sleeper, "sleeper")
    write = sleeper._write

    def sleep_then_write(*args: Any, **options: Any) -> Path:
        time.sleep(0.51)
        entry = led(other, "other")
        other._lease_ns *= 1000
        assert other.renew(entry)
        for _ in range(KEPT + 2):
            entry = other.commit(entry, b"view")
        assert not sleeper._version_file(old.version + 1).exists()
        return write(*args, **options)

    monkeypatch.setattr(sleeper, "_write", sleep_then_write)
    with pytest.raises(Superseded, match=f"is now {KEPT + 4}, in term 2 of other"):
        sleeper.commit(old, b"void")
    latest = other.read()
    assert latest == sleeper.read() == Entry(KEPT + 4, 2, "other", b"view")
    assert other.commit(latest, b"next") == sleeper.read()
    assert len(names(other, "version-")) == KEPT


def test_a_renewal_that_comes_too_late_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A contender may have found the old lease run out before the new one was written."""
    party, other = (FileArbiter(str(tmp_path), "flow", 0.5) for _ in range(2))
    entry = led(party, "a")
    write = party._write

    def sleep_then_write(*args: Any, **options: Any) -> Path:
        monkeypatch.undo()
        time.sleep(0.51)
        return write(*args, **options)

    monkeypatch.setattr(party, "_write", sleep_then_write)
    assert not party.renew(entry)
    assert led(other, "b").term == 2


def test_a_directory_of_another_host_is_refused(tmp_path: Path) -> None:
    here, there = (FileArbiter(str(tmp_path), "flow", 10) for _ in range(2))
    there._boot, there._host = "another-boot", "elsewhere 123"
    entry = led(here, "a")
    for call in (there.read, lambda: there.lead("b"), lambda: there.commit(entry, b"")):
        with pytest.raises(HostError, match="another host"):
            call()
    assert here.renew(entry)


def test_after_a_restart_of_the_host_the_entry_stays_and_the_lease_is_void(tmp_path: Path) -> None:
    before, after = (FileArbiter(str(tmp_path), "flow", 1000) for _ in range(2))
    before._boot = "earlier-boot"
    entry = before.commit(led(before, "a"), b"view")
    assert before.renew(entry)
    assert after.read() == entry
    assert led(after, "b") == Entry(3, 2, "b", b"view")


def test_a_directory_that_is_gone_is_not_an_empty_one(tmp_path: Path) -> None:
    party = FileArbiter(str(tmp_path / "x"), "flow", 10)
    entry = led(party, "a")
    (tmp_path / "x").rename(tmp_path / "y")
    for call in (
        party.read,
        lambda: party.lead("a"),
        lambda: party.commit(entry, b""),
        lambda: party.renew(entry),
        lambda: party.resign(entry),
    ):
        with pytest.raises(ArbiterAway, match="membership is frozen"):
            call()
    (tmp_path / "y").rename(tmp_path / "x")
    assert party.renew(entry)


def _race(url: str, me: str, terms: int, pipe: Connection) -> None:
    party, won = arbiter(url, "flow", 10), []
    while party.read().term < terms:
        entry = party.lead(me)
        if entry is not None:
            committed = party.commit(entry, me.encode())
            won.append((entry.term, entry.version, committed.version))
            party.resign(committed)
    pipe.send(won)


def test_two_processes_race_for_200_terms(tmp_path: Path) -> None:
    pipes = {me: PROCESSES.Pipe() for me in ("a", "b")}
    racers = [
        PROCESSES.Process(target=_race, args=(str(tmp_path), me, 200, theirs))
        for me, (_, theirs) in pipes.items()
    ]
    for racer in racers:
        racer.start()
    for _, theirs in pipes.values():
        theirs.close()
    try:
        won = {me: mine.recv() for me, (mine, _) in pipes.items() if mine.poll(60)}
    finally:
        for racer in racers:
            racer.kill()
            racer.join()
    assert all(wins == sorted(wins) for wins in won.values())
    everything = sorted(won["a"] + won["b"])
    # Every term has one holder, and every version one writer.
    assert everything == [(t, 2 * t - 1, 2 * t) for t in range(1, len(everything) + 1)]
    assert len(everything) >= 200 and won["a"] and won["b"]


def _work(url: str, pipe: Connection) -> None:
    party = arbiter(url, "flow", 0.05)
    pipe.send("ready")
    while True:
        entry = party.lead("child")
        with contextlib.suppress(Superseded):
            while entry is not None and party.renew(entry):
                entry = party.commit(entry, str(entry.version).encode() * 10_000)


def test_a_kill_at_any_moment_leaves_a_whole_entry(tmp_path: Path) -> None:
    rng = random.Random(7)
    here = arbiter(str(tmp_path), "flow", 0.05)
    last = here.read()
    for _ in range(20):
        mine, theirs = PROCESSES.Pipe()
        child = PROCESSES.Process(target=_work, args=(str(tmp_path), theirs))
        child.start()
        theirs.close()
        assert mine.recv() == "ready"
        time.sleep(rng.uniform(0.06, 0.12))
        child.kill()
        child.join()
        entry = here.read()
        assert entry.version >= last.version and entry.term >= last.term
        assert entry.value in (last.value, str(entry.version - 1).encode() * 10_000)
        time.sleep(0.06)
        last = led(here, "parent")
        assert (last.version, last.term) == (entry.version + 1, entry.term + 1)
        here.resign(last)
    assert last.term > 20


@pytest.mark.parametrize("url", ["file:/x/arb", "file:///x/arb", "/x/arb"])
def test_addresses_of_a_file_arbiter(url: str, tmp_path: Path) -> None:
    made = arbiter(url.replace("/x", str(tmp_path), 1), "my flow/1", 1)
    assert isinstance(made, FileArbiter)
    assert made.directory == tmp_path / "arb" / "my%20flow%2F1"


NO_PATHS = ["", "relative/path", "file:relative", "file://host/path", "//host/path", "etcd://h:1"]
NO_SERVERS = ["zk://", "zk:host:1", "zk://host:port", "zk://a:1,,b:2", "zk://a:1/chroot"]


@pytest.mark.parametrize("url", [*NO_PATHS, *NO_SERVERS])
def test_addresses_of_nothing(url: str) -> None:
    with pytest.raises(FlowError, match="not an arbiter URL"):
        arbiter(url, "flow", 1)


def test_what_else_cannot_be() -> None:
    assert isinstance(arbiter(None, "flow", 1), MemoryArbiter)
    with pytest.raises(FlowError, match="lease"):
        arbiter(None, "flow", 0)
    with pytest.raises(FlowError, match="is not valid"):
        arbiter(None, "..", 1)
    with pytest.raises(HostError, match="cannot create an arbiter in"):
        arbiter("/proc/nowhere", "flow", 1)


def test_without_kazoo_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "holdfast.arbiter.zookeeper", raising=False)
    monkeypatch.setitem(sys.modules, "kazoo", None)
    with pytest.raises(HostError, match=r"pip install 'holdfast\[zookeeper\]'"):
        arbiter("zk://127.0.0.1:1", "flow", 1)


@pytest.mark.parametrize(
    "error",
    [Superseded(flow="f", term=3, cause="late"), ArbiterAway(where="zk://h:1", cause="gone")],
)
def test_errors_survive_pickling(error: HoldfastError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.__dict__) == (type(error), str(error), error.__dict__)


def test_the_interface_is_all_there_is() -> None:
    offered = {n for n in dir(Arbiter) if not n.startswith("_")}
    asked = {"lease_s", "read", "commit", "lead", "renew", "resign", "close"}
    assert offered == asked | {"names", "remove", "removed"}


def test_an_entry_of_a_later_format_is_refused_and_one_without_a_format_is_read(
    tmp_path: Path,
) -> None:
    party = arbiter(f"file:{tmp_path}", "f", 60.0)
    led = party.lead("me")
    assert led is not None
    party.commit(led, b"value")
    file = max((tmp_path / "f").glob("version-*"))
    header = json.loads(file.read_bytes().split(b"\n")[0])
    assert header.pop("format") == FORMAT
    file.write_bytes(json.dumps(header).encode() + b"\nvalue")
    assert party.read().value == b"value"
    file.write_bytes(json.dumps(header | {"format": FORMAT + 1}).encode() + b"\nvalue")
    with pytest.raises(HostError, match="has format 2, and this Holdfast reads format 1 at most"):
        party.read()
