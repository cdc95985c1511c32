"""Who reads what work wrote: its holder and those who answer for it, not everybody who sees that it runs."""

from __future__ import annotations

import pytest
from django.test import Client

from pool.models import Allocation, AllocationLog
from pool.services.cycle import schedule_cycle
from tests.pool import builders as pool
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)
SECRET = "token=very-secret"


@pytest.fixture
def held() -> Allocation:
    """Two cards of a node, held and running, with a line of output."""
    team, flavour = build.department("vision"), build.flavour("h800", installed=None)
    pool.node(flavour, name="sh-01")
    build.limits(team, flavour, 8)
    pool.queued(team, flavour, 2)
    schedule_cycle(cause="test")
    allocation = Allocation.objects.get()
    pool.report_running(allocation)
    AllocationLog.objects.create(allocation=allocation, member=0, offset=0, data=SECRET)
    return allocation


@pytest.mark.parametrize(("role", "reads"), [("lead", True), ("auditor", True), ("finance", False)])
def test_finance_sees_the_lease_and_not_its_output(held: Allocation, role: str, reads: bool) -> None:
    person = build.user(language="en")
    build.role(person, role, held.department)
    client = Client(headers={"accept-language": "en"})
    client.force_login(person, backend="django.contrib.auth.backends.ModelBackend")
    page = client.get(f"/leases/{held.uid}/")
    assert page.status_code == 200
    assert (SECRET in page.content.decode()) is reads
    api = f"/api/v1/allocations/{held.uid}"
    assert client.get(f"{api}/").status_code == 200
    for address in (
        f"/leases/{held.uid}/log/",
        f"/leases/{held.uid}/log.txt",
        f"{api}/log/",
        f"{api}/log-pieces/",
    ):
        answer = client.get(address)
        assert answer.status_code == (200 if reads else 403), address
        assert (SECRET in answer.getvalue().decode()) is reads
