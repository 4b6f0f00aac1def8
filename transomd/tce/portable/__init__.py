"""Checkpoints to and from the files of others: torch.distributed.checkpoint, safetensors, torch.save.

Nothing that somebody else wrote is ever unpickled trusting it.
"""

from __future__ import annotations

from transomd.tce.portable.bring import bring_in
from transomd.tce.portable.export import FORMATS, check_new, export, state_bytes
from transomd.tce.portable.gather import Gathered, gather

__all__ = ["FORMATS", "Gathered", "bring_in", "check_new", "export", "gather", "state_bytes"]
