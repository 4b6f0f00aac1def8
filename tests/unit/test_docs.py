"""Holds the pages to the code: generated tables are fresh, links lead somewhere, the commands that are named exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import click
import pytest
from transom_cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(
    r"(?<!\!)\[[^\]]+\]\((?!https?:|#|mailto:)(?P<target>[^)#\s]+)[^)]*\)|!\[[^\]]*\]\((?P<image>[^)\s]+)\)"
)


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_docs", ROOT / "scripts/gen_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def test_generated_tables_are_fresh() -> None:
    stale = _generator().stale(ROOT / "docs")
    assert [page.name for page in stale] == [], "run: make docs"


def test_every_word_of_the_enumerations_is_in_the_docs() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    generator = _generator()
    assert [name for name in generator.BLOCKS if f"<!-- generated: {name} -->" not in text] == []


def test_a_changed_table_is_seen(tmp_path: Path) -> None:
    generator = _generator()
    page = tmp_path / "states.md"
    page.write_text("before\n<!-- generated: blames -->\n<!-- end -->\nafter\n", encoding="utf-8")
    right = generator.stale(tmp_path)[page]
    assert right.startswith("before\n<!-- generated: blames -->\n| blame | meaning |")
    assert right.endswith("<!-- end -->\nafter\n")
    page.write_text(right, encoding="utf-8")
    assert generator.stale(tmp_path) == {}
    page.write_text(right.replace("a switch or link", "a cable"), encoding="utf-8")
    assert list(generator.stale(tmp_path)) == [page]


def test_a_block_that_nothing_generates_is_an_error() -> None:
    with pytest.raises(KeyError, match="no-such-block"):
        _generator().render("<!-- generated: no-such-block -->\n<!-- end -->")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    found = (match["target"] or match["image"] for match in LINK.finditer(page.read_text(encoding="utf-8")))
    assert [target for target in found if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"(?:`|^    |^\$ |^)make ([a-z-]+)\b", text, re.MULTILINE))
    assert named - _targets() == set()


def test_every_target_is_described_and_has_what_it_runs() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    described = set(re.findall(r"^([a-z-]+):.*## \S", text, re.MULTILINE))
    assert described == _targets()
    scripts = set(re.findall(r"\bscripts/[a-z_.]+", text))
    assert [script for script in sorted(scripts) if not (ROOT / script).is_file()] == []


def test_the_readme_and_ci_name_the_same_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make demo" in readme
    assert "make test" in readme
    assert re.search(r"\bmake\b.*\btest\b", (ROOT / ".ci/run").read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_a_page_names_exists(page: Path) -> None:
    """What is copied from a page must be there: ``transomd db backup`` is, ``transom db backup`` is not."""
    named = set(re.findall(r"(?m)(?:^    |^\$ |`)transom ([a-z][a-z-]*)", page.read_text(encoding="utf-8")))
    context = click.Context(cli)
    # "transom is paused by ..." is a message.
    assert {name for name in named - {"is"} if cli.get_command(context, name) is None} == set()


@pytest.mark.parametrize("page", ["checkpoint.md", "checkpoint-lessons.md"])
def test_the_tests_that_pages_name_exist(page: str) -> None:
    named = set(re.findall(r"`(test_[a-z0-9_]+)`", (ROOT / "docs" / page).read_text(encoding="utf-8")))
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 15
    assert sorted(name for name in named if f"def {name}(" not in sources) == []
