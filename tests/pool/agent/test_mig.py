"""New layouts of cards through NVML: exactly what was asked, or what was there before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from pool.models import AgentCommand, Gpu, LayoutTask, Lease, MigSlice, Node
from pool.services.layouts import CORDON, layout_answered, layouts_settle
from portal.ops.models import Incident
from portal.ops.services.outbox import outbox_deliver
from tests.pool.agent.builders import allocation
from tests.pool.agent.conftest import ROOT, FakeNvml, Process, clean_environment, wait_for


def layout(nvml: FakeNvml, *profiles: tuple[str, int], uuid: str = "GPU-test-0") -> dict[str, Any]:
    """What the inner program says of an order."""
    done = subprocess.run(
        [sys.executable, "-m", "pool.agent", "_layout", json.dumps({"gpu_uuid": uuid, "profiles": profiles})],
        env=clean_environment(nvml.environment), cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def slices(nvml: FakeNvml) -> list[str]:
    """UUIDs of the slices that the library shows now."""
    lines = nvml.file.read_text().splitlines()
    return sorted(line.split("=")[1].split(",")[0] for line in lines if line.startswith("gpu.0.slice="))


def test_a_card_is_split_split_anew_and_what_fits_stays(nvml: FakeNvml) -> None:
    nvml.set(gpu_0_mig=0)
    first = layout(nvml, ("3g.40gb", 0), ("2g.20gb", 4), ("1g.10gb", 6))
    assert first == {
        "ok": True,
        "code": "",
        "detail": "",
        "has": [["1g.10gb", 6], ["2g.20gb", 4], ["3g.40gb", 0]],
    }
    kept = [one for one in slices(nvml) if one.endswith("-0")]
    again = layout(nvml, ("3g.40gb", 0), ("3g.40gb", 4))
    assert again["has"] == [["3g.40gb", 0], ["3g.40gb", 4]] and kept[0] in slices(nvml)
    assert len(slices(nvml)) == 2
    assert layout(nvml) == {"ok": True, "code": "", "detail": "", "has": []} and slices(nvml) == []


@pytest.mark.parametrize(
    ("state", "profiles", "code"),
    [
        ({"gpu_0_proc": "1:5"}, [("1g.10gb", 0)], "card_in_use"),
        ({"gpu_0_mig": 0, "gpu_0_mig_pending": 1}, [("1g.10gb", 0)], "needs_reset"),
        ({}, [("9g.99gb", 0)], "no_such_profile"),
        ({}, [("2g.20gb", 1)], "layout_failed"),  # not a place of that profile
        ({}, [("4g.40gb", 0), ("2g.20gb", 2)], "layout_failed"),  # one over the other
        ({"gpu_0_mig_refuse": 23}, [("1g.10gb", 0)], "layout_failed"),
    ],
)
def test_what_cannot_be_made_leaves_the_former_layout(
    nvml: FakeNvml, state: dict[str, Any], profiles: list[tuple[str, int]], code: str
) -> None:
    nvml.set(gpu_0_mig=1)
    nvml.lines = ["gpu.0.slice=MIG-old,3g.40gb,1,0,4,4,42144366592,0"]
    refuse = state.pop("gpu_0_mig_refuse", None)
    nvml.set(**state)
    if refuse:  # nothing is destroyed first where it can be made beside what is there
        nvml.set(gpu_0_mig_refuse=refuse)
        profiles = [("3g.40gb", 4), *profiles]
    answer = layout(nvml, *profiles)
    assert (answer["ok"], answer["code"]) == (False, code), answer
    assert len(slices(nvml)) == 1 and slices(nvml)[0].endswith(("old", "-4"))


@pytest.mark.serial
@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(os.geteuid() != 0, reason="only a root agent changes layouts")
def test_the_agent_splits_a_free_card_for_the_plan_and_the_task_closes(
    enrolled: Process, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.set(gpu_0_mig=0)
    enrolled.environment["PATH"] = f"{ROOT / 'tests/native/tools'}:{enrolled.environment['PATH']}"
    enrolled.start()
    gpu = wait_for(lambda: Gpu.objects.filter(uuid="GPU-test-0", node__health="ok").first())
    assert gpu.node.facts["can"]["mig"] == {"ok": True, "reason": None}
    member = allocation(Node.objects.get(), "true", [gpu])
    task = LayoutTask.objects.create(gpu=gpu, profiles=[["3g.40gb", 0], ["1g.10gb", 4]])
    assert layouts_settle() == 0 and not AgentCommand.objects.exists()  # somebody holds the card
    Lease.objects.filter(allocation=member.allocation).update(ended_at=task.created_at)
    assert layouts_settle() == 0
    gpu.refresh_from_db()
    assert (gpu.cordoned, gpu.cordon_reason) == (True, CORDON)
    wait_for(lambda: MigSlice.objects.filter(gpu=gpu, gone_at=None).count() == 2)
    assert layouts_settle() == 1
    task.refresh_from_db()
    gpu.refresh_from_db()
    assert task.state == "done" and not gpu.cordoned and gpu.mig_enabled
    assert sorted(MigSlice.objects.values_list("profile", "start")) == [("1g.10gb", 4), ("3g.40gb", 0)]


@pytest.mark.serial
@pytest.mark.django_db(transaction=True)
def test_G102_a_card_that_needs_a_reset_is_open_again_said_so_and_not_tried_for_ever(
    online: Process, nvml: FakeNvml
) -> None:
    gpu = Gpu.objects.select_related("node").get(uuid="GPU-test-0")
    Node.objects.update(facts={**gpu.node.facts, "can": {"mig": {"ok": True}}})
    task = LayoutTask.objects.create(gpu=gpu, profiles=[["1g.10gb", 0]])
    nvml.set(gpu_0_mig=0, gpu_0_mig_pending=1)  # the mode changes only when the card is reset
    assert layouts_settle() == 0
    wait_for(
        lambda: outbox_deliver() is not None and Incident.objects.filter(kind="mig_layout_failed").first()
    )
    gpu.refresh_from_db()
    task.refresh_from_db()
    assert not gpu.cordoned and task.state == "open"
    facts = Incident.objects.get(kind="mig_layout_failed").facts
    assert facts["profiles"] == [["1g.10gb", 0]] and facts["code"] == "needs_reset"
    assert layouts_settle() == 0 and AgentCommand.objects.count() == 1  # it is not tried for ever
    forged = {"kind": "layout_failed", "node_uid": "other", "data": {"task": str(task.uid)}}
    layout_answered(forged)
    assert Incident.objects.filter(kind="mig_layout_failed").count() == 1
