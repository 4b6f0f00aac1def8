"""Where the bytes of one checkpoint are taken from, piece by piece: memory where it has them, else storage."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from transomd.tce.catalogue import load_parts
from transomd.tce.dcp import staging
from transomd.tce.dcp.facts import FILE, Facts, Stored, damaged, decode, read_facts
from transomd.tce.dcp.shares import Shares
from transomd.tce.manifest import StepManifest, read_step_manifest

log = logging.getLogger("transom.tce")


class Source:
    """The checkpoint of ``folder``, which may be in memory (``shares``), in storage, or in both."""

    def __init__(self, folder: Path, shares: Shares | None = None) -> None:
        self.folder = folder
        self.shares = shares
        self._verified: dict[Stored, memoryview] = {}
        self._stored = 0
        self._files: dict[str, dict[str, str]] = {}

    def facts(self) -> Facts:
        """What the checkpoint holds. DamagedError if that is damaged or gone."""
        if self.shares is not None and (content := self.shares.find(FILE, "")) is not None:
            try:
                return decode(bytes(content))
            except ValueError as error:
                log.warning("%s in memory: %s", self.folder.name, error)
        return read_facts(self.folder)

    def check(self, stored: Stored) -> None:
        """Verify the bytes of a tensor; DamagedError names file and tensor if no tier has them undamaged."""
        found = self.shares.find(stored.file, stored.name) if self.shares is not None else None
        if found is not None and len(found) == stored.bytes:
            self._verified[stored] = found
        else:
            staging.check(self.folder, self._known(stored))
            self._stored += 1

    def get(self, stored: Stored, sizes: tuple[int, ...]) -> torch.Tensor:
        """A tensor with these bytes, for reading at once; DamagedError if they are damaged."""
        found = self._verified.get(stored)
        if found is None:
            return staging.get(self.folder, self._known(stored), sizes)
        dtype: torch.dtype = getattr(torch, stored.dtype)
        if not stored.bytes:
            return torch.empty(sizes, dtype=dtype)
        raw = torch.frombuffer(found, dtype=torch.uint8)
        return (raw.clone() if raw.data_ptr() % dtype.itemsize else raw).view(dtype).view(sizes)

    @property
    def told(self) -> str:
        """Where what was verified lies."""
        tiers = [*(["memory"] if self._verified else []), *(["storage"] if self._stored else [])]
        return " and ".join(tiers) or "nowhere: this rank loads nothing"

    def release(self) -> None:
        """Let go of memory."""
        self._verified = {}
        if self.shares is not None:
            self.shares.release()

    def _known(self, stored: Stored) -> Stored:
        """With its digest, which the writer's manifest has where it was taken after the facts were written."""
        if stored.xxh3_128:
            return stored
        try:
            return replace(stored, xxh3_128=self._digests(stored.file)[stored.name])
        except (OSError, ValueError, KeyError) as error:
            raise damaged(self.folder, error) from error

    def _digests(self, file: str) -> dict[str, str]:
        known = self._files.get(file)
        if known is None:
            parts = load_parts(self.folder, self._manifest, [file.removesuffix(".safetensors")])
            records = [record for part in parts for found in part.files for record in found.tensors]
            known = self._files[file] = {record.name: record.xxh3_128 for record in records}
        return known

    @cached_property
    def _manifest(self) -> StepManifest:
        return read_step_manifest(self.folder)
