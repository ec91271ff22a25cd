"""Sizes for each data set, and the settings that `drivetrain continual --tune` found best for each method there."""

from dataclasses import replace

from studies.continual.methods import METHODS, MethodSettings, Scale, trials_of

SCALES = {
    "digits": Scale(hidden=32, max_experts=16, batch=32, steps_per_task=200, remembered=200),
    "mnist": Scale(hidden=64, max_experts=16, batch=64, steps_per_task=400, remembered=500),
}
# Those that were not tuned have the settings of what is nearest to them: joint and dense-small of dense, fixed-near of
# fixed.
TUNED: dict[tuple[str, str], dict[str, MethodSettings]] = {
    ("digits", "rotated"): {
        "joint": MethodSettings(3e-4),
        "dense": MethodSettings(3e-4),
        "dense-small": MethodSettings(3e-4),
        "ewc": MethodSettings(3e-3, strength=30.0),
        "dense+replay": MethodSettings(1e-2, replay_rate=0.5),
        "fixed": MethodSettings(3e-3),
        "fixed-near": MethodSettings(3e-3),
        "fixed+replay": MethodSettings(3e-3, replay_rate=1.0),
        "growing": MethodSettings(1e-2, memory=0.99),
        "growing+sleep": MethodSettings(1e-2, memory=0.99),
    },
    ("digits", "split"): {
        "joint": MethodSettings(1e-3),
        "dense": MethodSettings(1e-3),
        "dense-small": MethodSettings(1e-3),
        "ewc": MethodSettings(1e-3, strength=300.0),
        "dense+replay": MethodSettings(3e-3, replay_rate=1.0),
        "fixed": MethodSettings(3e-4),
        "fixed-near": MethodSettings(3e-4),
        "fixed+replay": MethodSettings(3e-3, replay_rate=0.5),
        "growing": MethodSettings(3e-3, memory=0.9),
        "growing+sleep": MethodSettings(3e-3, memory=0.99),
    },
}


def scale_of(data: str, steps: int | None) -> Scale:
    scale = SCALES.get(data, SCALES["mnist"])
    if steps is None:
        return scale
    # Looks and naps come at the same fractions of a task; a task is a whole number of looks.
    return replace(scale, steps_per_task=max(1, steps // scale.look) * scale.look)


def tuned(data: str, tasks: str, method: str) -> MethodSettings:
    """Return the settings found for these tasks; for others the middle of those that would be tried."""
    trials = trials_of(METHODS[method])
    return TUNED.get((data, tasks), {}).get(method, trials[len(trials) // 2])
