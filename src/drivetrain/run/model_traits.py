"""Facts about a model that planning and warnings depend on."""

from torch import nn


def couples_samples(model: nn.Module) -> bool:
    """Return whether samples of a batch influence each other: then the micro-batch decides what is learnt."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def has_convolutions(model: nn.Module) -> bool:
    return any(isinstance(module, (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)) for module in model.modules())
