"""The checkpoint engine as a training program sees it."""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from transomd.tce import epochs, restore
from transomd.tce.environment import at_least, from_environment, place
from transomd.tce.errors import CheckpointError, storage_error
from transomd.tce.files import make_folder
from transomd.tce.handle import SaveHandle
from transomd.tce.persist import Writer
from transomd.tce.store import Store

if TYPE_CHECKING:
    from transomd.tce.payload import Payload

log = logging.getLogger("transom.tce")


class CheckpointEngine:
    """Saves and loads the state of a training program in ``directory``.

    ``rank`` and ``world_size`` come from torch.distributed or from RANK and WORLD_SIZE unless given. ``epoch`` counts
    the starts of the program, so that a process of an earlier start cannot write any more; without one, the next free
    number is taken (collectively, where there are several ranks). ``replicated`` names the top-level keys whose
    values are the same on every rank, as data parallelism makes them (True: all keys): one rank writes them. The
    ``keep`` newest checkpoints stay. ``resume_step`` bounds the step that ``load`` may choose.

    A save that fails is logged and counted and never stops the training, unless ``strict``.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        epoch: int | None = None,
        replicated: Iterable[str] | bool = (),
        keep: int = 3,
        resume_step: int | None = None,
        strict: bool = False,
    ) -> None:
        self.directory = Path(os.path.abspath(directory))
        self.rank, self.world_size = place(rank, world_size)
        self.keep = at_least(keep, 1, "keep")
        self.resume_step = None if resume_step is None else at_least(resume_step, 0, "resume_step")
        self.strict = strict
        self.saved = self.failed = 0
        self._all_replicated = replicated is True
        self._replicated = frozenset(() if isinstance(replicated, bool) else _names(replicated))
        self.epoch, self._token = self._begin(epoch)
        self._writer = Writer(self.directory, self.rank, self.world_size, self.epoch)
        self._store = Store(self._writer, self._token, self.keep)
        self._completion = self._store.completion
        self._remove_unfinished()

    @classmethod
    def from_env(cls, **overrides: Any) -> CheckpointEngine:
        """The engine that transom's launcher describes in the environment; ``overrides`` are arguments of the class.

        Reads TRANSOM_CHECKPOINT_DIR, TRANSOM_EPOCH, TRANSOM_RESUME_STEP (empty: the newest),
        TRANSOM_CHECKPOINT_KEEP, RANK and WORLD_SIZE. CheckpointError names a variable that is missing or wrong.
        """
        return cls(**{**from_environment(os.environ, overrides), **overrides})

    def save(self, step: int, state: Mapping[str, Any]) -> SaveHandle:
        """Write the state of ``step``; when this returns, ``state`` may change.

        Every rank calls it with the same step; no rank waits for another. Raises CheckpointError for a state that
        could not be loaded again, whatever ``strict`` says; any other failure is in the handle.
        """
        step = at_least(step, 0, "step")
        payloads = self._plan(state)
        self._completion.settle()
        self._completion.tell_unfinished()
        handle = SaveHandle(step, lambda: self._completion.progress(step))
        handle.error = self._write(step, payloads)
        if handle.error is not None:
            return self._failed(handle, handle.error)
        self._completion.add(handle)
        return handle

    def load(self, state: dict[str, Any]) -> int | None:
        """Fill ``state`` from the newest checkpoint that is complete and verified on every rank; returns its step.

        None: there is nothing to resume from. Tensors are filled in place where shape and type match, objects get
        ``load_state_dict``, other values replace those in ``state``; an empty ``state`` receives everything. Where a
        process group spans the ranks, every rank must call it. Raises CheckpointError if there are checkpoints and
        none can be loaded.
        """
        found = restore.find(self.directory, self.rank, self.world_size, self.resume_step)
        if found is None:
            log.info("%s: nothing to resume from", self.directory)
            return None
        restore.load_into(found, state, self.rank, self.world_size)
        self._completion.resume_source = found.folder
        log.info("resumed from step %d of epoch %d", found.manifest.step, found.manifest.epoch)
        return found.manifest.step

    def close(self) -> None:
        """Complete what can be completed. The engine must not be used afterwards."""
        self._completion.settle()

    def __enter__(self) -> CheckpointEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, epoch: int | None) -> tuple[int, str]:
        """The epoch, and the token that tells a claim of this start from another's ('': whoever has the epoch may).

        A given epoch is claimed at once. A number of our own is claimed by the first save only, so that a program
        which merely loads does not fence the one that trains.
        """
        if epoch is not None:
            self._claim_given(at_least(epoch, 0, "epoch"))
            return epoch, ""
        mine = (self._newest_epoch() or 0) + 1, uuid.uuid4().hex
        if self.world_size == 1:
            return mine
        exchange = restore.group_exchange(self.world_size)
        if exchange is None:
            raise CheckpointError(
                f"{self.world_size} ranks need an epoch, and cannot agree on one without a process group",
                hint="call torch.distributed.init_process_group first, or give epoch=N, growing with every start",
            )
        everyones: list[tuple[int, str]] = exchange(mine)
        return max(number for number, _ in everyones), everyones[0][1]

    def _newest_epoch(self) -> int | None:
        try:
            return epochs.newest_epoch(self.directory)
        except OSError as error:
            raise storage_error("the checkpoint directory cannot be read", error, self.directory, 0) from error

    def _claim_given(self, epoch: int) -> None:
        try:
            make_folder(self.directory)
            epochs.claim_epoch(self.directory, epoch)
        except OSError as error:
            told = storage_error(f"epoch {epoch} could not be claimed", error, self.directory, 4096)
            if not self.directory.is_dir():
                raise told from error
            log.warning("%s; going on: an earlier start of this program is not kept from writing", told)

    def _remove_unfinished(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.remove_unfinished()

    def _plan(self, state: Mapping[str, Any]) -> list[Payload]:
        # Here and not above: importing the engine must not import torch.
        from transomd.tce.layout import take_apart
        from transomd.tce.payload import plan

        layout = take_apart(state)
        keys = set(layout.tree)
        if not self._replicated <= keys:
            raise CheckpointError(
                f"replicated names {', '.join(sorted(self._replicated - keys))}, which the state does not hold",
                hint=f"the state holds {', '.join(sorted(keys))}",
            )
        shared = keys if self._all_replicated else set(self._replicated)
        payloads = []
        if keys - shared:
            payloads.append(plan(f"rank-{self.rank:05d}", (self.rank,), layout.select(keys - shared)))
        if shared and self.rank == 0:
            payloads.append(plan("replica-00000", tuple(range(self.world_size)), layout.select(shared)))
        return payloads

    def _write(self, step: int, payloads: Sequence[Payload]) -> CheckpointError | None:
        """Write this rank's share; what kept it from doing so, if anything did."""
        try:
            written = self._store.put(step, [payload.image() for payload in payloads])
        except CheckpointError as error:
            return error
        except (OSError, MemoryError) as error:
            told = self._store.told(step, error, sum(payload.bytes for payload in payloads))
            self._writer.fail(step, str(told))
            return told
        self.saved += written
        return None

    def _failed(self, handle: SaveHandle, error: CheckpointError) -> SaveHandle:
        self.failed += 1
        log.warning("%s; training goes on without this checkpoint (failed saves so far: %d)", error, self.failed)
        if self.strict:
            raise error
        return handle


def _names(replicated: Iterable[str]) -> Iterable[str]:
    return (replicated,) if isinstance(replicated, str) else replicated
