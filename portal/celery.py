"""The Celery application: queues schedule, execute, ingest, reports, notify."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from celery.signals import worker_init

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.settings")

app = Celery("gpupool")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["portal.ops", "portal.accounts", "portal.notify", "quotas", "pool", "monitoring"])


@worker_init.connect
def refuse_insecure_settings(**_kwargs: Any) -> None:
    """A worker of an insecure production does not come up, as its web server does not."""
    from portal.web.checks import refuse_insecure

    refuse_insecure()
