"""What `drivetrain prove` finds and what it does not: planted bugs, clean models, and the losses of `transformers`.

The cases are those of the tests. 1 stands for a bug that is found, classed and located, and for a clean model without
an alarm; 0 for anything else.
"""

import contextlib
import sys
import tempfile
import time
from pathlib import Path

from tests.api import test_transformers_loss, tiny_transformers
from tests.gloo_pool import GlooPool
from tests.proving import test_planted
from tests.proving.models import ARCHITECTURES, OWN, transformer
from tests.proving.test_clean_models import assert_clean

import drivetrain as dt


def measure_planted() -> dict[str, list[float]]:
    """Prove every planted bug: does the first verdict name its kind, and the tensor, sample or step?"""
    samples: dict[str, list[float]] = {}
    for planted in test_planted.PLANTED:
        name, began = planted.loop.__name__, time.monotonic()
        found = 0.0
        with contextlib.suppress(AssertionError):
            test_planted.check(planted)
            found = 1.0
        samples[f"{name}: {planted.kind.value}"] = [found]
        samples.setdefault("seconds", []).append(time.monotonic() - began)
        _say(f"{name}: {found:g}")
    return samples


def measure_clean() -> dict[str, list[float]]:
    """Prove every clean model by default: there is no alarm, and how long does it take?"""
    samples: dict[str, list[float]] = {}
    jobs = {**OWN, **{name: (lambda name=name: transformer(name)) for name in ARCHITECTURES}}
    for name, job in jobs.items():
        began = time.monotonic()
        clean = 0.0
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(AssertionError):
            assert_clean(dt.prove(job(), output=Path(folder) / "certificate.json", quiet=True), name)
            clean = 1.0
        samples[name] = [clean]
        samples.setdefault("seconds", []).append(time.monotonic() - began)
        _say(f"{name}: {clean:g} after {samples['seconds'][-1]:.0f} s")
    return samples


def measure_transformers() -> dict[str, list[float]]:
    """Measure how far `model(**batch).loss` with padding is from whole batches, in float64."""
    samples: dict[str, list[float]] = {}
    pool = GlooPool()
    try:
        for name in tiny_transformers.ARCHITECTURES:
            for world in (1, 2, 3):
                for micro_batch in (1, 2, 8):
                    with tempfile.TemporaryDirectory() as folder:
                        found = pool.run(test_transformers_loss.trained, folder, name, micro_batch, world=world)[0]
                    samples.setdefault(name, []).append(test_transformers_loss.difference(name, found))
            _say(f"{name}: {max(samples[name]):.1e}")
    finally:
        pool.close()
    return samples


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)
