"""A small convolutional network on the 1,797 handwritten digits (8×8) that scikit-learn brings along.

Data and model are small enough to train anywhere in seconds; nothing is downloaded.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Sampler, TensorDataset

from drivetrain.config import Config, Resolved
from drivetrain.config.show import as_yaml
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.run_folder import RunFolder
from drivetrain.hardware import DeviceManager, Hardware, assert_on_device
from drivetrain.plan import Pins, Settings, choose_settings

DEFAULT_EPOCHS = 15
DEFAULT_MICRO_BATCH = 64
DEFAULT_LEARNING_RATE = 3e-3
NUM_VALID = 360  # of 1,797: one fifth


class DigitNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 32, 3, padding=1)
        self.second = nn.Conv2d(32, 64, 3, padding=1)
        self.hidden = nn.Linear(64 * 4 * 4, 128)
        self.out = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = functional.relu(self.first(images))
        features = functional.max_pool2d(functional.relu(self.second(features)), 2)
        logits: Tensor = self.out(functional.relu(self.hidden(features.flatten(1))))
        return logits


@dataclass(frozen=True)
class Epoch:
    """What one pass over the data came to."""

    epoch: int
    steps: int
    train_loss: float
    valid_accuracy: float
    seconds: float
    samples_per_second: float


class MicroBatches(Sampler[list[int]]):
    """Sample indices of an epoch, in an order that depends on (seed, epoch) alone, cut into micro-batches.

    Each optimizer step gets `micro_batch × accumulation` samples, the last of an epoch what is left.
    """

    def __init__(self, num_samples: int, micro_batch: int, accumulation: int, seed: int) -> None:
        self.num_samples, self.micro_batch, self.accumulation, self.seed = num_samples, micro_batch, accumulation, seed
        self.epoch = 0

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.num_samples / (self.micro_batch * self.accumulation))

    def step_sizes(self) -> list[int]:
        whole = self.micro_batch * self.accumulation
        return [min(whole, self.num_samples - start) for start in range(0, self.num_samples, whole)]

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
        order: list[int] = torch.randperm(self.num_samples, generator=generator).tolist()
        for start in range(0, self.num_samples, self.micro_batch):
            yield order[start : start + self.micro_batch]


def train(resolved: Resolved, hardware: Hardware) -> RunFolder:
    """Train, and leave everything that was learnt about it in the run folder."""
    config = resolved.config
    settings = choose_settings(hardware, _pins(config))
    device = _one_device(config, hardware)
    train_set, valid_images, valid_labels = load_digits()
    torch.manual_seed(config.run.seed)
    model = DigitNet().to(device)
    run = _Run(model, device, settings, config, train_set)

    folder = RunFolder.create(config.run.output_dir, config.run.name, "digits")
    folder.write("config.yaml", as_yaml(resolved))
    folder.write("hardware.json", hardware.to_json())
    console = Console(highlight=False)
    _banner(console, run, hardware, len(valid_labels))

    epochs: list[Epoch] = []
    with _progress(console) as progress:
        bar = progress.add_task("", total=run.num_steps, epoch=1, loss=math.nan)
        while run.step < run.num_steps:
            begin, first_step = time.perf_counter(), run.step
            losses = []
            for loss in run.epoch():
                losses.append(loss)
                folder.append(
                    "steps.jsonl", {"step": run.step, "epoch": run.num_epochs + 1, "loss": loss, "lr": run.lr}
                )
                progress.update(bar, advance=1, epoch=run.num_epochs + 1, loss=loss)
            seconds = time.perf_counter() - begin
            record = Epoch(
                epoch=run.num_epochs,
                steps=run.step,
                train_loss=sum(losses) / len(losses),
                valid_accuracy=run.accuracy(valid_images, valid_labels),
                seconds=seconds,
                samples_per_second=sum(run.batches.step_sizes()[: run.step - first_step]) / seconds,
            )
            epochs.append(record)
            folder.append("epochs.jsonl", asdict(record))
            console.print(
                f"epoch {record.epoch:>3}   train loss {record.train_loss:.4f}   "
                f"validation accuracy {record.valid_accuracy:6.2%}   {record.samples_per_second:>8,.0f} samples/s"
            )

    folder.write("model.safetensors", to_safetensors({name: value.cpu() for name, value in model.state_dict().items()}))
    folder.write("performance_summary.txt", _summary(run, hardware, epochs))
    _plot(folder, epochs)
    _goodbye(console, folder, epochs[-1])
    return folder


class _Run:
    """The model, and what moves it. One device; one optimizer step per `micro_batch × accumulation` samples."""

    def __init__(
        self, model: nn.Module, device: torch.device, settings: Settings, config: Config, train_set: TensorDataset
    ) -> None:
        self.model, self.device, self.settings, self.config = model, device, settings, config
        micro_batch, accumulation = settings.micro_batch.value, settings.accumulation.value
        self.batches = MicroBatches(len(train_set), micro_batch, accumulation, config.run.seed)
        self.loader = DataLoader(
            train_set,
            batch_sampler=self.batches,
            num_workers=settings.num_workers.value,
            pin_memory=settings.pin_memory.value,
            persistent_workers=settings.num_workers.value > 0,
        )
        most = (config.budget.epochs or DEFAULT_EPOCHS) * self.batches.steps_per_epoch
        self.num_steps = min(most, config.budget.max_steps or most)
        self.step = self.num_epochs = 0
        dtype = settings.precision.value
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.optimizer.learning_rate or DEFAULT_LEARNING_RATE, fused=device.type == "cuda"
        )
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, self.num_steps)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == "fp16")
        self.autocast_dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(dtype)
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
        self.forward = torch.compile(model, mode=config.compile.mode) if config.compile.enabled else model

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def num_compiled_graphs(self) -> int:
        """Asked of the compiler itself: `torch.compile` can do nothing, and say nothing."""
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    def epoch(self) -> Iterator[float]:
        """One pass over the data: yields the loss of each optimizer step."""
        self.batches.epoch = self.num_epochs
        loader = iter(self.loader)
        for size in self.batches.step_sizes()[: self.num_steps - self.step]:
            loss = self._optimizer_step(islice(loader, self.settings.accumulation.value), size)
            self.step += 1
            if not math.isfinite(loss):
                raise DrivetrainError(
                    f"the loss is {loss} in step {self.step}, so the weights are lost; the run stops here",
                    remedy="a smaller --learning-rate, or --precision fp32",
                )
            yield loss
        self.num_epochs += 1

    def _optimizer_step(self, micro_batches: Iterator[list[Tensor]], size: int) -> float:
        """Sum over all samples of the step, divided by their number once: the same for any accumulation."""
        self.model.train()
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for images, labels in micro_batches:
            images, labels = self._to_device(images), self._to_device(labels)
            if self.config.device.assertions:
                assert_on_device(self.device, model=self.model, batch=(images, labels))
            loss = self._loss_sum(images, labels) / size
            scaled: Tensor = self.scaler.scale(loss)
            torch.autograd.backward(scaled)
            total += loss.detach()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        return float(total)  # the host waits for the device here, once per step

    def _loss_sum(self, images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
            return functional.cross_entropy(self.forward(images).float(), labels, reduction="sum")

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=self.settings.pin_memory.value)

    @torch.no_grad()
    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        self.model.eval()
        predicted = self.model(images.to(self.device)).argmax(1).cpu()
        return float((predicted == labels).double().mean())


def load_digits() -> tuple[TensorDataset, Tensor, Tensor]:
    """Training set, validation images and labels. The split is the same for every seed, to compare runs."""
    from sklearn.datasets import load_digits as bundled

    digits = bundled()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, valid = order[NUM_VALID:], order[:NUM_VALID]
    return TensorDataset(images[train], labels[train]), images[valid], labels[valid]


def _pins(config: Config) -> Pins:
    """The user's values, and where there are none this recipe's own: its model is too small for the rules' guesses."""
    return Pins(
        gpu_mode=config.device.mode,
        device=config.device.device,
        device_ids=config.device.ids,
        precision=config.precision.dtype,
        micro_batch=config.batch.size or DEFAULT_MICRO_BATCH,
        accumulation=config.batch.accumulation or 1,
        num_workers=0 if config.data.num_workers == -1 else config.data.num_workers,  # the data is in memory already
        pin_memory=config.data.pin_memory,
    )


