"""``transom ckpt``, and its list."""

from __future__ import annotations

import json
import time

import click

from transom_cli.commands.ckpt_find import as_json_option, described, folder_of, found_in, place
from transom_cli.commands.ckpt_gc import gc_command
from transom_cli.commands.ckpt_look import show_command, where_command
from transom_cli.commands.ckpt_move import export_command, import_command
from transom_cli.commands.ckpt_verify import verify_command
from transom_cli.text import ago, size, table, width
from transomd.words import ExitCode

HEADER = ("STEP", "EPOCH", "RANKS", "SIZE", "AGE", "STATE")
LIMITS = (12, 6, 6, 10, 12, 0)


@click.group()
def ckpt() -> None:
    """Look into checkpoints, check, move and remove them.

    \b
    They are those of a JOB (its id or name), or those in a folder DIR, which
    needs no daemon. STEP is a number, or newest: the newest complete one.

    \b
    Examples:
      transom ckpt list demo                 which ones there are
      transom ckpt show demo newest          what the newest one holds
      transom ckpt verify demo               read every byte of all of them
      transom ckpt export demo newest --to torch out.pt
      transom ckpt gc demo --dry-run         what would be removed
    """


@ckpt.command("list", short_help="Which checkpoints there are, newest first.")
@place
@as_json_option
def list_command(where: str, as_json: bool) -> int:
    """List checkpoints, newest first: whole ones and what is left of others. Sizes are looked at, bytes are not read.

    \b
    Examples:
      transom ckpt list demo
      transom ckpt list ./checkpoints/demo
    """
    folder = folder_of(where)
    found = found_in(folder)
    if as_json:
        print(json.dumps({"directory": str(folder), "checkpoints": [described(item) for item in found]}, indent=2))
        return ExitCode.OK
    now = time.time()
    rows = [
        (
            *(str(c.step), str(c.epoch), str(c.ranks or "-"), size(c.bytes), ago(c.created or None, now)),
            "complete" if c.complete else c.problem or "incomplete",
        )
        for c in found
    ]
    print("\n".join(table(HEADER, rows, LIMITS, width())))
    return ExitCode.OK


for command in (show_command, where_command, verify_command, export_command, import_command, gc_command):
    ckpt.add_command(command)
