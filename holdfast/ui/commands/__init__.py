"""The commands of ``holdfast``: a module each, with its arguments (`add_to`) and what it does
(`execute`)."""
