"""Padding to few lengths, and packing: neither changes the loss or the gradients of the samples."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import drivetrain as dt
from drivetrain.data.batch import to_device
from drivetrain.hf.lengths import buckets_for
from drivetrain.strategies import compiling
from tests.api.jobs import Trained, read
from tests.api.tiny_transformers import VOCABULARY
from tests.gloo_pool import GlooPool
from tests.hf.samples import peft, samples, tiny_llama, transformers

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama(dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> Any:
    torch.manual_seed(1)
    config = tiny_llama()
    config._attn_implementation = attention
    return transformers.LlamaForCausalLM(config).to(dtype)


def mistral(dtype: torch.dtype) -> Any:
    """A window of 3 tokens: a mask of its own that packing must not replace."""
    torch.manual_seed(1)
    config = transformers.MistralConfig(
        vocab_size=VOCABULARY, num_key_value_heads=1, sliding_window=3, pad_token_id=0, **SIZES
    )
    return transformers.MistralForCausalLM(config).to(dtype)


def gpt2(dtype: torch.dtype = torch.float64) -> Any:
    """Learned positions; and nothing in it rounds to float32."""
    torch.manual_seed(1)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    no_dropout = {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
    config = transformers.GPT2Config(vocab_size=VOCABULARY, pad_token_id=0, **sizes, **no_dropout)
    return transformers.GPT2LMHeadModel(config).to(dtype)


def adapted(dtype: torch.dtype = torch.float64) -> Any:
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    made = peft.get_peft_model(gpt2(dtype), lora)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "lora_B" in name:
                weight.normal_(generator=torch.Generator().manual_seed(len(name)))
    return made.to(dtype)


# With the error in float64: RMSNorm of transformers computes in float32 whatever the weights are.
MODELS: dict[str, tuple[Any, float]] = {
    "llama, sdpa": (llama, 1e-7),
    "llama, eager": (lambda dtype: llama(dtype, "eager"), 1e-7),
    "mistral with a sliding window": (mistral, 1e-7),
    "gpt2": (gpt2, 1e-12),
    "lora": (adapted, 1e-12),
}


def reference(model: Any, data: list[dict[str, Any]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Each sample alone, without padding: the mean over all labels, and its gradients."""
    model.zero_grad()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for each in data:
        tokens, labels = torch.tensor([each["input_ids"]]), torch.tensor(each["labels"])
        logits = model(input_ids=tokens).logits[0, :-1].to(next(model.parameters()).dtype)
        total = total + torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum")
        count += int((labels[1:] != -100).sum())
    (total / count).backward()
    grads = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return float(total.detach()) / count, grads


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "way", [{"packing": True}, {"packing": False}, {"packing": True, "length": 24}, {"length": 24}]
)
def test_loss_and_gradients_are_those_of_the_samples_alone(name: str, dtype: torch.dtype, way: dict[str, Any]) -> None:
    make, in_float64 = MODELS[name]
    tolerance = in_float64 if dtype is torch.float64 else 1e-5
    model, data = make(dtype), samples()
    job: Any = dt.hf.job(model, data, **way)
    expected, gradients = reference(model, data)
    model.zero_grad()
    found = job.loss(model, job.collate(data))
    (found.total / found.count).backward()
    assert abs(float(found.total.detach()) / float(found.count) - expected) < tolerance
    assert gradients
    for each, weight in model.named_parameters():
        if weight.requires_grad:
            torch.testing.assert_close(weight.grad, gradients[each], rtol=0, atol=tolerance)


def flexible() -> tuple[Any, Any]:
    """The same weights with flex attention and with sdpa. Its kernels take heads of 16 and more."""
    made = []
    for attention in ("flex_attention", "sdpa"):
        torch.manual_seed(1)
        config = tiny_llama()
        config.hidden_size, config.head_dim, config._attn_implementation = 32, 16, attention
        made.append(transformers.LlamaForCausalLM(config))
    return made[0], made[1]


def test_flex_attention_tells_packed_samples_apart_and_is_not_trained_on_a_cpu(tmp_path: Path) -> None:
    flex, sdpa = flexible()
    data = samples()
    job: Any = dt.hf.job(flex, data, packing=True, max_steps=2)
    expected, _ = reference(sdpa, data)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # no CPU but x86 compiles it
        found = job.loss(flex, job.collate(data))
    assert abs(float(found.total) / float(found.count) - expected) < 1e-5
    config = dt.configure(output_dir=tmp_path, gpu_mode="cpu", report=False)
    with pytest.raises(dt.DrivetrainError, match="flex attention cannot be trained on a CPU"):
        dt.train(job, config, quiet=True)


