"""Builds the wheel, installs it without extras in an empty environment, and uses it there: what a login node gets.

Says what is wrong in one sentence each, and ends with 1 when there was anything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("transomd", "cli/transom_cli", "slurm/transom_slurm", "sql/transom_sql")
NAMES = {Path(package).name for package in PACKAGES}
FOREIGN = ("cli", "slurm", "sql", "tests", "docs", "scripts")
"""Names that the wheel must never bring: folders of the checkout, and likely modules of somebody else."""

SHARED = {"data/share/transom/transomd.service"}
"""What the wheel puts beside the packages, below the environment's own folder."""

OF_TRAINING = {"numpy", "torch"}
"""What the environment of a training program has of its own."""

OF_EXTRAS = {"aiohttp", "alembic", "asyncssh", "prometheus_client", "pyslurm", "sqlalchemy"}
"""What an extra brings; only the head node's side may need it."""

WITHOUT_EXTRAS = ("transom_cli", "transomd.launch", "transomd.tce", "transomd.tee", "transomd.train")
"""What has to work on login and compute nodes, where the plain install is all there is."""

# Runs in the empty environment: each module of ours, with the error of its import.
IMPORT_ALL = """
import importlib, importlib.util, json, pkgutil, sys
failed = {}
def note(name):
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        failed[name] = [error.name, str(error)]
    except Exception as error:
        failed[name] = [None, f"{type(error).__name__}: {error}"]
count = 0
for package in sys.argv[1].split(","):
    module = note(package)
    for found in pkgutil.walk_packages(module.__path__, package + ".", onerror=lambda name: None):
        if not found.name.endswith(".__main__"):
            note(found.name)
            count += 1
present = [name for name in sys.argv[2].split(",") if importlib.util.find_spec(name)]
print(json.dumps({"failed": failed, "count": count, "present": present}))
"""


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command in an environment that knows nothing of this checkout."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=kept, capture_output=True, text=True, timeout=600, check=False
    )


def must(*command: str | Path, cwd: Path) -> str:
    """Runs a command that has to succeed; ends the program with its output when it does not."""
    done = run(*command, cwd=cwd)
    if done.returncode:
        sys.exit(f"wheel-smoke: {' '.join(map(str, command))} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def build(into: Path) -> Path:
    """The wheel, built from the source distribution, so that both are known to be whole."""
    must(sys.executable, "-m", "build", "--outdir", into, ROOT, cwd=into)
    return next(into.glob("*.whl"))


def wanted_files() -> list[str]:
    """Every file of the packages, by the name that it should have in the wheel."""
    found = [(path, ROOT / package) for package in PACKAGES for path in sorted((ROOT / package).rglob("*"))]
    names = [str(path.relative_to(base.parent)) for path, base in found if path.is_file()]
    return [name for name in names if "__pycache__" not in name]


def wrong_in_wheel(wheel: Path, wanted: list[str]) -> Iterator[str]:
    """Top-level names that do not belong there, and files of the packages that are missing."""
    inside = set(zipfile.ZipFile(wheel).namelist())
    shared = {name for name in inside if name.partition("/")[0].endswith(".data")}
    tops = {name.partition("/")[0] for name in inside - shared}
    yield from (f"the wheel brings {top}" for top in sorted(tops - NAMES) if not top.endswith(".dist-info"))
    brought = {name.partition("/")[2] for name in shared}
    yield from (f"the wheel lacks or brings {name}" for name in sorted(brought ^ SHARED))
    yield from (f"the wheel lacks {name}" for name in wanted if name not in inside)


def wrong_in_use(python: Path, empty: Path) -> Iterator[str]:
    """What fails to import or to run in the empty environment."""
    absent = ",".join((*FOREIGN, *sorted(OF_TRAINING | OF_EXTRAS)))
    found = json.loads(must(python, "-c", IMPORT_ALL, ",".join(sorted(NAMES)), absent, cwd=empty))
    for module, (missing, error) in found["failed"].items():
        if str(missing).partition(".")[0] not in may_be_missing(module):
            yield f"importing {module} fails: {error}"
    yield from (f"the plain install brings a module {name}" for name in found["present"])
    yield from wrong_in_commands(python, empty)
    print(f"wheel-smoke: imported {found['count']} modules, {len(found['failed'])} of them need an extra")


def may_be_missing(module: str) -> set[str]:
    """The libraries that a module may ask for in vain in the plain install."""
    outer = any(module == roof or module.startswith(f"{roof}.") for roof in WITHOUT_EXTRAS)
    return OF_TRAINING if outer else OF_TRAINING | OF_EXTRAS


def wrong_in_commands(python: Path, empty: Path) -> Iterator[str]:
    """What the installed commands say when they are asked for the simplest things."""
    transom = python.parent / "transom"
    for arguments, expected in ((("-h",), "submit"), (("--version",), "transom"), (("submit", "-h"), "job.yaml")):
        done = run(transom, *arguments, cwd=empty)
        if done.returncode or expected.lower() not in done.stdout.lower():
            yield f"transom {' '.join(arguments)} ends with {done.returncode}: {(done.stdout + done.stderr)[-300:]}"
    daemon = run(python.parent / "transomd", "-h", cwd=empty)
    if "Traceback" in daemon.stderr or (daemon.returncode and "transom[daemon]" not in daemon.stderr):
        yield f"transomd without its extra does not name it: {daemon.stderr[-300:]}"


def main() -> int:
    """Exit code 1 when anything was wrong."""
    with tempfile.TemporaryDirectory(prefix="transom-wheel-") as name:
        empty = Path(name)
        wanted = wanted_files()
        wheel = build(empty)
        print(f"wheel-smoke: built {wheel.name}, {wheel.stat().st_size // 1024} kB")
        must(sys.executable, "-m", "venv", empty / "venv", cwd=empty)
        python = empty / "venv/bin/python"
        must(python, "-m", "pip", "install", "--quiet", wheel, cwd=empty)
        faults = [*wrong_in_wheel(wheel, wanted), *wrong_in_use(python, empty)]
    for fault in faults:
        print(f"wheel-smoke: {fault}")
    print(f"wheel-smoke: {len(faults)} faults" if faults else "wheel-smoke: all good")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
