"""The main job, as people do it, on real parts: an empty folder, `manage.py up`, Chromium, this machine's own agent
with the real pynvml over a fake NVML library whose card changes, a real process.

request (English) → approval by another person (Chinese) → placement → log and four live measures → end → seen free →
ledger → the finance page (both languages).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.chromium import PATIENCE_MS, browsing
from tests.pool.agent.conftest import FakeNvml, nvml_library  # noqa: F401  (a fixture)
from tests.up.installation import Installation, open_folder, running, wait_for

pytestmark = [pytest.mark.up, pytest.mark.serial]
PASSWORD = "a long sentence for tests 7"
CARD = "GPU-0e2e0000-1111-2222-3333-444455556666"
MIB = 1024 * 1024
PROGRAM = """python3 - <<'END'
import os, time
print("devices=" + os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
print("他说：\\"开始\\" 'ok'", flush=True)
for step in range(1, 400):
    print(f"step {step}", flush=True)
    time.sleep(0.2)
    if os.path.exists("stop-now"):
        break
open("result.txt", "w").write("done")
END"""


class Api:
    """The installation's API with a person's session, for what an administrator prepares."""

    def __init__(self, base: str, user: str, password: str) -> None:
        self.base = base
        self.jar = CookieJar()
        self.opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(self.jar))
        page = self.opener.open(f"{base}/accounts/login/").read().decode()
        token = re.search(r'csrfmiddlewaretoken" value="([^"]+)', page)
        assert token is not None
        form = {"username": user, "password": password, "csrfmiddlewaretoken": token.group(1)}
        answer = self._send(
            "POST",
            "/accounts/login/",
            urllib.parse.urlencode(form).encode(),
            "application/x-www-form-urlencoded",
        )
        words = re.sub(r"<[^>]+>|\s+", " ", answer.decode())
        assert "gpupool_session" in {cookie.name for cookie in self.jar}, f"{user} was not signed in: {words}"

    def _send(self, method: str, path: str, body: bytes | None, kind: str) -> bytes:
        request = urllib.request.Request(self.base + path, data=body, method=method)
        request.add_header("Content-Type", kind)
        request.add_header("Referer", self.base + "/")
        for cookie in self.jar:
            if cookie.name == "gpupool_csrf":
                request.add_header("X-CSRFToken", str(cookie.value))
        try:
            with self.opener.open(request, timeout=60) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.code} {error.read().decode()}") from error

    def get(self, path: str) -> Any:
        return json.loads(self._send("GET", path, None, "application/json"))

    def post(self, path: str, **values: Any) -> Any:
        return json.loads(self._send("POST", path, json.dumps(values).encode(), "application/json") or b"{}")


@pytest.fixture
def card(nvml_library: Path) -> Iterator[FakeNvml]:  # noqa: F811
    """One A100 that never stands still: its four measures move several times a second."""
    with open_folder() as folder:
        library = folder / "lib"
        shutil.copytree(nvml_library, library)
        for path in (library, library / "libnvidia-ml.so.1"):
            path.chmod(0o755)
        fake = FakeNvml(library, folder / "card.txt")
        fake.set(
            count=1,
            gpu_0_uuid=CARD,
            gpu_0_name="NVIDIA A100-SXM4-80GB",
            gpu_0_mem_total=81920 * MIB,
            gpu_0_mem_used=0,
            gpu_0_util=0,
        )
        stop = threading.Event()

        def move() -> None:
            for turn in range(100_000):
                if stop.wait(0.3):
                    return
                fake.set(gpu_0_temp=50 + turn % 20, gpu_0_power=300_000 + 1000 * (turn % 50))

        thread = threading.Thread(target=move, daemon=True)
        thread.start()
        yield fake
        stop.set()
        thread.join(5)


class Person:
    """Somebody at a browser. Console errors are collected; the test asserts that there were none."""

    def __init__(self, browser: Browser, base: str, name: str, language: str) -> None:
        self.base = base
        self.context: BrowserContext = browser.new_context(viewport={"width": 1440, "height": 1000})
        self.context.set_default_timeout(PATIENCE_MS)
        self.context.add_cookies([{"name": "django_language", "value": language, "url": base}])
        self.page: Page = self.context.new_page()
        self.errors: list[str] = []
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))
        self.go("/accounts/login/")
        self.page.fill("input[name=username]", name)
        self.page.fill("input[type=password]", PASSWORD)
        self.page.press("input[type=password]", "Enter")
        self.page.wait_for_url(lambda url: "/login" not in url)

    def go(self, path: str) -> None:
        self.page.goto(self.base + path)

    def shot(self, name: str) -> None:
        if folder := os.environ.get("GPUPOOL_SHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=f"{folder}/{name}.png", full_page=True)


def first_sign_in(browser: Browser, installation: Installation, base: str) -> None:
    """The printed password works once and must be changed."""
    found = wait_for(installation.first_sign_in, say="the first sign-in")
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto(f"{base}/accounts/login/")
    page.fill("input[name=username]", found[0])
    page.fill("input[type=password]", found[1])
    page.press("input[type=password]", "Enter")
    page.wait_for_url("**/password**")
    boxes = page.locator("input[type=password]")
    boxes.nth(0).fill(found[1])
    boxes.nth(1).fill(PASSWORD)
    boxes.nth(2).fill(PASSWORD)
    boxes.nth(2).press("Enter")
    page.wait_for_url(lambda url: "password" not in url)
    context.close()


def prepare(base: str, admin: str) -> str:
    """Departments, people, roles, quota, price; returns the flavour's code."""
    api = Api(base, admin, PASSWORD)
    top = api.post("/api/v1/departments/", code="lab", name="实验室 Lab")
    team = api.post("/api/v1/departments/", code="vision", name="Vision", parent=top["uid"])

    def person(name: str, shown: str, role: str, where: str | None) -> None:
        made = api.post(
            "/api/v1/users/",
            username=name,
            display_name=shown,
            password=PASSWORD,
            home_department=team["uid"],
        )
        api.post("/api/v1/role-bindings/", user=made["uid"], role=role, department=where)

    person("lin.yue", "林悦", "researcher", team["uid"])
    person("chen.hao", "Chen Hao", "lead", top["uid"])
    person("sun.mei", "孙梅", "finance", None)

    def flavours() -> Any:
        return [f for f in api.get("/api/v1/flavours/")["results"] if "A100" in f["name"]]

    flavour = wait_for(flavours, say="the flavour of this machine's card")[0]["code"]
    for where in ("lab", "vision"):
        api.post("/api/v1/quotas/", department=where, flavour=flavour, guaranteed_milli=1000, reason="test")
    return str(flavour)


def test_the_main_job_from_an_empty_folder(card: FakeNvml) -> None:
    with open_folder() as home, browsing() as browser:
        account = os.environ.get("GPUPOOL_TEST_ACCOUNT", "nobody")
        more = {**card.environment, "GPUPOOL_AGENT_JOB_ACCOUNT": account}
        with running(home / "data", **more) as installation:
            installation.wait_page()
            installation.wait_running()
            try:
                _walk(browser, installation, card)
            except BaseException:
                tell(installation)
                raise


def tell(installation: Installation) -> None:
    """What the installation knows, for whoever reads a failure."""
    for sql in (
        "SELECT id, state, end_reason, error_code, error_detail FROM pool_allocation",
        "SELECT state, pid, account, exit_code FROM pool_allocationmember",
        "SELECT kind, facts FROM pool_allocationevent ORDER BY id",
        "SELECT kind, sent_at, acked_at FROM pool_agentcommand ORDER BY id",
        "SELECT id, state FROM quotas_capacityrequest",
        "SELECT reason, figures FROM pool_queueentry",
    ):
        print(sql, "\n", installation.psql(sql))
    for name in ("agent", "worker"):
        print(name, "\n", (installation.home / "log" / f"{name}.log").read_text()[-3000:])


def _walk(browser: Browser, installation: Installation, card: FakeNvml) -> None:
    base = f"http://127.0.0.1:{installation.port}"
    first_sign_in(browser, installation, base)
    flavour = prepare(base, "admin")
    # Each would have to choose a new password at first; the administrator's change above has shown it.
    installation.psql("UPDATE accounts_user SET must_change_password = false")
    finance = Person(browser, base, "sun.mei", "zh-hans")
    set_price(finance, base, flavour)

    researcher = Person(browser, base, "lin.yue", "en")
    address = ask(researcher, flavour)
    expect(researcher.page.locator("h1")).to_contain_text("In approval")
    researcher.shot("e2e-request")

    lead = Person(browser, base, "chen.hao", "zh-hans")
    lead.go("/approvals/")
    lead.shot("e2e-approvals")
    lead.page.get_by_role("link", name=re.compile("R-1")).first.click()
    lead.page.locator("#decide button[value=approve], #decide button[data-kind=primary]").first.click()
    lead.page.wait_for_load_state()

    lease = wait_running(researcher, address)
    card.set(gpu_0_util=87, gpu_0_mem_used=40960 * MIB)
    watch(researcher, lease)
    finish(installation, researcher, lease, card)
    pay(finance, installation)
    for person in (researcher, lead, finance):
        assert person.errors == []


def set_price(finance: Person, base: str, flavour: str) -> None:
    api = Api(base, "sun.mei", PASSWORD)
    api.post("/api/v1/prices/", flavour=flavour, micro_per_gpu_hour=16_000_000, reason="test")
    finance.go("/prices/")


def ask(researcher: Person, flavour: str) -> str:
    """Fill the form as a person does; the address of the request."""
    page = researcher.page
    researcher.go("/requests/new/")
    page.select_option("select[name=flavour]", flavour)
    page.fill("input[name=gpus_per_node]", "1")
    page.fill("input[name=hours]", "24")
    page.fill("textarea[name=purpose]", "End to end")
    page.fill("textarea[name=command]", PROGRAM)
    expect(page.locator("#fit")).to_contain_text("Chen Hao")
    researcher.shot("e2e-form")
    page.get_by_role("button", name="Submit request").click()
    page.wait_for_url(re.compile(r"/requests/[0-9a-f-]{36}/"))
    return urllib.parse.urlsplit(page.url).path


def wait_running(researcher: Person, address: str) -> str:
    """Until the request page says that it runs; the address of the allocation."""
    page = researcher.page

    def got() -> str | None:
        researcher.go(address)
        link = page.locator("main a[href*='/leases/']").first
        with contextlib.suppress(Exception):
            link.wait_for(timeout=2000)
            return str(link.get_attribute("href"))
        return None

    lease = wait_for(got, say="the allocation")

    def runs() -> bool:
        researcher.go(lease)
        return "Running" in page.locator("h1").inner_text()

    wait_for(runs, say="the running state")
    return str(lease)


def watch(researcher: Person, lease: str) -> None:
    """The log has the device and the odd characters; the four measures are live and move."""
    page = researcher.page
    expect(page.locator("#log")).to_contain_text(f"devices={CARD}")
    expect(page.locator("#log")).to_contain_text("他说：\"开始\" 'ok'")
    expect(page.locator("#log")).to_contain_text(re.compile(r"step \d+"))
    live = page.locator("main")
    expect(live).to_contain_text(re.compile(r"87\s*%"))
    expect(live).to_contain_text(re.compile(r"40(\.\d)?\s*GiB"))
    expect(live).to_contain_text(re.compile(r"\d\d\s*°C"))
    expect(live).to_contain_text(re.compile(r"3\d\d\s*W"))

    def temperature() -> str:
        found = re.search(r"(\d\d)\s*°C", live.inner_text())
        return found.group(1) if found else ""

    before = temperature()
    wait_for(lambda: temperature() not in ("", before), say="another temperature, without a reload")
    researcher.shot("e2e-lease")


def finish(installation: Installation, researcher: Person, lease: str, card: FakeNvml) -> None:
    """The holder gives it back; it has not ended while memory is still used, and ends once the card is free."""
    page = researcher.page
    researcher.go(lease)
    page.get_by_role("button", name="Release…").click()
    page.locator("#dlg-rel button[data-kind=danger]").click()
    page.wait_for_load_state()

    def state() -> str:
        return installation.psql("SELECT state FROM pool_allocation")

    wait_for(lambda: installation.psql("SELECT exit_signal FROM pool_allocationmember"), say="the stop")
    for _ in range(5):
        assert state() == "stopping"
        time.sleep(0.3)
    card.set(gpu_0_util=0, gpu_0_mem_used=0)
    wait_for(lambda: state() == "ended", say="the end")
    researcher.go(lease)
    expect(page.locator("h1")).to_contain_text("Ended")
    expect(page.locator("main")).to_contain_text("Released by its holder")


def pay(finance: Person, installation: Installation) -> None:
    """The ledger has the time that was held, to the price, and the month page says so in both languages."""

    booked = "SELECT bool_and(ended_at = accrued_to) FROM quotas_usagespan"
    wait_for(lambda: installation.psql(booked) == "t", say="the ledger")
    gpu_ms, amount = installation.psql(
        "SELECT sum(gpu_ms) || ' ' || sum(amount_micro) FROM quotas_ledgerentry"
    ).split()
    assert abs(int(amount) - int(gpu_ms) * 16_000_000 // 3_600_000) <= 2
    shown = f"{int(amount) / 1_000_000:.2f}"
    for language in ("zh-hans", "en"):
        finance.context.add_cookies([{"name": "django_language", "value": language, "url": finance.base}])
        finance.go("/months/")
        finance.shot(f"e2e-month-{language}")
        expect(finance.page.locator("main")).to_contain_text(shown)
        expect(finance.page.locator("main")).to_contain_text("Vision")
