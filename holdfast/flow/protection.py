"""How a stage is protected. A protection is a description; `holdfast.core` has what it does."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.layout import DOMAINS, GRANULARITIES
from holdfast.errors import FlowError


@dataclass(frozen=True, slots=True)
class Protection:
    """A name that the core knows, how many copies of each partition it wants, and what no two of
    them may share."""

    name: str
    copies: int = 1
    apart: str = "process"
    granularity: str = "partition"


def none() -> Protection:
    """A plain exchange: one copy of every partition; the loss of a site stops the flow."""
    return Protection("none")


def pairs(
    *, copies: int = 2, apart: str = "executor", granularity: str = "partition"
) -> Protection:
    """Partition pairs: every partition has two copies (or more) that compute. When one dies the
    other goes on at once, and a new copy is made while the stream flows.

    `apart` is what no two copies may share: ``"process"``, ``"executor"``, ``"host"`` or
    ``"application"``. On a local Spark master all sites are in one executor, so there only
    ``"process"`` can be had; the loss of the driver then ends the flow.

    `granularity` is what is lost with a site, and made anew: its partitions (the point of pairs),
    or, to compare with, the whole replica: of the flow on one site (``"dataflow"``), or on half of
    the sites (``"cluster"``). With the latter two the flow stands still while a replica is made,
    and with cluster pairs the mean time to failure falls with the square of the number of sites.
    """
    if copies < 2:
        raise FlowError(f"pairs() needs at least 2 copies, not {copies}", hint="none() has one")
    if apart not in DOMAINS:
        raise FlowError(f"pairs(): apart must be one of {', '.join(DOMAINS)}, not {apart!r}")
    if granularity not in GRANULARITIES:
        raise FlowError(
            f"pairs(): granularity must be one of {', '.join(GRANULARITIES)}, not {granularity!r}"
        )
    if granularity != "partition" and copies != 2:
        raise FlowError(f"pairs(): {granularity} pairs have 2 copies, not {copies}")
    return Protection("pairs", copies, apart, granularity)
