"""What an address stands for."""

from __future__ import annotations

import ipaddress
import socket


def is_wildcard(host: str) -> bool:
    """Whether a listening address stands for all addresses of the machine."""
    return host in ("", "0.0.0.0", "::")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False  # to listen there fails, too
    return all(ipaddress.ip_address(str(a[0]).partition("%")[0]).is_loopback for *_, a in found)
