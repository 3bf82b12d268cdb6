"""The nonces of a process that starts over: one stem, and the number of a life.

For the syncer each is another process, but for an eviction, which holds for all.
"""

_MARK = "~"


def next_life(nonce: str) -> str:
  """What a process that had this nonce joins with after it has left."""
  first, _, number = nonce.partition(_MARK)
  return f"{first}{_MARK}{int(number or 0) + 1}"


def first_life(nonce: str) -> str:
  """The nonce that the same process joined with first."""
  return nonce.partition(_MARK)[0]
