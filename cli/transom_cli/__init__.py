"""The ``transom`` command."""

from __future__ import annotations
