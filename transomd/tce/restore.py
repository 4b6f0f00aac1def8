"""Finding the checkpoint to resume from, agreed on by all ranks, and bringing it into a running program."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transomd.tce import examine
from transomd.tce.catalogue import load_parts, step_folders
from transomd.tce.errors import CheckpointError
from transomd.tce.manifest import PartEntry, StepManifest, parse_step_folder, read_step_manifest, step_folder

log = logging.getLogger("transom.tce")
Exchange = Callable[[Any], list[Any]]


class Memory(Protocol):
    """What this rank can load from its node's memory."""

    steps: list[tuple[int, int]]

    def problems(self, epoch: int, step: int) -> list[str]:
        """Verify every byte that would be loaded; what is wrong with it."""
        ...

    def manifest(self, epoch: int, step: int) -> StepManifest:
        """What was verified last, told as a manifest tells it."""
        ...

    def opened(self) -> list[Any]:
        """Its parts: layout, reader."""
        ...


@dataclass(frozen=True)
class Found:
    """A verified checkpoint; ``memory`` is where this rank has it, if not in ``folder``.

    ``memory_only``: this rank does not see it in storage.
    """

    folder: Path
    manifest: StepManifest
    memory: Memory | None = None
    memory_only: bool = False


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


def find(directory: Path, rank: int, world_size: int, bound: int | None, memory: Memory | None = None) -> Found | None:
    """The newest complete checkpoint, at most of step ``bound``, that is good on every rank; None: there is none.

    With a process group it is collective: each rank verifies what it would load, from its node's memory if it is there,
    else from storage, and all vote. Without one each rank verifies the files of all ranks, and so comes to the same
    answer by itself; memory then counts for a single rank only. CheckpointError if there are checkpoints and none is
    good. What some ranks have in memory and no store was ever whole: a node that is lost before the first step is
    stored must not keep the others from beginning anew.
    """
    shared = group_exchange(world_size)
    search = _Search(directory, rank, world_size, bound, memory if shared or world_size == 1 else None, shared is None)
    exchange = shared or (lambda value: [value])
    while agreed := _newest_common(exchange, search):
        found, problems = search.verify(agreed)
        everyones = exchange(problems)
        if found is not None and not any(everyones):
            return found
        search.refuted[directory / agreed] = _told(agreed, everyones)
        log.warning("%s: %s; trying the next older checkpoint", directory, search.refuted[directory / agreed])
    stored, staged = search.left()
    for name in staged:
        log.warning("%s: %s is in the memory of some ranks only and cannot be loaded", directory, name)
    _check_none_left(directory, bound, exchange([*search.refuted.values(), *_only_here(rank, stored)]))
    return None


class _Search:
    """What one rank sees, and what it found to be damaged."""

    def __init__(
        self, directory: Path, rank: int, world_size: int, bound: int | None, memory: Memory | None, everything: bool
    ) -> None:
        self.directory = directory
        self.refuted: dict[Path, str] = {}
        self._rank = rank
        self._world_size = world_size
        self._bound = bound
        self._memory = memory
        self._everything = everything
        self._stored: list[str] = []

    def seen(self) -> tuple[list[str], str]:
        """Names of what this rank could load, wherever it is, and what keeps it from looking into the store."""
        error = ""
        try:
            self._stored = _stored(self.directory, self._bound, self.refuted)
        except OSError as problem:
            self._stored, error = [], f"{self.directory} cannot be read: {problem}"
        staged = [step_folder(step, epoch) for epoch, step in self._memory.steps] if self._memory else []
        wanted = [name for name in staged if self._wanted(name)]
        return list(dict.fromkeys([*self._stored, *wanted])), error

    def left(self) -> tuple[list[str], list[str]]:
        """What this rank sees in storage, and what besides in memory alone."""
        seen, _ = self.seen()
        return self._stored, [name for name in seen if name not in self._stored]

    def _wanted(self, name: str) -> bool:
        step = (parse_step_folder(name) or (0, 0))[0]
        return self.directory / name not in self.refuted and (self._bound is None or step <= self._bound)

    def verify(self, name: str) -> tuple[Found | None, list[str]]:
        """The checkpoint where this rank has it undamaged, or what is wrong with it everywhere."""
        step, epoch = parse_step_folder(name) or (0, 0)
        problems: list[str] = []
        memory = self._memory
        if memory is not None and (epoch, step) in memory.steps:
            problems = memory.problems(epoch, step)
            if not problems:
                manifest = memory.manifest(epoch, step)
                return Found(self.directory / name, manifest, memory, name not in self._stored), []
        if name in self._stored:
            problems = _problems(self.directory / name, self._rank, self._world_size, self._everything)
        if problems:
            return None, problems
        return Found(self.directory / name, read_step_manifest(self.directory / name)), []


