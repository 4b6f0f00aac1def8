"""What a state consists of: its tensors, and the rest as plain values that ``torch.load(weights_only=True)`` takes.

Everything that could not be loaded again is refused here, with its path, before a byte is written.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from transomd.tce.errors import CheckpointError
from transomd.tce.shards import Deal, Dealt, Shard, dealt, is_dtensor, local

Path = tuple[Any, ...]
_PLAIN = (type(None), bool, float, complex, str, bytes, bytearray, torch.dtype, torch.device, torch.Size)
_KEYS = (type(None), bool, int, float, str, bytes)
# torch before 2.5 has no Buffer.
_TENSORS = (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor))
_DICTS = (dict, OrderedDict, defaultdict, Counter)
# torch.load(weights_only=True) reads integers of up to 255 bytes.
_INT_BITS = 255 * 8 - 1
_MAX_DEPTH = 200


@dataclass
class Layout:
    """A state taken apart: ``tree`` with None at the place of each tensor, and the tensors by name.

    ``tensors`` maps the path of each tensor in ``tree`` to its name, ``arrays`` the path of each that was a numpy
    array or scalar to its numpy type. Two paths of one tensor (tied weights) bear one name. ``shards`` says of each
    share of a DTensor which one it is, ``deals``, while saving, who has it, and ``elsewhere`` how many tensors of a key
    are in other parts than its tree.
    """

    tree: dict[str, Any]
    tensors: dict[Path, str] = field(default_factory=dict)
    arrays: dict[Path, tuple[str, bool]] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    shards: dict[str, Shard] = field(default_factory=dict)
    deals: dict[str, Deal] = field(default_factory=dict)
    elsewhere: dict[str, int] = field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        """The top-level keys of which something is here."""
        more = (path[0] for path, name in self.tensors.items() if name in self.shards) if self.shards else ()
        return tuple(dict.fromkeys([*self.tree, *more]))

    def split(self, name_of: Callable[[str, Deal | None], str]) -> dict[str, Layout]:
        """The parts by their names: what is under a key goes where ``name_of`` says, a DTensor where its deal says."""
        parts: dict[str, Layout] = defaultdict(lambda: Layout({}))
        homes = {}
        for key, value in self.tree.items():
            home = homes[key] = parts[name_of(key, None)]
            home.tree[key] = value
        for path, name in self.tensors.items():
            part = home = homes[path[0]]
            if name in self.deals:
                part = parts[name_of(path[0], self.deals[name])]
                part.shards[name] = self.shards[name]
            if part is not home:
                home.elsewhere[path[0]] = home.elsewhere.get(path[0], 0) + 1
            part.tensors[path] = name
            part.values[name] = self.values[name]
        for path, kind in self.arrays.items():
            homes[path[0]].arrays[path] = kind
        return dict(parts)


def path_text(path: Path) -> str:
    """A path as a person would write it: ``state['optimizer']['state'][0]``."""
    return "state" + "".join(f"[{key!r}]" for key in path)


def take_apart(state: Mapping[str, Any]) -> Layout:
    """Take ``state`` apart without copying a tensor; CheckpointError names the path of what could not be loaded again.

    Objects with ``state_dict`` and ``load_state_dict`` are asked for theirs.
    """
    if not isinstance(state, Mapping) or not all(type(key) is str for key in state):
        raise CheckpointError("the state must be a dict whose keys are strings", hint="save(step, {'model': model})")
    walk = _Walk(Layout({}))
    for key, value in state.items():
        walk.layout.tree[key] = walk.node(value, (key,))
    return walk.layout


def is_stateful(value: object) -> bool:
    """Whether ``value`` is an object that saves and loads itself (a module, an optimizer, a scheduler, a scaler)."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def is_array(value: object) -> bool:
    """Whether ``value`` is a numpy array or scalar; numpy is not imported for it."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


class _Walk:
    """One pass over a state."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._names: dict[tuple[Any, ...], str] = {}
        self._open: set[int] = set()

    def node(self, value: Any, path: Path) -> Any:
        """The plain stand-in for ``value``, whose tensors are noted."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if is_array(value):
            return self._array(value, path)
        if type(value) is bytes and not value:
            return self._empty_bytes(path)
        if type(value) in _PLAIN:
            return value
        if type(value) is int:
            return _bounded(value, path)
        if type(value) is set:
            return {_key(item, path) for item in value}
        return self._nested(value, path)

    def _nested(self, value: Any, path: Path) -> Any:
        if id(value) in self._open or len(path) > _MAX_DEPTH:
            raise _refused(path, value, "it contains itself, or is nested too deeply", "save a copy without the cycle")
        self._open.add(id(value))
        try:
            return self._container(value, path)
        finally:
            self._open.discard(id(value))

    def _container(self, value: Any, path: Path) -> Any:
        if type(value) in (list, tuple):
            return type(value)(self.node(item, (*path, index)) for index, item in enumerate(value))
        if type(value) in _DICTS:
            return self._dict(value, path)
        if is_stateful(value):
            return self.node(value.state_dict(), path)
        raise _refused(
            path,
            value,
            "only tensors, numbers, strings, bytes, lists, tuples, dicts and objects with state_dict and "
            "load_state_dict can be loaded again without running code from the file",
            "save what it is made of, or give its class state_dict and load_state_dict",
        )

    def _dict(self, value: dict[Any, Any], path: Path) -> Any:
        kind: type[Any] = dict if type(value) is defaultdict else type(value)
        result = kind()
        for key, item in value.items():
            result[_key(key, path)] = self.node(item, (*path, key))
        if kind is OrderedDict and hasattr(value, "_metadata"):
            # A module's state_dict carries the versions of its submodules there, and load_state_dict asks for them.
            result._metadata = _Walk(Layout({})).node(value._metadata, (*path, "_metadata"))
        return result

    def _tensor(self, tensor: torch.Tensor, path: Path) -> None:
        share = None
        if type(tensor) not in _TENSORS:
            share, tensor = _here(tensor, path)
        _check_tensor(tensor, path)
        view = (
            tensor.data_ptr(),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.device,
            tensor.is_conj(),
            tensor.is_neg(),
            id(share),
        )
        name = self._names.get(view) if tensor.numel() else None
        if name is None:
            name = self._new_name(path)
            self._names[view] = name
            self.layout.values[name] = tensor.detach()
            if share is not None:
                self.layout.shards[name], self.layout.deals[name] = share.shard, share.deal
        self.layout.tensors[path] = name

    def _array(self, array: Any, path: Path) -> None:
        numpy = sys.modules["numpy"]
        scalar = isinstance(array, numpy.generic)
        if not scalar and type(array) is not numpy.ndarray:
            raise _refused(path, array, "subclasses of numpy arrays cannot be rebuilt", "save its plain arrays")
        try:
            tensor = torch.from_numpy(numpy.array(array, order="C"))
        except (TypeError, ValueError) as error:
            raise _refused(path, array, f"numpy type {array.dtype}: {error}", "convert it to numbers first") from error
        name = self._new_name(path)
        self.layout.values[name] = tensor
        self.layout.tensors[path] = name
        self.layout.arrays[path] = (str(array.dtype), scalar)

    def _empty_bytes(self, path: Path) -> None:
        """Note ``b""``, the one plain value that torch.load(weights_only=True) refuses, as an array of no bytes."""
        name = self._new_name(path)
        self.layout.values[name] = torch.empty(0, dtype=torch.uint8)
        self.layout.tensors[path] = name
        self.layout.arrays[path] = ("bytes", True)

    def _new_name(self, path: Path) -> str:
        """``model.layers.0.weight``; two paths that read alike get different names."""
        plain = ".".join(str(key) for key in path)
        name, serial = plain, 1
        while name in self.layout.values or name == "__metadata__":
            serial += 1
            name = f"{plain}#{serial}"
        return name


def _here(tensor: torch.Tensor, path: Path) -> tuple[Dealt | None, torch.Tensor]:
    """What this rank has of a DTensor, and which share that is; what a collective still brings is waited for."""
    here = local(tensor)
    if not is_dtensor(tensor):
        return None, here
    try:
        share = dealt(tensor)
    except ValueError as error:
        raise _refused(path, tensor, str(error), "redistribute it to Shard or Replicate before saving") from error
    if tuple(here.shape) != share.sizes:
        told = f"this rank holds {list(here.shape)} of it, where its placements make it {list(share.sizes)}"
        raise _refused(path, tensor, told, "save its local tensor, tensor.to_local()")
    return share, here


def _check_tensor(tensor: torch.Tensor, path: Path) -> None:
    if type(tensor) not in _TENSORS:
        raise _refused(path, tensor, "tensor subclasses cannot be rebuilt", "save its local or plain tensor")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise _refused(path, tensor, "sparse and quantized tensors are not supported", "save its dense parts")
    if tensor.device.type == "meta":
        raise _refused(path, tensor, "it has no data (device meta)", "materialise it before saving")
    if tensor.numel() and not tensor.data_ptr():
        raise _refused(path, tensor, "its memory was freed or never allocated", "gather it before saving")


def _bounded(value: int, path: Path) -> int:
    if value.bit_length() > _INT_BITS:
        raise _refused(path, value, f"integers of more than {_INT_BITS} bits cannot be loaded", "save it as a string")
    return value


def _key(key: Any, path: Path) -> Any:
    if type(key) is tuple:
        return tuple(_key(item, path) for item in key)
    if type(key) not in _KEYS or key == b"":
        raise _refused(
            (*path, key), key, "keys must be strings, numbers, bytes (not empty), None or tuples of these", "rename it"
        )
    return _bounded(key, path) if type(key) is int else key


def _refused(path: Path, value: object, why: str, hint: str) -> CheckpointError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return CheckpointError(f"{path_text(path)} ({kind}) cannot be saved: {why}", hint=hint)


def put_together(layout: Layout, keys: list[str], read: Callable[[str], torch.Tensor]) -> dict[str, Any]:
    """The inverse of ``take_apart`` for some top-level keys; ``read`` brings the tensor of a name."""
    return {key: rebuild(layout, layout.tree[key], (key,), read) for key in keys}


def rebuild(layout: Layout, node: Any, path: Path, read: Callable[[str], torch.Tensor]) -> Any:
    """The value at ``path``, with its tensors and arrays in it."""
    name = layout.tensors.get(path)
    if name is not None:
        return as_array(read(name), layout.arrays[path]) if path in layout.arrays else read(name)
    if type(node) in (list, tuple):
        return type(node)(rebuild(layout, item, (*path, index), read) for index, item in enumerate(node))
    if isinstance(node, dict):
        result = type(node)()
        for key, item in node.items():
            result[key] = rebuild(layout, item, (*path, key), read)
        if hasattr(node, "_metadata"):
            result._metadata = node._metadata  # type: ignore[attr-defined]
        return result
    return node


def child(node: Any, key: Any, absent: Any) -> Any:
    """What stands at ``key`` in a dict, list or tuple; ``absent`` if nothing does."""
    if isinstance(node, dict):
        return node.get(key, absent)
    inside = type(node) in (list, tuple) and type(key) is int and key < len(node)
    return node[key] if inside else absent


def as_array(tensor: torch.Tensor, kind: tuple[str, bool]) -> Any:
    """The numpy array or scalar, or the empty bytes, that ``tensor`` was."""
    if kind[0] == "bytes":
        return b""
    array = tensor.numpy()
    return array[()] if kind[1] else array
