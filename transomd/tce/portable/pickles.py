"""DCP's ``.metadata``, a pickle, read without running anything: every class in it is replaced by one that only holds.

What is expected is then taken out piece by piece; whatever else the file names is refused.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from transomd.tce.errors import CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    **{(_METADATA, name): name for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")},
    **{
        (_METADATA, name): name for name in ("ChunkStorageMetadata", "TensorProperties", "MetadataIndex", "StorageMeta")
    },
    (_METADATA, "_MEM_FORMAT_ENCODING"): "format",
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): "_StorageInfo",
    ("torch.serialization", "_get_layout"): "layout",
    ("torch", "Size"): "Size",
    ("builtins", "getattr"): "member of an enumeration",
    **{("pathlib", name): "path" for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")},
    **{("pathlib._local", name): "path" for name in ("PosixPath", "PurePosixPath")},
}


class Inert:
    """Stands for an object of a pickle: it holds what the object was made with, and does nothing."""

    kind = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Inert:
        made = super().__new__(cls)
        made.args = args
        made.state = None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


@dataclass(frozen=True)
class Piece:
    """Where DCP has put a chunk of a tensor, or a value: file, offset and length."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Foreign:
    """What a ``.metadata`` tells: each tensor's type, shape and chunks by offsets; each value; and their paths."""

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...], dict[tuple[int, ...], Piece]]]
    values: dict[str, Piece]
    paths: dict[str, tuple[str | int, ...]] | None


def read_metadata(path: Path) -> Foreign:
    """Read a ``.metadata``. CheckpointError if it names anything that such a file has no need of, or no such file."""
    try:
        root = _Reader(io.BytesIO(path.read_bytes())).load()
        return _foreign(root)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}", hint="name the directory that dcp.save wrote") from error
    except (pickle.UnpicklingError, EOFError, IndexError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: is not read: {error}", hint="nothing is unpickled that could run code"
        ) from error


class _Reader(pickle.Unpickler):
    """Makes nothing but plain values and inert objects."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        # Made anew for each file, so that no file can leave anything behind in them.
        self._kinds = {kind: type(kind, (Inert,), {"kind": kind}) for kind in set(_KNOWN.values())}

    def find_class(self, module: str, name: str) -> Any:
        """The inert class for a name that DCP's metadata has; a type of torch's; nothing else."""
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        kind = _KNOWN.get((module, name))
        if kind is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which DCP's metadata has no need of")
        return self._kinds[kind]

    def persistent_load(self, pid: Any) -> Any:
        """Nothing is loaded from elsewhere."""
        raise pickle.UnpicklingError("it refers to something outside of the file")


def _foreign(root: Any) -> Foreign:
    about, stored = _field(root, "Metadata", "state_dict_metadata"), _field(root, "Metadata", "storage_data")
    pieces: dict[tuple[str, tuple[int, ...] | None], Piece] = {}
    for index, info in stored.items():
        offset = _field(index, "MetadataIndex", "offset", None)
        pieces[_field(index, "MetadataIndex", "fqn"), None if offset is None else _size(offset)] = _piece(info)
    tensors, values = {}, {}
    for fqn, item in about.items():
        if item.kind == "BytesStorageMetadata":
            values[fqn] = pieces[fqn, None]
        else:
            boxes = [_size(_field(c, "ChunkStorageMetadata", "offsets")) for c in _field(item, TENSOR, "chunks")]
            dtype = _field_of_properties(_field(item, TENSOR, "properties"))
            tensors[fqn] = dtype, _size(_field(item, TENSOR, "size")), {box: pieces[fqn, box] for box in boxes}
    return Foreign(tensors, values, _paths(_field(root, "Metadata", "planner_data", None)))


TENSOR = "TensorStorageMetadata"


def _field(item: Any, kind: str, name: str, *default: Any) -> Any:
    if not isinstance(item, Inert) or item.kind != kind or not isinstance(item.state, dict):
        raise ValueError(f"a {kind} was expected")
    return item.state.get(name, *default) if default else item.state[name]


def _field_of_properties(item: Any) -> torch.dtype:
    if not isinstance(item, Inert) or item.kind != "TensorProperties" or not isinstance(item.state[0], torch.dtype):
        raise ValueError("a tensor's type was expected")
    return item.state[0]


def _size(item: Any) -> tuple[int, ...]:
    if not isinstance(item, Inert) or item.kind != "Size":
        raise ValueError("a size was expected")
    numbers = tuple(item.args[0]) if item.args else ()
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a size was expected")
    return numbers


def _piece(info: Any) -> Piece:
    if _field(info, "_StorageInfo", "transform_descriptors", None):
        raise ValueError("its data went through an extension (compression), which is not supported")
    file, offset, length = (_field(info, "_StorageInfo", name) for name in ("relative_path", "offset", "length"))
    if type(file) is not str or Path(file).name != file or type(offset) is not int or type(length) is not int:
        raise ValueError(f"{file!r} is not the name of a file beside it")
    return Piece(file, offset, length)


def _paths(data: Any) -> dict[str, tuple[str | int, ...]] | None:
    if data is None:
        return None
    if not isinstance(data, dict) or not all(type(key) in (str, int) for path in data.values() for key in path):
        raise ValueError("the planner's data are no paths")
    return {str(fqn): tuple(path) for fqn, path in data.items()}
