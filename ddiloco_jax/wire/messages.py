"""The run and the control stream as domain types and as messages.

What only the run's settings can tell (does this fragment exist?) is for the
syncer to check, not for this file. (arXiv 2604.21428, Sec. 3.)
"""

from typing import Any

from ddiloco_jax.algorithm.fragments import Layout, Leaf
from ddiloco_jax.protocol import events
from ddiloco_jax.wire import fields, port
from ddiloco_jax.wire.options import MAX_MESSAGE_BYTES
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from ddiloco_jax.wire.status import ServiceError

MAX_METRICS = 64

_RUN_FIELDS = (
  "run_id",
  "epoch",
  "cycle_steps",
  "max_open_rounds",
  "quorum",
  "alpha",
  "chunk_bytes",
  "lease_s",
  "wait_for_publication",
  "adoption_delay_steps",
  "max_ahead",
  "num_shards",
  "num_syncer_steps",
  "settings_json",
  "origin_run_id",
  "origin_snapshot",
)  # The same on both sides.


def run_to_pb(spec: port.RunSpec) -> pb.Run:
  """Raises ValueError for a run that does not fit into one message."""
  run = pb.Run(
    protocol_version=port.PROTOCOL_VERSION,
    layout=[
      pb.Leaf(path=path, dtype=dtype, shape=shape, fragment=fragment)
      for path, dtype, shape, fragment in spec.layout.leaves
    ],
    layout_digest=spec.layout.digest(),
    num_fragments=spec.layout.num_fragments,
    up_format=fields.FORMATS[spec.up_format],
    down_format=fields.FORMATS[spec.down_format],
    **{name: getattr(spec, name) for name in _RUN_FIELDS},
  )
  if run.ByteSize() > MAX_MESSAGE_BYTES:
    raise ValueError(
      f"The run's description has {run.ByteSize()} bytes"
      f" ({len(spec.layout.leaves)} leaves); a message has at most"
      f" {MAX_MESSAGE_BYTES}. Use fewer leaves, such as stacked layers."
    )
  return run


def run_from_pb(run: pb.Run) -> port.RunSpec:
  """Raises ServiceError for a run that this learner cannot take part in."""
  if run.protocol_version != port.PROTOCOL_VERSION:
    raise ServiceError(
      "FAILED_PRECONDITION",
      f"the syncer speaks protocol version {run.protocol_version}, this"
      f" learner {port.PROTOCOL_VERSION}: use the same release on both sides.",
    )
  try:
    layout = Layout(
      tuple(
        Leaf(leaf.path, leaf.dtype, tuple(leaf.shape), leaf.fragment)
        for leaf in run.layout
      )
    )
  except ValueError as error:
    raise fields.invalid("Run.layout", str(error)) from error
  if layout.digest() != run.layout_digest:
    raise ServiceError(
      "FAILED_PRECONDITION",
      f"the layout that arrived has the digest {layout.digest()}, the syncer"
      f" says {run.layout_digest}: use the same release on both sides.",
    )
  return port.RunSpec(
    layout=layout,
    up_format=fields.format_from_pb(run.up_format),
    down_format=fields.format_from_pb(run.down_format),
    **{name: getattr(run, name) for name in _RUN_FIELDS},
  )


def upward_to_pb(message: port.Hello | port.Upward) -> pb.LearnerMessage:
  match message:
    case port.Hello():
      return pb.LearnerMessage(hello=_hello_to_pb(message))
    case events.Reported():
      return pb.LearnerMessage(report=_report_to_pb(message))
    case events.Applied():
      return pb.LearnerMessage(applied=_applied_to_pb(message))
    case events.Recovered():
      recovered = pb.Recovered(
        source=message.source, donor=message.donor, reason=message.reason
      )
      return pb.LearnerMessage(recovered=recovered)
    case events.MarkerDone():
      done = pb.MarkerDone(
        snapshot=message.snapshot, saved=message.saved, reason=message.reason
      )
      return pb.LearnerMessage(marker_done=done)
    case events.Left():
      return pb.LearnerMessage(goodbye=pb.Goodbye(reason=message.reason))
    case events.Heard():
      return pb.LearnerMessage(heartbeat=pb.Heartbeat())
  raise AssertionError(message)


