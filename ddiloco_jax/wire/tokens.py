"""Bearer tokens: who may call, read from a file or the environment.

A learner's token opens the learners' calls, an admin's the admin ones, and
either of them the status. Tokens are compared in constant time, shown nowhere,
and no part of any record of a run. (docs/security.md)
"""

import dataclasses
import hashlib
import hmac
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import grpc

from ddiloco_jax.wire import fields
from ddiloco_jax.wire.options import WireConfig
from ddiloco_jax.wire.pb import synchronizer_pb2 as pb
from ddiloco_jax.wire.status import ServiceError, abort

TOKENS_VARIABLE = "DDILOCO_TOKENS"
ADMIN_TOKENS_VARIABLE = "DDILOCO_ADMIN_TOKENS"

_SERVICE = f"/{pb.DESCRIPTOR.package}.Synchronizer/"
ADMIN_METHODS = frozenset(
  _SERVICE + name for name in ("Drain", "TakeSnapshot", "Evict")
)
_STATUS_METHODS = frozenset(
  _SERVICE + name for name in ("GetRun", "GetStatus", "WatchStatus")
)
_OURS = f"/{pb.DESCRIPTOR.package}."  # Health and reflection are open.
_HEADER = "authorization"
_SCHEME = "Bearer"
# The longest leaves room for the rest of options.MAX_METADATA_BYTES.
_MIN_LENGTH, _MAX_LENGTH = 16, 1024
_TOKEN = re.compile(r'[!"$-~]+')  # Printable ASCII without '#'.
_COMMENT = re.compile(r"(?:^|[ \t])#.*")

Metadata = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Token:
  """One line of a token file.

  Attributes:
    secret: What is sent.
    learner: The only id that it is good for; "" for any.
  """

  secret: str = dataclasses.field(repr=False)
  learner: str = ""


class Onlooker:
  """Who calls and is no learner: asks for the status, or is an admin."""


ONLOOKER: Final = Onlooker()


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens:
  """What a process knows of tokens; none of a kind means that none is asked."""

  learners: tuple[Token, ...] = ()
  admins: tuple[Token, ...] = ()

  def __bool__(self) -> bool:
    return bool(self.learners or self.admins)

  def of_onlooker(self) -> Token | None:
    """What somebody sends who is no learner: an admin's, else a learner's."""
    return next(iter((*self.admins, *self.learners)), None)

  def of_learner(self, learner: str) -> Token | None:
    """What a learner sends: the token of its id, else the one of any id.

    Raises:
      ValueError: there are tokens, and none is this learner's.
    """
    token = self.of_donor(learner)
    if self.learners and token is None:
      raise ValueError(
        f"the token file has no line for learner {learner!r}, and none for any"
        " learner: add a line 'LEARNER_ID TOKEN', or 'TOKEN'."
      )
    return token

  def of_donor(self, learner: str) -> Token | None:
    """What is said to a learner that is asked for its state: what it says
    itself, so that it hears nothing new.

    A token of the asker's own id is never said to it: it could take that id.
    Nor is one of any id to whom a line binds: it could take other ids.
    """
    for name in (learner, ""):
      for token in self.learners:
        if token.learner == name:
          return token
    return None

  def is_bound(self, learner: str) -> bool:
    """Whether an id has a line of its own."""
    return any(token.learner == learner for token in self.learners)


def read_tokens(cfg: WireConfig, env: Mapping[str, str] = os.environ) -> Tokens:
  """The tokens of wire.token_file and wire.admin_token_file; where a file is
  not set, those of the environment.

  Raises:
    ValueError: a file that cannot be read, or has a malformed line; a file or
      variable that is set and has no token.
  """
  learners = _read("wire.token_file", cfg.token_file, TOKENS_VARIABLE, env)
  admins = _read(
    "wire.admin_token_file", cfg.admin_token_file, ADMIN_TOKENS_VARIABLE, env
  )
  for line in admins:
    if line.token.learner:
      raise ValueError(
        f"{line.where} binds an admin's token to an id: an admin's line is the"
        " token and nothing else."
      )
  _check_once((*learners, *admins))
  return Tokens(
    tuple(line.token for line in learners), tuple(line.token for line in admins)
  )


def as_metadata(token: Token | None) -> Metadata:
  """What goes with every call."""
  return ((_HEADER, f"{_SCHEME} {token.secret}"),) if token else ()


