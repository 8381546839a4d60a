"""The file that defines a flow, and the Spark session that it gets."""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable
from typing import Any

from holdfast.api.graph import Flow
from holdfast.errors import FlowError


def load_flow(path: str, spark: Any) -> Flow:
    """Return the flow that a file defines."""
    return made_flow(path, flow_definition(path), spark)


def flow_definition(path: str) -> Flow | Callable[[Any], Any]:
    """Return the `flow` that a file defines: a flow, or a function that returns one."""
    if not os.path.isfile(path):
        raise FlowError(f"the file {path} does not exist")
    # Not "__main__", so that a file that starts its own flow does not do so here.
    defined = runpy.run_path(path, run_name="holdfast_flow_file").get("flow")
    if not isinstance(defined, Flow) and not callable(defined):
        raise _no_flow(path)
    return defined


def made_flow(path: str, defined: Flow | Callable[[Any], Any], spark: Any) -> Flow:
    """Return a definition's flow; a function gets the session."""
    flow = defined if isinstance(defined, Flow) else defined(spark)
    if not isinstance(flow, Flow):
        raise _no_flow(path)
    return flow


def _no_flow(path: str) -> FlowError:
    return FlowError(
        f"{path} defines no flow",
        hint="name it `flow`, or write a function `flow(spark)` that returns it",
    )


def session_of(master: str | None, sites: int) -> Any:
    """Return a session of `master`; without one, of an embedded Spark with room for the sites and
    four more tasks."""
    from holdfast.spark.session import local_session, session

    if master is None:
        return local_session("holdfast", sites + 4)
    return session("holdfast", master)
