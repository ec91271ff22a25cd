"""DeepSpeed's ZeRO: ranks shard the optimizer's state (stage 1), gradients (2), weights (3).

DeepSpeed averages gradients over ranks, and clips and steps in one call. So the objective is scaled up by the number of
ranks, and a rescaling by the actual count is passed to it as the loss scale, by which it divides before it clips; in
fp16, torch's GradScaler scales the loss, and DeepSpeed gets the product of both. Each micro-step is marked as the last
of its step or not: DeepSpeed does not count them itself.
"""

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from drivetrain.config import Config
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.metrics import StepOutcome
from drivetrain.core.plugins import Conflict
from drivetrain.core.state import Shard, TensorSource
from drivetrain.core.world import World
from drivetrain.strategies.base import Objective, ObjectiveCall, StrategyParts, Trial, rescaling, try_out
from drivetrain.strategies.replicated import share_buffers
from drivetrain.strategies.sharding import Sums, refuse_unless_elementwise
from drivetrain.strategies.spec import Description, StrategyContext, StrategySpec, refuse_without_package
from drivetrain.strategies.zero import (
    Zero,
    ZeroFacts,
    ZeroParts,
    derive,
    keeps_bf16_weights,
    refuse_odd_weights,
    scaler_state,
)

_SHARED_MEMORY = "deepspeed_shm_comm"
_LINEAR = functional.linear  # torch's own: the third stage puts another in its place, for the whole process


