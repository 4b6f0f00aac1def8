"""The state of transom in a database: records, the store behind a protocol, and migrations."""

from __future__ import annotations
