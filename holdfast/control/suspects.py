"""Sites that something is wrong with, until it is known what: whether their processes are gone."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.control.events import Probe, Probed
from holdfast.core.ids import SiteId


class Suspects:
    """Those of one control, whether it leads or not."""

    def __init__(self) -> None:
        self._reasons: dict[SiteId, str | None] = {}
        """Sites whose connection broke; with a reason if their process is known to be gone."""
        self._probes = 0
        self._inquiries: dict[int, dict[SiteId, str]] = {}
        """Under way: who is known to be gone, besides those that are probed."""

    def __bool__(self) -> bool:
        return bool(self._reasons)

    def add(self, site: SiteId, reason: str | None) -> bool:
        """Whether it is the first, and an inquiry is to be begun."""
        first = not self._reasons
        self._reasons[site] = reason or self._reasons.get(site)
        return first

    def forget(self, site: SiteId) -> None:
        self._reasons.pop(site, None)

    def forget_all(self) -> None:
        self._reasons.clear()

    def probe(self, addresses: dict[SiteId, tuple[str, int]]) -> Probe:
        self._probes += 1
        return Probe(self._probes, addresses)

    def inquire(self, addresses: Mapping[SiteId, tuple[str, int]]) -> Probe | dict[SiteId, str]:
        """Those that are gone for sure, and why; or what is to be found out first. Who has no
        address is not known to the flow, and does not matter."""
        suspects, self._reasons = self._reasons, {}
        gone = {s: reason for s, reason in suspects.items() if reason is not None}
        unsure = [s for s, reason in suspects.items() if reason is None and s in addresses]
        if not unsure:
            return gone
        probe = self.probe({s: addresses[s] for s in unsure})
        self._inquiries[probe.number] = gone
        return probe

    def gone(self, probed: Probed) -> dict[SiteId, str]:
        """Those that are gone, and why; nobody if the inquiry does not count any more."""
        if probed.number not in self._inquiries:
            return {}
        known = self._inquiries.pop(probed.number)
        return known | dict.fromkeys(probed.gone, "its process is gone")

    def end_inquiries(self) -> None:
        """What they find would concern a term that is over."""
        self._inquiries.clear()
