"""What the server of `warm_python.py` imports before it forks: this module, which imports the others.

None of it is ever garbage. A process forked from it that looked for some would copy all of that memory to do so.
"""

import gc
from contextlib import suppress
from importlib import import_module

from drivetrain.config import configure
from drivetrain.core.launchers import code_version
from tests.huge_pages import use_huge_pages

MODULES = (
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",  # with the next one, a second for each process that compiles
    "torch.distributed.tensor.experimental",
    "torch.distributed.fsdp",
    "matplotlib.backends.backend_agg",  # by each process that draws
    "matplotlib.figure",
    "drivetrain.api.training",
    "drivetrain.cli",
    "drivetrain.commands.in_process",
    "drivetrain.recipes.digits",
    "pytest",  # by the modules of tests that processes and ranks import
)
# Extras: seconds for each of the processes that train a model of Hugging Face, a second for those with digits.
IF_INSTALLED = ("transformers.models.llama", "transformers.models.gpt2", "transformers.trainer", "peft", "accelerate")
IF_INSTALLED += ("sklearn.datasets",)

gc.disable()
for module in MODULES:
    import_module(module)
for module in IF_INSTALLED:
    with suppress(ImportError):
        import_module(module)
# Kept by each process once it knows: the strategies of installed packages, a hash of our own files, and a thousand
# regular expressions that transformers makes for the first adapter.
configure()
code_version()
with suppress(ImportError):
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("gpt2")
gc.freeze()
gc.enable()
gc.set_threshold(20_000)  # as in conftest.py
use_huge_pages()
