"""How a command ends: one table of exit codes for all of them."""

OK = 0
FAILED = 1
BAD_USAGE = 2
FENCED = 3
QUORUM_TIMEOUT = 4
NO_SYNCER = 5
IN_USE = 6

MEANINGS = {
  OK: "it ended well, also when SIGTERM or SIGINT asked it to",
  FAILED: "failure; its log says which",
  BAD_USAGE: "bad usage, config or data",
  FENCED: "another process took this learner's id",
  QUORUM_TIMEOUT: "too few learners for sync.quorum_timeout_s",
  NO_SYNCER: "no syncer was there for run.connect_timeout_s or run.max_solo_s",
  IN_USE: "the address or the run directory is in use",
}


def table(codes: tuple[int, ...] = tuple(MEANINGS)) -> str:
  """The exit codes as lines, for --help."""
  return "\n".join(f"  {code}  {MEANINGS[code]}" for code in codes)
