"""torch.distributed.checkpoint on transom's checkpoints: ``dcp.save``, ``dcp.async_save`` and ``dcp.load`` as they are.

::

    dcp.save(state, storage_writer=TransomStorageWriter("checkpoints"), checkpoint_id=str(step))
    dcp.load(state, storage_reader=TransomStorageReader("checkpoints"))
"""

from __future__ import annotations

from transomd.tce.dcp.newest import load_newest
from transomd.tce.dcp.reader import TransomStorageReader
from transomd.tce.dcp.writer import TransomStorageWriter

__all__ = ["TransomStorageReader", "TransomStorageWriter", "load_newest"]
