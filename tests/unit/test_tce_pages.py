"""Mapped memory and its pages: huge ones where the kernel gives any, small ones else, nothing changed by it."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from transomd.tce.memory.pages import HUGE, Mapping

SIZE = 3 * HUGE + 12345
THP = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
NO_HUGE_PAGES = 41  # PR_SET_THP_DISABLE of prctl(2)


def memory(size: int = SIZE) -> int:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, size)
    return descriptor


def huge_kib(address: int) -> int:
    """KiB of the mapping at ``address`` that this process sees as huge pages."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    assert any(line.startswith(f"{address:x}-") for line in lines), "it is not mapped"
    return next(int(line.split()[1]) for line in lines if line.startswith("ShmemPmdMapped:"))


def gives_huge_pages() -> bool:
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    return release >= (6, 1) and THP.exists() and "[deny]" not in THP.read_text()


def test_a_mapping_begins_where_a_huge_page_may_and_leaves_nothing() -> None:
    before = Path("/proc/self/maps").read_text().count("memfd:test")
    descriptor = memory()
    mapping = Mapping(descriptor, SIZE)
    assert mapping.address % HUGE == 0
    assert len(mapping.memory) == SIZE
    mapping.memory[-3:] = b"end"
    assert os.pread(descriptor, 3, SIZE - 3) == b"end"
    view = mapping.memory[5:9]
    with pytest.raises(BufferError):
        mapping.close()
    assert bytes(view) == bytes(4), "who still looks does so at memory that is there"
    view.release()
    mapping.close()
    os.close(descriptor)
    assert Path("/proc/self/maps").read_text().count("memfd:test") == before


def test_what_cannot_be_mapped_is_an_error() -> None:
    read_end, write_end = os.pipe()
    with pytest.raises(OSError, match="cannot be mapped"):
        Mapping(read_end, SIZE)
    os.close(read_end)
    os.close(write_end)


@pytest.mark.skipif(not gives_huge_pages(), reason="Linux before 6.1, or huge pages are denied here")
def test_pages_are_huge_where_the_kernel_gives_them_and_so_in_every_process() -> None:
    descriptor = memory()
    mapping, other = Mapping(descriptor, SIZE), Mapping(descriptor, SIZE)
    mapping.memory[HUGE : HUGE + 5] = b"there"
    assert mapping.bring_in(0, SIZE)
    assert huge_kib(mapping.address) == 3 * HUGE >> 10
    assert other.bring_in(0, SIZE)
    assert huge_kib(other.address) == 3 * HUGE >> 10
    assert bytes(other.memory[HUGE : HUGE + 5]) == b"there"
    assert os.fstat(descriptor).st_blocks * 512 >= SIZE
    for each in (mapping, other):
        each.close()
    os.close(descriptor)


def test_where_there_are_none_small_pages_do() -> None:
    program = f"""
import ctypes, os, sys
sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
assert ctypes.CDLL(None).prctl({NO_HUGE_PAGES}, 1, 0, 0, 0) == 0
from test_tce_pages import SIZE, Mapping, huge_kib, memory
descriptor = memory()
mapping = Mapping(descriptor, SIZE)
assert mapping.bring_in(0, SIZE)
assert huge_kib(mapping.address) == 0
assert os.fstat(descriptor).st_blocks * 512 >= SIZE
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_bringing_pages_in_changes_nothing_that_is_written_meanwhile() -> None:
    descriptor = memory(8 * HUGE)
    mapping, other = Mapping(descriptor, 8 * HUGE), Mapping(descriptor, 8 * HUGE)
    filler = threading.Thread(target=other.bring_in, args=(0, 8 * HUGE))
    filler.start()
    for at in range(0, 8 * HUGE, 4096):
        mapping.memory[at : at + 8] = at.to_bytes(8, "little")
    filler.join()
    assert mapping.bring_in(0, 8 * HUGE)
    assert all(other.memory[at : at + 8] == at.to_bytes(8, "little") for at in range(0, 8 * HUGE, 4096))
    for each in (mapping, other):
        each.close()
    os.close(descriptor)


def test_where_reserving_is_refused_the_file_is_mapped_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    own = mmap.mmap

    def strict(descriptor: int, size: int, **flags: int) -> mmap.mmap:
        if descriptor == -1:
            raise OSError(12, "Cannot allocate memory")
        return own(descriptor, size, **flags)

    descriptor = memory()
    monkeypatch.setattr(mmap, "mmap", strict)
    mapping = Mapping(descriptor, SIZE)
    assert mapping.bring_in(0, SIZE)
    mapping.memory[:5] = b"there"
    assert os.pread(descriptor, 5, 0) == b"there"
    assert ctypes.string_at(mapping.address, 5) == b"there"
    mapping.close()
    os.close(descriptor)
