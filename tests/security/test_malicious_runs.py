"""Run folders made to harm, through every door that loads one: no code runs, and the error says what is wrong.

`tests/checkpoint/test_malice.py` has more lies of a single checkpoint.
"""

import hashlib
import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import drivetrain as dt
from drivetrain.commands.monitor import in_words, state_of
from drivetrain.report import write_report
from tests.api.jobs import Variant, Vectors, make_job
from tests.checkpoint.test_malice import seal

SMALL = Variant(steps=4, num_samples=40, global_batch=16)
RANK_0 = "rank-00000.safetensors"


class Payload:
    """Makes a folder where it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._proof),)


def config(folder: Path) -> dt.Config:
    return dt.configure(output_dir=folder, gpu_mode="cpu", loss_weighting="samples", report=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dt.Result:
    folder = tmp_path_factory.mktemp("trained")
    return dt.train(make_job(SMALL, valid=Vectors(SMALL)), config(folder), quiet=True)


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint / "manifest.json").read_text())["manifest"]
    return found


def restamp(checkpoint: Path, content: bytes) -> None:
    """Put other content into the file of tensors, which the manifest vouches for."""
    (checkpoint / RANK_0).write_bytes(content)
    manifest = manifest_of(checkpoint)
    manifest["files"][RANK_0] |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    seal(checkpoint, json.dumps(manifest).encode())


def pickled(proof: Path) -> bytes:
    return pickle.dumps(Payload(proof))


def saved_by_torch(proof: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"model/weight": Payload(proof)}, buffer)
    return buffer.getvalue()


def zip_bomb(proof: Path) -> bytes:
    """Many zeros in little space, beside a pickle as `torch.load` looks for it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickled(proof))
        with archive.open("archive/data/0", "w", force_zip64=True) as entry:
            for _ in range(16):
                entry.write(bytes(1 << 20))
    return buffer.getvalue()


def long_header(size: int) -> Callable[[Path], bytes]:
    return lambda proof: struct.pack("<Q", size) + b'{"__metadata__":{}}'


def huge_tensor(proof: Path) -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2**40, 2**20], "data_offsets": [0, 2**62]}}).encode()
    return struct.pack("<Q", len(header)) + header


