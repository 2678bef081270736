"""Who may ask, how often, and how many requests at a time. All of it is off unless configured."""

from __future__ import annotations

import hashlib
import hmac
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ragserve.engine import InvalidParamsError

from .problem import Problem

__all__ = ["ApiKey", "Concurrency", "KeyState", "Keyring", "TokenBucket", "priority_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key that clients send as `Authorization: Bearer ...`.

    :param key: the secret. It is in no repr and no log.
    :param name: what logs call its owner.
    :param namespace: the tenant of all its requests, which may ask for no other; None lets each
        request name its own, but none that belongs to another key.
    :param requests_per_minute: how many may be made, over time; as many at once after a quiet
        minute. None is no limit.
    :param max_concurrent: how many may be under way at a time: from when the body is there, a
        stream until its end. None is no limit.
    :param min_priority: least `priority` that its requests may ask for; lower goes first. It is
        also that of requests that ask for none, if it is above 0.
    :param metrics: whether it may read `/metrics`, which tells of all keys' requests together.
    :raises InvalidParamsError: if the key is empty or not ASCII, or a limit is below 1.
    """

    key: str = field(repr=False)
    name: str
    namespace: str | None = None
    requests_per_minute: int | None = None
    max_concurrent: int | None = None
    min_priority: int = 0
    metrics: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.key, str) and self.key and self.key.isascii()):
            raise InvalidParamsError("key", "...", "a string of ASCII characters, and not empty")
        for name in ("requests_per_minute", "max_concurrent"):
            check_limit(name, getattr(self, name))
        check_priority("min_priority", self.min_priority)
        if not isinstance(self.metrics, bool):
            raise InvalidParamsError("metrics", self.metrics, "True or False")


class TokenBucket:
    """A rate: holds a minute's worth, and fills steadily.

    :param per_minute: how much it holds.
    :param clock: seconds.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._size = float(per_minute)
        self._level = self._size
        self._clock = clock
        self._filled = clock()
        self._lock = threading.Lock()

    def take(self) -> float:
        """Take one: 0, or, if it is empty, the seconds until there is one."""
        with self._lock:
            now = self._clock()
            per_second = self._size / 60
            level = self._level + max(0.0, now - self._filled) * per_second
            self._level, self._filled = min(self._size, level), now
            if self._level < 1:
                return (1 - self._level) / per_second
            self._level -= 1
            return 0.0


class Concurrency:
    """A number of requests that may be under way at a time.

    :param limit: how many; None is no limit.
    :param whose: for the message.
    """

    def __init__(self, limit: int | None, whose: str) -> None:
        self._limit = limit
        self._whose = whose
        self._lock = threading.Lock()
        self.num_held = 0

    def check(self) -> None:
        """See whether there is one now, and take none.

        :raises Problem: 429, if there is none.
        """
        with self._lock:
            self._check()

    def _check(self) -> None:
        if self._limit is not None and self.num_held >= self._limit:
            raise Problem(
                429,
                f"{self._whose} has {self._limit} requests under way, which is its limit",
                code="concurrency_limit_exceeded",
                headers={"retry-after": "1"},
            )

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one while the block runs.

        :raises Problem: 429, if there is none.
        """
        with self._lock:
            self._check()
            self.num_held += 1
        try:
            yield
        finally:
            with self._lock:
                self.num_held -= 1


class KeyState:
    """A key, and what its owner is doing.

    :param taken: namespaces that belong to other keys.
    """

    def __init__(
        self, key: ApiKey, clock: Callable[[], float], taken: frozenset[str] = frozenset()
    ) -> None:
        self._taken = taken
        self.min_priority = key.min_priority
        self.metrics = key.metrics
        self.name = key.name
        self.namespace = key.namespace
        self.concurrency = Concurrency(key.max_concurrent, "this key")
        self._digest = _digest(key.key)
        rate = key.requests_per_minute
        self._bucket = None if rate is None else TokenBucket(rate, clock)

    def is_key(self, digest: bytes) -> bool:
        """Whether this is the digest of its key; takes the same time either way."""
        return hmac.compare_digest(digest, self._digest)

    def count(self) -> None:
        """Count a request.

        :raises Problem: 429, if there have been too many.
        """
        wait = 0.0 if self._bucket is None else self._bucket.take()
        if wait > 0:
            raise Problem(
                429,
                f"too many requests with this key; the next may be made in {wait:.1f} s",
                code="rate_limit_exceeded",
                headers={"retry-after": str(math.ceil(wait))},
            )

    def namespace_of(self, asked: str | None) -> str | None:
        """The tenant of a request that asked for `asked`.

        :raises Problem: 403, if that is another's.
        """
        if self.namespace is None:
            if asked is None or asked not in self._taken:
                return asked
        elif asked is None or asked == self.namespace:
            return self.namespace
        raise Problem(
            403,
            "this key may not ask in that namespace; leave the field out, or name one's own",
            param="namespace",
            code="namespace_not_allowed",
        )


class Keyring:
    """All keys that are accepted. Without any, everybody is.

    :raises InvalidParamsError: if two keys are the same.
    """

    def __init__(
        self, keys: Iterable[ApiKey | str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        known = [
            ApiKey(key=key, name=f"key {number}") if isinstance(key, str) else key
            for number, key in enumerate(keys, 1)
        ]
        if len({key.key for key in known}) < len(known):
            raise InvalidParamsError("api_keys", "...", "keys that differ from each other")
        taken = frozenset(key.namespace for key in known if key.namespace is not None)
        self._states = [KeyState(key, clock, taken) for key in known]

    def check_metrics(self, authorization: str | None) -> None:
        """See whether `/metrics` may be read.

        :raises Problem: 401, if a key is needed and this is none; 403, if it is another.
        """
        key = self.find(authorization)
        if key is not None and not key.metrics:
            raise Problem(
                403,
                "this key may not read metrics, which tell of other keys' requests; "
                "ApiKey(metrics=True) may",
                code="metrics_not_allowed",
            )

    def find(self, authorization: str | None) -> KeyState | None:
        """The key of an `Authorization` header; None if none is needed.

        :raises Problem: 401, if one is needed and this is none.
        """
        if not self._states:
            return None
        scheme, _, secret = (authorization or "").partition(" ")
        # Every key is compared, and digests of equal length, so that neither the time nor the
        # order of the keys tells anything.
        digest = _digest(secret.strip())
        found = [state for state in self._states if state.is_key(digest)]
        if scheme.lower() != "bearer" or not found:
            raise Problem(
                401,
                "a valid API key is needed, as the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return found[0]


def priority_of(asked: int | None, least: int) -> int:
    """The priority of a request that asked for `asked`; lower goes first.

    :param least: the lowest that it may ask for.
    :raises Problem: 403, if it asked for less.
    """
    if asked is None:
        return max(0, least)
    if asked < least:
        raise Problem(
            403,
            f"priority={asked} goes before what this client may ask for; the least is {least}",
            param="priority",
            code="priority_not_allowed",
        )
    return asked


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def check_limit(name: str, limit: int | None) -> None:
    """Check a limit that may be left out.

    :raises InvalidParamsError: if it is below 1.
    """
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise InvalidParamsError(name, limit, "an integer of at least 1, or None for no limit")


def check_seconds(name: str, seconds: float) -> None:
    """Check a time limit.

    :raises InvalidParamsError: if it is not above 0.
    """
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not seconds > 0:
        raise InvalidParamsError(name, seconds, "seconds above 0")


def check_priority(name: str, priority: int) -> None:
    """Check a priority.

    :raises InvalidParamsError: if it is no integer.
    """
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidParamsError(name, priority, "an integer; lower goes first")
