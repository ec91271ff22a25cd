"""Reads which collectives a rank reached: from the dump of torch's flight recorder, or from NCCL's watchdog's log.

When a collective of NCCL times out, torch writes a dump for every rank. It is a pickle of plain values; one that holds
anything else is not read, so that nothing in it is run.
"""

import pickle
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

# For a worker: dump where the launcher looks. Older releases of torch know the second name only.
DUMP_ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"
DUMP_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_LONGEST_DUMP = 256 << 20
# `[PG ID 0 PG GUID 0(default_pg) Rank 1]  failure detected by watchdog at work sequence id: 9 PG status: last enqueued
# work: 9, last completed work: 8`, and `… Received a dump signal … Last enqueued NCCL work: 9, …`.
_IN_LOG = re.compile(
    r"\[PG ID \S+ PG GUID (\S+) Rank \d+\][^\n]*?last enqueued(?: NCCL)? work: (-?\d+), last completed(?: NCCL)? work: "
    r"(-?\d+)",
    re.IGNORECASE,
)
Reached = dict[str, dict[str, Any]]  # by group: how many it enqueued, which the last was, whether it waits in it


class _PlainValues(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is no plain value")


def dump_environment(environ: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Return the variables that make torch dump to `prefix` and the rank, except those that the user has set.

    Args:
        environ: The environment of the launcher.
        prefix: The beginning of the path of a dump.
    """
    ours = {DUMP_ON_TIMEOUT: "1"}
    if not any(name in environ for name in DUMP_FILES):
        ours |= dict.fromkeys(DUMP_FILES, prefix)
    return {name: value for name, value in ours.items() if name not in environ}


def reached_by_dump(path: Path) -> Reached:
    """Return the last collective of each group that a rank enqueued; empty without a dump that can be read.

    Args:
        path: The file that the flight recorder wrote.
    """
    with suppress(OSError, pickle.UnpicklingError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        if path.stat().st_size > _LONGEST_DUMP:
            return {}
        with path.open("rb") as file:
            dump = _PlainValues(file).load()
        found: Reached = {}
        for entry in dump["entries"]:
            if entry.get("is_p2p"):
                continue
            name, description = map(str, entry["process_group"])
            group = f"{name}({description})" if description not in ("", "undefined") else name
            number = int(entry["collective_seq_id"])
            if number >= found.get(group, {"number": -1})["number"]:
                operation = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
                ranks = dump["pg_config"].get(name, {}).get("ranks", "")
                found[group] = {
                    "number": number,
                    "operation": f"{operation} of {entry['input_sizes']}"[:200],
                    "waits": entry["state"] != "completed",
                    "ranks": [int(rank) for rank in re.findall(r"\d+", str(ranks))],
                }
        return found
    return {}


def reached_by_log(text: str) -> Reached:
    """Return how many collectives of each group a rank enqueued, as far as NCCL's watchdog wrote it into its log.

    Args:
        text: The end of the log.
    """
    return {
        group: {"number": int(enqueued), "operation": "", "waits": enqueued != completed, "ranks": []}
        for group, enqueued, completed in _IN_LOG.findall(text)
    }
