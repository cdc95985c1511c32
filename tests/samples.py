"""Real and authored output of exporters and tools. Authored files are part of the project; real captures stay where
they are (`../shared/samples/real`), and what reads them is marked `shared`."""

from __future__ import annotations

from pathlib import Path

import pytest

AUTHORED = Path(__file__).resolve().parent / "data" / "samples"
REAL = Path(__file__).resolve().parents[2] / "shared" / "samples" / "real"


def authored(name: str) -> str:
    """The text of an authored sample, such as `dcgm/07_text_format_edge_cases.prom`."""
    return (AUTHORED / name).read_text(encoding="utf-8")


def real(name: str) -> str:
    """The text of a real capture."""
    return (REAL / name).read_text(encoding="utf-8")


def needs_real(test):  # type: ignore[no-untyped-def]
    """Marks a test that reads real captures."""
    skipped = pytest.mark.skipif(not REAL.is_dir(), reason="needs ../shared/samples")
    return pytest.mark.shared(skipped(test))
