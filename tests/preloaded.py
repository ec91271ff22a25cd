"""What the server of `warm_python.py` imports before it forks: this module, which imports the others.

None of it is ever garbage. A process forked from it that looked for some would copy all of that memory to do so.
"""

import gc
from importlib import import_module

MODULES = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "drivetrain.api.training",
    "drivetrain.cli",
    "drivetrain.commands.train_in_process",
    "drivetrain.recipes.digits",
)

gc.disable()
for module in MODULES:
    import_module(module)
gc.freeze()
gc.enable()
