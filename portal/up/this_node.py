"""The agent of the installation's own machine: enrols with the code that the start made, then runs.

`python -m portal.up.this_node STATE URL`. The address may have changed since the last start (another port),
so it is set anew each time; nothing else differs from an agent on another node.
"""

import os
import sys
import urllib.parse
from pathlib import Path

CODE_FILE = "enrolment-code"


def main(state: str, url: str) -> int:
    """Enrol where that has not been done yet, and run until stopped; the agent's exit code."""
    from pool.agent import cli, config
    from pool.agent.enrol import EnrolError, enrol

    config.prepare(state)
    settings = config.load(state)
    code_file = Path(state) / CODE_FILE
    if not settings.token:
        if not code_file.exists():
            print("this machine has no enrolment code", file=sys.stderr)
            return 1
        try:
            settings = enrol(state, url, code_file.read_text().strip())
        except EnrolError as error:
            print(error, file=sys.stderr)
            return 1
    code_file.unlink(missing_ok=True)
    socket_url = urllib.parse.urlsplit(url)
    settings.url = url
    settings.ws_url = f"ws://{socket_url.netloc}/agent/ws/"
    if os.geteuid() == 0 and not settings.job_account:
        # Jobs never run as root: people without an account on this machine get the one that owns nothing.
        settings.job_account = os.environ.get("GPUPOOL_AGENT_JOB_ACCOUNT", "nobody")
    config.save(state, settings)
    return cli.main(["--state", state, "run"])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
