"""The one typed configuration. YAML files, flags and Python all fill these fields; each is documented where it stands.

A field may only be added together with the code that obeys it: `tests/config/test_flags_frozen.py` holds the list.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

from drivetrain.core.faults import ALLOWED as FAULTS_ALLOWED
from drivetrain.core.faults import parse_faults
from drivetrain.core.plugins import STRATEGIES, TRACKERS, Plugins
from drivetrain.core.run_folder import ALLOWED_NAMES, problem_with_name
from drivetrain.core.value import PrecisionName, parse_seconds


class Flag:
    """The short names of a field, besides its dotted one. `-` and `_` are equal; messages show the first."""

    def __init__(self, *names: str) -> None:
        self.names = names


class Switch:
    """Flags without a value that set a field to one of its values: `--use-ddp` is `--parallel-strategy ddp`."""

    def __init__(self, value: str, *names: str) -> None:
        self.value, self.names = value, names


class Positional:
    """Marks the field of a command's options that is given without a flag."""


class Rest:
    """Marks the field of a command's options that takes every word after the first positional one, as it is."""


class AfterDashes:
    """Marks the field of a command's options that takes every word after `--`, as it is."""


class Planned:
    """Marks a field that a plan decides: it may stand in a plan.yaml, and pins the choice where a user sets it."""


class Allowed:
    """The allowed values of a text field in words, where the type alone does not show them."""

    def __init__(self, words: str) -> None:
        self.words = words


class Choices:
    """The allowed words of a text field that are found when asked for, and in words what else may be given.

    In Python an object may be given, too: `plugins` knows its name.
    """

    def __init__(self, find: Callable[[], tuple[str, ...]], others: str, plugins: Plugins) -> None:
        self.find, self.others, self.plugins = find, others, plugins


class Section(BaseModel):
    """A group of fields that belong together."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _name_of_a_run(name: str) -> str:
    """Accept what a job may be named, in any language, unless commands would take it for a flag."""
    problem = problem_with_name(name) or ("commands would take it for a flag" if name.startswith("-") else "")
    if problem:
        raise ValueError(problem)
    return name


def _of_home(path: Path) -> Path:
    """Return a path with the home folder for `~`, which no shell fills in where it stands in a file or in Python."""
    try:
        return path.expanduser()
    except RuntimeError as error:  # there is no such user, or no home
        raise ValueError(f"the home folder for {path.parts[0]} is not known") from error


class RunSection(Section):
    """The run's name, folder and seed."""

    name: Annotated[
        Annotated[str, AfterValidator(_name_of_a_run)] | None, Flag("name"), Allowed(f"{ALLOWED_NAMES}; no - in front")
    ] = Field(None, description="name of the run, and of its folder below output_dir (default: the recipe's name)")
    output_dir: Annotated[Path, AfterValidator(_of_home), Flag("output-dir")] = Field(
        Path("runs"), description="folder that holds the run folders"
    )
    strict: Annotated[bool, Flag("strict")] = Field(
        False, description="refuse to go on with a run whose code or data has changed, instead of reporting it"
    )
    seed: Annotated[int, Flag("seed")] = Field(
        0, ge=0, lt=2**63, description="seed of weights and sample order, in place of a job's own"
    )
    debug: Annotated[bool, Flag("debug")] = Field(
        False,
        description="try the whole path on little: 100 samples for training and 100 for validation, 4 per device and "
        "step, one epoch, in a run folder of its own; what flags say of batch and length goes before it",
    )


class DeviceSection(Section):
    """Which devices may be used."""

    mode: Annotated[Literal["auto", "cpu", "single_gpu", "multi_gpu"], Flag("gpu-mode")] = Field(
        "auto", description="auto takes GPUs where there are any"
    )
    device: Annotated[str, Flag("device"), Allowed("auto, cpu, cuda, cuda:n, mps")] = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$",
        description="one device by name: auto, cpu, cuda, cuda:n or mps",
    )
    ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...] | None, Flag("device-ids")] = Field(
        None, min_length=1, description="the GPUs to use, counted after CUDA_VISIBLE_DEVICES (auto: all)"
    )
    assertions: Annotated[bool, Flag("device-assertions")] = Field(
        False, description="check before every step that model and batch are on the device"
    )


