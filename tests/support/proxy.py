"""A TCP proxy that cuts connections when a test says so."""

import contextlib
import socket
import threading
from collections.abc import Callable


class Proxy:
  """Forwards connections to an address, and counts the bytes.

  Args:
    target: HOST:PORT to forward to.

  Attributes:
    address: What clients are given.
    num_connections: Connections that were forwarded.
    num_cuts: Those of them that were cut.
    bytes_up: What clients have sent.
  """

  def __init__(self, target: str):
    self.redirect(target)
    self._listener = socket.create_server(("127.0.0.1", 0))
    self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
    self.num_connections = self.num_cuts = self.bytes_up = 0
    self._lock = threading.Lock()
    self._pairs: list[tuple[socket.socket, socket.socket]] = []
    self._drop_answers = False
    self._closed = False
    threading.Thread(target=self._accept, daemon=True).start()

  def redirect(self, target: str) -> None:
    """Connections from now on are forwarded to another address."""
    host, _, port = target.rpartition(":")
    self._target = (host, int(port))

  def hold_answers(self) -> None:
    """From now on nothing that the target says arrives."""
    self._drop_answers = True

  def cut(self) -> None:
    """Cuts every connection; the next ones are forwarded as before."""
    with self._lock:
      pairs, self._pairs = self._pairs, []
    for pair in pairs:
      for end in pair:
        _close(end)
    self._drop_answers = False  # Not before: an answer may be on its way.
    self.num_cuts += len(pairs)

  def close(self) -> None:
    self._closed = True
    _close(self._listener)
    self.cut()

  def _accept(self) -> None:
    while not self._closed:
      try:
        client, _ = self._listener.accept()
      except OSError:
        return
      try:
        target = socket.create_connection(self._target)
      except OSError:
        _close(client)  # Nobody is there.
        continue
      with self._lock:
        self._pairs.append((client, target))
        self.num_connections += 1
      self._start(client, target, lambda: False)
      self._start(target, client, lambda: self._drop_answers)

  def _start(
    self, source: socket.socket, to: socket.socket, drop: Callable[[], bool]
  ) -> None:
    threading.Thread(
      target=self._forward, args=(source, to, drop), daemon=True
    ).start()

  def _forward(
    self, source: socket.socket, to: socket.socket, drop: Callable[[], bool]
  ) -> None:
    try:
      while data := source.recv(1 << 16):
        if to.getpeername() == self._target:
          self.bytes_up += len(data)
        if not drop():
          to.sendall(data)
    except OSError:
      pass  # It was cut.
    finally:
      _close(source)
      _close(to)


def _close(end: socket.socket) -> None:
  with contextlib.suppress(OSError):  # Not connected any more.
    end.shutdown(socket.SHUT_RDWR)
  end.close()
