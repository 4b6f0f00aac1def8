"""The pure rules: any job in any world gets a lawful decision, comes to rest, and has a way on."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tol_views import NOW, SPEC, attempts, recorded, reports, views, worlds
from tol_world import quick_settings
from transom_slurm.types import NodeStatus, SlurmNode
from transom_sql.records import Incident, Intent, Launch

from transomd.api.wire import LauncherReport
from transomd.settings import DrainSettings
from transomd.spec import PolicySpec
from transomd.tee.types import Verdict
from transomd.tol.admit import admit_drains
from transomd.tol.decide import decide
from transomd.tol.directive import directive
from transomd.tol.drains import CONFIRM_WITHIN_S, propose_drains
from transomd.tol.policy import BACKOFF_S, RULES, WAIT_S, launches_without_progress, make_plan
from transomd.tol.rollback import Way
from transomd.tol.transitions import MOVES, UnlawfulMove, check_move
from transomd.tol.view import Decision, JobView, SlurmView, World
from transomd.words import Action, Blame, CheckMode, Confidence, FailureClass, IntentKind, IntentState, JobState

SITE = quick_settings()
many = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


# --- every state, every world -----------------------------------------------------------------------------------------


@st.composite
def jobs_and_worlds(draw: st.DrawFn) -> tuple[JobView, World]:
    view = draw(views())
    return view, draw(worlds(view.attempts[-1] if view.attempts else None))


def come_to_rest(view: JobView, world: World) -> tuple[JobView, Decision]:
    """Decide and record until there is nothing more to record, as the loop does within one cycle."""
    for _ in range(50):
        decision = decide(view, world, SITE, NOW)
        if not decision.writes(view):
            return view, decision
        view = recorded(view, decision)
    raise AssertionError(f"50 decisions in a row, and no rest: {decision}")


@many
@given(jobs_and_worlds())
def test_every_job_comes_to_rest_lawfully(made: tuple[JobView, World]) -> None:
    come_to_rest(*made)


@many
@given(jobs_and_worlds())
def test_every_state_leads_on_or_says_what_it_waits_for(made: tuple[JobView, World]) -> None:
    view, decision = come_to_rest(*made)
    if view.state.final or view.state in (JobState.HELD, JobState.RUNNING):
        # A running job is looked at in every cycle: silence, Slurm's word or a probe leads on. Held is a person's turn.
        return
    under_way = any(intent.state == IntentState.PENDING for intent in view.intents.values())
    in_queue = view.state is JobState.QUEUED and bool(decision.reason)
    assert decision.wants or decision.wake_at or under_way or in_queue or made[1].deaf, decision


@many
@given(st.data())
def test_while_slurm_is_unknown_nothing_ends_and_nothing_healthy_is_touched(data: st.DataObject) -> None:
    view = data.draw(views(healthy=True))
    world = data.draw(worlds(view.attempts[-1], slurm_answers=False))
    world = replace(world, health={})
    _, decision = come_to_rest(view, world)
    after, _ = come_to_rest(view, world)
    assert after.state is JobState.RUNNING
    assert not after.intents
    assert not decision.intents
    assert propose_drains([*view.incidents], world.slurm, SITE, NOW) == ()


@many
@given(st.data())
def test_without_slurms_word_only_the_launcher_the_user_or_a_refusal_ends_a_job(data: st.DataObject) -> None:
    view = data.draw(views())
    world = data.draw(worlds(view.attempts[-1] if view.attempts else None, slurm_answers=False))
    after, _ = come_to_rest(view, world)
    if not after.state.final:
        return
    done = view.report is not None and view.report.phase == "done"
    refused = any(i.kind == IntentKind.SUBMIT and i.state == IntentState.FAILED for i in view.intents.values())
    assert done or refused or view.job.cancel_requested_by, after.job


@many
@given(st.data())
def test_a_launcher_is_let_through_only_with_the_recorded_attempt_and_job(data: st.DataObject) -> None:
    view = data.draw(views())
    attempt = view.attempts[-1] if view.attempts else data.draw(attempts(1))
    report = data.draw(reports(attempt))
    told = directive(view, report, SITE)
    fits = bool(view.attempts) and report.attempt == view.attempt.number
    fits = fits and view.attempt.slurm_job_id in (None, report.slurm_job_id)
    fits = fits and report.generation >= view.attempt.generation
    ahead = not view.attempts or report.attempt > view.attempt.number
    ahead = ahead and not view.job.cancel_requested_by
    assert (told.gate == "refuse") is not (fits or ahead)
    assert not ahead or (told.gate, told.stop, told.fence_epoch, told.grant) == ("hold", "", None, None)
    assert told.launch is None or told.gate == "open"
    if told.grant is not None:
        assert view.state is JobState.RUNNING
        assert told.grant.restarts <= SPEC.policy.max_restarts


# --- moves ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), list(product(JobState, JobState)))
def test_moves_are_those_of_the_table(old: JobState, new: JobState) -> None:
    if new is old or new in MOVES[old]:
        check_move(old, new)
    else:
        with pytest.raises(UnlawfulMove, match=f"from {old} to {new}"):
            check_move(old, new)


def test_every_open_state_may_end_and_no_final_one_leads_anywhere() -> None:
    for state in JobState:
        assert (not MOVES[state]) is state.final
        assert state.final or {JobState.FAILED, JobState.CANCELLED} <= MOVES[state]


# --- policy -----------------------------------------------------------------------------------------------------------


def verdict(failure_class: FailureClass, blame: Blame, *nodes: str) -> Verdict:
    return Verdict(
        failure_class=failure_class,
        blame=blame,
        action=Action.RESTART,
        confidence=Confidence.HIGH,
        summary="so it was",
        nodes=nodes,
    )


def incident(number: int, failure_class: FailureClass, blame: Blame = Blame.UNKNOWN, **data: object) -> Incident:
    return Incident(
        id=number,
        job_id=1,
        attempt=1,
        epoch=number,
        detected_at=NOW,
        failure_class=failure_class.value,
        blame=blame.value,
        data=data,
    )


def launch(epoch: int, last_step: int | None, seconds: float = 60.0) -> Launch:
    return Launch(
        job_id=1,
        epoch=epoch,
        attempt=1,
        nodes=("n1",),
        started_at=NOW,
        ended_at=NOW + seconds,
        last_step=last_step,
    )


@pytest.mark.parametrize(
    ("failure_class", "blame", "seen", "action"),
    [
        (FailureClass.CANCELLED, Blame.EXTERNAL, 0, Action.NONE),
        (FailureClass.CONFIG, Blame.PROGRAM, 0, Action.RESTART),
        (FailureClass.CONFIG, Blame.PROGRAM, 1, Action.STOP),
        (FailureClass.CONFIG, Blame.UNKNOWN, 0, Action.RESTART),
        (FailureClass.CONFIG, Blame.NODE, 1, Action.EXCLUDE),
        (FailureClass.USER_CODE, Blame.PROGRAM, 0, Action.STOP),
        (FailureClass.USER_CODE, Blame.UNKNOWN, 0, Action.RESTART),
        (FailureClass.PREEMPTION, Blame.EXTERNAL, 3, Action.RESTART),
        (FailureClass.TIME_LIMIT, Blame.EXTERNAL, 3, Action.RESTART),
        (FailureClass.STORAGE, Blame.UNKNOWN, 0, Action.WAIT),
        (FailureClass.UNKNOWN, Blame.STORAGE, 0, Action.WAIT),
        (FailureClass.NETWORK, Blame.NETWORK, 0, Action.WAIT),
        (FailureClass.NUMERIC, Blame.PROGRAM, 0, Action.ROLLBACK),
        (FailureClass.NUMERIC, Blame.PROGRAM, 1, Action.ROLLBACK),
        (FailureClass.NUMERIC, Blame.PROGRAM, 2, Action.STOP),
        (FailureClass.HOST_MEMORY, Blame.PROGRAM, 0, Action.RESTART),
        (FailureClass.HOST_MEMORY, Blame.PROGRAM, 1, Action.STOP),
        (FailureClass.HOST, Blame.NODE, 5, Action.EXCLUDE),
        (FailureClass.UNKNOWN, Blame.UNKNOWN, 5, Action.RESTART),
    ],
)
def test_the_first_row_that_fits_decides(failure_class: FailureClass, blame: Blame, seen: int, action: Action) -> None:
    earlier = [incident(n, failure_class, blame) for n in range(seen)]
    nodes = ("n1",) if blame is Blame.NODE else ()
    way = Way(source=4, older=2)
    plan = make_plan(verdict(failure_class, blame, *nodes), earlier, [launch(1, 5)], PolicySpec(), way)
    assert plan.action is action
    assert plan.resume_step == (2 if action is Action.ROLLBACK else None)
    assert plan.bar == (nodes if action is Action.EXCLUDE else ())


def test_a_set_up_that_never_worked_is_its_users_at_once() -> None:
    wrong = verdict(FailureClass.CONFIG, Blame.PROGRAM)
    assert make_plan(wrong, [], [launch(1, None)], PolicySpec()).action is Action.STOP


def test_every_verdict_has_a_row() -> None:
    for failure_class, blame in product(FailureClass, Blame):
        assert any(rule.fits(verdict(failure_class, blame), 0) for rule in RULES)


def test_budgets_are_kept_apart() -> None:
    node = verdict(FailureClass.HOST, Blame.NODE, "n1")
    policy = PolicySpec(max_restarts=2, max_user_restarts=1)
    free = [incident(n, kind) for n, kind in enumerate([FailureClass.PREEMPTION, FailureClass.USER_CODE] * 3)]
    free += [incident(20, FailureClass.HOST, at_gate=True), incident(21, FailureClass.HOST, false_alarm=True)]
    assert make_plan(node, free, [launch(1, 5)], policy).action is Action.EXCLUDE
    spent = [*free, incident(30, FailureClass.HOST), incident(31, FailureClass.UNKNOWN)]
    stopped = make_plan(node, spent, [launch(1, 5)], policy)
    assert (stopped.action, stopped.why) == (Action.STOP, "the restart budget is used up: 2 of 2")
    mine = verdict(FailureClass.USER_CODE, Blame.PROGRAM)
    assert make_plan(mine, [], [launch(1, 5)], policy).action is Action.RESTART
    assert make_plan(mine, [incident(1, FailureClass.USER_CODE)], [launch(1, 5)], policy).action is Action.STOP


@pytest.mark.parametrize(
    ("steps", "idle"),
    [([], 0), ([5], 0), ([None], 1), ([5, 5], 1), ([5, 9, 7, 9], 2), ([5, None, 4, 6], 0), ([None, None, 1], 0)],
)
def test_launches_without_progress(steps: list[int | None], idle: int) -> None:
    assert launches_without_progress([launch(n, step) for n, step in enumerate(steps)]) == idle


def test_a_program_that_shows_no_steps_advances_by_running_long() -> None:
    assert launches_without_progress([launch(1, None, 7200), launch(2, None, 7200)]) == 0
    assert launches_without_progress([launch(1, None, 7200), launch(2, None, 10)]) == 1


def test_restarts_back_off_and_stores_are_waited_for() -> None:
    lost = verdict(FailureClass.UNKNOWN, Blame.UNKNOWN)
    policy = PolicySpec(no_progress_limit=99, max_restarts=99)
    delays = [make_plan(lost, [], [launch(0, 5)] + [launch(n, 5) for n in range(1, k + 1)], policy) for k in range(7)]
    assert [plan.delay_s for plan in delays] == [*BACKOFF_S, BACKOFF_S[-1]]
    store = verdict(FailureClass.STORAGE, Blame.STORAGE)
    before = [incident(n, FailureClass.STORAGE, Blame.STORAGE) for n in range(9)]
    waits = [make_plan(store, before[:k], [launch(1, 5)], policy).delay_s for k in range(6)]
    assert waits == [*WAIT_S, WAIT_S[-1], WAIT_S[-1]]


# --- drains -----------------------------------------------------------------------------------------------------------


def node(name: str, base: str = "DOWN", *flags: str, reason: str = "Not responding") -> SlurmNode:
    return SlurmNode(name=name, status=NodeStatus(base, frozenset(flags)), state_text=base, reason=reason)


def seen(*nodes: SlurmNode) -> SlurmView:
    return SlurmView(jobs={}, nodes={n.name: n for n in nodes})


def blamed(checks: dict[str, list[str]], number: int = 1, at: float = NOW) -> Incident:
    return replace(
        incident(number, FailureClass.HOST, Blame.NODE, await_drain=checks), diagnosed_at=at, summary="Lost."
    )


@pytest.mark.parametrize(
    ("slurm", "checks", "drained"),
    [
        (seen(node("n1")), [], ["node-loss"]),
        (seen(node("n1", "ALLOCATED", "NOT_RESPONDING")), [], []),
        (seen(node("n1", "IDLE", reason="")), [], []),
        (seen(node("n1", "IDLE", reason="")), ["xid"], ["xid"]),
        (seen(node("n1", "IDLE", reason="")), ["disk"], []),
        (seen(node("n2")), [], []),
        (SlurmView(), ["xid"], []),
    ],
)
def test_a_drain_needs_slurms_word_or_a_failed_check(slurm: SlurmView, checks: list[str], drained: list[str]) -> None:
    found = propose_drains([blamed({"n1": checks})], slurm, SITE, NOW)
    assert [intent.args["check"] for intent in found] == drained


def test_a_drain_is_proposed_only_where_the_mode_says_so_and_not_for_ever() -> None:
    observing = quick_settings(drain={"node_loss": CheckMode.OBSERVE}, health={"modes": {}})
    waiting = blamed({"n1": ["xid"]})
    assert propose_drains([waiting], seen(node("n1")), observing, NOW) == ()
    assert propose_drains([waiting], seen(node("n1")), SITE, NOW + CONFIRM_WITHIN_S + 1) == ()
    assert propose_drains([replace(waiting, diagnosed_at=None)], seen(node("n1")), SITE, NOW) == ()


def drain(name: str, number: int = 1, *, at: float = NOW, state: str = "pending", check: str = "xid") -> Intent:
    args = {"node": name, "check": check, "reason": "transom[xid] x"}
    key = f"drain:{name}:{number}"
    return Intent(key=key, kind="drain", state=state, created_at=at, incident_id=number, args=args)


FLEET = seen(*(node(f"n{i}", "IDLE", reason="") for i in range(1, 21)))


@pytest.mark.parametrize(
    ("history", "limits", "granted", "cause"),
    [
        ([], {}, True, ""),
        ([], {"enabled": False}, False, "disabled"),
        ([drain("n9", 9, state="done")], {"per_hour": 1}, False, "per_hour"),
        ([drain("n9", 9, state="done", at=NOW - 4000)], {"per_hour": 1}, True, ""),
        ([drain("n9", 9, state="failed")], {"per_hour": 1}, True, ""),
        ([drain("n9", 9, state="done", check="manual")], {"per_hour": 1}, True, ""),
        ([drain("n9", 1, state="done")], {"per_incident": 1}, False, "per_incident"),
        ([drain("n8", 8), drain("n9", 9)], {"max_fraction": 0.1}, False, "max_fraction"),
        ([drain("n8", 8)], {"max_fraction": 0.1}, True, ""),
    ],
)
def test_drain_budgets(history: list[Intent], limits: dict[str, object], granted: bool, cause: str) -> None:
    budget = DrainSettings.model_validate(limits)
    admitted = admit_drains([drain("n1")], history, FLEET, budget, NOW)
    assert bool(admitted.granted) is granted
    assert [refusal.cause for refusal in admitted.refused] == ([] if granted else [cause])


@pytest.mark.parametrize(
    "slurm",
    [
        SlurmView(),
        seen(node("n2")),
        seen(node("n1", "IDLE", "DRAIN", reason="rack move")),
        seen(node("n1", "IDLE", "MAINTENANCE", reason="")),
        seen(node("n1", "IDLE", "RESERVED", reason="")),
        seen(node("n1", "IDLE", "REBOOT_ISSUED", reason="")),
        seen(node("n1", "DOWN", reason="bad fan")),
    ],
)
def test_a_node_that_is_not_there_or_somebody_elses_is_not_drained(slurm: SlurmView) -> None:
    assert admit_drains([drain("n1")], [], slurm, DrainSettings(), NOW).granted == ()


def test_what_is_stopped_or_known_is_not_granted() -> None:
    stopped = admit_drains([drain("n1")], [], FLEET, DrainSettings(), NOW, stopped="paused by alice")
    assert (stopped.granted, [r.reason for r in stopped.refused]) == ((), ["paused by alice"])
    known = admit_drains([drain("n1")], [drain("n1", state="failed")], FLEET, DrainSettings(), NOW)
    assert (known.granted, known.refused) == ((), ())


def test_budgets_count_what_is_granted_in_the_same_breath() -> None:
    proposals = [drain(f"n{i}", i) for i in range(1, 9)]
    admitted = admit_drains(proposals, [], FLEET, DrainSettings(per_hour=3, max_fraction=1.0), NOW)
    assert len(admitted.granted) == 3


# --- what launchers send ----------------------------------------------------------------------------------------------


REPORT = LauncherReport(job_id=1, attempt=1, slurm_job_id=8, generation=1, host="n1", phase="gate", at=NOW)


@many
@given(st.data())
def test_a_well_formed_report_is_read_as_it_is(data: st.DataObject) -> None:
    report = data.draw(reports(data.draw(attempts(1))))
    if report.failure is not None:
        # Evidence is read into its own shape, see test_tee_wire.
        report = replace(report, failure=replace(report.failure, evidence=[]))
    assert LauncherReport.from_json(report.to_json()) == report


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attempt", "1"),
        ("generation", True),
        ("slurm_job_id", -1),
        ("phase", "asleep"),
        ("at", float("nan")),
        ("at", "now"),
        ("nodes", "n1"),
        ("nodes", ["n1;reboot"]),
        ("lost", [7]),
        ("host", "-oProxyCommand=x"),
        ("unfit", ["n1"]),
        ("checkpoint_step", 1.5),
        ("exit_code", "0"),
    ],
)
def test_a_report_that_is_none_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        LauncherReport.from_json({**REPORT.to_json(), field: value})