def _no_amp_is_fp32(value: Any) -> Any:
    return "fp32" if value == "none" else value


class PrecisionSection(Section):
    """The number format that the model computes in."""

    dtype: Annotated[
        Literal["auto", PrecisionName],
        BeforeValidator(_no_amp_is_fp32),
        Flag("precision", "precision-type", "amp-dtype"),
        Planned(),
    ] = Field(
        "auto",
        description="fp32, tf32, fp16, bf16, fp8 or fp8-tensor; auto is bf16 on compute capability 8.0 and newer, fp16 "
        "before, fp32 on a CPU; none is fp32; fp8 is bf16 with linear layers of blocks in FP8, scaled by row (9.0), "
        "and fp8-tensor by tensor (8.9)",
    )
    mixed: Annotated[bool | None, Flag("mixed-precision")] = Field(
        None, description="false is fp32; true leaves fp32 out of what auto may take (auto: as precision says)"
    )


class KernelSection(Section):
    """Kernels: determinism, CUDA-graph capture, CPU threads."""

    deterministic: Annotated[bool, Flag("deterministic")] = Field(
        False, description="only kernels that give the same bits every time; an operation without one is an error"
    )
    repeatable: Annotated[Literal["auto", "off", "fixed", "strict"], Flag("repeatable"), Planned()] = Field(
        "auto",
        description="which kernels: off is the fastest; fixed none that is chosen by timing; "
        "strict is --deterministic; auto measures on a GPU whether steps repeat to the bit, and takes the first "
        "of these that does if it costs at most 3%",
    )
    num_threads: Annotated[int | None, Flag("num-threads"), Planned()] = Field(
        None, ge=1, description="threads that a CPU computes with (auto: one or all, as measured, else as torch has it)"
    )
    cudnn_benchmark: Annotated[bool, Flag("cudnn-benchmark")] = Field(
        True, description="let cuDNN try its convolutions on the first batch and take the fastest"
    )
    capture: Annotated[Literal["auto", "on", "off"], Flag("capture"), Planned()] = Field(
        "auto",
        description="record a step as a CUDA graph and replay it, where batches have few shapes; on says why where it "
        "cannot be; auto is off while nothing is measured",
    )


class MemorySection(Section):
    """Device memory: recomputing or offloading activations."""

    activations: Annotated[Literal["auto", "keep", "recompute", "offload"], Flag("activations"), Planned()] = Field(
        "auto",
        description="keep them for backward, recompute them block by block, or offload them to host memory; "
        "auto recomputes where little memory is free",
    )
    gpu_fraction: Annotated[float, Flag("gpu-memory-fraction")] = Field(
        0.9,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="the part of a device's free memory that a plan may use (of the host's, on a CPU)",
    )


class BatchSection(Section):
    """How many samples a step sees (size × accumulation × devices), and how losses are weighted."""

    size: Annotated[int | None, Flag("batch-size"), Planned()] = Field(
        None, ge=1, description="samples per device and micro-step (auto: by memory, or the recipe's)"
    )
    accumulation: Annotated[int | None, Flag("accumulation-steps"), Planned()] = Field(
        None,
        ge=1,
        description="micro-steps per optimizer step (auto: by memory, or the recipe's); a job's own global batch "
        "stays and is cut into so many, a recipe's batch is multiplied by it",
    )
    auto: Annotated[bool, Flag("auto-batch-size")] = Field(
        False,
        description="measure how many samples per device and micro-step are fastest, on a CPU too; the samples of a "
        "step stay what the job, the recipe or --batch-size says, and are as many as that where none of them does",
    )
    loss_weighting: Annotated[Literal["auto", "samples", "tokens", "sum"], Flag("loss-weighting")] = Field(
        "auto",
        description="how scalar losses of micro-batches are put together: as means over samples, as means over a count "
        "in the batch (labels that are not ignored, a mask), or as sums; auto measures which one the loss is",
    )

    @property
    def is_set(self) -> bool:
        return self.size is not None or self.accumulation is not None


