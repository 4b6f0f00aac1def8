"""A model of a disk that loses what was not synced: records what is done to files, and gives what a power cut leaves.

What the standards promise, and no more: a change of a folder (a name made, renamed, linked, removed) is there once that
folder was synced after it, bytes of a file once the file was. Whatever was not, is there or is not, each by itself, in
any order; bytes by blocks of 4096, where a block that is missing is zeros or the file's end.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK = 4096
ROOT = 0


@dataclass(frozen=True)
class Names:
    """Names in a folder, each to what it now leads (None: the name is gone); ``folder``: to a new folder."""

    place: int
    to: dict[str, int | None]
    folder: bool = False


@dataclass(frozen=True)
class Bytes:
    """Bytes of a file."""

    place: int
    at: int
    content: bytes


@dataclass(frozen=True)
class Synced:
    """All that was done to a file or to a folder's names before this is on the disk."""

    place: int


@dataclass(frozen=True)
class Promised:
    """A program was told that this step is stored."""

    step: int


Op = Names | Bytes | Synced | Promised
Tree = dict[str, bytes | None]
"""Files with their bytes, folders with None, by their paths."""


class Turns:
    """Of several threads one goes on at a time, chosen by dice at each of its steps, so that a run can be repeated."""

    def __init__(self, dice: random.Random, count: int) -> None:
        self._dice = dice
        self._alive = count
        self._waiting: set[int] = set()
        self._turn = -1
        self._changed = threading.Condition()

    def step(self, me: int) -> None:
        """Wait until it is this thread's turn."""
        with self._changed:
            self._waiting.add(me)
            self._choose()
            assert self._changed.wait_for(lambda: self._turn == me, 120)
            self._turn = -1

    def leave(self) -> None:
        """This thread has no more steps."""
        with self._changed:
            self._alive -= 1
            self._choose()

    def _choose(self) -> None:
        if self._waiting and len(self._waiting) == self._alive:
            self._turn = self._dice.choice(sorted(self._waiting))
            self._waiting.remove(self._turn)
            self._changed.notify_all()


