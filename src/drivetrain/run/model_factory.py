"""Makes the model of a run: builds it, loads the weights it starts with, and prepares it for the way its steps are run.

A limit of host memory makes a model that cannot fit fail with an error, instead of the process being OOM-killed.
`Job.init_from` names the weights that a new run starts with.
"""

import inspect
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from drivetrain.checkpoint import CheckpointError, Weights, WeightsTaken, load_weights, read_weights
from drivetrain.config import Config
from drivetrain.core.errors import DrivetrainError, returned
from drivetrain.core.isolation import seed_torch
from drivetrain.core.log import notice
from drivetrain.core.plugins import STRATEGIES, strategy_facts
from drivetrain.core.value import format_bytes
from drivetrain.core.world import World
from drivetrain.moe import MixtureOfExperts
from drivetrain.monitor.recorder import NoRunRecorder
from drivetrain.plan.fitting import num_bytes
from drivetrain.plan.knobs import StepWay
from drivetrain.run.job_settings import strategy_for
from drivetrain.run.memory import explained
from drivetrain.run.session import Session
from drivetrain.strategies import ShardOptions, SharedExperts
from drivetrain.strategies.base import LossFunction
from drivetrain.strategies.compiling import (
    CompileOptions,
    compile_named,
    compile_repeated,
    compiled,
    forget_compiled,
    leave_to,
    varying_dims_of,
)
from drivetrain.strategies.layers import recompute, repeated_blocks, split_recurrent_dropout, use_fp8
from drivetrain.strategies.sharding import build, compile_blocks, refuse_cut, refuse_uncuttable, shard
from drivetrain.strategies.shared_experts import HeldExperts

MOST = 0.95  # of the memory: the process itself needs some, too


class Prepared(NamedTuple):
    """A model as it is run, and its optimizer."""

    model: nn.Module
    optimizer: Optimizer
    called_model: Callable[..., Any] | None = None  # what the loss function gets instead: the model compiled


def build_model(run: Session, *, modes_stay: bool = False) -> nn.Module:
    """Make the model as the user defines it, on its device unless it is going to be sharded.

    It is in training mode then; `modes_stay` says that the caller puts the modes of its modules back.
    """
    seed_torch(run.job.seed)  # the same weights on every rank, and in every run of this seed
    made, notes = unwrapped(_made(run))
    refuse_other_train(made)
    refuse_cut(made)
    if not modes_stay:
        notes += _unfrozen_norms(made)
    for note in () if run.quiet else notes:
        notice(note)
    refuse_lazy(made)
    refuse_sparse(made)
    _refuse_meta(run, made)
    num_weights = sum(parameter.numel() for parameter in made.parameters())
    run.choose_strategy(strategy_for(run.config.distributed.strategy, made, run.job, run.world), num_weights)
    _refuse_several_optimizers(run)
    if run.shards:
        refuse_uncuttable(made)
        if run.spec.shares_experts:
            run.experts = SharedExperts(made, run.world, run.peak_tflops())
        return made.train()  # where it was made: no more than a block at a time comes to the device
    if run.spec.keeps_on_host(run.config):
        return made.train()  # likewise: weight by weight
    try:
        return made.to(run.world.device).train()
    except torch.OutOfMemoryError as error:
        free, fraction = torch.cuda.mem_get_info(run.world.device)[0], run.config.memory.gpu_fraction
        raise explained(
            run.job, made, run.way.precision, str(run.world.device), free, fraction, num_devices=run.num_devices
        ) from error


def _unfrozen_norms(model: nn.Module) -> list[str]:
    """Call `model.train()`, and tell of batch norms in evaluation mode that it puts back into training mode."""
    # What `from_pretrained` returns is in evaluation mode as a whole: that says nothing of its norms.
    norms = {name: it for name, it in model.named_modules() if isinstance(it, _BatchNorm) and not it.training}
    is_meant = model.training
    model.train()
    names = [name for name, norm in norms.items() if norm.training and is_meant]
    if not names:
        return []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [
        f"{names[0]}{more} was in evaluation mode, and is trained like the rest of the model: model.train() is called "
        "before the first step. To keep its statistics, override train() in the model: super().train(mode), then "
        "eval() of that part"
    ]