class BudgetSection(Section):
    """When training ends: at whichever comes first."""

    epochs: Annotated[int | None, Flag("epochs")] = Field(
        None, ge=1, description="passes over the data (auto: the job's)"
    )
    max_steps: Annotated[int | None, Flag("max-steps")] = Field(
        None, ge=1, description="optimizer steps at most (auto: no limit)"
    )


class OptimizerSection(Section):
    """The optimizer's settings."""

    learning_rate: Annotated[float | None, Flag("learning-rate", "lr")] = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="highest learning rate; other groups of the optimizer keep their ratio to it (auto: the job's own)",
    )
    weight_decay: Annotated[float | None, Flag("weight-decay")] = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="weight decay for weights of two dimensions and more (auto: the job's own)",
    )
    clip_norm: Annotated[float | None, Flag("clip-norm")] = Field(
        None, gt=0, allow_inf_nan=False, description="gradient norm to clip to (auto: the job's own, else none)"
    )
    warmup_steps: Annotated[int | None, Flag("warmup-steps")] = Field(
        None, ge=0, description="steps of the schedule's warm-up (auto: the job's own)"
    )
    ema: Annotated[float | None, Flag("ema")] = Field(
        None, gt=0, lt=1, description="decay of a moving average of the weights, such as 0.999 (auto: the job's own)"
    )


class MoeSection(Section):
    """Mixtures of experts, in recipes that have one."""

    experts: Annotated[int | None, Flag("experts")] = Field(
        None, ge=1, description="how many experts a mixture starts with (auto: the recipe's)"
    )


def _as_texts(value: Any) -> Any:
    """Convert numbers to texts: YAML reads `[0, 1]` as numbers; labels are texts."""
    if isinstance(value, (list, tuple)):
        return [str(each) if isinstance(each, int) and not isinstance(each, bool) else each for each in value]
    return value


class RecipeSection(Section):
    """Which variant of a recipe is trained, and how it reads files of your own."""

    size: Annotated[Literal["small", "full"], Flag("size")] = Field(
        "small", description="small trains in at most two minutes on two cores; full is meant for a GPU"
    )
    baseline: Annotated[str | None, Flag("baseline")] = Field(
        None,
        description="train the recipe's baseline of this name instead (email-sequence: bag-of-words; image-pairs: "
        "no-swap-loss, both-orders; chest-xray-vqa: image-blind, question-blind)",
    )
    text_column: Annotated[str, Flag("text-column")] = Field("text", description="column of the texts in --data")
    label_column: Annotated[str, Flag("label-column")] = Field("label", description="column of the labels in --data")
    labels: Annotated[tuple[str, ...], BeforeValidator(_as_texts), Flag("labels")] = Field(
        ("0", "1"), min_length=2, description="the labels that may occur in --data"
    )
    tokenizer: Annotated[Path | None, Flag("tokenizer")] = Field(
        None, description="gpt: the tokenizer.json of a byte-pair encoding (auto: bytes)"
    )
    backbone: Annotated[Path | None, Flag("backbone")] = Field(
        None,
        description="image-pairs: freeze this backbone and train low-rank adapters on it: a local folder of Hugging "
        "Face's, or an earlier run; chest-xray-vqa: train this local folder of Hugging Face's with the rest (auto: a "
        "small backbone of its own, trained with the rest)",
    )
    phase: Annotated[Literal["all", "pretrain", "finetune"], Flag("phase")] = Field(
        "all",
        description="chest-xray-vqa: the questions that are trained on: all, those of grades C and D (pretrain), or "
        "those of A and B (finetune, with --init-from the run of the pre-training)",
    )
    fold: Annotated[int, Flag("fold")] = Field(
        0, ge=0, le=4, description="image-pairs: the fold of five whose images are held out"
    )
    swap_weight: Annotated[float, Flag("swap-weight")] = Field(
        2.0, ge=0, allow_inf_nan=False, description="image-pairs: weight of the swap loss, reached at half of the job"
    )
    similar_within: Annotated[float, Flag("similar-within")] = Field(
        0.2, ge=0, allow_inf_nan=False, description="image-pairs: scores of --data that differ by no more are similar"
    )
    context: Annotated[Literal["plain", "two-region"], Flag("context")] = Field(
        "plain",
        description="what darkroom's transformer sees of its past: the last episodes, or a region that grows and the "
        "full one before it",
    )
    n_transit: Annotated[int | None, Flag("n-transit")] = Field(
        None, ge=1, description="steps in a context of darkroom's transformer (default: by size)"
    )
    tf_n_embd: Annotated[int | None, Flag("tf-n-embd")] = Field(
        None, ge=1, description="width of darkroom's transformer (default: by size)"
    )
    tf_n_layer: Annotated[int | None, Flag("tf-n-layer")] = Field(
        None, ge=1, description="blocks of darkroom's transformer (default: by size)"
    )


