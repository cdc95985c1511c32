"""Shared by all tests: test settings before Django is imported."""

from __future__ import annotations

import os

os.environ.setdefault("GPUPOOL_ENV", "test")
