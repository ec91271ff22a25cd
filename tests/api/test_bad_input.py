"""Wrong input: a clear error with the remedy, before anything is trained, and nothing overwritten."""

import hashlib
import inspect
import json
import multiprocessing
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from drivetrain import Config, ConfigError, DrivetrainError, EarlyStopping, Hook, Job, LossSum, StepContext
from drivetrain.api.driving import drive
from drivetrain.api.training import train
from drivetrain.checkpoint import Checkpoint
from drivetrain.config import configure
from tests import warm_python
from tests.api.jobs import Mlp, Variant, Vectors, make_job, make_model, vector_loss

SMALL = Variant(dtype=torch.float32, steps=4, num_samples=20, global_batch=8, save_every=2)


def config(folder: Path, **values: Any) -> Config:
    # Loss functions here count their calls: those of the probe that asks what kind of loss it is are left out.
    given = {"loss_weighting": "samples", "report": False, **values}
    return configure(output_dir=folder, gpu_mode="cpu", **given)


def fails(folder: Path, words: str, job: Job | None = None, **changes: Any) -> DrivetrainError:
    with pytest.raises(DrivetrainError, match=words) as caught:
        train(job or make_job(SMALL, **changes), config(folder), quiet=True)
    assert caught.value.remedy or "remedy" in str(caught.value)
    return caught.value


def test_a_loss_that_is_not_a_scalar(tmp_path: Path) -> None:
    fails(tmp_path, r"shape \(8, 4\)", loss=lambda model, batch: model(batch[0]))
    fails(tmp_path, "returned float", loss=lambda model, batch: 1.0)
    words = "the loss function returned None: did you forget `return`?"
    fails(tmp_path, re.escape(words), loss=lambda model, batch: None)


def test_a_loss_that_raises_is_shown_its_batch(tmp_path: Path) -> None:
    job = make_job(SMALL, loss=lambda model, batch: functional.cross_entropy(model(batch["x"]), batch["y"]))
    with pytest.raises(TypeError, match="list indices must be integers") as caught:
        train(job, config(tmp_path), quiet=True)
    (note,) = caught.value.__notes__
    assert note.endswith("with the batch [float32 tensor of shape (8, 6), int64 tensor of shape (8,)]")


@pytest.mark.parametrize(
    ("batch", "weights", "words"),
    [
        (torch.float64, torch.float32, r"batch is float64, and the weights are float32: .* array.astype\('float32'\)"),
        (torch.float32, torch.float16, "weights are float16: leave the weights in float32, and --precision"),
        (torch.float32, torch.float64, r"weights are float64: .* model.float\(\)"),
    ],
)
def test_a_batch_and_weights_of_different_types(
    tmp_path: Path, batch: torch.dtype, weights: torch.dtype, words: str
) -> None:
    data = TensorDataset(torch.rand(20, 6, dtype=batch), torch.zeros(20, dtype=torch.long))
    job = replace(make_job(SMALL), data=data, model=lambda: make_model(SMALL).to(weights))
    with pytest.raises(RuntimeError) as caught:
        train(job, config(tmp_path), quiet=True)
    assert re.search(words, caught.value.__notes__[-1])


def test_a_loss_that_does_not_depend_on_the_parameters(tmp_path: Path) -> None:
    fails(tmp_path, "does not depend on any parameter", loss=lambda model, batch: model(batch[0]).detach().mean())


def test_a_model_that_is_none(tmp_path: Path) -> None:
    fails(tmp_path, "the model function returned str", model=lambda: "a model")


def test_nothing_to_train(tmp_path: Path) -> None:
    fails(tmp_path, "no parameter of the model is trained", model=lambda: Mlp(0.0).requires_grad_(False))


def test_wrong_optimizers(tmp_path: Path) -> None:
    def two(groups: Any) -> Any:
        parameters = [parameter for group in groups for parameter in group["params"]]
        return [torch.optim.SGD(parameters[:2], lr=0.1), torch.optim.SGD(parameters[2:], lr=0.1)]

    fails(tmp_path, "returned 2 optimizers", optimizer=two)
    fails(tmp_path, "returned None: did you forget", optimizer=lambda groups: None)
    fails(tmp_path, "not with the model", optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    fails(tmp_path, "groups by name", optimizer=lambda model: torch.optim.SGD(model.named_parameters(), lr=0.1))
    fails(tmp_path, "that the model does not have", optimizer=lambda groups: torch.optim.SGD([torch.zeros(3)], lr=0.1))


def test_an_optimizer_function_that_chooses_parameters_is_told_of_groups(tmp_path: Path) -> None:
    def by_dimensions(given: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [it for it in given if it.ndim > 1]}], lr=0.1)

    fails(tmp_path, "asks a group of parameters for ndim", optimizer=by_dimensions)


