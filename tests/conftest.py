"""Fixtures of all tests."""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.api.options import Options
from holdfast.control.run import Run

pytest.register_assert_rewrite("tests.support")

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not built in place: what an older build has left there would be packed, too."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    rubbish = shutil.ignore_patterns("__pycache__")
    for package in ("holdfast", "pyspark_holdfast"):
        shutil.copytree(ROOT / package, sources / package, ignore=rubbish)
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, sources)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    build = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(sources)]
    done = subprocess.run([*command, *build], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.support.sharing import Sharing

    return Sharing(config, log)


@pytest.fixture(autouse=True)
def frequent_reports() -> Iterator[None]:
    """Sites report their metrics every 100 ms, unless a test says how often: tests wait for them.

    The lease stays as it is. A site that was killed is found out by its port, long before; and a
    shorter lease would declare those dead that a busy machine keeps waiting.
    """
    defaults = Options.__init__.__kwdefaults__
    assert "status_interval" in defaults
    faster = {**defaults, "status_interval": 0.1}
    # Not the fixture: it would be undone after a test's own fixtures have looked, not before.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Options.__init__, "__kwdefaults__", faster)
        yield


@pytest.fixture
def kept() -> Iterator[list[Run]]:
    """Runs put here are ended with the test, whatever happens."""
    runs: list[Run] = []
    yield runs
    for run in runs:
        if not run.ended(0):
            with contextlib.suppress(Exception):
                run.stop(drain=False, timeout=20)