def upward_from_pb(message: pb.LearnerMessage) -> port.Hello | port.Upward:
  """Raises ServiceError, INVALID_ARGUMENT, for what is malformed."""
  match message.WhichOneof("message"):
    case "hello":
      return _hello_from_pb(message.hello)
    case "report":
      return _report_from_pb(message.report)
    case "applied":
      return _applied_from_pb(message.applied)
    case "recovered":
      recovered = message.recovered
      return events.Recovered(
        source=fields.said_from_pb(recovered.source),
        donor=fields.said_from_pb(recovered.donor),
        reason=fields.said_from_pb(recovered.reason),
      )
    case "marker_done":
      done = message.marker_done
      return events.MarkerDone(
        snapshot=fields.natural("MarkerDone.snapshot", done.snapshot),
        saved=done.saved,
        reason=fields.said_from_pb(done.reason),
      )
    case "goodbye":
      return events.Left(reason=fields.said_from_pb(message.goodbye.reason))
    case "heartbeat":
      return events.Heard()
  raise fields.invalid(
    "LearnerMessage", "without content: set one of hello, report, applied,"
    " recovered, goodbye, heartbeat, marker_done"
  )  # fmt: skip


def _hello_to_pb(hello: port.Hello) -> pb.Hello:
  return pb.Hello(
    protocol_version=hello.protocol_version,
    learner_id=hello.learner,
    nonce=hello.nonce,
    layout_digest=hello.layout_digest,
    run_id=hello.run_id,
    takeover=hello.takeover,
    bases=[fields.version_to_pb(base) for base in hello.bases],
    max_replies=hello.max_replies,
    state_address=hello.state_address,
    takes_shards=hello.takes_shards,
    resumes=hello.resumes,
    reads=hello.reads,
    returned=[fields.position_to_pb(x) for x in hello.returned],
    adoptions=[_applied_to_pb(applied) for applied in hello.adoptions],
  )


def _hello_from_pb(hello: pb.Hello) -> port.Hello:
  fields.check_length("Hello.bases", hello.bases)
  fields.check_length("Hello.reads", hello.reads)
  fields.check_length("Hello.adoptions", hello.adoptions)
  return port.Hello(
    protocol_version=hello.protocol_version,
    learner=fields.learner_from_pb("Hello.learner_id", hello.learner_id),
    nonce=fields.text_from_pb("Hello.nonce", hello.nonce),
    layout_digest=hello.layout_digest[: fields.MAX_TEXT],
    run_id=hello.run_id[: fields.MAX_TEXT],
    takeover=hello.takeover,
    bases=tuple(
      fields.read_version("Hello.bases", base) for base in hello.bases
    ),
    max_replies=fields.natural("Hello.max_replies", hello.max_replies) or 1,
    state_address=fields.address_from_pb(
      "Hello.state_address", hello.state_address
    ),
    takes_shards=hello.takes_shards,
    resumes=hello.resumes[: fields.MAX_TEXT],
    reads=tuple(fields.natural("Hello.reads", s) for s in hello.reads),
    returned=fields.positions_from_pb("Hello.returned", hello.returned),
    adoptions=tuple(_applied_from_pb(applied) for applied in hello.adoptions),
  )


def _applied_to_pb(applied: events.Applied) -> pb.Applied:
  return pb.Applied(
    fragment=applied.fragment,
    version=fields.version_to_pb(applied.version),
    step=applied.step,
    counts=fields.counts_to_pb(applied.counts),
    exact=applied.exact,
  )


def _applied_from_pb(applied: pb.Applied) -> events.Applied:
  return events.Applied(
    fragment=fields.natural("Applied.fragment", applied.fragment),
    version=fields.version_from_pb("Applied", applied, "version"),
    step=fields.natural("Applied.step", applied.step),
    counts=fields.counts_from_pb("Applied", applied, "counts"),
    exact=applied.exact,
  )


