"""Takes a run back to its last checkpoint after bad numbers, and keeps which steps are left out then.

They are kept in the run's folder, so that a run that is killed and resumed leaves out the same steps.
"""

import json
from typing import Any

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.log import notice
from drivetrain.core.run_folder import write_atomically
from drivetrain.loop.bad_numbers import NO_SKIPS, RollBackError, Skips, facts_of
from drivetrain.run.out_of_memory import can_begin_again, saved_steps
from drivetrain.run.session import Session

SKIPS_FILE = "bad_steps.json"
MOST_ROLLBACKS, MOST_SINGLE = 3, 10


def read_skips(run: Session) -> Skips:
    """Return the steps that the run leaves out. Collective, once the folder is claimed."""
    found = run.world.agree(_read(run) if run.world.is_main else None)
    if found is None:
        return NO_SKIPS
    return Skips(frozenset(found["single"]), tuple((first, last) for first, last in found["past"]))


def _read(run: Session) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((run.path / SKIPS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def rolls_back(run: Session, error: RollBackError) -> bool:
    """Have the next start leave out the steps that went bad. Return whether this process can start over. Collective.

    Args:
        run: The run.
        error: What went wrong.
    """
    return bool(run.world.main_does(lambda: _kept(run, error)))


def _kept(run: Session, error: RollBackError) -> bool:
    if not can_begin_again(run):
        return False
    saved = saved_steps(run)
    if not saved and not error.single:
        return False  # to leave out all that there was would learn nothing: the settings are to blame
    before = _read(run) or facts_of(NO_SKIPS)
    step = max((each for each in saved if each < error.last), default=0)
    kind, most = ("single", MOST_SINGLE) if error.single else ("past", MOST_ROLLBACKS)
    if len(before[kind]) >= most:
        raise DrivetrainError(
            f"{error.message}; the run went back to a checkpoint {most} times already, and it did not help",
            remedy="a lower learning rate, clip_norm, or repaired data (bad step in events.jsonl names the samples); "
            f"remove {SKIPS_FILE} from the run's folder to let it try again",
        )
    before[kind].append(error.last if error.single else [step + 1, error.last])
    write_atomically(run.path / SKIPS_FILE, json.dumps(before) + "\n")
    where = f"the checkpoint of step {step}" if step else "the beginning"
    left_out = f"step {error.last}" if error.single else f"steps {step + 1} to {error.last}"
    notice(f"{error.message}: going back to {where}, without {left_out}")
    return True
