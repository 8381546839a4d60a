"""The protections a user can choose from. Each is a `ProtectionSpec`; `holdfast.core` has what it
does."""

from __future__ import annotations

from typing import Literal

from holdfast.core.protection import ALL_LEVELS, DOMAINS, GRANULARITIES, ProtectionSpec
from holdfast.engine.durations import Seconds, milliseconds
from holdfast.errors import FlowError

FailureDomain = Literal["process", "executor", "host", "application"]
Granularity = Literal["partition", "dataflow", "cluster"]
Protection = ProtectionSpec
"""What the functions below return."""


def none() -> Protection:
    """A plain exchange: one replica of every partition; the loss of a site stops the flow."""
    return Protection("none")


def active(*, replicas: int = 2, failure_domain: FailureDomain = "executor") -> Protection:
    """Active standby: every partition has two `replicas` that compute (or more), of which all but
    the first withhold their output until that is lost. Unlike `pairs` they need not make the same
    rows in the same order, only the same set of them in an epoch, and they are not compared.
    Sources and sinks have as many replicas, which are as those of `pairs`. All but one may be lost
    at once. No two replicas share a `failure_domain`.
    """
    if replicas < 2:
        raise FlowError(
            f"active() needs at least 2 replicas, not {replicas}", hint="none() has one"
        )
    _check_domain("active", failure_domain)
    return Protection("active", replicas, failure_domain, deterministic=False)


def passive(
    *,
    standbys: int = 1,
    interval: Seconds | None = None,
    interval_epochs: int | None = None,
    recovery_time: Seconds | None = None,
    failure_domain: FailureDomain = "executor",
) -> Protection:
    """Passive standby: every partition has one replica that computes, and a standby that gets what
    has changed every `interval` (half a second), or every `interval_epochs`. When the first dies
    the standby goes on from its last checkpoint; its producers keep what came since. Sources and
    sinks have a replica more than there are `standbys`. With several of these each gets every
    checkpoint, producers keep what the oldest lacks, and as many sites as there are standbys may
    be lost at once. No two replicas share a `failure_domain`.

    With `recovery_time` instead, checkpoints come at the longest interval at which processing what
    came since the last one takes no longer than that, estimated by the time that the replica has
    been at work since then.
    """
    wanted = {
        "interval": interval,
        "interval_epochs": interval_epochs,
        "recovery_time": recovery_time,
    }
    given = [name for name, value in wanted.items() if value is not None]
    if len(given) > 1:
        raise FlowError(f"passive(): give one of {', '.join(given)}, not all")
    if standbys < 1:
        raise FlowError(f"passive() needs at least 1 standby, not {standbys}", hint="none() has 0")
    if interval_epochs is not None and interval_epochs < 1:
        raise FlowError(f"passive(): interval_epochs must be at least 1, not {interval_epochs}")
    _check_domain("passive", failure_domain)
    every_ms = _milliseconds("passive", "interval", interval)
    return Protection(
        "passive",
        1,
        failure_domain,
        standbys=standbys,
        every_ms=every_ms or (0 if given else 500),
        every_epochs=interval_epochs or 0,
        recovery_ms=_milliseconds("passive", "recovery_time", recovery_time),
    )


def upstream(
    *,
    k: int | None = None,
    summary_interval: Seconds | None = None,
    failure_domain: FailureDomain = "executor",
) -> Protection:
    """Upstream backup: every partition has one replica, and its producers keep its input for as
    long as the partition's state comes from it. When it dies it is rebuilt from that input, on any
    live site. Sources and sinks have two replicas, which do not share a `failure_domain`.

    It is for operators whose state comes from the recent past: event-time windows and joins, and
    spans with a time-out. The state of other operators comes from all rows that a key ever had.
    With `summary_interval` a standby gets a summary of them (a counter, a ring, an open span) that
    often; without, such a flow is refused.

    Of stages in a row with this protection `k` may be lost at once: by default all of them, so that
    it does not matter how many of their partitions a site has. With a smaller `k` producers keep
    less, and no site gets partitions of more than `k` stages in a row, as far as there are enough
    sites; ``run.status()["exposed"]`` has those whose loss would end the flow.
    """
    if k is not None and k < 1:
        raise FlowError(f"upstream(): k must be at least 1, not {k}", hint="none() bears no loss")
    _check_domain("upstream", failure_domain)
    base = _milliseconds("upstream", "summary_interval", summary_interval)
    return Protection("upstream", 1, failure_domain, rebuild_level=k or ALL_LEVELS, base_ms=base)


def rollback(
    *,
    h: int | None = None,
    summary_interval: Seconds | None = None,
    failure_domain: FailureDomain = "executor",
) -> Protection:
    """Rollback with checkpoint markers: producers log a partition's input until a marker behind it
    has travelled `h` stages further and has been returned. A lost partition is rebuilt from the
    logs. The flow must be uniform: all ways from one stage to another are equally long. The state
    of operators must come from the recent past, unless there is a summary every `summary_interval`
    (see `upstream`). Sources and sinks have two replicas, which do not share a `failure_domain`.

    Slices of thickness `h` overlap. By default they are as thick as the flow is long. With 2, two
    stages in a row must not lose a partition within a short time, even on one site.
    """
    if h is not None and h < 2:
        raise FlowError(f"rollback(): h must be at least 2, not {h}")
    _check_domain("rollback", failure_domain)
    base = _milliseconds("rollback", "summary_interval", summary_interval)
    level = h - 1 if h else ALL_LEVELS
    return Protection("rollback", 1, failure_domain, rebuild_level=level, base_ms=base)


def pairs(
    *,
    replicas: int = 2,
    failure_domain: FailureDomain = "executor",
    granularity: Granularity = "partition",
) -> Protection:
    """Partition pairs: every partition has two replicas (or more) that compute. When one dies the
    other goes on at once, and a new replica is made while rows flow.

    `failure_domain` is what no two replicas may share: ``"process"``, ``"executor"``, ``"host"`` or
    ``"application"``. On a local Spark master all sites are in one executor, so only ``"process"``
    is possible there; the loss of the driver then ends the flow.

    `granularity` is what is lost with a site, and rebuilt: its partitions, or, for comparison, the
    whole mirror: of the flow on one site (``"dataflow"``), or on half of the sites (``"cluster"``).
    With the latter two the flow stands still while a mirror is made, and with cluster pairs the
    mean time to failure falls with the square of the number of sites.
    """
    if replicas < 2:
        raise FlowError(f"pairs() needs at least 2 replicas, not {replicas}", hint="none() has one")
    _check_domain("pairs", failure_domain)
    if granularity not in GRANULARITIES:
        raise FlowError(
            f"pairs(): granularity must be one of {', '.join(GRANULARITIES)}, not {granularity!r}"
        )
    if granularity != "partition" and replicas != 2:
        raise FlowError(f"pairs(): {granularity} pairs have 2 replicas, not {replicas}")
    return Protection("pairs", replicas, failure_domain, granularity=granularity)


def _milliseconds(who: str, name: str, value: Seconds | None) -> int:
    return 0 if value is None else milliseconds(value, f"{who}(): {name}")


def _check_domain(who: str, failure_domain: str) -> None:
    if failure_domain not in DOMAINS:
        raise FlowError(
            f"{who}(): failure_domain must be one of {', '.join(DOMAINS)}, not {failure_domain!r}"
        )
