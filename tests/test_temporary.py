"""Temporary folders: gone with their process, at the latest when the next one starts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from holdfast.storage.temporary import TemporaryFolder

CODE = """
import sys, time
from holdfast.storage.temporary import TemporaryFolder
made = TemporaryFolder("kind", sys.argv[1])
(made.path / "file").write_text("x")
print(made.path, flush=True)
time.sleep(600)
"""


def another_process(within: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has made a folder, and lives."""
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, str(within)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_is_removed_when_it_is_closed(tmp_path: Path) -> None:
    with TemporaryFolder("kind", str(tmp_path)) as made:
        (made.path / "file").write_text("x")
        assert list(tmp_path.iterdir()) == [made.path]
    made.close()
    assert list(tmp_path.iterdir()) == []


def test_folders_of_processes_that_were_killed_are_removed_at_the_next_start(
    tmp_path: Path,
) -> None:
    """Those of processes that live are not, nor those of another kind or version."""
    (dead, left), (alive, used) = another_process(tmp_path), another_process(tmp_path)
    try:
        (tmp_path / "holdfast-kind-of-an-earlier-version").mkdir()
        (tmp_path / "holdfast-other-1").mkdir()
        os.kill(dead.pid, signal.SIGKILL)
        dead.wait()
        assert left.is_dir()
        with TemporaryFolder("kind", str(tmp_path)) as made:
            expected = {"holdfast-kind-of-an-earlier-version", "holdfast-other-1"}
            expected |= {used.name, made.path.name}
            assert {path.name for path in tmp_path.iterdir()} == expected
            assert (used / "file").read_text() == "x"
    finally:
        alive.kill()
        alive.wait()


def test_a_folder_stays_as_long_as_a_process_lives_that_its_maker_has_passed_it_to(
    tmp_path: Path,
) -> None:
    """As the applications of a flow do that go on without their supervisor."""
    made = TemporaryFolder("kind", str(tmp_path))
    heir = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE,
                            pass_fds=[made.lock])  # fmt: skip
    os.close(made.lock)  # as if this process were gone
    try:
        with TemporaryFolder("kind", str(tmp_path)):
            assert made.path.is_dir()
    finally:
        heir.kill()
        heir.wait()
    with TemporaryFolder("kind", str(tmp_path)):
        assert not made.path.exists()
