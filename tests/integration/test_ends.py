"""Every kind of source and sink in two Spark applications: sites, tasks and drivers are killed at
random moments, and nothing is lost or repeated at any end."""

import json
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from holdfast.control.applications import Apps
from holdfast.lab.bench.processes import tree
from holdfast.net.keys import Keys
from holdfast.net.reader import TableReader, url_of
from tests.support import ends_flow
from tests.support.apps_runs import until
from tests.support.ends_flow import MADE, numbers
from tests.support.postgres_server import PostgresServer
from tests.support.topics import Kafka

FILE = ends_flow.__file__
SEED = 4
FAULTS = ["site", "task", "driver", "site"]
PER_FILE, PAUSE_S = 300, 0.3
Totals = list[tuple[int, float, int]]


def expected(rows: int) -> Totals:
    """What a line gives for its first rows."""
    sums: Counter[int] = Counter()
    counts: Counter[int] = Counter()
    found = []
    for row in numbers(0, 0, rows).to_pylist():
        sums[row["k"]] += row["v"]
        counts[row["k"]] += 1
        found.append((row["k"], float(sums[row["k"]]), counts[row["k"]]))
    return sorted(found)


def totals(table: pa.Table) -> Totals:
    return sorted(zip(*(table[n].to_pylist() for n in ("k", "t", "n")), strict=True))


class Feed(threading.Thread):
    """Adds files to two folders, and rows to a topic, until it is told to stop."""

    def __init__(self, told: dict[str, str], topics: Kafka) -> None:
        super().__init__(daemon=True)
        self._told, self._topics = told, topics
        self._over = threading.Event()
        self.rows = 0

    def run(self) -> None:
        while not self._over.wait(PAUSE_S):
            rows = pa.Table.from_batches([numbers(0, self.rows, PER_FILE)])
            ids = pa.array(range(self.rows, self.rows + PER_FILE))
            self._add("files", rows.add_column(0, "id", ids))
            self._add("folder", rows)
            for partition in (0, 1):  # a key is in one of them
                some = [r for r in rows.to_pylist() if r["k"] % 2 == partition]
                self._topics.fill(self._told["topic"], some, partition)
            self.rows += PER_FILE

    def _add(self, folder: str, rows: pa.Table) -> None:
        path = Path(self._told[folder], f"{self.rows:08d}.parquet")
        pq.write_table(rows, path.with_name(f".{path.name}"))
        path.with_name(f".{path.name}").rename(path)

    def stop(self) -> int:
        self._over.set()
        self.join()
        return self.rows


class Reader:
    """A query that reads the flow's outlet into files; it can be started again."""

    def __init__(self, spark: SparkSession, url: str, folder: Path) -> None:
        self._folder = folder
        source = spark.readStream.format("holdfast").option("flow", url).option("sink", "made out")
        self._df = source.option("reader", "files").load()
        self.start()

    def start(self) -> None:
        writer = self._df.writeStream.option("checkpointLocation", str(self._folder / "at"))
        self.query = writer.format("parquet").start(str(self._folder / "rows"))


def kill(apps: Apps, what: str, draw: random.Random) -> None:
    sites = {site["pid"] for site in apps.status()["sites"]}
    if what == "driver":
        os.killpg(apps.processes[draw.choice(sorted(apps.processes))].pid, signal.SIGKILL)
        return
    victims = sites
    if what == "task":
        below = {p for process in apps.processes.values() for p in tree(process.pid)}
        victims = {p for p in below - sites if is_worker(p, below)}
    os.kill(draw.choice(sorted(victims)), signal.SIGKILL)


def is_worker(pid: int, others: set[int]) -> bool:
    """Whether it is one of Spark's Python workers: forked by a daemon that looks the same."""
    try:
        stat, command = (Path(f"/proc/{pid}/{n}").read_text() for n in ("stat", "cmdline"))
        parent = int(stat.rsplit(")", 1)[1].split()[1])
        same = command == Path(f"/proc/{parent}/cmdline").read_text()
    except OSError:
        return False
    return parent in others and same and "pyspark" in command


@pytest.fixture
def told(
    tmp_path: Path, topics: Kafka, database: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    folders = {n: str(tmp_path / n) for n in ("files", "folder", "parquet", "checkpoint")}
    for name in ("files", "folder"):
        Path(folders[name]).mkdir()
    servers = {"servers": topics.servers, "topic": topics.create(2), "out": topics.create()}
    made = {**folders, **servers, "dsn": database.dsn, "table": "ends"}
    monkeypatch.setenv("HOLDFAST_TEST_ENDS", json.dumps(made))
    yield made


def test_nothing_is_lost_or_repeated_whoever_is_killed(
    spark: SparkSession, told: dict[str, str], topics: Kafka, tmp_path: Path
) -> None:
    draw = random.Random(SEED)
    faults = FAULTS[:]
    draw.shuffle(faults)
    feed = Feed(told, topics)
    with Apps(FILE, apps=2, sites=4) as apps:
        until(apps, lambda: apps.protected, "everything is protected", within=180)
        place = apps.configs[0].place
        url = url_of("ends", Keys.of(apps.configs[0].secret, "ends"), place.controls)
        feed.start()
        reader = Reader(spark, url, tmp_path)
        for fault in faults:
            taken = apps.status()["rows_in"]
            until(apps, lambda taken=taken: apps.status()["rows_in"] > taken + 2_000, "rows flow")
            threading.Event().wait(draw.random())
            kill(apps, fault, draw)
            if fault != "task":
                until(apps, lambda: not apps.protected, f"{fault}: it is noticed")
            until(apps, lambda: apps.protected, f"{fault}: protected again", within=180)
            # An application that has found another leader may still repeat the last one's word.
            threading.Event().wait(apps.configs[0].options.lease_s)
            until(apps, lambda: apps.protected, f"{fault}: protected again", within=180)
            if fault == "driver":
                reader.query.stop()
                reader.start()
        rows = feed.stop()
        until(apps, lambda: apps.status()["rows_in"] >= 3 * rows + MADE, "everything is taken")
        assert apps.status()["rows_in"] == 3 * rows + MADE
        latest = {k: (k, t, n) for k, t, n in sorted(expected(MADE), key=lambda r: r[2])}
        with TableReader(url, "latest") as table:
            until(
                apps,
                lambda: totals(table.to_arrow()) == sorted(latest.values()),
                "the table is right",
            )
        apps.stop()
        apps.wait()
        reader.query.stop()
    with psycopg.connect(told["dsn"]) as connection:
        in_table = connection.execute("SELECT k, t, n FROM ends").fetchall()
    assert totals(pq.read_table(told["parquet"])) == expected(rows)
    assert sorted(in_table) == expected(rows)
    assert sorted((r["k"], r["t"], r["n"]) for r in topics.rows(told["out"])) == expected(rows)
    read = spark.read.parquet(str(tmp_path / "rows")).toArrow()
    assert totals(read) == expected(MADE)
