"""BlockManager against a model, with stamped contents and copies that fail on demand.

The model keeps each sequence's tokens and the pool's books (``PoolModel``). After every step the
books agree and every sequence, in either tier, reads back what was written for its tokens.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from fake_storage import ListStorage
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pool_model import PoolModel

from allocator.config import EngineConfig
from allocator.content import TokenContent
from allocator.errors import NotHeld, OutOfBlocks, Refused, StorageError
from allocator.geometry import GEOMETRIES
from allocator.ids import BlockFlag
from allocator.invariants import check_manager
from allocator.manager import BlockManager
from allocator.plans import MovePlan
from allocator.torch_storage import TorchStorage

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=8)


@dataclass(eq=False)
class Held:
    """One sequence: its whole stream, how much of it is written, and where."""

    stream: list[int]
    written: int
    row: int | None
    host_row: int | None = None

    def keys(self, block_size: int) -> list[bytes]:
        return list(TokenContent(np.array(self.stream, np.int32)).keys(block_size))


def stamps(stream: list[int], start: int, stop: int) -> np.ndarray:
    """What the slots of these tokens hold: a number for the token and its place."""
    return np.array([8 * i + stream[i] + 1 for i in range(start, stop)], np.uint64)


class ManagerAgainstModel(RuleBasedStateMachine):
    """Sequences are made of few different tokens, so that prefixes collide all the time."""

    def make_storage(self, config: EngineConfig):
        return ListStorage(config.block_size)

    can_fail = True

    @initialize(
        num_blocks=st.one_of(st.integers(1, 5), st.integers(1, 12)),
        host_blocks=st.integers(0, 8),
        block_size=st.integers(1, 4),
        slab=st.one_of(st.none(), st.integers(1, 12)),
        policy=st.sampled_from(["lru", "fifo", "lfu"]),
        prefix_cache=st.sampled_from([True, True, True, False]),
    )
    def build(self, num_blocks, host_blocks, block_size, slab, policy, prefix_cache):
        self.size = block_size
        self.config = EngineConfig(
            num_blocks=num_blocks,
            num_swap_blocks=host_blocks,
            block_size=block_size,
            slab_blocks=slab,
            eviction=policy,
            prefix_cache=prefix_cache,
        )
        self.storage = self.make_storage(self.config)
        self.manager = BlockManager(self.config, self.storage)
        self.model = PoolModel(num_blocks, self.config.slab_size, policy)
        self.host = PoolModel(host_blocks, self.config.slab_size, "lru")
        self.sequences: list[Held] = []
        self.said: list[list[int]] = [[]]
        self.copied_on_write = 0

    # -- helpers -------------------------------------------------------------------------------------

    def table(self, held: Held) -> list[int]:
        if held.row is not None:
            return self.manager.tables.table(held.row).tolist()
        return self.manager.host_tables.table(held.host_row).tolist()

    def on_device(self) -> list[Held]:
        return [s for s in self.sequences if s.row is not None]

    def swapped(self) -> list[Held]:
        return [s for s in self.sequences if s.host_row is not None]

    def stamp(self, held: Held, start: int, stop: int) -> None:
        slots = np.array(self.slots(held, start, stop), np.int64)
        self.storage.write_stamps("device", slots, stamps(held.stream, start, stop))

    def slots(self, held: Held, start: int, stop: int) -> list[int]:
        table = self.table(held)
        return [table[i // self.size] * self.size + i % self.size for i in range(start, stop)]

    def maybe_fail(self, data, most: int = 2) -> bool:
        """Arm the storage, or not; ``disarm`` after."""
        if self.can_fail:
            self.storage.fail_after = data.draw(st.one_of(st.none(), st.integers(0, most)), "copies until one fails")
        return self.can_fail and self.storage.fail_after is not None

    def disarm(self) -> None:
        if self.can_fail:
            self.storage.fail_after = None

    def publish(self, held: Held, first: int, stop: int) -> None:
        """Publish keys of full blocks, on both sides."""
        keys = held.keys(self.size)[first:stop]
        self.manager.publish_keys(held.row, keys, first)
        if self.config.prefix_cache:
            self.model.insert(self.table(held)[first : first + len(keys)], keys)

    # -- sequences -----------------------------------------------------------------------------------

    @rule(data=st.data(), own=TOKENS, output=st.lists(st.integers(0, 1), max_size=9), keep=st.integers(0, 2))
    def admit(self, data, own, output, keep):
        """A prompt continues, repeats or cuts short something said before, or is new."""
        known = data.draw(st.sampled_from(self.said), "said before")
        cut = data.draw(st.integers(0, len(known)), "as far as")
        prompt = known[:cut] + own[: data.draw(st.integers(cut == 0, len(own)), "then own")]
        model, n = self.model, len(prompt)
        self.said.append(prompt + output)
        held = Held(prompt + output, n, None)
        keys = held.keys(self.size)
        matched = model.match(keys[: n // self.size]) if self.config.prefix_cache else []
        fresh = -(-n // self.size) - len(matched)
        revived = sum(model.is_cached(b) and not model.flags.get(b) for b in matched)
        needed = fresh + revived + keep
        if needed > model.allocatable():
            with pytest.raises(OutOfBlocks) as error:
                self.manager.admit(keys, n, keep=keep)
            assert (error.value.needed, error.value.allocatable) == (needed, model.allocatable())
            return
        admission = self.manager.admit(keys, n, keep=keep)
        held.row = admission.row
        self.sequences.append(held)
        table = self.table(held)
        assert table[: len(matched)] == matched
        assert admission.matched_blocks == len(matched)
        assert admission.hit_blocks == (len(matched) - 1 if len(matched) * self.size == n else len(matched))
        assert len(table) == len(matched) + fresh
        model.share(matched)
        model.take(table[len(matched) :])
        if len(matched) * self.size < n:
            self.stamp(held, len(matched) * self.size, n)
        if data.draw(st.integers(0, 4), "publish"):
            self.publish(held, len(matched), n // self.size)

    @precondition(lambda self: self.on_device())
    @rule(data=st.data())
    def decode(self, data):
        """Some sequences get room for a token and write it, as one batch."""
        open_ended = [s for s in self.on_device() if s.written < len(s.stream)]
        if not open_ended:
            return
        chosen = data.draw(st.lists(st.sampled_from(open_ended), unique=True, min_size=1))
        rows = np.array([s.row for s in chosen], np.int64)
        growing = [s for s in chosen if s.written == len(self.table(s)) * self.size]
        tails = [(s, self.table(s)[-1]) for s in chosen if s not in growing]
        copies = {b: min(sum(t == b for _, t in tails), self.model.ref(b) - 1) for _, b in tails}
        needed = len(growing) + sum(copies.values())
        failing = self.maybe_fail(data)
        try:
            if needed > self.model.allocatable():
                with pytest.raises(OutOfBlocks) as error:
                    self.manager.extend(rows)
                assert (error.value.needed, error.value.allocatable) == (needed, self.model.allocatable())
                return
            try:
                self.manager.extend(rows)
                whole = True
            except StorageError:
                assert failing
                whole = False
        finally:
            self.disarm()
        if not whole:
            self.model.make_free(sum(copies.values()))  # what the copies had already made room for
            assert [self.table(held)[-1] for held, _ in tails] == [old for _, old in tails]
            return
        for held, old in tails:
            if self.model.ref(old) < 2:
                assert self.table(held)[-1] == old
                continue
            new = self.table(held)[-1]
            assert new != old
            self.model.take([new])
            self.model.release([old])
            self.copied_on_write += 1
        assert self.manager.copy_on_write_blocks == self.copied_on_write
        self.model.take([self.table(s)[-1] for s in growing])
        for held in chosen:
            assert len(self.table(held)) == held.written // self.size + 1
            assert self.model.ref(self.table(held)[-1]) == 1, "a shared block would be written"
            self.stamp(held, held.written, held.written + 1)
            held.written += 1
        self.manager.write(rows, 1)
        for held in chosen:
            if held.written % self.size == 0:
                self.publish(held, held.written // self.size - 1, held.written // self.size)

    decode_again = decode  # the everyday step: twice as likely as the others

    @precondition(lambda self: self.on_device())
    @rule(data=st.data(), tail=st.lists(st.integers(0, 1), max_size=8))
    def fork(self, data, tail):
        parent = data.draw(st.sampled_from(self.on_device()))
        child = Held(parent.stream[: parent.written] + tail, parent.written, self.manager.fork(parent.row))
        assert self.table(child) == self.table(parent)
        self.model.share(self.table(child))
        self.sequences.append(child)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data):
        held = data.draw(st.sampled_from(self.sequences))
        ids = self.table(held)[::-1]
        if held.row is not None:
            self.manager.free(held.row)
            self.model.release(ids)
        else:
            self.manager.free_host(held.host_row)
            self.host.release(ids)
        self.sequences.remove(held)

    # -- tiers -----------------------------------------------------------------------------------------

    @precondition(lambda self: self.on_device())
    @rule(data=st.data())
    def swap_out(self, data):
        held = data.draw(st.sampled_from(self.on_device()))
        ids = self.table(held)
        if len(ids) > self.host.allocatable():
            with pytest.raises(OutOfBlocks) as error:
                self.manager.swap_out(held.row)
            numbers = (error.value.needed, error.value.allocatable, error.value.tier)
            assert numbers == (len(ids), self.host.allocatable(), "host")
            return
        failing = self.maybe_fail(data, 1)
        try:
            host_row = self.manager.swap_out(held.row)
        except StorageError:
            assert failing
            return
        finally:
            self.disarm()
        held.row, held.host_row = None, host_row
        self.host.take(self.table(held))
        self.model.release(ids[::-1])

    @precondition(lambda self: self.swapped())
    @rule(data=st.data(), keep=st.integers(0, 1))
    def swap_in(self, data, keep):
        held = data.draw(st.sampled_from(self.swapped()))
        model, host_ids = self.model, self.table(held)
        keys = held.keys(self.size)[: held.written // self.size] if self.config.prefix_cache else []
        resident = [model.block[k] for k in keys if k in model.block]
        missing = len(host_ids) - len(resident)
        needed = missing + sum(model.is_cached(b) and not model.flags.get(b) for b in resident) + keep
        assert self.manager.plan_swap_in(held.host_row, keys) == (missing, needed - keep)
        if needed > model.allocatable():
            with pytest.raises(OutOfBlocks) as error:
                self.manager.swap_in(held.host_row, keys, keep=keep)
            assert (error.value.needed, error.value.allocatable) == (needed, model.allocatable())
            return
        failing = self.maybe_fail(data, 1)
        try:
            row, copied = self.manager.swap_in(held.host_row, keys, keep=keep)
        except StorageError:
            # The blocks found on the device are held for a moment; what was evicted for the others is lost.
            assert failing
            model.share(resident)
            model.make_free(missing)
            model.release(resident[::-1])
            return
        finally:
            self.disarm()
        assert copied == missing
        held.row, held.host_row = row, None
        table = self.table(held)
        fresh = [b for i, b in enumerate(table) if i >= len(keys) or keys[i] not in model.block]
        assert [b for b in table if b not in fresh] == resident
        model.share(resident)
        free = model.loose_free()
        if len(fresh) <= len(free):
            lengths = sorted((length for _, length in model.runs(free)), reverse=True)
            fewest = next(i for i in range(len(lengths) + 1) if sum(lengths[:i]) >= len(fresh))
            assert len(model.runs(fresh)) == fewest
        model.take(fresh)
        model.insert(table[: len(keys)], keys)
        self.host.release(host_ids[::-1])

    # -- moves and size --------------------------------------------------------------------------------

    def run_moves(self, plan: MovePlan, act) -> bool:
        """Do what ``act`` does with ``plan``, and the same to the model; return whether all stages were done."""
        before = self.storage.copies if self.can_fail else 0
        try:
            act()
            whole = True
        except StorageError:
            whole = False
        done = len(plan.stages) if whole else 0
        if not whole:
            copying = [i for i, stage in enumerate(plan.stages) if len(stage.sources)]
            done = copying[self.storage.copies - before - 1]
        for i, stage in enumerate(plan.stages[: done + (not whole)]):
            assert not set(stage.sources.tolist()) & set(stage.destinations.tolist())
            lost = stage.evicted.tolist()
            assert all(self.model.is_cached(b) and not self.model.flags.get(b) for b in lost)
            for block in lost:
                self.model.forget(block)
            self.model.num_evicted += len(lost)
            if i == done:
                break
            assert not any(self.model.flags.get(b) for b in stage.sources.tolist())
            assert all(b in self.model.loose_free() for b in stage.destinations.tolist())
            self.model.move(stage.sources, stage.destinations)
        return whole

    @rule(
        data=st.data(),
        goal=st.sampled_from(["pack-low", "longest-run", "by-sequence"]),
        run=st.one_of(st.none(), st.integers(1, 12)),
        budget=st.one_of(st.none(), st.integers(1, 4)),
    )
    def compact(self, data, goal, run, budget):
        try:
            plan = self.manager.plan_compaction(goal, run, budget)
        except (OutOfBlocks, Refused):
            assert goal == "longest-run"
            assert run is not None
            return
        if budget is not None:
            assert plan.moved_blocks <= budget
        held_before = sum(self.contiguity(s) for s in self.on_device())
        self.maybe_fail(data)
        try:
            whole = self.run_moves(plan, lambda: self.manager.move(plan))
        finally:
            self.disarm()
        if whole and goal == "by-sequence":
            assert sum(self.contiguity(s) for s in self.on_device()) <= held_before - len(plan.stages)
        if whole and not plan.left and (budget is None or goal != "by-sequence"):
            assert not self.manager.plan_compaction(goal, run, None).stages

    def contiguity(self, held: Held) -> int:
        table = self.table(held)
        return 1 + sum(b != a + 1 or b % self.model.slab_size == 0 for a, b in itertools.pairwise(table))

    @rule(data=st.data(), num_blocks=st.integers(1, 16))
    def resize(self, data, num_blocks):
        model = self.model
        above = [b for b in range(num_blocks, model.num_blocks) if model.flags.get(b)]
        flagged_below = sum(bool(model.flags.get(b)) for b in range(min(num_blocks, model.num_blocks)))
        moving = sum(model.is_held(b) and not model.flags.get(b) for b in range(model.num_blocks))
        if num_blocks < model.num_blocks and (above or moving > num_blocks - flagged_below):
            with pytest.raises(Refused if above else OutOfBlocks) as error:
                self.manager.resize(num_blocks)
            if not above:
                assert (error.value.needed, error.value.allocatable) == (moving, num_blocks - flagged_below)
            return
        plan = self.manager.plan_resize(num_blocks)
        keyed = sum(model.is_cached(b) and not model.flags.get(b) for b in range(model.num_blocks))
        if num_blocks < model.num_blocks:
            assert plan.evicted_blocks == max(0, moving + keyed + flagged_below - num_blocks)
        self.maybe_fail(data, 1)
        if self.can_fail and data.draw(st.booleans(), "no memory"):
            self.storage.fail_resize = True
        grows = num_blocks > model.num_blocks
        try:
            whole = self.grow(num_blocks) if grows else self.run_moves(plan, lambda: self.manager.resize(num_blocks))
        finally:
            self.disarm()
            if self.can_fail:
                self.storage.fail_resize = False
        if whole:
            for block in range(num_blocks, model.num_blocks):
                model.flags.pop(block, None)
            model.num_blocks = num_blocks

    def grow(self, num_blocks: int) -> bool:
        try:
            self.manager.resize(num_blocks)
        except StorageError:
            return False
        return True

    # -- operators -------------------------------------------------------------------------------------

    @rule(data=st.data(), pinned=st.booleans())
    def change_pins(self, data, pinned):
        ids = data.draw(st.lists(st.integers(0, self.model.num_blocks - 1), max_size=3))
        (self.manager.pin if pinned else self.manager.unpin)(np.array(ids, np.int64))
        for block in ids:
            self.model.flags[block] = BlockFlag.PINNED if pinned else 0
        for block in (-1, self.model.num_blocks):
            with pytest.raises(NotHeld):
                self.manager.pin(np.array([0, block]))
            with pytest.raises(NotHeld):
                self.manager.unpin(np.array([block, 0]))

    @rule(n=st.integers(1, 4))
    def evict(self, n):
        assert self.manager.device.evict(n) == len(self.model.evict(n))

    # -- what holds after every step -------------------------------------------------------------------

    @invariant()
    def books_and_contents(self):
        if not hasattr(self, "model"):
            return
        check_manager(self.manager)
        self.model.compare(self.manager.device)
        assert sorted(self.manager.host.free_ids().tolist()) == sorted(self.host.loose_free())
        for held in self.sequences:
            tier = "device" if held.row is not None else "host"
            tables = self.manager.tables if held.row is not None else self.manager.host_tables
            row = held.row if held.row is not None else held.host_row
            assert int(tables.num_tokens[row]) == held.written
            slots = np.array(self.slots(held, 0, held.written), np.int64)
            assert self.storage.check_stamps(tier, slots, stamps(held.stream, 0, held.written)).all()


class ManagerOnTensors(ManagerAgainstModel):
    """The same sessions on torch tensors, where copies do not fail."""

    can_fail = False

    def make_storage(self, config: EngineConfig):
        return TorchStorage(GEOMETRIES["tiny"], config.block_size, "cpu", config.slab_size)


TestManagerAgainstModel = ManagerAgainstModel.TestCase
# Deep bugs need a fork, a partial block and an unlucky batch in one session.
TestManagerAgainstModel.settings = settings(
    max_examples=max(120, settings().max_examples), stateful_step_count=max(60, settings().stateful_step_count)
)
TestManagerOnTensors = ManagerOnTensors.TestCase
