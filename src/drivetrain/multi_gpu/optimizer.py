"""`create_optimized_training_optimizer`: a model and its loaders, trained by `await optimizer.train()`."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from drivetrain.api.measuring import benchmark_performance
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.log import notice
from drivetrain.multi_gpu.config import MultiGPUConfig
from drivetrain.multi_gpu.trainer import MultiGPUTrainer
from drivetrain.multi_gpu.training_run import TrainingSpec
from drivetrain.planning.trials import search_batch_size
from drivetrain.report import write_report
from drivetrain.run import Session
from drivetrain.run.model_factory import build_model

DEFAULT_PATIENCE = 10


class OptimizedTrainingOptimizer:
    """A training with everything it takes; `create_optimized_training_optimizer` makes one.

    Args:
        spec: the model, its data, and how long.
        multi_gpu_config: how to use the GPUs.
    """

    def __init__(self, spec: TrainingSpec, multi_gpu_config: MultiGPUConfig | None = None) -> None:
        self.spec = spec
        self.multi_gpu_trainer = MultiGPUTrainer(multi_gpu_config)
        self.model = spec.model
        self.results: dict[str, Any] | None = None

    async def train(self) -> dict[str, Any]:
        """Train to the end or to an early stop, without holding up the event loop, and return the results.

        Cancelled, it finishes the step, saves a checkpoint and raises `CancelledError`; called again, it goes on there.
        Keys: total_epochs, best_epoch, best_metric, final_training_loss, final_validation_loss,
        early_stopping_triggered, finished, resumed_from, history (a dictionary per epoch), folder, performance_summary,
        multi_gpu_summary.
        """
        self.multi_gpu_trainer.initialize_training(self.model)
        self.results = await self.multi_gpu_trainer.train_spec(self.spec)
        return self.results

    def benchmark_performance(self, num_iterations: int = 100) -> dict[str, Any]:
        """Measure steps on a copy of the model; trains nothing. Times are seconds per optimizer step.

        Args:
            num_iterations: how many steps are measured, after a few to warm up.
        """
        job, config, _ = self.multi_gpu_trainer.prepared(replace(self.spec, quiet=True))
        found = benchmark_performance(job, config, num_iterations=num_iterations)
        return {
            "average_forward_time": found.forward_seconds,
            "average_backward_time": found.backward_seconds,
            "average_optimizer_time": found.optimizer_seconds,
            "average_communication_time": found.communication_seconds,
            "average_step_time": found.step_seconds,
            "throughput": found.samples_per_second,
            "peak_memory": found.peak_memory_bytes,
            "mfu": found.mfu,
            "batch_size": found.global_batch,
            "num_iterations": num_iterations,
            "device": found.device,
            "precision": found.precision,
        }

    def get_optimal_batch_size(self, target_memory_usage: float = 0.8) -> int:
        """Measure which batch size is fastest within a part of the free memory: forward, backward and optimizer step.

        Nothing is changed: give the number to the loader, or as `batch_size`, to use it. Of sizes that are equally fast
        to 3 %, the smallest is taken. It is per process, and at most the number of samples.

        Args:
            target_memory_usage: the part of the device's free memory (the host's, on a CPU) that a step may use.
        """
        if not 0 < target_memory_usage <= 1:
            raise DrivetrainError(
                f"target_memory_usage is {target_memory_usage}", remedy="give a number above 0, up to 1, such as 0.8"
            )
        job, config, _ = self.multi_gpu_trainer.prepared(replace(self.spec, quiet=True))
        session = Session.join(replace(job, model=copy.deepcopy(self.model)), config, quiet=True)
        try:
            found = search_batch_size(session, build_model(session), target_memory_usage)
        finally:
            session.close_loaders()
            session.close()
        if not self.spec.quiet and session.world.is_main:
            notice(f"batch size: {found.in_words()}")
        return found.fastest

    def get_performance_summary(self) -> dict[str, Any]:
        """Return the figures of the last training and of the devices; see `MultiGPUTrainer`."""
        return self.multi_gpu_trainer.get_performance_summary()

    def get_training_summary(self) -> dict[str, Any]:
        """Return the results of the last training, and how the model is placed."""
        return {"results": self.results, "training_info": self.multi_gpu_trainer.get_training_info()}

    def create_training_visualizations(self) -> list[Path]:
        """Write pictures, the page and the summary of the last training again, and return the files."""
        if self.results is None:
            raise DrivetrainError("there was no training yet", remedy="await optimizer.train() first")
        folder = Path(self.results["folder"])
        for problem in write_report(folder):
            notice(problem)
        names = ("training_metrics.png", "report.html", "performance_summary.txt")
        return [folder / name for name in names if (folder / name).exists()]

    def cleanup(self) -> None:
        """Leave the other processes and release cached memory."""
        self.multi_gpu_trainer.cleanup()


def create_optimized_training_optimizer(
    model: nn.Module,
    train_loader: Any,
    val_loader: Any = None,
    *,
    multi_gpu_config: MultiGPUConfig | None = None,
    experiment_name: str = "multi_gpu",
    max_epochs: int = 100,
    learning_rate: float = 1e-3,
    weight_decay: float = 1e-5,
    gradient_clip: float | None = 1.0,
    early_stopping_patience: int | None = DEFAULT_PATIENCE,
    early_stopping_min_delta: float = 1e-4,
    batch_size: int | None = None,
    gradient_accumulation_steps: int = 1,
    enable_mixed_precision: bool | None = None,
    enable_gradient_checkpointing: bool = False,
    loss: Callable[[nn.Module, Any], Any] | None = None,
    criterion: Callable[[Any, Tensor], Tensor] | None = None,
    metrics: Mapping[str, Any] | None = None,
    seed: int = 0,
    output_dir: str | Path = "runs",
    quiet: bool = False,
    **settings: Any,
) -> OptimizedTrainingOptimizer:
    """Make what trains a model: AdamW, warm-up and cosine, clipped gradients, early stopping, checkpoints, a report.

    Args:
        model: the module; it is trained in place.
        train_loader: a DataLoader or a data set.
        val_loader: held-out samples, which early stopping and the best checkpoint go by.
        multi_gpu_config: how to use the GPUs.
        experiment_name: name of the run, and of its folder below `output_dir`.
        max_epochs: passes over the data.
        learning_rate: the highest one; it warms up over a tenth of the steps, 1,000 at most, then falls to 0.
        weight_decay: for weights of two dimensions and more.
        gradient_clip: largest norm of the gradients; None does not clip.
        early_stopping_patience: validations without a better loss before it stops; None never stops early.
        early_stopping_min_delta: how much better counts.
        batch_size: samples at once per process, instead of the loader's.
        gradient_accumulation_steps: batches per optimizer step.
        enable_mixed_precision: True for bf16 or fp16, False for fp32; None decides by the device.
        enable_gradient_checkpointing: recomputes activations block by block, where the model has repeated blocks.
        loss: a function of (model, batch); None is `criterion` over batches of (inputs, targets).
        criterion: a function of (output, targets); None is cross-entropy for classes, else the squared error.
        metrics: functions of (output, batch) by name; None is the accuracy where targets are classes.
        seed: of the order of samples.
        output_dir: folder that holds the run folders.
        quiet: prints nothing but errors.
        settings: any setting of drivetrain by name, such as `compile=True`; unknown ones are errors.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.zeros(8, dtype=torch.long))
        >>> optimizer = create_optimized_training_optimizer(torch.nn.Linear(2, 2), DataLoader(data, 4), max_epochs=1)
        >>> optimizer.spec.max_epochs
        1
    """
    if val_loader is None and early_stopping_patience == DEFAULT_PATIENCE:
        early_stopping_patience = None  # it was not asked for
    spec = TrainingSpec(
        model=model,
        train_loader=train_loader,
        val_loader=val_loader,
        experiment_name=experiment_name,
        max_epochs=max_epochs,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        gradient_clip=gradient_clip,
        early_stopping_patience=early_stopping_patience,
        early_stopping_min_delta=early_stopping_min_delta,
        batch_size=batch_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        enable_mixed_precision=enable_mixed_precision,
        enable_gradient_checkpointing=enable_gradient_checkpointing,
        loss=loss,
        criterion=criterion,
        metrics=metrics,
        seed=seed,
        output_dir=output_dir,
        quiet=quiet,
        settings=settings,
    )
    return OptimizedTrainingOptimizer(spec, multi_gpu_config)
