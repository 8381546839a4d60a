"""``holdfast chaos``: injects the faults of real clusters into a flow under load.

It kills sites, also during recovery from the last loss; it stops them for a while; it breaks their
connections and cuts their network. A seed decides which fault happens to which site and when. The
flow's protection promises to survive every injected fault, so the answer must be exact, and
everything must be protected again at the end. `faults` draws the faults, `engine` injects them,
and `report` shows the outcome.
"""
