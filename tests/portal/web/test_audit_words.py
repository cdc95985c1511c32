"""Each act that the code audits has its words, and only those."""

from __future__ import annotations

import re
from pathlib import Path

from django.utils import translation

from portal.web.audit_words import ACTS, act_word

ROOT = Path(__file__).resolve().parents[3]
CODE = r'"([a-z_]+\.[a-z_]+)"'
WRITTEN = re.compile(rf"\baction\s*=\s*{CODE}(?:\s+if\s.+?\selse\s+{CODE})?")
PASSED = re.compile(rf"\b(?:_change|_tell)\([^)]*?{CODE}(?:\s+if\s.+?\selse\s+{CODE})?")
MADE = {
    "approval": ("approved", "returned", "rejected"),
    "finding": ("told", "dismissed", "reopened", "incident"),
    "request": ("occurrence_moved", "occurrence_skipped"),
}
"""Acts whose code is put together where they are written."""


def test_every_audited_act_has_its_words_and_no_other():
    found = {f"{area}.{kind}" for area, kinds in MADE.items() for kind in kinds}
    for room in ("portal", "pool", "quotas", "monitoring"):
        for file in (ROOT / room).rglob("*.py"):
            text = file.read_text()
            if "audit_record" in text:
                for pattern in (WRITTEN, PASSED):
                    found |= {code for match in pattern.findall(text) for code in match if code}
    assert found == set(ACTS)


def test_an_act_is_read_in_the_readers_language_and_an_unknown_one_by_its_code():
    with translation.override("en"):
        assert act_word("node.cordoned") == "Node closed to new work"
    with translation.override("zh-hans"):
        assert act_word("node.cordoned") == "停止调度节点"
    assert act_word("ship.sunk") == "ship.sunk"
