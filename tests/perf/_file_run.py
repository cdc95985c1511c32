"""`python -m tests.perf._file_run KIND ID`: make one file in a process of its own; prints seconds and its peak memory.

KIND export takes the number of an export job; pdf a kind of report, its grouping, a month and a flavour, for the
first reader.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any


def _counted() -> list[int]:
    """Pages of the documents that will be written."""
    from weasyprint.document import Document

    pages: list[int] = []
    write = Document.write_pdf

    def counted(self: Any, *given: Any, **more: Any) -> Any:
        pages.append(len(self.pages))
        return write(self, *given, **more)

    Document.write_pdf = counted
    return pages


def main() -> None:
    """Make it, and say what it took."""
    import django

    django.setup()
    began = time.monotonic()
    extra: dict[str, int] = {}
    if sys.argv[1] == "export":
        from monitoring.services.exports import export_make

        if not export_make(job_id=int(sys.argv[2])):
            raise SystemExit("not made")
    else:
        from monitoring.selectors.reports.base import ask_from
        from monitoring.selectors.reports.frozen import content_of
        from monitoring.selectors.reports.kinds import kind_of
        from monitoring.web.report_files import pdf_bytes
        from portal.accounts.models import User
        from portal.accounts.policy import policy_of

        pages = _counted()
        kind = kind_of(sys.argv[2])
        policy = policy_of(User.objects.get(username="u0"))
        ask = ask_from(kind, {"by": sys.argv[3], "period": sys.argv[4], "flavour": sys.argv[5]}, policy)
        data = pdf_bytes(content_of(kind, ask, kind.make(ask)))
        extra = {"bytes": len(data), "pages": sum(pages)}
    took = time.monotonic() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": round(took, 2), "memory_mib": round(memory, 1), **extra}))


if __name__ == "__main__":
    main()
