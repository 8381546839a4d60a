"""Starts the processes of sites, and finds out which sites have lost their process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from holdfast.api.graph import Flow
from holdfast.api.options import Options
from holdfast.control.credentials import Credentials
from holdfast.control.events import ControlEvent, Probe, Probed, ProcessExited
from holdfast.control.hosting import Address, Host, Place
from holdfast.core.events import FlowFailed
from holdfast.core.ids import SiteId
from holdfast.net.connection import is_listening
from holdfast.site.config import SiteConfig

Post = Callable[[ControlEvent], None]
"""Hands an event to the control node, from any thread."""


class SiteLauncher:
    """Starts sites of one application at its host."""

    def __init__(
        self,
        flow: Flow,
        host: Host,
        place: Place,
        options: Options,
        credentials: Credentials,
        generation: int,
        post: Post,
    ) -> None:
        self._flow, self._host, self._place = flow, host, place
        self._options, self._credentials, self._generation = options, credentials, generation
        self._post = post

    def launch(self, site: SiteId, control: Address) -> None:
        """Start a site that reports to the control at this address, and to all others."""
        several = self._place.apps > 1
        config = SiteConfig(
            site,
            self._credentials.for_site(site),
            self._place.controls or (control,),
            self._host.listen_host,
            replace(self._options, http=None),  # sites serve no pages and need no token
            f"application {self._place.app}" if several else self._host.application,
            generation=self._generation,
        )
        # Packing the flow takes a while, and other sites may fail meanwhile: a thread does it.
        asyncio.get_running_loop().run_in_executor(None, self._launch_now, site, config)

    def _launch_now(self, site: SiteId, config: SiteConfig) -> None:
        try:
            self._host.launch(self._flow, config, self._on_exit)
        except Exception as error:
            self._post(FlowFailed(site, error))

    def _on_exit(self, site: int, reason: str) -> None:
        """A site's process has ended. Any thread calls this."""
        self._post(ProcessExited(SiteId(site), reason))

    async def probe(self, probe: Probe) -> Probed:
        """Connect to sites to find out which of them are gone."""
        return Probed(probe.number, tuple(await self.gone(probe.addresses)))

    async def gone(self, addresses: Mapping[SiteId, Address]) -> list[SiteId]:
        """The sites at whose address no process listens."""
        patience = self._options.lease_s / 5
        there = await asyncio.gather(*(is_listening(a, patience) for a in addresses.values()))
        return [s for s, listens in zip(addresses, there, strict=True) if not listens]
