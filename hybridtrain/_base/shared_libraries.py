"""How many shared libraries this process has loaded."""

from __future__ import annotations

import ctypes
from typing import Any


class _LibraryInfo(ctypes.Structure):
    """`struct dl_phdr_info` of link.h, up to the count."""

    _fields_ = [
        ("address", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("headers", ctypes.c_void_p),
        ("number_of_headers", ctypes.c_uint16),
        ("loads", ctypes.c_ulonglong),
    ]


def _note(info: Any, size: int, count: Any) -> int:
    """Copies the count, which is the same for each library; 1 leaves out the other libraries."""
    ctypes.c_ulonglong.from_address(count).value = info[0].loads
    return 1


_NOTE: Any = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(_LibraryInfo), ctypes.c_size_t, ctypes.c_void_p
)(_note)

# In the C libraries of Linux, not in that of macOS. `PyDLL` keeps the GIL during the call, which
# holds a lock of the loader: `_note` would wait for the GIL, and a thread that has the GIL and
# imports an extension for the lock.
_iterate: Any = getattr(ctypes.PyDLL(None), "dl_iterate_phdr", None)


def loaded_libraries() -> int | None:
    """Returns the number of libraries loaded so far, closed ones too; None if unknown."""
    if _iterate is None:
        return None
    count = ctypes.c_ulonglong()
    _iterate(_NOTE, ctypes.byref(count))
    return count.value
