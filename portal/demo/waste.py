"""Waste and alerts of the demo: a process without a lease, a few alert rules, and the first findings."""

from __future__ import annotations

from datetime import timedelta

from monitoring.models import AlertRule
from monitoring.services.alerts import alert_rule_save
from monitoring.services.findings import findings_sweep
from pool.models import Gpu
from pool.services.conditions import gpu_foreign_use_set
from portal.accounts.models import User
from portal.accounts.policy import policy_of
from portal.demo.fleet import FOREIGN
from portal.kernel.clock import now
from portal.ops.actor import Actor

RULES = (
    ("Hot cards", "gpu_temp_c", "above", 84, 300, "warning"),
    ("Node waits for input", "node_iowait_percent", "above", 25, 600, "info"),
    ("Few free GPUs", "pool_free_gpus", "below", 4, 120, "info"),
    ("Cards without data", "pool_no_data_gpus", "above", 0, 60, "warning"),
)
FIELDS = ("name", "metric", "direction", "threshold", "for_s", "severity")


def waste() -> None:
    """Make what is missing; safe to run again."""
    admin = User.objects.get(username="zhao.rui")
    for row in RULES:
        values = dict(zip(FIELDS, row, strict=True))
        if not AlertRule.objects.filter(name=values["name"]).exists():
            alert_rule_save(acting_user=Actor(user=admin), policy=policy_of(admin), values=values)
    node, index = FOREIGN
    card = Gpu.objects.get(node__name=node, index=index)
    if not card.foreign_use and not card.leases.filter(ended_at=None).exists():
        since = now() - timedelta(hours=5, minutes=20)
        process = {"pid": 20418, "name": "jupyter-lab", "user": "huang.lei", "mem_mib": 9_216}
        gpu_foreign_use_set(gpu=card, processes=[{**process, "since": since.isoformat()}])
    findings_sweep()
