"""From what DCP keeps (flat names, chunks, pickled values) to a nested state."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from transomd.tce.dcp.values import why
from transomd.tce.errors import CheckpointError


def assemble(
    name: str, shape: Sequence[int], dtype: torch.dtype, chunks: Sequence[tuple[Sequence[int], torch.Tensor]]
) -> torch.Tensor:
    """The tensor that chunks at these offsets make up; CheckpointError if they do not."""
    if len(chunks) == 1 and tuple(chunks[0][1].shape) == tuple(shape) and chunks[0][1].dtype == dtype:
        return chunks[0][1]
    if sum(chunk.numel() for _, chunk in chunks) != math.prod(shape):
        raise CheckpointError(f"{name}: its chunks do not make up a tensor of shape {list(shape)}")
    whole = torch.empty(tuple(shape), dtype=dtype)
    for offsets, chunk in chunks:
        target = whole
        for dim, (offset, length) in enumerate(zip(offsets, chunk.shape, strict=True)):
            target = target.narrow(dim, offset, length)
        target.copy_(chunk)
    return whole


def leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What a nested value consists of, each with its path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value


def nested(flat: Mapping[str, Any], paths: Mapping[str, Sequence[str | int]] | None) -> dict[str, Any]:
    """The state whose values lie at these paths: of numbers lists are made, of words dicts."""
    root: dict[Any, Any] = {}
    for name, value in flat.items():
        *way, last = (paths or {}).get(name, (name,))
        node = root
        for key in way:
            node = node.setdefault(key, _Node())
        node[last] = value
    return {str(key): _finished(value) for key, value in root.items()}


def value_of(name: str, content: bytes) -> Any:
    """The value that torch.save wrote; CheckpointError if only a trusted pickle could bring it back."""
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # bytes of something else may make it raise anything
        raise CheckpointError(f"{name}: {refusal(error)}", hint=HINT) from error


HINT = (
    "in a program that trusts the file, load it with torch.load(weights_only=False) and save it through transom, "
    "without what only its own classes can restore"
)


def refusal(error: Exception) -> str:
    """Why a file was not loaded, out of torch's long message."""
    return f"nothing is unpickled that could run code ({why(error)})"


class _Node(dict[Any, Any]):
    """A container on the way to a value, as opposed to a dict that is a value."""


def _finished(value: Any) -> Any:
    if not isinstance(value, _Node):
        return value
    if all(type(key) is int for key in value):
        return [_finished(value[key]) for key in sorted(value)]
    return {key: _finished(item) for key, item in value.items()}
