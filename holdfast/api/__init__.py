"""What a user writes: flows, streams, protection, options."""
