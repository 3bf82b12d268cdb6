"""Messages and domain types are each other's mirror; what is malformed stops."""

import importlib.util
import pathlib
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import pytest
from google.protobuf import descriptor_pb2

from ddiloco_jax.algorithm.fragments import make_layout
from ddiloco_jax.protocol import events
from ddiloco_jax.wire import fields, headers, messages, options, port
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from ddiloco_jax.wire.status import CODES, ServiceError, to_grpc

ROOT = pathlib.Path(__file__).parents[2]

naturals = st.integers(0, 1 << 53)
small = st.integers(0, 2**31 - 1)
printable = st.characters(exclude_categories=("C", "Z"))
texts = st.text(printable, max_size=20)
names = st.from_regex(fields.LEARNER_ID, fullmatch=True)
versions = st.builds(events.Version, naturals, naturals)
counts = st.builds(events.Counts, naturals, naturals)
positions = st.lists(st.builds(events.Position, small, naturals)).map(tuple)
finite = st.floats(allow_nan=False, allow_infinity=False)
outcomes = st.sampled_from(events.Outcome)
applied = st.builds(
  events.Applied,
  time=st.just(0.0),
  learner=st.just(""),
  incarnation=st.just(0),
  fragment=small,
  version=versions,
  step=naturals,
  counts=counts,
)
upward = st.one_of(
  st.builds(
    port.Hello,
    learner=names,
    nonce=st.text(printable, min_size=1, max_size=20),
    layout_digest=texts,
    protocol_version=small,
    run_id=texts,
    takeover=st.booleans(),
    bases=st.lists(versions).map(tuple),
    adoptions=st.lists(applied).map(tuple),
    max_replies=st.integers(1, 9),
  ),
  st.builds(
    events.Reported,
    time=st.just(0.0),
    learner=st.just(""),
    incarnation=st.just(0),
    step=naturals,
    counts=st.lists(counts).map(tuple),
    positions=positions,
    boundaries=st.lists(st.tuples(small, naturals)).map(tuple),
    waiting=st.booleans(),
    exhausted=st.booleans(),
    metrics=st.dictionaries(
      st.text(printable, min_size=1, max_size=9), finite, max_size=5
    ).map(lambda metrics: tuple(sorted(metrics.items()))),
  ),
  applied,
  st.builds(events.Left, time=st.just(0.0), reason=texts,
            learner=st.just(""), incarnation=st.just(0)),
  st.just(events.Heard()),
)  # fmt: skip
rounds = st.integers(-1, 1 << 53)
attempts = st.integers(-1, 2**31 - 1)
notices = st.one_of(
  st.builds(
    port.Welcomed,
    session=st.builds(
      port.Session,
      learner=st.just("ada"),
      incarnation=naturals,
      secret=texts,
    ),
    run_id=texts,
    epoch=naturals,
    clocks=st.lists(
      st.builds(
        events.FragmentClock, versions, naturals, naturals, rounds, attempts
      )
    ).map(tuple),
    positions=positions,
    reconnect=st.booleans(),
  ),
  st.builds(port.PullNotice, fragment=small, round=naturals, attempt=small),
  st.builds(
    port.PublishedNotice,
    fragment=small,
    version=versions,
    outcome=outcomes,
    reason=texts,
    round=rounds,
    attempt=attempts,
    exact=st.booleans(),
  ),
  st.builds(
    port.GivenUpNotice,
    fragment=small,
    round=naturals,
    attempt=small,
    reason=texts,
  ),
  st.builds(port.EndingNotice, reason=texts),
  st.builds(port.FinishedNotice, reason=texts, exit_code=small),
  st.just(port.HeartbeatNotice()),
)
REPLY = port.ReplyHeader(
  session=port.Session(learner="ada", incarnation=3, secret="s"),
  fragment=1,
  round=2,
  attempt=0,
  base=events.Version(1, 4),
  counts=events.Counts(24, 98_304),
  lr_sum=0.25,
  positions=(events.Position(2, 7),),
  format="bfloat16",
  num_bytes=512,
)


