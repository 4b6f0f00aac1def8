"""Bringing saved values into a program: tensors in place, objects through load_state_dict, the rest by value."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from transomd.tce.errors import CheckpointError
from transomd.tce.joined import Joined, check_whole
from transomd.tce.layout import Path, as_array, child, is_array, is_stateful, path_text, rebuild
from transomd.tce.payload import is_plain
from transomd.tce.program import Program
from transomd.tce.shards import local

log = logging.getLogger("transom.tce")
_ABSENT: Any = object()


class Merge:
    """The parts of a rank on their way into its state."""

    def __init__(self, parts: Joined, state: dict[str, Any], keys: Sequence[str]) -> None:
        """CheckpointError names what of ``state`` the checkpoint has no value for, or another share of."""
        check_whole(parts.layout, keys)
        self._layout = parts.layout
        self._reader = parts
        self._keys = keys
        self._targets: list[tuple[str, torch.Tensor]] = []
        self._check(state)
        self._program = Program(self._layout, state, keys)

    def _check(self, state: dict[str, Any]) -> None:
        lacking = [path for key in self._keys for path in self._lacking(state.get(key), self._layout.tree[key], (key,))]
        if lacking:
            raise CheckpointError(
                f"the checkpoint has nothing for {', '.join(path_text(path) for path in lacking[:5])}"
                f"{' and others' if len(lacking) > 5 else ''}: the program's state has changed since it was saved",
                hint="leave out of the state what was not saved",
            )

    def apply(self, state: dict[str, Any]) -> None:
        """Bring the values into ``state``: plain tensors at the end, all together, the others as they come."""
        with torch.no_grad():
            for key in self._keys:
                state[key] = self._value(state.get(key, _ABSENT), self._layout.tree[key], (key,))
        for targets in _together(self._targets):
            self._reader.fill(targets)
        for _, target in self._targets:
            torch.autograd.graph.increment_version(target)
        self._targets = []

    def _lacking(self, target: Any, node: Any, path: Path) -> list[Path]:
        if is_stateful(target) or isinstance(target, torch.Tensor):
            return []
        found: list[Path] = []
        for key, item in _children(target):
            there = child(node, key, _ABSENT)
            if there is not _ABSENT:
                found += self._lacking(item, there, (*path, key))
            elif _holds_tensors(item):
                found.append((*path, key))
        return found

    def _value(self, target: Any, node: Any, path: Path) -> Any:
        if path in self._layout.tensors:
            return self._tensor(target, path)
        if is_stateful(target) and not isinstance(target, torch.Tensor):
            target.load_state_dict(self._for_loading(target, node, path))
            return target
        if isinstance(target, dict) and isinstance(node, dict):
            return self._dict(target, node, path)
        if type(target) in (list, tuple) and type(node) in (list, tuple):
            return self._sequence(target, node, path)
        return self._rebuild(node, path)

    def _rebuild(self, node: Any, path: Path) -> Any:
        return rebuild(self._layout, node, path, self._read)

    def _for_loading(self, target: Any, node: Any, path: Path) -> Any:
        """What ``load_state_dict`` gets: a module copies from it; others may keep what they are given."""
        return rebuild(self._layout, node, path, self._peek if _copies(target, node) else self._read)

    def _read(self, name: str) -> torch.Tensor:
        return self._program.as_dealt(name, self._reader.read(name))

    def _peek(self, name: str) -> torch.Tensor:
        return self._program.as_dealt(name, self._reader.peek(name))

    def _dict(self, target: dict[Any, Any], node: dict[Any, Any], path: Path) -> dict[Any, Any]:
        values = {key: self._value(target.get(key, _ABSENT), item, (*path, key)) for key, item in node.items()}
        for key in [key for key in target if key not in values]:
            del target[key]
        target.update(values)
        return target

    def _sequence(self, target: Any, node: Any, path: Path) -> Any:
        values = [
            self._value(target[index] if index < len(target) else _ABSENT, item, (*path, index))
            for index, item in enumerate(node)
        ]
        if type(target) is tuple or type(node) is tuple:
            return tuple(values) if type(node) is tuple else values
        target[:] = values
        return target

    def _tensor(self, target: Any, path: Path) -> Any:
        name = self._layout.tensors[path]
        kind = self._layout.arrays.get(path)
        if kind is not None:
            return _into_array(target, as_array(self._reader.read(name), kind))
        if not isinstance(target, torch.Tensor):
            return self._read(name)
        here, saved = local(target), self._reader.record(name)
        dtype: torch.dtype = getattr(torch, saved.dtype)
        if tuple(here.shape) != saved.shape or here.dtype != dtype or _overlaps(here):
            log.warning(
                "%s: saved as %s %s, in the program %s %s: the state got the saved tensor, the old one is unchanged",
                path_text(path),
                dtype,
                list(saved.shape),
                here.dtype,
                list(here.shape),
            )
            return self._read(name)
        if is_plain(here):
            self._targets.append((name, here))
        else:
            here.copy_(self._reader.peek(name))
        return target


def _together(targets: list[tuple[str, torch.Tensor]]) -> list[list[tuple[str, torch.Tensor]]]:
    """Which targets may be filled at the same time: all, unless some share memory; then one after the other.

    Where two paths lead to one tensor (tied weights) it is filled once.
    """
    once = list({(name, target.data_ptr()): (name, target) for name, target in targets if target.nbytes}.values())
    storages = {target.untyped_storage().data_ptr() for _, target in once}
    return [once] if len(storages) == len(once) else [[target] for target in once]


def _copies(target: Any, node: Any) -> bool:
    """Whether ``load_state_dict`` is torch's own all the way down, which copies every tensor into the program's."""
    base = torch.nn.Module
    if not isinstance(target, base) or type(target).load_state_dict is not base.load_state_dict:
        return False
    own = (
        type(each)._load_from_state_dict is base._load_from_state_dict
        or type(each).__module__.startswith("torch.nn.modules")
        for each in target.modules()
    )
    return all(own) and not any("_extra_state" in str(key) for key in node)


def _into_array(target: Any, saved: Any) -> Any:
    if is_array(target) and target.shape and target.shape == saved.shape and target.dtype == saved.dtype:
        target[...] = saved
        return target
    return saved


def _overlaps(target: torch.Tensor) -> bool:
    """Whether elements of ``target`` share memory (expanded tensors): such a one cannot be written to."""
    return any(stride == 0 and size > 1 for size, stride in zip(target.shape, target.stride(), strict=True))


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if type(value) in (list, tuple):
        return list(enumerate(value))
    return []


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, torch.Tensor) or is_stateful(value):
        return True
    return any(_holds_tensors(item) for _, item in _children(value))
