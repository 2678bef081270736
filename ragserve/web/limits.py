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

__all__ = ["ApiKey", "Concurrency", "Keyring", "KeyState", "TokenBucket"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key that clients send as `Authorization: Bearer ...`.

    :param key: the secret. It is in no repr and no log.
    :param name: what logs call its owner.
    :param namespace: the tenant of all its requests, which may ask for no other; None lets each
        request name its own.
    :param requests_per_minute: how many may be made, over time; as many at once after a quiet
        minute. None is no limit.
    :param max_concurrent: how many may be under way at a time; a stream is until its end. None
        is no limit.
    :raises InvalidParamsError: if the key is empty or not ASCII, or a limit is below 1.
    """

    key: str = field(repr=False)
    name: str
    namespace: str | None = None
    requests_per_minute: int | None = None
    max_concurrent: int | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.key, str) and self.key and self.key.isascii()):
            raise InvalidParamsError("key", "...", "a string of ASCII characters, and not empty")
        for name in ("requests_per_minute", "max_concurrent"):
            check_limit(name, getattr(self, name))


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

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one while the block runs.

        :raises Problem: 429, if there is none.
        """
        with self._lock:
            if self._limit is not None and self.num_held >= self._limit:
                raise Problem(
                    429,
                    f"{self._whose} has {self._limit} requests under way, which is its limit",
                    code="concurrency_limit_exceeded",
                    headers={"retry-after": "1"},
                )
            self.num_held += 1
        try:
            yield
        finally:
            with self._lock:
                self.num_held -= 1


class KeyState:
    """A key, and what its owner is doing."""

    def __init__(self, key: ApiKey, clock: Callable[[], float]) -> None:
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

        :raises Problem: 403, if that is not this key's.
        """
        if self.namespace is None or asked is None or asked == self.namespace:
            return asked if self.namespace is None else self.namespace
        raise Problem(
            403,
            "this key is for another namespace; leave the field out",
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
        self._states = [KeyState(key, clock) for key in known]

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
