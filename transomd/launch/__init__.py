"""What runs inside the allocation: the launcher (one) and the agents (one a node). Nothing of the daemon is imported."""

from __future__ import annotations
