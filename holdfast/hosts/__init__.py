"""Hosts of sites without Spark: plain processes, forked from a fork server."""
