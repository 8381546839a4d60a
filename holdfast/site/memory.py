"""What of the memory that this process may use may be rows on their way."""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.sequencer import Budget


def fitting(budget: Budget, limit: int) -> Budget:
    """`budget`, or a smaller one where a sixteenth of the memory is less: rows in flight are held
    by several stages at once, and the state needs the rest."""
    return replace(budget, bytes_in_flight_max=min(budget.bytes_in_flight_max, limit // 16))