@pytest.mark.gpu
def test_flex_attention_trains_packed_samples_as_each_alone() -> None:
    flex, sdpa = flexible()
    data = samples()
    job: Any = dt.hf.job(flex, data, packing=True)
    expected, gradients = reference(sdpa, data)  # on the CPU
    flex.cuda()
    found = job.loss(flex, to_device(job.collate(data), torch.device("cuda")))
    (found.total / found.count).backward()
    assert abs(float(found.total.detach()) / float(found.count) - expected) < 1e-5
    for name, weight in flex.named_parameters():
        torch.testing.assert_close(weight.grad.cpu(), gradients[name], rtol=0, atol=1e-5)


@pytest.mark.gpu
def test_a_packed_run_with_flex_attention_has_the_losses_of_sdpa(tmp_path: Path) -> None:
    losses = []
    for name, model in zip(("flex", "sdpa"), flexible(), strict=True):
        job = dt.hf.job(model, samples(count=40), packing=True, name=name, global_batch=8, max_steps=10, seed=3)
        config = dt.configure(output_dir=tmp_path, precision="fp32", auto_optimize=False, report=False)
        result = dt.train(job, config, quiet=True)
        losses.append(read(result.folder, result.resumed_from).losses)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


def test_rows_of_packed_samples() -> None:
    data = [{"input_ids": [5] * 6}, {"input_ids": [6] * 3}, {"input_ids": [7] * 2}, {"input_ids": [8] * 4}]
    job: Any = dt.hf.job(tiny_llama(), data, packing=True, length=8)
    batch = job.collate(data)
    assert batch["input_ids"].tolist() == [[5, 5, 5, 5, 5, 5, 7, 7], [8, 8, 8, 8, 6, 6, 6, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 0, 1], [0, 1, 2, 3, 0, 1, 2, 0]]
    assert batch["labels"].tolist() == [[-100, 5, 5, 5, 5, 5, -100, 7], [-100, 8, 8, 8, -100, 6, 6, -100]]
    assert set(batch) == {"input_ids", "labels", "position_ids", "use_cache"}
    assert batch["use_cache"] is False  # or the model would look at all samples of a row


def test_padding_of_the_tokenizer_is_left_out_of_rows() -> None:
    job: Any = dt.hf.job(tiny_llama(), [{"input_ids": [5, 6, 2, 2], "attention_mask": [1, 1, 0, 0]}] * 2, packing=True)
    assert job.collate(job.source.dataset)["input_ids"].tolist() == [[5, 6, 5, 6]]


@pytest.mark.parametrize(
    ("model", "data", "settings", "words"),
    [
        (llama, [{"input_ids": [2, 5, 6], "attention_mask": [0, 1, 1]}], {}, "hides tokens before the end"),
        (llama, [{"input_ids": [5, 6], "position_ids": [3, 4]}], {}, "position_ids of its own"),
        (llama, [{"input_ids": [5, 6]}], {"task": "sequence-classification"}, "a causal model"),
        (
            lambda: transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(
                vocab_size=31, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
                num_key_value_heads=1, head_dim=8, linear_num_value_heads=2, linear_num_key_heads=2,
                linear_key_head_dim=8, linear_value_head_dim=8, moe_intermediate_size=16, num_experts=2,
                num_experts_per_tok=1, shared_expert_intermediate_size=16, pad_token_id=0)),
            [{"input_ids": [5, 6]}], {}, "see the tokens of other samples",
        ),
        (
            lambda: transformers.FalconMambaConfig(
                vocab_size=31, hidden_size=16, num_hidden_layers=1, state_size=4, pad_token_id=0),
            [{"input_ids": [5, 6]}], {}, "takes no position_ids",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_packed(model: Any, data: Any, settings: dict[str, Any], words: str) -> None:
    given = tiny_llama() if "task" in settings else model()
    with pytest.raises(dt.DrivetrainError, match=words):
        dt.hf.job(given, data, packing=True, **settings)


def test_a_model_that_is_built_later_is_checked_then() -> None:
    config = transformers.Qwen3NextConfig(
        vocab_size=31, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, moe_intermediate_size=16, num_experts=2, num_experts_per_tok=1,
        shared_expert_intermediate_size=16, pad_token_id=0,
    )  # fmt: skip
    job: Any = dt.hf.job(config, samples(), packing=True)
    with pytest.raises(dt.DrivetrainError, match="see the tokens of other samples"):
        job.model()


def test_the_check_changes_nothing() -> None:
    model = llama(torch.float32)
    model.model.layers[0].eval()
    flags = [module.training for module in model.modules()]
    before = torch.get_rng_state()
    dt.hf.job(model, samples(), packing=True)
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), before)
    assert all(weight.grad is None for weight in model.parameters())


