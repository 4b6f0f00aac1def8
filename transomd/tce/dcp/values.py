"""Values that are no tensors: DCP keeps each as what ``torch.save`` wrote, a pickle, and loads it trusting it.

Here only what ``torch.load(weights_only=True)`` takes is saved, and nothing else is handed to DCP when it loads.
"""

from __future__ import annotations

import io

import torch

from transomd.tce.errors import CheckpointError

_HINT = (
    "save what it is made of: tensors, numbers, strings, bytes, lists, tuples, dicts; "
    "or allow its class in the program that saves and in the one that loads: "
    "torch.serialization.add_safe_globals([TheClass])"
)


def check_loadable(name: str, content: bytes | bytearray) -> None:
    """CheckpointError if the value that torch.save wrote could not be loaded without trusting its pickle."""
    try:
        torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # bytes of something else may make it raise anything
        raise CheckpointError(
            f"{name}: nothing but a trusted pickle could bring it back, which may run code ({why(error)})", hint=_HINT
        ) from error


def why(error: Exception) -> str:
    """The sentence of torch's long message that says what was refused."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line for line in lines if "GLOBAL" in line or "WeightsUnpickler" in line), lines[0]).strip()
