"""schemathesis on our own description: never a server error, never a status that is not described."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.clients.serving import ROOT, Serving
from tests.tasks import ran

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
LIMIT_S = 240


@pytest.mark.timeout(2 * LIMIT_S)
def test_whatever_is_sent(stack: Serving, tmp_path: Path) -> None:
    words = [
        *("schemathesis.cli", "run", f"{stack.base_url.removesuffix('/v1')}/openapi.json"),
        *("--header", f"Authorization: Bearer {stack.key}", "--checks", ",".join(CHECKS)),
        *("--phases", "examples,coverage,fuzzing", "--max-examples", "12", "--request-timeout", "60"),
        *("--max-time", str(LIMIT_S), "--continue-on-failure", "--no-color", "--generation-database", "none"),
    ]
    done = ran(
        [sys.executable, "-m", "tests.clients.loopback", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=LIMIT_S + 60,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    counted = re.search(r"(\d+) generated", done.stdout)
    assert counted is not None and int(counted[1]) > 500, done.stdout[-3000:]
    print(done.stdout[-400:])
