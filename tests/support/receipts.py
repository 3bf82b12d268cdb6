"""What a tape says of a run, as a plan for `references.imposed`."""

import collections
import dataclasses
import re
from typing import NamedTuple

from ddiloco_jax.protocol import events, tape


class Process(NamedTuple):
  learner: str
  incarnation: int


@dataclasses.dataclass
class Receipts:
  """Per process: adoptions, wanted copies, first data position; and merges.

  Attributes:
    adoptions: Process -> boundary -> [(fragment, n)], in order.
    copies: Process -> {(boundary, fragment)}.
    positions: Process -> events.Position of its first batch.
    donors: Process -> (process, its step) whose moments it began with.
    merges: [(fragment, n, [(process, boundary, weight)])], in order.
  """

  adoptions: dict
  copies: dict
  positions: dict
  donors: dict
  merges: list


def read(path) -> Receipts:
  adoptions = collections.defaultdict(lambda: collections.defaultdict(list))
  adopted, replies, positions, donors, merges = {}, {}, {}, {}, []
  newest = {}
  lines = list(tape.Reader(path).lines())
  for line in lines:
    assert not line.fault, line.fault
    event = line.event
    if isinstance(event, events.Applied):
      who = Process(event.learner, event.incarnation)
      adoptions[who][event.step].append((event.fragment, event.version.n))
      adopted[who, event.fragment, event.version.n] = event.step
    elif isinstance(event, events.Replied):
      key = events.ReplyKey(
        event.learner,
        event.incarnation,
        event.fragment,
        event.round,
        event.attempt,
      )
      replies[key] = event
    elif isinstance(event, events.Recovered) and event.donor:
      who = Process(event.learner, event.incarnation)
      step = int(re.findall(r"at its step (\d+)", event.reason)[-1])
      donors[who] = newest[event.donor], step
    for effect in line.effects:
      if isinstance(effect, events.Welcome):
        who = Process(effect.learner, effect.incarnation)
        positions[who] = effect.positions[0]
        newest[effect.learner] = who
      elif isinstance(effect, events.Merge):
        merges.append(effect)
  copies = collections.defaultdict(set)
  plan = []
  for merge in merges:
    inputs = []
    for item in merge.inputs:
      reply, who = replies[item.key], Process(*item.key[:2])
      start = adopted[who, merge.fragment, reply.base.n]
      boundary = start + reply.counts.steps
      copies[who].add((boundary, merge.fragment))
      inputs.append((who, boundary, item.weight))
    plan.append((merge.fragment, merge.version.n, inputs))
  return Receipts(adoptions, copies, positions, donors, plan)
