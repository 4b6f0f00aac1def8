"""TCE, the checkpoint engine: ``save`` and ``load`` for a training program, and the catalogue of what was saved."""

from __future__ import annotations

from transomd.tce.engine import CheckpointEngine
from transomd.tce.errors import CheckpointError
from transomd.tce.handle import SaveHandle

__all__ = ["CheckpointEngine", "CheckpointError", "SaveHandle"]
