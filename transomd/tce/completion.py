"""Steps that this rank has written and that are not known to be complete yet, and what follows once one is."""

from __future__ import annotations

import logging
from pathlib import Path

from transomd.tce import retention
from transomd.tce.catalogue import list_checkpoints
from transomd.tce.epochs import check_epoch
from transomd.tce.errors import CheckpointError
from transomd.tce.handle import SaveHandle
from transomd.tce.persist import Writer

log = logging.getLogger("transom.tce")


class Completion:
    """Completes steps, tells of those that cannot be, and removes what the ``keep`` newest make superfluous."""

    def __init__(self, writer: Writer, keep: int) -> None:
        self.resume_source: Path | None = None
        self._writer = writer
        self.keep = keep
        self._pending: dict[int, SaveHandle] = {}

    def add(self, handle: SaveHandle) -> None:
        """Take over a step that this rank has just written."""
        self._pending[handle.step] = handle
        self.settle()

    def settle(self) -> None:
        """Complete what can be completed. Never raises: what keeps a step from it goes into its handle and the log."""
        for step in sorted(self._pending):
            self.progress(step)

    def tell_unfinished(self) -> None:
        """Log the steps that wait for another rank."""
        for step in self._pending:
            missing = self._writer.missing_rank(step)
            if missing is not None:
                where = self._writer.directory
                log.warning(
                    "step %d is still incomplete: rank %d has not written (is %s shared by all nodes?)",
                    *(step, missing, where),
                )

    def progress(self, step: int) -> bool:
        """Whether ``step`` is complete; completes it if it can be."""
        try:
            committed = self._writer.commit(step)
            complete = committed or self._writer.stored(step)
        except CheckpointError as error:
            self._give_up(step, error)
            return False
        except (OSError, ValueError) as error:
            log.warning("step %d could not be completed yet: %s", step, error)
            return False
        if step in self._pending:
            if complete:
                self._completed(step, committed)
            elif failure := self._writer.failed_rank(step):
                self._give_up(step, failure)
        return complete

    def _give_up(self, step: int, error: CheckpointError) -> None:
        handle = self._pending.pop(step, None)
        if handle is not None:
            handle.error = error
            log.warning("step %d will not be complete: %s", step, error)

    def _completed(self, step: int, committed: bool) -> None:
        self._pending.pop(step).reached = True
        if committed:
            log.info("step %d of epoch %d is complete: %d ranks", step, self._writer.epoch, self._writer.world_size)
        for older in [other for other in self._pending if other < step]:
            self._give_up(
                older, CheckpointError(f"step {older} was not completed, or not kept: step {step} is complete since")
            )
        try:
            self._tidy(committed)
        except (OSError, CheckpointError) as error:
            log.warning("old checkpoints were not removed: %s", error)

    def _tidy(self, committed: bool) -> None:
        """Remove what is surplus (whoever completed the step) and what can never be complete (rank 0)."""
        writer = self._writer
        checkpoints = list_checkpoints(writer.directory)
        protected = [self.resume_source] if self.resume_source else []
        going = retention.surplus(checkpoints, self.keep, protected, writer.epoch) if committed else []
        if writer.rank == 0:
            going += retention.leftovers(checkpoints, protected, writer.epoch)
        for folder in going:
            check_epoch(writer.directory, writer.epoch)
            retention.remove_checkpoint(folder)
