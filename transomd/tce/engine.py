"""The checkpoint engine as a training program sees it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from transomd.tce import restore
from transomd.tce.environment import at_least, before_on_node, from_environment, place
from transomd.tce.errors import CheckpointError
from transomd.tce.groups import Groups, Replicated, first_of_node
from transomd.tce.handle import SaveHandle
from transomd.tce.memory.budget import switched_off
from transomd.tce.memory.carry import carry_over
from transomd.tce.memory.ledger import NoRoom
from transomd.tce.memory.link import Link, call
from transomd.tce.memory.pool import Policy, policy_of
from transomd.tce.memory.tier import MemoryTier
from transomd.tce.persist import Writer
from transomd.tce.schedule import Every, every_of
from transomd.tce.start import begin
from transomd.tce.store import Store

if TYPE_CHECKING:
    from transomd.tce.memory.recall import Recall
    from transomd.tce.payload import Payload

log = logging.getLogger("transom.tce")
AT_EXIT_S = 60.0
"""How long a program that ends without ``close`` waits for storage; its keeper goes on after that."""
_open: weakref.WeakSet[CheckpointEngine] = weakref.WeakSet()


class CheckpointEngine:
    """Saves and loads the state of a training program in ``directory``.

    ``rank`` and ``world_size`` come from torch.distributed or from RANK and WORLD_SIZE unless given. ``epoch`` counts
    the starts of the program, so that a process of an earlier start cannot write any more; without one, the next free
    number is taken (collectively, where there are several ranks). ``replicated`` names the top-level keys whose
    values are the same on every rank, as data parallelism makes them (True: all keys), or gives for each key the ranks,
    or the process group, that hold the same: one of them writes it. Of DTensors their placements say so. The
    ``keep`` newest checkpoints stay. ``resume_step`` bounds the step that ``load`` may choose.

    A save that fails is logged and counted and never stops the training, unless ``strict``.

    ``memory``: whether saves are copied into memory that outlives the program, and written to storage by a process of
    its own (None: unless TRANSOM_CHECKPOINT_MEMORY is ``off``). ``when_full`` says what a save does when storage is
    slower than the saves: ``latest`` takes the place of the oldest that waits, ``wait`` waits for storage.
    ``storage_every``: with the memory tier, only the steps that it divides are written to storage, and the newest when
    the program ends; ``auto``: as often as it is worth it, by measure. ``replica_every``: another node gets a copy of
    the steps that it divides.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        epoch: int | None = None,
        replicated: Replicated = (),
        keep: int = 3,
        resume_step: int | None = None,
        strict: bool = False,
        memory: bool | None = None,
        when_full: Policy = "latest",
        storage_every: int | Literal["auto"] = 1,
        replica_every: int = 1,
    ) -> None:
        self.directory = Path(os.path.abspath(directory))
        self.rank, self.world_size = place(rank, world_size)
        self.keep = at_least(keep, 1, "keep")
        self.resume_step = None if resume_step is None else at_least(resume_step, 0, "resume_step")
        self.strict = strict
        every = Every(every_of(storage_every), at_least(replica_every, 1, "replica_every"))
        self.resumed_from = ""
        self._saved = self._failures = 0
        self._groups = Groups(replicated, self.rank, self.world_size)
        self._before = before_on_node(self.rank)
        link = self._call_keeper(memory, when_full)
        try:
            self.epoch, self._token = begin(self.directory, self.world_size, epoch, link.newest_epoch if link else 0)
        except CheckpointError:
            if link is not None:
                link.close()
            raise
        self._writer = Writer(self.directory, self.rank, self.world_size, self.epoch)
        self._store = Store(self._writer, self._token, self.keep, every)
        self._completion = self._store.completion
        self._memory = MemoryTier(self._store, when_full, link) if self._in_memory else None
        if self._memory is not None:
            # At the end of the program _close_all comes first.
            weakref.finalize(self, self._memory.release).atexit = False
        self._remove_unfinished()
        _open.add(self)

    @classmethod
    def from_env(cls, **overrides: Any) -> CheckpointEngine:
        """The engine that transom's launcher describes in the environment; ``overrides`` are arguments of the class.

        Reads TRANSOM_CHECKPOINT_DIR, TRANSOM_EPOCH, TRANSOM_RESUME_STEP (empty: the newest),
        TRANSOM_CHECKPOINT_KEEP, TRANSOM_CHECKPOINT_STORAGE_EVERY, TRANSOM_CHECKPOINT_REPLICA_EVERY, RANK and
        WORLD_SIZE. CheckpointError names a variable that is missing or wrong.
        """
        return cls(**{**from_environment(os.environ, overrides), **overrides})

    def save(self, step: int, state: Mapping[str, Any]) -> SaveHandle:
        """Write the state of ``step``; when this returns, ``state`` may change.

        Every rank calls it with the same step; no rank waits for another. Raises CheckpointError for a state that
        could not be loaded again, whatever ``strict`` says; any other failure is in the handle.
        """
        step = at_least(step, 0, "step")
        payloads, needs = self._plan(state)
        if self._memory is not None:
            tier = self._memory
            handle = SaveHandle(step, lambda: tier.progress(step), pause=tier.pause)
            try:
                if not tier.stage(step, payloads, needs, handle):
                    return handle
            except NoRoom as error:
                handle.error = error
                return self._failed(handle, error)
        return self._save_now(step, [payload for payload, stored in payloads if stored], needs)

    def _save_now(self, step: int, payloads: Sequence[Payload], needs: tuple[str, ...]) -> SaveHandle:
        """Write to storage, and wait for it."""
        self._completion.settle()
        self._completion.tell_unfinished()
        handle = SaveHandle(step, lambda: self._completion.progress(step))
        handle.error = self._write(step, payloads, needs)
        if handle.error is not None:
            return self._failed(handle, handle.error)
        self._completion.add(handle)
        return handle

    @property
    def saved(self) -> int:
        """Steps whose share this rank has written to storage."""
        return self._saved + (self._memory.ledger.written if self._memory else 0)

    @property
    def failed(self) -> int:
        """Saves that will never be in storage because something failed."""
        return self._failures + (self._memory.ledger.failed if self._memory else 0)

    @property
    def skipped(self) -> int:
        """Saves that are not in storage because it was slower than the saves."""
        return self._memory.ledger.skipped if self._memory else 0

    @property
    def memory_reason(self) -> str:
        """Why saves go to storage at once, without the memory tier; '' if they do not."""
        return self._memory.reason if self._memory else "it is switched off"

    def load(self, state: dict[str, Any]) -> int | None:
        """Fill ``state`` from the newest checkpoint that is complete and verified on every rank; returns its step.

        None: there is nothing to resume from. Tensors are filled in place where shape and type match, objects get
        ``load_state_dict``, other values replace those in ``state``; an empty ``state`` receives everything. Where a
        process group spans the ranks, every rank must call it. Raises CheckpointError if there are checkpoints and
        none can be loaded.
        """
        memory = self._memory.recall() if self._memory else None
        try:
            found = restore.find(self.directory, self.rank, self.world_size, self.resume_step, memory)
            if found is None:
                log.info("%s: nothing to resume from", self.directory)
                return None
            restore.load_into(found, state, self.rank, self.world_size)
            self._carry_over(found, memory)
        finally:
            if memory is not None:
                memory.release()
        self._resumed(found, memory)
        return found.manifest.step

    def _carry_over(self, found: restore.Found, memory: Recall | None) -> None:
        """Have this start bring to storage what it loaded from memory alone."""
        if self._memory is not None and memory is not None and found.memory_only and not memory.owned:
            carry_over(self._memory, found, memory, self._before)

    def _resumed(self, found: restore.Found, memory: Recall | None) -> None:
        self._completion.resume_source = found.folder
        step, epoch = found.manifest.step, found.manifest.epoch
        if self._memory is not None and (memory is None or not memory.owned):
            self._memory.resumed(found.folder, lacking=found.memory_only)
        self.resumed_from = memory.source if memory is not None and found.memory else "storage"
        exchange = restore.group_exchange(self.world_size)
        everyones = [self.resumed_from] if exchange is None else exchange(self.resumed_from)
        log.info("resumed from step %d of epoch %d: %s", step, epoch, _from_where(everyones))

    def close(self, timeout: float = 600.0) -> None:
        """Wait until what was saved is on the disk, at most ``timeout`` seconds; complete what can be completed.

        What is not on the disk by then is written by the keeper, which outlives the program. The engine must not be
        used afterwards.
        """
        self._close(timeout, leave=True)

    def _close(self, timeout: float, leave: bool) -> None:
        _open.discard(self)
        if self._memory is not None:
            self._memory.close(timeout, leave)
        self._completion.settle()

    def _call_keeper(self, memory: bool | None, when_full: Policy) -> Link | None:
        """Call a keeper that is there, before the claim of an epoch keeps it from storing what it holds."""
        policy_of(when_full)
        self._in_memory = memory is True or (memory is None and not switched_off(os.environ))
        try:
            return call(self.directory, self.rank, self.world_size, start=False) if self._in_memory else None
        except OSError as error:
            log.warning("memory is not asked for checkpoints: %s", error)
            return None

    def __enter__(self) -> CheckpointEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            # As at the end of a program: the next start goes on from what is in memory, and not only once it is stored.
            self._close(AT_EXIT_S, leave=False)

    def _remove_unfinished(self) -> None:
        """Not what a keeper still writes for an earlier process of this very epoch."""
        with contextlib.suppress(OSError):
            if self._memory is None or not self._memory.holds(self.epoch):
                self._writer.remove_unfinished()

    def _plan(self, state: Mapping[str, Any]) -> tuple[list[tuple[Payload, bool]], tuple[str, ...]]:
        """What this rank keeps, with whether it writes that to storage too, and the names of what it would load."""
        # Here and not above: importing the engine must not import torch.
        from transomd.tce.layout import take_apart
        from transomd.tce.payload import plan

        layout = take_apart(state)
        self._groups.check(layout.tree)
        parts = layout.split(self._groups.name_of)
        payloads = []
        for name in sorted(parts):
            ranks = self._groups.ranks(name)
            stored = ranks[0] == self.rank
            # In memory there is one copy a node; storage gets the first rank's.
            if stored or (self._memory is not None and first_of_node(ranks, self._before)):
                payloads.append((plan(name, ranks, parts[name]), stored))
        return payloads, tuple(sorted(parts))

    def _write(self, step: int, payloads: Sequence[Payload], needs: tuple[str, ...]) -> CheckpointError | None:
        """Write this rank's share; what kept it from doing so, if anything did."""
        try:
            written = self._store.put(step, [payload.image() for payload in payloads], needs)
        except CheckpointError as error:
            return error
        except (OSError, MemoryError) as error:
            told = self._store.told(step, error, sum(payload.bytes for payload in payloads))
            self._writer.fail(step, str(told))
            return told
        self._saved += written
        return None

    def _failed(self, handle: SaveHandle, error: CheckpointError) -> SaveHandle:
        if not isinstance(error, NoRoom):
            self._failures += 1
        log.warning("%s; training goes on without this checkpoint (failed saves so far: %d)", error, self.failed)
        if self.strict:
            raise error
        return handle


def _close_all() -> None:
    """At the end of the program, also by sys.exit or an exception: what was saved is brought to storage."""
    for engine in list(_open):
        engine._close(AT_EXIT_S, leave=False)


atexit.register(_close_all)


def _from_where(everyones: Sequence[str]) -> str:
    """Say where the ranks, in their order, have their state from."""
    ranks: dict[str, list[int]] = {}
    for rank, source in enumerate(everyones):
        ranks.setdefault(source, []).append(rank)
    if len(ranks) == 1:
        return f"from {everyones[0]}"
    told = {source: f"rank {them[0]}" if len(them) == 1 else f"{len(them)} ranks" for source, them in ranks.items()}
    return ", ".join(f"{who} from {source}" for source, who in told.items())
