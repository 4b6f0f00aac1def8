"""What the environment and the arguments say about one rank: where it stands, and where checkpoints go."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Mapping
from typing import Any

from transomd.tce.errors import CheckpointError


def place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size: as given, else of the process group, else of the environment, else alone."""
    if rank is None and world_size is None:
        module: Any = sys.modules.get("torch.distributed")
        if module is not None and module.is_available() and module.is_initialized():
            return module.get_rank(), module.get_world_size()
        rank = whole_number(os.environ, "RANK")
        world_size = whole_number(os.environ, "WORLD_SIZE")
    if rank is None and world_size is None:
        return 0, 1
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise CheckpointError(
            f"rank {rank} of {world_size} ranks is not possible",
            hint="give rank and world_size together, or set RANK and WORLD_SIZE as torchrun does",
        )
    return rank, world_size


def before_on_node(rank: int, environ: Mapping[str, str] = os.environ) -> tuple[int, ...]:
    """The ranks of this node that come before this one.

    Where the ranks are Slurm's, it lists those of the node (SLURM_GTIDS, srun(1)), which may be dealt out in turn.
    Else LOCAL_RANK says how many they are, and they follow each other, as torchrun numbers them; without it, none.
    """
    count = whole_number(environ, "LOCAL_RANK")
    if environ.get("SLURM_PROCID") == str(rank):
        listed = {int(task) for task in environ.get("SLURM_GTIDS", "").split(",") if task.isdecimal()}
        before = tuple(sorted(task for task in listed if task < rank))
        # A launcher in a task of Slurm's may number its own ranks by chance alike.
        if rank in listed and count in (None, len(before)):
            return before
    return tuple(range(max(0, rank - (count or 0)), rank))


def from_environment(environ: Mapping[str, str], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the engine that the environment gives; CheckpointError names what is missing or wrong."""
    if not environ.get("TRANSOM_CHECKPOINT_DIR") and "directory" not in overrides:
        raise CheckpointError(
            "TRANSOM_CHECKPOINT_DIR is not set: this program was not started by transom",
            hint="set it to a directory, or use CheckpointEngine('a/directory') or from_env(directory='a/directory')",
        )
    numbers = {
        "epoch": whole_number(environ, "TRANSOM_EPOCH"),
        "resume_step": whole_number(environ, "TRANSOM_RESUME_STEP"),
        "keep": whole_number(environ, "TRANSOM_CHECKPOINT_KEEP"),
        "storage_every": _number_or_auto(environ, "TRANSOM_CHECKPOINT_STORAGE_EVERY"),
        "replica_every": whole_number(environ, "TRANSOM_CHECKPOINT_REPLICA_EVERY"),
    }
    found: dict[str, Any] = {key: value for key, value in numbers.items() if value is not None}
    for name in ("RANK", "WORLD_SIZE"):
        if "epoch" in found and name.lower() not in overrides and not environ.get(name):
            raise CheckpointError(
                f"{name} is not set, but TRANSOM_EPOCH is: the ranks of this start cannot be told apart",
                hint=f"transom's launcher and torchrun set {name}; outside of transom unset TRANSOM_EPOCH",
            )
    return {"directory": environ.get("TRANSOM_CHECKPOINT_DIR"), **found}


def _number_or_auto(environ: Mapping[str, str], name: str) -> int | str | None:
    return "auto" if environ.get(name, "").strip() == "auto" else whole_number(environ, name)


def whole_number(environ: Mapping[str, str], name: str) -> int | None:
    """The number in a variable, None if it is unset or empty; CheckpointError if it is something else."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise CheckpointError(f"{name} is {text!r}, which is not a whole number", hint=f"correct or unset {name}")
    return int(text)


def at_least(value: int, least: int, name: str) -> int:
    """``value`` as an int (numpy's and torch's whole numbers too); CheckpointError names the argument otherwise."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise CheckpointError(f"{name} is {value!r} and must be a whole number of at least {least}")
    return number
