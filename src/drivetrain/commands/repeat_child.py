"""The fresh process of `planning.repeat`: makes the job of a target, and answers questions about its first steps.

Questions and answers are lines of JSON over two pipes; the output of the target goes to a separate file.
"""

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from drivetrain.commands.targets import with_job
from drivetrain.config import Config
from drivetrain.job import Job
from drivetrain.plan.knobs import StepWay
from drivetrain.plan.loss_weighting import Weighting
from drivetrain.planning.repeat import FirstSteps
from drivetrain.run import Session
from drivetrain.run.model_factory import build_model


def main() -> None:
    questions = _lines(int(sys.argv[1]))
    answers = int(sys.argv[2])
    request = next(questions)
    config = Config.model_validate(request["config"])
    try:
        with_job(
            request["target"],
            config,
            lambda job: _serve(job, config, request, questions, answers),
            request["argv"][1:],
        )
    except Exception as error:  # any error of the target is reported to the asker
        _tell(answers, {"error": f"{type(error).__name__}: {error}"})
        raise


def _serve(job: Job, config: Config, request: dict[str, Any], questions: Iterator[Any], answers: int) -> None:
    run = Session.join(job, config, quiet=True)
    try:
        identity = request["identity"]
        mine = json.loads(json.dumps(run.job.identity()))
        changed = [name for name in sorted({*mine, *identity}) if mine.get(name) != identity.get(name)]
        if changed:
            _tell(answers, {"error": f"a fresh process made another job of it: {', '.join(changed)} differ"})
            return
        run.weighting = Weighting.model_validate(request["weighting"])
        steps = FirstSteps(run, build_model(run))
        _tell(answers, {"ready": True})
        for question in questions:
            _tell(answers, _answer(steps, question))
    finally:
        run.close_loaders()
        run.close()


def _answer(steps: FirstSteps, question: dict[str, Any]) -> dict[str, Any]:
    found = steps.bits(StepWay.model_validate(question["bits"]), twice=False)
    steps.release()
    return {"bits": found.model_dump(mode="json")}


def _lines(descriptor: int) -> Iterator[Any]:
    """Yield each request line; ends when the other side is gone."""
    with os.fdopen(descriptor, encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _tell(descriptor: int, message: dict[str, Any]) -> None:
    os.write(descriptor, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
