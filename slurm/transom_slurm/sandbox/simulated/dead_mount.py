"""Puts a file system whose server never answers over a folder: ``dead_mount.py PATH``. Ends by SIGKILL.

It is a FUSE mount of which nobody reads the requests: whoever touches it waits in the kernel (state D), and only
SIGKILL ends that, as on a hard NFS mount. See fuse(4): fd, rootmode, user_id and group_id are what the kernel asks for.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def main() -> int:
    """Mount, say so on standard output, and keep the device open for ever."""
    libc = ctypes.CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"dead-server", os.fsencode(sys.argv[1]), b"fuse", 0, options):
        print(f"failed: mount: {os.strerror(ctypes.get_errno())}", flush=True)
        return 1
    print("mounted", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
