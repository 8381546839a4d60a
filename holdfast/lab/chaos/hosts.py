"""Hosts of a chaos run: subprocesses whose connections pass through a proxy."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Protocol

from holdfast.api.graph import Flow
from holdfast.control.hosting import Host
from holdfast.hosts.fork_server import Work
from holdfast.hosts.processes import ProcessHost
from holdfast.lab.chaos.namespaces import Network
from holdfast.lab.chaos.proxy import CONTROL, Proxy
from holdfast.site.config import OnExit, SiteConfig


class Exits:
    """Records when the sites' processes ended, and closes the routes to them."""

    def __init__(self, proxy: Proxy, network: Network | None = None) -> None:
        self.at: dict[int, float] = {}
        self._proxy, self._network = proxy, network

    def recording(self, on_exit: OnExit) -> OnExit:
        """Return `on_exit`, extended by the record."""

        def recorded(site: int, reason: str) -> None:
            self.at[site] = time.time()
            self._proxy.forget(site)
            on_exit(site, reason)
            if self._network is not None:
                self._network.remove(site)

        return recorded


class ChaosHost(Host, Protocol):
    """A host that records exits."""

    exits: Exits


def detoured(config: SiteConfig, proxy: Proxy) -> SiteConfig:
    """Return the configuration of a site that reaches its controller through the proxy."""
    routes = [proxy.route(config.site, CONTROL, address) for address in config.controllers]
    return replace(config, controllers=tuple(routes))


class ChaosProcesses(ProcessHost):
    """Starts sites as subprocesses; with a `network`, each in a separate network namespace."""

    def __init__(self, proxy: Proxy, network: Network | None) -> None:
        super().__init__()
        self.exits = Exits(proxy, network)
        self._proxy, self._network = proxy, network
        if network is not None:
            self.listen_host = self.advertise_host = network.address

    def launch(self, flow: Flow, config: SiteConfig, on_exit: OnExit) -> None:
        config = detoured(config, self._proxy)
        if self._network is not None:
            config = replace(config, listen_host=self._network.add(config.site))
        super().launch(flow, config, self.exits.recording(on_exit))

    def work(self, flow: Flow, config: SiteConfig) -> Work:
        inner = super().work(flow, config)
        return self._network.inside(config.site, inner) if self._network else inner
