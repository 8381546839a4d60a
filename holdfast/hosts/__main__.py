"""``python -m holdfast.hosts N``: the fork server, which receives its requests from socket N."""

import logging
import socket
import sys

import pyarrow as pa

import holdfast.site.runtime  # noqa: F401
from holdfast.hosts.fork_server import serve

if __name__ == "__main__":
    pa.array([0])  # makes pyarrow import pandas
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    serve(socket.socket(fileno=int(sys.argv[1])))()
