"""Suspects: sites whose connection broke, until it is known whether their processes are gone."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.control.events import Probe, Probed
from holdfast.core.ids import SiteId

SUSPECTS_MAX = 100
"""How many suspects a control remembers that does not lead. When it takes over, it also probes all
members of the view."""


class Suspects:
    """The suspects of one control, whether it leads or not."""

    def __init__(self) -> None:
        self._reasons: dict[SiteId, str | None] = {}
        """By suspect: the reason if its process is known to be gone, else None."""
        self._probes = 0
        self._inquiries: dict[int, dict[SiteId, str]] = {}
        """By number of a probe that is under way: the other suspects of the same inquiry, which are
        known to be gone, and why."""

    def __bool__(self) -> bool:
        return bool(self._reasons)

    def add(self, site: SiteId, reason: str | None) -> bool:
        """Add a suspect. Returns whether it is the first, so that an inquiry must begin."""
        first = not self._reasons
        self._reasons[site] = reason or self._reasons.pop(site, None)
        return first

    def trim(self) -> None:
        """Forget the oldest suspects of a control that does not lead."""
        while len(self._reasons) > SUSPECTS_MAX:
            del self._reasons[next(iter(self._reasons))]

    def forget(self, site: SiteId) -> None:
        self._reasons.pop(site, None)

    def forget_all(self) -> None:
        self._reasons.clear()

    def probe(self, addresses: dict[SiteId, tuple[str, int]]) -> Probe:
        """A probe of these sites, with a number of its own."""
        self._probes += 1
        return Probe(self._probes, addresses)

    def inquire(self, addresses: Mapping[SiteId, tuple[str, int]]) -> Probe | dict[SiteId, str]:
        """The suspects that are certainly gone, and why; or a probe, if that must be found out
        first. A suspect without an address is not a site of the flow, and is dropped."""
        suspects, self._reasons = self._reasons, {}
        gone = {s: reason for s, reason in suspects.items() if reason is not None}
        unsure = [s for s, reason in suspects.items() if reason is None and s in addresses]
        if not unsure:
            return gone
        probe = self.probe({s: addresses[s] for s in unsure})
        self._inquiries[probe.number] = gone
        return probe

    def gone(self, probed: Probed) -> dict[SiteId, str]:
        """The suspects that are gone, and why; empty if the inquiry no longer counts."""
        if probed.number not in self._inquiries:
            return {}
        known = self._inquiries.pop(probed.number)
        return known | dict.fromkeys(probed.gone, "its process is gone")

    def end_inquiries(self) -> None:
        """Forget inquiries that are under way: they belong to a term that is over."""
        self._inquiries.clear()
