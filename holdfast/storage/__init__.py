"""Files of checkpoints: their layout, their checksums, who may write them, and what a flow
restores."""
