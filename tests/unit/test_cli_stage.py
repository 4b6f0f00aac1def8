"""The run folder: whole or not there, its owner's alone, and no place for somebody else's tricks."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from transomd.errors import UsageError
from transomd.launch import stage as staging
from transomd.launch.stage import kept_environment, path_faults, stage, unstage
from transomd.spec import JobSpec, load_job

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another user")


def a_spec(workdir: Path, more: str = "") -> JobSpec:
    return load_job(f"name: demo\nnodes: 1\ncommand: true\n{more}", cwd=workdir).resolve(workdir)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_what_a_run_folder_holds(tmp_path: Path) -> None:
    spec = a_spec(tmp_path)
    staged = stage(spec, {"HOME": "/h", "SLURM_JOB_ID": "1", "SBATCH_X": "1", "TRANSOM_EPOCH": "3", "B": "\udc80"})
    assert staged.run_dir.parent == tmp_path / ".transom"
    assert staged.run_dir.name.startswith("demo-")
    assert json.loads((staged.run_dir / "env.json").read_text()) == {"HOME": "/h", "B": "\udc80"}
    assert JobSpec.from_stored(json.loads((staged.run_dir / "spec.json").read_text())) == spec
    assert (staged.run_dir / "token").read_text() == staged.token
    assert len(staged.token) >= 40
    assert {path.name for path in staged.run_dir.iterdir()} == {"env.json", "spec.json", "token", "logs"}
    assert mode(staged.run_dir) == mode(staged.run_dir.parent) == mode(staged.run_dir / "logs") == 0o700
    assert {mode(staged.run_dir / name) for name in ("env.json", "spec.json", "token")} == {0o600}
    assert staged.token not in repr(staged)


def test_two_jobs_of_one_name_have_folders_of_their_own(tmp_path: Path) -> None:
    first, second = stage(a_spec(tmp_path), {}), stage(a_spec(tmp_path), {})
    assert first.run_dir != second.run_dir
    assert first.token != second.token


def test_a_script_is_kept_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "s.sh").write_text("#!/bin/sh\necho one\n")
    spec = load_job("name: demo\nnodes: 1\nscript: s.sh\n", cwd=tmp_path).resolve(tmp_path)
    staged = stage(spec, {})
    (tmp_path / "s.sh").write_text("#!/bin/sh\necho two\n")
    assert (staged.run_dir / "script").read_text() == "#!/bin/sh\necho one\n"
    assert mode(staged.run_dir / "script") == 0o700
    (tmp_path / "s.sh").unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        stage(spec, {})


def test_unstage_leaves_nothing(tmp_path: Path) -> None:
    staged = stage(a_spec(tmp_path), {})
    unstage(staged)
    assert list((tmp_path / ".transom").iterdir()) == []


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / ".transom").symlink_to(elsewhere)
    with pytest.raises(UsageError, match="a link, which is not followed"):
        stage(a_spec(tmp_path / "w"), {})
    assert list(elsewhere.iterdir()) == []


def test_a_folder_that_others_may_write_in_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".transom").mkdir()
    (tmp_path / ".transom").chmod(0o777)
    with pytest.raises(UsageError, match="others may write in it"):
        stage(a_spec(tmp_path), {})


@as_root
def test_another_users_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".transom").mkdir(mode=0o700)
    os.chown(tmp_path / ".transom", 12345, 12345)
    with pytest.raises(UsageError, match="belongs to another user") as caught:
        stage(a_spec(tmp_path), {})
    assert "`workdir` of its own" in caught.value.hint


def test_nothing_is_left_when_a_file_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, write, written = a_spec(tmp_path), staging._write, []

    def full(folder: int, name: str, data: bytes) -> None:
        if written:
            raise OSError(28, "No space left on device")
        written.append(name)
        write(folder, name, data)

    monkeypatch.setattr(staging, "_write", full)
    with pytest.raises(UsageError, match="No space left on device") as caught:
        stage(spec, {})
    assert "df " in caught.value.hint
    assert list((tmp_path / ".transom").iterdir()) == []


def test_a_workdir_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory"):
        stage(a_spec(tmp_path / "gone"), {})


def test_slurms_variables_describe_another_job() -> None:
    assert kept_environment({"SLURM_CPU_BIND": "x", "SRUN_DEBUG": "1", "PATH": "/bin", "NCCL_DEBUG": "INFO"}) == {
        "PATH": "/bin",
        "NCCL_DEBUG": "INFO",
    }


def test_all_folders_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spec = a_spec(tmp_path / "gone", f"checkpoint: {{dir: {tmp_path}/file/ck}}\n")
    faults = path_faults(spec)
    assert [fault.split(":")[0] for fault in faults] == ["workdir", "checkpoint.dir"]
    assert "in the way and no folder" in faults[1]
    assert path_faults(a_spec(tmp_path)) == ()
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("folder", ["/proc/ck", "/sys/kernel/a/b", "{tmp}/link/ck"])
def test_the_kernels_own_folders_keep_no_checkpoints(tmp_path: Path, folder: str) -> None:
    (tmp_path / "link").symlink_to("/proc")
    (fault,) = path_faults(a_spec(tmp_path, f"checkpoint: {{dir: {folder.format(tmp=tmp_path)}}}\n"))
    assert fault.startswith("checkpoint.dir: ")
    assert "keeps no files" in fault


AS_NOBODY = """
import os, sys
from pathlib import Path
from transomd.launch.stage import path_faults
from transomd.spec import load_job
spec = load_job(f"name: a\\nnodes: 1\\ncommand: b\\ncheckpoint: {{dir: {sys.argv[2]}}}\\n").resolve(Path(sys.argv[1]))
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print("\\n".join(path_faults(spec)))
"""


@as_root
def test_an_unreadable_checkpoint_folder_is_told_as_the_user_finds_it() -> None:
    base = Path("/tmp") / f"transom-stage-{os.getpid()}"
    base.mkdir(mode=0o755)
    try:
        (base / "work").mkdir()
        os.chown(base / "work", 65534, 65534)
        (base / "ck").mkdir(mode=0o700)
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, base / "work", base / "ck"], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == (
            f"checkpoint.dir: you cannot read and write in {base}/ck; name another, or have it opened to you"
        )
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, base, base / "work"], capture_output=True, text=True, check=True
        )
        assert done.stdout.startswith(f"workdir: you cannot write in {base}")
    finally:
        shutil.rmtree(base)
