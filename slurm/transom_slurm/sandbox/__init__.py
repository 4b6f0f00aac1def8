"""A private, real Slurm on one machine: try transom, run the demo and the tests, inject faults."""

from __future__ import annotations

from transom_slurm.sandbox.cluster import Sandbox
from transom_slurm.sandbox.errors import SandboxError

__all__ = ["Sandbox", "SandboxError"]
