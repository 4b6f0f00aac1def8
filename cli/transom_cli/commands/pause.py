"""``transom pause`` and ``transom resume-actions``: the big red switch."""

from __future__ import annotations

import json

import click

from transom_cli.ask import client
from transom_cli.telling import say
from transomd.words import ExitCode

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print what the daemon answers.")


@click.command()
@click.option("--reason", default="", help="Why, for whoever finds transom paused.")
@as_json_option
def pause(reason: str, as_json: bool) -> int:
    """Stop all that transom does to the cluster by itself, at once: it submits, cancels, drains, fences and starts
    nothing any more. It goes on looking, diagnosing and recording, and says what it would do; jobs that run go on.
    It stays so until transom resume-actions, also when the daemon is restarted.

    What a person asks for still happens: cancel, drain and undrain. A submitted job is taken in, and waits.

    \b
    Examples:
      transom pause --reason 'the switch is being replaced'
    """
    answer = client().post("/v1/pause", {"reason": reason})
    if as_json:
        print(json.dumps(answer, indent=2))
        return ExitCode.OK
    say(answer["paused"])
    for key in answer.get("under_way") or ():
        say(f"under way, ends by itself: {key}", indent="  ")
    say("next: transom status; and when it is over: transom resume-actions")
    return ExitCode.OK


@click.command(name="resume-actions")
@as_json_option
def resume_actions(as_json: bool) -> int:
    """Let transom act again: after transom pause, and after a drain budget that was used up. What it would have done
    meanwhile is decided anew, by what is so now.

    A budget counts what is so: with too many nodes still drained (drain.max_fraction) the next drain trips it again.

    \b
    Examples:
      transom resume-actions
    """
    answer = client().post("/v1/resume-actions")
    were = answer["were"]
    if as_json:
        print(json.dumps(answer, indent=2))
        return ExitCode.OK
    for switch in were:
        why = f": {switch['reason']}" if switch.get("reason") else ""
        say(f"resumed {switch['name']}: stopped by {switch['who']}{why}")
    if not were:
        print("nothing was stopped")
    return ExitCode.OK
