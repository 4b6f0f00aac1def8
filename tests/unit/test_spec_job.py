"""job.yaml: what suffices, what is refused and how it is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from transomd.errors import NotFoundError, SpecError, UsageError
from transomd.spec import JobSpec, load_job

LEAST = "name: demo\nnodes: 4\ncommand: python train.py\n"


def faults(text: str, **options: tuple[str, ...]) -> tuple[str, ...]:
    with pytest.raises(SpecError) as caught:
        load_job(text, **options)
    return caught.value.faults


def test_name_command_and_nodes_suffice() -> None:
    spec = load_job(LEAST)
    assert (spec.name, spec.nodes, spec.spares, spec.launcher, spec.tasks_per_node) == ("demo", 4, 0, "srun", 1)
    assert spec.policy.max_restarts == 20
    assert spec.checkpoint.keep == 3


def test_every_field(tmp_path: Path) -> None:
    spec = load_job(
        LEAST + "launcher: torchrun\nspares: 1\ngpus_per_node: 8\npartition: gpu,big\naccount: a\nqos: q\n"
        "time_limit: 2-00:00:00\nsbatch:\n  - --constraint=h100\n  - --mem\n  - 10G\nworkdir: run\n"
        "env:\n  OMP_NUM_THREADS: 4\n  FLAG: no\nsetup: |\n  module load cuda\n  ulimit -c 0\n"
        "checkpoint:\n  dir: ckpt\n  keep: 5\n  every: 100\nhealth:\n  probe: false\n  skip: [clock]\n"
        "watch:\n  progress: 'it (\\d+)'\n  stall_after: 1h30m\n  heartbeat_timeout: 20\n"
        "policy:\n  max_restarts: 3\n  max_user_restarts: 1\n"
    ).resolve(tmp_path)
    assert spec.tasks_per_node == 8
    assert spec.time_limit_s == 172800
    assert spec.sbatch == ("--constraint=h100", "--mem", "10G")
    assert spec.env == {"OMP_NUM_THREADS": "4", "FLAG": "no"}
    assert spec.setup == ("module load cuda", "ulimit -c 0")
    assert (spec.workdir, spec.checkpoint.dir) == (f"{tmp_path}/run", f"{tmp_path}/run/ckpt")
    assert (spec.watch.stall_after, spec.watch.first_step_after) == (5400.0, None)
    assert spec.checkpoint.every == 100
    assert (spec.health.probe, spec.health.collective, spec.total_nodes) == (False, True, 5)


def test_a_stored_job_is_read_back_equal(tmp_path: Path) -> None:
    spec = load_job(LEAST + "time_limit: 12:00:00\nwatch: {stall_after: 10m}\nsetup: [a, b]\n").resolve(tmp_path)
    assert JobSpec.from_stored(json.loads(json.dumps(spec.model_dump(mode="json")))) == spec


def test_all_faults_are_told_at_once_each_with_its_line() -> None:
    text = (
        "name: 12\nnodes: 0\nspare: 2\nhealth:\n  prob: yes\n  collective: 7\nnodes: 4\nwatch:\n  progress: '(('\n"
        "  stall_after: soon\nlauncher: mpi\nenv: [1]\ntime_limit: 1h\nsbatch: --nodes=3\n"
    )
    told = faults(text)
    assert told == (
        "job.yaml:7: nodes: is written twice (also in line 2); keep one",
        "job.yaml:1: command: is required: the shell command to run, or `script`, an sbatch file",
        "job.yaml:1: name: must not be a number alone: 12 would be taken for a job's id",
        "job.yaml:2: nodes: must be at least 1, got 0",
        "job.yaml:3: spare: is no field; did you mean `spares`?",
        "job.yaml:5: health.prob: is no field; did you mean `probe`?",
        "job.yaml:6: health.collective: must be true or false, got 7",
        "job.yaml:9: watch.progress: is no regular expression: missing ), unterminated subpattern at position 1",
        "job.yaml:10: watch.stall_after: must be a duration such as 90, 10m or 1h30m, got 'soon'",
        "job.yaml:11: launcher: must be 'srun' or 'torchrun', got 'mpi'",
        "job.yaml:12: env: must be a mapping such as `KEY: value`, got a list",
        "job.yaml:13: time_limit: must be a Slurm time limit such as 90, 12:00:00, 2-00:00:00 or UNLIMITED, got '1h'",
        "job.yaml:14: sbatch: --nodes=3: say it in job.yaml: nodes, spares",
    )


def test_a_missing_command_is_told_beside_other_faults() -> None:
    assert faults("name: demo\nnodes: 0\n") == (
        "job.yaml:1: command: is required: the shell command to run, or `script`, an sbatch file",
        "job.yaml:2: nodes: must be at least 1, got 0",
    )


def test_an_empty_file_misses_everything() -> None:
    assert [fault.split(": ")[1] for fault in faults("")] == ["command", "name", "nodes"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("nodes_: 4", "did you mean `nodes`?"),
        ("Time-Limit: 1", "did you mean `time_limit`?"),
        ("zzz: 1", "is no field; known here: account, checkpoint, command"),
        ("partition: -p", "must be one word that does not start with `-`"),
        ("account: a b", "must be one word"),
        ('workdir: "/a\\nb"', "must be one line without control characters"),
        ("env: {RANK: 1}", "RANK is set by transom for every launch"),
        ("env: {TRANSOM_X: 1}", "TRANSOM_X is set by transom"),
        ("env: {a-b: 1}", "'a-b' is no name of an environment variable"),
        ("env: {a-b: 1, c: 2, RANK: 3}", "'a-b' is no name of an environment variable; RANK is set by transom"),
        ('env: {A: "x\\0y"}', "must not hold a NUL character"),
        ("watch: {progress: step}", "must hold a group for the step's number"),
        ("watch: {stall_after: 0}", "must be longer than nothing"),
        ("checkpoint: {every: 0}", "must be a number of steps of at least 1"),
        ("checkpoint: {keep: 0}", "checkpoint.keep: must be at least 1, got 0"),
        ("checkpoint: here", "must be a mapping of fields, got 'here'"),
        ("tasks_per_node: 0", "tasks_per_node: must be at least 1, got 0"),
        ("gpus_per_node: h100:8", "must be a whole number, got 'h100:8'"),
        ("sbatch: [--requeue]", "--requeue: transom restarts jobs itself"),
        ('sbatch: ["--x=a\\nb"]', "a control character"),
        ("health: {skip: [clok]}", "health.skip[1]: 'clok' is no check; did you mean `clock`?"),
        ("setup: {a: b}", "setup: must be a list, got a mapping"),
    ],
)
def test_single_faults(line: str, expected: str) -> None:
    (told,) = faults(LEAST + line + "\n")
    assert told.startswith("job.yaml:4: ")
    assert expected in told


@pytest.mark.parametrize("name", ["a/b", "../x", "a b", "-x", ".x", "a" * 65, "näme", '"a\\e[31m"', "$(id)"])
def test_names_that_would_be_no_good_in_a_path_or_a_tag(name: str) -> None:
    (told,) = faults(LEAST.replace("demo", name))
    assert "job.yaml:1: name: must be at most 64 letters" in told
    assert "\x1b" not in told


def test_overrides_win_and_are_blamed_by_themselves() -> None:
    assert load_job(LEAST, overrides=("nodes=2", "checkpoint.keep=7", "env.A=b=c")).model_dump(
        include={"nodes": True, "checkpoint": {"keep"}, "env": True}
    ) == {"nodes": 2, "checkpoint": {"keep": 7}, "env": {"A": "b=c"}}
    assert faults(LEAST, overrides=("nodes=-2", "policy", "name.x=1")) == (
        "--set policy: must be FIELD=VALUE, such as nodes=2 or checkpoint.keep=5",
        "--set name.x=1: name is no mapping",
        "--set nodes=-2: must be at least 1, got -2",
    )


def test_options_after_the_dashes_follow_the_files_own() -> None:
    spec = load_job(LEAST + "sbatch: --mem=1G\n", sbatch=("--constraint", "a&b"))
    assert spec.sbatch == ("--mem=1G", "--constraint", "a&b")
    (told,) = faults(LEAST, sbatch=("-N2",))
    assert told == "after `--`: -N2: say it in job.yaml: nodes, spares"


def test_paths_are_resolved_with_the_users_variables(tmp_path: Path) -> None:
    spec = load_job(LEAST + "workdir: ~/runs/$RUN\ncheckpoint: {dir: '${SCRATCH}/ck'}\n")
    done = spec.resolve(tmp_path, {"HOME": "/home/a", "RUN": "7", "SCRATCH": "/scratch"})
    assert (done.workdir, done.checkpoint.dir) == ("/home/a/runs/7", "/scratch/ck")
    with pytest.raises(SpecError) as caught:
        spec.resolve(tmp_path, {"HOME": "/home/a"})
    assert caught.value.faults == (
        "workdir: the variable $RUN is not set, in '~/runs/$RUN'",
        "checkpoint.dir: the variable $SCRATCH is not set, in '${SCRATCH}/ck'",
    )


def test_the_defaults_of_paths(tmp_path: Path) -> None:
    spec = load_job(LEAST).resolve(tmp_path)
    assert (spec.workdir, spec.checkpoint.dir) == (str(tmp_path), f"{tmp_path}/checkpoints/demo")


def test_a_job_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        load_job(LEAST).nodes = 5  # type: ignore[misc]


def test_a_stored_job_with_faults_is_refused_with_all_of_them() -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec.from_stored({"name": "x", "nodes": 0, "command": "a", "sbatch": ["--uid=0"], "more": 1})
    assert caught.value.faults == (
        "job: sbatch: --uid=0: the job runs as its owner",
        "job: nodes: must be at least 1, got 0",
        "job: more: is no field; known here: " + ", ".join(sorted(JobSpec.model_fields)),
    )


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no such file"):
        load_job(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="Is a directory"):
        load_job(tmp_path)
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"name: x\n\xff\xfe\n")
    with pytest.raises(SpecError) as caught:
        load_job(binary)
    assert caught.value.faults == (f"{binary}:2: is not UTF-8 text",)
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * (1 << 20) + b"#")
    with pytest.raises(UsageError, match="larger than 1 MiB"):
        load_job(big)


def test_faults_bear_the_files_name(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("name: x\ncommand: y\nnodes: many\n")
    with pytest.raises(SpecError) as caught:
        load_job(path)
    assert caught.value.faults == (f"{path}:3: nodes: must be a whole number, got 'many'",)


def test_every_field_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "job-yaml.md").read_text()
    parts = {"checkpoint", "health", "watch", "policy"}
    names = set(JobSpec.model_fields) - parts
    names |= {f"{part}.{name}" for part in parts for name in type(getattr(load_job(LEAST), part)).model_fields}
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
