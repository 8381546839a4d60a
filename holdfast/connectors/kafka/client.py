"""The configuration of the Kafka client, shared by source and sink."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from typing import Any

from holdfast.errors import FlowError

log = logging.getLogger("holdfast.kafka")

Options = Mapping[str, Any]
"""Settings of librdkafka, such as those for TLS and SASL."""

RECONNECT_MS_MAX = 1_000
"""Maximum delay until the client finds a broker that has returned."""


def check(what: str, servers: str, topic: str, options: Options | None, ours: set[str]) -> Options:
    """Check the arguments of a source or sink and return its options."""
    if importlib.util.find_spec("confluent_kafka") is None:
        raise FlowError(
            f"{what}: the package confluent-kafka is not installed",
            hint="pip install 'holdfast[kafka]', here and where the sites run",
        )
    if not isinstance(servers, str) or not servers:
        raise FlowError(f"{what}: servers must be 'host:9092,host:9092', not {servers!r}")
    if not isinstance(topic, str) or not topic:
        raise FlowError(f"{what}: topic must be a name, not {topic!r}")
    options = dict(options or {})
    if taken := sorted(ours & options.keys()):
        raise FlowError(
            f"{what}: Holdfast itself sets {', '.join(taken)}", hint="omit these options"
        )
    return options


def settings(servers: str, options: Options, **ours: Any) -> dict[str, Any]:
    """Return a client's configuration; keywords have underscores in place of librdkafka's dots."""
    return {
        "reconnect.backoff.max.ms": RECONNECT_MS_MAX,
        "logger": log,
        **options,
        "bootstrap.servers": servers,
        **{name.replace("_", "."): value for name, value in ours.items()},
    }
