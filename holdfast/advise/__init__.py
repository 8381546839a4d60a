"""Proposes protections for a flow: it measures the flow, predicts cost and recovery time of each
protection with models fitted to a benchmark, and names the cheapest ones within bounds."""
