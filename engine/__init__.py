"""The engine: a batched language model with a paged, prefix-cached KV pool, in this process."""

from .cache import cache_directory
from .config import EngineConfig
from .core import EngineCore, Runner, Update
from .engine import Engine, Health
from .errors import (
    DiskCacheError,
    EngineClosedError,
    EngineDeadError,
    EventLoopError,
    InternalError,
    InvalidParamsError,
    ModelLoadError,
    OutOfMemoryError,
    PromptTooLongError,
    QueueFullError,
    QueueTimeoutError,
    RagserveError,
    UnsupportedModelError,
)
from .handoff import check_event_loop, current_event_loop, result_of, run_in
from .limits import RequestLimits
from .loading import LoadedModel, ModelSource, PretrainedModel
from .outputs import (
    Choice,
    Completion,
    Delta,
    FinishReason,
    MissReason,
    ReuseSource,
    SegmentReuse,
    Timings,
    TokenLogprob,
    Usage,
)
from .pins import Pin
from .probe import PrefixProbe
from .prompt import (
    Plain,
    Prompt,
    PromptLike,
    Retention,
    Segment,
    SegmentKind,
    TokenizedPrompt,
    check_text,
)
from .request import Chunk, Request, Timeline
from .sampling import SamplingParams
from .scheduler import SampledToken, ScheduledChunk, StepPlan, StepResult
from .statistics import (
    STAGE_BOUNDARIES,
    CacheStatistics,
    Distribution,
    FinishedRequest,
    Histogram,
    Listener,
    Listeners,
    Statistics,
)
from .stream import Stream
from .sync import LLM
from .text import Tokenizer
from .tiers import TierStatistics

__all__ = [
    # the face
    "Engine",
    "LLM",
    "Stream",
    "EngineConfig",
    "RequestLimits",
    "SamplingParams",
    "Health",
    "Statistics",
    "CacheStatistics",
    "TierStatistics",
    "Distribution",
    "FinishedRequest",
    "Listener",
    # prompts
    "Plain",
    "Prompt",
    "PromptLike",
    "Retention",
    "Pin",
    "PrefixProbe",
    "Segment",
    "SegmentKind",
    "TokenizedPrompt",
    "check_text",
    # answers
    "Choice",
    "Completion",
    "Delta",
    "FinishReason",
    "MissReason",
    "ReuseSource",
    "SegmentReuse",
    "Timings",
    "TokenLogprob",
    "Usage",
    "Chunk",
    "Timeline",
    # errors
    "RagserveError",
    "DiskCacheError",
    "EngineClosedError",
    "EngineDeadError",
    "EventLoopError",
    "InternalError",
    "InvalidParamsError",
    "ModelLoadError",
    "OutOfMemoryError",
    "PromptTooLongError",
    "QueueFullError",
    "QueueTimeoutError",
    "UnsupportedModelError",
    # for other models than files, and for tests
    "EngineCore",
    "LoadedModel",
    "ModelSource",
    "PretrainedModel",
    "Request",
    "Runner",
    "SampledToken",
    "ScheduledChunk",
    "StepPlan",
    "StepResult",
    "Tokenizer",
    "Update",
    # for the floor above
    "STAGE_BOUNDARIES",
    "Histogram",
    "Listeners",
    "cache_directory",
    "check_event_loop",
    "current_event_loop",
    "result_of",
    "run_in",
]
