"""YAML read for a schema: every scalar stays the text that was written, and every key has its line.

YAML's own guesses are not used (``12:00:00`` as a number in base 60, ``no`` as false, ``010`` as eight); the schema
knows what a field is. Nothing is ever constructed from a tag.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]

MAX_NODES = 20_000
"""Values in one document, aliases counted as often as they are used: a few lines can name billions."""

_NULLS = ("", "~", "null", "Null", "NULL")
_PLAIN_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


@dataclass(frozen=True)
class Fault:
    """Something wrong at a line (1-based; 0 when no line can be named)."""

    line: int
    field: str
    message: str

    def text(self, label: str) -> str:
        """Return ``label:line: field: message`` without the parts that are not known."""
        where = f"{label}:{self.line}" if self.line else label
        return f"{where}: {self.field}: {self.message}" if self.field else f"{where}: {self.message}"


@dataclass
class Document:
    """The values of a document, the line of each key, and what was already found wrong."""

    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[Path, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    size: int = 0

    def line(self, path: Path) -> int:
        """Return the line of ``path``, or of the nearest thing around it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return 1 if self.lines else 0


def read_yaml(text: str) -> Document:
    """Read one YAML mapping. Never raises for what the text holds: see ``faults``."""
    document = Document()
    try:
        root = yaml.compose(text, Loader=_TextLoader)
        if root is not None:
            document.values = _root(root, document)
    except yaml.YAMLError as error:
        document.faults.append(_syntax_fault(error))
    except RecursionError:
        document.faults.append(Fault(1, "", "is nested too deeply to be a job"))
    except _TooLarge:
        document.faults.append(Fault(1, "", f"holds more than {MAX_NODES} values"))
    return document


class _TooLarge(Exception):
    pass


class _TextLoader(yaml.SafeLoader):
    """A loader that takes every plain scalar for text."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (as the base class has it)


def _root(node: yaml.Node, document: Document) -> dict[str, Any]:
    if not isinstance(node, yaml.MappingNode):
        document.faults.append(Fault(node.start_mark.line + 1, "", "must be a mapping of fields such as `name: demo`"))
        return {}
    return _mapping(node, (), document)


def _value(node: yaml.Node, path: Path, document: Document) -> Any:
    document.size += 1
    if document.size > MAX_NODES:
        raise _TooLarge
    if node.tag not in _PLAIN_TAGS:
        message = f"has the tag {node.tag!r}; plain values only"
        document.faults.append(Fault(node.start_mark.line + 1, dotted(path), message))
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, document)
    if isinstance(node, yaml.SequenceNode):
        return _sequence(node, path, document)
    if isinstance(node, yaml.ScalarNode) and node.style is None and node.value in _NULLS:
        return None
    return node.value


def _sequence(node: yaml.SequenceNode, path: Path, document: Document) -> list[Any]:
    items = []
    for index, item in enumerate(node.value):
        place = (*path, index)
        document.lines[place] = item.start_mark.line + 1
        items.append(_value(item, place, document))
    return items


def _mapping(node: yaml.MappingNode, path: Path, document: Document) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            document.faults.append(Fault(line, dotted(path), "a field's name must be one word"))
            continue
        key = (*path, key_node.value)
        if key_node.value in values:
            message = f"is written twice (also in line {document.lines[key]}); keep one"
            document.faults.append(Fault(line, dotted(key), message))
            continue
        document.lines[key] = line
        values[key_node.value] = _value(value_node, key, document)
    # An empty field counts as not written, so that its default holds or its absence is told.
    return {key: value for key, value in values.items() if value is not None}


def _syntax_fault(error: yaml.YAMLError) -> Fault:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).splitlines()[0]
    where = f" (column {mark.column + 1})" if mark else ""
    return Fault(mark.line + 1 if mark else 0, "", f"is not YAML: {problem}{where}")


def dotted(path: Path) -> str:
    """Return a path as people write it: ``watch.stall_after``, ``sbatch[2]`` (counted from 1)."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part + 1}]"
        else:
            text += f".{part}" if text else part
    return text
