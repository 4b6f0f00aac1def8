"""What DCP must know of a checkpoint, as JSON: which tensors and values there are, and where the bytes of each lie.

It says what DCP's own ``.metadata`` says, which is a pickle and so could run code when it is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transomd.tce.catalogue import load_parts, step_folders
from transomd.tce.errors import CheckpointError
from transomd.tce.files import digest
from transomd.tce.manifest import StepManifest, read_step_manifest
from transomd.words import ExitCode

FORMAT = 1
FILE = "dcp.json"
KEYS = ("torch.distributed.checkpoint",)
"""In place of a state's keys, so that the engine, asked to load such a checkpoint, says what it is."""


DAMAGED = "is damaged"


class DamagedError(CheckpointError):
    """Bytes of a checkpoint are not those that were written; an older checkpoint may be good."""

    exit_code = ExitCode.UNHEALTHY


@dataclass(frozen=True)
class Stored:
    """Where bytes lie, what torch calls their type, and their digest ('': the manifest of the rank has it)."""

    file: str
    name: str
    dtype: str
    offset: int
    bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: where it begins, its sizes, and where its bytes are stored."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stored: Stored


@dataclass(frozen=True)
class TensorFacts:
    """A whole tensor and the chunks that it was cut into."""

    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Facts:
    """A checkpoint: tensors and other values by DCP's name of each, and the path of each in the nested state.

    ``paths`` is None where the planner did not flatten the state.
    """

    tensors: Mapping[str, TensorFacts]
    values: Mapping[str, Stored]
    paths: Mapping[str, tuple[str | int, ...]] | None


def encode(facts: Facts) -> bytes:
    """The text of ``dcp.json``."""
    return json.dumps({"format": FORMAT, **asdict(facts)}, separators=(",", ":")).encode() + b"\n"


def decode(content: bytes) -> Facts:
    """Read the text of ``dcp.json``; ValueError says what is wrong."""
    document = json.loads(content)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{FILE}: is not of format {FORMAT}, which this transom reads")
    try:
        tensors = {fqn: _tensor(item) for fqn, item in document["tensors"].items()}
        values = {fqn: Stored(**item) for fqn, item in document["values"].items()}
        paths = document["paths"]
        return Facts(tensors, values, None if paths is None else {fqn: tuple(path) for fqn, path in paths.items()})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{FILE}: lacks {error}") from error


def read_facts(folder: Path) -> Facts:
    """Read and verify the facts of the checkpoint in ``folder``. DamagedError if they are damaged or gone."""
    try:
        manifest = read_step_manifest(folder)
        part = load_parts(folder, manifest, [part.name for part in manifest.parts if part.keys == KEYS])[0]
        content = (folder / FILE).read_bytes()
        if digest(content) != part.files[0].xxh3_128:
            raise ValueError(f"{FILE}: is damaged")
        return decode(content)
    except (OSError, ValueError, IndexError) as error:
        raise damaged(folder, error) from error


def damaged(folder: Path, error: Exception) -> DamagedError:
    """Say that the checkpoint in ``folder`` cannot be read as it was written."""
    return DamagedError(f"{folder} {DAMAGED}: {error}", hint=f"transom ckpt verify {folder.parent}")


def written_by_dcp(manifest: StepManifest) -> bool:
    """Whether a checkpoint was written through torch.distributed.checkpoint."""
    return any(part.keys == KEYS for part in manifest.parts)


def folders(directory: Path, bound: int | None = None) -> list[Path]:
    """The folders of complete checkpoints that DCP wrote, at most of step ``bound``, newest first."""
    return [folder for folder in step_folders(directory) if _fits(folder, bound)]


def _fits(folder: Path, bound: int | None) -> bool:
    try:
        manifest = read_step_manifest(folder)
    except (OSError, ValueError):
        return False
    return written_by_dcp(manifest) and (bound is None or manifest.step <= bound)


def _tensor(item: dict[str, Any]) -> TensorFacts:
    chunks = tuple(Chunk(tuple(c["offsets"]), tuple(c["sizes"]), Stored(**c["stored"])) for c in item["chunks"])
    return TensorFacts(item["dtype"], tuple(item["shape"]), item["requires_grad"], chunks)
