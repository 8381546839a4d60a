"""Ctrl-C and SIGTERM, which stop a flow."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM was received; it stops the flow like Ctrl-C."""


@contextmanager
def stoppable(*, by_sigterm: bool = True) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM interrupt this context. Enter it after Spark has started, because
    Spark installs a handler of Ctrl-C that cancels all jobs, and sites are jobs."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    numbers = [signal.SIGINT, *([signal.SIGTERM] if by_sigterm else [])]
    before = {number: signal.getsignal(number) for number in numbers}
    if threading.current_thread() is not threading.main_thread():
        before = {}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
