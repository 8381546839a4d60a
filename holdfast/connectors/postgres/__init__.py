"""PostgreSQL tables as sinks."""
