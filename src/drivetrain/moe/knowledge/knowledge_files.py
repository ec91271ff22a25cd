"""A hook that writes graphs and expert placement into the run folder, for the figures of the report."""

import json
from collections.abc import Mapping
from typing import Any, Literal

from drivetrain.core.hook import StepContext
from drivetrain.core.run_folder import write_atomically
from drivetrain.moe.bounds import check_every
from drivetrain.moe.knowledge.knowledge import Knowledge
from drivetrain.moe.layer.balance import mixtures_in
from drivetrain.moe.layer.mixture import MixtureOfExperts
from drivetrain.moe.layer.placement import share_together

FOLDER = "knowledge"


class KnowledgeFiles:
    """Writes `knowledge/epoch_0003.json` at the end of the third epoch, or `step_…` where it is written by steps."""

    def __init__(self, knowledge: Knowledge, every: int | Literal["epoch"] = "epoch") -> None:
        check_every("KnowledgeFiles", every)
        self.every, self._knowledge = every, knowledge
        self._uses: dict[str, dict[str, int]] = {}  # by layer and expert, when it was written last

    def __call__(self, context: StepContext) -> None:
        layers = {
            name: {"graph": self._knowledge.graphs[name].as_json(), **self._whereabouts(name, layer)}
            for name, layer in mixtures_in(context.model).items()
            if name in self._knowledge.graphs
        }
        if not context.world.is_main or not layers:
            return
        name = f"epoch_{context.epoch:04d}" if self.every == "epoch" else f"step_{context.step:08d}"
        folder = context.folder / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"step": context.step, "epoch": context.epoch, "layers": layers}) + "\n"
        write_atomically(folder / f"{name}.json", content)

    def state_dict(self) -> Mapping[str, Any]:
        return {"uses": {name: dict(uses) for name, uses in self._uses.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._uses = {name: dict(uses) for name, uses in state["uses"].items()}

    def _whereabouts(self, name: str, layer: MixtureOfExperts) -> dict[str, Any]:
        """Return, by slot, the rank, the expert's number (-1: free) and its tokens since the last file. The host waits.

        `together`: the fraction of all co-activation between experts of one rank.
        """
        ranks, capabilities = layer.dispatcher.placement(layer.num_slots)
        experts, uses = layer.expert_ids.tolist(), layer.uses.tolist()
        before = self._uses.get(name, {})
        self._uses[name] = {str(number): uses[slot] for slot, number in enumerate(experts) if number >= 0}
        return {
            "ranks": list(ranks),
            "capabilities": list(capabilities),
            "experts": experts,
            "loads": [max(uses[slot] - before.get(str(number), 0), 0) for slot, number in enumerate(experts)],
            "together": share_together(ranks, layer.together),
        }