class Sam(torch.optim.SGD):
    """As published: two steps around a second backward, or a closure."""

    def first_step(self) -> None: ...

    def second_step(self) -> None: ...


class Asserting(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "this optimizer requires closure"


@pytest.mark.parametrize(
    "make",
    [
        lambda groups: torch.optim.LBFGS([p for group in groups for p in group["params"]], lr=0.1),
        lambda groups: Sam(groups, lr=0.1),
        lambda groups: Asserting(groups, lr=0.1),
    ],
)
def test_optimizers_that_need_a_closure(tmp_path: Path, make: Any) -> None:
    error = fails(tmp_path, "it needs a closure", optimizer=make)
    assert "AdamW or SGD" in error.remedy


@pytest.mark.parametrize("keeps_graph", [False, True])
def test_a_loss_that_computes_gradients_itself(tmp_path: Path, keeps_graph: bool) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = vector_loss(model, batch)
        value.backward(retain_graph=keeps_graph)
        return value

    error = fails(tmp_path, "has computed gradients itself, which would count twice", loss=loss)
    assert "without calling backward()" in error.remedy


def test_gradients_that_were_there_before_are_nothing_of_the_loss(tmp_path: Path) -> None:
    made = make_model(SMALL)
    for parameter in made.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert train(make_job(SMALL, model=made, max_steps=1), config(tmp_path), quiet=True).finished


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63, 2**64 - 1, np.int64(7)])
def test_seeds_of_64_bits(tmp_path: Path, seed: int) -> None:
    result = train(make_job(SMALL, seed=seed, max_steps=1), config(tmp_path), quiet=True)
    assert result.finished


class Every:
    """A user's own hook."""

    def __init__(self, every: Any) -> None:
        self.every = every

    def __call__(self, context: StepContext) -> None:
        pass


class NothingToCall(Hook):
    """Written with the words of other trainers: it would be called, and do nothing."""

    def on_step_end(self, context: StepContext) -> None:
        pass