def brute_force(lengths: list[int], most: int) -> int:
    from itertools import combinations

    values = sorted({-(-length // 8) * 8 for length in lengths})
    chosen = [(*each, values[-1]) for k in range(min(most, len(values))) for each in combinations(values[:-1], k)]
    return min(sum(min(b for b in each if b >= length) for length in lengths) for each in chosen)


@pytest.mark.parametrize("seed", range(6))
def test_buckets_pad_the_least(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 90, 60)
    found = buckets_for(lengths, 3)
    assert len(found) <= 3
    assert all(bucket % 8 == 0 for bucket in found)
    padded = sum(min(bucket for bucket in found if bucket >= length) for length in lengths.tolist())
    assert padded == brute_force(lengths.tolist(), 3)


def test_many_lengths_have_buckets_quickly() -> None:
    found = buckets_for(np.random.default_rng(0).integers(1, 200_000, 100_000), 6)
    assert len(found) == 6
    assert found[-1] >= 199_990
    assert buckets_for(np.array([5, 5]), 4) == (5,)
    assert buckets_for(np.array([5, 6]), 4) == (8,)


def lengths_seen(job: Any, data: list[Any], batch: int) -> set[tuple[int, ...]]:
    return {tuple(job.collate(data[at : at + batch])["input_ids"].shape) for at in range(0, len(data), batch)}


def long_samples(count: int = 200) -> list[dict[str, Any]]:
    lengths = np.random.default_rng(0).integers(1, 100, count)
    return [{"input_ids": [3 + at % 20 for at in range(length)]} for length in lengths]


def test_batches_have_few_lengths_and_it_is_told() -> None:
    data = long_samples()
    job: Any = dt.hf.job(tiny_llama(), data, group_by_length=True, packing=False)
    assert len(lengths_seen(job, data, 1)) <= 8
    note = next(note for note in job.source.notes if "padded" in note)
    assert "% of the tokens" in note
    order = job.source.order(16, 0, shuffle=True).samples(0, 0, 200).tolist()
    padded = [job.collate([data[i] for i in order[at : at + 16]])["input_ids"].numel() for at in range(0, 200, 16)]
    share = 1 - sum(len(each["input_ids"]) for each in data) / sum(padded)
    assert f"{100 * share:.0f} % of the tokens" in note
    fixed: Any = dt.hf.job(tiny_llama(), data, length=128)
    assert lengths_seen(fixed, data, 4) == {(4, 128)}


def test_packing_is_chosen_where_much_would_be_padding() -> None:
    data = long_samples()
    packed: Any = dt.hf.job(tiny_llama(), data)
    assert "position_ids" in packed.collate(data[:4])
    assert any("packed" in note for note in packed.source.notes)
    alike = [{"input_ids": [5] * 30}] * 40
    for padded in (
        dt.hf.job(tiny_llama(), alike),
        dt.hf.job(tiny_llama(), data, packing=False),
        dt.hf.job(tiny_llama(), data, group_by_length=True),
        dt.hf.job(tiny_llama(), data, metrics={"size": lambda output, batch: output.logits.mean()}, valid=data),
    ):
        assert "position_ids" not in padded.collate(data[:4])  # type: ignore[operator]


@pytest.mark.parametrize("packing", [True, False])
def test_batches_of_any_size_are_compiled_once(packing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    without_kernels = {"backend": "eager"}  # they take minutes
    monkeypatch.setattr(compiling.CompileOptions, "arguments", lambda options: without_kernels)
    data, model = long_samples(160), llama()
    job: Any = dt.hf.job(model, data, packing=packing)
    torch._dynamo.reset()
    before = compiling.num_graphs()
    step = compiling.compiled(job.loss, compiling.CompileOptions())
    shapes = set()
    for at in range(0, 160, 10):  # a single row would be compiled by itself
        batch = job.collate(data[at : at + 10])
        shapes.add(batch["input_ids"].shape)
        eager, found = job.loss(model, batch), step(model, batch)
        torch.testing.assert_close(found.total, eager.total)
    assert len(shapes) > 2
    assert compiling.num_graphs() - before == 1


def make_job(way: str, **changes: Any) -> dt.Job:
    data = samples(count=40)
    ways: dict[str, Any] = {
        "packed": {"packing": True},
        "grouped": {"group_by_length": True},
        "lora, packed": {"packing": True, "model": adapted},
    }
    values = {"model": gpt2, "name": "suite", "global_batch": 8, "max_steps": 10, "lr": 0.01, "seed": 3, **ways[way]}
    values |= changes
    return dt.hf.job(values.pop("model")(), data, **values)


def run(folder: str, way: str, micro_batch: int, **changes: Any) -> Trained | None:
    config = dt.configure(output_dir=folder, gpu_mode="cpu", batch_size=micro_batch, report=False)
    result = dt.train(make_job(way, **changes), config, quiet=True)
    return read(result.folder, result.resumed_from) if result.is_main else None


@functools.cache
def by_hand(way: str) -> tuple[list[float], Any]:
    """The undivided batches of the job's order, sample by sample, with torch's own parts."""
    job: Any = make_job(way)
    model: Any = job.model
    trained = [each for each in model.parameters() if each.requires_grad]
    decayed, others = [each for each in trained if each.dim() > 1], [each for each in trained if each.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)
    data, stream, losses = samples(count=40), job.source.order(8, 3, shuffle=True), []
    for step in range(10):
        epoch, number = divmod(step, 5)
        order = stream.samples(epoch, number * 8, number * 8 + 8).tolist()
        mean, _ = reference(model, [data[index] for index in order])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * job.lr_factor(step, 10)
        optimizer.step()
        losses.append(mean)
    return losses, model


@pytest.mark.parametrize("way", ["packed", "grouped", "lora, packed"])
@pytest.mark.parametrize(("world", "micro_batch"), [(1, 8), (2, 3), (3, 2)])
def test_any_world_trains_like_a_plain_loop(
    gloo_pool: GlooPool, tmp_path: Path, way: str, world: int, micro_batch: int
) -> None:
    trained = gloo_pool.run(run, str(tmp_path), way, micro_batch, world=world)[0]
    losses, model = by_hand(way)
    assert trained.losses == pytest.approx(losses, abs=1e-9)
    for name, weight in model.named_parameters():
        np.testing.assert_allclose(trained.weights[f"model/{name}"], weight.detach().numpy(), rtol=0, atol=1e-9)


def test_packed_rows_are_not_taken_for_samples_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line told users that their collate function had left out half of the samples."""
    equal = [{"input_ids": [5] * 8}] * 4  # a row each
    job = dt.hf.job(llama(), equal + [{"input_ids": [5, 7, 2]}] * 12, packing=True, max_steps=4, shuffle=False)
    dt.train(dataclasses.replace(job, global_batch=4), dt.configure(output_dir=tmp_path, report=False), quiet=True)
    assert "collate function" not in capsys.readouterr().err


def test_predictions_have_a_row_per_sample(tmp_path: Path) -> None:
    data = samples()
    job: Any = dt.hf.job(gpt2(), data, packing=True, length=16, max_steps=1, global_batch=4)
    result = dt.train(job, dt.configure(output_dir=tmp_path, gpu_mode="cpu", quiet=True, report=False))
    found = dt.predict(result, data, forward=lambda model, batch: model(**batch).logits)
    assert found.shape[:2] == (len(data), 16)
    model: Any = result.model
    for row, each in zip(found, data, strict=True):
        alone = model(input_ids=torch.tensor([each["input_ids"]])).logits[0].detach()
        torch.testing.assert_close(row[: len(alone)], alone)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"compile": True, "compile_scope": "blocks"}], ids=["eager", "blocks"])
def test_steps_of_packed_rows_are_captured(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The host does not wait for the device in such a step, and its losses are those of the steps that are run."""
    losses: dict[str, list[float]] = {}
    for capture in ("off", "on"):
        job = dt.hf.job(llama(), samples(count=40), packing=True, name=capture, global_batch=8, max_steps=40, seed=3)
        config = dt.configure(
            output_dir=tmp_path, precision="fp32", capture=capture, auto_optimize=False, report=False, **settings
        )
        result = dt.train(job, config, quiet=True)
        events = (result.folder / "events.jsonl").read_text()
        assert ("steps replayed" in events) == (capture == "on"), events
        losses[capture] = read(result.folder, result.resumed_from).losses
    np.testing.assert_allclose(losses["on"], losses["off"], rtol=1e-4)
