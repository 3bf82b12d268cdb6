"""How a run stands, asked from its syncer: who takes part, what it waits for.

python -m ddiloco_jax.cli.status HOST:PORT [--watch] [--json]
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live

from ddiloco_jax.launch import calling, exits, view
from ddiloco_jax.learner.client import Client
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from ddiloco_jax.wire.status import ServiceError

_FINISHED = "finished"


def make_parser() -> argparse.ArgumentParser:
  parser = calling.make_parser("status", __doc__)
  add = parser.add_argument
  add("--watch", action="store_true", help="once a second, until the run ends")
  add("--json", action="store_true", help="one JSON object a line")
  add("--timeout_s", type=float, default=5.0, help="of the call (default: 5)")
  calling.add_flags(parser)
  return parser


def main(argv: list[str] | None = None) -> int:
  parser = make_parser()
  flags = parser.parse_args(argv)
  client = calling.connect(parser, flags, flags.timeout_s)
  try:
    show(poll(client, watch=flags.watch), as_json=flags.json)
  except ServiceError as error:
    return calling.failed(error, flags.address)
  except KeyboardInterrupt:
    pass
  finally:
    client.close()
  return exits.OK


def poll(client: Client, *, watch: bool) -> Iterator[pb.Status]:
  """The status, once, or every second until the run has ended."""
  status = client.status()
  yield status
  while watch and status.phase != _FINISHED:
    time.sleep(1.0)
    try:
      status = client.status()
    except ServiceError as error:
      if not error.is_worth_retrying:
        raise
      return  # It has ended, and its syncer with it.
    yield status


def show(statuses: Iterator[pb.Status], *, as_json: bool) -> None:
  """Prints each; on a terminal the newest replaces the one before."""
  if as_json:
    for status in statuses:
      print(json.dumps(view.to_dict(status), allow_nan=False), flush=True)
    return
  console = Console()
  if not console.is_terminal:
    for status in statuses:
      console.print(view.render(status))
    return
  with Live(console=console) as live:
    for status in statuses:
      live.update(view.render(status))


def run() -> None:
  """Console entry point."""
  sys.exit(main())


if __name__ == "__main__":
  run()
