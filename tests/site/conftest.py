import pytest

from holdfast.run import Run


@pytest.fixture
def kept():
    """Runs put here are ended with the test, whatever happens."""
    runs: list[Run] = []
    yield runs
    for run in runs:
        if not run.finished:
            try:
                run.stop(drain=False, timeout=20)
            except Exception:
                pass
