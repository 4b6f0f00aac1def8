"""Holds the rules about who may import what, proves that each of them can fail, and watches a few habits of the tree.

Each rule is a function from a source tree to the sentences that say where it is broken. The first test asks them all
about this tree; the second breaks one rule at a time in a copy and asks again.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"transomd": "transomd", "transom_cli": "cli", "transom_slurm": "slurm", "transom_sql": "sql"}
"""Each import package with the folder of the checkout that it lies in (its own name where that is the top)."""

SOURCES = ("transomd", "cli", "slurm", "sql", "tests", "docs", "scripts", ".ci")
BROUGHT_BY_DAEMON = ("aiohttp", "asyncssh", "sqlalchemy", "alembic")
PURE = tuple(f"transomd.tol.{name}" for name in ("decide", "admit", "transitions", "policy"))
EFFECTS = ("asyncio", "asyncssh", "sqlalchemy", "time")
HIDDEN_INPUTS = ("random", "secrets", "socket", "subprocess", "threading", "uuid")
STORE_AND_OPERATOR = ("transomd.tol", "transom_sql")


@dataclass(frozen=True)
class Import:
    """One import statement, or a call of ``import_module`` with a literal name."""

    name: str
    line: int
    at_import: bool
    """Whether importing the module carries it out: it is neither inside a function nor for the type checker only."""


# ------------------------------------------------------------------------------------------------- the import graph


def folder(root: Path, package: str) -> Path:
    """Where a package lies in a tree."""
    return root / package if PACKAGES[package] == package else root / PACKAGES[package] / package


def modules(root: Path) -> dict[str, Path]:
    """Every module of the four packages, by its import name."""
    found = {}
    for package in PACKAGES:
        base = folder(root, package)
        for path in sorted(base.rglob("*.py")):
            parts = path.relative_to(base.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(module: str, path: Path) -> list[Import]:
    """Every import in a file, with relative names resolved and ``from a import b`` told as ``a`` and ``a.b``."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return _imports_in(path.read_text(encoding="utf-8"), package)


@cache
def _imports_in(text: str, package: str) -> list[Import]:
    """Kept by the text, since the copies that the tests make differ in a file or two."""
    return list(_imports(ast.parse(text), package, True))


