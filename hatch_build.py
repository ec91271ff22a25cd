"""Stops `pip install` on an old Python with one sentence, before pip downloads anything."""

import sys

from hatchling.metadata.plugin.interface import MetadataHookInterface


class OldPython(MetadataHookInterface):
    def update(self, metadata):
        if sys.version_info < (3, 11):  # noqa: UP036
            version = ".".join(map(str, sys.version_info[:3]))
            raise SystemExit(
                f"drivetrain needs Python 3.11 or newer; this is Python {version}. "
                "Remedy: docs/guide/install.md, Python 3.10 and older"
            )
