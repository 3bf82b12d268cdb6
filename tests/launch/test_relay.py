import contextlib
import gc
import socket
import threading
import time

import pytest

from ddiloco_jax.launch.relay import Relay


class Echo:
  """Says again what it hears, to all who connect."""

  def __init__(self):
    self._listener = socket.create_server(("127.0.0.1", 0))
    self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
    threading.Thread(target=self._accept, daemon=True).start()

  def _accept(self):
    with contextlib.suppress(OSError):
      while True:
        end, _ = self._listener.accept()
        threading.Thread(target=self._echo, args=(end,), daemon=True).start()

  def _echo(self, end):
    with contextlib.suppress(OSError), end:
      while data := end.recv(1 << 16):
        end.sendall(data)

  def close(self):
    self._listener.close()


@pytest.fixture
def echo():
  with contextlib.closing(Echo()) as served:
    yield served


@pytest.fixture
def relay(echo):
  with contextlib.closing(Relay(echo.address)) as made:
    yield made


def connect(relay):
  host, port = relay.address.split(":")
  end = socket.create_connection((host, int(port)))
  end.settimeout(20.0)
  return end


def ask(end, data=b"x"):
  end.sendall(data)
  got = b""
  while len(got) < len(data):
    more = end.recv(1 << 16)
    assert more, "the connection ended"
    got += more
  return got


def is_silent(end, for_s=0.3):
  end.settimeout(for_s)
  try:
    data = end.recv(1)
  except TimeoutError:
    return True
  finally:
    end.settimeout(20.0)
  raise AssertionError(f"it said {data!r}")


def test_all_bytes_pass_in_order_both_ways(relay):
  data = bytes(range(256)) * 4000

  with connect(relay) as end:
    sender = threading.Thread(target=end.sendall, args=(data,))
    sender.start()
    got = b""
    while len(got) < len(data):
      got += end.recv(1 << 16)
    sender.join()

  assert got == data
  assert relay.num_connections == 1


def test_an_end_of_one_side_reaches_the_other(relay):
  with connect(relay) as end:
    ask(end)
    end.shutdown(socket.SHUT_WR)

    assert end.recv(1) == b""


def test_a_cut_ends_connections_and_the_next_one_passes(relay):
  with connect(relay) as end, connect(relay) as next_end:
    ask(end)
    ask(next_end)
    relay.cut()

    for each in (end, next_end):
      with contextlib.suppress(ConnectionResetError):
        assert each.recv(1) == b""
  with connect(relay) as end:
    assert ask(end) == b"x"
  assert relay.num_cuts == 2


def test_in_a_partition_nothing_passes_and_after_it_everything(relay):
  with connect(relay) as end:
    ask(end)
    relay.hold()
    end.sendall(b"held")
    assert is_silent(end)
    with connect(relay) as other:
      other.sendall(b"new")
      assert is_silent(other)
      relay.release()

      assert other.recv(3) == b"new"
    assert end.recv(4) == b"held"


def test_a_half_open_connection_stays_open_and_silent(relay):
  with connect(relay) as end:
    ask(end)
    relay.half_open()
    end.sendall(b"lost")

    assert is_silent(end)
    with connect(relay) as other:
      assert ask(other) == b"x"


def test_a_link_has_its_latency_each_way(relay):
  with connect(relay) as end:
    ask(end)
    relay.shape(latency_s=0.1)
    start = time.monotonic()
    ask(end)
    slow_s = time.monotonic() - start
    relay.shape()

    assert slow_s >= 0.2


def test_a_link_has_its_bandwidth_and_connections_share_it(relay):
  data = bytes(50_000)
  with connect(relay) as end, connect(relay) as other:
    ask(end)
    ask(other)
    relay.shape(bytes_per_s=200_000)
    start = time.monotonic()
    both = [threading.Thread(target=ask, args=(e, data)) for e in (end, other)]
    for each in both:
      each.start()
    for each in both:
      each.join()

    assert time.monotonic() - start >= 0.45  # 100 kB; the ways overlap.


def test_an_idle_connection_is_forgotten_in_silence(echo):
  with contextlib.closing(Relay(echo.address, forget_idle_s=0.2)) as relay:
    with connect(relay) as end:
      ask(end)
      threading.Event().wait(0.4)
      end.sendall(b"x")

      assert is_silent(end)
      assert relay.num_forgotten == 1
    with connect(relay) as end:
      assert ask(end) == b"x"


def test_nobody_there_ends_the_connection(relay):
  relay.redirect("127.0.0.1:9")

  with connect(relay) as end, contextlib.suppress(ConnectionResetError):
    assert end.recv(1) == b""


def test_whom_it_accepted_as_it_ended_is_closed_too(echo):
  for _ in range(20):
    relay, dialled = Relay(echo.address), []
    dialling = threading.Thread(target=dial, args=(relay.address, dialled))
    dialling.start()
    relay.close()
    dialling.join()
    for end in dialled:
      end.close()
    del relay
    gc.collect()  # An open socket would warn, which is an error here.


def dial(address, dialled):
  host, port = address.split(":")
  with contextlib.suppress(OSError):
    for _ in range(20):
      dialled.append(socket.create_connection((host, int(port)), timeout=5))
