"""What the demo shows: lines that stay, and on a terminal a live panel below them."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from demo_follow import Json, Seen
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transom_cli.text import plain

STATES = {
    "running": "bold green",
    "completed": "bold green",
    "recovering": "bold yellow",
    "checking": "bold cyan",
    "queued": "cyan",
    "submitted": "cyan",
    "held": "bold magenta",
    "failed": "bold red",
    "cancelled": "bold red",
}
EVENTS = {
    "failure": "bold red",
    "lost": "bold red",
    "unfit": "bold red",
    "failed": "bold red",
    "act-failed": "bold red",
    "verdict": "bold yellow",
    "restart": "bold cyan",
    "drained": "bold magenta",
    "recovered": "bold green",
    "completed": "bold green",
}
WIDEST = 120
_CTRL_C = 3
"""Columns left free beside the panel: a terminal that echoes ^C there would else begin a new line."""
_EVERY_STEPS = 10
_HEAD = "steps/s "


@dataclass(frozen=True, slots=True)
class Signs:
    """The characters that are drawn with. ``levels`` rise from nothing to the most."""

    levels: str
    full: str
    empty: str
    rank: str
    spare: str
    gone: str
    idle: str
    stopped: str
    yes: str
    no: str


UNICODE = Signs("▁▂▃▄▅▆▇█", "█", "░", "●", "○", "✗", "·", "·", "✓", "✗")
ASCII = Signs(".:-=+*%#", "#", ".", "*", "o", "x", "-", ".", "ok", "NO")


def signs(console: Console) -> Signs:
    """What the terminal or file can show."""
    return UNICODE if console.encoding.lower().startswith("utf") else ASCII


class Show:
    """Prints. Live on a terminal; plain lines into a pipe or file."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.signs = signs(console)
        self._began = time.time()
        self._live: Live | None = None
        self._told = 0

    def line(self, text: Text | str = "", style: str = "") -> None:
        """Print one line that stays."""
        self.console.print(text if isinstance(text, Text) else Text(text, style), soft_wrap=True)

    def title(self, text: str) -> None:
        """Print the headline of a part, and count its seconds from here."""
        self._began, self._told = time.time(), 0
        self.line()
        self.line(text, "bold")

    def command(self, *words: str) -> None:
        """Print a command as a person would type it."""
        lines = _folded([_quoted(word) for word in words], self.width - 4)
        self.line(Text("$ ", "dim") + Text(" \\\n    ".join(lines), "bold blue"))

    def block(self, text: str, style: str = "") -> None:
        """Print what belongs to the line above, indented."""
        for line in text.rstrip().splitlines():
            for part in textwrap.wrap(line, self.width - 2, drop_whitespace=False) or [""]:
                self.line(f"  {part}".rstrip(), style)

    def answer(self, text: str) -> None:
        """Print what a command said, as it said it."""
        for line in text.rstrip().splitlines():
            self.line(line)

    def event(self, event: Mapping[str, Any]) -> None:
        """Print one event of a job: seconds, kind, message."""
        kind = plain(event.get("kind"))
        self._happened(kind, plain(event.get("message")), EVENTS.get(kind, ""), float(event.get("at") or 0))

    def row(self, *cells: tuple[str, str] | str) -> None:
        """Print cells (text and style) side by side, the last one wrapped below itself."""
        *first, last = [cell if isinstance(cell, tuple) else (cell, "") for cell in cells]
        head = Text(" ").join(Text(*cell) for cell in first) + Text(" ")
        room = max(20, self.width - head.cell_len)
        lines = textwrap.wrap(last[0], room) or [""]
        self.line(head + Text(("\n" + " " * head.cell_len).join(lines), last[1]))

    @property
    def width(self) -> int:
        """The columns to keep within."""
        return min(self.console.width, WIDEST)

    def happened(self, what: str, text: str, style: str) -> None:
        """Print what was done to the job from outside."""
        self._happened(what, text, style, time.time())

    def _happened(self, what: str, text: str, style: str, at: float) -> None:
        self.row((f"{max(at - self._began, 0):7.1f} s", "dim"), (f"{what:<10}", style), text)

    @contextmanager
    def following(self, seen: Seen) -> Iterator[None]:
        """Show ``seen`` below the lines for as long as this lasts, on a terminal; it disappears after that."""
        if not self.console.is_terminal or self.console.is_dumb_terminal:
            yield
            return
        first = panel(seen, time.time(), self.width - _CTRL_C, self.signs)
        with Live(first, console=self.console, auto_refresh=False, transient=True) as self._live:
            try:
                yield
            finally:
                self._live = None

    def refresh(self, seen: Seen) -> None:
        """Show what has changed: the panel, or a line every ten steps."""
        now = time.time()
        if self._live is not None:
            self._live.update(panel(seen, now, self.width - _CTRL_C, self.signs), refresh=True)
        elif seen.step // _EVERY_STEPS != self._told:
            self._told = seen.step // _EVERY_STEPS
            told = f"{seen.step} of {seen.total}, {seen.rate(now):.1f} steps/s, checkpoint: step {seen.checkpoint}"
            self._happened("step", told, "", now)


def _quoted(word: str) -> str:
    return f"'{word}'" if " " in word else word


def _folded(words: Sequence[str], width: int) -> list[str]:
    """A command on as many lines as it needs, broken before options."""
    lines = [words[0]]
    for word in words[1:]:
        if word.startswith("--") and len(lines[-1]) + len(word) + 1 > width // 2:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return [" ".join(words)] if len(" ".join(words)) <= width else lines


