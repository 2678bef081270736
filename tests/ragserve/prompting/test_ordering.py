"""Document order: what is canonical, what is cached, what tenants may know of each other."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragserve.engine import InvalidParamsError
from ragserve.prompting import ORDERS, Popularity, order_documents

BLOCK = 4
SYSTEM = (1, 2, 3, 4, 5)


class FakeProbe:
    """A cache of prefixes: a set of keys, each a hash of all that stands before."""

    root = b"root"

    def __init__(self) -> None:
        self.cached: set[bytes] = set()

    @staticmethod
    def keys(parent: bytes, token_ids: Sequence[int]) -> list[bytes]:
        keys = []
        for start in range(0, len(token_ids), BLOCK):
            block = bytes(token_ids[start : start + BLOCK])
            parent = hashlib.blake2b(parent + block, digest_size=16).digest()
            keys.append(parent)
        return keys

    def begins(self, parent: bytes, token_ids: Sequence[int], /) -> bool:
        return self.keys(parent, token_ids)[0] in self.cached

    def extend(self, parent: bytes, token_ids: Sequence[int], /) -> tuple[bytes, int]:
        keys = self.keys(parent, token_ids)
        missing = [key not in self.cached for key in keys]
        blocks = missing.index(True) if True in missing else len(keys)
        return keys[-1], min(len(token_ids), BLOCK * blocks)

    def store(self, *segments: Sequence[int], blocks: int | None = None) -> None:
        """Cache a prompt, or its first blocks."""
        keys, parent = [], self.root
        for segment in segments:
            keys += self.keys(parent, segment)
            parent = keys[-1]
        self.cached.update(keys[:blocks])

    def hit(self, *segments: Sequence[int]) -> int:
        """Leading tokens of a prompt that are cached."""
        total, parent = 0, self.root
        for segment in segments:
            parent, cached = self.extend(parent, segment)
            total += cached
            if cached < len(segment):
                break
        return total


def tokens(index: int, number: int) -> list[int]:
    """Documents of different lengths, which know their number."""
    return [number, *(20 + index for _ in range(5 + 2 * index))]


def popular(*ids: str) -> Popularity:
    popularity = Popularity()
    popularity.note("", ids)
    return popularity


def walk(probe: FakeProbe, ids: Sequence[str], popularity: Popularity | None = None) -> list[int]:
    return order_documents(
        "cache_aware", ids, popularity=popularity, probe=probe, system=SYSTEM, tokens=tokens
    )


def test_relevance_is_as_retrieved() -> None:
    assert order_documents("relevance", ["c", "a", "b"], popularity=popular("b")) == [0, 1, 2]
    assert all(order_documents(order, []) == [] for order in ORDERS)


def test_canonical_is_most_retrieved_first_then_by_id() -> None:
    ids = ["c", "a", "d", "b"]
    assert order_documents("canonical", ids) == [1, 3, 0, 2]
    popularity = popular("d", "d", "b", "c")
    assert order_documents("canonical", ids, popularity=popularity) == [2, 3, 0, 1]
    other = order_documents("canonical", ids, popularity=popularity, namespace="other")
    assert other == [1, 3, 0, 2]


@given(st.permutations(["a", "b", "c", "d", "e"]), st.lists(st.sampled_from("abcde")))
def test_canonical_is_one_order_whatever_the_relevance(ids: list[str], noted: list[str]) -> None:
    popularity = popular(*noted)
    ordered = [ids[i] for i in order_documents("canonical", ids, popularity=popularity)]
    counts = Counter(noted)
    assert ordered == sorted("abcde", key=lambda chunk_id: (-counts[chunk_id], chunk_id))


def test_cache_aware_follows_what_is_cached() -> None:
    ids = ["a", "b", "c", "d"]
    probe = FakeProbe()
    probe.store(SYSTEM, tokens(2, 1), tokens(0, 2))
    popularity = popular("d")
    assert walk(probe, ids, popularity) == [2, 0, 3, 1]  # then in canonical order
    # Without a probe, or with nothing in the cache, all of it is.
    assert walk(FakeProbe(), ids, popularity) == [3, 0, 1, 2]
    assert order_documents("cache_aware", ids, popularity=popularity) == [3, 0, 1, 2]


def test_cache_aware_prefers_what_saves_most() -> None:
    probe = FakeProbe()
    ids = ["a", "b", "c"]
    probe.store(SYSTEM, tokens(0, 1))
    probe.store(SYSTEM, tokens(1, 1))
    assert walk(probe, ids) == [1, 0, 2]  # b is longer
    probe.store(SYSTEM, tokens(0, 1), tokens(2, 2))
    assert walk(probe, ids) == [0, 2, 1]  # and a leads on


def test_a_document_whose_end_is_gone_ends_the_walk() -> None:
    probe = FakeProbe()
    probe.store(SYSTEM, tokens(1, 1), tokens(0, 2))
    probe.cached -= set(probe.keys(probe.keys(probe.root, SYSTEM)[-1], tokens(1, 1))[1:])
    assert walk(probe, ["a", "b", "c"]) == [1, 0, 2]  # its beginning is worth having
    probe.store(SYSTEM, tokens(0, 1))  # more than that, for a behind b is out of reach
    assert walk(probe, ["a", "b", "c"]) == [0, 1, 2]


def test_nothing_is_found_behind_a_system_prompt_that_is_gone() -> None:
    probe = FakeProbe()
    probe.store(SYSTEM, tokens(1, 1))
    probe.cached -= set(probe.keys(probe.root, SYSTEM)[:1])
    assert walk(probe, ["a", "b"]) == [0, 1]


def test_without_a_system_segment() -> None:
    probe = FakeProbe()
    probe.store(tokens(1, 1))
    assert order_documents("cache_aware", ["a", "b"], probe=probe, tokens=tokens) == [1, 0]


def test_a_document_without_tokens_stands_last_in_the_walk() -> None:
    probe = FakeProbe()
    probe.store(SYSTEM, [7, 7])
    order = order_documents(
        "cache_aware",
        ["a", "b"],
        probe=probe,
        system=SYSTEM,
        tokens=lambda index, number: [] if index == 0 else [7, 7],
    )
    assert order == [1, 0]


@given(
    st.lists(st.tuples(st.permutations([0, 1, 2, 3]), st.integers(0, 20)), min_size=0, max_size=6)
)
def test_cache_aware_finds_the_best_order(stored: list[tuple[list[int], int]]) -> None:
    """No order of the documents has more cached, where a last one that begins counts as whole."""
    probe = FakeProbe()
    for order, blocks in stored:
        segments = [tokens(index, number) for number, index in enumerate(order, 1)]
        probe.store(SYSTEM, *segments, blocks=blocks)

    def value(order: Sequence[int]) -> int:
        segments = [tokens(index, number) for number, index in enumerate(order, 1)]
        before = probe.hit(SYSTEM, *segments[:-1])
        is_whole = before == sum(map(len, (SYSTEM, *segments[:-1])))
        begins = probe.hit(SYSTEM, *segments) > before
        return before + (len(segments[-1]) if is_whole and begins else 0)

    chosen = walk(probe, ["a", "b", "c", "d"])
    assert sorted(chosen) == [0, 1, 2, 3]
    assert value(chosen) == max(map(value, permutations(range(4))))


def test_a_look_is_bounded() -> None:
    """Every order of many documents is cached: the first one that is found will do."""

    class Everything(FakeProbe):
        calls = 0

        def begins(self, parent: bytes, token_ids: Sequence[int], /) -> bool:
            return True

        def extend(self, parent: bytes, token_ids: Sequence[int], /) -> tuple[bytes, int]:
            self.calls += 1
            # All of it, but for what is deep down.
            return parent + b".", len(token_ids) if len(parent) < 20 else 1

    probe = Everything()
    order = order_documents(
        "cache_aware", [f"{i:02}" for i in range(30)], probe=probe, tokens=tokens
    )
    assert sorted(order) == list(range(30))
    assert probe.calls < 100


def test_counts_are_of_a_namespace() -> None:
    popularity = Popularity()
    popularity.note("one", ["a", "b", "a"])
    popularity.note("two", ["b"])
    assert (popularity.count("one", "a"), popularity.count("two", "a")) == (2, 0)
    assert (popularity.count("one", "b"), popularity.count("none", "b")) == (1, 0)
    assert popularity.top("one", 5) == ["a", "b"]
    assert popularity.top("one", 1) == ["a"]
    assert popularity.top("none", 1) == []
    assert len(popularity) == 3


def test_what_was_popular_gives_way() -> None:
    popularity = Popularity()
    for _ in range(100):
        popularity.note("", ["old"])
    popularity.note("other", ["old"])
    for _ in range(2000):
        popularity.note("", ["new"])
    assert popularity.top("", 1) == ["new"]
    assert popularity.count("", "old") < 50
    assert popularity.count("other", "old") == 1  # ages with its own retrievals only


def test_a_large_tenant_does_not_push_out_a_small_one() -> None:
    popularity = Popularity(capacity=100)
    popularity.note("small", ["a", "b"])
    for i in range(1000):
        popularity.note("large", [f"{i}"])
    assert popularity.top("small", 9) == ["a", "b"]
    assert len(popularity) <= 100


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.sampled_from(["", "x", "y"]), st.lists(st.sampled_from("abcdef")))),
)
def test_popularity_is_bounded(capacity: int, notes: list[tuple[str, list[str]]]) -> None:
    popularity = Popularity(capacity)
    for namespace, ids in notes:
        popularity.note(namespace, ids)
        held = sum(len(popularity.top(name, 99)) for name in ("", "x", "y"))
        assert held == len(popularity) <= capacity


def test_threads_count_together() -> None:
    popularity = Popularity()

    def note() -> None:
        for i in range(500):
            popularity.note("", ["a", f"{i}"])

    threads = [threading.Thread(target=note) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert popularity.count("", "a") == 2000
    assert all(popularity.count("", f"{i}") == 4 for i in range(500))


def test_bad_parameters() -> None:
    with pytest.raises(InvalidParamsError, match="capacity"):
        Popularity(0)
