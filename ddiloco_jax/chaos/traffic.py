"""How long bytes take between a learner and the syncer, and how many there were.

A link is a latency and a bandwidth each way; what is under way delays what
comes after it. (arXiv 2604.21428, Sec. 4.)
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
  """A learner's link to the syncer, each way.

  Attributes:
    latency_s: From the first byte's leaving to its arrival.
    gbit_per_s: Bandwidth; inf for no limit.
    up_bits, down_bits: Per parameter of a delta, and of a published fragment.
  """

  latency_s: float = 0.02
  gbit_per_s: float = 10.0
  up_bits: float = 16.0
  down_bits: float = 16.0

  def __post_init__(self):
    if not 0 <= self.latency_s < float("inf"):
      raise ValueError(
        f"link.latency_s is {self.latency_s!r}: it must be at least 0, and"
        " finite."
      )
    for name in ("gbit_per_s", "up_bits", "down_bits"):
      if not getattr(self, name) > 0:
        raise ValueError(
          f"link.{name} is {getattr(self, name)!r}: it must be above 0."
        )


class Way:
  """One direction of a link.

  Attributes:
    num_bytes: That were sent.
  """

  def __init__(self, cfg: LinkConfig, bits_per_param: float):
    self._latency_s = cfg.latency_s
    self._bytes_per_param = bits_per_param / 8
    self._bytes_per_s = cfg.gbit_per_s * 1e9 / 8
    self._free_at = 0.0
    self.num_bytes = 0.0

  def send(self, now: float, num_params: int) -> float:
    """Sends a fragment after all that was sent before; when it has arrived."""
    num_bytes = num_params * self._bytes_per_param
    self.num_bytes += num_bytes
    self._free_at = max(now, self._free_at) + num_bytes / self._bytes_per_s
    return self._free_at + self._latency_s

  def say(self, now: float) -> float:
    """Sends a few bytes beside the others; when they have arrived."""
    return now + self._latency_s
