"""Spark looks for data sources in packages of such a name: ``format("holdfast")`` is found here."""

from holdfast.spark.results import HoldfastSource as DefaultSource

__all__ = ["DefaultSource"]
