"""Ready jobs, one file each, which `drivetrain train` finds by name; `Recipe` is for those of other packages."""

from drivetrain.recipes.recipe import Recipe

__all__ = ["Recipe"]
