"""One server of each kind for all of these tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from holdfast.lab.chaos import kafka
from holdfast.lab.chaos.zookeeper import JAR, ZooKeeperServer
from holdfast.spark.session import local_session
from tests.support import postgres_server
from tests.support.topics import Kafka

CONNECTOR = kafka.JARS.with_name("spark-kafka")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    if not JAR.exists():
        pytest.fail("ZooKeeper is not installed: say make test-integration")
    server = ZooKeeperServer(tmp_path_factory.mktemp("zookeeper"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def database() -> Iterator[postgres_server.PostgresServer]:
    if not (postgres_server.PROGRAMS / "initdb").exists():
        pytest.fail("PostgreSQL is not installed: say make test-integration")
    server = postgres_server.PostgresServer()
    server.start()
    yield server
    server.remove()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kafka.Broker]:
    if (missing := kafka.unavailable()) is not None:
        pytest.fail(missing)
    broker = kafka.Broker(tmp_path_factory.mktemp("kafka"))
    broker.start()
    yield broker
    broker.kill()


@pytest.fixture
def topics(broker: kafka.Broker) -> Kafka:
    return Kafka(broker.servers)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """With Spark's own connector."""
    root = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    jars = [str(j) for j in CONNECTOR.glob("*.jar")]
    if not jars:
        pytest.fail("Spark's Kafka connector is not there: say make test-integration")
    conf = {"spark.jars": ",".join(jars), "spark.ui.enabled": "false"}
    session = local_session("holdfast integration", 4, **conf)
    yield session
    session.stop()
