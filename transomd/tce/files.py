"""Files that are either whole and on the disk, or not there: written beside, fsynced, renamed or linked."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from xxhash import xxh3_128

CHUNK = 16 << 20
PIECE = 1 << 20
"""Bytes read at once where they are hashed, too: they are still in the processor's cache then."""
TEMPORARY = ".tmp"
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
_BLOCK = 4096
_LOCAL = (0xEF53, 0x58465342)  # f_type of statfs(2)
_serial = itertools.count()


def write_file(path: Path, size: int, chunks: Iterable[bytes | memoryview]) -> None:
    """Put a file of ``size`` bytes at ``path``, durable but for its name: the caller fsyncs the folder.

    Space is reserved before the first byte is written, so a full file system is known at once (OSError).
    """
    temporary = _temporary(path)
    try:
        _write_durably(temporary, size, chunks)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def link_file(path: Path, content: bytes) -> bool:
    """Put ``content`` at ``path`` durably unless something is there already; True if this call put it there."""
    temporary = _temporary(path)
    try:
        _write_durably(temporary, len(content), [content])
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    sync_folder(path.parent)
    return True


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make ``folder`` and its parents, each name durable."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
        sync_folder(folder.parent)


def remove_files(paths: Iterable[Path]) -> None:
    """Remove files; one that is gone already is no error."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def read_chunks(path: Path, sizes: Iterable[int]) -> Iterator[memoryview]:
    """Yield the bytes of ``path`` in pieces of at most 16 MiB that never cross one of the given sizes.

    A shorter file ends the pieces early. The memory of a piece is reused for the next one.
    """
    buffer = memoryview(bytearray(CHUNK))
    with open(path, "rb", buffering=0) as file:
        for size in sizes:
            while size:
                count = file.readinto(buffer[: min(size, CHUNK)])
                if not count:
                    return
                yield buffer[:count]
                size -= count


def digest(content: bytes | memoryview) -> str:
    """The xxh3-128 of ``content`` in hexadecimal."""
    return xxh3_128(content).hexdigest()


def _temporary(path: Path) -> Path:
    """A name beside ``path`` that no other rank, host or earlier try uses."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{next(_serial)}{TEMPORARY}")


def _write_durably(path: Path, size: int, chunks: Iterable[bytes | memoryview]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        _reserve(descriptor, size)
        written = sum(_write_all(descriptor, chunk) for chunk in chunks)
        if written != size:
            raise OSError(errno.EIO, f"{written} bytes were written where {size} were announced", str(path))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, content: bytes | memoryview) -> int:
    view = memoryview(content).cast("B")
    done = _write_directly(descriptor, view) if len(view) >= CHUNK and _is_local(descriptor) else 0
    while done < len(view):
        done += os.write(descriptor, view[done : done + CHUNK])
    return done


def _write_directly(descriptor: int, view: memoryview) -> int:
    """Write past the page cache as long as the file system takes it; how much it took.

    It refuses what does not begin at a block, in memory or in the file. What is written so costs no copy, and pushes
    nothing else out of the cache.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    done, whole = 0, len(view) // _BLOCK * _BLOCK
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        while done < whole:
            done += os.write(descriptor, view[done : min(done + CHUNK, whole)])
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return done


def _is_local(descriptor: int) -> bool:
    """Whether the file lies on ext4 or XFS: over a network, one direct write at a time would wait for each answer."""
    found = (ctypes.c_long * 32)()
    return ctypes.CDLL(None).fstatfs(descriptor, found) == 0 and found[0] in _LOCAL


def _reserve(descriptor: int, size: int) -> None:
    """Reserve ``size`` bytes; where the file system cannot, nothing is done.

    The system call itself, because libc's posix_fallocate writes a byte into every block where it is missing (NFS).
    """
    if not size:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0:
        return
    code = ctypes.get_errno()
    if code not in _NO_FALLOCATE:
        raise OSError(code, os.strerror(code))
