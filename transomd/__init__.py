"""transom: a Slurm-native supervisor that keeps large training jobs training."""

from __future__ import annotations

__version__ = "0.1.0"
