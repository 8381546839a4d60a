"""A model checker over the core's machines: every order of events of a small closed world."""
