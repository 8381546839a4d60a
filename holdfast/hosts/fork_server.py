"""The fork server: a process that has all modules loaded and forks the sites of this process.

Loading numpy, pyarrow and pandas takes a second of processor time. A site that replaces a dead one
would spend it while the flow recovers. Forked from the fork server, it runs after milliseconds.

A site reads its work from its standard input. For each site the parent has a *line*, a socket on
which the fork server sends the site's process id and, when the site has ended, its exit status. The
site also holds the fork server's end of the line, without using it. So the line closes only when
both the fork server and the site are gone.
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import cloudpickle

from holdfast.errors import HostError

_NUMBER = struct.Struct("!i")
_LOST = -1
"""The status of a site whose fork server is gone; the real status is unknown."""

Work = Callable[[], None]
OnEnd = Callable[[int, int], None]
"""Called with the process id and the exit status of a process that has ended."""


class Child:
    """A process that the fork server forked."""

    def __init__(self, line: socket.socket, on_end: OnEnd | None) -> None:
        self._line, self._on_end = line, on_end
        pid = line.recv(_NUMBER.size)
        if not pid:
            raise HostError("the fork server has ended")
        (self.pid,) = _NUMBER.unpack(pid)
        self._status = _LOST
        self._ended = threading.Event()
        threading.Thread(target=self._listen, daemon=True, name="holdfast-watch").start()

    def _listen(self) -> None:
        with self._line:
            status = self._line.recv(_NUMBER.size)
        if status:
            (self._status,) = _NUMBER.unpack(status)
        self._ended.set()
        if self._on_end is not None:
            self._on_end(self.pid, self._status)

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the exit status, negative for the signal that ended the process; None if it still
        runs after `timeout` seconds."""
        return self._status if self._ended.wait(timeout) else None

    def kill(self) -> None:
        if not self._ended.is_set():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """The client of the fork server, which it starts with the first site."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def fork(self, work: Work, on_end: OnEnd | None = None) -> Child:
        """Fork a process that does `work`. It gets the current environment, working directory,
        module path and output of this process. `on_end` is called in its own thread."""
        setup = (os.getcwd(), dict(os.environ), sys.path, cloudpickle.dumps(work))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stdin, write_end = os.pipe()
        with suppress(BrokenPipeError), open(write_end, "wb") as to_site:
            with theirs, open(stdin):
                self._ask([theirs.fileno(), stdin, 1, 2])
            pickle.dump(setup, to_site)  # if it has already died, its line reports that
        return Child(ours, on_end)

    def _ask(self, descriptors: list[int]) -> None:
        with self._lock:
            for last in (False, True):
                try:
                    socket.send_fds(self._running(), [b"!"], descriptors)
                    return
                except OSError:
                    self._close()
                    if last:
                        raise

    def _running(self) -> socket.socket:
        if self._control is None:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "holdfast.hosts", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            atexit.register(self.close)
        return self._control

    def close(self) -> None:
        """End the fork server; running sites are not affected."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.wait()
        self._control = self._process = None


shared = ForkServer()
"""The fork server of this process, for all flows that it runs."""


def serve(control: socket.socket) -> Work:
    """Fork a process for every request, until no process can send one. Returns only in the forked
    processes, with their work."""
    # Ctrl-C is for the process that runs the flow, which may want to drain it. A site leaves when
    # that process is gone. The same holds for SIGTERM, which a service manager sends to all
    # processes of a service.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waking, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    lines: dict[int, socket.socket] = {}
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(waking, selectors.EVENT_READ)
    gc.freeze()  # so that a collection in a child does not copy every page
    while True:
        ready = [key.fileobj for key, _ in selector.select()]
        if waking in ready:
            waking.recv(1024)
            _reap(lines)
        if control not in ready:
            continue
        request, descriptors, *_ = socket.recv_fds(control, 1, 4)
        if not request:
            sys.exit()
        line = socket.socket(fileno=descriptors[0])
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            selector.close()
            for inherited in (waking, wake, control, *lines.values()):
                inherited.close()
            line.detach()  # stays open as long as this process lives
            return _received(descriptors[1:])
        lines[pid] = line
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        _send_number(line, pid)


def _received(streams: list[int]) -> Work:
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    with open(0, "rb", closefd=False) as stdin:
        folder, environment, sys.path[:], work = pickle.load(stdin)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    return pickle.loads(work)


def _reap(lines: dict[int, socket.socket]) -> None:
    """Send the exit status of every ended site on its line, and close the line."""
    while lines:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with lines.pop(pid) as line:
            _send_number(line, os.waitstatus_to_exitcode(status))


def _send_number(line: socket.socket, number: int) -> None:
    with suppress(OSError):  # the parent has closed the line
        line.send(_NUMBER.pack(number))
