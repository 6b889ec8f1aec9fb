"""Checksums of KV records in C++ (`digest.h`): 70 to 100 GB/s in the CPU's cache; CRC-32 reaches 7."""

import ctypes
from functools import cache

from services.worker.engine.native.build import build
from services.worker.kv.tiers.records import CRC, Checksums, RecordRow
from shared.errors import ConfigError


@cache
def checksums() -> Checksums:
    """Return the native checksums, or CRC-32 without the library."""
    try:
        library = ctypes.CDLL(str(build()))
    except (ConfigError, OSError):
        return CRC  # The engine logs the reason.
    library.kv_digest.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    library.kv_digest.restype = ctypes.c_uint64
    library.kv_digest_kind.argtypes = ()
    library.kv_digest_kind.restype = ctypes.c_int32

    def digest(row: RecordRow) -> int:
        return int(library.kv_digest(row.ctypes.data, row.nbytes))

    return Checksums(library.kv_digest_kind(), digest)
