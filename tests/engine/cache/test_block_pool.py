"""The block pool: layouts, keys, reference counts, eviction; against models that are obvious."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ragserve.engine import Retention
from ragserve.engine.cache.block_hash import BlockHash, block_hashes
from ragserve.engine.cache.block_pool import BlockPool
from ragserve.engine.cache.layout import BlockLayout
from ragserve.engine.cache.retention import RetentionPolicy

# -- layout -------------------------------------------------------------------------------


def blocks_by_hand(segments: list[int], block_size: int, num_tokens: int) -> list[list[int]]:
    """Positions that each block holds, put there one token after the other."""
    heads, total = set(), 0
    for length in segments:
        if length:
            heads.add(total)
        total += length
    blocks: list[list[int]] = []
    for position in range(num_tokens):
        if position in heads or len(blocks[-1]) == block_size:
            blocks.append([])
        blocks[-1].append(position)
    return blocks


@settings(deadline=None, max_examples=150)
@given(
    segments=st.lists(st.integers(0, 70), min_size=1, max_size=6).filter(any),
    block_size=st.integers(1, 32),
    generated=st.integers(0, 80),
)
def test_layout_is_what_placing_tokens_one_by_one_gives(
    segments: list[int], block_size: int, generated: int
) -> None:
    layout = BlockLayout(segments, block_size)
    total = sum(segments) + generated
    # Enough further tokens that every block which `total` reaches is complete at the end.
    blocks = blocks_by_hand(segments, block_size, total + block_size)
    for block, positions in enumerate(blocks):
        assert layout.start(block) == positions[0]
        assert {layout.block_of(position) for position in positions} == {block}
    starts = [positions[0] for positions in blocks]
    for count in range(len(starts) + 1):
        assert layout.starts(count) == starts[:count]
    ends = [positions[-1] for positions in blocks]
    for num_tokens in range(total + 1):
        assert layout.num_blocks(num_tokens) == sum(start < num_tokens for start in starts)
        # The last block by hand may be cut short, but it begins after `num_tokens`.
        assert layout.num_complete(num_tokens) == sum(end < num_tokens for end in ends)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_layout_at_block_boundaries(length: int) -> None:
    layout = BlockLayout([length], 16)
    assert layout.num_blocks(length) == -(-length // 16)
    assert layout.num_complete(length) == length // 16
    assert layout.num_blocks(0) == layout.num_complete(0) == 0


# -- keys ---------------------------------------------------------------------------------


def keys_of(segments: list[list[int]], namespace: str = "", block_size: int = 4) -> list[BlockHash]:
    layout = BlockLayout([len(segment) for segment in segments], block_size)
    return block_hashes([t for segment in segments for t in segment], layout, namespace)


def test_only_complete_blocks_have_keys_and_the_end_of_a_segment_completes_one() -> None:
    assert len(keys_of([[1, 2, 3]])) == 0
    assert len(keys_of([[1, 2, 3, 4]])) == 1
    assert len(keys_of([[1, 2, 3], [4]])) == 1
    assert len(keys_of([[1, 2, 3], [4, 5, 6, 7]])) == 2


def test_a_key_names_all_tokens_before_it() -> None:
    one, other = keys_of([[1, 2, 3, 4, 5, 6, 7, 8]]), keys_of([[9, 2, 3, 4, 5, 6, 7, 8]])
    assert not set(one) & set(other)
    longer = keys_of([[1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9]])
    assert longer[:2] == one


def test_a_document_at_another_place_has_other_keys() -> None:
    document = [5, 6, 7, 8]
    assert keys_of([[1, 2], document])[1] != keys_of([[1, 3], document])[1]
    assert keys_of([[1, 2], document])[1] != keys_of([document])[0]


@settings(deadline=None, max_examples=150)
@given(
    contents=st.lists(
        st.tuples(
            st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=4),
            st.sampled_from(["", "a", "b", "ab", "\x00", "\x00\x00", "\ud800"]),
        ),
        min_size=2,
        max_size=12,
    ),
    block_size=st.integers(1, 4),
)
def test_keys_are_equal_exactly_if_the_content_is(
    contents: list[tuple[list[list[int]], str]], block_size: int
) -> None:
    """Content: the namespace, and how all tokens up to the block's end lie in blocks."""
    seen: dict[BlockHash, object] = {}
    of_content: dict[object, BlockHash] = {}
    for segments, namespace in contents:
        tokens = [t for segment in segments for t in segment]
        lengths = [len(segment) for segment in segments]
        blocks = blocks_by_hand(lengths, block_size, len(tokens))
        for index, key in enumerate(keys_of(segments, namespace, block_size)):
            content = (
                namespace,
                tuple(tuple(tokens[p] for p in block) for block in blocks[: index + 1]),
            )
            assert seen.setdefault(key, content) == content
            assert of_content.setdefault(content, key) == key


