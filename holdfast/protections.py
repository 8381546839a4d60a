"""How a flow, or a stage, is protected: what ``Flow(protect=)`` and ``protect`` take."""

from holdfast.api.protection import active, none, pairs, passive, rollback, upstream

__all__ = ["active", "none", "pairs", "passive", "rollback", "upstream"]
