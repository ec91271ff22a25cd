"""Algorithm distillation on the darkroom: the room, the learner, the transformer, and how it plays."""