def refuse_other_train(model: nn.Module) -> None:
    """Raise where `train` of a module is not torch's switch of modes but something of the user's."""
    for name, module in model.named_modules():
        if type(module).train is nn.Module.train:
            continue
        try:
            inspect.signature(module.train).bind(True)
        except TypeError as error:
            whose = f"{name} ({type(module).__name__})" if name else type(module).__name__
            raise DrivetrainError(
                f"train() of {whose} cannot be called as train(True), by which torch sets the training mode: {error}",
                remedy="give that method another name, such as fit()",
            ) from error


def _refuse_several_optimizers(run: Session) -> None:
    """Raise where the job has several optimizers and the strategy takes one."""
    if run.job.optims and not run.spec.several_optimizers:
        known = [name for name in STRATEGIES.names() if strategy_facts(name).several_optimizers]
        raise DrivetrainError(
            f"the strategy {run.strategy} trains with one optimizer, and the job has {', '.join(run.job.optims)}",
            remedy=f"--parallel-strategy {' or '.join(known)}",
        )


def prepare_model(run: Session, model: nn.Module) -> Prepared:
    """Prepare a model that was built for the way that is followed."""
    leave_to(run.way, model, run.job.step_parts)
    if run.way.channels_last and not run.shards:  # shards are rows, one after the other
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if run.config.distributed.sync_batchnorm and run.world.size > 1:
        if run.world.device.type != "cuda":
            raise DrivetrainError("synchronized batch norm needs GPUs", remedy="drop --sync-batchnorm")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    use_fp8(model, run.precision.fp8)
    _compile_parts(run, model)
    if run.way.splits_recurrent_dropout:
        split_recurrent_dropout(model)
    if run.way.recompute:
        blocks = recompute(model)
        if not blocks and "memory.activations" in run.config.foreign:
            if not run.quiet:
                words = "gradient checkpointing: the model has no repeated blocks to recompute; none is"
                notice(words)
        elif not blocks and run.settings.activations.pinned:
            raise DrivetrainError(
                "no repeated blocks were found in the model, so there is nothing to recompute block by block",
                remedy="keep them in an nn.ModuleList or nn.Sequential, or use --activations offload",
            )
    if run.shards:
        run.sharded = shard(model, run.world, _shard_options(run.config, run.way), run.precision, run.experts)
    optimizer = run.job.make_optimizer(model)
    if run.sharded is not None:
        run.sharded.take_over(optimizer)
    if run.experts is not None:
        run.experts.cut_state(optimizer)
    return Prepared(model, optimizer)


def _compile_parts(run: Session, model: nn.Module) -> None:
    """Compile what is compiled of the model by itself, without the loss function: named modules or blocks."""
    forget_compiled(model)
    if run.way.compile_mode is None:
        return
    options = CompileOptions.of(run.way)
    if run.config.compile.only:
        compile_named(model, run.config.compile.only, options)
    elif run.shards:
        compile_blocks(model, options, shares_experts=run.experts is not None)
    elif run.way.compiles_blocks:
        if not repeated_blocks(model):
            raise DrivetrainError(
                f"--compile-scope {run.way.compile_scope}: no repeated blocks were found in the model",
                remedy="keep them in an nn.ModuleList or nn.Sequential, or use --compile-scope loss",
            )
        compile_repeated(model, options, varying_dims_of(run.job.loss_function))


def callable_model(run: Session) -> Prepared:
    """Return the model as it is run, its optimizer, and what the loss function calls instead if it is compiled."""
    model, optimizer, _ = prepare_model(run, build_model(run, modes_stay=True))
    if not run.shards:
        model = model.to(run.world.device)
    if run.way.compile_mode is None or not run.way.compiles_loss or run.shards:
        return Prepared(model, optimizer)
    return Prepared(model, optimizer, torch.compile(model, **CompileOptions.of(run.way).arguments()))


def called_loss_of(run: Session) -> LossFunction | None:
    """Return what is called in place of the loss function where it is compiled, with all or the rest of the model."""
    # Of a sharded model, blocks are compiled.
    is_whole = run.way.compiles_loss and not run.shards and not run.config.compile.only
    return compiled(run.job.loss_function, CompileOptions.of(run.way)) if is_whole else None


