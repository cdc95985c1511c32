"""The Celery application: queues schedule, execute, ingest, reports, notify."""

from __future__ import annotations

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.settings")

app = Celery("gpupool")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["portal.ops", "portal.accounts", "portal.notify", "quotas", "pool", "monitoring"])
