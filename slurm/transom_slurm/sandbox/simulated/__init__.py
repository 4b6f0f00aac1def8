"""Programs that a sandbox's nodes run: standard library only, run as files."""

from __future__ import annotations
