"""Kills a syncer again and again, and says whether anything was lost.

  python scripts/kill_syncer.py --kills=200

A real syncer process, learners of plain numpy over gRPC that live through all
of it, fragments of 16 MiB. Every kill is a SIGKILL; nine of ten are aimed at a
commit: once the journal's newest file grows, after a random part of the time
that it took the last ones from there until a learner was told. The syncer is
started again with --restore, and the journal is read before it: a record that
was cut, or one whose version no learner had been told of, says that the kill
fell between the begin of a commit and the end of its publication. Exit code 0:
every restart was clean, versions are contiguous, none was lost or repeated, the
books balance, and at least half of the kills fell so (not asked of fewer than
20 kills: few say nothing of a share).
"""

import argparse
import collections
import json
import pathlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # The learners are those of the tests.

from ddiloco_jax.learner.client import Client  # noqa: E402
from ddiloco_jax.protocol import events, status, tape  # noqa: E402
from ddiloco_jax.protocol.state import State  # noqa: E402
from ddiloco_jax.report.chronicle import tapes_of  # noqa: E402
from ddiloco_jax.syncer.files import OsFiles  # noqa: E402
from ddiloco_jax.syncer.journal import Journal  # noqa: E402
from ddiloco_jax.wire import port  # noqa: E402
from ddiloco_jax.wire.status import ServiceError  # noqa: E402
from tests.support.numpy_learner import NumpyLearner  # noqa: E402

START_S = 120.0
_LOOK_S = 0.0005
_HEAD_BYTES = 1 << 16  # More than the head of a file; an array is larger.
_FEW_KILLS = 20  # A share of fewer says nothing.


class Watched(NumpyLearner):
  """Remembers the newest version that it was told of, and any that went back.

  Attributes:
    told: Per fragment.
    gone_back: [(fragment, n told before, n told now)].
  """

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self.told: dict[int, int] = {}
    self.gone_back: list[tuple[int, int, int]] = []

  def _take(self, notice):
    if isinstance(notice, port.PublishedNotice):
      p, n = notice.fragment, notice.version.n
      if n < self.told.get(p, 0):
        self.gone_back.append((p, self.told[p], n))
      self.told[p] = max(n, self.told.get(p, 0))
    super()._take(notice)

  def _fetch(self, p, exact):
    while True:
      try:
        return super()._fetch(p, exact)
      except ServiceError as error:  # A new life does not know the session.
        if error.code != "UNAUTHENTICATED" or self._over.is_set():
          raise
      self._over.wait(0.1)


class Syncer:
  """Lives of one syncer, all on one port and one directory."""

  def __init__(self, base: pathlib.Path, args: argparse.Namespace):
    self.run_dir = base / "run"
    self._log = base / "syncer.log"
    rng = np.random.default_rng(0)
    size = int(args.fragment_mib * (1 << 20)) // 4
    arrays: dict[str, Any] = {
      f"w{p}": rng.normal(size=size).astype(np.float32) for p in range(2)
    }
    np.savez(base / "theta.npz", **arrays)
    with socket.socket() as free:
      free.bind(("127.0.0.1", 0))
      self.address = f"127.0.0.1:{free.getsockname()[1]}"
    settings = {
      "sync.num_fragments": 2,
      "fragments.num_fragments": 2,
      "sync.cycle_steps": 4,
      "sync.quorum": 1,
      "sync.lease_s": 20.0,
      "run.checkpoint_every_s": args.checkpoint_every_s,
    }
    self._argv = [
      sys.executable,
      "-m",
      "ddiloco_jax.cli.syncer",
      f"--config={ROOT / 'tests/support/small.py'}",
      f"--run_dir={self.run_dir}",
      f"--address={self.address}",
      f"--layout_arrays={base / 'theta.npz'}",
      *(f"--config.{name}={value}" for name, value in settings.items()),
    ]
    self._process: subprocess.Popen | None = None

  def start(self) -> float:
    """Starts a life; returns the seconds until it serves."""
    begun = time.monotonic()
    restore = ["--restore"] if self.run_dir.exists() else []
    (self.run_dir / "address").unlink(missing_ok=True)
    with self._log.open("a") as log:
      self._process = subprocess.Popen(
        [*self._argv, *restore], cwd=ROOT, stdout=log, stderr=log
      )
    while not (self.run_dir / "address").exists():
      if self._process.poll() is not None or (
        time.monotonic() > begun + START_S
      ):
        raise SystemExit(f"the syncer did not start:\n{self.said()}")
      time.sleep(0.01)
    return time.monotonic() - begun

  def said(self) -> str:
    return self._log.read_text()[-3000:]

  def kill(self) -> None:
    assert self._process is not None
    if self._process.poll() is not None:
      raise SystemExit(f"the syncer ended by itself:\n{self.said()}")
    self._process.send_signal(signal.SIGKILL)
    self._process.wait()

  def stop(self) -> int:
    assert self._process is not None
    self._process.send_signal(signal.SIGTERM)
    return self._process.wait(START_S)

  def journal(self) -> tuple[pathlib.Path | None, int]:
    """The newest file of the journal, and its bytes."""
    files = sorted(
      (self.run_dir / "journal").glob("*.log"),
      key=lambda path: [int(part) for part in path.stem.split("-")],
    )
    return (files[-1], _size(files[-1])) if files else (None, 0)


