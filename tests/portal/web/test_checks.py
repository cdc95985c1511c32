"""Production refuses insecure settings; development and test do not care."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from portal.web.checks import insecure_settings, refuse_insecure

SAFE: dict[str, Any] = {
    "GPUPOOL_ENV": "production",
    "SECRET_KEY": "k" * 64,
    "DEBUG": False,
    "ALLOWED_HOSTS": ["gpu.example.com"],
    "CELERY_TASK_ALWAYS_EAGER": False,
    "AXES_ENABLED": True,
    "GPUPOOL_BASE_URL": "https://gpu.example.com",
}


@pytest.fixture
def production(settings: Any) -> Any:
    for name, value in SAFE.items():
        setattr(settings, name, value)
    return settings


def test_a_safe_production_has_nothing_to_say(production: Any) -> None:
    assert insecure_settings() == []
    refuse_insecure()


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("SECRET_KEY", "", "gpupool.E001"),
        ("SECRET_KEY", "short", "gpupool.E001"),
        ("DEBUG", True, "gpupool.E002"),
        ("ALLOWED_HOSTS", ["*"], "gpupool.E003"),
        ("CELERY_TASK_ALWAYS_EAGER", True, "gpupool.E004"),
        ("AXES_ENABLED", False, "gpupool.E005"),
    ],
)
def test_each_insecure_value_is_refused_in_production_only(
    production: Any, name: str, value: Any, code: str
) -> None:
    setattr(production, name, value)
    assert [m.id for m in insecure_settings()] == [code]
    with pytest.raises(ImproperlyConfigured, match=code):
        refuse_insecure()
    production.GPUPOOL_ENV = "development"
    assert insecure_settings() == []
    refuse_insecure()


def test_plain_http_beyond_this_machine_is_warned_of(production: Any) -> None:
    production.GPUPOOL_BASE_URL = "http://10.0.0.5:8000"
    assert [m.id for m in insecure_settings()] == ["gpupool.W001"]
    refuse_insecure()
    production.GPUPOOL_BASE_URL = "http://127.0.0.1:8000"
    assert insecure_settings() == []
