"""An existing sbatch file as a job's program."""

from __future__ import annotations

from pathlib import Path

import pytest

from transomd.errors import SpecError
from transomd.spec import load_job

SCRIPT = """#!/bin/bash
#SBATCH --job-name=old -N 3
#SBATCH --time=1:00:00 --mem=3G
#SBATCH --requeue --output=x.log
srun ./a
#SBATCH --partition=too-late
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "t.sbatch").write_text(SCRIPT)
    return tmp_path


def test_its_lines_become_fields_and_options(folder: Path) -> None:
    spec = load_job("script: t.sbatch\n", cwd=folder)
    assert (spec.name, spec.nodes, spec.time_limit, spec.partition) == ("old", 3, "1:00:00", "")
    assert spec.sbatch == ("--mem=3G",)
    assert spec.resolve(folder).script == f"{folder}/t.sbatch"


def test_job_yaml_wins(folder: Path) -> None:
    spec = load_job("script: t.sbatch\nname: new\nnodes: 2\nsbatch: [--mem=4G]\n", cwd=folder)
    assert (spec.name, spec.nodes, spec.sbatch) == ("new", 2, ("--mem=3G", "--mem=4G"))


def test_a_value_that_no_job_can_have_is_blamed_on_the_script(folder: Path) -> None:
    path = folder / "r.sbatch"
    path.write_text("#!/bin/sh\n#SBATCH -N 2-4 -J x --array=1-3\n")
    with pytest.raises(SpecError) as caught:
        load_job("script: r.sbatch\nspares: -1\n", cwd=folder)
    assert f"{path}: #SBATCH --array=1-3: one transom job is one plain Slurm job" in caught.value.faults
    assert "job.yaml:2: spares: must be at least 0, got -1" in caught.value.faults
    path.write_text("#!/bin/sh\n#SBATCH -N 2-4 -J x\n")
    with pytest.raises(SpecError) as caught:
        load_job("script: r.sbatch\n", cwd=folder)
    assert caught.value.faults == (f"{path}: #SBATCH: nodes: must be a whole number, got '2-4'",)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "the script cannot be read: No such file or directory"),
        (b"echo hi\n", "is no batch script: its first line must begin with #!"),
        (b"#!/bin/sh\n\x00\n", "holds a NUL character"),
        (b"#!/bin/sh\n#SBATCH --comment='a\n", "line 2: unclosed"),
        (b"#!/bin/sh\n" + b"#" * (4 << 20), "is larger than 4 MiB"),
    ],
)
def test_what_is_no_script(tmp_path: Path, content: bytes | None, expected: str) -> None:
    if content is not None:
        (tmp_path / "s").write_bytes(content)
    with pytest.raises(SpecError) as caught:
        load_job("name: a\nnodes: 1\nscript: s\n", cwd=tmp_path)
    (told,) = caught.value.faults
    assert told.startswith(f"{tmp_path}/s: ")
    assert expected in told


def test_a_script_starts_its_program_itself(folder: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_job("script: t.sbatch\nlauncher: torchrun\n", cwd=folder)
    assert caught.value.faults == (
        "job.yaml:2: launcher: must be srun for a `script`, which starts its program itself",
    )


def test_a_command_beside_a_script_is_one_too_many(folder: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_job("command: ./a\nscript: t.sbatch\n", cwd=folder)
    assert caught.value.faults == ("job.yaml:2: script: is given beside `command`; keep one",)