class Disk:
    """What was done below ``root``, in order; ``before`` is called before each change."""

    def __init__(self, root: Path, before: Callable[[], None]) -> None:
        self.ops: list[Op] = []
        self.root = str(root)
        self._before = before
        self._places = {self.root: ROOT}
        self._made = ROOT
        self._files: dict[int, list[Any]] = {}
        self._real: dict[str, Callable[..., Any]] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what all threads do."""
        names = ("open", "write", "fsync", "close", "rename", "link", "unlink", "mkdir", "rmdir")
        self._real = {name: getattr(os, name) for name in names}
        try:
            for name in names:
                setattr(os, name, getattr(self, f"_{name}"))
            yield
        finally:
            for name in names:
                setattr(os, name, self._real[name])

    def promised(self, step: int) -> None:
        """A program was told so."""
        self.ops.append(Promised(step))

    def _ours(self, path: Any, dir_fd: int | None = None) -> str:
        """The whole path; '' if it is not below the root."""
        if isinstance(path, int):
            return ""
        base = self._files[dir_fd][0] if dir_fd in self._files else ""
        full = os.path.join(base, os.fspath(path))
        return full if f"{full}/".startswith(f"{self.root}/") else ""

    def _lead(self, path: str, place: int | None, new_folder: bool = False) -> None:
        """A name now leads there."""
        folder, name = os.path.split(path)
        self.ops.append(Names(self._places[folder], {name: place}, new_folder))
        self._places.pop(path, None)
        if place is not None:
            self._places[path] = place

    def _make(self, path: str, folder: bool = False) -> None:
        self._made += 1
        self._lead(path, self._made, folder)

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        ours = self._ours(path, dir_fd)
        makes = bool(ours and flags & os.O_CREAT and ours not in self._places)
        if makes:
            self._before()
        number: int = self._real["open"](path, flags, mode, dir_fd=dir_fd)
        if makes:
            self._make(ours)
        if ours in self._places:
            self._files[number] = [ours, self._places[ours], 0]
        return number

    def _close(self, number: int) -> None:
        self._files.pop(number, None)
        self._real["close"](number)

    def _write(self, number: int, content: Any) -> int:
        if number not in self._files:
            return int(self._real["write"](number, content))
        self._before()
        count: int = self._real["write"](number, content)
        file = self._files[number]
        self.ops.append(Bytes(file[1], file[2], bytes(content[:count])))
        file[2] += count
        return count

    def _fsync(self, number: int) -> None:
        if number in self._files:
            self._before()
            self.ops.append(Synced(self._files[number][1]))

    def _rename(self, source: Any, target: Any) -> None:
        self._before()
        self._real["rename"](source, target)
        (folder, name), (there, new) = os.path.split(self._ours(source)), os.path.split(self._ours(target))
        assert folder == there, "a rename between folders is not modelled"
        place = self._places.pop(self._ours(source))
        self._places[self._ours(target)] = place
        self.ops.append(Names(self._places[folder], {name: None, new: place}))

    def _link(self, source: Any, target: Any) -> None:
        self._before()
        self._real["link"](source, target)
        self._lead(self._ours(target), self._places[self._ours(source)])

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove("unlink", path, dir_fd)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove("rmdir", path, dir_fd)

    def _remove(self, how: str, path: Any, dir_fd: int | None) -> None:
        ours = self._ours(path, dir_fd)
        if ours:
            self._before()
        self._real[how](path, dir_fd=dir_fd)
        if ours:
            self._lead(ours, None)

    def _mkdir(self, path: Any, mode: int = 0o777) -> None:
        if self._ours(path):
            self._before()
        self._real["mkdir"](path, mode)
        if self._ours(path):
            self._make(self._ours(path), folder=True)


def after_power_cut(ops: Sequence[Op], lost: Callable[[], bool], dice: random.Random) -> Tree:
    """What is there when the power went after ``ops``; ``lost`` says of each thing that was not synced whether it is.

    Of bytes that were not synced and are not lost, some blocks may be.
    """
    folders = [place for op in ops if isinstance(op, Names) and op.folder for place in op.to.values()]
    names: dict[int | None, dict[str, int]] = {place: {} for place in [ROOT, *folders]}
    files: dict[int, bytearray] = {}
    for op, safe in zip(ops, _safe(ops), strict=True):
        if not safe and lost():
            continue
        if isinstance(op, Names):
            _rename(names[op.place], op.to)
        elif isinstance(op, Bytes):
            file = files.setdefault(op.place, bytearray())
            content = op.content if safe else _torn(op.content, dice)
            file[len(file) :] = bytes(max(0, op.at + len(content) - len(file)))
            file[op.at : op.at + len(content)] = content
    return dict(_tree(names, files, ROOT, ""))


def _safe(ops: Sequence[Op]) -> list[bool]:
    """Of each change whether it was synced."""
    synced: set[int] = set()
    told = []
    for op in reversed(ops):
        if isinstance(op, Synced):
            synced.add(op.place)
        told.append(not isinstance(op, Promised) and op.place in synced)
    return told[::-1]


def _rename(folder: dict[str, int], to: dict[str, int | None]) -> None:
    for name, place in to.items():
        if place is None:
            folder.pop(name, None)
        else:
            folder[name] = place


def _torn(content: bytes, dice: random.Random) -> bytes:
    """Bytes that were on their way: all, cut off at a block, or with blocks of zeros."""
    how = dice.randrange(3)
    if how == 0:
        return content
    if how == 1:
        return content[: BLOCK * dice.randrange(0, len(content) // BLOCK + 1)]
    blocks = [content[at : at + BLOCK] for at in range(0, len(content), BLOCK)]
    return b"".join(block if dice.random() < 0.5 else bytes(len(block)) for block in blocks)


def _tree(
    names: dict[int | None, dict[str, int]], files: dict[int, bytearray], place: int, path: str
) -> Iterator[tuple[str, bytes | None]]:
    for name, there in sorted(names[place].items()):
        if there in names:
            yield f"{path}{name}", None
            yield from _tree(names, files, there, f"{path}{name}/")
        else:
            yield f"{path}{name}", bytes(files.get(there, b""))


def lay_out(tree: Tree, folder: Path) -> None:
    """Make these files and folders."""
    for path, content in tree.items():
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)
