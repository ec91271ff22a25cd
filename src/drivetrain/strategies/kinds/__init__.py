"""Strategies, one per file. A file's name is the strategy's name; its `SPEC` says all that other rooms need to know.

`drivetrain.strategies.spec` finds them here: nothing lists them.
"""
