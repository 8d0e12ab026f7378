"""A run's state in the forms of others' tools: Prometheus' metrics, OpenTelemetry's traces. No torch."""
