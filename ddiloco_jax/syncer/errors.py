"""Why a syncer does not start, or stops."""


class InUse(Exception):
  """An address or a run's directory belongs to a live process, or a run."""


class Superseded(Exception):
  """Another syncer has taken over the run: this one publishes no more."""
