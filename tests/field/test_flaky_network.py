"""Answers that are lost, slots that are missed: what is done twice counts once."""

import contextlib
import threading
import time

import numpy as np
import pytest

from ddiloco_jax.launch.relay import Relay
from ddiloco_jax.learner.client import Client
from ddiloco_jax.learner.exchange import Exchange
from ddiloco_jax.learner.link import Link
from ddiloco_jax.protocol import events, status, tape
from ddiloco_jax.protocol.events import ZERO, Counts
from ddiloco_jax.wire import options
from tests.support.over_grpc import (
  Held,
  LoopLearner,
  learners,
  paced,
  served_run,
  settings,
)
from tests.support.served import wait_for

LR = 0.05


class LosingAnswers:
  """A client whose first pushes arrive, and whose answers do not.

  Args:
    client: Calls through the proxy.
    proxy: Cut when the syncer has taken the reply.
    is_taken: Whether the syncer has taken the reply with this header.
    times: Of how many replies.
  """

  def __init__(self, client, proxy, is_taken, times):
    self._client = client
    self._proxy = proxy
    self._is_taken = is_taken
    self.num_left = times
    self._lost = set()

  def __getattr__(self, name):
    return getattr(self._client, name)

  def push(self, header, chunks):
    name = header.fragment, header.round, header.attempt
    if name in self._lost or not self.num_left:
      return self._client.push(header, chunks)
    self._lost.add(name)
    self.num_left -= 1
    self._proxy.hold_answers()
    threading.Thread(target=self._cut, args=[header], daemon=True).start()
    return self._client.push(header, chunks)

  def _cut(self, header):
    wait_for(lambda: self._is_taken(header))
    self._proxy.cut()


def asking(run):
  """Tells of a header whether its reply is in the syncer's books."""

  def is_taken(header):
    account = run.syncer.snapshot()[1].accounts["ada"][header.fragment]
    return any(
      (answer.round, answer.attempt) == (header.round, header.attempt)
      for answer in account.answers
    )

  return is_taken


@pytest.mark.parametrize("quorum", [1, 2])
def test_a_push_whose_answer_was_lost_is_merged_once(tmp_path, quorum):
  # [N5] The learner asks again, on a new connection.
  cfg = settings(quorum=quorum, num_syncer_steps=60)
  with served_run(cfg, tmp_path / "run") as run:
    proxy = Relay(run.address)
    lossy: list[LosingAnswers] = []

    def wrap(client):
      lossy.append(LosingAnswers(client, proxy, asking(run), times=3))
      return lossy[0]

    ada = LoopLearner(
      proxy.address, "ada", paced(0.04, lr=LR), wrap=wrap, reconnect_max_s=0.2
    )
    others = [
      LoopLearner(run.address, f"o{i}", paced(0.04, lr=LR))
      for i in range(quorum - 1)
    ]
    with learners(ada, *others):
      finished = run.wait(60.0)
      ada.end()
    proxy.close()
    books = {book.name: book.tokens for book in run.status().books}
    layout = run.syncer.get_run().layout

  assert finished.exit_code == 0
  assert lossy[0].num_left == 0
  assert proxy.num_cuts >= 3
  taken, included, duplicates = receipts(tmp_path / "run" / "tape.jsonl")
  assert duplicates >= 3
  assert len(included) == len(set(included))
  # Tokens: those of the included replies, each once; a mean over fragments, by
  # their sizes.
  sizes = [layout.num_params(p) for p in range(layout.num_fragments)]
  merged = sum(taken[key].tokens * sizes[key.fragment] for key in included)
  assert books["merged"] == pytest.approx(merged / sum(sizes))
  discarded = sum(v for k, v in books.items() if k.startswith("discarded"))
  assert books["reported"] == pytest.approx(
    books["merged"] + books["pending"] + discarded
  )


