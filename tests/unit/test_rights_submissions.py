"""What is taken as a job, and which Slurm jobs count as one's own."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from transom_slurm.fake import FakeSlurm
from transom_slurm.types import SubmitRequest, UserIdentity
from transom_sql.records import Attempt, Intent, Job

from transomd.api.submissions import check_limits, check_owner, check_partition, check_room, new_job
from transomd.errors import RefusedError, SpecError, UsageError
from transomd.settings import PolicySettings, Settings
from transomd.spec import JobSpec
from transomd.tol.act import Actor
from transomd.tol.facts import first_tag
from transomd.tol.view import JobView
from transomd.words import IntentKind, IntentState

SPEC = JobSpec.from_stored({"name": "demo", "command": "x", "nodes": 1})
BODY = {"run_dir": "/home/a/.transom/x", "cwd": "/home/a"}
DIGEST = "0123456789abcdef" * 4


def job(uid: int = 1001, **changes: Any) -> Job:
    return replace(new_job(SPEC, uid, BODY, DIGEST, 5.0), **changes)


@pytest.mark.parametrize("digest", ["", "A" * 64, "0" * 63, "0" * 65, None, 7, "g" * 64])
def test_a_digest_is_a_digest(digest: object) -> None:
    with pytest.raises(UsageError, match="token_sha256"):
        new_job(SPEC, 1001, BODY, digest, 5.0)


@pytest.mark.parametrize("path", ["x", "", None, 7, "/a\nb", "/a\x1b[2J", "/" + "a" * 4096, "/a\u202eb", "/\udcff"])
@pytest.mark.parametrize("key", ["run_dir", "cwd"])
def test_a_path_is_absolute_and_printable(key: str, path: object) -> None:
    body: Mapping[str, Any] = {**BODY, key: path}
    with pytest.raises(UsageError, match=key):
        new_job(SPEC, 1001, body, DIGEST, 5.0)


def test_the_uid_makes_the_user_whatever_is_sent() -> None:
    made = new_job(SPEC, os.geteuid(), {**BODY, "user": "root", "uid": 0}, DIGEST, 5.0)
    assert (made.uid, made.user) == (os.geteuid(), pwd.getpwuid(os.geteuid()).pw_name)


def test_a_site_limits_jobs() -> None:
    spec = JobSpec.from_stored({**SPEC.model_dump(mode="json"), "policy": {"max_restarts": 99, "max_attempts": 99}})
    with pytest.raises(SpecError) as caught:
        check_limits(spec, PolicySettings(max_restarts=9, max_attempts=9))
    assert len(caught.value.faults) == 2
    others = [job(run_dir=f"/r{n}") for n in range(3)]
    check_room(job(), others, 4)
    check_room(job(2002), others, 3)
    check_room(job(), others, None)
    with pytest.raises(RefusedError, match="3 jobs already"):
        check_room(job(), others, 3)
    with pytest.raises(RefusedError, match="another job's"):
        check_room(job(), [job(2002)], None)


def test_a_partition_that_slurm_does_not_have() -> None:
    spec = JobSpec.from_stored({**SPEC.model_dump(mode="json"), "partition": "gpu"})
    check_partition(spec, None)
    with pytest.raises(SpecError):
        check_partition(spec, {})


def test_a_personal_daemon_takes_its_owners_jobs_only() -> None:
    check_owner(4242, personal=False)
    check_owner(os.geteuid(), personal=True)
    with pytest.raises(RefusedError, match="own"):
        check_owner(4242, personal=True)


def test_users_cannot_make_tags_alike() -> None:
    """The name and the token are the user's, and eight digits of a digest are soon found."""
    assert first_tag(job(id=7)) != first_tag(job(2002, id=8))


def request(tag: str, user: str) -> SubmitRequest:
    who = UserIdentity(uid=2002, gid=2002, groups=(2002,), name=user, home="/")
    return SubmitRequest(
        script="#!/bin/sh\n", options=("--nodes=1",), name=tag, comment="transom:7:1", cwd="/", user=who
    )


class Reach:
    """Hands out the call of the job's own user."""

    async def fence(self, nodes: list[str], job_id: int, epoch: int) -> Mapping[str, str]:
        raise AssertionError

    async def start_launcher(self, view: JobView, host: str, generation: int) -> None:
        raise AssertionError

    def submission(self, view: JobView, attempt: int) -> SubmitRequest:
        return request(view.attempt.tag, view.job.user)


async def test_what_another_user_submitted_is_neither_adopted_nor_cancelled() -> None:
    slurm = FakeSlurm(4)
    actor = Actor(slurm, Reach(), Settings(), slurm.clock)
    own = job(id=7, user="alice")
    tag = first_tag(own)
    theirs = await slurm.submit(request(tag, "mallory"))
    view = JobView(job=own, spec=SPEC, attempts=(Attempt(job_id=7, number=1, tag=tag, created_at=1.0),))
    submit = Intent(
        key="submit:7:1", kind=IntentKind.SUBMIT.value, state="pending", created_at=1.0, job_id=7,
        args={"attempt": 1, "tag": tag},
    )  # fmt: skip
    done = await actor.perform(submit, view)
    while done.state is IntentState.PENDING:
        slurm.advance(done.again_s or 1.0)
        done = await actor.perform(replace(submit, outcome=done.data, tries=submit.tries + 1), view)
    assert done.state is IntentState.DONE
    assert done.data["slurm_job_id"] != theirs
    cancel = replace(submit, key="cancel:7:1", kind=IntentKind.CANCEL.value, args={"slurm_job_id": theirs, "tag": tag})
    await actor.perform(cancel, view)
    assert not (await slurm.jobs())[theirs].status.terminal
