"""Settings of the tests: the site's own, with GPUPOOL_ENV=test set before they are read."""

import os

from portal.up.environment import other_number

os.environ["GPUPOOL_ENV"] = "test"
os.environ.pop("GPUPOOL_DEMO", None)
# Tests that run side by side share a Redis server, so each process has a database number of its own.
for _ in range(int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))):
    os.environ["REDIS_URL"] = other_number(os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0"))

import portal.celery  # noqa: E402, F401  (shared tasks find their application, and run at once)
from portal.settings import *  # noqa: E402, F403
