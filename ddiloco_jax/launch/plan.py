"""A run as data: the processes that it is made of.

Nothing is started here; `children.py` makes real processes of a plan, and a
test or another launcher may make something else of it.
"""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Mapping

# Stands in an argv for HOST:PORT of the syncer, known once it serves.
ADDRESS = "{syncer}"
SYNCER = "syncer"
MAX_LEARNERS = 1000  # Processes of one machine.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Process:
  """One process of a run.

  Attributes:
    name: Names its log, RUN/logs/<name>.log.
    argv: What starts it; ADDRESS in it is replaced.
    again: What starts it after it died.
    env: Added to the launcher's own environment.
  """

  name: str
  argv: tuple[str, ...]
  again: tuple[str, ...]
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NumpyLearners:
  """Learners without JAX (`launch/numpy_learner.py`).

  Attributes:
    theta: An .npz with Theta 0 of their model.
  """

  theta: pathlib.Path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
  """What a local run is made from.

  Attributes:
    config: Path of a file in the style of configs/.
    run_dir: The run's directory.
    num_learners: Learner processes; their ids are 0, 1, ...
    address: Where the syncer binds; port 0 takes a free one.
    overrides: `--config.x.y=value` flags, as given.
    owned: Dotted names that the syncer owns, or their sections: a learner
      takes them from it, and would refuse their overrides.
    restore: Continue the run that is in run_dir.
    snapshot: Of another run, to begin from; None to begin afresh.
    numpy: Learners are of this kind; None for those of `config`.
  """

  config: str
  run_dir: pathlib.Path
  num_learners: int = 4
  address: str = "127.0.0.1:0"
  overrides: tuple[str, ...] = ()
  owned: tuple[str, ...] = ()
  restore: bool = False
  snapshot: pathlib.Path | None = None
  numpy: NumpyLearners | None = None


def plan_run(plan: RunPlan) -> tuple[Process, ...]:
  """Lists the processes of a local run, the syncer first.

  Raises:
    ValueError: no learner or too many, or an override that is none.
  """
  if not 1 <= plan.num_learners <= MAX_LEARNERS:
    raise ValueError(
      f"--learners={plan.num_learners}: a run needs at least 1 learner, and one"
      f" machine has room for few; give a number from 1 to {MAX_LEARNERS}"
    )
  for override in plan.overrides:
    if not override.startswith("--config.") or "=" not in override:
      raise ValueError(
        f"{override!r} is no override; write --config.section.field=value"
      )
  learners = (learner_process(plan, n) for n in range(plan.num_learners))
  return (syncer_process(plan), *learners)


def syncer_process(plan: RunPlan) -> Process:
  """The syncer; after a death it restores, and binds the same port again."""
  command = (
    sys.executable,
    "-m",
    "ddiloco_jax.cli.syncer",
    f"--config={plan.config}",
    f"--run_dir={plan.run_dir}",
    *_snapshot(plan),
    *plan.overrides,
  )
  if plan.numpy:
    command = (*command, f"--layout_arrays={plan.numpy.theta}")
  again = (*command, f"--address={ADDRESS}", "--restore")
  first = (*command, f"--address={plan.address}")
  if plan.restore:
    first = (*first, "--restore")
  # The syncer's arithmetic is for CPUs; an accelerator is for learners.
  env = {**_shared_env(plan), "JAX_PLATFORMS": "cpu"}
  return Process(name=SYNCER, argv=first, again=again, env=env)


def learner_process(plan: RunPlan, learner: int) -> Process:
  """One learner; after a death it takes its own id and checkpoint over."""
  if plan.numpy:
    return _numpy_learner(plan, learner)
  argv = (
    sys.executable,
    "-m",
    "ddiloco_jax.train",
    f"--config={plan.config}",
    f"--syncer={ADDRESS}",
    f"--learner_id={learner}",
    f"--run_dir={plan.run_dir}",
    *_snapshot(plan),
    *(o for o in plan.overrides if not _is_owned(o, plan.owned)),
  )
  # Learners on one accelerator would each take most of its memory at once.
  env = {**_shared_env(plan), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
  return Process(
    name=learner_name(learner),
    argv=argv,
    again=(*argv, "--takeover", "--restore"),
    env=env,
  )


def _numpy_learner(plan: RunPlan, learner: int) -> Process:
  argv = (
    sys.executable,
    "-m",
    "ddiloco_jax.launch.numpy_learner",
    f"--syncer={ADDRESS}",
    f"--learner_id={learner}",
    f"--run_dir={plan.run_dir}",
  )
  return Process(
    name=learner_name(learner),
    argv=argv,
    again=(*argv, "--takeover"),
    # Many of them share few cores.
    env={"PYTHONUNBUFFERED": "1", "OPENBLAS_NUM_THREADS": "1"},
  )


def learner_name(learner: int | str) -> str:
  """The name of a learner's process."""
  return f"learner-{learner}"


def _snapshot(plan: RunPlan) -> tuple[str, ...]:
  """Kept for another start, too: it is only taken where nothing newer is."""
  return (f"--snapshot={plan.snapshot}",) if plan.snapshot else ()


def _is_owned(override: str, owned: tuple[str, ...]) -> bool:
  name = override.removeprefix("--config.").split("=")[0]
  return any(name == own or name.startswith(own + ".") for own in owned)


def _shared_env(plan: RunPlan) -> dict[str, str]:
  """One compilation cache beside the runs: who comes back compiles nothing."""
  cache = plan.run_dir.absolute().parent / ".cache" / "jax"
  defaults = {
    "JAX_COMPILATION_CACHE_DIR": str(cache),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }
  return {
    "PYTHONUNBUFFERED": "1",  # A log shows what was printed before a SIGKILL.
    **{key: os.environ.get(key, value) for key, value in defaults.items()},
  }
