"""Attacks a syncer with random calls and bytes while a learner trains there.

  python scripts/fuzz.py --minutes=5 --seed=0 --json

A real syncer process with tokens on loopback, one honest learner of plain numpy,
and an insider who calls every method with malformed messages, wrong lengths,
wrong order, broken streams, too much metadata, and speaks random bytes to the
port. Exit code 1 if anything was found: the syncer ended or wrote a traceback, a
caller's fault was called INTERNAL or UNKNOWN, the learner's rounds stood still, or
threads or memory did not come back. Inputs are drawn from (seed, number), so that
--seed=S --first=N plays the same ones again from input N on.
"""

import argparse
import json
import pathlib
import random
import sys
import tempfile
import time
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # The learner is that of the tests.

from ddiloco_jax.learner.client import Client  # noqa: E402
from ddiloco_jax.wire.options import WireConfig  # noqa: E402
from scripts.fuzzing.attacks import Target, attack  # noqa: E402
from tests.support import processes  # noqa: E402
from tests.support.numpy_learner import NumpyLearner  # noqa: E402

TOKENS = {
  "mallory": "the-token-of-mallory-0123456789",
  "healthy": "the-token-of-healthy-0123456789",
  "watcher": "the-token-of-watcher-0123456789",
}
_STILL_S = 30.0  # The learner's rounds may not stand still for longer.
_SETTLE_S = 25.0  # Handshakes, first messages and the like have run out then.
_MORE_THREADS = 8
_MORE_MIB = 150.0


def start_syncer(start: Any, base: pathlib.Path) -> tuple[Any, str]:
  """A syncer process; returns it with its address."""
  np.savez(base / "theta.npz", a=np.zeros((3, 4), "f4"), b=np.zeros(10, "f4"))
  (base / "tokens").write_text("".join(f"{k} {v}\n" for k, v in TOKENS.items()))
  (base / "admins").write_text("the-token-of-the-admins-0123456789\n")
  flags = processes.overrides(
    sync__num_fragments=2,
    fragments__num_fragments=2,
    sync__cycle_steps=4,
    sync__quorum=1,
    sync__max_learners=4,
    sync__num_shards=4,
    wire__call_timeout_s=2.0,
    wire__progress_timeout_s=3.0,
    wire__joins_per_s=1000.0,
    wire__max_calls=64,
    wire__token_file=base / "tokens",
    wire__admin_token_file=base / "admins",
  )
  argv = processes.module(
    processes.SYNCER,
    f"--config={ROOT / 'tests/support/small.py'}",
    f"--run_dir={base / 'run'}",
    "--address=127.0.0.1:0",
    f"--layout_arrays={base / 'theta.npz'}",
    *flags,
  )
  syncer = start(argv, base / "syncer.log")
  return syncer, processes.address_of(base / "run", syncer)


def usage(pid: int) -> tuple[int, float]:
  """Threads, and resident MiB, of a process."""
  lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
  values = dict(line.split(":", 1) for line in lines)
  return int(values["Threads"]), int(values["VmRSS"].split()[0]) / 1024


def fuzz(args: argparse.Namespace, base: pathlib.Path) -> dict[str, Any]:
  """Attacks for so long; the verdict."""
  findings: list[str] = []
  with processes.ending() as start:
    syncer, address = start_syncer(start, base)
    learner = NumpyLearner(
      Client(
        address,
        WireConfig(token_file=str(base / "tokens")),
        learner="healthy",
      ),
      "healthy",
    )
    learner.start()
    learner.wait_for(lambda: learner.num_included() >= 3, 60.0)
    target = Target(address, TOKENS["mallory"])
    threads_before, mib_before = usage(syncer.pid)
    number = _attack_all(args, syncer, learner, target, findings, usage)
    threads, mib = _settled(syncer, target)
    if threads > threads_before + _MORE_THREADS:
      findings.append(f"threads: {threads_before} before, {threads} after")
    if mib > mib_before + _MORE_MIB:
      findings.append(f"MiB: {mib_before:.0f} before, {mib:.0f} after")
    before = learner.num_included()
    try:
      learner.wait_for(lambda: learner.num_included() > before, _STILL_S)
    except BaseException as error:
      findings.append(f"the learner does not go on: {error!r}")
    if "Traceback" in syncer.said():
      findings.append(f"a traceback in {base / 'syncer.log'}")
    learner.leave()
    target.close()
  findings += [
    f"{name}: {code}: {text}"
    for name, code, text in sorted(set(target.unexpected))
  ]
  codes: dict[str, dict[str, int]] = {}
  for (name, code), num in sorted(target.codes.items()):
    codes.setdefault(name, {})[code] = num
  return {
    "seed": args.seed,
    "num_inputs": number - args.first,
    "by_attack": dict(target.num_inputs),
    "num_included": before,
    "threads": [threads_before, threads],
    "mib": [round(mib_before), round(mib)],
    "codes": codes,
    "findings": findings,
  }


def _attack_all(
  args: argparse.Namespace,
  syncer: Any,
  learner: NumpyLearner,
  target: Target,
  findings: list[str],
  measure: Any,
) -> int:
  """Attacks until the time is up, or the syncer is; the next input's number."""
  end = time.monotonic() + 60 * args.minutes
  said = moved = time.monotonic()
  included, number = learner.num_included(), args.first
  while (now := time.monotonic()) < end:
    if not syncer.is_running():
      findings.append(f"the syncer ended at input {number}")
      break
    attack(random.Random(f"{args.seed}/{number}"), target)
    number += 1
    if learner.num_included() != included:
      included, moved = learner.num_included(), now
    elif now - moved > _STILL_S:
      findings.append(f"no round for {_STILL_S:g} s at input {number}")
      moved = now
    if now - said > 5.0:
      said = now
      threads, mib = measure(syncer.pid)
      print(
        f"{number} inputs, {end - now:.0f} s left, {included} merges,"
        f" {threads} threads, {mib:.0f} MiB, {len(target.unexpected)} odd codes",
        file=sys.stderr,
      )
  return number


def _settled(syncer: Any, target: Target) -> tuple[int, float]:
  """What the syncer uses once nothing is held open any more."""
  target.release()
  time.sleep(_SETTLE_S)
  return usage(syncer.pid)


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add("--minutes", type=float, default=5.0, help="how long (default: 5)")
  add("--seed", type=int, default=0)
  add("--first", type=int, default=0, help="number of the first input")
  add("--json", action="store_true", help="print the verdict as JSON")
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as base:
    verdict = fuzz(args, pathlib.Path(base))
    log = (pathlib.Path(base) / "syncer.log").read_text(errors="replace")
  if verdict["findings"]:
    print(log[-4000:], file=sys.stderr)
  if args.json:
    print(json.dumps(verdict, allow_nan=False))
  else:
    print(f"{verdict['num_inputs']} inputs: {verdict['codes']}")
    print("\n".join(verdict["findings"] or ["nothing was found"]))
  return 1 if verdict["findings"] else 0


if __name__ == "__main__":
  sys.exit(main())
