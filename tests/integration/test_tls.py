"""Kafka and PostgreSQL over TLS, with certificates on both sides."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest

from holdfast import Flow, sinks, sources
from holdfast.errors import HoldfastError
from tests.support.certificates import Authority, Certificate
from tests.support.runs import PATIENCE_S
from tests.support.secure_servers import SecureBroker, SecurePostgres
from tests.support.topics import Kafka

ROWS = pa.table({"k": list(range(100))})


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def client(authority: Authority) -> Certificate:
    made = authority.sign("client")
    made.key.chmod(0o600)  # libpq refuses a key that others can read
    return made


@pytest.fixture(scope="module")
def secure_broker(
    tmp_path_factory: pytest.TempPathFactory, authority: Authority
) -> Iterator[SecureBroker]:
    broker = SecureBroker(tmp_path_factory.mktemp("kafka"), authority)
    broker.start()
    yield broker
    broker.kill()


@pytest.fixture(scope="module")
def secure_database(authority: Authority) -> Iterator[SecurePostgres]:
    server = SecurePostgres(authority)
    server.start()
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute("CREATE USER app")
        connection.execute("CREATE DATABASE app OWNER app")
    yield server
    server.remove()


def test_rows_go_through_kafka_into_postgres(
    secure_broker: SecureBroker,
    secure_database: SecurePostgres,
    authority: Authority,
    client: Certificate,
) -> None:
    topic = Kafka(secure_broker.servers).create()
    servers = f"127.0.0.1:{secure_broker.secure_port}"
    options = secure_broker.secure_options(authority.cert, client)
    into = Flow("into")
    into.source("rows", sources.rows(ROWS)).sink(
        "out", sinks.kafka(servers, topic, options=options)
    )
    with into.start(sites=1) as run:
        assert run.wait(PATIENCE_S)

    dsn = secure_database.secure_dsn(authority.cert, client)
    from_kafka = sources.kafka(servers, topic, schema=ROWS.schema, end="latest", options=options)
    onward = Flow("onward")
    onward.source("rows", from_kafka).sink("out", sinks.postgres(dsn, "numbers", create=True))
    with onward.start(sites=2) as run:
        assert run.wait(PATIENCE_S)
    with psycopg.connect(dsn) as connection:
        found = connection.execute("SELECT k FROM numbers ORDER BY k").fetchall()
        encrypted = connection.execute(
            "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
        ).fetchone()
    assert [k for (k,) in found] == list(range(100))
    assert encrypted == (True,)


def test_without_tls_or_with_another_authority_nobody_gets_in(
    secure_broker: SecureBroker,
    secure_database: SecurePostgres,
    authority: Authority,
    client: Certificate,
    tmp_path: Path,
) -> None:
    other = Authority(tmp_path / "other")
    dsn = secure_database.secure_dsn(authority.cert, client)
    for wrong in (
        f"host=127.0.0.1 port={secure_database.port} user=app dbname=app sslmode=disable",
        dsn.replace(str(authority.cert), str(other.cert)),
    ):
        flow = Flow("refused")
        flow.source("rows", sources.rows(ROWS)).sink("out", sinks.postgres(wrong, "t", create=True))
        with pytest.raises(HoldfastError), flow.start(sites=1) as run:
            run.wait(PATIENCE_S)
    topic = Kafka(secure_broker.servers).create()
    options = secure_broker.secure_options(other.cert, client)
    flow = Flow("refused")
    servers = f"127.0.0.1:{secure_broker.secure_port}"
    source = sources.kafka(servers, topic, schema=ROWS.schema, end="latest", options=options)
    flow.source("rows", source).sink("out", sinks.discard())
    with pytest.raises(HoldfastError):
        flow.start(sites=1)
