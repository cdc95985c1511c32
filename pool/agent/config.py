"""Where the agent keeps what it must remember, and its settings: one JSON file with the node's token, mode
0600."""

from __future__ import annotations

import os
import stat
from dataclasses import asdict, dataclass, field, fields

from pool.agent import files

ROOT_STATE = "/var/lib/gpupool-agent"


def default_state_dir() -> str:
    if os.environ.get("GPUPOOL_AGENT_STATE"):
        return os.environ["GPUPOOL_AGENT_STATE"]
    if os.geteuid() == 0:
        return ROOT_STATE
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(base, "gpupool-agent")


@dataclass
class Config:
    """``job_account`` is the node administrator's own choice for people without a mapped account (root
    agents)."""

    url: str = ""
    ws_url: str = ""
    token: str = ""
    node_uid: str = ""
    ca_file: str | None = None
    job_account: str | None = None
    work_dir: str | None = None
    spool_mib: int = 64
    log_limit_mib: int = 8
    extra: dict[str, str] = field(default_factory=dict)


def config_path(state_dir: str) -> str:
    return os.path.join(state_dir, "agent.json")


def load(state_dir: str) -> Config:
    """The settings, or an empty ``Config`` before enrolment. Unknown keys of a newer agent are ignored."""
    data = files.read_json(config_path(state_dir)) or {}
    known = {item.name for item in fields(Config)}
    return Config(**{key: value for key, value in data.items() if key in known})


def save(state_dir: str, config: Config) -> None:
    files.write_json(config_path(state_dir), asdict(config))


def prepare(state_dir: str) -> None:
    """Make the state folder. It is traversable but not readable for others: jobs' work folders lie below
    it."""
    os.makedirs(state_dir, mode=0o711, exist_ok=True)
    for name in ("jobs", "outbox"):
        os.makedirs(os.path.join(state_dir, name), mode=0o700, exist_ok=True)


def reachable(path: str) -> bool:
    """Whether any account may walk down to ``path`` (every folder above it is open to others)."""
    path = os.path.abspath(path)
    while True:
        try:
            if not os.stat(path).st_mode & stat.S_IXOTH:
                return False
        except OSError:
            return False
        parent = os.path.dirname(path)
        if parent == path:
            return True
        path = parent


def work_root(state_dir: str, config: Config) -> str:
    """The folder of the jobs' work folders. A root agent whose state lies in a closed home uses /var/tmp."""
    if config.work_dir:
        path = config.work_dir
    else:
        path = os.path.join(state_dir, "work")
        if os.geteuid() == 0 and not reachable(state_dir):
            path = os.path.join("/var/tmp", f"gpupool-work-{os.stat(state_dir).st_ino}")
    os.makedirs(path, mode=0o711, exist_ok=True)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to someone else")
    os.chmod(path, 0o711)
    return path
