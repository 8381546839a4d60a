"""The control of a flow: who leads, which view counts, what sites are told.

`node.py` is pure and the same everywhere; `server.py` joins it to sockets, hosts and arbiter.
"""