def panel(seen: Seen, now: float, width: int, use: Signs) -> Panel:
    """Everything about the job now, in few lines that fit 80 columns."""
    job, state = seen.job, str(seen.job.get("state", "submitted"))
    title = Text.assemble((f"job {job.get('id', '')} {plain(job.get('name', ''))} ", "bold"), (state, STATES[state]))
    title.append(f" · {max(0.0, now - float(job.get('created_at') or now)):.0f} s", "dim")
    why = Text(plain(job.get("reason", "")), "dim", no_wrap=True, overflow="ellipsis")
    rows = [
        why,
        _progress(seen, width - 4, use),
        _rates(seen, now, width - 4, use),
        _facts(seen),
        Text(""),
        _nodes(seen, use),
    ]
    return Panel(Group(*rows), title=title, title_align="left", width=width, border_style="dim")


def _progress(seen: Seen, width: int, use: Signs) -> Text:
    """How far it is; after a restart also, in yellow, how far it had been."""
    room = width - len(_HEAD) - 8
    done = round(room * min(1.0, seen.step / seen.total))
    lost = max(0, round(room * min(1.0, seen.furthest / seen.total)) - done)
    parts = ((use.full * done, "green"), (use.empty * lost, "yellow"), (use.empty * (room - done - lost), "dim"))
    return Text.assemble(f"{'step':<{len(_HEAD)}}", *parts, f" {seen.step:>3}/{seen.total}")


def _rates(seen: Seen, now: float, width: int, use: Signs) -> Text:
    room = width - len(_HEAD) - 8
    return Text(_HEAD).append_text(strip(seen, int(now) - room + 1, 1.0, room, use)).append(f" {seen.rate(now):.1f}")


def _facts(seen: Seen) -> Text:
    told = [f"checkpoint: step {seen.checkpoint}" if seen.checkpoint else "no checkpoint yet"]
    if seen.steps:
        told.append(f"loss {seen.steps[-1].loss:.4f}")
    if seen.expected and seen.steps:
        same, looked = seen.agreement()
        told.append(f"{same} of {looked} losses equal")
    return Text(" " * len(_HEAD) + "   ".join(told))


def strip(seen: Seen, begin: float, bucket_s: float, count: int, use: Signs) -> Text:
    """Steps per second as a strip of characters, one for each ``bucket_s`` seconds from ``begin``.

    Green: new steps. Yellow: steps computed anew after going back. A red sign: the fault; dots: no step, which is red
    between the first and the last.
    """
    new, again = _amounts(seen, begin, bucket_s, count)
    most = max([1e-9, *(a + b for a, b in zip(new, again, strict=True))])
    cut = int((seen.cut_at - begin) // bucket_s) if seen.cut_at is not None else -1
    ended = seen.steps[-1].at if seen.step >= seen.total else begin + bucket_s * count
    text = Text()
    for index in range(count):
        at = begin + bucket_s * index
        amount = new[index] + again[index]
        if index == cut:
            text.append(use.gone, "bold red")
        elif amount:
            level = round((len(use.levels) - 1) * amount / most)
            text.append(use.levels[level], "yellow" if again[index] > new[index] else "green")
        else:
            text.append(use.stopped, "red" if seen.steps and seen.steps[0].at < at < ended else "dim")
    return text


def _amounts(seen: Seen, begin: float, bucket_s: float, count: int) -> tuple[list[float], list[float]]:
    """How many steps each bucket holds, new ones and such that were computed before; a step is spread over its time."""
    new, again = [0.0] * count, [0.0] * count
    furthest = 0
    for step in seen.steps:
        took = max(step.took_s, 1e-3)
        first, last = (int((at - begin) // bucket_s) for at in (step.at - took, step.at))
        for index in range(max(first, 0), min(last + 1, count)):
            left = begin + index * bucket_s
            inside = min(step.at, left + bucket_s) - max(step.at - took, left)
            (again if step.step <= furthest else new)[index] += max(inside, 0.0) / took
        furthest = max(furthest, step.step)
    return new, again


def _nodes(seen: Seen, use: Signs) -> Padding:
    grid = Table.grid(expand=True)
    cells = [_node(node, seen, use) for node in sorted(seen.nodes, key=lambda node: str(node["name"]))]
    for _ in cells:
        grid.add_column(ratio=1)
    grid.add_row(*cells)
    return Padding(grid, 0)


def _node(node: Json, seen: Seen, use: Signs) -> Text:
    """One node: a sign, its name, what it is in the job, and whatever else is to be said of it."""
    name, job = str(node["name"]), seen.job
    slurm = str(node.get("state", "")).lower()
    host = (seen.detail.get("launcher") or {}).get("host")
    attempts = seen.detail.get("attempts") or [{}]
    training = list(job.get("nodes") or ())
    lost = name in (attempts[-1].get("barred") or ()) or name in ((seen.detail.get("launcher") or {}).get("lost") or ())
    sign, role, style = use.idle, "idle", "dim"
    if lost:
        sign, role, style = use.gone, "lost", "bold red"
    elif name in training:
        sign, role, style = use.rank, f"rank {training.index(name)}", "green"
    elif name in (job.get("spares") or ()):
        checking = job.get("state") == "checking"
        sign, role, style = use.spare, "in check" if checking else "spare", "cyan"
    more = "launcher" if name == host and not lost else ""
    if name == seen.cut:
        style, more = "bold red", "power cut"
    if node.get("owner") == "transom":
        more = "drained"
    elif "down" in slurm and name != seen.cut:
        more = "down in Slurm"
    return Text.assemble((f"{sign} {name}", style), "\n", (f"  {role}", style), "\n", (f"  {more}", "dim"))
