"""How long an interrupted chip is away: the laws of repair.

The paper names the exponentiated Weibull law and not its parameters.
(arXiv 2604.21428, Sec. 5.)
"""

import dataclasses

import numpy as np

LAWS = ("constant", "exponential", "weibull")
_NUM_QUANTILES = 20_000  # The mean of a law, to about a thousandth.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RepairConfig:
  """A law of the time until an interrupted slice is back.

  Attributes:
    law: "constant", "exponential", or "weibull", the exponentiated one:
      F(t) = (1 - exp(-(t / s)**a))**b, with s such that the mean is mean_s.
    mean_s: Mean time.
    a, b: Shapes of "weibull".
  """

  law: str = "weibull"
  mean_s: float = 600.0
  a: float = 1.0
  b: float = 1.0

  def __post_init__(self):
    if self.law not in LAWS:
      raise ValueError(
        f"repair.law is {self.law!r}: it must be one of {', '.join(LAWS)}."
      )
    for name in ("mean_s", "a", "b"):
      if not 0 < getattr(self, name) < float("inf"):
        raise ValueError(
          f"repair.{name} is {getattr(self, name)!r}: it must be above 0 and"
          " finite."
        )


def draw_s(cfg: RepairConfig, u: np.ndarray) -> np.ndarray:
  """Repair times by inversion of the law, seconds.

  Args:
    cfg: The law.
    u: Uniform draws in [0, 1), [n].
  """
  if cfg.law == "constant":
    return np.full_like(u, cfg.mean_s)
  if cfg.law == "exponential":
    return -cfg.mean_s * np.log1p(-u)
  quantiles = (np.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES
  scale_s = cfg.mean_s / float(np.mean(_unit(cfg, quantiles)))
  return scale_s * _unit(cfg, u)


def _unit(cfg: RepairConfig, u: np.ndarray) -> np.ndarray:
  """The inverse of the exponentiated Weibull law with scale 1."""
  return (-np.log1p(-(u ** (1 / cfg.b)))) ** (1 / cfg.a)
