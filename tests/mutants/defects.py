"""The defects: those that were found in earlier versions, and others of the same kinds.

A defect replaces one text of one file; the text must occur exactly once, so that a refactoring
which moves it fails loudly.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Defect:
    """One way to break the source, and the tests that must notice it."""

    name: str
    """What a user would see."""
    path: str
    """File below src/hipress."""
    old: str
    new: str
    tests: tuple[str, ...]
    """Files or node ids that `make test` runs."""

    def apply(self, root: Path) -> None:
        """Breaks a copy of the source.

        Raises:
            ValueError: The text is not there exactly once.
        """
        path = root / "src" / "hipress" / self.path
        text = path.read_text("utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.old!r} occurs {count} times in {self.path}")
        path.write_text(text.replace(self.old, self.new), "utf-8")


LOST = "tests/session/test_nothing_is_lost.py"
POLICY = "tests/session/test_policy.py"
LOOPBACK = "tests/casync/test_loopback.py"
GRAPHS = "tests/casync/test_graphs.py"
MESSAGES = "tests/casync/test_messages.py"
CONTRACT = "tests/codecs/test_contract.py"
FRAME = "tests/codecs/test_frame.py"
WORLD = "tests/launch/test_world.py"

LOST = "tests/session/test_nothing_is_lost.py"
POLICY = "tests/session/test_policy.py"
LOOPBACK = "tests/casync/test_loopback.py"
GRAPHS = "tests/casync/test_graphs.py"
CONTRACT = "tests/codecs/test_contract.py"
FRAME = "tests/codecs/test_frame.py"
WORLD = "tests/launch/test_world.py"

LOST = "tests/session/test_nothing_is_lost.py"
POLICY = "tests/session/test_policy.py"
LOOPBACK = "tests/casync/test_loopback.py"
GRAPHS = "tests/casync/test_graphs.py"
CONTRACT = "tests/codecs/test_contract.py"
FRAME = "tests/codecs/test_frame.py"
WORLD = "tests/launch/test_world.py"

LOST = "tests/session/test_nothing_is_lost.py"
POLICY = "tests/session/test_policy.py"
LOOPBACK = "tests/casync/test_loopback.py"
GRAPHS = "tests/casync/test_graphs.py"
CONTRACT = "tests/codecs/test_contract.py"
FRAME = "tests/codecs/test_frame.py"
WORLD = "tests/launch/test_world.py"

LOST = "tests/session/test_nothing_is_lost.py"
POLICY = "tests/session/test_policy.py"
LOOPBACK = "tests/casync/test_loopback.py"
GRAPHS = "tests/casync/test_graphs.py"
CONTRACT = "tests/codecs/test_contract.py"
FRAME = "tests/codecs/test_frame.py"
WORLD = "tests/launch/test_world.py"

LOST = "tests/session/test_nothing_is_lost.py"
POLICY = "tests/session/test_policy.py"
LOOPBACK = "tests/casync/test_loopback.py"
GRAPHS = "tests/casync/test_graphs.py"
CONTRACT = "tests/codecs/test_contract.py"
FRAME = "tests/codecs/test_frame.py"
WORLD = "tests/launch/test_world.py"

LOST = "tests/session/test_nothing_is_lost.py"
POLICY = "tests/session/test_policy.py"
LOOPBACK = "tests/casync/test_loopback.py"
GRAPHS = "tests/casync/test_graphs.py"
CONTRACT = "tests/codecs/test_contract.py"
FRAME = "tests/codecs/test_frame.py"
WORLD = "tests/launch/test_world.py"

LOST = "tests/session/test_nothing_is_lost.py"
POLICY = "tests/session/test_policy.py"
LOOPBACK = "tests/casync/test_loopback.py"
GRAPHS = "tests/casync/test_graphs.py"
CONTRACT = "tests/codecs/test_contract.py"
FRAME = "tests/codecs/test_frame.py"
WORLD = "tests/launch/test_world.py"

LOST = "tests/session/test_nothing_is_lost.py"
POLICY = "tests/session/test_policy.py"
LOOPBACK = "tests/casync/test_loopback.py"
GRAPHS = "tests/casync/test_graphs.py"
CONTRACT = "tests/codecs/test_contract.py"
FRAME = "tests/codecs/test_frame.py"
WORLD = "tests/launch/test_world.py"

LOST = "tests/session/test_nothing_is_lost.py"
POLICY = "tests/session/test_policy.py"
LOOPBACK = "tests/casync/test_loopback.py"
GRAPHS = "tests/casync/test_graphs.py"
CONTRACT = "tests/codecs/test_contract.py"
FRAME = "tests/codecs/test_frame.py"
WORLD = "tests/launch/test_world.py"

DEFECTS: tuple[Defect, ...] = (
    # --- session --------------------------------------------------------------------------------
    Defect(
        "detach leaves residuals unsent",
        "session/session.py",
        "if mode is Mode.FLUSHING:\n            self.owed.flush(self.engine, bucket, buffer)",
        "if False:\n            self.owed.flush(self.engine, bucket, buffer)",
        (f"{LOST}::test_what_was_given_arrives",),
    ),
    Defect(
        "residuals that were sent by a flush are kept and sent again",
        "session/owed.py",
        "            engine.forget(group.names)\n",
        "",
        (LOST, "tests/session/test_session.py::test_modes_of_a_run"),
    ),
    Defect(
        "what a checkpoint of other ranks holds is added in every step",
        "session/owed.py",
        "self.pop(name, None)",
        "self.get(name)",
        (f"{LOST}::test_a_checkpoint_of_other_ranks_is_owed_once",),
    ),
    Defect(
        "what a checkpoint of other ranks holds is dropped",
        "session/checkpoint.py",
        "session.owed[name] = left.clone() if before is None else",
        "_ = left.clone() if before is None else",
        (f"{LOST}::test_a_checkpoint_of_other_ranks_is_owed_once",),
    ),
    Defect(
        "residuals of another codec's checkpoint are dropped",
        "session/checkpoint.py",
        "same = (choice.codec.name, choice.strategy) == (facts",
        "same = True or (choice.codec.name, choice.strategy) == (facts",
        (f"{LOST}::test_a_checkpoint_of_another_codec_is_owed",),
    ),
    Defect(
        "a checkpoint of another model is loaded",
        "session/checkpoint.py",
        "if numel != found:",
        "if False:",
        (f"{LOST}::test_a_refused_checkpoint_leaves_the_run_as_it_was",),
    ),
    Defect(
        "residuals do not follow the loss scale",
        "session/session.py",
        "            self.engine.states.scale(ratio)\n",
        "",
        (f"{LOST}::test_it_arrives_in_the_scale_of_its_step",),
    ),
    Defect(
        "what is owed does not follow the loss scale",
        "session/session.py",
        "            self.owed.scale(ratio)\n",
        "",
        (f"{LOST}::test_what_was_thrown_away_comes_again_in_the_scale_of_that_step",),
    ),
    Defect(
        "what the framework threw away is lost",
        "session/owed.py",
        "if adapter.was_dropped(name, sent):",
        "if False:",
        (f"{LOST}::test_what_was_thrown_away_comes_again_in_the_scale_of_that_step",),
    ),
    Defect(
        "NaN of a skipped step is owed",
        "session/owed.py",
        "sent.isfinite().all() & sent.any()",
        "sent.any()",
        ("tests/session/test_buckets.py",),
    ),
    Defect(
        "a session detaches though its last mean was thrown away",
        "session/session.py",
        "not (self.mode.is_leaving and self.owed)",
        "True",
        (f"{LOST}::test_what_is_thrown_away_while_it_is_sent_for_the_last_time_comes_again",),
    ),
    Defect(
        "residuals do not follow the learning rate",
        "session/session.py",
        "self._rate_ratios[name] = last / now",
        "self._rate_ratios[name] = now / last",
        (f"{LOST}::test_residuals_follow_the_learning_rate",),
    ),
    Defect(
        "a learning rate of 0 leaves the last ratio in place",
        "session/session.py",
        "        self._rate_ratios = {}\n        for",
        "        for",
        ("tests/session/test_momentum.py::test_a_rate_of_zero_rescales_nothing",),
    ),
    Defect(
        "momentum is taken of means that were not cleared",
        "session/session.py",
        "if self.adapter.holds_means():",
        "if False:",
        ("tests/session/test_momentum.py::test_a_framework_that_still_holds_the_means_is_refused",),
    ),
    Defect(
        "a bare hook takes any gradient for the mean",
        "torch/ddp.py",
        "return given._version == self._versions[name]",
        "return False",
        ("tests/torch/test_accumulation.py::test_what_ddp_throws_away_comes_again",),
    ),
    Defect(
        "a resumed run compresses during its warm-up",
        "session/session.py",
        "self.mode.restart(warm=self.step >= self.settings.warmup_steps)",
        "self.mode.restart(warm=True)",
        (f"{LOST}::test_a_warm_up_goes_on_where_it_was",),
    ),
    Defect(
        "compression starts during the flush of a detach",
        "session/mode.py",
        "self._go(self._after_flush, {Mode.FLUSHING})",
        "self._go(Mode.PLAIN, {Mode.FLUSHING})",
        ("tests/session/test_mode.py",),
    ),
    Defect(
        "a lost mean is left as this rank's own gradient",
        "session/session.py",
        ".fill_(torch.nan)",
        ".detach()",
        (f"{LOST}::test_a_failed_exchange_is_raised_and_its_mean_is_no_number",),
    ),
    Defect(
        "a failed exchange is not raised",
        "session/session.py",
        "        if self._failure is not None:\n            raise self._failure\n",
        "",
        (f"{LOST}::test_a_failed_exchange_is_raised_and_its_mean_is_no_number",),
    ),
    Defect(
        "ranks with different codecs train all the same",
        "session/session.py",
        '            "codecs": [g.choice.codec.name for g in gradients],\n',
        "",
        (f"{LOST}::test_ranks_compare_what_decides_about_bytes",),
    ),
    Defect(
        "the replica check runs once only",
        "session/session.py",
        "if every and self.step % every == 0:\n            self.check_replicas()",
        "if every and self.step == 0:\n            self.check_replicas()",
        (f"{LOST}::test_replicas_are_checked_when_asked_for",),
    ),
    Defect(
        "the replica check does not see swapped elements",
        "session/replicas.py",
        "(values * (places * 2_654_435_761 + 1)).sum()",
        "values.sum()",
        ("tests/session/test_replicas.py",),
    ),
    Defect(
        "one-dimensional gradients are compressed",
        "plan.py",
        "if dims < 2:",
        "if dims < 1:",
        ("tests/session/test_selection.py", "tests/secopa/test_search.py"),
    ),
    Defect(
        "an excluded gradient is compressed",
        "session/selection.py",
        "if (pattern := _first(self.exclude, spec.name)) is not None:",
        "if (pattern := _first((), spec.name)) is not None:",
        ("tests/session/test_selection.py",),
    ),
    Defect(
        "auto compresses what a user excluded",
        "session/selection.py",
        "return replace(choice, codec=NONE, reason=asked.reason) if asked.reason else choice",
        "return choice",
        ("tests/session/test_selection.py",),
    ),
    Defect(
        "auto keeps a plan that is slower than plain all-reduce",
        "session/policy.py",
        "return before - median(own) >= max(",
        "return True or before - median(own) >= max(",
        (POLICY,),
    ),
    Defect(
        "auto never compares its plan with plain steps again",
        "session/policy.py",
        "is_due = epoch is not None and since >= max(wait, self._control_steps(ref))",
        "is_due = False",
        (POLICY,),
    ),
    Defect(
        "controls of auto cost any share of the time",
        "session/policy.py",
        "return math.ceil(count * slower / self.limits.control_share)",
        "return 0",
        (POLICY,),
    ),
    Defect(
        "auto does not notice that a link became slow",
        "session/policy.py",
        "beyond = not limits.drift_down * ref <= now <= limits.drift_up * ref",
        "beyond = now < limits.drift_down * ref",
        (POLICY,),
    ),
    Defect(
        "steps in which ranks switch plans are timed",
        "session/policy.py",
        "return list(outcome.times[skip:])",
        "return list(outcome.times)",
        (POLICY,),
    ),
    Defect(
        "two plans of auto share the state of their codecs",
        "session/auto.py",
        "flushes = holder not in (None, wanted)",
        "flushes = False",
        (
            "tests/session/test_auto.py::test_another_plan_is_used_after_the_state_of_the_last_was_sent",
        ),
    ),
    Defect(
        "gradients with different learning rates share a frame",
        "session/buckets.py",
        "rate=spec.rate_group if has_momentum(choice.codec) else None",
        "rate=None",
        ("tests/session/test_buckets.py",),
    ),
    Defect(
        "momentum of codec and optimizer is not warned of",
        "session/buckets.py",
        'MOMENTUM = WRAPPED | {"velocity"}',
        'MOMENTUM = {"velocity"}',
        ("tests/torch/test_optimizer_checks.py",),
    ),
    Defect(
        "what is owed passes the codec's momentum once more",
        "session/owed.py",
        "waits = compresses and (has_momentum(group.codec) or group.codec.clip > 0)",
        "waits = False",
        ("tests/session/test_momentum.py",),
    ),
    Defect(
        "auto takes codecs whose state it would drop",
        "session/planner.py",
        "if kept := set(named_codec(name).state_names) - {*UNSENT, WEIGHT}:",
        "if kept := set():",
        ("tests/session/test_momentum.py::test_auto_refuses_codecs_with_other_state",),
    ),
    Defect(
        "auto drops momentum of a checkpoint without a word",
        "session/checkpoint.py",
        "if session.auto is not None and set(keys) - set(UNSENT) and is_first:",
        "if False:",
        ("tests/session/test_shards.py",),
    ),
    Defect(
        "rank 0 ends the store before the others know who failed",
        "casync/ranks/heartbeats.py",
        "if self._rank != 0 or self._failure is None:",
        "if True:",
        ("tests/casync/test_heartbeats.py",),
    ),
    Defect(
        "a thread asks a store that is gone for what another knows",
        "casync/ranks/heartbeats.py",
        "found = self._failure or self._recorded_failure() or self._find_silent(error)",
        "self._failure = None\n"
        "            found = self._recorded_failure() or self._find_silent(error)",
        ("tests/casync/test_heartbeats.py",),
    ),
    # --- codecs ---------------------------------------------------------------------------------
    Defect(
        "NaN enters the residual",
        "compll/passes/states.py",
        "    value = g.select(_is_written(draft, w.value, flag), w.value, old)",
        "    value = w.value",
        (f"{CONTRACT}::test_bad_number_leaves_its_residual",),
    ),
    Defect(
        "a state of ints takes what a comparison made of a NaN",
        "compll/passes/states.py",
        "    elif loads:\n        bad = flag.body",
        "    elif loads:\n        bad = g.const(False)",
        ("tests/compll/test_states.py::test_no_number_hides_a_nan",),
    ),
    Defect(
        "an array of a block is read at i ^ h where the program says (i ^ k) ^ h",
        "compll/backends/cpu/buffers.py",
        'not all(e.op == "xor" and is_own(*e.args) for e in partners)',
        'not all(e.op == "xor" and e.args[1].op == "const" for e in partners)',
        ("tests/compll/test_blocks.py::test_as_the_oracle",),
    ),
    Defect(
        "a flagged frame is decoded as if its numbers were good",
        "codecs/program.py",
        'if header.nonfinite:\n            out.detach().fill_(float("nan"))\n        elif numel:',
        "if numel:",
        (f"{CONTRACT}::test_bad_number_reaches_every_element",),
    ),
    Defect(
        "a bad number among small gradients is not flagged",
        "codecs/bulk.py",
        "        if flagged:\n            frame.set_flag(out.numpy(), frame.FLAG_NONFINITE)",
        "        if False:\n            frame.set_flag(out.numpy(), frame.FLAG_NONFINITE)",
        ("tests/codecs/test_bulk.py",),
    ),
    Defect(
        "a frame of another codec is decoded",
        "codecs/frame.py",
        "if codec_hash is not None and found_hash != codec_hash:",
        "if False:",
        (FRAME,),
    ),
    Defect(
        "a header that was changed on the way is believed",
        "codecs/frame.py",
        "if is_whole and check != (expected := _crc(view, num_bodies)):",
        "if False and check != (expected := _crc(view, num_bodies)):",
        (FRAME,),
    ),
    Defect(
        "bodies that leave the frame are read",
        "codecs/frame.py",
        "    if end != len(view):\n        raise _bad_end(end, len(view))",
        "    if end < 0:\n        raise _bad_end(end, len(view))",
        (FRAME,),
    ),
    Defect(
        "a body of another size than its elements need is decoded",
        "codecs/program.py",
        "if body.num_bytes != expected:",
        "if False:",
        ("tests/codecs/test_frames_of_codecs.py",),
    ),
    Defect(
        "a frame of other gradients is written into a bulk",
        "codecs/bulk.py",
        "if tuple(body.numel for body in bodies) != self.numels:",
        "if False:",
        ("tests/codecs/test_bulk.py", "tests/codecs/test_frames_of_codecs.py"),
    ),
    Defect(
        "int8 cuts off instead of rounding",
        "codecs/int8.pse",
        "g / scale + 128.5",
        "g / scale + 128.0",
        ("tests/codecs/test_formulas.py::test_int8_is_within_half_a_step",),
    ),
    Defect(
        "the last block of onebit is divided by the size of a full one",
        "codecs/onebit.pse",
        "float scale = reduce(map(gradient, abs), 0.0, add) / gradient.size;",
        "float scale = reduce(map(gradient, abs), 0.0, add) / p.block;",
        ("tests/codecs/test_formulas.py::test_onebit_is_sign_times_mean",),
    ),
    Defect(
        "topk sends fewer than it has room for on the way back",
        "codecs/topk.py",
        "workers={min(workers * o['workers'], MAX_WORKERS)}",
        "workers={min(o['workers'], MAX_WORKERS)}",
        ("tests/codecs/test_aggregators.py::test_what_it_becomes", "tests/codecs/test_way_back.py"),
    ),
    Defect(
        "tbq sends the mean of several workers back as one level",
        "codecs/tbq.py",
        "levels={min(workers * o['levels'], MAX_LEVELS)}",
        "levels={min(o['levels'], MAX_LEVELS)}",
        ("tests/codecs/test_way_back.py",),
    ),
    Defect(
        "momentum is applied on the way back too",
        "codecs/table.py",
        "lambda workers, _: inner.aggregator(workers), phases)",
        "lambda workers, _: momentum(inner.aggregator(workers)), phases)",
        (
            "tests/codecs/test_aggregators.py::test_what_it_becomes",
            "tests/codecs/test_aggregators.py::test_momentum_is_not_applied_twice",
        ),
    ),
    Defect(
        "dgc keeps the velocity of elements that it sent",
        "codecs/dgc.pse",
        "return s != 0.0 ? 0.0 : u1;",
        "return u1;",
        (f"{CONTRACT}::test_nothing_is_lost_in_dgc",),
    ),
    Defect(
        "the residual is not scaled with the learning rate",
        "compll/passes/derive.py",
        'g.binary("mul", rho, g.load(residual, i))',
        "g.load(residual, i)",
        ("tests/codecs/test_states.py",),
    ),
    # --- compll ---------------------------------------------------------------------------------
    Defect(
        "random numbers of the CPU follow another sequence",
        "compll/backends/cpu/prelude.py",
        "p = u64(a) * u64(0xD2511F53)",
        "p = u64(a) * u64(0xD2511F55)",
        ("tests/compll/test_philox.py",),
    ),
    Defect(
        "random numbers repeat every four elements",
        "compll/backends/reference/prelude.py",
        "group = (i // 4) & 0xFFFFFFFF",
        "group = (i % 4) & 0xFFFFFFFF",
        ("tests/compll/test_philox.py",),
    ),
    Defect(
        "a conversion to an unsigned code wraps around",
        "compll/backends/cpu/prelude.py",
        "return i32(v if v < f32(top) else f32(top))",
        "return i32(v)",
        ("tests/compll/test_language.py::test_numbers",),
    ),
    Defect(
        "integer division rounds down",
        "compll/backends/cpu/prelude.py",
        "return i64(q if (a < 0) == (b < 0) else u64(0) - q)",
        "return i64(a) // i64(b)",
        ("tests/compll/test_language.py::test_numbers",),
    ),
    Defect(
        "the last element of an odd number is not packed",
        "compll/backends/cpu/prelude.py",
        "    num_bytes = (m + 1) >> 1\n    for i in range(m, num_bytes * 2):",
        "    num_bytes = m >> 1\n    for i in range(m, num_bytes * 2):",
        ("tests/compll/test_seven_defects.py",),
    ),
    Defect(
        "float16 is cut off where the processor does not convert it",
        "compll/backends/cpu/prelude.py",
        "u32(a + u32(0xFFF) + u32((a >> u32(13)) & u32(1)))",
        "u32(a)",
        ("tests/compll/test_host_values.py::test_float16_without_an_instruction_of_the_processor",),
    ),
    Defect(
        "bfloat16 is cut off instead of rounded",
        "compll/backends/cpu/prelude.py",
        "u32(u32(b + u32(0x7FFF)) + u32((b >> u32(16)) & u32(1))) >> u32(16)",
        "b >> u32(16)",
        ("tests/codecs/test_formulas.py::test_bf16_rounds_to_nearest_even",),
    ),
    Defect(
        "an index outside an array is read",
        "compll/backends/reference/prelude.py",
        "return values[np.clip(ix, 0, len(values) - 1)]",
        "return values[ix]",
        ("tests/compll/test_language.py", "tests/compll/test_regressions.py"),
    ),
    Defect(
        "a - b - c of a program means a - (b - c)",
        "compll/front/grammar.lark",
        "?add: mul | add SIGN mul",
        "?add: mul | mul SIGN add",
        ("tests/compll/test_language.py",),
    ),
    # --- casync ---------------------------------------------------------------------------------
    Defect(
        "ps divides by the number of the others",
        "casync/graphs/strategies/ps.py",
        "[size / sum(sizes) for size in sizes]",
        "[size / (sum(sizes) - 1) for size in sizes]",
        (f"{GRAPHS}::test_every_rank_gets_the_same_mean",),
    ),
    Defect(
        "ps merges in another order than that of the ranks",
        "casync/graphs/strategies/ps.py",
        "draft.merge(parts, mean,",
        "draft.merge(parts[::-1], mean,",
        (f"{LOOPBACK}::test_a_sync_is_what_the_slow_reference_computes",),
    ),
    Defect(
        "ranks agree on every exchange anew",
        "casync/engine/engine.py",
        "self._recipes[key] = prepared = _Prepared(recipe)",
        "prepared = _Prepared(recipe)",
        (f"{LOOPBACK}::test_steady_steps_agree_bind_and_allocate_nothing",),
    ),
    Defect(
        "tasks are bound to buffers in every step",
        "casync/engine/exchange.py",
        "if codec.name not in self._bounds:",
        "if True:",
        (f"{LOOPBACK}::test_steady_steps_agree_bind_and_allocate_nothing",),
    ),
    Defect(
        "buffers are made anew in every step",
        "casync/engine/engine.py",
        "            if prepared.idle:\n",
        "            if False:\n",
        (f"{LOOPBACK}::test_steady_steps_agree_bind_and_allocate_nothing",),
    ),
    Defect(
        "hosts count alike whatever number of ranks they have",
        "casync/graphs/strategies/hierarchical.py",
        "sizes = [float(len(group)) for group in members]",
        "sizes = [1.0 for group in members]",
        (f"{GRAPHS}::test_hosts_of_any_size_count_as_much_as_they_have",),
    ),
    Defect(
        "the aggregator does not decode what it sent",
        "casync/graphs/strategies/ps.py",
        "    draft.decode(back, gradient, depth + DEPTH)",
        "    draft.decode(back if rank != aggregator else frame, gradient, depth + DEPTH)",
        (f"{GRAPHS}::test_every_rank_gets_the_same_mean",),
    ),
    Defect(
        "the ring weighs the running mean like one rank",
        "casync/graphs/strategies/ring.py",
        "weights.insert(0, position / (position + 1))",
        "weights.insert(0, 1.0 / (position + 1))",
        (f"{GRAPHS}::test_every_rank_gets_the_same_mean",),
    ),
    Defect(
        "the ring hands the result on a hop too far",
        "casync/graphs/strategies/ring.py",
        "    if hop < last:\n        draft.send(back",
        "    if hop <= last:\n        draft.send(back",
        (GRAPHS,),
    ),
    Defect(
        "messages of two chunks have one tag",
        "casync/graphs/graph.py",
        "return self.chunk * NUM_MESSAGE_CLASSES + MESSAGE_CLASS[self.kind]",
        "return MESSAGE_CLASS[self.kind]",
        (f"{LOOPBACK}::test_none_is_the_exact_mean",),
    ),
    Defect(
        "messages of two exchanges have one tag",
        "casync/engine/executors.py",
        "while self.failure is None and key in self._running:",
        "while False:",
        (f"{MESSAGES}::test_a_call_that_waits_for_its_tags_ends_with_the_error",),
    ),
    Defect(
        "a frame of another tensor is merged",
        "casync/engine/memory.py",
        "            self._check(self._bytes)",
        "            pass",
        (f"{MESSAGES}::test_swapped_messages_are_refused_with_both_names",),
    ),
    Defect(
        "a forked process closes the exchange of its parent",
        "casync/engine/engine.py",
        "        if not self._is_own:\n            return\n",
        "",
        ("tests/casync/test_fork.py",),
    ),
    Defect(
        "a task starts before what it reads is written",
        "casync/graphs/graph.py",
        "found.add(self._writer[slot])\n        for slot in task.writes:",
        "pass\n        for slot in task.writes:",
        (GRAPHS,),
    ),
    Defect(
        "elements between two partitions are left out",
        "casync/graphs/partitions.py",
        "GRAIN * GRAIN for k in range(count)] + [numel]",
        "GRAIN * GRAIN for k in range(count)] + [max(numel - 1, 0)]",
        (f"{GRAPHS}::test_every_element_is_in_one_slice",),
    ),
    Defect(
        "small gradients travel one by one",
        "casync/graphs/partitions.py",
        "small = bulk and len(parts) == 1 and numel <= target // 2",
        "small = False",
        (f"{GRAPHS}::test_small_gradients_travel_together",),
    ),
    Defect(
        "all chunks have one aggregator",
        "casync/graphs/partitions.py",
        "routes[group] = loads.index(min(loads))",
        "routes[group] = 0",
        (GRAPHS,),
    ),
    Defect(
        "a mean of 16-bit elements overflows",
        "casync/engine/exchange.py",
        "elements.mul_(1.0 / len(self.recipe.hosts))",
        "pass",
        (f"{LOOPBACK}::test_a_mean_of_16_bits_does_not_overflow",),
    ),
    Defect(
        "tensors without a name carry residuals on",
        "casync/engine/exchange.py",
        "if self.recipe.names is None:\n                for key",
        "if False:\n                for key",
        (f"{LOOPBACK}::test_without_a_name_nothing_is_carried_on",),
    ),
    Defect(
        "all ranks round with the same random numbers",
        "casync/engine/exchange.py",
        "stream = recipe.rank if slot.kind is Kind.FRAME else",
        "stream = 0 if slot.kind is Kind.FRAME else",
        (f"{LOOPBACK}::test_ranks_round_with_random_numbers_of_their_own",),
    ),
    Defect(
        "a sum is a mean",
        "casync/engine/exchange.py",
        "self._alpha = float(len(recipe.hosts)) if recipe.total else 1.0",
        "self._alpha = 1.0",
        (f"{LOOPBACK}::test_the_sum_is_n_times_the_mean",),
    ),
    Defect(
        "bytes on the wire are counted twice",
        "casync/engine/exchange.py",
        "sent_bytes=sum(buffer.wire.nbytes for m in moved for buffer, *_ in m.sends),",
        "sent_bytes=2 * sum(buffer.wire.nbytes for m in moved for buffer, *_ in m.sends),",
        (f"{LOOPBACK}::test_bytes_and_messages_are_those_of_the_transport",),
    ),
    Defect(
        "a difference between ranks is not an error",
        "casync/ranks/agreement.py",
        "if len(by_value) > 1:",
        "if len(by_value) > 2:",
        ("tests/casync/test_agreement.py",),
    ),
    Defect(
        "a rank that never comes is waited for without end",
        "casync/ranks/agreement.py",
        "                if left_s <= LOOK_S:\n                    return missing\n",
        "",
        ("tests/casync/test_agreement.py::test_a_rank_that_never_comes_is_named_in_time",),
    ),
    Defect(
        "heartbeats never expire",
        "casync/ranks/heartbeats.py",
        "elif time.monotonic() - since > silence_s:",
        "elif False:",
        ("tests/casync/test_heartbeats.py::test_a_silent_rank_is_named_on_all_others",),
    ),
    Defect(
        "a rank that ended well is missed",
        "casync/ranks/heartbeats.py",
        "if seen != last or seen == _BYE:",
        "if seen != last:",
        ("tests/casync/test_heartbeats.py::test_a_rank_that_has_said_goodbye_is_not_missed",),
    ),
    Defect(
        "every rank reports another failure",
        "casync/ranks/heartbeats.py",
        'if self._store.add("failures", 1) == 1:',
        "if True:",
        ("tests/casync/test_heartbeats.py",),
    ),
    Defect(
        "the offset of a clock ignores the way of the answer",
        "casync/ranks/agreement.py",
        "answer_ns - (start_ns + end_ns) // 2",
        "answer_ns - start_ns",
        ("tests/casync/test_clock.py",),
    ),
    # --- secopa, probe, plan ----------------------------------------------------------------------
    Defect(
        "the published ring sends N times instead of 2 (N - 1)",
        "secopa/sosp21/planner.py",
        "return 2 * (self.num_nodes - 1) * self.step.at(x)",
        "return self.num_nodes * self.step.at(x)",
        ("tests/secopa/test_planner.py",),
    ),
    Defect(
        "the published planner counts too few decodes",
        "secopa/sosp21/planner.py",
        "decodes = min(num - 1 + partitions, 2 * (num - 1))",
        "decodes = min(partitions, 2 * (num - 1))",
        ("tests/secopa/test_planner.py",),
    ),
    Defect(
        "equal times are compressed",
        "secopa/sosp21/planner.py",
        "pays = compressed_s < plain_s",
        "pays = compressed_s <= plain_s",
        ("tests/secopa/test_planner.py",),
    ),
    Defect(
        "a bound on the error is ignored",
        "secopa/budget.py",
        "if self.bound is not None and off > self.bound:",
        "if False:",
        ("tests/secopa/test_search.py",),
    ),
    Defect(
        "a bound allows codecs that apply momentum",
        "secopa/budget.py",
        "return tuple(name for name in measured if not ONLY_NAMED.match(name))",
        "return tuple(measured)",
        ("tests/secopa/test_budget.py",),
    ),
    Defect(
        "a plan is chosen that is slower than nothing",
        "secopa/search.py",
        "return found if pays else self._nothing(epoch, found)",
        "return found",
        ("tests/secopa/test_search.py",),
    ),
    Defect(
        "simulated work does not wait for a core",
        "secopa/hardware.py",
        "return 1.0 if self._demand <= free else free / self._demand",
        "return 1.0",
        ("tests/secopa/test_simulate.py",),
    ),
    Defect(
        "another rate changes the work of an all-reduce too",
        "secopa/what_if.py",
        "host = max(curve.slope - sent / before, 0.0)",
        "host = 0.0",
        ("tests/secopa/test_what_if.py",),
    ),
    Defect(
        "costs that were measured for other ranks are used",
        "probe/cache.py",
        'f"{num_ranks} ranks", ',
        "",
        ("tests/probe/test_probe.py::test_another_number_of_ranks_is_measured_again",),
    ),
    Defect(
        "a damaged cache ends the measurement",
        "probe/cache.py",
        "if isinstance(points, dict) and _is_valid(points):",
        "if points is not None:",
        ("tests/probe/test_probe.py::test_a_damaged_file_is_measured_again",),
    ),
    Defect(
        "the quota of a container is not seen",
        "probe/links.py",
        "return min(float(seen), int(quota) / int(period))",
        "return float(seen)",
        ("tests/probe/test_probe.py::test_a_quota_of_the_container_counts",),
    ),
    Defect(
        "the size of a text plan's line is read from its last field",
        "plan.py",
        "numel=int(size[0]) if size else None",
        "numel=int(partitions) if size else None",
        ("tests/test_plan.py",),
    ),
    Defect(
        "a newer plan is followed in part",
        "plan.py",
        "if version > VERSION:",
        "if False:",
        ("tests/test_plan.py",),
    ),
    # --- processes, lab, launch, environment ------------------------------------------------------
    Defect(
        "the last line without a newline is lost",
        "processes/pipes.py",
        "        return [rest] if rest else []",
        "        return []",
        ("tests/processes/test_pipes.py",),
    ),
    Defect(
        "a line end of two bytes is two lines",
        "processes/pipes.py",
        r'_LINE_END = re.compile(rb"\r\n|\n|\r(?=.)", re.DOTALL)',
        r'_LINE_END = re.compile(rb"\n|\r", re.DOTALL)',
        ("tests/processes/test_pipes.py",),
    ),
    Defect(
        "a rank that a signal ended has exit code 0",
        "processes/family.py",
        "return status if status >= 0 else 128 - status",
        "return max(status, 0)",
        ("tests/launch/test_rank.py",),
    ),
    Defect(
        "what a rank leaves behind goes on running",
        "launch/rank.py",
        "    kill_descendants(_CLEAN_UP_S)\n",
        "",
        ("tests/launch/test_rank.py",),
    ),
    Defect(
        "srun's list of hosts loses zeros in front",
        "environment.py",
        "str(n).zfill(len(first))",
        "str(n)",
        (WORLD,),
    ),
    Defect(
        "srun's local size is that of the first host",
        "environment.py",
        "return counts[node]",
        "return counts[0]",
        (WORLD,),
    ),
    Defect(
        "half the variables of a launcher mean a rank alone",
        "environment.py",
        'if found := [name for name in (*_TORCH, "LOCAL_RANK") if environ.get(name)]:',
        "if found := []:",
        (WORLD,),
    ),
    Defect(
        "one host is named twice",
        "launch/hosts.py",
        "if _same(host.name) in seen:",
        "if False:",
        ("tests/launch/test_hosts.py",),
    ),
    Defect(
        "lines of a rank have no prefix",
        "launch/screen.py",
        'self._out.write(stream, f"[{prefix}] {text}\\n")',
        'self._out.write(stream, f"{text}\\n")',
        ("tests/launch/test_screen.py",),
    ),
    Defect(
        "the exit code of a failed rank is ignored",
        "lab/run.py",
        "            if code != 0:\n                self._failures",
        "            if code < 0:\n                self._failures",
        ("tests/lab/test_job.py::test_the_first_failure_ends_all_and_gives_the_exit_code",),
    ),
    Defect(
        "a percentage is taken for a fraction",
        "lab/links.py",
        "return percent / 100",
        "return percent",
        ("tests/lab/test_links.py",),
    ),
    # --- train, cli, timeline, imports ------------------------------------------------------------
    Defect(
        "ranks train on the same examples",
        "train/batches.py",
        "start = step_of_epoch * self.together + self.rank * self.batch",
        "start = step_of_epoch * self.together",
        ("tests/train/test_sampling.py",),
    ),
    Defect(
        "every epoch has the same order",
        "train/batches.py",
        "manual_seed(mix(seed, epoch))",
        "manual_seed(mix(seed, 0))",
        ("tests/train/test_sampling.py",),
    ),
    Defect(
        "a write that fails destroys the last checkpoint",
        "train/checkpoints.py",
        'partial = file.with_suffix(".partial")',
        "partial = file",
        ("tests/train/test_checkpoints.py",),
    ),
    Defect(
        "the checkpoint of another job is resumed",
        "train/checkpoints.py",
        "if found.get(name) != value:",
        "if False:",
        ("tests/train/test_checkpoints.py",),
    ),
    Defect(
        "a run that is resumed on other ranks trains on examples twice",
        "train/checkpoints.py",
        'step = int(state["epoch"]) * job.sampler.steps_per_epoch + within',
        'step = int(state["epoch"]) * job.sampler.steps_per_epoch',
        ("tests/train/test_checkpoints.py",),
    ),
    Defect(
        "a resumed run ignores a new learning rate",
        "train/checkpoints.py",
        'group.update({name: value for name, value in options.items() if name != "params"})',
        "pass",
        ("tests/train/test_checkpoints.py",),
    ),
    Defect(
        "parameters that are no numbers replace a good checkpoint",
        "train/checkpoints.py",
        "if not all(bool(parameter.isfinite().all()) for parameter in job.model.parameters()):",
        "if False:",
        ("tests/train/test_checkpoints.py",),
    ),
    Defect(
        "--json has no rows",
        "cli/ui.py",
        '"rows": ',
        '"results": ',
        ("tests/cli/test_ui.py",),
    ),
    Defect(
        "a process waits in DDP for a rank that is gone",
        "torch/watchdog.py",
        "                os._exit(1)\n",
        "",
        ("tests/torch/test_watchdog.py",),
    ),
    Defect(
        "a process is ended for time that it waited before a rank was lost",
        "torch/watchdog.py",
        "time.monotonic() - max(since, lost_at) > self._patience_s",
        "time.monotonic() - since > self._patience_s",
        ("tests/torch/test_watchdog.py",),
    ),
    Defect(
        "a command that fails has exit code 0",
        "cli/main.py",
        "        sys.exit(2)\n",
        "        sys.exit(0)\n",
        ("tests/cli/test_main.py",),
    ),
    Defect(
        "hipress --help waits for torch",
        "cli/main.py",
        "import hipress\n",
        "import hipress\nimport torch\n",
        (
            "tests/cli/test_main.py::test_help_loads_neither_torch_nor_numba",
            "tests/test_imports.py",
        ),
    ),
    Defect(
        "the times of a rank are on its own clock",
        "timeline.py",
        "_drawn(event, at, one.offset_ns - zero_ns)",
        "_drawn(event, at, -zero_ns)",
        ("tests/test_timeline.py",),
    ),
    Defect(
        "spans that overlap are dropped by Perfetto",
        "timeline.py",
        "if row[-1].end_ns <= event.start_ns), None)",
        "if True), None)",
        ("tests/test_timeline.py",),
    ),
    Defect(
        "a lower room imports a higher one",
        "plan.py",
        "from hipress.profile import version_of\n",
        "from hipress.profile import version_of\nfrom hipress.secopa import budget  # noqa: F401\n",
        ("tests/test_imports.py::test_imports_point_down_only",),
    ),
    Defect(
        "a room uses a private name of another",
        "session/stats.py",
        "done = engine.stats\n",
        "done = engine.stats\n        engine._sequence\n",
        ("tests/test_imports.py::test_no_room_uses_a_private_name_of_another",),
    ),
    Defect(
        "no thread at all is a valid setting",
        "settings.py",
        "    if value < 1:\n",
        "    if value < 0:\n",
        ("tests/test_settings.py",),
    ),
)
