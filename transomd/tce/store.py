"""The storage stage of one rank of one epoch: writes its share of a step, completes steps, says what went wrong.

``save`` uses it where there is no memory tier, the keeper where there is one. No torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from transomd.tce import epochs
from transomd.tce.completion import Completion
from transomd.tce.errors import CheckpointError, human_bytes, storage_error
from transomd.tce.files import make_folder
from transomd.tce.image import PartImage
from transomd.tce.persist import Writer
from transomd.tce.schedule import EVERY_STEP, Every

log = logging.getLogger("transom.tce")


class Store:
    """One rank's end of the checkpoint directory. ``token`` tells a claim of its epoch from another program's.

    ``every``: which steps go to storage, and which to another node, while memory holds them all.
    """

    def __init__(self, writer: Writer, token: str, keep: int, every: Every = EVERY_STEP) -> None:
        self.writer = writer
        self.token = token
        self.keep = keep
        self.every = every
        self.completion = Completion(writer, keep)

    def owned(self, token: str, keep: int) -> None:
        """A start of the program has taken over."""
        self.token, self.keep, self.completion.keep = token, keep, keep

    @property
    def directory(self) -> Path:
        """Where checkpoints are."""
        return self.writer.directory

    def put(self, step: int, images: Sequence[PartImage], needs: tuple[str, ...] = ()) -> bool:
        """Write this rank's share of ``step`` durably; False if it has been written in this epoch already.

        ``needs``: the parts that this rank would load, whoever writes them.

        Raises OSError or MemoryError (see ``told``), CheckpointError if a newer epoch or another program is at work.
        """
        make_folder(self.directory)
        epochs.claim_epoch(self.directory, self.writer.epoch, self.token)
        if self.writer.written(step):
            log.warning("step %d was saved in this epoch already; it is not written again", step)
            return False
        begun = time.monotonic()
        self.writer.write(step, images, needs)
        size = human_bytes(sum(image.bytes for image in images))
        log.info("step %d: rank %d wrote %s in %.2f s", step, self.writer.rank, size, time.monotonic() - begun)
        return True

    def told(self, step: int, error: OSError | MemoryError, needed: int) -> CheckpointError:
        """Say why ``step``, of ``needed`` bytes, could not be written."""
        what = f"step {step}: rank {self.writer.rank} could not write its checkpoint"
        if isinstance(error, OSError):
            return storage_error(what, error, self.directory, needed)
        return CheckpointError(f"{what}: no memory for a contiguous copy of a tensor ({error})")
