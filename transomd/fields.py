"""The kinds of fields that job and settings files have, each with its check and the sentence that a person reads."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from transomd.faults import nearest
from transomd.forms import parse_size, seconds, time_limit_seconds
from transomd.health.profile import CHECKS

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORD = re.compile(r"[^\s\x00-\x1f\x7f-][^\s\x00-\x1f\x7f]*")
_OWNED_ENV = ("NNODES", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _name(value: str) -> str:
    if not NAME.fullmatch(value):
        raise ValueError(f"must be at most 64 letters, digits, `.`, `_` or `-`, got {value!r}")
    if value.isdigit():
        raise ValueError(f"must not be a number alone: {value} would be taken for a job's id")
    return value


def _word(value: str) -> str:
    if value and not _WORD.fullmatch(value):
        raise ValueError(f"must be one word that does not start with `-`, got {value!r}")
    return value


def _no_nul(value: str) -> str:
    if "\x00" in value:
        raise ValueError("must not hold a NUL character")
    return value


def _one_line(value: str) -> str:
    if any(ord(char) < 32 or ord(char) == 127 for char in value):
        raise ValueError(f"must be one line without control characters, got {value!r}")
    return value


def _lines(value: object) -> object:
    return tuple(value.splitlines()) if isinstance(value, str) else value


def _words(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _environment(value: dict[str, str]) -> dict[str, str]:
    faults = [fault for name in value if (fault := _name_fault(name))]
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise ValueError("; ".join(faults[:5]) + more)
    return value


def _name_fault(name: str) -> str:
    if not _ENV_NAME.fullmatch(name):
        return f"{name!r} is no name of an environment variable"
    if name in _OWNED_ENV or name.startswith("TRANSOM_"):
        return f"{name} is set by transom for every launch and cannot be given"
    return ""


def _pattern(value: str) -> str:
    try:
        groups = re.compile(value).groups
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    if value and not groups:
        raise ValueError("must hold a group for the step's number, such as `step (\\d+)`")
    return value


def _time_limit(value: str) -> str:
    if value:
        time_limit_seconds(value)
    return value


def _rate(value: object) -> object:
    size = parse_size(value) if isinstance(value, str) else value
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"must be a number of bytes per second such as 500M, got {value!r}")
    return size


def _every(value: object) -> object:
    if isinstance(value, str):
        if value.isascii() and value.isdigit():
            value = int(value)
        else:
            seconds(value)
    if isinstance(value, int) and value < 1:
        raise ValueError(f"must be a number of steps of at least 1, or a duration, got {value}")
    return value


def _steps(value: object) -> object:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"must be a number of steps of at least 1, got {value!r}")
    return value


def _steps_or_auto(value: object) -> object:
    try:
        return value if value == "auto" else _steps(value)
    except ValueError:
        raise ValueError(f"must be a number of steps of at least 1, or `auto`, got {value!r}") from None


def _longer_than_nothing(value: float) -> float:
    if value <= 0:
        raise ValueError("must be longer than nothing")
    return value


def _check(value: str) -> str:
    if value not in CHECKS:
        raise ValueError(f"{value!r} is no check; {nearest(value, CHECKS)}")
    return value


Name = Annotated[str, AfterValidator(_name)]
Word = Annotated[str, AfterValidator(_word)]
Text = Annotated[str, AfterValidator(_no_nul)]
Line = Annotated[str, AfterValidator(_one_line)]
Lines = Annotated[tuple[Text, ...], BeforeValidator(_lines)]
Check = Annotated[str, AfterValidator(_check)]
Checks = Annotated[tuple[Check, ...], BeforeValidator(_words)]
Options = Annotated[tuple[str, ...], BeforeValidator(_words)]
Environment = Annotated[dict[str, Text], AfterValidator(_environment)]
Pattern = Annotated[str, AfterValidator(_pattern)]
TimeLimit = Annotated[str, AfterValidator(_time_limit)]
Every = Annotated[str | int | None, BeforeValidator(_every)]
Steps = Annotated[int | None, BeforeValidator(_steps)]
StepsOrAuto = Annotated[int | Literal["auto"] | None, BeforeValidator(_steps_or_auto)]
Rate = Annotated[int, BeforeValidator(_rate)]
Duration = Annotated[float, BeforeValidator(seconds)]
PositiveDuration = Annotated[float, BeforeValidator(seconds), AfterValidator(_longer_than_nothing)]


class Part(BaseModel):
    """What the parts of a job or settings file have in common: immutable, and unknown fields are faults."""

    model_config = ConfigDict(frozen=True, extra="forbid")
