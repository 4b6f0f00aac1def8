"""The bytes of a part: a safetensors file for its tensors, a small ``.pt`` file for the rest."""

from __future__ import annotations

import ctypes
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path as FilePath
from typing import Any

import torch
from xxhash import xxh3_128

from transomd.tce.crew import together
from transomd.tce.errors import CheckpointError
from transomd.tce.files import PIECE, digest
from transomd.tce.image import FileImage, PartImage, Piece, write_part
from transomd.tce.layout import Layout
from transomd.tce.manifest import Part, TensorRecord
from transomd.tce.memory.move import move
from transomd.tce.shards import Shard

# The names that every safetensors since 0.4.3 knows; what is not here is stored as bytes.
_SAFETENSORS = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
_ALIGN = 4096
Described = tuple[str, torch.dtype, torch.Size]
_DIGEST_LATER = "0" * 32
# Without numpy, and for every type: bfloat16 and the like have no buffer protocol.
_memory_view: Any = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.restype = ctypes.py_object
_memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200


@dataclass(frozen=True)
class Payload:
    """What is to be written for one part: name, loaders, layout, and the two files planned to the byte."""

    name: str
    ranks: tuple[int, ...]
    layout: Layout
    header: bytes
    records: tuple[TensorRecord, ...]
    rest: bytes

    @property
    def bytes(self) -> int:
        """Bytes of both files."""
        return self.tensor_bytes + len(self.rest)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the safetensors file; 0 when there is no tensor."""
        return len(self.header) + sum(record.bytes for record in self.records)

    def image(self) -> PartImage:
        """The files, whose bytes are still in the tensors."""
        rest = FileImage(f"{self.name}.pt", len(self.rest), (), lambda: [self.rest])
        tensors = FileImage(f"{self.name}.safetensors", self.tensor_bytes, self.records, self._pieces)
        files = (tensors, rest) if self.records else (rest,)
        return PartImage(self.name, self.ranks, self.layout.keys, files)

    def _pieces(self) -> Iterator[Piece]:
        yield self.header
        for record in self.records:
            # Held here while it is written: a contiguous copy has no other owner.
            tensor = on_host(self.layout.values[record.name])
            yield bytes_of(tensor)


def plan(name: str, ranks: tuple[int, ...], layout: Layout) -> Payload:
    """Plan the files of a part; copies nothing but what is no tensor."""
    header, records = _header(layout.values) if layout.values else (b"", ())
    return Payload(name, ranks, layout, header, records, _rest(layout))


def write_payload(folder: FilePath, payload: Payload) -> Part:
    """Write both files of a part durably (their names once the caller fsyncs the folder); raises OSError."""
    return write_part(folder, payload.image())


def read_layout(folder: FilePath, part: Part) -> Layout:
    """Read what is no tensor of a part, its digest verified; CheckpointError if it is damaged, OSError if gone."""
    record = next(file for file in part.files if file.name.endswith(".pt"))
    content = (folder / record.name).read_bytes()
    if digest(content) != record.xxh3_128:
        raise CheckpointError(f"{folder / record.name}: is damaged")
    return layout_of(content)


def layout_of(content: bytes) -> Layout:
    """What the bytes of a ``.pt`` file say."""
    document = torch.load(io.BytesIO(content), weights_only=True)
    layout = Layout(document["state"], document["tensors"], document["arrays"])
    for told, names in document.get("shards", ()):
        layout.shards.update(dict.fromkeys(names, Shard(*told)))
    layout.elsewhere.update(document.get("elsewhere", {}))
    return layout


class TensorReader:
    """Reads single tensors of a part, each verified before it is handed out."""

    def __init__(self, folder: FilePath, part: Part) -> None:
        found = [file for file in part.files if file.tensors]
        self._path = folder / found[0].name if found else None
        self._records = {tensor.name: tensor for tensor in found[0].tensors} if found else {}

    def record(self, name: str) -> TensorRecord:
        """What the manifest says of a tensor."""
        return self._records[name]

    def peek(self, name: str) -> torch.Tensor:
        """As ``read``: there is nothing to look at without reading it."""
        return self.read(name)

    def read(self, name: str) -> torch.Tensor:
        """A new tensor with the bytes of the file; CheckpointError if they are damaged."""
        record = self._records[name]
        tensor = torch.empty(record.shape, dtype=getattr(torch, record.dtype))
        self._read_into(name, tensor)
        return tensor

    def fill(self, targets: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Read straight into plain tensors that share no memory; CheckpointError if one has got damaged bytes."""
        together(sorted(targets, key=lambda target: -target[1].nbytes), self._fill)

    def _fill(self, targets: Iterator[tuple[str, torch.Tensor]]) -> Iterable[None]:
        for target in targets:
            self._read_into(*target)
        return ()

    def _read_into(self, name: str, tensor: torch.Tensor) -> None:
        assert self._path is not None
        record, view, own, done = self._records[name], bytes_of(tensor), xxh3_128(), 0
        with open(self._path, "rb", buffering=0) as file:
            file.seek(record.offset)
            while done < len(view) and (count := file.readinto(view[done : done + PIECE])):
                own.update(view[done : done + count])
                done += count
        if done != record.bytes or own.hexdigest() != record.xxh3_128:
            raise CheckpointError(f"{self._path}: tensor {name} is damaged")


