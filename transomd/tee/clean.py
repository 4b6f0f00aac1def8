"""Makes a raw line fit to be matched and shown: decoded, without escapes, without the printer's prefix, with its time.

Formats of prefixes and time stamps are those of torchrun, srun, pdsh, mpirun, ray, NCCL, glog, Python logging, syslog
and dmesg, as their own outputs show them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Container
from dataclasses import dataclass

MAX_LINE = 4096
"""Bytes of a line that are looked at."""

_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?<=>!]*[ -/]*[@-~]|\][^\x07\x1b]{0,2000}(?:\x07|\x1b\\)?|[@-Z\\^_=>78])")
_FRAME = re.compile(r"^\s*[│┃║|]\s(.*?)\s*[│┃║|]?\s*$")
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]")
_NOT_HOSTS = r"(?!python\d|pip\d|nvidia-|(?:gpu|cpu|cuda|nvme|mlx|eth|ib|md|sd[a-z]|rank|step|epoch|iter)\d{1,2}: )"
_HOST = _NOT_HOSTS + r"[a-z][a-z-]{0,30}\d[a-z0-9-]{0,40}(?:\.[a-z0-9.-]{1,80})?"
_PREFIXES = (
    re.compile(r"\[rank ?(?P<rank>\d{1,6})\]: ?(?:\[rank ?\d{1,6}\]: ?)?(?=\S|\s|$)"),
    re.compile(r"\[default(?P<local>\d{1,4})\]: ?"),
    re.compile(r"\[\d+,(?P<rank>\d{1,6})\]<std(?:out|err)>: ?"),
    re.compile(r"\((?:\w+ )?(?:Worker )?rank=(?P<rank>\d{1,6})[ ,]+pid=\d+\) ?"),
    re.compile(r"\((?:\w+ )?(?:Actor )?pid=\d+(?:, ip=(?P<node>[\d.]{7,15}))?\) ?"),
    re.compile(r"\[(?P<node>[a-z][\w-]{0,60}):(?P<local>\d{1,3})\]: ?"),
    re.compile(r"(?P<node>\d{1,3}(?:\.\d{1,3}){3}): "),
    re.compile(rf"(?P<node>{_HOST}): "),
    re.compile(r"(?P<node>[a-z][\w.-]{0,60}):\d{1,8}:\d{1,8} (?=\[\d+\] )"),
    re.compile(r" {0,5}(?P<rank>\d{1,6}): ?(?=\S|\s{2}|$)"),
)
_SYSLOG = re.compile(
    r"(?:(?:<\d+>)?[A-Z][a-z]{2} {1,2}\d{1,2} \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT[\d:.]{8,15}[+-]\d\d:?\d\d)"
    r" (?P<node>[\w.-]{1,80}) (?:kernel|\S{1,40}\[\d+\]): "
)


@dataclass(frozen=True, slots=True)
class Printer:
    """Who printed a line, as far as its prefix says."""

    node: str = ""
    rank: int | None = None
    label: str = ""


NOBODY = Printer()


def decode(raw: bytes) -> str:
    """Return the text of at most ``MAX_LINE`` bytes with nothing in it that a terminal would act on."""
    text = raw[:MAX_LINE].decode("utf-8", "replace")
    if not text.isascii() or not text.isprintable():
        text = _UNSAFE.sub(" ", _ESCAPES.sub("", text).expandtabs(4))
        if framed := _FRAME.match(text):
            text = framed[1]
    return text.rstrip()


def split_prefix(text: str, hosts: Container[str] = ()) -> tuple[Printer, str]:
    """Take the printer's prefix off a line. Any of ``hosts``, the nodes of the job if known, may be one."""
    printer, rest = _one_prefix(text, hosts)
    if printer is NOBODY:
        return printer, rest
    second, after = _one_prefix(rest, hosts)
    if second is NOBODY:
        return printer, rest
    rank = second.rank if second.rank is not None else printer.rank
    return Printer(second.node or printer.node, rank, printer.label + second.label), after


def _one_prefix(text: str, hosts: Container[str]) -> tuple[Printer, str]:
    first, colon, rest = text.partition(": ")
    if colon and hosts and first in hosts:
        return Printer(node=first, label=first), rest
    for pattern in _PREFIXES:
        if match := pattern.match(text):
            groups = match.groupdict()
            rank = int(groups["rank"]) if groups.get("rank") else None
            return Printer(groups.get("node") or "", rank, match[0].strip()), text[match.end() :]
    if match := _SYSLOG.match(text):
        return Printer(node=match["node"], label=match["node"]), text[match.end() :]
    return NOBODY, text


_MONTH_NAMES = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_MONTHS = {name: number for number, name in enumerate(_MONTH_NAMES, 1)}
_ISO = re.compile(r"(20\d\d)[-/](\d\d)[-/](\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)?")
_GLOG = re.compile(r"(?:^|[\s\[:])[IWEF](\d{3,4}) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?")
_SYSLOG_TIME = re.compile(r"(?:^|[\s\[>])([A-Z][a-z]{2}) {1,2}(\d{1,2}) (\d\d):(\d\d):(\d\d)(?: (20\d\d))?")
_WHERE = 160


def find_time(text: str, *, now: float) -> float | None:
    """Return the time stamp near the start of a line as Unix seconds, or None.

    A stamp without zone is local time; one without year lies in the year before ``now``. The seconds since boot of a
    raw kernel log are no time.
    """
    head = text[:_WHERE]
    if match := _ISO.search(head):
        year, month, day, hour, minute, second = (int(part) for part in match.groups()[:6])
        return _seconds((year, month, day, hour, minute, second), match[7], match[8])
    if match := _GLOG.search(head):
        digits = match[1]
        return _yearless(int(digits[:-2]), int(digits[-2:]), (match[2], match[3], match[4]), match[5], now)
    if (match := _SYSLOG_TIME.search(head)) and match[1] in _MONTHS:
        return _yearless(_MONTHS[match[1]], int(match[2]), (match[3], match[4], match[5]), None, now, match[6])
    return None


def _yearless(
    month: int, day: int, clock: tuple[str, str, str], fraction: str | None, now: float, year: str | None = None
) -> float | None:
    hour, minute, second = (int(part) for part in clock)
    this_year = int(year) if year else time.localtime(now).tm_year
    found = _seconds((this_year, month, day, hour, minute, second), fraction, None)
    if found is not None and not year and found > now + 86400:
        return _seconds((this_year - 1, month, day, hour, minute, second), fraction, None)
    return found


def _seconds(parts: tuple[int, int, int, int, int, int], fraction: str | None, zone: str | None) -> float | None:
    year, month, day, hour, minute, second = parts
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60 and second < 61):
        return None
    extra = float(f"0.{fraction}") if fraction else 0.0
    days = _days(year, month, day)
    if zone is None:
        return time.mktime((year, month, day, hour, minute, second, 0, 0, -1)) + extra
    offset = 0 if zone == "Z" else (1 if zone[0] == "+" else -1) * (int(zone[1:3]) * 60 + int(zone[-2:])) * 60
    return days * 86400 + hour * 3600 + minute * 60 + second - offset + extra


def _days(year: int, month: int, day: int) -> int:
    """Days from 1970-01-01, with days beyond the end of a month running on into the next."""
    years = year - 1 if month <= 2 else year
    era_year = years % 400
    day_of_year = (153 * (month - 3 if month > 2 else month + 9) + 2) // 5 + day - 1
    return years // 400 * 146097 + era_year * 365 + era_year // 4 - era_year // 100 + day_of_year - 719468
