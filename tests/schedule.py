"""In which order the files of tests are dealt out to workers that run side by side."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

SECONDS = {
    "test_jobs_daemon": 420, "test_jobs_failures": 350, "test_jobs_silent": 280, "test_sql_daemon": 170,
    "test_jobs_replica": 160, "test_hooks_sandbox": 150, "test_rights_users": 120, "test_demo": 120,
    "test_rights_personal": 110, "test_jobs_slurm": 110, "test_jobs_kinds": 100, "test_ops_site": 80,
    "test_jobs_storage": 70, "test_health_sandbox": 50, "test_sandbox_faults": 45, "test_jobs_rollback": 18,
    "test_dcp_ranks": 100, "test_dcp_nodes": 100, "test_tol_kill": 90, "test_tce_shards": 70, "test_tce_memory": 50,
    "test_store": 50, "test_example_resume": 40, "test_slurm_client": 35, "test_tce_replica": 35, "test_tce_kills": 30,
    "test_ckpt_move": 20, "test_health_collective": 20, "test_tol_rules": 20, "test_cli_ops": 20, "test_nevers": 20,
    "test_rights_reports": 20, "test_tce_streams": 20, "test_tol_lives": 17, "test_tce_kill": 17,
    "test_store_postgres": 16,
}  # fmt: skip
"""About how long the long ones take on two cores, from ``pytest --durations=0``; all others take ``SHORT_S``."""
SHORT_S = 2


def dealt(files: Iterable[Path]) -> list[Path]:
    """Return the files with those of a whole cluster, which wait, evenly among the others, which compute.

    Of each kind the longest come first, so that short ones fill up the end.
    """
    kinds: dict[bool, list[Path]] = {False: [], True: []}
    for file in sorted(files, key=lambda file: (-_seconds(file), file)):
        kinds["cluster" in file.parts].append(file)
    return [file for _, file in sorted((place, file) for kind in kinds.values() for place, file in _places(kind))]


def _seconds(file: Path) -> int:
    return SECONDS.get(file.stem, SHORT_S)


def _places(files: list[Path]) -> list[tuple[float, Path]]:
    """Each file with the part of its kind's time that is over when it begins."""
    total, gone, found = sum(map(_seconds, files)), 0, []
    for file in files:
        found.append((gone / total, file))
        gone += _seconds(file)
    return found
