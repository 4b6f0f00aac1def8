"""The commands of ``transom``, one file each; loaded when used."""

from __future__ import annotations
