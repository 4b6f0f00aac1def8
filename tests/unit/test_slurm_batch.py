"""What users may pass to sbatch, what transom adds, and the exact text of a submission (tests/golden/slurm/batch)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from transom_slurm.batch import (
    BatchScriptError,
    check_user_options,
    job_options,
    owned_options,
    parse_sbatch_script,
    render_script,
    sbatch_argv,
    script_options,
)
from transom_slurm.options import parse_options
from transom_slurm.types import SubmitRequest

GOLDEN = Path(__file__).parents[1] / "golden" / "slurm" / "batch"
SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=4 --job-name "my run" # a comment
#SBATCH -p gpu   --time=2-00:00:00

  # an ordinary comment, and a blank line
#SBATCH --mail-user=a\\ b --comment='it''s' -C "a|b \\"c\\""
##SBATCH --qos=off
#SBATCH --gres=gpu:8
 #SBATCH --account=indented-is-a-comment
export X=1
#SBATCH --account=late
"""


@pytest.mark.parametrize("name", owned_options())
def test_every_owned_option_is_refused_with_a_reason(name: str) -> None:
    faults = check_user_options([f"--{name}=x"])
    assert len(faults) == 1
    assert faults[0].startswith(f"--{name}")


@pytest.mark.parametrize(
    "words",
    [
        ["-N", "2"], ["-N2"], ["--nodes", "2"], ["-HN2"], ["-k"], ["-s"], ["-J", "x"], ["-a1-9"], ["-W"], ["-o", "x"],
        ["-w", "n1"], ["-D/x"], ["--requeue"], ["--no-kill"], ["--exclusive=user"], ["--uid", "0"], ["-M", "other"],
        ["--container-image=docker://x"], ["--no-container-mount-home"],
    ],
)  # fmt: skip
def test_owned_options_in_every_spelling(words: list[str]) -> None:
    assert len(check_user_options(words)) == 1


def test_all_faults_are_told_at_once() -> None:
    faults = check_user_options(["--uid=0", "--mem=1G", "run.sh", "-y", ":", "--nice=-5", "--account"])
    assert faults == [
        "--uid=0: the job runs as its owner",
        "run.sh: no option of sbatch",
        "-y: sbatch has no option -y",
        ":: heterogeneous jobs are not supported: one transom job is one plain Slurm job",
        "--nice=-5: only an administrator may raise a job's priority",
        "--account: its value is missing",
    ]


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("--ui=0", "write the option out: --uid"),
        ("--exclu", "--exclude, --exclusive"),
        ("--exclude=n[1-", "bracket is not closed"),
        ("--exclude=./bad.txt", "not a file"),
        ("--contiguous=yes", "takes no value"),
        ("--mail-user=a\nb", "control character"),
    ],
)
def test_other_faults(word: str, text: str) -> None:
    assert text in check_user_options([word])[0]


@pytest.mark.parametrize(
    "words",
    [
        [], ["--mem=0", "-c", "8", "-C", "h100&ib"], ["--nice"], ["--nice=100"], ["-x", "n[1-3]"], ["--hold"], ["-HO"],
        ["--dependency=afterok:1"], ["--reservation", "r"], ["--new-in-2030=x"], ["-pgpu", "-t", "1-0", "--qos=high"],
    ],
)  # fmt: skip
def test_what_may_be_passed_on(words: list[str]) -> None:
    assert check_user_options(words) == []


def test_options_are_read_as_getopt_does() -> None:
    read = [(o.name, o.value) for o in parse_options(["-HN2", "-x", "n1", "--nice", "--mem=a=b", "--nodes", "3"])]
    assert read == [
        ("hold", None), ("nodes", "2"), ("exclude", "n1"), ("nice", None), ("mem", "a=b"), ("nodes", "3"),
    ]  # fmt: skip


def test_sbatch_lines_are_read_as_sbatch_does() -> None:
    assert parse_sbatch_script(SCRIPT) == (
        "--nodes=4", "--job-name", "my run", "-p", "gpu", "--time=2-00:00:00", "--mail-user=a b", "--comment=its",
        "-C", 'a|b "c"', "--gres=gpu:8",
    )  # fmt: skip


@pytest.mark.parametrize("line", ["#SBATCH --comment='open", "#SBATCH hetjob", "#SBATCH packjob"])
def test_lines_that_cannot_be_read_are_named(line: str) -> None:
    with pytest.raises(BatchScriptError, match="line 2: "):
        parse_sbatch_script(f"#!/bin/sh\n{line}\n")


def test_a_plain_script_is_sorted_into_fields_options_and_notes() -> None:
    found = script_options([*parse_sbatch_script(SCRIPT), "--requeue", "--array=1-3"])
    assert found.fields == {"nodes": "4", "name": "my run", "partition": "gpu", "time_limit": "2-00:00:00"}
    assert found.options == ("--mail-user=a b", '--constraint=a|b "c"', "--gres=gpu:8")
    assert [note.partition(":")[0] for note in found.replaced] == ["--comment=its", "--requeue"]
    assert found.faults == ("--array=1-3: one transom job is one plain Slurm job",)


def _request() -> SubmitRequest:
    options = job_options(
        nodes=4,
        spares=1,
        output="/home/alice/runs/12/100%/slurm.log",
        exclude=["n7", "n5", "n6"],
        partition="gpu",
        time_limit="2-00:00:00",
        gpus_per_node=8,
        user_options=["-x", "n9", "--mem", "0", "-C", "h100"],
    )
    command = [
        "/opt/transom/bin/python",
        "-m",
        "transomd.launch",
        "--folder",
        "/home/alice/my runs/12",
        "--say",
        "it's",
    ]
    script = render_script(
        command, title="transom: job 12, attempt 1", env={"TRANSOM_JOB_ID": "12", "TRANSOM_X": "a b"}
    )
    return SubmitRequest(script, options, "transom-12-1", "transom:12:1", "/home/alice/my runs/12")


def test_the_exact_submission() -> None:
    request = _request()
    assert request.script == (GOLDEN / "script.sh").read_text()
    assert "\n".join(sbatch_argv(request)) + "\n" == (GOLDEN / "argv.txt").read_text()


def test_the_script_becomes_the_command(tmp_path: Path) -> None:
    words = ["a b", "it's", "$HOME", "`id`", "x;y", "", "new\nline", '"']
    script = render_script(["printf", "%s|", *words], title="t", env={"A": "$(id) 'b'"})
    done = subprocess.run(["sh"], input=script, capture_output=True, text=True, check=True)
    assert done.stdout == "|".join([*words, ""])
    shown = render_script(["sh", "-c", 'printf %s "$A"; echo $$'], title="t", env={"A": "$(id) 'b'"})
    done = subprocess.run(["sh", "-c", "echo $$; exec sh -s"], input=shown, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1].startswith("$(id) 'b'")
    assert done.stdout.splitlines()[0] == done.stdout.splitlines()[1].removeprefix("$(id) 'b'"), "not exec'ed"


@pytest.mark.parametrize(
    ("command", "title", "env"), [([], "t", {}), (["x"], "t\nreboot", {}), (["x"], "t", {"A=b;reboot #": "x"})]
)
def test_no_line_can_be_slipped_in(command: list[str], title: str, env: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="not a batch script"):
        render_script(command, title=title, env=env)


def test_users_options_stand_before_transoms_own() -> None:
    words = job_options(nodes=2, output="/x", user_options=["--mem=0"])
    assert words.index("--mem=0") < words.index("--nodes=2")
    assert {"--no-requeue", "--no-kill", "--exclusive", "--open-mode=append", "--signal=B:TERM@120"} <= set(words)
