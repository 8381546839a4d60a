"""``python -m holdfast.site``: one site; flow and configuration come on standard input."""

import logging
import pickle
import sys

from holdfast.site.runtime import run_site

if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    flow, config = pickle.load(sys.stdin.buffer)
    run_site(flow, config)
