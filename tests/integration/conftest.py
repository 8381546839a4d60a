"""One ZooKeeper server for all of these tests."""

from collections.abc import Iterator

import pytest

from holdfast.chaos.zookeeper import JAR, Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not JAR.exists():
        pytest.fail("ZooKeeper is not installed: say make test-integration")
    server = Server(tmp_path_factory.mktemp("zookeeper"))
    server.start()
    yield server
    server.kill()
