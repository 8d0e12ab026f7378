"""The event store of a run: Parquet files that agents and launchers write, and that DuckDB queries. No torch."""
