"""Finds values that are valid alone and wrong together, or wrong on this machine."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from drivetrain.config.given import Given
from drivetrain.config.schema import Config, DistributedSection, Switch
from drivetrain.core.errors import Problem
from drivetrain.core.plugins import STRATEGIES
from drivetrain.core.strategy_facts import StrategyFacts, strategy_facts
from drivetrain.hardware import Hardware

_NEEDS_THE_MACHINE = (
    "device.mode",
    "device.device",
    "device.ids",
    "precision.dtype",
    "data.pin_memory",
    "distributed.strategy",
)


@dataclass(frozen=True)
class _Case:
    config: Config
    given: Mapping[str, Given]  # only values that were set, and are valid alone

    def problem(self, name: str, message: str, allowed: str = "", remedy: str = "") -> Problem:
        given = self.given[name]
        return Problem(given.spelled, message, given.value, given.source, allowed, remedy)

    def spelled(self, name: str) -> str:
        """Return the setting as the user wrote it, with its value, for the other half of a contradiction."""
        given = self.given[name]
        return f"{given.spelled} {given.value}" if given.spelled.startswith("-") else f"{given.spelled}: {given.value}"


def find_contradictions(
    config: Config,
    given: Mapping[str, Given],
    unusable: Collection[str],
    hardware: Callable[[], Hardware] | None,
) -> list[Problem]:
    """Return every contradiction among the valid values. Invalid values take no part: their own problem is enough."""
    case = _Case(config, given)
    problems = [*_between_values(case)]
    if hardware is not None and any(name in given for name in _NEEDS_THE_MACHINE):
        already = {problem.key for problem in problems}
        device_known = "device.mode" not in unusable and "device.device" not in unusable
        machine = _with_the_machine(case, hardware(), device_known)
        problems += [problem for problem in machine if problem.key not in already]
    return problems


def _cpu_asked_by(case: _Case) -> str | None:
    """Return the setting that asks for the CPU, as the user wrote it."""
    if case.config.device.mode == "cpu" and "device.mode" in case.given:
        return case.spelled("device.mode")
    if case.config.device.device == "cpu" and "device.device" in case.given:
        return case.spelled("device.device")
    return None


def _between_values(case: _Case) -> Iterator[Problem]:
    config, given = case.config, case.given
    device, mode, ids = config.device.device, config.device.mode, config.device.ids
    cpu = _cpu_asked_by(case)

    if "precision.dtype" in given and config.precision.dtype in ("fp16", "tf32") and cpu:
        yield case.problem(
            "precision.dtype",
            f"{config.precision.dtype} needs a GPU, but {cpu} asks for the CPU",
            "auto, fp32, bf16 on a CPU",
            "use --precision bf16 or fp32, or let the GPU be used with --gpu-mode auto",
        )
    if mode == "cpu" and device.startswith("cuda"):
        yield case.problem(
            "device.device",
            f"asks for a GPU, but {case.spelled('device.mode')} asks for the CPU",
            "auto, cpu with that mode",
            "drop one of the two",
        )
    if mode in ("single_gpu", "multi_gpu") and device == "cpu":
        yield case.problem(
            "device.device",
            f"asks for the CPU, but {case.spelled('device.mode')} asks for GPUs",
            "auto, cuda, cuda:n with that mode",
            "drop one of the two",
        )
    if mode == "multi_gpu" and device.startswith("cuda:"):
        yield case.problem(
            "device.device",
            f"names one GPU, but {case.spelled('device.mode')} asks for several",
            "auto, cuda with that mode",
            "name the GPUs with --device-ids 0,1, or use --gpu-mode single_gpu",
        )
    if ids is not None:
        if len(set(ids)) < len(ids):
            yield case.problem("device.ids", f"{list(ids)} names a GPU twice", remedy="name each GPU once")
        if cpu:
            yield case.problem(
                "device.ids", f"{list(ids)} names GPUs, but {cpu} asks for the CPU", remedy="drop one of the two"
            )
        elif mode == "single_gpu" and len(ids) > 1:
            yield case.problem(
                "device.ids",
                f"{list(ids)} names {len(ids)} GPUs, but {case.spelled('device.mode')} uses one",
                remedy=f"--device-ids {ids[0]}, or --gpu-mode multi_gpu",
            )
        elif mode == "multi_gpu" and len(ids) == 1:
            yield case.problem(
                "device.ids",
                f"{list(ids)} names one GPU, but {case.spelled('device.mode')} asks for several",
                remedy="name two or more, or use --gpu-mode single_gpu",
            )
        elif device.startswith("cuda:") and "device.device" in given:
            yield case.problem(
                "device.ids",
                f"{list(ids)} stands beside {case.spelled('device.device')}: both choose the GPU",
                remedy="drop one of the two",
            )
    if config.precision.mixed is not None and "precision.dtype" in given:
        dtype, mixed = config.precision.dtype, case.spelled("precision.mixed")
        if config.precision.mixed != (dtype in ("auto", "fp16", "bf16")) and dtype != "auto":
            yield case.problem(
                "precision.dtype",
                f"{dtype} is {'not ' if config.precision.mixed else ''}mixed precision, but there is {mixed}",
                remedy="drop one of the two",
            )
    if config.kernels.deterministic and config.kernels.cudnn_benchmark and "kernels.cudnn_benchmark" in given:
        yield case.problem(
            "kernels.cudnn_benchmark",
            f"the fastest convolution of the moment is not the same every time, but there is "
            f"{case.spelled('kernels.deterministic')}",
            remedy="drop one of the two",
        )
    if config.kernels.deterministic and config.kernels.repeatable in ("off", "fixed"):
        yield case.problem(
            "kernels.repeatable",
            f"{config.kernels.repeatable} allows kernels that do not repeat, but there is "
            f"{case.spelled('kernels.deterministic')}",
            remedy="drop one of the two",
        )
    is_repeated = config.kernels.repeatable in ("fixed", "strict")
    if is_repeated and config.kernels.cudnn_benchmark and "kernels.cudnn_benchmark" in given:
        yield case.problem(
            "kernels.cudnn_benchmark",
            f"the fastest convolution of the moment is not the same every time, but there is "
            f"{case.spelled('kernels.repeatable')}",
            remedy="drop one of the two",
        )
    if config.data.pin_memory and cpu:
        yield case.problem(
            "data.pin_memory",
            f"pinned memory serves copies to a GPU, but {cpu} asks for the CPU",
            remedy="drop one of the two",
        )
    if config.data.prefetch_factor and config.data.num_workers == 0:
        yield case.problem(
            "data.prefetch_factor",
            f"loader processes fetch ahead, and {case.spelled('data.num_workers')} asks for none",
            remedy="drop one of the two",
        )
    if config.compile.only and not config.compile.enabled:
        yield case.problem(
            "compile.only", "names what is compiled, but compiling is not asked for", remedy="add --compile"
        )
    if "compile.mode" in given and config.compile.mode != "default" and not config.compile.enabled:
        state = "is not asked for" if config.compile.enabled is None else "is off"
        yield case.problem(
            "compile.mode", f"chooses how to compile, but compiling {state}", remedy="add --compile, or drop this"
        )
    yield from _strategy(case, cpu)
    yield from _output_folder(case)


def _strategy(case: _Case, cpu: str | None) -> Iterator[Problem]:
    config, asked = case.config, case.config.distributed.strategy
    facts = strategy_facts(asked)
    if facts.devices == "several":
        yield from _one_device_left(case, cpu)
    yield from _options_of_others(case, facts)
    for name in filter(None, (asked, facts.rest(config))):
        for conflict in strategy_facts(name).conflicts:
            if all(config.value(setting) == value for setting, value in conflict.when.items()):
                at, quoted = (
                    setting if setting in case.given else "distributed.strategy"
                    for setting in (conflict.at, conflict.asked)
                )
                message = conflict.message.replace("{asked}", case.spelled(quoted))
                yield case.problem(at, message, conflict.allowed, conflict.remedy)


def _one_device_left(case: _Case, cpu: str | None) -> Iterator[Problem]:
    """Yield the problem of a strategy that uses several GPUs, where another setting leaves one or none."""
    device, ids = case.config.device, case.config.device.ids
    one_gpu = {
        "device.mode": device.mode == "single_gpu",
        "device.device": device.device.startswith("cuda"),
        "device.ids": ids is not None and len(ids) == 1,
    }
    asked = cpu or next((case.spelled(name) for name, found in one_gpu.items() if found and name in case.given), None)
    if asked:
        left = "none" if cpu else "one"
        yield case.problem(
            "distributed.strategy",
            f"{case.config.distributed.strategy} shares batches between GPUs, but {asked} leaves {left}",
            "auto, single with that",
            "drop one of the two",
        )


def _options_of_others(case: _Case, facts: StrategyFacts) -> Iterator[Problem]:
    """Yield options that the chosen strategy would not obey. With `auto` most count if theirs is chosen."""
    config, asked = case.config, case.config.distributed.strategy
    obeyed, plain = {asked, facts.rest(config), *facts.takes}, Config()
    for owner in STRATEGIES.names():
        others = strategy_facts(owner)
        for option in () if owner in obeyed else others.options:
            if others.options_by_name and config.value(option) != plain.value(option):
                yield case.problem(
                    option,
                    f"is an option of {owner}, and the strategy is {asked}",
                    remedy=f"add {_how_to_ask_for(owner)}, or drop this",
                )
            elif not others.options_by_name and asked != "auto" and option in case.given:
                yield case.problem(
                    option,
                    f"is an option of {owner}, but {case.spelled('distributed.strategy')} asks for another strategy",
                    remedy="drop one of the two",
                )


def _how_to_ask_for(strategy: str) -> str:
    switches = [mark for mark in DistributedSection.model_fields["strategy"].metadata if isinstance(mark, Switch)]
    flag = f"--parallel-strategy {strategy}"
    return next((f"--{mark.names[0]} (that is {flag})" for mark in switches if mark.value == strategy), flag)


def _output_folder(case: _Case) -> Iterator[Problem]:
    folder = case.config.run.output_dir
    if "run.output_dir" not in case.given:
        return
    if "\0" in str(folder):
        yield case.problem("run.output_dir", "this is no path", "a folder", "name another folder")
        return
    blocker = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None)
    if blocker is not None:
        yield case.problem(
            "run.output_dir", f"{blocker} is a file", "a folder, which is made if it is missing", "name another folder"
        )


def _with_the_machine(case: _Case, hardware: Hardware, device_known: bool) -> Iterator[Problem]:
    config, given = case.config, case.given
    has_gpu = hardware.accelerator in ("cuda", "rocm")
    num_gpus = len(hardware.gpus) if has_gpu else 0
    here = _gpus_in_words(hardware) if has_gpu else _why_no_gpu(hardware)
    indices = f"0 to {num_gpus - 1}" if num_gpus > 1 else "0"

    if config.device.mode in ("single_gpu", "multi_gpu") and num_gpus == 0:
        yield case.problem(
            "device.mode",
            f"asks for a GPU, and there is none: {here}",
            "auto, cpu here",
            "`drivetrain check` says more",
        )
    elif config.device.mode == "multi_gpu" and num_gpus == 1:
        yield case.problem(
            "device.mode",
            f"asks for several GPUs, and there is one: {here}",
            "auto, cpu, single_gpu here",
            "--gpu-mode single_gpu",
        )
    device = config.device.device
    if device.startswith("cuda") and num_gpus == 0:
        yield case.problem(
            "device.device",
            f"asks for a GPU, and there is none: {here}",
            "auto, cpu here",
            "`drivetrain check` says more",
        )
    elif device.startswith("cuda:") and int(device[5:]) >= num_gpus:
        yield case.problem(
            "device.device", f"there is no such GPU: {here}", f"cuda:n with n {indices}", "--device cuda:0"
        )
    ids = config.device.ids
    if ids is not None and num_gpus == 0:
        yield case.problem(
            "device.ids",
            f"{list(ids)} names GPUs, and there is none: {here}",
            remedy="drop it, or see `drivetrain check`",
        )
    elif ids is not None and any(index >= num_gpus for index in ids):
        missing = ", ".join(str(index) for index in ids if index >= num_gpus)
        yield case.problem("device.ids", f"there is no GPU {missing}: {here}", indices, "--device-ids 0")

    strategy = config.distributed.strategy
    if strategy_facts(strategy).devices == "several" and num_gpus < 2:
        yield case.problem(
            "distributed.strategy",
            f"{strategy} shares batches between GPUs, and there {'is one' if num_gpus else 'is none'}: {here}",
            "auto, single here",
            "leave --parallel-strategy out",
        )
    if not device_known:
        return
    dtype = config.precision.dtype
    on_cpu = num_gpus == 0 or config.device.mode == "cpu" or device == "cpu"
    if "precision.dtype" in given and dtype in ("fp16", "tf32") and on_cpu:
        yield case.problem(
            "precision.dtype",
            f"{dtype} needs a GPU, and there is none to use: {here}",
            "auto, fp32, bf16 on a CPU",
            "use --precision bf16 or fp32",
        )
    elif "precision.dtype" in given and dtype == "tf32" and not on_cpu:
        without = [gpu for gpu in hardware.gpus if "tf32" not in gpu.precisions and (ids is None or gpu.index in ids)]
        if without:
            yield case.problem(
                "precision.dtype",
                f"tf32 needs compute capability 8.0, which {without[0].name} (cuda:{without[0].index}) does not have",
                "auto, fp32, fp16, bf16 there",
                "use --precision fp16, or leave that GPU out with --device-ids",
            )
    if config.data.pin_memory and num_gpus == 0:
        yield case.problem(
            "data.pin_memory", f"pinned memory serves copies to a GPU, and there is none: {here}", remedy="drop it"
        )


def _gpus_in_words(hardware: Hardware) -> str:
    if len(hardware.gpus) == 1:
        return f"1 GPU is visible, cuda:0 ({hardware.gpus[0].name})"
    return f"{len(hardware.gpus)} GPUs are visible, cuda:0 to cuda:{len(hardware.gpus) - 1}"


def _why_no_gpu(hardware: Hardware) -> str:
    for note in hardware.notes:
        if "GPU" in note.sentence or "NVIDIA" in note.sentence:
            return note.sentence.rstrip(".")
    return "no GPU is visible to this process"