class DeepSpeedStrategy:
    """One process per device. `config` is the JSON that DeepSpeed gets (`deepspeed_config.derive`)."""

    name = "deepspeed"

    def __init__(
        self,
        world: World,
        config: Mapping[str, Any],
        *,
        broadcast_buffers: bool = True,
        scaling: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep the configuration. `scaling` is the gradient scaler's initial state in fp16, where a file has one."""
        self._world, self.config = world, dict(config)
        self._scaling = dict(scaling or {})
        self._stage = int(config["zero_optimization"]["stage"])
        self._engine: Any = None
        self._broadcast_buffers = broadcast_buffers

    def prepare(self, parts: StrategyParts, trial: Trial) -> ObjectiveCall:
        self._refuse(parts)
        deepspeed = _load(self._world)
        self._parts = parts
        parts.mixtures.group = self._world.group
        self._objective = Objective(parts, scale=float(self._world.size))  # it averages over ranks; a step is a sum
        self._has_buffers = any(True for _ in parts.model.buffers())
        self._scaler = parts.scaler if parts.precision.scales_loss else None
        if self._scaler is not None and self._scaling:
            self._scaler.load_state_dict(self._scaling)
        self._sums = Sums(self._world)
        self._begins, self._accumulates = True, False
        self._samples = 0
        self._zero_parts = ZeroParts(parts, self._world.rank, self._world.is_main, self._stage)
        for parameter in parts.model.parameters():
            parameter.data = parameter.data.contiguous()  # it sends them as bytes, and flattens them anyway
        if self._stage == 3:
            self._cut(deepspeed, parts.model)
        self._engine, self._zero, _, _ = deepspeed.initialize(
            args=SimpleNamespace(device_rank=self._world.device.index or 0),
            model=self._objective,
            optimizer=parts.optimizer,
            config=self.config,
            dist_init_required=False,
        )
        self._zero.override_loss_scale(1.0)  # from now on the strategy sets it
        self._zero_parts.find(self._zero)
        if parts.average is not None:
            for parameter in parts.model.parameters():
                parts.average.cut(parameter, lambda average: average)  # weights have moved into the flat buffers
        self._engine.set_gradient_accumulation_boundary(True)
        self._try_out(trial)
        return self._call

    def _refuse(self, parts: StrategyParts) -> None:
        parts.frozen.refused = "DeepSpeed steps all weights as one"
        refuse_odd_weights(parts.model)
        refuse_unless_elementwise(parts.optimizer, self.name)
        if isinstance(parts.optimizer, torch.optim.Adagrad):
            raise DrivetrainError(
                "DeepSpeed makes another Adagrad from the job's, without its groups and its schedule",
                remedy="use another optimizer, or --parallel-strategy fsdp",
            )
        if parts.average is not None and (self._stage == 3 or keeps_bf16_weights(self.config)):
            raise DrivetrainError(
                "with deepspeed, a moving average of the weights needs whole float32 weights on every rank",
                remedy="use --zero-stage 2 without bf16 in DeepSpeed's own file, or fsdp; or drop --ema",
            )

    def _cut(self, deepspeed: Any, model: nn.Module) -> None:
        """Shard the model weight by weight: DeepSpeed itself would move the whole model to the device first."""
        if keeps_bf16_weights(self.config):
            for parameter in model.parameters():
                parameter.data = parameter.data.bfloat16()
        dtype = torch.bfloat16 if keeps_bf16_weights(self.config) else torch.float32
        deepspeed.zero.Init(module=model, config_dict_or_path=self.config, dtype=dtype)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(self._world.device)

    def _try_out(self, trial: Trial) -> None:
        """Run a step that is not finite, on purpose: DeepSpeed drops it and its gradients, as any such step."""
        self._used: set[str] = set()  # weights that got a gradient in this step
        for name, parameter in self._parts.model.named_parameters():
            if parameter.requires_grad:
                cast(Any, parameter).register_post_accumulate_grad_hook(lambda _, name=name: self._used.add(name))

        def forgotten(objective: Tensor) -> None:
            self._zero.external_loss_scale = float("nan")
            self._engine.backward(objective, scale_wrt_gas=False)
            with _quietly():
                self._engine.step()
            self._zero.external_loss_scale = 1.0
            self._forget_gradients()

        try_out(self._call, self._parts.model, trial, forgotten)
        self._objective.take_tallies()
        self._parts.forget_step()
        self._begins = True
        self._used_first, self._used = self._used, set()
        self._refuse_other_weights(sorted(self._used_first))
        self._refuse_decay_of_unused()

    def _adapt_scale(self, scaler: torch.amp.GradScaler) -> None:
        """Update the scaler with whether gradients were finite: DeepSpeed found out, for all ranks together."""
        infinite = torch.full((1,), float(self._zero.overflow), device=self._world.device)
        scaler._per_optimizer_states[id(self._parts.optimizer)]["found_inf_per_device"] = {infinite.device: infinite}
        scaler.update()

    def _forget_gradients(self) -> None:
        """Drop the gradients of a step that was skipped.

        With an offloaded optimizer DeepSpeed 0.19 itself keeps the sums that were not finite, adds to them, and so
        skips every step that follows.
        """
        if self._stage < 3:
            for group in self._zero.averaged_gradients:
                self._zero.averaged_gradients[group] = None

    def _refuse_other_weights(self, used: list[str]) -> None:
        """Refuse ranks that use different weights: gradients are reduced in order of arrival, without a check."""
        by_rank = self._world.gather(used)
        for rank, others in enumerate(by_rank):
            if others != by_rank[0]:
                odd = sorted(set(others) ^ set(by_rank[0]))[0]
                raise DrivetrainError(
                    f"ranks 0 and {rank} use different weights ({odd} is used by one of them), and DeepSpeed would "
                    "add the gradients of one weight to those of another",
                    remedy="use every weight on every rank, or --parallel-strategy ddp --find-unused-parameters",
                )

    def _refuse_decay_of_unused(self) -> None:
        """Refuse weight decay of unused weights: their gradient is zero in the flat tensor; only decay moves them."""
        for names, group in zip(self._zero_parts.groups, self._parts.optimizer.param_groups, strict=True):
            unused = [name for name in names if name not in self._used_first]
            if unused and group.get("weight_decay"):
                raise DrivetrainError(
                    f"{unused[0]} is not used by the loss, and DeepSpeed, which steps all weights of a group as one, "
                    f"would still shrink it by the weight decay of {group['weight_decay']}",
                    remedy="set requires_grad = False on it, give it a group without weight decay, or use "
                    "--parallel-strategy ddp --find-unused-parameters",
                )

    def _refuse_other_use(self) -> None:
        """Raise where a step uses other weights than the first: an unused weight would be moved all the same."""
        used, self._used = self._used, set()
        if used != self._used_first:
            odd = sorted(used ^ self._used_first)[0]
            was, is_now = ("not used", "used") if odd in used else ("used", "not used")
            raise DrivetrainError(
                f"{odd} is {is_now} in this step and was {was} in the first one; DeepSpeed steps all weights of a "
                "group as one, and would move a weight that a plain loop leaves alone",
                remedy="use the same weights in every step, or --parallel-strategy ddp --find-unused-parameters",
            )

    def _call(self, batch: Any, num_samples: int, step_samples: int, weight: int) -> Tensor:
        if self._begins:
            self._begins, self._samples = False, step_samples
            if self._has_buffers and self._world.size > 1 and self._broadcast_buffers:
                share_buffers(self._parts.model, self._world)
        objective: Tensor = self._engine(batch, num_samples, step_samples, weight)
        return objective

    def accumulate(self) -> AbstractContextManager[Any]:
        return self._accumulating()

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        self._accumulates = True
        self._engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self._accumulates = False
            self._engine.set_gradient_accumulation_boundary(True)

    def backward(self, objective: Tensor) -> None:
        if not self._accumulates:
            self._sums.send(*self._objective.take_tallies())
        if self._scaler is not None:
            objective = self._scaler.scale(objective)
        self._engine.backward(objective, scale_wrt_gas=False)

    def step(self, stop: float) -> StepOutcome:
        self._refuse_other_use()
        total, count, stopping = self._sums.take()
        if self._objective.counts_items:
            # The host waits for the device. So it does in DeepSpeed's step, to see whether the norm is finite.
            factor = float(rescaling(self._samples, count))
            self._zero.external_loss_scale = 1 / factor if factor else float("inf")
        if self._scaler is not None:
            self._zero.external_loss_scale *= self._scaler.get_scale()
        self._engine.step()
        self._zero.external_loss_scale = 1.0
        if self._scaler is not None:
            self._adapt_scale(self._scaler)
        norm = None
        if self._parts.clip_norm is not None:
            norm = torch.as_tensor(self._engine.get_global_grad_norm(), device=self._world.device)
        self._parts.follow()
        self._begins = True
        self._sums.stop = stop  # travels with the next sums
        skipped = float(self._zero.overflow)
        if skipped:
            self._forget_gradients()
        return self._parts.outcome([(total, 1.0)], count, stopping, norm, skipped)

    def save(self) -> tuple[list[Shard], dict[str, Any]]:
        """Return what this rank updates; on rank 0 also what all ranks have."""
        return self._zero_parts.save()

    def load(self, source: TensorSource) -> None:
        zero = self._zero
        if self._stage == 3:
            zero.checkpoint_event_prologue()  # what was gathered is not to be used any more
            self._zero_parts.load(source)
            for number in range(len(zero.fp16_groups)):
                zero._reassign_or_swap_out_partitioned_parameters(number)
            zero.checkpoint_event_epilogue()
        else:
            self._zero_parts.load(source)
            zero.update_lp_params()

    def close(self) -> None:
        """Restore what DeepSpeed changed in the process. Also called after an error, in any state."""
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None
        if "deepspeed" in sys.modules:
            _forget_last_run()


def _load(world: World) -> Any:
    """Import the package and initialize it over the existing process group."""
    refuse_without_package("deepspeed", SPEC)
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)  # or it takes what it finds
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))
    # DeepSpeed calls functions that torch is going to rename: users can do nothing about it.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    import deepspeed
    import deepspeed.ops

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Only inference uses it, and it would be compiled first, which takes a minute and a compiler.
    deepspeed.ops.__compatible_ops__[_SHARED_MEMORY] = False
    group = world.own_group()
    _forget_last_run()  # it may not have ended well
    deepspeed.init_distributed(dist_backend=dist.get_backend(group), auto_mpi_discovery=False, verbose=False)
    return deepspeed


