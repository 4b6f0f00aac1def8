"""What became of the steps that this rank staged, as far as the keeper has told."""

from __future__ import annotations

import logging
from typing import Any

from transomd.tce.errors import CheckpointError
from transomd.tce.handle import SaveHandle
from transomd.tce.memory.wire import Message
from transomd.tce.schedule import Auto, Fixed

log = logging.getLogger("transom.tce")
_UNCOPIED = 64
"""Steps whose copies are waited for; others are given up."""
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

    def add(self, handle: SaveHandle) -> None:
        """A step is in memory."""
        handle.in_memory = True
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
            self.no_partner = str(told["none"])
            return
        step = int(told["step"])
        if told["epoch"] != self._epoch:
            return
        kind = told["t"]
        if kind == "written":
            self.written += step in self.unwritten
            self.unwritten.discard(step)
            self.problem = ""
        elif kind == "complete":
            if "took" in told:  # a keeper of an earlier version, which outlives an upgrade, does not say
                self.schedule.took(float(told["took"]))
            self.complete(step)
        elif kind == "replicated":
            self._copied(step)
        elif kind == "uncopied":
            self.not_copied(step, str(told["why"]))
        elif kind == "skipped":
            self.skip(step, int(told["by"]))
            self.heard = max(self.heard, int(told.get("count", 0)))
        elif kind == "problem":
            self._trouble(step, told["error"])
        elif kind == "failed":
            self.fail(step, CheckpointError(told["error"], hint=told["hint"]))

    def _copied(self, step: int) -> None:
        """Another node has this step, and will never be given an older one."""
        for older in [other for other in self._uncopied if other <= step]:
            handle = self._uncopied.pop(older)
            if older == step:
                handle.replicated = True
            else:
                handle.never["replica"] = f"no other node has a copy; step {step} was copied in its place"

    def not_copied(self, step: int, why: str) -> None:
        """No other node will get this step."""
        handle = self._uncopied.pop(step, None)
        if handle is not None:
            handle.never["replica"] = f"no other node has a copy, nor will have one: {why}"

    def none_copied(self, why: str) -> None:
        """Nothing is heard of copies any more; the keeper may go on copying."""
        for handle in self._uncopied.values():
            handle.never["replica"] = f"nothing more is heard of its copy: {why}"
        self._uncopied.clear()

    def complete(self, step: int) -> None:
        """A step is in storage, of all ranks."""
        taken = self._take(step)
        for handle in taken:
            handle.reached = True
        if taken:
            log.info("step %d of epoch %d is complete", step, self._epoch)

    def fail(self, step: int, error: CheckpointError) -> None:
        """A step will never be in storage."""
        taken = self._take(step)
        for handle in taken:
            handle.error = error
        if taken:
            self.failed += 1
            log.warning("step %d will not be complete: %s", step, error)

    def skip(self, step: int, by: int) -> None:
        """A step is not in storage because a newer one, ``by`` (-1: not known yet), took its place."""
        taken = self._take(step)
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

    def _take(self, step: int) -> list[SaveHandle]:
        """The handles of all saves of a step, of whom nothing more is to be told."""
        self.unwritten.discard(step)
        handle = self.handles.pop(step, None)
        return [*self._earlier.pop(step, []), handle] if handle else []