class MemoryReader:
    """Hands out single tensors of a part that lies in memory and was verified there."""

    def __init__(self, memory: memoryview, at: int, records: tuple[TensorRecord, ...]) -> None:
        self._memory = memory
        self._at = at
        self._records = {record.name: record for record in records}

    def record(self, name: str) -> TensorRecord:
        """What is told of a tensor."""
        return self._records[name]

    def read(self, name: str) -> torch.Tensor:
        """A new tensor."""
        return self.peek(name).clone()

    def fill(self, targets: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copy into plain tensors that share no memory."""
        pairs = [(target, self.peek(name)) for name, target in targets]
        move((target.data_ptr(), saved.data_ptr(), saved.nbytes) for target, saved in pairs)

    def peek(self, name: str) -> torch.Tensor:
        """The tensor itself, for reading at once: its memory belongs to the keeper."""
        record = self._records[name]
        dtype = getattr(torch, record.dtype)
        if not record.bytes:
            return torch.empty(record.shape, dtype=dtype)
        raw = torch.frombuffer(self._memory, dtype=torch.uint8, count=record.bytes, offset=self._at + record.offset)
        if raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(record.shape)


def _header(tensors: dict[str, torch.Tensor]) -> tuple[bytes, tuple[TensorRecord, ...]]:
    return _planned(tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()))


@lru_cache(maxsize=8)
def _planned(tensors: tuple[Described, ...]) -> tuple[bytes, tuple[TensorRecord, ...]]:
    """The safetensors header, padded so that data begin at a page, and where each tensor will lie.

    The format allows no gap between tensors, so the widest types come first, which aligns every one.
    """
    entries: dict[str, Any] = {}
    placed = []
    position = 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: -tensor[1].itemsize):
        size = shape.numel() * dtype.itemsize
        known = _SAFETENSORS.get(dtype)
        form = {"dtype": known, "shape": list(shape)} if known else {"dtype": "U8", "shape": [size]}
        entries[name] = {**form, "data_offsets": [position, position + size]}
        placed.append((name, dtype, shape, position, size))
        position += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGN)
    start = len(text) + 8
    records = tuple(_record(name, dtype, shape, start + at, size) for name, dtype, shape, at, size in placed)
    return len(text).to_bytes(8, "little") + text, records


def _record(name: str, dtype: torch.dtype, shape: torch.Size, offset: int, size: int) -> TensorRecord:
    note = "" if dtype in _SAFETENSORS else "stored as its bytes: safetensors has no such type"
    return TensorRecord(name, str(dtype).removeprefix("torch."), tuple(shape), offset, size, _DIGEST_LATER, note)


def _rest(layout: Layout) -> bytes:
    document: dict[str, Any] = {"state": layout.tree, "tensors": layout.tensors, "arrays": layout.arrays}
    if layout.shards:
        document["shards"] = _shards(layout)
    if layout.elsewhere:
        document["elsewhere"] = layout.elsewhere
    buffer = io.BytesIO()
    torch.save(document, buffer)
    return buffer.getvalue()


def _shards(layout: Layout) -> list[tuple[tuple[Any, ...], list[str]]]:
    """Each share that is like no other, and the names of the tensors that it is told of: torch.save is slow."""
    names: dict[int, list[str]] = {}
    shards = {id(shard): shard for shard in layout.shards.values()}
    for name, shard in layout.shards.items():
        names.setdefault(id(shard), []).append(name)
    return [(tuple(shards[key]), names[key]) for key in shards]


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a contiguous copy of it in host memory."""
    return tensor.resolve_conj().resolve_neg().cpu().contiguous()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether what lies at ``data_ptr`` in host memory is the tensor's bytes, one after the other."""
    own = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cpu and tensor.is_contiguous()
    return own and not tensor.is_conj() and not tensor.is_neg()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor, of whatever type; valid while the tensor lives."""
    if not tensor.nbytes:
        return memoryview(b"")
    view: memoryview = _memory_view(tensor.data_ptr(), tensor.nbytes, _WRITABLE)
    return view
