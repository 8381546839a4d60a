"""``python -m holdfast.hosts N``: the fork server, which hears at socket N what it is to fork."""

import logging
import socket
import sys

import pyarrow as pa

import holdfast.site.runtime  # noqa: F401
from holdfast.hosts.fork_server import serve

if __name__ == "__main__":
    pa.array([0])  # only now pyarrow imports pandas
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    serve(socket.socket(fileno=int(sys.argv[1])))()
