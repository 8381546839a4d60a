"""One flow in two applications on plain processes: either of them may die, or stand still."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import pyarrow.parquet as pq
import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.api.options import Options
from holdfast.arbiter import arbiter
from holdfast.control.applications import Apps
from holdfast.control.hosting import Place
from holdfast.control.run import Run
from holdfast.control.server import Control
from holdfast.errors import FlowError, HostError
from holdfast.hosts.processes import ProcessHost
from holdfast.plan.planner import plan
from tests.support.apps_flow import flow
from tests.support.apps_runs import FILE, check, flows_on, out, until

__all__ = ["out"]

FIGURES = ("rows_in_total", "epochs_total", "lag_epochs", "output_gap_seconds", "state_bytes")


@pytest.fixture
def apps(out: Path) -> Iterator[Apps]:
    with Apps(FILE, apps=2, sites=4, host="process", http=two_free_ports()) as apps:
        until(apps, lambda: apps.protected, "everything is protected")
        yield apps


def two_free_ports() -> str:
    """An address whose port is free, and so is the next one."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port = one.getsockname()[1]
            with suppress(OSError, OverflowError), socket.create_server(("127.0.0.1", port + 1)):
                return f"127.0.0.1:{port}"


def metrics(apps: Apps, app: int) -> dict[str, float]:
    """What an application serves for Prometheus, added up by name; nothing if it does not."""
    with suppress(OSError), urlopen(f"http://{apps.configs[app].http}/metrics", timeout=30) as said:
        sums: Counter[str] = Counter()
        for family in text_string_to_metric_families(said.read().decode()):
            for sample in family.samples:
                sums[sample.name.removeprefix("holdfast_")] += sample.value
        return dict(sums)
    return {}


@pytest.mark.parametrize("role", ["leading", "following"])
def test_an_application_dies_with_all_its_sites(apps: Apps, role: str, out: Path) -> None:
    flows_on(apps)
    leader = apps.leader
    assert leader is not None
    victim = leader if role == "leading" else 1 - leader
    other = 1 - victim
    gone = {s["site"] for s in apps.status()["sites"]}
    os.killpg(apps.processes[victim].pid, signal.SIGKILL)
    until(apps, lambda: apps.leader == other, "the other leads")
    flows_on(apps)
    until(
        apps,
        lambda: bool({s["site"] for s in apps.status()["sites"]} - gone) and apps.protected,
        "the application is back, and everything is protected again",
    )
    assert apps.lives[victim] == 2
    check(apps, out)


def all_is_known(said: dict[str, float]) -> bool:
    """Sites report when they get to it."""
    return said.get("protected") == 1.0 and said["sites"] == 4 and said["state_bytes"] > 0


def test_each_application_serves_the_metrics_of_the_whole_flow(apps: Apps) -> None:
    leader = apps.leader
    assert leader is not None
    for app, leads in ((leader, 1.0), (1 - leader, 0.0)):
        until(apps, lambda app=app: all_is_known(metrics(apps, app)), "it is known")
        said = metrics(apps, app)
        assert said["leading"] == leads and said["replicas_missing"] == 0
        assert set(FIGURES) <= said.keys() and said["rows_in_total"] > 0
        until(
            apps,
            lambda app=app, said=said: metrics(apps, app)["rows_in_total"] > said["rows_in_total"],
            "the metrics move on",
        )
    os.killpg(apps.processes[leader].pid, signal.SIGKILL)
    until(apps, lambda: metrics(apps, 1 - leader).get("leading") == 1.0, "the other leads")
    until(apps, lambda: metrics(apps, leader).get("protected") == 1.0, "the first one is back")
    assert metrics(apps, leader)["leading"] == 0.0


def test_an_address_that_others_cannot_be_counted_from_is_refused() -> None:
    for address in ("9090", "127.0.0.1:0", "127.0.0.1:http"):
        with pytest.raises(FlowError, match="no address that others can be counted from"):
            Apps(FILE, apps=2, sites=2, host="process", http=address)