def _newest_common(exchange: Exchange, search: _Search) -> str | None:
    """The newest checkpoint that every rank has somewhere."""
    answers = exchange(search.seen())
    common = set.intersection(*(set(names) for names, _ in answers))
    errors = [error for _, error in answers if error]
    if errors and not common:
        raise CheckpointError(errors[0], hint=f"check that every node can read {search.directory}")
    return max(common, key=_order, default=None)


def _stored(directory: Path, bound: int | None, refuted: dict[Path, str]) -> list[str]:
    """Names of the folders that have a readable manifest; OSError if the directory cannot be read."""
    names = []
    for folder in step_folders(directory):
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


def _only_here(rank: int, seen: list[str]) -> list[str]:
    return [f"rank {rank} sees {name}, not every other rank does" for name in seen]


def _order(name: str) -> tuple[int, int]:
    step, epoch = parse_step_folder(name) or (0, 0)
    return epoch, step


def _problems(folder: Path, rank: int, world_size: int, everything: bool) -> list[str]:
    """What keeps this rank from loading ``folder``; whatever happens, it votes."""
    try:
        manifest = read_step_manifest(folder)
        wanted = manifest.parts if everything else loadable(manifest, rank, world_size)
        return examine.problems(folder, manifest, {part.name for part in wanted})
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
    from transomd.tce.joined import Joined
    from transomd.tce.merge import Merge

    wanted = loadable(found.manifest, rank, world_size)
    there = _whole_keys(found.manifest, wanted, world_size)
    keys = list(state) or there
    _check_keys(found.manifest, there, keys, world_size)
    parts = Joined(found.memory.opened() if found.memory else _opened(found, wanted))
    Merge(parts, state, [key for key in there if key in keys]).apply(state)


def _opened(found: Found, wanted: list[PartEntry]) -> list[Any]:
    from transomd.tce.payload import TensorReader, read_layout

    parts = load_parts(found.folder, found.manifest, {part.name for part in wanted})
    return [(read_layout(found.folder, part), TensorReader(found.folder, part)) for part in parts]


def _whole_keys(manifest: StepManifest, wanted: list[PartEntry], world_size: int) -> list[str]:
    """The keys that can be loaded: with another number of ranks none of which a part is some ranks' alone."""
    held = dict.fromkeys(key for part in wanted for key in part.keys)
    if manifest.world_size == world_size:
        return list(held)
    others = {key for part in manifest.parts if part not in wanted for key in part.keys}
    return [key for key in held if key not in others]


def _check_keys(manifest: StepManifest, there: list[str], keys: list[str], world_size: int) -> None:
    missing = [key for key in keys if key not in there]
    if not missing:
        ignored = sorted(set(there) - set(keys))
        if ignored:
            log.info("left in the checkpoint, as the program's state has no such key: %s", ", ".join(ignored))
        return
    anywhere = {key for part in manifest.parts for key in part.keys}
    if manifest.world_size != world_size and anywhere.issuperset(missing):
        raise CheckpointError(
            f"step {manifest.step} was saved by {manifest.world_size} ranks and this program has {world_size}: "
            f"{', '.join(missing)} differ from rank to rank and cannot be dealt out anew",
            hint=f"run with {manifest.world_size} ranks, or leave these keys out of the state to load. DTensors that "
            "are saved through transomd.tce.dcp are loaded on any number of ranks, and so is what 'transom ckpt export "
            "--to dcp' makes of them",
        )
    raise CheckpointError(
        f"step {manifest.step} does not hold {', '.join(missing)}; it holds {', '.join(sorted(anywhere)) or 'nothing'}",
        hint="leave out of the state what was not saved",
    )
