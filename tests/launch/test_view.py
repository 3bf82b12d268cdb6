"""How a run stands, as people see it."""

import io
import json
import math

import pytest
from rich.console import Console

from ddiloco_jax.launch import view
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb


@pytest.fixture
def status():
  return pb.Status(
    run_id="r",
    t=120,
    num_syncer_steps=240,
    phase="training",
    waiting_for="round 7 of fragment 3: 1 of 2 replies, learner 1 is silent",
    eta_s=75.0,
    num_live=2,
    num_training=2,
    num_eligible=1,
    num_contributing=2,
    step_s=0.5,
    learners=[
      pb.LearnerStatus(
        learner_id="10",
        incarnation=1,
        live=True,
        training=True,
        contributing=True,
        step=118,
        step_s=0.5,
        metrics={"loss": 3.25, "num_tokens": 1024.0},
      ),
      pb.LearnerStatus(
        learner_id="2", incarnation=2, note="lost: silent for 16 s"
      ),
    ],
    fragments=[
      pb.FragmentStatus(
        fragment=p, version=pb.Version(epoch=1, n=5), realised_h=23.0
      )
      for p in range(2)
    ],
    books=[
      pb.Book(name="reported", tokens=2e6),
      pb.Book(name="merged", tokens=1.9e6),
      pb.Book(name="pending", tokens=5e4),
      pb.Book(name="discarded/late", tokens=5e4),
      pb.Book(name="discarded/end_of_run", tokens=0),
    ],
    alarms=["slot_missed: fragment 3"],
  )


def printed(renderable) -> str:
  out = io.StringIO()
  Console(file=out, width=110).print(renderable)
  return out.getvalue()


def test_the_table_says_what_the_run_waits_for(status):
  text = printed(view.render(status))

  assert "t 120/240 training" in text
  assert "2 live, 2 training, 1 eligible, 2 contributing" in text
  assert "now: round 7 of fragment 3" in text
  assert "1 min 15 s to go" in text
  assert "alarm: slot_missed" in text


def test_the_table_has_a_row_for_every_learner_in_order(status):
  lines = printed(view.render(status)).splitlines()

  head = next(i for i, line in enumerate(lines) if line.startswith("learner"))
  rows = lines[head + 1 : head + 3]
  assert [row.split()[0] for row in rows] == ["2", "10"]
  assert "lost: silent for 16 s" in rows[0]
  assert {"118", "3.2500", "2,048"} <= set(rows[1].split())


def test_a_learner_that_has_not_joined_is_shown_with_its_process(status):
  text = printed(
    view.render(status, {"2": "killed", "10": "runs", "7": "runs"})
  )

  assert "killed" in text
  assert "has not joined yet" in text


def test_merges_and_tokens_are_told(status):
  text = printed(view.render(status))

  assert "10 merges over 2 fragments, realised H 23.0" in text
  assert "reported 2,000,000" in text
  assert "late 50,000" in text
  assert "end_of_run" not in text


def test_a_log_gets_one_line(status):
  line = view.one_line(status)

  assert "\n" not in line
  assert "t 120/240" in line
  assert "10: 3.250" in line
  assert "now: round 7" in line


def test_before_the_syncer_serves_there_is_something_to_see():
  assert "starts" in view.one_line(None)
  assert "starts" in printed(view.render(None, {"0": "not started"}))


@pytest.mark.parametrize("what", ["[red]", "[/]", "[bold"])
def test_words_of_a_learner_are_no_markup(status, what):
  learner = next(each for each in status.learners if each.learner_id == "2")
  learner.note = note = f"note {what} of a learner"

  assert note in printed(view.render(status))


def test_as_json_a_status_keeps_its_numbers_and_leaves_nothing_out(status):
  values = json.loads(json.dumps(view.to_dict(status)))

  assert values["t"] == 120
  assert values["sync_s"] == 0.0
  assert values["learners"][0]["metrics"]["loss"] == 3.25
  assert values["fragments"][1]["version"] == {"epoch": 1, "n": 5}
  assert values["alarms"] == ["slot_missed: fragment 3"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_as_json_a_number_that_is_not_finite_is_null(status, value):
  status.learners[0].metrics["loss"] = value
  status.sync_s = value
  status.books.add(name="merged", tokens=value)

  values = view.to_dict(status)

  json.dumps(values, allow_nan=False)
  assert values["learners"][0]["metrics"] == {"loss": None, "num_tokens": 1024}
  assert values["sync_s"] is None
  assert values["books"][-1] == {"name": "merged", "tokens": None}