def couples_samples(model: nn.Module) -> bool:
    """Return whether samples of a batch influence each other: then the micro-batch decides what is learned."""
    return any(
        isinstance(module, _BatchNorm)
        and (module.training or not model.training or not module.track_running_stats)  # frozen ones do not
        for module in model.modules()
    )


def has_convolutions(model: nn.Module) -> bool:
    return any(isinstance(module, (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)) for module in model.modules())


def _made(run: Session) -> nn.Module:
    given = run.job.model
    if isinstance(given, nn.Module):
        return given
    if run.cuts(run.config.distributed.strategy):
        return checked(build(given, run.world))
    return make_model(given, run.hardware.memory.total_bytes)


def _refuse_meta(run: Session, made: nn.Module) -> None:
    """Refuse meta tensors, except on other ranks than the main one of a sharded model: they get values later."""
    if isinstance(run.job.model, nn.Module) or not run.cuts(run.config.distributed.strategy):
        refuse_meta(made)
        return
    run.world.main_does(lambda: refuse_meta(made))


def _shard_options(config: Config, way: StepWay) -> ShardOptions:
    return ShardOptions(
        offload=config.distributed.fsdp_offload,
        cast=config.distributed.fsdp_cast,
        accumulate=config.distributed.fsdp_accumulate,
        broadcast_buffers=config.distributed.broadcast_buffers,
        reduces_unused=config.distributed.find_unused_parameters,
        reshard=way.reshard,
        unit_blocks=way.unit_blocks,
        gather_ahead=way.gather_ahead,
        replicas=config.distributed.fsdp_replicas,
    )


def make_model(factory: Callable[[], Any], total_bytes: int) -> nn.Module:
    """Make the model. `total_bytes` is all that the process may use of the host's memory; 0: not known.

    The limit is not the free memory: the kernel frees more on demand than it reports as free, and only a model that is
    sure not to fit is refused.
    """
    with _within(total_bytes):
        return checked(factory())


def checked(made: Any) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise DrivetrainError(f"the model function {returned(made)}", remedy="return a torch.nn.Module")
    return made


