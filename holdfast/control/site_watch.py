"""The sites that report to a control, and what their silence means.

Sites report to every control, whether it leads or not. What the watch finds becomes an event of the
controller, which decides what follows; only a leader has one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from holdfast.control import events as ev
from holdfast.control.suspects import Suspects
from holdfast.core.events import Call, ReplicaReported, SitesFailed, SitesHung, SitesPartitioned
from holdfast.core.failure_detector import FailureDetector
from holdfast.core.ids import SiteId
from holdfast.core.layout import View
from holdfast.net import wire

GATHER_S = 0.003
"""Sites that are lost within this time of each other have failed together: one view for all."""


class SiteWatch:
    """The sites of one control. It looks at them every fifth of a lease (`interval_s`)."""

    def __init__(self, lease_s: float, call_s_max: float) -> None:
        self.interval_s = lease_s / 5
        self._lease_s = lease_s
        self._call_s_max = max(call_s_max, 2 * lease_s)
        self.detector = FailureDetector(lease_s)
        self.suspects = Suspects()
        self.connected: list[SiteId] = []
        self.registered: dict[SiteId, wire.Register] = {}
        self.status: dict[int, dict[str, Any]] = {}
        """By site: the metrics that it reported last."""
        self._looked_at: float | None = None

    # --- what sites report ----------------------------------------------------------------------

    def on_message(self, site: SiteId, message: wire.Message, now: float) -> None:
        """Every message is a sign of life."""
        busy = isinstance(message, wire.Beat) and message.busy
        self.detector.heard(site, now, busy)

    def on_register(self, site: SiteId, message: wire.Register) -> None:
        if site not in self.connected:
            self.connected.append(site)
        self.registered[site] = message
        self.suspects.forget(site)

    def on_beat(self, site: SiteId, message: wire.Beat) -> None:
        call = Call(message.stage, message.epoch, message.seconds) if message.busy else None
        self.detector.in_call(site, call)

    def on_pulse_lost(self, site: SiteId) -> None:
        """The heartbeat thread of a site can no longer report its call."""
        self.detector.in_call(site, None)

    def on_unheard(self, site: SiteId, message: wire.Unheard, now: float) -> None:
        """A site complains that it hears nothing from another."""
        about = (site, SiteId(message.site), message.leases, message.how)
        self.detector.complained(*about, now)

    def on_status(self, site: SiteId | None, message: wire.Status) -> None:
        """Keep the metrics of a site. The status of the flow, from the leader, is not kept here."""
        if site in self.registered:
            self.status[site] = msgspec.json.decode(message.metrics)

    def on_lost(self, site: SiteId) -> None:
        """The connection to a site broke."""
        if site in self.connected:
            self.connected.remove(site)
        self.registered.pop(site, None)

    def expel(self, site: SiteId) -> None:
        """Forget a site that must leave."""
        self.on_lost(site)
        self.detector.forget(site)
        self.status.pop(site, None)

    def begin_term(self, sites: Iterable[SiteId], now: float) -> None:
        """Expect to hear from these sites from now on. What dead sites reported is dropped."""
        self.status = {s: said for s, said in self.status.items() if s in self.registered}
        self.detector.begin(sites, now)

    # --- suspects -------------------------------------------------------------------------------

    def inquire(self, addresses: Mapping[SiteId, tuple[str, int]]) -> ev.Probe | SitesFailed | None:
        """Tell dead suspects from those whose connection broke: no process listens at the address
        of a dead one."""
        found = self.suspects.inquire(addresses)
        return found if isinstance(found, ev.Probe) else _failed(found)

    def on_probed(self, event: ev.Probed) -> SitesFailed | None:
        """The suspects that are dead, by the result of a probe."""
        return _failed(self.suspects.gone(event))

    # --- looking at sites -----------------------------------------------------------------------

    def on_look(self, now: float, known: Collection[SiteId]) -> None:
        """Forget sites that are neither registered nor known to the leader. If this process has not
        run for a while, silence in that time does not count."""
        self.detector.keep({*self.registered, *known})
        self.status = {s: m for s, m in self.status.items() if s in self.registered or s in known}
        before, self._looked_at = self._looked_at, now
        if before is not None and now - before > 3 * self.interval_s:
            self.detector.was_away(now)

    def silent(self, known: Collection[SiteId], now: float) -> SitesFailed | None:
        """The known sites that have been silent for longer than the lease."""
        silent = self.detector.silent(known, now)
        reason = f"silent for more than {self._lease_s} s"
        return SitesFailed(tuple(silent), reason, certain=False) if silent else None

    def partitioned(self, now: float) -> SitesPartitioned | None:
        """The sites that hear nothing from each other. The caller acts on it."""
        couples = self.detector.partitioned(now)
        if not couples:
            return None
        self.detector.settled()
        return SitesPartitioned(couples)

    def hung(self) -> SitesHung | None:
        """The sites that have been in one call for too long."""
        calls = self.detector.hung(self._call_s_max)
        return SitesHung(calls, self._call_s_max) if calls else None

    def stuck(self, view: View, now: float) -> ReplicaReported | None:
        """A joining replica that has received nothing for too long, as if it had failed. There may
        be more of them; the next view has a different number."""
        stuck, seconds = self.detector.stuck(view, self.status.values(), now)
        for task, site in stuck:
            reason = f"site {site} got nothing for more than {seconds:.0f} s"
            return ReplicaReported(site, task, view.number, "failed", reason)
        return None


def _failed(gone: Mapping[SiteId, str]) -> SitesFailed | None:
    reason = "; ".join(sorted(set(gone.values())))
    return SitesFailed(tuple(gone), reason) if gone else None
