"""Puts each site into its own network namespace, connected by a bridge, so that it can be cut off.

Needs root and ``ip`` (Debian's iproute2). All names contain this process's id, so other runs on the
machine are not affected. Everything is removed at the end.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

_CLONE_NEWNET = 0x40000000


class Network:
    """A bridge in this namespace, and a veth pair from it into each site's."""

    def __init__(self) -> None:
        tag = os.getpid() % 100_000
        self._tag, self._bridge = tag, f"hf{tag}"
        self._prefix = f"10.{200 + tag % 50}.{tag // 50 % 250}"
        self.address = f"{self._prefix}.1"
        self._slots: dict[int, int] = {}
        self._next = 2
        self._lock = threading.Lock()
        _ip("link", "add", self._bridge, "type", "bridge")
        try:
            # A bridge without a fixed address changes it as sites are added and removed.
            _ip("link", "set", self._bridge, "address", _mac(1))
            _ip("addr", "add", f"{self.address}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
        except OSError:
            self.close()
            raise

    def add(self, site: int) -> str:
        """Create a namespace for `site`, and return its address there."""
        with self._lock:
            while self._next in self._slots.values():
                self._next = self._next % 253 + 2
            slot = self._slots[site] = self._next
            self._next = self._next % 253 + 2
        space, out, address = self._space(site), self._link(site), f"{self._prefix}.{slot}"
        _ip("netns", "add", space)
        peer = ("peer", "name", "site", "address", _mac(slot), "netns", space)
        _ip("link", "add", out, "type", "veth", *peer)
        _ip("-n", space, "addr", "add", f"{address}/24", "dev", "site")
        _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", space, "link", "set", "site", "up")
        # Lower the priority of the local table, so that other rules can precede it.
        _ip("-n", space, "rule", "add", "pref", "10", "lookup", "local")
        _ip("-n", space, "rule", "del", "pref", "0")
        _ip("link", "set", out, "master", self._bridge, "up")
        # Permanent neighbour entries avoid ARP requests: the kernel repeats one that is lost in a
        # short cut only after a second, which would prolong the cut.
        known = ("nud", "permanent", "lladdr")
        _ip("neigh", "replace", address, *known, _mac(slot), "dev", self._bridge)
        _ip("-n", space, "neigh", "replace", self.address, *known, _mac(1), "dev", "site")
        return address

    def _space(self, site: int) -> str:
        return f"hf{self._tag}-{site}"

    def _link(self, site: int) -> str:
        return f"hf{self._tag}v{self._slots[site]}"

    def inside(self, site: int, work: Callable[[], None]) -> Callable[[], None]:
        """Return a function that does `work` in the site's namespace. The calling process must have
        only one thread."""
        return partial(_inside, f"/run/netns/{self._space(site)}", work)

    def cut(self, site: int) -> None:
        """Silently drop all traffic from and to the site."""
        _ip("link", "set", self._link(site), "down")

    def heal(self, site: int) -> None:
        if site in self._slots:  # otherwise it has left in the meantime
            _ip("link", "set", self._link(site), "up")

    def part(self, site: int, port: int) -> None:
        """Drop all traffic between the site and this port of the bridge's address."""
        for rule in self._rules(port):
            _ip("-n", self._space(site), "rule", "add", *rule)

    def join(self, site: int, port: int) -> None:
        if site in self._slots:  # otherwise it has left in the meantime
            for rule in self._rules(port):
                _ip("-n", self._space(site), "rule", "del", *rule)

    def _rules(self, port: int) -> list[tuple[str, ...]]:
        there, tcp = self.address, ("ipproto", "tcp")
        out = ("pref", "1", "to", there, *tcp, "dport", str(port), "blackhole")
        back = ("pref", "2", "from", there, *tcp, "sport", str(port), "blackhole")
        return [out, back]

    def remove(self, site: int) -> None:
        """Remove the namespace of a site whose process has ended, and with it its end of the veth
        pair."""
        for command in (("link", "del", self._link(site)), ("netns", "del", self._space(site))):
            with suppress(OSError):
                _ip(*command)
        with self._lock:
            self._slots.pop(site, None)

    def close(self) -> None:
        for site in list(self._slots):
            self.remove(site)
        with suppress(OSError):
            _ip("link", "del", self._bridge)


def _inside(space: str, work: Callable[[], None]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(space) as opened:
        if libc.setns(opened.fileno(), _CLONE_NEWNET) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"cannot enter the namespace {space}: {os.strerror(error)}")
    work()


def unavailable() -> str | None:
    """Return the reason why namespaces are unavailable here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` command (Debian: apt install iproute2)"
    probe = f"hf{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
        try:
            _ip("-n", probe, "link", "add", "hfa", "type", "veth", "peer", "name", "hfb")
            _ip("-n", probe, "link", "add", "hfc", "type", "bridge")
            _ip("netns", "exec", probe, "true")
        finally:
            _ip("netns", "del", probe)
    except OSError as error:
        return f"the kernel refuses network namespaces: {error}"
    return None


def _mac(slot: int) -> str:
    """Return the MAC address of a slot; it is always the same for the same IP address."""
    return f"02:68:66:00:00:{slot:02x}"


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip() or f"status {done.returncode}"
        raise OSError(f"ip {' '.join(arguments)}: {reason}")
