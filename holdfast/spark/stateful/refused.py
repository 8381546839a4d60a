"""Refuses what a flow cannot give operators written for Spark: processing time, complete tables."""

from holdfast.errors import FlowError

MODES = ("append", "update")


def refuse_mode(output_mode: str, where: str) -> None:
    """Raise unless the output mode is append or update, which are equivalent here. The mode
    complete would need a result table, and there is none."""
    if output_mode.lower() not in MODES:
        raise FlowError(
            f"{where}: the output mode {output_mode!r} is not supported",
            hint="use append or update, which give the same rows",
        )


def uses_event_time(name: str, where: str) -> bool:
    """Return whether a time mode, or a kind of timeout, uses event time."""
    plain = name.lower()
    if plain in ("processingtime", "processingtimetimeout"):
        raise FlowError(
            f"{where}: {name} is not supported: results in Holdfast never depend on processing "
            "time",
            hint="use event time: EventTime, or EventTimeTimeout",
        )
    if plain not in ("none", "notimeout", "eventtime", "eventtimetimeout"):
        raise FlowError(f"{where}: unknown time mode {name!r}", hint="use None, or event time")
    return plain.startswith("event")
