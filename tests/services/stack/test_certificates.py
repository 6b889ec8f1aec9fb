"""Which certificate the settings ask for."""

import stat
from pathlib import Path

import pytest

from services.stack.authority import make_certificate
from services.stack.certificates import Certificate, certificate_for
from services.stack.config import StackConfig
from shared.errors import ConfigError


def test_none_made_or_the_operators(tmp_path: Path) -> None:
    assert certificate_for(StackConfig(), tmp_path / "tls") is None
    assert not (tmp_path / "tls").exists()
    made = certificate_for(StackConfig(tls=True), tmp_path / "tls")
    assert made is not None
    assert made.ca is not None
    assert made == Certificate.from_paths(made.paths())
    own = StackConfig(tls=True, nats_tls_cert=made.cert, nats_tls_key=made.key, nats_tls_ca=made.ca)
    assert certificate_for(own, tmp_path / "unused") == made
    assert not (tmp_path / "unused").exists()
    public = StackConfig(nats_tls_cert=made.cert, nats_tls_key=made.key)
    assert certificate_for(public, tmp_path) == Certificate(made.cert, made.key, None)


def test_every_start_has_a_new_one_that_others_cannot_read(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    make_certificate(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    make_certificate(folder)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert before.keys() == after.keys() == {"ca.pem", "server.pem", "server-key.pem"}
    assert all(before[name] != after[name] for name in before)
    for path in (folder, *folder.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def test_half_of_it_is_refused(tmp_path: Path) -> None:
    make_certificate(tmp_path)
    cert, key, ca = (tmp_path / name for name in ("server.pem", "server-key.pem", "ca.pem"))
    for wrong in (
        StackConfig(nats_tls_cert=cert),
        StackConfig(nats_tls_key=key),
        StackConfig(nats_tls_ca=ca),
        StackConfig(nats_tls_cert=cert, nats_tls_key=tmp_path / "none.pem"),
    ):
        with pytest.raises(ConfigError, match=r"nats_tls|none\.pem"):
            certificate_for(wrong, tmp_path)