@hypothesis.given(upward)
def test_what_goes_up_arrives_as_it_was_said(message):
  wire = messages.upward_to_pb(message).SerializeToString()

  back = messages.upward_from_pb(pb.LearnerMessage.FromString(wire))

  assert back == message


@hypothesis.given(st.builds(port.Stamp, t=naturals, step_s=finite), notices)
def test_what_goes_down_arrives_as_it_was_said(stamp, notice):
  wire = messages.notice_to_pb(stamp, notice).SerializeToString()

  back = messages.notice_from_pb(pb.SyncerMessage.FromString(wire), "ada")

  assert back == (stamp, notice)


def test_a_notice_of_a_later_release_is_skipped():
  assert messages.notice_from_pb(pb.SyncerMessage(t=3), "ada") is None


@hypothesis.given(outcomes, st.none() | outcomes)
def test_an_outcome_arrives_as_it_was_decided(outcome, first):
  result = port.PushResult(outcome=outcome, reason="why", first=first)

  back = headers.push_result_from_pb(headers.push_result_to_pb(result))

  assert back == result


def test_bulk_headers_arrive_as_they_were_said():
  fragment = port.FragmentHeader(
    fragment=1, version=events.Version(2, 9), format="float32", num_bytes=8
  )
  fetch = (REPLY.session, 1, 9, True)

  assert headers.reply_header_from_pb(
    headers.reply_header_to_pb(REPLY)
  ) == REPLY  # fmt: skip
  assert headers.fragment_header_from_pb(
    headers.fragment_header_to_pb(fragment)
  ) == fragment  # fmt: skip
  assert headers.fetch_from_pb(headers.fetch_to_pb(*fetch)) == fetch


def spoil_reply(**changes) -> pb.ReplyHeader:
  header = headers.reply_header_to_pb(REPLY)
  for name, value in changes.items():
    header.ClearField(name)
    if isinstance(value, int | float | str):
      setattr(header, name, value)
    elif value is not None:
      getattr(header, name).CopyFrom(value)
  return header


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"counts": None}, "ReplyHeader.counts is missing"),
    ({"counts": pb.Counts(steps=1)}, "counts.tokens is missing"),
    ({"counts": pb.Counts(tokens=1)}, "counts.steps is missing"),
    ({"counts": pb.Counts(steps=-1, tokens=1)}, "counts.steps is -1"),
    ({"counts": pb.Counts(steps=1, tokens=1 << 60)}, "counts.tokens is 1152"),
    ({"base": None}, "ReplyHeader.base is missing"),
    ({"base": pb.Version(epoch=1, n=-1)}, "base.n is -1"),
    ({"fragment": -1}, "ReplyHeader.fragment is -1"),
    ({"round": -1}, "ReplyHeader.round is -1"),
    ({"attempt": -1}, "ReplyHeader.attempt is -1"),
    ({"num_bytes": -5}, "ReplyHeader.num_bytes is -5"),
    ({"format": 0}, "format is 0"),
    ({"format": 17}, "format is 17"),
    ({"lr_sum": float("nan")}, "lr_sum is nan"),
    ({"lr_sum": -0.1}, "lr_sum is -0.1"),
    ({"learner_id": ""}, "learner_id is ''"),
    ({"learner_id": "../../etc"}, "learner_id is '../../etc'"),
  ],
)
def test_a_malformed_reply_names_the_field_and_its_value(changes, says):
  with pytest.raises(ServiceError) as caught:
    headers.reply_header_from_pb(spoil_reply(**changes))

  assert caught.value.code == "INVALID_ARGUMENT"
  assert says in caught.value.text


