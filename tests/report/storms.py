"""Storms in virtual time: tapes and faults.jsonl, as a real one leaves them."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from ddiloco_jax.protocol import events
from ddiloco_jax.protocol.rules import Rules
from tests.protocol import driver
from tests.report.taped import Taped

RULES = Rules(num_fragments=4, cycle_steps=12, lease_s=5.0)
BEGAN_S = 10.0  # The storm's, on the run's clock.
END_S = 90.0  # Its length.
NUM = 4


def fleet(**settings: Any) -> list[driver.Learner]:
  return [driver.Learner(str(n), **settings) for n in range(NUM)]


def fault(
  at_s: float, process: str, kind: str, lasts_s: float
) -> dict[str, Any]:
  what = {"at_s": at_s, "kind": kind, "target": 0, "lasts_s": lasts_s}
  return line("fault", at_s, process=process, done=True, fault=what)


def line(what: str, at_s: float, **values: Any) -> dict[str, Any]:
  return {"what": what, "at_s": at_s, **values}


def write_lines(
  run_dir: pathlib.Path,
  lines: Sequence[dict[str, Any]],
  offsets: Sequence[float] = (-BEGAN_S,),
) -> None:
  """faults.jsonl: what every storm has, and these lines between."""
  every = [
    line("listening", 0.0, epoch=1),
    *(
      line("start", 0.0, process=name, life=1)
      for name in ("syncer", *(f"learner-{n}" for n in range(NUM)))
    ),
    *lines,
    line("over", END_S),
  ]
  every.sort(key=lambda each: each["at_s"])
  every += [
    line("clock", END_S, epoch=n, offset_s=s) for n, s in enumerate(offsets, 1)
  ]
  text = "".join(json.dumps(each) + "\n" for each in every)
  (run_dir / "faults.jsonl").write_text(text)


def had(
  run_dir: pathlib.Path,
  learners: Sequence[driver.Learner],
  deaths: Sequence[tuple[str, float, float]] = (),
) -> Taped:
  """A storm of kills under one syncer; deaths: (learner, at_s, back at_s)."""
  run = Taped(run_dir / "tape.jsonl", RULES, learners)
  lines = []
  for learner, at_s, back_s in deaths:
    name = f"learner-{learner}"
    run.at(BEGAN_S + at_s, run.kill, learner)
    run.at(BEGAN_S + back_s, run.restart, learner)
    lines += [
      fault(at_s, name, "kill", back_s - at_s),
      line("end", at_s, process=name, life=1, code=-9, killed=True),
      line("start", back_s, process=name, life=2),
    ]
  run.run(BEGAN_S + END_S)
  run.tape.close(run.state)
  write_lines(run_dir, lines)
  return run


def with_a_killed_syncer(
  run_dir: pathlib.Path,
  *,
  saved_s: float,
  back_after_s: float = 0.4,
  steps_alone: int = 5,
) -> tuple[Taped, Taped]:
  """It dies at 40 s of the storm, and listens again at 45 s.

  Args:
    saved_s: When it saved what it comes back with.
    back_after_s: When the learners are back with it.
    steps_alone: How many steps each has taken meanwhile.
  """
  first = Taped(run_dir / "tape.1.jsonl", RULES, fleet())
  first.save_at(BEGAN_S + saved_s)
  first.run(BEGAN_S + 40.0)
  first.tape.abandon()
  saved = first.saves[BEGAN_S + saved_s]
  last = Taped(run_dir / "tape.jsonl", RULES, (), saved)
  last.learners = first.learners
  listens_s = last.now
  for learner in first.learners.values():
    learner.step += steps_alone
    learner.counts = [
      events.Counts(
        c.steps + steps_alone, c.tokens + driver.TOKENS * steps_alone
      )
      for c in learner.counts
    ]
    back = events.Joined(
      learner=learner.name, nonce=learner.nonce, bases=tuple(learner.bases)
    )
    at_s = listens_s + back_after_s
    last.at(at_s, last.tell, back)
    last.at(at_s + 0.5, last._stepped, learner)
  last.run(listens_s + END_S - 45.0)
  last.tape.close(last.state)
  lines = [
    fault(40.0, "syncer", "kill", 5.0),
    line("end", 40.0, process="syncer", life=1, code=-9, killed=True),
    line("silent", 40.0, epoch=1),
    line("start", 44.0, process="syncer", life=2),
    line("listening", 45.0, epoch=2),
  ]
  write_lines(run_dir, lines, (-BEGAN_S, 45.0 - listens_s))
  return first, last