def test_fields_cannot_run_into_each_other() -> None:
    """The same bytes split otherwise between the fields give other keys."""
    assert keys_of([[1], [2, 3]], block_size=2)[0] != keys_of([[1, 2], [3]], block_size=2)[0]
    # A namespace that spells what the hash is fed for a block.
    first = keys_of([[7, 7, 7, 7]])[0]
    spelled = first.decode("latin-1") + "\x04\x00\x00\x00"
    assert keys_of([[7, 7, 7, 7]], spelled)[0] not in keys_of([[7] * 8])
    # Token ids that differ only beyond the low byte.
    assert keys_of([[1, 0, 0, 0]]) != keys_of([[256, 0, 0, 0]])


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=40),
    cut=st.integers(0, 40),
    first=st.integers(1, 40),
)
def test_keys_go_on_from_known_ones(tokens: list[int], cut: int, first: int) -> None:
    first = min(first, len(tokens))
    layout = BlockLayout([first, len(tokens) - first], 3)
    whole = block_hashes(tokens, layout, "n")
    known = block_hashes(tokens[: max(1, cut)], layout, "n")
    assert block_hashes(tokens, layout, "n", known=known) == whole
    assert whole[: len(known)] == known, "they do not depend on what comes after"


# -- the pool -----------------------------------------------------------------------------

A, B, C, D = (bytes([number]) * 32 for number in range(4))


