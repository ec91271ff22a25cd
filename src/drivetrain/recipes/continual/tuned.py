"""Sizes for each data set, and the settings that `drivetrain continual --tune` found best for each method there."""

from dataclasses import replace

from drivetrain.recipes.continual.methods import METHODS, Scale, Settings, trials_of

SCALES = {
    "digits": Scale(hidden=32, max_experts=16, batch=32, steps_per_task=200, remembered=200),
    "mnist": Scale(hidden=64, max_experts=16, batch=64, steps_per_task=400, remembered=500),
}
TUNED: dict[tuple[str, str], dict[str, Settings]] = {}


def scale_of(data: str, steps: int | None) -> Scale:
    scale = SCALES.get(data, SCALES["mnist"])
    if steps is None:
        return scale
    # Looks and naps come at the same fractions of a task; a task is a whole number of looks.
    return replace(scale, steps_per_task=max(1, steps // scale.look) * scale.look)


def tuned(data: str, tasks: str, method: str) -> Settings:
    """As found for these tasks; elsewhere the middle of what would be tried."""
    trials = trials_of(METHODS[method])
    return TUNED.get((data, tasks), {}).get(method, trials[len(trials) // 2])
