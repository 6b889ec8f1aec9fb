"""Keeps a process on this machine: a connection or a look-up that leaves the loopback is refused, and noted.

As a program it does that for another module's command line: `python -m tests.clients.loopback llm models`.
"""

import os
import runpy
import sys
from collections.abc import Mapping

QUIET = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "NO_PROXY": "127.0.0.1",
}
"""What the clients are told, so that they have no reason to leave."""
_LOCAL = {None, "", "127.0.0.1", "::1", "localhost", b"127.0.0.1", b"localhost"}

refused: list[str] = []
"""What was tried, in this process."""


def quiet_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The same without any provider's key, and without proxies."""
    unwanted = ("_PROXY", "_API_KEY", "_BASE_URL", "_API_BASE", "_ORG_ID")
    return {name: value for name, value in environment.items() if not name.upper().endswith(unwanted)} | QUIET


def stay() -> None:
    """From now on, in every thread of this process; there is no way back."""
    sys.addaudithook(_on_event)


def _on_event(event: str, details: tuple[object, ...]) -> None:
    if event == "socket.connect":
        address = details[1]
        host = address[0] if isinstance(address, tuple) else None
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = details[0]
    else:
        return
    if host not in _LOCAL:
        refused.append(f"{event} {host!r}")
        raise PermissionError(f"{host!r} is not this machine")


def main(module: str) -> None:
    """Run `module` here; exit code 99 when it tried to leave."""
    stay()
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        if refused:
            print("\n".join(refused), file=sys.stderr, flush=True)
            os._exit(99)


if __name__ == "__main__":
    del sys.argv[0]
    main(sys.argv[0])
