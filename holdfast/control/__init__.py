"""The control plane of a flow: its server, start-up, applications, checkpoints, and the run
handle."""
