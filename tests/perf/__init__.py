"""Measurements: `python -m tests.perf NAME` prints one JSON line last. They inform; tests decide."""