class ValidationSection(Section):
    """Validation and early stopping."""

    every: Annotated[int | None, Flag("valid-every")] = Field(
        None, ge=1, description="optimizer steps between validations (auto: the job's own, else each epoch's end)"
    )
    batch_size: Annotated[int | None, Flag("valid-batch-size")] = Field(
        None, ge=1, description="samples per device in each forward of a validation (auto: as in training)"
    )
    patience: Annotated[int | None, Flag("patience")] = Field(
        None, ge=1, description="stop after so many validations without a better loss (auto: the job's own, else never)"
    )


class DataSection(Section):
    """How samples reach the device."""

    num_workers: Annotated[int, Flag("num-workers"), Planned()] = Field(
        -1, ge=-1, description="loader processes per rank; -1 is automatic, 0 loads in the training process"
    )
    total_workers: Annotated[int | None, Flag("dataloader-num-workers", "total-workers")] = Field(
        None, ge=0, description="loader processes of all ranks on a machine together, shared out evenly (auto: not set)"
    )
    path: Annotated[Path | None, Flag("data")] = Field(None, description="file or folder that the recipe reads")
    pin_memory: Annotated[bool | None, Flag("pin-memory")] = Field(
        None, description="page-locked host memory for faster copies (auto: where there is a GPU)"
    )
    prefetch_factor: Annotated[int | None, Flag("prefetch-factor"), Planned()] = Field(
        None, ge=1, description="micro-batches that each loader process fetches ahead (auto: 2 to 4, by memory)"
    )
    resident: Annotated[Literal["auto", "on", "off"], Flag("resident"), Planned()] = Field(
        "auto",
        description="hold the data set on the device and gather batches there; auto: if it is made of tensors that fit "
        "a quarter of the free memory; on: or stop with the reason",
    )
    channels_last: Annotated[Literal["auto", "on", "off"], Flag("channels-last"), Planned()] = Field(
        "auto", description="images and convolutions with channels innermost; auto is off where nothing is measured"
    )


class CheckpointSection(Section):
    """Checkpoints: how often, how many, and what a run starts from."""

    every: Annotated[Annotated[int, Field(ge=1)] | Literal["epoch"] | None, Flag("checkpoint-every")] = Field(
        None,
        description="optimizer steps between checkpoints, or epoch (auto: the job's own, else by the cost of one)",
    )
    seconds: Annotated[float | None, Flag("checkpoint-seconds")] = Field(
        None, gt=0, allow_inf_nan=False, description="seconds between checkpoints (auto: by what a save costs)"
    )
    mtbf_hours: Annotated[float, Flag("mtbf-hours")] = Field(
        4.0,
        gt=0,
        allow_inf_nan=False,
        description="mean time between failures, until some were observed: it says how often checkpoints are due",
    )
    keep_last: Annotated[int | None, Flag("keep-last")] = Field(
        None, ge=1, description="how many checkpoints stay (auto: the job's own, else 3)"
    )
    async_save: Annotated[bool, Flag("async-save")] = Field(
        True, description="write checkpoints beside training, from a copy in host memory; off, training waits for each"
    )
    check_finite: Annotated[bool, Flag("check-finite")] = Field(
        True, description="never save trained weights or optimizer moments that are NaN or infinite"
    )
    init_from: Annotated[Path | None, Flag("init-from")] = Field(
        None,
        description="weights that a new run starts with: a .safetensors file, the folder of a run, or one of its "
        "checkpoints (auto: the job's own)",
    )
    fresh: Annotated[bool, Flag("fresh")] = Field(
        False, description="begin anew: move a run that has this name aside, to NAME.old-1; nothing is deleted"
    )
    extend: Annotated[bool, Flag("extend")] = Field(
        False, description="go on with the run of this name, finished or not, to the longer --epochs or --max-steps"
    )
    extend_schedule: Annotated[Literal["floor", "stretch", "rewarm"] | None, Flag("extend-schedule")] = Field(
        None,
        description="--extend, for a schedule that depends on the number of steps: floor keeps the rate at which it "
        "ended, stretch follows that of the longer job, rewarm begins it again for the steps that are added (auto: "
        "refused)",
    )

    @property
    def extends(self) -> bool:
        """Whether a run is to be made longer."""
        return self.extend or self.extend_schedule is not None


