"""What monitoring listens to in the outbox."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from portal.notify import kinds
from portal.ops.outbox import subscribe

subscribe("pool.agent_event", "monitoring.services.events.gpu_event_record")
for _topic in (
    "pool.allocation_reserved",
    "pool.allocation_started",
    "pool.allocation_stopping",
    "pool.allocation_ended",
    "pool.allocation_reclaim",
    "pool.allocation_extended",
):
    subscribe(_topic, "monitoring.services.pokes.allocation_changed")
subscribe("pool.node_state", "monitoring.services.pokes.node_changed")
subscribe("pool.gpu_condition", "monitoring.services.pokes.gpu_changed")
subscribe("pool.capacity_changed", "monitoring.services.pokes.capacity_changed")

kinds.register(
    "report_ready",
    _("Report %(name)s"),
    _("%(ref)s is ready: the figures are kept as they were when it was made."),
    group="money",
    label=_("A scheduled report is ready"),
    icon="chart",
)
kinds.register(
    "export_ready",
    _("File %(name)s is ready"),
    _("It can be downloaded until %(until)s."),
    group="money",
    label=_("A file that I asked for is ready"),
    icon="download",
)
