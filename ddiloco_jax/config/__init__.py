"""A run's settings: each room's own frozen dataclass, composed, checked, saved.

A file in configs/ edits the ConfigDict of `default`; `freeze` turns it, once,
into a `Config`, and refuses unknown names, wrong types and settings that
contradict each other. What the syncer owns is replaced at a learner by what the
syncer says.
"""

from ddiloco_jax.config.flag import (
  FLAG,
  default,
  default_of,
  define_flag,
  load_file,
  overridden,
  parsed,
)
from ddiloco_jax.config.settings import (
  Config,
  RunConfig,
  check,
  check_vocab,
  freeze,
)
from ddiloco_jax.config.text import (
  SYNCER_OWNED,
  digest,
  from_json,
  shared_json,
  syncer_owned,
  to_dict,
  to_json,
  with_shared,
)

__all__ = (
  "FLAG",
  "SYNCER_OWNED",
  "Config",
  "RunConfig",
  "check",
  "check_vocab",
  "default",
  "default_of",
  "define_flag",
  "digest",
  "freeze",
  "from_json",
  "load_file",
  "overridden",
  "parsed",
  "shared_json",
  "syncer_owned",
  "to_dict",
  "to_json",
  "with_shared",
)
