"""Holdfast as users get it: a wheel, built from a replica of the sources."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
