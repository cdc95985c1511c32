"""`manage.py enrol_code`: a one-time code for a new node, for administrators at the installation's own
shell."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from pool.models import Cluster, Node
from pool.services.enrolment import enrolment_code_create
from portal.kernel.errors import DomainError
from portal.ops.actor import system


class Command(BaseCommand):
    """Prints the code alone on the first line, so that scripts can take it."""

    help = "Make a one-time code that lets one machine in"

    def add_arguments(self, parser: CommandParser) -> None:
        """Where the machine belongs."""
        parser.add_argument("--cluster", help="code of the cluster; default: the first with agents")
        parser.add_argument("--node", help="name of a known node that is to be enrolled (again)")
        parser.add_argument("--name", default="", help="name of the new node; default: its host name")
        parser.add_argument("--hours", type=float, default=24.0, help="how long the code is valid")

    def handle(self, *args: Any, **options: Any) -> None:
        """Make it, or say in one line why not."""
        node = cluster = None
        if options["node"]:
            node = Node.objects.filter(name=options["node"]).select_related("cluster").first()
            if node is None:
                raise CommandError(f"no node named {options['node']}")
        if options["cluster"]:
            cluster = Cluster.objects.filter(code=options["cluster"]).first()
            if cluster is None:
                raise CommandError(f"no cluster with the code {options['cluster']}")
        try:
            code = enrolment_code_create(
                acting_user=system("enrol_code", via="command"),
                node=node,
                cluster=cluster,
                node_name=options["name"],
                valid_for=timedelta(hours=options["hours"]),
            )
        except DomainError as error:
            raise CommandError(str(error.detail)) from error
        self.stdout.write(code)
        base = settings.GPUPOOL_BASE_URL
        self.stderr.write(
            f"On the node: curl -fsSO {base}/agent/agent.pyz && python3 agent.pyz enrol {code} --url {base}"
        )
