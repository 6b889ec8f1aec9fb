"""A stack of stand-ins: `python -m tests.services.stack.standin up …` runs the real commands over them.

`front` serves HTTP on the gateway's port, `sleeper` ends on SIGTERM, `deaf` ignores it, `parent` has a child,
`sprout` is forked from `seed`.
The environment adds one more: STANDIN_EXTRA is the code of a child called `extra`.
"""

import sys
from functools import partial

from services.stack.access import BusAccess
from services.stack.cli import Program, main
from services.stack.config import StackConfig
from services.stack.probes import listens, serves
from services.stack.process import SeedLauncher
from services.stack.roll_call import RollCall
from services.stack.rundir import RunDirectory
from services.stack.supervisor import ChildSpec
from services.stack.table import Sources

FRONT = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"data":[{"id":"standin"}]}'
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
PARENT = "import subprocess; subprocess.run(['sleep', '1000'])"
SPROUT = "tests.services.stack.sprout"
PYTHON = (sys.executable, "-S", "-E", "-c")


def standin_table(
    config: StackConfig, run: RunDirectory, *, port: int, access: BusAccess, sources: Sources, roll: RollCall
) -> list[ChildSpec]:
    """Six children, and `extra`."""
    env = dict(sources.environ) | {"SPROUT": "green"}
    seed = run.path / "seed.sock"
    seed.unlink(missing_ok=True)
    table = [
        ChildSpec("sleeper", ("sleep", "1000"), env),
        ChildSpec("deaf", (*PYTHON, DEAF), env, stage=1),
        ChildSpec("parent", (*PYTHON, PARENT), env, stage=1),
        ChildSpec(
            "seed",
            (sys.executable, "-m", "services.stack.seed", str(seed), "json"),
            env,
            partial(listens, seed),
        ),
        ChildSpec("sprout", ("false",), env, launch=SeedLauncher(seed, "sprout", SPROUT, ("--leaf", "1"))),
        ChildSpec("front", (*PYTHON, FRONT, str(port)), env, partial(serves, port, "/ready"), stage=2),
    ]
    if "STANDIN_EXTRA" in env:
        table.append(ChildSpec("extra", (*PYTHON, env["STANDIN_EXTRA"]), env))
    return table


if __name__ == "__main__":
    raise SystemExit(main(program=Program(module="tests.services.stack.standin", make_table=standin_table)))
