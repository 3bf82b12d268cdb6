"""How fast the simulator is: a day of a million chips, a month of 2.4 million.

  python scripts/bench/simulate.py --json

Steps of 30 s, P = H = 24; every report and reply goes through machine.step. The
day has 64 learners, the month 16. `heap_ratio` is the day's time over that of a
bare heap loop with as many events. One core. --share=0.01 plays a hundredth of
each, and scales the times up.
"""

import argparse
import heapq
import json
import sys
import time
from typing import Any

from ddiloco_jax.chaos.fleet import DAY_S, FleetConfig
from ddiloco_jax.chaos.scenario import LearnersConfig, RunConfig, Scenario
from ddiloco_jax.chaos.simulate import Simulation
from ddiloco_jax.protocol.rules import Rules


def scenario(chips: int, num_learners: int, days: float) -> Scenario:
  return Scenario(
    run=RunConfig(duration_s=days * DAY_S),
    learners=LearnersConfig(num=num_learners, step_s=30.0),
    fleet=FleetConfig(chips=chips),
    sync=Rules(
      lease_s=120.0, max_learners=num_learners, num_shards=num_learners
    ),
  )


def play(cfg: Scenario, name: str) -> dict[str, Any]:
  """Seconds, events of the machine, and turns of the heap."""
  simulation = Simulation(cfg)
  end_s = cfg.run.duration_s

  def look(now: float) -> None:
    print(f"\r{name}: {now / end_s:4.0%}", end="", file=sys.stderr)

  begun = time.perf_counter()
  simulation.run(look)
  seconds = time.perf_counter() - begun
  print(f"\r{name}: {seconds:.1f} s", file=sys.stderr)
  return {
    "seconds": seconds,
    "events": simulation.tally.num_events,
    "turns": simulation.num_turns,
    "goodput": simulation.tally.goodput,
  }


def bare_heap_s(num_turns: int, num_waiting: int) -> float:
  """Seconds of as many turns of a heap that does nothing else."""

  def do_nothing(what: object) -> None:
    pass

  heap = [(float(n), n, do_nothing, None) for n in range(num_waiting)]
  begun = time.perf_counter()
  for n in range(num_turns):
    now, _, do, what = heapq.heappop(heap)
    do(what)
    heapq.heappush(heap, (now + num_waiting, n, do, what))
  return time.perf_counter() - begun


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--share", type=float, default=1.0)
  parser.add_argument("--json", action="store_true")
  flags = parser.parse_args()
  if not 0 < flags.share <= 1:
    parser.error(f"--share={flags.share}: it must be above 0 and at most 1")
  day = play(scenario(1_000_000, 64, 1.0 * flags.share), "day")
  month = play(scenario(2_400_000, 16, 30.0 * flags.share), "month")
  bare_s = bare_heap_s(day["turns"], 128)
  figures = {
    "day_1m_s": day["seconds"] / flags.share,
    "month_2m4_s": month["seconds"] / flags.share,
    "us_per_event": 1e6 * day["seconds"] / day["events"],
    "heap_ratio": day["seconds"] / bare_s,
    "events_per_day": day["events"] / flags.share,
    "goodput_day": day["goodput"],
    "goodput_month": month["goodput"],
    "share": flags.share,
  }
  if flags.json:
    print(json.dumps(figures, allow_nan=False))
  else:
    for name, value in figures.items():
      print(f"{name:<16} {value:.6g}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
