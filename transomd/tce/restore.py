"""Finding the checkpoint to resume from, agreed on by all ranks, and bringing it into a running program."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transomd.tce.catalogue import load_parts, step_folders, verify_parts
from transomd.tce.errors import CheckpointError
from transomd.tce.manifest import PartEntry, StepManifest, parse_step_folder, read_step_manifest

log = logging.getLogger("transom.tce")
Exchange = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class Found:
    """A verified checkpoint."""

    folder: Path
    manifest: StepManifest


def group_exchange(world_size: int) -> Exchange | None:
    """How every rank's value reaches every rank: torch.distributed, if it spans these ranks; None where it does not."""
    module: Any = sys.modules.get("torch.distributed")
    if world_size == 1 or module is None or not (module.is_available() and module.is_initialized()):
        return None
    if module.get_world_size() != world_size:
        return None

    def exchange(value: Any) -> list[Any]:
        values: list[Any] = [None] * world_size
        module.all_gather_object(values, value)
        return values

    return exchange


def find(directory: Path, rank: int, world_size: int, bound: int | None) -> Found | None:
    """The newest complete checkpoint, at most of step ``bound``, that is good on every rank; None: there is none.

    With a process group it is collective: each rank verifies what it would load, and all vote. Without one each rank
    verifies the files of all ranks, and so comes to the same answer by itself. CheckpointError if there are
    checkpoints and none is good.
    """
    shared = group_exchange(world_size)
    exchange = shared or (lambda value: [value])
    everything = shared is None
    refuted: dict[Path, str] = {}
    while agreed := _newest_common(exchange, directory, bound, refuted):
        problems = exchange(_problems(directory / agreed, rank, world_size, everything))
        if not any(problems):
            return Found(directory / agreed, read_step_manifest(directory / agreed))
        refuted[directory / agreed] = _told(agreed, problems)
        log.warning("%s: %s; trying the next older checkpoint", directory, refuted[directory / agreed])
    seen = _seen(directory, bound, refuted)
    _check_none_left(directory, bound, exchange([*refuted.values(), *_only_here(rank, seen)]))
    return None


def _newest_common(exchange: Exchange, directory: Path, bound: int | None, refuted: dict[Path, str]) -> str | None:
    """The newest folder with a readable manifest that every rank sees."""
    answers = exchange(_seen(directory, bound, refuted))
    unreadable = [answer for answer in answers if isinstance(answer, str)]
    if unreadable:
        raise CheckpointError(unreadable[0], hint=f"check that every node can read {directory}")
    common = set.intersection(*(set(answer) for answer in answers))
    return max(common, key=_order, default=None)


def _seen(directory: Path, bound: int | None, refuted: dict[Path, str]) -> list[str] | str:
    """Names of the folders that have a readable manifest, or what keeps this rank from looking."""
    try:
        folders = step_folders(directory)
    except OSError as error:
        return f"{directory} cannot be read: {error}"
    names = []
    for folder in folders:
        step, _ = parse_step_folder(folder.name) or (0, 0)
        if folder in refuted or (bound is not None and step > bound):
            continue
        try:
            read_step_manifest(folder)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            refuted[folder] = f"{folder.name}: {error}"
            log.warning("%s: %s; trying the next older checkpoint", directory, refuted[folder])
            continue
        names.append(folder.name)
    return names


def _only_here(rank: int, seen: list[str] | str) -> list[str]:
    return [f"rank {rank} sees {name}, not every other rank does" for name in seen] if isinstance(seen, list) else []


def _order(name: str) -> tuple[int, int]:
    step, epoch = parse_step_folder(name) or (0, 0)
    return epoch, step


def _problems(folder: Path, rank: int, world_size: int, everything: bool) -> list[str]:
    """What keeps this rank from loading ``folder``; whatever happens, it votes."""
    try:
        manifest = read_step_manifest(folder)
        wanted = manifest.parts if everything else loadable(manifest, rank, world_size)
        return verify_parts(folder, manifest, {part.name for part in wanted})
    except (OSError, ValueError) as error:
        return [str(error)]


def loadable(manifest: StepManifest, rank: int, world_size: int) -> list[PartEntry]:
    """The parts that a rank of a world of this size can load: its own, and those that every rank held alike."""
    if manifest.world_size == world_size:
        return [part for part in manifest.parts if rank in part.ranks]
    return [part for part in manifest.parts if len(part.ranks) == manifest.world_size]


def _told(name: str, problems: list[list[str]]) -> str:
    told = dict.fromkeys(problem for each in problems for problem in each)
    return f"{name} is damaged: {'; '.join(list(told)[:5])}"


def _check_none_left(directory: Path, bound: int | None, answers: list[list[str]]) -> None:
    told = list(dict.fromkeys(problem for answer in answers for problem in answer))
    if told:
        raise CheckpointError(
            f"{directory} holds checkpoints and none can be loaded: {'; '.join(told)}",
            hint="see 'transom ckpt verify'; to start from the beginning, move them to another directory",
        )
    if bound:
        raise CheckpointError(
            f"{directory} holds no checkpoint of step {bound} or before, which was to be resumed from",
            hint="unset TRANSOM_RESUME_STEP to resume from the newest, set it to 0 to start from the beginning",
        )


def load_into(found: Found, state: dict[str, Any], rank: int, world_size: int) -> None:
    """Bring the checkpoint into ``state``. CheckpointError, before anything is changed, if it does not fit."""
    # Here and not above: who only lists or writes needs no torch.
    from transomd.tce.merge import Merge
    from transomd.tce.payload import TensorReader, read_layout

    wanted = loadable(found.manifest, rank, world_size)
    keys = list(state) or [key for part in wanted for key in part.keys]
    _check_keys(found.manifest, wanted, keys, world_size)
    parts = load_parts(found.folder, found.manifest, {part.name for part in wanted})
    merges = [
        Merge(read_layout(found.folder, part), TensorReader(found.folder, part), [k for k in part.keys if k in keys])
        for part in parts
    ]
    for merge in merges:
        merge.check(state)
    for merge in merges:
        merge.apply(state)


def _check_keys(manifest: StepManifest, wanted: list[PartEntry], keys: list[str], world_size: int) -> None:
    there = {key for part in wanted for key in part.keys}
    missing = [key for key in keys if key not in there]
    if not missing:
        ignored = sorted(there - set(keys))
        if ignored:
            log.info("left in the checkpoint, as the program's state has no such key: %s", ", ".join(ignored))
        return
    anywhere = {key for part in manifest.parts for key in part.keys}
    if manifest.world_size != world_size and anywhere.issuperset(missing):
        raise CheckpointError(
            f"step {manifest.step} was saved by {manifest.world_size} ranks and this program has {world_size}: "
            f"{', '.join(missing)} differ from rank to rank and cannot be dealt out anew",
            hint=f"run with {manifest.world_size} ranks, or leave these keys out of the state to load",
        )
    raise CheckpointError(
        f"step {manifest.step} does not hold {', '.join(missing)}; it holds {', '.join(sorted(anywhere)) or 'nothing'}",
        hint="leave out of the state what was not saved",
    )
