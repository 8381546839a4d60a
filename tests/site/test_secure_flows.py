"""Real flows at every level of security: kills, a relay, rotation of the secret."""

import hashlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast import Flow, sinks, sources
from holdfast import functions as F
from holdfast.api.options import Options
from holdfast.api.security import Tls
from holdfast.control.applications import Apps
from holdfast.errors import FlowError, HoldfastError, HostError
from holdfast.net.reader import SinkReader
from holdfast.protections import pairs
from tests.support.apps_runs import FILE, flows_on, out
from tests.support.apps_runs import check as check_apps
from tests.support.apps_runs import until as until_apps
from tests.support.certificates import Authority
from tests.support.runs import kill, pids, until, until_protected

__all__ = ["out"]

ROWS = 60_000


def numbers(split: int, offset: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"k": [n % 7 for n in range(offset, offset + count)]})


def counted(folder: Path, rate: int | None = 20_000) -> Flow:
    flow = Flow("counts", protect=pairs(failure_domain="process"))
    source = sources.generator(numbers, numbers(0, 0, 1).schema, rows=ROWS, rate=rate)
    counts = flow.source("numbers", source).key_by("k").agg(n=F.count())
    counts.sink("out", sinks.parquet(folder / "out"))
    counts.sink("now", sinks.table("k"))
    return flow


def check(folder: Path) -> None:
    found = pq.read_table(folder / "out")
    assert found.num_rows == ROWS
    assert found.group_by(["k", "n"]).aggregate([]).num_rows == ROWS


@pytest.mark.parametrize("level", ["auth", "mac", "tls"])
def test_a_site_is_killed(level: str, tmp_path: Path) -> None:
    with counted(tmp_path).start(sites=3, options=Options(security=level)) as run:
        until_protected(run, 3)
        kill(run, 0)
        assert run.wait(60)
    check(tmp_path)


def test_certificates_of_the_users_own(tmp_path: Path) -> None:
    made = Authority(tmp_path / "ca")
    own = made.sign("sites")
    files = Tls(made.cert, own.cert, own.key)
    with counted(tmp_path, None).start(sites=2, options=Options(security=files)) as run:
        assert run.wait(60)
    check(tmp_path)


def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    files = Tls(tmp_path / "none.pem", tmp_path / "none.pem", tmp_path / "none.key")
    with pytest.raises(HostError, match=r"none\.pem"):
        counted(tmp_path).start(sites=2, options=Options(security=files))


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(FlowError, match="security='strong' is no level"):
        Options(security="strong")


@pytest.mark.parametrize("level", ["auth", "tls"])
def test_the_secret_is_replaced_while_rows_flow(level: str, tmp_path: Path) -> None:
    with counted(tmp_path, 8_000).start(sites=3, options=Options(security=level)) as run:
        until_protected(run, 3)
        before, reader = run.url, SinkReader(run.url, "now")
        assert reader.schema.names == ["k", "n"]
        run.rotate_secret()
        assert run.url != before
        # Neither the open connection of an earlier reader goes on, nor does its address open one.
        with pytest.raises(HoldfastError, match="rotated"):
            _ask_once(before)
        _ask_once(run.url)
        until_protected(run, 3)
        assert run.status()["dead"] == {}
        kill(run, 0)
        again = run.rotate_secret("a secret of the operator's own")
        assert again.endswith(":a secret of the operator's own")
        assert run.wait(60)
    check(tmp_path)


def test_no_event_loop_of_a_control_derives_keys_from_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes 0.1 s."""
    threads: list[str] = []
    derive = hashlib.scrypt

    def noted(*args: Any, **settings: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return derive(*args, **settings)

    with counted(tmp_path).start(sites=2) as run:
        monkeypatch.setattr(hashlib, "scrypt", noted)
        run.rotate_secret()
        assert threads == [threading.current_thread().name]
        assert run.wait(60)


def _ask_once(url: str) -> None:
    """What a reader is told, without its patience."""
    SinkReader(url, "now")._find()


def test_sites_that_do_not_answer_are_named_and_both_secrets_are_good(tmp_path: Path) -> None:
    options = Options(security="tls", lease=60)
    with counted(tmp_path, 4_000).start(sites=3, options=options) as run:
        until_protected(run, 3)
        before = run.url
        pid = pids(run)[2]
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(HostError, match="no answer from site 2"):
                run.rotate_secret(timeout=1)
            _ask_once(before)
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda: not run._control.rotator.waits_for, "the rotation goes on")
        assert run.url != before
        run.stop(drain=False)


def test_a_secret_is_not_sent_where_others_can_read_it(tmp_path: Path) -> None:
    with counted(tmp_path, 4_000).start(sites=2, options=Options(security="mac")) as run:
        run._control.credentials.local = False  # as at any other address
        with pytest.raises(HostError, match="others could read the new keys"):
            run.rotate_secret()
        run.stop(drain=False)


def test_applications_get_a_new_secret_and_one_that_starts_later_has_it(out: Path) -> None:
    options = Options(security="tls")
    with Apps(FILE, apps=2, sites=4, host="process", options=options) as apps:
        until_apps(apps, lambda: apps.protected, "everything is protected")
        apps.rotate_secret()
        leader = apps.leader
        assert leader is not None
        os.killpg(apps.processes[leader].pid, signal.SIGKILL)
        lives = apps.lives[leader]
        until_apps(apps, lambda: apps.lives[leader] > lives, "it is started again")
        until_apps(apps, lambda: apps.leader == 1 - leader, "the other one leads")
        until_apps(apps, lambda: apps.protected, "everything is protected again")
        flows_on(apps)
        check_apps(apps, out)
