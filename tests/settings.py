"""Settings of the tests: the site's own, with GPUPOOL_ENV=test set before they are read."""

import os

os.environ["GPUPOOL_ENV"] = "test"
os.environ.pop("GPUPOOL_DEMO", None)

import portal.celery  # noqa: E402, F401  (shared tasks find their application, and run at once)
from portal.settings import *  # noqa: E402, F403