def test_a_leader_that_stands_still_is_replaced_and_finds_out(apps: Apps, out: Path) -> None:
    """Only its control stands still; its sites run on, and stay."""
    flows_on(apps)
    leader = apps.leader
    assert leader is not None
    before = apps.status()["domains"].keys()
    assert len(before) == 4
    os.kill(apps.processes[leader].pid, signal.SIGSTOP)
    try:
        until(apps, lambda: apps.leader == 1 - leader, "the other leads")
        flows_on(apps)
    finally:
        os.kill(apps.processes[leader].pid, signal.SIGCONT)
    flows_on(apps)
    assert apps.leader == 1 - leader
    assert apps.status()["domains"].keys() == before
    check(apps, out)


def test_a_leader_that_wakes_up_does_not_hide_the_one_that_leads() -> None:
    """It reports once more before it finds out, and later than the other."""
    apps = Apps.__new__(Apps)
    old = {"app": 0, "state": "running", "term": 1, "time": 9.0}
    new = {"app": 1, "state": "running", "term": 2, "time": 8.9}
    apps._last_status, apps._reports = {}, lambda: {0: old, 1: new}  # type: ignore[method-assign]
    assert apps.leader == 1


def test_applications_on_two_hosts_need_an_arbiter() -> None:
    controls = (("one", 1), ("two", 1))
    with pytest.raises(HostError, match="need an arbiter that all of them reach"):
        Place(0, controls, "file:/tmp/somewhere")
    with pytest.raises(HostError, match="2 applications need an arbiter"):
        Place(0, controls)
    assert Place(1, controls, "zk://one:2181").apps == 2


def test_more_applications_than_sites_are_refused() -> None:
    with pytest.raises(FlowError, match="at least as many sites"):
        Apps(FILE, apps=3, sites=2, host="process")


def test_a_stop_that_comes_while_another_leads_is_not_forgotten(tmp_path: Path) -> None:
    """Whoever leads may be stepping down just then, and nobody would hear of it."""
    with socket.create_server(("127.0.0.1", 0)) as leader, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        controls = (free.getsockname(), leader.getsockname())
    with socket.create_server(controls[1]):
        place = Place(0, controls, f"file:{tmp_path}")
        planned, host = flow(out=str(tmp_path / "out")), ProcessHost()
        control = Control(planned, plan(planned), host, 2, 0, Options(), b"secret" * 6, place)
        other = arbiter(place.arbiter_url, control.arbiter.arbiter.flow, 1.0)
        entry = other.lead(f"127.0.0.1:{controls[1][1]}")
        assert entry is not None
        run = Run(control, host)
        run._thread.start()
        control.stop(drain=False)
        other.resign(entry)
        ended = run.wait(20)
        control.stop(drain=False)
        assert run.wait(20) and ended


def test_sigterm_to_the_supervisor_drains_the_flow(out: Path, tmp_path: Path) -> None:
    """It reaches the applications and their sites, too, as a service manager would have it."""
    status, root = tmp_path / "status.json", str(Path(__file__).parents[2])
    arguments = ["run", FILE, "--apps", "2", "--sites", "2", "--host", "process", "--quiet"]
    running = subprocess.Popen(
        [sys.executable, "-m", "holdfast.ui.cli", *arguments, "--json", str(status)],
        env=os.environ | {"PYTHONPATH": root},
    )
    try:
        deadline = time.monotonic() + 90.0
        while not any(out.glob("*.parquet")):
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        applications = [
            p for p in children(running.pid) if "holdfast.control.applications" in command_of(p)
        ]
        assert len(applications) == 2
        for process in (running.pid, *applications):
            os.kill(process, signal.SIGTERM)
        assert running.wait(90) == 0
    finally:
        running.kill()
        running.wait()
    said = json.loads(status.read_text())
    assert said["state"] == "done"
    assert pq.read_table(out).num_rows == said["rows_in"] > 0


def children(parent: int) -> list[int]:
    tasks = Path(f"/proc/{parent}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def command_of(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
