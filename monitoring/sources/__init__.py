"""Telemetry that is fetched: what exporters and Prometheus servers say, brought into one shape (`reading`)."""
