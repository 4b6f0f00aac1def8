"""Writes the generated tables in ``docs/`` anew; ``--check`` only says whether they are true.

A table stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``; everything else on a page is written by hand.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from transom_slurm import pending

from transomd import words

DOCS = Path(__file__).resolve().parent.parent / "docs"
BLOCK = re.compile(r"(<!-- generated: (?P<name>[a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def word_table(kind: type[words.Word], name: str) -> str:
    """Every member of an enumeration with its meaning, in the order in which they are declared."""
    return table((name, "meaning"), ((f"`{word}`", word.meaning) for word in kind))


def job_states() -> str:
    """The job states, with whether they are final."""
    rows = ((f"`{state}`", state.meaning, "yes" if state.final else "") for state in words.JobState)
    return table(("state", "meaning", "final"), rows)


def exit_codes() -> str:
    """The exit codes of the commands and the launcher."""
    return table(("code", "name", "meaning"), ((str(int(code)), code.name, code.meaning) for code in words.ExitCode))


def moves() -> str:
    """The lawful moves between job states, from the one table that has them."""
    lawful: Mapping[words.JobState, frozenset[words.JobState]] = importlib.import_module(
        "transomd.tol.transitions"
    ).MOVES
    rows = ((f"`{state}`", _listed(state, lawful.get(state, frozenset()))) for state in words.JobState)
    return table(("from", "to"), rows)


def _listed(state: words.JobState, targets: frozenset[words.JobState]) -> str:
    if not targets:
        return "nothing: final"
    return " ".join(f"`{target}`" for target in words.JobState if target in targets)


def waiting_reasons() -> str:
    """Slurm's reasons for which a job waits."""
    rows = (
        (
            " ".join(f"`{word}`" for word in row.words),
            row.until.value,
            row.meaning,
            f"`{row.command.format(job='JOB', partition='P')}`" if row.command else "",
        )
        for row in pending.REASONS
    )
    return table(("reason", "waits for", "meaning", "look at, or type"), rows)


BLOCKS: Mapping[str, Callable[[], str]] = {
    "job-states": job_states,
    "moves": moves,
    "classes": lambda: word_table(words.FailureClass, "class"),
    "blames": lambda: word_table(words.Blame, "blame"),
    "actions": lambda: word_table(words.Action, "action"),
    "roles": lambda: word_table(words.Role, "role"),
    "confidences": lambda: word_table(words.Confidence, "confidence"),
    "outcomes": lambda: word_table(words.Outcome, "outcome"),
    "check-modes": lambda: word_table(words.CheckMode, "mode"),
    "intents": lambda: word_table(words.IntentKind, "intent"),
    "intent-states": lambda: word_table(words.IntentState, "state"),
    "launcher-phases": lambda: word_table(words.LauncherPhase, "phase"),
    "exit-codes": exit_codes,
    "waiting-reasons": waiting_reasons,
}


def render(text: str) -> str:
    """The page with every block written anew. Raises ``KeyError`` for a block that nothing generates."""
    return BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found['name']]()}{found[3]}", text)


def stale(docs: Path) -> dict[Path, str]:
    """The pages that are not what they should be, each with its right text."""
    pages = {page: page.read_text(encoding="utf-8") for page in sorted(docs.rglob("*.md"))}
    return {page: right for page, text in pages.items() if (right := render(text)) != text}


def main(arguments: list[str]) -> int:
    """Exit code 1 when ``--check`` found a page to be stale."""
    pages = stale(DOCS)
    if "--check" in arguments:
        for page in pages:
            print(f"{page.relative_to(DOCS.parent)} is stale: run make docs")
        return 1 if pages else 0
    for page, right in pages.items():
        page.write_text(right, encoding="utf-8")
        print(f"wrote {page.relative_to(DOCS.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
