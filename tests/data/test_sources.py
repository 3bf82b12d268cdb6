import json
import sysconfig
from pathlib import Path

import grain
import pytest
from array_record.python import array_record_module
from hypothesis import given
from hypothesis import strategies as st

from ddiloco_jax.data import sources
from ddiloco_jax.data.sources import DataConfig


def read(path, **settings):
  return sources.read_documents(DataConfig(source=str(path), **settings))


def test_text_files_are_read_in_the_order_of_their_paths(tmp_path):
  for name in ("b", "a", "c"):
    (tmp_path / f"{name}.txt").write_text(name)

  assert read(tmp_path / "*.txt") == [b"a", b"b", b"c"]


def test_a_text_file_is_cut_at_line_ends(tmp_path):
  text = "".join(f"{i:03}\n" for i in range(100))
  (tmp_path / "a.txt").write_text(text)

  documents = read(tmp_path / "a.txt", piece_bytes=50)

  assert b"".join(documents) == text.encode()
  assert all(document.endswith(b"\n") for document in documents)
  assert [len(document) for document in documents] == [52] * 7 + [36]


def test_each_json_line_is_a_document(tmp_path):
  (tmp_path / "a.jsonl").write_text('{"text": "één"}\n\n{"text": "two"}\n')

  assert read(tmp_path / "a.jsonl") == ["één".encode(), b"two"]


def test_the_field_of_a_json_line_can_be_named(tmp_path):
  (tmp_path / "a.jsonl").write_text('{"body": "x", "text": "y"}\n')

  assert read(tmp_path / "a.jsonl", field="body") == [b"x"]


def test_each_record_of_an_array_record_is_a_document(tmp_path):
  path = tmp_path / "a.array_record"
  writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
  for text in (b"one", b"two", b"three"):
    writer.write(text)
  writer.close()
  assert len(grain.sources.ArrayRecordDataSource([str(path)])) == 3  # type: ignore

  assert read(path) == [b"one", b"two", b"three"]


def test_sources_are_joined_in_the_order_given(tmp_path):
  (tmp_path / "b.txt").write_text("b")
  (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')

  assert read(f"{tmp_path}/b.txt, {tmp_path}/a.jsonl") == [b"b", b"a"]


def test_the_standard_library_is_there_without_tests_and_site_packages():
  documents = read("stdlib")
  root = Path(sysconfig.get_paths()["stdlib"])

  assert (root / "dataclasses.py").read_bytes() in documents
  assert (root / "json" / "decoder.py").read_bytes() in documents
  assert Path(pytest.__file__).read_bytes() not in documents
  assert len(documents) > 300


def test_no_more_than_max_bytes_is_read(tmp_path):
  for name in "abc":
    (tmp_path / f"{name}.txt").write_text(name * 10)

  assert read(tmp_path / "*.txt", max_bytes=25) == [b"a" * 10, b"b" * 10]


@pytest.mark.parametrize(
  ("name", "text", "words"),
  [
    ("no.txt", None, ["matches no file", "--config.data.source"]),
    ("a.csv", "x", ["'.csv'", ".jsonl"]),
    ("a.txt", "", ["gives no document", "max_bytes"]),
    ("a.jsonl", '{"text": "x"}\n{"text"\n', ["a.jsonl:2", "not JSON"]),
    ("a.jsonl", '{"body": "x"}\n', ["a.jsonl:1", "'text'", "data.field"]),
    ("a.jsonl", "[1]\n", ["a.jsonl:1", "data.field"]),
    ("a.jsonl", '{"text": 5}\n', ["a.jsonl:1", "string"]),
  ],
)
def test_bad_input_says_what_and_where_and_how_to_mend_it(
  tmp_path, name, text, words
):
  if text is not None:
    (tmp_path / name).write_text(text)

  with pytest.raises(ValueError) as error:
    read(tmp_path / name)

  for word in words:
    assert word in str(error.value)


def test_an_empty_glob_is_refused_even_beside_others(tmp_path):
  (tmp_path / "a.txt").write_text("x")

  with pytest.raises(ValueError, match=r"\*\.jsonl' matches no file"):
    read(f"{tmp_path}/a.txt,{tmp_path}/*.jsonl")


documents = st.lists(st.binary(min_size=1, max_size=6), min_size=1, max_size=30)


@given(documents, st.integers(2, 10), st.randoms())
def test_held_out_documents_are_chosen_by_content_alone(texts, every, random):
  if len(set(texts)) < 2:
    with pytest.raises(ValueError, match="held_out_every"):
      sources.split_held_out(texts, every)
    return
  training, held_out = sources.split_held_out(texts, every)

  shuffled = list(texts)
  random.shuffle(shuffled)
  _, again = sources.split_held_out(shuffled, every)

  assert sorted(training + held_out) == sorted(texts)
  assert not set(training) & set(held_out)
  assert training
  assert sorted(again) == sorted(held_out)
  assert len(set(held_out)) == -(-len(set(texts)) // every)


def test_one_document_cannot_be_split():
  with pytest.raises(ValueError, match="at least 2 documents"):
    sources.split_held_out([b"a", b"a"], 20)


def test_the_digest_tells_where_documents_end():
  assert sources.digest([b"ab", b"c"]) != sources.digest([b"a", b"bc"])
  assert sources.digest([b"ab"]) == sources.digest([b"ab"])


def test_json_escapes_are_decoded(tmp_path):
  (tmp_path / "a.jsonl").write_text(json.dumps({"text": 'a"\n\t'}) + "\n")

  assert read(tmp_path / "a.jsonl") == [b'a"\n\t']
