"""Operates a run: ends it in order, takes a snapshot, or shuts a learner out.

  python -m ddiloco_jax.cli.admin HOST:PORT drain --reason="maintenance"
  python -m ddiloco_jax.cli.admin HOST:PORT snapshot
  python -m ddiloco_jax.cli.admin HOST:PORT evict 3 --reason="its host is sick"

drain ends the run as SIGTERM does: flush, last publication, exit code 0; the
run can be restored. snapshot is a consistent cut of the syncer and of every
learner that saves its part in time; it is named once it is on disk, with those
that are not in it. evict fences the present process of a learner id, which
exits with code 3; another process may take the id.
"""

import argparse
import json
import sys
from typing import Any

from ddiloco_jax.launch import calling, exits
from ddiloco_jax.learner.client import Client
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from ddiloco_jax.wire.status import ServiceError


def make_parser() -> argparse.ArgumentParser:
  shared = argparse.ArgumentParser(add_help=False)
  shared.add_argument("--reason", default="", help="for logs and the tape")
  shared.add_argument("--json", action="store_true", help="print JSON instead")
  shared.add_argument(
    "--timeout_s",
    type=float,
    help="of the call (default: 10; of a snapshot 600)",
  )
  calling.add_flags(shared)
  parser = calling.make_parser("admin", __doc__)
  verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
  verbs.add_parser("drain", parents=[shared], help="end the run in order")
  verbs.add_parser(
    "snapshot", parents=[shared], help="take a consistent cut of the run"
  )
  evict = verbs.add_parser("evict", parents=[shared], help="shut a learner out")
  evict.add_argument("learner", metavar="ID", help="of the learner")
  return parser


def main(argv: list[str] | None = None) -> int:
  parser = make_parser()
  flags = parser.parse_args(argv)
  timeout_s = flags.timeout_s
  if timeout_s is None:
    timeout_s = 600.0 if flags.verb == "snapshot" else 10.0
  client = calling.connect(parser, flags, timeout_s)
  try:
    values, sentence = act(client, flags)
  except ServiceError as error:
    return calling.failed(error, flags.address)
  finally:
    client.close()
  print(json.dumps(values, allow_nan=False) if flags.json else sentence)
  return exits.OK


def act(
  client: Client, flags: argparse.Namespace
) -> tuple[dict[str, Any], str]:
  """What was done: as values, and as a sentence."""
  match flags.verb:
    case "drain":
      client.drain(flags.reason)
      return {}, f"the run at {flags.address} ends; its learners are told"
    case "snapshot":
      reply = client.take_snapshot()
      return _to_dict(reply), "\n".join(_lines(reply))
    case "evict":
      incarnation = client.evict(flags.learner, flags.reason)
      return {"incarnation": incarnation}, (
        f"incarnation {incarnation} of learner {flags.learner} is shut out"
      )
  raise AssertionError(flags.verb)


def _to_dict(reply: pb.TakeSnapshotReply) -> dict[str, Any]:
  return {
    "snapshot": reply.snapshot,
    "path": reply.path,
    "clock": [[version.epoch, version.n] for version in reply.clock],
    "learners": list(reply.learners),
    "skipped": list(reply.skipped),
  }


def _lines(reply: pb.TakeSnapshotReply) -> list[str]:
  merges = sum(version.n for version in reply.clock)
  return [
    f"snapshot {reply.snapshot} after {merges} merges is in {reply.path}, with"
    f" the learners {', '.join(reply.learners) or '(none)'}",
    *(f"not in it: {who}" for who in reply.skipped),
  ]


def run() -> None:
  """Console entry point."""
  sys.exit(main())


if __name__ == "__main__":
  run()
