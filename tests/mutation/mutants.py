"""The planted bugs: each changes the text of one module of ``allocator`` and has to turn a test red.

A change names text that stands in its module exactly once; ``test_mutants_apply`` says so when it does not any more.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One bug.

    Attributes:
        name: What goes wrong.
        module: File in ``allocator/``.
        tests: Tests that should see it, in the order in which they are run: ``engine`` is ``test_engine.py``.
        changes: Texts, and what stands there instead.
    """

    name: str
    module: str
    tests: str
    changes: tuple[tuple[str, str], ...]

    def planted_in(self, text: str) -> str:
        """Return a module's text with the bug in it.

        Raises:
            ValueError: The text has moved on: the mutant has to be written anew.
        """
        for old, new in self.changes:
            if text.count(old) != 1:
                raise ValueError(f"{self.module}: {self.name!r} is stale: {text.count(old)} places read {old!r}")
            text = text.replace(old, new)
        return text


MUTANTS: tuple[Mutant, ...] = (
    # -- pool --
    Mutant(
        "evicts more than needed",
        "pool.py",
        "model_pool pool_by_hand eviction",
        (("self._evict(n - len(free))", "self._evict(min(n, self.num_cached - self._withheld_cached))"),),
    ),
    Mutant(
        "shared never becomes sole",
        "pool.py",
        "model_manager model_pool pool_by_hand eviction",
        (("alone = ids[facts.refs[ids] == 1]", "alone = ids[facts.refs[ids] == 0]"),),
    ),
    Mutant(
        "order does not follow moves",
        "pool.py",
        "eviction pool_by_hand model_pool",
        (("            self._order.rename(remap)\n", "            pass\n"),),
    ),
    Mutant(
        "free list keeps ids above the end",
        "pool.py",
        "model_pool pool_by_hand eviction",
        (("self._free.replace(ids[ids < num_blocks])", "self._free.replace(ids)"),),
    ),
    Mutant(
        "stale eviction entries survive a shrink",
        "pool.py",
        "engine pool_by_hand model_pool eviction",
        (("        self._order.forget_stale(self.facts)  #", "        #"),),
    ),
    Mutant(
        "pinned free blocks handed out",
        "pool.py",
        "model_pool pool_by_hand eviction",
        (
            (
                "            self._withheld_free += len(idle_free)\n            self._drop_from_free_list()",
                "            self._withheld_free += len(idle_free)",
            ),
        ),
    ),
    Mutant(
        "unpinned cached blocks stay withheld",
        "pool.py",
        "model_manager pool_by_hand model_pool eviction",
        (("        self._withheld_cached -= int(np.count_nonzero(facts.state[bare] == CACHED))\n", ""),),
    ),
    Mutant(
        "lfu keeps old uses",
        "pool.py",
        "eviction pool_by_hand model_pool",
        (("            facts.uses[ids] = 0\n", ""),),
    ),
    Mutant(
        "contiguous first fit",
        "pool.py",
        "model_pool pool_by_hand eviction",
        (
            (
                "start = int(starts[fits[np.argmin(lengths[fits])]])\n                return self._take",
                "start = int(starts[fits[0]])\n                return self._take",
            ),
        ),
    ),
    Mutant(
        "compact allocation takes the shortest",
        "pool.py",
        "model_pool pool_by_hand eviction",
        (("else int(np.argmax(lengths))", "else int(np.flatnonzero(lengths)[np.argmin(lengths[lengths > 0])])"),),
    ),
    Mutant(
        "double free in a small pool",
        "pool.py",
        "model_pool pool_by_hand eviction",
        (("distinct = self.num_blocks - int(np.count_nonzero(state)) == len(self._free) + n", "distinct = True"),),
    ),
    Mutant(
        "double free of a few",
        "facts.py",
        "model_pool pool_by_hand eviction reservation",
        (
            (
                "                for other in block_ids[:done]:\n"
                "                    states[other] = SOLE\n"
                "                return False",
                "                return False",
            ),
        ),
    ),
    Mutant(
        "double free in a large pool",
        "pool.py",
        "model_pool pool_by_hand eviction",
        (("distinct = mark[ids].tobytes() == ramp_bytes", "distinct = True"),),
    ),
    # -- manager --
    Mutant(
        "releases head first",
        "manager.py",
        "model_manager engine",
        (
            (
                "self.device.release_distinct(self.tables.table(row)[::-1].copy())",
                "self.device.release_distinct(self.tables.table(row).copy())",
            ),
        ),
    ),
    Mutant(
        "full hit counted whole",
        "manager.py",
        "model_manager engine",
        (("hits = len(matched) - (len(matched) * self.block_size == num_tokens)", "hits = len(matched)"),),
    ),
    Mutant(
        "copy-on-write overcounted",
        "manager.py",
        "model_manager engine",
        (("                left[block] = holders - 1\n", ""),),
    ),
    Mutant(
        "copy-on-write copies another block",
        "transfers.py",
        "model_manager engine",
        (('CopyJob("device", old, "device", new)', 'CopyJob("device", old - (old > 0), "device", new)'),),
    ),
    Mutant(
        "copy-on-write keeps the old reference",
        "transfers.py",
        "model_manager engine",
        (("                pool.release(old)  #", "                #"),),
    ),
    Mutant(
        "failed copy-on-write leaks",
        "transfers.py",
        "transfers engine model_manager",
        (("abort=lambda: pool.unreserve(new),", "abort=lambda: None,"),),
    ),
    Mutant(
        "failed swap out leaks host blocks",
        "transfers.py",
        "model_manager engine",
        (("                host.release(host_ids)\n", ""),),
    ),
    Mutant(
        "failed swap in leaks",
        "transfers.py",
        "model_manager engine",
        (("abort=lambda: manager.release_row(row),", "abort=lambda: None,"),),
    ),
    Mutant(
        "tables not re-pointed",
        "transfers.py",
        "model_manager engine",
        (("        manager.tables.rename(remap)\n", ""),),
    ),
    Mutant(
        "failed move keeps destinations",
        "transfers.py",
        "engine model_manager transfers",
        (("abort=lambda: pool.unreserve(stage.destinations),", "abort=lambda: None,"),),
    ),
    Mutant(
        "copies fence nothing",
        "transfers.py",
        "transfers",
        (("            pool.fence(block_ids)\n", "            pass\n"), ("pool.unfence(block_ids)", "pass")),
    ),
    Mutant(
        "a fence ends with the first copy",
        "pool.py",
        "transfers",
        (("last[i] = more == 0", "last[i] = True"),),
    ),
    Mutant(
        "rows not taken while they are copied",
        "transfers.py",
        "transfers executor",
        (("        self._manager.sequences.take(transfer.rows)\n", ""),),
    ),
    Mutant(
        "nobody is woken when a copy ends",
        "locks.py",
        "transfers",
        (("        self._changed.notify_all()\n", ""),),
    ),
    Mutant(
        "a row that went away is used after the wait",
        "manager.py",
        "transfers",
        (("if [self.tables.births[row] for row in rows] != births:", "if False:"),),
    ),
    Mutant(
        "hands out blocks above the end of a shrink",
        "transfers.py",
        "transfers",
        (("above = np.flatnonzero(pool.facts.state[num_blocks:] == FREE) + num_blocks", "above = stage.evicted[:0]"),),
    ),
    Mutant(
        "blocks released during a compaction come back to life",
        "transfers.py",
        "transfers",
        (("stay = (facts.state[stage.sources] == FREE) | (", "stay = ("),),
    ),
    Mutant(
        "pinned blocks move",
        "transfers.py",
        "transfers",
        ((" | ((facts.flags[stage.sources] & BlockFlag.PINNED) != 0)", ""),),
    ),
    Mutant(
        "plans that are out of date are carried out",
        "transfers.py",
        "transfers",
        (("            or (state[stage.sources] == FREE).any()\n", ""),),
    ),
    Mutant(
        "copies committed before they are due",
        "pipeline.py",
        "executor",
        (("self._under_way[0].due_step <= step:", "self._under_way[0].ticket.done:"),),
    ),
    Mutant(
        "copies committed in another order",
        "pipeline.py",
        "executor",
        (
            ("copy = self._under_way[0]", "copy = self._under_way[-1]"),
            ("self._under_way.popleft()", "self._under_way.pop()"),
        ),
    ),
    Mutant(
        "failed copies are committed",
        "pipeline.py",
        "executor engine",
        (("if ticket.error is not None:", "if False:"),),
    ),
    Mutant(
        "slots are never free again",
        "executor.py",
        "executor",
        (("        self._slots.release()\n", ""),),
    ),
    Mutant(
        "copies carried out in reverse order",
        "executor.py",
        "executor",
        (("queue.SimpleQueue[CopyTicket | None] = queue.SimpleQueue()", "queue.LifoQueue = queue.LifoQueue()"),),
    ),
    Mutant(
        "the last writer of a block does not wait for its copy",
        "room.py",
        "executor engine",
        (("        at_once &= ~np.isin(rows, manager.fenced_tails(rows))\n", ""),),
    ),
    Mutant(
        "forks never copy", "manager.py", "model_manager engine", (("            self._may_share_tails = True\n", ""),)
    ),
    Mutant(
        "copy-on-write forgets other rows",
        "manager.py",
        "engine model_manager",
        (("self._may_share_tails = len(rows) < len(tables.rows())", "self._may_share_tails = False"),),
    ),
    Mutant(
        "admit forgets revived blocks",
        "manager.py",
        "engine model_manager",
        (("self.require(needed + self.count_idle(shared), keep)", "self.require(needed, keep)"),),
    ),
    Mutant(
        "swap in ignores residents for room",
        "transfers.py",
        "engine model_manager",
        (
            (
                "manager.require(len(missing) + manager.count_idle(resident), keep)",
                "manager.require(len(missing), keep)",
            ),
        ),
    ),
    Mutant(
        "growing never copies",
        "manager.py",
        "grow",
        (("self.transfers.run(self.transfers.begin_copy_on_write(np.array([row])))", "pass"),),
    ),
    Mutant(
        "growing forgets its own copy for room",
        "manager.py",
        "grow",
        (("self.require(fresh + is_copied, 0)", "self.require(fresh, 0)"),),
    ),
    Mutant(
        "counts are written beside the lock",
        "manager.py",
        "grow",
        (("        with self.lock:  # another thread's new row", "        if True:  # another thread's new row"),),
    ),
    # -- compaction --
    Mutant(
        "shrink evicts the youngest",
        "compaction.py",
        "compaction",
        (
            (
                "evicted = shape.eviction_order[:excess]",
                "evicted = shape.eviction_order[len(shape.eviction_order) - excess :]",
            ),
        ),
    ),
    Mutant(
        "pack boundary ignores pins",
        "compaction.py",
        "compaction",
        (("places = np.concatenate(([0], np.cumsum(~shape.stuck)))", "places = np.arange(shape.num_blocks + 1)"),),
    ),
    Mutant(
        "window over a slab end",
        "compaction.py",
        "compaction",
        (
            (
                "(sums(shape.stuck) == 0) & (starts // shape.slab_size == (starts + n - 1) // shape.slab_size)",
                "(sums(shape.stuck) == 0)",
            ),
        ),
    ),
    Mutant(
        "rescued blocks outside the budget",
        "compaction.py",
        "compaction",
        (("sources, elsewhere = sources[:count], elsewhere[: max_moves - count]", "sources = sources[:count]"),),
    ),
    # -- engine --
    Mutant(
        "preempts the first",
        "room.py",
        "engine",
        (
            (
                "self.preempt(victim)",
                "self.preempt(scheduler.running[0])",
            ),
        ),
    ),
    Mutant(
        "watermark never waived",
        "admission.py",
        "engine admission",
        (("        if not kept:\n            return 0, 0\n", ""),),
    ),
    Mutant(
        "resumed counted as queries",
        "admission.py",
        "engine",
        (
            (
                "        if not sequence.resumed:\n            self._count_query",
                "        if True:\n            self._count_query",
            ),
        ),
    ),
    Mutant(
        "skips over arrivals",
        "skipping.py",
        "engine",
        (
            (
                "    if (until := _next_client_step(engine)) is not None:\n        steps = min(steps",
                "    if (until := None) is not None:\n        steps = min(steps",
            ),
        ),
    ),
    Mutant(
        "skips over what clients do at a token",
        "scheduler.py",
        "scripts",
        (("[s.next_stop for s in decoding]", "[s.num_target for s in decoding]"),),
    ),
    Mutant(
        "skips over clients that hang up",
        "skipping.py",
        "scripts",
        (("steps = [engine.lifecycle.next_deadline()]", "steps = [None]"),),
    ),
    Mutant(
        "waits for deadlines of those who ended",
        "scripts.py",
        "scripts",
        (("while self._due and not is_unfinished(self._due[0][1]):", "while False:"),),
    ),
    Mutant(
        "a child forgets its script",
        "lifecycle.py",
        "scripts",
        (("            acts=token_acts(script),\n", ""),),
    ),
    Mutant(
        "hangs up and goes on",
        "lifecycle.py",
        "scripts",
        (("                self.cancel(sequence)\n                return\n", "                return\n"),),
    ),
    Mutant(
        "a run is torn by compaction",
        "manager.py",
        "contiguous",
        (("order, slab_size, self.fixed_blocks())", "order, slab_size)"),),
    ),
    Mutant(
        "a run is torn by a plan made before it",
        "transfers.py",
        "contiguous",
        (("            or np.isin(stage.sources, self._manager.fixed_blocks()).any()\n", ""),),
    ),
    Mutant(
        "a run is not freed where it is taken",
        "admission.py",
        "auto_compaction",
        (("if engine.compactor.make_run(error.needed):", "if False:"),),
    ),
    Mutant(
        "a run comes back from swap in pieces",
        "transfers.py",
        "contiguous",
        (("pool.allocate_contiguous(len(missing)) if one_run else pool", "pool"),),
    ),
    Mutant(
        "a run is found by its content",
        "lifecycle.py",
        "contiguous",
        (("config.prefix_cache and not request.contiguous", "config.prefix_cache"),),
    ),
    Mutant(
        "waits for ever for a run that cannot be",
        "admission.py",
        "contiguous",
        (("if engine.scheduler.running or len(engine.copies) or longest >= error.needed:", "if longest >= 0:"),),
    ),
    Mutant(
        "counts a lack of a run each step",
        "admission.py",
        "contiguous",
        (('if sequence.reason_kind != "contiguous":', "if True:"),),
    ),
    Mutant(
        "a torn run passes the laws",
        "invariants.py",
        "contiguous",
        (("if (np.diff(tables.table(row)) != 1).any():", "if False:"),),
    ),
    Mutant(
        "refuses what just fits",
        "lifecycle.py",
        "engine",
        (("if needed > size:", "if needed >= size:"),),
    ),
    Mutant(
        "no late refusal",
        "admission.py",
        "engine",
        (
            (
                "if not num_running and not len(engine.copies) and needs_more:",
                "if False:",
            ),
        ),
    ),
    Mutant(
        "cancel strands host blocks",
        "lifecycle.py",
        "engine",
        (
            (
                "            self._engine.swaps.leave_host(sequence)\n        self._engine.scheduler.stop(sequence)",
                "            sequence.host_row = None\n        self._engine.scheduler.stop(sequence)",
            ),
        ),
    ),
    Mutant(
        "stamped one late",
        "compute.py",
        "engine",
        (("positions.append(np.arange(start, stop", "positions.append(np.arange(start + 1, stop + 1"),),
    ),
    Mutant(
        "keys published late",
        "engine.py",
        "engine",
        (("        self.manager.publish_keys(sequence.row, keys, first, tokens=tokens)\n", "        pass\n"),),
    ),
    Mutant(
        "skips one too many",
        "skipping.py",
        "engine",
        (("min(budget, int(room[room.argmin()]))", "min(budget, int(room[room.argmin()]) + 1)"),),
    ),
    # -- scheduler --
    Mutant(
        "returns in order of preemption",
        "scheduler.py",
        "scheduler engine",
        (
            (
                "            bisect.insort(self.waiting, sequence, key=_order)",
                "            self.waiting.append(sequence)",
            ),
        ),
    ),
    Mutant(
        "held sequences come back alone",
        "scheduler.py",
        "scheduler engine",
        (("for s in self.waiting if not s.held and (", "for s in self.waiting if ("),),
    ),
    Mutant(
        "nobody ages",
        "scheduler.py",
        "scheduler",
        (("return left + AGEING_TOKENS * sequence.arrived_step, ", "return left, "),),
    ),
    Mutant(
        "victims of any class",
        "scheduler.py",
        "scheduler admission",
        (("return min(candidates, key=lambda s: (s.priority, -s.seq_id))", "return candidates[-1]"),),
    ),
    # -- admission --
    Mutant(
        "begun prompts not kept room for",
        "admission.py",
        "admission",
        (("keep = watermark + begun", "keep = watermark"),),
    ),
    Mutant(
        "lower classes preempted in vain",
        "admission.py",
        "admission",
        (("if manager.count_released(tables) + engine.copies.pending_blocks < shortage:", "if False:"),),
    ),
    Mutant(
        "matched blocks cost budget",
        "admission.py",
        "admission",
        (("max(1, stop - start)", "stop"),),
    ),
    Mutant(
        "granted tokens taken back",
        "admission.py",
        "admission",
        (("scheduler.next_victim(self._granted)", "scheduler.next_victim()"),),
    ),
    Mutant(
        "skips over the room a preemption left",
        "engine.py",
        "admission",
        (("steps = 1 if short or scheduler.prefilling", "steps = 1 if scheduler.prefilling"),),
    ),
    Mutant(
        "skips over the end of a thrash window",
        "skipping.py",
        "admission",
        (
            (
                "    if (change := engine.thrash.next_change()) is not None:\n"
                "        steps = min(steps, change - engine.step)\n    return max(1, steps)",
                "    return max(1, steps)",
            ),
        ),
    ),
    Mutant(
        "room that was never written to is swapped",
        "swaps.py",
        "admission",
        (("        manager.trim(sequence.row)", "        #"),),
    ),
    # -- thrash --
    Mutant("thrash never seen", "thrash.py", "thrash admission", (("or lost <= gained", "or lost >= 0"),)),
    Mutant(
        "limit never eased",
        "thrash.py",
        "thrash admission",
        (("self.limit = 2 * self.limit if 2 * self.limit < self.max_running else None", "pass"),),
    ),
    # -- auto_compaction --
    Mutant(
        "no hysteresis",
        "auto_compaction.py",
        "auto_compaction",
        (("return now.ratio <= STOP_SHARE * threshold_ratio", "return now.ratio <= threshold_ratio"),),
    ),
    Mutant(
        "no cool-down",
        "auto_compaction.py",
        "auto_compaction",
        (("step if reached or idle else step + COOL_DOWN_STEPS", "step"),),
    ),
    Mutant(
        "packing low evicts",
        "compaction.py",
        "auto_compaction",
        (("    if keep_cached:\n", "    if False:\n"),),
    ),
    # -- eviction --
    Mutant(
        "pinned cached blocks evicted",
        "eviction.py",
        "eviction model_pool",
        (("            if facts.num_flagged:\n                live = current & (facts.flags[ids] == 0)\n", ""),),
    ),
    Mutant(
        "lru newest first",
        "eviction.py",
        "eviction model_pool",
        (
            (
                "        self._records.append((int(facts.stamp[block_ids[0]]), block_ids))",
                "        self._records.appendleft((int(facts.stamp[block_ids[0]]), block_ids))",
            ),
        ),
    ),
    # -- storage --
    Mutant("copies run over a slab end", "storage.py", "storage", ((" | (dst[1:] % destination_slab == 0)", ""),)),
    # -- facts --
    Mutant(
        "insertion time does not move",
        "facts.py",
        "model_manager eviction model_pool",
        (
            (
                "(self.state, self.refs, self.stamp, self.inserted, self.uses",
                "(self.state, self.refs, self.stamp, self.uses",
            ),
        ),
    ),
    # -- block_table --
    Mutant(
        "growing table loses its ids",
        "block_table.py",
        "engine block_table",
        (("        start = self._start[row]\n        self._arena[start : start + len(ids)] = ids\n", ""),),
    ),
    # -- metrics --
    Mutant(
        "contiguity across slabs",
        "metrics.py",
        "metrics",
        (("        starts |= block_ids % slab_size == 0\n", "        pass\n"),),
    ),
    # -- observing --
    Mutant(
        "the map forgets changes that only the other buffer got",
        "observing.py",
        "observing",
        (("            for place in self._places:\n", "            for place in self._places[-1:]:\n"),),
    ),
    Mutant(
        "a shared block keeps its owner when that one leaves",
        "observing.py",
        "observing",
        (("        out.owner[looks[-1].shared] = looks[-1].first_rows\n", ""),),
    ),
    Mutant(
        "a block whose other holders left keeps their row",
        "observing.py",
        "observing",
        (("if ((facts.state[unshared] & HOLDERS_MASK) == SOLE).any():", "if False:"),),
    ),
    Mutant(
        "a tail that filled up stays partial in the map",
        "observing.py",
        "observing",
        (("        out.fill[written.partial] = self._usual_fill(facts.state[written.partial])\n", ""),),
    ),
    Mutant(
        "the map keeps the key of a block that was evicted and used again",
        "pool.py",
        "observing",
        (("        self.facts.rekeyed.note(block_ids)\n", ""),),
    ),
    Mutant(
        "a row that is used again is told of in part",
        "block_table.py",
        "block_table observing",
        (("        self._told[row] = 0\n", ""),),
    ),
    # -- free_list --
    Mutant(
        "free list forgets to spill",
        "free_list.py",
        "model_pool",
        (("            self._spill(len(self.front))\n            top = self.top", "            top = self.top"),),
    ),
    Mutant(
        "free list spills too many",
        "free_list.py",
        "model_pool",
        (
            (
                "        del self.front[:count]\n        self.put_many(moved)",
                "        del self.front[: count + 1]\n        self.put_many(moved)",
            ),
        ),
    ),
    # -- content --
    Mutant(
        "a fork keeps the parent's keys",
        "content.py",
        "content engine",
        (
            (
                "return self.parent.keys(block_size, key_hash)[: self.at // block_size]",
                "return self.parent.keys(block_size, key_hash)",
            ),
        ),
    ),
    # -- torch_storage --
    Mutant(
        "copies into the wrong slab",
        "torch_storage.py",
        "storage",
        (
            (
                "                    dst_slab, dst = divmod(destination, self.slab_size)",
                "                    dst_slab, dst = source // self.slab_size, destination % self.slab_size",
            ),
        ),
    ),
    # -- hashing --
    Mutant(
        "keys without the parent",
        "hashing.py",
        "hashing prefix_exact",
        (
            (
                "keys = [parent := digest(parent + piece) for piece in pieces]",
                "keys = [digest(piece) for piece in pieces]",
            ),
        ),
    ),
    Mutant(
        "sha256 keys without what came before",
        "hashing.py",
        "hashing prefix_exact",
        (("            state.update(piece)\n", "            state = hashlib.sha256(piece)\n"),),
    ),
    Mutant(
        "no salt",
        "hashing.py",
        "hashing prefix_exact",
        (("xxhash.xxh3_128_digest(salt)", 'xxhash.xxh3_128_digest(b"")'),),
    ),
    # -- prefix_cache --
    Mutant(
        "a hit is not compared",
        "prefix_cache.py",
        "prefix_exact model_pool",
        (("if not lineage or not self._holds(ids, tokens):", "if not lineage:"),),
    ),
    Mutant(
        "a hit may have another parent",
        "prefix_cache.py",
        "prefix_exact model_pool",
        (("if not lineage or not self._holds(ids, tokens):", "if not self._holds(ids, tokens):"),),
    ),
    Mutant(
        "a slow match goes on after a mismatch",
        "prefix_cache.py",
        "prefix_exact model_pool",
        (
            (
                "self._holds(block_ids[position : position + 1], own):\n                break",
                "self._holds(block_ids[position : position + 1], own):\n                continue",
            ),
        ),
    ),
    Mutant(
        "a displaced block keeps its key",
        "prefix_cache.py",
        "prefix_exact model_pool",
        (
            (
                "                self._keys[owner] = _NO_KEY\n                self._block_of[key] = block",
                "                self._block_of[key] = block",
            ),
        ),
    ),
    Mutant(
        "a moved block's key stays behind",
        "prefix_cache.py",
        "prefix_exact model_pool",
        (
            (
                "            if self._block_of.get(key) == source:\n"
                "                self._block_of[key] = destination\n",
                "            pass\n",
            ),
        ),
    ),
    Mutant(
        "an insertion forgets what came before",
        "prefix_cache.py",
        "prefix_exact model_pool",
        (("            self._parent[ids[0]] = parent\n", ""),),
    ),
    # -- reservation --
    Mutant(
        "a release looks for a pin too early",
        "reservation.py",
        "reservation explorer",
        (
            (
                "                    if self.pool.facts.num_flagged:\n"
                "                        self._return_surplus(mine)\n"
                "                    return\n",
                "                    return\n",
            ),
        ),
    ),
    Mutant(
        "a larger release looks for a pin too early",
        "reservation.py",
        "reservation explorer",
        (
            (
                "        if len(mine.blocks) > 2 * SLAB or facts.num_flagged:\n",
                "        if len(mine.blocks) > 2 * SLAB:\n",
            ),
        ),
    ),
    Mutant(
        "a pin leaves what is reserved",
        "reservation.py",
        "reservation explorer",
        (("            self._steal_all()\n\n    def unpin", "\n    def unpin"),),
    ),
    Mutant(
        "nothing is stolen back",
        "reservation.py",
        "reservation explorer",
        (
            (
                "            # Blocks that are promised but unused are better given out than cached ones evicted.\n"
                "            self._steal_all()\n",
                "            pass\n",
            ),
        ),
    ),
    Mutant(
        "a refill takes all there is",
        "reservation.py",
        "reservation explorer",
        (("slab = min(SLAB, pool.num_free_listed // 2) if not", "slab = min(SLAB, pool.num_free_listed) if not"),),
    ),
    Mutant(
        "a refill leaves blocks free",
        "reservation.py",
        "reservation explorer",
        (("                pool.facts.state[fresh] = RESERVED\n", ""),),
    ),
    Mutant(
        "what was taken is lost when others stole the rest",
        "reservation.py",
        "reservation explorer",
        (
            (
                "                state[block] = RESERVED\n            blocks += taken\n",
                "                state[block] = RESERVED\n",
            ),
        ),
    ),
    Mutant(
        "who asks for too much makes others fail",
        "reservation.py",
        "reservation explorer",
        (("        if len(blocks) < n:\n            return self._refill(mine, n)\n", ""),),
    ),
    Mutant(
        "a steal copies and then clears",
        "reservation.py",
        "reservation explorer",
        (
            (
                "        back = _pop_until(reservation.blocks, 0)\n",
                "        back = list(reservation.blocks)\n        reservation.blocks.clear()\n",
            ),
        ),
    ),
    Mutant(
        "surplus goes back without the lock",
        "reservation.py",
        "reservation explorer",
        (("        with self.lock:\n            keep = 0", "        if True:\n            keep = 0"),),
    ),
    Mutant(
        "a thread that ends keeps its blocks",
        "reservation.py",
        "reservation explorer",
        (("                self.pool._put_back(_pop_until(self.mine.blocks, 0))\n", ""),),
    ),
    Mutant(
        "a thread that ends takes its counts with it",
        "reservation.py",
        "reservation explorer",
        (("        self.pool.num_allocated += reservation.handed_out\n", ""),),
    ),
    Mutant(
        "idle reservations are never seen as idle",
        "reservation.py",
        "reservation explorer",
        (("                reservation.seen = used\n", "                pass\n"),),
    ),
    Mutant(
        "every reservation counts as idle",
        "reservation.py",
        "reservation explorer",
        (("if used == reservation.seen or not reservation.thread.is_alive():", "if True:"),),
    ),
    Mutant(
        "surplus keeps too much",
        "reservation.py",
        "reservation explorer",
        (("        if len(mine.blocks) > 2 * SLAB or facts.num_flagged:\n", "        if facts.num_flagged:\n"),),
    ),
    # -- locks --
    Mutant(
        "the order of locks is not looked at",
        "locks.py",
        "reservation",
        (
            (
                "RANKS[lock.layer] < max(RANKS[other.layer] for other in stack)",
                "RANKS[lock.layer] < min(RANKS[other.layer] for other in stack)",
            ),
        ),
    ),
    Mutant(
        "waits are not counted",
        "locks.py",
        "reservation",
        (
            (
                "        self._lock.acquire()\n",
                "        self._lock.acquire()\n        self.contended -= 1\n",
            ),
        ),
    ),
    # -- faults on purpose --
    Mutant(
        "a turn skips a fault that is due",
        "faults.py",
        "faults",
        (("return max(1, self._next - step)", "return 1 << 40"),),
    ),
    Mutant(
        "a host tier once full stays full",
        "faults.py",
        "faults",
        (
            (
                "            self._host_open_at = None\n            _withhold_host(engine.manager, False)\n",
                "            pass\n",
            ),
        ),
    ),
    Mutant(
        "a failing copy strikes for ever",
        "faulty_storage.py",
        "faults",
        (("self._armed[kind] = (count - 1, seconds)", "pass"),),
    ),
    Mutant(
        "a stuck copy that was given up counts as done",
        "faulty_storage.py",
        "faults",
        (("        if not came_back:\n", "        if False:\n"),),
    ),
)
