"""Where an installation keeps its things, and the lock that lets one supervisor at a time use the folder."""

import fcntl
import hashlib
import json
import os
import secrets
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from portal.up.errors import UpError

BASE_DIR = Path(os.environ.get("X_BASE") or Path(__file__).resolve().parent.parent.parent)
# sun_path holds 108 bytes with its closing NUL on Linux and 104 on macOS; the longest name put below is 19
# bytes long.
SOCKET_DIR_LIMIT = 82


@dataclass(frozen=True)
class Layout:
    """The folders of one installation. `root` is what `--data` names; a demo keeps its own things in
    `root/demo`."""

    root: Path
    demo: bool = False

    @property
    def home(self) -> Path:
        """Files of this run (media, agent state, beat's state, status.json): the value of
        GPUPOOL_DATA_DIR."""
        return self.root / "demo" if self.demo else self.root

    @property
    def database(self) -> str:
        """Name of the database of this run."""
        return "gpupool_demo" if self.demo else "gpupool"

    @property
    def redis_db(self) -> int:
        """Number of the Valkey database of this run."""
        return 1 if self.demo else 0

    @property
    def postgres(self) -> Path:
        return self.root / "pg"

    @property
    def valkey(self) -> Path:
        return self.root / "valkey"

    @property
    def logs(self) -> Path:
        return self.home / "log"

    @property
    def status_file(self) -> Path:
        return self.home / "status.json"

    @property
    def secrets_file(self) -> Path:
        return self.root / "secrets.json"

    @property
    def sockets(self) -> Path:
        """Folder of the two servers' sockets: `root/run`, or a short one where the path of a socket would not
        fit."""
        inside = self.root / "run"
        if len(os.fsencode(inside)) <= SOCKET_DIR_LIMIT:
            return inside
        mark = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:12]
        base = Path(tempfile.gettempdir())
        if len(os.fsencode(base)) > SOCKET_DIR_LIMIT - 24:
            base = Path("/tmp")
        return base / f"gpupool-{os.getuid()}-{mark}"

    def prepare(self) -> None:
        """Make the folders; UpError where the folder cannot be written."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.home.mkdir(exist_ok=True)
            self.logs.mkdir(exist_ok=True)
            (self.home / "media").mkdir(exist_ok=True)
            (self.home / "static").mkdir(exist_ok=True)
            probe = self.root / f".write-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UpError(
                f"the data folder {self.root} cannot be written: {error.strerror}. "
                "Choose another with --data DIR."
            ) from None
        # The folder holds secrets, job output and media: it is for its owner alone. Only the way through is
        # left to others, since the database server may run under another account when this program is root.
        self.root.chmod(0o711 if os.geteuid() == 0 else 0o700)
        self.home.chmod(0o711 if os.geteuid() == 0 else 0o700)
        self.logs.chmod(0o700)
        (self.home / "media").chmod(0o700)

    def lock(self) -> TextIO:
        """Take the folder for this process; released when it ends, however it ends. UpError while another has
        it."""
        handle = open(self.root / "lock", "a+", encoding="utf-8")  # noqa: SIM115 - held until the process ends
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            handle.seek(0)
            owner = handle.read().strip()
            handle.close()
            raise UpError(
                f"another installation is running on {self.root}"
                + (f" (process {owner})." if owner else ".")
                + " Stop it first, or choose another folder with --data DIR."
            ) from None
        handle.seek(0)
        handle.truncate()
        handle.write(str(os.getpid()))
        handle.flush()
        return handle

    def is_running(self) -> bool:
        """Whether some process holds the folder's lock now."""
        try:
            with open(self.root / "lock", "a+", encoding="utf-8") as handle:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False


def default_root() -> Path:
    """The data folder where `--data` is not given: GPUPOOL_DATA_DIR, else `data` in the checkout."""
    return Path(os.environ.get("GPUPOOL_DATA_DIR") or BASE_DIR / "data").expanduser().absolute()


def write_atomically(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Replace a file so that a reader, or a crash, never meets half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.chmod(temporary, mode)
    os.replace(temporary, path)


def load_secrets(layout: Layout) -> dict[str, str]:
    """The installation's secrets, made at the first start (file mode 0600, mended when it was opened
    wider)."""
    found: dict[str, Any] = {}
    if layout.secrets_file.exists():
        try:
            found = json.loads(layout.secrets_file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UpError(
                f"{layout.secrets_file} cannot be read: {error}. Restore it from a backup."
            ) from None
        if stat.S_IMODE(layout.secrets_file.stat().st_mode) != 0o600:
            layout.secrets_file.chmod(0o600)
    missing = [name for name in ("secret_key", "postgres_admin", "postgres_app") if name not in found]
    if missing:
        for name in missing:
            found[name] = secrets.token_urlsafe(48 if name == "secret_key" else 24)
        write_atomically(layout.secrets_file, json.dumps(found, indent=1) + "\n")
    return {name: str(value) for name, value in found.items()}