def test_a_push_whose_answer_was_lost_moves_theta_once(tmp_path):
  # [N5] Alone, with outer SGD of rate 1: Theta is the learner's own copy.
  cfg = settings(quorum=1)
  with served_run(cfg, tmp_path / "run") as run:
    proxy = Relay(run.address)
    ada = LoopLearner(
      proxy.address,
      "ada",
      paced(0.04, lr=LR),
      wrap=lambda client: LosingAnswers(client, proxy, asking(run), times=1),
    )
    with learners(ada):
      wait_for(lambda: proxy.num_cuts)
      wait_for(lambda: min(f.version.n for f in run.status().fragments) >= 2)
    proxy.close()
    kept = list(replayed_theta(run))

  for got, want in kept:
    np.testing.assert_allclose(got, want, rtol=1e-5)


def replayed_theta(run):
  """(Theta, what the included counts imply) for each fragment."""
  tensors, state = run.syncer.snapshot()
  steps = {0: 0, 1: 0}
  taken, included, _ = receipts(run.directory / "tape.jsonl")
  for key in included:
    steps[key.fragment] += taken[key].steps
  assert state.fragments[0].version.n == sum(k.fragment == 0 for k in included)
  for p, part in enumerate(tensors.theta):
    for array in part.values():
      yield array, np.full_like(array, 1 - (1 - LR) ** steps[p])


def receipts(path):
  """(reply -> counts, replies as merged, number of duplicates)."""
  taken, included, duplicates = {}, [], 0
  for line in tape.Reader(path).lines():
    event = line.event
    if isinstance(event, events.Replied):
      key = events.ReplyKey(
        event.learner,
        event.incarnation,
        event.fragment,
        event.round,
        event.attempt,
      )
      taken.setdefault(key, event.counts)
    for effect in line.effects:
      if isinstance(effect, events.Merge):
        included += [item.key for item in effect.inputs]
      if isinstance(effect, events.Resolved):
        duplicates += effect.outcome == events.Outcome.DUPLICATE
  return taken, included, duplicates


def test_after_missed_slots_and_a_given_up_round_merges_go_on(tmp_path):
  # [N17] Nobody can push for a while.
  cfg = settings(quorum=2, min_deadline_s=0.5, max_open_rounds=1)
  gate = threading.Event()
  gate.set()
  with served_run(cfg, tmp_path / "run") as run:

    def versions():
      return [f.version.n for f in run.status().fragments]

    pair = [
      LoopLearner(
        run.address, name, paced(0.03), wrap=lambda client: Held(client, gate)
      )
      for name in ("ada", "bob")
    ]
    with learners(*pair):
      wait_for(lambda: min(versions()) >= 3)
      gate.clear()
      wait_for(lambda: run.status().counters.get("slot_missed", 0) >= 2)
      wait_for(lambda: has_given_up(run.directory / "tape.jsonl"))
      gate.set()
      stuck = versions()
      wait_for(lambda: min(versions()) >= max(stuck) + 4)
      run.request_stop()
      finished = run.wait(30.0)

  assert finished.exit_code == 0
  merges = [e for e in effects(run.directory / "tape.jsonl", events.Merge)]
  for p in range(len(stuck)):
    numbers = [m.version.n for m in merges if m.fragment == p]
    assert numbers == list(range(1, len(numbers) + 1))
  late = [m for m in merges if m.version.n > max(stuck) + 1]
  assert {len(m.inputs) for m in late if m.version.n <= max(stuck) + 4} == {2}


def test_two_missed_publications_do_not_stop_the_next_round(tmp_path):
  # [N17] Everybody's base is two versions old, and the next round merges.
  cfg = settings(quorum=2)
  gate = threading.Event()
  gate.set()

  class NoFetch(Held):
    def push(self, header, chunks):
      return self._client.push(header, chunks)

    def fetch(self, session, fragment, n, exact):
      self._gate.wait(30.0)
      return self._client.fetch(session, fragment, n, exact)

  with served_run(cfg, tmp_path / "run") as run:

    def versions():
      return [f.version.n for f in run.status().fragments]

    pair = [
      LoopLearner(
        run.address,
        name,
        paced(0.03),
        wrap=lambda client: NoFetch(client, gate),
      )
      for name in ("ada", "bob")
    ]
    with learners(*pair):
      wait_for(lambda: min(versions()) >= 2)
      gate.clear()
      start = versions()
      # Both have learned something, and have not applied what came of it.
      threading.Event().wait(1.0)
      stuck = versions()
      gate.set()
      wait_for(lambda: min(versions()) >= max(stuck) + 3)
      run.request_stop()
      run.wait()

  assert max(n - m for n, m in zip(stuck, start)) <= 2
  assert all(len(m.inputs) == 2 for m in merges_before_the_end(run.directory))


