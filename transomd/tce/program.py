"""The DTensors of a program that loads: whether what was saved is their share, and new ones for what it has not yet."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from transomd.tce.errors import CheckpointError
from transomd.tce.layout import Layout, Path, child, is_stateful, path_text
from transomd.tce.shards import Shard, dealt, is_dtensor

_ABSENT: Any = object()
_TOLD = 5


class Program:
    """A program's ``state`` beside the shards that were saved under ``keys``."""

    def __init__(self, layout: Layout, state: dict[str, Any], keys: Collection[str]) -> None:
        """CheckpointError names the tensors that are not dealt out as they were."""
        self._shards = layout.shards
        self._state = state
        self._dicts: dict[int, Any] = {}
        self._models: dict[str, Any] = {}
        self._known: dict[tuple[Any, ...], list[Any]] = {}
        wanted = [(path, name) for path, name in layout.tensors.items() if name in layout.shards and path[0] in keys]
        lacking = [found for path, name in wanted if (found := self._meet(path, name))]
        lacking += [found for path, name in wanted if (found := self._place(path, name))]
        if lacking:
            more = f", and {len(lacking) - _TOLD} others" if len(lacking) > _TOLD else ""
            raise CheckpointError(
                f"what this rank saved is not what it holds now: {'; '.join(lacking[:_TOLD])}{more}",
                hint="run with the mesh, the placements and the number of ranks of before. What is saved through "
                "transomd.tce.dcp is loaded on any, and so is what 'transom ckpt export --to dcp' makes of this",
            )

    def as_dealt(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The DTensor whose share ``tensor`` is; ``tensor`` itself if it is none, or the program has no mesh for it."""
        model = self._models.get(name)
        if model is None:
            return tensor
        shape = torch.Size(self._shards[name].shape)
        stride = model.stride() if model.shape == shape else torch.empty(shape, device="meta").stride()
        whole: torch.Tensor = type(model).from_local(
            tensor, model.device_mesh, model.placements, run_check=False, shape=shape, stride=stride
        )
        return whole

    def _meet(self, path: Path, name: str) -> str:
        """Compare a shard with what the program has in its place; what is wrong, '' if nothing is."""
        target, _ = self._find(path)
        if not isinstance(target, torch.Tensor):
            return ""
        saved = self._shards[name]
        if not is_dtensor(target):
            return f"{path_text(path)}: saved as a DTensor ({saved}), in the program a plain tensor"
        self._learn(target)
        self._models[name] = target
        try:
            now = dealt(target).shard
        except ValueError as error:
            return f"{path_text(path)}: {error}"
        return "" if saved.fits(now) else f"{path_text(path)}: saved as {saved}; in the program {now}"

    def _place(self, path: Path, name: str) -> str:
        """Find a mesh for a shard that the program has no DTensor for; what is wrong, '' if nothing is.

        Without any mesh the share itself is loaded, but into no object, which could not know it from the whole.
        """
        if name in self._models:
            return ""
        target, inside = self._find(path)
        if isinstance(target, torch.Tensor) or not (self._known or inside):
            return ""
        saved = self._shards[name]
        models = [model for model in self._known.get(saved.kind, []) if _may_be_of(model, saved)]
        if len(models) == 1:
            self._models[name] = models[0]
            return ""
        return f"{path_text(path)}: saved as {saved}; the program has {len(models) or 'no'} meshes that it may be of"

    def _find(self, path: Path) -> tuple[Any, bool]:
        """What the program has at a path, and whether that is within an object that loads itself."""
        value, inside = self._state, False
        for key in path:
            if is_stateful(value):
                value, inside = self._dict_of(value), True
            value = child(value, key, _ABSENT)
        return value, inside

    def _dict_of(self, value: Any) -> Any:
        if id(value) not in self._dicts:
            self._dicts[id(value)] = value.state_dict()
            # An optimizer that has not stepped yet knows the mesh from its parameters alone.
            for group in getattr(value, "param_groups", ()):
                for parameter in filter(is_dtensor, group["params"]):
                    self._learn(parameter)
        return self._dicts[id(value)]

    def _learn(self, tensor: Any) -> None:
        try:
            kind = dealt(tensor).shard.kind
        except ValueError:
            return
        models = self._known.setdefault(kind, [])
        # FSDP2 over tensor parallel makes a mesh of its own for every module, all of them equal.
        if not any(model.device_mesh == tensor.device_mesh for model in models):
            models.append(tensor)


def _may_be_of(model: Any, saved: Shard) -> bool:
    """Whether a shard is ours on the mesh of ``model``; of the same ranks, unless another rank wrote it for us."""
    now = dealt(model, saved.shape).shard
    return saved.fits(now) and (saved.ranks == now.ranks or model.device_mesh.get_rank() not in saved.ranks)