def _size(file: pathlib.Path | None) -> int:
  """Bytes; 0 where there is none, or it has been deleted meanwhile."""
  try:
    return file.stat().st_size if file else 0
  except FileNotFoundError:
    return 0


class Aim:
  """Kills a syncer within its commits.

  Attributes:
    lengths_s: Of the last commits, from the first byte in the journal until a
      learner was told of the version.
  """

  def __init__(
    self, syncer: Syncer, learners: list[Watched], rng: random.Random
  ):
    self.lengths_s: collections.deque[float] = collections.deque(maxlen=15)
    self._syncer = syncer
    self._learners = learners
    self._rng = rng

  def kill(self) -> None:
    """Times up to three commits, waits for one more, kills in it."""
    for _ in range(self._rng.randrange(0 if self.lengths_s else 1, 4)):
      self._time_commit()
    self._await_growth()
    length_s = statistics.median(self.lengths_s)
    time.sleep(self._rng.uniform(0.0, 0.9) * length_s)
    self._syncer.kill()

  def _time_commit(self) -> None:
    self._await_growth()
    begun, told = time.monotonic(), self._num_told()
    while self._num_told() == told and not self._is_late(begun):
      time.sleep(_LOOK_S)
    self.lengths_s.append(time.monotonic() - begun)

  def _await_growth(self) -> None:
    """Until the newest file of the journal grows; a next file is no growth."""
    begun = time.monotonic()
    file, before = self._syncer.journal()
    while not self._is_late(begun):
      for _ in range(20):  # The others are looked for now and then.
        if _size(file) > before + _HEAD_BYTES:
          return
        time.sleep(_LOOK_S)
      newest, size = self._syncer.journal()
      if newest != file:
        file, before = newest, size

  def _num_told(self) -> int:
    return sum(sum(each.told.values()) for each in self._learners)

  def _is_late(self, begun: float) -> bool:
    if time.monotonic() > begun + START_S:
      errors = [each.error for each in self._learners]
      raise SystemExit(
        f"no commit in {START_S:g} s (learners: {errors}):\n"
        f"{self._syncer.said()}"
      )
    return False


def look(
  syncer: Syncer, learners: list[Watched], restored: list[int]
) -> tuple[list[int], bool]:
  """What is durable, and whether the kill fell into a commit.

  Args:
    restored: What this life began with; of that nobody needs to be told.
  """
  journal = Journal(syncer.run_dir / "journal", OsFiles())
  durable = list(restored)
  newest, end = None, 0
  for entry in journal.entries():
    end = entry.place.offset
    newest = entry.place.name
    for p, n, _ in entry.head.get("fragments", ()):
      durable[p] = n
  is_cut = newest is not None and syncer.journal()[1] > end
  told = [max(a.told.get(p, 0) for a in learners) for p in range(2)]
  known = map(max, told, restored)
  return durable, is_cut or any(n > k for n, k in zip(durable, known))