def _imports(node: ast.AST, package: str, at_import: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        for name in _names(child, package):
            yield Import(name, child.lineno, at_import)  # type: ignore[attr-defined]
        inner = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or _is_for_type_checker(child)
        yield from _imports(child, package, at_import and not inner)


def _is_for_type_checker(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _names(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*above, *filter(None, [node.module])])
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and _last_name(node.func) in ("import_module", "__import__"):
        yield from (str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def graph(root: Path) -> dict[str, list[Import]]:
    """What every module of the four packages imports."""
    return {module: imports(module, path) for module, path in modules(root).items()}


def within(name: str, *roofs: str) -> bool:
    """Whether a dotted name is one of the others or lies below it."""
    return any(name == roof or name.startswith(f"{roof}.") for roof in roofs)


def closure(tree: Mapping[str, list[Import]], start: str) -> set[str]:
    """The project's modules that importing ``start`` runs, itself among them."""
    reached, waiting = {start}, [start]
    while waiting:
        module = waiting.pop()
        wanted = [found.name for found in tree[module] if found.at_import]
        for name in [*wanted, *_above(module), *(parent for want in wanted for parent in _above(want))]:
            if name in tree and name not in reached:
                reached.add(name)
                waiting.append(name)
    return reached


def _above(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def directly(root: Path, where: Callable[[str], bool], *banned: str) -> Iterator[str]:
    """Imports of something banned in the modules that ``where`` picks, wherever in the file they stand."""
    for module, found in graph(root).items():
        if where(module):
            bad = {(one.line, one.name) for one in found if within(one.name, *banned)}
            yield from (f"{module}:{line}: {module} imports {name}" for line, name in sorted(bad))


def along_the_way(root: Path, where: Callable[[str], bool], *banned: str) -> Iterator[str]:
    """Imports of something banned by a module that one of those picked pulls in when it is imported."""
    tree = graph(root)
    for start in filter(where, tree):
        for module in sorted(closure(tree, start) - {start}):
            bad = sorted({one.name for one in tree[module] if one.at_import and within(one.name, *banned)})
            if bad:
                yield f"{start} pulls in {module}, which imports {', '.join(bad)}"


# -------------------------------------------------------------------------------------------------------- the rules


def slurm_and_sql_stand_alone(root: Path) -> Iterator[str]:
    """The Slurm adapter and the store know nothing of those who use them."""
    yield from directly(root, lambda m: within(m, "transom_slurm", "transom_sql"), "transomd", "transom_cli")


def decisions_are_pure(root: Path) -> Iterator[str]:
    """Deciding has no effects, no clock and no chance in it, nor has anything that it imports."""
    yield from directly(root, PURE.__contains__, *EFFECTS, *HIDDEN_INPUTS)
    yield from along_the_way(root, PURE.__contains__, *EFFECTS)
    for module, path in modules(root).items():
        if module in PURE:
            yield from _clock_reads(path, root)


def _clock_reads(path: Path, root: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in ("now", "utcnow", "today") and _is_date(node.value):
            yield f"{path.relative_to(root)}:{node.lineno}: reads the clock"


def _is_date(node: ast.AST) -> bool:
    return ast.unparse(node).rpartition(".")[2] in ("datetime", "date")


def outer_parts_keep_out_of_the_operator(root: Path) -> Iterator[str]:
    """The command and what runs inside a job know neither the operator nor the store."""

    def outer(module: str) -> bool:
        return within(module, "transom_cli", "transomd.train", "transomd.tce")

    yield from directly(root, outer, *STORE_AND_OPERATOR)
    yield from along_the_way(root, outer, *STORE_AND_OPERATOR)


def pyslurm_has_one_importer(root: Path) -> Iterator[str]:
    """Pyslurm's calls can hang with the interpreter lock held, so one file holds all of them."""
    importers = [m for m, found in graph(root).items() if any(within(one.name, "pyslurm") for one in found)]
    if len(importers) > 1:
        yield f"pyslurm is imported by {', '.join(importers)}"


def packages_are_typed_and_described(root: Path) -> Iterator[str]:
    """Every package is typed, every folder of it is a package, every public module says what it is."""
    for package in PACKAGES:
        base = folder(root, package)
        if not (base / "py.typed").is_file():
            yield f"{base.relative_to(root)} has no py.typed"
        for directory in sorted({path.parent for path in base.rglob("*.py")}):
            if not (directory / "__init__.py").is_file():
                yield f"{directory.relative_to(root)} has no __init__.py"
    for module, path in modules(root).items():
        public = not any(part.startswith("_") for part in module.split("."))
        if public and not _docstring(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(root)} has no docstring"


@cache
def _docstring(text: str) -> str | None:
    return ast.get_docstring(ast.parse(text))


def _joined(*parts: tuple[str, str, str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(left + glue + right) for left, glue, right in parts))


# Put together here, so that this file does not break the rule that it holds.
REGISTRY_HOST = _joined(
    ("pypi", ".", "org"),
    ("pythonhosted", ".", "org"),
    ("download.pytorch", ".", "org"),
    ("deb.debian", ".", "org"),
    ("archive.ubuntu", ".", "com"),
    ("registry.npmjs", ".", "org"),
    ("conda.anaconda", ".", "org"),
)
BUILD_PATH = _joined(
    ("/work", "/", "main"),
    ("/work", "/", "shared"),
    ("/opt", "/", "pypi"),
    ("/opt", "/", "wheels"),
    (".lib", "rary", "/"),
    ("/root", "/", ".pyenv"),
    ("/tmp", "/", "prep"),
)


def nothing_names_a_registry_or_this_machine(root: Path) -> Iterator[str]:
    """What is committed works anywhere: it names no package registry's host and no path of a build machine."""
    for path in written_files(root):
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            for pattern in (REGISTRY_HOST, BUILD_PATH):
                yield from (f"{path.relative_to(root)}:{number}: names {hit[0]}" for hit in pattern.finditer(line))


def written_files(root: Path) -> Iterator[Path]:
    """Every text that people wrote: the source folders and the files at the top."""
    for top in SOURCES:
        for directory, inner, names in os.walk(root / top):
            inner[:] = [name for name in inner if name != "__pycache__" and not name.startswith(".")]
            yield from (Path(directory, name) for name in sorted(names))
    yield from (path for path in sorted(root.iterdir()) if path.is_file() and path.name != ".coverage")


NEWLY_LOADED = """
import importlib, sys
banned, seen = set(sys.argv[1].split(",")), set()
for module in sys.argv[2:]:
    try:
        importlib.import_module(module)
    except Exception as error:
        print(f"importing {module} fails: {type(error).__name__}: {error}")
    loaded = banned & {name.partition(".")[0] for name in sys.modules}
    if loaded - seen:
        print(f"importing {module} loads {', '.join(sorted(loaded - seen))}")
    seen = loaded
"""


def _loads(root: Path, roof: str, *banned: str) -> Iterator[str]:
    """What importing the modules below ``roof`` brings along of what is banned, found out by importing them."""
    wanted = [module for module in modules(root) if within(module, roof) and not module.endswith(".__main__")]
    places = os.pathsep.join(sorted({str(folder(root, package).parent) for package in PACKAGES}))
    run = subprocess.run(
        [sys.executable, "-c", NEWLY_LOADED, ",".join(banned), *wanted],
        env={**os.environ, "PYTHONPATH": places, "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    yield from run.stdout.splitlines()


def importing_tce_is_light(root: Path) -> Iterator[str]:
    """A training program that saves checkpoints loads nothing of the daemon's."""
    yield from _loads(root, "transomd.tce", *BROUGHT_BY_DAEMON, "click", "pydantic", "rich")


def importing_train_is_light(root: Path) -> Iterator[str]:
    """Nor does one that uses the other helpers."""
    yield from _loads(root, "transomd.train", *BROUGHT_BY_DAEMON, "click", "pydantic", "rich")


def importing_the_command_is_light(root: Path) -> Iterator[str]:
    """The command starts fast: the heavy libraries are loaded where they are used."""
    yield from _loads(root, "transom_cli.main", "torch", *BROUGHT_BY_DAEMON, "pydantic", "rich")


RULES = (
    slurm_and_sql_stand_alone,
    decisions_are_pure,
    outer_parts_keep_out_of_the_operator,
    pyslurm_has_one_importer,
    packages_are_typed_and_described,
    nothing_names_a_registry_or_this_machine,
    importing_tce_is_light,
    importing_train_is_light,
    importing_the_command_is_light,
)


# -------------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule: Callable[[Path], Iterator[str]]) -> None:
    assert list(rule(ROOT)) == []


@dataclass(frozen=True)
class Breach:
    """A line that breaks a rule, the file of the copy that it is added to, and words of the sentence that must come."""

    rule: Callable[[Path], Iterator[str]]
    file: str
    line: str
    said: str


HOST = "pypi" + ".org"
BREACHES = (
    Breach(slurm_and_sql_stand_alone, "slurm/transom_slurm/types.py", "import transomd", "transom_slurm.types imports"),
    Breach(
        slurm_and_sql_stand_alone, "sql/transom_sql/new.py", "def f():\n from transomd import words", "imports transomd"
    ),
    Breach(slurm_and_sql_stand_alone, "sql/transom_sql/new.py", "import_module('transomd.x')", "imports transomd.x"),
    *(
        Breach(decisions_are_pure, f"transomd/tol/{name}.py", "import time", "imports time")
        for name in ("decide", "admit")
    ),
    Breach(decisions_are_pure, "transomd/tol/policy.py", "from asyncio import sleep", "imports asyncio"),
    Breach(decisions_are_pure, "transomd/tol/transitions.py", "from sqlalchemy.orm import Session", "sqlalchemy"),
    Breach(decisions_are_pure, "transomd/tol/decide.py", "import random", "imports random"),
    Breach(decisions_are_pure, "transomd/tol/decide.py", "x = datetime.datetime.now()", "reads the clock"),
    Breach(
        decisions_are_pure,
        "transomd/tol/__init__.py",
        "import asyncssh",
        "pulls in transomd.tol, which imports asyncssh",
    ),
    Breach(
        outer_parts_keep_out_of_the_operator, "cli/transom_cli/new.py", "def f():\n import transomd.tol.decide", "tol"
    ),
    Breach(outer_parts_keep_out_of_the_operator, "transomd/tce/new.py", "from ..tol import decide", "transomd.tol"),
    Breach(
        outer_parts_keep_out_of_the_operator, "transomd/train/new.py", "from transom_sql import store", "transom_sql"
    ),
    Breach(
        outer_parts_keep_out_of_the_operator, "transomd/__init__.py", "import transom_sql.store", "pulls in transomd,"
    ),
    Breach(pyslurm_has_one_importer, "slurm/transom_slurm/new.py", "import pyslurm", "pyslurm is imported by"),
    Breach(packages_are_typed_and_described, "transomd/tee/new.py", "x = 1", "new.py has no docstring"),
    Breach(packages_are_typed_and_described, "transomd/bare/new.py", '"""Something."""', "bare has no __init__.py"),
    Breach(nothing_names_a_registry_or_this_machine, "docs/new.md", f"see {HOST}", f"docs/new.md:1: names {HOST}"),
    Breach(nothing_names_a_registry_or_this_machine, "Makefile", "cd /work" + "/main", "Makefile"),
    Breach(
        importing_tce_is_light,
        "transomd/tce/new.py",
        "import sqlalchemy",
        "importing transomd.tce.new loads sqlalchemy",
    ),
    Breach(importing_train_is_light, "transomd/train/new.py", "import pydantic", "transomd.train.new loads pydantic"),
    Breach(
        importing_the_command_is_light, "cli/transom_cli/main.py", "import rich.table", "transom_cli.main loads rich"
    ),
    Breach(
        importing_the_command_is_light, "cli/transom_cli/main.py", "import no_such", "transom_cli.main fails: ModuleNot"
    ),
)


@pytest.mark.parametrize("breach", BREACHES, ids=lambda breach: f"{breach.rule.__name__}-{breach.line[:24]}")
def test_a_breach_of_the_rule_is_seen(breach: Breach, tmp_path: Path) -> None:
    copy_tree(tmp_path)
    if breach.rule is pyslurm_has_one_importer:
        (tmp_path / "transomd/new.py").write_text("import pyslurm\n", encoding="utf-8")
    target = tmp_path / breach.file
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("a", encoding="utf-8") as file:
        file.write(f"\n{breach.line}\n" if target.stat().st_size else f"{breach.line}\n")
    assert any(breach.said in sentence for sentence in breach.rule(tmp_path)), list(breach.rule(tmp_path))


def test_a_package_without_its_mark_is_seen(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    (tmp_path / "sql/transom_sql/py.typed").unlink()
    assert "sql/transom_sql has no py.typed" in list(packages_are_typed_and_described(tmp_path))


def test_what_only_the_type_checker_imports_is_not_pulled_in(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    (tmp_path / "transomd/__init__.py").write_text(
        '"""transom."""\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import transom_sql.store\n',
        encoding="utf-8",
    )
    assert not any("pulls in transomd," in said for said in outer_parts_keep_out_of_the_operator(tmp_path))


def copy_tree(target: Path) -> None:
    """A copy of the four packages, without what Python left beside them."""
    for package in PACKAGES:
        shutil.copytree(folder(ROOT, package), folder(target, package), ignore=shutil.ignore_patterns("__pycache__"))


def test_our_packages_shadow_no_module() -> None:
    assert not sys.stdlib_module_names & set(PACKAGES)
    assert all(re.fullmatch(r"transomd|transom_[a-z]+", package) for package in PACKAGES)