def unwrapped(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """Return the model itself without the wrappers of others, and what is to be reported about that.

    Wrappers add prefixes to the names of weights. A compiled model stays compiled: the module is called as the wrapper
    would have called it. Wrappers that copy a model or reduce its gradients are left out: a run does that itself. They
    do it no longer, since a loop of the user's may go on calling them.
    """
    notes = list[str]()
    while _is_compiled(model) or isinstance(model, (nn.DataParallel, DistributedDataParallel)):
        if _is_compiled(model):
            model = _compiled_in_place(model)
        else:
            notes.append(f"the model came wrapped in {type(model).__name__}: its module is trained, and divided here")
            model = _set_aside(model)
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None and _is_compiled(child):
                module._modules[name] = _compiled_in_place(child)
            elif isinstance(child, (nn.DataParallel, DistributedDataParallel)):  # its weights keep their names
                notes.append(f"{name} of the model came wrapped in {type(child).__name__}: it is divided here")
                _set_aside(child)
    return model, notes


def _set_aside(wrapper: nn.Module) -> nn.Module:
    """Have a wrapper only call its module, and return that."""
    if isinstance(wrapper, DistributedDataParallel):
        wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = False  # as in `no_sync`, for good
    elif isinstance(wrapper, nn.DataParallel):
        wrapper.device_ids = []
    return cast(nn.Module, wrapper.module)


def _is_compiled(model: nn.Module) -> bool:
    """Return whether `torch.compile` wrapped the module. Checked by name: the class is slow to import."""
    return type(model).__name__ == "OptimizedModule" and hasattr(model, "_orig_mod")


def _compiled_in_place(wrapper: Any) -> nn.Module:
    """Compile the wrapped model in place as `nn.Module.compile` does, with the wrapper's own options."""
    model: nn.Module = wrapper._orig_mod
    model._compiled_call_impl = wrapper.dynamo_ctx(model._call_impl)
    return model


def refuse_meta(model: nn.Module) -> None:
    """Raise where weights or buffers have a shape and no values: training could not begin with anything."""
    named = [*model.named_parameters(), *model.named_buffers()]
    found = [name for name, tensor in named if tensor.is_meta]
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise DrivetrainError(
            f"{len(found)} of the model's {len(named)} tensors are on the meta device and have no values: "
            f"{', '.join(found[:3])}{more}",
            remedy="build the model outside torch.device('meta'), or call model.to_empty(device='cpu') and initialize "
            "or load every weight and buffer before the model function returns it",
        )


def refuse_lazy(model: nn.Module) -> None:
    """Raise where shapes of weights or buffers follow from a first batch, which nothing has seen yet."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise DrivetrainError(
                f"{name} of the model has no shape yet: a lazy module takes it from the first batch",
                remedy="run one batch through the model inside the model function, before it is returned",
            )


def refuse_sparse(model: nn.Module) -> None:
    """Raise where a weight is sparse, or a buffer that is saved: neither a checkpoint nor safetensors holds them."""
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor) and tensor.layout is not torch.strided:
            raise DrivetrainError(
                f"{name} of the model is a sparse tensor ({str(tensor.layout).removeprefix('torch.')}), which no "
                "checkpoint can hold",
                remedy="register_buffer(name, tensor, persistent=False), if the model function makes it anew each time",
            )


@contextmanager
def _within(total_bytes: int) -> Iterator[None]:
    """Count weights when a module gets them, before they are filled: until then they take no memory."""
    taken = 0
    weights: list[weakref.ref[nn.Parameter]] = []

    def held() -> int:
        """Return what is held now: some is freed since, or shrunk, or on a device. Shared memory counts once."""
        live = [weight for ref in weights if (weight := ref()) is not None and weight.device.type == "cpu"]
        return num_bytes(live)

    def count(module: nn.Module, name: str, weight: nn.Parameter | None) -> None:
        nonlocal taken
        if weight is None or weight.device.type != "cpu":
            return
        weights.append(weakref.ref(weight))
        taken += weight.nbytes
        if taken <= MOST * total_bytes:
            return
        taken = held()
        if taken > MOST * total_bytes:
            shape = " × ".join(map(str, weight.shape))
            raise _too_large(total_bytes, taken, f" up to {name} ({shape}) of a {type(module).__name__}")

    handle = register_module_parameter_registration_hook(count) if total_bytes else None
    try:
        yield
    except RuntimeError as error:  # the kernel may refuse a large weight before a module gets it
        refused = re.search(r"(?:can't allocate|not enough) memory: you tried to allocate (\d+) bytes", str(error))
        if refused is None or not total_bytes:
            raise
        raise _too_large(total_bytes, held() + int(refused[1]), "") from error
    finally:
        if handle is not None:
            handle.remove()


def _too_large(total_bytes: int, taken: int, where: str) -> DrivetrainError:
    return DrivetrainError(
        f"the model does not fit in this machine's memory: it has {format_bytes(total_bytes)}, and the weights "
        f"take {format_bytes(taken)}{where}",
        remedy="a machine with more memory, or a smaller model; with --parallel-strategy fsdp no process makes "
        "all of it",
    )


def take_weights(
    source: str | Path, model: nn.Module, world: World, experts: SharedExperts | None = None
) -> WeightsTaken:
    """Load the weights on every rank. An error on one is raised on all: the others would wait for it otherwise.

    `experts`: those that are distributed already, of which a rank reads its rows.
    """
    taken, problem = None, None
    try:
        weights = read_weights(Path(source)).called(model.state_dict())
        taken = _taken(model, weights, {} if experts is None else experts.held)
    except CheckpointError as error:
        problem = {"message": error.message, "remedy": error.remedy}
    for found in world.gather(problem):
        if found is not None:
            raise DrivetrainError(f"init_from: {found['message']}", remedy=found["remedy"])
    assert taken is not None
    return taken


def _taken(model: nn.Module, weights: Weights, held: Mapping[str, HeldExperts]) -> WeightsTaken:
    """Load the weights, and report on all experts, not only on those that this rank holds."""
    wholes = {name: (found.num_slots, *found.parameter.shape[1:]) for name, found in held.items()}
    mixtures = {name: part for name, part in model.named_modules() if isinstance(part, MixtureOfExperts)}
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    differing = _differing(mixtures, shapes | wholes, weights)
    anew = {name for layer in differing for name in shapes if _is_in(layer, name)}
    before = {name: _num_active(layer) for name, layer in mixtures.items()}
    taken = load_weights(model, _held_here(weights, held, wholes), anew)
    unlike = [name for name, whole in wholes.items() if weights.shapes.get(name, whole) != whole]
    notes = [_why_anew(layer, mixtures[layer], names, shapes | wholes, weights) for layer, names in differing.items()]
    notes += [
        f"{name or 'the model'} has {_experts(_num_active(layer))} now, as there; it was made with {before[name]}"
        for name, layer in mixtures.items()
        if _num_active(layer) != before[name]
    ]
    return replace(
        taken,
        missing=tuple(name for name in taken.missing if name not in unlike),
        other_shape=taken.other_shape
        + tuple(f"{name} {weights.shapes[name]} there, {wholes[name]} in the model" for name in unlike),
        notes=tuple(notes),
        told=frozenset(anew | {name for layer in differing for name in weights.shapes if _is_in(layer, name)}),
    )


def _differing(
    mixtures: Iterable[str], shapes: Mapping[str, tuple[int, ...]], weights: Weights
) -> dict[str, list[str]]:
    """Return the mixtures that have another shape there, with the names of the tensors in question.

    None of their weights are taken: which experts are active, and what these have learned, only make sense together.
    """
    found = {
        layer: [
            name for name in shapes if _is_in(layer, name) and weights.shapes.get(name, shapes[name]) != shapes[name]
        ]
        for layer in mixtures
    }
    return {layer: names for layer, names in found.items() if names}


def _is_in(layer: str, name: str) -> bool:
    return name.startswith(f"{layer}." if layer else "")


def _num_active(layer: MixtureOfExperts) -> int:
    return int(layer.router.active.sum())


def _experts(number: int) -> str:
    return f"{number} active expert{'' if number == 1 else 's'}"


def _why_anew(
    layer: str,
    mixture: MixtureOfExperts,
    names: list[str],
    shapes: Mapping[str, tuple[int, ...]],
    weights: Weights,
) -> str:
    head = f"{layer or 'the model'} starts anew with its {_experts(_num_active(mixture))}, none of its weights are used"
    ids = f"{layer}.expert_ids" if layer else "expert_ids"
    if ids in names and len(weights.shapes[ids]) == 1:
        there = weights.shapes[ids][0]
        return (
            f"{head}: it has {there} slots there and {mixture.num_slots} in the model; "
            f"make it with num_slots={there} to take them"
        )
    name = names[0]
    return (
        f"{head}: {name} is {weights.shapes[name]} there and {shapes[name]} in the model; make both alike to take them"
    )


def _held_here(weights: Weights, held: Mapping[str, HeldExperts], wholes: Mapping[str, tuple[int, ...]]) -> Weights:
    """Return this rank's view of the weights: its own rows of experts, and none of a layer with other slots."""
    shared_out = {name: held[name] for name, whole in wholes.items() if weights.shapes.get(name) == whole}

    def read(name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        if name not in shared_out:
            return weights.read(name, offsets, shape)
        return shared_out[name].read(partial(weights.read, name), weights.shapes[name])

    here = {name: tuple(found.parameter.shape) for name, found in shared_out.items()}
    others = {name: shape for name, shape in weights.shapes.items() if name not in held}
    return replace(weights, shapes=others | here, read=read)


def write_down(taken: WeightsTaken, recorder: NoRunRecorder) -> None:
    recorder.event(
        "weights taken",
        path=str(taken.path),
        taken=taken.taken,
        missing=taken.missing,
        unexpected=taken.unexpected,
        other_shape=taken.other_shape,
        left_out=taken.left_out,
        notes=taken.notes,
    )
    for number, line in enumerate(taken.lines):
        recorder.say(f"  {'' if number else 'weights':<9}  {line}")
