"""Each user's way in, for processes and through state.json."""

import json
from pathlib import Path

import pytest

from services.stack.access import BusAccess
from services.stack.certificates import Certificate
from services.stack.rundir import Credentials, RunDirectory
from shared.config import BusConfig
from shared.config.loading import load
from shared.config.models import ServiceConfig

CERTIFICATE = Certificate(Path("/c/server.pem"), Path("/c/key.pem"), Path("/c/ca.pem"))


def credentials(path: Path) -> Credentials:
    run = RunDirectory(path)
    run.create()
    return run.credentials("worker-0", "worker-1", "gateway-0")


@pytest.mark.parametrize("certificate", [None, CERTIFICATE, Certificate(Path("/c"), Path("/k"), None)])
def test_children_and_state_lead_to_the_same_server(tmp_path: Path, certificate: Certificate | None) -> None:
    access = BusAccess.to_local(7422, credentials(tmp_path), certificate)
    assert access.port == 7422
    assert access.url.startswith("tls://") == (certificate is not None)
    state = json.dumps(access.state())
    assert not any(password in state for password in access.credentials.nats_passwords.values())
    assert BusAccess.from_state(json.loads(state), access.credentials) == access
    child = load(ServiceConfig, "worker", argv=[], environ=access.environment("worker-0"))
    assert child.bus == access.config("worker-0")


def test_everybody_gets_the_own_password_only(tmp_path: Path) -> None:
    access = BusAccess.to_local(7422, credentials(tmp_path), None)
    for user, password in access.credentials.nats_passwords.items():
        environment = " ".join(access.environment(user).values())
        assert [other for other in access.credentials.nats_passwords.values() if other in environment] == [
            password
        ]
        config = access.config(user, connect_timeout_s=3.0)
        assert isinstance(config, BusConfig)
        assert config.connect_timeout_s == 3.0
        assert password not in repr(config)
