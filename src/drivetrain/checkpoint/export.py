"""Out of drivetrain's format: one plain safetensors file that everything else reads."""

import secrets
from pathlib import Path

from drivetrain.checkpoint.checkpoint import Checkpoint
from drivetrain.checkpoint.errors import CheckpointError
from drivetrain.checkpoint.files import Files
from drivetrain.checkpoint.plain_names import plain_name
from drivetrain.checkpoint.tensor_file import CODES, RESERVED_NAME, Entry, arranged, encoded


def export(checkpoint: Checkpoint, path: Path, prefix: str = "model/", instead: str = "") -> Path:
    """The whole tensors below the prefix, named without it. One tensor at a time is in memory.

    With `instead`, a tensor of the same name below that prefix is taken where there is one.

    A file that is there already is replaced in one go, or left as it is.
    """
    found = [key for key in checkpoint.keys if key.startswith(prefix)]
    names = {key: plain_name(key.removeprefix(prefix)) for key in found}
    if len(set(names.values())) < len(names):
        names = {key: key.removeprefix(prefix) for key in found}
    if not names:
        known = sorted({key.split("/")[0] + "/" for key in checkpoint.keys if "/" in key})
        raise CheckpointError(
            f"{checkpoint.path} holds no tensor whose name starts with {prefix!r}",
            remedy=f"choose one of these prefixes: {', '.join(known) or '(there are none)'}",
            path=checkpoint.path,
        )
    if forbidden := [key for key, name in names.items() if name in ("", RESERVED_NAME)]:
        raise CheckpointError(
            f"{forbidden[0]!r} has no name that a safetensors file can hold, without {prefix!r}",
            remedy="choose another prefix",
            path=checkpoint.path,
        )
    infos = checkpoint.keys
    if instead:
        others = {key: instead + key.removeprefix(prefix) for key in names}
        names = {others[key] if others[key] in infos else key: name for key, name in names.items()}
    keys = list(names)
    entries = [Entry(names[key], CODES[infos[key].dtype], infos[key].shape) for key in keys]
    files = Files()
    draft = path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}")
    try:
        files.write_file(
            draft, encoded(arranged(entries, {"format": "pt"}), lambda number: checkpoint.read(keys[number]))
        )
        files.rename(draft, path)
        files.fsync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror}; it needs {sum(entry.num_bytes for entry in entries)} bytes",
            remedy="name a folder that is there, that you can write to, and that has the space",
            path=path,
        ) from None
    finally:
        files.remove_file(draft)
    return path
