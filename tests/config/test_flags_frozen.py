"""The list of flags. It grows only together with code that obeys the new flag."""

import functools
import re
from pathlib import Path

import pytest

from drivetrain.cli import COMMANDS, flag_parser
from drivetrain.config import BY_NAME, SETTINGS
from drivetrain.plan.knobs import KNOBS

FLAGS = {
    "run.name": ["--name"],
    "run.output_dir": ["--output-dir"],
    "run.seed": ["--seed"],
    "run.strict": ["--strict"],
    "run.debug": ["--debug"],
    "checkpoint.fresh": ["--fresh"],
    "checkpoint.extend": ["--extend"],
    "checkpoint.extend_schedule": ["--extend-schedule"],
    "device.mode": ["--gpu-mode"],
    "device.device": ["--device"],
    "device.ids": ["--device-ids"],
    "device.assertions": ["--device-assertions"],
    "precision.dtype": ["--precision", "--precision-type", "--amp-dtype"],
    "precision.mixed": ["--mixed-precision"],
    "kernels.cudnn_benchmark": ["--cudnn-benchmark"],
    "memory.gpu_fraction": ["--gpu-memory-fraction"],
    "batch.size": ["--batch-size"],
    "batch.accumulation": ["--accumulation-steps"],
    "batch.auto": ["--auto-batch-size"],
    "batch.loss_weighting": ["--loss-weighting"],
    "budget.epochs": ["--epochs"],
    "budget.max_steps": ["--max-steps"],
    "optimizer.learning_rate": ["--learning-rate", "--lr"],
    "optimizer.weight_decay": ["--weight-decay"],
    "optimizer.clip_norm": ["--clip-norm"],
    "optimizer.warmup_steps": ["--warmup-steps"],
    "optimizer.ema": ["--ema"],
    "moe.experts": ["--experts"],
    "recipe.size": ["--size"],
    "recipe.baseline": ["--baseline"],
    "recipe.text_column": ["--text-column"],
    "recipe.label_column": ["--label-column"],
    "recipe.labels": ["--labels"],
    "recipe.tokenizer": ["--tokenizer"],
    "recipe.backbone": ["--backbone"],
    "recipe.phase": ["--phase"],
    "recipe.fold": ["--fold"],
    "recipe.swap_weight": ["--swap-weight"],
    "recipe.similar_within": ["--similar-within"],
    "recipe.context": ["--context"],
    "recipe.n_transit": ["--n-transit"],
    "recipe.tf_n_embd": ["--tf-n-embd"],
    "recipe.tf_n_layer": ["--tf-n-layer"],
    "validation.every": ["--valid-every"],
    "validation.batch_size": ["--valid-batch-size"],
    "validation.patience": ["--patience"],
    "data.num_workers": ["--num-workers"],
    "data.total_workers": ["--dataloader-num-workers", "--total-workers"],
    "data.pin_memory": ["--pin-memory"],
    "data.prefetch_factor": ["--prefetch-factor"],
    "data.resident": ["--resident"],
    "data.path": ["--data"],
    "checkpoint.every": ["--checkpoint-every"],
    "checkpoint.seconds": ["--checkpoint-seconds"],
    "checkpoint.mtbf_hours": ["--mtbf-hours"],
    "checkpoint.keep_last": ["--keep-last"],
    "checkpoint.async_save": ["--async-save"],
    "checkpoint.check_finite": ["--check-finite"],
    "checkpoint.init_from": ["--init-from"],
    "distributed.strategy": ["--parallel-strategy", "--deepspeed", "--use-deepspeed", "--use-ddp"],
    "distributed.expert_rest": ["--expert-rest"],
    "distributed.fsdp_offload": ["--fsdp-offload"],
    "distributed.fsdp_cast": ["--fsdp-cast"],
    "distributed.fsdp_accumulate": ["--fsdp-accumulate"],
    "distributed.fsdp_replicas": ["--fsdp-replicas"],
    "distributed.backend": ["--backend"],
    "distributed.init_method": ["--init-method"],
    "distributed.timeout_seconds": ["--timeout-seconds"],
    "distributed.find_unused_parameters": ["--find-unused-parameters"],
    "distributed.broadcast_buffers": ["--broadcast-buffers"],
    "distributed.bucket_cap_mb": ["--bucket-cap-mb"],
    "distributed.static_graph": ["--static-graph"],
    "distributed.gradient_as_bucket_view": ["--gradient-as-bucket-view"],
    "distributed.sync_batchnorm": ["--sync-batchnorm"],
    "distributed.skip_preflight": ["--skip-preflight"],
    "deepspeed.stage": ["--zero-stage"],
    "deepspeed.offload_optimizer": ["--offload-optimizer"],
    "deepspeed.config": ["--deepspeed-config"],
    "compile.enabled": ["--compile"],
    "compile.mode": ["--compile-mode"],
    "compile.from_step": ["--compile-from"],
    "compile.only": ["--compile-only"],
    "compile.scope": ["--compile-scope"],
    "plan.auto_optimize": ["--auto-optimize"],
    "plan.budget_seconds": ["--plan-budget", "--budget"],
    "plan.file": ["--plan"],
    "plan.cache": ["--plan-cache"],
    "watch.trackers": ["--trackers"],
    "watch.log_every": ["--log-every"],
    "watch.monitor_gpu": ["--monitor-gpu"],
    "watch.gpu_log_interval": ["--gpu-log-interval"],
    "watch.profile": ["--profile"],
    "watch.bad_steps": ["--bad-steps"],
    "watch.spikes": ["--spikes"],
    "watch.compare_replicas": ["--compare-replicas"],
    "watch.inject": ["--inject"],
    "watch.report": ["--report"],
    "watch.quiet": ["--quiet"],
}
# What pins a planned choice has one flag, named as its field, unless it is listed above: the table of these is KNOBS.
FLAGS |= {
    name: [f"--{name.partition('.')[2].replace('_', '-')}"]
    for knob in KNOBS
    for name in knob.settings
    if name not in FLAGS
}
PLACE = ["run.output_dir", "device.mode", "device.device", "device.ids"]
OBEYED = {
    "cache": [],
    "check": [
        *PLACE,
        *(
            "precision.dtype",
            "precision.mixed",
            "memory.activations",
            "batch.size",
            "batch.accumulation",
            "distributed.strategy",
        ),
        *("data.num_workers", "data.pin_memory", "data.prefetch_factor"),
    ],
    "verify": PLACE,
    "status": ["run.output_dir"],
    "report": ["run.output_dir"],
    "compare": ["run.output_dir"],
    "monitor": ["run.output_dir"],
    "train": list(FLAGS),
    "sweep": list(FLAGS),
    "launch": ["run.output_dir", "distributed.skip_preflight", "watch.inject"],
    "plan": [
        name
        for name in FLAGS
        if not name.startswith(("watch.", "checkpoint.", "validation.")) and name != "plan.auto_optimize"
    ],
    "benchmark": [
        name
        for name in FLAGS
        if not name.startswith(("watch.", "checkpoint.", "validation.", "plan."))
        and name not in ("batch.auto", "batch.loss_weighting")
    ],
    "find-lr": [
        name
        for name in FLAGS
        if not name.startswith(("watch.", "checkpoint.", "validation.", "plan.", "budget.", "optimizer."))
        or name in ("optimizer.weight_decay", "optimizer.clip_norm", "checkpoint.init_from")
    ],
    "prove": [
        name
        for name in FLAGS
        if not name.startswith(("watch.", "checkpoint.", "validation.", "plan.")) or name == "watch.quiet"
    ],
    "eval": [
        name
        for name in FLAGS
        if name in (*PLACE[1:], "batch.size", "memory.activations")
        or name.startswith(("precision.", "kernels.", "data.", "distributed."))
    ],
    "continual": [
        name
        for name in FLAGS
        if name in (*PLACE, "run.name", "watch.quiet") or name.startswith(("precision.", "kernels."))
    ],
    "config": list(FLAGS),
}
LAUNCH_FLAGS = [
    *("--num-processes", "--num-gpus", "--gpu-ids", "--cpu", "--share-gpus", "--nodes", "--spares", "--node-rank"),
    *(
        "--main-address",
        "--main-port",
        "--interface",
        "--max-restarts",
        "--standby",
        "--hang-seconds",
        "--tail-ranks",
        "--log-dir",
        "--bind",
    ),
    *("--join-seconds", "--node-seconds", "--rejoin-seconds", "--stop-seconds"),
]
OWN_FLAGS = {
    "check": ["--json"],
    "verify": ["--json", "--only", "--quick", "--save", "--time-limit-seconds"],
    "config": ["--json"],
    "status": ["--json", "--slurm"],
    "report": [],
    "compare": ["--common", "--confidence", "--json", "--metric", "--mode", "--out", "--over", "--which"],
    "cache": [],
    "monitor": ["--every", "--json", "--port", "--web"],
    "train": LAUNCH_FLAGS,
    "sweep": [
        *("--grid", "--variants", "--seeds", "--metric", "--mode", "--halving", "--first-steps", "--fork", "--trials"),
        *("--max-seconds", "--max-total-steps", "--parallel", "--json"),
    ],
    "launch": [
        *LAUNCH_FLAGS,
        *("--ray", "--kubernetes", "--image", "--volume-claim"),
        *("--slurm", "--submit", "--job-name", "--partition", "--account", "--time-limit", "--cpus", "--modules"),
        *("--activate", "--signal-seconds"),
    ],
    "benchmark": ["--iterations", "--json"],
    "find-lr": ["--highest", "--lowest", "--out", "--steps"],
    "continual": ["--data", "--data-dir", "--methods", "--num-tasks", "--seeds", "--steps", "--tasks", "--tune"],
    "eval": ["--json", "--which"],
    "prove": ["--full", "--json", "--output", "--trainer"],
    "plan": [
        "--cpu",
        "--for",
        "--from-run",
        "--gpu-memory",
        "--gpus",
        "--json",
        "--measure",
        "--mfu",
        "--num-processes",
        "--out",
    ],
}