def check_tapes(run_dir: pathlib.Path) -> tuple[list[str], bool]:
  """Faults of the versions over all epochs, and whether the books balance.

  An epoch starts with what the one before had, or with one merge more per
  fragment: one that was durable, and killed before the tape had it.
  """
  faults, ns, state = [], [0, 0], None
  for path in tapes_of(run_dir):
    reader, begun = tape.Reader(path), False
    for line in reader.lines():
      if not begun and reader.start is not None:
        begun = True
        start = [f.version.n for f in reader.start.fragments]
        faults += [
          f"{path.name}: fragment {p} starts from {n} after {before}"
          for p, (n, before) in enumerate(zip(start, ns))
          if n - before not in (0, 1)
        ]
        ns = start
      if isinstance(line.event, events.Merged):
        p, n = line.event.fragment, line.event.version.n
        if n != ns[p] + 1:
          faults.append(f"{path.name}: fragment {p} merges {n} after {ns[p]}")
        ns[p] = n
      state = line.state
  return faults, state is not None and is_balanced(state)


def is_balanced(state: State) -> bool:
  """Whether reported = merged + discarded + pending, and nothing counts twice."""
  for p, fragment in enumerate(state.fragments):
    merged = 0
    for name in state.learners:
      totals = status.account_totals(state, name, p)
      rest = [totals.merged, totals.pending, *(c for _, c in totals.discarded)]
      if totals.reported.tokens != sum(c.tokens for c in rest):
        return False
      merged += totals.merged.tokens
    if merged != fragment.merged.tokens:
      return False
  return True


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--kills", type=int, default=200)
  parser.add_argument("--learners", type=int, default=2)
  parser.add_argument("--fragment_mib", type=float, default=16.0)
  parser.add_argument("--checkpoint_every_s", type=float, default=10.0)
  parser.add_argument("--step_s", type=float, default=0.2)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--json", action="store_true", help="one line, at last")
  args = parser.parse_args()
  with tempfile.TemporaryDirectory(prefix="kill-syncer-") as base:
    told = kill_all(pathlib.Path(base), args)
  print(json.dumps(told, indent=None if args.json else 2, allow_nan=False))
  return 0 if told["passed"] else 1


def kill_all(base: pathlib.Path, args: argparse.Namespace) -> dict:
  rng = random.Random(args.seed)
  syncer = Syncer(base, args)
  syncer.start()
  names = [f"l{i}" for i in range(args.learners)]
  clients = [Client(syncer.address, learner=name) for name in names]
  learners = [
    Watched(client, name, step_s=args.step_s)
    for client, name in zip(clients, names, strict=True)
  ]
  for learner in learners:
    learner.start()
  aim = Aim(syncer, learners, rng)
  within, returns, lost, durable = 0, [], [], [0, 0]
  for kill in range(1, args.kills + 1):
    if rng.random() < 0.9:
      aim.kill()
    else:
      time.sleep(rng.random() * 2)
      syncer.kill()
    durable, is_within = look(syncer, learners, durable)
    within += is_within
    for p in range(2):
      newest = max(a.told.get(p, 0) for a in learners)
      if durable[p] < newest:
        lost.append([kill, p, newest, durable[p]])
    returns.append(syncer.start())
    print(
      f"kill {kill}/{args.kills}: {within} within a commit, versions"
      f" {durable}, back after {returns[-1]:.1f} s",
      file=sys.stderr,
      flush=True,
    )
  time.sleep(2.0)
  code = syncer.stop()
  for learner, client in zip(learners, clients):
    learner.join(30)
    client.close()
  faults, balanced = check_tapes(syncer.run_dir)
  errors = [repr(each.error) for each in learners if each.error]
  back = [g for each in learners for g in each.gone_back]
  is_aimed = args.kills < _FEW_KILLS or 2 * within >= args.kills
  ok = not (code or lost or back or faults or errors) and balanced and is_aimed
  return {
    "passed": ok,
    "kills": args.kills,
    "within_commit": within,
    "commit_s_median": round(statistics.median(aim.lengths_s), 4),
    "clean_restarts": len(returns),
    "exit_code": code,
    "versions_lost": lost,
    "versions_gone_back": back,
    "faults_on_tape": faults,
    "books_balanced": balanced,
    "learner_errors": errors,
    "return_s_median": round(float(np.median(returns)), 2),
    "return_s_max": round(max(returns), 2),
  }


if __name__ == "__main__":
  sys.exit(main())
