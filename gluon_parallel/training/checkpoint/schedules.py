"""State of a learning rate schedule, and of a schedule that it holds."""

from typing import Any

from ...compat import mx


def scalars(thing: Any) -> dict[str, Any]:
    """The attributes that are numbers or None."""
    return {key: value for key, value in vars(thing).items() if type(value) in (int, float, type(None))}


def schedule_values(schedule: Any) -> dict[str, Any]:
    """The numbers of a learning rate schedule, and by name those of a schedule that it holds."""
    held = {key: one for key, one in vars(schedule).items() if isinstance(one, mx.lr_scheduler.LRScheduler)}
    return {**scalars(schedule), **{key: schedule_values(one) for key, one in held.items()}}


def set_schedule_values(schedule: Any, values: dict[str, Any]) -> None:
    """Put back what :func:`schedule_values` returned."""
    for key, value in values.items():
        if isinstance(value, dict):
            set_schedule_values(vars(schedule)[key], value)
        else:
            vars(schedule)[key] = value


def schedule_fits(schedule: Any, values: dict[str, Any]) -> bool:
    """Whether the schedule has everything that :func:`set_schedule_values` would set."""
    own = vars(schedule) if isinstance(schedule, mx.lr_scheduler.LRScheduler) else {}
    fits = [schedule_fits(own[key], value) for key, value in values.items() if key in own and isinstance(value, dict)]
    return set(values) <= set(own) and all(fits)
