"""tce."""

from __future__ import annotations