class Gate(grpc.ServerInterceptor):
  """Lets a call through whose token says that its caller may make it.

  Args:
    tokens: That are accepted.
    is_local: The server is reached from this machine only. Without any tokens
      it then does what it is told; else nobody is an admin without a token.
  """

  def __init__(self, tokens: Tokens, *, is_local: bool):
    self._tokens = tokens
    self._is_local = is_local

  def intercept_service(self, continuation: Any, handler_call_details: Any):
    """Serves the call, or the reason why not."""
    try:
      self._check(
        handler_call_details.method, handler_call_details.invocation_metadata
      )
    except ServiceError as error:
      return _refusing(error)
    return continuation(handler_call_details)

  def check_learner(self, metadata: Iterable[Any], learner: str) -> None:
    """Refuses a token that is bound to another id, and one of any id under an
    id that has a token of its own.

    Raises:
      ServiceError: UNAUTHENTICATED.
    """
    token = _find(self._tokens.learners, _said(metadata))
    if token is None or token.learner == learner:
      return
    if token.learner:
      raise ServiceError(
        "UNAUTHENTICATED",
        f"the token is bound to another id, and this is learner {learner!r}:"
        " give each learner the token of its own id.",
      )
    if self._tokens.is_bound(learner):
      raise ServiceError(
        "UNAUTHENTICATED",
        f"learner {learner!r} has a token of its own, and one of any id was"
        " sent: give it the line of its id.",
      )

  def _check(self, method: str, metadata: Iterable[Any]) -> None:
    if not method.startswith(_OURS):
      return
    if method in ADMIN_METHODS:
      self._check_admin(method, _said(metadata))
    elif self._tokens.learners:
      said = _said(metadata)
      if _find(self._tokens.learners, said):
        return
      if not _find(self._tokens.admins, said):
        raise _unknown(said, "learner", "wire.token_file", TOKENS_VARIABLE)
      if method not in _STATUS_METHODS:
        raise ServiceError(
          "PERMISSION_DENIED",
          f"an admin's token was sent with {method}, a learner's call: give"
          " the learner a token of wire.token_file.",
        )

  def _check_admin(self, method: str, said: str) -> None:
    if _find(self._tokens.admins, said):
      return
    if self._is_local and not self._tokens:
      return  # Nobody else can reach it.
    if _find(self._tokens.learners, said):
      raise ServiceError(
        "PERMISSION_DENIED",
        f"a learner's token was sent with {method}, an admin's call: send a"
        " token of wire.admin_token_file.",
      )
    if not self._tokens.admins:
      raise ServiceError(
        "PERMISSION_DENIED",
        f"{method} is an admin's call, and the syncer knows no admin's token:"
        f" set wire.admin_token_file (or {ADMIN_TOKENS_VARIABLE}) at it.",
      )
    raise _unknown(
      said, "admin", "wire.admin_token_file", ADMIN_TOKENS_VARIABLE
    )


def _unknown(said: str, who: str, setting: str, variable: str) -> ServiceError:
  if not said:
    text = f"no token was sent, and this service asks every {who} for one"
  else:
    text = f"wrong token: it is none that this service knows of a {who}"
  return ServiceError(
    "UNAUTHENTICATED",
    f"{text}. Set {setting} (or {variable}) to what the syncer has.",
  )


def _said(metadata: Iterable[Any]) -> str:
  for key, value in metadata:
    if key == _HEADER and isinstance(value, str):
      scheme, _, said = value.partition(" ")
      if scheme.lower() == _SCHEME.lower():  # RFC 7235: in any case.
        return said.strip(" ")
  return ""


def _find(tokens: Iterable[Token], said: str) -> Token | None:
  """Looks at all of them, whichever it is: how long it takes tells nothing."""
  digest, found = hashlib.sha256(said.encode()).digest(), None
  for token in tokens:
    own = hashlib.sha256(token.secret.encode()).digest()
    if hmac.compare_digest(own, digest):
      found = token
  return found


def _refusing(error: ServiceError) -> grpc.RpcMethodHandler:
  def refuse(requests: Any, context: grpc.ServicerContext) -> None:
    abort(context, error)

  # A stream: it is refused before anything is read, whatever kind it is.
  return grpc.stream_stream_rpc_method_handler(refuse)


class _Line(NamedTuple):
  """A token, and where it is written: a number and a file, no word of it."""

  where: str
  token: Token


def _read(
  setting: str, path: str, variable: str, env: Mapping[str, str]
) -> tuple[_Line, ...]:
  source = f"{setting}={path}" if path else f"${variable}"
  if path:
    try:
      text = pathlib.Path(path).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
      raise ValueError(
        f"{source} cannot be read: {error}. It is a text file of tokens, one a"
        " line."
      ) from None
  elif variable in env:
    text = env[variable]
  else:
    return ()
  lines = []
  for number, line in enumerate(text.split("\n"), 1):
    if words := _words(line):
      where = f"line {number} of {source}"
      lines.append(_Line(where, _parse(where, words)))
  if not lines:  # Nobody sets it to ask for none.
    raise ValueError(
      f"{source} has no token: write one a line, or do not set it."
    )
  return tuple(lines)


def _words(line: str) -> list[str]:
  """Between blanks and tabs only: what else a line holds is to be seen."""
  bare = _COMMENT.sub("", line.rstrip("\r"))
  return [word for word in re.split(r"[ \t]+", bare) if word]


def _parse(where: str, words: list[str]) -> Token:
  """No error repeats a word: it may be a secret in the wrong column."""
  if len(words) > 2:
    raise ValueError(
      f"{where} has {len(words)} words; it must be 'TOKEN' or"
      " 'LEARNER_ID TOKEN'."
    )
  secret, learner = words[-1], words[0] if len(words) == 2 else ""
  if learner and not fields.LEARNER_ID.fullmatch(learner):
    raise ValueError(
      f"{where} begins with what is no learner's id: {fields.ID_RULE}."
    )
  fits = _MIN_LENGTH <= len(secret) <= _MAX_LENGTH
  if not (fits and _TOKEN.fullmatch(secret)):
    raise ValueError(
      f"{where} has a token of {len(secret)} characters; it must have"
      f" {_MIN_LENGTH} to {_MAX_LENGTH}, all of them printable ASCII and none a"
      " '#', as `openssl rand -hex 32` makes it."
    )
  return Token(secret, learner)


def _check_once(lines: Iterable[_Line]) -> None:
  """Refuses a token that is written twice: whose it is would be anyone's
  guess, and whoever has it could do what either may."""
  first: dict[str, str] = {}
  for where, token in lines:
    other = first.setdefault(token.secret, where)
    if other != where:
      raise ValueError(
        f"{other} and {where} have the same token: give each a token of its own."
      )
