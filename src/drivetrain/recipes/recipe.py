"""A recipe: a named function that makes a job of a configuration."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from drivetrain.config import Config
from drivetrain.job import Job
from drivetrain.run import Result


@dataclass(frozen=True)
class Recipe:
    """A function that makes a job, and what to show after training. `drivetrain train` finds it by name.

    Args:
        make: makes the job of a configuration.
        about: one line on what it trains, as a literal.
        show: prints something about a result, in the main process.
        reads: settings that it reads beside `run.seed`, which every recipe reads, such
            as `data.path`; as literals. On the command line, flags that a recipe does not read are refused.

    Example:
        >>> import drivetrain as dt
        >>> from drivetrain.recipes.digits import RECIPE
        >>> RECIPE.job(dt.configure(seed=1)).name
        'digits'
    """

    make: Callable[[Config], Job]
    about: str = ""
    show: Callable[[Result], None] | None = None
    reads: tuple[str, ...] = ()

    def job(self, config: Config) -> Job:
        """Return the job. Its length follows this configuration; an epoch may be something else there."""
        return replace(self.make(config), length_is_read=True)