def effects(path, kind):
  return [
    effect
    for line in tape.Reader(path).lines()
    for effect in line.effects
    if isinstance(effect, kind)
  ]


def merges_before_the_end(directory):
  lines = tape.Reader(directory / "tape.jsonl").lines()
  return [
    effect
    for line in lines
    if line.state.end is None
    for effect in line.effects
    if isinstance(effect, events.Merge)
  ]


def has_given_up(path):
  return effects(path, events.GiveUp)


@contextlib.contextmanager
def linked(tmp_path, **wire):
  """A run, a relay to it, and the link and client of "ada" through that relay."""
  with (
    served_run(settings(quorum=1, lease_s=60.0), tmp_path / "run") as run,
    contextlib.closing(Relay(run.address)) as proxy,
    contextlib.closing(
      Client(proxy.address, options.WireConfig(**wire), learner="ada")
    ) as client,
  ):
    link = Link(client, "ada")
    link.start()
    yield run, proxy, link, client
    link.leave("the test is over")


@contextlib.contextmanager
def lost_words(tmp_path):
  """As `linked`; it adopted and took a step, and has news of every fragment.

  What it says within is lost: nothing passes, and at the end the link is cut.
  """
  with linked(tmp_path) as (run, proxy, link, _):
    for publication in link.published():
      link.adopted(publication, 0, ZERO)
    report(link, 1)
    wait_for(lambda: account_of(run, "ada").reported == Counts(1, 100))
    with learners(LoopLearner(run.address, "bob", paced(0.02, lr=LR))):
      news = {}
      wait_for(lambda: gather(link, news) == 2)
    proxy.hold()
    yield link, list(news.values())
    proxy.cut()
    proxy.release()
    wait_for(lambda: account_of(run, "ada").reported == Counts(4, 400))
    account = account_of(run, "ada")
    assert account.discarded == (("overwritten_in_flight", Counts(3, 300)),)
    assert account.pending == Counts(1, 100)


def gather(link, news):
  news |= {
    publication.fragment: publication for publication in link.published()
  }
  return len(news)


def report(link, step):
  """Of one step since the last adoption."""
  link.report(events.Reported(step=step, counts=(Counts(1, 100),) * 2))


def account_of(run, name):
  return status.account_totals(run.syncer.state, name, 0)


def test_what_an_adoption_resets_is_booked_though_its_message_is_lost(tmp_path):
  # Three steps, of which one was reported.
  with lost_words(tmp_path) as (link, news):
    for publication in news:
      link.adopted(publication, 3, Counts(3, 300))
    report(link, 4)


def test_a_hello_is_of_one_moment_of_the_loop(tmp_path, monkeypatch):
  # The loop would adopt between what Hello says of bases and of adoptions.
  whole = Exchange.all_adoptions
  with lost_words(tmp_path) as (link, news):

    def adopt():
      for publication in news:
        link.adopted(publication, 3, Counts(3, 300))
      report(link, 4)

    loop = threading.Thread(target=adopt)

    def all_adoptions(self):
      if not loop.ident:
        loop.start()
        loop.join(0.5)
      return whole(self)

    monkeypatch.setattr(Exchange, "all_adoptions", all_adoptions)
  loop.join()


def test_an_idle_learner_is_not_thrown_off_for_its_pings(tmp_path):
  # [T3] It pings dozens of times and calls nothing on its bulk connection; a
  # server that minds closes it after the third time.
  with linked(tmp_path, keepalive_s=0.2) as (_, proxy, link, client):
    session = link.welcome.session
    before = proxy.num_connections

    time.sleep(6.0)
    client.fetch(session, 0, 0, False)

    assert proxy.num_connections == before == 2  # Control and bulk.
