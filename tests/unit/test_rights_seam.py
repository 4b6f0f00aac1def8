"""What needs root goes through one seam, and whatever runs as a user has that user's rights and nothing more."""

from __future__ import annotations

import ast
import asyncio
import os
import pwd
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from transom_slurm.runner import CommandNotStarted, clean_env, user_identity
from transom_slurm.types import UserIdentity

from transomd.errors import RefusedError
from transomd.modes import settle
from transomd.rights import Rights
from transomd.settings import Settings

ROOT = Path(__file__).parents[2]
SEAM = {"transomd/rights.py", "slurm/transom_slurm/runner.py"}
LOOKS = {"transomd/preflight.py"}
"""``transomd --check`` logs in on one node, to see whether that works."""
NODES = "transomd/health"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another user")


def sources() -> Iterator[tuple[str, ast.AST]]:
    for package in ("transomd", "slurm/transom_slurm", "sql/transom_sql", "cli/transom_cli"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if not name.startswith(("slurm/transom_slurm/sandbox", "slurm/transom_slurm/hooks")):
                yield name, ast.parse(path.read_text())


def test_rights_are_dropped_and_nodes_entered_in_one_place() -> None:
    found: set[tuple[str, str]] = set()
    for name, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func).rpartition(".")[2]
                if called in ("setuid", "setgid", "setgroups", "setreuid", "setresuid", "initgroups", "seteuid"):
                    found.add((name, called))
                if called == "SshPool" and not name.startswith(NODES):
                    found.add((name, called))
            if isinstance(node, ast.Constant) and node.value == "extra_groups":
                found.add((name, "extra_groups"))
    assert {name for name, _ in found} - LOOKS == SEAM, found


def test_no_user_string_meets_a_shell() -> None:
    """``shell=True`` is for nobody, ``create_subprocess_shell`` for the site's own command only."""
    for name, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func).rpartition(".")[2]
                assert not any(k.arg == "shell" for k in node.keywords), name
                assert called not in ("system", "popen"), name
                if called in ("create_subprocess_shell", "subprocess_shell"):
                    assert name == "transomd/notify.py", name


@pytest.fixture
def nobody() -> UserIdentity:
    return user_identity("games")


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that other users can pass; pytest's own are closed to them."""
    with tempfile.TemporaryDirectory(prefix="transom-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def site() -> Rights:
    return Rights(settle(Settings(), 0), time.time)


PROVE = (
    'id -u; id -G; umask; pwd; grep -E "^(Cap(Inh|Prm|Eff|Amb)|Groups):" /proc/self/status; ls -1 /proc/self/fd | wc -l'
)


@needs_root
async def test_a_command_of_a_users_has_nothing_of_roots(nobody: UserIdentity) -> None:
    done = await site().run(["sh", "-c", PROVE], env=clean_env(), timeout=60, cwd="/var", user=nobody)
    uid, groups, umask, folder, *status, descriptors = done.stdout.split("\n")[:-1]
    assert (uid, umask, folder) == (str(nobody.uid), "0022", "/var")
    assert sorted(map(int, groups.split())) == sorted(nobody.groups)
    assert "0" not in groups.split()
    assert [line for line in status if line.startswith("Cap")] == [
        f"Cap{kind}:\t0000000000000000" for kind in ("Inh", "Prm", "Eff", "Amb")
    ]
    assert int(descriptors) <= 4, "the three, and the one that ls has opened"


@needs_root
async def test_files_are_read_with_the_users_rights(nobody: UserIdentity, open_path: Path) -> None:
    closed, own = open_path / "roots", open_path / "own"
    for folder in (closed, own):
        folder.mkdir(mode=0o700)
    os.chown(own, nobody.uid, nobody.gid)
    assert (await site().run(["ls"], env=clean_env(), timeout=60, cwd=str(own), user=nobody)).rc == 0
    with pytest.raises(CommandNotStarted, match="ermission denied"):
        await site().run(["ls"], env=clean_env(), timeout=60, cwd=str(closed), user=nobody)
    process = await site().start(nobody.uid, ["id", "-u"], f"{own}/log")
    assert await asyncio.to_thread(process.wait, 10) == 0
    assert (own / "log").read_text().strip() == str(nobody.uid)
    assert (own / "log").stat().st_uid == nobody.uid
    process = await site().start(nobody.uid, ["id", "-u"], f"{closed}/log")
    assert await asyncio.to_thread(process.wait, 10) != 0
    assert not (closed / "log").exists()


@needs_root
async def test_words_stay_words(nobody: UserIdentity) -> None:
    words = ["; touch /tmp/owned", "$(id)", "`id`", "a\nb", "--", "-x", "'\"", "%s"]
    done = await site().run(["printf", "[%s]", *words], env=clean_env(), timeout=60, user=nobody)
    assert done.stdout == "".join(f"[{word}]" for word in words)


def test_a_personal_daemon_acts_for_its_owner_only() -> None:
    uid = pwd.getpwnam("games").pw_uid
    rights = Rights(settle(Settings.model_validate({"daemon": {"mode": "personal"}}), os.geteuid()), time.time)
    assert rights.identity(os.geteuid()) is None
    with pytest.raises(RefusedError, match="own"):
        rights.identity(uid)


async def test_a_personal_daemon_runs_nothing_as_another(nobody: UserIdentity) -> None:
    rights = Rights(settle(Settings.model_validate({"daemon": {"mode": "personal"}}), os.geteuid()), time.time)
    with pytest.raises(CommandNotStarted, match="own"):
        await rights.run(["id"], env=clean_env(), timeout=60, user=nobody)
    with pytest.raises(RefusedError):
        await rights.start(nobody.uid, ["id"], "/dev/null")
    with pytest.raises(RefusedError):
        await rights.all_reduce(["n1"], nobody.uid, "/usr/bin/python3", 1.0)


def test_nothing_secret_is_in_a_command_line() -> None:
    """Whatever carries a token, a key or a password goes by file, header or standard input."""
    for name, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                text = ast.unparse(node)
                assert not re.search(r"--(token|key|password|secret)=\{", text), (name, text)
