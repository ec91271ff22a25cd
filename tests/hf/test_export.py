"""`dt.hf.export`: folders that transformers and peft open, with the weights of the run to the bit; LoRA runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import drivetrain as dt
from drivetrain.run.result import checkpoint_of
from tests.hf.samples import peft, samples, tiny_llama, transformers


def base_model(seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(tiny_llama())


def adapted(seed: int = 1) -> Any:
    return peft.get_peft_model(
        base_model(seed), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )


def trained(model: Any, folder: Path, **fields: Any) -> dt.Result:
    job = dt.hf.job(model, samples(), max_steps=3, global_batch=4, lr=0.01, **fields)
    return dt.train(job, dt.configure(output_dir=folder, quiet=True, report=False))


def of_checkpoint(run: dt.Result) -> dict[str, torch.Tensor]:
    checkpoint = checkpoint_of(run, "last")
    return {key[6:]: checkpoint.read(key) for key in checkpoint.keys if key.startswith("model/")}


def same(model: nn.Module, weights: dict[str, torch.Tensor]) -> bool:
    state = model.state_dict()
    return set(state) == set(weights) and all(torch.equal(state[name], weights[name]) for name in state)


def test_a_whole_model(tmp_path: Path) -> None:
    run = trained(tiny_llama(), tmp_path, checkpoint_every=1)
    weights = of_checkpoint(run)
    opened = transformers.LlamaForCausalLM.from_pretrained(dt.hf.export(run, tmp_path / "from result"))
    assert same(opened, weights)
    assert not same(base_model(), weights)
    opened = transformers.LlamaForCausalLM.from_pretrained(
        dt.hf.export(run.folder, tmp_path / "from folder", model=tiny_llama())
    )
    assert same(opened, weights)
    again: Any = dt.hf.job(tmp_path / "from folder", samples()).model
    assert same(again(), weights)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["from folder", "from result", run.folder.name]


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    run = trained(tiny_llama(), tmp_path)
    with pytest.raises(dt.DrivetrainError, match="does not hold its model's configuration"):
        dt.hf.export(run.folder, tmp_path / "new")
    with pytest.raises(dt.DrivetrainError, match="is there already"):
        dt.hf.export(run, tmp_path)
    other = tiny_llama()
    other.num_hidden_layers = 3
    with pytest.raises(dt.DrivetrainError, match="holds another model"):
        dt.hf.export(run.folder, tmp_path / "new", model=other)
    assert not (tmp_path / "new").exists()


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_an_adapter(tmp_path: Path) -> None:
    model = adapted()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    run = trained(model, tmp_path, checkpoint_every=1)
    weights = of_checkpoint(run)
    changed = {name for name in weights if not torch.equal(weights[name], before[name])}
    assert changed == {name for name in before if "lora_" in name}

    folder = dt.hf.export(run, tmp_path / "adapter")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in folder.iterdir()}
    assert size_of(folder) < sum(weight.nbytes for weight in before.values())
    assert same(peft.PeftModel.from_pretrained(base_model(), folder), weights)
    by_hand = dt.hf.export(run.folder, tmp_path / "by hand", model=adapted())
    assert same(peft.PeftModel.from_pretrained(base_model(), by_hand), weights)

    with pytest.raises(dt.DrivetrainError, match=r"another base model: \d+ of its \d+ weights differ"):
        dt.hf.export(run.folder, tmp_path / "other", model=adapted(seed=2))
    with pytest.raises(dt.DrivetrainError, match="holds an adapter, without the model"):
        dt.hf.job(folder, samples())
    assert not (tmp_path / "other").exists()


def test_an_adapter_goes_on_training(tmp_path: Path) -> None:
    folder = dt.hf.export(trained(adapted(), tmp_path / "runs"), tmp_path / "adapter")
    from peft import PeftModel

    base = base_model()
    job: Any = dt.hf.job(base, samples(), adapter=folder)
    assert same(PeftModel.from_pretrained(base_model(), folder), job.model.state_dict())
    assert all(weight.requires_grad == ("lora_" in name) for name, weight in job.model.named_parameters())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 32}, r"belongs to another base model: 4 of its weights do not fit.* is \(2, 16\) there"),
        ({"num_hidden_layers": 1}, "4 of its weights do not fit"),
        ({"num_hidden_layers": 3}, "4 of its weights do not fit"),
    ],
)
def test_an_adapter_of_another_base_is_refused(tmp_path: Path, changes: dict[str, int], words: str) -> None:
    folder = dt.hf.export(trained(adapted(), tmp_path / "runs"), tmp_path / "adapter")
    config = tiny_llama()
    for name, value in changes.items():
        setattr(config, name, value)
    from transformers import LlamaForCausalLM

    base = LlamaForCausalLM(config)
    names = list(base.state_dict())
    with pytest.raises(dt.DrivetrainError, match=words):
        dt.hf.job(base, samples(), adapter=folder)
    assert list(base.state_dict()) == names
    with pytest.raises(dt.DrivetrainError, match="there is no adapter in"):
        dt.hf.job(base, samples(), adapter=tmp_path)


def test_checkpoints_of_an_adapter_hold_the_base_model_once(tmp_path: Path) -> None:
    model = adapted()
    run = trained(model, tmp_path, checkpoint_every=1)
    frozen = sum(each.nbytes for each in model.parameters() if not each.requires_grad)
    steps = sorted((run.folder / "checkpoints").glob("step-*"))
    assert len(steps) == 3
    data = [size_of_tensors(step) for step in steps]
    assert all(size < frozen / 2 for size in data), (data, frozen)


def size_of_tensors(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def test_an_adapter_has_a_rate_of_its_own_and_prompts_are_refused() -> None:
    model = adapted()
    job: Any = dt.hf.job(model, samples())
    optimizer = job.make_optimizer(model)
    assert optimizer.defaults["lr"] == 2e-4
    trains = {id(each) for each in model.parameters() if each.requires_grad}
    assert {id(each) for group in optimizer.param_groups for each in group["params"]} == trains
    prompts = peft.get_peft_model(base_model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(dt.DrivetrainError, match="PROMPT_TUNING puts tokens before each sample"):
        dt.hf.job(prompts, samples())
