"""What ``pip wheel .`` makes has everything in it, and works without being unpacked."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("holdfast", "pyspark_holdfast")


def test_the_wheel_has_what_the_repository_has(wheel: Path) -> None:
    files = [p for name in PACKAGES for p in (ROOT / name).rglob("*") if p.is_file()]
    ours = {str(p.relative_to(ROOT)) for p in files if "__pycache__" not in p.parts}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == ours
    assert {"holdfast/py.typed", "holdfast/spark/log4j2.properties"} <= ours
    (entry_points,) = (name for name in names if name.endswith("/entry_points.txt"))
    assert b"holdfast = holdfast.ui.cli:main" in zipfile.ZipFile(wheel).read(entry_points)


def test_it_runs_as_it_is_shipped(wheel: Path, tmp_path: Path) -> None:
    """As with --py-files: straight out of the archive, which Spark wants to be called .zip."""
    zipped = tmp_path / "holdfast.zip"
    zipped.write_bytes(wheel.read_bytes())
    script = (
        "import pkgutil, sys; import holdfast.spark.daemon, holdfast.ui.cli, pyspark_holdfast;"
        "assert all('holdfast.zip' in m.__file__ for n, m in sys.modules.items()"
        " if n.split('.')[0] == 'holdfast'), holdfast.__file__;"
        "print(sorted(m.name for m in pkgutil.iter_modules() if m.name.startswith('pyspark_')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(zipped)},
    )
    assert done.returncode == 0, done.stderr
    assert "pyspark_holdfast" in done.stdout, "Spark would not find format('holdfast')"