@pytest.mark.parametrize(
  ("message", "says"),
  [
    (pb.LearnerMessage(), "without content"),
    (
      pb.LearnerMessage(report=pb.Report(counts=[pb.Counts(steps=1)])),
      "Report.counts[0].tokens is missing",
    ),
    (pb.LearnerMessage(report=pb.Report(step=-1)), "Report.step is -1"),
    (
      pb.LearnerMessage(
        report=pb.Report(metrics={f"m{i}": 0.0 for i in range(65)})
      ),
      "65 values",
    ),
    (
      pb.LearnerMessage(
        report=pb.Report(boundaries=[pb.Boundary()] * (2**16 + 1))
      ),
      "Report.boundaries is a list of 65537",
    ),
    (
      pb.LearnerMessage(
        report=pb.Report(returned=[pb.Position()] * (2**16 + 1))
      ),
      "Report.positions is a list of 65537",
    ),
    (
      pb.LearnerMessage(report=pb.Report(metrics={"a\x1b[2J": 0.0})),
      "name of a metric is 5 characters",
    ),
    (
      pb.LearnerMessage(applied=pb.Applied(counts=pb.Counts())),
      "Applied.version is missing",
    ),
    (
      pb.LearnerMessage(applied=pb.Applied(version=pb.Version())),
      "Applied.counts is missing",
    ),
    (pb.LearnerMessage(hello=pb.Hello(learner_id="a")), "Hello.nonce is 0"),
    (
      pb.LearnerMessage(hello=pb.Hello(learner_id="a\n", nonce="n")),
      "Hello.learner_id is 'a\\n'",
    ),
    (
      pb.LearnerMessage(
        hello=pb.Hello(learner_id="a", nonce="n", max_replies=-1)
      ),
      "Hello.max_replies is -1",
    ),
  ],
)
def test_a_malformed_control_message_names_the_field_and_its_value(
  message, says
):
  with pytest.raises(ServiceError) as caught:
    messages.upward_from_pb(message)

  assert caught.value.code == "INVALID_ARGUMENT"
  assert says in caught.value.text


def test_what_is_said_in_words_forges_no_line_of_a_screen():
  said = "on fire\n2026-01-01 ERROR \x1b[2J"
  message = pb.LearnerMessage(goodbye=pb.Goodbye(reason=said))

  left = messages.upward_from_pb(message)

  assert left == events.Left(reason="on fire?2026-01-01 ERROR ?[2J")


def make_run(num_leaves: int = 2) -> port.RunSpec:
  shapes = {
    f"layer_{i:06}/kernel": ((2, 3), "float32") for i in range(num_leaves)
  }
  return port.RunSpec(
    run_id="r",
    epoch=3,
    layout=make_layout(shapes, "tensor", 2),
    cycle_steps=24,
    max_open_rounds=2,
    quorum=3,
    alpha=0.5,
    up_format="bfloat16",
    down_format="float32",
    chunk_bytes=1 << 20,
    lease_s=15.0,
    wait_for_publication=True,
    adoption_delay_steps=1,
    max_ahead=4,
    num_shards=8,
    num_syncer_steps=100,
    settings_json='{"seed": 1}',
  )


def test_a_run_arrives_as_it_is():
  assert messages.run_from_pb(messages.run_to_pb(make_run())) == make_run()


def test_a_run_of_many_leaves_fits_into_a_message():
  run = messages.run_to_pb(make_run(num_leaves=2000))

  assert run.ByteSize() < options.MAX_MESSAGE_BYTES / 10


def test_a_run_that_fits_into_no_message_is_refused_with_its_size():
  with pytest.raises(ValueError, match=r"150000 leaves.*at most 4194304"):
    messages.run_to_pb(make_run(num_leaves=150_000))


def test_a_run_whose_layout_has_another_digest_is_refused():
  run = messages.run_to_pb(make_run())
  run.layout[0].shape[0] += 1

  with pytest.raises(ServiceError, match=run.layout_digest) as caught:
    messages.run_from_pb(run)

  assert caught.value.code == "FAILED_PRECONDITION"


def test_a_run_of_another_protocol_version_is_refused():
  run = messages.run_to_pb(make_run())
  run.protocol_version = 2

  with pytest.raises(ServiceError, match="version 2") as caught:
    messages.run_from_pb(run)

  assert caught.value.code == "FAILED_PRECONDITION"


