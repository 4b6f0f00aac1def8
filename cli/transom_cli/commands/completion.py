"""``transom completion``."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from transomd.errors import UsageError
from transomd.words import ExitCode


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Print what makes a SHELL complete transom's commands, options, jobs, nodes and fault kinds. Names are asked for
    from the daemon; where it does not answer within 0.3 s there are none.

    \b
    Examples:
      transom completion bash > /etc/bash_completion.d/transom
      eval "$(transom completion bash)"        for oneself, in ~/.bashrc
      transom completion zsh > ~/.zfunc/_transom
      transom completion fish > ~/.config/fish/completions/transom.fish
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise UsageError(f"this click completes no {shell}", hint="pip install --upgrade click")
    made = kind(click.get_current_context().find_root().command, {}, "transom", "_TRANSOM_COMPLETE")
    print(made.source_template % made.source_vars())
    return ExitCode.OK
