"""Reading the site file again while the daemon runs: what takes effect at once, and what needs a restart. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from transomd.settings import Settings

NEEDS_RESTART: frozenset[str] = frozenset(
    {
        *(f"daemon.{name}" for name in ("mode", "socket", "listen", "advertise", "metrics", "state_dir", "database")),
        "hooks.key",
        *(f"slurm.{name}" for name in type(Settings().slurm).model_fields),
        *(f"ssh.{name}" for name in type(Settings().ssh).model_fields),
    }
)
"""Settings that are built into connections and sockets. All others take effect with the next cycle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reloaded:
    """The settings to go on with, and the names of those that changed: at once, or only after a restart."""

    settings: Settings
    at_once: tuple[str, ...] = ()
    after_restart: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """What happened, for the log."""
        told = [f"now {', '.join(self.at_once)}"] if self.at_once else []
        told += [f"only after a restart: {', '.join(self.after_restart)}"] if self.after_restart else []
        return f"the site file was read again: {'; '.join(told) or 'nothing has changed'}"


def reloaded(old: Settings, new: Settings) -> Reloaded:
    """Take over what may change at once from ``new``; the rest stays as it is in ``old``."""
    changed = [name for name in _names(old) if _value(old, name) != _value(new, name)]
    kept = [name for name in changed if name in NEEDS_RESTART]
    return Reloaded(
        settings=_with(new, old, kept),
        at_once=tuple(name for name in changed if name not in NEEDS_RESTART),
        after_restart=tuple(kept),
    )


def _names(settings: Settings) -> list[str]:
    sections = type(settings).model_fields
    return [f"{section}.{name}" for section in sections for name in type(getattr(settings, section)).model_fields]


def _value(settings: Settings, name: str) -> object:
    section, _, field = name.partition(".")
    return getattr(getattr(settings, section), field)


def _with(settings: Settings, source: Settings, names: list[str]) -> Settings:
    """Return ``settings`` with these fields as they are in ``source``."""
    sections: dict[str, dict[str, object]] = {}
    for name in names:
        section, _, field = name.partition(".")
        sections.setdefault(section, {})[field] = _value(source, name)
    parts = {section: getattr(settings, section).model_copy(update=fields) for section, fields in sections.items()}
    return settings.model_copy(update=parts)