def _forget_last_run() -> None:
    """Reset DeepSpeed's process group: it keeps the first it sees, and another run in this process may have another."""
    from deepspeed.comm import comm
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.utils import groups

    # Numbers of weights and modules go on from run to run; ranks compare them, and may have had unequally many runs.
    Init.param_id = 0
    parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    parameter_offload.FWD_MODULE_STACK.clear()  # would keep the whole model
    functional.linear = _LINEAR
    groups._release_process_group_references()
    comm.cdb = None


@contextmanager
def _quietly() -> Iterator[None]:
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _config_of(context: StrategyContext) -> dict[str, Any]:
    """Derive the JSON that DeepSpeed gets from the run; raise what contradicts it."""
    global_batch = context.job.largest_batch or 0
    rank_samples = -(-global_batch // context.world.size)  # of the rank that has the most
    config = context.config
    facts = ZeroFacts(
        precision=context.precision,
        world_size=context.world.size,
        micro_batch=context.micro_batch,
        accumulation=-(-rank_samples // context.micro_batch),
        global_batch=global_batch,
        clip_norm=context.job.clip_norm,
        stage=config.deepspeed.stage,
        offload_optimizer=config.deepspeed.offload_optimizer,
        num_weights=context.num_weights,
    )
    zero = _zero_of(context)
    return derive(facts, zero.own, zero.file)


def _zero_of(context: StrategyContext) -> Zero:
    return Zero.of(context.config, on_gpu=context.world.device.type == "cuda")


def _make(context: StrategyContext) -> DeepSpeedStrategy:
    return DeepSpeedStrategy(
        context.world,
        _config_of(context),
        broadcast_buffers=context.config.distributed.broadcast_buffers,
        scaling=scaler_state(_zero_of(context).own),
    )


def _check(context: StrategyContext) -> None:
    _config_of(context)


def _settle(config: Config, on_gpu: bool) -> tuple[Config, list[str]]:
    """Apply the settings that a user's own file names, where nothing else set them."""
    return Zero.of(config, on_gpu=on_gpu).obeyed(config)


def _settle_auto(config: Config, num_processes: int) -> Config:
    """Keep the optimizer in host memory, for which `auto` takes DeepSpeed. Several ranks shard the weights, too."""
    wanted = {"offload_optimizer": True, "stage": 3 if num_processes > 1 else 2}
    return config.model_copy(update={"deepspeed": config.deepspeed.model_copy(update=wanted)})


def _keeps_on_host(config: Config) -> bool:
    """Stage 3 takes the model to the device weight by weight."""
    return Zero.of(config).stage == 3


def _describe(strategy: DeepSpeedStrategy) -> Description:
    """Return the whole configuration that DeepSpeed got: the JSON is derived, and is stored nowhere else."""
    zero = strategy.config["zero_optimization"]
    offload = (zero.get("offload_optimizer") or {}).get("device", "none")
    where = "" if offload == "none" else ", the optimizer in host memory"
    line = f"  deepspeed  ZeRO stage {zero['stage']}{where}; its JSON is in events.jsonl"
    return Description("deepspeed", {"config": strategy.config}, line)


SPEC = StrategySpec(
    make=_make,
    check=_check,
    settle=_settle,
    settle_auto=_settle_auto,
    keeps_on_host=_keeps_on_host,
    describe=_describe,
    memory="zero",
    why_not_captured="deepspeed: its step asks the host whether gradients have overflowed",
    norms=False,  # its step clips and moves the weights in one call
    own_loop="DeepSpeed has to run the forward itself, and dt.drive leaves it to the loop",
    package="deepspeed",
    install="'drivetrain[deepspeed]'",
    options=("deepspeed.stage", "deepspeed.offload_optimizer", "deepspeed.config"),
    options_by_name=True,
    conflicts=(
        Conflict(
            when={"distributed.find_unused_parameters": True},
            message="with {asked} every rank has to use the same weights",
            at="distributed.find_unused_parameters",
            remedy="drop it, or use --parallel-strategy ddp",
        ),
        Conflict(
            when={"compile.enabled": True, "deepspeed.stage": 3},
            message="{asked} gathers weights inside the forward, which cannot be compiled",
            at="compile.enabled",
            asked="deepspeed.stage",
            remedy="drop one of the two, or use --parallel-strategy fsdp",
        ),
    ),
)
