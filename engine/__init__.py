"""The engine: a batched language model with a paged, prefix-cached KV pool, in this process."""

from .cache.probe import PrefixProbe
from .config import EngineConfig
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
from .limits import RequestLimits
from .llm import LLM
from .models.conversion_cache import cache_directory
from .offload.tiers import TierStatistics
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
from .runtime.core import EngineCore, Runner, Update
from .runtime.handoff import check_event_loop, current_event_loop, result_of, run_in
from .runtime.loading import LoadedModel, ModelSource, PretrainedModel
from .runtime.pins import Pin
from .runtime.statistics import (
    STAGE_BOUNDARIES,
    CacheStatistics,
    Distribution,
    FinishedRequest,
    Histogram,
    Listener,
    Listeners,
    Statistics,
)
from .sampling_params import SamplingParams
from .scheduling.plan import SampledToken, ScheduledChunk, StepPlan, StepResult
from .scheduling.request import Request
from .scheduling.timeline import Chunk, Timeline
from .stream import Stream
from .text.tokenizer import Tokenizer

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
