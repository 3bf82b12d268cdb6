"""Explores the state machine with a model of learners, links and crashes.

  python scripts/explore.py --schedules=100000 --seed=0 --processes=2 --json
  python scripts/explore.py --plant=double_merge --schedules=10000
  python scripts/explore.py --schedule=17

Each schedule is named by (seed, index): settings and choices drawn at random,
at least 200 events, every law of exploration/laws.py after each. Exit code 1: a
law was broken; the shortest schedule found that breaks it is printed, event by
event. With --min_reached, also if a reason was given less often.

--plant plants a fault into the machine (`all`: each in turn) and fails if it is
*not* found. --schedule tells one schedule, event by event.
"""

import argparse
import collections
import concurrent.futures
import gc
import json
import multiprocessing
import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from exploration import plants, schedule, shrink, world
from exploration.laws import LAWS, Broken, Laws
from exploration.reasons import Reached

_BATCH = 100  # Schedules that a process takes at once.


def explore(seed: int, first: int, num: int) -> dict[str, Any]:
  """Plays schedules of consecutive indices; broken laws are listed."""
  reached, broken, num_events = Reached(), [], 0
  gc.collect()
  gc.freeze()  # What is imported is not looked at again,
  gc.disable()  # and a schedule makes next to no cycles.
  for index in range(first, first + num):
    laws = Laws(reached)
    try:
      world.run(schedule.draw(seed, index), laws)
    except Broken as error:
      broken.append((index, error.law))
    num_events += laws.num_events
  return {
    "num_schedules": num,
    "num_events": num_events,
    "broken": broken,
    "reached": dict(reached.counts),
  }


def explore_all(
  seed: int, num_schedules: int, num_processes: int
) -> dict[str, Any]:
  """The verdict over the schedules 0 .. num_schedules - 1 of a seed."""
  started = time.monotonic()
  starts = range(0, num_schedules, _BATCH)
  sizes = [min(_BATCH, num_schedules - start) for start in starts]
  reached: collections.Counter[str] = collections.Counter()
  done, num_events, broken = 0, 0, []
  with concurrent.futures.ProcessPoolExecutor(
    num_processes, multiprocessing.get_context("spawn")
  ) as pool:
    parts = [
      pool.submit(explore, seed, start, size)
      for start, size in zip(starts, sizes)
    ]
    for part in concurrent.futures.as_completed(parts):
      found = part.result()
      done += found["num_schedules"]
      num_events += found["num_events"]
      broken += found["broken"]
      for index, law in found["broken"]:
        print(f"\nschedule {index} breaks: {law}", file=sys.stderr)
      reached.update(found["reached"])
      _show(done, num_schedules, num_events, len(broken), started)
  counts = dict(sorted(reached.items(), key=lambda item: item[1]))
  return {
    "seed": seed,
    "schedules": done,
    "events": num_events,
    "events_per_schedule_min": schedule.NUM_EVENTS,
    "seconds": round(time.monotonic() - started, 1),
    "laws": list(LAWS),
    "broken": sorted(broken),
    "reasons": len(counts),
    "reached_min": min(counts.values()),
    "reached": counts,
  }


def _show(
  done: int, num: int, num_events: int, num_broken: int, started: float
) -> None:
  elapsed_s = time.monotonic() - started
  left_s = elapsed_s / done * (num - done)
  print(
    f"\r{done}/{num} schedules, {num_events} events, {num_broken} broken, "
    f"{left_s:.0f} s left ",
    end="" if done < num else "\n",
    file=sys.stderr,
    flush=True,
  )


def find_plant(name: str, seed: int, num_schedules: int) -> dict[str, Any]:
  """Looks for a planted fault, and shrinks the first schedule that shows it."""
  with plants.planted(name):
    for index in range(num_schedules):
      whole = schedule.draw(seed, index)
      error = shrink.broken(whole)
      if error is not None:
        shrunk = shrink.shrink(whole, error.law)
        return {
          "plant": name,
          "found_at": index,
          "law": error.law,
          "choices": len(shrunk.choices),
          "trace": shrink.trace(shrunk),
        }
  return {"plant": name, "found_at": None}


def tell(seed: int, index: int) -> str:
  """One schedule, shrunk if it breaks a law."""
  whole = schedule.draw(seed, index)
  error = shrink.broken(whole)
  if error is not None:
    whole = shrink.shrink(whole, error.law)
  lines = [f"schedule {index} of seed {seed}: {whole.settings}"]
  lines += shrink.trace(whole)
  return "\n".join(lines)


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--schedules", type=int, default=1000)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--processes", type=int, default=2)
  parser.add_argument("--min_reached", type=int, default=0)
  parser.add_argument("--plant", choices=(*plants.PLANTS, "all"))
  parser.add_argument("--schedule", type=int)
  parser.add_argument("--json", action="store_true")
  args = parser.parse_args()
  if args.schedule is not None:
    print(tell(args.seed, args.schedule))
    return 0
  if args.plant:
    return _look_for_plants(args)
  verdict = explore_all(args.seed, args.schedules, args.processes)
  for index, _ in verdict["broken"][:1]:
    print(tell(args.seed, index), file=sys.stderr)
  rare = [r for r, n in verdict["reached"].items() if n < args.min_reached]
  for reason in rare:
    print(f"reached {verdict['reached'][reason]} times: {reason}")
  if args.json:
    print(json.dumps(verdict, indent=2, allow_nan=False))
  else:
    print(
      f"{verdict['schedules']} schedules, {verdict['events']} events, "
      f"{len(verdict['broken'])} broken, {verdict['reasons']} reasons reached "
      f"at least {verdict['reached_min']} times, {verdict['seconds']} s"
    )
  return 1 if verdict["broken"] or rare else 0


def _look_for_plants(args: argparse.Namespace) -> int:
  names = list(plants.PLANTS) if args.plant == "all" else [args.plant]
  found = [find_plant(name, args.seed, args.schedules) for name in names]
  if args.json:
    print(json.dumps(found, indent=2, allow_nan=False))
  else:
    for plant in found:
      print(f"{plant['plant']}: found at {plant['found_at']}")
      print("\n".join(plant.get("trace", ())))
  return 0 if all(plant["found_at"] is not None for plant in found) else 1


if __name__ == "__main__":
  sys.exit(main())
