"""Finds values that are valid alone and wrong together, or wrong on this machine."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from drivetrain.config.schema import Config, DistributedSection, Switch
from drivetrain.config.settings import Given
from drivetrain.core.errors import Problem
from drivetrain.core.plugins import STRATEGIES, StrategyFacts, strategy_facts
from drivetrain.core.value import FP8_CAPABILITY
from drivetrain.hardware import Gpu, Hardware, has_apple_gpu

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
    """A configuration that is checked: its values, and where each came from."""

    config: Config
    given: Mapping[str, Given]  # only values that were set, and are valid alone

    @property
    def cpu(self) -> str:
        """The setting that asks for the CPU, as the user wrote it; empty where none does."""
        if self.config.device.mode == "cpu" and "device.mode" in self.given:
            return self.spelled("device.mode")
        return self.spelled("device.device") if self.config.device.device == "cpu" and self.has("device.device") else ""

    @property
    def ids(self) -> tuple[int, ...]:
        """The GPUs that are named by index; empty where none is."""
        return tuple(self.config.device.ids or ())

    def has(self, name: str) -> bool:
        return name in self.given

    def problem(self, name: str, message: str, allowed: str = "", remedy: str = "") -> Problem:
        given = self.given[name]
        return Problem(given.spelled, message, given.value, given.source, allowed, remedy)

    def spelled(self, name: str) -> str:
        """Return the setting as the user wrote it, with its value, for the other half of a contradiction."""
        given = self.given[name]
        return f"{given.spelled} {given.value}" if given.spelled.startswith("-") else f"{given.spelled}: {given.value}"


@dataclass(frozen=True)
class _MachineCase(_Case):
    """A configuration that is checked against a machine."""

    hardware: Hardware
    device_known: bool  # the device was not itself given wrongly

    @property
    def num_gpus(self) -> int:
        return len(self.hardware.gpus) if self.hardware.accelerator in ("cuda", "rocm") else 0

    @property
    def here(self) -> str:
        """The GPUs of this machine in words, or why there is none."""
        has_gpu = self.hardware.accelerator in ("cuda", "rocm")
        return _gpus_in_words(self.hardware) if has_gpu else _why_no_gpu(self.hardware)

    @property
    def indices(self) -> str:
        return f"0 to {self.num_gpus - 1}" if self.num_gpus > 1 else "0"

    @property
    def on_cpu(self) -> bool:
        return self.num_gpus == 0 or self.config.device.mode == "cpu" or self.config.device.device == "cpu"

    @property
    def missing_ids(self) -> str:
        return ", ".join(str(index) for index in self.ids if index >= self.num_gpus)

    @property
    def without_fp8(self) -> list[Gpu]:
        """The GPUs to be used that cannot multiply in the FP8 that is asked for."""
        ids, least = self.config.device.ids, FP8_CAPABILITY[self.config.precision.dtype]
        used = [gpu for gpu in self.hardware.gpus if ids is None or gpu.index in ids]
        return [gpu for gpu in used if gpu.capability is None or gpu.capability < least]

    @property
    def without_tf32(self) -> list[Gpu]:
        """The GPUs to be used that have no tf32."""
        ids = self.config.device.ids
        return [gpu for gpu in self.hardware.gpus if "tf32" not in gpu.precisions and (ids is None or gpu.index in ids)]


C = TypeVar("C", bound=_Case)


@dataclass(frozen=True)
class _Rule(Generic[C]):
    """One contradiction.

    Args:
        at: the setting that is reported. Settings that were not given are reported by no rule.
        wrong: whether a configuration has it.
        message: what is wrong, in words.
        allowed: the values that would be right.
        remedy: what the user can do.
        otherwise: the rule is asked only where those before it, back to the last without this, found nothing.
    """

    at: str
    wrong: Callable[[C], Any]
    message: Callable[[C], str]
    allowed: str | Callable[[C], str] = ""
    remedy: str | Callable[[C], str] = "drop one of the two"
    otherwise: bool = False

    def find(self, case: C) -> Problem | None:
        if not case.has(self.at) or not self.wrong(case):
            return None
        return case.problem(self.at, self.message(case), _text(self.allowed, case), _text(self.remedy, case))


def _text(words: str | Callable[[C], str], case: C) -> str:
    return words if isinstance(words, str) else words(case)


def _problems(rules: Sequence[_Rule[C]], case: C) -> Iterator[Problem]:
    found: Problem | None = None
    for rule in rules:
        if not (rule.otherwise and found is not None):
            found = rule.find(case)
            if found is not None:
                yield found


def _names_gpu(case: _Case) -> bool:
    return case.config.device.device.startswith("cuda:")


def _needs_gpu(case: _Case) -> bool:
    return case.config.precision.dtype in ("fp16", "tf32")


def _asks_for_gpus(case: _Case) -> bool:
    return case.config.device.mode in ("single_gpu", "multi_gpu")


_NOT_REPEATED = "the fastest convolution of the moment is not the same every time, but there is "

_BETWEEN_VALUES: tuple[_Rule[_Case], ...] = (
    _Rule(
        "checkpoint.fresh",
        lambda case: case.config.checkpoint.fresh and case.config.checkpoint.extends,
        lambda case: "begins anew, but a run is to be extended",
        remedy="drop --fresh, or --extend and --extend-schedule",
    ),
    _Rule(
        "precision.dtype",
        lambda case: _needs_gpu(case) and case.cpu,
        lambda case: f"{case.config.precision.dtype} needs a GPU, but {case.cpu} asks for the CPU",
        allowed="auto, fp32, bf16 on a CPU",
        remedy="use --precision bf16 or fp32, or let the GPU be used with --gpu-mode auto",
    ),
    _Rule(
        "device.device",
        lambda case: case.config.device.mode == "cpu" and case.config.device.device.startswith("cuda"),
        lambda case: f"asks for a GPU, but {case.spelled('device.mode')} asks for the CPU",
        allowed="auto, cpu with that mode",
    ),
    _Rule(
        "device.device",
        lambda case: _asks_for_gpus(case) and case.config.device.device == "cpu",
        lambda case: f"asks for the CPU, but {case.spelled('device.mode')} asks for GPUs",
        allowed="auto, cuda, cuda:n with that mode",
    ),
    _Rule(
        "device.device",
        lambda case: case.config.device.mode == "multi_gpu" and _names_gpu(case),
        lambda case: f"names one GPU, but {case.spelled('device.mode')} asks for several",
        allowed="auto, cuda with that mode",
        remedy="name the GPUs with --device-ids 0,1, or use --gpu-mode single_gpu",
    ),
    _Rule(
        "device.ids",
        lambda case: len(set(case.ids)) < len(case.ids),
        lambda case: f"{list(case.ids)} names a GPU twice",
        remedy="name each GPU once",
    ),
    _Rule(
        "device.ids",
        lambda case: case.config.device.ids is not None and case.cpu,
        lambda case: f"{list(case.ids)} names GPUs, but {case.cpu} asks for the CPU",
    ),
    _Rule(
        "device.ids",
        lambda case: case.config.device.mode == "single_gpu" and len(case.ids) > 1,
        lambda case: f"{list(case.ids)} names {len(case.ids)} GPUs, but {case.spelled('device.mode')} uses one",
        remedy=lambda case: f"--device-ids {case.ids[0]}, or --gpu-mode multi_gpu",
        otherwise=True,
    ),
    _Rule(
        "device.ids",
        lambda case: case.config.device.mode == "multi_gpu" and len(case.ids) == 1,
        lambda case: f"{list(case.ids)} names one GPU, but {case.spelled('device.mode')} asks for several",
        remedy="name two or more, or use --gpu-mode single_gpu",
        otherwise=True,
    ),
    _Rule(
        "device.ids",
        lambda case: case.ids and _names_gpu(case) and case.has("device.device"),
        lambda case: f"{list(case.ids)} stands beside {case.spelled('device.device')}: both choose the GPU",
        otherwise=True,
    ),
    _Rule(
        "precision.dtype",
        lambda case: (
            case.config.precision.mixed is not None
            and case.config.precision.dtype != "auto"
            and case.config.precision.mixed == (case.config.precision.dtype in ("fp32", "tf32"))
        ),
        lambda case: (
            f"{case.config.precision.dtype} is {'not ' if case.config.precision.mixed else ''}mixed precision, but "
            f"there is {case.spelled('precision.mixed')}"
        ),
    ),
    _Rule(
        "kernels.cudnn_benchmark",
        lambda case: case.config.kernels.deterministic and case.config.kernels.cudnn_benchmark,
        lambda case: f"{_NOT_REPEATED}{case.spelled('kernels.deterministic')}",
    ),
    _Rule(
        "kernels.repeatable",
        lambda case: case.config.kernels.deterministic and case.config.kernels.repeatable in ("off", "fixed"),
        lambda case: (
            f"{case.config.kernels.repeatable} allows kernels that do not repeat, but there is "
            f"{case.spelled('kernels.deterministic')}"
        ),
    ),
    _Rule(
        "kernels.cudnn_benchmark",
        lambda case: case.config.kernels.repeatable in ("fixed", "strict") and case.config.kernels.cudnn_benchmark,
        lambda case: f"{_NOT_REPEATED}{case.spelled('kernels.repeatable')}",
    ),
    _Rule(
        "data.pin_memory",
        lambda case: case.config.data.pin_memory and case.cpu,
        lambda case: f"pinned memory serves copies to a GPU, but {case.cpu} asks for the CPU",
    ),
    _Rule(
        "data.prefetch_factor",
        lambda case: case.config.data.prefetch_factor and case.config.data.num_workers == 0,
        lambda case: f"loader processes fetch ahead, and {case.spelled('data.num_workers')} asks for none",
    ),
    _Rule(
        "compile.only",
        lambda case: case.config.compile.only and not case.config.compile.enabled,
        lambda case: "names what is compiled, but compiling is not asked for",
        remedy="add --compile",
    ),
    _Rule(
        "compile.mode",
        lambda case: case.config.compile.mode != "default" and not case.config.compile.enabled,
        lambda case: (
            "chooses how to compile, but compiling "
            f"{'is not asked for' if case.config.compile.enabled is None else 'is off'}"
        ),
        remedy="add --compile, or drop this",
    ),
    _Rule(
        "compile.from_step",
        lambda case: case.config.compile.from_step is not None and not case.config.compile.enabled,
        lambda case: (
            "says when compiled code is used, but compiling "
            f"{'is not asked for' if case.config.compile.enabled is None else 'is off'}"
        ),
        remedy="add --compile, or drop this",
    ),
    _Rule(
        "compile.from_step",
        lambda case: case.config.compile.from_step and case.config.kernels.capture == "on",
        lambda case: (
            f"steps that go over to compiled code are not captured, and there is {case.spelled('kernels.capture')}"
        ),
        remedy="drop one of the two",
    ),
    _Rule(
        "compile.scope",
        lambda case: case.config.compile.scope != "auto" and case.config.compile.enabled is False,
        lambda case: "chooses what to compile as one, but compiling is off",
        remedy="drop one of the two",
    ),
    _Rule(
        "compile.scope",
        lambda case: case.config.compile.scope != "auto" and case.config.compile.only,
        lambda case: f"chooses what to compile as one, and {case.spelled('compile.only')} names it",
        remedy="drop one of the two",
    ),
)

_WITH_THE_MACHINE: tuple[_Rule[_MachineCase], ...] = (
    _Rule(
        "device.mode",
        lambda case: _asks_for_gpus(case) and case.num_gpus == 0,
        lambda case: f"asks for a GPU, and there is none: {case.here}",
        allowed="auto, cpu here",
        remedy="`drivetrain check` says more",
    ),
    _Rule(
        "device.mode",
        lambda case: case.config.device.mode == "multi_gpu" and case.num_gpus == 1,
        lambda case: f"asks for several GPUs, and there is one: {case.here}",
        allowed="auto, cpu, single_gpu here",
        remedy="--gpu-mode single_gpu",
    ),
    _Rule(
        "device.device",
        lambda case: case.config.device.device.startswith("cuda") and case.num_gpus == 0,
        lambda case: f"asks for a GPU, and there is none: {case.here}",
        allowed="auto, cpu here",
        remedy="`drivetrain check` says more",
    ),
    _Rule(
        "device.device",
        lambda case: case.config.device.device == "mps" and not has_apple_gpu(case.hardware),
        lambda case: "asks for an Apple GPU, and this is no Mac with one that this torch can use",
        allowed="auto, cpu, cuda or cuda:n",
        remedy="leave it out",
    ),
    _Rule(
        "device.device",
        lambda case: _names_gpu(case) and int(case.config.device.device[5:]) >= case.num_gpus > 0,
        lambda case: f"there is no such GPU: {case.here}",
        allowed=lambda case: f"cuda:n with n {case.indices}",
        remedy="--device cuda:0",
    ),
    _Rule(
        "device.ids",
        lambda case: case.config.device.ids is not None and case.num_gpus == 0,
        lambda case: f"{list(case.ids)} names GPUs, and there is none: {case.here}",
        remedy="drop it, or see `drivetrain check`",
    ),
    _Rule(
        "device.ids",
        lambda case: case.missing_ids and case.num_gpus > 0,
        lambda case: f"there is no GPU {case.missing_ids}: {case.here}",
        allowed=lambda case: case.indices,
        remedy="--device-ids 0",
    ),
    _Rule(
        "distributed.strategy",
        lambda case: strategy_facts(case.config.distributed.strategy).devices == "several" and case.num_gpus < 2,
        lambda case: (
            f"{case.config.distributed.strategy} shares batches between GPUs, and there "
            f"{'is one' if case.num_gpus else 'is none'}: {case.here}"
        ),
        allowed="auto, single here",
        remedy="leave --parallel-strategy out",
    ),
    _Rule(
        "precision.dtype",
        lambda case: case.device_known and _needs_gpu(case) and case.on_cpu,
        lambda case: f"{case.config.precision.dtype} needs a GPU, and there is none to use: {case.here}",
        allowed="auto, fp32, bf16 on a CPU",
        remedy="use --precision bf16 or fp32",
    ),
    _Rule(
        "precision.dtype",
        lambda case: (
            case.device_known and case.config.precision.dtype == "tf32" and not case.on_cpu and case.without_tf32
        ),
        lambda case: (
            f"tf32 needs compute capability 8.0, which {case.without_tf32[0].name} "
            f"(cuda:{case.without_tf32[0].index}) does not have"
        ),
        allowed="auto, fp32, fp16, bf16 there",
        remedy="use --precision fp16, or leave that GPU out with --device-ids",
    ),
    _Rule(
        "precision.dtype",
        lambda case: (
            case.device_known and case.config.precision.dtype in FP8_CAPABILITY and not case.on_cpu and case.without_fp8
        ),
        lambda case: (
            f"{case.config.precision.dtype} needs compute capability "
            f"{'.'.join(map(str, FP8_CAPABILITY[case.config.precision.dtype]))}, which {case.without_fp8[0].name} "
            f"(cuda:{case.without_fp8[0].index}) does not have"
        ),
        allowed="auto, fp32, tf32, fp16, bf16 there",
        remedy="use --precision bf16, or leave that GPU out with --device-ids",
    ),
    _Rule(
        "data.pin_memory",
        lambda case: case.device_known and case.config.data.pin_memory and case.num_gpus == 0,
        lambda case: f"pinned memory serves copies to a GPU, and there is none: {case.here}",
        remedy="drop it",
    ),
)


def find_contradictions(
    config: Config,
    given: Mapping[str, Given],
    unusable: Collection[str],
    hardware: Callable[[], Hardware] | None,
) -> list[Problem]:
    """Return every contradiction among the valid values. Invalid values take no part: their own problem is enough."""
    case = _Case(config, given)
    problems = [*_problems(_BETWEEN_VALUES, case), *_strategy(case), *_output_folder(case)]
    if hardware is not None and any(name in given for name in _NEEDS_THE_MACHINE):
        already = {problem.key for problem in problems}
        device_known = "device.mode" not in unusable and "device.device" not in unusable
        machine = _problems(_WITH_THE_MACHINE, _MachineCase(config, given, hardware(), device_known))
        problems += [problem for problem in machine if problem.key not in already]
    return problems


def _strategy(case: _Case) -> Iterator[Problem]:
    config, asked = case.config, case.config.distributed.strategy
    facts = strategy_facts(asked)
    if facts.devices == "several":
        yield from _one_device_left(case)
    yield from _options_of_others(case, facts)
    for name in filter(None, (asked, facts.rest(config))):
        for conflict in strategy_facts(name).conflicts:
            if conflict.is_met(config.value):
                at, quoted = (
                    setting if setting in case.given else "distributed.strategy"
                    for setting in (conflict.at, conflict.asked)
                )
                message = conflict.message.replace("{asked}", case.spelled(quoted))
                yield case.problem(at, message, conflict.allowed, conflict.remedy)


def _one_device_left(case: _Case) -> Iterator[Problem]:
    """Yield the problem of a strategy that uses several GPUs, where another setting leaves one or none."""
    device, ids = case.config.device, case.config.device.ids
    one_gpu = {
        "device.mode": device.mode == "single_gpu",
        "device.device": device.device.startswith("cuda"),
        "device.ids": ids is not None and len(ids) == 1,
    }
    asked = case.cpu or next(
        (case.spelled(name) for name, found in one_gpu.items() if found and name in case.given), None
    )
    if asked:
        left = "none" if case.cpu else "one"
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
        yield case.problem("run.output_dir", "not a valid path", "a folder", "name another folder")
        return
    if variable := re.search(r"\$(\w+|\{\w+\})", str(folder)):
        words = f"{variable[0]} is not filled in: only a shell does so, on the command line"
        yield case.problem("run.output_dir", words, "a folder, spelled out", "write out what it stands for")
        return
    blocker = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None)
    if blocker is not None:
        yield case.problem(
            "run.output_dir", f"{blocker} is a file", "a folder, which is made if it is missing", "name another folder"
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
