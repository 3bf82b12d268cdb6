import itertools
import math
import threading
import time

import numpy as np
import pytest

from ddiloco_jax.data import stream
from ddiloco_jax.data.sources import DataConfig

B, T = 4, 16


@pytest.fixture
def cfg(tmp_path):
  text = "".join(f"line {i} of a small text\n" for i in range(2000))
  (tmp_path / "a.txt").write_text(text)
  return DataConfig(source=str(tmp_path / "a.txt"), piece_bytes=512)


def make(cfg, seed=0, shard=0, num_shards=3, batch_size=B):
  return stream.make_batches(cfg, seed, shard, num_shards, batch_size, T)


def num_windows(cfg):
  return -(-(len(stream.load_corpus(cfg).training) - 1) // T)


def read_epoch(batches, in_shard):
  """Ids of the first epoch, whose end need not be a batch's end."""
  count = -(-in_shard // B)
  ids = np.concatenate([batches.example_ids(i) for i in range(count)])
  return ids[:in_shard]


def test_a_batch_is_a_function_of_seed_shard_and_position(cfg):
  first = make(cfg)
  forwards = [first(i) for i in range(6)]

  stream.load_corpus.cache_clear()
  again = make(cfg)
  backwards = [again(i) for i in reversed(range(6))]

  for a, b in zip(forwards, reversed(backwards)):
    for name in ("inputs", "targets", "weights"):
      np.testing.assert_array_equal(a[name], b[name])


def test_a_batch_has_static_shapes_and_types(cfg):
  batch = make(cfg)(0)

  assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {
    "inputs": ((B, T), np.int32),
    "targets": ((B, T), np.int32),
    "weights": ((B, T), np.float32),
  }
  np.testing.assert_array_equal(
    batch["inputs"][:, 1:], batch["targets"][:, :-1]
  )


def test_a_batch_holds_the_windows_that_its_ids_name(cfg):
  batches = make(cfg, shard=1)
  text = stream.load_corpus(cfg).training

  for row, i in enumerate(batches.example_ids(5)):
    expected = text[i * T : i * T + T]
    np.testing.assert_array_equal(batches(5)["inputs"][row], expected)


def test_shards_are_disjoint_and_together_read_everything_once(cfg):
  total = num_windows(cfg)
  read = []
  for shard in range(3):
    in_shard = len(range(shard, total, 3))
    read.append(read_epoch(make(cfg, seed=shard, shard=shard), in_shard))

  everything = np.sort(np.concatenate(read))
  np.testing.assert_array_equal(everything, np.arange(total))


def test_readers_with_different_batch_sizes_read_disjoint_ids(cfg):
  # [D3]
  # Whatever its devices, a learner of another batch size has its own shard.
  seen = [
    {
      int(i)
      for position in range(40)
      for i in make(cfg, shard=s, batch_size=b).example_ids(position)
    }
    for s, b in enumerate((2, 4, 8))
  ]

  assert not seen[0] & seen[1]
  assert not seen[0] & seen[2]
  assert not seen[1] & seen[2]


def test_each_epoch_of_a_shard_is_a_new_order_of_the_same_examples(cfg):
  in_shard = len(range(0, num_windows(cfg), 3))
  batches = make(cfg, batch_size=1)
  epochs = [
    [int(batches.example_ids(e * in_shard + i)[0]) for i in range(in_shard)]
    for e in range(3)
  ]

  assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
  assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
  assert epochs[0] != sorted(epochs[0])


def test_another_seed_is_another_order_of_the_same_shard(cfg):
  in_shard = len(range(0, num_windows(cfg), 3))
  one = read_epoch(make(cfg, seed=0), in_shard)
  two = read_epoch(make(cfg, seed=1), in_shard)

  assert list(one) != list(two)
  assert sorted(one) == sorted(two)


def test_neighbouring_seeds_do_not_share_epochs(cfg):
  # grain draws epoch e of seed s with s + e: unhashed, these would be equal.
  in_shard = len(range(0, num_windows(cfg), 3))
  later = make(cfg, seed=0, batch_size=1)
  second = [int(later.example_ids(in_shard + i)[0]) for i in range(in_shard)]

  first = read_epoch(make(cfg, seed=1), in_shard)

  assert second != [int(i) for i in first]


def test_two_resumes_within_an_epoch_keep_the_uninterrupted_order(cfg):
  whole = [list(make(cfg).example_ids(i)) for i in range(30)]

  resumed = []
  for start, stop in ((0, 7), (7, 18), (18, 30)):
    stream.load_corpus.cache_clear()  # As a new process would find it.
    batches = make(cfg)
    resumed += [list(batches.example_ids(i)) for i in range(start, stop)]

  assert resumed == whole


def test_the_order_is_the_one_that_old_checkpoints_count_on(cfg):
  # Written down once: a grain that shuffles otherwise breaks every resume.
  batches = make(cfg, shard=2)

  assert num_windows(cfg) == 3023
  assert [list(batches.example_ids(i)) for i in (0, 1, 400)] == [
    [2924, 1067, 2948, 2954],
    [1589, 2291, 1979, 2903],
    [2267, 500, 371, 1733],
  ]


def test_every_training_token_is_a_target_once(cfg):
  corpus = stream.load_corpus(cfg)
  total = num_windows(cfg)
  batches = make(cfg, num_shards=1, batch_size=1)

  weight = sum(batches(i)["weights"].sum() for i in range(total))

  assert weight == len(corpus.training) - 1


def test_padding_has_no_weight_and_is_the_separator(cfg):
  corpus = stream.load_corpus(cfg)
  batches = make(cfg, num_shards=1, batch_size=1)
  last = next(
    i for i in range(9999) if batches.example_ids(i)[0] == num_windows(cfg) - 1
  )

  batch = batches(last)

  real = (len(corpus.training) - 1) % T
  assert 0 < real < T
  np.testing.assert_array_equal(
    batch["weights"][0], [1] * real + [0] * (T - real)
  )
  assert set(batch["targets"][0, real:]) == {corpus.separator}


def test_a_finite_shard_is_exhausted_after_its_epochs(cfg):
  in_shard = len(range(0, num_windows(cfg), 3))
  finite = DataConfig(
    source=cfg.source, piece_bytes=cfg.piece_bytes, num_epochs=2
  )
  batches = make(finite)

  assert batches.num_batches == 2 * in_shard // B
  batches(batches.num_batches - 1)
  with pytest.raises(stream.Exhausted, match="num_epochs"):
    batches(batches.num_batches)


def test_an_endless_shard_goes_on(cfg):
  batches = make(cfg)

  assert batches.num_batches is None
  assert batches(10**9)["inputs"].shape == (B, T)


def test_a_negative_position_is_refused(cfg):
  with pytest.raises(ValueError, match="position=-1"):
    make(cfg)(-1)


def test_a_shard_outside_its_range_is_refused(cfg):
  with pytest.raises(ValueError, match=r"shard=3 of num_shards=3"):
    make(cfg, shard=3)


def test_too_little_text_for_a_batch_says_what_there_is(cfg):
  with pytest.raises(ValueError, match=r"num_shards") as error:
    make(cfg, num_shards=3000)

  assert "only 2 windows of 16" in str(error.value)


def test_too_little_text_for_one_window_says_so(tmp_path):
  (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"text": "cd"}\n')

  with pytest.raises(ValueError, match=r"4 training tokens do not fill"):
    make(DataConfig(source=str(tmp_path / "a.jsonl")), num_shards=1)


def test_held_out_windows_are_the_same_for_everybody(cfg):
  one = stream.held_out(cfg, T, 10)
  stream.load_corpus.cache_clear()
  two = stream.held_out(cfg, T, 10)

  assert len(one) == len(two) == 2
  for a, b in zip(one, two):
    np.testing.assert_array_equal(a["inputs"], b["inputs"])
    np.testing.assert_array_equal(a["weights"], b["weights"])


def test_held_out_batches_count_each_window_once(cfg):
  batches = stream.held_out(cfg, T, 10, batch_size=8)
  rows = [
    row.tobytes()
    for batch in batches
    for row, weight in zip(batch["inputs"], batch["weights"].sum(axis=1))
    if weight
  ]

  assert [batch["inputs"].shape for batch in batches] == [(8, T), (8, T)]
  assert len(rows) == len(set(rows)) == 10


def test_held_out_takes_what_there_is(cfg):
  length = len(stream.load_corpus(cfg).held_out) - 1

  batches = stream.held_out(cfg, T, 10**6)

  assert sum(batch["weights"].sum() for batch in batches) == length


def test_held_out_documents_are_never_trained_on(cfg):
  corpus = stream.load_corpus(cfg)
  training, held_out = corpus.training.tobytes(), corpus.held_out.tobytes()

  documents = [d for d in held_out.split(b"\0") if d]

  assert len(documents) >= 4
  assert all(document not in training for document in documents)
  assert len(training) > 10 * len(held_out)


def test_bigram_entropy_equals_a_count_by_hand(tmp_path):
  # Held out is one of two documents; both are "abab...", so which is no matter.
  lines = "".join(f'{{"text": "{"ab" * 50}{end}"}}\n' for end in ("", "a"))
  (tmp_path / "a.jsonl").write_text(lines)
  cfg = DataConfig(source=str(tmp_path / "a.jsonl"))
  ids = list(stream.load_corpus(cfg).held_out)

  pairs = list(itertools.pairwise(ids))
  expected = 0.0
  for a, b in pairs:
    after_a = [y for x, y in pairs if x == a]
    expected -= math.log(after_a.count(b) / len(after_a))

  assert stream.bigram_entropy(cfg) == pytest.approx(
    expected / len(pairs), rel=1e-12
  )


def test_bigram_entropy_of_certain_successors_is_zero(tmp_path):
  (tmp_path / "a.jsonl").write_text('{"text": "abcdef"}\n{"text": "ghijk"}\n')

  cfg = DataConfig(source=str(tmp_path / "a.jsonl"))

  assert stream.bigram_entropy(cfg) == pytest.approx(0, abs=1e-12)


def test_the_corpus_says_what_it_was_made_of(cfg, tmp_path):
  before = stream.load_corpus(cfg).digest
  (tmp_path / "b.txt").write_text("more\n")
  both = DataConfig(source=str(tmp_path / "*.txt"), piece_bytes=512)

  assert len(before) == 64
  assert stream.load_corpus(both).digest != before


def test_streams_cannot_be_written(cfg):
  with pytest.raises(ValueError, match="read-only"):
    stream.load_corpus(cfg).training[0] = 1


def test_threads_read_one_shard_at_once(cfg):
  batches = make(cfg)
  expected = [batches(i)["inputs"] for i in range(50)]
  wrong = []

  def read():
    for i, inputs in enumerate(expected):
      if not np.array_equal(batches(i)["inputs"], inputs):
        wrong.append(i)

  threads = [threading.Thread(target=read) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()

  assert not wrong


def test_the_standard_library_is_read_in_time():
  cfg = DataConfig()
  stream.load_corpus.cache_clear()

  start = time.perf_counter()
  corpus = stream.load_corpus(cfg)
  seconds = time.perf_counter() - start

  assert seconds < 5  # Measured 0.25 s; a loaded machine gets some room.
  assert len(corpus.training) > 5_000_000
  assert stream.vocab_size(cfg) == corpus.vocab_size == 256
  assert 1.5 < stream.bigram_entropy(cfg) < 3.5
