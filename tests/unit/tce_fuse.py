"""A file system over a folder, by the kernel's FUSE protocol, that a test can stop, slow down or let refuse.

Run as ``python tce_fuse.py FOLDER MOUNTPOINT ORDERS`` by root; it prints ``mounted`` once it is, and ends when it is
unmounted. The file ORDERS is read anew for each request: ``slow 0.1`` (seconds a request), ``refuse 122`` (an errno for
whatever writes), or nothing. A stopped process (SIGSTOP) is a store whose server is gone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

HEADER = struct.Struct("<IIQQIIIHH")
ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
(LOOKUP, FORGET, GETATTR, SETATTR, MKDIR, UNLINK, RMDIR, RENAME, LINK) = (1, 2, 3, 4, 9, 10, 11, 12, 13)
(OPEN, READ, WRITE, STATFS, RELEASE, FSYNC, FLUSH, INIT) = (14, 15, 16, 17, 18, 20, 25, 26)
(OPENDIR, READDIR, RELEASEDIR, FSYNCDIR, CREATE, BATCH_FORGET, RENAME2) = (27, 28, 29, 30, 35, 42, 45)
WRITES = {SETATTR, MKDIR, UNLINK, RMDIR, RENAME, RENAME2, LINK, WRITE, CREATE}
NO_SUID_NO_DEV = 6
MOST_BYTES = 128 << 10


class Mirror:
    """Answers requests out of a folder. Numbers of nodes stand for paths in it."""

    def __init__(self, folder: str) -> None:
        self.paths = {1: folder}
        self.answers: dict[int, Callable[[int, bytes], bytes]] = {
            LOOKUP: lambda node, body: self._entry(self._child(node, body)),
            GETATTR: lambda node, body: struct.pack("<QII", 0, 0, 0) + _attributes(self.paths[node], node),
            SETATTR: self._change,
            MKDIR: self._make,
            UNLINK: lambda node, body: _nothing(os.unlink(self._child(node, body))),
            RMDIR: lambda node, body: _nothing(os.rmdir(self._child(node, body))),
            RENAME: lambda node, body: self._rename(node, body, 8),
            RENAME2: lambda node, body: self._rename(node, body, 16),
            LINK: self._link,
            OPEN: lambda node, body: _opened(
                os.open(self.paths[node], struct.unpack_from("<I", body)[0] & ~os.O_DIRECT)
            ),
            CREATE: self._create,
            READ: self._read,
            WRITE: self._write,
            STATFS: self._space,
            FSYNC: lambda node, body: _nothing(os.fsync(struct.unpack_from("<Q", body)[0])),
            RELEASE: lambda node, body: _nothing(os.close(struct.unpack_from("<Q", body)[0])),
            OPENDIR: lambda node, body: _opened(0),
            READDIR: self._names,
            INIT: self._begin,
            **dict.fromkeys((FLUSH, RELEASEDIR, FSYNCDIR), lambda node, body: b""),
        }

    def _child(self, node: int, body: bytes) -> str:
        return f"{self.paths[node]}/{body.rstrip(bytes(1)).decode()}"

    def _entry(self, path: str) -> bytes:
        os.lstat(path)
        node = next((known for known, place in self.paths.items() if place == path), max(self.paths) + 1)
        self.paths[node] = path
        return struct.pack("<QQQQII", node, 0, 0, 0, 0, 0) + _attributes(path, node)

    def _change(self, node: int, body: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        if valid & 8:
            os.truncate(self.paths[node], size)
        if valid & 1:
            os.chmod(self.paths[node], struct.unpack_from("<I", body, 68)[0] & 0o7777)
        return self.answers[GETATTR](node, b"")

    def _make(self, node: int, body: bytes) -> bytes:
        path = self._child(node, body[8:])
        os.mkdir(path, struct.unpack_from("<I", body)[0])
        return self._entry(path)

    def _rename(self, node: int, body: bytes, skip: int) -> bytes:
        old, new = body[skip:].split(b"\0")[:2]
        source, target = self._child(node, old), self._child(struct.unpack_from("<Q", body)[0], new)
        os.rename(source, target)
        self.paths = {n: p for n, p in self.paths.items() if p != target}
        self.paths = {
            n: target + p[len(source) :] if f"{p}/".startswith(f"{source}/") else p for n, p in self.paths.items()
        }
        return b""

    def _link(self, node: int, body: bytes) -> bytes:
        path = self._child(node, body[8:])
        os.link(self.paths[struct.unpack_from("<Q", body)[0]], path)
        return self._entry(path)

    def _create(self, node: int, body: bytes) -> bytes:
        flags, mode = struct.unpack_from("<II", body)
        path = self._child(node, body[16:])
        descriptor = os.open(path, (flags | os.O_CREAT) & ~os.O_DIRECT, mode & 0o7777)
        return self._entry(path) + _opened(descriptor)

    def _read(self, node: int, body: bytes) -> bytes:
        descriptor, offset, size = struct.unpack_from("<QQI", body)
        return os.pread(descriptor, size, offset)

    def _write(self, node: int, body: bytes) -> bytes:
        descriptor, offset, size = struct.unpack_from("<QQI", body)
        return struct.pack("<II", os.pwrite(descriptor, body[40 : 40 + size], offset), 0)

    def _space(self, node: int, body: bytes) -> bytes:
        found = os.statvfs(self.paths[1])
        sizes = found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree
        return struct.pack("<QQQQQIIII24x", *sizes, found.f_bsize, 255, found.f_frsize, 0)

    def _names(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        told = b""
        for at, name in list(enumerate(sorted(os.listdir(self.paths[node])), 1))[offset:]:
            raw = name.encode()
            one = struct.pack("<QQII", 1, at, len(raw), 0) + raw
            one += bytes(-len(one) % 8)
            if len(told) + len(one) > size:
                break
            told += one
        return told

    def _begin(self, node: int, body: bytes) -> bytes:
        # Version 7.31 and writes of more than a page.
        return struct.pack("<IIIIHHIIHHI28x", 7, 31, MOST_BYTES, 1 << 5, 16, 12, MOST_BYTES, 1, 0, 0, 0)


def _attributes(path: str, node: int) -> bytes:
    found = os.lstat(path)
    times = int(found.st_atime), int(found.st_mtime), int(found.st_ctime)
    owner = found.st_mode, found.st_nlink, found.st_uid, found.st_gid
    return ATTRIBUTES.pack(node, found.st_size, found.st_blocks, *times, 0, 0, 0, *owner, 0, 4096, 0)


def _opened(descriptor: int) -> bytes:
    return struct.pack("<QII", descriptor, 0, 0)


def _nothing(_: object) -> bytes:
    return b""


def refusal(orders: Path, request: int) -> int:
    """Do as ordered; the errno to answer with, or 0."""
    words = orders.read_text().split()
    if words[:1] == ["slow"]:
        time.sleep(float(words[1]))
    return int(words[1]) if words[:1] == ["refuse"] and request in WRITES else 0


def serve(channel: int, mirror: Mirror, orders: Path) -> None:
    """Answer until the file system is unmounted."""
    while True:
        try:
            message = os.read(channel, MOST_BYTES + 4096)
        except OSError as error:
            if error.errno == errno.ENODEV:
                return
            continue
        _, request, unique, node, *_ = HEADER.unpack_from(message)
        if request in (FORGET, BATCH_FORGET):
            continue
        code, answer = refusal(orders, request), b""
        try:
            if request not in mirror.answers:
                code = errno.ENOSYS
            elif not code:
                answer = mirror.answers[request](node, message[HEADER.size :])
        except OSError as error:
            code = error.errno or errno.EIO
        os.write(channel, struct.pack("<IiQ", 16 + len(answer), -code, unique) + answer)


def main() -> None:
    """Mount, say so, and serve."""
    folder, mountpoint, orders = sys.argv[1:]
    os.umask(0)
    channel = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={channel},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"mirror", mountpoint.encode(), b"fuse.mirror", NO_SUID_NO_DEV, options.encode()):
        sys.exit(os.strerror(ctypes.get_errno()))
    print("mounted", flush=True)
    serve(channel, Mirror(folder), Path(orders))


if __name__ == "__main__":
    main()
