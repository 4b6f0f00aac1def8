"""What pydantic found wrong, told as sentences that name the field, the line, what is right and what was given."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel, ValidationError

from transomd.yamldoc import Fault, Path, dotted

_SHOWN = 60
_WANTED = {
    "int_": "must be a whole number",
    "float_": "must be a number",
    "bool_": "must be true or false",
    "string_": "must be text",
    "tuple_": "must be a list",
    "list_": "must be a list",
    "dict_": "must be a mapping such as `KEY: value`",
    "model_": "must be a mapping of fields",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "must be at least {}"),
    "greater_than": ("gt", "must be more than {}"),
    "less_than_equal": ("le", "must be at most {}"),
    "less_than": ("lt", "must be less than {}"),
}


def faults_of(error: ValidationError, model: type[BaseModel], line: Callable[[Path], int]) -> list[Fault]:
    """Return one fault for each thing that is wrong in what ``model`` was given."""
    return [_fault(item, model, line) for item in error.errors(include_url=False)]


def _fault(item: Any, model: type[BaseModel], line: Callable[[Path], int]) -> Fault:
    path: Path = tuple(part for part in item["loc"] if part != "[key]")
    if item["type"] == "extra_forbidden":
        message = f"is no field; {nearest(str(path[-1]), field_names(model, path[:-1]))}"
    else:
        message = _sentence(item)
    return Fault(line(path), dotted(path), message)


def _sentence(item: Any) -> str:
    kind, context = item["type"], item.get("ctx", {})
    if kind == "missing":
        return "is required"
    if kind == "value_error":
        return str(context["error"])
    got = f", got {shown(item['input'])}"
    if kind in ("literal_error", "enum"):
        return f"must be {context['expected']!s}{got}"
    if kind in _BOUNDS:
        name, form = _BOUNDS[kind]
        return form.format(context[name]) + got
    wanted = next((text for prefix, text in _WANTED.items() if kind.startswith(prefix)), None)
    return (wanted or str(item["msg"])) + got


def shown(value: object) -> str:
    """Return a value as it is quoted in a message: short, on one line, without control characters."""
    if isinstance(value, (dict, list, tuple)):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = repr(value) if isinstance(value, str) and not value.lstrip("-").isdigit() else str(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the question that helps with an unknown word: the nearest known one, else all of them."""
    names = {name.replace("-", "_"): name for name in sorted(known)}
    near = difflib.get_close_matches(word.lower().replace("-", "_"), names, n=1, cutoff=0.6)
    return f"did you mean `{names[near[0]]}`?" if near else f"known here: {', '.join(names.values())}"


def field_names(model: type[BaseModel], path: Path) -> tuple[str, ...]:
    """Return the fields of the model that ``path`` leads to within ``model``; none where it leads to no model."""
    for part in path:
        field = model.model_fields.get(str(part))
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return ()
        model = field.annotation
    return tuple(model.model_fields)
