"""Pictures from a folder or the network; what is missing or damaged is said in words. No network is needed."""

import gzip
import hashlib
import io
import struct
import urllib.error
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.config import configure
from drivetrain.core.errors import ConfigError, DrivetrainError
from drivetrain.moe import Lifecycle
from drivetrain.recipes import mnist
from drivetrain.recipes.digits_moe import mixture_job
from drivetrain.recipes.mnist import load_pictures


def idx(numbers: torch.Tensor) -> bytes:
    head = bytes([0, 0, 8, numbers.dim()]) + struct.pack(f">{numbers.dim()}I", *numbers.shape)
    return head + numbers.to(torch.uint8).numpy().tobytes()


def files(num_train: int = 40, num_test: int = 10, size: int = 28) -> dict[str, bytes]:
    generator = torch.Generator().manual_seed(0)

    def pictures(count: int) -> bytes:
        return idx(torch.randint(0, 256, (count, size, size), generator=generator))

    return {
        "train-images-idx3-ubyte": pictures(num_train),
        "train-labels-idx1-ubyte": idx(torch.arange(num_train) % 10),
        "t10k-images-idx3-ubyte": pictures(num_test),
        "t10k-labels-idx1-ubyte": idx(torch.arange(num_test) % 10),
    }


def write(folder: Path, compressed: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files().items():
        path = folder / (f"{name}.gz" if compressed else name)
        path.write_bytes(gzip.compress(content) if compressed else content)
    return folder


@pytest.mark.parametrize("where", ["", "raw"])
@pytest.mark.parametrize("compressed", [True, False])
def test_a_folder_is_read(tmp_path: Path, where: str, compressed: bool) -> None:
    write(tmp_path / where, compressed)
    found = load_pictures("mnist", tmp_path)
    assert (len(found.train), len(found.valid), len(found.test), found.size) == (35, 5, 10, 28)
    images, labels = found.test.tensors
    assert images.shape == (10, 1, 28, 28)
    raw = files()["t10k-images-idx3-ubyte"][16:]
    assert images.flatten().tolist() == pytest.approx([value / 255 for value in raw], abs=1e-6)
    assert labels.tolist() == list(range(10))
    both = torch.cat([found.train.tensors[0], found.valid.tensors[0]]).flatten(1)
    assert len(torch.unique(both, dim=0)) == 40, "every picture is in one part"


def test_the_bundled_digits_are_in_three_parts() -> None:
    found = load_pictures("digits")
    assert (len(found.train), len(found.valid), len(found.test), found.size) == (1258, 179, 360, 8)


class Network:
    """Answers as a server would, or not at all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: dict[str, bytes] | None) -> None:
        self.asked: list[str] = []
        self._answers = answers
        monkeypatch.setattr(mnist.urllib.request, "urlopen", self)

    def __call__(self, address: str, timeout: float) -> Any:
        self.asked.append(address)
        if self._answers is None:
            raise urllib.error.URLError("Temporary failure in name resolution")
        return io.BytesIO(self._answers[address.rsplit("/", 1)[1].removesuffix(".gz")])


def published(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """As if these small files were the ones that were published."""
    packed = {name: gzip.compress(content, mtime=0) for name, content in files().items()}
    sums = {name: hashlib.md5(content, usedforsecurity=False).hexdigest() for name, content in packed.items()}
    known = mnist._Published(("https://first.example/", "https://second.example/"), sums)
    monkeypatch.setitem(mnist.PUBLISHED, "mnist", known)
    return packed


def test_what_is_missing_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(monkeypatch, published(monkeypatch))
    monkeypatch.setenv("DRIVETRAIN_CACHE", str(tmp_path))
    assert len(load_pictures("mnist").train) == 35
    assert len(network.asked) == 4
    assert len(load_pictures("mnist").train) == 35
    assert len(network.asked) == 4, "it was kept"
    assert [path.name for path in sorted((tmp_path / "data" / "mnist").iterdir())] == sorted(
        f"{name}.gz" for name in files()
    )


def test_a_wrong_checksum_is_refused_and_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = published(monkeypatch)
    network = Network(monkeypatch, {name: content[:-3] for name, content in packed.items()})
    with pytest.raises(DrivetrainError, match="has the MD5 sum"):
        load_pictures("mnist", tmp_path)
    assert len(network.asked) == 2, "both addresses were tried"
    assert list(tmp_path.iterdir()) == []


def test_without_a_network_the_words_say_what_to_bring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Network(monkeypatch, None)
    with pytest.raises(DrivetrainError) as caught:
        load_pictures("fashion-mnist", tmp_path)
    assert "could not be downloaded" in caught.value.message
    assert "name resolution" in caught.value.message
    assert "--data-dir" in (caught.value.remedy or "")
    with pytest.raises(ConfigError, match="no such folder"):
        load_pictures("mnist", tmp_path / "missing")


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(torch.arange(9))))
    with pytest.raises(DrivetrainError, match="do not belong together"):
        load_pictures("mnist", tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("train-labels-idx1-ubyte", torch.arange(40), r"labels from 0 to 39.* 0 to 9"),
        ("t10k-labels-idx1-ubyte", torch.full((10,), 10), r"labels from 10 to 10.* 0 to 9"),
        ("t10k-images-idx3-ubyte", torch.zeros(10, 20, 20), r"pictures of 20 × 20.* 28 × 28"),
        ("train-images-idx3-ubyte", torch.zeros(40, 28, 20), r"pictures of 28 × 20.* as high as they are wide"),
    ],
)
def test_labels_and_sizes_that_cannot_be_learnt_are_found_when_read(
    tmp_path: Path, file: str, content: torch.Tensor, words: str
) -> None:
    write(tmp_path)
    (tmp_path / f"{file}.gz").write_bytes(gzip.compress(idx(content)))
    with pytest.raises(DrivetrainError, match=f"{file}.gz has {words}") as caught:
        load_pictures("mnist", tmp_path)
    assert caught.value.remedy


def test_classes_have_the_names_of_what_is_to_be_seen(tmp_path: Path) -> None:
    write(tmp_path)
    clothes = load_pictures("fashion-mnist", tmp_path)
    assert (clothes.classes[0], clothes.classes[9], len(clothes.classes)) == ("T-shirt/top", "Ankle boot", 10)
    assert load_pictures("mnist", tmp_path).classes == load_pictures("digits").classes == tuple("0123456789")
    job = mixture_job("clothes", clothes, configure(gpu_mode="cpu"), epochs=1, global_batch=8)
    lifecycle = next(hook for hook in job.hooks if isinstance(hook, Lifecycle))
    assert lifecycle.knowledge is not None
    assert lifecycle.knowledge._names[:10] == list(clothes.classes)
