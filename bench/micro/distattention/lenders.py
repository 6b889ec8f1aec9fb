"""Creditor processes of the bench: started together, dialled, ended. Knows no measurement."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from bench.kit.provenance import ROOT
from bench.micro.distattention.creditor import DEBTOR, Settings
from services.worker.peers.transport.base import Peer, PeerLink
from services.worker.peers.transport.tcp import TcpTransport
from shared.errors import InternalError

_DIAL_S = 10.0


@contextmanager
def lenders(settings: Sequence[Settings]) -> Iterator[list[PeerLink]]:
    """A link to each. Raises InternalError when one does not start."""
    started = [_start(each) for each in settings]
    links: list[PeerLink] = []
    try:
        for each, process in zip(settings, started, strict=True):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise InternalError(f"creditor {each.name} ended with code {process.wait()}")
            said = json.loads(line)
            ticket = bytes.fromhex(said["ticket"])
            links.append(
                TcpTransport().dial(said["address"], DEBTOR, Peer(each.name, 1), ticket, deadline_s=_DIAL_S)
            )
        yield links
    finally:
        for link in links:
            link.close()
        for process in started:
            process.kill()
            process.communicate()


def _start(settings: Settings) -> "subprocess.Popen[str]":
    encoded = msgspec.json.encode(settings).decode()
    return subprocess.Popen(
        [sys.executable, "-m", "bench.micro.distattention.creditor", encoded],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