def _known_strategy(name: str) -> str:
    """Accept `auto`, the name of a strategy, and `package.module:SPEC`, which is loaded by the process that trains."""
    if name != "auto" and not STRATEGIES.target(name):
        raise ValueError(f"there is no strategy {name}")
    return name


class DistributedSection(Section):
    """How several processes work together."""

    strategy: Annotated[
        str,
        AfterValidator(_known_strategy),
        Choices(lambda: ("auto", *STRATEGIES.names()), "package.module:SPEC of a strategy of your own", STRATEGIES),
        Flag("parallel-strategy"),
        Planned(),
        Switch("deepspeed", "deepspeed", "use-deepspeed"),
        Switch("ddp", "use-ddp"),
    ] = Field(
        "auto",
        description="how devices share a step: auto is ddp where a launcher started several processes (fsdp where a "
        "whole copy of model and optimizer does not fit a GPU), else single; data_parallel is one process for several "
        "GPUs; expert_parallel is ddp with the experts of mixtures shared out; deepspeed is its ZeRO",
    )
    expert_rest: Annotated[Literal["ddp", "fsdp"], Flag("expert-rest"), Planned()] = Field(
        "ddp",
        description="expert_parallel, all but the experts: ddp, a whole copy on each rank, or fsdp, a part on each",
    )
    fsdp_offload: Annotated[bool, Flag("fsdp-offload")] = Field(
        False, description="fsdp: keep shards and optimizer in host memory, and step the optimizer there"
    )
    fsdp_cast: Annotated[Literal["operations", "blocks"], Flag("fsdp-cast")] = Field(
        "operations",
        description="fsdp in bf16 or fp16: cast for each operation, as other strategies do, or a block's weights and "
        "inputs once: half the communication and less memory, other rounding",
    )
    fsdp_accumulate: Annotated[Literal["whole", "shards"], Flag("fsdp-accumulate")] = Field(
        "whole",
        description="fsdp, between micro-steps: keep whole gradients without communicating, or reduce them to shards "
        "every time, which takes less memory",
    )
    fsdp_reshard: Annotated[Literal["auto", "on", "off"], Flag("fsdp-reshard"), Planned()] = Field(
        "auto",
        description="fsdp: free a block's weights after its forward and gather them again for its backward; off keeps "
        "them, which communicates less and takes more memory; auto is on where nothing is measured",
    )
    fsdp_unit_blocks: Annotated[int | None, Flag("fsdp-unit-blocks"), Planned()] = Field(
        None,
        ge=1,
        description="fsdp: blocks that are gathered together: fewer and larger messages, more memory (auto: 1 where "
        "nothing is measured)",
    )
    fsdp_gather_ahead: Annotated[int | None, Flag("fsdp-gather-ahead"), Planned()] = Field(
        None,
        ge=0,
        description="fsdp: units that are gathered while another one computes (auto: 0, as torch does it, where "
        "nothing is measured)",
    )
    fsdp_replicas: Annotated[int, Flag("fsdp-replicas")] = Field(
        1,
        ge=1,
        description="fsdp: copies of the model, each shared by ranks that follow one another (HSDP): with as many as "
        "machines, weights are gathered within a machine, and only gradients go between them",
    )
    backend: Annotated[Literal["auto", "nccl", "gloo"], Flag("backend")] = Field(
        "auto", description="auto is nccl where each process has a GPU, else gloo"
    )
    init_method: Annotated[str | None, Flag("init-method"), Allowed("env://, tcp://HOST:PORT, file:///PATH")] = Field(
        None, pattern=r"^(env|tcp|file)://", description="where processes meet (default: as the launcher set it)"
    )
    timeout_seconds: Annotated[float, Flag("timeout-seconds")] = Field(
        600, gt=0, allow_inf_nan=False, description="how long a collective may take before the run is stopped"
    )
    find_unused_parameters: Annotated[bool, Flag("find-unused-parameters")] = Field(
        False, description="for models that do not use every parameter in every step"
    )
    broadcast_buffers: Annotated[bool, Flag("broadcast-buffers")] = Field(
        True, description="give all ranks the buffers of rank 0 before each forward"
    )
    bucket_cap_mb: Annotated[float | None, Flag("bucket-cap-mb")] = Field(
        None, gt=0, allow_inf_nan=False, description="size of the gradient buckets (auto: torch's own, 25)"
    )
    static_graph: Annotated[bool, Flag("static-graph")] = Field(
        False, description="promise that every step uses the same parameters"
    )
    gradient_as_bucket_view: Annotated[bool, Flag("gradient-as-bucket-view")] = Field(
        True, description="keep gradients in the buckets: one copy less"
    )
    sync_batchnorm: Annotated[bool, Flag("sync-batchnorm")] = Field(
        False, description="batch statistics over all ranks; needs GPUs"
    )
    skip_preflight: Annotated[bool, Flag("skip-preflight")] = Field(
        False, description="do not compare the ranks and try their connections before the model is made"
    )


