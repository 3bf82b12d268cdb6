import subprocess
import sys

import numpy as np
import pytest
import sentencepiece
import tokenizers

from ddiloco_jax.data import tokens

TEXTS = [f"the quick brown fox {i} jumps over it" for i in range(200)]


@pytest.fixture
def tokenizers_file(tmp_path):
  model = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
  model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=100,
    special_tokens=["<unk>", "<|endoftext|>"],
    show_progress=False,
  )
  model.train_from_iterator(TEXTS, trainer)
  model.save(str(tmp_path / "t.json"))
  return str(tmp_path / "t.json")


@pytest.fixture
def sentencepiece_file(tmp_path):
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(TEXTS),
    model_prefix=str(tmp_path / "t"),
    vocab_size=60,
    hard_vocab_limit=False,
    minloglevel=2,
  )
  return str(tmp_path / "t.model")


def test_a_byte_is_its_own_id():
  tokenizer = tokens.make_tokenizer("bytes")

  ids = tokens.join(tokenizer, ["aé".encode(), b"b"])

  assert list(ids) == [0, 97, 195, 169, 0, 98, 0]
  assert ids.dtype == np.uint8
  assert tokenizer.vocab_size == 256


def test_a_tokenizers_file_is_read(tokenizers_file):
  tokenizer = tokens.make_tokenizer(tokenizers_file)
  model = tokenizers.Tokenizer.from_file(tokenizers_file)

  ids = tokens.join(tokenizer, [b"the quick fox", b"over it"])

  end = model.token_to_id("<|endoftext|>")
  assert tokenizer.separator == end
  parts = [model.encode(text).ids for text in ("the quick fox", "over it")]
  assert list(ids) == [end, *parts[0], end, *parts[1], end]
  assert tokenizer.vocab_size == model.get_vocab_size()


def test_a_tokenizer_without_an_end_token_gets_one_more_id(tmp_path):
  model = tokenizers.Tokenizer(
    tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
  )
  model.save(str(tmp_path / "t.json"))

  tokenizer = tokens.make_tokenizer(str(tmp_path / "t.json"))

  assert (tokenizer.separator, tokenizer.vocab_size) == (2, 3)


def test_a_sentencepiece_file_is_read(sentencepiece_file):
  tokenizer = tokens.make_tokenizer(sentencepiece_file)
  model = sentencepiece.SentencePieceProcessor(model_file=sentencepiece_file)

  ids = tokens.join(tokenizer, [b"the quick fox"])

  end = model.eos_id()
  assert list(ids) == [end, *model.encode("the quick fox"), end]
  assert tokenizer.vocab_size == model.vocab_size() > max(ids)


@pytest.mark.parametrize(
  ("name", "content", "words"),
  [
    ("no.json", None, ["no such file", "--config.data.tokenizer"]),
    ("t.bin", "x", ["'.bin'", ".model"]),
    ("t.json", "{}", ["cannot be read", "tokenizers .json"]),
    ("t.model", "no model", ["cannot be read", "sentencepiece .model"]),
  ],
)
def test_a_bad_tokenizer_file_says_what_is_wrong(
  tmp_path, name, content, words
):
  if content is not None:
    (tmp_path / name).write_text(content)

  with pytest.raises(ValueError) as error:
    tokens.make_tokenizer(str(tmp_path / name))

  for word in words:
    assert word in str(error.value)


def test_byte_tokens_need_no_tokenizer_library():
  code = (
    "import sys; from ddiloco_jax.data import tokens;"
    "tokens.make_tokenizer('bytes');"
    "print({'jax', 'grain', 'tokenizers'} & set(sys.modules))"
  )
  out = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )

  assert out.stdout.strip() == "set()"