class OfAnotherTrainer:
    def on_train_batch_end(self, *args: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": TensorDataset(torch.zeros(0, 6), torch.zeros(0))}, "the data set is empty"),
        ({"global_batch": 21}, "21 samples are asked for per step, and the data set has 20"),
        ({"global_batch": 0}, "got 0"),
        ({"global_batch": True}, "got True"),
        ({"max_steps": None}, "nothing says when to stop"),
        ({"epochs": 1.5}, "got 1.5"),
        ({"loss": 3}, "got int, expected a function"),
        ({"loss": nn.CrossEntropyLoss()}, r"CrossEntropyLoss takes \(output, target\)"),
        ({"loss": functional.cross_entropy}, r"cross_entropy takes \(output, target\)"),
        ({"loss": nn.MSELoss}, r"MSELoss takes \(output, target\)"),
        ({"loss": lambda model, x, y: x}, r"called with \(model, batch\), and the function takes \(model, x, y\)"),
        ({"model": Mlp}, r"model=lambda: Mlp\(…\)"),
        ({"model": "resnet50"}, "got str, expected a function"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)}, r"got an optimizer \(SGD\)"),
        ({"optimizer": lambda: None}, r"called with \(params\), and the function takes \(\)"),
        ({"collate": lambda one, other: one}, r"takes \(one, other\)"),
        ({"schedule": "cosine"}, "got str, expected a function"),
        ({"schedule": torch.optim.lr_scheduler.StepLR}, r"schedule=dt.WarmupCosine\(warmup_steps=100\)"),
        ({"data": Vectors}, "expected a Dataset, got the class Vectors"),
        ({"data": lambda: Vectors(SMALL)}, "expected a Dataset, got a function"),
        ({"data": Path("images")}, "expected a Dataset, got PosixPath"),
        ({"data": {"labeled": Vectors(SMALL), "other": Vectors(SMALL)}}, "whose items have a part of each"),
        ({"valid": Vectors(SMALL), "metrics": [vector_loss]}, "got list, expected a dictionary"),
        ({"valid": Vectors(SMALL), "metrics": {"accuracy": lambda output: 1}}, r"the function takes \(output\)"),
        ({"valid": Vectors(SMALL), "best": "accuracy"}, r"best=dt.Aim\("),
        ({"valid": Vectors(SMALL), "early_stopping": 3}, r"dt.EarlyStopping\(patience=3\)"),
        ({"clip_norm": "1"}, "got '1'"),
        ({"weight_decay": "0.1"}, "got '0.1'"),
        ({"ema": "0.9"}, "got '0.9'"),
        ({"clip_norm": -1}, "got -1"),
        ({"data": 3}, "expected a Dataset, got int"),
        ({"keep_last": 0}, "got 0"),
        ({"hooks": [Every(0)]}, "Every.every is 0"),
        ({"hooks": [Every(-4)]}, "Every.every is -4"),
        ({"hooks": [Every("step")]}, "Every.every is 'step'"),
        ({"hooks": [NothingToCall()]}, r"NothingToCall has no __call__ of its own.*\n.*in place of on_step_end"),
        ({"hooks": [OfAnotherTrainer()]}, r"OfAnotherTrainer is no hook.*\n.*in place of on_train_batch_end"),
        ({"hooks": [EarlyStopping(2)]}, r"EarlyStopping is no hook.*\n.*early_stopping=dt.EarlyStopping"),
        ({"hooks": [Every]}, r"got the class Every, expected an instance"),
        ({"hooks": [print]}, r"hooks=\[dt.every\(100, function\)\]"),
        ({"hooks": print}, "got builtin_function_or_method, expected a list"),
        ({"seed": 2**64}, "got 18446744073709551616"),
        ({"seed": -(2**63) - 1}, "Job.seed"),
        ({"seed": 1.5}, "got 1.5"),
        ({"seed": None}, "got None"),
        ({"name": "../up"}, r"'../up': it names another folder"),
        ({"name": ".."}, "another folder"),
        ({"name": "/tmp/up"}, "another folder"),
        ({"name": "a/b"}, "another folder"),
        ({"name": "a\\b"}, "another folder"),
        ({"name": ""}, "it is empty"),
        ({"name": "  "}, "it is empty"),
        ({"name": "a\nb"}, "cannot be printed"),
        ({"name": "a\0b"}, "cannot be printed"),
        ({"name": "\udcff"}, "its bytes are no text"),
        ({"name": "n" * 300}, "longer than 200 bytes"),
        ({"name": 3}, "it is a int, not text"),
    ],
)
def test_a_job_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        make_job(SMALL, **changes)
    assert all(problem.remedy for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("keyword", "words"),
    [
        ("validation", "did you mean valid=…?"),
        ("val_dataset", "did you mean valid=…?"),
        ("batch_size", "did you mean global_batch=…?"),
        ("optimiser", "did you mean optimizer=…?"),
        ("num_epochs", "did you mean epochs=…?"),
        ("lr", "optimizer=lambda params: torch.optim.AdamW(params, lr=…)"),
        ("precision", "dt.configure(precision=…"),
        ("num_train_epochs", "did you mean epochs=…?"),
        ("eval_steps", "did you mean valid_every=…?"),
        ("save_steps", "did you mean checkpoint_every=…?"),
        ("warmup_steps", "schedule=dt.WarmupCosine(warmup_steps=…)"),
        ("gradient_accumulation_steps", "dt.configure(batch_size=…)"),
        ("default_root_dir", "dt.configure(output_dir=…)"),
        ("resume_from_checkpoint", "leave it out"),
        ("sampler", "data=DataLoader(dataset, batch_size=…, sampler=…)"),
    ],
)
def test_a_misspelled_keyword_of_a_job(keyword: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        make_job(SMALL, **{keyword: 3})
    assert f"Job({keyword}=…): there is no such parameter" in str(caught.value)


def test_misspelled_keywords_of_functions(tmp_path: Path) -> None:
    model = Mlp(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=re.escape("did you mean epochs=…?")):
        drive(model, optimizer, Vectors(SMALL), epoch=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=re.escape("did you mean `batch_size`?")):
        configure(batchsize=3)
    with pytest.raises(ConfigError, match=re.escape('did you mean `precision="bf16"`?')):
        configure(bf16=True)
    assert "global_batch" in inspect.signature(Job).parameters, "as an editor shows them"


@pytest.mark.parametrize(
    ("keyword", "words"),
    [("ema", "give a copy of the model"), ("test_data", "dt.train has a test set"), ("num_epochs", "mean epochs=…?")],
)
def test_a_keyword_that_drive_does_not_have(keyword: str, words: str) -> None:
    model = Mlp(0.0)
    with pytest.raises(ConfigError, match=re.escape(words)):
        drive(model, torch.optim.SGD(model.parameters(), lr=0.1), Vectors(SMALL), **{keyword: 3})


def test_what_train_is_not_given() -> None:
    with pytest.raises(ConfigError, match=r"expected a dt.Job, got Linear\n.*dt.train\(dt.Job\(name="):
        train(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    for keyword in ("epochs", "max_epochs"):
        with pytest.raises(ConfigError, match=r"part of the job: dt.Job\(epochs=…\); dt.configure\(epochs=…\)"):
            train(make_job(SMALL), **{keyword: 3})
    with pytest.raises(ConfigError, match=r"part of the job: dt.Job\(hooks=…\)"):
        train(make_job(SMALL), callbacks=[])  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="settings of the run go to config"):
        train(make_job(SMALL), devices=2)  # type: ignore[call-arg]


def test_a_collate_function_without_return(tmp_path: Path) -> None:
    fails(tmp_path, "the collate function returned None: did you forget", collate=lambda items: None)


def test_all_problems_of_a_job_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        make_job(SMALL, global_batch=0, max_steps=0, clip_norm=0.0, loss=None)
    assert {problem.key for problem in caught.value.problems} == {
        "Job.global_batch",
        "Job.max_steps",
        "Job.clip_norm",
        "Job.loss",
    }


class Broken(Vectors):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 17:
            raise OSError("picture 17 is damaged")
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_item_that_raises_is_named(tmp_path: Path, num_workers: int) -> None:
    job = make_job(SMALL, data=Broken(SMALL))
    with pytest.raises(DrivetrainError, match="item 17 of the data set raised OSError"):
        train(job, config(tmp_path, num_workers=num_workers), quiet=True)


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    class Other(Mlp):
        def __init__(self) -> None:
            super().__init__(0.0)
            self.extra = nn.Linear(3, 3)
            self.layers[5] = nn.Linear(24, 5)

    _interrupted(tmp_path)
    before = _files(tmp_path)
    error = fails(tmp_path, "the checkpoint is of another model", model=Other)
    assert "only in the model: extra.bias, extra.weight" in error.message
    assert r"layers.5.weight is (5, 24) here and (4, 24) there" in error.message
    assert _files(tmp_path) == before


def test_other_settings_of_the_optimizer(tmp_path: Path) -> None:
    _interrupted(tmp_path)
    fails(tmp_path, "initial_lr is 0.5 now and was 0.01", optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.5))


