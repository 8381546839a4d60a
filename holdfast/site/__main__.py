"""``python -m holdfast.site``: one site; flow and configuration come on standard input."""

import logging
import pickle
import signal
import sys

from holdfast.site.runtime import run_site

if __name__ == "__main__":
    # Ctrl-C is for whoever runs the flow, and may want it to drain. Without that one a site leaves.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    flow, config = pickle.load(sys.stdin.buffer)
    run_site(flow, config)