class DeepSpeedSection(Section):
    """DeepSpeed's settings; the rest of its JSON follows from the run."""

    stage: Annotated[int | None, Flag("zero-stage")] = Field(
        None,
        ge=1,
        le=3,
        description="what ranks divide: 1 the optimizer's state, 2 gradients too, 3 weights too (auto: as "
        "deepspeed.config says, else 2)",
    )
    offload_optimizer: Annotated[bool | None, Flag("offload-optimizer"), Planned()] = Field(
        None,
        description="keep the optimizer's state in host memory, and step there (auto: as deepspeed.config says, else "
        "not)",
    )
    config: Annotated[Path | None, Flag("deepspeed-config")] = Field(
        None, description="your own deepspeed_config.json; what in it contradicts the run is an error"
    )


class CompileSection(Section):
    """torch.compile."""

    enabled: Annotated[bool | None, Flag("compile"), Planned()] = Field(
        None, description="compile the model before training (auto: where measuring shows that it pays)"
    )
    mode: Annotated[Literal["default", "reduce-overhead", "max-autotune"], Flag("compile-mode"), Planned()] = Field(
        "default", description="what the compiler spends its time on; needs --compile"
    )
    scope: Annotated[Literal["auto", "loss", "blocks", "both"], Flag("compile-scope"), Planned()] = Field(
        "auto",
        description="compile the whole loss function with the model inside; or each block that the model repeats, "
        "which takes the compiler a fraction of the time; or both: the blocks, and the loss function around them "
        "(auto: measured where compiling is auto; otherwise loss)",
    )
    from_step: Annotated[Annotated[int, Field(ge=0)] | Literal["ready"] | None, Flag("compile-from"), Planned()] = (
        Field(
            None,
            description="compile in the background: ready trains eagerly while another process compiles, and goes over "
            "to the compiled code once it is there; a number goes over after so many steps; needs --compile "
            "(auto: compile before the first step)",
        )
    )
    only: Annotated[tuple[str, ...], Flag("compile-only")] = Field(
        (),
        description="compile only the modules with these names, such as router or blocks.0, instead of the whole loss; "
        "experts stands for mixtures of experts; needs --compile",
    )


def _seconds_in_words(value: Any) -> Any:
    """Convert `60s` to 60."""
    return parse_seconds(value) if isinstance(value, str) else value


class PlanSection(Section):
    """How the plan is made: by measuring, by rule, or from a file."""

    auto_optimize: Annotated[bool, Flag("auto-optimize")] = Field(
        True,
        description="measure ways of running a step on a copy of the model before training, where the job is long "
        "enough to gain from it; off goes by rule",
    )
    budget_seconds: Annotated[float, BeforeValidator(_seconds_in_words), Flag("plan-budget", "budget")] = Field(
        60, gt=0, allow_inf_nan=False, description="seconds for measuring at most, compiling aside"
    )
    file: Annotated[Path | None, Flag("plan")] = Field(
        None, description="a plan.yaml of `drivetrain plan --out` or of a run: its choices are pinned (auto: none)"
    )
    cache: Annotated[bool, Flag("plan-cache")] = Field(
        True, description="keep what was measured for the next start of the same job, and use it"
    )


