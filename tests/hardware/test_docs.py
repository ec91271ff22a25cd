"""The code in docs/hardware.md runs, from top to bottom."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "hardware.md"


def test_the_samples_run(capsys: pytest.CaptureFixture[str]) -> None:
    samples = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(samples) == 3
    exec("\n".join(samples), {})
    assert "batch['image'][0] is on meta" in capsys.readouterr().out