def as_manifest(proof: Path, checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_bytes(pickled(proof))


def moved_out(checkpoint: Path, name: str, target: Path) -> None:
    """Have the manifest name a file outside, which is there, with the right hash."""
    shutil.move(checkpoint / RANK_0, target)
    text = json.dumps(manifest_of(checkpoint)).replace(RANK_0, name)
    seal(checkpoint, text.encode())


def linked(proof: Path, checkpoint: Path) -> None:
    outside = checkpoint.parents[2] / "outside.safetensors"
    shutil.copy(checkpoint / RANK_0, outside)
    (checkpoint / RANK_0).unlink()
    (checkpoint / RANK_0).symlink_to(outside)


def content(make: Callable[[Path], bytes]) -> Callable[[Path, Path], None]:
    return lambda proof, checkpoint: restamp(checkpoint, make(proof))


CORPUS: dict[str, Callable[[Path, Path], None]] = {
    "a pickle": content(pickled),
    "a file of torch.save": content(saved_by_torch),
    "a zip bomb": content(zip_bomb),
    "a header of a terabyte": content(long_header(2**40)),
    "a header beyond 63 bits": content(long_header(2**64 - 1)),
    "a huge tensor": content(huge_tensor),
    "a pickle as the manifest": as_manifest,
    "a path up": lambda proof, at: moved_out(at, "../../../out.safetensors", at.parents[2] / "out.safetensors"),
    "a path from the root": lambda proof, at: moved_out(at, str(proof) + ".s", Path(f"{proof}.s")),
    "a link": linked,
}


def resume(folder: Path, result: dt.Result) -> object:
    (folder / "finished.json").unlink()
    return dt.train(make_job(SMALL, valid=Vectors(SMALL)), config(folder.parent), quiet=True)


DOORS: dict[str, Callable[[Path, dt.Result], object]] = {
    "resume": resume,
    "evaluate": lambda folder, result: dt.evaluate(result.job, folder, config(folder.parent)),  # type: ignore[arg-type]
    "predict": lambda folder, result: dt.predict(folder, Vectors(SMALL), job=result.job, config=config(folder.parent)),
    "the result's model": lambda folder, result: dt.Result(
        folder, 4, 0, True, None, "", True, job=result.job
    ).model,
    "export": lambda folder, result: dt.export(folder),
    "init_from": lambda folder, result: dt.train(
        make_job(SMALL, name="other", init_from=folder), config(folder.parent), quiet=True
    ),
}  # fmt: skip


def harmful(trained: dt.Result, tmp_path: Path, evil: str) -> tuple[Path, Path]:
    """A run folder whose checkpoints are all like that, and what there would be if their code had run."""
    folder, proof = tmp_path / "suite", tmp_path / "proof"
    shutil.copytree(trained.folder, folder)
    for checkpoint in sorted((folder / "checkpoints").glob("step-*")):
        if evil != "a path from the root" or checkpoint.name.endswith("4"):
            CORPUS[evil](proof, checkpoint)
        else:
            shutil.rmtree(checkpoint)
    return folder, proof


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("evil", CORPUS)
def test_no_door_runs_code_or_leaves_the_folder(trained: dt.Result, tmp_path: Path, evil: str, door: str) -> None:
    folder, proof = harmful(trained, tmp_path, evil)
    with pytest.raises(dt.DrivetrainError) as caught:
        DOORS[door](folder, trained)
    assert str(folder) in str(caught.value)
    assert caught.value.remedy
    in_words(state_of(folder))
    write_report(folder, always_draws=False)  # a picture takes longer than all else, and shows the same for every door
    assert not proof.exists()


@pytest.mark.parametrize("evil", CORPUS)
def test_no_picture_runs_code(trained: dt.Result, tmp_path: Path, evil: str) -> None:
    folder, proof = harmful(trained, tmp_path, evil)
    write_report(folder)
    assert not proof.exists()


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ".pkl", ".safetensors"])
@pytest.mark.parametrize("make", [pickled, saved_by_torch, zip_bomb])
def test_weights_of_others_are_never_unpickled(tmp_path: Path, suffix: str, make: Callable[[Path], bytes]) -> None:
    file, proof = tmp_path / f"weights{suffix}", tmp_path / "proof"
    file.write_bytes(make(proof))
    with pytest.raises(dt.DrivetrainError, match="weights"):
        dt.train(make_job(SMALL, init_from=file), config(tmp_path), quiet=True)
    assert not proof.exists()


def test_the_payload_would_work(tmp_path: Path) -> None:
    """Otherwise the tests above would show nothing."""
    pickle.loads(pickled(tmp_path / "proof"))
    assert (tmp_path / "proof").is_dir()
    torch.load(io.BytesIO(saved_by_torch(tmp_path / "proof2")), weights_only=False)
    assert (tmp_path / "proof2").is_dir()


@pytest.mark.parametrize("file", ["job.yaml", "plan.yaml", "config.yaml", "hardware.json"])
def test_yaml_makes_no_objects_and_does_not_explode(trained: dt.Result, tmp_path: Path, file: str) -> None:
    folder, proof = tmp_path / "suite", tmp_path / "proof"
    shutil.copytree(trained.folder, folder)
    laughs = "\n".join(f"l{number}: &l{number} [{', '.join([f'*l{number - 1}'] * 9)}]" for number in range(1, 30))
    for text in (f"a: !!python/object/apply:os.mkdir ['{proof}']\n", f"l0: &l0 [ha]\n{laughs}\n"):
        (folder / file).write_text(text)
        in_words(state_of(folder))
        write_report(folder)
    assert not proof.exists()


def test_an_adapter_is_never_unpickled(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from drivetrain.hf.adapters import with_adapter

    proof = tmp_path / "proof"
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "target_modules": ["0"], "r": 2}')
    (tmp_path / "adapter_model.bin").write_bytes(saved_by_torch(proof))
    model = torch.nn.Sequential(torch.nn.Linear(3, 3))
    with pytest.raises(dt.DrivetrainError, match="there is no adapter"):
        with_adapter(model, tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(saved_by_torch(proof))
    with pytest.raises(dt.DrivetrainError, match="cannot be read"):
        with_adapter(model, tmp_path)
    assert not proof.exists()
