"""The protections a user can choose from. Each is a `ProtectionSpec`; `holdfast.core` has what it
does."""

from __future__ import annotations

from holdfast.core.protection import DOMAINS, GRANULARITIES, ProtectionSpec
from holdfast.errors import FlowError


def none() -> ProtectionSpec:
    """A plain exchange: one replica of every partition; the loss of a site stops the flow."""
    return ProtectionSpec("none")


ALL = 1 << 16


def active(*, apart: str = "executor") -> ProtectionSpec:
    """Active standby: every partition has two replicas that compute, of which the second withholds
    what it makes until the first is gone. Unlike `pairs` they need not make the same rows in the
    same order, only the same set of them in an epoch; and nobody compares them. Sources and
    sinks are pairs. No two replicas share what `apart` says.
    """
    _check_apart("active", apart)
    return ProtectionSpec("active", 2, apart, deterministic=False)


def passive(
    *,
    every_ms: int | None = None,
    every_epochs: int | None = None,
    recovery_ms: int | None = None,
    apart: str = "executor",
) -> ProtectionSpec:
    """Passive standby: every partition has one replica that computes, and another that gets what
    has changed every so many milliseconds (500) or epochs. When the first dies the other goes on
    from there; those that it gets its input from keep what came since. Of sources and sinks there
    are two replicas. No two replicas share what `apart` says.

    With `recovery_ms` instead, checkpoints come as seldom as they may if going through what came
    since the last one shall take no longer than that. How long it would take is what the replica
    that computes has been at work for.
    """
    wanted = {"every_ms": every_ms, "every_epochs": every_epochs, "recovery_ms": recovery_ms}
    given = {name: value for name, value in wanted.items() if value is not None}
    if len(given) > 1:
        raise FlowError(f"passive(): give one of {', '.join(given)}, not all")
    for name, value in given.items():
        if value < 1:
            raise FlowError(f"passive(): {name} must be at least 1, not {value}")
    _check_apart("passive", apart)
    return ProtectionSpec(
        "passive",
        1,
        apart,
        standbys=1,
        every_ms=every_ms or (0 if given else 500),
        every_epochs=every_epochs or 0,
        recovery_ms=recovery_ms or 0,
    )


def upstream(
    *, k: int | None = None, base_ms: int | None = None, apart: str = "executor"
) -> ProtectionSpec:
    """Upstream backup: every partition has one replica, and those that it gets its input from keep
    it for as long as the partition's state comes from it. When it dies it is rebuilt from that,
    on any site that lives. Sources and sinks have two replicas, which do not share what `apart`
    says.

    That is for operators whose state comes from the recent past: event-time windows and joins, and
    sessions with a time-out. What another operator knows of a key comes from all rows that the key
    ever had. With `base_ms` it is cut off by a summary of them (a counter, a ring, an open
    session), of which a standby gets what has changed every so many milliseconds; without, such a
    flow is refused.

    Of stages in a row that are protected so, `k` may be lost at once: by default all of them, so
    that it does not matter how many of their partitions a site has. With a smaller `k` less of the
    input is kept; but then partitions of more stages in a row than `k` must not be on one site,
    or its loss is the end of the flow.
    """
    if k is not None and k < 1:
        raise FlowError(f"upstream(): k must be at least 1, not {k}", hint="none() bears no loss")
    _check_apart("upstream", apart)
    base = _base_ms("upstream", base_ms)
    return ProtectionSpec("upstream", 1, apart, rebuild_level=k or ALL, base_ms=base)


def rollback(
    *, h: int | None = None, base_ms: int | None = None, apart: str = "executor"
) -> ProtectionSpec:
    """Rollback with checkpoint markers: what a partition gets is logged by those it comes from,
    until a marker behind it has come `h` stages further on, and has been returned. A partition
    that is lost is rebuilt from the logs. Only for flows that are uniform: all ways from one
    stage to another must be equally long; and for operators whose state comes from the recent
    past, unless it is cut off by a summary every `base_ms` (see `upstream`). Sources and sinks have
    two replicas, which do not share what `apart` says.

    Slices of thickness `h` overlap. By default they are as thick as the flow is long; with 2 no
    two stages in a row may lose a partition within a short time, be it on one site.
    """
    if h is not None and h < 2:
        raise FlowError(f"rollback(): h must be at least 2, not {h}")
    _check_apart("rollback", apart)
    base = _base_ms("rollback", base_ms)
    return ProtectionSpec("rollback", 1, apart, rebuild_level=h - 1 if h else ALL, base_ms=base)


def pairs(
    *, replicas: int = 2, apart: str = "executor", granularity: str = "partition"
) -> ProtectionSpec:
    """Partition pairs: every partition has two replicas (or more) that compute. When one dies the
    other goes on at once, and a new replica is made while the stream flows.

    `apart` is what no two replicas may share: ``"process"``, ``"executor"``, ``"host"`` or
    ``"application"``. On a local Spark master all sites are in one executor, so there only
    ``"process"`` can be had; the loss of the driver then ends the flow.

    `granularity` is what is lost with a site, and rebuilt: its partitions (the point of pairs),
    or, to compare with, the whole mirror: of the flow on one site (``"dataflow"``), or on half of
    the sites (``"cluster"``). With the latter two the flow stands still while a mirror is made,
    and with cluster pairs the mean time to failure falls with the square of the number of sites.
    """
    if replicas < 2:
        raise FlowError(f"pairs() needs at least 2 replicas, not {replicas}", hint="none() has one")
    _check_apart("pairs", apart)
    if granularity not in GRANULARITIES:
        raise FlowError(
            f"pairs(): granularity must be one of {', '.join(GRANULARITIES)}, not {granularity!r}"
        )
    if granularity != "partition" and replicas != 2:
        raise FlowError(f"pairs(): {granularity} pairs have 2 replicas, not {replicas}")
    return ProtectionSpec("pairs", replicas, apart, granularity=granularity)


def _base_ms(who: str, base_ms: int | None) -> int:
    if base_ms is not None and base_ms < 1:
        raise FlowError(f"{who}(): base_ms must be at least 1, not {base_ms}")
    return base_ms or 0


def _check_apart(who: str, apart: str) -> None:
    if apart not in DOMAINS:
        raise FlowError(f"{who}(): apart must be one of {', '.join(DOMAINS)}, not {apart!r}")
