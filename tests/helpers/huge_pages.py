"""Memory of this process in pages of 2 MiB: forking it then takes half the time.

A process that has imported all tests has 450 MiB, in 115,000 pages of 4 KiB.  Each fork
copies the table of these pages and each end of a child gives it back: 33 ms of CPU, and
the tests start thousands of workers.  Of 2 MiB there are 225.
"""

import ctypes
import re
import sys
from pathlib import Path

HUGE_PAGE_BYTES = 2 << 20
MADV_COLLAPSE = 25
"""Of Linux 6.1 and later; an older one refuses it, and nothing changes."""

# address range, private and writable, and no file behind it
ANONYMOUS = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 +(\[heap\])?$", re.M)


def collapse_pages():
    """Ask the kernel to put what is in small pages now into huge ones.

    Only a hint: no mapping and no byte changes, and what is allocated later is in small
    pages as before.

    Returns:
        Bytes that are in huge pages now.
    """
    if not sys.platform.startswith("linux"):
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    collapsed_bytes = 0
    for first, last, _ in ANONYMOUS.findall(Path("/proc/self/maps").read_text()):
        begin = -(-int(first, 16) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        end = int(last, 16) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        # One by one: the kernel stops at a part that nobody has written to yet.
        for address in range(begin, end, HUGE_PAGE_BYTES):
            if madvise(address, HUGE_PAGE_BYTES, MADV_COLLAPSE) == 0:
                collapsed_bytes += HUGE_PAGE_BYTES
    return collapsed_bytes
