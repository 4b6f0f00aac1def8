"""Epoch claims: of several starts of one program, only the newest may complete checkpoints.

A claim is a file ``epoch-000003.claim`` in the checkpoint directory. Epochs only grow. A start that is still
running somewhere, on a node that was thought dead, finds the newer claim and stops writing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from pathlib import Path

from transomd.tce.errors import CheckpointError, FencedError
from transomd.tce.files import link_file, remove_files
from transomd.tce.manifest import parse_step_folder

_CLAIM = re.compile(r"epoch-(\d+)\.claim")


def newest_epoch(directory: str | os.PathLike[str]) -> int | None:
    """The newest epoch that was claimed or that wrote something in ``directory``; None if there is none."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return None
    folders = (parse_step_folder(name) for name in names)
    epochs = [*_claims(names).values(), *(folder[1] for folder in folders if folder)]
    return max(epochs, default=None)


def claim_epoch(directory: Path, epoch: int, token: str = "") -> None:
    """Claim ``epoch``; OSError if the claim cannot be written.

    CheckpointError if a newer one is claimed, or this one with another ``token`` ('': whoever has the epoch may).
    """
    check_epoch(directory, epoch)
    path = _claim_path(directory, epoch)
    if path.exists() or not link_file(path, _claim_text(epoch, token)):
        _check_token(path, epoch, token)
        return
    with contextlib.suppress(OSError):
        claims = _claims(os.listdir(directory))
        remove_files(directory / name for name, claimed in claims.items() if claimed < epoch)


def check_epoch(directory: Path, epoch: int) -> None:
    """CheckpointError if an epoch newer than ``epoch`` is known in ``directory``."""
    newest = newest_epoch(directory)
    if newest is not None and newest > epoch:
        raise FencedError(
            f"{directory}: epoch {epoch} is fenced: epoch {newest} has started since, so this process must not write",
            hint="end this process; to start the program anew, give it an epoch above "
            f"{newest} (transom does that by itself) or another directory",
        )


def _claim_path(directory: Path, epoch: int) -> Path:
    return directory / f"epoch-{epoch:06d}.claim"


def _claim_text(epoch: int, token: str) -> bytes:
    claim = {"epoch": epoch, "token": token, "host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
    return json.dumps(claim).encode() + b"\n"


def _check_token(path: Path, epoch: int, token: str) -> None:
    try:
        claimed = json.loads(path.read_bytes())
        owner = f"process {claimed['pid']} on {claimed['host']}"
        same = claimed["token"] == token
    except (ValueError, KeyError, TypeError):
        owner, same = "something that left no readable claim", False
    if not same:
        raise CheckpointError(
            f"{path.parent}: epoch {epoch} was taken by {owner}: two programs write into one directory",
            hint="give each program a directory of its own",
        )


def _claims(names: list[str]) -> dict[str, int]:
    matches = ((name, _CLAIM.fullmatch(name)) for name in names)
    return {name: int(match[1]) for name, match in matches if match}
