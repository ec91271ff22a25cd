"""Caches that travel: what was compiled is found again elsewhere, and a file that does not fit changes nothing."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from drivetrain.cli import main
from drivetrain.commands import cache
from tests import warm_python

COMPILING = """
import json, torch
from torch._dynamo.utils import counters
from torch._inductor import config

# In an empty cache, the compiler would try what the CPU can do and compile headers first: 8 s.
config.cpp.vec_isa_ok, config.cpp_cache_precompile_headers = True, False

def loss(weight, inputs):
    return (inputs @ weight).relu().square().sum()

torch.compile(loss)(torch.ones(8, 8), torch.ones(4, 8))
found = counters["inductor"]
print(json.dumps({"hits": found["fxgraph_cache_hit"], "misses": found["fxgraph_cache_miss"]}))
"""


def use_caches(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("DRIVETRAIN_CACHE", str(folder / "drivetrain"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)


def fill(folder: Path) -> None:
    for name in ("drivetrain/plans/a.json", "inductor/ab/code.py", "inductor/triton/0/x/kernel.cubin"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"content of {name}")
    for name in ("drivetrain/plans/a.probes.jsonl", "inductor/locks/b.lock", "inductor/ab/code.py.77.tmp"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("of one process")


def files_in(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_what_one_machine_compiled_another_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by the compiler itself, in two processes whose caches have nothing in common but the file."""

    def compiled() -> dict[str, int]:
        done = warm_python.run(["-c", COMPILING])
        assert done.returncode == 0, done.stdout
        found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
        return found

    use_caches(monkeypatch, tmp_path / "first")
    first = compiled()
    assert first["hits"] == 0
    assert first["misses"] > 0
    assert main(["cache", "pack", str(tmp_path / "warm.tar.gz")]) == 0
    use_caches(monkeypatch, tmp_path / "second")
    assert main(["cache", "unpack", str(tmp_path / "warm.tar.gz")]) == 0
    assert compiled() == {"hits": first["misses"], "misses": 0}


def test_the_same_files_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    use_caches(monkeypatch, tmp_path / "first")
    fill(tmp_path / "first")
    file = tmp_path / "warm.tar.gz"
    assert main(["cache", "pack", str(file)]) == 0
    assert "3 files" in capsys.readouterr().out
    use_caches(monkeypatch, tmp_path / "second")
    (tmp_path / "second" / "inductor" / "ab").mkdir(parents=True)
    (tmp_path / "second" / "inductor" / "ab" / "code.py").write_text("mine")
    assert main(["cache", "unpack", str(file)]) == 0
    assert "3 files" in (told := capsys.readouterr().out)
    assert "2 of them new here" in told
    expected = {name: f"content of {name}" for name in ("drivetrain/plans/a.json", "inductor/triton/0/x/kernel.cubin")}
    assert files_in(tmp_path / "second") == {**expected, "inductor/ab/code.py": "mine"}


def test_torch_keeps_its_cache_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert str(cache.roots()["inductor"]) == default_cache_dir()


def test_a_file_of_another_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    use_caches(monkeypatch, tmp_path / "first")
    fill(tmp_path / "first")
    assert main(["cache", "pack", str(tmp_path / "warm.tar.gz")]) == 0
    here = cache.kind_of_machine()
    monkeypatch.setattr(cache, "kind_of_machine", lambda: {**here, "torch": "9.9", "device": "Another"})
    use_caches(monkeypatch, tmp_path / "second")
    assert main(["cache", "unpack", str(tmp_path / "warm.tar.gz")]) == 1
    told = capsys.readouterr().err
    assert f"torch {here['torch']}, and here it is 9.9" in told
    assert "and here it is Another" in told
    assert "remedy" in told
    assert not (tmp_path / "second").exists()


def forged(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    manifest = cache.PackedCache(machine=cache.kind_of_machine(), num_files=1, num_bytes=1).to_json().encode()
    head = tarfile.TarInfo(cache.MANIFEST)
    head.size = len(manifest)
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(head, io.BytesIO(manifest))
        for member, content in members:
            archive.addfile(member, io.BytesIO(content))
    return path


def member(name: str, content: bytes = b"x", kind: bytes = tarfile.REGTYPE, link: str = "") -> tuple[Any, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = (len(content) if kind == tarfile.REGTYPE else 0), kind, link
    return info, content


@pytest.mark.parametrize(
    "bad",
    [
        member("inductor/../../escaped"),
        member("/inductor/escaped"),
        member("elsewhere/escaped"),
        member("inductor"),
        member("inductor/..\\escaped"),
        member("inductor/link", kind=tarfile.SYMTYPE, link="/etc/passwd"),
        member("inductor/link", kind=tarfile.LNKTYPE, link="plans/x"),
        member("inductor/pipe", kind=tarfile.FIFOTYPE),
    ],
    ids=lambda found: found[0].name if isinstance(found, tuple) else "",
)
def test_a_file_made_to_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, bad: Any) -> None:
    use_caches(monkeypatch, tmp_path / "here")
    assert main(["cache", "unpack", str(forged(tmp_path / "bad.tar.gz", bad))]) == 1
    assert "no file of a cache" in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "bad.tar.gz"]


def test_nothing_is_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    use_caches(monkeypatch, tmp_path / "here")
    (tmp_path / "here" / "inductor").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "here" / "inductor" / "ab").symlink_to(tmp_path / "outside")
    assert main(["cache", "unpack", str(forged(tmp_path / "bad.tar.gz", member("inductor/ab/file")))]) == 1
    assert "outside of" in capsys.readouterr().err
    assert not list((tmp_path / "outside").iterdir())


def test_sizes_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    use_caches(monkeypatch, tmp_path / "here")
    monkeypatch.setattr(cache, "MOST_BYTES", 10)
    bad = forged(tmp_path / "bad.tar.gz", member("inductor/a", b"123456"), member("inductor/b", b"123456"))
    assert main(["cache", "unpack", str(bad)]) == 1
    assert "more than a cache file may hold" in capsys.readouterr().err
    assert files_in(tmp_path / "here") == {"inductor/a": "123456"}


@pytest.mark.parametrize("damage", ["cut", "text", "other archive", "none"])
def test_what_is_no_cache_file_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, damage: str
) -> None:
    use_caches(monkeypatch, tmp_path / "here")
    file = tmp_path / "file.tar.gz"
    if damage == "cut":
        whole = forged(file, member("inductor/a", bytes(range(256)) * 999)).read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
    elif damage == "text":
        file.write_text("not an archive")
    elif damage == "other archive":
        with tarfile.open(file, "w:gz") as archive:
            info, content = member("inductor/a")
            archive.addfile(info, io.BytesIO(content))
    assert main(["cache", "unpack", str(file)]) == 1
    assert "remedy" in capsys.readouterr().err
    assert not files_in(tmp_path / "here")


def test_nothing_to_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    use_caches(monkeypatch, tmp_path)
    assert main(["cache", "pack", str(tmp_path / "warm.tar.gz")]) == 1
    assert "nothing was planned or compiled" in capsys.readouterr().err
    assert not (tmp_path / "warm.tar.gz").exists()
