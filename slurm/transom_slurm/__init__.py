"""transom_slurm."""

from __future__ import annotations
