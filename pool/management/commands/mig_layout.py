"""Tell or change the MIG layout of a Kubernetes node through MIG Manager."""

from __future__ import annotations

import time
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from pool.models import Node
from pool.services.layouts import node_layout, node_layout_set
from portal.kernel.errors import DomainError
from portal.ops.actor import system

OVER = frozenset({"success", "failed"})
PAUSE_S = 2.0


class Command(BaseCommand):
    """`mig_layout NODE`: its configuration and how far it is. `mig_layout NODE CONFIG`: ask for another one, on a
    drained node alone. With ``--wait S`` until it is there; exit code 1 where it failed or is not there by then.
    """

    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("node")
        parser.add_argument("config", nargs="?", help="of MIG Manager's config map, for example all-1g.10gb")
        parser.add_argument("--wait", type=float, default=0.0, metavar="S")

    def handle(self, *args: Any, **options: Any) -> None:
        node = Node.objects.select_related("cluster").filter(name=options["node"]).first()
        if node is None:
            raise CommandError(f"no such node: {options['node']}")
        try:
            if options["config"]:
                config, state = node_layout_set(
                    acting_user=system("administrator", via="command"), node=node, config=options["config"]
                )
            else:
                config, state = node_layout(node=node)
            until = time.monotonic() + options["wait"]
            while state not in OVER and time.monotonic() < until:
                time.sleep(PAUSE_S)
                config, state = node_layout(node=node)
        except DomainError as error:
            raise CommandError(f"{error.code}: {error.detail}") from error
        self.stdout.write(f"{node.name}: {config or '-'} {state or '-'}")
        if options["wait"] and state != "success":
            raise CommandError("not there")
