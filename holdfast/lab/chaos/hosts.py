"""Where the sites of a chaos run live: subprocesses whose connections can be tampered with."""

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
from holdfast.site.runtime import OnExit, SiteConfig


class Exits:
    """Which sites' processes have ended, and when; from then on no connection leads there."""

    def __init__(self, proxy: Proxy, network: Network | None = None) -> None:
        self.at: dict[int, float] = {}
        self._proxy, self._network = proxy, network

    def noting(self, on_exit: OnExit) -> OnExit:
        """`on_exit`, with a note."""

        def noted(site: int, reason: str) -> None:
            self.at[site] = time.time()
            self._proxy.forget(site)
            on_exit(site, reason)
            if self._network is not None:
                self._network.remove(site)

        return noted


class ChaosHost(Host, Protocol):
    """A host that notes exits."""

    exits: Exits


def detoured(config: SiteConfig, proxy: Proxy) -> SiteConfig:
    """The site reaches its controller through the proxy."""
    routes = [proxy.route(config.site, CONTROL, address) for address in config.controllers]
    return replace(config, controllers=tuple(routes))


class ChaosProcesses(ProcessHost):
    """Subprocesses; with a `network`, each in a network namespace of its own."""

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
        super().launch(flow, config, self.exits.noting(on_exit))

    def work(self, flow: Flow, config: SiteConfig) -> Work:
        inner = super().work(flow, config)
        return self._network.inside(config.site, inner) if self._network else inner
