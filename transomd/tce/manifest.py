"""What the JSON files of a checkpoint say. The format is told in docs/checkpoint.md.

A *part* is what one rank wrote for one set of ranks to load: its own keys, or the keys that all ranks hold alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transomd.tce.files import digest

FORMAT = 1
MANIFEST = "manifest.json"
_FOLDER = re.compile(r"step-(\d+)\.epoch-(\d+)")
_RANK_MANIFEST = re.compile(r"rank-(\d+)\.json")


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of a file: torch's name of its type, where its bytes lie, their digest, and a note if they are raw."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    xxh3_128: str
    note: str = ""


@dataclass(frozen=True)
class FileRecord:
    """One data file: its size, its digest and the tensors in it, by offset.

    ``head_xxh3_128``: of what precedes the tensors ('': there are none, or the file is of an earlier transom).
    """

    name: str
    bytes: int
    xxh3_128: str
    tensors: tuple[TensorRecord, ...] = ()
    head_xxh3_128: str = ""


@dataclass(frozen=True)
class Part:
    """What one rank wrote for the ranks that load it; ``files`` are NAME.safetensors and NAME.pt."""

    name: str
    ranks: tuple[int, ...]
    keys: tuple[str, ...]
    files: tuple[FileRecord, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the data files."""
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True)
class RankManifest:
    """What one rank wrote at one step; it is there when all its files are. ``needs``: the parts that it would load."""

    step: int
    epoch: int
    rank: int
    world_size: int
    created: float
    parts: tuple[Part, ...]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankEntry:
    """A rank manifest as the step manifest knows it."""

    rank: int
    name: str
    bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class PartEntry:
    """A part as the step manifest knows it: who wrote it, who loads it, the keys and the sizes of the files."""

    name: str
    writer: int
    ranks: tuple[int, ...]
    keys: tuple[str, ...]
    files: Mapping[str, int]


@dataclass(frozen=True)
class StepManifest:
    """A whole checkpoint: it exists when this does."""

    step: int
    epoch: int
    world_size: int
    created: float
    ranks: tuple[RankEntry, ...]
    parts: tuple[PartEntry, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all data files."""
        return sum(size for part in self.parts for size in part.files.values())


def step_folder(step: int, epoch: int) -> str:
    """The name of the folder of one step as one epoch wrote it."""
    return f"step-{step:09d}.epoch-{epoch:06d}"


def parse_step_folder(name: str) -> tuple[int, int] | None:
    """Step and epoch of a folder's name; None if it is no checkpoint's."""
    match = _FOLDER.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def rank_manifest_name(rank: int) -> str:
    """The name of the manifest of one rank."""
    return f"rank-{rank:05d}.json"


def parse_rank_manifest_name(name: str) -> int | None:
    """The rank whose manifest bears this name; None if it is no rank manifest."""
    match = _RANK_MANIFEST.fullmatch(name)
    return int(match[1]) if match else None


def encode(manifest: RankManifest | StepManifest) -> bytes:
    """The JSON text of a manifest, with a digest over itself."""
    document = json.loads(json.dumps({"format": FORMAT, **asdict(manifest)}))
    document["xxh3_128"] = _self_digest(document)
    return json.dumps(document, indent=1).encode() + b"\n"


def read_rank_manifest(folder: Path, entry: RankEntry) -> RankManifest:
    """Read the rank manifest that ``entry`` tells of; ValueError if it is another one or damaged, OSError if gone."""
    content = (folder / entry.name).read_bytes()
    if digest(content) != entry.xxh3_128:
        raise ValueError(f"{entry.name}: does not match the digest in {MANIFEST}")
    return decode_rank_manifest(content, entry.name)


def decode_rank_manifest(content: bytes, name: str) -> RankManifest:
    """Read a rank manifest; ValueError names ``name`` and what is wrong."""
    document = _decode(content, name)
    try:
        parts = tuple(_part(item) for item in document["parts"])
        step, epoch, rank, world_size = (document[key] for key in ("step", "epoch", "rank", "world_size"))
        needs = tuple(document.get("needs", ()))
        return RankManifest(step, epoch, rank, world_size, document["created"], parts, needs)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{name}: lacks {error}") from error


def read_step_manifest(folder: Path) -> StepManifest:
    """Read the manifest of the checkpoint in ``folder``; ValueError says what is wrong, OSError if it is not there."""
    document = _decode((folder / MANIFEST).read_bytes(), MANIFEST)
    try:
        ranks = tuple(RankEntry(**item) for item in document["ranks"])
        parts = tuple(
            PartEntry(p["name"], p["writer"], tuple(p["ranks"]), tuple(p["keys"]), p["files"])
            for p in document["parts"]
        )
        step, epoch = document["step"], document["epoch"]
        manifest = StepManifest(step, epoch, document["world_size"], document["created"], ranks, parts)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{MANIFEST}: lacks {error}") from error
    if parse_step_folder(folder.name) != (step, epoch):
        raise ValueError(f"{MANIFEST}: is of step {step} and epoch {epoch}, unlike its folder {folder.name}")
    return manifest


def _part(item: dict[str, Any]) -> Part:
    files = tuple(_file(file) for file in item["files"])
    return Part(item["name"], tuple(item["ranks"]), tuple(item["keys"]), files)


def _file(item: dict[str, Any]) -> FileRecord:
    tensors = tuple(_tensor(tensor) for tensor in item["tensors"])
    return FileRecord(item["name"], item["bytes"], item["xxh3_128"], tensors, item.get("head_xxh3_128", ""))


def _tensor(item: dict[str, Any]) -> TensorRecord:
    return TensorRecord(**{**item, "shape": tuple(item["shape"])})


def _decode(content: bytes, name: str) -> dict[str, Any]:
    try:
        document = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{name}: is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{name}: is not a JSON object")
    if document.pop("xxh3_128", None) != _self_digest(document):
        raise ValueError(f"{name}: does not match its own digest")
    if document.get("format") != FORMAT:
        raise ValueError(f"{name}: has format {document.get('format')}, this transom reads format {FORMAT}")
    return document


def _self_digest(document: dict[str, Any]) -> str:
    return digest(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())
