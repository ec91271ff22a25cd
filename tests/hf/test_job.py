"""`dt.hf.job`: the loss is transformers' own over the undivided batch, however it is divided."""

import doctest
import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import drivetrain as dt
from drivetrain.data.division import SampleStream
from tests.api.tiny_transformers import ARCHITECTURES, OTHER_HEADS, make
from tests.hf.samples import NUM_SAMPLES, samples, tiny_llama, transformers

KNOWN = {name: ARCHITECTURES[name][2] for name in ARCHITECTURES} | {"bert classification": "classes"}


def made(name: str) -> nn.Module:
    torch.manual_seed(1)
    return make(name)().float()


@pytest.mark.parametrize("name", KNOWN)
def test_sums_over_any_division_are_the_models_own_loss(name: str) -> None:
    assert set(ARCHITECTURES) | set(OTHER_HEADS) >= set(KNOWN)
    data, model = samples(KNOWN[name]), made(name)
    job: Any = dt.hf.job(model, data, name="tiny")
    with torch.no_grad():
        expected = model(**job.collate(data)).loss
    for size in (1, 5, NUM_SAMPLES):
        parts = [job.loss(model, job.collate(data[at : at + size])) for at in range(0, NUM_SAMPLES, size)]
        found = sum(part.total.detach() for part in parts) / sum(part.count for part in parts)
        assert abs(float(found) - float(expected)) < 1e-6