def test_every_code_is_a_code_of_grpc_and_no_two_are_the_same():
  assert {to_grpc(code).name for code in CODES} == set(CODES)


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"chunk_bytes": (3 << 20) + 1}, "chunk_bytes is 3145729.*4194304"),
    ({"chunk_bytes": 0}, "chunk_bytes is 0"),
    ({"up_format": "int4"}, "up_format is 'int4'.*float32, bfloat16"),
    ({"keepalive_s": 0.0}, "keepalive_s is 0.0"),
    ({"keepalive_s": float("nan")}, "keepalive_s is nan"),
    ({"bandwidth_bytes_per_s": -1}, "bandwidth_bytes_per_s is -1"),
    ({"max_calls": 1}, "max_calls is 1"),
  ],
)
def test_a_setting_out_of_range_names_the_value_and_the_rule(changes, says):
  with pytest.raises(ValueError, match=says):
    options.WireConfig(**changes)


def test_both_sides_keep_the_connection_alive_by_the_same_figures():
  cfg = options.WireConfig(keepalive_s=7.0, keepalive_timeout_s=3.0)
  channel = dict(options.channel_options(cfg))
  server = dict(options.server_options(cfg))

  for name in ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms"):
    assert channel[name] == server[name]
  assert channel["grpc.keepalive_time_ms"] == 7000
  least_ms = server["grpc.http2.min_ping_interval_without_data_ms"]
  assert least_ms < channel["grpc.keepalive_time_ms"]
  assert channel["grpc.max_reconnect_backoff_ms"] == 1000


def test_a_learner_without_jax_loads_the_wire_without_a_warning():
  code = "import sys, ddiloco_jax.learner.client; print('jax' in sys.modules)"

  found = subprocess.run(
    [sys.executable, "-W", "error", "-c", code],
    capture_output=True,
    text=True,
    check=False,
  )

  assert (found.stdout, found.stderr) == ("False\n", "")


@pytest.mark.skipif(
  not importlib.util.find_spec("grpc_tools"), reason="needs grpcio-tools"
)
def test_the_generated_messages_are_those_of_the_proto_file(tmp_path):
  from grpc_tools import protoc

  out = tmp_path / "set.pb"
  code = protoc.main(
    [
      "protoc",
      f"--proto_path={ROOT / 'protos'}",
      f"--descriptor_set_out={out}",
      "ddiloco/v1/synchronizer.proto",
    ]
  )

  assert code == 0
  (fresh,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
  committed = descriptor_pb2.FileDescriptorProto()
  pb.DESCRIPTOR.CopyToProto(committed)
  for message in fresh.message_type:  # Generated code leaves these out.
    for field in [*message.field, *_nested_fields(message)]:
      field.ClearField("json_name")
  assert committed == fresh, "run scripts/make_protos.sh"


def _nested_fields(message):
  return (field for nested in message.nested_type for field in nested.field)


@pytest.mark.parametrize(
  "address",
  [
    *(
      "unix:/etc/passwd",
      "not an address",
      "h:0",
      "h:70000",
      "dns:///h:1",
      "h",
    ),
    *("0.0.0.0:1", "0:1", "[::]:1", "[::ffff:0.0.0.0]:1"),
  ],
)
def test_an_address_of_a_peer_is_a_host_and_a_port(address):
  hello = pb.Hello(learner_id="ada", nonce="n", state_address=address)

  with pytest.raises(ServiceError, match="state_address"):
    messages.upward_from_pb(pb.LearnerMessage(hello=hello))


@pytest.mark.parametrize("address", ["", "10.0.0.1:8470", "[::1]:1", "h-1.x:2"])
def test_an_address_of_a_peer_is_kept(address):
  hello = pb.Hello(learner_id="ada", nonce="n", state_address=address)

  found = messages.upward_from_pb(pb.LearnerMessage(hello=hello))

  assert found.state_address == address
