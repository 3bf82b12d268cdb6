from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Format(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FORMAT_UNSPECIFIED: _ClassVar[Format]
    FORMAT_FLOAT32: _ClassVar[Format]
    FORMAT_BFLOAT16: _ClassVar[Format]
    FORMAT_INT8: _ClassVar[Format]
    FORMAT_INT4: _ClassVar[Format]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_INCLUDED: _ClassVar[Outcome]
    OUTCOME_ACCEPTED: _ClassVar[Outcome]
    OUTCOME_CARRIED: _ClassVar[Outcome]
    OUTCOME_DUPLICATE: _ClassVar[Outcome]
    OUTCOME_LATE: _ClassVar[Outcome]
    OUTCOME_REFUSED: _ClassVar[Outcome]
    OUTCOME_NOT_ASKED: _ClassVar[Outcome]
FORMAT_UNSPECIFIED: Format
FORMAT_FLOAT32: Format
FORMAT_BFLOAT16: Format
FORMAT_INT8: Format
FORMAT_INT4: Format
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_INCLUDED: Outcome
OUTCOME_ACCEPTED: Outcome
OUTCOME_CARRIED: Outcome
OUTCOME_DUPLICATE: Outcome
OUTCOME_LATE: Outcome
OUTCOME_REFUSED: Outcome
OUTCOME_NOT_ASKED: Outcome

class Version(_message.Message):
    __slots__ = ("epoch", "n")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    n: int
    def __init__(self, epoch: _Optional[int] = ..., n: _Optional[int] = ...) -> None: ...

class Counts(_message.Message):
    __slots__ = ("steps", "tokens")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    tokens: int
    def __init__(self, steps: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("shard", "batch")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    shard: int
    batch: int
    def __init__(self, shard: _Optional[int] = ..., batch: _Optional[int] = ...) -> None: ...

class GetRunRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Leaf(_message.Message):
    __slots__ = ("path", "dtype", "shape", "fragment")
    PATH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    path: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    fragment: int
    def __init__(self, path: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., fragment: _Optional[int] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("protocol_version", "run_id", "epoch", "layout", "layout_digest", "num_fragments", "cycle_steps", "max_open_rounds", "quorum", "alpha", "up_format", "down_format", "chunk_bytes", "lease_s", "wait_for_publication", "adoption_delay_steps", "max_ahead", "num_shards", "num_syncer_steps", "settings_json", "origin_run_id", "origin_snapshot")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    CYCLE_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_OPEN_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    UP_FORMAT_FIELD_NUMBER: _ClassVar[int]
    DOWN_FORMAT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_FOR_PUBLICATION_FIELD_NUMBER: _ClassVar[int]
    ADOPTION_DELAY_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_AHEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    NUM_SYNCER_STEPS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_JSON_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    run_id: str
    epoch: int
    layout: _containers.RepeatedCompositeFieldContainer[Leaf]
    layout_digest: str
    num_fragments: int
    cycle_steps: int
    max_open_rounds: int
    quorum: int
    alpha: float
    up_format: Format
    down_format: Format
    chunk_bytes: int
    lease_s: float
    wait_for_publication: bool
    adoption_delay_steps: int
    max_ahead: int
    num_shards: int
    num_syncer_steps: int
    settings_json: str
    origin_run_id: str
    origin_snapshot: int
    def __init__(self, protocol_version: _Optional[int] = ..., run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., layout: _Optional[_Iterable[_Union[Leaf, _Mapping]]] = ..., layout_digest: _Optional[str] = ..., num_fragments: _Optional[int] = ..., cycle_steps: _Optional[int] = ..., max_open_rounds: _Optional[int] = ..., quorum: _Optional[int] = ..., alpha: _Optional[float] = ..., up_format: _Optional[_Union[Format, str]] = ..., down_format: _Optional[_Union[Format, str]] = ..., chunk_bytes: _Optional[int] = ..., lease_s: _Optional[float] = ..., wait_for_publication: bool = ..., adoption_delay_steps: _Optional[int] = ..., max_ahead: _Optional[int] = ..., num_shards: _Optional[int] = ..., num_syncer_steps: _Optional[int] = ..., settings_json: _Optional[str] = ..., origin_run_id: _Optional[str] = ..., origin_snapshot: _Optional[int] = ...) -> None: ...

class LearnerMessage(_message.Message):
    __slots__ = ("hello", "report", "applied", "goodbye", "heartbeat", "marker_done", "recovered")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    MARKER_DONE_FIELD_NUMBER: _ClassVar[int]
    RECOVERED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    report: Report
    applied: Applied
    goodbye: Goodbye
    heartbeat: Heartbeat
    marker_done: MarkerDone
    recovered: Recovered
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., applied: _Optional[_Union[Applied, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., marker_done: _Optional[_Union[MarkerDone, _Mapping]] = ..., recovered: _Optional[_Union[Recovered, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "learner_id", "nonce", "layout_digest", "run_id", "takeover", "bases", "max_replies", "state_address", "takes_shards", "resumes", "reads", "returned", "adoptions")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TAKEOVER_FIELD_NUMBER: _ClassVar[int]
    BASES_FIELD_NUMBER: _ClassVar[int]
    MAX_REPLIES_FIELD_NUMBER: _ClassVar[int]
    STATE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TAKES_SHARDS_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    ADOPTIONS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    learner_id: str
    nonce: str
    layout_digest: str
    run_id: str
    takeover: bool
    bases: _containers.RepeatedCompositeFieldContainer[Version]
    max_replies: int
    state_address: str
    takes_shards: bool
    resumes: str
    reads: _containers.RepeatedScalarFieldContainer[int]
    returned: _containers.RepeatedCompositeFieldContainer[Position]
    adoptions: _containers.RepeatedCompositeFieldContainer[Applied]
    def __init__(self, protocol_version: _Optional[int] = ..., learner_id: _Optional[str] = ..., nonce: _Optional[str] = ..., layout_digest: _Optional[str] = ..., run_id: _Optional[str] = ..., takeover: bool = ..., bases: _Optional[_Iterable[_Union[Version, _Mapping]]] = ..., max_replies: _Optional[int] = ..., state_address: _Optional[str] = ..., takes_shards: bool = ..., resumes: _Optional[str] = ..., reads: _Optional[_Iterable[int]] = ..., returned: _Optional[_Iterable[_Union[Position, _Mapping]]] = ..., adoptions: _Optional[_Iterable[_Union[Applied, _Mapping]]] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("step", "counts", "positions", "boundaries", "waiting", "exhausted", "metrics", "returned")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    EXHAUSTED_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    step: int
    counts: _containers.RepeatedCompositeFieldContainer[Counts]
    positions: _containers.RepeatedCompositeFieldContainer[Position]
    boundaries: _containers.RepeatedCompositeFieldContainer[Boundary]
    waiting: bool
    exhausted: bool
    metrics: _containers.ScalarMap[str, float]
    returned: _containers.RepeatedCompositeFieldContainer[Position]
    def __init__(self, step: _Optional[int] = ..., counts: _Optional[_Iterable[_Union[Counts, _Mapping]]] = ..., positions: _Optional[_Iterable[_Union[Position, _Mapping]]] = ..., boundaries: _Optional[_Iterable[_Union[Boundary, _Mapping]]] = ..., waiting: bool = ..., exhausted: bool = ..., metrics: _Optional[_Mapping[str, float]] = ..., returned: _Optional[_Iterable[_Union[Position, _Mapping]]] = ...) -> None: ...

class Boundary(_message.Message):
    __slots__ = ("fragment", "step")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    step: int
    def __init__(self, fragment: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Applied(_message.Message):
    __slots__ = ("fragment", "version", "step", "counts", "exact")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: Version
    step: int
    counts: Counts
    exact: bool
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., step: _Optional[int] = ..., counts: _Optional[_Union[Counts, _Mapping]] = ..., exact: bool = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class MarkerDone(_message.Message):
    __slots__ = ("snapshot", "saved", "reason")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    snapshot: int
    saved: bool
    reason: str
    def __init__(self, snapshot: _Optional[int] = ..., saved: bool = ..., reason: _Optional[str] = ...) -> None: ...

class Recovered(_message.Message):
    __slots__ = ("source", "donor", "reason")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DONOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    source: str
    donor: str
    reason: str
    def __init__(self, source: _Optional[str] = ..., donor: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class SyncerMessage(_message.Message):
    __slots__ = ("welcome", "pull", "published", "given_up", "ending", "finished", "heartbeat", "marker", "shards", "t", "step_s")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    GIVEN_UP_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    MARKER_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    T_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    pull: Pull
    published: Published
    given_up: GivenUp
    ending: Ending
    finished: Finished
    heartbeat: Heartbeat
    marker: Marker
    shards: Shards
    t: int
    step_s: float
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., pull: _Optional[_Union[Pull, _Mapping]] = ..., published: _Optional[_Union[Published, _Mapping]] = ..., given_up: _Optional[_Union[GivenUp, _Mapping]] = ..., ending: _Optional[_Union[Ending, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., marker: _Optional[_Union[Marker, _Mapping]] = ..., shards: _Optional[_Union[Shards, _Mapping]] = ..., t: _Optional[int] = ..., step_s: _Optional[float] = ...) -> None: ...

class FragmentClock(_message.Message):
    __slots__ = ("version", "n0", "merged_n", "merged_round", "merged_attempt")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    N0_FIELD_NUMBER: _ClassVar[int]
    MERGED_N_FIELD_NUMBER: _ClassVar[int]
    MERGED_ROUND_FIELD_NUMBER: _ClassVar[int]
    MERGED_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    version: Version
    n0: int
    merged_n: int
    merged_round: int
    merged_attempt: int
    def __init__(self, version: _Optional[_Union[Version, _Mapping]] = ..., n0: _Optional[int] = ..., merged_n: _Optional[int] = ..., merged_round: _Optional[int] = ..., merged_attempt: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("incarnation", "session_secret", "run_id", "epoch", "clocks", "positions", "reconnect", "donor")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_SECRET_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    RECONNECT_FIELD_NUMBER: _ClassVar[int]
    DONOR_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    session_secret: str
    run_id: str
    epoch: int
    clocks: _containers.RepeatedCompositeFieldContainer[FragmentClock]
    positions: _containers.RepeatedCompositeFieldContainer[Position]
    reconnect: bool
    donor: Donor
    def __init__(self, incarnation: _Optional[int] = ..., session_secret: _Optional[str] = ..., run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., clocks: _Optional[_Iterable[_Union[FragmentClock, _Mapping]]] = ..., positions: _Optional[_Iterable[_Union[Position, _Mapping]]] = ..., reconnect: bool = ..., donor: _Optional[_Union[Donor, _Mapping]] = ...) -> None: ...

class Donor(_message.Message):
    __slots__ = ("learner_id", "address")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    address: str
    def __init__(self, learner_id: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Pull(_message.Message):
    __slots__ = ("fragment", "round", "attempt")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    round: int
    attempt: int
    def __init__(self, fragment: _Optional[int] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Published(_message.Message):
    __slots__ = ("fragment", "version", "outcome", "reason", "round", "attempt", "exact")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: Version
    outcome: Outcome
    reason: str
    round: int
    attempt: int
    exact: bool
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., reason: _Optional[str] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ..., exact: bool = ...) -> None: ...

class GivenUp(_message.Message):
    __slots__ = ("fragment", "round", "attempt", "reason")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    round: int
    attempt: int
    reason: str
    def __init__(self, fragment: _Optional[int] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Ending(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "exit_code")
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    exit_code: int
    def __init__(self, reason: _Optional[str] = ..., exit_code: _Optional[int] = ...) -> None: ...

class Marker(_message.Message):
    __slots__ = ("snapshot", "clock")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    snapshot: int
    clock: _containers.RepeatedCompositeFieldContainer[Version]
    def __init__(self, snapshot: _Optional[int] = ..., clock: _Optional[_Iterable[_Union[Version, _Mapping]]] = ...) -> None: ...

class Shards(_message.Message):
    __slots__ = ("positions",)
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    positions: _containers.RepeatedCompositeFieldContainer[Position]
    def __init__(self, positions: _Optional[_Iterable[_Union[Position, _Mapping]]] = ...) -> None: ...

class PushChunk(_message.Message):
    __slots__ = ("header", "data", "trailer")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    TRAILER_FIELD_NUMBER: _ClassVar[int]
    header: ReplyHeader
    data: bytes
    trailer: Trailer
    def __init__(self, header: _Optional[_Union[ReplyHeader, _Mapping]] = ..., data: _Optional[bytes] = ..., trailer: _Optional[_Union[Trailer, _Mapping]] = ...) -> None: ...

class ReplyHeader(_message.Message):
    __slots__ = ("learner_id", "incarnation", "session_secret", "fragment", "round", "attempt", "base", "counts", "lr_sum", "positions", "format", "num_bytes")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_SECRET_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    LR_SUM_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    incarnation: int
    session_secret: str
    fragment: int
    round: int
    attempt: int
    base: Version
    counts: Counts
    lr_sum: float
    positions: _containers.RepeatedCompositeFieldContainer[Position]
    format: Format
    num_bytes: int
    def __init__(self, learner_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., session_secret: _Optional[str] = ..., fragment: _Optional[int] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ..., base: _Optional[_Union[Version, _Mapping]] = ..., counts: _Optional[_Union[Counts, _Mapping]] = ..., lr_sum: _Optional[float] = ..., positions: _Optional[_Iterable[_Union[Position, _Mapping]]] = ..., format: _Optional[_Union[Format, str]] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class Trailer(_message.Message):
    __slots__ = ("crc32",)
    CRC32_FIELD_NUMBER: _ClassVar[int]
    crc32: int
    def __init__(self, crc32: _Optional[int] = ...) -> None: ...

class PushOutcome(_message.Message):
    __slots__ = ("outcome", "reason", "first")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    reason: str
    first: Outcome
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., reason: _Optional[str] = ..., first: _Optional[_Union[Outcome, str]] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("learner_id", "incarnation", "session_secret", "fragment", "n", "exact")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_SECRET_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    incarnation: int
    session_secret: str
    fragment: int
    n: int
    exact: bool
    def __init__(self, learner_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., session_secret: _Optional[str] = ..., fragment: _Optional[int] = ..., n: _Optional[int] = ..., exact: bool = ...) -> None: ...

class FetchChunk(_message.Message):
    __slots__ = ("header", "data", "trailer")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    TRAILER_FIELD_NUMBER: _ClassVar[int]
    header: FragmentHeader
    data: bytes
    trailer: Trailer
    def __init__(self, header: _Optional[_Union[FragmentHeader, _Mapping]] = ..., data: _Optional[bytes] = ..., trailer: _Optional[_Union[Trailer, _Mapping]] = ...) -> None: ...

class FragmentHeader(_message.Message):
    __slots__ = ("fragment", "version", "format", "num_bytes")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: Version
    format: Format
    num_bytes: int
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., format: _Optional[_Union[Format, str]] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class FetchStateRequest(_message.Message):
    __slots__ = ("learner_id", "incarnation", "session_secret", "run_id", "donor_id", "clock", "but_not")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_SECRET_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    DONOR_ID_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    BUT_NOT_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    incarnation: int
    session_secret: str
    run_id: str
    donor_id: str
    clock: _containers.RepeatedCompositeFieldContainer[Version]
    but_not: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, learner_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., session_secret: _Optional[str] = ..., run_id: _Optional[str] = ..., donor_id: _Optional[str] = ..., clock: _Optional[_Iterable[_Union[Version, _Mapping]]] = ..., but_not: _Optional[_Iterable[str]] = ...) -> None: ...

class StateChunk(_message.Message):
    __slots__ = ("header", "data", "trailer")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    TRAILER_FIELD_NUMBER: _ClassVar[int]
    header: StateHeader
    data: bytes
    trailer: Trailer
    def __init__(self, header: _Optional[_Union[StateHeader, _Mapping]] = ..., data: _Optional[bytes] = ..., trailer: _Optional[_Union[Trailer, _Mapping]] = ...) -> None: ...

class StateHeader(_message.Message):
    __slots__ = ("donor_id", "step", "clock", "leaves", "num_bytes")
    DONOR_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    donor_id: str
    step: int
    clock: _containers.RepeatedCompositeFieldContainer[Version]
    leaves: _containers.RepeatedCompositeFieldContainer[StateLeaf]
    num_bytes: int
    def __init__(self, donor_id: _Optional[str] = ..., step: _Optional[int] = ..., clock: _Optional[_Iterable[_Union[Version, _Mapping]]] = ..., leaves: _Optional[_Iterable[_Union[StateLeaf, _Mapping]]] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class StateLeaf(_message.Message):
    __slots__ = ("path", "dtype", "shape")
    PATH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    path: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, path: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TakeSnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TakeSnapshotReply(_message.Message):
    __slots__ = ("snapshot", "path", "clock", "learners", "skipped")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    LEARNERS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    snapshot: int
    path: str
    clock: _containers.RepeatedCompositeFieldContainer[Version]
    learners: _containers.RepeatedScalarFieldContainer[str]
    skipped: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, snapshot: _Optional[int] = ..., path: _Optional[str] = ..., clock: _Optional[_Iterable[_Union[Version, _Mapping]]] = ..., learners: _Optional[_Iterable[str]] = ..., skipped: _Optional[_Iterable[str]] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("learner_id", "reason")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    reason: str
    def __init__(self, learner_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class EvictReply(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    def __init__(self, incarnation: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchStatusRequest(_message.Message):
    __slots__ = ("interval_s",)
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    interval_s: float
    def __init__(self, interval_s: _Optional[float] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("run_id", "epoch", "time_s", "t", "num_syncer_steps", "phase", "waiting_for", "eta_s", "num_live", "num_training", "num_eligible", "num_contributing", "step_s", "quorum_s", "sync_s", "learners", "fragments", "rounds", "books", "bytes_up", "bytes_down", "counters", "alarms", "waiting_kind")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    T_FIELD_NUMBER: _ClassVar[int]
    NUM_SYNCER_STEPS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    ETA_S_FIELD_NUMBER: _ClassVar[int]
    NUM_LIVE_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_ELIGIBLE_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTRIBUTING_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    QUORUM_S_FIELD_NUMBER: _ClassVar[int]
    SYNC_S_FIELD_NUMBER: _ClassVar[int]
    LEARNERS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    BOOKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    ALARMS_FIELD_NUMBER: _ClassVar[int]
    WAITING_KIND_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    time_s: float
    t: int
    num_syncer_steps: int
    phase: str
    waiting_for: str
    eta_s: float
    num_live: int
    num_training: int
    num_eligible: int
    num_contributing: int
    step_s: float
    quorum_s: float
    sync_s: float
    learners: _containers.RepeatedCompositeFieldContainer[LearnerStatus]
    fragments: _containers.RepeatedCompositeFieldContainer[FragmentStatus]
    rounds: _containers.RepeatedCompositeFieldContainer[RoundStatus]
    books: _containers.RepeatedCompositeFieldContainer[Book]
    bytes_up: int
    bytes_down: int
    counters: _containers.ScalarMap[str, int]
    alarms: _containers.RepeatedScalarFieldContainer[str]
    waiting_kind: str
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., time_s: _Optional[float] = ..., t: _Optional[int] = ..., num_syncer_steps: _Optional[int] = ..., phase: _Optional[str] = ..., waiting_for: _Optional[str] = ..., eta_s: _Optional[float] = ..., num_live: _Optional[int] = ..., num_training: _Optional[int] = ..., num_eligible: _Optional[int] = ..., num_contributing: _Optional[int] = ..., step_s: _Optional[float] = ..., quorum_s: _Optional[float] = ..., sync_s: _Optional[float] = ..., learners: _Optional[_Iterable[_Union[LearnerStatus, _Mapping]]] = ..., fragments: _Optional[_Iterable[_Union[FragmentStatus, _Mapping]]] = ..., rounds: _Optional[_Iterable[_Union[RoundStatus, _Mapping]]] = ..., books: _Optional[_Iterable[_Union[Book, _Mapping]]] = ..., bytes_up: _Optional[int] = ..., bytes_down: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., alarms: _Optional[_Iterable[str]] = ..., waiting_kind: _Optional[str] = ...) -> None: ...

class LearnerStatus(_message.Message):
    __slots__ = ("learner_id", "incarnation", "live", "training", "contributing", "exhausted", "step", "step_s", "silent_s", "metrics", "note")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTING_FIELD_NUMBER: _ClassVar[int]
    EXHAUSTED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    incarnation: int
    live: bool
    training: bool
    contributing: bool
    exhausted: bool
    step: int
    step_s: float
    silent_s: float
    metrics: _containers.ScalarMap[str, float]
    note: str
    def __init__(self, learner_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., live: bool = ..., training: bool = ..., contributing: bool = ..., exhausted: bool = ..., step: _Optional[int] = ..., step_s: _Optional[float] = ..., silent_s: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ..., note: _Optional[str] = ...) -> None: ...

class FragmentStatus(_message.Message):
    __slots__ = ("fragment", "version", "realised_h", "num_contributors")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REALISED_H_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: Version
    realised_h: float
    num_contributors: int
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., realised_h: _Optional[float] = ..., num_contributors: _Optional[int] = ...) -> None: ...

class RoundStatus(_message.Message):
    __slots__ = ("fragment", "round", "attempt", "num_members", "num_replies", "phase")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLIES_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    round: int
    attempt: int
    num_members: int
    num_replies: int
    phase: str
    def __init__(self, fragment: _Optional[int] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ..., num_members: _Optional[int] = ..., num_replies: _Optional[int] = ..., phase: _Optional[str] = ...) -> None: ...

class Book(_message.Message):
    __slots__ = ("name", "tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    tokens: float
    def __init__(self, name: _Optional[str] = ..., tokens: _Optional[float] = ...) -> None: ...
