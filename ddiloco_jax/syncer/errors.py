"""Why a syncer does not start, or stops."""


class InUse(Exception):
  """An address or a run's directory belongs to a live process, or a run."""


class Stopping(Exception):
  """Ends a syncer that serves; its learners look for it, or for another."""


class Superseded(Stopping):
  """Another syncer has taken over the run: this one publishes no more."""


class TooLate(Exception):
  """Another syncer has taken over first."""