def _report_to_pb(report: events.Reported) -> pb.Report:
  return pb.Report(
    step=report.step,
    counts=[fields.counts_to_pb(counts) for counts in report.counts],
    positions=[
      fields.position_to_pb(position) for position in report.positions
    ],
    returned=[fields.position_to_pb(position) for position in report.returned],
    boundaries=[
      pb.Boundary(fragment=fragment, step=step)
      for fragment, step in report.boundaries
    ],
    waiting=report.waiting,
    exhausted=report.exhausted,
    metrics=dict(report.metrics),
  )


def _report_from_pb(report: pb.Report) -> events.Reported:
  if len(report.metrics) > MAX_METRICS:
    raise fields.invalid(
      "Report.metrics", f"{len(report.metrics)} values; at most {MAX_METRICS}"
    )
  fields.check_length("Report.counts", report.counts)
  fields.check_length("Report.boundaries", report.boundaries)
  return events.Reported(
    step=fields.natural("Report.step", report.step),
    counts=tuple(
      fields.read_counts(f"Report.counts[{p}]", counts)
      for p, counts in enumerate(report.counts)
    ),
    positions=fields.positions_from_pb("Report", report.positions),
    returned=fields.positions_from_pb("Report", report.returned),
    boundaries=tuple(
      (
        fields.natural("Boundary.fragment", boundary.fragment),
        fields.natural("Boundary.step", boundary.step),
      )
      for boundary in report.boundaries
    ),
    waiting=report.waiting,
    exhausted=report.exhausted,
    metrics=tuple(
      (fields.text_from_pb("name of a metric", name), value)
      for name, value in sorted(report.metrics.items())
    ),
  )


# --- control stream, down ----------------------------------------------------


def notice_to_pb(stamp: port.Stamp, notice: port.Notice) -> pb.SyncerMessage:
  content: dict[str, Any]
  match notice:
    case port.Welcomed():
      content = {"welcome": _welcome_to_pb(notice)}
    case port.PullNotice(fragment=fragment, round=round, attempt=attempt):
      pull = pb.Pull(fragment=fragment, round=round, attempt=attempt)
      content = {"pull": pull}
    case port.PublishedNotice():
      content = {"published": _published_to_pb(notice)}
    case port.GivenUpNotice():
      given_up = pb.GivenUp(
        fragment=notice.fragment,
        round=notice.round,
        attempt=notice.attempt,
        reason=notice.reason,
      )
      content = {"given_up": given_up}
    case port.EndingNotice(reason=reason):
      content = {"ending": pb.Ending(reason=reason)}
    case port.FinishedNotice(reason=reason, exit_code=exit_code):
      finished = pb.Finished(reason=reason, exit_code=exit_code)
      content = {"finished": finished}
    case port.ShardsNotice(positions=positions):
      listed = [fields.position_to_pb(position) for position in positions]
      content = {"shards": pb.Shards(positions=listed)}
    case port.MarkerNotice():
      marker = pb.Marker(
        snapshot=notice.snapshot,
        clock=[fields.version_to_pb(version) for version in notice.clock],
      )
      content = {"marker": marker}
    case port.HeartbeatNotice():
      content = {"heartbeat": pb.Heartbeat()}
  return pb.SyncerMessage(t=stamp.t, step_s=stamp.step_s, **content)


