"""Builds the copy kernel into the wheel where there is a C compiler; without one the wheel is pure Python, and works.

A hook of hatchling's, for wheels and editable installs alike. CC names the compiler (else ``cc``).
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("transomd/tce/memory")
SOURCE, LIBRARY = FOLDER / "stream.c", FOLDER / "stream.x86_64.so"


class BuildHook(BuildHookInterface[Any]):
    """Compiles ``stream.c`` before the files of a wheel are gathered."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Put the library beside its source, and say for which machines the wheel is then."""
        root = Path(self.root)
        why_not = build(root / SOURCE, root / LIBRARY)
        if why_not:
            self.app.display_warning(
                f"transom is built without its copy kernel (copies take about 1.7 times as long): {why_not}"
            )
            return
        build_data["artifacts"].append(str(LIBRARY))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"


def build(source: Path, library: Path) -> str:
    """Compile; why not, if not. A library that is in use is never written over: the new one takes its name."""
    compiler = shlex.split(os.environ.get("CC", "cc")) or ["cc"]
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "it is for Linux on x86-64"
    if shutil.which(compiler[0]) is None:
        return "there is no C compiler"
    new = library.with_name(f"{library.name}.{os.getpid()}")
    command = [*compiler, "-O2", "-Wall", "-Werror", "-fPIC", "-shared", "-o", str(new), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        with contextlib.suppress(OSError):  # also where the checkout can only be read
            new.unlink()
        return f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}"
    new.rename(library)
    return ""
