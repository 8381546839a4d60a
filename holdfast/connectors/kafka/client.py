"""What source and sink have in common: the client, and how it is set up."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from typing import Any

from holdfast.errors import FlowError

log = logging.getLogger("holdfast.kafka")

Options = Mapping[str, Any]
"""Settings of librdkafka, such as those of TLS and SASL."""

RECONNECT_MS_MAX = 1_000
"""A broker that comes back is found again within so long."""


def check(what: str, servers: str, topic: str, options: Options | None, ours: set[str]) -> Options:
    """Refuse what cannot be right; the options."""
    if importlib.util.find_spec("confluent_kafka") is None:
        raise FlowError(
            f"{what}: the package confluent-kafka is not installed",
            hint="pip install 'holdfast[kafka]', here and where the sites run",
        )
    if not isinstance(servers, str) or not servers:
        raise FlowError(f"{what}: servers must be like 'host:9092,host:9092', not {servers!r}")
    if not isinstance(topic, str) or not topic:
        raise FlowError(f"{what}: a topic has a name, not {topic!r}")
    options = dict(options or {})
    if taken := sorted(ours & options.keys()):
        raise FlowError(f"{what}: {', '.join(taken)} are set by Holdfast", hint="leave them out")
    return options


def settings(servers: str, options: Options, **ours: Any) -> dict[str, Any]:
    """A client's configuration; keywords have underscores where librdkafka has dots."""
    return {
        "reconnect.backoff.max.ms": RECONNECT_MS_MAX,
        "logger": log,
        **options,
        "bootstrap.servers": servers,
        **{name.replace("_", "."): value for name, value in ours.items()},
    }
