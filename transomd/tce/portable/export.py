"""Writing a gathered checkpoint as others read it: whole and durable beside its name, then renamed to it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from transomd.tce.errors import CheckpointError, storage_error
from transomd.tce.files import make_folder, sync_folder
from transomd.tce.layout import path_text
from transomd.tce.portable.nest import leaves

FORMATS = ("dcp", "safetensors", "torch")


def export(state: Mapping[str, Any], out: Path, to: str) -> list[str]:
    """Write ``state`` at ``out`` as one of ``FORMATS``; returns the paths of what that format cannot hold.

    CheckpointError if ``out`` is there already, the state does not fit the format, or the disk refuses.
    """
    check_new(out)
    write, lacking = _WRITERS[to](state)
    beside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        make_folder(out.parent)
        _check_room(out.parent, state_bytes(state))
        write(beside)
        _sync(beside)
        os.rename(beside, out)
        sync_folder(out.parent)
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        raise _told(out, error, state_bytes(state)) from error
    finally:
        _remove(beside)
    return lacking


def check_new(out: Path) -> None:
    """Raise CheckpointError if there is something at ``out``."""
    if os.path.lexists(out):
        raise CheckpointError(
            f"exporting to {out}: it is there already, and is not written over", hint="choose another name"
        )


def state_bytes(state: Mapping[str, Any]) -> int:
    """The bytes of all tensors in ``state``."""
    return sum(value.nbytes for _, value in leaves(state, ()) if isinstance(value, torch.Tensor))


def _check_room(folder: Path, needed: int) -> None:
    """OSError if the file system is too small: the libraries would tell of it in words of their own."""
    found = os.statvfs(folder)
    if found.f_bavail * found.f_frsize < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _told(out: Path, error: BaseException, needed: int) -> BaseException:
    """Say what the file system refused, whatever a library made of it."""
    cause: BaseException | None = error
    if isinstance(error, CheckpointException):
        cause = next((failure[0] for failure in error.failures.values()), None)
    while cause is not None and not isinstance(cause, (OSError, KeyboardInterrupt)):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, OSError):
        return storage_error(f"exporting to {out}", cause, out.parent, needed)
    # DCP makes an error of Ctrl-C.
    return cause or CheckpointError(f"exporting to {out}: {error}", hint=f"df {out.parent}")


Plan = tuple[Callable[[Path], object], list[str]]


def _torch(state: Mapping[str, Any]) -> Plan:
    def write(path: Path) -> None:
        # Given a path, torch would say nothing of what the file system refused.
        with open(path, "wb") as file:
            torch.save(dict(state), file)

    return write, []


def _dcp(state: Mapping[str, Any]) -> Plan:
    def write(path: Path) -> None:
        with warnings.catch_warnings():
            # It says that there is one process, which is so.
            warnings.filterwarnings("ignore", message="torch.distributed is")
            dcp_save(dict(state), storage_writer=FileSystemWriter(path))

    return write, []


def _safetensors(state: Mapping[str, Any]) -> Plan:
    tensors: dict[str, torch.Tensor] = {}
    lacking: list[str] = []
    seen: set[int] = set()
    for path, value in leaves(state, ()):
        name = ".".join(str(key) for key in path)
        if not isinstance(value, torch.Tensor):
            lacking.append(path_text(path))
        elif name in tensors:
            raise CheckpointError(f"two tensors would be named {name} in a safetensors file", hint="export --to torch")
        else:
            # The format has no tied tensors: each name gets bytes of its own.
            tensors[name] = value.clone() if value.data_ptr() in seen else value.contiguous()
            seen.add(value.data_ptr())
    if not tensors:
        raise CheckpointError("there is no tensor to export", hint="export --to torch")

    def write(path: Path) -> None:
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"a safetensors file cannot hold this: {error}", hint="export --to torch") from error
        # The library makes its file for the owner alone.
        os.chmod(path, 0o666 & ~_umask())

    return write, lacking


_WRITERS: Mapping[str, Callable[[Mapping[str, Any]], Plan]] = {
    "dcp": _dcp,
    "safetensors": _safetensors,
    "torch": _torch,
}


def _sync(path: Path) -> None:
    """Make a file, or all files of a folder and their names, durable."""
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
    if path.is_dir():
        sync_folder(path)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink()
