"""Why a syncer does not start."""


class InUse(Exception):
  """An address or a run's directory belongs to a live process, or a run."""
