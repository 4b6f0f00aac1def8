"""One file for each revision."""

from __future__ import annotations
