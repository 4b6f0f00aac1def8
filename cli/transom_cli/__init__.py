"""transom_cli."""

from __future__ import annotations
