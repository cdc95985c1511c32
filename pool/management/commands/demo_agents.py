"""`manage.py demo_agents`: the demo's simulated nodes (pool/agent/simulated.py says what their file looks like)."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser

from pool.agent import simulated

FLEET_FILE = "demo-fleet.json"


class Command(BaseCommand):
    """Runs until stopped. Waits for the fleet file, which the demo's seed writes."""

    help = "Run the demo's simulated agents"

    def add_arguments(self, parser: CommandParser) -> None:
        """Where the installation is and which nodes to play."""
        parser.add_argument("--url", default=settings.GPUPOOL_BASE_URL)
        parser.add_argument("--fleet", default=str(settings.GPUPOOL_DATA_DIR / FLEET_FILE))

    def handle(self, *args: Any, **options: Any) -> None:
        """Wait for the file, then play the nodes."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        while not Path(options["fleet"]).exists():
            time.sleep(0.5)
        simulated.main([options["fleet"], "--url", options["url"]])