def notice_from_pb(
  message: pb.SyncerMessage, learner: str
) -> tuple[port.Stamp, port.Notice] | None:
  """A stamped notice for `learner`; None for one that is not known here."""
  stamp = port.Stamp(t=message.t, step_s=message.step_s)
  match message.WhichOneof("message"):
    case "welcome":
      return stamp, _welcome_from_pb(message.welcome, learner)
    case "pull":
      pull = message.pull
      return stamp, port.PullNotice(
        fragment=pull.fragment, round=pull.round, attempt=pull.attempt
      )
    case "published":
      return stamp, _published_from_pb(message.published)
    case "given_up":
      given_up = message.given_up
      return stamp, port.GivenUpNotice(
        fragment=given_up.fragment,
        round=given_up.round,
        attempt=given_up.attempt,
        reason=given_up.reason,
      )
    case "ending":
      return stamp, port.EndingNotice(reason=message.ending.reason)
    case "finished":
      finished = message.finished
      return stamp, port.FinishedNotice(
        reason=finished.reason, exit_code=finished.exit_code
      )
    case "shards":
      positions = fields.positions_from_pb("Shards", message.shards.positions)
      return stamp, port.ShardsNotice(positions=positions)
    case "marker":
      return stamp, port.MarkerNotice(
        snapshot=message.marker.snapshot,
        clock=tuple(
          fields.read_version("Marker.clock", version)
          for version in message.marker.clock
        ),
      )
    case "heartbeat":
      return stamp, port.HeartbeatNotice()
  return None


def snapshot_to_pb(over: events.SnapshotOver) -> pb.TakeSnapshotReply:
  return pb.TakeSnapshotReply(
    snapshot=over.snapshot,
    path=over.path,
    clock=[fields.version_to_pb(version) for version in over.clock],
    learners=over.learners,
    skipped=over.skipped,
  )


def _welcome_to_pb(welcomed: port.Welcomed) -> pb.Welcome:
  return pb.Welcome(
    incarnation=welcomed.session.incarnation,
    session_secret=welcomed.session.secret,
    run_id=welcomed.run_id,
    epoch=welcomed.epoch,
    clocks=[
      pb.FragmentClock(
        version=fields.version_to_pb(clock.version),
        n0=clock.n0,
        merged_n=clock.merged_n,
        merged_round=clock.merged_round,
        merged_attempt=clock.merged_attempt,
      )
      for clock in welcomed.clocks
    ],
    positions=[
      fields.position_to_pb(position) for position in welcomed.positions
    ],
    reconnect=welcomed.reconnect,
    donor=_donor_to_pb(welcomed.donor),
  )


def _welcome_from_pb(welcome: pb.Welcome, learner: str) -> port.Welcomed:
  return port.Welcomed(
    session=port.Session(
      learner=learner,
      incarnation=welcome.incarnation,
      secret=welcome.session_secret,
    ),
    run_id=welcome.run_id,
    epoch=welcome.epoch,
    clocks=tuple(
      events.FragmentClock(
        version=fields.version_from_pb("FragmentClock", clock, "version"),
        n0=clock.n0,
        merged_n=clock.merged_n,
        merged_round=clock.merged_round,
        merged_attempt=clock.merged_attempt,
      )
      for clock in welcome.clocks
    ),
    positions=fields.positions_from_pb("Welcome", welcome.positions),
    reconnect=welcome.reconnect,
    donor=_donor_from_pb(welcome),
  )


def _donor_to_pb(donor: events.Donor | None) -> pb.Donor | None:
  if donor is None:
    return None
  return pb.Donor(learner_id=donor.learner, address=donor.address)


def _donor_from_pb(welcome: pb.Welcome) -> events.Donor | None:
  if not welcome.HasField("donor"):
    return None
  return events.Donor(welcome.donor.learner_id, welcome.donor.address)


def _published_to_pb(notice: port.PublishedNotice) -> pb.Published:
  return pb.Published(
    fragment=notice.fragment,
    version=fields.version_to_pb(notice.version),
    outcome=fields.OUTCOMES[notice.outcome],
    reason=notice.reason,
    round=notice.round,
    attempt=notice.attempt,
    exact=notice.exact,
  )


def _published_from_pb(published: pb.Published) -> port.PublishedNotice:
  return port.PublishedNotice(
    fragment=published.fragment,
    version=fields.version_from_pb("Published", published, "version"),
    outcome=fields.outcome_from_pb("Published.outcome", published.outcome),
    reason=published.reason,
    round=published.round,
    attempt=published.attempt,
    exact=published.exact,
  )