def _one_device(config: Config, hardware: Hardware) -> torch.device:
    mode = config.device.mode
    if mode == "multi_gpu" or (config.device.ids and len(config.device.ids) > 1):
        raise DrivetrainError(
            "this recipe trains on one device, and several GPUs are asked for", remedy="--gpu-mode single_gpu"
        )
    return DeviceManager(hardware, mode=mode, device=config.device.device, ids=config.device.ids).device


def _banner(console: Console, run: _Run, hardware: Hardware, num_valid: int) -> None:
    settings = run.settings
    name = hardware.gpus[run.device.index or 0].name if run.device.type == "cuda" else hardware.cpu.model
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    batch = f"{settings.micro_batch.value} × {settings.accumulation.value}"
    console.print("[bold]Handwritten digits[/]: a small network learns to read 8×8 pixel images.")
    console.print(f"  device     {run.device} ({name})")
    console.print(f"  precision  {settings.precision.value}: {settings.precision.reason}")
    console.print(f"  data       {run.batches.num_samples} to learn from, {num_valid} held out")
    console.print(
        f"  model      {parameters:,} parameters, {'compiled' if run.config.compile.enabled else 'not compiled'}"
    )
    console.print(f"  batch      {batch} samples per step, {run.num_steps} steps")


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps, loss {task.fields[loss]:.4f}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _compilation(run: _Run) -> str:
    if not run.config.compile.enabled:
        return "not asked for"
    graphs = run.num_compiled_graphs
    return f"{graphs} graphs in mode {run.config.compile.mode}" if graphs else "asked for, but nothing was compiled"