def _first_before_last(window: str | None) -> str | None:
    if window is not None and int(window.split(":")[0]) > int(window.split(":")[1]):
        raise ValueError("the first step comes after the last")
    return window


def _known_faults(text: str) -> str:
    parse_faults(text)
    return text


def _known_tracker(name: str) -> str:
    """Accept the name of a tracker, and `package.module:prepare`, which is loaded by the process that trains."""
    if not TRACKERS.target(name):
        raise ValueError(f"there is no tracker {name}")
    return name


class WatchSection(Section):
    """What is measured and shown during a run."""

    trackers: Annotated[
        tuple[Annotated[str, AfterValidator(_known_tracker)], ...],
        Choices(TRACKERS.names, "package.module:prepare of your own tracker", TRACKERS),
        Flag("trackers"),
    ] = Field(
        (),
        description="where figures go besides the run folder's own files: tensorboard, wandb, or your own as "
        "package.module:prepare",
    )
    log_every: Annotated[int | None, Flag("log-every")] = Field(
        None,
        ge=0,
        description="steps between points of speed, phases and trackers, and between lines on the terminal (auto: 10, "
        "at most two points a second, and a line per epoch); 0 measures none of it",
    )
    monitor_gpu: Annotated[bool, Flag("monitor-gpu")] = Field(
        True, description="write what the devices of the run do (memory, load, temperature, power) to gpu.jsonl"
    )
    gpu_log_interval: Annotated[int | None, Flag("gpu-log-interval")] = Field(
        None, ge=0, description="steps between rows of gpu.jsonl (auto: a row every 5 seconds); 0 writes none"
    )
    profile: Annotated[
        str | None,
        AfterValidator(_first_before_last),
        Flag("profile"),
        Allowed("first:last step, such as 10:15; in quotes in YAML"),
    ] = Field(
        None,
        pattern=r"^[1-9]\d*:[1-9]\d*$",
        description="steps to watch with torch.profiler, the first and the last, such as 10:15",
    )
    bad_steps: Annotated[Literal["skip", "stop"], Flag("bad-steps")] = Field(
        "skip",
        description="what follows a loss or gradients that are not finite: skip leaves the weights as they were, on "
        "all ranks, and goes back to a checkpoint after three in a row; stop ends the run",
    )
    spikes: Annotated[Literal["alert", "rollback", "off"], Flag("spikes")] = Field(
        "alert",
        description="what follows a loss far above those before it: a line, or going back to the last checkpoint and "
        "past these batches, at most three times",
    )
    compare_replicas: Annotated[int | None, Flag("compare-replicas")] = Field(
        None,
        ge=0,
        description="steps between comparisons of weights and moments that all ranks must have alike (auto: 100, or as "
        "many as keep it below 0.5 % of the time); 0 compares none",
    )
    inject: Annotated[str, AfterValidator(_known_faults), Flag("inject"), Allowed(FAULTS_ALLOWED)] = Field(
        "",
        description="faults to inject into the run, each once, to see what it survives, such as kill@120:rank1: in "
        "step 120, on rank 1 (default: every rank); several separated by commas",
    )
    report: Annotated[bool, Flag("report")] = Field(
        True,
        description="write report.html and performance_summary.txt at the end, and pictures of runs that took a minute "
        "or have experts; given by name, it draws them of any run",
    )
    quiet: Annotated[bool, Flag("quiet")] = Field(False, description="show nothing but errors on the terminal")


@dataclass(frozen=True)
class PlanPins:
    """The part of a configuration that comes from a plan's file."""

    lines: Mapping[str, str] = field(default_factory=dict)  # by setting, where in the file it stands: `a.yaml line 3`
    global_batch: int | None = None  # of the job that was planned; None: the file does not say


