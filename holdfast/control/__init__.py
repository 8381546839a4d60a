"""The control of a flow: which application leads, which view counts, what sites are ordered to do.

`node.py` is pure and the same everywhere; `server.py` joins it to sockets, hosts and arbiter.
"""
