"""Node health: the probe, its judge, SSH to the nodes, fencing and the collective check."""

from __future__ import annotations
