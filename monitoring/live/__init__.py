"""Live telemetry: ingest from agents, the hub to browsers."""
