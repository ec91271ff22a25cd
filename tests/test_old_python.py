"""On an old Python the build says what is needed, in one sentence."""

import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

HOOK = Path(__file__).parents[1] / "hatch_build.py"


@pytest.mark.parametrize("version", [(3, 10, 13), (3, 11, 0)])
def test_the_build_stops_on_an_old_python(version: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    name = "hatchling.metadata.plugin.interface"  # hatchling itself is only there while pip builds
    for end in range(1, 5):
        module = ModuleType(".".join(name.split(".")[:end]))
        module.MetadataHookInterface = object  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    hook = runpy.run_path(str(HOOK))["OldPython"]()
    monkeypatch.setattr(sys, "version_info", version)
    if version < (3, 11):
        with pytest.raises(SystemExit, match=r"needs Python 3\.11 or newer; this is Python 3\.10\.13"):
            hook.update({})
    else:
        hook.update({})
