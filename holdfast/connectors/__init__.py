"""Sources and sinks: memory, files, parquet, sockets, Kafka, PostgreSQL, tables."""