def test_the_list_covers_every_command_of_ours() -> None:
    """Installed packages may bring others."""
    assert set(OWN_FLAGS) == {name for name, command in COMMANDS.items() if command.target.startswith("drivetrain.")}


@pytest.mark.parametrize("command", OWN_FLAGS)
def test_the_flags_of_each_command(command: str) -> None:
    expected = {"--help", "--help-all", *OWN_FLAGS[command], *(["--config"] if OBEYED[command] else [])}
    for name in OBEYED[command]:
        expected |= {f"--{name.replace('_', '-')}", *FLAGS[name]}
    assert set(flag_parser(command, COMMANDS[command].load()).flags) == expected


def test_the_list_covers_every_field() -> None:
    assert set(FLAGS) == {setting.name for setting in SETTINGS}


def test_no_two_fields_share_a_name() -> None:
    assert len(BY_NAME) == sum(len(set(setting.names)) for setting in SETTINGS)


@functools.cache
def sources() -> dict[Path, str]:
    package = Path(__file__).parents[2] / "src" / "drivetrain"
    return {path: path.read_text(encoding="utf-8") for path in package.rglob("*.py")}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_field_is_obeyed_somewhere(setting) -> None:
    """A field nobody reads is a flag that does nothing. Checking it for contradictions is not obeying it."""
    readers = [path for path in sources() if path.name != "contradictions.py"]
    words = f"{setting.section}.{setting.field}"
    use = re.compile(rf'\b(config|self)\.{re.escape(words)}\b|\brest_by="{re.escape(words)}"')
    for knob in KNOBS:  # read by name, and obeyed as a part of the way that is followed
        if setting.name in knob.settings:
            words = f"way.{knob.field}"
            use = re.compile(rf"\b{re.escape(words)}\b")
            readers = [path for path in readers if path.parent.name != "plan"]
    texts = [sources()[path] for path in readers]
    assert any(use.search(text) for text in texts if words in text), f"{setting.name} does nothing"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_field_explains_itself(setting) -> None:
    assert len(setting.help) > 10
    assert setting.allowed
