"""What became of the steps that this rank staged, as far as the keeper has told."""

from __future__ import annotations

import logging
import sys
from typing import Any

from transomd.tce.errors import CheckpointError
from transomd.tce.handle import SaveHandle
from transomd.tce.memory.wire import Message
from transomd.tce.schedule import Auto, Fixed

log = logging.getLogger("transom.tce")
_UNCOPIED = 64
"""Steps whose copies are waited for; others are given up."""
_EVERY = sys.maxsize
"""No save is newer. News of this one is of all saves of its step; a keeper of an earlier version has no other."""
_HINT = "save less often, or let the policy be 'wait'"
_ANEW = "it was saved anew"


class NoRoom(CheckpointError):
    """All slots are in use: this step is skipped."""


class Ledger:
    """The handles of steps that are not in storage yet, and counts of those that are or never will be.

    Storage gets the steps of the ``schedule``, and ``resumed`` (-1: none); another node those of ``copies``, unless
    ``no_partner`` says why none holds any.
    """

    def __init__(self, epoch: int, schedule: Fixed | Auto, copies: Fixed) -> None:
        self.handles: dict[int, SaveHandle] = {}
        self.unwritten: set[int] = set()
        self.written = self.failed = self.skipped = 0
        self.heard = 0
        """How many of the steps that the keeper skipped are counted in ``skipped``."""
        self.problem = self.no_partner = ""
        self.resumed = -1
        self._epoch = epoch
        self.schedule = schedule
        self._copies = copies
        self._uncopied: dict[int, SaveHandle] = {}
        self._earlier: dict[int, list[SaveHandle]] = {}
        self._newest: SaveHandle | None = None
        self._settled = -1

    def add(self, handle: SaveHandle, seq: int) -> None:
        """A step is in memory, as the rank's save number ``seq``."""
        handle.in_memory, handle.seq = True, seq
        self._newest = handle
        if self.no_partner:
            handle.never["replica"] = self.no_partner
        elif not self._copies.due(handle.step):
            handle.never["replica"] = f"it stays in the memory of its own node; another one gets {self._copies.rule}"
        else:
            self.not_copied(handle.step, _ANEW)
            self._uncopied[handle.step] = handle
            if len(self._uncopied) > _UNCOPIED:
                self.not_copied(next(iter(self._uncopied)), "copies do not reach another node")
        if self.due(handle.step):
            if handle.step in self.handles:
                self._earlier.setdefault(handle.step, []).append(self.handles[handle.step])
            self.handles[handle.step] = handle
            self.unwritten.add(handle.step)
        else:
            which = f"storage gets {self.schedule.rule}, and the newest when the program ends"
            handle.never["storage"] = f"it stays in memory; {which}"

    def ends(self) -> None:
        """The program ends: storage gets the newest save as well, if it was not to get it."""
        handle = self._newest
        if handle is not None and handle.step > self._settled and handle.never.pop("storage", ""):
            self.handles[handle.step] = handle
            self.unwritten.add(handle.step)

    def due(self, step: int) -> bool:
        """Whether storage is to get this step while the program goes on."""
        return self.schedule.due(step) or step == self.resumed

    def staged(self) -> dict[str, Any]:
        """What the keeper is told when something was staged; it answers for what of ``uncopied`` it has no more."""
        told = {"skipped": self.skipped, "heard": self.heard, "uncopied": list(self._uncopied)}
        return {**told, **self.schedule.told()}

    def awaits_copy(self, step: int) -> bool:
        """Whether another node is to get this step, and has not got it yet."""
        return step in self._uncopied

    def hear(self, told: Message) -> None:
        """Take in a piece of the keeper's news."""
        if told["t"] == "partner":
            self._paired(str(told["none"]))
            return
        step = int(told["step"])
        if told["epoch"] != self._epoch:
            return
        kind, seq = told["t"], int(told.get("seq", _EVERY))
        if kind in ("complete", "failed", "skipped"):
            self._settled = max(step, self._settled)
        if kind == "written":
            if step in self.unwritten and self.handles[step].seq <= seq:
                self.written += 1
                self.unwritten.discard(step)
            self.problem = ""
        elif kind == "complete":
            if "took" in told:  # a keeper of an earlier version, which outlives an upgrade, does not say
                self.schedule.took(float(told["took"]))
            self.complete(step)
        elif kind == "replicated":
            self._copied(step, seq)
        elif kind == "uncopied":
            self.not_copied(step, str(told["why"]), seq)
        elif kind == "skipped":
            self.skip(step, int(told["by"]), seq)
            self.heard = max(self.heard, int(told.get("count", 0)))
        elif kind == "problem":
            self._trouble(step, told["error"])
        elif kind == "failed":
            self.fail(step, CheckpointError(told["error"], hint=told["hint"]), seq)

    def _paired(self, no_partner: str) -> None:
        """The launcher has told of another node that holds copies; or, as ``no_partner`` says, that there is none."""
        self.no_partner = no_partner
        if no_partner:
            for step in list(self._uncopied):
                self.not_copied(step, no_partner)

    def _copied(self, step: int, seq: int) -> None:
        """Another node has this save of a step, and will never be given an older one."""
        for handle in [other for other in self._uncopied.values() if (other.step, other.seq) <= (step, seq)]:
            del self._uncopied[handle.step]
            if handle.step == step:
                handle.replicated = True
            else:
                handle.never["replica"] = f"no other node has a copy; step {step} was copied in its place"

    def not_copied(self, step: int, why: str, seq: int = _EVERY) -> None:
        """No other node will get this step, as it was saved up to ``seq``."""
        handle = self._uncopied.get(step)
        if handle is not None and handle.seq <= seq:
            del self._uncopied[step]
            handle.never["replica"] = f"no other node has a copy, nor will have one: {why}"

    def none_copied(self, why: str) -> None:
        """Nothing is heard of copies any more; the keeper may go on copying."""
        for handle in self._uncopied.values():
            handle.never["replica"] = f"nothing more is heard of its copy: {why}"
        self._uncopied.clear()

    def complete(self, step: int) -> None:
        """A step is in storage, of all ranks; no later save of it is written over what is there."""
        taken = self._take(step, _EVERY)
        for handle in taken:
            handle.reached = True
        if taken:
            log.info("step %d of epoch %d is complete", step, self._epoch)

    def fail(self, step: int, error: CheckpointError, seq: int = _EVERY) -> None:
        """A step, as it was saved up to ``seq``, will never be in storage."""
        taken = self._take(step, seq)
        for handle in taken:
            handle.error = error
        if taken:
            self.failed += 1
            log.warning("step %d will not be complete: %s", step, error)

    def skip(self, step: int, by: int, seq: int) -> None:
        """A step, as it was saved up to ``seq``, is not in storage: ``by`` (-1: not known yet) took its place."""
        taken = self._take(step, seq)
        if taken:
            self.skipped += 1
            newer = f"step {by}" if by >= 0 else "a newer one"
            told = f"step {step} was not written to storage, which is slower than the saves: {newer} took its place"
            error = CheckpointError(f"{told} {self._so_far()}", hint=_HINT)
            for handle in taken:
                handle.error = error
            log.warning("%s", error)

    def no_room(self, step: int, slots: int) -> NoRoom:
        """A step cannot even be copied into memory."""
        self.skipped += 1
        which = f"step {step}" if step >= 0 else "a step"
        told = f"{which} was skipped: of {slots} slots of memory one has the newest step, the others are in use"
        return NoRoom(f"{told} {self._so_far()}", hint=_HINT)

    def _so_far(self) -> str:
        return f"(skipped so far: {self.skipped}). {self.problem}".rstrip()

    def _trouble(self, step: int, error: str) -> None:
        if error != self.problem:
            log.warning("%s; it stays in memory, and writing is tried again. Training goes on", error)
        self.problem = error
        if step in self.handles:
            self.handles[step].problem = error

    def _take(self, step: int, seq: int) -> list[SaveHandle]:
        """The handles of the saves of a step up to ``seq``, of whom nothing more is to be told."""
        newest = self.handles.get(step)
        if newest is None:
            return []
        earlier = self._earlier.pop(step, [])
        if newest.seq <= seq:
            self.unwritten.discard(step)
            del self.handles[step]
            return [*earlier, newest]
        left = [handle for handle in earlier if handle.seq > seq]
        if left:
            self._earlier[step] = left
        return [handle for handle in earlier if handle.seq <= seq]
