"""The schema's history, run by :mod:`transom_sql.upgrade`.

Revisions are named ``rNNNN_pre`` and ``rNNNN_post``: *pre* is safe while the last release still runs, *post* needs the
new one. A file in ``versions`` bears its revision's name and what it does, and imports nothing of transom.
"""

from __future__ import annotations
