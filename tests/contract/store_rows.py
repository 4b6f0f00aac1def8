"""Rows as the first release writes them: what every upgrade must keep.

``python tests/contract/store_rows.py REVISION`` writes them to ``tests/golden/sql/REVISION.{sqlite,postgresql}.sql``.
That is done once for a release, for its newest revision; then the dumps are frozen.
"""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path
from typing import Any

from alembic import command
from transom_sql import upgrade as upgrading
from transom_sql.connect import connect, writer
from transom_sql.records import Attempt, Checkpoint, Event, Incident, Intent, Job, Launch, NodeRecord
from transom_sql.sqlstore import SqlStore
from transom_sql.store import Change, Store

GOLDEN = Path(__file__).parents[1] / "golden" / "sql"
AT = 1.7e9
EVIDENCE = {"file": "rank3.log", "line": 812, "text": "NCCL WARN … ‘peer’\tgone \x1b[0m", "role": "root"}
MARK = "-- rows"


def write_rows(store: Store) -> None:
    """Two jobs with everything that the first release (r0001_pre) knows."""
    first = store.add_job(
        _job(name="tinylm", user="ann", uid=1001),
        events=[Event(at=AT, kind="submitted", message="ann submitted tinylm")],
        intents=[_intent("submit:1:1", args={"tag": "transom:1:1"})],
    )
    store.finish_intent("submit:1:1", "done", {"slurm_job_id": 77, "at": AT + 0.25}, AT + 1)
    store.commit(_recovery(first))
    store.retry_intent("drain:n3:1", AT + 99, {"error": "slurmctld does not answer"})
    store.add_job(_job(name="größer ☃", user="bob", uid=1002, data={"x": [1, None, "é"]}))
    store.commit(Change(intents=[_intent("submit:2:1", job_id=2)]))
    store.commit(Change(drop_intents=["submit:2:1"]))
    store.finish_intent("submit:2:1", "failed", {"error": "invalid partition"}, AT + 7)
    store.commit(Change(intents=[_intent("submit:2:2", job_id=2)]))


def _job(**fields: Any) -> Job:
    known = {"spec": {"nodes": 4, "watch": {"stall_after_s": 600.5}}, "run_dir": "/h/.transom/1", "cwd": "/h/ann"}
    return Job(
        token_sha256="9f" * 32, state="queued", reason="waits", created_at=AT, changed_at=AT, **{**known, **fields}
    )


def _intent(key: str, **fields: Any) -> Intent:
    return Intent(key=key, kind=key.partition(":")[0], state="pending", created_at=AT, **fields)


def _recovery(job: Job) -> Change:
    lost = AT + 50
    return Change(
        job=job,
        attempts=[
            Attempt(
                job_id=1,
                number=1,
                tag="transom:1:1",
                created_at=AT,
                slurm_job_id=77,
                slurm_submit_time=AT,
                nodes=("n1", "n2", "n3", "n4"),
                barred=("n3",),
            )
        ],
        launches=[
            Launch(job_id=1, epoch=1, attempt=1, nodes=("n1", "n2", "n3"), started_at=AT + 4, ended_at=lost),
            Launch(job_id=1, epoch=2, attempt=1, nodes=("n1", "n2", "n4"), started_at=lost + 9, resume_step=40),
        ],
        incident=_incident(lost),
        nodes=[NodeRecord(name="n3", changed_at=lost, checks=({"check": "xid", "result": "unfit", "value": 79},))],
        checkpoints=[
            Checkpoint(job_id=1, step=40, epoch=1, stage="storage", at=lost - 3, path="/h/ann/ck/40"),
            Checkpoint(job_id=1, step=20, epoch=1, stage="memory", at=lost - 9),
        ],
        intents=[_intent("drain:n3:1", job_id=1, args={"node": "n3", "reason": "transom[1.1] n3"})],
        events=[Event(at=lost, kind="verdict", message="n3: host", job_id=1, node="n3", data={"loss": 2.5})],
    )


def _incident(at: float) -> Incident:
    return Incident(
        job_id=1,
        attempt=1,
        epoch=1,
        detected_at=at,
        failure_class="host",
        blame="node",
        action="drain",
        nodes=("n3",),
        ranks=(2,),
        confidence="high",
        summary="n3 does not answer",
        evidence=(EVIDENCE,),
        diagnosed_at=at + 1,
    )


def store_at(url: str, revision: str) -> SqlStore:
    """An empty store at a revision, as the release that had it made it."""
    engine = connect(url, create=True)
    with writer(engine).begin() as connection:
        command.upgrade(upgrading._config(connection), revision)
    return SqlStore(engine)


def sqlite_dump(file: Path) -> str:
    """The schema, and every row with its columns named, as the program of then would have written it."""
    connection = sqlite3.connect(file)
    own = "sql IS NOT NULL AND name NOT LIKE 'sqlite_%'"
    objects = connection.execute(f"SELECT name, type, sql FROM sqlite_master WHERE {own} ORDER BY rowid").fetchall()
    lines = [f"{sql.strip()};" for _, kind, sql in objects if kind != "trigger"]
    lines.append(MARK)
    tables = [name for name, kind, _ in objects if kind == "table"]
    for table in tables:
        columns = [f'"{row[1]}"' for row in connection.execute(f'PRAGMA table_info("{table}")')]
        quoted = " || ', ' || ".join(f"quote({column})" for column in columns)
        for (values,) in connection.execute(f'SELECT {quoted} FROM "{table}" ORDER BY rowid'):
            lines.append(f'INSERT INTO "{table}" ({", ".join(columns)}) VALUES ({values});')
    lines += [f"{sql.strip()};" for _, kind, sql in objects if kind == "trigger"]
    connection.close()
    return "\n".join(lines) + "\n"


def main(revision: str) -> None:
    """Write both dumps of a revision."""
    from postgres_server import PostgresServer  # here alone: the tests may run without

    file = GOLDEN / "new.db"
    store = store_at(f"sqlite:///{file}", revision)
    write_rows(store)
    store.close()
    (GOLDEN / f"{revision}.sqlite.sql").write_text(sqlite_dump(file))
    file.unlink()
    server = PostgresServer()
    try:
        store = store_at(server.new_database(), revision)
        write_rows(store)
        store.close()
        (GOLDEN / f"{revision}.postgresql.sql").write_text(server.dump("t1"))
    finally:
        server.close()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main(sys.argv[1])