def plain_loop(model: nn.Module, data: list[dict[str, Any]], batch: int, steps: int, seed: int) -> None:
    """Whole batches, padded by hand, with the model's own loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        chosen = [data[int(at)] for at in SampleStream(len(data), seed).samples(0, step * batch, (step + 1) * batch)]
        tokens, mask = torch.zeros(batch, 10, dtype=torch.int64), torch.zeros(batch, 10, dtype=torch.int64)
        labels = torch.full((batch, 10), -100)
        for row, sample in enumerate(chosen):
            length = len(sample["input_ids"])
            tokens[row, :length] = torch.tensor(sample["input_ids"])
            labels[row, :length] = torch.tensor(sample["labels"])
            mask[row, :length] = 1
        optimizer.zero_grad()
        model(input_ids=tokens, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()


def test_micro_batches_train_like_whole_batches(tmp_path: Path) -> None:
    data = samples()
    job = dt.hf.job(
        tiny_llama(), data, global_batch=6, max_steps=2, seed=5, schedule=dt.Constant(), clip_norm=None,
        weight_decay=None, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
    )  # fmt: skip
    result = dt.train(job, dt.configure(output_dir=tmp_path, batch_size=1, quiet=True, report=False))
    torch.manual_seed(5)
    reference = transformers.LlamaForCausalLM(tiny_llama()).train()
    before = reference.state_dict()["lm_head.weight"].clone()
    plain_loop(reference, data, 6, 2, 5)
    trained = result.model.state_dict()
    assert not torch.equal(before, trained["lm_head.weight"])
    for name, weight in reference.state_dict().items():
        torch.testing.assert_close(trained[name], weight, rtol=0, atol=1e-6)


def test_a_batch_without_labels_contributes_nothing() -> None:
    model: Any = transformers.LlamaForCausalLM(tiny_llama())
    data = [{"input_ids": [5, 6, 7], "labels": [-100] * 3}, {"input_ids": [5], "labels": [5]}]
    job: Any = dt.hf.job(model, [*data, {"input_ids": [5, 6]}])
    for batch in (data, data[1:]):  # one token alone predicts nothing
        found = job.loss(model, job.collate(batch))
        assert float(found.total.detach()) == 0
        assert int(found.count) == 0
        found.total.backward()
        assert all(not torch.count_nonzero(each.grad) for each in model.parameters() if each.grad is not None)


def test_the_end_of_a_text_is_learned_though_it_also_pads() -> None:
    job: Any = dt.hf.job(tiny_llama(), [{"input_ids": [5, 2]}], tokenizer=SimpleNamespace(pad_token_id=2))
    batch: dict[str, Tensor] = job.collate([{"input_ids": [5, 2]}, {"input_ids": [5, 6, 7, 2]}])
    assert {value.shape for value in batch.values()} == {(2, 8)}  # longer than all it was made with
    assert int(batch["attention_mask"][:, 4:].sum()) == 0
    assert bool((batch["labels"][:, 4:] == -100).all())
    batch = {name: value[:, :4] for name, value in batch.items()}
    assert batch["input_ids"].tolist() == [[5, 2, 2, 2], [5, 6, 7, 2]]
    assert batch["labels"].tolist() == [[5, 2, -100, -100], [5, 6, 7, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    fixed: Any = dt.hf.job(tiny_llama(), [{"input_ids": [5, 2]}], length=6)
    assert fixed.collate([{"input_ids": [5, 2]}])["labels"].tolist() == [[5, 2, -100, -100, -100, -100]]


def test_padded_tensors_by_name_and_padding_that_a_tokenizer_made_is_no_label() -> None:
    tensors = {
        "input_ids": torch.tensor([[5, 6, 2], [5, 2, 2]]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
    }
    job: Any = dt.hf.job(tiny_llama(), tensors, valid={"a": tensors, "b": tensors})
    batch = job.collate([job.source.dataset[0], job.source.dataset[1]])
    assert batch["labels"].tolist() == [[5, 6, 2], [5, 2, -100]]
    assert batch["attention_mask"].tolist() == tensors["attention_mask"].tolist()


def test_defaults() -> None:
    job: Any = dt.hf.job(tiny_llama(), samples(count=160))
    assert (job.name, job.epochs, job.global_batch, job.clip_norm, job.weight_decay) == ("llama", 3, 16, 1.0, 0.01)
    assert job.schedule == dt.WarmupCosine(warmup_steps=3)
    optimizer = job.make_optimizer(job.model())
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["lr"] == 5e-5
    assert dt.hf.job(tiny_llama(), samples(), max_steps=7).epochs is None
    assert dt.hf.job(tiny_llama(), samples(), max_steps=7, items="words").items == "words"


def test_a_folder_is_loaded_in_float32_and_a_task_chooses_the_head(tmp_path: Path) -> None:
    saved = transformers.LlamaForCausalLM(tiny_llama()).bfloat16()
    saved.save_pretrained(tmp_path / "model")
    loaded: Any = dt.hf.job(str(tmp_path / "model"), samples()).model
    state = loaded().state_dict()
    assert all(torch.equal(state[name], weight.float()) for name, weight in saved.state_dict().items())
    classifier: Any = dt.hf.job(tmp_path / "model", samples("classes"), task="sequence-classification").model
    assert type(classifier()).__name__ == "LlamaForSequenceClassification"


def test_validation_counts_labels(tmp_path: Path) -> None:
    data = samples()
    job = dt.hf.job(tiny_llama(), data, valid={"all": data, "some": data[:5]}, max_steps=1, global_batch=4)
    result = dt.train(job, dt.configure(output_dir=tmp_path, batch_size=2, quiet=True, report=False))
    model: Any = result.model
    for name, part in (("all", data), ("some", data[:5])):
        expected = float(model(**job.collate(part)).loss.detach())
        assert abs(result.metrics[f"valid_{name}_loss"] - expected) < 1e-6


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
BART = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32, "vocab_size": 31}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            lambda: transformers.BertForQuestionAnswering(transformers.BertConfig(**SMALL, vocab_size=31)),
            "none of the models",
        ),
        (lambda: transformers.BartForCausalLM(transformers.BartConfig(**BART)), "how it shifts labels is not known"),
        (
            lambda: transformers.MixtralForCausalLM(
                transformers.MixtralConfig(**SMALL, num_key_value_heads=1, vocab_size=31, output_router_logits=True)
            ),
            "the loss of its router",
        ),
        (lambda: nn.Linear(2, 2), "expected a model of transformers"),
        (lambda: "no/such/folder", "no config.json"),
    ],
)
def test_models_that_are_not_known(model: Any, words: str) -> None:
    with pytest.raises(dt.DrivetrainError, match=words):
        dt.hf.job(model(), samples())


def test_padding_that_the_model_would_take_for_words() -> None:
    model = transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(**SMALL, vocab_size=31, num_labels=3, pad_token_id=1)
    )
    with pytest.raises(dt.DrivetrainError, match="padded with token 0, and the model takes 1 for padding"):
        dt.hf.job(model, samples("classes"), pad_id=0)


@pytest.mark.parametrize(
    ("data", "settings", "words"),
    [
        ([{"text": "a", "label": 1}], {}, "no column 'input_ids'; the columns are 'text', 'label'"),
        ([{"input_ids": [5, 6]}], {"columns": {"labels": "target"}}, "no column 'target'; the columns are 'input_ids'"),
        ([{"input_ids": [5, 6], "labels": [5]}], {}, r"2 input_ids and labels of the shape \[1\]"),
        ([{"input_ids": [5, 6, 7]}], {"length": 2}, "has 3 tokens, and length=2"),
        ([{"input_ids": "words"}], {}, "holds no numbers"),
        (["a text"], {}, "and not str"),
        ([{"input_ids": [5, 6], "labels": [-100, -100]}] * 3, {}, "none of the 3 samples that were read has a label"),
        ([{"input_ids": [5]}], {}, "none of the 1 samples that were read has a label"),
        ([{"input_ids": [5, 6]}], {"task": "poetry"}, "there is no task 'poetry'"),
    ],
)
def test_data_that_cannot_be_trained_on(data: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(dt.DrivetrainError, match=words):
        dt.hf.job(tiny_llama(), data, **settings)


def test_a_collate_function_of_your_own_may_take_other_columns() -> None:
    job = dt.hf.job(tiny_llama(), [{"text": "a"}], collate=lambda items: {"input_ids": torch.ones(len(items), 2)})
    assert isinstance(job, dt.Job)


def test_transformers_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(dt.DrivetrainError, match=r"dt\.hf needs transformers(.|\n)*drivetrain\[hf\]"):
        dt.hf.job("folder", samples())


def test_labels_under_other_names() -> None:
    item = {"input_ids": [5, 6, 7], "target": 2, "label": 1}
    for columns, label in ((None, 1), ({"labels": "target"}, 2)):
        job: Any = dt.hf.job(tiny_llama(), [item], task="sequence-classification", columns=columns)
        assert job.collate([item])["labels"].tolist() == [label]


def test_transformers_is_imported_when_a_job_is_made() -> None:
    code = "import sys, drivetrain as dt; dt.hf.job; print(sorted({'transformers', 'peft'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=240)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("name", ["job", "export", "job_from"])
def test_docstrings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    function = getattr(dt.hf, name)
    text = inspect.getdoc(function) or ""
    arguments = text.partition("Args:\n")[2].partition("\nReturns:")[0]
    documented = [line.split(":")[0].strip() for line in arguments.splitlines() if line[4:5].strip()]
    assert documented == list(inspect.signature(function).parameters)
    example = doctest.DocTestParser().get_doctest(text, {"dt": dt}, name, None, None)
    assert doctest.DocTestRunner().run(example).failed == 0
