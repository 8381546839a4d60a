"""What a host tells a site: how to find its flow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.api.options import Options
from holdfast.net.handshake import Party

HOST = "HOLDFAST_HOST"
"""The environment variable with the name of the site's machine, if its host name is another."""

OnExit = Callable[[int, str], None]
"""A host calls it with site and reason when a site's process has ended."""


@dataclass(frozen=True)
class SiteConfig:
    """It travels with the code, not over the wire."""

    site: int
    party: Party
    """Who the site is towards others: its keys and its certificate."""
    controllers: tuple[tuple[str, int], ...]
    """Where the flow's applications listen; one of them leads."""
    listen_host: str
    options: Options
    application: str = "local"
    executor: str = ""
    generation: int = 0
    """The writer's generation in the checkpoint folder."""