def allocated(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def cache(pool: BlockPool, key: BlockHash, retention: Retention = Retention.ANSWER) -> int:
    """One block, published and let go."""
    (block,) = allocated(pool, 1)
    pool.publish(block, key, RetentionPolicy(retention))
    pool.release([block])
    return block


def test_allocate_takes_all_or_nothing() -> None:
    pool = BlockPool(4)
    first = allocated(pool, 3)
    assert len(set(first)) == 3
    before = pool.statistics()
    assert pool.allocate(2) is None
    assert pool.statistics() == before
    assert pool.allocate(0) == []
    pool.release(first)
    assert sorted(allocated(pool, 4)) == [0, 1, 2, 3]


def test_an_unpublished_block_is_free_and_a_published_one_cached() -> None:
    pool = BlockPool(4)
    one, other = allocated(pool, 2)
    pool.publish(one, A, RetentionPolicy(Retention.ANSWER))
    assert pool.find([A]) == [one], "while it is held, too"
    pool.release([one, other])
    stats = pool.statistics()
    assert (stats.free, stats.cached, stats.held) == (3, 1, 0)
    assert pool.num_available == 4
    assert pool.find([A, B]) == [one]
    pool.check_integrity()


def test_find_stops_at_the_first_gap_and_changes_nothing() -> None:
    pool = BlockPool(4)
    a, _ = cache(pool, A), cache(pool, C)
    before = pool.statistics()
    assert pool.find([A, B, C]) == [a]
    assert pool.find([B, C]) == []
    assert pool.statistics() == before
    pool.check_integrity()


def test_find_is_not_a_use() -> None:
    pool = BlockPool(2)
    cache(pool, A)
    cache(pool, B)
    pool.find([A])
    pool.release(allocated(pool, 1))
    assert pool.find([A]) == []


def test_a_held_block_is_never_evicted_and_needs_every_holder_to_let_go() -> None:
    pool = BlockPool(2)
    block = cache(pool, A)
    assert pool.num_idle_of([block]) == 1
    pool.acquire([block])
    assert pool.num_idle_of([block]) == 0
    pool.acquire([block])
    assert pool.num_available == 1
    assert pool.allocate(2) is None
    pool.check_integrity([[block], [block]])
    pool.release([block])
    assert pool.allocate(2) is None
    pool.release([block])
    assert pool.num_available == 2
    pool.check_integrity()


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(3)
    block = cache(pool, A)
    assert block not in allocated(pool, 2)
    assert pool.find([A]) == [block]
    assert pool.statistics().evictions == 0
    assert allocated(pool, 1) == [block]
    assert pool.statistics().evictions == 1
    assert pool.find([A]) == []


def test_the_block_unused_for_longest_goes_first() -> None:
    pool = BlockPool(3)
    a, b, c = (cache(pool, key) for key in (A, B, C))
    pool.acquire([a])
    pool.release([a])
    assert [allocated(pool, 1) for _ in range(3)] == [[b], [c], [a]]


def test_the_end_of_a_prefix_goes_before_its_beginning() -> None:
    pool = BlockPool(3)
    blocks = allocated(pool, 3)
    for block, key in zip(blocks, (A, B, C), strict=True):
        pool.publish(block, key, RetentionPolicy(Retention.ANSWER))
    pool.release(blocks)
    for left in (2, 1, 0):
        allocated(pool, 1)
        assert pool.find([A, B, C]) == blocks[:left]


def test_lower_retention_goes_first_however_recent() -> None:
    pool = BlockPool(4)
    system = cache(pool, A, Retention.SYSTEM)
    old, new = cache(pool, B, Retention.DOCUMENT), cache(pool, C, Retention.DOCUMENT)
    answer = cache(pool, D, Retention.ANSWER)
    assert [allocated(pool, 1) for _ in range(4)] == [[answer], [old], [new], [system]]


def test_a_recycled_block_does_not_inherit_its_retention() -> None:
    pool = BlockPool(2)
    block = cache(pool, A, Retention.SYSTEM)
    cache(pool, B, Retention.SYSTEM)
    assert allocated(pool, 1) == [block]
    pool.publish(block, C, RetentionPolicy(Retention.ANSWER))
    pool.release([block])
    assert allocated(pool, 1) == [block], "an answer now"
    pool.check_integrity([[block]])


def test_of_two_blocks_with_one_content_the_first_is_found_and_the_other_private() -> None:
    pool = BlockPool(3)
    first, second = allocated(pool, 2)
    pool.publish(first, A, RetentionPolicy(Retention.ANSWER))
    pool.publish(second, A, RetentionPolicy(Retention.ANSWER))
    assert pool.find([A]) == [first]
    pool.check_integrity([[first, second]])
    pool.release([second])
    stats = pool.statistics()
    assert (stats.free, stats.cached) == (2, 0)
    pool.release([first])
    assert pool.find([A]) == [first]
    pool.check_integrity()


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize(
    ("one", "other"),
    [(Retention.ANSWER, Retention.SYSTEM), (Retention.SYSTEM, Retention.ANSWER)],
)
def test_the_higher_retention_of_two_publications_wins(
    one: Retention, other: Retention, held: bool
) -> None:
    pool = BlockPool(3)
    found, private, rival = allocated(pool, 3)
    pool.publish(found, A, RetentionPolicy(one))
    if not held:
        pool.release([found])
    pool.publish(private, A, RetentionPolicy(other))
    pool.check_integrity([[private, rival] + [found] * held])
    pool.release([private] + [found] * held)
    pool.publish(rival, B, RetentionPolicy(Retention.DOCUMENT))
    pool.release([rival])
    allocated(pool, 1)  # the private one was free
    assert allocated(pool, 1) == [rival]
    assert pool.find([A]) == [found]


def test_a_key_can_be_published_anew_after_its_block_was_evicted() -> None:
    pool = BlockPool(1)
    cache(pool, A)
    cache(pool, B)
    assert pool.find([A]) == []
    block = cache(pool, A)
    assert pool.find([A]) == [block]
    assert pool.find([B]) == []
    pool.check_integrity()


def test_clear_forgets_everything_but_takes_nothing_away() -> None:
    pool = BlockPool(4)
    held, idle = allocated(pool, 2)
    pool.publish(held, A, RetentionPolicy(Retention.SYSTEM))
    pool.publish(idle, B, RetentionPolicy(Retention.DOCUMENT))
    pool.release([idle])
    pool.clear()
    assert pool.find([A]) == pool.find([B]) == []
    stats = pool.statistics()
    assert (stats.free, stats.cached, stats.held) == (3, 0, 1)
    pool.check_integrity([[held]])
    pool.release([held])
    assert pool.statistics().free == 4
    pool.clear()
    pool.check_integrity()


def test_without_prefix_caching_nothing_is_found_or_kept() -> None:
    pool = BlockPool(2, enable_prefix_caching=False)
    (block,) = allocated(pool, 1)
    pool.publish(block, A, RetentionPolicy(Retention.SYSTEM))
    assert pool.find([A]) == []
    pool.acquire([block])  # sharing among holders works
    pool.release([block])
    pool.release([block])
    assert pool.statistics().free == 2
    pool.check_integrity()


def _leak(pool: BlockPool) -> None:
    pool.allocate(1)


def _release_twice(pool: BlockPool) -> None:
    pool.release(pool.find([A]))


def _lose_free(pool: BlockPool) -> None:
    pool._free.pop()


def _free_twice(pool: BlockPool) -> None:
    pool._free.append(pool._free[0])


def _free_cached(pool: BlockPool) -> None:
    pool._free[0] = pool.find([B])[0]


def _misplace(pool: BlockPool) -> None:
    pool._idle._level_of[pool.find([B])[0]] += 1


def _swap_keys(pool: BlockPool) -> None:
    pool._block_of[A], pool._block_of[B] = pool._block_of[B], pool._block_of[A]


def _lose_key(pool: BlockPool) -> None:
    del pool._block_of[A]


def _lose_cached_key(pool: BlockPool) -> None:
    pool._key_of[pool._block_of.pop(B)] = None


def _key_of_free(pool: BlockPool) -> None:
    pool._key_of[pool._free[0]] = C
    pool._block_of[C] = pool._free[0]


def _lose_level(pool: BlockPool) -> None:
    pool._idle._heap.clear()


@pytest.mark.parametrize(
    "corrupt",
    [
        _leak,
        _release_twice,
        _lose_free,
        _free_twice,
        _free_cached,
        _misplace,
        _swap_keys,
        _lose_key,
        _lose_cached_key,
        _key_of_free,
        _lose_level,
    ],
)
def test_the_integrity_check_notices(corrupt: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(6)
    held = allocated(pool, 1)
    pool.publish(held[0], A, RetentionPolicy(Retention.ANSWER))
    cache(pool, B, Retention.DOCUMENT)
    pool.check_integrity([held])
    corrupt(pool)
    with pytest.raises(RuntimeError):
        pool.check_integrity([held])


def test_the_integrity_check_compares_with_the_holders() -> None:
    pool = BlockPool(2)
    held = allocated(pool, 1)
    with pytest.raises(RuntimeError, match="reference count"):
        pool.check_integrity()
    with pytest.raises(RuntimeError, match="reference count"):
        pool.check_integrity([held, held])


class PoolMachine(RuleBasedStateMachine):
    """The pool against lists: what is found, who is evicted, what is left.

    By age alone it is known who goes; by worth, that nobody goes before what is found through it.
    """

    @initialize(size=st.integers(1, 8), caching=st.booleans(), cost_aware=st.booleans())
    def make(self, size: int, caching: bool, cost_aware: bool) -> None:
        self.size, self.caching, self.cost_aware = size, caching, cost_aware
        self.pool = BlockPool(size, enable_prefix_caching=caching, cost_aware=cost_aware)
        self.held: list[list[int]] = []
        self.found: dict[BlockHash, int] = {}
        self.idle: list[int] = []  # longest unused first
        self.pinned: list[list[BlockHash]] = []
        self.wanted: list[list[BlockHash]] = []

    @property
    def references(self) -> list[int]:
        return [block for blocks in self.held for block in blocks]

    def _rank(self, block: int) -> tuple[bool, bool]:
        """Pinned blocks go last, before them wanted ones."""
        key = next(key for key, b in self.found.items() if b == block)
        return (
            any(key in keys for keys in self.pinned),
            any(key in keys for keys in self.wanted),
        )

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        free = self.size - len(self.idle) - len(set(self.references))
        blocks = self.pool.allocate(count)
        if count > free + len(self.idle):
            assert blocks is None
            return
        assert blocks is not None
        assert len(set(blocks)) == count
        assert not set(blocks) & set(self.references)
        evicted = blocks[min(count, free) :]
        assert set(evicted) <= set(self.idle)
        ranks = {block: self._rank(block) for block in self.idle}
        expected = sorted(self.idle, key=lambda b: (ranks[b], self.idle.index(b)))
        if not self.cost_aware and not self.pinned and not self.wanted:
            assert evicted == expected[: len(evicted)], "in this order"
        assert [ranks[b] for b in evicted] == [ranks[b] for b in expected[: len(evicted)]]
        for block in evicted:
            self.idle.remove(block)
            self.found = {k: b for k, b in self.found.items() if b != block}
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        key=st.integers(0, 9),
        retention=st.sampled_from(Retention),
        seconds=st.sampled_from([None, None, 1e-9, 1e9]),
        cost=st.sampled_from([1.0, 0.0625, 1.5]),
    )
    def publish(
        self,
        data: st.DataObject,
        key: int,
        retention: Retention,
        seconds: float | None,
        cost: float,
    ) -> None:
        own = [b for b in self.references if b not in self.found.values()]
        if not own:
            return
        block, name = data.draw(st.sampled_from(own)), bytes([key]) * 32
        self.pool.publish(block, name, RetentionPolicy(retention, seconds), cost)
        if not self.caching:
            return
        found = self.found.setdefault(name, block)
        if found in self.idle and found != block:  # it may have been put elsewhere
            self.idle = [b for b in self.pool._idle if b in self.idle]
            self.idle.sort(key=list(self.pool._idle.next(self.size, lambda _: False)).index)

    @rule(keys=st.lists(st.integers(0, 9), max_size=4, unique=True), use=st.booleans())
    def find_and_acquire(self, keys: list[int], use: bool) -> None:
        names = [bytes([key]) * 32 for key in keys]
        expected = []
        for name in names:
            if name not in self.found:
                break
            expected.append(self.found[name])
        blocks = self.pool.find(names)
        assert blocks == expected
        assert self.pool.num_idle_of(blocks) == sum(b in self.idle for b in blocks)
        if use:
            self.pool.acquire(blocks)
            self.idle = [b for b in self.idle if b not in blocks]
            self.held.append(blocks)
            return
        # Held for a transfer: nothing has changed after it.
        before = self.pool.next_victims(self.size)
        places = self.pool.hold(blocks)
        self.pool.check_integrity([*self.held, blocks])
        self.pool.let_go(blocks, places)
        after = self.pool.next_victims(self.size)
        assert sorted(before) == sorted(after)
        if len(blocks) == 1 and self.cost_aware:
            return  # it is the oldest of its level now
        assert not blocks or self.cost_aware or set(blocks) <= set(self.idle + self.references)
        self.idle = [*[b for b in blocks if b in self.idle], *self.idle]
        self.idle = list(dict.fromkeys(self.idle))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(blocks)
        for block in reversed(blocks):
            if block not in self.references and block in self.found.values():
                self.idle.append(block)

    @rule(keys=st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True), on=st.booleans())
    def pin(self, keys: list[int], on: bool) -> None:
        if on:
            self.pinned.append([bytes([key]) * 32 for key in keys])
            self.pool.pin(self.pinned[-1])
        elif self.pinned:
            self.pool.unpin(self.pinned.pop())

    @rule(keys=st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True), on=st.booleans())
    def want(self, keys: list[int], on: bool) -> None:
        if on:
            self.wanted.append([bytes([key]) * 32 for key in keys])
            self.pool.protect(self.wanted[-1])
        elif self.wanted:
            self.pool.unprotect(self.wanted.pop())

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        self.found, self.idle = {}, []

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity(self.held)
        stats = self.pool.statistics()
        assert stats.cached == len(self.idle)
        assert stats.held == len(set(self.references))
        assert stats.free + stats.cached + stats.held == stats.total == self.size
        assert self.pool.num_available == stats.free + stats.cached


PoolMachine.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
test_pool_machine = PoolMachine.TestCase
