"""The race counts the tokens of samples, whoever runs it."""

from typing import Any

import pytest
from benchmarks.contest import Circumstances

from benchmarks import lora_race


@pytest.mark.parametrize("name", ["ours", "ours-grouped", "trainer-defaults"])
def test_tokens_that_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    measured = lora_race._measured

    def watching(race: Any, moments: Any, tokens: list[int], facts: Any) -> Any:
        seen.append((len(moments), tokens))
        return measured(race, moments, tokens, facts)

    monkeypatch.setattr(lora_race, "_measured", watching)
    race = lora_race.TINY
    found = lora_race.contest(smoke=True).competitor(name).measure(Circumstances(True, False, {}))
    num_moments, tokens = seen[0]
    assert num_moments == race.num_steps
    per_epoch = race.num_samples // lora_race.GLOBAL_BATCH
    assert sum(tokens[:per_epoch]) == int(race.lengths().sum())  # each sample once, no padding
    rate = lora_race._tokens_per_step(race) / found.seconds[0]
    assert rate == pytest.approx(found.facts["tokens_per_second"], rel=1e-2)
    assert 0 < found.facts["first_step_seconds"] <= found.facts[f"seconds_until_{race.warm_steps}_steps"]
