"""Two applications that settle who leads through a real ZooKeeper, also while that is away."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.control.applications import Apps
from holdfast.lab.chaos.zookeeper import ZooKeeperServer
from tests.support.apps_runs import FILE, check, flows_on, out, until

__all__ = ["out"]


@pytest.fixture
def apps(out: Path, server: ZooKeeperServer) -> Iterator[Apps]:
    url = server.url
    with Apps(FILE, apps=2, sites=4, host="process", arbiter=url) as apps:
        until(apps, lambda: apps.protected, "everything is protected")
        yield apps


def test_the_leader_dies(apps: Apps, out: Path) -> None:
    flows_on(apps)
    leader = apps.leader
    assert leader is not None
    os.killpg(apps.processes[leader].pid, signal.SIGKILL)
    until(apps, lambda: apps.leader == 1 - leader, "the other leads")
    flows_on(apps)
    until(apps, lambda: apps.lives[leader] == 2 and apps.protected, "everything is protected again")
    check(apps, out)


def test_while_the_arbiter_is_away_data_flows_and_membership_is_frozen(
    apps: Apps, out: Path, server: ZooKeeperServer
) -> None:
    flows_on(apps)
    view = apps.status()["view"]
    server.signal(signal.SIGSTOP)
    try:
        flows_on(apps)
        site = apps.status()["sites"][-1]
        os.kill(site["pid"], signal.SIGKILL)
        until(apps, lambda: not apps.protected, "the loss is noticed")
    finally:
        server.signal(signal.SIGCONT)
    until(apps, lambda: apps.status()["view"] != view and apps.protected, "it is mended")
    flows_on(apps)
    check(apps, out)
