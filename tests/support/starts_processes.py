"""Run by a test: a run over gRPC beside which processes and threads start."""

import concurrent.futures
import multiprocessing
import os
import pathlib
import subprocess
import sys
import tempfile

import grain

from tests.support.over_grpc import (
  LoopLearner,
  learners,
  paced,
  served_run,
  settings,
)
from tests.support.served import wait_for


def square(x: int) -> int:
  return x * x


def main() -> None:
  forks: list[int] = []
  os.register_at_fork(before=lambda: forks.append(1))
  with (
    tempfile.TemporaryDirectory() as base,
    served_run(settings(quorum=2), pathlib.Path(base) / "run") as run,
  ):

    def num_merges() -> int:
      return sum(f.version.n for f in run.status().fragments)

    pair = [LoopLearner(run.address, n, paced(0.03)) for n in ("a", "b")]
    with learners(*pair):
      wait_for(lambda: num_merges() >= 4)
      start_all()
      before = num_merges()
      wait_for(lambda: num_merges() >= before + 4)
      assert not run.status().counters.get("lease_expired")
  assert not forks
  print("merges went on")


def start_all() -> None:
  for _ in range(3):
    subprocess.run(
      [sys.executable, "-S", "-c", "print(1)"],
      check=True,
      timeout=30,
      stdout=subprocess.DEVNULL,
    )
  spawn = multiprocessing.get_context("spawn")
  with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
    assert list(pool.map(square, range(4), timeout=60)) == [0, 1, 4, 9]
  read = (
    grain.MapDataset.range(64)
    .map(square)
    .to_iter_dataset(grain.ReadOptions(num_threads=4, prefetch_buffer_size=8))
  )
  assert sum(read) == sum(x * x for x in range(64))


if __name__ == "__main__":
  main()
