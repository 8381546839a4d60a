"""``holdfast chaos``: to a flow under load is done what clusters do to flows.

Sites are killed, also while the last loss is being mended; they are stopped for a while; their
connections break, their network is cut. A seed decides what happens to whom and when. Whatever
happens stays within what the flow's protection promises, so the answer must be exact, and in the
end everything protected again. `faults` decides, `engine` does it, `report` tells.
"""