class Config(Section):
    """Everything a user can set. `configure()` makes one from names, files and values, with every error at once.

    Args:
        run: The run's name, folder and seed.
        device: Which devices may be used.
        precision: The number format that the model computes in.
        kernels: Kernels: determinism, CUDA-graph capture, CPU threads.
        memory: Device memory: recomputing or offloading activations.
        batch: How many samples a step sees (size × accumulation × devices), and how losses are weighted.
        budget: When training ends: at whichever comes first.
        optimizer: The optimizer's settings.
        moe: Mixtures of experts, in recipes that have one.
        recipe: Which variant of a recipe is trained, and how it reads files of your own.
        validation: Validation and early stopping.
        data: How samples reach the device.
        compile: torch.compile.
        plan: How the plan is made: by measuring, by rule, or from a file.
        checkpoint: Checkpoints: how often, how many, and what a run starts from.
        distributed: How several processes work together.
        deepspeed: DeepSpeed's settings; the rest of its JSON follows from the run.
        watch: What is measured and shown during a run.

    Example:
        >>> dt.configure(epochs=3).budget.epochs
        3
    """

    run: RunSection = RunSection()
    device: DeviceSection = DeviceSection()
    precision: PrecisionSection = PrecisionSection()
    kernels: KernelSection = KernelSection()
    memory: MemorySection = MemorySection()
    batch: BatchSection = BatchSection()
    budget: BudgetSection = BudgetSection()
    optimizer: OptimizerSection = OptimizerSection()
    moe: MoeSection = MoeSection()
    recipe: RecipeSection = RecipeSection()
    validation: ValidationSection = ValidationSection()
    data: DataSection = DataSection()
    compile: CompileSection = CompileSection()
    plan: PlanSection = PlanSection()
    checkpoint: CheckpointSection = CheckpointSection()
    distributed: DistributedSection = DistributedSection()
    deepspeed: DeepSpeedSection = DeepSpeedSection()
    watch: WatchSection = WatchSection()
    _plan_pins: PlanPins = PrivateAttr(PlanPins())
    _notes: tuple[str, ...] = PrivateAttr(())
    _foreign: frozenset[str] = PrivateAttr(frozenset())

    @property
    def plan_pins(self) -> PlanPins:
        return self._plan_pins

    def with_plan_pins(self, pins: PlanPins) -> Self:
        changed = self.model_copy()
        changed._plan_pins = pins
        return changed

    @property
    def foreign(self) -> frozenset[str]:
        """The fields that a file for another trainer set: those that cannot be obeyed are reported, not refused."""
        return self._foreign

    def with_foreign(self, names: frozenset[str]) -> Self:
        changed = self.model_copy()
        changed._foreign = names
        return changed

    @property
    def notes(self) -> tuple[str, ...]:
        """The translations of another trainer's file that were not reported yet."""
        return self._notes

    def with_notes(self, notes: tuple[str, ...]) -> Self:
        changed = self.model_copy()
        changed._notes = notes
        return changed

    @property
    def batch_asked(self) -> BatchSection:
        """The user's settings of the global batch. A plan's file has none: it only divides a step."""
        of_plan = {name: None for name in BatchSection.model_fields if f"batch.{name}" in self._plan_pins.lines}
        return self.batch.model_copy(update=of_plan)

    def value(self, name: str) -> Any:
        """Return the value of a setting by its dotted name, such as `kernels.capture`."""
        section, _, field_name = name.partition(".")
        return getattr(getattr(self, section), field_name)

    def pins(self) -> dict[str, Any]:
        """Return the choices that it pins, in the planner's terms: `plan` does not import `config`."""
        return {
            "gpu_mode": self.device.mode,
            "device": self.device.device,
            "device_ids": self.device.ids,
            "precision": "fp32" if self.precision.mixed is False else self.precision.dtype,
            "mixed": self.precision.mixed,
            "activations": self.memory.activations,
            "strategy": self.distributed.strategy,
            "micro_batch": self.batch_asked.size,
            "accumulation": self.batch_asked.accumulation,
            "num_workers": None if self.data.num_workers == -1 else self.data.num_workers,
            "pin_memory": self.data.pin_memory,
            "prefetch_factor": self.data.prefetch_factor,
            "zero_stage": self.deepspeed.stage,
        }
