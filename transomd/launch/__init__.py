"""What runs inside the allocation: the launcher (one) and the agents (one a node)."""

from __future__ import annotations
