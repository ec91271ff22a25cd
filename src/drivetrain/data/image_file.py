"""Decodes the user's image files. One that does not decode is collected, not replaced."""

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from drivetrain.data.bad_input import BadInput


def read_image(
    path: Path, size: int, bad: BadInput, *, mode: Literal["L", "RGB"] = "RGB", named_in: tuple[Path, int] | None = None
) -> Tensor | None:
    """Decode an image to a `uint8` tensor of (channels, size, size); None on failure, which is added to `bad`.

    Args:
        path: The image, in any format that Pillow reads.
        size: Height and width of the result; the image is stretched to it.
        bad: Gets the problem if the image is missing, torn or of an unknown format.
        mode: `RGB` for three channels, `L` for one.
        named_in: The table and its line that name the image, for the message.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image)  # cameras store photographs lying on their side
            pixels = np.asarray(upright.convert(mode).resize((size, size), Image.Resampling.BILINEAR))
    except FileNotFoundError:
        problem = "there is no such image"
    except UnidentifiedImageError:
        problem = "it is no image of a known format"
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        problem = f"it does not decode: {error}"
    else:
        tensor = torch.from_numpy(pixels.copy())
        return tensor.unsqueeze(0) if tensor.dim() == 2 else tensor.permute(2, 0, 1).contiguous()
    if named_in is None:
        bad.add(path, problem)
    else:
        bad.add(named_in[0], f"{path}: {problem}", line=named_in[1])
    return None
