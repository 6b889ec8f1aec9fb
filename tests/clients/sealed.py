"""Run a command in a network that has nothing but 127.0.0.1: `unshare … python sealed.py FD PORT COMMAND …`.

It listens on 127.0.0.1:PORT in that network and sends the listening socket through the socket FD to the
process that started it. That process answers from outside. Standard library only.
"""

import array
import fcntl
import socket
import struct
import subprocess
import sys

SEAL = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
"""No other network, and no process outlives the command. This needs Linux with user namespaces."""
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1


def _bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = array.array("b", struct.pack("16sh14x", b"lo", 0))
        fcntl.ioctl(any_socket, _GET_FLAGS, request)
        flags = struct.unpack("16sh14x", request)[1]
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _UP))


def main(to_parent: int, port: int, command: list[str]) -> int:
    _bring_up_loopback()
    with socket.socket(fileno=to_parent) as parent, socket.create_server(("127.0.0.1", port)) as server:
        socket.send_fds(parent, [b"."], [server.fileno()])
    return subprocess.call(command)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
