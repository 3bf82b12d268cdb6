"""A TCP relay between a learner and its syncer that can be a bad network.

It forwards bytes and knows nothing of what they mean. All its connections live
on one thread; its methods may be called from any other.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable

_CHUNK_BYTES = 1 << 16
_TURNS = 5  # At its end: what was accepted just now begins, and is cut.
_QUEUED = 64  # Chunks on their way, per direction: 4 MiB.


class _Way:
  """One direction of a relay: open or not, and when its line is free again."""

  def __init__(self):
    self.open = asyncio.Event()
    self.open.set()
    self.drops = False
    self.free_at = 0.0


class _Connection:
  """A client's connection and the relay's own to the target."""

  def __init__(self, client: asyncio.StreamWriter):
    self.client = client
    self.target: asyncio.StreamWriter | None = None
    self.moved_at = time.monotonic()
    self.is_forgotten = False  # Both ends stay open, and nothing passes.


class Relay:
  """Forwards connections to an address; see its methods for the weather.

  Args:
    target: HOST:PORT to forward to; may be given later, by `redirect`.
    forget_idle_s: A connection on which no byte moved for so long is forgotten
      in silence, as some firewalls do; 0: never.

  Attributes:
    address: What clients are given.
    num_connections: Connections that were forwarded.
    num_cuts: Those of them that were cut.
    num_forgotten: Those that were forgotten.
  """

  def __init__(self, target: str = "", forget_idle_s: float = 0.0):
    self.address = ""
    self.num_connections = self.num_cuts = self.num_forgotten = 0
    self._target = target
    self._forget_idle_s = forget_idle_s
    self._latency_s = 0.0
    self._bytes_per_s = 0
    self._connections: set[_Connection] = set()
    self._loop = asyncio.new_event_loop()
    self._up, self._down = _Way(), _Way()
    started = threading.Event()
    self._thread = threading.Thread(
      target=self._serve, args=(started,), daemon=True, name="relay"
    )
    self._thread.start()
    started.wait()

  # --- the weather -------------------------------------------------------------

  def redirect(self, target: str) -> None:
    """Connections from now on are forwarded to another address."""
    self._target = target

  def shape(self, latency_s: float = 0.0, bytes_per_s: int = 0) -> None:
    """Sets latency and bandwidth of each way; 0 for none of it."""
    self._latency_s, self._bytes_per_s = latency_s, bytes_per_s

  def hold(self) -> None:
    """A partition: nothing passes, and nobody is told.

    What is on its way is delivered when it ends, as TCP would send it again;
    new connections wait.
    """
    self._do(lambda: (self._up.open.clear(), self._down.open.clear()))

  def release(self) -> None:
    """Ends a partition."""
    self._do(lambda: (self._up.open.set(), self._down.open.set()))

  def half_open(self) -> None:
    """The target's ends are closed; the clients' stay open, and silent."""
    self._do(self._halve)

  def hold_answers(self) -> None:
    """From now on nothing that the target says arrives."""
    self._down.drops = True

  def cut(self) -> None:
    """Cuts every connection; the next ones are forwarded as before."""
    self._do(self._cut)
    self._down.drops = False  # Not before: an answer may be on its way.

  def close(self) -> None:
    """Cuts every connection and ends its thread."""
    if self._thread.is_alive():
      self._do(self._cut)
      self._loop.call_soon_threadsafe(self._loop.stop)
      self._thread.join()

  # --- on its own thread ---------------------------------------------------------

  def _do(self, call: Callable[[], object]) -> None:
    """Calls on the relay's thread, and waits until it is done."""
    done = threading.Event()
    self._loop.call_soon_threadsafe(lambda: (call(), done.set()))
    done.wait()

  def _serve(self, started: threading.Event) -> None:
    asyncio.set_event_loop(self._loop)
    serving = asyncio.start_server(self._accept, "127.0.0.1", 0)
    server = self._loop.run_until_complete(serving)
    self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    started.set()
    self._loop.run_forever()
    for listening in server.sockets:  # Once closed, it drops whom it accepted.
      self._loop.remove_reader(listening.fileno())
    self._loop.run_until_complete(self._end_all())
    server.close()
    self._loop.close()

  async def _end_all(self) -> None:
    """Cuts until no task is left; one that waits for its line is cancelled.

    A task that is cancelled before its first step would close nothing.
    """
    for _ in range(_TURNS):
      await asyncio.sleep(0.01)
      self._up.open.set()
      self._down.open.set()
      self._cut()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0.01)  # What was cut last is closed.

  def _cut(self) -> None:
    for connection in self._connections:
      _abort(connection.client)
      _abort(connection.target)
    self.num_cuts += len(self._connections)
    self._connections.clear()

  def _halve(self) -> None:
    for connection in self._connections:
      connection.is_forgotten = True
      _abort(connection.target)

  async def _accept(
    self, source: asyncio.StreamReader, client: asyncio.StreamWriter
  ) -> None:
    connection = _Connection(client)
    self._connections.add(connection)
    try:
      await self._up.open.wait()  # A connection crosses the link, too.
      host, _, port = self._target.rpartition(":")
      answers, connection.target = await asyncio.open_connection(
        host, int(port)
      )
      if client.is_closing():
        return  # It was cut meanwhile.
      self.num_connections += 1
      await asyncio.gather(
        self._forward(connection, self._up, source, connection.target),
        self._forward(connection, self._down, answers, client),
        return_exceptions=True,  # One is cut: the other ends, too.
      )
      while connection.is_forgotten and await source.read(_CHUNK_BYTES):
        pass  # Until the client gives it up.
    except (OSError, ValueError):
      pass  # Nobody is there, or it was cut.
    finally:
      self._connections.discard(connection)
      _abort(connection.target)
      _abort(client)

  async def _forward(
    self,
    connection: _Connection,
    way: _Way,
    source: asyncio.StreamReader,
    to: asyncio.StreamWriter,
  ) -> None:
    """Reads as fast as the line takes it; another task delivers."""
    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUED)
    delivery = asyncio.ensure_future(self._deliver(connection, way, queue, to))
    try:
      while data := await source.read(_CHUNK_BYTES):
        await self._transmit(way, len(data))
        if delivery.done():  # Cut, or forgotten: nobody takes from the queue.
          return
        await queue.put((time.monotonic() + self._latency_s, data))
      await queue.put((time.monotonic() + self._latency_s, b""))
      await delivery
    finally:
      delivery.cancel()

  async def _transmit(self, way: _Way, num_bytes: int) -> None:
    """Takes the time that the line takes; connections share it."""
    if not self._bytes_per_s:
      return
    start = max(time.monotonic(), way.free_at)
    way.free_at = start + num_bytes / self._bytes_per_s
    await asyncio.sleep(way.free_at - time.monotonic())

  async def _deliver(
    self,
    connection: _Connection,
    way: _Way,
    queue: asyncio.Queue[tuple[float, bytes]],
    to: asyncio.StreamWriter,
  ) -> None:
    while True:
      due, data = await queue.get()
      await asyncio.sleep(max(0.0, due - time.monotonic()))
      await way.open.wait()
      self._note_idle(connection)
      if connection.is_forgotten:
        return
      if way.drops and data:
        continue
      if not data:
        with contextlib.suppress(OSError):
          to.write_eof()
        return
      to.write(data)
      await to.drain()

  def _note_idle(self, connection: _Connection) -> None:
    now = time.monotonic()
    idle_s = now - connection.moved_at
    if 0 < self._forget_idle_s < idle_s and not connection.is_forgotten:
      connection.is_forgotten = True
      self.num_forgotten += 1
    connection.moved_at = now


def _abort(end: asyncio.StreamWriter | None) -> None:
  """Closes without waiting for what is still to be sent."""
  if end is not None:
    end.transport.abort()