def _summary(run: _Run, hardware: Hardware, epochs: list[Epoch]) -> str:
    best = max(epochs, key=lambda record: record.valid_accuracy)
    seconds = sum(record.seconds for record in epochs)
    lines = [
        f"device                {run.device}",
        f"precision             {run.settings.precision.value}",
        f"torch                 {hardware.software.torch}",
        f"compilation           {_compilation(run)}",
        f"optimizer steps       {run.step}",
        f"training time         {seconds:.2f} s (validation aside)",
        f"samples per second    {max(record.samples_per_second for record in epochs):,.0f} in the fastest epoch",
        f"final accuracy        {epochs[-1].valid_accuracy:.2%}",
        f"best accuracy         {best.valid_accuracy:.2%} (epoch {best.epoch})",
    ]
    return "\n".join(lines) + "\n"


def _plot(folder: RunFolder, epochs: list[Epoch]) -> None:
    import io

    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    numbers = [record.epoch for record in epochs]
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for axis, title, values in (
        (axes[0], "training loss", [record.train_loss for record in epochs]),
        (axes[1], "validation accuracy (%)", [100 * record.valid_accuracy for record in epochs]),
        (axes[2], "seconds per epoch", [record.seconds for record in epochs]),
    ):
        axis.plot(numbers, values, marker="o", markersize=4)
        axis.set(title=title, xlabel="epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    axes[0].set_yscale("log")
    axes[2].set_ylim(bottom=0)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
    folder.write("training_metrics.png", picture.getvalue())


def _goodbye(console: Console, folder: RunFolder, last: Epoch) -> None:
    console.print(f"\n[bold green]{last.valid_accuracy:.1%}[/] of the held-out digits are read correctly.")
    console.print(f"Results are in [bold]{folder.path}[/]:")
    for name, about in (
        ("training_metrics.png", "loss, accuracy and time by epoch"),
        ("performance_summary.txt", "speed and accuracy in words"),
        ("model.safetensors", "the weights, for plain PyTorch"),
        ("steps.jsonl", "every step; epochs.jsonl has every epoch"),
        ("config.yaml", "the settings; train again with --config"),
    ):
        console.print(f"  {name:<24} {about}")
