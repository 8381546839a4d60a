"""Acknowledgements that wait to be sent, so that those to one site go in one message."""

from __future__ import annotations

from holdfast.core.ids import SiteId
from holdfast.core.messages import Ack


class AckQueue:
    """Acknowledgements by site. They are cumulative: a later one replaces an earlier one."""

    def __init__(self, window: int) -> None:
        self._hasty_always = window < 4
        self._waiting: dict[SiteId, dict[tuple[int, int, int], Ack]] = {}
        self._hasty = False

    def put(self, site: SiteId, ack: Ack, lazy: bool) -> None:
        """Add an ack. A `lazy` one only lets the producer drop bundles, which can wait until there
        is another one for it. The others ask for something: bundles, or credit."""
        waiting = self._waiting.setdefault(site, {})
        key = (ack.exchange, ack.producer, ack.consumer)
        self._hasty |= not lazy or key in waiting or self._hasty_always
        waiting[key] = ack

    @property
    def waits(self) -> bool:
        return bool(self._waiting)

    @property
    def is_due(self) -> bool:
        """Whether a producer waits for one of them."""
        return bool(self._waiting) and self._hasty

    def forget(self, site: SiteId) -> None:
        self._waiting.pop(site, None)

    def take(self) -> dict[SiteId, list[Ack]]:
        """Remove and return all."""
        self._hasty = False
        waiting, self._waiting = self._waiting, {}
        return {site: list(acks.values()) for site, acks in waiting.items()}