def test_another_job_under_the_same_name(tmp_path: Path) -> None:
    _interrupted(tmp_path)
    before = _files(tmp_path)
    fails(tmp_path, "global_batch is 4 now and was 8", global_batch=4)
    assert _files(tmp_path) == before


def test_a_checkpoint_of_a_newer_format(tmp_path: Path) -> None:
    _interrupted(tmp_path)
    (manifest,) = (tmp_path / "suite" / "checkpoints").glob("step-*/manifest.json")
    body = manifest.read_bytes().partition(b'"manifest":')[2].removesuffix(b"}\n")
    newer = body.replace(b'"format_version":3', b'"format_version":99')
    assert newer != body
    digest = hashlib.sha256(newer).hexdigest().encode()
    manifest.write_bytes(b'{"sha256":"' + digest + b'","manifest":' + newer + b"}\n")
    before = _files(tmp_path)
    fails(tmp_path, "99")
    assert _files(tmp_path) == before


class ForgetfulOptimizer(torch.optim.SGD):
    """Keeps something that a checkpoint cannot hold, from its first step on."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["history"] = [object()]
        return result


def test_optimizer_state_that_cannot_be_saved(tmp_path: Path) -> None:
    calls = []

    def loss(model: Any, batch: Any) -> Tensor:
        calls.append(1)
        return vector_loss(model, batch)

    error = fails(
        tmp_path,
        r"'history' of .*\[0\] is a object",
        loss=loss,
        optimizer=lambda groups: ForgetfulOptimizer(groups, lr=0.1),
    )
    assert "tensors, numbers, text" in error.message
    assert len(calls) == 2  # the trial and the first step: refused then, not at the first save


def test_a_loss_that_becomes_nan_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        calls.append(1)
        return vector_loss(model, batch) * (float("nan") if len(calls) == 5 else 1.0)

    calls: list[int] = []
    with pytest.raises(DrivetrainError, match=r"the loss of step 4 .* is nan"):
        train(make_job(SMALL, loss=loss), config(tmp_path, bad_steps="stop"), quiet=True)
    assert [path.name for path in (tmp_path / "suite" / "checkpoints").iterdir()] == ["step-00000002"]


class Unpicklable(Dataset[Any]):
    def __init__(self) -> None:
        self.open = (number for number in range(3))

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(6), torch.tensor(0)


def test_a_data_set_that_cannot_be_sent_to_workers(tmp_path: Path) -> None:
    """Where workers are forked nothing is sent, and it works; where they are spawned it is an error with the remedy."""
    job = make_job(SMALL, data=Unpicklable())
    assert train(job, config(tmp_path, num_workers=1), quiet=True).finished
    method = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        with pytest.raises(DrivetrainError, match="workers could not be started") as caught:
            train(job, config(tmp_path, num_workers=1), quiet=True)
    finally:
        multiprocessing.set_start_method(method, force=True)
    assert "--num-workers 0" in caught.value.remedy


def _interrupted(folder: Path) -> None:
    """A run that stopped after its checkpoint at step 2."""

    def loss(model: Any, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return vector_loss(model, batch)

    calls: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        train(make_job(SMALL, loss=loss), config(folder), quiet=True)


def _files(folder: Path) -> dict[str, bytes]:
    kept = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): path.read_bytes() for path in kept if path.name not in ("events.jsonl", "hardware.json")}


def test_nan_in_the_first_batch(tmp_path: Path) -> None:
    data = TensorDataset(torch.full((20, 6), torch.nan), torch.zeros(20, dtype=torch.int64))
    words = "the loss of step 3 .* is nan, as the two before it: before anything was learned"
    error = fails(tmp_path, words, data=data)
    assert "first batches" in error.remedy
    assert not list((tmp_path / "suite" / "checkpoints").glob("step-*"))
    events = (tmp_path / "suite" / "events.jsonl").read_text()
    assert "stopped by an error" in events


@pytest.mark.parametrize("count", [0, torch.tensor(0)])
def test_a_step_that_counts_nothing_moves_nothing(tmp_path: Path, count: Any) -> None:
    """A batch whose items are all padding, say."""
    calls = [0]

    def loss(model: nn.Module, batch: Any) -> LossSum:
        calls[0] += 1
        total = functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        return LossSum(total * 0, count) if calls[0] == 3 else LossSum(total, len(batch[1]))  # the trial, then step 2

    job = make_job(SMALL, loss=loss, checkpoint_every=1, keep_last=9, weight_decay=None)
    job = replace(job, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
    result = train(job, config(tmp_path), quiet=True)
    steps = [json.loads(line) for line in (result.folder / "steps.jsonl").read_text().splitlines()]
    assert steps[1]["loss"] == 0.0
    assert steps[1]["num_items"] == 0
    one, two = (Checkpoint.open(result.folder / "checkpoints" / f"step-0000000{step}") for step in (1, 2))
    assert all(torch.equal(one.read(key), two.read(key)) for key in one.keys if key.startswith("model/"))


def test_an_output_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    """A full disk behind the redirection; and a reader that goes away."""
    command = ["-m", "drivetrain", "train", "digits", "--max-steps", "4", "--gpu-mode", "cpu", "--no-report"]
    with Path("/dev/full").open("w") as full:
        done = warm_python.run([*command, "--output-dir", str(tmp_path / "full")], stdout=full.fileno())
    assert list((tmp_path / "full" / "digits" / "checkpoints").glob("step-*"))
    assert (tmp_path / "full" / "digits" / "finished.json").exists()
    assert done.returncode in (0, 1, 120)  # what is printed after the run may fail to be
    words = [*command, "--log-every", "1", "--output-dir", str(tmp_path / "pipe")]
    with warm_python.WarmProcess(words, drops_stderr=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        process.wait(120)
    assert (tmp_path / "pipe" / "digits" / "finished.json").exists()
