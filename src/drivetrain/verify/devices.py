"""Chooses the GPUs to verify, by numbers and without torch: `DeviceManager` would load it where none is needed."""

from drivetrain.config import Config
from drivetrain.hardware import Hardware


def chosen_gpus(hardware: Hardware, config: Config) -> tuple[int, ...]:
    """Return indices as torch counts; none for the CPU. Contradictions were refused when the configuration was read."""
    wanted = config.device
    if wanted.mode == "cpu" or wanted.device == "cpu" or hardware.accelerator not in ("cuda", "rocm"):
        return ()
    if wanted.ids is not None:
        return wanted.ids
    if wanted.device.startswith("cuda:"):
        return (int(wanted.device.removeprefix("cuda:")),)
    available = tuple(gpu.index for gpu in hardware.gpus)
    return available[:1] if wanted.mode == "single_gpu" else available
