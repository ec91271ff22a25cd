"""Algorithm distillation on the darkroom: the room, the learner, the transformer, and how it plays."""

from drivetrain.recipes.darkroom.recipe import job, show
from drivetrain.recipes.recipe import Recipe

RECIPE = Recipe(
    make=job,
    about="a transformer that learns in its context to find hidden goals",
    show=show,
    reads=(
        "recipe.size",
        "recipe.context",
        "recipe.n_transit",
        "recipe.tf_n_embd",
        "recipe.tf_n_layer",
    ),
)
