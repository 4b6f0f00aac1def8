"""Text for a terminal: harmless, short, aligned, readable at 80 columns. All pure but for what asks the terminal."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence

import click

# Control characters, and those that reorder or hide text around them.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
_COLOURS = re.compile("\x1b\\[[0-9;]*m")
_ELLIPSIS = "…"
_NUMBERED = re.compile(r"([A-Za-z0-9._-]*[A-Za-z._-])([0-9]{1,9})")
_OWN = (
    r"submit|status|logs|events|cancel|ckpt|history|incident|diagnose|nodes|drain|undrain|hooks|check|doctor|pause"
    r"|resume-actions|completion|sandbox"
)
_PROGRAMS = (
    rf"transom (?:-|{_OWN})|transomd(?= --| db| >|[;,)]|$)|(?:srun|sbatch|squeue|sinfo|munge|journalctl|ls|python3?) -"
    r"|scontrol (?:show|update|ping|release|reconfigure)|scancel \d|sacctmgr show|systemctl |sudo |ssh |eval "
    r"|pip install|apt-get "
)
_WORDS = r"""(?:'[^']*'|"[^"]*"|[^;,'"]|,(?! ))*?"""
_END = r"(?=[;,)]? (?:or|and|then) |[;,)](?: |$)|$)"
_COMMAND = re.compile(rf"(?<![\w/])(?:{_PROGRAMS}){_WORDS}{_END}")
_GLUE = "\x00"
MANY = 64
"""Names from which it is no longer worth to look for a shape with several dimensions."""

STATE_STYLES: dict[str, dict[str, object]] = {
    "running": {"fg": "green"},
    "completed": {"fg": "green", "dim": True},
    "recovering": {"fg": "yellow"},
    "checking": {"fg": "cyan"},
    "queued": {"fg": "cyan"},
    "held": {"fg": "magenta", "bold": True},
    "failed": {"fg": "red", "bold": True},
}


def safe(value: object) -> str:
    """Return text in which nothing steers the terminal; lines and tabs stay. Job output and names are hostile input."""
    return _UNSAFE.sub(lambda found: found.group().encode("unicode_escape").decode(), str(value))


def plain(value: object) -> str:
    """Return text as :func:`safe` does, on one line."""
    return safe(value).replace("\n", " ").replace("\t", " ")


def log_line(text: str, *, terminal: bool) -> str:
    """Return a line of a log for output: unchanged into a file or pipe; on a terminal only its colours still act."""
    if not terminal:
        return text
    text = text.rpartition("\r")[2]
    reset = "\x1b[0m" if _COLOURS.search(text) else ""
    parts = _COLOURS.split(text)
    colours = [*_COLOURS.findall(text), ""]
    return "".join(safe(part) + colour for part, colour in zip(parts, colours, strict=True)) + reset


def clip(text: str, width: int) -> str:
    """Return ``text``, cut to ``width`` characters; 0 is no limit."""
    return text if not width or len(text) <= width else text[: max(width - 1, 0)] + _ELLIPSIS


def span(seconds: float) -> str:
    """Return a duration: ``0.4s``, ``42s``, ``3m12s``, ``2h05m``, ``3d04h``."""
    seconds = max(seconds, 0.0)
    if seconds < 9.95:
        return f"{seconds:.1f}s" if seconds % 1 else f"{seconds:.0f}s"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest}s"
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes}m{rest:02d}s"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours:02d}h" if days else f"{hours}h{minutes:02d}m"


def ago(then: object, now: float) -> str:
    """Return ``3m12s ago`` for a time in Unix seconds; ``-`` when there is none."""
    if not isinstance(then, (int, float)):
        return "-"
    return f"{span(round(now - then))} ago"


