"""One server of each kind for all of these tests."""

from collections.abc import Iterator

import pytest

from holdfast.chaos.zookeeper import JAR, Server
from tests.integration import postgres_server
from tests.site.conftest import kept

__all__ = ["database", "kept", "server"]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not JAR.exists():
        pytest.fail("ZooKeeper is not installed: say make test-integration")
    server = Server(tmp_path_factory.mktemp("zookeeper"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def database() -> Iterator[postgres_server.Server]:
    if not (postgres_server.PROGRAMS / "initdb").exists():
        pytest.fail("PostgreSQL is not installed: say make test-integration")
    server = postgres_server.Server()
    server.start()
    yield server
    server.remove()
