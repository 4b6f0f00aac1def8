"""Runs migrations on the connection that :mod:`transom_sql.upgrade` hands over, within its transaction."""

from __future__ import annotations

from alembic import context

from transom_sql.tables import REVISION_TABLE

context.configure(connection=context.config.attributes["connection"], version_table=REVISION_TABLE)
context.run_migrations()
