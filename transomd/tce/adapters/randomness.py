"""The random states of a process: Python's, numpy's and torch's, as the frameworks' checkpoints keep them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch


def random_states(distributed: bool) -> dict[str, Any]:
    """Return what :func:`put_back` takes; of the GPUs, all of the machine, or this process's own if ``distributed``."""
    import numpy  # what saves and loads files alone needs none

    states = {"python": random.getstate(), "numpy": numpy.random.get_state(), "cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state() if distributed else torch.cuda.get_rng_state_all()
    return states


def put_back(states: Mapping[str, Any]) -> None:
    """Go on from the random states of a process that had all GPUs."""
    import numpy

    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
