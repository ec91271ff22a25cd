"""The facts about strategies that must be known without torch, read from each strategy's file without importing it.

A strategy is one file: its class, and `SPEC = StrategySpec(...)` with the facts below as literals. The configuration,
the launcher and the rules of a plan ask for a fact by the strategy's name; they never compare names.
"""

from typing import Any, Literal

from drivetrain.core.literal_facts import literal_facts
from drivetrain.core.plugins import STRATEGIES
from drivetrain.core.value import Value


class Conflict(Value):
    """Settings that a strategy cannot be used with, and the message for it.

    Args:
        when: the settings, by their dotted names, with the values that conflict; all of them together.
        message: what is wrong; `{asked}` stands for the setting `asked` as the user wrote it.
        at: the setting that the problem is reported at.
        asked: the setting that the message quotes.
        allowed: what could be used instead.
        remedy: what to do.
        reason: why a plan keeps away from that value, where a rule would choose it.
    """

    when: dict[str, Any]
    message: str
    at: str = "distributed.strategy"
    asked: str = "distributed.strategy"
    allowed: str = ""
    remedy: str = "drop one of the two"
    reason: str = ""


class StrategyFacts(Value):
    """What other rooms know of a strategy. In its file they are literals: some of them are read without importing it.

    Args:
        processes: how many processes it can be used in.
        devices: how many devices each process uses.
        memory: what each process holds of weights, gradients and optimizer: a whole copy; shards, into which the model
            is cut by `strategies.sharding` before the strategy gets it; or parts by DeepSpeed's ZeRO stage.
        shares_experts: whether the experts of mixtures are shared out among processes.
        captures: whether its step can be captured as a CUDA graph (`CapturableStrategy`).
        norms: whether it computes a gradient norm in the steps that ask for one (`StrategyParts.norms`).
        own_loop: why `dt.drive` cannot use it; empty where it can.
        package: the package that it needs; empty for none.
        install: what pip installs for it, where that is not the package alone.
        options: the settings that only this strategy obeys.
        options_by_name: whether these are an error unless the strategy is asked for by name. Otherwise they may stand
            beside `auto`, and count where it chooses this strategy.
        takes: other strategies whose options may be given too.
        rest_by: the setting that names the strategy for all that this one leaves alone; its facts hold as well.
        conflicts: settings that it cannot be used with.
    """

    processes: Literal["one", "several", "any"] = "any"
    devices: Literal["one", "several"] = "one"
    memory: Literal["whole", "shards", "zero"] = "whole"
    shares_experts: bool = False
    captures: bool = False
    norms: bool = True
    own_loop: str = ""
    package: str = ""
    install: str = ""
    options: tuple[str, ...] = ()
    options_by_name: bool = False
    takes: tuple[str, ...] = ()
    rest_by: str = ""
    conflicts: tuple[Conflict, ...] = ()

    def rest(self, config: Any) -> str:
        """Return the strategy that a configuration names for what this one leaves alone; empty where there is none."""
        return str(config.value(self.rest_by)) if self.rest_by else ""


def strategy_facts(name: str) -> StrategyFacts:
    """Return the facts of a strategy, without importing it. Nothing is known of `auto`, which gets the defaults.

    Facts that are not literals, or stand in a file that cannot be found, have their defaults here. The process that
    trains imports the strategy, and sees them as they are.
    """
    source = STRATEGIES.source(name)
    attribute = STRATEGIES.target(name).partition(":")[2]
    found = () if source is None else literal_facts(source, attribute, StrategyFacts, Conflict)
    return found[0] if found else StrategyFacts()