def size(count: float) -> str:
    """Return a number of bytes: ``812 B``, ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def hosts(names: Iterable[object]) -> str:
    """Return names folded into a host list; names that are none are listed as they are."""
    wanted = [plain(name) for name in names]
    quick = _numbered(wanted)
    if quick is not None:
        return quick
    from transom_slurm.nodesets import HostlistError, fold

    try:
        return fold(wanted)
    except HostlistError:
        return ",".join(wanted)


def _numbered(names: Sequence[str]) -> str | None:
    """Fold names of one prefix and a number, the usual case, without ClusterShell, which takes its time.

    Many names of several prefixes are folded by prefix. None: ClusterShell must do it.
    """
    numbers: dict[str, set[str]] = {}
    for name in names:
        found = _NUMBERED.fullmatch(name)
        if found is None:
            return None
        numbers.setdefault(found.group(1), set()).add(found.group(2))
    if len(numbers) > 1 and len(names) < MANY:
        return None
    parts = [_ranges(prefix, numbers[prefix]) for prefix in sorted(numbers)]
    return None if None in parts else ",".join(str(part) for part in parts)


def _ranges(prefix: str, digits: set[str]) -> str | None:
    """Fold the numbers of a prefix; None where padded and other numbers are mixed."""
    if len({len(text) for text in digits}) > 1 and any(text[0] == "0" and len(text) > 1 for text in digits):
        return None
    if len(digits) == 1:
        return prefix + next(iter(digits))
    runs: list[list[str]] = []
    for text in sorted(digits, key=int):
        if runs and int(text) == int(runs[-1][-1]) + 1:
            runs[-1].append(text)
        else:
            runs.append([text])
    return f"{prefix}[{','.join(run[0] if len(run) == 1 else f'{run[0]}-{run[-1]}' for run in runs)}]"


def width() -> int:
    """Return the columns to keep within: the terminal's, ``$COLUMNS`` anywhere else, 0 (no limit) without either."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return shutil.get_terminal_size((80, 24)).columns
    return 0


def paint(text: str, state: str) -> str:
    """Return ``text`` in the colour of a state, on a terminal that may show colours (https://no-color.org)."""
    style = STATE_STYLES.get(state)
    if not style or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return click.style(text, **style)  # type: ignore[arg-type]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], limits: Sequence[int], columns: int) -> list[str]:
    """Return aligned lines: each column is as wide as it must be and at most its limit; the last takes what is left."""
    rows = [[plain(cell) for cell in row] for row in rows]
    widths = [
        min(limit or len(title), max([len(title), *(len(row[n]) for row in rows)]))
        for n, (title, limit) in enumerate(zip(header, limits, strict=True))
    ][:-1]
    left = max(columns - sum(widths) - 2 * len(widths), 10) if columns else 0
    return [
        "  ".join(
            [*(clip(cell, w).ljust(w) for cell, w in zip(row[:-1], widths, strict=True)), clip(row[-1], left)]
        ).rstrip()
        for row in [list(header), *rows]
    ]


def wrapped(text: str, columns: int, *, indent: str = "  ", whole: bool = False) -> list[str]:
    """Return the lines of ``text``, indented, none longer than ``columns`` (0: as they are), broken between words.

    A command in it is broken only where it takes more than half a line. ``whole``: neither a command nor a word is
    ever broken, so that it can be copied, and what follows a break is indented further.
    """
    room, further = columns - len(indent) if columns else 0, "  " if whole else ""
    lines: list[str] = []
    for line in _glued(safe(text).expandtabs(4), longest=None if whole else room // 2).splitlines():
        hang = ""
        while room and (cut := _cut(line, room - len(hang), whole=whole)):
            lines.append(indent + hang + line[:cut].rstrip())
            line, hang = line[cut:].lstrip(), further
        lines.append(indent + hang + line)
    return [line.replace(_GLUE, " ") for line in lines]


def _cut(line: str, room: int, *, whole: bool) -> int:
    """Return where to break a line that is too long; 0: nowhere."""
    if len(line) <= room:
        return 0
    first = len(line) - len(line.lstrip(" ")) + 1
    cut = line.rfind(" ", first if whole else room // 2, room + 1)
    if cut < 0:
        cut = line.find(" ", max(room, first)) if whole else room
    return max(cut, 0)


def _glued(text: str, *, longest: int | None) -> str:
    """Return ``text`` with other blanks in its commands, so that nothing breaks them there."""

    def glue(found: re.Match[str]) -> str:
        command = found.group()
        return command if longest is not None and len(command) > longest else command.replace(" ", _GLUE)

    return _COMMAND.sub(glue, text)
