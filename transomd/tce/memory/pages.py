"""Shared memory and its pages: mapped so that huge pages fit, and brought in as huge pages where the kernel gives any.

The kernels of most sites give shared memory no huge pages by themselves (``shmem_enabled`` is ``never``), but all since
Linux 6.1 when asked for one (MADV_COLLAPSE, madvise(2)). Bringing a page of 2 MiB in costs a sixth of bringing its 512
small ones in, mapping it again costs next to nothing, and there is no entry of a page table for each 4 KiB.
"""

from __future__ import annotations

import ctypes
import mmap

HUGE = 2 << 20
"""Bytes of a huge page, and what mappings are aligned to: x86-64's, and arm64's with small pages of 4 KiB."""
_PAGE = 4096
_POPULATE_WRITE, _COLLAPSE = 23, 25
_SHARED_HERE = mmap.MAP_SHARED | 0x10  # MAP_FIXED
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(3 * [ctypes.c_int]), ctypes.c_long)


class Mapping:
    """All of a file's memory, shared.

    ``memory`` is its bytes, ``address`` where they begin, a multiple of HUGE wherever its pages can be huge.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        """Map; raises OSError."""
        try:
            # Python's own mmap does not choose where: it reserves more than enough, and the file is mapped into that.
            self._room = mmap.mmap(-1, size + HUGE, flags=_RESERVED)
        except OSError:
            # Where the kernel counts what is reserved (vm.overcommit_memory = 2): small pages.
            self._room = mmap.mmap(descriptor, size)
            self.address, self.memory = _address(self._room), memoryview(self._room)
            return
        start = _address(self._room)
        self.address = -(-start // HUGE) * HUGE
        both = mmap.PROT_READ | mmap.PROT_WRITE
        if _libc.mmap(self.address, size, both, _SHARED_HERE, descriptor, 0) != self.address:
            raise OSError(ctypes.get_errno(), "the memory of checkpoints cannot be mapped")
        self.memory = memoryview(self._room)[self.address - start :][:size]

    def bring_in(self, at: int, size: int) -> bool:
        """Bring pages in, changing nothing, huge ones where whole ones lie there; whether that could be done.

        ``at`` is a multiple of HUGE. False: this kernel cannot bring pages in without writing to them.
        """
        whole = size // HUGE * HUGE
        # It takes one page that is there to make a huge one of. Each call makes all processors look up: few calls.
        there = all(self.map_in(each, _PAGE) for each in range(at, at + whole, HUGE))
        if there and whole:
            _libc.madvise(self.address + at, whole, _COLLAPSE)
        return there and self.map_in(at, size)

    def map_in(self, at: int, size: int) -> bool:
        """As ``bring_in``, with pages as they are, or small ones where there are none yet."""
        return not _libc.madvise(self.address + at, size, _POPULATE_WRITE)

    def close(self) -> None:
        """Unmap; BufferError if somebody still has a view of ``memory``."""
        self.memory.release()
        self._room.close()


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
