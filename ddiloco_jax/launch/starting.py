"""What a syncer starts from: the run in its directory, or a fresh one."""

import dataclasses
import json
import logging
import pathlib
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import optax

from ddiloco_jax import config
from ddiloco_jax.algorithm import fragments, outer
from ddiloco_jax.protocol import ending, machine, tail
from ddiloco_jax.protocol.state import End
from ddiloco_jax.protocol.turn import Turn
from ddiloco_jax.syncer import manifest
from ddiloco_jax.syncer.merger import Tensors
from ddiloco_jax.syncer.store import Store
from ddiloco_jax.wire import messages, port

_log = logging.getLogger(__name__)
# The shards' number decides what a position in them means, the outer optimizer's
# name what its state means; the others, what live learners do.
_FIXED = (
  "model",
  "fragments",
  "sync.num_fragments",
  "sync.cycle_steps",
  "sync.alpha",
  "sync.wait_for_publication",
  "sync.adoption_delay_steps",
  "sync.max_ahead",
  "sync.num_shards",
  "wire.up_format",
  "wire.down_format",
  "wire.chunk_bytes",
  "outer.name",
)


class Origin(NamedTuple):
  """The snapshot that a run was restored from; "" and 0: none."""

  run_id: str = ""
  snapshot: int = 0


class Start(NamedTuple):
  """What a syncer starts from.

  Attributes:
    spec: Of the run.
    state: Of the machine.
    tensors: Of its versions.
    unsaved_s: Seconds of the run since its newest checkpoint.
  """

  spec: port.RunSpec
  state: machine.State
  tensors: Tensors
  unsaved_s: float


def make_start(
  cfg: config.Config,
  layout: fragments.Layout,
  params: Mapping[str, np.ndarray],
  tx: optax.GradientTransformation,
  store: Store,
  snapshot: pathlib.Path | None = None,
) -> Start:
  """The run in the store, or a fresh one; the store is left as it is.

  Args:
    cfg: Settings.
    layout: Of the model.
    params: Theta 0.
    tx: The outer optimizer.
    store: Of the run's directory.
    snapshot: RUN/snapshots/ID of a cut that a fresh run goes on from, instead
      of Theta 0; "latest" for ID.

  Raises:
    ValueError: settings that do not fit; a run that has ended, or is beyond a
      limit that was changed.
  """
  sizes = tuple(layout.num_params(p) for p in range(layout.num_fragments))
  rules = dataclasses.replace(cfg.sync, fragment_params=sizes)
  origin, unsaved_s = Origin(), 0.0

  def check(record: Mapping[str, Any]) -> None:
    check_fixed(cfg, record["config"])

  if store.has_progress:
    found = store.restore(layout, tx, check)
    tensors, record = found.tensors, found.spec
    old, merged = tail.catch_up(
      store.tape, machine.load(rules, found.state), found.merged
    )
    state = machine.restore(rules, machine.save(old), store.epoch, merged)
    unsaved_s = state.now - found.saved_at
    _check_goes_on(state, store.path)
    if not store.takes_over:  # Else nobody is there to raise a limit.
      settings = store.last_settings or record["config"]
      _check_is_within(state, old.end, settings["sync"], store.path)
    run_id = record["run_id"]
    origin = Origin(*record.get("origin", origin))
    if snapshot is not None:
      _check_began_from(origin, snapshot, store.path)
  elif snapshot is not None:
    cut = manifest.find(snapshot)
    found = store.restore_from(cut, layout, tx, check)
    tensors = found.tensors
    state = machine.restore(rules, found.state, store.epoch)
    _check_leaves_something(state, cut)
    origin = Origin(found.spec["run_id"], int(cut.name))
    run_id = _new_run_id(cfg)
  else:
    if store.epoch > 1:
      _log.info("%s has no checkpoint yet: the run begins afresh", store.path)
    tensors = _split(params, layout, tx)
    state = machine.initial(rules, store.epoch)
    run_id = _new_run_id(cfg)
  # A cut's number is used once, whatever a restart has forgotten of it.
  number = max(state.next_snapshot, 1 + store.last_cut())
  state = state._replace(next_snapshot=number)
  spec = run_spec(cfg, layout, run_id, state.epoch, origin)
  return Start(spec, state, tensors, unsaved_s)


def run_spec(
  cfg: config.Config,
  layout: fragments.Layout,
  run_id: str,
  epoch: int,
  origin: Origin = Origin(),  # noqa: B008
) -> port.RunSpec:
  """What learners are told of a run.

  Raises:
    ValueError: it fits into no message.
  """
  spec = port.RunSpec(
    run_id=run_id,
    epoch=epoch,
    layout=layout,
    cycle_steps=cfg.sync.cycle_steps,
    max_open_rounds=cfg.sync.max_open_rounds,
    quorum=cfg.sync.quorum,
    alpha=cfg.sync.alpha,
    up_format=cfg.wire.up_format,
    down_format=cfg.wire.down_format,
    chunk_bytes=cfg.wire.chunk_bytes,
    lease_s=cfg.sync.lease_s,
    wait_for_publication=cfg.sync.wait_for_publication,
    adoption_delay_steps=cfg.sync.adoption_delay_steps,
    max_ahead=cfg.sync.max_ahead,
    num_shards=cfg.sync.num_shards,
    num_syncer_steps=cfg.sync.num_syncer_steps,
    settings_json=config.shared_json(cfg),
    origin_run_id=origin.run_id,
    origin_snapshot=origin.snapshot,
  )
  messages.run_to_pb(spec)  # Fails now, not at a learner.
  return spec


