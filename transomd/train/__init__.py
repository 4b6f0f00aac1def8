"""train."""

from __future__ import annotations
