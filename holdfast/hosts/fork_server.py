"""A process that has everything loaded, and forks the sites of this one.

Loading numpy, pyarrow and pandas costs a second of processor time. A site that replaces a dead one
would spend it just when the flow has least to spare; forked from here it runs after milliseconds.

What a site is to be comes through its standard input. Whoever wants it has a line to it, a socket
on which the fork server says the number of its process, and with which status that has ended. The
site holds the other end of the line, too, and says nothing: so the line breaks if fork server and
site are both gone, and not before.
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
"""The status of a site whose fork server is gone, so that nobody knows it."""

Work = Callable[[], None]
OnEnd = Callable[[int, int], None]
"""Called with the number and the exit status of a process that has ended."""


class Child:
    """A process that the fork server has forked."""

    def __init__(self, line: socket.socket, on_end: OnEnd | None) -> None:
        self._line, self._on_end = line, on_end
        number = line.recv(_NUMBER.size)
        if not number:
            raise HostError("the process from which sites are forked has ended")
        (self.pid,) = _NUMBER.unpack(number)
        self._status = _LOST
        self._ended = threading.Event()
        threading.Thread(target=self._listen, daemon=True, name="holdfast-watch").start()

    def _listen(self) -> None:
        with self._line:
            said = self._line.recv(_NUMBER.size)
        if said:
            (self._status,) = _NUMBER.unpack(said)
        self._ended.set()
        if self._on_end is not None:
            self._on_end(self.pid, self._status)

    def wait(self, timeout: float | None = None) -> int | None:
        """Its exit status, minus the signal that ended it; None if it still runs after `timeout`
        seconds."""
        return self._status if self._ended.wait(timeout) else None

    def kill(self) -> None:
        if not self._ended.is_set():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """The end of it in the process that wants sites. Started with the first of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def fork(self, work: Work, on_end: OnEnd | None = None) -> Child:
        """A process that does `work`, with the environment, the folder, the module path and the
        output of this one as they are now. `on_end` is called in a thread of its own."""
        here = (os.getcwd(), dict(os.environ), sys.path, cloudpickle.dumps(work))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stdin, feed = os.pipe()
        with suppress(BrokenPipeError), open(feed, "wb") as to_site:
            with theirs, open(stdin):
                self._ask([theirs.fileno(), stdin, 1, 2])
            pickle.dump(here, to_site)  # if it has died already, its line says so
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
        """No more sites; those that run are not touched."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.wait()
        self._control = self._process = None


shared = ForkServer()
"""One is enough for a process, however many flows it runs."""


def serve(control: socket.socket) -> Work:
    """Fork a process for every request until nobody is left who could send one. Returns only in
    those processes, each time with what it is to do."""
    # Ctrl-C is for whoever runs the flow, and may want it to drain. Without that one a site leaves.
    # The same goes for SIGTERM, which a service manager sends to all processes of a service.
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
            _remove(lines)
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
        _say(line, pid)


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


def _remove(lines: dict[int, socket.socket]) -> None:
    """Tell everybody whose site has ended."""
    while lines:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with lines.pop(pid) as line:
            _say(line, os.waitstatus_to_exitcode(status))


def _say(line: socket.socket, number: int) -> None:
    with suppress(OSError):  # nobody listens any more
        line.send(_NUMBER.pack(number))