def _new_run_id(cfg: config.Config) -> str:
  return f"{cfg.run.name}-{secrets.token_hex(4)}"


def _check_began_from(
  origin: Origin, snapshot: pathlib.Path, path: pathlib.Path
) -> None:
  """Refuses to take a run that is there for one that is to be restored."""
  if not origin.run_id:
    raise ValueError(
      f"the run in {path} did not begin from a snapshot, and goes on with what"
      f" it has, not with {snapshot}. Give another --run_dir to restore it, or"
      " leave --snapshot out."
    )
  _log.info(
    "%s goes on with what it has since snapshot %d of run %s",
    path,
    origin.snapshot,
    origin.run_id,
  )


def check_fixed(cfg: config.Config, saved: Mapping[str, Any]) -> None:
  """Refuses what may not change in a run: learners go on with what it was."""
  now = json.loads(config.to_json(cfg))
  sections = {name.partition(".")[0] for name in _FIXED}
  if not (isinstance(saved, Mapping) and sections <= saved.keys()):
    raise ValueError(
      "the record of the run's settings (config.json, or that of a checkpoint)"
      f" lacks one of {', '.join(sorted(sections))}: it is damaged, or no run's"
    )
  for name in _FIXED:
    section, _, only = name.partition(".")
    for key in [only] if only else sorted(now[section]):
      old, new = (x[section].get(key) for x in (saved, now))
      if old != new:
        raise _changed(f"{section}.{key}", old, new, "it")
  old, new = (x["outer"].get("momentum") for x in (saved, now))
  if now["outer"]["name"] == "sgd" and bool(old) != bool(new):
    which = "from 0, which keeps no momentum, or to it, it"
    raise _changed("outer.momentum", old, new, which)


def _changed(name: str, old: Any, new: Any, it: str) -> ValueError:
  return ValueError(
    f"{name} is {new!r} and in the run to restore {old!r}: {it} may not change"
    " in a run, whose parameters, outer states, data positions and live learners"
    f" are of the old value. Set --config.{name}={old}, or give another"
    " --run_dir."
  )


def _check_goes_on(state: machine.State, path: pathlib.Path) -> None:
  """Refuses a restored run that has nothing left to do."""
  if state.end is not None:
    limit = f"sync.{state.end.cause}"
    raise ValueError(
      f"the run in {path} has ended: {state.end.reason}. Raise the limit"
      f" (--config.{limit}=N) to go on with it, or give another --run_dir."
    )


def _check_is_within(
  state: machine.State,
  end: End | None,
  saved: Mapping[str, Any],
  path: pathlib.Path,
) -> None:
  """Refuses a limit that was changed, and is reached at once.

  One that is as it was is how a run that was killed in its end, or just before
  it, comes to it.

  Args:
    end: That the run was in when it was killed.
    saved: Section `sync` of its settings then.
  """
  cause = ending.end_cause(Turn(state))
  if cause is None:
    return
  limit, said = cause
  new, old = getattr(state.rules, limit), saved.get(limit)
  if new == old:
    return
  if limit == "num_syncer_steps":
    said = f"t is {state.t}"
  ways = f"Raise it (--config.sync.{limit}=N), set it to 0 for no limit, "
  if end is not None and end.cause == limit:
    ways += f"or back to {old}, to end it as it was to end, "
  raise ValueError(
    f"sync.{limit} is {new}, and the run in {path} is there already: {said}. A"
    " run that was killed goes on to a limit that is ahead of it, or that it had"
    f" (sync.{limit} was {old}). {ways}or give another --run_dir."
  )


def _check_leaves_something(state: machine.State, cut: pathlib.Path) -> None:
  """Refuses a snapshot from which there is nowhere to go."""
  if cause := ending.end_cause(Turn(state)):
    limit, said = cause
    raise ValueError(
      f"the snapshot {cut} is at the end of this run already: {said}. Raise the"
      f" limit (--config.sync.{limit}=N), or take another snapshot."
    )


def _split(
  params: Mapping[str, np.ndarray],
  layout: fragments.Layout,
  tx: optax.GradientTransformation,
) -> Tensors:
  theta = tuple(
    {x.path: np.array(params[x.path], np.float32) for x in layout.fragment(p)}
    for p in range(layout.num_fragments)
  )
  return Tensors(theta, tuple(outer.init(tx, part) for part in theta))
