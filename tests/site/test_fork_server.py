"""Processes that are forked from one that has everything loaded."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from holdfast import HostError
from holdfast.hosts.fork_server import ForkServer
from tests.support.runs import until


@pytest.fixture
def fork_server() -> Iterator[ForkServer]:
    made = ForkServer()
    yield made
    made.close()


def write(path: Path, *lines: object) -> None:
    path.write_text("\n".join(str(line) for line in lines))


def read(path: Path) -> list[str]:
    return path.read_text().split("\n")


def test_everything_is_as_in_the_process_that_asks(
    fork_server, tmp_path, monkeypatch, capfd
) -> None:
    """As it is now, not as it was when the first one was forked."""
    assert fork_server.fork(partial(write, tmp_path / "first")).wait(30) == 0
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_TEST", "here")
    monkeypatch.delenv("HOME", raising=False)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "beside.py").write_text(
        "import os\n"
        "def work():\n"
        "    print('said', os.getcwd(), os.environ['HOLDFAST_TEST'], 'HOME' in os.environ)\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "lib")
    from beside import work  # type: ignore[import-not-found]

    assert fork_server.fork(work).wait(30) == 0
    assert capfd.readouterr().out == f"said {tmp_path} here False\n"


def test_they_are_forked_and_have_everything_loaded(fork_server, tmp_path) -> None:
    def work(path: Path) -> None:
        write(path, os.getpid(), os.getppid(), "pandas" in sys.modules)

    one, other = (fork_server.fork(partial(work, tmp_path / name)) for name in "ab")
    assert one.wait(30) == other.wait(30) == 0
    (pid, parent, loaded), (_, other_parent, _) = read(tmp_path / "a"), read(tmp_path / "b")
    assert pid == str(one.pid) and parent == other_parent != str(os.getpid())
    assert loaded == "True"


def test_how_they_end(fork_server, capfd) -> None:
    assert fork_server.fork(partial(sys.exit, 3)).wait(30) == 3
    assert fork_server.fork(partial(int, "x")).wait(30) == 1
    assert "invalid literal" in capfd.readouterr().err
    endless = fork_server.fork(signal.pause)
    assert endless.wait(0.1) is None
    endless.kill()
    assert endless.wait(30) == -signal.SIGKILL
    endless.kill()  # whoever has its number now is left alone


def test_a_fork_server_that_dies_takes_nobody_along_and_is_replaced(fork_server, tmp_path) -> None:
    endless = fork_server.fork(signal.pause)
    os.kill(fork_server._process.pid, signal.SIGKILL)
    fork_server._process.wait()
    assert endless.wait(0.5) is None, "it lives, though nobody will know its status"
    assert fork_server.fork(partial(write, tmp_path / "x")).wait(30) == 0
    endless.kill()
    assert endless.wait(30) is not None


def test_a_fork_server_that_cannot_start_is_an_error(fork_server, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(HostError, match="fork server has ended"):
        fork_server.fork(signal.pause)


def test_it_ends_with_the_process_that_has_it_and_sites_do_not() -> None:
    code = """if True:
    import os, signal
    from holdfast.hosts.fork_server import shared
    born = shared.fork(signal.pause)
    print(shared._process.pid, born.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        fork_server, born = map(int, process.stdout.readline().split())
        try:
            until(lambda: not alive(fork_server), "the fork server has ended")
            assert process.wait() == -signal.SIGKILL and alive(born)
        finally:
            os.kill(born, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
