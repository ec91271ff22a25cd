"""How experts come and go: growth, merging, pruning and sleep."""
