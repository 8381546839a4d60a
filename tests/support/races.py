"""Several that try at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.errors import StoreTakenError


def raced(claimants: int, claim: Callable[[int], int]) -> list[int]:
    """Which of them got something, when all try at once."""
    start, won = threading.Barrier(claimants), []

    def one(number: int) -> None:
        start.wait()
        try:
            won.append(claim(number))
        except StoreTakenError as error:
            assert "another process owns the store" in str(error)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(claimants)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won
