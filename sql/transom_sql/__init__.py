"""transom_sql."""

from __future__ import annotations
