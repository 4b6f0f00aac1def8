"""``transom ckpt export`` and ``import``."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from transom_cli.commands.ckpt_bar import ByteBar, writing
from transom_cli.commands.ckpt_find import as_json_option, epoch_option, one_of, place, step_word, whole
from transom_cli.text import plain
from transomd.errors import NotFoundError, RefusedError, TransomError, UsageError
from transomd.words import ExitCode

FORMATS = ("dcp", "safetensors", "torch")


@click.command("export", short_help="Write one as a DCP, safetensors or torch.save file.")
@place
@click.argument("step", callback=step_word)
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--to", required=True, type=click.Choice(FORMATS), help="The format to write.")
@click.option("--key", default="", metavar="KEY", help="Only what is under this key of the state.")
@click.option(
    "--rank", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="Whose own keys to take."
)
@epoch_option
@as_json_option
def export_command(
    where: str, step: int, out: Path, to: str, key: str, rank: int, epoch: int | None, as_json: bool
) -> int:
    """Write a checkpoint as files that need no transom. Every byte is verified on the way; OUT must not exist.

    \b
    dcp          a directory for torch.distributed.checkpoint
    safetensors  one file of tensors; other values are left out, and named
    torch        one file for torch.load(weights_only=True)

    Keys that the ranks had each for itself are taken from one rank. torch must
    be installed where this runs, and the state must fit into memory.

    \b
    Examples:
      transom ckpt export demo newest --to dcp ./demo-dcp
      transom ckpt export demo 400 --key model --to safetensors model.safetensors
    """
    item = whole(one_of(where, step, epoch), where)
    portable = _portable()
    portable.check_new(out)
    with ByteBar(f"reading step {item.step}", item.bytes) as bar:
        gathered = portable.gather(item.path, rank=rank, on_read=bar.advance)
    state = _under(gathered.state, key, where)
    with writing(f"writing {out.name}", portable.state_bytes(state)):
        lacking = portable.export(state, out, to)
    own = [k for k in gathered.of_one_rank if key in ("", k)]
    if as_json:
        about = {"step": item.step, "epoch": item.epoch, "path": str(out), "format": to, "rank": rank}
        print(json.dumps({**about, "of_one_rank": own, "left_out": lacking}, indent=2))
        return ExitCode.OK
    print(f"step {item.step} of epoch {item.epoch} is in {plain(out)}")
    _note(f"of rank {rank} alone, as each rank had its own", own)
    _note("left out, as a safetensors file holds tensors only", folded(lacking))
    return ExitCode.OK


@click.command("import", short_help="Make one from such files.")
@click.argument("source", metavar="SOURCE", type=click.Path(path_type=Path))
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="The step it is of.")
@click.option("--key", default="", metavar="KEY", help="Put it under this key, as the program's state has it.")
@as_json_option
def import_command(source: Path, directory: Path, step: int, key: str, as_json: bool) -> int:
    """Make a complete, verified checkpoint in DIR, for any number of ranks, from the files of others.

    SOURCE is a directory that torch.distributed.checkpoint wrote, a
    .safetensors file, or a file of torch.save. Nothing is unpickled that could
    run code: a file that needs it is refused, and what it names is told. DIR
    must be new: a job that starts with it resumes from the import.

    \b
    Examples:
      transom ckpt import model.safetensors ./start --key model
      transom ckpt import ./dcp/step-400 ./start --step 400
    """
    bytes_ = _source_bytes(source)
    portable = _portable()
    # What the engine logs is told by its error, too.
    logging.getLogger("transom.tce").addHandler(logging.NullHandler())
    with writing(f"importing {source.name}", bytes_):
        folder = portable.bring_in(source, directory, step=step, key=key)
    if as_json:
        print(json.dumps({"step": step, "path": str(folder)}, indent=2))
    else:
        print(f"step {step} is complete and verified in {plain(folder)}")
    return ExitCode.OK


def _source_bytes(source: Path) -> int:
    """The size of a file, or of all files in a folder. Raises NotFoundError, RefusedError."""
    try:
        files = [source, *source.iterdir()] if source.is_dir() else [source]
        return sum(file.stat().st_size for file in files)
    except FileNotFoundError:
        raise NotFoundError(f"importing {source}: there is no such file", hint=f"ls -la {source.parent}") from None
    except PermissionError:
        raise RefusedError(f"importing {source}: permission denied", hint=f"ls -ld {source}") from None


def _portable() -> Any:
    """The module that does the work; it needs torch, which a login node may not have."""
    try:
        from transomd.tce import portable
    except ImportError as error:
        raise TransomError(
            f"loading torch: {error}", hint="run this where the training program runs, or pip install 'transom[torch]'"
        ) from error
    return portable


def _under(state: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    if not key:
        return state
    if key not in state:
        raise NotFoundError(
            f"exporting {key}: the state holds {', '.join(sorted(state))}", hint=f"transom ckpt show {where}"
        )
    inner = state[key]
    if not isinstance(inner, dict):
        raise UsageError(f"exporting {key}: it is a {type(inner).__name__}, not a dict", hint="leave --key out")
    return inner


def folded(paths: Sequence[str]) -> list[str]:
    """Return paths such as ``state['a']['b'][0]`` with those alike in their first two keys told once, and counted."""
    alike: dict[str, list[str]] = {}
    for path in paths:
        found = re.match(r"[^\[]*(?:\[[^\]]*\]){0,2}", path)
        alike.setdefault(found[0] if found else path, []).append(path)
    return [each[0] if len(each) == 1 else f"{start} ({len(each)} values)" for start, each in alike.items()]


def _note(what: str, names: Sequence[str]) -> None:
    if names:
        print(f"{what}: {plain(', '.join(names))}", file=sys.stderr)
