"""The event store of a run: Parquet files that nodes write and DuckDB queries; Prometheus' metrics; OTLP. No torch."""
