"""Text to token ids: bytes by default, or a tokenizer file.

A byte is its own id, so the vocabulary is 256; id 0 (NUL, which text does not
contain) separates documents and fills the last window, where it has no weight.
(arXiv 2604.21428, Sec. 5.)
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

BYTES = "bytes"
# End-of-document tokens by the names under which tokenizer files have them.
_SEPARATORS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
  """How text becomes ids.

  Attributes:
    vocab_size: Ids are below this.
    separator: The id between documents; also the padding, without weight.
    encode: UTF-8 documents to their ids, in order.
  """

  vocab_size: int
  separator: int
  encode: Callable[[Sequence[bytes]], list[np.ndarray]]


def make_tokenizer(name: str) -> Tokenizer:
  """The tokenizer of a name.

  Args:
    name: "bytes", or a path to a tokenizers .json or sentencepiece .model
      file. Where a file has no end-of-document token, the separator is one id
      more, the last one.

  Raises:
    ValueError: a file that is missing, unreadable or of another kind.
  """
  if name == BYTES:
    return Tokenizer(vocab_size=256, separator=0, encode=_encode_bytes)
  makers = {".json": _tokenizers_file, ".model": _sentencepiece_file}
  suffix = Path(name).suffix
  if suffix not in makers or not Path(name).is_file():
    fault = "no such file" if suffix in makers else f"suffix {suffix!r}"
    raise ValueError(
      f"data.tokenizer={name!r}: {fault}; it must be {BYTES!r}, or an existing "
      "tokenizers .json or sentencepiece .model file: correct "
      "--config.data.tokenizer."
    )
  return makers[suffix](name)


def join(tokenizer: Tokenizer, documents: Sequence[bytes]) -> np.ndarray:
  """One stream of ids: a separator before each document and after the last.

  Returns:
    ids [num_tokens] of the smallest unsigned type that holds the vocabulary.
  """
  dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
  separator = np.array([tokenizer.separator], dtype)
  parts = [separator]
  for ids in tokenizer.encode(documents):
    parts += [ids.astype(dtype, copy=False), separator]
  return np.concatenate(parts)


def _encode_bytes(documents: Sequence[bytes]) -> list[np.ndarray]:
  return [np.frombuffer(document, np.uint8) for document in documents]


def _tokenizers_file(path: str) -> Tokenizer:
  import tokenizers  # Deferred: byte tokens do not need it.

  try:
    model = tokenizers.Tokenizer.from_file(path)
  except Exception as error:  # The library raises bare Exception.
    raise _unreadable(path, "tokenizers .json", error) from error
  ids = (model.token_to_id(token) for token in _SEPARATORS)
  separator = next((i for i in ids if i is not None), model.get_vocab_size())

  def encode(documents: Sequence[bytes]) -> list[np.ndarray]:
    texts = [document.decode(errors="replace") for document in documents]
    encodings = model.encode_batch(texts, add_special_tokens=False)
    return [np.array(encoding.ids, np.int64) for encoding in encodings]

  size = max(model.get_vocab_size(), separator + 1)
  return Tokenizer(vocab_size=size, separator=separator, encode=encode)


def _sentencepiece_file(path: str) -> Tokenizer:
  import sentencepiece  # Deferred: byte tokens do not need it.

  try:
    model = sentencepiece.SentencePieceProcessor(model_file=path)
  except RuntimeError as error:
    raise _unreadable(path, "sentencepiece .model", error) from error
  size = model.vocab_size()
  separator = model.eos_id() if model.eos_id() >= 0 else size

  def encode(documents: Sequence[bytes]) -> list[np.ndarray]:
    texts = [document.decode(errors="replace") for document in documents]
    return [np.array(ids, np.int64) for ids in model.encode(texts)]

  return Tokenizer(
    vocab_size=max(size, separator + 1), separator=separator, encode=encode
  )


def _unreadable(path: str, kind: str, error: Exception) -> ValueError:
  return ValueError(
    f"data.tokenizer={path!r} cannot be read as a {kind} file ({error}); give "
    "one that the library itself has saved."
  )
