"""What runs in a site: the event loop, connections, and the execution of operators."""
