"""What many of these tests begin with."""

from __future__ import annotations

import pytest

from tests.quotas import build


@pytest.fixture
def team():
    return build.department("vg")


@pytest.fixture
def h800():
    return build.flavour("h800", installed=None)
